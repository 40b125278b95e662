"""The order in which each pipeline stage runs its forward and backward passes, schedule by schedule.

A stage is a list of actions, first to last. Chunks are numbered in the model's order; which stage holds which chunk is the
schedule's: chunk i on stage i % stages, under a V shape on stage i and then 2 stages - 1 - i.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Callable, Iterable, Sequence
from typing import NamedTuple

FORWARD, BACKWARD, INPUT_GRADIENT, WEIGHT_GRADIENT = "F", "B", "I", "W"
"""A backward pass is either whole (B), or its gradient of the inputs (I) and, later, that of the weights (W)."""


class Action(NamedTuple):
    """One pass of one micro-batch through one chunk."""

    kind: str
    """One of F, B, I, W."""
    chunk: int
    micro_batch: int

    def __str__(self) -> str:
        return f"{self.chunk}{self.kind}{self.micro_batch}"


Order = list[list[Action]]
"""Stage -> its actions."""


def gpipe(micro_batches: int, stages: int, chunks_per_stage: int = 1) -> Order:
    """Every forward, then every backward. Source: Huang et al. 2019, GPipe.

    >>> tell(gpipe(2, 2))
    ['0F0 0F1 0B0 0B1', '1F0 1F1 1B0 1B1']
    """
    every = range(micro_batches)
    return [[Action(kind, stage, m) for kind in (FORWARD, BACKWARD) for m in every] for stage in range(stages)]


def one_f_one_b(micro_batches: int, stages: int, chunks_per_stage: int = 1) -> Order:
    """A stage runs one forward for each stage behind it, then forward and backward in turn. Source: Narayanan et al. 2021, section 2.2.

    >>> tell(one_f_one_b(3, 2))
    ['0F0 0F1 0B0 0F2 0B1 0B2', '1F0 1B0 1F1 1B1 1F2 1B2']
    """
    return [_alternating(_passes(micro_batches, [stage], micro_batches), stages - 1 - stage) for stage in range(stages)]


def interleaved_1f1b(micro_batches: int, stages: int, chunks_per_stage: int, group: int = 0) -> Order:
    """As 1F1B, chunk by chunk: so many micro-batches run through one chunk of a stage, then through the next.

    ``group``: micro-batches at a time; 0 = as PyTorch takes them, which is ``stages`` where that divides the micro-batches.
    Source: Narayanan et al. 2021, section 2.2; torch/distributed/pipelining/schedules.py, ScheduleInterleaved1F1B;
    Megatron-Core, pipeline_parallel/schedules.py (group = microbatch_group_size_per_vp_stage, by default the stages).

    >>> tell(interleaved_1f1b(2, 2, 2))[1]
    '1F0 1F1 3F0 3B0 3F1 3B1 1B0 1B1'
    """
    group = group or micro_batches // max(1, micro_batches // stages)
    order = []
    for stage in range(stages):
        chunks = [stage + stages * place for place in range(chunks_per_stage)]
        ahead = (chunks_per_stage - 1) * group + 2 * (stages - 1 - stage)
        order.append(_alternating(_passes(micro_batches, chunks, group), ahead))
    return order


def _passes(micro_batches: int, chunks: Sequence[int], group: int) -> list[tuple[int, int]]:
    """(chunk, micro-batch) of a stage's forward passes."""
    starts = range(0, micro_batches, group)
    return [(chunk, m) for start in starts for chunk in chunks for m in range(start, min(start + group, micro_batches))]


def _alternating(forwards: list[tuple[int, int]], ahead: int) -> list[Action]:
    """Some forwards ahead, then forward and backward in turn, then the backwards that are left; a group goes back last chunk first."""
    chunks = list(dict.fromkeys(chunk for chunk, _ in forwards))
    mirror = dict(zip(chunks, reversed(chunks)))
    backwards = [Action(BACKWARD, mirror[chunk], m) for chunk, m in forwards]
    ahead = min(ahead, len(forwards))
    actions = [Action(FORWARD, *forward) for forward in forwards[:ahead]]
    for forward, backward in zip(forwards[ahead:], backwards):
        actions += [Action(FORWARD, *forward), backward]
    return actions + backwards[len(forwards) - ahead :]


