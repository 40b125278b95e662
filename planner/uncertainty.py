"""How far off a prediction may be: residuals of measured runs nearest in kind, each predicted by a fit without its source.

The shipped table (measured_runs/residuals.csv, written by ``python -m tests.published.renew``) holds for every measured
step its logarithmic error and what kind of run it was.
"""

from __future__ import annotations

import csv
import functools
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from planner.cost.arrays import Floats
from planner.scenario import Job
from solver.layout import Layout

RESIDUALS = Path(__file__).with_name("measured_runs") / "residuals.csv"

TRAITS = ("generation", "software", "moe", "low_precision", "tensor", "pipeline", "context", "expert", "sharded")
"""What makes two runs of one kind: silicon, stack, kind of model, precision, and the parallel axes that are in use."""

WEIGHT: Mapping[str, float] = {"generation": 2.0, "software": 3.0, "moe": 4.0, "low_precision": 1.0}
"""How much a shared trait brings two runs together; the others count OTHER."""

OTHER = 0.5
CONFIDENCE = 0.8


def traits(job: Job, layout: Layout) -> dict[str, str]:
    """The kind of a run."""
    flags = {
        "moe": job.model.num_experts > 0,
        "low_precision": job.low_precision,
        "tensor": layout.tensor_parallel > 1,
        "pipeline": layout.pipeline_parallel > 1,
        "context": layout.context_parallel > 1,
        "expert": layout.expert_parallel > 1,
        "sharded": layout.zero_stage == 3,
    }
    return {"generation": job.generation.name, "software": job.software.name, **{k: str(int(v)) for k, v in flags.items()}}


@dataclass(frozen=True)
class Residuals:
    """The table: one entry per measured run."""

    family: np.ndarray
    kind: Mapping[str, np.ndarray]
    log_error: Floats
    """ln(predicted / measured)."""


@functools.cache
def shipped() -> Residuals | None:
    """The shipped table, or None where it was not installed."""
    if not RESIDUALS.is_file():
        return None
    with RESIDUALS.open(newline="", encoding="utf-8") as file:
        rows = list(csv.DictReader(file))
    kind = {trait: np.array([row[trait] for row in rows]) for trait in TRAITS}
    return Residuals(np.array([row["family"] for row in rows]), kind, np.array([float(row["log_error"]) for row in rows]))


@dataclass(frozen=True)
class Band:
    """A prediction with its 80 % band."""

    low: float
    high: float
    """Factors on the predicted step time."""
    extrapolates: bool
    """No measured run shares silicon, stack and kind of model: the band is a guess."""
    nearest: int
    """Measured runs that share all three."""


def band(job: Job, layout: Layout, without_family: str = "") -> Band | None:
    """The 80 % band of a step time from the residuals nearest in kind; None without the table.

    Runs weigh by exp of their likeness, and a family of n runs by n^0.4 in all. ``without_family`` leaves a source out,
    as the check of the band itself must.
    """
    own = traits(job, layout)
    return _band_of(tuple(own[trait] for trait in TRAITS), without_family)


@functools.cache
def _band_of(values: tuple[str, ...], without_family: str) -> Band | None:
    table = shipped()
    if table is None:
        return None
    own = dict(zip(TRAITS, values, strict=True))
    same = {trait: table.kind[trait] == own[trait] for trait in TRAITS}
    likeness = sum(same[trait] * WEIGHT.get(trait, OTHER) for trait in TRAITS)
    weights = np.exp(likeness - likeness.max()) * family_weights(table.family)
    weights = np.where(table.family == without_family, 0.0, weights)
    close = same["generation"] & same["software"] & same["moe"] & (table.family != without_family)
    low, high = _weighted_quantiles(table.log_error, weights, ((1 - CONFIDENCE) / 2, (1 + CONFIDENCE) / 2))
    return Band(float(np.exp(-high)), float(np.exp(-low)), not bool(close.any()), int(close.sum()))


def family_weights(families: np.ndarray) -> Floats:
    """Weights that give a family of n rows a total of n^0.4: large tables inform, but do not drown the small ones."""
    _, inverse, counts = np.unique(families, return_inverse=True, return_counts=True)
    return np.asarray((counts**0.4 / counts)[inverse])


def _weighted_quantiles(values: Floats, weights: Floats, shares: tuple[float, float]) -> tuple[float, float]:
    order = np.argsort(values, kind="stable")
    passed = np.cumsum(weights[order]) - weights[order] / 2
    found = np.interp(np.array(shares) * weights.sum(), passed, values[order])
    return float(found[0]), float(found[1])
