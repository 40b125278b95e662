"""The executed schedules: that they are executed as they must be, and what they say of the formulas' fill and holdings."""

from __future__ import annotations

import dataclasses
import time

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from planner.cost.arrays import Floats
from planner.cost.orders import Action
from planner.cost.plan import ACTIONS, Plan, plan_for, plan_of, simulate, span
from planner.cost.schedules import SCHEDULES, fills
from planner.cost.stages import stage_of_chunk
from planner.cost.step import step_seconds, stragglers
from planner.cost.timeline import KINDS, ChunkSeconds, timeline_of
from planner.request import Request, make_scenario
from planner.scenario import Job
from planner.simulated import executed_step, fill_transfers
from solver.layout import V_SHAPED, Ints, Layout, columns_of, num_micro_batches

PLAIN = ("gpipe", "1f1b", "interleaved_1f1b")


@dataclasses.dataclass(frozen=True)
class Case:
    """A schedule and the sizes of its pipeline."""

    schedule: str
    micro_batches: int
    stages: int
    chunks: int

    @property
    def plan(self) -> Plan:
        return plan_for(self.schedule, self.micro_batches, self.stages, self.chunks)

    @property
    def owner(self) -> Ints:
        """Stage of each chunk."""
        return stage_of_chunk(self.stages, self.chunks, self.schedule in V_SHAPED)


@st.composite
def cases(draw: st.DrawFn, schedules: tuple[str, ...] = tuple(SCHEDULES), few: bool = True) -> Case:
    """Pipelines that the solver's rules allow; ``few``: also with fewer micro-batches than stages."""
    schedule, stages = draw(st.sampled_from(schedules)), draw(st.integers(2, 7))
    chunks = draw(st.integers(2, 4)) if schedule == "interleaved_1f1b" else 2 if schedule in V_SHAPED else 1
    least = {"interleaved_1f1b": stages, "dualpipe": 2 * stages}.get(schedule, 1 if few else stages)
    return Case(schedule, draw(st.integers(least, 4 * stages)), stages, chunks)


def seconds_of(forward: Floats, gradient: Floats, weight: Floats) -> ChunkSeconds:
    """Chunks without recompute, between which nothing is waited for."""
    nothing = np.zeros_like(forward)
    return ChunkSeconds(forward, gradient, weight, nothing, nothing, nothing)


def equal(case: Case, forward: float = 1.0, gradient: float = 1.0, weight: float = 1.0) -> ChunkSeconds:
    """Stages of the same seconds, chunks too."""
    ones = np.ones(case.stages * case.chunks) / case.chunks
    return seconds_of(forward * ones, gradient * ones, weight * ones)


def uneven(case: Case, seed: int) -> ChunkSeconds:
    """Chunks of any seconds."""
    draw = np.random.default_rng(seed)
    return seconds_of(*draw.uniform(0.2, 2.0, (3, case.stages * case.chunks)))


def makespan(case: Case, seconds: ChunkSeconds, arrival: float = 0.0) -> float:
    """Until the last end."""
    start, end = simulate(case.plan, seconds.of(case.plan), arrival)
    return span(case.plan, start, end, staggered=False)


def formula(case: Case, seconds: ChunkSeconds) -> float:
    """The longest stage and its fill, as the step's formula has them."""
    forward = np.bincount(case.owner, seconds.forward)
    backward = np.bincount(case.owner, seconds.input + seconds.weight)
    around, m, p, v = float((forward + backward).sum()), case.micro_batches, case.stages, case.chunks
    found = [fills(case.schedule, f, b, around, m, p, v, residue=0.0, synchronised=True) for f, b in zip(forward, backward)]
    return float(max(m * (f + b) + max(fill) for f, b, fill in zip(forward, backward, found)))


times = st.floats(0.1, 3.0)


@given(cases(), st.integers(0, 2**32 - 1), st.floats(0.0, 1.0))
def test_every_action_runs_once_after_what_it_needs_and_no_stage_does_two_at_a_time(case: Case, seed: int, arrival: float) -> None:
    plan = case.plan
    took = uneven(case, seed).of(plan)
    start, end = simulate(plan, took, arrival)
    columns = (plan.kind.tolist(), plan.chunk.tolist(), plan.micro_batch.tolist())
    rows = {(ACTIONS[kind], chunk, batch): row for row, (kind, chunk, batch) in enumerate(zip(*columns))}
    assert len(rows) == len(plan)
    last = case.stages * case.chunks - 1
    gradient = {key[1:]: row for key, row in rows.items() if key[0] in "BI"}
    assert len(gradient) == sum(key[0] == "F" for key in rows) == (last + 1) * case.micro_batches
    assert sum(key[0] == "W" for key in rows) == sum(key[0] == "I" for key in rows)
    slack = 1e-9
    for (kind, chunk, batch), row in rows.items():
        assert plan.stage[row] == case.owner[chunk]
        needs = {"F": rows.get(("F", chunk - 1, batch)), "W": rows.get(("I", chunk, batch))}
        needed = needs.get(kind, gradient.get((chunk + 1, batch), rows[("F", chunk, batch)]))
        if kind in "BI":
            assert start[row] >= end[rows["F", chunk, batch]] - slack
        if needed is not None:
            far = plan.stage[needed] != plan.stage[row]
            assert start[row] >= end[needed] + far * arrival - slack
    for stage in range(case.stages):
        own = np.flatnonzero(plan.stage == stage)
        own = own[np.argsort(start[own], kind="stable")]
        assert np.all(start[own][1:] >= end[own][:-1] - slack)


