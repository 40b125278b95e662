"""Why nothing fits: conflicts against the search itself, repairs that a search confirms, the fewest GPUs, and what limits cost."""

from __future__ import annotations

import dataclasses
import functools
import itertools
import json
import math
from collections.abc import Callable, Collection
from functools import partial
from typing import Any

import numpy as np
import pytest

from planner import spec
from planner.cli.terminal import rendered
from planner.cost.memory import FITS, OUT_OF_MEMORY
from planner.errors import InputError, NoLayoutFits
from planner.explain import explain
from planner.fewest import (
    Fewest,
    divisible_batch,
    fewest_gpus,
    fits,
    group_products,
    launchable,
    least_gpus,
    meshes,
    node_counts,
    on_gpus,
    with_batch,
)
from planner.lifting import gpu_counts, limits_of, pin_words, possible, value_words
from planner.repairs import LARGER, found, larger_parts
from planner.report.why_text import why_json, why_page
from planner.request import Request, make_scenario
from planner.scenario import Scenario
from planner.search import search
from planner.shortfall import why_fewer_fail
from planner.why import LEAST_GAIN, Why, binding, timed_again, why, with_wires
from solver.conflict import smallest_conflict
from tests.builders import random_scenario, starved_scenario, tight_scenario
from tests.conftest import Outcome

Command = Callable[..., Outcome]

MOST_GPUS = 16
"""Up to where the tests lift a number of GPUs."""


@functools.cache
def searched(seed: int) -> bool:
    """Whether the search itself finds a layout of a tight scenario."""
    return finds(tight_scenario(seed))


def finds(scenario: Scenario) -> bool:
    """Whether the search itself finds a layout."""
    try:
        search(scenario)
    except (NoLayoutFits, InputError):
        return False
    return True


INFEASIBLE = (
    *(0, 2, 3, 4, 5, 10, 11, 12, 14, 16, 17, 19, 20, 21, 22, 23, 24, 25, 26, 29),
    *(30, 33, 35, 36, 37, 39, 40, 43, 44, 45, 46, 47, 49, 50, 51, 52, 53, 54, 55, 56),
)
"""Seeds of tight scenarios in which nothing fits; the first test holds them to that."""


def with_job(scenario: Scenario, **changed: Any) -> Scenario:
    """The scenario with parts of its job changed."""
    return dataclasses.replace(scenario, job=dataclasses.replace(scenario.job, **changed))


def with_choices(scenario: Scenario, **changed: Any) -> Scenario:
    """The scenario with some choices changed."""
    return dataclasses.replace(scenario, choices=dataclasses.replace(scenario.choices, **changed))


def without(scenario: Scenario, limit: str) -> list[Scenario]:
    """The scenario with one limit lifted, in every way that counts, written down a second time."""
    job, choices = scenario.job, scenario.choices
    if limit == "memory":
        return [with_job(scenario, gpu=dataclasses.replace(job.gpu, memory_bytes=1e14))]
    if limit == "num_gpus":
        return [with_job(scenario, num_gpus=count) for count in gpu_counts(scenario, MOST_GPUS)]
    if limit == "global_batch_size":
        micro_batch = math.lcm(*choices.pins.get("micro_batch_size", (1,)))
        return [scenario, with_job(scenario, global_batch_size=math.lcm(job.global_batch_size, 2 * job.num_gpus * micro_batch))]
    if limit == "tensor_across_nodes":
        return [with_choices(scenario, tensor_across_nodes=True)]
    if limit == "max_pipeline_parallel":
        return [with_choices(scenario, max_pipeline_parallel=1000)]
    if limit == "framework":
        return [with_choices(scenario, framework=framework) for framework in (choices.framework, "any", "none")]
    return [with_choices(scenario, pins={axis: values for axis, values in choices.pins.items() if axis != limit})]


def found_by_search(scenario: Scenario, kept: Collection[str]) -> bool:
    """Whether the search finds a layout when all limits but some are lifted."""
    lifted = [scenario]
    for limit in limits_of(scenario, MOST_GPUS):
        if limit.name not in kept:
            lifted = [wider for one in lifted for wider in without(one, limit.name)]
    return any(map(finds, lifted))


