"""How sure the first place of a shortlist is: its steps under many draws of what the cost model does not know exactly.

The physical constants are drawn, each by its posterior deviation from the fit to the shipped runs
(measured_runs/deviations.csv, written by ``python -m tests.published.renew``): one draw moves all layouts together.
Beside that, what no constant explains: layouts of one job that differ by a doubling along one axis err by SCATTER apart.
"""

from __future__ import annotations

import csv
import dataclasses
import functools
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import numpy as np

from planner.calibrate import CONSTANTS, Constant, adjusted
from planner.cost.arrays import Floats
from planner.cost.estimate import time_of
from planner.frameworks.legality import jobs_by_framework
from planner.refine import Shortlist
from planner.scenario import Job
from planner.search import Scored, SearchResult
from planner.simulated import steps_of
from solver.grouping import distinct
from solver.layout import FULL, MESH_AXES, SIZES, Columns, Ints, deepest_chunk

DEVIATIONS = Path(__file__).with_name("measured_runs") / "deviations.csv"

DRAWS, SEED = 1000, 0

NODE = 1.5
"""Deviations from its shipped value at which a constant is tried, below and above."""

SCATTER = 0.035
"""Standard deviation of the error, as a logarithm, between two layouts of one job that differ by a doubling along one axis.

Found on the shipped runs in 104 groups (4,028 pairs) that differ in their layout alone. By the constants alone the pick of
a group led in 95 % of the draws, yet was the fastest measured in 78 % of the groups; with this scatter on every axis, and
1.6 % of scatter between repeated runs, it led in 78 %. By axis: 7 % tensor, 4 % pipeline, micro-batch and recompute, 2 %
schedule; too few pairs for the others.
"""

EQUAL = 1e-3
"""Layouts whose steps agree within this share in every draw of the constants are one group."""

LEADS = 0.5
"""Share of draws below which the first place is luck."""

MOST_RIVALS = 20
"""Layouts of other meshes that compete with a shortlist."""

MOST_SHOWN = 50
"""Layouts of a shortlist that compete: the draws of a longer one would fill the memory."""

MOST_DECIDING = 3
"""Causes named of what decides between the first and its rival."""

LEAST_SHARE = 0.1
"""Share of the variance below which a cause does not decide."""

SWITCHES = ("schedule", "zero_stage", "recompute")
"""Axes whose values all lie equally far apart."""


@dataclass(frozen=True)
class Unfitted:
    """A constant that no fit moves, with the deviation of its logarithm that is taken for it, and why."""

    record: str
    field: str
    width: float
    reason: str


UNFITTED: tuple[Unfitted, ...] = (
    Unfitted("generation", "k_overhead", 0.2, "measured product tables"),
    Unfitted("generation", "backward_ratio", 0.1, "kernel tables, +-10 % as the attention rates beside it"),
    Unfitted("generation", "cast_bytes", 0.3, "one fit for all generations; traffic counted within a third"),
    Unfitted("generation", "link_latency_seconds", 0.6, "not identified by any measured run: a factor of 1.8"),
    Unfitted("generation", "nic_latency_seconds", 0.6, "not identified by any measured run: a factor of 1.8"),
    Unfitted("generation", "node_latency_seconds", 0.6, "not identified by any measured run: a factor of 1.8"),
    Unfitted("generation", "link_all_to_all_efficiency", 0.25, "the catalogue's +-25 %"),
    Unfitted("generation", "nic_all_to_all_efficiency", 0.25, "the catalogue's +-25 %"),
    Unfitted("software", "single_nic_share", 0.3, "one stack's habit, seen in one source"),
    Unfitted("physics", "expert_imbalance", 0.04, "assumed 7 % above even; 2 to 12 % are reported"),
    Unfitted("physics", "score_backward_factor", 0.2, "fitted once with the score traffic"),
    Unfitted("physics", "norm_bytes", 0.2, "bytes counted from the kernels"),
    Unfitted("physics", "embedding_traffic_bytes", 0.3, "bytes counted from the kernels"),
    Unfitted("physics", "floor_backward", 0.2, "launch counts of a backward layer"),
    Unfitted("physics", "floor_low_precision", 0.2, "launch counts, hardly identified"),
    Unfitted("physics", "floor_graphs", 0.6, "hardly identified: a factor of 1.8"),
    Unfitted("physics", "moe_floor_token_drop", 0.6, "hardly identified: a factor of 1.8"),
    Unfitted("physics", "fixed_step_graphs", 0.6, "hardly identified: a factor of 1.8"),
    Unfitted("physics", "data_window", 0.2, "hardly identified; a share of 0.83 can hardly exceed 1"),
    Unfitted("physics", "fill_window", 0.4, "hardly identified; half of the fill, between a third and three quarters"),
    Unfitted("physics", "p2p_exposed", 0.6, "hardly identified: a factor of 1.8"),
    Unfitted("physics", "p2p_latency_seconds", 0.6, "hardly identified: a factor of 1.8"),
    Unfitted("physics", "micro_batch_no_pipeline_seconds", 0.6, "as micro_batch_seconds"),
    Unfitted("physics", "zero_bubble_residue", 0.6, "hardly identified: a factor of 1.8"),
)

