"""Which rows of several measures no other row beats."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from planner.cost.arrays import Floats


def front(columns: Sequence[Floats]) -> np.ndarray:
    """Mask of the rows that no other row dominates: nowhere larger, somewhere smaller. Less is better in every column.

    Equal rows are on the front together; rows with a nan are not. In lexicographic order a row can be dominated by
    earlier ones only, so the first that is left is on the front and takes with it all that it dominates.

    >>> seconds, dollars = np.array([1.0, 2.0, 2.0, 3.0]), np.array([9.0, 5.0, 5.0, 6.0])
    >>> front([seconds, dollars]).tolist()
    [True, True, True, False]
    """
    values = np.stack([np.asarray(column, dtype=np.float64) for column in columns], axis=1)
    found = np.zeros(len(values), dtype=bool)
    left = np.lexsort(values.T[::-1])
    left = left[~np.isnan(values[left]).any(axis=1)]
    while len(left):
        best = values[left[0]]
        found[left[(values[left] == best).all(axis=1)]] = True
        left = left[(values[left] < best).any(axis=1)]
    return found
