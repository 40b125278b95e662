"""Fits the cost model's physical constants to measured step times: priors at the shipped values, robust, identifiable or not.

The fit is a maximum a posteriori estimate in log space. A constant moves only as far as the data pull it away from its
prior; how far its uncertainty shrank says whether the data identify it.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from planner.cost import flops
from planner.cost.arrays import Floats
from planner.cost.estimate import time_of
from planner.errors import InputError
from planner.measured import Run
from planner.scenario import Job
from solver.layout import columns_of


@dataclass(frozen=True)
class Constant:
    """A constant that a fit may move: which record holds it, and how well it is known beforehand."""

    record: str
    """"generation", "software" or "physics"."""
    field: str
    width: float
    """Standard deviation of its logarithm before any data."""
    most: float
    """Largest factor up or down that a fit may apply."""


CONSTANTS: tuple[Constant, ...] = (
    Constant("generation", "matmul_efficiency", 0.09, 1.4),
    Constant("generation", "hbm_efficiency", 0.15, 1.4),
    Constant("generation", "flash1", 0.225, 1.8),
    Constant("generation", "flash2", 0.18, 1.8),
    Constant("generation", "fused", 0.18, 1.8),
    Constant("generation", "fp8_share", 0.12, 1.4),
    Constant("generation", "fp4_share", 0.18, 1.6),
    Constant("generation", "rowwise_factor", 0.3, 1.8),
    Constant("generation", "link_efficiency", 0.18, 1.5),
    Constant("generation", "nic_efficiency", 0.15, 1.5),
    Constant("software", "matmul_quality", 0.075, 1.5),
    Constant("software", "elementwise_passes", 0.375, 2.0),
    Constant("software", "launch_floor_seconds", 0.75, 4.0),
    Constant("software", "fixed_step_seconds", 0.6, 4.0),
    Constant("software", "tensor_exposed_forward", 0.3, 2.0),
    Constant("software", "tensor_exposed_backward", 0.375, 2.5),
    Constant("software", "expert_exposed", 0.45, 2.5),
    Constant("physics", "wave_exponent", 0.375, 1.8),
    Constant("physics", "grouped_factor", 0.18, 1.6),
    Constant("physics", "misaligned_head_slowdown", 0.375, 2.0),
    Constant("physics", "attention_head_exponent", 0.45, 2.0),
    Constant("physics", "attention_sequence_half", 0.6, 3.0),
    Constant("physics", "score_traffic_bytes", 0.3, 2.0),
    Constant("physics", "torch_softmax_factor", 0.3, 2.0),
    Constant("physics", "eager_norm_bytes", 0.3, 2.0),
    Constant("physics", "compile_factor", 0.375, 2.0),
    Constant("physics", "accumulate_share", 0.6, 3.0),
    Constant("physics", "permutation_passes", 0.6, 3.0),
    Constant("physics", "loss_traffic_bytes", 0.6, 3.0),
    Constant("physics", "floor_tensor", 0.6, 3.0),
    Constant("physics", "floor_tensor_wide", 0.6, 3.0),
    Constant("physics", "moe_floor_seconds", 0.6, 3.0),
    Constant("physics", "moe_floor_per_expert_seconds", 0.6, 3.0),
    Constant("physics", "moe_floor_partial_graphs", 0.45, 2.0),
    Constant("physics", "moe_floor_full_graphs", 0.6, 3.0),
    Constant("physics", "context_exposed", 0.6, 3.0),
    Constant("physics", "fsdp_disturbance", 0.525, 3.0),
    Constant("physics", "fsdp_first_layer", 0.6, 3.0),
    Constant("physics", "optimizer_traffic_bytes", 0.375, 2.0),
    Constant("physics", "half_optimizer_traffic_bytes", 0.375, 2.0),
    Constant("physics", "gradient_passes", 0.525, 2.5),
    Constant("physics", "micro_batch_seconds", 0.6, 3.0),
    Constant("physics", "straggler", 0.6, 3.0),
    Constant("physics", "data_residue", 0.6, 3.0),
)

NOISE = 0.06
"""Scatter of measured step times around a right model, as a logarithm."""

STEP = 0.02
"""Finite difference of a constant's logarithm."""

Knob = tuple[str, str, Constant]
"""(record kind, record name, constant)."""


def knobs(runs: Sequence[Run]) -> list[Knob]:
    """Every constant of every record that some run uses."""
    found: dict[tuple[str, str, str], Knob] = {}
    for run in runs:
        for constant in CONSTANTS:
            record = getattr(run.job, constant.record)
            if getattr(record, constant.field) > 0:
                found.setdefault((constant.record, record.name, constant.field), (constant.record, record.name, constant))
    return [found[key] for key in sorted(found)]


def adjusted(job: Job, logs: Mapping[tuple[str, str, str], float]) -> Job:
    """The job with constants multiplied by exp of the given logarithms, keyed by record kind, record name and field."""
    for kind in ("generation", "software", "physics"):
        record = getattr(job, kind)
        changes = {
            field: getattr(record, field) * float(np.exp(log))
            for (own_kind, name, field), log in logs.items()
            if own_kind == kind and name == record.name and log
        }
        if changes:
            job = dataclasses.replace(job, **{kind: dataclasses.replace(record, **changes)})
    return job


def log_seconds(run: Run, logs: Mapping[tuple[str, str, str], float]) -> float:
    """Logarithm of the predicted step time under adjusted constants."""
    return float(np.log(time_of(adjusted(run.job, logs), columns_of([run.layout])).total[0]))


