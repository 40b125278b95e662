"""Targets on days, money and speed: what a search drops, shows and calls impossible, against every layout under its best split."""

from __future__ import annotations

import dataclasses
import functools
import math
import random
from collections.abc import Collection
from typing import Any

import numpy as np
import pytest

from planner import spec
from planner.catalogue import load
from planner.catalogue.schema import Software
from planner.cli.terminal import rendered
from planner.cost.bound import least_work
from planner.cost.estimate import time_of
from planner.cost.memory import AT_RISK, FITS
from planner.errors import InputError
from planner.explain import complete_layout
from planner.fewest import attempt, node_counts, on_gpus, too_slow
from planner.frameworks.legality import jobs_by_framework
from planner.lifting import limits_of
from planner.operations import run_of, shares_of, upkeep_of
from planner.refine import LISTED, on_front, pareto_of, ranking, shortlist_of, split_of
from planner.repairs import Repair, found
from planner.report.why_text import why_page
from planner.request import Request, make_scenario
from planner.scenario import SORTS, Scenario
from planner.search import Scored, SearchResult, enumerate_layouts, search, searched
from planner.sensitivity import sensitivity
from planner.targets import TARGETS, hopeless, longest_steps, stated
from planner.why import STRUCTURE, Why, timed_again, why, with_wires
from planner.why_not import why_not
from solver.layout import RECOMPUTE, SCHEDULES
from tests.builders import random_scenario, tight_scenario, without_floor

MOST_LAYOUTS = 120
"""Of a scenario whose every layout is split."""


def with_targets(scenario: Scenario, **targets: float) -> Scenario:
    """The scenario with some targets."""
    return dataclasses.replace(scenario, choices=dataclasses.replace(scenario.choices, **targets))  # type: ignore[arg-type]


def meets(scenario: Scenario, stack: int, step_seconds: float) -> bool:
    """Whether a step meets every target, written down a second time; equality counts up to the last digits."""
    choices, job = scenario.choices, jobs_by_framework(scenario)[stack]
    tokens = job.seq_len * job.global_batch_size
    days = scenario.training_tokens / tokens * step_seconds / 86400 / upkeep_of(scenario.operations, job).goodput
    dollars = days * 24 * job.num_gpus * scenario.price_usd_per_hour
    above = 1 + 1e-12
    return (
        (not choices.max_days or days <= choices.max_days * above)
        and (not choices.max_cost_usd or dollars <= choices.max_cost_usd * above)
        and (not choices.max_step_seconds or step_seconds <= choices.max_step_seconds * above)
        and (not choices.min_tokens_per_second or tokens / step_seconds * above >= choices.min_tokens_per_second)
    )


def reached_by(scenario: Scenario, name: str, stack: int, step_seconds: float) -> float:
    """The target that a step just meets."""
    job = jobs_by_framework(scenario)[stack]
    run = run_of(scenario, step_seconds, upkeep_of(scenario.operations, job).goodput)
    return float(
        {
            "max_days": run.total_days,
            "max_cost_usd": run.cost_usd,
            "max_step_seconds": step_seconds,
            "min_tokens_per_second": job.tokens_per_step / step_seconds,
        }[name]
    )


def varied_scenario(seed: int) -> Scenario:
    """A random scenario with pipelines, of any framework; in some checkpoints take so long that stacks differ in goodput."""
    pick = random.Random(seed)
    wishes: dict[str, Any] = {
        "framework": pick.choice(("any", "any", "none", "megatron", "torchtitan", "deepspeed")),
        "training_tokens": pick.choice((1e9, 1e12)),
        "recompute": pick.choice((("none",), ("none", "full"), ("none", "selective"), ("full",))),
        "schedule": pick.choice(
            (("1f1b", "interleaved_1f1b"), ("1f1b", "zero_bubble_h1"), ("gpipe", "zero_bubble_v"), ("1f1b", "dualpipe"))
        ),
        "zero_stage": pick.choice(((0, 1), (1,), (0, 3), (1, 2))),
        "pipeline_parallel": pick.choice((None, (2, 4))),
    }
    if pick.random() < 0.4:
        wishes |= {"storage_gb_per_s": pick.choice((0.001, 0.01)), "interruptions_per_1000_gpu_days": pick.choice((100.0, 1000.0))}
    return random_scenario(seed, micro_batch_size=(1, 2), virtual_pipeline=(1, 2), **wishes)