MEANING: Mapping[str, str] = {
    "matmul_efficiency": "matrix-product rate",
    "matmul_quality": "matrix-product rate",
    "wave_exponent": "cost of partly filled waves",
    "hbm_efficiency": "HBM efficiency",
    "flash1": "attention rate",
    "flash2": "attention rate",
    "fused": "attention rate",
    "backward_ratio": "attention rate",
    "link_efficiency": "NVLink efficiency",
    "nic_efficiency": "NIC efficiency",
    "link_latency_seconds": "NVLink latency",
    "nic_latency_seconds": "network latency",
    "node_latency_seconds": "network latency",
    "link_all_to_all_efficiency": "all-to-all efficiency of NVLink",
    "nic_all_to_all_efficiency": "all-to-all efficiency of the NIC",
    "elementwise_passes": "element-wise traffic",
    "norm_bytes": "element-wise traffic",
    "compile_factor": "element-wise traffic left by the compiler",
    "launch_floor_seconds": "launch time",
    "floor_backward": "launch time",
    "floor_tensor": "launch time",
    "floor_tensor_wide": "launch time",
    "moe_floor_seconds": "launch time of experts",
    "moe_floor_per_expert_seconds": "launch time of experts",
    "fixed_step_seconds": "fixed time per step",
    "tensor_exposed_forward": "exposed share of tensor traffic",
    "tensor_exposed_backward": "exposed share of tensor traffic",
    "expert_exposed": "exposed share of expert traffic",
    "context_exposed": "exposed share of context traffic",
    "p2p_exposed": "exposed share of stage boundaries",
    "p2p_latency_seconds": "latency of stage boundaries",
    "data_window": "window that hides gradient traffic",
    "fill_window": "window that hides gradient traffic",
    "data_residue": "exposed share of gradient traffic",
    "fsdp_disturbance": "disturbance by ZeRO-3 transfers",
    "fsdp_first_layer": "unhidden ZeRO-3 transfers",
    "micro_batch_seconds": "fixed time per micro-batch",
    "micro_batch_no_pipeline_seconds": "fixed time per micro-batch",
    "accumulate_share": "gradient accumulation traffic",
    "optimizer_traffic_bytes": "optimizer traffic",
    "half_optimizer_traffic_bytes": "optimizer traffic",
    "gradient_passes": "gradient passes",
    "zero_bubble_residue": "bubble left by zero-bubble schedules",
    "grouped_factor": "rate of grouped products",
    "expert_imbalance": "imbalance of the experts",
    "permutation_passes": "token permutation traffic",
    "loss_traffic_bytes": "loss traffic",
    "straggler": "stragglers",
}
"""What a constant is in a sentence such as "where the ... is higher"; the others go by their own name."""

Key = tuple[str, str, str]
"""(record kind, record name, field)."""


@functools.cache
def shipped_deviations() -> Mapping[Key, float]:
    """Posterior standard deviations of the constants' logarithms, or nothing where the table was not installed."""
    if not DEVIATIONS.is_file():
        return {}
    with DEVIATIONS.open(newline="", encoding="utf-8") as file:
        return {(row["record"], row["name"], row["field"]): float(row["deviation"]) for row in csv.DictReader(file)}


