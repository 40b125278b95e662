"""Results as plain data for JSON: numbers as every export states them, what is not finite as null."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from planner.units import nine_digits


def plain(value: Any) -> Any:
    """A value, or all values of a mapping, list or tuple, in types that JSON knows.

    >>> plain({"days": 1 / 3, "never": float("inf"), "sizes": (1, 2)})
    {'days': 0.333333333, 'never': None, 'sizes': [1, 2]}
    """
    if isinstance(value, Mapping):
        return {str(key): plain(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [plain(item) for item in value]
    if hasattr(value, "item"):  # of numpy
        return plain(value.item())
    if isinstance(value, float):
        return nine_digits(value) if math.isfinite(value) else None
    return value
