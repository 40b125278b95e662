"""The order of every stage of a pipeline, executed: which action waits for which, and when each begins and ends."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache

import numpy as np
import numpy.typing as npt

from planner.cost.arrays import Floats
from planner.cost.more_orders import orders_of
from planner.cost.orders import Action
from solver.layout import Ints

Bools = npt.NDArray[np.bool_]

ACTIONS = "FBIW"
"""What the order of a stage names: a forward, a whole backward, and its halves, the input and the weight gradient."""

SIDE_BY_SIDE = ("dualpipe",)
"""Schedules that run a forward of one chunk beside a backward of the other, to hide the transfers of both."""


@dataclass(frozen=True)
class Plan:
    """The actions of all stages, each after those that it waits for; arrays of one length."""

    stage: Ints
    kind: Ints
    """Index into :data:`ACTIONS`."""
    chunk: Ints
    """In model order."""
    micro_batch: Ints
    before: Ints
    """Row of the action that the stage runs before it; -1 for the stage's first."""
    needs: Ints
    """Row of the action whose output it needs; -1 where the data loader has it."""
    beside: Ints
    """The same of the action that runs beside it; of one that runs alone, of itself."""

    def __len__(self) -> int:
        return len(self.stage)

    def sent(self, needs: Ints) -> Bools:
        """Whether the output of some row, that each action needs, comes from another stage."""
        return np.asarray((needs >= 0) & (self.stage[needs] != self.stage))

    @cached_property
    def inputs(self) -> tuple[list[int], ...]:
        """Rows of what each action waits for, as lists: a plan is executed many times."""
        columns = (self.before, self.needs) if np.array_equal(self.needs, self.beside) else (self.before, self.needs, self.beside)
        return tuple(column.tolist() for column in columns)


def plan_of(orders: Sequence[Sequence[Action]], *, beside: bool = False) -> Plan:
    """The actions of every stage's order with what each waits for. Raises RuntimeError where the orders deadlock.

    A forward needs the forward of the chunk before it, a backward or an input gradient that of the chunk after it (on
    the last chunk its own forward), a weight gradient its input gradient. ``beside``: a forward and the whole backward
    that follows it run side by side: both begin when both can, and their outputs leave together.
    """
    kinds, chunks, batches = zip(*(action for order in orders for action in order))
    kind, chunk, micro_batch = np.array([ACTIONS.index(name) for name in kinds]), np.array(chunks), np.array(batches)
    stage = np.repeat(np.arange(len(orders)), [len(order) for order in orders])
    rows = np.arange(len(kind))
    follows = np.diff(stage, prepend=-1) == 0
    needed, output = _outputs(kind, chunk, micro_batch)
    paired = np.zeros(len(rows), dtype=bool)  # a forward with the backward that runs beside it in the next row
    paired[:-1] = beside & (kind[:-1] == ACTIONS.index("F")) & (kind[1:] == ACTIONS.index("B")) & follows[1:]
    maker = np.full(int(max(needed.max(), output.max())) + 2, -1)  # of every output; the last one, at -1, stands for the data loader
    maker[output] = rows + paired
    maker[-1] = -1
    needs = maker[needed]
    other = rows + paired - np.concatenate([[False], paired[:-1]])
    first = np.searchsorted(stage, np.arange(len(orders) + 1)).tolist()
    sequence = _sequence(first, needs.tolist(), needs[other].tolist())
    place = np.full(len(rows) + 1, -1)
    place[sequence] = rows
    before = np.where(follows, rows - 1, -1)
    return Plan(*(column[sequence] for column in (stage, kind, chunk, micro_batch, place[before], place[needs], place[needs[other]])))


