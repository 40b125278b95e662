"""The shortlist with the best uneven split of every layout, and what is proven of it: what leads, and that nothing overtakes it."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass

import numpy as np

from planner.cost.arrays import Floats
from planner.cost.estimate import memory_of, time_of
from planner.cost.memory import OUT_OF_MEMORY
from planner.frameworks import FRAMEWORKS, UNEVEN
from planner.frameworks.legality import NO_STACK, assign, jobs_by_framework
from planner.pareto import front
from planner.rank import MEASURES, order
from planner.scenario import Job, Scenario
from planner.search import Scored, SearchResult
from planner.split import WORTHWHILE, Split, best_split, recomputes_all, with_split
from planner.splittable import RUNS_UNEVEN, least_steps, splittable
from planner.targets import longest_step, met
from solver.layout import AXES, Columns, Ints, Layout, columns_of

LISTED = 10
"""Layouts that a shortlist has if nobody says how many."""

MOST_SPLIT = 50
"""Layouts of a shortlist that are split."""

MOST_RIVALS = 24
"""Layouts beyond it that are split to show that none overtakes, unless a proof is asked for: a limit that no clock moves."""


@dataclass(frozen=True)
class Proof:
    """What is known of the first layout of a shortlist."""

    ranked: int
    """Layouts that the search ranked under the even split."""
    runner_up: float
    """Share by which the second layout's step is longer; nan where there is none."""
    split: int
    """Layouts whose best split was sought."""
    proven: int
    """Of them those for which it was proven best."""
    open: int
    """Layouts that were not split although their bound does not exclude that a split of theirs leads."""
    open_gain: float
    """By which share of the first layout's step a split of theirs could be faster at most; 0 if there are none."""


@dataclass(frozen=True)
class Shortlist:
    """The best layouts, first first, each with its uneven split where that is better than the even one."""

    rows: Scored
    splits: tuple[Split | None, ...]
    proof: Proof | None = None
    """None where nothing was proven: the order is not by step time, or splitting was turned off."""

    def first(self, top: int) -> Shortlist:
        """The first of its layouts."""
        return Shortlist(self.rows.take(slice(0, top)), self.splits[:top], self.proof)

    def job(self, scenario: Scenario, row: int) -> Job:
        """The job under the stack of one row, with its split."""
        own, split = jobs_by_framework(scenario)[int(self.rows.stack[row])], self.splits[row]
        return own if split is None else with_split(own, split.layers_per_stage, split.recomputed_per_stage)


def shortlist_of(result: SearchResult, top: int, *, sort: str = "step", prove: bool = False) -> Shortlist:
    """The first ``top`` layouts of a search that was sorted so, under their best splits or, where asked for, the even one.

    Layouts that miss a target of the scenario are left out; without targets it is empty only where the search is.
    """
    splits = result.scenario.choices.uneven_stages and len(result.ranked) > 0
    if sort == "memory" or not splits:
        found = evenly(result, top)
        if len(found.rows) or not splits:  # else a target that none meets evenly
            return found
    return refined(result, top, sort=sort, prove=prove)


def evenly(result: SearchResult, top: int) -> Shortlist:
    """The first layouts of a search as they are."""
    rows = result.ranked.take(np.flatnonzero(met(result.scenario, result.ranked))[:top])
    return Shortlist(rows, (None,) * len(rows))


def pareto_of(result: SearchResult, top: int) -> Shortlist:
    """The layouts that none beats in time, money and memory at once, fastest first; the fastest of all under their best splits."""
    found = _Refinement(result.scenario, result.ranked)
    if result.scenario.choices.uneven_stages and len(result.ranked):
        found.shortlist(LISTED)
    rows = found.rows(np.arange(len(result.ranked)))
    kept = np.flatnonzero(met(result.scenario, rows))
    kept = kept[on_front(result, rows.take(kept))]
    kept = kept[np.lexsort([rows.need_bytes[kept], rows.step_seconds[kept], rows.verdict[kept]])][:top]
    return Shortlist(rows.take(kept), tuple(found.splits.get(int(row)) for row in kept))


def on_front(result: SearchResult, rows: Scored) -> np.ndarray:
    """Which of some layouts none of them and no layout of the search that meets the targets beats in time, money and memory at once."""
    evenly = result.ranked.take(np.flatnonzero(met(result.scenario, result.ranked)))
    together = [np.concatenate(pair) for pair in zip(trade_offs(result.scenario, rows), trade_offs(result.scenario, evenly), strict=True)]
    return front(together)[: len(rows)]


def trade_offs(scenario: Scenario, rows: Scored) -> list[Floats]:
    """What is traded against each other, less being better: seconds, failures included; their cost; memory."""
    return [MEASURES[measure](scenario, rows) for measure in ("goodput", "cost", "memory")]


def split_of(scenario: Scenario, number: int, job: Job, layout: Layout) -> Split | None:
    """The uneven split under which a search would cost a layout under the stack of a number; None where the even one is as good."""
    x = columns_of([layout])
    if not splittable(scenario, number, x)[0] or memory_of(job, x).verdict[0] == OUT_OF_MEMORY:
        return None
    free = number == NO_STACK and bool(recomputes_all(layout, job.model.num_layers))
    return best_split(job, layout, even_step_seconds=float(time_of(job, x).total[0]), free_recompute=free)[0]


