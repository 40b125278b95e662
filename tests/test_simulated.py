"""One step per layout: every command prints the same, executed where no formula knows the fill, and lists are in its order."""

from __future__ import annotations

import dataclasses
import functools
from pathlib import Path

import numpy as np
import pytest

from planner import load_scenario
from planner.cost.estimate import time_of
from planner.difference import compare
from planner.errors import NoLayoutFits
from planner.explain import explain
from planner.export import head_lines, target_of
from planner.frameworks.reading import read_config
from planner.measured import Run
from planner.refine import Shortlist, costing_job, evenly, on_front, pareto_of, ranking, shortlist_of
from planner.refinement import MOST_EXECUTED, NEAR, Refinement
from planner.report.text import executed_line
from planner.request import Request, make_scenario
from planner.scenario import Scenario
from planner.search import SearchResult, search, searched
from planner.simulated import executed_step, inexact, step_of, steps_of
from planner.targets import met
from planner.validate import predict
from planner.verdict import check
from planner.why_not import why_not
from solver.layout import Layout, columns_of
from tests.builders import by_formula

ZERO_BUBBLE = ("zero_bubble_h1", "zero_bubble_v", "dualpipe", "1f1b", "interleaved_1f1b")

SCENARIOS = Path(__file__).parents[1] / "scenarios"

QUESTIONS = {
    "chunks that no pipeline divides": {"model": "llama-3.1-405b", "num_gpus": 1024, "global_batch_size": 512, "seq_len": 8192},
    "zero-bubble": {"model": "llama-3.1-8b", "num_gpus": 64, "framework": "none", "pipeline_parallel": (4, 8), "schedule": ZERO_BUBBLE},
    "uneven splits": {"model_shape": "layers=13,hidden=4096,heads=32,vocab=512000", "num_gpus": 16, "pipeline_parallel": (2, 4)},
}


@functools.cache
def asked(name: str) -> tuple[Scenario, SearchResult, Shortlist]:
    """A question, its search and its shortlist."""
    wishes = {"gpu": "h100", "seq_len": 4096, "global_batch_size": 256, **QUESTIONS[name]}
    scenario = make_scenario(Request(**wishes))  # type: ignore[arg-type]
    result = search(scenario)
    return scenario, result, shortlist_of(result, 10)


@pytest.mark.parametrize("name", QUESTIONS)
def test_every_command_prints_the_step_that_the_search_prints(name: str) -> None:
    scenario, _, shortlist = asked(name)
    first = shortlist.rows.layouts.layout(0)
    assert np.any(inexact(shortlist.rows.layouts))
    for row in range(len(shortlist.rows)):
        layout, seconds = shortlist.rows.layouts.layout(row), pytest.approx(float(shortlist.rows.step_seconds[row]), rel=1e-12)
        found = explain(scenario, layout)
        assert found.step is not None and float(found.step.total[0]) == seconds
        assert found.split == shortlist.splits[row] or (
            found.split and found.split.layers_per_stage == shortlist.splits[row].layers_per_stage
        )  # type: ignore[union-attr]
        compared = compare(scenario, first.label, layout.label).difference
        assert compared is not None and compared.b.step_seconds == seconds


@pytest.mark.parametrize("name", QUESTIONS)
def test_why_not_ranks_and_times_a_layout_as_the_search_does(name: str) -> None:
    pinned = asked(name)[0]
    scenario = dataclasses.replace(pinned, choices=dataclasses.replace(pinned.choices, pins={}))  # as the answer lifts them
    shortlist = shortlist_of(search(scenario), 10)
    for row in (1, len(shortlist.rows) - 1):
        found = why_not(scenario, shortlist.rows.layouts.layout(row))
        assert found.rank == row + 1 and found.winner is not None and found.difference is not None
        assert found.winner.step_seconds == float(shortlist.rows.step_seconds[0])
        assert found.difference.b.step_seconds == pytest.approx(float(shortlist.rows.step_seconds[row]), rel=1e-12)
        near = found.neighbour
        if near is not None:
            own = float(step_of(costing_job(scenario, near.layout)[0], near.layout).total[0])
            assert near.step_seconds == pytest.approx(own, rel=2e-3)  # under the even split, where no better one was sought


