"""Seconds of one micro-batch forward and backward through any pipeline stage, of every layout at once."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np

from planner.cost.arrays import Floats, Number, each
from planner.cost.ends import EndSeconds
from planner.cost.layer import KEYS, LayerSeconds, sharded
from planner.cost.shared import factors
from planner.cost.stages import Stages, covered_layers
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


@dataclass(frozen=True)
class Passes:
    """The layers and ends of every layout, from which the pass through any stage follows."""

    x: Columns
    layers: _Layers
    ends: EndSeconds

    @staticmethod
    def of(job: Job, x: Columns) -> Passes:
        """The passes of the layouts of a job."""
        first, key = distinct(getattr(x, axis) for axis in KEYS)
        rows = x.take(first)
        found = factors(job, rows)
        kinds = {moe: sharded(job, rows, layer, moe=moe) for moe, layer in found.kinds.items()}
        return Passes(x, _Layers(key, kinds), each(lambda part: part[key], found.ends))

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
