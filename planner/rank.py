"""What is best: verdict first, then the chosen measure, ties broken the same way every time."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

import numpy as np

from planner.cost.arrays import Floats
from planner.operations import goodput
from planner.scenario import Scenario
from solver.layout import AXES, Ints

if TYPE_CHECKING:
    from planner.search import Scored

TIE_BREAKERS = (
    "zero_stage",
    "recompute",
    "recompute_layers",
    "tensor_parallel",
    "pipeline_parallel",
    "context_parallel",
    "virtual_pipeline",
)
"""Between equal layouts the simpler one leads; the remaining axes follow in their own order."""

MEASURES: dict[str, Callable[[Scenario, Scored], Floats]] = {
    "step": lambda scenario, scored: scored.step_seconds,
    "memory": lambda scenario, scored: scored.need_bytes,
    "goodput": lambda scenario, scored: scored.step_seconds / goodput(scenario, scored.stack),
    "gpu-hours": lambda scenario, scored: gpu_seconds(scenario, scored),
    "cost": lambda scenario, scored: gpu_seconds(scenario, scored) * scenario.price_usd_per_hour,
}
"""What ``--sort`` may name. Inside one cluster size the last three agree, and differ from step where stacks write other checkpoints."""


def gpu_seconds(scenario: Scenario, scored: Scored) -> Floats:
    """GPU-seconds of a step, with its share of failures, checkpoints and evaluation."""
    return scored.step_seconds * scenario.job.num_gpus / goodput(scenario, scored.stack)


def order(scenario: Scenario, scored: Scored, sort: str = "step") -> Ints:
    """Row numbers, best first: layouts that fit before those at risk, then the measure rounded to 12 digits, then ties."""
    measure = MEASURES[sort](scenario, scored)
    rounded = _significant(measure)
    axes = TIE_BREAKERS + tuple(axis for axis in AXES if axis not in TIE_BREAKERS)
    keys = [getattr(scored.layouts, axis) for axis in reversed(axes)]
    second = scored.need_bytes if sort == "step" else scored.step_seconds
    return np.lexsort([*keys, _significant(scored.need_bytes), _significant(second), rounded, scored.verdict]).astype(np.int64)


def _significant(values: Floats, digits: int = 12) -> Floats:
    """Values rounded to some significant digits, so that the last bits of a sum never decide a rank."""
    positive = np.where(values == 0, 1.0, np.abs(values))
    scale = 10.0 ** (digits - 1 - np.floor(np.log10(positive)))
    return np.asarray(np.round(values * scale) / scale)
