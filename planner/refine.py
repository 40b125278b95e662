"""The shortlist under the best uneven splits and with its pipelines executed, and what is proven of it: that nothing overtakes."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass

import numpy as np

from planner.cost.arrays import Floats
from planner.cost.estimate import memory_of, time_of
from planner.cost.memory import OUT_OF_MEMORY
from planner.frameworks.legality import NO_STACK, assign, jobs_by_framework
from planner.pareto import front
from planner.rank import MEASURES, order
from planner.refinement import MOST_EXECUTED, Refinement, executed_split
from planner.scenario import Job, Scenario
from planner.search import Scored, SearchResult
from planner.simulated import inexact, step_of
from planner.split import Split, best_split, recomputes_all, with_split
from planner.splittable import splittable
from planner.targets import met
from solver.layout import AXES, Columns, Ints, Layout, columns_of

LISTED = 10
"""Layouts that a shortlist has if nobody says how many."""

MOST_ON_FRONT = 256
"""Layouts whose pipeline is executed to find a front."""

TELLING = 0.01
"""Share of a step from which on it is told that the formula was off."""


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
class Executed:
    """What executing the pipelines of a search's first layouts event by event showed, where no formula knows their fill."""

    number: int
    """Layouts that were executed."""
    moved: int
    """Of them those whose step then differed by more than :data:`TELLING`."""
    farthest: float
    """The largest difference, as a share of the step by the formula."""
    leader: Layout | None
    """The layout that would lead by the formulas alone; None where it does lead."""
    complete: bool
    """Whether the formula of no other layout comes near the first one's step."""


@dataclass(frozen=True)
class Shortlist:
    """The best layouts, first first, each with its uneven split where that is better than the even one."""

    rows: Scored
    splits: tuple[Split | None, ...]
    proof: Proof | None = None
    """None where nothing was proven: the order is not by step time, or splitting was turned off. Proven of the formula."""
    formula_seconds: tuple[float | None, ...] = ()
    """For each row the step by the formula, where it was executed instead; else None."""
    executed: Executed | None = None
    """None where no layout needed it."""

    def first(self, top: int) -> Shortlist:
        """The first of its layouts."""
        return dataclasses.replace(
            self, rows=self.rows.take(slice(0, top)), splits=self.splits[:top], formula_seconds=self.formula_seconds[:top]
        )

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
        found = evenly(result, top, sort=sort)
        if len(found.rows) or not splits:  # else a target that none meets evenly
            return found
    return refined(result, top, sort=sort, prove=prove)


def evenly(result: SearchResult, top: int, *, sort: str = "step") -> Shortlist:
    """The first layouts of a search under the even split."""
    return listed(Refinement(result.scenario, result.ranked), top, sort)


def refined(result: SearchResult, top: int, *, sort: str = "step", prove: bool = False) -> Shortlist:
    """The first layouts of a search, split as well as can be, and any others that could overtake them by step time.

    Layouts of the shortlist are split first. Then, in the order of their bounds, those whose bound lies below the best
    step so far: a bound above it excludes that any split of theirs leads. ``prove``: all of those, not the first few.
    What is proven is proven of the step by the formula; money and goodput order alike but for the stacks' checkpoints.
    Last, where the formula of the fill does not hold, the pipelines of those that lead are executed.
    """
    found = Refinement(result.scenario, result.ranked)
    found.shortlist(top, prove=prove)
    return listed(found, top, sort, proven=sort == "step")


def pareto_of(result: SearchResult, top: int) -> Shortlist:
    """The layouts that none beats in time, money and memory at once, fastest first; the fastest of all under their best splits."""
    scenario, found = result.scenario, Refinement(result.scenario, result.ranked)
    if scenario.choices.uneven_stages and len(result.ranked):
        found.shortlist(LISTED)
    every, unknown = np.arange(len(result.ranked)), np.arange(0)
    while True:
        found.execute(unknown)
        rows, even = found.rows(every), found.even_rows()
        kept = np.flatnonzero(met(scenario, rows))
        together = [trade_offs(scenario, part) for part in (rows.take(kept), even.take(np.flatnonzero(met(scenario, even))))]
        kept = kept[front([np.concatenate(pair) for pair in zip(*together, strict=True)])[: len(kept)]]
        kept = kept[np.lexsort([rows.need_bytes[kept], rows.step_seconds[kept], rows.verdict[kept]])][:top]
        unknown = kept[found.open[kept]][: MOST_ON_FRONT - len(found.steps)]
        if not len(unknown):
            break
    kept = kept[on_front(result, rows.take(kept))]
    return taken(found, rows.take(kept), kept)


def on_front(result: SearchResult, rows: Scored) -> np.ndarray:
    """Which of some layouts none of them and no layout of the search that meets the targets beats in time, money and memory at once.

    Of the layouts whose fill no formula knows those count that were executed: the first ones that could beat one of the given.
    """
    scenario = result.scenario
    evenly = result.ranked.take(np.flatnonzero(met(scenario, result.ranked)))
    guessed = inexact(evenly.layouts)
    own, others = trade_offs(scenario, rows), trade_offs(scenario, evenly)
    known = [np.concatenate([mine, other[~guessed]]) for mine, other in zip(own, others, strict=True)]
    found = front(known)[: len(rows)]
    unsure, jobs = np.flatnonzero(guessed), jobs_by_framework(scenario)
    goals = np.stack([other[unsure] for other in others], axis=1)
    executed: dict[int, Floats] = {}
    for row in np.flatnonzero(found):
        mine = np.array([goal[row] for goal in own])
        for rival in np.flatnonzero(np.all(goals <= mine, axis=1) & np.any(goals < mine, axis=1)).tolist():
            if rival not in executed and len(executed) < MOST_EXECUTED:
                at = int(unsure[rival])
                step = float(step_of(jobs[int(evenly.stack[at])], evenly.layouts.layout(at)).total[0])
                executed[rival] = goals[rival] * np.array([*[step / evenly.step_seconds[at]] * 2, 1.0])  # time and money, not memory
            if rival in executed and np.all(executed[rival] <= mine) and np.any(executed[rival] < mine):
                found[row] = False
                break
    return found