def test_a_checked_and_an_exported_configuration_of_unequal_chunks_are_executed(tmp_path: Path) -> None:
    flags = (
        "--num-layers 32 --hidden-size 4096 --ffn-hidden-size 14336 --num-attention-heads 32 --swiglu --vocab-size 128256 "
        "--seq-length 4096 "
        "--max-position-embeddings 4096 --bf16 --micro-batch-size 1 --global-batch-size 128 --tensor-model-parallel-size 2 "
        "--pipeline-model-parallel-size 4 --num-layers-per-virtual-pipeline-stage 2 --use-distributed-optimizer --sequence-parallel"
    )
    path = tmp_path / "launch.sh"
    path.write_text(f"export CUDA_DEVICE_MAX_CONNECTIONS=1\ntorchrun pretrain_gpt.py {flags}\n")
    found = check(read_config(path, 64), Request(num_gpus=64))
    own = found.planned
    assert found.explanation.step is not None and inexact(columns_of([own.layout]))[0]
    assert float(found.explanation.step.total[0]) == float(executed_step(found.explanation.job, own.layout).total[0])
    scenario, _, shortlist = asked("chunks that no pipeline divides")
    target = target_of(scenario, "megatron", shortlist.rows.layouts.layout(0))
    assert f"expected: {float(step_of(target.job, target.layout).total[0]):.4g} s per step" in head_lines(target, "megatron")[2]


@pytest.mark.parametrize("name", QUESTIONS)
def test_a_shortlist_is_in_the_order_of_executed_steps_and_no_near_formula_was_left_out(name: str) -> None:
    scenario, result, shortlist = asked(name)
    rows, known = shortlist.rows, shortlist.executed
    assert known is not None and known.number <= MOST_EXECUTED + 8
    assert list(zip(rows.verdict, rows.step_seconds, strict=True)) == sorted(zip(rows.verdict, rows.step_seconds, strict=True))
    for row, formula in enumerate(shortlist.formula_seconds):
        job, layout = shortlist.job(scenario, row), rows.layouts.layout(row)
        assert (formula is not None) == bool(inexact(columns_of([layout]))[0])
        assert float(rows.step_seconds[row]) == float(step_of(job, layout).total[0])
        assert (formula or float(rows.step_seconds[row])) == pytest.approx(float(time_of(job, columns_of([layout])).total[0]))
    if known.complete:
        near = result.ranked.take(np.flatnonzero(inexact(result.ranked.layouts) & (result.ranked.verdict == rows.verdict[0])))
        near = near.take(np.flatnonzero(near.step_seconds <= NEAR * rows.step_seconds[0]))
        for row in range(len(near)):
            job = Refinement(scenario, near).jobs[int(near.stack[row])]
            assert float(step_of(job, near.layouts.layout(row)).total[0]) >= rows.step_seconds[0] * (1 - 1e-9)


def test_405b_is_planned_with_four_chunks_per_stage_though_the_formula_says_seven() -> None:
    scenario = load_scenario(SCENARIOS / "405b-16384.toml")
    shortlist = shortlist_of(search(scenario), 10)
    assert shortlist.executed is not None and shortlist.executed.leader is not None
    assert shortlist.executed.leader.virtual_pipeline == 7 and shortlist.rows.layouts.layout(0).virtual_pipeline == 4
    assert shortlist.executed.farthest > 0.1
    line = executed_line(shortlist)
    assert f"{shortlist.executed.number} pipelines" in line and "would lead" in line and "moved by over 1%" in line


@pytest.mark.parametrize("sort", ["step", "memory", "cost"])
def test_targets_hold_for_the_executed_step_of_all_that_is_shown(sort: str) -> None:
    scenario, result, shortlist = asked("chunks that no pipeline divides")
    formula, executed = float(result.ranked.step_seconds[0]), float(shortlist.rows.step_seconds[0])
    assert formula < executed
    for limit, possible in ((1.02 * executed, True), ((formula + executed) / 2, False)):
        choices = dataclasses.replace(scenario.choices, max_step_seconds=limit)
        wanted = dataclasses.replace(scenario, choices=choices)
        shown = shortlist_of(searched(wanted, sort), 10, sort=sort)
        assert (len(shown.rows) > 0) == possible
        assert np.all(shown.rows.step_seconds <= limit) and np.all(met(wanted, shown.rows))
        for row in range(len(shown.rows)):
            assert float(shown.rows.step_seconds[row]) == float(step_of(shown.job(wanted, row), shown.rows.layouts.layout(row)).total[0])


@pytest.mark.parametrize("name", QUESTIONS)
def test_the_front_shows_executed_steps_and_no_shown_layout_beats_another(name: str) -> None:
    scenario, result, shortlist = asked(name)
    shown = pareto_of(result, 20)
    goals = np.stack([shown.rows.step_seconds, shown.rows.need_bytes], axis=1)
    for row in range(len(goals)):
        assert not np.any(np.all(goals <= goals[row], axis=1) & np.any(goals < goals[row], axis=1))
        job, layout = shown.job(scenario, row), shown.rows.layouts.layout(row)
        assert float(shown.rows.step_seconds[row]) == float(step_of(job, layout).total[0])
    assert on_front(result, shortlist.rows)[0] and np.all(on_front(result, shown.rows))


