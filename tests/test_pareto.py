"""The Pareto front against its definition."""

from __future__ import annotations

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from planner.pareto import front

ROWS = st.integers(1, 4).flatmap(lambda width: st.lists(st.tuples(*[st.integers(0, 4)] * width), max_size=30))
"""Few values, so that rows tie in some columns and in all."""


def dominated(row: tuple[int, ...], rows: list[tuple[int, ...]]) -> bool:
    """The definition, row by row."""
    return any(all(a <= b for a, b in zip(other, row)) and other != row for other in rows)


@given(ROWS)
def test_the_front_is_what_nothing_dominates(rows: list[tuple[int, ...]]) -> None:
    columns = [np.array(column, dtype=float) for column in zip(*rows)] or [np.zeros(0)]
    assert front(columns).tolist() == [not dominated(row, rows) for row in rows]


@given(st.lists(st.floats(0, 1), min_size=1, max_size=20))
def test_one_measure_has_its_least_values_on_the_front(values: list[float]) -> None:
    assert front([np.array(values)]).tolist() == [value == min(values) for value in values]


def test_a_row_with_a_nan_is_never_on_the_front() -> None:
    assert front([np.array([np.nan, 2.0, 1.0]), np.array([0.0, np.inf, np.inf])]).tolist() == [False, False, True]
    assert front([np.array([np.nan])]).tolist() == [False]
