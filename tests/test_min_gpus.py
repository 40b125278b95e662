"""The fewest GPUs for a model or a target: exact against a search of every number of GPUs, and explained by what is true."""

from __future__ import annotations

import dataclasses
import functools
import json
import random
import re
from collections.abc import Callable
from typing import Any

import pytest

from planner.cli.terminal import rendered
from planner.cost.memory import AT_RISK, FITS
from planner.errors import InputError
from planner.fewest import divisible_batch, fewest_gpus, node_counts, on_gpus, with_batch
from planner.min_gpus import MinGpus, min_gpus, nearby_batches
from planner.refine import LISTED, shortlist_of
from planner.report.min_gpus_text import min_gpus_json, min_gpus_page
from planner.request import Request, make_scenario
from planner.scenario import Scenario
from planner.search import Scored, searched
from planner.shortfall import why_fewer_fail
from planner.targets import TARGETS, stated, untargeted
from tests.builders import random_scenario, tight_scenario
from tests.conftest import Outcome

Command = Callable[..., Outcome]

TOKENS = 1e12
COARSE = {"micro_batch_size": (1, 2), "virtual_pipeline": (1, 2)}


def shown(scenario: Scenario) -> Scored | None:
    """What a search shows on the scenario's GPUs; None where no replicas divide the batch."""
    try:
        return shortlist_of(searched(scenario), LISTED).rows
    except InputError:
        return None


def brute_force(scenario: Scenario, most: int) -> tuple[int, int]:
    """The first numbers of GPUs on which a search shows a layout that fits, and any layout; 0 where none does."""
    safe = risky = 0
    for count in node_counts(scenario.job.cluster.gpus_per_node, most):
        rows = shown(on_gpus(scenario, count))
        if rows is None or not len(rows):
            continue
        risky = risky or count
        if rows.verdict[0] == FITS:
            return count, risky
    return safe, risky


def base(seed: int) -> Scenario:
    """A small model, dense or a mixture, with pins, of any framework; every third has a tight memory."""
    pick = random.Random(seed)
    if seed % 3 == 0:
        scenario = tight_scenario(seed)
    else:
        zero = pick.choice(((0,), (1,), (3,), (1, 2)))
        framework = pick.choice(("any", "none", "megatron", "deepspeed", "torchtitan"))
        scenario = random_scenario(seed, framework=framework, zero_stage=zero, **COARSE)
    operations = scenario.operations
    if pick.random() < 0.3:  # stacks differ in goodput
        operations = dataclasses.replace(operations, interruptions_per_1000_gpu_days=1000.0, storage_bytes_per_s=2e6)
    return dataclasses.replace(scenario, training_tokens=TOKENS, price_usd_per_hour=2.0, operations=operations)


def most_of(scenario: Scenario) -> int:
    """Up to where the tests look."""
    return min(4 * scenario.job.cluster.gpus_per_node, 16)


def question(seed: int) -> Scenario:
    """The model with a target near what some number of GPUs attains, or, in a fourth of the cases, without one."""
    scenario, pick = base(seed), random.Random(seed)
    counts = list(node_counts(scenario.job.cluster.gpus_per_node, most_of(scenario)))
    pick.shuffle(counts)
    rows = next((rows for count in counts if (rows := shown(on_gpus(scenario, count))) is not None and len(rows)), None)
    if rows is None or seed % 4 == 0:
        return scenario
    step, tokens = float(rows.step_seconds[0]) * pick.choice((1.0, 1.02, 0.97, 0.8, 1.3)), scenario.job.tokens_per_step
    days = 1.05 * TOKENS / tokens * step / 86400
    name, value = pick.choice(
        (
            ("max_step_seconds", step),
            ("min_tokens_per_second", tokens / step),
            ("max_days", days),
            ("max_cost_usd", days * 24 * pick.choice(counts) * 2.0),
        )
    )
    return dataclasses.replace(scenario, choices=dataclasses.replace(scenario.choices, **{name: value}))  # type: ignore[arg-type]