@pytest.mark.parametrize("name", QUESTIONS)
def test_a_ranking_holds_every_layout_and_begins_as_the_shortlist_does(name: str) -> None:
    _, result, shortlist = asked(name)
    every = ranking(result)
    assert len(every) == len(result.ranked)
    assert every.layouts.layout(0) == shortlist.rows.layouts.layout(0)
    assert every.step_seconds[0] == shortlist.rows.step_seconds[0]


def test_long_lists_hold_what_was_not_executed_behind_the_best() -> None:
    _, result, _ = asked("zero-bubble")
    shown = evenly(result, 1000)
    assert len(shown.rows) == min(1000, len(result.ranked))
    assert shown.rows.step_seconds[0] == evenly(result, 10).rows.step_seconds[0]


def test_a_stage_that_runs_alone_or_one_forward_one_backward_keeps_its_formula() -> None:
    scenario, _, _ = asked("zero-bubble")
    job = scenario.job_in("none")
    for layout in (Layout(data_parallel=64, zero_stage=1), Layout(pipeline_parallel=4, data_parallel=16, zero_stage=1)):
        x = columns_of([layout])
        assert not inexact(x)[0] and float(step_of(job, layout).total[0]) == float(time_of(job, x).total[0])
        assert float(executed_step(job, layout).total[0]) == pytest.approx(float(time_of(job, x).total[0]), rel=0.01)
    mixed = columns_of([Layout(pipeline_parallel=4, data_parallel=16), Layout(pipeline_parallel=4, virtual_pipeline=3, data_parallel=16)])
    assert steps_of(job, mixed).tolist() == [float(step_of(job, mixed.layout(row)).total[0]) for row in range(2)]


def test_equal_chunks_take_as_long_executed_as_by_the_formula() -> None:
    job = asked("zero-bubble")[0].job_in("none")
    light = dataclasses.replace(job, model=dataclasses.replace(job.model, vocab_size=1024))
    for chunks in (1, 2, 4, 8):
        layout = Layout(
            pipeline_parallel=4, virtual_pipeline=chunks, data_parallel=16, schedule="interleaved_1f1b" if chunks > 1 else "1f1b"
        )
        formula = float(time_of(light, columns_of([layout])).total[0])
        assert float(executed_step(light, layout).total[0]) == pytest.approx(formula, rel=5e-3)


def test_many_micro_batches_follow_from_the_rounds_that_are_executed(monkeypatch: pytest.MonkeyPatch) -> None:
    job = dataclasses.replace(asked("zero-bubble")[0].job_in("none"), global_batch_size=16 * 256)
    for chunks, schedule in ((3, "interleaved_1f1b"), (1, "zero_bubble_h1"), (2, "zero_bubble_v"), (2, "dualpipe")):
        layout = Layout(pipeline_parallel=4, virtual_pipeline=chunks, data_parallel=16, schedule=schedule)
        short = float(executed_step(job, layout).total[0])
        monkeypatch.setattr("planner.cost.timeline.executed_micro_batches", lambda layout, m: (m, m))
        assert short == pytest.approx(float(executed_step(job, layout).total[0]), rel=1e-9)
        monkeypatch.undo()


def test_a_measured_run_is_predicted_by_the_same_rule() -> None:
    job = asked("zero-bubble")[0].job_in("none")
    layout = Layout(pipeline_parallel=4, virtual_pipeline=3, data_parallel=16, schedule="interleaved_1f1b")
    run = Run("a", "f", job, layout, True, False, 1.0, float("nan"), "", False)
    assert predict(run).step_seconds == float(step_of(job, layout).total[0])


def test_by_the_formula_alone_nothing_is_executed() -> None:
    _, result, _ = asked("zero-bubble")
    with by_formula():
        plain = shortlist_of(result, 10)
    assert plain.executed is None and not any(plain.formula_seconds)


def test_a_target_that_only_the_formula_meets_is_told_as_missed_by_the_fewest_gpus_too() -> None:
    from planner.fewest import attempt

    scenario, result, shortlist = asked("chunks that no pipeline divides")
    between = (float(result.ranked.step_seconds[0]) + float(shortlist.rows.step_seconds[0])) / 2
    for limit, possible in ((between, False), (1.02 * float(shortlist.rows.step_seconds[0]), True)):
        wanted = dataclasses.replace(scenario, choices=dataclasses.replace(scenario.choices, max_step_seconds=limit))
        found = attempt(wanted)
        assert found.fits == possible
        assert found.fits or (found.fastest is not None and found.fastest.step_seconds > limit)
    with pytest.raises(NoLayoutFits):
        search(dataclasses.replace(scenario, choices=dataclasses.replace(scenario.choices, max_step_seconds=0.01)))