@dataclasses.dataclass(frozen=True)
class Split:
    """Every layout of a search without targets, with its step and verdict under the split that a search would cost it under."""

    result: SearchResult
    step_seconds: np.ndarray
    verdict: np.ndarray

    @property
    def labels(self) -> list[str]:
        """In the order of the search."""
        return labels(self.result.ranked)


def labels(scored: Scored) -> list[str]:
    """The layouts as text."""
    return [scored.layouts.layout(row).label for row in range(len(scored))]


@functools.cache
def split(seed: int) -> Split:
    """Every layout of a varied scenario under its best split."""
    scenario = varied_scenario(seed)
    ranked = (result := searched(scenario)).ranked
    jobs, step, verdict = jobs_by_framework(scenario), ranked.step_seconds.copy(), ranked.verdict.copy()
    assert 0 < len(ranked) <= MOST_LAYOUTS
    for row in range(len(ranked)):
        stack = int(ranked.stack[row])
        found = split_of(scenario, stack, jobs[stack], ranked.layouts.layout(row))
        if found is not None:
            step[row], verdict[row] = found.step.total[0], found.verdict
    return Split(result, step, verdict)


SEEDS = (26, 54, 237, 127, 131, 139, 182, 192, 225)


@functools.cache
def questions(seed: int) -> tuple[Scenario, ...]:
    """Targets that some layout just meets or just misses, that nothing meets, that two layouts meet, and two at once."""
    every, pick, scenario = split(seed), random.Random(seed), varied_scenario(seed)
    rows = [int(np.argmin(every.step_seconds)), pick.randrange(len(every.step_seconds))]
    gained = np.flatnonzero(every.step_seconds < every.result.ranked.step_seconds)
    rows += [int(pick.choice(gained))] if len(gained) else []
    asked = []
    for row, nudge in zip(rows, (1 - 1e-9, 1 + 1e-9, 1 + 1e-9)):
        name = pick.choice(list(TARGETS))
        loose = nudge if name != "min_tokens_per_second" else 1 / nudge
        asked.append({name: loose * reached_by(scenario, name, int(every.result.ranked.stack[row]), float(every.step_seconds[row]))})
    asked.append({**asked[0], **asked[-1]})
    return tuple(with_targets(scenario, **targets) for targets in asked)


def meeting(seed: int, scenario: Scenario) -> np.ndarray:
    """Which layouts meet the targets under their best split."""
    every = split(seed)
    return np.array([meets(scenario, int(k), float(s)) for k, s in zip(every.result.ranked.stack, every.step_seconds)])


@functools.cache
def listed(seed: int, number: int) -> Scored:
    """The shortlist of a question."""
    return shortlist_of(searched(questions(seed)[number]), LISTED).rows


def test_the_scenarios_are_of_many_kinds() -> None:
    kinds = [(varied_scenario(seed), split(seed)) for seed in SEEDS]
    assert {scenario.choices.framework for scenario, _ in kinds} == {"any", "none", "megatron", "torchtitan", "deepspeed"}
    assert sum(scenario.job.model.num_experts > 0 for scenario, _ in kinds) > 2
    assert sum(bool(np.any(every.step_seconds < every.result.ranked.step_seconds)) for _, every in kinds) > len(kinds) / 2
    assert sum(len(set(every.result.ranked.verdict)) > 1 for _, every in kinds) > 2
    assert {name for seed in SEEDS for question in questions(seed) for name in stated(question.choices)} == set(TARGETS)
    answers = [bool(np.any(meeting(seed, question))) for seed in SEEDS for question in questions(seed)]
    assert min(answers.count(True), answers.count(False)) > len(SEEDS) / 2


# What a search drops and shows


@pytest.mark.parametrize("seed", SEEDS)
def test_no_layout_that_meets_the_targets_under_its_best_split_is_dropped(seed: int) -> None:
    every = split(seed)
    for question in questions(seed):
        left = set(labels(searched(question).ranked))
        assert not {label for label, good in zip(every.labels, meeting(seed, question)) if good} - left
        assert left <= set(every.labels)


@pytest.mark.parametrize("seed", SEEDS)
def test_the_books_close_and_targets_drop_after_everything_else(seed: int) -> None:
    before = split(seed).result.funnel
    for question in questions(seed):
        result = searched(question)
        own = {name: number for name, number in result.funnel.dropped.items() if name in TARGETS}
        assert set(own) == set(stated(question.choices))
        assert {k: v for k, v in result.funnel.dropped.items() if k not in TARGETS} == before.dropped
        assert sum(own.values()) + len(result.ranked) == before.survivors == sum(result.too_late.values()) + result.funnel.survivors


