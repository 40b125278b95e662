"""Why not this layout? The rule against it and the nearest layout that works; or its rank and where its seconds go."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from planner.cost.arrays import Floats
from planner.cost.memory import FITS, OUT_OF_MEMORY
from planner.costed import RESERVE, costed
from planner.difference import Difference, between
from planner.drivers import changes
from planner.errors import NoLayoutFits
from planner.explain import MEMORY_FORMULAS, Explanation, explain
from planner.frameworks.legality import framework_of
from planner.refine import costing_job, ranking, same_rows
from planner.scenario import Scenario
from planner.search import Scored, search
from planner.targets import untargeted
from solver.layout import SCHEDULES, SIZES, WORDS, Columns, Ints, Layout, columns_of, deepest_chunk, natural_schedule

DIGITS = 9
"""Distances that agree to so many digits are equal: the last bits of a logarithm never decide which layout is nearest."""


@dataclass(frozen=True)
class Nearby:
    """A ranked layout beside the one asked about."""

    layout: Layout
    software: str
    """The stack that it is costed under."""
    rank: int
    step_seconds: float
    need_bytes: float
    verdict: int
    distance: float
    """Doublings and changed words between the two."""
    changes: list[str]
    """In words, such as "tensor_parallel 16 -> 8"; another stack is among them."""


@dataclass(frozen=True)
class Shortage:
    """What a layout that runs out of memory lacks, on its fullest stage."""

    stage: int
    need_bytes: float
    excess_bytes: float
    """Need beyond the usable memory."""
    parts: Mapping[str, float]
    """Bytes, largest first."""


@dataclass(frozen=True)
class WhyNot:
    """Everything that answers "why not mine"."""

    scenario: Scenario
    """With its pins lifted."""
    explanation: Explanation
    legal: bool
    """Whether the solver's rules hold and a framework in play accepts it."""
    num_ranked: int
    """Layouts that the search ranked."""
    outside_pins: list[str]
    """The axes whose pins exclude the layout, in words."""
    winner: Nearby | None
    """The first of the ranking; None where nothing is feasible."""
    nearest: Nearby | None = None
    """Of an illegal layout the nearest feasible one, of one out of memory the nearest that fits."""
    shortage: Shortage | None = None
    rank: int | None = None
    """Of a feasible layout."""
    difference: Difference | None = None
    """The winner (a) against the layout (b), for every layout that can be costed."""
    neighbour: Nearby | None = None
    """Of a feasible layout the best one that is one change away."""

    @property
    def layout(self) -> Layout:
        """The layout asked about."""
        return self.explanation.layout

    @property
    def feasible(self) -> bool:
        """Legal, and not out of memory."""
        return self.legal and self.explanation.verdict != OUT_OF_MEMORY

    @property
    def gain_seconds(self) -> float:
        """What the best single change gains per step; negative where every change loses, nan where there is none."""
        if self.neighbour is None or self.difference is None:
            return float("nan")
        return self.difference.b.step_seconds - self.neighbour.step_seconds


def why_not(scenario: Scenario, layout: Layout, layers_per_stage: tuple[int, ...] = ()) -> WhyNot:
    """A layout against every other: pins and targets of the scenario are lifted, and one full search is made.

    ``layers_per_stage``: its split, where that is given; empty: its best one. Raises InputError for a batch that no number
    of replicas divides.
    """
    free = untargeted(dataclasses.replace(scenario, choices=dataclasses.replace(scenario.choices, pins={})))
    found = explain(free, layout, layers_per_stage)
    legal = found.legal
    around = Surroundings(free, layout, _ranked(free, layout), found.job.software.name if found.accepted_by else "", layers_per_stage)
    base = WhyNot(
        scenario=free,
        explanation=found,
        legal=legal,
        num_ranked=len(around.ranked),
        outside_pins=_outside_pins(scenario, layout),
        winner=around.nearby(0) if len(around.ranked) else None,
        difference=around.against_winner() if found.step is not None else None,
    )
    if not base.feasible:
        short = _shortage(found) if legal else None
        return dataclasses.replace(base, shortage=short, nearest=around.nearest(fits=legal))
    return dataclasses.replace(base, rank=around.rank(found), neighbour=around.best_neighbour())


