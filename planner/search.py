"""The search as one readable pipeline: scenario -> space -> prune -> cost -> rank."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np

from planner import spec, targets
from planner.cost.arrays import PIECE, Floats
from planner.cost.estimate import memory_of, time_of
from planner.cost.memory import OUT_OF_MEMORY
from planner.errors import InputError, NoLayoutFits
from planner.frameworks.legality import assign, framework_of, jobs_by_framework
from planner.rank import order
from planner.scenario import Job, Scenario
from solver import check, prune, space
from solver.layout import AXES, MESH_AXES, Columns, Ints, Layout
from solver.problem import UNLIMITED_KIB, Problem

LAUNCHABLE, MEMORY = "launchable", "memory"
"""The two rules that need the frameworks and the cost model, after the solver's."""

Progress = Callable[[int, int], None]
"""(layouts done, layouts in all)"""


@dataclass(frozen=True)
class Scored:
    """Layouts with their estimates; arrays of one length."""

    layouts: Columns
    frameworks: Ints
    """Bit set of the frameworks that accept the layout."""
    stack: Ints
    """Number of the framework whose stack the layout is costed under."""
    need_bytes: Floats
    verdict: Ints
    step_seconds: Floats
    bubble_seconds: Floats
    exposed_seconds: Floats

    def __len__(self) -> int:
        return len(self.need_bytes)

    def take(self, index: Ints | slice) -> Scored:
        """The selected rows."""
        rest = (getattr(self, f.name)[index] for f in dataclasses.fields(self)[1:])
        return Scored(self.layouts.take(index), *rest)


@dataclass(frozen=True)
class Rejected:
    """The layout that came nearest among those out of memory."""

    layout: Layout
    framework: str
    need_bytes: float


@dataclass(frozen=True)
class SearchResult:
    """What a search found, in rank order, and the books of what it dropped."""

    scenario: Scenario
    problem: Problem
    layouts: prune.Spread
    """What the solver's rules leave."""
    funnel: prune.Funnel
    ranked: Scored
    """Best first; every layout that is not out of memory."""
    nearest: Rejected | None
    seconds: float
    """Wall time of the search itself."""

    @property
    def too_late(self) -> dict[str, int]:
        """Layouts that fit, yet miss a target, by the first that each misses."""
        return {name: number for name, number in self.funnel.dropped.items() if name in targets.TARGETS and number}


def search(scenario: Scenario, sort: str = "step", progress: Progress | None = None) -> SearchResult:
    """Every layout of the scenario's space, pruned, scored and ranked.

    Raises InputError for a batch that no replica count divides, NoLayoutFits when nothing is left.
    """
    started = time.perf_counter()
    problem = spec.problem(scenario)
    funnel = prune.count(problem)
    layouts = enumerate_layouts(problem)
    if len(layouts) != funnel.survivors:
        raise RuntimeError(f"CP-SAT leaves {len(layouts)} layouts, counting leaves {funnel.survivors}")
    scored, nearest, dropped = score(scenario, layouts, progress)
    for rule, number in dropped.items():
        funnel = funnel.after(rule, number)
    ranked = scored.take(order(scenario, scored, sort))
    result = SearchResult(scenario, problem, layouts, funnel, ranked, nearest, time.perf_counter() - started)
    if not len(ranked):
        check_batch(problem)
        if nearest is None and funnel.dropped["memory_floor"]:
            result = dataclasses.replace(result, nearest=nearest_above_floor(scenario, problem))
        raise NoLayoutFits(result)
    return result


def searched(scenario: Scenario, sort: str = "step", progress: Progress | None = None) -> SearchResult:
    """The search, also where it finds nothing. Raises InputError for a batch that no replica count divides."""
    try:
        return search(scenario, sort, progress)
    except NoLayoutFits as nothing:
        return nothing.result


def enumerate_layouts(problem: Problem) -> prune.Spread:
    """All layouts that the solver's rules allow: meshes and splits by CP-SAT, joined and spread over the switches."""
    base = space.join(problem, space.meshes(problem), space.splits(problem))
    return prune.spread(problem, base)


def weigh(scenario: Scenario, x: Columns, bits: Ints, stack: Ints) -> Iterator[tuple[Job, Scored]]:
    """Per stack its layouts with their memory and verdict; their step times are still unknown (nan)."""
    for number, job in jobs_by_framework(scenario).items():
        rows = np.flatnonzero(stack == number)
        if not len(rows):
            continue
        own = x.take(rows)
        memory = memory_of(job, own)
        unknown = np.full(len(rows), np.nan)
        yield job, Scored(own, bits[rows], stack[rows], memory.need_bytes, memory.verdict, unknown, unknown, unknown)


def timed(job: Job, weighed: Scored) -> Scored:
    """The layouts with their step times."""
    step = time_of(job, weighed.layouts)
    return dataclasses.replace(weighed, step_seconds=step.total, bubble_seconds=step.bubble, exposed_seconds=step.exposed_communication)


def retimed(scenario: Scenario, scored: Scored) -> Scored:
    """Layouts under a scenario that changes rates alone, best first: neither legality nor memory reads a rate."""
    stacks = ((job, np.flatnonzero(scored.stack == number)) for number, job in jobs_by_framework(scenario).items())
    again = concatenate([timed(job, scored.take(rows)) for job, rows in stacks if len(rows)])
    return again.take(order(scenario, again))