def zero_bubble_h1(micro_batches: int, stages: int, chunks_per_stage: int = 1) -> Order:
    """As 1F1B with the backward in two: stage r runs the weight gradients r micro-batches late, which fills the drain.

    Every stage holds as many micro-batches as there are stages. Source: Qi et al. 2023, section 2.3 (ZB-H1);
    torch/distributed/pipelining/schedules.py, ScheduleInterleavedZeroBubble with one chunk per stage.

    >>> tell(zero_bubble_h1(3, 2))
    ['0F0 0F1 0I0 0W0 0F2 0I1 0W1 0I2 0W2', '1F0 1I0 1F1 1I1 1W0 1F2 1I2 1W1 1W2']
    """
    order = []
    for stage in range(stages):
        ahead = min(stages - 1 - stage, micro_batches)
        line = _Line()
        line.add(FORWARD, *[stage] * ahead)
        for m in range(micro_batches):
            line.add(FORWARD, *[stage] * (m < micro_batches - ahead))
            line.add(INPUT_GRADIENT, stage)
            line.add(WEIGHT_GRADIENT, *[stage] * (m >= stage))
        line.add(WEIGHT_GRADIENT, *[stage] * (micro_batches - line.count[WEIGHT_GRADIENT, stage]))
        order.append(line.actions)
    return order


class _Line:
    """A stage's actions as they are added: each pass takes the next micro-batch of its chunk."""

    def __init__(self) -> None:
        self.actions: list[Action] = []
        self.count: Counter[tuple[str, int]] = Counter()
        self.late: deque[Action] = deque()
        """Weight gradients that are to come, oldest first."""

    def add(self, kind: str, *chunks: int) -> None:
        """One pass after another through the given chunks."""
        for chunk in chunks:
            counted = INPUT_GRADIENT if kind == BACKWARD else kind
            self.actions.append(Action(kind, chunk, self.count[counted, chunk]))
            self.count[counted, chunk] += 1

    def both(self, chunk: int) -> None:
        """Input gradients, and the weight gradients right behind them."""
        self.add(INPUT_GRADIENT, chunk)
        self.add(WEIGHT_GRADIENT, chunk)

    def beside(self, forward: int, back: int) -> None:
        """A forward pass that runs beside a whole backward pass."""
        self.add(FORWARD, forward)
        self.add(BACKWARD, back)

    def back(self, chunk: int, *, whole: bool) -> None:
        """A backward pass, or its input gradients with those of the weights kept for later."""
        self.add(BACKWARD if whole else INPUT_GRADIENT, chunk)
        if not whole:
            self.late.append(Action(WEIGHT_GRADIENT, chunk, self.actions[-1].micro_batch))

    def catch_up(self) -> None:
        """The oldest weight gradients that were kept for later, where there are any."""
        if self.late:
            self.actions.append(self.late.popleft())


def zero_bubble_v(micro_batches: int, stages: int, chunks_per_stage: int = 2) -> Order:
    """Two chunks per stage in a V, weight gradients apart: the drain runs input gradients first.

    Laid out for at least 2 stages - 1 micro-batches; of fewer, the passes that do not exist are left out.
    Source: Qi et al. 2023, section 6 (ZB-V); torch/distributed/pipelining/schedules.py, ScheduleZBVZeroBubble.

    >>> tell(zero_bubble_v(1, 1))
    ['0F0 1F0 1I0 1W0 0I0 0W0']
    """
    whole = max(2 * stages - 1, micro_batches)
    lines = (_zero_bubble_v_line(whole, stages, stage) for stage in range(stages))
    return [[action for action in line if action.micro_batch < micro_batches] for line in lines]


