"""What schedules hold and idle, against an event simulation of the orders that pipelines execute."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest

from planner.cost.schedules import SCHEDULES
from solver.layout import SCHEDULES as NAMES

FORWARD, BACKWARD = 1.0, 2.0
Pass = tuple[str, int, int]
"""("F" or "B", chunk in model order, micro-batch)."""
Order = Callable[[int, int, int, int], list[Pass]]
"""(micro-batches, stages, chunks of a stage, stage) -> the passes of the stage, in the order in which it runs them."""


def warmed_up(m: int, p: int, v: int, r: int, warm: int) -> list[Pass]:
    """``warm`` forwards, then forward and backward in turn, then the backwards left; rounds of p micro-batches per chunk."""

    def turn(k: int, kind: str) -> Pass:
        in_turn = k // p % v
        chunk = in_turn if kind == "F" else v - 1 - in_turn
        return kind, chunk * p + r, k // (p * v) * p + k % p

    forwards, backwards = ([turn(k, kind) for k in range(m * v)] for kind in "FB")
    warm = min(warm, m * v)
    steady = [one for pair in zip(forwards[warm:], backwards, strict=False) for one in pair]
    return forwards[:warm] + steady + backwards[m * v - warm :]


ORDERS: dict[str, Order] = {
    "gpipe": lambda m, p, v, r: [("F", r, i) for i in range(m)] + [("B", r, i) for i in range(m)],
    "1f1b": lambda m, p, v, r: warmed_up(m, p, 1, r, p - r - 1),
    "interleaved_1f1b": lambda m, p, v, r: warmed_up(m, p, v, r, 2 * (p - r - 1) + (v - 1) * p),
}
"""As in Huang et al. 2019 and Narayanan et al. 2021."""

SETTINGS = [
    ("gpipe", 6, 4, 1),
    ("gpipe", 2, 4, 1),
    ("1f1b", 16, 4, 1),
    ("1f1b", 3, 5, 1),
    ("1f1b", 7, 1, 1),
    ("interleaved_1f1b", 8, 4, 2),
    ("interleaved_1f1b", 12, 4, 3),
    ("interleaved_1f1b", 4, 4, 2),
    ("interleaved_1f1b", 6, 2, 4),
]


def finish_times(orders: list[list[Pass]], chunks: int, per_chunk: dict[str, float]) -> dict[Pass, float]:
    """When each pass ends if every stage starts its next pass as soon as the stage and the pass's input are ready."""
    ended: dict[Pass, float] = {}
    free, position = [0.0] * len(orders), [0] * len(orders)

    def input_of(one: Pass) -> Pass | None:
        kind, chunk, batch = one
        if kind == "F":
            return ("F", chunk - 1, batch) if chunk else None
        return ("B", chunk + 1, batch) if chunk + 1 < chunks else ("F", chunk, batch)

    while any(position[stage] < len(order) for stage, order in enumerate(orders)):
        before = sum(position)
        for stage, order in enumerate(orders):
            while position[stage] < len(order) and (needs := input_of(order[position[stage]])) in {None, *ended}:
                one = order[position[stage]]
                free[stage] = max(free[stage], ended[needs] if needs else 0.0) + per_chunk[one[0]]
                ended[one] = free[stage]
                position[stage] += 1
        assert sum(position) > before, "the order deadlocks"
    return ended


def most_held(order: list[Pass], v: int) -> float:
    """The most forwards without their backward on a stage, in loads of a whole stage."""
    return float(max(np.cumsum([1 if kind == "F" else -1 for kind, _, _ in order]))) / v


@pytest.mark.parametrize(("name", "m", "p", "v"), SETTINGS)
def test_micro_batches_in_flight_are_those_of_the_executed_order(name: str, m: int, p: int, v: int) -> None:
    executed = [most_held(ORDERS[name](m, p, v, stage), v) for stage in range(p)]
    assert [float(SCHEDULES[name].in_flight(m, p, v, stage)) for stage in range(p)] == executed


@pytest.mark.parametrize(("name", "m", "p", "v"), SETTINGS)
def test_the_fill_is_the_idle_time_of_the_executed_order(name: str, m: int, p: int, v: int) -> None:
    orders = [ORDERS[name](m, p, v, stage) for stage in range(p)]
    seconds = max(finish_times(orders, p * v, {"F": FORWARD / v, "B": BACKWARD / v}).values())
    fill = SCHEDULES[name].fill(FORWARD, BACKWARD, p * (FORWARD + BACKWARD), m, p, v)
    assert seconds == pytest.approx(m * (FORWARD + BACKWARD) + float(fill))


@pytest.mark.parametrize("name", SCHEDULES)
def test_no_schedule_holds_more_than_all_micro_batches_nor_less_on_an_earlier_stage(name: str) -> None:
    for m, p in ((1, 4), (3, 4), (16, 4), (64, 8)):
        held = [float(SCHEDULES[name].in_flight(m, p, 2, stage)) for stage in range(p)]
        assert max(held) <= m and min(held) > 0
        assert held == sorted(held, reverse=True)


@pytest.mark.parametrize("name", [name for name, schedule in SCHEDULES.items() if schedule.residue])
def test_a_zero_bubble_schedule_idles_no_longer_than_1f1b_once_the_pipeline_is_full(name: str) -> None:
    for p in (2, 4, 8):
        times = (FORWARD, BACKWARD, p * (FORWARD + BACKWARD), 4 * p, p, 1)
        assert float(SCHEDULES[name].fill(*times)) < float(SCHEDULES["1f1b"].fill(*times))


def test_uneven_stages_wait_for_the_slowest() -> None:
    total = 3 * (FORWARD + BACKWARD) + 2 * (FORWARD + BACKWARD)  # one of four stages takes twice as long
    assert SCHEDULES["1f1b"].fill(2 * FORWARD, 2 * BACKWARD, total, 16, 4, 1) == 3 * (FORWARD + BACKWARD)


def test_every_schedule_of_the_vocabulary_has_a_cost() -> None:
    assert tuple(SCHEDULES) == NAMES