@given(cases(), st.integers(0, 2**32 - 1), st.data())
def test_a_longer_part_never_shortens_the_step(case: Case, seed: int, data: st.DataObject) -> None:
    took = uneven(case, seed).of(case.plan)
    longer = took.copy()
    longer[data.draw(st.integers(0, len(took) - 1))] *= 1.5
    arrival = data.draw(st.floats(0.0, 1.0))
    assert np.all(simulate(case.plan, longer, arrival)[1] >= simulate(case.plan, took, arrival)[1] - 1e-9)
    assert np.all(simulate(case.plan, took, 2 * arrival)[1] >= simulate(case.plan, took, arrival)[1] - 1e-9)


@given(cases(PLAIN), times, times, times)
def test_the_fill_of_gpipe_and_1f1b_interleaved_or_not_is_exact_for_equal_stages(case: Case, f: float, i: float, w: float) -> None:
    seconds = equal(case, f, i, w)
    assert makespan(case, seconds) == pytest.approx(formula(case, seconds), rel=1e-9)


@given(cases(("gpipe",)), st.integers(0, 2**32 - 1), times)
def test_the_fill_of_gpipe_is_exact_for_stages_of_any_size_and_one_ratio_of_backward_to_forward(
    case: Case, seed: int, ratio: float
) -> None:
    forward = np.random.default_rng(seed).uniform(0.2, 2.0, case.stages)
    seconds = seconds_of(forward, ratio * forward / 2, ratio * forward / 2)
    assert makespan(case, seconds) == pytest.approx(formula(case, seconds), rel=1e-9)


@given(cases(("1f1b",)), st.integers(0, 2**32 - 1))
def test_the_fill_of_1f1b_is_never_too_short_for_unequal_stages(case: Case, seed: int) -> None:
    assert makespan(case, uneven(case, seed)) <= formula(case, uneven(case, seed)) * (1 + 1e-9)


@pytest.mark.parametrize(
    ("stages", "lengths"), [(4, (1.0, 2.0)), (8, (2.0, 1.0)), (4, (1.0, 2.0, 2.0)), (16, (1.0, 1.0, 1.0, 2.0, 1.0, 1.0, 1.0))]
)
def test_interleaved_chunks_of_unequal_length_wait_in_every_round_which_the_fill_does_not_know(
    stages: int, lengths: tuple[float, ...]
) -> None:
    forward = np.repeat(lengths, stages)  # every stage has the same chunks, a round of micro-batches passes one after another
    seconds = seconds_of(forward, forward, forward)
    few, many = (Case("interleaved_1f1b", rounds * stages, stages, len(lengths)) for rounds in (4, 8))
    steady = (makespan(many, seconds) - makespan(few, seconds)) / (4 * stages * 3 * sum(lengths))
    assert makespan(few, seconds) > 1.03 * formula(few, seconds)
    assert steady > 1.02


@given(cases(("zero_bubble_h1",), few=False), times, times)
def test_the_fill_of_zero_bubble_h1_is_exact_for_equal_stages_and_halves_no_shorter_than_the_forward(
    case: Case, f: float, more: float
) -> None:
    seconds = equal(case, f, f + more, f + more)
    assert makespan(case, seconds) == pytest.approx(formula(case, seconds), rel=1e-9)


@given(cases(("dualpipe",)), times, times)
def test_the_fill_of_dualpipe_is_exact_for_equal_stages_and_halves_no_shorter_than_the_forward(case: Case, f: float, more: float) -> None:
    seconds = equal(case, f, f + more, f + more)
    assert makespan(case, seconds) == pytest.approx(formula(case, seconds), rel=1e-9)


@given(cases(("zero_bubble_v",)), times)
def test_zero_bubble_v_has_no_bubble_for_equal_passes_and_enough_micro_batches_if_no_stage_waits_at_the_end(case: Case, f: float) -> None:
    case = dataclasses.replace(case, micro_batches=case.micro_batches + 2 * case.stages - 1)
    seconds = equal(case, f, f, f)
    assert makespan(case, seconds) == pytest.approx(formula(case, seconds), rel=1e-9)  # p - 1 half forwards
    start, end = simulate(case.plan, seconds.of(case.plan))
    assert span(case.plan, start, end, staggered=True) == pytest.approx(3 * f * case.micro_batches, rel=1e-9)


