"""The refined shortlist: uneven splits only where they pay and launch, and nothing that is left out could overtake."""

from __future__ import annotations

import numpy as np
import pytest

from planner.cost.estimate import memory_of, time_of
from planner.frameworks.legality import framework_names, jobs_by_framework
from planner.refine import evenly, refined
from planner.refinement import bounds, can_split
from planner.request import Request, make_scenario
from planner.scenario import Scenario
from planner.search import SearchResult, search
from planner.simulated import step_of
from planner.split import best_split
from solver.layout import columns_of
from tests.builders import by_formula

LUMPY = {"model_shape": "layers=13,hidden=4096,heads=32,vocab=512000", "num_gpus": 16, "global_batch_size": 32, "virtual_pipeline": (1, 2)}
"""A head as heavy as several layers, and layers that no pipeline divides."""


def searched(**wishes: object) -> tuple[Scenario, SearchResult]:
    """A scenario and its search."""
    scenario = make_scenario(Request(**{**LUMPY, **wishes}))  # type: ignore[arg-type]
    return scenario, search(scenario)


@pytest.mark.parametrize("framework", ["any", "megatron", "none"])
def test_no_split_of_any_layout_leads_where_the_proof_is_closed(framework: str) -> None:
    pins = {"pipeline_parallel": (2, 4, 8), "micro_batch_size": (1, 2), "zero_stage": (1,), "tensor_parallel": (1, 2)}
    pins |= {"schedule": ("1f1b", "interleaved_1f1b")}
    scenario, result = searched(framework=framework, recompute=("none",), **pins)
    with by_formula():
        shortlist = refined(result, 5, prove=True)
    assert shortlist.executed is None and shortlist.proof is not None
    assert shortlist.proof.open == 0 and shortlist.proof.ranked == len(result.ranked)
    best = float(shortlist.rows.step_seconds[0])
    jobs, splittable = jobs_by_framework(scenario), can_split(result.ranked)
    for row in range(len(result.ranked)):
        seconds = float(result.ranked.step_seconds[row])
        if splittable[row]:
            split, _ = best_split(jobs[int(result.ranked.stack[row])], result.ranked.layouts.layout(row), even_step_seconds=seconds)
            seconds = min(seconds, float(split.step.total[0]) if split else seconds)
        if result.ranked.verdict[row] == 0:
            assert best <= seconds * (1 + 2e-3), result.ranked.layouts.layout(row).label


def test_the_shortlist_says_what_the_cost_model_says_of_each_split() -> None:
    scenario, result = searched(pipeline_parallel=(4,))
    shortlist = refined(result, 10)
    assert shortlist.executed is not None and any(shortlist.splits) and len(shortlist.rows) == len(shortlist.splits) == 10
    for row, split in enumerate(shortlist.splits):
        job, layout = shortlist.job(scenario, row), shortlist.rows.layouts.layout(row)
        x = columns_of([layout])
        assert step_of(job, layout).total[0] == pytest.approx(shortlist.rows.step_seconds[row], rel=1e-12)
        assert time_of(job, x).total[0] == pytest.approx(shortlist.formula_seconds[row] or shortlist.rows.step_seconds[row], rel=1e-12)
        assert memory_of(job, x).need_bytes[0] == pytest.approx(shortlist.rows.need_bytes[row], rel=1e-12)
        assert split is None or (split.gain > 0 and split.even_step_seconds > shortlist.rows.step_seconds[row])


def test_refining_never_makes_the_first_layout_slower() -> None:
    for pipeline in (1, 2, 4, 8):
        _, result = searched(pipeline_parallel=(pipeline,))
        assert refined(result, 3).rows.step_seconds[0] <= result.ranked.step_seconds[0]


def test_a_layout_with_uneven_stages_names_only_frameworks_that_run_them() -> None:
    _, result = searched(pipeline_parallel=(4,))
    shortlist = refined(result, 10)
    for row, split in enumerate(shortlist.splits):
        names = framework_names(int(shortlist.rows.frameworks[row]))
        assert names and (split is None or "deepspeed" not in names)


def test_deepspeed_cuts_by_its_own_rule_so_nothing_is_split() -> None:
    _, result = searched(framework="deepspeed", pipeline_parallel=(4,))
    shortlist = refined(result, 5)
    assert not any(shortlist.splits) and shortlist.proof is not None and shortlist.proof.split == 0


def test_every_ranked_layout_takes_at_least_its_bound() -> None:
    scenario, result = searched()
    wanted = can_split(result.ranked)
    found = bounds(scenario, result.ranked, wanted)
    assert np.all(found[wanted] <= result.ranked.step_seconds[wanted]) and np.all(np.isinf(found[~wanted]))


def test_the_even_shortlist_is_the_search_as_it_is_where_formulas_know_the_fill() -> None:
    _, result = searched(virtual_pipeline=(1,))
    shortlist = evenly(result, 4)
    assert np.array_equal(shortlist.rows.step_seconds, result.ranked.step_seconds[:4])
    assert shortlist.proof is None and not any(shortlist.splits)
