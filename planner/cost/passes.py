"""Seconds of one micro-batch forward and backward through any pipeline stage, of every layout at once."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np

from planner.cost import compute
from planner.cost.arrays import Floats, Number
from planner.cost.layer import KEYS, LayerSeconds, layer_seconds
from planner.cost.stages import Stages, covered_layers, layer_kinds
from planner.scenario import Job
from solver.grouping import distinct
from solver.layout import SELECTIVE, Columns, Ints


@dataclass(frozen=True)
class _Modes:
    """For each row the shares of its layers under none, selective and full recompute: shape (modes, n)."""

    shares: Floats

    def of(self, part: Floats, key: Ints) -> Floats:
        """A per-layer part (modes, keys) as seconds of the rows' average layer."""
        return np.asarray(sum(self.shares[mode] * part[mode][key] for mode in range(len(self.shares))))


def _modes_of(x: Columns, stage: Stages) -> _Modes:
    full = covered_layers(x, stage) / np.maximum(stage.layers, 1)
    selective = (x.recompute == SELECTIVE).astype(float)
    return _Modes(np.stack([(1.0 - full) * (1.0 - selective), selective, full]))


@dataclass(frozen=True)
class _Layers:
    """Both kinds of layers under every distinct key, and the key of each row."""

    key: Ints
    kinds: dict[bool, LayerSeconds]

    def sum(self, part: str, stage: Stages, modes: _Modes) -> Floats:
        """One part over the layers of a stage."""
        counts = {False: stage.dense_layers, True: stage.moe_layers}
        total: Number = 0.0
        for moe, layer in self.kinds.items():
            values: Floats = getattr(layer, part)
            each = modes.of(values, self.key) if values.ndim == 2 else values[self.key]
            total = total + counts[moe] * each
        return np.asarray(total)


def _layer_table(job: Job, x: Columns) -> _Layers:
    first, key = distinct(getattr(x, axis) for axis in KEYS)
    rows = x.take(first)
    return _Layers(key, {moe: layer_seconds(job, rows, moe=moe) for moe, present in layer_kinds(job.model).items() if present})


@dataclass(frozen=True)
class _EndSeconds:
    """Embedding on the first stage, head and loss on the last, per row and micro-batch."""

    embedding: Floats
    head_forward: Floats
    head_backward: Floats

    @staticmethod
    def of(job: Job, x: Columns) -> _EndSeconds:
        first, key = distinct([x.tensor_parallel, x.context_parallel, x.micro_batch_size])
        rows = x.take(first)
        rates = compute.rates_of(job)
        tokens = job.rank_tokens(rows)
        heads = 1 + job.num_mtp_layers
        forward, backward = compute.head_seconds(job, rates, tokens, rows.tensor_parallel)
        embedding = compute.embedding_seconds(job, rates, tokens)
        return _EndSeconds(embedding[key], heads * forward[key], heads * backward[key])

    def forward(self, stage: Stages) -> Floats:
        """Forward seconds at the ends that the stage holds."""
        return stage.has_embedding * self.embedding / 3 + stage.has_head * self.head_forward

    def backward(self, stage: Stages) -> Floats:
        """Backward seconds at the ends that the stage holds."""
        return stage.has_embedding * self.embedding * 2 / 3 + stage.has_head * self.head_backward


@dataclass(frozen=True)
class Passes:
    """The layers and ends of every layout, from which the pass through any stage follows."""

    x: Columns
    layers: _Layers
    ends: _EndSeconds

    @staticmethod
    def of(job: Job, x: Columns) -> Passes:
        """The passes of the layouts of a job."""
        return Passes(x, _layer_table(job, x), _EndSeconds.of(job, x))

    def through(self, stage: Stages) -> tuple[Floats, Floats]:
        """Forward and backward seconds of one micro-batch through a stage, ends included; one stage per layout."""
        forward, backward = self.parts(("forward", "backward"), stage).values()
        return forward + self.ends.forward(stage), backward + self.ends.backward(stage)

    def parts(self, names: Iterable[str], stage: Stages) -> dict[str, Floats]:
        """Some parts (fields of LayerSeconds) over the layers of a stage, ends apart."""
        modes = _modes_of(self.x, stage)
        return {name: self.layers.sum(name, stage, modes) for name in names}


def whole_model(job: Job, x: Columns) -> Stages:
    """All stages together as one, nothing recomputed, to sum over a pipeline."""
    model = job.model
    ones = np.ones(len(x), dtype=np.int64)
    dense, moe = model.num_layers - model.num_moe_layers, model.num_moe_layers
    if moe:
        moe += job.num_mtp_layers
    else:
        dense += job.num_mtp_layers
    return Stages(0 * ones, dense * ones, moe * ones, model.num_layers * ones, ones, ones, 0 * ones)