@functools.cache
def answered(seed: int) -> tuple[Scenario, MinGpus]:
    """A question and its answer."""
    scenario = question(seed)
    return scenario, min_gpus(scenario, most_of(scenario))


SEEDS = (4, 7, 10, 11, 13, 20, 22, 26, 37, 43, 44, 46, 49, 53, 58, 65, 70, 74, 76, 77, 82, 86, 93, 95, 97)


@pytest.mark.parametrize("seed", SEEDS)
def test_the_fewest_gpus_are_the_first_on_which_a_search_shows_a_layout(seed: int) -> None:
    scenario, found = answered(seed)
    assert (found.safe.num_gpus, found.risky.num_gpus) == brute_force(scenario, most_of(scenario))


@pytest.mark.parametrize("seed", SEEDS)
def test_the_layout_on_the_page_is_the_first_of_a_search_and_fits(seed: int) -> None:
    scenario, found = answered(seed)
    assert (found.shortlist is None) == (found.safe.num_gpus == 0)
    if found.shortlist is not None:
        rows = shown(on_gpus(scenario, found.safe.num_gpus))
        assert rows is not None and len(found.shortlist.rows) == 1 and found.shortlist.rows.verdict[0] == FITS
        assert rows.layouts.layout(0) == found.shortlist.rows.layouts.layout(0)
        assert rows.step_seconds[0] == found.shortlist.rows.step_seconds[0]


@pytest.mark.parametrize("seed", SEEDS)
def test_the_reason_why_fewer_fail_is_true(seed: int) -> None:
    scenario, found = answered(seed)
    for failure in filter(None, (found.fewer, found.slower)):
        on = on_gpus(scenario, failure.num_gpus)
        without = shown(untargeted(on))
        fits_without = without is not None and any(without.verdict <= found.safe.worst)
        assert (failure.reason in ("time", "work")) == (fits_without and bool(stated(scenario.choices))) or failure.reason == "work"
        if failure.reason == "time":
            assert without is not None and str(without.layouts.layout(0).label) in failure.words
            assert any(TARGETS[name].words(scenario) in failure.words for name in stated(scenario.choices))
        if failure.reason == "batch":
            batch = divisible_batch(on)
            larger = shown(with_batch(on, batch)) if batch else None
            assert not fits_without and larger is not None and any(larger.verdict <= found.safe.worst)


def test_the_questions_are_of_many_kinds() -> None:
    all_of_them = [answered(seed) for seed in SEEDS]
    assert {name for scenario, _ in all_of_them for name in stated(scenario.choices)} == set(TARGETS)
    assert {scenario.choices.framework for scenario, _ in all_of_them} == {"any", "none", "megatron", "torchtitan", "deepspeed"}
    assert {scenario.job.model.num_experts > 0 for scenario, _ in all_of_them} == {True, False}
    numbers = [(found.risky.num_gpus, found.safe.num_gpus) for _, found in all_of_them]
    assert sum(risky < safe for risky, safe in numbers) > 2 and sum(safe == 0 for _, safe in numbers) > 2
    assert len({safe for _, safe in numbers}) > 5
    reasons = {failure.reason for _, found in all_of_them for failure in (found.fewer, found.slower) if failure}
    assert reasons >= {"time", "memory", "rules"}


CATALOGUE: list[dict[str, Any]] = [
    {"model": "llama-3.2-3b", "gpu": "rtx-4090", "zero_stage": (1,), "context_parallel": (1,), "max_days": 900.0, "training_tokens": 1e12},
    {"model": "olmoe-1b-7b", "gpu": "h100", "pipeline_parallel": (1,), "zero_stage": (1,), "max_cost_usd": 4e5, "training_tokens": 1e12},
    {"model": "llama-3.2-1b", "gpu": "a100", "framework": "megatron", "min_tokens_per_second": 150_000.0, "recompute": ("full",)},
    {"model": "llama-3.2-1b", "gpu": "l4", "framework": "deepspeed", "max_step_seconds": 10.0, "tensor_parallel": (1, 2)},
]


