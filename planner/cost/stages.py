"""Which layers each pipeline stage holds under the even split, and the few stages that can be the fullest or slowest."""

from __future__ import annotations

from dataclasses import dataclass, fields, replace

import numpy as np

from planner.catalogue.schema import Model
from planner.cost.arrays import Number
from planner.scenario import Job
from solver.grouping import distinct
from solver.layout import V_CODES, Columns, Ints
from solver.layout import chunk_sizes as even_chunks


def chunk_sizes(num_layers: int, chunks: int) -> Ints:
    """Layers of each chunk in model order: as even as possible, the surplus in the middle chunks.

    The ends carry embedding and head, so the middle takes the odd layers.

    >>> chunk_sizes(61, 8).tolist()
    [7, 8, 8, 8, 8, 8, 7, 7]
    """
    return np.array(even_chunks(num_layers, chunks), dtype=np.int64)


def even_sizes(job: Job, chunks: int) -> Ints:
    """Layers of each chunk where nobody states a split: as the stack cuts them, the surplus in the first or the middle ones."""
    sizes = chunk_sizes(job.model.num_layers, chunks)
    return np.sort(sizes)[::-1] if job.software.surplus_first else sizes


def stage_of_chunk(pipeline: int, per_stage: int, v_shaped: bool) -> Ints:
    """The stage that holds each chunk: round robin, or there and back in a V.

    >>> stage_of_chunk(3, 2, False).tolist(), stage_of_chunk(3, 2, True).tolist()
    ([0, 1, 2, 0, 1, 2], [0, 1, 2, 2, 1, 0])
    """
    if v_shaped:
        return np.concatenate([np.arange(pipeline), np.arange(pipeline)[::-1]])
    return np.tile(np.arange(pipeline), per_stage)


def layer_kinds(model: Model) -> dict[bool, bool]:
    """Whether the model has dense layers (False) and mixture-of-experts layers (True)."""
    return {False: model.num_layers > model.num_moe_layers, True: model.num_moe_layers > 0}


@dataclass(frozen=True)
class Stages:
    """Stages as arrays of one shape; in a table: (kinds of pipeline, candidates)."""

    rank: Ints
    dense_layers: Ints
    moe_layers: Ints
    """Multi-token-prediction layers count here (or as dense ones in a dense model) on the last stage."""
    model_layers: Ints
    """Layers of the model proper, multi-token-prediction layers apart."""
    has_embedding: Ints
    has_head: Ints
    recomputed: Ints
    """Layers of a stated split that full recompute covers; -1: as deep as the layout says."""

    @property
    def layers(self) -> Ints:
        """Layers of both kinds."""
        return self.dense_layers + self.moe_layers

    def take(self, index: object) -> Stages:
        """The selected entries of every array."""
        return Stages(*(getattr(self, field.name)[index] for field in fields(self)))


def joined(parts: list[Stages]) -> Stages:
    """Stages one after another."""
    return Stages(*(np.concatenate([getattr(part, field.name) for part in parts]) for field in fields(Stages)))


def chunks_of(job: Job, pipeline: int, per_stage: int, v_shaped: bool) -> tuple[Ints, Ints]:
    """Layers of every chunk in model order, and the stage that owns it. A stated split wins over the even one."""
    owner = stage_of_chunk(pipeline, per_stage, v_shaped)
    if len(job.layers_per_stage) != pipeline:
        return even_sizes(job, pipeline * per_stage), owner
    of_stage = [iter(chunk_sizes(count, per_stage)) for count in job.layers_per_stage]
    return np.array([next(of_stage[stage]) for stage in owner]), owner


def all_stages(job: Job, pipeline: int, per_stage: int, v_shaped: bool) -> Stages:
    """Every stage of one pipeline, first stage first: arrays of shape (pipeline,)."""
    sizes, owner = chunks_of(job, pipeline, per_stage, v_shaped)
    stages = split_stages(job.model, sizes, owner, job.num_mtp_layers)
    if len(job.recomputed_per_stage) == pipeline:
        stages = replace(stages, recomputed=np.array(job.recomputed_per_stage, dtype=np.int64))
    return stages