def deviations(job: Job) -> dict[Key, float]:
    """Every uncertain constant of a job's records with its deviation: posterior, else prior, else the stated one.

    Constants of a user's profile keep the shipped deviations: a profile does not say how well they are known.
    """
    shipped = shipped_deviations()
    found: dict[Key, float] = {}
    uncertain: tuple[Constant | Unfitted, ...] = (*CONSTANTS, *UNFITTED)
    for constant in uncertain:
        record = getattr(job, constant.record)
        key = (constant.record, record.name, constant.field)
        if getattr(record, constant.field) > 0:
            found[key] = shipped.get(key, constant.width)
    return found


class _Watched:
    """A record that notes which of its fields are read."""

    def __init__(self, record: object, seen: set[str]) -> None:
        self.record, self.seen = record, seen

    def __getattr__(self, name: str) -> Any:
        self.seen.add(name)
        return getattr(self.record, name)


def constants_read(job: Job, layouts: Columns) -> dict[Key, float]:
    """The uncertain constants that the step times of some layouts read, with their deviations."""
    seen: dict[str, set[str]] = {kind: set() for kind in ("generation", "software", "physics")}
    watched = {kind: cast(Any, _Watched(getattr(job, kind), fields)) for kind, fields in seen.items()}
    time_of(dataclasses.replace(job, **watched), layouts)
    return {key: deviation for key, deviation in deviations(job).items() if key[2] in seen[key[0]]}


@dataclass(frozen=True)
class Response:
    """How log step times answer to the constants: base + slopes z + curves z^2, z in deviations of each constant."""

    keys: tuple[Key, ...]
    base: Floats
    slopes: Floats
    """Shape (constants, rows)."""
    curves: Floats

    def logs(self, z: Floats) -> Floats:
        """Log step times of every draw: (draws, constants) -> (draws, rows)."""
        return np.asarray(self.base + z @ self.slopes + (z * z) @ self.curves)

    def parts(self, z: Floats, row: int, other: int) -> Floats:
        """What each constant adds to the difference of two rows' log step times: shape (draws, constants)."""
        slopes, curves = (values[:, row] - values[:, other] for values in (self.slopes, self.curves))
        return np.asarray(z * slopes + z * z * curves)


def by_job(jobs: Iterable[Job]) -> dict[Job, Ints]:
    """The rows of each distinct job, in order of appearance."""
    rows: dict[Job, list[int]] = {}
    for row, job in enumerate(jobs):
        rows.setdefault(job, []).append(row)
    return {job: np.array(own, dtype=np.int64) for job, own in rows.items()}


def respond(jobs: Sequence[Job], layouts: Columns) -> Response:
    """The response of layouts, each under its job, through three points per constant: as shipped, and NODE deviations off.

    Constants act one by one: how two of them act together beyond that is left out. Every constant is tried on all layouts
    of a stack at once by the formula, a layout with a split of its own under the even one: its own step, executed where no formula
    knows its fill, is the base.
    """
    base = np.zeros(len(layouts))
    for job, rows in by_job(jobs).items():
        base[rows] = np.log(steps_of(job, layouts.take(rows)))
    tried: dict[Key, Floats] = {}
    for job, rows in by_job(dataclasses.replace(job, layers_per_stage=(), recomputed_per_stage=()) for job in jobs).items():
        own = layouts.take(rows)
        middle = np.log(time_of(job, own).total)
        for key, deviation in constants_read(job, own).items():
            ends = [np.log(time_of(adjusted(job, {key: sign * NODE * deviation}), own).total) - middle for sign in (-1.0, 1.0)]
            tried.setdefault(key, np.zeros((2, len(layouts))))[:, rows] = ends
    keys = tuple(sorted(key for key, ends in tried.items() if np.any(ends)))
    low, high = (np.array([tried[key][end] for key in keys]).reshape(len(keys), len(layouts)) for end in (0, 1))
    return Response(keys, base, (high - low) / (2 * NODE), (high + low) / (2 * NODE**2))