@functools.cache
def conflict_names(seed: int) -> tuple[str, ...]:
    """The reported conflict of a tight scenario."""
    scenario = tight_scenario(seed)
    limits = limits_of(scenario, MOST_GPUS)
    members = smallest_conflict(len(limits), partial(possible, scenario, limits)).members
    return tuple(limits[number].name for number in sorted(members))


@pytest.mark.parametrize("seed", INFEASIBLE)
def test_the_conflict_excludes_every_layout_and_without_any_one_member_there_is_one(seed: int) -> None:
    scenario, conflict = tight_scenario(seed), conflict_names(seed)
    assert conflict and not searched(seed)
    assert not found_by_search(scenario, conflict)
    for member in conflict:
        assert found_by_search(scenario, set(conflict) - {member}), member


def test_the_tight_scenarios_are_many_and_of_many_kinds() -> None:
    assert len(INFEASIBLE) >= 30
    kinds = {conflict_names(seed) for seed in INFEASIBLE}
    assert len(kinds) > 10 and {name for kind in kinds for name in kind} > {"memory", "num_gpus", "global_batch_size", "framework"}
    assert sum(len(conflict_names(seed)) > 1 for seed in INFEASIBLE) > 30


@pytest.mark.parametrize("seed", [seed for seed in INFEASIBLE if seed % 4 == 0])
def test_no_single_limit_is_a_smaller_conflict(seed: int) -> None:
    scenario, conflict = tight_scenario(seed), conflict_names(seed)
    if len(conflict) > 1:
        assert all(found_by_search(scenario, {limit.name}) for limit in limits_of(scenario, MOST_GPUS))


@pytest.mark.parametrize("seed", range(0, 80, 2))
def test_whether_anything_fits_is_what_the_search_says(seed: int) -> None:
    scenario = tight_scenario(seed)
    assert fits(scenario) == searched(seed)
    assert launchable(scenario) == finds(without(scenario, "memory")[0])


@pytest.mark.parametrize("build", [random_scenario, starved_scenario])
def test_whether_anything_fits_with_a_margin_is_what_the_search_ranks_first(build: Callable[[int], Scenario]) -> None:
    for seed in range(8):
        scenario = build(seed)
        try:
            best = int(search(scenario).ranked.verdict[0])
        except (NoLayoutFits, InputError):
            best = OUT_OF_MEMORY
        assert fits(scenario) == (best < OUT_OF_MEMORY) and fits(scenario, FITS) == (best == FITS)


# The fewest GPUs


@functools.cache
def fewest_of(seed: int) -> Fewest:
    """The fewest GPUs of a tight scenario, up to four nodes."""
    return fewest_gpus(tight_scenario(seed), most=4 * tight_scenario(seed).job.cluster.gpus_per_node)


@pytest.mark.parametrize("seed", range(1, 60, 4))
def test_the_fewest_gpus_are_the_first_count_with_a_layout(seed: int) -> None:
    scenario, fewest = tight_scenario(seed), fewest_of(seed)
    node = scenario.job.cluster.gpus_per_node
    first = next((count for count in node_counts(node, 4 * node) if finds(on_gpus(scenario, count))), 0)
    assert fewest.num_gpus == first
    assert not first or fewest.least <= first
    assert first or fewest.tried == 4 * node or fewest.exhausted


def test_no_count_outside_the_group_products_has_a_mesh() -> None:
    for seed in range(0, 60, 3):
        scenario = tight_scenario(seed)
        products = group_products(scenario, 40)
        legal = {count for count in range(1, 41) if len(meshes(spec.problem(on_gpus(scenario, count)))["tensor_parallel"])}
        assert legal <= products


def test_below_the_lower_bound_nothing_fits() -> None:
    for seed in range(30):
        scenario = tight_scenario(seed)
        least = least_gpus(scenario)
        assert not any(finds(on_gpus(scenario, count)) for count in range(1, min(least, 9)))


def test_where_no_number_of_gpus_helps_the_search_says_so_and_stops() -> None:
    scenario = make_scenario(Request(model="70b", num_gpus=8, tensor_parallel=(1,), pipeline_parallel=(1,), zero_stage=(0,)))
    fewest = fewest_gpus(scenario)
    assert fewest.num_gpus == 0 and fewest.exhausted and fewest.tried >= 1024
    impatient = fewest_gpus(make_scenario(Request(model="70b", num_gpus=8, micro_batch_size=(512,), recompute=("none",))), patience=5000)
    assert impatient.num_gpus == 0 and not impatient.exhausted and impatient.nearest is not None


