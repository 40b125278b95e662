"""The best uneven split of one layout's layers over its stages: the cost model's numbers for the solver, its answer costed."""

from __future__ import annotations

import dataclasses
import math
from dataclasses import dataclass
from fractions import Fraction
from typing import Any

import numpy as np

from planner.cost import memory
from planner.cost.arrays import Floats
from planner.cost.bound import linear_fills
from planner.cost.estimate import memory_of, time_of
from planner.cost.passes import Passes, whole_model
from planner.cost.stages import Stages, all_stages, even_sizes, joined, recomputed_layers, stage_of_chunk
from planner.cost.step import StepSeconds
from planner.scenario import Job
from solver import partition
from solver.layout import V_SHAPED, Ints, Layout, columns_of, deepest_chunk, num_micro_batches
from solver.partition import Option, Partition, Piece, Pipeline

FINENESS = 1 << 50
"""The longest step in the solver's unit of time: what a double still tells apart."""

WORTHWHILE = 1e-3
"""Share of the step from which on an uneven split replaces the even one."""

ROUNDING = 1e-6
"""Share of a step by which the solver's whole numbers may be off."""


@dataclass(frozen=True)
class Split:
    """An uneven split with its cost, and how far it is proven."""

    layers_per_stage: tuple[int, ...]
    recomputed_per_stage: tuple[int, ...]
    """Layers of each stage that full recompute covers; empty: as deep as the layout says."""
    chunks: tuple[int, ...]
    """Layers of each chunk, in model order."""
    status: str
    """Of the search for it: "optimal", or "feasible" when its time ran out."""
    gap: float
    """Share of the pipeline's time that a better split might still save; 0 if proven best."""
    step: StepSeconds
    """One row."""
    even_step_seconds: float
    need_bytes: float
    verdict: int

    @property
    def gain(self) -> float:
        """Share of the even split's step that it saves."""
        return 1.0 - float(self.step.total[0]) / self.even_step_seconds


def best_split(
    job: Job, layout: Layout, *, even_step_seconds: float, free_recompute: bool = False, seconds: float = 2.0
) -> tuple[Split | None, str]:
    """The split with the shortest pipeline time among those that need no more than the verdict of the even one allows.

    The split is None where the even one is as good; the second value is the solver's status, which says how far that is
    proven. ``free_recompute``: each stage may recompute any number of its layers instead of the layout's depth.
    """
    pipeline = pipeline_of(job, layout, free_recompute=free_recompute)
    even = even_layers(job, layout)
    found = partition.solve(pipeline, seconds=seconds, hint=even)
    if not found.loads:
        return None, found.status
    recomputed = found.recomputed if free_recompute else ()
    if (found.layers == even and not free_recompute) or (recomputed and not sum(recomputed)):
        return None, found.status  # no recompute at all is another layout, which the search has too
    split = _costed(job, layout, found, recomputed, even_step_seconds)
    return (split, found.status) if split.gain > WORTHWHILE else (None, found.status)


def with_split(job: Job, layers: tuple[int, ...], recomputed: tuple[int, ...] = ()) -> Job:
    """The job with a stated split."""
    return dataclasses.replace(job, layers_per_stage=layers, recomputed_per_stage=recomputed)


def chunks_under(job: Job, layout: Layout, split: Split | None) -> tuple[int, ...]:
    """Layers of each chunk in the model's order, under a split or evenly."""
    sizes = split.chunks if split is not None else even_sizes(job, layout.pipeline_parallel * layout.virtual_pipeline)
    return tuple(int(size) for size in sizes)


def _costed(job: Job, layout: Layout, found: Partition, recomputed: tuple[int, ...], even_step_seconds: float) -> Split:
    """The solver's split under the whole cost model, beside the even one."""
    x, uneven = columns_of([layout]), with_split(job, found.layers, recomputed)
    own = memory_of(uneven, x)
    return Split(
        layers_per_stage=found.layers,
        recomputed_per_stage=recomputed,
        chunks=found.chunks,
        status=found.status,
        gap=found.gap,
        step=time_of(uneven, x),
        even_step_seconds=even_step_seconds,
        need_bytes=float(own.need_bytes[0]),
        verdict=int(own.verdict[0]),
    )