@pytest.mark.parametrize("seed", SEEDS)
def test_a_shortlist_is_empty_only_where_nothing_meets_the_targets_and_shows_only_what_does(seed: int) -> None:
    for number, question in enumerate(questions(seed)):
        any_meets = bool(np.any(meeting(seed, question)))
        shown = [shortlist_of(searched(question, sort), 1, sort=sort).rows for sort in ("cost", "memory")]
        for rows in (*shown, listed(seed, number), pareto_of(searched(question), 1000).rows):
            assert (len(rows) > 0) == any_meets
            assert all(meets(question, int(k), float(s)) for k, s in zip(rows.stack, rows.step_seconds))


@pytest.mark.parametrize("seed", SEEDS)
def test_the_first_layout_fits_if_one_that_fits_meets_the_targets(seed: int) -> None:
    for number, question in enumerate(questions(seed)):
        good = meeting(seed, question) & (split(seed).result.ranked.verdict == FITS)
        if np.any(good):
            assert listed(seed, number).verdict[0] == FITS


@pytest.mark.parametrize("seed", SEEDS)
def test_a_loose_target_changes_nothing_that_is_shown(seed: int) -> None:
    scenario, result = varied_scenario(seed), split(seed).result
    loose = with_targets(scenario, max_days=1e6, max_cost_usd=1e15, max_step_seconds=1e9, min_tokens_per_second=1e-6)
    one, other = shortlist_of(result, LISTED), shortlist_of(searched(loose), LISTED)
    assert labels(one.rows) == labels(other.rows) and one.proof == other.proof
    np.testing.assert_array_equal(one.rows.step_seconds, other.rows.step_seconds)
    assert [s and s.layers_per_stage for s in one.splits] == [s and s.layers_per_stage for s in other.splits]


@pytest.mark.parametrize("name", TARGETS)
def test_the_longest_step_that_a_target_allows_is_the_one_that_just_meets_it(worked_example: Scenario, name: str) -> None:
    for stack, job in jobs_by_framework(worked_example).items():
        target = reached_by(worked_example, name, stack, 12.5)
        assert longest_steps(with_targets(worked_example, **{name: target}), job) == {name: pytest.approx(12.5, rel=1e-12)}


def test_targets_by_hand(worked_example: Scenario) -> None:
    job = worked_example.job
    goodput = upkeep_of(worked_example.operations, job).goodput
    limits = longest_steps(with_targets(worked_example, max_days=30.0, max_cost_usd=3e6, min_tokens_per_second=1e6), job)
    steps = 1.4e12 / 2**22
    assert limits["max_days"] == pytest.approx(30 * 86400 * goodput / steps)
    assert limits["max_cost_usd"] == pytest.approx(3e6 / 2.5 / 2048 * 3600 * goodput / steps)
    assert limits["min_tokens_per_second"] == pytest.approx(4.194304)


def test_pins_that_leave_full_recompute_alone_are_no_reason_to_call_a_target_impossible() -> None:
    wishes = Request(model="llama-3.2-1b", num_gpus=4, recompute_layers=(4,), max_step_seconds=1000.0)
    for pins in ({}, {"recompute": ("none", "full")}):
        scenario = make_scenario(dataclasses.replace(wishes, **pins))
        assert len(shortlist_of(searched(scenario), 1).rows) and not too_slow(scenario) and attempt(scenario).fits


def lumpy(**wishes: Any) -> Scenario:
    """A head as heavy as several layers: an uneven split is a third faster than the even one."""
    pins = {"pipeline_parallel": (4,), "tensor_parallel": (1,), "virtual_pipeline": (1,), "zero_stage": (1,), "micro_batch_size": (1,)}
    shape = "layers=13,hidden=4096,heads=32,vocab=512000"
    return make_scenario(Request(**{"model_shape": shape, "num_gpus": 16, "global_batch_size": 32, **pins, **wishes}))


@functools.cache
def fastest_lumpy() -> float:
    """The shortest step of the lumpy model, unevenly."""
    return float(shortlist_of(searched(lumpy()), LISTED).rows.step_seconds[0])