def _outputs(kind: Ints, chunk: Ints, micro_batch: Ints) -> tuple[Ints, Ints]:
    """The number of the output that each action needs (-1: none), and of the one that it makes; activations before gradients."""
    last, width = int(chunk.max()), int(micro_batch.max()) + 1
    own, gradients = chunk * width + micro_batch, (last + 1) * width
    forward, weight = (kind == ACTIONS.index(name) for name in "FW")
    of_forward = np.where(chunk > 0, own - width, -1)
    of_backward = np.where(chunk < last, own + width + gradients, own)
    needed = np.where(forward, of_forward, np.where(weight, own + gradients, of_backward))
    return needed, np.where(forward, own, np.where(weight, 2 * gradients, own + gradients))  # a weight gradient goes nowhere


def _sequence(first: list[int], needs: list[int], others: list[int]) -> Ints:
    """The actions of all stages, each after those that it needs; ``first``: the stages' first ones, and how many there are in all."""
    done = bytearray(first[-1] + 1)
    done[-1] = 1  # what needs nothing
    waiting: dict[int, int] = {}  # action -> the stage whose next action needs it
    position, ready = first[:-1], list(range(len(first) - 1))[::-1]
    rows: list[int] = []
    while ready:
        stage = ready.pop()
        row, end = position[stage], first[stage + 1]
        while row < end:
            missing = needs[row] if not done[needs[row]] else others[row]
            if not done[missing]:
                waiting[missing] = stage
                break
            rows.append(row)
            done[row] = 1
            if row in waiting:
                ready.append(waiting.pop(row))
            row += 1
        position[stage] = row
    stuck = [stage for stage, row in enumerate(position) if row < first[stage + 1]]
    if stuck:
        action = position[stuck[0]] - first[stuck[0]]
        raise RuntimeError(f"the orders deadlock: stage {stuck[0]} never gets what action {action} needs")
    return np.array(rows, dtype=np.int64)


def simulate(plan: Plan, seconds: Floats, arrival_seconds: float = 0.0) -> tuple[Floats, Floats]:
    """Start and end of every action if each begins as soon as its stage and its input are there.

    ``seconds``: how long each action takes; ``arrival_seconds``: how much later than it is made an output of another
    stage is there, while both stages go on working.
    """
    ends = [0.0] * (len(plan) + 1)  # the last one, at -1, stands for the begin of the step
    inputs, took = plan.inputs, seconds.tolist()
    if arrival_seconds:
        later = [np.where(plan.sent(rows), arrival_seconds, 0.0).tolist() for rows in (plan.needs, plan.beside)]
        for row, (before, need, late, other, late_too, own) in enumerate(zip(inputs[0], inputs[1], later[0], inputs[-1], later[1], took)):
            ends[row] = max(ends[before], ends[need] + late, ends[other] + late_too) + own
    elif len(inputs) == 3:
        for row, (before, need, other, own) in enumerate(zip(*inputs, took)):
            ends[row] = max(ends[before], ends[need], ends[other]) + own
    else:
        for row, (before, need, own) in enumerate(zip(*inputs, took)):
            free, there = ends[before], ends[need]
            ends[row] = (free if free > there else there) + own
    end = np.array(ends[:-1])
    return end - seconds, end


@lru_cache(maxsize=64)
def plan_for(schedule: str, micro_batches: int, stages: int, chunks: int) -> Plan:
    """The plan of a schedule with so many micro-batches, stages and chunks of a stage."""
    return plan_of(orders_of(schedule, micro_batches, stages, chunks), beside=schedule in SIDE_BY_SIDE)


def spans(plan: Plan, start: Floats, end: Floats) -> tuple[Floats, Floats]:
    """When every stage begins its first action, and when it ends its last."""
    stages = int(plan.stage.max()) + 1
    begins, ends = np.full(stages, np.inf), np.zeros(stages)
    np.minimum.at(begins, plan.stage, start)
    np.maximum.at(ends, plan.stage, end)
    return begins, ends


def span(plan: Plan, start: Floats, end: Floats, *, staggered: bool) -> float:
    """Seconds from the first begin to the last end; ``staggered``: of the stage for which that takes longest.

    Stages that do not wait for each other between steps begin the next one as late after each other as this one.
    """
    begins, ends = spans(plan, start, end)
    return float(np.max(ends - begins)) if staggered else float(np.max(ends))