def scatter(jobs: Sequence[Job], layouts: Columns, draws: int, rng: np.random.Generator) -> Floats:
    """The part of each layout's log step time that no constant explains: shape (draws, rows).

    Along a size it walks at random with the logarithm, so that near sizes err alike; between switches and stacks it jumps,
    and walks with the depth of full recompute.
    """
    full = layouts.recompute == FULL
    depth = np.where(full, layouts.recompute_layers / deepest_chunk(layouts, jobs[0].model.num_layers), 0.0)
    total = np.zeros((draws, len(layouts)))
    for places in (*(np.log2(getattr(layouts, axis)) for axis in SIZES), depth):
        values, place = np.unique(places, return_inverse=True)
        steps = rng.standard_normal((draws, len(values))) * np.sqrt(np.diff(values, prepend=values[0]))
        total += np.cumsum(steps, axis=1)[:, place]
    for kinds in (*(getattr(layouts, axis) for axis in SWITCHES), np.array([job.software.name for job in jobs])):
        values, place = np.unique(kinds, return_inverse=True)
        total += rng.standard_normal((draws, len(values)))[:, place] / np.sqrt(2.0)  # two values differ by SCATTER
    return SCATTER * total


def equal_rows(logs: Floats) -> Ints:
    """For each row of (draws, rows) the first row with which it agrees within EQUAL in every draw: often itself."""
    group = np.arange(logs.shape[1], dtype=np.int64)
    for row in range(logs.shape[1]):
        for first in np.unique(group[:row]):
            if np.all(np.abs(logs[:, row] - logs[:, first]) <= EQUAL):
                group[row] = first
                break
    return group


@dataclass(frozen=True)
class Cause:
    """An uncertain constant, or several of one meaning, that decides between the first layout and its rival."""

    words: str
    higher: bool
    """Whether the rival leads where it is higher; else where it is lower."""
    share: float
    """Of the variance of the difference."""


@dataclass(frozen=True)
class Robustness:
    """What many draws say of layouts; arrays of one length, the first ``shown`` rows are the shortlist's."""

    layouts: Columns
    shown: int
    draws: int
    logs: Floats
    """Log step times under the draws of the constants, shape (draws, rows)."""
    lead_share: Floats
    """Share of the draws in which the layout is the fastest; ties count by halves, thirds, ..."""
    regret_mean: Floats
    """Its step over the fastest of the draw, minus one, on average."""
    regret_p90: Floats
    scattered_share: Floats
    """As lead_share, with what no constant explains drawn too."""
    group: Ints
    """First row that is as fast in every draw of the constants; often itself."""
    rival: int
    """The row outside the first row's group that leads most often, or comes nearest; -1 without one."""
    causes: tuple[Cause, ...]
    """What decides between the first row and the rival, most first."""

    @property
    def equals(self) -> Ints:
        """The rows that are one with the first."""
        return np.flatnonzero(self.group == 0)

    @property
    def group_share(self) -> Floats:
        """Share of the draws in which a row's group leads."""
        return np.array([self.lead_share[self.group == first].sum() for first in self.group])

    @property
    def by_luck(self) -> bool:
        """Whether the first place is luck: its group leads in less than half of the draws, or another as often."""
        share = self.group_share
        others = share[self.group != 0]
        return bool(share[0] < LEADS or share[0] <= others.max(initial=-1.0))

    @property
    def mesh(self) -> np.ndarray:
        """Whether a row has the first row's parallel sizes."""
        same = np.all([getattr(self.layouts, axis) == getattr(self.layouts, axis)[0] for axis in MESH_AXES], axis=0)
        return np.asarray(same)


def robustness(
    jobs: Sequence[Job],
    layouts: Columns,
    *,
    shown: int | None = None,
    draws: int = DRAWS,
    seed: int = SEED,
    widen: float = 1.0,
) -> Robustness:
    """How often each layout, costed under the job of its row, leads under the model's uncertainty, and what choosing it costs.

    ``widen`` multiplies every deviation. The cost model is asked twice per constant and stack, however many draws. The
    same input gives the same draws.
    """
    rng = np.random.default_rng(seed)
    response = respond(jobs, layouts)
    z = widen * rng.standard_normal((draws, len(response.keys)))
    logs = response.logs(z)
    group = equal_rows(logs)
    regret = np.expm1(logs - logs.min(axis=1, keepdims=True))
    lead_share = lead_shares(logs)
    rival = _rival(lead_share, logs, group)
    return Robustness(
        layouts=layouts,
        shown=len(layouts) if shown is None else shown,
        draws=draws,
        logs=logs,
        lead_share=lead_share,
        regret_mean=regret.mean(axis=0),
        regret_p90=np.quantile(regret, 0.9, axis=0),
        scattered_share=lead_shares(logs + widen * scatter(jobs, layouts, draws, rng)[:, group]),
        group=group,
        rival=rival,
        causes=_causes(jobs, response, z, rival) if rival >= 0 else (),
    )


