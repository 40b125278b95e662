"""Number-or-array arithmetic that every formula shares."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import fields
from typing import TYPE_CHECKING, Any, TypeVar

import numpy as np
import numpy.typing as npt

if TYPE_CHECKING:
    from _typeshed import DataclassInstance

Record = TypeVar("Record", bound="DataclassInstance")

Number = Any
"""A plain number or an array of numbers: formulas take either, in any mix that broadcasts."""
Floats = npt.NDArray[np.float64]

PIECE = 1 << 16
"""Layouts scored at once: small enough for the processor's cache, large enough to amortise the calls."""


def ceil_div(number: Number, by: Number) -> Number:
    """Quotient of positive integers, rounded up.

    >>> ceil_div(7, 2)
    4
    """
    return -(-number // by)


def smooth_max(x: Number, y: Number, power: float) -> Number:
    """The smooth maximum (x^q + y^q)^(1/q): two things that overlap, but never quite.

    >>> round(float(smooth_max(3.0, 4.0, 2)), 6)
    5.0
    """
    if power == 2:
        return np.sqrt(x * x + y * y)
    larger, smaller = np.maximum(x, y), np.minimum(x, y)
    share = np.divide(smaller, larger, out=np.zeros_like(larger * 1.0), where=larger > 0)
    return larger * (1.0 + share**power) ** (1.0 / power)


def each(change: Callable[..., Any], *records: Record) -> Record:
    """The record whose every field is made from that field of some records of one kind: all their arrays cut or joined alike."""
    return type(records[0])(*(change(*(getattr(record, field.name) for record in records)) for field in fields(records[0])))
