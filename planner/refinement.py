"""The layouts of a search whose uneven splits were sought and whose pipelines were executed so far, and which lead by what is known."""

from __future__ import annotations

import dataclasses
import math
from functools import cached_property

import numpy as np

from planner.cost.arrays import Floats
from planner.cost.memory import OUT_OF_MEMORY
from planner.cost.step import StepSeconds
from planner.cost.timeline import executed_micro_batches
from planner.frameworks import FRAMEWORKS, UNEVEN
from planner.frameworks.legality import NO_STACK, jobs_by_framework
from planner.rank import MEASURES, order
from planner.scenario import Job, Scenario
from planner.search import Scored
from planner.simulated import inexact, step_of
from planner.split import WORTHWHILE, Split, best_split, recomputes_all, with_split
from planner.splittable import RUNS_UNEVEN, least_steps
from planner.targets import longest_step, met, stated
from solver.layout import Ints, Layout, num_micro_batches

MOST_SPLIT = 50
"""Layouts of a shortlist that are split."""

MOST_RIVALS = 24
"""Layouts beyond it that are split to show that none overtakes, unless a proof is asked for: a limit that no clock moves."""

MOST_EXECUTED = 64
"""Layouts whose pipeline is executed event by event to find those that lead: a limit that no clock moves."""

MOST_MORE = 192
"""Layouts that are executed beyond them where too few meet the scenario's targets."""

MOST_ACTIONS = 1 << 20
"""Passes of a chunk that are executed for them in all: about a second."""

NEAR = 1.03
"""Layouts whose formula comes so near to the best known step are executed before anything is said to lead. Models of 32 layers and more
were found to be at most 2.6 % faster than their formula."""

AT_ONCE = 8
"""Layouts that are executed before it is asked again which are to be."""

BEHIND = 1e-6
"""Share of the best known step by which layouts that were not executed come behind it at least."""

MOST_CONSIDERED = 512
"""Layouts, in the order of the formula, among which the executed ones are sought."""


