"""Grouping and expanding columns agree with plain loops."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from solver.grouping import distinct, ragged

MANY = settings(max_examples=200, deadline=None, derandomize=True)
VALUES = st.one_of(st.integers(0, 3), st.sampled_from((1 << 20, (1 << 20) + 1, 1 << 40)))
"""Four columns of the largest pass 2**64: their combined code must not wrap around."""


@MANY
@given(st.integers(1, 4).flatmap(lambda width: st.lists(st.tuples(*[VALUES] * width), min_size=1, max_size=30)))
def test_distinct_numbers_combinations_as_they_appear(rows: list[tuple[int, ...]]) -> None:
    first, group = distinct([np.array(column, dtype=np.int64) for column in zip(*rows, strict=True)])
    seen = list(dict.fromkeys(rows))
    assert group.tolist() == [seen.index(row) for row in rows]
    assert first.tolist() == [rows.index(row) for row in seen]


def test_no_rows_make_no_groups() -> None:
    first, group = distinct([np.zeros(0, dtype=np.int64)])
    assert len(first) == len(group) == 0


def test_no_columns_are_an_error() -> None:
    with pytest.raises(ValueError, match="at least one column"):
        distinct([])


@MANY
@given(st.lists(st.integers(0, 5), max_size=20))
def test_ragged_repeats_every_row_as_often_as_counted(count: list[int]) -> None:
    row, within = ragged(np.array(count, dtype=np.int64))
    expected = [(number, repetition) for number, times in enumerate(count) for repetition in range(times)]
    assert list(zip(row.tolist(), within.tolist(), strict=True)) == expected
