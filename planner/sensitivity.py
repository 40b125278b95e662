"""What each property of cluster and workload is worth: one at a time it is changed, and layouts are costed and searched again."""

from __future__ import annotations

import dataclasses
import math
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from planner.calibrate import adjusted
from planner.cost.estimate import time_of
from planner.cost.memory import OUT_OF_MEMORY, VERDICTS
from planner.errors import InputError, NoLayoutFits
from planner.explain import explain
from planner.scenario import Job, Scenario
from planner.search import Scored, SearchResult, retimed, search
from planner.targets import untargeted
from planner.units import GB, GIB
from solver.layout import Layout, columns_of

RATE_FACTORS = (0.5, 0.8, 1.25, 2.0)
COUNT_FACTORS = (0.5, 2.0)
"""Of what must stay a whole number."""

LEAST_FACTOR, MOST_FACTOR, MOST_FACTORS = 0.01, 100.0, 12

NUDGE = 0.01
"""Change of a knob's logarithm for an elasticity."""

Progress = Callable[[int, int], None]
"""(points done, points in all)"""


@dataclass(frozen=True)
class Knob:
    """A property that is changed on its own."""

    name: str
    unit: str
    value: Callable[[Job], float]
    """In the knob's unit."""
    change: Callable[[Job, float], Job]
    """The job with the property multiplied. Raises InputError where that is no legal value."""
    rate: bool = True
    """Neither legality nor memory reads it: layouts are only timed again."""
    factors: tuple[float, ...] = RATE_FACTORS


def _with_gpu(job: Job, **factors: float) -> Job:
    changes = {key: getattr(job.gpu, key) * factor for key, factor in factors.items()}
    return dataclasses.replace(job, gpu=dataclasses.replace(job.gpu, **changes))


def _with_wire(job: Job, key: str, factor: float) -> Job:
    """The link or network of the cluster, or of the GPU where the cluster states none."""
    stated = getattr(job.cluster, key)
    if not stated:
        return _with_gpu(job, **{key: factor})
    return dataclasses.replace(job, cluster=dataclasses.replace(job.cluster, **{key: stated * factor}))


def _with_peak(job: Job, factor: float) -> Job:
    return _with_gpu(job, **{f"peak_{name}_flops": factor for name in ("bf16", "fp16", "fp8", "fp4")})


LATENCIES = (
    ("generation", "link_latency_seconds"),
    ("generation", "nic_latency_seconds"),
    ("generation", "node_latency_seconds"),
    ("physics", "p2p_latency_seconds"),
)


def _with_latency(job: Job, factor: float) -> Job:
    return adjusted(job, {(kind, getattr(job, kind).name, field): math.log(factor) for kind, field in LATENCIES})


def _whole(value: float, what: str) -> int:
    """The whole number that a value must be. Raises InputError."""
    if abs(value - round(value)) > 1e-9 * max(value, 1.0) or round(value) < 1:
        raise InputError(f"{value:,.1f} is no whole number of {what}")
    return round(value)


