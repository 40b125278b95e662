"""The order of any schedule of the vocabulary: those of :mod:`planner.cost.orders`, and one for ZB-2p, whose authors find it by search."""

from __future__ import annotations

from planner.cost.orders import FORWARD, INPUT_GRADIENT, ORDERS, WEIGHT_GRADIENT, Action, Order, interleaved_1f1b
from solver.layout import micro_batch_group


def zero_bubble_2p(micro_batches: int, stages: int, chunks_per_stage: int = 1) -> Order:
    """ZB-H2: twice the forwards ahead of ZB-H1, the weight gradients of stage r 2r micro-batches late.

    A stage holds up to 2 stages - 1 micro-batches, and with as many of them and equal passes none waits. It stands for
    ZB-2p, whose authors search the order anew for every job under that limit. Source: Qi et al. 2023, section 2.4 (ZB-H2).

    >>> from planner.cost.orders import tell
    >>> tell(zero_bubble_2p(4, 2))
    ['0F0 0F1 0F2 0I0 0W0 0F3 0I1 0W1 0I2 0W2 0I3 0W3', '1F0 1I0 1F1 1I1 1F2 1I2 1W0 1F3 1I3 1W1 1W2 1W3']
    """
    return [_late_line(micro_batches, stage, 2 * (stages - 1 - stage), 2 * stage) for stage in range(stages)]


def _late_line(micro_batches: int, stage: int, ahead: int, late: int) -> list[Action]:
    """So many forwards ahead, then forward and input gradient in turn, the weight gradients so many micro-batches late."""
    actions = [Action(FORWARD, stage, m) for m in range(min(ahead, micro_batches))]
    for m in range(micro_batches):
        if m + ahead < micro_batches:
            actions.append(Action(FORWARD, stage, m + ahead))
        actions.append(Action(INPUT_GRADIENT, stage, m))
        if m >= late:
            actions.append(Action(WEIGHT_GRADIENT, stage, m - late))
    return actions + [Action(WEIGHT_GRADIENT, stage, m) for m in range(max(micro_batches - late, 0), micro_batches)]


def orders_of(schedule: str, micro_batches: int, stages: int, chunks_per_stage: int) -> Order:
    """The actions of every stage under a schedule; interleaved stages take the groups of micro-batches that their memory assumes."""
    if schedule == "zero_bubble_2p":
        return zero_bubble_2p(micro_batches, stages)
    if schedule == "interleaved_1f1b":
        return interleaved_1f1b(micro_batches, stages, chunks_per_stage, group=micro_batch_group(micro_batches, stages))
    return ORDERS[schedule](micro_batches, stages, chunks_per_stage)