def listed(found: Refinement, top: int, sort: str, *, proven: bool = False) -> Shortlist:
    """The first rows that meet the targets, executed where the formula does not hold, as a shortlist."""
    scenario, pool = found.scenario, found.candidates(top)
    leads = pool[order(scenario, found.rows(pool), sort)]
    leads = leads[met(scenario, found.rows(leads))][:1]
    best = found.rows(leads).step_seconds
    found.execute_leaders(pool, top, sort)
    kept = found.first(pool, top, sort)
    if not len(kept):
        pool = np.union1d(pool, np.flatnonzero(met(scenario, found.ranked)))
        found.execute_leaders(pool, top, sort)
        kept = found.first(pool, top, sort)
    rows = found.rows(kept)
    return dataclasses.replace(
        taken(found, rows, kept),
        proof=proof_of(found, rows, float(best[0]) if len(best) else np.inf) if proven else None,
        executed=executed_of(found, pool, kept, leads, sort),
    )


def taken(found: Refinement, rows: Scored, places: Ints) -> Shortlist:
    """Rows, which stand at some places of the search, with their splits and what the formula said of them."""
    numbers = [int(place) for place in places]
    return Shortlist(rows, tuple(map(found.splits.get, numbers)), formula_seconds=tuple(map(found.formula.get, numbers)))


def proof_of(found: Refinement, rows: Scored, best: float) -> Proof:
    """What is known of the first of the final rows, and of the best step by the formula."""
    unsought = np.ones(len(found.ranked), dtype=bool)
    unsought[list(found.sought)] = False
    gap = float(rows.step_seconds[1] / rows.step_seconds[0] - 1.0) if len(rows) > 1 else float("nan")
    open_bounds = found.bounds[unsought & found.splittable & (found.bounds < best)]
    gain = 1.0 - float(open_bounds.min(initial=best)) / best
    return Proof(len(found.ranked), gap, len(found.sought), found.proven, len(open_bounds), gain)


def executed_of(found: Refinement, pool: Ints, kept: Ints, leads: Ints, sort: str) -> Executed | None:
    """What executing the pipelines of some rows showed; ``leads``: the one that leads by the formula."""
    if not found.steps or not len(kept):
        return None
    off = [float(found.steps[row].total[0]) / seconds - 1.0 for row, seconds in found.formula.items()]
    return Executed(
        number=len(found.steps),
        moved=sum(abs(share) > TELLING for share in off),
        farthest=max(off, key=abs),
        leader=found.ranked.layouts.layout(int(leads[0])) if len(leads) and leads[0] != kept[0] else None,
        complete=not len(found.due(pool, len(kept), sort)),
    )


def trade_offs(scenario: Scenario, rows: Scored) -> list[Floats]:
    """What is traded against each other, less being better: seconds, failures included; their cost; memory."""
    return [MEASURES[measure](scenario, rows) for measure in ("goodput", "cost", "memory")]


def split_of(scenario: Scenario, number: int, job: Job, layout: Layout) -> Split | None:
    """The uneven split under which a search would cost a layout under the stack of a number; None where the even one is as good."""
    x = columns_of([layout])
    if not splittable(scenario, number, x)[0] or memory_of(job, x).verdict[0] == OUT_OF_MEMORY:
        return None
    free = number == NO_STACK and bool(recomputes_all(layout, job.model.num_layers))
    split = best_split(job, layout, even_step_seconds=float(time_of(job, x).total[0]), free_recompute=free)[0]
    return executed_split(job, layout, split, int(memory_of(job, x).verdict[0])) if split else None


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


def ranking(result: SearchResult, layout: Layout | None = None, beside: Ints | None = None) -> Scored:
    """All layouts of a search in the order of a refined shortlist, a given one under its best split too, its pipeline executed.

    ``beside``: rows of the search of which the best is executed too.
    """
    found = Refinement(result.scenario, result.ranked)
    if result.scenario.choices.uneven_stages and len(result.ranked):
        found.shortlist(LISTED)
    listed(found, LISTED, "step")
    if layout is not None:
        own = np.flatnonzero(same_rows(result.ranked.layouts, layout))
        if result.scenario.choices.uneven_stages:
            found.split(own)
        found.execute(own)
    if beside is not None and len(beside):
        found.execute_leaders(beside, 1, "step")
    rows: Scored = found.rows(np.arange(len(result.ranked)))
    return rows.take(order(result.scenario, found.behind(rows, found.open, "step", LISTED)))


def same_rows(x: Columns, layout: Layout) -> np.ndarray:
    """Which of many layouts are a given one."""
    own = columns_of([layout])
    return np.asarray(np.all([getattr(x, axis) == getattr(own, axis) for axis in AXES], axis=0))