LAWS = {
    "zero_bubble_h1": lambda f, i, w: max(f, i, f + i - w),
    "zero_bubble_v": lambda f, i, w: max(f / 2, i / 2, i - w),
    "dualpipe": lambda f, i, w: (f + max(f, i) + max(0.0, i - w)) / 2,
}
"""Idle seconds of a pipeline of two equal stages, of one of p times p - 1: for forward, input and weight gradient of a stage.

The first is table 1 of Qi et al. 2023, (p - 1)(F + I - W), the last table 2 of DeepSeek-AI 2024, (p - 1)(F&B + B - 3 W), both
where the halves are no shorter than what they are to hide.
"""


@given(cases(tuple(LAWS), few=False), times, times, times)
def test_halves_of_unequal_length_leave_the_bubble_that_the_schedules_authors_state(case: Case, f: float, more: float, w: float) -> None:
    i = max(f, w) + more - 0.1
    if case.schedule == "zero_bubble_v":
        case = dataclasses.replace(case, micro_batches=case.micro_batches + case.stages - 1)
    found = makespan(case, equal(case, f, i, w)) - case.micro_batches * (f + i + w)
    assert found == pytest.approx((case.stages - 1) * LAWS[case.schedule](f, i, w), rel=1e-6, abs=1e-6)


@given(cases(("gpipe", "1f1b")), st.integers(0, 2**32 - 1), times, times)
def test_gpipe_takes_as_long_as_1f1b_for_equal_stages(case: Case, seed: int, f: float, b: float) -> None:
    other = dataclasses.replace(case, schedule="gpipe" if case.schedule == "1f1b" else "1f1b")
    assert makespan(case, equal(case, f, b / 2, b / 2)) == pytest.approx(makespan(other, equal(case, f, b / 2, b / 2)), rel=1e-9)


@pytest.mark.parametrize("schedule", ["gpipe", "1f1b", "zero_bubble_h1", "zero_bubble_2p", "zero_bubble_v", "dualpipe"])
def test_one_stage_never_waits(schedule: str) -> None:
    case = Case(schedule, 5, 1, 2 if schedule in V_SHAPED else 1)
    assert makespan(case, equal(case, 1.0, 0.7, 0.4)) == pytest.approx(5 * 2.1)


HELD_MORE = {"zero_bubble_2p": 1.0}
"""Stage-loads by which the formula of what a schedule holds, fitted on peaks, exceeds what its order holds."""


@given(cases())
def test_no_stage_holds_more_micro_batches_than_the_memory_formula_counts(case: Case) -> None:
    if case.schedule == "zero_bubble_v" and case.micro_batches < 2 * case.stages - 1:
        return  # the formula's count is the fullest stage's of a full pipeline
    held = [_most_held(case.plan, stage) / case.chunks for stage in range(case.stages)]
    formula = [float(SCHEDULES[case.schedule].in_flight(case.micro_batches, case.stages, case.chunks, r)) for r in range(case.stages)]
    assert all(h <= f + 1e-9 for h, f in zip(held, formula))
    if case.schedule in PLAIN:
        assert held == pytest.approx(formula)
    elif case.micro_batches >= 2 * case.stages:
        assert max(held) == pytest.approx(max(formula) - HELD_MORE.get(case.schedule, 0.0))


def _most_held(plan: Plan, stage: int) -> int:
    """The most chunk passes of a stage whose last gradient is still to come."""
    kinds = plan.kind[plan.stage == stage]  # a plan keeps the order of every stage
    return int(np.max(np.cumsum(np.select([kinds == ACTIONS.index(kind) for kind in "FBW"], [1, -1, -1]))))


def test_orders_that_wait_for_each_other_are_told() -> None:
    stuck = [[Action("B", 0, 0), Action("F", 0, 0)], [Action("F", 1, 0), Action("B", 1, 0)]]
    with pytest.raises(RuntimeError, match="deadlock: stage 0"):
        plan_of(stuck)


SCENARIO = make_scenario(Request(model="llama-3.1-8b", gpu="h100", num_gpus=64, seq_len=4096, global_batch_size=256))
JOB = SCENARIO.job_in("none")
LAYOUTS = [
    Layout(
        pipeline_parallel=4,
        data_parallel=16,
        zero_stage=1,
        schedule=name,
        virtual_pipeline=2 if name in (*V_SHAPED, "interleaved_1f1b") else 1,
    )
    for name in SCHEDULES
]