def costing_job(scenario: Scenario, layout: Layout, layers_per_stage: tuple[int, ...] = ()) -> tuple[Job, Split | None]:
    """The job that a layout is costed under: the stack of the first framework that accepts it, and its best split or a given one.

    A layout that none accepts is costed under the stack of the framework that was asked for, evenly.
    """
    number = int(assign(scenario, columns_of([layout]))[1][0])
    jobs = jobs_by_framework(scenario)
    job = jobs.get(number) or (next(iter(jobs.values())) if len(jobs) == 1 else scenario.job_in("none"))
    if layers_per_stage:
        return with_split(job, layers_per_stage), None
    split = split_of(scenario, number, job, layout)
    return (with_split(job, split.layers_per_stage, split.recomputed_per_stage), split) if split else (job, None)


def ranking(result: SearchResult, layout: Layout | None = None) -> Scored:
    """All layouts of a search in the order of a refined shortlist, a given one under its best split too."""
    found = _Refinement(result.scenario, result.ranked)
    if result.scenario.choices.uneven_stages and len(result.ranked):
        found.shortlist(LISTED)
        if layout is not None:
            found.split(np.flatnonzero(same_rows(result.ranked.layouts, layout)))
    rows = found.rows(np.arange(len(result.ranked)))
    return rows.take(order(result.scenario, rows))


def same_rows(x: Columns, layout: Layout) -> np.ndarray:
    """Which of many layouts are a given one."""
    own = columns_of([layout])
    return np.asarray(np.all([getattr(x, axis) == getattr(own, axis) for axis in AXES], axis=0))


def refined(result: SearchResult, top: int, *, sort: str = "step", prove: bool = False) -> Shortlist:
    """The first layouts of a search, split as well as can be, and any others that could overtake them by step time.

    Layouts of the shortlist are split first. Then, in the order of their bounds, those whose bound lies below the best
    step so far: a bound above it excludes that any split of theirs leads. ``prove``: all of those, not the first few.
    What is proven is proven of the step; money and goodput order alike but for the stacks' checkpoints.
    """
    scenario, ranked = result.scenario, result.ranked
    found = _Refinement(scenario, ranked)
    found.shortlist(top, prove=prove)
    evenly_met = np.flatnonzero(met(scenario, ranked))[: top + len(found.splits)]
    kept = np.unique(np.concatenate([evenly_met, np.array(sorted(found.splits), dtype=np.int64)]))
    rows = found.rows(kept)
    best_first = order(scenario, rows, sort)
    first = best_first[met(scenario, rows)[best_first]][:top]
    rows = rows.take(first)
    splits = tuple(found.splits.get(int(kept[row])) for row in first)
    return Shortlist(rows, splits, found.proof(rows) if sort == "step" else None)


class _Refinement:
    """The layouts of a search whose splits were sought so far."""

    def __init__(self, scenario: Scenario, ranked: Scored) -> None:
        self.scenario, self.ranked = scenario, ranked
        self.jobs = jobs_by_framework(scenario)
        self.splittable = can_split(ranked)
        self.bounds = np.where(self.splittable, bounds(scenario, ranked, self.splittable), np.inf)
        self.splits: dict[int, Split] = {}
        self.sought: set[int] = set()
        self.proven = 0
        self.best_step = float(ranked.step_seconds[ranked.verdict == ranked.verdict[:1]].min(initial=np.inf))
        self.meets = int(ranked.verdict[met(scenario, ranked)].min(initial=OUT_OF_MEMORY))
        """The best verdict of the layouts that are known to meet the scenario's targets; out of memory where none is."""

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

    def rows(self, kept: Ints) -> Scored:
        """Rows of the search with their splits' estimates in place of the even ones; frameworks that refuse splits taken out."""
        rows = self.ranked.take(kept)
        columns = {f.name: getattr(rows, f.name).copy() for f in dataclasses.fields(Scored) if f.name != "layouts"}
        uneven = sum(1 << number for number, name in enumerate(FRAMEWORKS) if name in UNEVEN)
        for place, row in enumerate(kept):
            split = self.splits.get(int(row))
            if split is None:
                continue
            columns["frameworks"][place] &= 0 if split.recomputed_per_stage else uneven  # none takes a depth per stage
            columns["need_bytes"][place], columns["verdict"][place] = split.need_bytes, split.verdict
            columns["step_seconds"][place] = split.step.total[0]
            columns["bubble_seconds"][place] = split.step.bubble[0]
            columns["exposed_seconds"][place] = split.step.exposed_communication[0]
        return Scored(rows.layouts, **columns)

    def proof(self, rows: Scored) -> Proof:
        """What is known of the first of the final rows."""
        best = float(rows.step_seconds[0]) if len(rows) else np.inf
        unsought = np.ones(len(self.ranked), dtype=bool)
        unsought[list(self.sought)] = False
        gap = float(rows.step_seconds[1] / best - 1.0) if len(rows) > 1 else float("nan")
        open_bounds = self.bounds[unsought & self.splittable & (self.bounds < best)]
        gain = 1.0 - float(open_bounds.min(initial=best)) / best
        return Proof(len(self.ranked), gap, len(self.sought), self.proven, len(open_bounds), gain)


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