def _ranked(scenario: Scenario, layout: Layout) -> Scored:
    """Every feasible layout, best first: the first ones and the one asked about under their best splits; empty where nothing fits."""
    try:
        result = search(scenario)
        one_away = num_changes(layout, result.ranked.layouts, scenario.job.model.num_layers) == 1
        return ranking(result, layout, np.flatnonzero(one_away))
    except NoLayoutFits as nothing:
        return nothing.result.ranked


def _outside_pins(scenario: Scenario, layout: Layout) -> list[str]:
    said = []
    for axis, pinned in scenario.choices.pins.items():
        words = [WORDS[axis][value] if axis in WORDS else value for value in pinned]
        if getattr(layout, axis) not in words:
            said.append(f"{axis} = {getattr(layout, axis)} is not among the pinned {', '.join(map(str, words))}")
    return said


def _shortage(found: Explanation) -> Shortage:
    """What the fullest stage lacks."""
    assert found.memory is not None and found.need_bytes is not None
    stage = int(np.argmax(found.need_bytes))
    need = float(found.need_bytes[stage])
    parts = {part: float(getattr(found.memory, part)[stage]) for part in MEMORY_FORMULAS}
    parts[RESERVE] = need - sum(parts.values())
    return Shortage(stage, need, need - found.job.gpu.memory_bytes, dict(sorted(parts.items(), key=lambda part: -part[1])))


@dataclass(frozen=True)
class Surroundings:
    """A layout among all ranked ones."""

    scenario: Scenario
    layout: Layout
    ranked: Scored
    """Best first."""
    software: str
    """The stack of the layout; empty where no framework accepts it."""
    layers_per_stage: tuple[int, ...] = ()
    """A given split of the layout; empty: its best one."""

    @property
    def num_layers(self) -> int:
        """Layers of the model."""
        return self.scenario.job.model.num_layers

    def row(self) -> int:
        """The layout's own row. Raises RuntimeError if it is not ranked."""
        rows = np.flatnonzero(same_rows(self.ranked.layouts, self.layout))
        if not len(rows):
            raise RuntimeError(f"{self.layout.label} is legal and not out of memory, yet the search did not rank it")
        return int(rows[0])

    def rank(self, found: Explanation) -> int:
        """The layout's place; under a given split the place that its step and verdict earn among all others' best ones."""
        if not self.layers_per_stage:
            return self.row() + 1
        assert found.step is not None
        verdict, seconds = self.ranked.verdict, self.ranked.step_seconds
        ahead = (verdict < found.verdict) | ((verdict == found.verdict) & (seconds < float(found.step.total[0])))
        return 1 + int(np.sum(ahead & ~same_rows(self.ranked.layouts, self.layout)))

    def nearby(self, row: int) -> Nearby:
        """One ranked layout as seen from the layout asked about."""
        ranked, other = self.ranked, self.ranked.layouts.take(slice(row, row + 1))
        software = self.scenario.stacks[framework_of(int(ranked.stack[row]))].name
        said = changes(self.layout, other.layout(0))
        if self.software and software != self.software:
            said.append(f"software {self.software} -> {software}")
        return Nearby(
            layout=other.layout(0),
            software=software,
            rank=row + 1,
            step_seconds=float(ranked.step_seconds[row]),
            need_bytes=float(ranked.need_bytes[row]),
            verdict=int(ranked.verdict[row]),
            distance=float(distances(self.layout, other, self.num_layers)[0]),
            changes=said,
        )

    def nearest(self, *, fits: bool) -> Nearby | None:
        """The ranked layout at the least distance, of equals the best ranked; None where nothing is ranked.

        ``fits``: only layouts whose verdict is that they fit, if any does.
        """
        if not len(self.ranked):
            return None
        away = distances(self.layout, self.ranked.layouts, self.num_layers)
        if fits and np.any(self.ranked.verdict == FITS):
            away = np.where(self.ranked.verdict == FITS, away, np.inf)
        found = self.nearby(int(np.argmin(np.round(away, DIGITS))))
        job, _ = costing_job(self.scenario, found.layout)  # however far down the ranking: as it is explained
        own = costed(job, found.layout)
        return dataclasses.replace(found, step_seconds=own.step_seconds, need_bytes=own.need_bytes, verdict=own.verdict)

    def best_neighbour(self) -> Nearby | None:
        """The best ranked of the layouts that differ in one axis beside data_parallel, which follows; None if there is none."""
        rows = np.flatnonzero(num_changes(self.layout, self.ranked.layouts, self.num_layers) == 1)
        return self.nearby(int(rows[0])) if len(rows) else None

    def against_winner(self) -> Difference | None:
        """The first of the ranking against the layout; None where nothing is ranked. The layout's sizes must multiply."""
        if not len(self.ranked):
            return None
        best = self.ranked.layouts.layout(0)
        own = costing_job(self.scenario, self.layout, self.layers_per_stage)[0]
        return between(costed(costing_job(self.scenario, best)[0], best), costed(own, self.layout))