def even_layers(job: Job, layout: Layout) -> tuple[int, ...]:
    """Layers of each stage under the even split."""
    stages = all_stages(job, layout.pipeline_parallel, layout.virtual_pipeline, layout.schedule in V_SHAPED)
    return tuple(int(count) for count in stages.model_layers)


@dataclass(frozen=True)
class _Loads:
    """Every load that a stage may be given, as rows: the stage, its passes in seconds, its need."""

    stages: Stages
    forward: Floats
    backward: Floats
    need_bytes: Floats
    verdict: Ints

    def take(self, index: Ints) -> _Loads:
        return _Loads(self.stages.take(index), *(getattr(self, f.name)[index] for f in dataclasses.fields(self)[1:]))


def pipeline_of(job: Job, layout: Layout, *, free_recompute: bool = False) -> Pipeline:
    """The solver's problem: per stage the loads that fit, their times in its unit, the pieces of the step."""
    p, v = layout.pipeline_parallel, layout.virtual_pipeline
    weights, scale = _pieces(job, layout)
    loads, limit = _affordable(job, layout, weights, free_recompute)
    if free_recompute:
        loads = _loads(job, layout, _any_recompute(loads.stages))
    loads = loads.take(np.flatnonzero(loads.verdict <= limit))
    tick = _tick(loads, weights, scale, p)
    options: list[list[Option]] = [[] for _ in range(p)]
    rows = zip(*(column.tolist() for column in _option_columns(job, layout, loads, tick)), strict=True)
    for stage, *numbers in rows:
        options[stage].append(Option(*numbers))
    return Pipeline(
        num_stages=p,
        chunks_per_stage=v,
        owner=tuple(stage_of_chunk(p, v, layout.schedule in V_SHAPED).tolist()),
        layer_kinds=_kinds(job),
        options=tuple(tuple(own) for own in options),
        pieces=tuple(Piece(*(int(weight * scale) for weight in piece)) for piece in weights),
        scale=scale,
        min_chunk=0,  # the loads say which chunks may be empty
    )


def _kinds(job: Job) -> tuple[int, int]:
    return job.model.num_layers - job.model.num_moe_layers, job.model.num_moe_layers


def _pieces(job: Job, layout: Layout) -> tuple[list[tuple[Fraction, Fraction, Fraction]], int]:
    """The weights of a stage's forward and backward and of the way around in the step, and their common denominator."""
    m = num_micro_batches(layout, job.global_batch_size)
    fills = linear_fills(job, layout.schedule, m, layout.pipeline_parallel, layout.virtual_pipeline)
    exact = [tuple(Fraction(float(weight)).limit_denominator(10_000) for weight in fill) for fill in fills]
    pieces = [(m + forward, m + backward, around) for forward, backward, around in exact]
    return pieces, math.lcm(*(weight.denominator for piece in pieces for weight in piece))


def _affordable(job: Job, layout: Layout, weights: list[tuple[Fraction, Fraction, Fraction]], free_recompute: bool) -> tuple[_Loads, int]:
    """The loads that do not alone make the step longer than the even split is, and the worst verdict of the even split."""
    every_load = _all_loads(job, layout)
    if free_recompute:  # no load is dropped for a recompute that it may do without
        every_load = dataclasses.replace(every_load, recomputed=np.zeros_like(every_load.rank))
    even_stages = all_stages(job, layout.pipeline_parallel, layout.virtual_pipeline, layout.schedule in V_SHAPED)
    model = whole_model(job, columns_of([layout]))
    together = _loads(job, layout, joined([even_stages, model, every_load]))  # one call of the cost model
    p = layout.pipeline_parallel
    even, every, loads = (together.take(np.arange(*span)) for span in ((0, p), (p, p + 1), (p + 1, len(together.forward))))
    through_all, around = (float(np.sum(part.forward + part.backward)) for part in (even, every))
    most = max(float(_weighed(even, piece).max()) + float(piece[2]) * through_all for piece in weights)
    longest = np.max([_weighed(loads, piece) + float(piece[2]) * around for piece in weights], axis=0)
    return loads.take(np.flatnonzero(longest <= most * (1.0 + ROUNDING))), int(even.verdict.max())