def test_states_batch_memory_and_rules_are_told_apart_as_reasons_for_too_few_gpus() -> None:
    def reason(**wishes: Any) -> tuple[str, str]:
        failure = why_fewer_fail(fewest_gpus(make_scenario(Request(**{"model": "8b", "num_gpus": 8, "global_batch_size": 64, **wishes}))))
        assert failure is not None
        return failure.reason, failure.words

    assert reason(gpu="l4", global_batch_size=6, data_parallel=(6,), framework="megatron")[0] in ("states", "memory", "rules")
    states = fewest_gpus(make_scenario(Request(model="70b", num_gpus=8, global_batch_size=64)))
    assert "alone are" in str(getattr(why_fewer_fail(dataclasses.replace(states, before=states.least - 1)), "words", ""))
    assert reason(gpu="l4")[0] == "memory" and "GiB" in reason(gpu="l4")[1]
    batch = make_scenario(Request(model="llama-3.2-1b", num_gpus=8, global_batch_size=4, tensor_parallel=(1,), pipeline_parallel=(1,)))
    batch = with_choices(batch, pins={**batch.choices.pins, "context_parallel": (1,)})
    on_three = Fewest(batch, 4, 1, 4, False, before=3, nearest=None)
    failure = why_fewer_fail(on_three)
    assert failure is not None and failure.reason == "batch" and "4 sequences" in failure.words
    assert reason(tensor_parallel=(4,))[0] == "rules"


def test_the_larger_batch_suits_every_mesh_micro_batch_and_schedule() -> None:
    scenario = make_scenario(Request(model="8b", num_gpus=24, global_batch_size=10, micro_batch_size=(3,)))
    batch = divisible_batch(scenario)
    assert batch is not None and batch % (10 * 3) == 0 and batch % (2 * 24 * 3) == 0
    assert divisible_batch(with_batch(on_gpus(scenario, 9_999_991), 1 << 20)) is None


# Conflicts and repairs of the field


@functools.cache
def large_model_on_one_node() -> Why:
    """The question of the field: 405B on 8 GPUs."""
    return why(make_scenario(Request(model="405b", num_gpus=8)))


def test_a_model_too_large_for_a_node_names_memory_and_gpus_and_three_verified_repairs() -> None:
    answer = large_model_on_one_node()
    assert [limit.words for limit in answer.conflict] == ["79.2 GiB usable per GPU", "8 GPUs"]
    assert len(answer.repairs) >= 3 and answer.fewest is not None
    for repair in answer.repairs:
        best = repair.best
        again = explain(best.scenario, best.layout)
        assert again.legal and again.verdict == best.verdict < OUT_OF_MEMORY
        assert again.step is not None and float(again.step.total[0]) == pytest.approx(best.step_seconds)
    assert {"num_gpus", "memory", "optimizer"} <= {name for repair in answer.repairs for name in repair.lifts}


def test_the_fewest_gpus_of_a_large_model_are_exact() -> None:
    answer = large_model_on_one_node()
    assert answer.fewest is not None and answer.fewer is not None
    assert answer.fewer.num_gpus == answer.fewest.num_gpus - 8 and answer.fewer.reason == "memory"
    assert finds(answer.fewest.scenario)
    scenario = answer.scenario
    counts = range(math.ceil(answer.fewest.least / 8) * 8, answer.fewest.num_gpus, 8)
    assert counts and not any(finds(on_gpus(scenario, count)) for count in counts)
    assert not any(finds(on_gpus(scenario, count)) for count in range(1, 9))


@functools.cache
def pinned_too_hard() -> Why:
    """70B on two nodes without recompute, in micro-batches of 4 over pairs of GPUs."""
    return why(make_scenario(Request(model="70b", num_gpus=16, recompute=("none",), micro_batch_size=(4,), tensor_parallel=(2,))))


def test_fewer_changes_come_first_and_none_is_needless() -> None:
    for answer in (large_model_on_one_node(), pinned_too_hard()):
        sizes = [len(repair.words) for repair in answer.repairs]
        assert sizes == sorted(sizes)
        words = [set(repair.words) for repair in answer.repairs]
        assert not any(one < other for one in words for other in words)


