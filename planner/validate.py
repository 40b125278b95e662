"""How right the cost model is on measured runs: step time, memory, ranking and verdicts, per source."""

from __future__ import annotations

import csv
import math
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from planner.cost import memory
from planner.cost.arrays import Floats
from planner.cost.estimate import memory_of
from planner.errors import InputError, nearest
from planner.measured import Run, Unusable, run_of
from planner.profile import Profile
from planner.simulated import step_of
from planner.uncertainty import band
from planner.units import nine_digits
from solver.layout import columns_of, fully_recomputed

NOISY = ("bs-other", "tr3", "tr8", "mbskill")
"""Families whose source reports scatter of 40 % or times single launch-bound iterations: reported apart."""

MIN_ROWS_OF_WORST = 10
MIN_ROWS_OF_GROUP = 3
REQUIRED = ("id", "family", "framework", "gpu", "num_gpus", "num_layers", "tensor_parallel", "pipeline_parallel")
SHIPPED = Path(__file__).with_name("measured_runs") / "runs.csv"


@dataclass(frozen=True)
class Prediction:
    """One run and what the model says of it; nan where the source states nothing."""

    run: Run
    step_seconds: float
    memory_bytes: float
    """Of the kind that the source measured: tensors, reserved, or the whole device."""
    verdict: int
    """Index into planner.cost.memory.VERDICTS."""
    fits: bool
    """Need at most the usable memory: the verdict without its middle state."""

    @property
    def step_error(self) -> float:
        """Predicted over measured, minus one."""
        return self.step_seconds / self.run.step_seconds - 1.0

    @property
    def memory_error(self) -> float:
        """Predicted over measured, minus one."""
        return self.memory_bytes / self.run.peak_bytes - 1.0


def read_rows(path: Path) -> list[dict[str, str]]:
    """The rows of a runs file. Raises InputError naming the file and the missing columns."""
    try:
        with path.open(newline="", encoding="utf-8") as file:
            reader = csv.DictReader(file)
            rows = [{key: value or "" for key, value in row.items() if key} for row in reader]
    except OSError as error:
        raise InputError(f"{path}: cannot be read ({error.strerror or error})") from None
    except (UnicodeDecodeError, csv.Error) as error:
        raise InputError(f"{path}: not a CSV file in UTF-8 ({error})") from None
    missing = [column for column in REQUIRED if column not in (reader.fieldnames or ())]
    if missing:
        raise InputError(f"{path}: columns missing: {', '.join(missing)}")
    return rows


def runs_of(rows: Iterable[Mapping[str, str]], skipped: Counter[str], profile: Profile | None = None) -> Iterator[Run]:
    """The rows that can be predicted; the others are counted with their reason."""
    for row in rows:
        try:
            yield run_of(row, profile)
        except Unusable as reason:
            skipped[str(reason)] += 1


def predict(run: Run) -> Prediction:
    """Step time, memory of the measured kind, and verdict of one run.

    Where recompute is not stated the verdict takes the setting that needs less: out of memory is never said on an
    assumed "none", and what depends on the setting is at risk.
    """
    x = columns_of([run.layout])
    found = memory_of(run.job, x)
    by_kind = {
        "allocated": found.parts.tensors,
        "reserved": memory.reserved_bytes(run.job, found.parts),
        "need": found.need_bytes,
        "device": memory.reserved_bytes(run.job, found.parts) + found.parts.context,
    }
    seconds = float(step_of(run.job, run.layout).total[0]) if run.step_seconds > 0 else math.nan
    verdict, need = int(found.verdict[0]), float(found.need_bytes[0])
    if not run.recompute_known:
        least = memory_of(run.job, columns_of([fully_recomputed(run.layout, run.job.model.num_layers)]))
        verdict = verdict if verdict == int(least.verdict[0]) else memory.AT_RISK
        need = min(need, float(least.need_bytes[0]))
    measured = float(by_kind.get(run.memory_kind, by_kind["allocated"])[0])
    return Prediction(run, seconds, measured, verdict, need <= run.job.gpu.memory_bytes)


def scored(errors: list[float]) -> dict[str, Any]:
    """Size, median, 90th percentile and bias of a list of relative errors."""
    values = np.array(errors)
    return {
        "n": len(values),
        "median": float(np.median(np.abs(values))),
        "p90": float(np.quantile(np.abs(values), 0.9)),
        "bias": float(np.median(values)),
    }


def by_family(predictions: list[Prediction], measure: str) -> dict[str, Any]:
    """Errors of one measure per family, their median over families, and the worst large one."""
    errors: dict[str, list[float]] = defaultdict(list)
    for prediction in predictions:
        errors[prediction.run.family].append(getattr(prediction, measure))
    families = {name: scored(errors[name]) for name in sorted(errors)}
    large = {n: f["median"] for n, f in families.items() if f["n"] >= MIN_ROWS_OF_WORST and n not in NOISY}
    worst = max(large, key=lambda name: large[name]) if large else ""
    every = [abs(e) for family in errors.values() for e in family]
    return {
        "rows": len(every),
        "family_median": float(np.median([f["median"] for f in families.values()])) if families else None,
        "worst_family": {"name": worst, "median": large[worst]} if worst else None,
        "row_median": float(np.median(every)) if every else None,
        "families": families,
    }


def kendall_tau(predicted: Floats, measured: Floats) -> float:
    """Agreement of two orders: (concordant - discordant) / pairs; ties count as neither (tau-a).

    >>> kendall_tau(np.array([1.0, 2.0, 3.0]), np.array([1.0, 3.0, 2.0]))
    0.3333333333333333
    """
    rows, columns = np.triu_indices(len(predicted), 1)
    signs = np.sign(predicted[rows] - predicted[columns]) * np.sign(measured[rows] - measured[columns])
    return float(signs.mean())