def _weighed(loads: _Loads, piece: tuple[Fraction, Fraction, Fraction]) -> Floats:
    return float(piece[0]) * loads.forward + float(piece[1]) * loads.backward


def _all_loads(job: Job, layout: Layout) -> Stages:
    """Every number of layers of both kinds that a stage can hold while every chunk holds one; the last one, with the loss, may be empty."""
    p, v, (dense, moe) = layout.pipeline_parallel, layout.virtual_pipeline, _kinds(job)
    counts = np.arange(v - 1, job.model.num_layers - (p - 1) * v + 2)
    last = int(stage_of_chunk(p, v, layout.schedule in V_SHAPED)[-1])
    first = np.arange(dense + 1)
    rank, layers, of_first = (grid.ravel() for grid in np.meshgrid(np.arange(p), counts, first, indexing="ij"))
    possible = (of_first <= layers) & (layers - of_first <= moe) & (layers >= v - (rank == last))
    rank, layers, of_first = rank[possible], layers[possible], of_first[possible]
    mtp = job.num_mtp_layers * (rank == last)
    return Stages(
        rank=rank,
        dense_layers=of_first + (0 if moe else mtp),
        moe_layers=layers - of_first + (mtp if moe else 0),
        model_layers=layers,
        has_embedding=(rank == 0).astype(np.int64),
        has_head=(rank == last).astype(np.int64),
        recomputed=np.full(len(rank), -1, dtype=np.int64),
    )


def _any_recompute(stages: Stages) -> Stages:
    """Each load once per number of layers that it may recompute."""
    row = np.repeat(np.arange(len(stages.rank)), stages.model_layers + 1)
    within = np.arange(len(row)) - np.repeat(np.cumsum(stages.model_layers + 1) - stages.model_layers - 1, stages.model_layers + 1)
    return dataclasses.replace(stages.take(row), recomputed=within)


def _loads(job: Job, layout: Layout, stages: Stages) -> _Loads:
    """Passes, need and verdict of any stages of a layout."""
    x = columns_of([layout]).take(np.zeros(len(stages.rank), dtype=np.int64))
    forward, backward = Passes.of(job, x).through(stages)
    parts = memory.stage_memory(job, x, stages, memory.loads(job, x))
    need = memory.need_bytes(job, parts)
    return _Loads(stages, forward, backward, need, memory.verdicts(job, need, parts.logits + parts.transient))


def _tick(loads: _Loads, weights: list[tuple[Fraction, Fraction, Fraction]], scale: int, p: int) -> float:
    """Seconds of the solver's unit of time: as fine as the longest step allows."""
    forward, backward = float(loads.forward.max(initial=0.0)), float(loads.backward.max(initial=0.0))
    longest = max(float(f) * forward + float(b) * backward + float(a) * p * (forward + backward) for f, b, a in weights)
    return max(longest, 1e-9) * scale / FINENESS


def _option_columns(job: Job, layout: Layout, loads: _Loads, tick: float) -> list[Ints]:
    """Stage, layers of both kinds, recomputed layers, forward, backward, need of every load: the solver's whole numbers."""
    stages, moe = loads.stages, job.model.num_moe_layers > 0
    by_depth = recomputed_layers(stages.model_layers, layout.virtual_pipeline, layout.recompute_layers)
    first = stages.dense_layers if moe else stages.model_layers
    return [
        stages.rank,
        first,
        stages.model_layers - first,
        np.where(stages.recomputed >= 0, stages.recomputed, by_depth),
        np.rint(loads.forward / tick).astype(np.int64),
        np.rint(loads.backward / tick).astype(np.int64),
        np.ceil(loads.need_bytes / 1024).astype(np.int64),
    ]


def recomputes_all(x: Any, num_layers: int) -> Any:
    """Whether one layout or many recompute every layer: where no framework asks for one depth, each stage may recompute fewer."""
    depth = x.recompute_layers
    return (depth > 0) & (depth == deepest_chunk(x, num_layers))
