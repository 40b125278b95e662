"""The whole search on random small jobs: pruning loses nothing, and nothing illegal or too large is ranked."""

from __future__ import annotations

import dataclasses
import functools

import numpy as np
import pytest

from planner import spec
from planner.errors import InputError, NoLayoutFits
from planner.explain import complete_layout, explain
from planner.rank import order
from planner.scenario import Scenario
from planner.search import SearchResult, concatenate, enumerate_layouts, estimate, search
from solver import prune
from solver.layout import AXES
from tests.builders import random_scenario, rows_of, without_floor

SEEDS = range(40)


@functools.cache
def outcome(seed: int) -> SearchResult | None:
    """The result of a random job; None where its batch suits no replica count."""
    try:
        return search(random_scenario(seed))
    except NoLayoutFits as nothing:
        return nothing.result
    except InputError:
        return None


def test_the_random_jobs_cover_success_and_failure() -> None:
    found = [outcome(seed) for seed in SEEDS]
    sizes = [len(result.ranked) for result in found if result is not None]
    assert sum(size > 0 for size in sizes) > 15 and sum(size == 0 for size in sizes) > 2


@pytest.mark.parametrize("seed", SEEDS)
def test_pruning_never_changes_the_winner(seed: int) -> None:
    result = outcome(seed)
    if result is None:
        return
    scenario = result.scenario
    every = enumerate_layouts(without_floor(result.problem))
    scored = concatenate([fits for piece in every.pieces(1 << 14) for fits, _ in estimate(scenario, piece)])
    unpruned = scored.take(order(scenario, scored))
    np.testing.assert_array_equal(rows_of(unpruned.layouts), rows_of(result.ranked.layouts))  # so the floor drops nothing that fits


@pytest.mark.parametrize("seed", SEEDS)
def test_the_books_close_and_nothing_wrong_is_ranked(seed: int) -> None:
    result = outcome(seed)
    if result is None:
        return
    funnel, ranked = result.funnel, result.ranked
    assert funnel.space == sum(funnel.dropped.values()) + len(ranked)
    assert np.all(ranked.verdict < 2) and np.all(np.diff(ranked.verdict) >= 0)
    assert np.all(ranked.frameworks > 0)
    for verdict in (0, 1):
        seconds = ranked.step_seconds[ranked.verdict == verdict]
        assert np.all(np.diff(seconds) >= -1e-9) and np.all(seconds > 0)
    if len(ranked):
        best = explain(result.scenario, ranked.layouts.layout(0))
        assert best.legal and best.verdict == ranked.verdict[0]


def narrowed(scenario: Scenario, framework: str) -> SearchResult:
    """The scenario for one framework."""
    return search(dataclasses.replace(scenario, choices=dataclasses.replace(scenario.choices, framework=framework)))


def test_a_framework_keeps_only_what_it_accepts_and_none_keeps_more() -> None:
    scenario = next(r.scenario for r in map(outcome, SEEDS) if r is not None and len(r.ranked) > 200)
    for bit, framework in enumerate(("megatron", "torchtitan", "deepspeed")):
        assert np.all(narrowed(scenario, framework).ranked.frameworks >> bit & 1)
    physical = narrowed(scenario, "none")
    assert physical.funnel.dropped["launchable"] == 0


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


def test_partial_layouts_that_were_dropped_weigh_up_to_the_space() -> None:
    problem = spec.problem(random_scenario(5))
    total = 0
    for step in prune.walk(problem, {}, AXES):
        total += step.layouts if isinstance(step, prune.Dropped) else len(next(iter(step.values())))
    assert total == problem.space_size


def test_a_label_gives_its_layout_back(worked_example: Scenario) -> None:
    layouts = search(worked_example).ranked.layouts
    for row in range(0, len(layouts), len(layouts) // 50):
        layout = layouts.layout(row)
        assert complete_layout(worked_example, layout.label) == layout