def regret(predicted: Floats, measured: Floats) -> float:
    """Measured time of the layout predicted fastest over the best measured, minus one.

    >>> regret(np.array([1.0, 2.0]), np.array([1.1, 1.0])) == 1.1 / 1.0 - 1
    True
    """
    return float(measured[int(np.argmin(predicted))] / measured.min() - 1.0)


def layout_groups(predictions: list[Prediction]) -> list[list[Prediction]]:
    """Runs that differ in nothing but their layout, in groups of at least three."""
    groups: dict[tuple[Any, ...], list[Prediction]] = defaultdict(list)
    for prediction in predictions:
        run, job = prediction.run, prediction.run.job
        model = job.model
        shape = (model.num_layers, model.hidden_size, model.num_attention_heads, model.num_experts, model.vocab_size)
        kernel = (job.software.attention_kernel, job.software.eager_norm)
        key = (run.family, shape, job.seq_len, job.num_gpus, job.global_batch_size, job.gpu.name, job.precision, kernel)
        groups[key].append(prediction)
    return [group for group in groups.values() if len({p.run.layout for p in group}) >= MIN_ROWS_OF_GROUP]


def ranking(predictions: list[Prediction]) -> dict[str, Any]:
    """How well the model orders layouts of one and the same job."""
    groups = layout_groups(predictions)
    pairs = [(np.array([p.step_seconds for p in g]), np.array([p.run.step_seconds for p in g])) for g in groups]
    regrets = [regret(predicted, measured) for predicted, measured in pairs]
    taus = [kendall_tau(predicted, measured) for predicted, measured in pairs]
    return {
        "groups": len(groups),
        "mean_regret": float(np.mean(regrets)) if groups else None,
        "max_regret": float(np.max(regrets)) if groups else None,
        "kendall_tau": float(np.mean(taus)) if groups else None,
    }


def verdicts(predictions: list[Prediction]) -> dict[str, Any]:
    """Outcomes against verdicts: with the limit alone, and in three states with what is at risk counted apart."""
    rows = len(predictions)
    false_fits = sum(p.run.out_of_memory and p.fits for p in predictions)
    false_ooms = sum(not p.run.out_of_memory and not p.fits for p in predictions)
    return {
        "rows": rows,
        "accuracy": 1.0 - (false_fits + false_ooms) / rows if rows else None,
        "false_fits": int(false_fits),
        "false_ooms": int(false_ooms),
        "three_states": {
            "fits": sum(p.verdict == memory.FITS for p in predictions),
            "fits_that_ran_out": sum(p.verdict == memory.FITS and p.run.out_of_memory for p in predictions),
            "at_risk": sum(p.verdict == memory.AT_RISK for p in predictions),
            "out_of_memory": sum(p.verdict == memory.OUT_OF_MEMORY for p in predictions),
            "out_of_memory_that_ran": sum(p.verdict == memory.OUT_OF_MEMORY and not p.run.out_of_memory for p in predictions),
        },
    }


def coverage(predictions: list[Prediction]) -> dict[str, Any]:
    """How often the truth lies inside the 80 % band that the other sources' residuals give."""
    inside = []
    for p in predictions:
        found = band(p.run.job, p.run.layout, without_family=p.run.family)
        if found is not None:
            inside.append(found.low <= p.run.step_seconds / p.step_seconds <= found.high)
    return {"rows": len(inside), "inside": float(np.mean(inside)) if inside else None}


def validate(rows: list[dict[str, str]], family: str | None = None, profile: Profile | None = None) -> dict[str, Any]:
    """The whole report on the rows of a runs file, optionally of one family. Raises InputError for an unknown family."""
    skipped: Counter[str] = Counter()
    if family is not None:
        known = sorted({row["family"] for row in rows})
        if family not in known:
            raise InputError(f"no family called '{family}' in the runs file{nearest(family, known)}")
        rows = [row for row in rows if row["family"] == family]
    predictions = [predict(run) for run in runs_of(rows, skipped, profile)]
    return report(predictions, skipped)


def report(predictions: list[Prediction], skipped: Counter[str]) -> dict[str, Any]:
    """Measures of a list of predictions."""
    timed = [p for p in predictions if p.run.step_seconds > 0 and not p.run.out_of_memory]
    own_peak = [p for p in predictions if not p.run.offloads]
    weighed = [p for p in own_peak if p.run.peak_bytes > 0 and p.run.recompute_known and not p.run.out_of_memory]
    return {
        "step_time": by_family(timed, "step_error"),
        "memory": by_family(weighed, "memory_error"),
        "memory_allocated": by_family([p for p in weighed if p.run.memory_kind == "allocated"], "memory_error"),
        "ranking": ranking(timed),
        "verdict": verdicts(own_peak),
        "band": coverage(timed),
        "skipped": dict(sorted(skipped.items())),
        "rows": [_row(p) for p in predictions],
    }


def _row(p: Prediction) -> dict[str, Any]:
    def known(value: float) -> float | None:
        return nine_digits(value) if math.isfinite(value) else None

    return {
        "id": p.run.id,
        "family": p.run.family,
        "predicted_step_seconds": known(p.step_seconds),
        "measured_step_seconds": known(p.run.step_seconds),
        "predicted_memory_bytes": known(p.memory_bytes),
        "measured_memory_bytes": known(p.run.peak_bytes),
        "verdict": memory.VERDICTS[p.verdict],
        "outcome": "oom" if p.run.out_of_memory else "ok",
    }