def test_the_layouts_of_these_tests_have_every_schedule_and_fit_the_batch() -> None:
    assert {layout.schedule for layout in LAYOUTS} == set(SCHEDULES)
    assert all(num_micro_batches(layout, JOB.global_batch_size) >= 8 for layout in LAYOUTS)


def jobs() -> list[tuple[Job, Layout]]:
    """Every schedule evenly, under a stated split, with a stated depth of recompute, without waiting at the end of a step."""
    uneven = dataclasses.replace(JOB, layers_per_stage=(9, 9, 8, 6))
    deep = dataclasses.replace(uneven, recomputed_per_stage=(3, 2, 0, 1))
    staggered = dataclasses.replace(JOB, software=dataclasses.replace(JOB.software, post_validation=True))
    whole = [dataclasses.replace(layout, recompute="full", recompute_layers=4) for layout in LAYOUTS]
    alone = Layout(data_parallel=64, zero_stage=1)
    every = [(job, layout) for job in (JOB, uneven, staggered) for layout in LAYOUTS]
    return [*every, *((JOB, layout) for layout in whole), *((deep, layout) for layout in whole), (JOB, alone)]


@pytest.mark.parametrize(("job", "layout"), jobs())
def test_busy_and_idle_seconds_sum_to_the_step_and_no_two_events_of_a_stage_overlap(job: Job, layout: Layout) -> None:
    found = timeline_of(job, layout)
    assert found.num_stages == layout.pipeline_parallel
    busy = found.busy_seconds()
    for stage in range(found.num_stages):
        own = found.take(found.stage == stage)
        assert np.all(own.start_seconds[1:] >= own.end_seconds[:-1] - 1e-9)
        assert own.end_seconds[-1] - own.start_seconds[0] <= found.total_seconds + 1e-9
        assert found.idle_seconds(stage) == pytest.approx(found.total_seconds - busy[stage])
        assert found.idle_seconds(stage) >= -1e-9
    assert set(np.unique(found.kind)) <= set(range(len(KINDS)))


@pytest.mark.parametrize(("job", "layout"), jobs())
def test_the_stages_of_a_timeline_do_what_the_formula_counts(job: Job, layout: Layout) -> None:
    found, step = timeline_of(job, layout), step_seconds(job, columns_of([layout]))
    took = found.end_seconds - found.start_seconds
    m = num_micro_batches(layout, job.global_batch_size)
    forwards = found.kind == KINDS.index("forward")
    assert int(forwards.sum()) == m * layout.pipeline_parallel * layout.virtual_pipeline
    works = ~np.isin(found.kind, [KINDS.index(kind) for kind in ("communication", "gradients", "optimizer")])
    slow = 1.0 + job.physics.straggler * np.log2(job.num_gpus / job.fast_domain)
    busiest = float(np.bincount(found.stage[works], weights=took[works]).max()) / slow
    fixed = job.physics.micro_batch_seconds if layout.pipeline_parallel > 1 else job.physics.micro_batch_no_pipeline_seconds
    counted = float((step.total - step.bubble - step.pipeline - step.data - step.optimizer - step.overhead)[0])
    assert busiest == pytest.approx(counted + m * fixed, rel=1e-3)
    for kind, part in (("gradients", step.data), ("optimizer", step.optimizer)):
        assert took[found.kind == KINDS.index(kind)].sum() == pytest.approx(layout.pipeline_parallel * float(part[0]))


@pytest.mark.parametrize(("job", "layout"), jobs())
def test_an_executed_step_is_its_timeline_and_the_transfers_of_the_fill_and_has_no_negative_part(job: Job, layout: Layout) -> None:
    step, timeline = executed_step(job, layout), timeline_of(job, layout)
    staged = layout.pipeline_parallel > 1
    filled = fill_transfers(job, layout) * (1.0 + stragglers(job)) if staged else 0.0
    assert float(step.total[0]) == pytest.approx(timeline.total_seconds + filled, rel=1e-6 if staged else 1e-3)
    assert all(float(getattr(step, field.name)[0]) >= -1e-9 for field in dataclasses.fields(step))


@pytest.mark.parametrize("layout", [layout for layout in LAYOUTS if layout.schedule in PLAIN], ids=lambda layout: layout.schedule)
def test_formula_and_simulation_of_a_step_agree_within_one_percent_for_even_stages(layout: Layout) -> None:
    light_ends = dataclasses.replace(JOB, model=dataclasses.replace(JOB.model, vocab_size=1024))
    simulated = timeline_of(light_ends, layout).total_seconds
    assert simulated == pytest.approx(float(step_seconds(light_ends, columns_of([layout])).total[0]), rel=0.01)


def test_large_pipelines_are_simulated_in_no_time() -> None:
    started = time.process_time()
    case = Case("interleaved_1f1b", 256, 16, 2)
    assert len(case.plan) == 16384 and makespan(case, equal(case)) > 0
    assert time.process_time() - started < 1.0