@pytest.mark.parametrize("sort", SORTS)
def test_a_target_between_the_best_split_and_the_even_one_is_met_whatever_is_best(sort: str) -> None:
    scenario = lumpy(max_step_seconds=1.05 * fastest_lumpy())
    assert searched(scenario, sort).ranked.step_seconds.min() > 1.2 * fastest_lumpy()
    assert shortlist_of(searched(scenario, sort), 3, sort=sort).rows.step_seconds[0] <= 1.05 * fastest_lumpy()
    assert not len(shortlist_of(searched(with_targets(scenario, uneven_stages=False), sort), 3, sort=sort).rows)


# What is called impossible


@pytest.mark.parametrize("seed", SEEDS)
def test_one_count_is_answered_as_the_search_answers_it(seed: int) -> None:
    for number, question in enumerate(questions(seed)):
        good = meeting(seed, question)
        assert attempt(question, AT_RISK).fits == bool(np.any(good))
        assert attempt(question, FITS).fits == bool(np.any(listed(seed, number).verdict == FITS))
        assert not (np.any(good) and (hopeless(question) or too_slow(question)))


def test_impossible_targets_are_proven_so_and_not_by_every_search() -> None:
    asked = [question for seed in SEEDS for question in questions(seed)]
    assert sum(map(hopeless, asked)) < sum(map(too_slow, asked))
    scenario = varied_scenario(SEEDS[0])
    assert hopeless(with_targets(scenario, max_step_seconds=1e-6)) and not hopeless(scenario)


@pytest.mark.parametrize("seed", range(0, 60, 5))
def test_no_layout_of_any_stack_steps_faster_than_its_kernels_shared_out(seed: int) -> None:
    scenario = random_scenario(seed)
    layouts = next(enumerate_layouts(without_floor(spec.problem(scenario))).pieces(1 << 40), None)
    if layouts is None:
        return
    x = layouts.take(np.sort(np.random.default_rng(seed).permutation(len(layouts))[:2000]))
    for stack in load.records(Software):
        job = scenario.job.under(stack)
        assert least_work(job) / job.num_gpus <= time_of(job, x).total.min(), stack.name


def test_the_least_work_was_compared_with_every_schedule_and_recompute_and_is_close_on_one_gpu() -> None:
    x = next(enumerate_layouts(without_floor(spec.problem(random_scenario(45)))).pieces(1 << 40))
    assert set(x.schedule.tolist()) == set(range(len(SCHEDULES))) and set(x.recompute.tolist()) == set(range(len(RECOMPUTE)))
    scenario = make_scenario(Request(model="8b", num_gpus=1, gpu_memory_gib=200, global_batch_size=64))
    assert 0.95 < least_work(scenario.job) / searched(scenario).ranked.step_seconds.min() <= 1


# Why a target is missed


@functools.cache
def asked(seed: int) -> tuple[Scenario, Why]:
    """A small scenario whose target is too tight, a little or far, and why."""
    pick = random.Random(seed)
    pins = {"micro_batch_size": (1,), "virtual_pipeline": (1,), "schedule": ("1f1b",), "zero_stage": (1,)}
    pins = dict(pick.sample(sorted(pins.items()), 3))
    scenario = random_scenario(seed, num_gpus=pick.choice((2, 4)), training_tokens=1e11, gpus_per_node=4, **pins)
    rows = shortlist_of(searched(scenario), LISTED).rows
    name = pick.choice(list(TARGETS))
    tight = pick.choice((0.97, 0.6)) if name != "min_tokens_per_second" else pick.choice((1.03, 1.6))
    least = int(np.argmin(rows.step_seconds))
    question = with_targets(scenario, **{name: tight * reached_by(scenario, name, int(rows.stack[least]), float(rows.step_seconds[least]))})
    return question, why(question)


WHY_SEEDS = (1, 2, 6, 10, 14, 25)


def finds(scenario: Scenario) -> bool:
    """Whether the search itself finds a layout that meets the targets."""
    try:
        return len(shortlist_of(searched(scenario), LISTED).rows) > 0
    except InputError:
        return False


def lifted_one_by_one(scenario: Scenario, kept: Collection[str]) -> bool:
    """Whether the search finds a layout when all limits but some are lifted, in any of the ways that count."""
    ways = [scenario]
    for limit in limits_of(scenario):
        if limit.name not in kept and limit.name not in STRUCTURE:
            ways = [wider for one in ways for wider in limit.lift(one)]
    return any(map(finds, ways))


