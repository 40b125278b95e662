"""One optimizer step event by event: the order of every stage executed with the cost model's seconds."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache

import numpy as np
import numpy.typing as npt

from planner.cost.arrays import Floats
from planner.cost.layer import dense_kernels, moe_kernels
from planner.cost.more_orders import orders_of
from planner.cost.orders import Action
from planner.cost.passes import Passes
from planner.cost.schedules import SCHEDULES
from planner.cost.stages import Stages, chunk_sizes, layer_kinds, split_stages, stage_of_chunk
from planner.cost.step import between_seconds, boundary_seconds, step_seconds, stragglers
from planner.scenario import Job
from solver.layout import RECOMPUTE, V_SHAPED, Columns, Ints, Layout, columns_of, num_micro_batches

Bools = npt.NDArray[np.bool_]

ACTIONS = "FBIW"
"""What the order of a stage names: a forward, a whole backward, and its halves, the input and the weight gradient."""

KINDS = ("communication", "recompute", "forward", "backward", "backward input", "backward weight", "gradients", "optimizer")
"""What a stage does in an event; the last two once per step: what is exposed of the gradients' reduction, and the optimizer."""

SIDE_BY_SIDE = ("dualpipe",)
"""Schedules that run a forward of one chunk beside a backward of the other, to hide the transfers of both."""

PIECES: dict[str, tuple[tuple[str, tuple[str, ...]], ...]] = {
    "F": (("communication", ("receive_forward",)), ("forward", ("forward",))),
    "B": (("communication", ("receive_backward",)), ("recompute", ("recompute",)), ("backward", ("input", "weight"))),
    "I": (("communication", ("receive_backward",)), ("recompute", ("recompute",)), ("backward input", ("input",))),
    "W": (("backward weight", ("weight",)),),
}
"""Action -> the events that it consists of, first first: (kind, the fields of ChunkSeconds that it takes)."""


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