def test_pinned_axes_are_repaired_by_their_values() -> None:
    words = {word for repair in pinned_too_hard().repairs for word in repair.words}
    assert {"recompute full instead of none", "tensor parallel 8 instead of 2"} <= words


def test_a_combination_that_no_framework_launches_names_it() -> None:
    answer = why(make_scenario(Request(model="8b", num_gpus=16, zero_stage=(3,), pipeline_parallel=(4,), framework="megatron")))
    assert {limit.name for limit in answer.conflict} == {"pipeline_parallel", "zero_stage", "framework"}
    assert {repair.lifts for repair in answer.repairs} == {("pipeline_parallel",), ("zero_stage",), ("framework",)}
    assert {repair.words for repair in answer.repairs} >= {("any framework",)}


def test_a_batch_that_divides_nothing_is_repaired_by_the_nearest_batch_and_the_nearest_gpus() -> None:
    answer = why(make_scenario(Request(model="8b", num_gpus=97, global_batch_size=64)))
    assert answer.result is None and {limit.name for limit in answer.conflict} == {"num_gpus", "global_batch_size"}
    batches = [repair.best.scenario.job.global_batch_size for repair in answer.repairs if repair.lifts == ("global_batch_size",)]
    counts = [repair.best.scenario.job.num_gpus for repair in answer.repairs if repair.lifts == ("num_gpus",)]
    assert batches == [97] and {96, 104} & set(counts)


def test_limits_of_the_shape_alone_are_told_by_the_pin_alone() -> None:
    answer = why(make_scenario(Request(model="8b", num_gpus=16, tensor_parallel=(3,))))
    assert [limit.words for limit in answer.conflict] == ["tensor parallel 3"]
    assert "one limit alone" in rendered(why_page(answer), to_file=True)


def test_larger_gpus_are_of_the_same_maker_no_older_and_each_a_step_larger() -> None:
    for gpu in ("a100-40gb", "v100", "h100", "l4", "mi300x", "b300"):
        scenario = make_scenario(Request(model="8b", num_gpus=8, gpu=gpu))
        memory = [scenario.job.gpu.memory_bytes] + [part.job.gpu.memory_bytes for part in larger_parts(scenario)]
        assert all(larger >= LARGER * smaller for smaller, larger in itertools.pairwise(memory))
        assert all(part.job.gpu.link_bytes_per_s >= scenario.job.gpu.link_bytes_per_s for part in larger_parts(scenario))
    names = [part.job.gpu.name for part in larger_parts(make_scenario(Request(model="8b", num_gpus=8, gpu="a100-40gb")))]
    assert names[0] == "a100-sxm-80gb"
    assert all(part.job.gpu.name.startswith("mi") for part in larger_parts(make_scenario(Request(model="8b", num_gpus=8, gpu="mi300x"))))


def test_a_gpu_whose_memory_was_lowered_may_have_its_own_back() -> None:
    scenario = make_scenario(Request(model="8b", num_gpus=1, gpu_memory_gib=20.0))
    part = larger_parts(scenario)[0]
    assert part.job.gpu.name == scenario.job.gpu.name and part.job.cluster == scenario.job.cluster


def test_lifted_gpus_hold_every_pinned_group() -> None:
    scenario = make_scenario(Request(model="70b", num_gpus=16, tensor_parallel=(8,), pipeline_parallel=(3, 5), data_parallel=(7,)))
    counts = gpu_counts(scenario, 4096)
    assert counts[0] == 16 and {8 * 3 * 7, 8 * 5 * 7, 8, 4096} <= set(counts) and len(counts) == len(set(counts))


def test_limits_are_said_with_the_users_numbers() -> None:
    scenario = make_scenario(
        Request(model="70b", num_gpus=2048, tensor_parallel=(4, 8), recompute=("none",), max_pipeline_parallel=16, framework="deepspeed")
    )
    words = [limit.words for limit in limits_of(scenario)]
    assert {"2,048 GPUs", "tensor parallel 4 or 8", "no recompute", "pipelines of at most 16 stages", "launchable in DeepSpeed"} <= set(
        words
    )
    assert "tensor groups inside a node of 8" in words and "1,024 sequences per step" in words
    assert pin_words("schedule", (2,)) == "schedule gpipe" and value_words("tensor_parallel", (1, 2, 4, 8)) == "one of 1 to 8"


# What holds the best layout back


