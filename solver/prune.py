"""Where every layout of the declared space went: axis by axis, what each named rule drops, and what survives."""

from __future__ import annotations

import functools
import math
from collections.abc import Iterator
from dataclasses import dataclass
from types import SimpleNamespace

import numpy as np
import numpy.typing as npt

from solver.check import RULES, SWITCH_RULES, Rule
from solver.grouping import distinct, ragged
from solver.layout import AXES, MESH_AXES, SPLIT_AXES, SWITCH_AXES, Columns, Ints
from solver.problem import Problem

Table = dict[str, Ints]


@dataclass(frozen=True)
class Dropped:
    """Partial layouts that one rule refuses as soon as their last needed axis is set.

    Rows are the layouts before that axis; what the rule refuses of the axis is stated per kind of row.
    """

    rule: Rule
    axis: str
    """The axis just set."""
    table: Table
    """The axes set before it, one row per partial layout with at least one refused value."""
    kind: Ints
    """For each row its kind."""
    values: Ints
    """The domain of the axis."""
    refuses: npt.NDArray[np.bool_]
    """Shape (kinds, values): whether the rule refuses a value of the axis."""
    layouts_each: int
    """Complete layouts of the declared space behind each refused value."""

    @property
    def layouts(self) -> int:
        """Complete layouts of the declared space that the rule drops here."""
        return self.layouts_each * int(self.refuses.sum(axis=1)[self.kind].sum())

    @functools.cached_property
    def refused(self) -> list[list[int]]:
        """For each kind the values of the axis that the rule refuses."""
        return [[int(value) for value in self.values[of_kind]] for of_kind in self.refuses]


def _rows(table: Table) -> int:
    return len(next(iter(table.values()))) if table else 1


def _take(table: Table, rows: Ints) -> Table:
    return {axis: column[rows] for axis, column in table.items()}


def _verdicts(table: Table, axis: str, problem: Problem, rules: list[Rule]) -> tuple[Ints, npt.NDArray[np.int64]]:
    """For each distinct row (as the rules see it) and each value of the axis the first rule broken, else len(rules)."""
    values = np.array(problem.domains[axis])
    read = sorted({other for rule in rules for other in rule.axes} - {axis})
    if read:
        first, inverse = distinct(table[other] for other in read)
    else:
        first, inverse = np.zeros(1, dtype=np.int64), np.zeros(_rows(table), dtype=np.int64)
    view = SimpleNamespace(**{other: table[other][first][:, None] for other in read}, **{axis: values[None, :]})
    verdict = np.full((len(first), len(values)), len(rules), dtype=np.int64)
    for number, rule in reversed(list(enumerate(rules))):
        holds = np.broadcast_to(rule.holds(view, problem), verdict.shape)
        verdict[~holds] = number
    return inverse, verdict


def walk(problem: Problem, table: Table, axes: tuple[str, ...]) -> Iterator[Dropped | Table]:
    """Set ``axes`` one after the other on every row of ``table``: yields what is dropped, and at last the survivors.

    A layout counts under the first rule that it breaks, in the order of the axes and, within one, of the rules.
    """
    for axis in axes:
        position = AXES.index(axis)
        bound = set(AXES[: position + 1])
        rules = [rule for rule in RULES if axis in rule.axes and set(rule.axes) <= bound]
        behind = math.prod(len(problem.domains[later]) for later in AXES[position + 1 :])
        values = np.array(problem.domains[axis])
        inverse, verdict = _verdicts(table, axis, problem, rules)
        for number, rule in enumerate(rules):
            refuses = verdict == number
            rows = np.flatnonzero(refuses.any(axis=1)[inverse])
            yield Dropped(rule, axis, _take(table, rows), inverse[rows], values, refuses, behind)
        table = _extended(table, axis, values, inverse, verdict == len(rules))
    yield table


def _extended(table: Table, axis: str, values: Ints, inverse: Ints, chosen: npt.NDArray[np.bool_]) -> Table:
    """Every row with each of the axis values chosen for its kind."""
    per_kind = chosen.sum(axis=1)
    kind_values = np.broadcast_to(values, chosen.shape)[chosen]
    kind_start = np.cumsum(per_kind) - per_kind
    count = per_kind[inverse]
    row, within = ragged(count)
    return {**_take(table, row), axis: kind_values[kind_start[inverse][row] + within]}


