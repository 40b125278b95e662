"""Columns in groups: distinct combinations of rows, and the ragged expansion of one table by another."""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np
import pandas as pd

from solver.layout import Ints


def distinct(columns: Iterable[Ints]) -> tuple[Ints, Ints]:
    """Row number of the first of each distinct combination, and for every row the combination that it belongs to.

    Columns hold integers >= 0 and have equal length. Combinations are numbered in order of appearance.

    >>> distinct([np.array([5, 5, 7, 5]), np.array([0, 1, 0, 0])])
    (array([0, 1, 2]), array([0, 1, 2, 0]))
    """
    code: Ints | None = None
    size = 1
    for column in columns:
        width = int(column.max(initial=0)) + 1
        if code is None:
            code, size = column, width
            continue
        if size * width >= 1 << 62:
            code = pd.factorize(code)[0].astype(np.int64)
            size = int(code.max(initial=0)) + 1
        code, size = code * width + column, size * width
    if code is None:
        raise ValueError("distinct needs at least one column")
    group = pd.factorize(code)[0].astype(np.int64)
    first = np.zeros(int(group.max(initial=-1)) + 1, dtype=np.int64)
    rows = np.arange(len(group), dtype=np.int64)
    first[group[::-1]] = rows[::-1]
    return first, group


def ragged(count: Ints) -> tuple[Ints, Ints]:
    """For rows that repeat ``count`` times: the row of each repetition, and its number within the row.

    >>> ragged(np.array([2, 0, 1]))
    (array([0, 0, 2]), array([0, 1, 0]))
    """
    row = np.repeat(np.arange(len(count), dtype=np.int64), count)
    within = np.arange(len(row), dtype=np.int64) - np.repeat(np.cumsum(count) - count, count)
    return row, within