def _with_sequence(job: Job, factor: float) -> Job:
    """Longer or shorter sequences, as many tokens per step as before."""
    length = _whole(job.seq_len * factor, "tokens")
    model = job.model
    if model.learned_positions and length > model.learned_positions:
        raise InputError(f"{length:,} tokens are beyond the {model.learned_positions:,} learned positions")
    if job.tokens_per_step % length:
        raise InputError(f"{job.tokens_per_step:,} tokens per step are no whole number of sequences of {length:,}")
    return dataclasses.replace(job, seq_len=length, global_batch_size=job.tokens_per_step // length)


def _with_batch(job: Job, factor: float) -> Job:
    return dataclasses.replace(job, global_batch_size=_whole(job.global_batch_size * factor, "sequences"))


KNOBS: tuple[Knob, ...] = (
    Knob("HBM size", "GiB", lambda job: job.gpu.memory_bytes / GIB, lambda job, f: _with_gpu(job, memory_bytes=f), rate=False),
    Knob("HBM bandwidth", "GB/s", lambda job: job.gpu.hbm_bytes_per_s / GB, lambda job, f: _with_gpu(job, hbm_bytes_per_s=f)),
    Knob("NVLink bandwidth", "GB/s", lambda job: job.link_bytes_per_s / GB, lambda job, f: _with_wire(job, "link_bytes_per_s", f)),
    Knob("NIC bandwidth", "Gb/s", lambda job: job.nic_bytes_per_s * 8 / GB, lambda job, f: _with_wire(job, "nic_bytes_per_s", f)),
    Knob("latency", "us", lambda job: job.generation.nic_latency_seconds * 1e6, _with_latency),
    Knob("peak FLOP rate", "TFLOP/s", lambda job: job.peak_flops / 1e12, _with_peak),
    Knob("sequence length", "tokens", lambda job: job.seq_len, _with_sequence, rate=False, factors=COUNT_FACTORS),
    Knob("global batch", "sequences", lambda job: job.global_batch_size, _with_batch, rate=False, factors=COUNT_FACTORS),
)
"""Link and network speeds are data-sheet figures per GPU and direction; the latency shown is the network's; all of LATENCIES move."""


@dataclass(frozen=True)
class Outcome:
    """A layout at one point."""

    layout: Layout
    step_seconds: float
    tokens_per_second_per_gpu: float
    verdict: str


@dataclass(frozen=True)
class Point:
    """One knob at one factor."""

    knob: str
    factor: float
    value: float
    """In the knob's unit; the factor times the base."""
    unit: str
    pick: Outcome | None
    """The same layout; None where it is illegal or out of memory, or the point does not exist."""
    best: Outcome | None
    """The best layout of a search at this point."""
    note: str
    """Why there is no pick or no best layout."""


@dataclass(frozen=True)
class Sensitivity:
    """What every knob does to the pick and to the best layout."""

    scenario: Scenario
    layout: Layout
    pick: Outcome | None
    """The pick as the cluster is; None where it cannot run."""
    note: str
    """Why it cannot run."""
    best: Outcome
    elasticity: Mapping[str, float]
    """d log step / d log knob of the pick; 0 for HBM size, which decides only what fits; nan if unknown."""
    points: tuple[Point, ...]


def parse_factors(text: str) -> tuple[float, ...]:
    """Comma-separated factors, sorted, each once. Raises InputError.

    >>> parse_factors("2,0.5,2")
    (0.5, 2.0)
    """
    found: set[float] = set()
    for piece in text.split(","):
        plain = re.fullmatch(r"\s*([0-9]+\.?[0-9]*|\.[0-9]+)(e-?[0-9]+)?\s*", piece, re.ASCII | re.IGNORECASE)
        factor = float(piece) if plain else math.nan
        if not LEAST_FACTOR <= factor <= MOST_FACTOR:
            raise InputError(f"--factors: '{piece.strip()}' must be a number between {LEAST_FACTOR:g} and {MOST_FACTOR:g}, such as 0.5,2")
        found.add(factor)
    if len(found) > MOST_FACTORS:
        raise InputError(f"--factors: {len(found)} factors; give at most {MOST_FACTORS}")
    return tuple(sorted(found))


def sensitivity(
    scenario: Scenario, layout: Layout | None = None, factors: Sequence[float] = (), progress: Progress | None = None
) -> Sensitivity:
    """Every knob at every factor: the pick's step, and the best layout of a search there. All under even splits.

    ``layout`` is the pick, else the search's first. Without ``factors`` each knob has its own. Targets are set aside: they
    drop layouts that another rate would make the fastest. Raises InputError and NoLayoutFits as the search itself does.
    """
    scenario = untargeted(scenario)
    base = search(scenario)
    chosen = layout or base.ranked.layouts.layout(0)
    plan = [(knob, factor) for knob in KNOBS for factor in factors or knob.factors]
    points = []
    for number, (knob, factor) in enumerate(plan):
        points.append(_point(base, chosen, knob, factor))
        if progress:
            progress(number + 1, len(plan))
    pick, why_not = _pick(scenario, chosen)
    elasticities = {knob.name: elasticity(scenario, chosen, knob, pick, points) for knob in KNOBS}
    return Sensitivity(scenario, chosen, pick, why_not, _first(scenario.job, base.ranked), elasticities, tuple(points))


def _point(base: SearchResult, layout: Layout, knob: Knob, factor: float) -> Point:
    """One knob at one factor, the rest as it is."""
    scenario = base.scenario
    at = {"knob": knob.name, "factor": factor, "value": knob.value(scenario.job) * factor, "unit": knob.unit}
    try:
        changed = dataclasses.replace(scenario, job=knob.change(scenario.job, factor))
    except InputError as error:
        return Point(**at, pick=None, best=None, note=str(error))  # type: ignore[arg-type]
    pick, why_not = _pick(changed, layout)
    best, nothing = (_retimed(changed, base.ranked), "") if knob.rate else _searched(changed)
    return Point(**at, pick=pick, best=best, note="; ".join(filter(None, [why_not, nothing])))  # type: ignore[arg-type]


def _pick(scenario: Scenario, layout: Layout) -> tuple[Outcome | None, str]:
    """The layout under a scenario, or why it cannot run."""
    found = explain(scenario, layout)
    if not found.legal or found.step is None:
        rules = [*found.broken_rules] or ["no framework accepts it"]
        return None, f"the pick is illegal ({', '.join(rules)})"
    if found.verdict == OUT_OF_MEMORY:
        return None, "the pick is out of memory"
    return _outcome(scenario.job, layout, float(found.step.total[0]), found.verdict), ""


def _outcome(job: Job, layout: Layout, seconds: float, verdict: int) -> Outcome:
    return Outcome(layout, seconds, job.tokens_per_step / seconds / job.num_gpus, VERDICTS[verdict])


def _first(job: Job, ranked: Scored) -> Outcome:
    return _outcome(job, ranked.layouts.layout(0), float(ranked.step_seconds[0]), int(ranked.verdict[0]))


def _searched(scenario: Scenario) -> tuple[Outcome | None, str]:
    """The best layout of a search, or why there is none."""
    try:
        return _first(scenario.job, search(scenario).ranked), ""
    except NoLayoutFits as nothing:
        nearest = nothing.result.nearest
        lacks = f"; {(nearest.need_bytes - scenario.job.gpu.memory_bytes) / GIB:.1f} GiB too few" if nearest else ""
        return None, f"nothing fits{lacks}"
    except InputError as error:
        return None, str(error)


def _retimed(scenario: Scenario, ranked: Scored) -> Outcome:
    """The best of layouts that were ranked under other rates: neither legality nor memory reads a rate."""
    fitting = ranked.take(np.flatnonzero(ranked.verdict == ranked.verdict[0]))
    return _first(scenario.job, retimed(scenario, fitting))


def elasticity(scenario: Scenario, layout: Layout, knob: Knob, pick: Outcome | None, points: Sequence[Point]) -> float:
    """d log step / d log knob of a layout: of a rate by a small change, of a count between the nearest points that exist."""
    if pick is None:
        return math.nan
    if knob.rate:
        stack = explain(scenario, layout).job
        ends = [time_of(knob.change(stack, math.exp(sign * NUDGE)), columns_of([layout])).total[0] for sign in (-1.0, 1.0)]
        return math.log(ends[1] / ends[0]) / (2 * NUDGE)
    if knob.name == "HBM size":
        return 0.0
    known = {0.0: math.log(pick.step_seconds)}
    known |= {math.log(p.factor): math.log(p.pick.step_seconds) for p in points if p.knob == knob.name and p.pick}
    low, high = max((x for x in known if x < 0), default=0.0), min((x for x in known if x > 0), default=0.0)
    return (known[high] - known[low]) / (high - low) if high > low else math.nan