@pytest.mark.parametrize("seed", WHY_SEEDS)
def test_the_conflict_names_the_target_excludes_every_layout_and_without_any_one_member_there_is_one(seed: int) -> None:
    scenario, answer = asked(seed)
    conflict = {limit.name for limit in answer.conflict}
    assert not answer.feasible and conflict >= set(stated(scenario.choices))
    assert not lifted_one_by_one(scenario, conflict)
    for member in conflict:
        assert lifted_one_by_one(scenario, conflict - {member}), member


def changed(old: Scenario, new: Scenario) -> set[str]:
    """The keys in which two scenarios differ."""
    keys = [field.name for field in dataclasses.fields(old.choices) if field.name != "pins"]
    names = {key for key in keys if getattr(old.choices, key) != getattr(new.choices, key)}
    names |= {axis for axis in {*old.choices.pins, *new.choices.pins} if old.choices.pins.get(axis) != new.choices.pins.get(axis)}
    parts = ("num_gpus", "global_batch_size", "optimizer", "sequence_parallel", "seq_len", "precision", "model")
    names |= {part for part in parts if getattr(old.job, part) != getattr(new.job, part)}
    return names | ({"memory"} if old.job.gpu != new.job.gpu else set())


def layout_under(scenario: Scenario) -> tuple[str, float]:
    """The first layout that a search shows, and its step."""
    rows = shortlist_of(searched(scenario), 1).rows
    assert meets(scenario, int(rows.stack[0]), float(rows.step_seconds[0]))
    return labels(rows)[0], float(rows.step_seconds[0])


def assert_confirmed(old: Scenario, repair: Repair) -> None:
    """A repair changes what it says and nothing else, and a search shows its layout."""
    new = repair.best.scenario
    assert set(repair.lifts) == changed(old, new)
    assert layout_under(new) == (repair.best.layout.label, pytest.approx(repair.best.step_seconds))
    if repair.exact:
        node, found = new.job.cluster.gpus_per_node, new.job.num_gpus
        fewer = [count for count in node_counts(node, found - 1) if count <= 64]
        assert not any(finds(on_gpus(new, count)) for count in fewer)


@pytest.mark.parametrize("seed", WHY_SEEDS)
def test_every_repair_of_a_missed_target_is_what_a_search_shows_and_the_fewest_gpus_are_the_fewest(seed: int) -> None:
    scenario, answer = asked(seed)
    assert answer.repairs
    for repair in answer.repairs:
        assert_confirmed(scenario, repair)
    assert any(set(repair.lifts) == set(stated(scenario.choices)) for repair in answer.repairs)


@pytest.mark.parametrize("seed", (10, 22))
def test_where_nothing_fits_anyway_no_target_is_blamed(seed: int) -> None:
    scenario = dataclasses.replace(tight_scenario(seed), training_tokens=1e12)
    plain, answer = why(scenario), why(with_targets(scenario, max_days=1e-6, max_step_seconds=1e-6))
    assert answer.conflict and [limit.name for limit in answer.conflict] == [limit.name for limit in plain.conflict]
    assert [repair.lifts for repair in answer.repairs] == [repair.lifts for repair in plain.repairs]
    assert not {name for repair in answer.repairs for name in repair.lifts} & set(TARGETS)


def test_a_target_that_only_the_bounds_allow_is_missed_and_explained() -> None:
    scenario = varied_scenario(192)
    question = with_targets(scenario, max_step_seconds=float(split(192).step_seconds.min()) * (1 - 1e-6))
    assert len(searched(question).ranked) and not finds(question)
    answer = why(question)
    assert not answer.feasible and "max_step_seconds" in {limit.name for limit in answer.conflict}
    eased = next(repair for repair in answer.repairs if repair.lifts == ("max_step_seconds",))
    assert layout_under(scenario) == (eased.best.layout.label, pytest.approx(eased.best.step_seconds))
    assert "no layout meets the target" in rendered(why_page(answer), to_file=True)


def test_faster_wires_and_other_rates_are_judged_on_every_layout_not_on_those_that_meet_the_target() -> None:
    plain = make_scenario(Request(model="8b", num_gpus=16, global_batch_size=16, virtual_pipeline=(1,), schedule=("1f1b",)))
    result = searched(plain)
    target = with_targets(plain, max_step_seconds=float(result.ranked.step_seconds[0]) * 1.001)
    faster = with_wires(target, nic_bytes_per_s=2 * plain.job.nic_bytes_per_s)
    assert found(timed_again(searched(target), faster)).step_seconds == found(search(faster)).step_seconds
    assert sensitivity(target, factors=(0.5, 2.0)).points == sensitivity(plain, factors=(0.5, 2.0)).points


