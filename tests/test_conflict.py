"""The smallest conflict and the smallest corrections, against every subset of random small families."""

from __future__ import annotations

import random
from itertools import combinations

import pytest

from solver.conflict import (
    Limits,
    Possible,
    minimal_correction,
    remembered,
    smallest_conflict,
    smallest_corrections,
    smallest_hitting_set,
    sufficient_assumptions,
)

SEEDS = range(60)


def family(seed: int) -> tuple[int, list[Limits]]:
    """Some limits, and the sets of them of which lifting any one makes something possible."""
    pick = random.Random(seed)
    count = pick.randint(1, 7)
    return count, [frozenset(pick.sample(range(count), pick.randint(1, count))) for _ in range(pick.randint(1, 12))]


def possible_in(ways: list[Limits]) -> Possible:
    """Something is possible when all limits of some way are lifted."""
    return lambda kept: any(not way & kept for way in ways)


def subsets(count: int) -> list[Limits]:
    """Every set of limits, small ones first."""
    return [frozenset(chosen) for size in range(count + 1) for chosen in combinations(range(count), size)]


@pytest.mark.parametrize("seed", SEEDS)
def test_no_conflict_is_smaller_and_between_equals_the_lowest_numbers_win(seed: int) -> None:
    count, ways = family(seed)
    possible = possible_in(ways)
    found = smallest_conflict(count, possible)
    conflicts = [kept for kept in subsets(count) if not possible(kept)]
    assert found.members == min(conflicts, key=lambda kept: (len(kept), sum(1 << limit for limit in kept)))
    assert all(possible(found.members - {limit}) for limit in found.members)


@pytest.mark.parametrize("seed", SEEDS)
def test_known_corrections_are_minimal_and_meet_the_conflict(seed: int) -> None:
    count, ways = family(seed)
    possible, every = possible_in(ways), frozenset(range(count))
    found = smallest_conflict(count, possible)
    for lifted in found.corrections:
        assert possible(every - lifted) and lifted & found.members
        assert not any(possible(every - (lifted - {limit})) for limit in lifted)


@pytest.mark.parametrize("seed", SEEDS)
def test_the_smallest_corrections_are_all_of_their_size(seed: int) -> None:
    count, ways = family(seed)
    possible, every = possible_in(ways), frozenset(range(count))
    found = smallest_corrections(count, smallest_conflict(count, possible).members, possible, enough=1, most=count)
    minimal = [lifted for lifted in subsets(count) if possible(every - lifted) and not any(w < lifted for w in ways)]
    least = min(len(lifted) for lifted in minimal)
    assert set(found) == {lifted for lifted in minimal if len(lifted) == least}


def test_a_correction_takes_back_what_need_not_be_lifted() -> None:
    possible = possible_in([frozenset({1, 2}), frozenset({0, 3})])
    assert minimal_correction(4, frozenset({3}), possible) == {1, 2}
    assert minimal_correction(4, frozenset({1}), possible) == {0, 3}


def test_the_assumptions_that_suffice_are_named_and_those_that_do_not_exclude_are_none() -> None:
    ways = [frozenset({0, 1}), frozenset({1, 2})]
    assert sufficient_assumptions(3, ways, frozenset({1})) == frozenset({1})
    assert sufficient_assumptions(3, ways, frozenset({0})) is None
    assert sufficient_assumptions(3, [], frozenset()) == frozenset()


def test_between_equal_hitting_sets_the_lowest_numbers_win() -> None:
    assert smallest_hitting_set(4, [frozenset({0, 3}), frozenset({1, 3}), frozenset({2, 3})]) == {3}
    assert smallest_hitting_set(4, [frozenset({0, 1}), frozenset({2, 3})]) == {0, 2}
    assert smallest_hitting_set(3, []) == frozenset()


def test_limits_that_leave_something_possible_are_no_conflict() -> None:
    with pytest.raises(ValueError, match="do not exclude"):
        smallest_conflict(2, lambda kept: True)
    with pytest.raises(ValueError, match="more than"):
        smallest_conflict(21, lambda kept: False)


def test_where_nothing_is_ever_possible_the_conflict_is_empty() -> None:
    found = smallest_conflict(3, lambda kept: False)
    assert found.members == frozenset() and found.corrections == ()


def test_what_is_known_is_not_asked_again() -> None:
    asked: list[Limits] = []

    def possible(kept: Limits) -> bool:
        asked.append(kept)
        return not kept >= {0, 1}

    ask = remembered(possible)
    answers = [ask(frozenset(kept)) for kept in ({0, 2}, {0}, {0, 1}, {0, 1, 2}, set())]
    assert answers == [True, True, False, False, True] and asked == [{0, 2}, {0, 1}]