def num_changes(layout: Layout, x: Columns, num_layers: int) -> Ints:
    """Axes in which each layout of ``x`` differs, data_parallel and what goes without saying apart (see :func:`distances`)."""
    own = columns_of([layout])
    changed = [getattr(x, axis) != getattr(own, axis) for axis in (*SIZES, "zero_stage")]
    changed += [_schedule_distance(layout, x) > 0, _recompute_distance(layout, x, num_layers) > 0]
    return np.asarray(np.sum(changed, axis=0), dtype=np.int64)


def distances(layout: Layout, x: Columns, num_layers: int) -> Floats:
    """How far each layout of ``x`` is: |log2| of every size's ratio, 1 for another ZeRO stage, schedule or recompute.

    What goes without saying costs nothing: the schedule that the chunks ask for, and full recompute of every layer
    where the chunks have another size.
    """
    own = columns_of([layout])
    total = (x.zero_stage != own.zero_stage) + _schedule_distance(layout, x) + _recompute_distance(layout, x, num_layers)
    for axis in (*SIZES, "data_parallel"):
        total = total + np.abs(np.log2(getattr(x, axis) / getattr(own, axis)))
    return np.asarray(total, dtype=np.float64)


def _schedule_distance(layout: Layout, x: Columns) -> Ints:
    """1 where the schedule is another, unless both are those that go without saying."""
    different = x.schedule != SCHEDULES.index(layout.schedule)
    if layout.schedule == natural_schedule(layout.virtual_pipeline):
        different &= ~_natural(x)
    return np.asarray(different, dtype=np.int64)


def _natural(x: Columns) -> npt.NDArray[np.bool_]:
    plain, interleaved = (SCHEDULES.index(natural_schedule(chunks)) for chunks in (1, 2))
    return np.asarray(x.schedule == np.where(x.virtual_pipeline > 1, interleaved, plain))


def _recompute_distance(layout: Layout, x: Columns, num_layers: int) -> Floats:
    """1 where the mode is another; between two full ones |log2| of the layers' ratio, 0 where both cover every layer."""
    own = columns_of([layout])
    depth, own_depth = np.maximum(x.recompute_layers, 1), max(layout.recompute_layers, 1)
    ratio = np.abs(np.log2(depth / own_depth))
    if layout.recompute_layers == deepest_chunk(layout, num_layers):
        ratio = np.where(x.recompute_layers == deepest_chunk(x, num_layers), 0.0, ratio)
    return np.where(x.recompute != own.recompute, 1.0, ratio)