class Refinement:
    """The layouts of a search whose splits were sought, and whose pipelines were executed, so far."""

    def __init__(self, scenario: Scenario, ranked: Scored) -> None:
        self.scenario, self.ranked = scenario, ranked
        self.jobs = jobs_by_framework(scenario)
        self.splittable = can_split(ranked)
        self.splits: dict[int, Split] = {}
        self.open = inexact(ranked.layouts)
        """Layouts whose step may not be what it is said to be, until they are executed."""
        self.steps: dict[int, StepSeconds] = {}
        """Of the executed layouts."""
        self.actions = 0
        """Passes of chunks that were executed."""
        self.formula: dict[int, float] = {}
        """Seconds of their steps by the formula."""
        self.sought: set[int] = set()
        self.proven = 0
        self.best_step = min(ranked.step_seconds[ranked.verdict == ranked.verdict[:1]].tolist(), default=math.inf)
        self.meets = min(ranked.verdict[met(scenario, ranked)].tolist(), default=OUT_OF_MEMORY)
        """The best verdict of the layouts that are known to meet the scenario's targets; out of memory where none is."""

    @cached_property
    def bounds(self) -> Floats:
        """For each layout the step, by the formula, below which no split can bring it; infinite where none is sought."""
        return np.where(self.splittable, bounds(self.scenario, self.ranked, self.splittable), np.inf)

    def split(self, rows: Ints | list[int]) -> None:
        """Seek the best splits of some rows."""
        for row in rows:
            if not self.splittable[row] or int(row) in self.sought:
                continue
            self.sought.add(int(row))
            if self.bounds[row] >= self.ranked.step_seconds[row] * (1.0 - WORTHWHILE):
                self.proven += 1  # by the bound alone: no split gains what would make it worth while
                continue
            job, layout = self.jobs[int(self.ranked.stack[row])], self.ranked.layouts.layout(int(row))
            free = int(self.ranked.stack[row]) == NO_STACK and recomputes_all(layout, job.model.num_layers)
            split, status = best_split(job, layout, even_step_seconds=float(self.ranked.step_seconds[row]), free_recompute=bool(free))
            self.proven += status in ("optimal", "infeasible")
            if split is not None:
                self.splits[int(row)] = split
                if float(split.step.total[0]) <= longest_step(self.scenario, job):
                    self.meets = min(self.meets, split.verdict)
                if split.verdict <= int(self.ranked.verdict[0]):
                    self.best_step = min(self.best_step, float(split.step.total[0]))

    def shortlist(self, top: int, *, prove: bool = False) -> None:
        """Split the first ``top`` rows, then those that could overtake the best of them.

        All of those to prove it, else a first few. As long as none meets the scenario's targets, every layout that would lead
        if it did: even slower ones, for stacks differ in what their checkpoints leave of the time.
        """
        self.split(np.arange(min(top, MOST_SPLIT, len(self.ranked))))
        verdict = self.ranked.verdict
        for tried, row in enumerate(np.argsort(self.bounds, kind="stable")):
            overtakes, few = self.bounds[row] < self.best_step, tried < MOST_RIVALS or prove
            if self.meets <= verdict[0] and not (overtakes and few):
                break
            if verdict[row] < self.meets or (overtakes and few):
                self.split([int(row)])

    def candidates(self, top: int) -> Ints:
        """The rows among which the first ones are: by the formula, those that need no execution, and all that were split."""
        evenly_met = np.flatnonzero(met(self.scenario, self.ranked))
        number = top + len(self.splits)
        certain = evenly_met[~self.open[evenly_met]][:number]  # not to be crowded out by rows that are not executed
        split = np.array(sorted(self.splits), dtype=np.int64)
        return np.unique(np.concatenate([evenly_met[: number + MOST_CONSIDERED], certain, split]))

    def execute(self, rows: Ints) -> None:
        """Execute the pipelines of those rows that are open, under their splits where these still pay then."""
        for row in rows[self.open[rows]].tolist():
            job, layout, split = self.jobs[int(self.ranked.stack[row])], self.ranked.layouts.layout(row), self.splits.pop(row, None)
            timed = executed_split(job, layout, split, int(self.ranked.verdict[row])) if split else None
            if split is not None and timed is not None:
                self.splits[row], step, formula = timed, timed.step, float(split.step.total[0])
            else:
                step, formula = step_of(job, layout), float(self.ranked.step_seconds[row])
            self.steps[row], self.open[row] = step, False
            micro_batches = max(executed_micro_batches(layout, int(num_micro_batches(layout, job.global_batch_size))))
            self.actions += 2 * micro_batches * layout.pipeline_parallel * layout.virtual_pipeline
            self.formula[row] = formula

    def execute_leaders(self, pool: Ints, top: int, sort: str) -> None:
        """Execute those of some rows that would be among the first ones, or whose formula comes near the best known step.

        A few at a time, for each may move behind others; so many at most, and more only where too few of them meet the targets.
        """
        most, most_actions = len(self.steps) + MOST_EXECUTED, self.actions + MOST_ACTIONS
        while len(due := self.due(pool, top, sort)):
            if len(self.steps) >= most or self.actions >= most_actions:
                number = int(np.sum(met(self.scenario, self.rows(pool[~self.open[pool]]))))
                wanted = min(top, MOST_EXECUTED) if len(self.steps) < most + MOST_MORE else 1
                if number >= wanted:
                    break
            self.execute(pool[due[:AT_ONCE]])

    def due(self, pool: Ints, top: int, sort: str) -> Ints:
        """Which of some rows are to be executed before it is known what leads; places in the pool, first first."""
        rows, unknown = self.rows(pool), self.open[pool]
        first = self._met_in_order(rows, rows, sort)
        known = first[~unknown[first]]
        wanted = np.zeros(len(pool), dtype=bool)
        wanted[first[:top]] = True
        if len(known) and sort != "memory":
            measure = MEASURES[sort](self.scenario, rows)
            wanted |= (rows.verdict <= rows.verdict[known[0]]) & (measure <= NEAR * measure[known[0]])
        return np.asarray(first[(wanted & unknown)[first]])

    def first(self, pool: Ints, top: int, sort: str) -> Ints:
        """The first of some rows that meet the targets, executed or in need of none; if there are too few, others after them.

        Others, which only a longer list than can be executed shows, stand where their formula puts them, but never before those
        that are known; where there are targets, none is shown, for it is not known to meet them.
        """
        rows, unknown = self.rows(pool), self.open[pool]
        first = self._met_in_order(rows, rows, sort)
        known = first[~unknown[first]]
        if len(known) < top and not stated(self.scenario.choices):
            known = self._met_in_order(rows, self.behind(rows, unknown, sort, MOST_EXECUTED), sort)
        return np.asarray(pool[known[:top]])

    def _met_in_order(self, rows: Scored, ordered_as: Scored, sort: str) -> Ints:
        """Places of those rows that meet the targets, in the order of other figures of theirs."""
        first = order(self.scenario, ordered_as, sort)
        return np.asarray(first[met(self.scenario, rows)[first]])

    def behind(self, rows: Scored, unknown: np.ndarray, sort: str, top: int) -> Scored:
        """Rows as they are to be ordered: none that was not executed is said to be as fast as the first ``top`` that are known."""
        known = rows.take(np.flatnonzero(~unknown))
        if sort == "memory" or not len(known) or not top:
            return rows
        last = order(self.scenario, known, sort)[:top][-1]
        least = known.step_seconds[last] * (1.0 + BEHIND)
        return dataclasses.replace(rows, step_seconds=np.where(unknown, np.maximum(rows.step_seconds, least), rows.step_seconds))

    def even_rows(self) -> Scored:
        """All rows under the even split, the executed ones as they were executed."""
        seconds = self.ranked.step_seconds.copy()
        for row in self.steps:
            seconds[row] = step_of(self.jobs[int(self.ranked.stack[row])], self.ranked.layouts.layout(row)).total[0]
        return dataclasses.replace(self.ranked, step_seconds=seconds)

    def rows(self, kept: Ints) -> Scored:
        """Rows of the search with their splits' and their executed steps in place; frameworks that refuse splits taken out."""
        rows = self.ranked.take(kept)
        columns = {f.name: getattr(rows, f.name).copy() for f in dataclasses.fields(Scored) if f.name != "layouts"}
        uneven = sum(1 << number for number, name in enumerate(FRAMEWORKS) if name in UNEVEN)
        changed = np.zeros(len(self.ranked), dtype=bool)
        changed[[*self.splits, *self.steps]] = True
        for place in np.flatnonzero(changed[kept]):
            row = int(kept[place])
            split = self.splits.get(row)
            if split is not None:
                columns["frameworks"][place] &= 0 if split.recomputed_per_stage else uneven  # none takes a depth per stage
                columns["need_bytes"][place], columns["verdict"][place] = split.need_bytes, split.verdict
            step = self.steps[row] if row in self.steps else self.splits[row].step
            columns["step_seconds"][place] = step.total[0]
            columns["bubble_seconds"][place] = step.bubble[0]
            columns["exposed_seconds"][place] = step.exposed_communication[0]
        return Scored(rows.layouts, **columns)


def executed_split(job: Job, layout: Layout, split: Split, even_verdict: int) -> Split | None:
    """A split, which was sought by the formula, beside the even one with both pipelines executed; None where it then does not pay."""
    step = step_of(with_split(job, split.layers_per_stage, split.recomputed_per_stage), layout)
    timed = dataclasses.replace(split, step=step, even_step_seconds=float(step_of(job, layout).total[0]))
    return timed if timed.gain > WORTHWHILE or timed.verdict < even_verdict else None


def can_split(scored: Scored) -> np.ndarray:
    """Layouts with a pipeline that a framework of the uneven kind, or the physical rules alone, would run."""
    return np.asarray((scored.layouts.pipeline_parallel > 1) & RUNS_UNEVEN[scored.stack])


def bounds(scenario: Scenario, scored: Scored, wanted: np.ndarray) -> Floats:
    """The proven lower bound on the step of each wanted layout under any split; the others stay infinite."""
    found = np.full(len(scored), np.inf)
    for number, job in jobs_by_framework(scenario).items():
        rows = np.flatnonzero(wanted & (scored.stack == number))
        found[rows] = least_steps(number, job, scored.layouts.take(rows))
    return found
