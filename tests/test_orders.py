"""The schedules' orders: every pass once, in an order that can run, holding what the memory model says."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from planner.cost.orders import BACKWARD, FORWARD, INPUT_GRADIENT, ORDERS, WEIGHT_GRADIENT, Action, Order, interleaved_1f1b, most_held
from planner.cost.schedules import SCHEDULES
from solver.layout import V_SHAPED

CHUNKS = {"interleaved_1f1b": (2, 3, 4), **dict.fromkeys(V_SHAPED, (2,))}


@st.composite
def sizes(draw: st.DrawFn, schedule: str) -> tuple[int, int, int]:
    """Micro-batches, stages and chunks per stage that the schedule takes."""
    stages = draw(st.integers(1, 6))
    chunks = draw(st.sampled_from(CHUNKS.get(schedule, (1,))))
    least = 2 * stages if schedule == "dualpipe" else 1
    micro_batches = draw(st.integers(least, least + 18))
    return (micro_batches * stages if schedule == "interleaved_1f1b" else micro_batches), stages, chunks


def runs(order: Order, chunks: int) -> bool:
    """Whether all stages come to their end, each waiting for what its next action needs."""
    done: set[Action] = set()
    at = [0] * len(order)
    moved = True
    while moved:
        moved = False
        for stage, actions in enumerate(order):
            while at[stage] < len(actions) and ready(actions[at[stage]], done, chunks):
                done.add(actions[at[stage]])
                at[stage] += 1
                moved = True
    return all(place == len(actions) for place, actions in zip(at, order))


def ready(action: Action, done: set[Action], chunks: int) -> bool:
    """Whether an action's inputs are there."""
    kind, chunk, m = action
    if kind == WEIGHT_GRADIENT:
        return Action(INPUT_GRADIENT, chunk, m) in done
    if kind == FORWARD:
        return chunk == 0 or Action(FORWARD, chunk - 1, m) in done
    behind = chunk == chunks - 1 or any(Action(back, chunk + 1, m) in done for back in (BACKWARD, INPUT_GRADIENT))
    return behind and Action(FORWARD, chunk, m) in done


@pytest.mark.parametrize("schedule", ORDERS)
@given(data=st.data())
def test_every_pass_runs_once_and_no_stage_waits_for_ever(schedule: str, data: st.DataObject) -> None:
    m, p, v = data.draw(sizes(schedule))
    order = ORDERS[schedule](m, p, v)
    every = [action for actions in order for action in actions]
    passes = {(chunk, batch) for chunk in range(p * v) for batch in range(m)}
    assert len(every) == len(set(every))
    assert {(c, b) for kind, c, b in every if kind == FORWARD} == passes
    whole = {(c, b) for kind, c, b in every if kind == BACKWARD}
    inputs, weights = ({(c, b) for kind, c, b in every if kind == part} for part in (INPUT_GRADIENT, WEIGHT_GRADIENT))
    assert inputs == weights and whole | inputs == passes and not whole & inputs
    assert runs(order, p * v)


@pytest.mark.parametrize("schedule", ORDERS)
@given(data=st.data())
def test_chunks_are_where_the_schedule_puts_them(schedule: str, data: st.DataObject) -> None:
    m, p, v = data.draw(sizes(schedule))
    for stage, actions in enumerate(ORDERS[schedule](m, p, v)):
        here = {stage, 2 * p - 1 - stage} if schedule in V_SHAPED else {stage + p * place for place in range(v)}
        assert {action.chunk for action in actions} == here


@pytest.mark.parametrize("schedule", ORDERS)
@given(data=st.data())
def test_a_stage_holds_what_the_memory_model_counts(schedule: str, data: st.DataObject) -> None:
    m, p, v = data.draw(sizes(schedule))
    held = [most_held(actions) / v for actions in ORDERS[schedule](m, p, v)]
    counted = [float(SCHEDULES[schedule].in_flight(m, p, v, stage)) for stage in range(p)]
    if schedule == "zero_bubble_v" and m < 2 * p - 1:  # too few to fill the V: the count is an upper bound
        assert all(own <= bound for own, bound in zip(held, counted))
    else:
        assert held == counted


@given(groups=st.integers(1, 4), extra=st.integers(0, 5), p=st.integers(2, 5), v=st.integers(2, 3))
def test_groups_of_any_legal_size_run_to_the_end(groups: int, extra: int, p: int, v: int) -> None:
    group = p + extra
    order = interleaved_1f1b(groups * group, p, v, group)
    assert runs(order, p * v) and max(most_held(actions) for actions in order) <= (v - 1) * group + 2 * (p - 1) + 1


def test_dualpipe_refuses_too_few_micro_batches() -> None:
    with pytest.raises(ValueError, match="at least 8"):
        ORDERS["dualpipe"](7, 4, 2)