def _zero_bubble_v_line(micro_batches: int, stages: int, stage: int) -> list[Action]:
    near, far, line = stage, 2 * stages - 1 - stage, _Line()
    line.add(FORWARD, *[near] * (2 * (stages - stage) - 1))
    line.add(FORWARD, *[far, near] * stage)
    for _ in range(stages - stage):
        line.add(FORWARD, far)
        line.both(far)
    while line.count[FORWARD, far] < micro_batches:
        line.add(FORWARD, *[near] * (line.count[FORWARD, near] < micro_batches))
        line.both(near)
        line.add(FORWARD, far)
        line.both(far)
    line.add(INPUT_GRADIENT, *[near, far] * stage)
    for _ in range(stages - stage):
        line.both(near)
    for chunk in (far, near):
        line.add(WEIGHT_GRADIENT, *[chunk] * (micro_batches - line.count[WEIGHT_GRADIENT, chunk]))
    return line.actions


def dualpipe(micro_batches: int, stages: int, chunks_per_stage: int = 2) -> Order:
    """DualPipe folded into a V: in the steady state a forward pass of one chunk runs beside a backward pass of the other.

    Such a pair is written as its forward and then its backward pass. Needs 2 stages micro-batches.
    Source: DeepSeek-AI 2024, section 3.2.1, and DualPipeV's table of schedules;
    torch/distributed/pipelining/schedules.py, ScheduleDualPipeV.

    >>> tell(dualpipe(2, 1))
    ['0F0 1F0 0F1 1B0 1F1 0B0 1B1 0I1 0W1']
    """
    if micro_batches < 2 * stages:
        raise ValueError(f"dualpipe needs at least {2 * stages} micro-batches for {stages} stages, not {micro_batches}")
    return [_dualpipe_line(micro_batches, stages, stage) for stage in range(stages)]


def _dualpipe_line(micro_batches: int, stages: int, stage: int) -> list[Action]:
    near, far, line = stage, 2 * stages - 1 - stage, _Line()
    behind = stages - 1 - stage
    line.add(FORWARD, *[near] * (2 * behind), *[near, far] * (stage + 1))
    for _ in range(behind):
        line.back(far, whole=False)
        line.catch_up()
        line.add(FORWARD, far)
    for _ in range(micro_batches - 2 * stages + stage + 1):
        line.beside(near, far)
        line.beside(far, near)
    for _ in range(behind):
        line.back(far, whole=True)
        line.beside(far, near)
    for step in range(2 * (stage + 1)):  # the second half keeps weight gradients for later; on odd stages it begins a pass earlier
        line.back(near if step % 2 else far, whole=step < stage + 1)
    for _ in range(behind):
        line.catch_up()
        line.back(near, whole=False)
    while line.late:
        line.catch_up()
    return line.actions


ORDERS: dict[str, Callable[[int, int, int], Order]] = {
    "gpipe": gpipe,
    "1f1b": one_f_one_b,
    "interleaved_1f1b": interleaved_1f1b,
    "zero_bubble_h1": zero_bubble_h1,
    "zero_bubble_v": zero_bubble_v,
    "dualpipe": dualpipe,
}
"""Schedule -> (micro-batches, stages, chunks per stage) -> its order. ZB-2p has none: its authors find it by search."""


def tell(order: Order) -> list[str]:
    """Each stage's actions as one text."""
    return [" ".join(map(str, actions)) for actions in order]


def most_held(actions: Iterable[Action]) -> int:
    """Chunk passes whose activations a stage holds at its fullest: from the forward pass to the last gradient.

    >>> most_held(one_f_one_b(8, 4)[0])
    4
    """
    held = most = 0
    for action in actions:
        held += {FORWARD: 1, BACKWARD: -1, WEIGHT_GRADIENT: -1}.get(action.kind, 0)
        most = max(most, held)
    return most