def key_of(knob: Knob) -> tuple[str, str, str]:
    """What identifies a knob among adjustments."""
    return knob[0], knob[1], knob[2].field


@dataclass(frozen=True)
class Linear:
    """Log predictions and their derivatives at one setting of the constants."""

    logs: Floats
    slopes: Floats
    """Shape (runs, knobs)."""


def linearise(runs: Sequence[Run], moving: Sequence[Knob], at: Floats) -> Linear:
    """Predictions and derivatives by finite differences; a constant touches only the runs that use its record."""
    settings = {key_of(knob): float(log) for knob, log in zip(moving, at, strict=True)}
    base = np.array([log_seconds(run, settings) for run in runs])
    slopes = np.zeros((len(runs), len(moving)))
    for column, knob in enumerate(moving):
        kind, name, _ = knob
        shifted = {**settings, key_of(knob): settings[key_of(knob)] + STEP}
        for row, run in enumerate(runs):
            if getattr(run.job, kind).name == name:
                slopes[row, column] = (log_seconds(run, shifted) - base[row]) / STEP
    return Linear(base, slopes)


def solve(
    linear: Linear, at: Floats, measured: Floats, weights: Floats, widths: Floats, limits: Floats, centre: Floats | float = 0.0
) -> tuple[Floats, Floats]:
    """One robust Gauss-Newton solution in log space: the new constants and their posterior standard deviations.

    Cauchy weights at NOISE keep a wrong row from pulling; the prior sits at ``centre`` with the given widths.
    """
    new: Floats = at.copy()
    for _ in range(8):
        residual = measured - (linear.logs + linear.slopes @ (new - at))
        robust = weights / (1.0 + (residual / NOISE) ** 2)
        normal = (linear.slopes * robust[:, None]).T @ linear.slopes / NOISE**2 + np.diag(widths**-2)
        target = measured - linear.logs + linear.slopes @ at
        pulled = (linear.slopes * robust[:, None]).T @ target / NOISE**2 + centre * widths**-2
        new = np.asarray(np.clip(np.linalg.solve(normal, pulled), centre - limits, centre + limits), dtype=np.float64)
    return new, np.sqrt(np.diag(np.linalg.inv(normal)))


IDENTIFIED, PARTLY = 0.5, 0.85
"""Posterior over prior width below which the data identify a constant, or do so in part."""

MOST_RUNS = 400


@dataclass(frozen=True)
class Calibration:
    """What a fit to a user's own runs found."""

    runs: list[Run]
    moving: list[Knob]
    logs: Floats
    """Fitted logarithms over the shipped values."""
    shrinkage: Floats
    """Posterior over prior standard deviation of each knob: 1 = the data say nothing."""
    before: Floats
    """Relative errors with the shipped constants, one per run."""
    after: Floats
    left_out: Floats
    """Errors of each run predicted by a fit to the others."""

    def profile(self) -> dict[tuple[str, str], dict[str, float]]:
        """The constants that the data at least partly identify, at their fitted values."""
        found: dict[tuple[str, str], dict[str, float]] = {}
        for knob, log, shrunk in zip(self.moving, self.logs, self.shrinkage, strict=True):
            if shrunk < PARTLY:
                kind, name, constant = knob
                record = next(getattr(run.job, kind) for run in self.runs if getattr(run.job, kind).name == name)
                found.setdefault((kind, name), {})[constant.field] = getattr(record, constant.field) * float(np.exp(log))
        return found


def calibrate(runs: list[Run]) -> Calibration:
    """Fits the constants to measured steps. Raises InputError for no usable run, too many, or an impossible one."""
    if not runs:
        raise InputError("no row with a step time that can be predicted")
    if len(runs) > MOST_RUNS:
        raise InputError(f"{len(runs)} runs; calibrate takes at most {MOST_RUNS} of your own, 1 to 20 are enough")
    for run in runs:
        refuse_nonsense(run)
    moving = knobs(runs)
    measured = np.log([run.step_seconds for run in runs])
    widths = np.array([knob[2].width for knob in moving])
    limits = np.log([knob[2].most for knob in moving])
    equal = np.ones(len(runs))
    at = np.zeros(len(moving))
    linear = linearise(runs, moving, at)
    before = np.exp(linear.logs - measured) - 1.0
    for _ in range(2):
        at, deviation = solve(linear, at, measured, equal, widths, limits)
        linear = linearise(runs, moving, at)
    left_out = np.zeros(len(runs))
    for row in range(len(runs)):
        others = np.arange(len(runs)) != row
        part = Linear(linear.logs[others], linear.slopes[others])
        without, _ = solve(part, at, measured[others], equal[others], widths, limits)
        left_out[row] = np.exp(linear.logs[row] + linear.slopes[row] @ (without - at) - measured[row]) - 1.0
    after = np.exp(linear.logs - measured) - 1.0
    return Calibration(runs, moving, at, deviation / widths, before, after, left_out)


def refuse_nonsense(run: Run) -> None:
    """Raise InputError for a run faster than the peak FLOP rate allows."""
    rate = flops.model_flops_per_step(run.job) / (run.step_seconds * run.job.num_gpus)
    if rate > run.job.peak_flops:
        raise InputError(
            f"row {run.id}: step_seconds = {run.step_seconds} means {rate / 1e12:.0f} TFLOP/s per GPU, above the peak of "
            f"{run.job.peak_flops / 1e12:.0f} ({run.job.gpu.name}, {run.job.precision})"
        )
