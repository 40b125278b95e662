"""Steps timed by executing their schedule: what the simulation makes of one layout, and of a shortlist."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass

import numpy as np

from planner.cost.estimate import time_of
from planner.cost.step import StepSeconds, between_seconds, stragglers
from planner.cost.timeline import KINDS, Timeline, timeline_of
from planner.rank import order
from planner.refine import Shortlist
from planner.scenario import Job, Scenario
from planner.search import Scored
from solver.layout import Layout, columns_of, num_micro_batches

TOLERATED = 0.01
"""Share of a step by which the formula may differ from the simulation before the simulation replaces it."""


@dataclass(frozen=True)
class Retimed:
    """A shortlist whose steps are the simulation's where the formula is off, in the order that they then have."""

    shortlist: Shortlist
    formula_seconds: tuple[float | None, ...]
    """For each row the step by the formula, where the simulation replaced it; None where it stands."""

    @property
    def changed(self) -> int:
        """Rows that the simulation timed."""
        return sum(seconds is not None for seconds in self.formula_seconds)


def simulated_step(job: Job, layout: Layout) -> StepSeconds:
    """The step of a layout with the simulation's waiting in place of the formula's fill: one row.

    Its total is the timeline's. The transfers are those that the slowest stage waits for, the bubble its idle time; all
    other parts are the formula's. Without a pipeline there is nothing to simulate.
    """
    step = time_of(job, columns_of([layout]))
    return step if layout.pipeline_parallel == 1 else with_timeline(job, layout, step, timeline_of(job, layout))


def with_timeline(job: Job, layout: Layout, step: StepSeconds, timeline: Timeline) -> StepSeconds:
    """The formula's step with the bubble and the total of a timeline."""
    slow, m = 1.0 + stragglers(job), num_micro_batches(layout, job.global_batch_size)
    fixed = m * between_seconds(job, columns_of([layout]))[1]
    worked = step.compute + step.imbalance + step.recompute + step.launch + step.tensor + step.context + step.expert + step.sharding
    sent = timeline.kind == KINDS.index("communication")
    took = (timeline.end_seconds - timeline.start_seconds) / slow
    inside = sent | ~np.isin(timeline.kind, [KINDS.index(kind) for kind in ("gradients", "optimizer")])
    busy, waits = (np.bincount(timeline.stage[rows], weights=took[rows], minlength=layout.pipeline_parallel) for rows in (inside, sent))
    slowest = int(np.argmin(np.abs(busy - waits - worked[0] - fixed[0])))
    pipeline = timeline.pipeline_seconds / slow
    return dataclasses.replace(
        step,
        pipeline=np.array([waits[slowest]]),
        bubble=pipeline - worked - fixed - waits[slowest],
        overhead=fixed + (slow - 1.0) * pipeline,
    )


def with_simulation(scenario: Scenario, shortlist: Shortlist, sort: str = "step") -> Retimed:
    """The shortlist with those rows timed by the simulation whose step it puts further off than is tolerated, sorted again."""
    rows = shortlist.rows
    columns = {name: getattr(rows, name).copy() for name in ("step_seconds", "bubble_seconds", "exposed_seconds")}
    formula: list[float | None] = [None] * len(rows)
    for row in np.flatnonzero(rows.layouts.pipeline_parallel > 1).tolist():
        step = simulated_step(shortlist.job(scenario, row), rows.layouts.layout(row))
        known = float(rows.step_seconds[row])
        if abs(float(step.total[0]) / known - 1.0) > TOLERATED:
            formula[row] = known
            for name, seconds in (("step", step.total), ("bubble", step.bubble), ("exposed", step.exposed_communication)):
                columns[f"{name}_seconds"][row] = seconds[0]
    timed: Scored = dataclasses.replace(rows, **columns)
    first = order(scenario, timed, sort)
    again = Shortlist(timed.take(first), tuple(shortlist.splits[row] for row in first), shortlist.proof)
    return Retimed(again, tuple(formula[row] for row in first))