@pytest.mark.parametrize("wishes", CATALOGUE, ids=[f"{wishes['model']}-{wishes['gpu']}" for wishes in CATALOGUE])
def test_the_fewest_gpus_of_catalogue_models_are_the_first_on_which_a_search_shows_a_layout(wishes: dict[str, Any]) -> None:
    scenario = make_scenario(Request(**{**COARSE, "num_gpus": 1, "global_batch_size": 48, **wishes}))
    found = min_gpus(scenario, most=32)
    assert found.safe.num_gpus > 1
    assert (found.safe.num_gpus, found.risky.num_gpus) == brute_force(scenario, 32)


def test_a_layout_that_only_its_best_split_takes_below_the_limit_fits() -> None:
    shape = "layers=5,hidden=1024,heads=4,ffn=4096,vocab=32000,gated=false,experts=4,top_k=2,moe_ffn=14336,num_dense_layers=3"
    pins = {"tensor_parallel": (2,), "pipeline_parallel": (2,), "context_parallel": (2,), "expert_parallel": (1,)}
    pins |= {"expert_tensor_parallel": (1,), "virtual_pipeline": (1,), "zero_stage": (1,), "micro_batch_size": (1,)}
    sizes = {"gpu": "v100-sxm-16gb", "gpu_memory_gib": 8.0, "seq_len": 6144, "global_batch_size": 16}
    scenario = make_scenario(Request(model_shape=shape, num_gpus=8, framework="megatron", recompute=("none",), **sizes, **pins))
    result = searched(scenario)
    assert set(result.ranked.verdict) == {AT_RISK} and shortlist_of(result, LISTED).rows.verdict[0] == FITS
    found = min_gpus(scenario, most=16)
    assert found.safe.num_gpus == found.risky.num_gpus == 8


def test_a_number_that_the_batch_does_not_divide_among_fails_between_two_that_do() -> None:
    scenario = make_scenario(Request(model="llama-3.2-1b", num_gpus=1, gpus_per_node=8, global_batch_size=12, pipeline_parallel=(1,)))
    counts = {count for count in range(1, 8) if (rows := shown(on_gpus(scenario, count))) is not None and len(rows)}
    assert {4, 6} <= counts and not {5, 7} & counts


def test_larger_numbers_are_not_tried_and_what_was_tried_is_said() -> None:
    scenario = make_scenario(Request(model="8b", num_gpus=1, gpu="l4", global_batch_size=64))
    found = min_gpus(scenario, most=2)
    assert found.safe.num_gpus == found.risky.num_gpus == 0 and found.safe.tried == 2 and not found.safe.exhausted
    assert "no number of GPUs up to 2 does" in rendered(min_gpus_page(found), to_file=True)


def test_a_target_that_no_number_of_gpus_meets_ends_the_search() -> None:
    wishes = {"tensor_parallel": (1,), "pipeline_parallel": (1,), "context_parallel": (1,), "global_batch_size": 8}
    found = min_gpus(make_scenario(Request(model="llama-3.2-1b", num_gpus=1, max_step_seconds=1e-3, **wishes)))
    assert found.safe.num_gpus == 0 and found.safe.exhausted and found.fewer is not None and found.fewer.reason in ("work", "time")
    assert "nor any larger one" in rendered(min_gpus_page(found), to_file=True)


def test_a_count_that_fits_at_risk_is_not_blamed_on_the_batch() -> None:
    sizes = {"global_batch_size": 9, "gpu_memory_gib": 7.0, "zero_stage": (3,)}
    fewest = fewest_gpus(make_scenario(Request(model="llama-3.2-1b", num_gpus=1, **sizes, **COARSE)), FITS)
    failure = why_fewer_fail(fewest)
    assert failure is not None and (fewest.num_gpus, failure.num_gpus) == (16, 8)
    assert failure.reason == "memory" and failure.words.endswith("at risk")


