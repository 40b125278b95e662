"""One optimizer step event by event: the order of every stage executed with the cost model's seconds."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from planner.cost.arrays import Floats
from planner.cost.layer import dense_kernels, moe_kernels
from planner.cost.passes import Passes
from planner.cost.plan import ACTIONS, Bools, Plan, plan_for, simulate, span, spans
from planner.cost.schedules import SCHEDULES
from planner.cost.stages import Stages, chunks_of, layer_kinds, split_stages
from planner.cost.step import between_seconds, boundary_seconds, step_seconds, stragglers
from planner.scenario import Job
from solver.layout import RECOMPUTE, V_SHAPED, Columns, Ints, Layout, columns_of, num_micro_batches

KINDS = ("communication", "recompute", "forward", "backward", "backward input", "backward weight", "gradients", "optimizer")
"""What a stage does in an event; the last two once per step: what is exposed of the gradients' reduction, and the optimizer."""

ROUNDS = (6, 8)
"""Micro-batches per stage after which a pipeline is taken to be steady: exact on 200 random ones, but for 1 % of two V-shaped ones
whose chunks differ threefold."""

PIECES: dict[str, tuple[tuple[str, tuple[str, ...]], ...]] = {
    "F": (("communication", ("receive_forward",)), ("forward", ("forward",))),
    "B": (("communication", ("receive_backward",)), ("recompute", ("recompute",)), ("backward", ("input", "weight"))),
    "I": (("communication", ("receive_backward",)), ("recompute", ("recompute",)), ("backward input", ("input",))),
    "W": (("backward weight", ("weight",)),),
}
"""Action -> the events that it consists of, first first: (kind, the fields of ChunkSeconds that it takes)."""


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
    """Every chunk of a layout as a stage of its own, in model order, and the stage that owns it."""
    p, v = layout.pipeline_parallel, layout.virtual_pipeline
    sizes, owner = chunks_of(job, p, v, layout.schedule in V_SHAPED)
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


def plan_of_layout(job: Job, layout: Layout, micro_batches: int = 0) -> Plan:
    """The plan of all micro-batches of a step, or of so many."""
    m = micro_batches or num_micro_batches(layout, job.global_batch_size)
    return plan_for(layout.schedule, m, layout.pipeline_parallel, layout.virtual_pipeline)


def staggered(job: Job, layout: Layout) -> bool:
    """Whether the stages do not wait for each other between steps."""
    return job.software.post_validation and SCHEDULES[layout.schedule].residue


def pipeline_seconds(job: Job, layout: Layout, seconds: ChunkSeconds) -> float:
    """A step without gradients and optimizer: the chunks' passes in the order of the schedule.

    Of many micro-batches only so many are executed that each round of one per stage takes as long as the one before it:
    what a schedule waits for returns with every round.
    """

    def took(micro_batches: int) -> float:
        plan = plan_of_layout(job, layout, micro_batches)
        return span(plan, *simulate(plan, seconds.of(plan)), staggered=staggered(job, layout))

    m = num_micro_batches(layout, job.global_batch_size)
    few, more = executed_micro_batches(layout, m)
    return took(m) if few == more else took(more) + (took(more) - took(few)) * (m - more) / (more - few)


def executed_micro_batches(layout: Layout, m: int) -> tuple[int, int]:
    """The two numbers of micro-batches of which a step's pipeline follows: both all of them where these are few, or in odd groups."""
    p = layout.pipeline_parallel
    few, more = (rounds * p + m % p for rounds in ROUNDS)
    return (few, more) if m > few + more and not (layout.virtual_pipeline > 1 and m % p) else (m, m)


def timeline_of(job: Job, layout: Layout) -> Timeline:
    """The step of a layout, event by event.

    Every chunk's passes, the exposed share of every transfer between stages, gradients and optimizer are those of the
    step's formula; where the stages wait follows from their orders instead of the formula's fill.
    """
    plan = plan_of_layout(job, layout)
    seconds = chunk_seconds(job, layout)
    start, end = simulate(plan, seconds.of(plan))
    overlapping = staggered(job, layout)
    pipeline = span(plan, start, end, staggered=overlapping)
    begins = spans(plan, start, end)[0] if overlapping else np.zeros(layout.pipeline_parallel)
    step = step_seconds(job, columns_of([layout]))
    data, optimizer = float(step.data[0]), float(step.optimizer[0])
    events = [_events(plan, seconds, start), *_at_the_end(begins + pipeline, data, optimizer)]
    stage, kind, chunk, micro_batch, begin, finish = (np.concatenate(column) for column in zip(*events, strict=True))
    found = Timeline(stage, kind, chunk, micro_batch, begin, finish, pipeline, pipeline + data + optimizer)
    kept = np.flatnonzero(finish > begin)
    return found.take(kept[np.lexsort([begin[kept], stage[kept]])])


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