def split_stages(model: Model, sizes: Ints, owner: Ints, num_mtp_layers: int) -> Stages:
    """The stages of any split: ``sizes`` of the chunks in model order, and the stage that owns each."""
    pipeline = int(owner.max()) + 1
    ends = np.cumsum(sizes)
    num_dense = model.num_layers - model.num_moe_layers
    dense = np.minimum(ends, num_dense) - np.minimum(ends - sizes, num_dense)

    def per_stage(values: Ints) -> Ints:
        return np.bincount(owner, weights=values, minlength=pipeline).astype(np.int64)

    dense_layers, moe_layers = per_stage(dense), per_stage(sizes - dense)
    last = int(owner[-1])
    (moe_layers if model.num_moe_layers else dense_layers)[last] += num_mtp_layers
    rank = np.arange(pipeline, dtype=np.int64)
    return Stages(
        rank=rank,
        dense_layers=dense_layers,
        moe_layers=moe_layers,
        model_layers=per_stage(sizes),
        has_embedding=(rank == 0).astype(np.int64),
        has_head=(rank == last).astype(np.int64),
        recomputed=np.full(pipeline, -1, dtype=np.int64),
    )


def _candidates(stages: Stages) -> tuple[Ints, Ints]:
    """The stages that can be the fullest or slowest, and how many each stands for: the ends, and of equal middle ones the earliest.

    In every schedule an earlier stage holds at least as many micro-batches as a later one.
    """
    at_end = (stages.has_embedding | stages.has_head).astype(bool)
    ends, middle = np.flatnonzero(at_end), np.flatnonzero(~at_end)
    if not len(middle):
        return ends, np.ones(len(ends), dtype=np.int64)
    first, kind = distinct([stages.dense_layers[middle], stages.moe_layers[middle], stages.recomputed[middle] + 1])
    alike = np.bincount(kind, minlength=len(first))
    return np.concatenate([ends, middle[first]]), np.concatenate([np.ones(len(ends), dtype=np.int64), alike])


def candidate_stages(job: Job, x: Columns) -> tuple[Stages, Ints, Ints]:
    """For each kind of pipeline in ``x`` its candidate stages, how many stages each stands for, and the kind of every row.

    The stages are padded to equal numbers by repetition; a repeated one stands for none.
    """
    v_shaped = np.isin(x.schedule, V_CODES).astype(np.int64)
    first, kind = distinct([x.pipeline_parallel, x.virtual_pipeline, v_shaped])
    found, counts = [], []
    for row in first:
        stages = all_stages(job, int(x.pipeline_parallel[row]), int(x.virtual_pipeline[row]), bool(v_shaped[row]))
        chosen, alike = _candidates(stages)
        found.append(stages.take(chosen))
        counts.append(alike)
    if not found:
        empty = np.zeros((0, 1), dtype=np.int64)
        return Stages(*[empty] * len(fields(Stages))), empty, kind
    width = max(len(stages.rank) for stages in found)
    padded = [stages.take(np.minimum(np.arange(width), len(stages.rank) - 1)) for stages in found]
    table = Stages(*(np.stack([getattr(s, field.name) for s in padded]) for field in fields(Stages)))
    return table, np.stack([np.pad(alike, (0, width - len(alike))) for alike in counts]), kind


def each_candidate(job: Job, x: Columns) -> tuple[list[Stages], list[Ints]]:
    """The candidate stages of every layout, one list entry per candidate, and how many stages of the layout each stands for."""
    table, counts, kind = candidate_stages(job, x)
    numbers = range(table.rank.shape[1])
    return [table.take((slice(None), number)).take(kind) for number in numbers], [counts[:, number][kind] for number in numbers]


def chosen(candidates: list[Stages], number: Ints) -> Stages:
    """For each layout the candidate of some number."""
    rows = np.arange(len(number))
    return Stages(*(np.stack([getattr(stage, field.name) for stage in candidates])[number, rows] for field in fields(Stages)))


def recomputed_layers(layers: Number, chunks: Number, depth: Number) -> Number:
    """Layers that full recompute covers when it covers ``depth`` layers of each of some chunks that are as even as possible.

    >>> int(recomputed_layers(20, 1, 5)), int(recomputed_layers(16, 1, 16)), int(recomputed_layers(7, 2, 3))
    (5, 16, 6)
    """
    small = layers // chunks
    return chunks * np.minimum(depth, small) + (layers - chunks * small) * (depth > small)


def covered_layers(x: Columns, stage: Stages) -> Ints:
    """Layers of each row's stage that full recompute covers; 0 in the other modes (they state no layers)."""
    by_depth = recomputed_layers(stage.model_layers, x.virtual_pipeline, x.recompute_layers)
    return np.asarray(np.where(stage.recomputed >= 0, stage.recomputed, by_depth))
