"""Pipeline schedules: micro-batches in flight on each stage, and the bubble that filling and draining leaves.

Times are of one stage and micro-batch: ``forward`` and ``backward`` of the slowest stage, ``total`` the sum of both over
all stages. A schedule is one row of :data:`SCHEDULES`.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from planner.cost.arrays import Number
from solver.layout import micro_batch_group


def in_flight_gpipe(m: Number, p: Number, v: Number, r: Number) -> Number:
    """All micro-batches: every forward runs before the first backward. Source: Huang et al. 2019."""
    return m + 0 * r


def in_flight_1f1b(m: Number, p: Number, v: Number, r: Number) -> Number:
    """Stage r of p holds p - r micro-batches. Source: Narayanan et al. 2021, section 2.2.

    >>> int(in_flight_1f1b(16, 4, 1, 0)), int(in_flight_1f1b(16, 4, 1, 3)), int(in_flight_1f1b(2, 4, 1, 0))
    (4, 1, 2)
    """
    return np.minimum(m, p - r)


def in_flight_interleaved(m: Number, p: Number, v: Number, r: Number) -> Number:
    """Warm-up of 2 (p - r - 1) + (v - 1) n chunks and one more, in stages of v chunks and groups of n micro-batches.

    Source: Megatron-Core's interleaved schedule.

    >>> float(in_flight_interleaved(16, 4, 2, 0)), float(in_flight_interleaved(14, 4, 2, 0))
    (5.5, 6.0)
    """
    return np.minimum(m * v, 2 * (p - r - 1) + (v - 1) * micro_batch_group(m, p) + 1) / v


def in_flight_zero_bubble(m: Number, p: Number, v: Number, r: Number) -> Number:
    """p micro-batches on every stage: the weight gradients wait. Measured on 31 zero-bubble peaks (within 0.3 %)."""
    return np.minimum(m, p + 0 * r)


def in_flight_zero_bubble_2p(m: Number, p: Number, v: Number, r: Number) -> Number:
    """2p micro-batches on every stage. Measured on 17 peaks (within 0.3 %)."""
    return np.minimum(m, 2 * p + 0 * r)


def in_flight_dualpipe(m: Number, p: Number, v: Number, r: Number) -> Number:
    """2p + 1 half-stage chunks in the V-shaped variant. Source: DeepSeek-AI, DualPipeV's table of schedules."""
    return np.minimum(m, p + 0.5 + 0 * r)


def fill_1f1b(forward: Number, backward: Number, total: Number, m: Number, p: Number, v: Number) -> Number:
    """Fill and drain: every other stage once, divided by the chunks of an interleaved stage.

    For equal stages this is the textbook (p - 1) (F + B) / v. Source: Narayanan et al. 2021, section 2.2.

    >>> float(fill_1f1b(1.0, 2.0, 12.0, 16, 4, 2))
    4.5
    """
    return np.maximum(total - forward - backward, 0.0) / v


def fill_zero_bubble_h1(forward: Number, backward: Number, total: Number, m: Number, p: Number, v: Number) -> Number:
    """Weight gradients fill the drain as far as p micro-batches in flight allow.

    (p - 1)(F + B_i) - (min(m, p) - 1) F with B_i half of the backward, at least a residue.
    Source: Qi et al. 2023, table 1; for few micro-batches checked against their measured runs.
    """
    return (p - 1) * (forward + backward / 2) - (np.minimum(m, p) - 1) * forward


def fill_zero_bubble_2p(forward: Number, backward: Number, total: Number, m: Number, p: Number, v: Number) -> Number:
    """As H1 with up to 2p - 1 forwards ahead: no bubble once there are enough micro-batches. Source: as H1."""
    return (p - 1) * (forward + backward / 2) - (np.minimum(m, 2 * p - 1) - 1) * forward


def fill_zero_bubble_v(forward: Number, backward: Number, total: Number, m: Number, p: Number, v: Number) -> Number:
    """No bubble but the residue. Source: Qi et al. 2023, section on the V schedule."""
    return 0.0 * total


def fill_dualpipe(forward: Number, backward: Number, total: Number, m: Number, p: Number, v: Number) -> Number:
    """(p - 1)(F&B + B - 3W) of half-stage chunks, with W half of the backward.

    Source: DeepSeek-AI 2024, table 2, for the V-shaped variant with two chunks per GPU.
    """
    return (p - 1) * (forward / 2 + backward / 4)


@dataclass(frozen=True)
class Schedule:
    """What the cost of a schedule needs."""

    in_flight: Callable[[Number, Number, Number, Number], Number]
    """(micro-batches, stages, chunks, stage) -> stage-loads of activations held at the peak."""
    fill: Callable[[Number, Number, Number, Number, Number, Number], Number]
    """(forward, backward, total, micro-batches, stages, chunks) -> idle seconds."""
    residue: bool = False
    """The fill never falls below a small share of 1F1B's."""


SCHEDULES: dict[str, Schedule] = {
    "1f1b": Schedule(in_flight_1f1b, fill_1f1b),
    "interleaved_1f1b": Schedule(in_flight_interleaved, fill_1f1b),
    "gpipe": Schedule(in_flight_gpipe, fill_1f1b),
    "zero_bubble_h1": Schedule(in_flight_zero_bubble, fill_zero_bubble_h1, residue=True),
    "zero_bubble_2p": Schedule(in_flight_zero_bubble_2p, fill_zero_bubble_2p, residue=True),
    "zero_bubble_v": Schedule(in_flight_zero_bubble, fill_zero_bubble_v, residue=True),
    "dualpipe": Schedule(in_flight_dualpipe, fill_dualpipe, residue=True),
}


def fills(
    name: str, forward: Number, backward: Number, total: Number, m: Number, p: Number, v: Number, *, residue: float, synchronised: bool
) -> list[Number]:
    """Lower bounds on the idle seconds of a schedule's fill and drain, each linear in the times; the largest is the fill.

    ``residue``: share of 1F1B's fill that a zero-bubble schedule keeps. ``synchronised``: the optimizer is not validated
    afterwards, so every stage waits for the last one, which begins when the first micro-batch reaches it: at least
    (p - 1) F / v. Source: Qi et al. 2023, section 4 and table 10.
    """
    schedule = SCHEDULES[name]
    found = [schedule.fill(forward, backward, total, m, p, v)]
    if schedule.residue:
        found.append(residue * fill_1f1b(forward, backward, total, m, p, v))
        if synchronised:
            found.append((p - 1) * forward / v)
    return found
