"""The whole search on random small jobs: pruning loses nothing, and nothing illegal or too large is ranked."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable

import numpy as np
import numpy.typing as npt
import pytest

from planner import spec
from planner.cost.estimate import memory_of
from planner.errors import InputError, NoLayoutFits
from planner.explain import complete_layout, explain
from planner.frameworks import FRAMEWORKS, legality
from planner.rank import order
from planner.scenario import FRAMEWORK_CHOICES, Scenario
from planner.search import Scored, SearchResult, assign, concatenate, enumerate_layouts, estimate, search
from solver import prune
from solver.check import broken_rules
from solver.layout import columns_of
from tests.builders import brute_force, random_scenario, rows_of, starved_scenario, without_floor

JOBS = [(build, seed) for build in (random_scenario, starved_scenario) for seed in range(40)]
EVERY_JOB = pytest.mark.parametrize(("build", "seed"), JOBS, ids=[f"{build.__name__.split('_')[0]}-{seed}" for build, seed in JOBS])
Build = Callable[[int], Scenario]


@functools.cache
def outcome(build: Build, seed: int) -> SearchResult | None:
    """The result of a random job; None where its batch suits no replica count."""
    try:
        return search(build(seed))
    except NoLayoutFits as nothing:
        return nothing.result
    except InputError:
        return None


@functools.cache
def unpruned(build: Build, seed: int) -> Scored:
    """Every layout of a random job by brute force, without the solver and without the memory floor, ranked."""
    scenario = build(seed)
    problem = without_floor(spec.problem(scenario))
    every = prune.spread(problem, brute_force(problem))
    scored = concatenate([fits for piece in every.pieces(1 << 14) for fits, _ in estimate(scenario, piece)])
    return scored.take(order(scenario, scored))


def test_the_random_jobs_cover_success_failure_risk_and_a_floor_that_drops_some_meshes() -> None:
    found = [result for job in JOBS if (result := outcome(*job)) is not None]
    ranked = [result for result in found if len(result.ranked)]
    assert len(ranked) > 40 and len(found) - len(ranked) > 2
    assert sum(result.funnel.dropped["memory_floor"] > 0 for result in ranked) > 15
    assert sum(set(result.ranked.verdict.tolist()) == {0, 1} for result in ranked) > 10


@EVERY_JOB
def test_pruning_changes_neither_the_winner_nor_any_other_rank(build: Build, seed: int) -> None:
    result = outcome(build, seed)
    if result is None:
        assert not len(unpruned(build, seed))
        return
    np.testing.assert_array_equal(rows_of(unpruned(build, seed).layouts), rows_of(result.ranked.layouts))
    np.testing.assert_array_equal(unpruned(build, seed).step_seconds, result.ranked.step_seconds)


@EVERY_JOB
def test_the_books_close_and_what_fits_comes_before_what_is_at_risk(build: Build, seed: int) -> None:
    result = outcome(build, seed)
    if result is None:
        return
    funnel, ranked = result.funnel, result.ranked
    assert {"launchable", "memory"} < set(funnel.dropped)
    assert funnel.space == result.problem.space_size == sum(funnel.dropped.values()) + len(ranked)
    assert np.all(ranked.verdict < 2) and np.all(np.diff(ranked.verdict) >= 0)
    for verdict in (0, 1):
        seconds = ranked.step_seconds[ranked.verdict == verdict]
        assert np.all(np.diff(seconds) >= -1e-9 * seconds[:-1]) and np.all(seconds > 0)


@EVERY_JOB
def test_no_ranked_layout_breaks_a_rule_lacks_a_framework_or_runs_out_of_memory(build: Build, seed: int) -> None:
    result = outcome(build, seed)
    if result is None:
        return
    scenario, ranked = result.scenario, result.ranked
    for row in range(0, len(ranked), len(ranked) // 20 + 1):
        layout, number = ranked.layouts.layout(row), int(ranked.stack[row])
        assert broken_rules(layout, result.problem) == {}
        assert (number == -1) == (scenario.choices.framework == "none")
        name = "none" if number == -1 else list(FRAMEWORKS)[number]
        assert number == -1 or legality.broken(scenario.job_in(name), layout, name) == []
        need = float(memory_of(scenario.job_in(name), columns_of([layout])).need_bytes[0])
        assert need == pytest.approx(ranked.need_bytes[row])
        assert ranked.verdict[row] == 1 or need < scenario.job.gpu.memory_bytes
    if len(ranked):
        best = explain(scenario, ranked.layouts.layout(0))
        assert best.legal and best.verdict == ranked.verdict[0]


def for_framework(framework: str) -> Build:
    """Builds starved jobs for one framework."""

    def build(seed: int) -> Scenario:
        scenario = starved_scenario(seed)
        return dataclasses.replace(scenario, choices=dataclasses.replace(scenario.choices, framework=framework))

    return build


BUILDS = {framework: for_framework(framework) for framework in FRAMEWORK_CHOICES}


def ranked_rows(seed: int, framework: str) -> set[tuple[int, ...]]:
    """The layouts that a starved job ranks for one framework."""
    result = outcome(BUILDS[framework], seed)
    assert result is not None
    return set(map(tuple, rows_of(result.ranked.layouts).tolist()))


def launchable(seed: int, framework: str) -> npt.NDArray[np.bool_]:
    """Which legal layouts of a starved job can be launched, whatever memory they need."""
    scenario = BUILDS[framework](seed)
    layouts = next(enumerate_layouts(without_floor(spec.problem(scenario))).pieces(1 << 40))
    return np.asarray(assign(scenario, layouts)[1] != -2)


@pytest.mark.parametrize("seed", range(8))
def test_a_framework_keeps_only_what_it_accepts(seed: int) -> None:
    for bit, framework in enumerate(FRAMEWORKS):
        result = outcome(BUILDS[framework], seed)
        assert result is not None
        assert np.all(result.ranked.frameworks >> bit & 1)
        assert set(result.ranked.stack.tolist()) <= {bit}


@pytest.mark.parametrize("seed", range(8))
def test_narrowing_only_drops_layouts_and_no_framework_at_all_drops_none(seed: int) -> None:
    physical = outcome(BUILDS["none"], seed)
    assert physical is not None and physical.funnel.dropped["launchable"] == 0
    assert ranked_rows(seed, "megatron")  # else the next line says nothing
    assert ranked_rows(seed, "megatron") <= ranked_rows(seed, "any") & ranked_rows(seed, "none")
    assert launchable(seed, "none").all()
    assert np.array_equal(launchable(seed, "any"), np.any([launchable(seed, framework) for framework in FRAMEWORKS], axis=0))


def test_the_same_question_has_the_same_answer() -> None:
    first, second = search(random_scenario(3)), search(random_scenario(3))
    np.testing.assert_array_equal(rows_of(first.ranked.layouts), rows_of(second.ranked.layouts))
    np.testing.assert_array_equal(first.ranked.step_seconds, second.ranked.step_seconds)


def test_when_nothing_fits_the_nearest_is_told_with_what_it_lacks(worked_example: Scenario) -> None:
    job = dataclasses.replace(worked_example.job, num_gpus=8, gpu=dataclasses.replace(worked_example.job.gpu, memory_bytes=20 * 2.0**30))
    with pytest.raises(NoLayoutFits) as nothing:
        search(dataclasses.replace(worked_example, job=job))
    nearest = nothing.value.result.nearest
    assert nearest is not None and nearest.need_bytes > job.gpu.memory_bytes


def test_a_batch_without_replicas_names_the_nearest_legal_ones(worked_example: Scenario) -> None:
    job = dataclasses.replace(worked_example.job, num_gpus=10_007)
    with pytest.raises(InputError, match=r"global_batch_size = 1024 .* nearest legal: 10007"):
        search(dataclasses.replace(worked_example, job=job))


def test_a_label_gives_its_layout_back(worked_example: Scenario) -> None:
    layouts = search(worked_example).ranked.layouts
    for row in range(0, len(layouts), len(layouts) // 50):
        layout = layouts.layout(row)
        assert complete_layout(worked_example, layout.label) == layout
