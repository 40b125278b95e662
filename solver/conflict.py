"""Which limits exclude each other, and which must go: the smallest conflict and the smallest corrections, by CP-SAT.

Limits are numbers from 0. A set of limits is *kept* while all others are lifted, and the caller says whether anything is
possible then; lifting a limit never takes anything away. A *conflict* is a set under which nothing is possible, a
*correction* a set of limits without which something is. Every conflict shares a limit with every correction, so the
smallest conflict is the smallest set that hits all corrections; they are asked for one by one, as long as the smallest
hitting set of those known leaves something possible (Ignatiev et al. 2015, "Smallest MUS extraction with minimal
hitting set dualization").
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from itertools import combinations

from ortools.sat.python import cp_model

Limits = frozenset[int]
Possible = Callable[[Limits], bool]
"""(limits kept) -> whether anything is possible while all others are lifted"""

MOST_LIMITS = 20
"""Each limit is a bit of the objective's weights."""


@dataclass(frozen=True)
class Conflict:
    """The smallest conflict, and the corrections that prove that none is smaller."""

    members: Limits
    corrections: tuple[Limits, ...]
    """Each minimal: every one of its limits must be lifted."""


def remembered(possible: Possible) -> Possible:
    """The same answers, never asked twice: what a kept set allows, its parts allow; what it excludes, larger ones exclude."""
    allowing: list[Limits] = []
    excluding: list[Limits] = []

    def answer(kept: Limits) -> bool:
        if any(kept <= other for other in allowing):
            return True
        if any(kept >= other for other in excluding):
            return False
        found = possible(kept)
        (allowing if found else excluding).append(kept)
        return found

    return answer


def smallest_conflict(count: int, possible: Possible) -> Conflict:
    """The smallest set of ``count`` limits under which nothing is possible; between equal ones that of the lowest numbers.

    Empty when nothing is possible without any limit. Raises ValueError when all limits together leave something possible.
    """
    if count > MOST_LIMITS:
        raise ValueError(f"{count} limits are more than {MOST_LIMITS}")
    ask = remembered(possible)
    if ask(frozenset(range(count))):
        raise ValueError("the limits do not exclude each other")
    known: list[Limits] = []
    kept: Limits = frozenset()
    while ask(kept):
        known.append(minimal_correction(count, kept, ask))
        kept = smallest_hitting_set(count, known)
    if known and sufficient_assumptions(count, known, kept) != kept:
        raise RuntimeError(f"CP-SAT finds a conflict smaller than the smallest, {sorted(kept)}")
    return Conflict(kept, tuple(known))


def minimal_correction(count: int, kept: Limits, possible: Possible) -> Limits:
    """Limits to lift, none of them among ``kept``, of which every one is needed: the others are taken back in turn."""
    for limit in range(count):
        if limit not in kept and possible(kept | {limit}):
            kept = kept | {limit}
    return frozenset(range(count)) - kept


def smallest_corrections(count: int, conflict: Limits, possible: Possible, enough: int, most: int = 3) -> tuple[Limits, ...]:
    """All minimal corrections of one limit, then of two and so on, until there are ``enough``; none lifts more than ``most``.

    Every correction shares a limit with ``conflict``.
    """
    ask, every = remembered(possible), frozenset(range(count))
    found: list[Limits] = []
    for size in range(1, most + 1):
        if len(found) >= enough:
            break
        for lifted in map(frozenset, combinations(range(count), size)):
            needed = lifted & conflict and not any(smaller <= lifted for smaller in found)
            if needed and ask(every - lifted):
                found.append(lifted)
    return tuple(found)


def smallest_hitting_set(count: int, sets: Iterable[Limits]) -> Limits:
    """The fewest limits that meet every set; between equal choices that of the lowest numbers. Raises RuntimeError without proof."""
    model = cp_model.CpModel()
    keep = [model.new_bool_var(f"keep_{limit}") for limit in range(count)]
    for members in sets:
        model.add_bool_or([keep[limit] for limit in sorted(members)])
    model.minimize(sum(((1 << count) + (1 << limit)) * keep[limit] for limit in range(count)))  # size first, then numbers
    solver = _solver()
    status = solver.solve(model)
    if status != cp_model.OPTIMAL:
        raise RuntimeError(f"the smallest hitting set ended with {solver.status_name(status)}, not with a proof")
    return frozenset(limit for limit in range(count) if solver.boolean_value(keep[limit]))


def sufficient_assumptions(count: int, corrections: Iterable[Limits], kept: Limits) -> Limits | None:
    """Of the limits kept those that suffice to exclude every correction, one assumption literal each; None if they do not.

    Something is possible when the limits of some correction are all lifted.
    """
    model = cp_model.CpModel()
    keep = [model.new_bool_var(f"keep_{limit}") for limit in range(count)]
    ways: list[cp_model.IntVar] = []
    for members in corrections:
        way = model.new_bool_var(f"way_{len(ways)}")
        for limit in sorted(members):
            model.add_implication(keep[limit], ~way)
        ways.append(way)
    model.add_bool_or(ways)
    model.add_assumptions([keep[limit] for limit in sorted(kept)])
    solver = _solver()
    status = solver.solve(model)
    if status == cp_model.OPTIMAL:
        return None
    if status != cp_model.INFEASIBLE:
        raise RuntimeError(f"the assumptions ended with {solver.status_name(status)}, not with a proof")
    core = set(solver.sufficient_assumptions_for_infeasibility())
    return frozenset(limit for limit in range(count) if keep[limit].index in core)


def _solver() -> cp_model.CpSolver:
    solver = cp_model.CpSolver()
    solver.parameters.num_workers = 1  # the same answer every time
    solver.parameters.catch_sigint_signal = False  # Ctrl-C belongs to the program
    return solver