def test_a_layout_that_misses_the_target_can_still_be_asked_about() -> None:
    plain = make_scenario(Request(model="llama-3.2-1b", num_gpus=4, global_batch_size=16))
    layout = complete_layout(plain, "tp4")
    answer = why_not(with_targets(plain, max_step_seconds=1e-3), layout)
    assert answer.feasible and answer.rank == why_not(plain, layout).rank


# What is best


def points_of(scenario: Scenario, scored: Scored) -> np.ndarray:
    """Seconds with failures included, dollars and bytes of each layout, by hand."""
    jobs = jobs_by_framework(scenario)
    goodput = np.array([upkeep_of(scenario.operations, jobs[int(stack)]).goodput for stack in scored.stack])
    seconds = scored.step_seconds / goodput
    return np.stack([seconds, seconds * scenario.job.num_gpus * scenario.price_usd_per_hour / 3600, scored.need_bytes], axis=1)


def beaten(point: np.ndarray, others: np.ndarray) -> bool:
    """The definition of domination."""
    return bool(np.any(np.all(others <= point, axis=1) & np.any(others < point, axis=1)))


@pytest.mark.parametrize("seed", [*SEEDS, 95])
def test_the_front_is_what_nothing_beats_evenly_or_under_its_split(seed: int) -> None:
    scenario = varied_scenario(seed) if seed in SEEDS else random_scenario(95, virtual_pipeline=(1, 2), zero_stage=(0, 1))
    plain = searched(scenario)
    step = float(np.median(plain.ranked.step_seconds))
    for question in (scenario, with_targets(scenario, max_step_seconds=step)):
        result = searched(question)
        split, limit = ranking(result), question.choices.max_step_seconds or math.inf
        split, even = (rows.take(np.flatnonzero(rows.step_seconds <= limit)) for rows in (split, result.ranked))
        points, others = points_of(question, split), np.concatenate([points_of(question, split), points_of(question, even)])
        front = {label for label, point in zip(labels(split), points, strict=True) if not beaten(point, others)}
        shown = pareto_of(result, 10_000)
        assert set(labels(shown.rows)) == front and len(shown.rows) == len(front)
        places = list(zip(shown.rows.verdict.tolist(), shown.rows.step_seconds.tolist(), strict=True))
        assert places == sorted(places) and np.all(on_front(result, shown.rows))


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("sort", ["step", "cost", "goodput"])
def test_a_shortlist_is_in_the_order_of_what_is_best_and_starts_with_the_best_known(seed: int, sort: str) -> None:
    scenario = varied_scenario(seed)
    result = searched(scenario, sort)
    rows = shortlist_of(result, LISTED, sort=sort).rows

    def keys(scored: Scored) -> list[tuple[int, float]]:
        measure = scored.step_seconds if sort == "step" else points_of(scenario, scored)[:, 1 if sort == "cost" else 0]
        return [(int(v), float(f"{m:.10g}")) for v, m in zip(scored.verdict, measure)]

    assert keys(rows) == sorted(keys(rows)) and keys(result.ranked) == sorted(keys(result.ranked))
    assert keys(rows)[0] <= min(keys(result.ranked))


def test_failures_beyond_reason_leave_plain_numbers() -> None:
    for mtbf, restart, interval in ((1e-5, 1e7, 1e7), (1e-5, 0.0, 1e-5), (1e-2, 1e3, 1.0), (math.inf, 1e9, math.inf)):
        shares = shares_of(interval=interval, stall=5.0, mtbf=mtbf, restart=restart, behind=0.0, evaluation=0.03)
        assert all(0 <= share <= 1 for share in vars(shares).values()) and shares.training > 0
        assert sum(vars(shares).values()) == pytest.approx(1)
    for wishes in ({"checkpoint_minutes": 60.0, "restart_minutes": 1e5}, {}, {"asynchronous_checkpoints": True, "storage_gb_per_s": 1e-4}):
        request = Request(
            model="8b", num_gpus=10_000_000, interruptions_per_1000_gpu_days=1e5, training_tokens=1e18, price_usd_per_hour=1e6
        )
        scenario = make_scenario(dataclasses.replace(request, max_cost_usd=1.0, **wishes))
        run = run_of(scenario, 1e6, upkeep_of(scenario.operations, scenario.job).goodput)
        assert all(math.isfinite(float(value)) for value in vars(run).values())
        assert all(math.isfinite(seconds) for seconds in longest_steps(scenario, scenario.job).values())