def estimate(scenario: Scenario, x: Columns) -> Iterator[tuple[Scored, Scored]]:
    """Per stack: the layouts that are not out of memory with their step time, and those that are (step time nan)."""
    for job, weighed in weigh(scenario, x, *assign(scenario, x)):
        over = weighed.verdict == OUT_OF_MEMORY
        yield timed(job, weighed.take(np.flatnonzero(~over))), weighed.take(np.flatnonzero(over))


def score(scenario: Scenario, layouts: prune.Spread, progress: Progress | None = None) -> tuple[Scored, Rejected | None, dict[str, int]]:
    """Every layout under its framework's stack: those that fit, the nearest of those that do not, and the drops."""
    kept: list[Scored] = []
    nearest: Rejected | None = None
    dropped = {LAUNCHABLE: 0, MEMORY: 0, **dict.fromkeys(targets.stated(scenario.choices), 0)}
    done = accepted = 0
    for piece in layouts.pieces(PIECE):
        for fits, lost in estimate(scenario, piece):
            accepted += len(fits) + len(lost)
            dropped[MEMORY] += len(lost)
            kept.append(reaching(scenario, fits, dropped))
            least = int(np.argmin(lost.need_bytes)) if len(lost) else -1
            if least >= 0 and (nearest is None or lost.need_bytes[least] < nearest.need_bytes):
                nearest = Rejected(lost.layouts.layout(least), framework_of(int(lost.stack[least])), float(lost.need_bytes[least]))
        done += len(piece)
        if progress:
            progress(done, len(layouts))
    dropped[LAUNCHABLE] = done - accepted
    return concatenate(kept), nearest, dropped


def reaching(scenario: Scenario, timed: Scored, dropped: dict[str, int]) -> Scored:
    """The layouts of one stack that may meet the scenario's targets, if not evenly then under a split; the others are counted."""
    if not len(timed) or not targets.stated(scenario.choices):
        return timed
    number = int(timed.stack[0])
    late = targets.out_of_reach(scenario, number, jobs_by_framework(scenario)[number], timed.layouts, timed.step_seconds)
    for name, rows in late.items():
        dropped[name] += int(rows.sum())
    return timed.take(np.flatnonzero(~np.any(list(late.values()), axis=0)))


def concatenate(parts: list[Scored]) -> Scored:
    """Scored layouts one after another."""
    axes = [field.name for field in dataclasses.fields(Columns)]

    def joined(arrays: list[Any]) -> Any:
        return np.concatenate(arrays) if arrays else np.zeros(0, dtype=np.int64)

    layouts = Columns(*(joined([getattr(p.layouts, axis) for p in parts]) for axis in axes))
    rest = (joined([getattr(p, f.name) for p in parts]) for f in dataclasses.fields(Scored)[1:])
    return Scored(layouts, *rest)


def nearest_above_floor(scenario: Scenario, problem: Problem) -> Rejected | None:
    """The layout that misses the memory by least when the solver's floor already refused every mesh."""
    _, nearest, _ = score(scenario, enumerate_layouts(dataclasses.replace(problem, usable_kib=UNLIMITED_KIB)))
    return nearest


def nearest_refused(problem: Problem) -> tuple[Layout, str] | None:
    """Of the layouts that the solver's rules refuse one that came furthest, and the rule that it breaks, with numbers."""
    last: prune.Dropped | None = None
    for step in prune.walk(problem, {}, AXES):
        if isinstance(step, prune.Dropped) and step.layouts:
            last = step
    if last is None:
        return None
    values = {axis: domain[0] for axis, domain in problem.domains.items()}
    values |= {axis: int(column[0]) for axis, column in last.table.items()}
    values[last.axis] = last.refused[int(last.kind[0])][0]
    layout = Columns(**{axis: np.array([value], dtype=np.int64) for axis, value in values.items()}).layout(0)
    return layout, check.broken_rules(layout, problem).get(last.rule.name, last.rule.sentence)


def check_batch(problem: Problem) -> None:
    """Raise InputError, with the nearest legal batches, when only the batch keeps every mesh from being legal."""
    possible: set[int] = set()
    for step in prune.walk(problem, {}, MESH_AXES):
        if isinstance(step, prune.Dropped) and step.rule.name == "replicas":
            possible |= {value for kind in set(step.kind.tolist()) for value in step.refused[kind]}
        elif not isinstance(step, prune.Dropped) and len(step["data_parallel"]):
            return
    if not possible:
        return
    batch = problem.global_batch_size
    legal = sorted({max(batch // d, 1) * d for d in possible} | {-(-batch // d) * d for d in possible}, key=lambda n: abs(n - batch))
    known = ", ".join(f"{d:,}" for d in sorted(possible)[:6])
    raise InputError(
        f"workload.global_batch_size = {batch} does not divide by any data_parallel that {problem.num_gpus:,} GPUs allow "
        f"({known}); nearest legal: {', '.join(str(n) for n in sorted(legal[:3]))}"
    )
