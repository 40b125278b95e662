"""The books: every layout is counted once, under the first rule that it breaks, and they close."""

from __future__ import annotations

import itertools
from collections import Counter
from types import SimpleNamespace

import numpy as np
import pytest
from hypothesis import given, settings

from solver import prune
from solver.check import RULES
from solver.layout import AXES
from solver.problem import Problem
from tests.builders import brute_force, problems, rows_of, small_problem

SOME = settings(max_examples=50, deadline=None, derandomize=True)
LEGAL = "legal"
TINY = small_problem(
    num_gpus=4,
    gpus_per_node=2,
    num_layers=2,
    global_batch_size=4,
    pins={"zero_stage": (0, 3), "micro_batch_size": (1, 4), "schedule": (0, 1, 4)},
)


def first_broken(values: tuple[int, ...], problem: Problem) -> str:
    """The rule that drops a layout: the first one, axis by axis, whose last axis was just set."""
    x = SimpleNamespace(**dict(zip(AXES, values, strict=True)))
    broken = [(max(AXES.index(axis) for axis in rule.axes), n) for n, rule in enumerate(RULES) if not np.all(rule.holds(x, problem))]
    return RULES[min(broken)[1]].name if broken else LEGAL


def test_every_layout_counts_under_the_first_rule_that_it_breaks() -> None:
    books = prune.count(TINY)
    every = itertools.product(*(TINY.domains[axis] for axis in AXES))
    expected = Counter(first_broken(values, TINY) for values in every)
    assert Counter({**books.dropped, LEGAL: books.survivors}) == expected
    assert sum(1 for number in books.dropped.values() if number) >= 6


@SOME
@given(problems(most_gpus=16, most_batch=12, most_layers=4))
def test_the_dropped_rows_of_a_walk_weigh_up_to_the_space(problem: Problem) -> None:
    steps = list(prune.walk(problem, {}, AXES))
    dropped = [step for step in steps if isinstance(step, prune.Dropped)]
    survivors = steps[-1]
    assert isinstance(survivors, dict)
    by_hand = sum(len(step.refused[kind]) * step.layouts_each for step in dropped for kind in step.kind.tolist())
    assert by_hand == sum(step.layouts for step in dropped)
    assert by_hand + len(survivors[AXES[-1]]) == problem.space_size


@SOME
@given(problems(most_gpus=16, most_batch=12, most_layers=4))
def test_counting_agrees_with_walking_rule_by_rule(problem: Problem) -> None:
    walked: Counter[str] = Counter()
    for step in prune.walk(problem, {}, AXES):
        if isinstance(step, prune.Dropped):
            walked[step.rule.name] += step.layouts
    assert walked == Counter(prune.count(problem).dropped)


@pytest.mark.parametrize(("space", "dropped", "survivors"), [(10, {"a": 3}, 6), (10, {"a": 3, "b": 5}, 3), (0, {}, 1)])
def test_books_that_do_not_close_are_refused(space: int, dropped: dict[str, int], survivors: int) -> None:
    with pytest.raises(RuntimeError, match="do not close"):
        prune.Funnel(space, dropped, survivors)


def test_a_later_rule_drops_survivors_and_the_books_still_close() -> None:
    books = prune.Funnel(10, {"a": 3}, 7).after("memory", 5).after("memory", 1)
    assert (books.dropped, books.survivors) == ({"a": 3, "memory": 6}, 1)


@pytest.mark.parametrize("most", [1, 7, 100, 1 << 30])
def test_pieces_of_any_size_hold_the_same_layouts(most: int) -> None:
    spread = prune.spread(small_problem(), brute_force(small_problem()))
    pieces = [rows_of(piece) for piece in spread.pieces(most)]
    whole = rows_of(next(spread.pieces(1 << 40)))
    assert len(whole) == len(spread) > 1000
    assert np.array_equal(np.concatenate(pieces), whole)
    heaviest = int(spread.count.max())
    assert all(len(piece) <= max(most, heaviest) for piece in pieces)