def test_a_batch_that_divides_better_needs_fewer_gpus_as_a_search_of_it_shows() -> None:
    pins = {"tensor_parallel": (1,), "pipeline_parallel": (1,), "context_parallel": (1,), "zero_stage": (1,)}
    scenario = make_scenario(Request(model="llama-3.2-1b", num_gpus=1, gpus_per_node=2, global_batch_size=34, **pins))
    rows = shown(on_gpus(with_batch(scenario, 36), 4))
    assert rows is not None
    step = 1.01 * float(rows.step_seconds[0])
    scenario = dataclasses.replace(scenario, choices=dataclasses.replace(scenario.choices, max_step_seconds=step))
    found = min_gpus(scenario, most=64, batch_within=0.06)
    assert found.safe.num_gpus == 34 == brute_force(scenario, 34)[0]
    batches = {other.fewest.scenario.job.global_batch_size: other for other in found.other_batches}
    assert set(batches) == set(nearby_batches(34, 0.06)) == {32, 36}
    for batch, other in batches.items():
        assert other.fewest.num_gpus == 4 == brute_force(with_batch(scenario, batch), 33)[0]
        assert float(other.shortlist.rows.step_seconds[0]) <= step


# The command


def test_the_page_and_the_json_of_the_command_hold_the_same_answer(command: Command) -> None:
    wishes = ("min-gpus", "--model", "8b", "--global-batch", "64", "--tokens", "100B", "--deadline", "40d", "--mb", "1,2", "--zero", "1")
    page, content = command(*wishes), json.loads(command(*wishes, "--format", "json").out)
    assert page.code == 0 and page.err == "" and max(map(len, page.out.splitlines())) <= 100
    first = " ".join(page.out.split())
    number = content["fits"]["num_gpus"]
    assert f"at most 40 days for 100B tokens: {number:,} GPUs" in first and "exact:" in page.out
    assert content["targets"] == {"max_days": 40.0} and content["scenario"]["num_gpus"] is None
    assert content["best"]["verdict"] == "fits" and content["best"]["step_seconds"] > 0
    fewer = content["fewer"]
    assert f"{fewer['num_gpus']:,} fail: {fewer['words']}" in first and fewer["num_gpus"] < number
    assert command(*wishes).out == page.out


@pytest.mark.parametrize("software", ["jax", "fsdp2"])
@pytest.mark.parametrize("framework", ["any", "none", "torchtitan"])
def test_the_kernels_are_named_as_too_slow_under_every_stack_and_framework(software: str, framework: str) -> None:
    wishes = Request(model="8b", num_gpus=1, software=software, framework=framework, max_step_seconds=1e-3)
    found = min_gpus(make_scenario(wishes), most=4)
    assert found.fewer is not None and found.fewer.reason == "work" and "(steps of at most 0.001 s)" in found.fewer.words


def test_an_impossible_target_exits_1_with_the_reason_and_no_layout(command: Command) -> None:
    done = command("min-gpus", "--model", "8b", "--step-under", "0.001", "--most", "64")
    assert done.code == 1 and done.err == "" and "no number of GPUs up to 64 does" in " ".join(done.out.split())
    assert re.search(r"64 fail: the kernels alone, perfectly shared out, come to steps of [0-9.]+ s", done.out)
    content = json.loads(command("min-gpus", "--model", "8b", "--step-under", "0.001", "--most", "64", "--format", "json").out)
    assert content["fits"]["num_gpus"] is None and content["best"] is None
    json.dumps(min_gpus_json(min_gpus(make_scenario(Request(model="llama-3.2-1b", num_gpus=1)), most=4)), allow_nan=False)