@functools.cache
def small_cluster() -> Why:
    """8B on 16 A100 of 40 GB in two nodes, ZeRO pinned."""
    return why(make_scenario(Request(model="8b", num_gpus=16, gpu="a100-40gb", global_batch_size=128, zero_stage=(1,))))


def test_binding_limits_come_largest_gain_first_and_each_is_what_a_search_finds() -> None:
    answer = small_cluster()
    assert answer.feasible and answer.result is not None and answer.gains
    old = found(answer.result)
    changes = [gain.change for gain in answer.gains]
    assert changes == sorted(changes) and max(changes) <= -LEAST_GAIN
    for gain in answer.gains:
        best = found(search(gain.best.scenario))
        assert best.layout == gain.best.layout and best.step_seconds == pytest.approx(gain.best.step_seconds)
        assert gain.change == pytest.approx(old.tokens_per_second / best.tokens_per_second - 1.0)


def test_timing_anew_is_searching_anew() -> None:
    result = small_cluster().result
    assert result is not None
    for changed in ({"nic_bytes_per_s": 100e9}, {"link_bytes_per_s": 900e9}):
        faster = with_wires(result.scenario, **changed)
        again, fresh = timed_again(result, faster).ranked, search(faster).ranked
        np.testing.assert_array_equal(again.step_seconds, fresh.step_seconds)
        np.testing.assert_array_equal(again.layouts.tensor_parallel, fresh.layouts.tensor_parallel)


def test_a_layout_at_risk_is_told_what_would_make_it_fit() -> None:
    scenario = make_scenario(Request(model="70b", num_gpus=16))
    result = search(scenario)
    assert result.ranked.verdict[0] > FITS
    gains, _ = binding(result)
    assert "memory" in {gain.name for gain in gains if gain.best.verdict == FITS}


# The commands


def test_search_that_finds_nothing_prints_conflict_and_repairs_and_exits_1(command: Command) -> None:
    done = command("search", "--gpus", "8", "--model", "405b")
    assert done.code == 1 and done.err == ""
    assert "exclude each other" in done.out and "- 8 GPUs" in done.out and "fewest GPUs: 88" in done.out
    assert "GiB too much" in done.out and max(map(len, done.out.splitlines())) <= 100
    assert done.out == rendered(why_page(large_model_on_one_node()), to_file=True)


def test_the_json_of_a_search_and_of_why_hold_the_same_diagnosis(command: Command) -> None:
    wishes = ("--model", "8b", "--gpus", "16", "--zero", "3", "--pp", "4", "--framework", "megatron", "--format", "json")
    first, second = (json.loads(command(name, *wishes).out) for name in ("search", "why"))
    assert first["conflict"] == second["conflict"] and first["repairs"] == second["repairs"] and first["layouts"] == []
    assert [limit["limit"] for limit in second["conflict"]] == ["pipeline_parallel", "zero_stage", "framework"]
    assert second["feasible"] is False and second["best"] is None and second["fewest_gpus"] is None
    json.dumps(why_json(large_model_on_one_node()), allow_nan=False)


def test_why_of_a_feasible_search_exits_0_and_prints_the_same_bytes_twice(command: Command) -> None:
    wishes = ("why", "--model", "8b", "--gpus", "16", "--gpu", "a100-40gb", "--global-batch", "128", "--zero", "1")
    first, second = command(*wishes), command(*wishes)
    assert first.code == 0 and first.out == second.out and first.err == ""
    assert "binding limits" in first.out and max(map(len, first.out.splitlines())) <= 100
    content = json.loads(command(*wishes, "--format", "json").out)
    assert content["feasible"] and content["conflict"] == [] and content["gains"] and content["best"]["layout"]


def test_why_not_a_layout_exits_by_whether_it_could_run(command: Command) -> None:
    wishes = ("why", "--model", "8b", "--gpus", "16", "--global-batch", "128")
    assert command(*wishes, "--layout", "tp2-dp8").code == 0
    assert command(*wishes, "--layout", "tp3-dp8").code == 1


def test_a_batch_that_no_replicas_divide_is_bad_input_to_search_and_a_question_to_why(command: Command) -> None:
    wishes = ("--model", "8b", "--gpus", "97", "--global-batch", "64")
    assert command("search", *wishes).code == 2
    done = command("why", *wishes)
    assert done.code == 1 and "64 sequences per step" in done.out and done.err == ""