def plan_of(orders: Sequence[Sequence[Action]], *, beside: bool = False) -> Plan:
    """The actions of every stage's order with what each waits for. Raises RuntimeError where the orders deadlock.

    A forward needs the forward of the chunk before it, a backward or an input gradient that of the chunk after it (on
    the last chunk its own forward), a weight gradient its input gradient. ``beside``: a forward and the whole backward
    that follows it run side by side: both begin when both can, and their outputs leave together.
    """
    last = max(action.chunk for order in orders for action in order)
    width = 1 + max(action.micro_batch for order in orders for action in order)
    made = [-1] * (2 * (last + 1) * width)  # row of the action that made each activation, then of each gradient
    waiting: dict[int, int] = {}  # output -> the stage whose next action needs it
    position, latest = [0] * len(orders), [-1] * len(orders)
    rows: list[tuple[int, int, int, int, int, int, int]] = []
    ready = list(range(len(orders)))[::-1]
    while ready:
        stage = ready.pop()
        order = orders[stage]
        while position[stage] < len(order):
            at = position[stage]
            paired = beside and order[at].kind == "F" and at + 1 < len(order) and order[at + 1].kind == "B"
            together = order[at : at + 1 + paired]
            needed = [_output_needed(action, last, width) for action in together]
            missing = next((output for output in needed if output >= 0 and made[output] < 0), -1)
            if missing >= 0:
                waiting[missing] = stage
                break
            found = [made[output] if output >= 0 else -1 for output in needed]
            for action, own, other in zip(together, found, found[::-1]):
                rows.append((stage, ACTIONS.index(action.kind), action.chunk, action.micro_batch, latest[stage], own, other))
                latest[stage] = len(rows) - 1
            position[stage] += len(together)
            for kind, chunk, micro_batch in together:
                if kind != "W":
                    output = chunk * width + micro_batch + (len(made) // 2 if kind != "F" else 0)
                    made[output] = latest[stage]
                    if output in waiting:
                        ready.append(waiting.pop(output))
    stuck = [stage for stage, order in enumerate(orders) if position[stage] < len(order)]
    if stuck:
        raise RuntimeError(f"the orders deadlock: stage {stuck[0]} never gets what action {position[stuck[0]]} needs")
    return Plan(*np.array(rows, dtype=np.int64).T)


def _output_needed(action: Action, last: int, width: int) -> int:
    """The number of the output that an action needs, activations before gradients; -1: none."""
    own, gradients = action.chunk * width + action.micro_batch, (last + 1) * width
    if action.kind == "F":
        return own - width if action.chunk else -1
    if action.kind == "W":
        return own + gradients
    return own + width + gradients if action.chunk < last else own


def simulate(plan: Plan, seconds: Floats, arrival_seconds: float = 0.0) -> tuple[Floats, Floats]:
    """Start and end of every action if each begins as soon as its stage and its input are there.

    ``seconds``: how long each action takes; ``arrival_seconds``: how much later than it is made an output of another
    stage is there, while both stages go on working.
    """
    inputs = [(plan.needs, plan.sent(plan.needs)), (plan.beside, plan.sent(plan.beside))]
    columns = [plan.before, *(part for rows, sent in inputs for part in (rows, np.where(sent, arrival_seconds, 0.0))), seconds]
    ends = [0.0] * (len(plan) + 1)  # the last one, at -1, stands for the begin of the step
    for row, (before, first, later, second, later_too, own) in enumerate(zip(*(column.tolist() for column in columns))):
        ends[row] = max(ends[before], ends[first] + later, ends[second] + later_too) + own
    end = np.array(ends[:-1])
    return end - seconds, end


@lru_cache(maxsize=64)
def plan_for(schedule: str, micro_batches: int, stages: int, chunks: int) -> Plan:
    """The plan of a schedule with so many micro-batches, stages and chunks of a stage."""
    return plan_of(orders_of(schedule, micro_batches, stages, chunks), beside=schedule in SIDE_BY_SIDE)


@dataclass(frozen=True)
class ChunkSeconds:
    """Seconds of one micro-batch on every chunk, in model order."""

    forward: Floats
    input: Floats
    """The backward without recompute and weight gradients."""
    weight: Floats
    recompute: Floats
    receive_forward: Floats
    """What the stage waits for an activation that is sent to it: the exposed share of the transfer."""
    receive_backward: Floats

    def of(self, plan: Plan) -> Floats:
        """How long every action of a plan takes."""
        table = np.array([sum(sum(getattr(self, name) for name in names) for _, names in PIECES[kind]) for kind in ACTIONS])
        return np.asarray(table[plan.kind, plan.chunk])


def chunk_stages(job: Job, layout: Layout) -> tuple[Stages, Ints]:
    """Every chunk of a layout as a stage of its own, in model order, and the stage that owns it. A stated split wins over the even one."""
    p, v = layout.pipeline_parallel, layout.virtual_pipeline
    owner = stage_of_chunk(p, v, layout.schedule in V_SHAPED)
    sizes = chunk_sizes(job.model.num_layers, p * v)
    if len(job.layers_per_stage) == p:
        of_stage = [iter(chunk_sizes(count, v)) for count in job.layers_per_stage]
        sizes = np.array([next(of_stage[stage]) for stage in owner])
    chunks = split_stages(job.model, sizes, np.arange(p * v), job.num_mtp_layers)
    if len(job.recomputed_per_stage) == p:
        chunks = dataclasses.replace(chunks, recomputed=_recomputed(chunks.model_layers, owner, job.recomputed_per_stage))
    return chunks, owner


def _recomputed(layers: Ints, owner: Ints, of_stage: Sequence[int]) -> Ints:
    """Recomputed layers of every chunk: those of its stage in proportion to its layers, no layer lost by rounding."""
    found = np.zeros_like(layers)
    for stage, count in enumerate(of_stage):
        own = np.flatnonzero(owner == stage)
        upto = np.cumsum(layers[own])
        found[own] = np.diff(upto * count // max(int(upto[-1]), 1), prepend=0)
    return found


def chunk_seconds(job: Job, layout: Layout) -> ChunkSeconds:
    """Every chunk's passes as the step's formula has them, stragglers and the fixed time per micro-batch included.

    Sources: :mod:`planner.cost.passes` for the passes, :mod:`planner.cost.step` for what surrounds them.
    """
    chunks, owner = chunk_stages(job, layout)
    x = columns_of([dataclasses.replace(layout, virtual_pipeline=1)]).take(np.zeros(len(owner), dtype=np.int64))
    plain = dataclasses.replace(x, recompute=0 * x.recompute + RECOMPUTE.index("none"), recompute_layers=0 * x.recompute_layers)
    forward, backward = Passes.of(job, x).through(chunks)
    passes = Passes.of(job, plain)
    _, once = passes.through(dataclasses.replace(chunks, recomputed=np.full(len(owner), -1)))
    weight = weight_seconds(job, plain.take(slice(0, 1)), chunks, passes)
    one = columns_of([layout])
    fixed = between_seconds(job, one)[1] / (2 * layout.virtual_pipeline)
    crossing = owner[1:] != owner[:-1]
    wait = job.physics.p2p_exposed * boundary_seconds(job, one) * crossing
    slow = 1.0 + stragglers(job)
    return ChunkSeconds(
        forward=slow * (forward + fixed),
        input=slow * (once - weight + fixed),
        weight=slow * weight,
        recompute=slow * np.maximum(backward - once, 0.0),
        receive_forward=slow * np.concatenate([[0.0], wait]),
        receive_backward=slow * np.concatenate([wait, [0.0]]),
    )


def weight_seconds(job: Job, x: Columns, chunks: Stages, passes: Passes) -> Floats:
    """What of every chunk's backward can wait: half of the linear layers' products, adding up their gradients, the embedding's backward.

    ``x``: the layout, one row. Attention, element-wise kernels, transfers and launches belong to the input gradient.
    """
    kernels = {False: dense_kernels, True: moe_kernels}
    counts = {False: chunks.dense_layers, True: chunks.moe_layers}
    layers = 0.0
    for moe, present in layer_kinds(job.model).items():
        if present:
            found = kernels[moe](job, x)
            layers = layers + counts[moe] * (found.linear_backward / 2 + found.accumulate)
    ends = passes.ends
    return np.asarray(layers + chunks.has_head * ends.head_backward / 2 + chunks.has_embedding * ends.embedding * 2 / 3)


@dataclass(frozen=True)
class Timeline:
    """The events of one step, stage by stage in their order; arrays of one length."""

    stage: Ints
    kind: Ints
    """Index into :data:`KINDS`."""
    chunk: Ints
    """In model order; -1 for what happens once per step."""
    micro_batch: Ints
    """-1 for what happens once per step."""
    start_seconds: Floats
    end_seconds: Floats
    pipeline_seconds: float
    """Until the last stage is done with the last micro-batch; of a stack whose stages do not wait for each other at the end
    of a step, from a stage's begin to its begin of the next step."""
    total_seconds: float
    """With gradients and optimizer: the step."""

    def __len__(self) -> int:
        return len(self.stage)

    @property
    def num_stages(self) -> int:
        """Stages of the pipeline."""
        return int(self.stage.max()) + 1

    def take(self, index: Ints | Bools) -> Timeline:
        """The selected events."""
        names = [field.name for field in dataclasses.fields(self)[:6]]
        return dataclasses.replace(self, **{name: getattr(self, name)[index] for name in names})

    def busy_seconds(self) -> Floats:
        """Seconds that each stage is busy, waiting for the exposed share of transfers included."""
        return np.asarray(np.bincount(self.stage, self.end_seconds - self.start_seconds), dtype=np.float64)

    def idle_seconds(self, stage: int) -> float:
        """Seconds of the step in which a stage has nothing to do."""
        return float(self.total_seconds - self.busy_seconds()[stage])


def timeline_of(job: Job, layout: Layout) -> Timeline:
    """The step of a layout, event by event.

    Every chunk's passes, the exposed share of every transfer between stages, gradients and optimizer are those of the
    step's formula; where the stages wait follows from their orders instead of the formula's fill.
    """
    m = num_micro_batches(layout, job.global_batch_size)
    plan = plan_for(layout.schedule, m, layout.pipeline_parallel, layout.virtual_pipeline)
    seconds = chunk_seconds(job, layout)
    start, end = simulate(plan, seconds.of(plan))
    staggered = job.software.post_validation and SCHEDULES[layout.schedule].residue
    pipeline = span(plan, start, end, staggered=staggered)
    begins = spans(plan, start, end)[0] if staggered else np.zeros(layout.pipeline_parallel)
    step = step_seconds(job, columns_of([layout]))
    data, optimizer = float(step.data[0]), float(step.optimizer[0])
    events = [_events(plan, seconds, start), *_at_the_end(begins + pipeline, data, optimizer)]
    stage, kind, chunk, micro_batch, begin, finish = (np.concatenate(column) for column in zip(*events, strict=True))
    found = Timeline(stage, kind, chunk, micro_batch, begin, finish, pipeline, pipeline + data + optimizer)
    kept = np.flatnonzero(finish > begin)
    return found.take(kept[np.lexsort([begin[kept], stage[kept]])])


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


_Events = tuple[Ints, Ints, Ints, Ints, Floats, Floats]
"""Columns of a timeline."""


def _events(plan: Plan, seconds: ChunkSeconds, start: Floats) -> _Events:
    """The actions of a plan, each as the events that it consists of; those that take no time too."""
    parts: list[_Events] = []
    for code, action in enumerate(ACTIONS):
        rows = np.flatnonzero(plan.kind == code)
        begin = start[rows]
        for kind, names in PIECES[action]:
            end = begin + sum(getattr(seconds, name) for name in names)[plan.chunk[rows]]
            parts.append((plan.stage[rows], np.full(len(rows), KINDS.index(kind)), plan.chunk[rows], plan.micro_batch[rows], begin, end))
            begin = end
    stage, kinds, chunk, micro_batch, begin, end = (np.concatenate(column) for column in zip(*parts, strict=True))
    return stage, kinds, chunk, micro_batch, begin, end


def _at_the_end(begin: Floats, data: float, optimizer: float) -> list[_Events]:
    """On every stage what is exposed of the gradients' reduction, then the optimizer."""
    stages, once = np.arange(len(begin)), np.full(len(begin), -1)
    named = (("gradients", begin, begin + data), ("optimizer", begin + data, begin + data + optimizer))
    return [(stages, np.full(len(begin), KINDS.index(kind)), once, once, start, end) for kind, start, end in named]