@dataclass(frozen=True)
class Funnel:
    """The books of a search: the size of the declared space, what each rule dropped, what is left."""

    space: int
    dropped: dict[str, int]
    survivors: int

    def __post_init__(self) -> None:
        if self.space != sum(self.dropped.values()) + self.survivors:
            raise RuntimeError(f"the counts do not close: {self}")

    def after(self, rule: str, dropped: int) -> Funnel:
        """The books with one more rule applied to the survivors."""
        total = self.dropped.get(rule, 0) + dropped
        return Funnel(self.space, {**self.dropped, rule: total}, self.survivors - dropped)


def count(problem: Problem) -> Funnel:
    """The books of all solver rules, by counting alone (no CP-SAT).

    Complete layouts are counted, never built: the last axes are counted per kind.
    """
    dropped = {rule.name: 0 for rule in RULES}
    for step in walk(problem, {}, AXES[:-1]):
        if isinstance(step, Dropped):
            dropped[step.rule.name] += step.layouts
        else:
            table = step
    last = AXES[-1]
    rules = [rule for rule in RULES if last in rule.axes]
    inverse, verdict = _verdicts(table, last, problem, rules)
    of_kind = np.bincount(inverse, minlength=len(verdict))
    for number, rule in enumerate(rules):
        dropped[rule.name] += int(((verdict == number).sum(axis=1) * of_kind).sum())
    survivors = int(((verdict == len(rules)).sum(axis=1) * of_kind).sum())
    return Funnel(problem.space_size, dropped, survivors)


@dataclass(frozen=True)
class Spread:
    """Every legal setting of the switches on every row of a base table, built in pieces to bound memory."""

    base: Ints
    """Shape (rows, MESH_AXES + SPLIT_AXES)."""
    group: Ints
    """For each row of the base its kind: switch rules see only pipeline, data and split."""
    switches: Ints
    """Shape (settings, SWITCH_AXES), the settings of one kind next to each other."""
    start: Ints
    count: Ints
    """Where the settings of each kind start, and how many there are."""

    def __len__(self) -> int:
        return int(self.count[self.group].sum())

    def pieces(self, most: int) -> Iterator[Columns]:
        """Complete layouts in pieces of about ``most`` rows, in the order of the base."""
        ends = np.cumsum(self.count[self.group])
        first = 0
        while first < len(self.base):
            done = int(ends[first - 1]) if first else 0
            last = max(first + 1, int(np.searchsorted(ends, done + most, side="right")))
            yield self._piece(slice(first, last))
            first = last

    def _piece(self, rows: slice) -> Columns:
        kind = self.group[rows]
        row, within = ragged(self.count[kind])
        base, switches = self.base[rows][row], self.switches[self.start[kind][row] + within]
        names = zip(MESH_AXES + SPLIT_AXES + SWITCH_AXES, [*base.T, *switches.T], strict=True)
        return Columns(**dict(names))


def spread(problem: Problem, base: Ints) -> Spread:
    """The legal settings of the switches for every row of ``base`` (MESH_AXES + SPLIT_AXES)."""
    axes = MESH_AXES + SPLIT_AXES
    seen = sorted({axis for rule in SWITCH_RULES for axis in rule.axes} - set(SWITCH_AXES))
    first, group = distinct(base[:, axes.index(axis)] for axis in seen)
    table: Table = {axis: base[first, axes.index(axis)] for axis in seen}
    table["kind"] = np.arange(len(first), dtype=np.int64)
    for step in walk(problem, table, SWITCH_AXES):
        if not isinstance(step, Dropped):
            table = step
    order = np.argsort(table["kind"], kind="stable")
    switches = np.stack([table[axis] for axis in SWITCH_AXES], axis=1)[order]
    count = np.bincount(table["kind"], minlength=len(first)).astype(np.int64)
    return Spread(base, group, switches, np.cumsum(count) - count, count)