def lead_shares(logs: Floats) -> Floats:
    """Share of the draws in which each row of (draws, rows) is the least; equal ones share a draw.

    >>> lead_shares(np.array([[0.0, 0.0, 1.0], [2.0, 1.0, 3.0]])).tolist()
    [0.25, 0.75, 0.0]
    """
    leads = logs <= logs.min(axis=1, keepdims=True) + 1e-12
    return np.asarray((leads / leads.sum(axis=1, keepdims=True)).mean(axis=0))


def _rival(lead_share: Floats, logs: Floats, group: Ints) -> int:
    others = np.flatnonzero(group != 0)
    if not len(others):
        return -1
    return int(others[np.lexsort([logs.mean(axis=0)[others], -lead_share[others]])[0]])


def _causes(jobs: Sequence[Job], response: Response, z: Floats, rival: int) -> tuple[Cause, ...]:
    """The constants behind most of the variance of log step(rival) - log step(first)."""
    parts = response.parts(z, rival, 0)
    variance = parts.var(axis=0)
    if not variance.sum() > 0:
        return ()
    differ = jobs[0].software.name != jobs[rival].software.name
    grouped: dict[str, list[int]] = {}
    for number, (kind, name, field) in enumerate(response.keys):
        words = MEANING.get(field, field.replace("_", " "))
        grouped.setdefault(f"{words} of {name}" if kind == "software" and differ else words, []).append(number)
    causes = []
    for words, numbers in grouped.items():
        largest = numbers[int(np.argmax(variance[numbers]))]
        falls = float(np.mean(z[:, largest] * parts[:, largest])) < 0  # the rival gains as the constant grows
        causes.append(Cause(words, falls, float(variance[numbers].sum() / variance.sum())))
    most = sorted(causes, key=lambda cause: (-cause.share, cause.words))[:MOST_DECIDING]
    return tuple(cause for cause in most if cause.share >= LEAST_SHARE)


def rivals(ranked: Scored, shortlist: Columns, most: int = MOST_RIVALS) -> Ints:
    """Rows of a search that a shortlist leaves out: the best of every other mesh and micro-batch, best first, at most ``most``.

    Only those with the verdict of the search's first: a layout at risk is no rival of one that fits.
    """
    axes = (*MESH_AXES, "micro_batch_size")
    joined = (np.concatenate([getattr(shortlist, axis), getattr(ranked.layouts, axis)]) for axis in axes)
    first, _ = distinct(joined)
    rows = first[first >= len(shortlist)] - len(shortlist)
    return np.asarray(rows[ranked.verdict[rows] == ranked.verdict[0]][:most])


def robustness_of(result: SearchResult, shortlist: Shortlist, draws: int = DRAWS, seed: int = SEED) -> Robustness | None:
    """The robustness of a shortlist that is ordered by step time, against itself and the best of the meshes that it leaves out.

    Rows with a worse verdict than the first do not compete, nor do those beyond MOST_SHOWN. None for an empty shortlist
    and for no draws.
    """
    rows, ranked = shortlist.rows, result.ranked
    if not len(rows) or not draws:
        return None
    others = jobs_by_framework(result.scenario)
    jobs = [shortlist.job(result.scenario, row) for row in range(min(len(rows), MOST_SHOWN))]
    same = min(int(np.sum(np.cumprod(rows.verdict == rows.verdict[0]))), MOST_SHOWN)
    extra = ranked.take(rivals(ranked, rows.layouts))
    layouts = Columns(*(np.concatenate([getattr(rows.layouts, axis)[:same], getattr(extra.layouts, axis)]) for axis in _fields()))
    every = [*jobs[:same], *(others[int(stack)] for stack in extra.stack)]
    return robustness(every, layouts, shown=same, draws=draws, seed=seed)


def _fields() -> tuple[str, ...]:
    return tuple(field.name for field in dataclasses.fields(Columns))
