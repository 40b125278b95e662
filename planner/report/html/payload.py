"""All scored layouts as packed columns inside the page: little-endian typed arrays, deflated, in base64; the page unpacks them."""

from __future__ import annotations

import base64
import zlib
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import numpy as np

from planner.cost import flops
from planner.cost.arrays import Floats
from planner.cost.memory import VERDICTS
from planner.frameworks.legality import framework_of, jobs_by_framework
from planner.operations import run_of, upkeep_of
from planner.report.html.chart_frames import framework_words
from planner.report.plain import plain
from planner.scenario import Scenario
from planner.search import SearchResult
from planner.units import GIB
from solver.layout import LABEL_ORDER, WORDS

MOST_LAYOUTS = 100_000
"""Layouts that a page holds, best first."""

SHARE_STEPS = 65535
"""Shares between 0 and 1 are kept in so many steps."""

HEADS = {
    "tensor_parallel": "TP",
    "pipeline_parallel": "PP",
    "virtual_pipeline": "VP",
    "context_parallel": "CP",
    "expert_parallel": "EP",
    "expert_tensor_parallel": "ETP",
    "data_parallel": "DP",
    "zero_stage": "ZeRO",
    "micro_batch_size": "MB",
    "recompute": "recompute",
    "recompute_layers": "layers recomputed",
    "schedule": "schedule",
}
"""Table heads of the axes."""


@dataclass(frozen=True)
class Packed:
    """One column of all rows."""

    key: str
    title: str
    values: np.ndarray
    words: tuple[str, ...] = ()
    """Not empty: the values are indices into them."""
    scale: float = 1.0
    """What a value is multiplied by."""
    digits: int = 0
    """Behind the point when shown."""
    percent: bool = False


@dataclass(frozen=True)
class Derived:
    """A column that the page computes: factor of the row's stack times the step, or over it."""

    key: str
    title: str
    factors: tuple[float, ...]
    """One per word of the column ``software``."""
    over: bool = False
    digits: int = 0
    percent: bool = False


def columns_of_search(result: SearchResult) -> tuple[list[Packed], list[Derived]]:
    """The columns of the ranked layouts, at most MOST_LAYOUTS, under even splits."""
    rows = result.ranked.take(slice(0, MOST_LAYOUTS))
    stacks = [int(number) for number in np.unique(rows.stack)]
    step = rows.step_seconds
    packed = [Packed(axis, HEADS[axis], getattr(rows.layouts, axis), WORDS.get(axis, ())) for axis in LABEL_ORDER]
    packed += [
        Packed("step_seconds", "step s", step.astype("<f4"), digits=3),
        Packed("memory_gib", "GiB", (rows.need_bytes / GIB).astype("<f4"), digits=1),
        Packed("bubble_share", "bubble", _steps(rows.bubble_seconds / step), scale=1 / SHARE_STEPS, digits=1, percent=True),
        Packed("exposed_share", "exposed comm.", _steps(rows.exposed_seconds / step), scale=1 / SHARE_STEPS, digits=1, percent=True),
        Packed("verdict", "verdict", rows.verdict, VERDICTS),
        _worded("frameworks", "accepted by", framework_words(rows)),
        Packed(
            "software",
            "stack",
            np.searchsorted(stacks, rows.stack),
            tuple(result.scenario.stacks[framework_of(number)].name for number in stacks),
        ),
    ]
    return packed, derived(result.scenario, stacks)


def derived(scenario: Scenario, stacks: list[int]) -> list[Derived]:
    """What follows from the step alone: throughput, utilisation, and where the tokens are known days and dollars."""
    job, jobs = scenario.job, jobs_by_framework(scenario)
    same = [1.0] * len(stacks)
    found = [
        Derived("tokens_per_second_per_gpu", "tok/s/GPU", tuple(job.tokens_per_step / job.num_gpus * one for one in same), over=True),
        Derived("mfu", "MFU", tuple(float(flops.mfu(job, np.ones(1))[0]) * one for one in same), over=True, digits=1, percent=True),
    ]
    if scenario.training_tokens:
        runs = [run_of(scenario, 1.0, upkeep_of(scenario.operations, jobs[number]).goodput) for number in stacks]
        found.append(Derived("total_days", "days", tuple(float(run.total_days) for run in runs), digits=2))
        found.append(Derived("cost_usd", "cost $", tuple(float(run.cost_usd) for run in runs)))
    return found


def _steps(shares: Floats) -> np.ndarray:
    return np.round(np.clip(shares, 0.0, 1.0) * SHARE_STEPS).astype("<u2")


def _worded(key: str, title: str, words: list[str]) -> Packed:
    distinct = tuple(dict.fromkeys(words))
    place = {word: number for number, word in enumerate(distinct)}
    return Packed(key, title, np.array([place[word] for word in words], dtype=np.int64), distinct)


def smallest(values: np.ndarray) -> np.ndarray:
    """Whole numbers in the narrowest little-endian type that holds them; floats as 4 bytes. Raises ValueError for negative ones."""
    if values.dtype.kind == "f":
        return values.astype("<f4")
    most, least = int(values.max(initial=0)), int(values.min(initial=0))
    if least < 0 or most > 0xFFFFFFFF:
        raise ValueError(f"a packed column holds 0 to {0xFFFFFFFF}, not {least} to {most}")
    return values.astype("<u1" if most < 256 else "<u2" if most < 65536 else "<u4")


def packed_json(packed: Iterable[Packed], computed: Iterable[Derived]) -> dict[str, Any]:
    """The payload: what the columns are, and their bytes one after another, deflated and in base64."""
    columns, buffers, rows = [], [], 0
    for column in packed:
        values = smallest(column.values)
        rows = len(values)
        buffers.append(values.tobytes())
        about = {"key": column.key, "title": column.title, "type": values.dtype.str[1:], "words": list(column.words)}
        columns.append(about | {"scale": column.scale, "digits": column.digits, "percent": column.percent})
    later = [
        {"key": d.key, "title": d.title, "factors": plain(list(d.factors)), "over": d.over, "digits": d.digits, "percent": d.percent}
        for d in computed
    ]
    squeezed = zlib.compress(b"".join(buffers), 6)
    return {"rows": rows, "columns": columns, "derived": later, "bytes": base64.b64encode(squeezed).decode("ascii")}


def unpacked(payload: dict[str, Any]) -> dict[str, np.ndarray]:
    """The packed columns of a payload, as the page reads them: what tests compare."""
    raw, found, start = zlib.decompress(base64.b64decode(payload["bytes"])), dict[str, np.ndarray](), 0
    for column in payload["columns"]:
        dtype = np.dtype("<" + column["type"])
        size = dtype.itemsize * payload["rows"]
        found[column["key"]] = np.frombuffer(raw[start : start + size], dtype=dtype)
        start += size
    return found


def search_payload(result: SearchResult) -> dict[str, Any]:
    """The payload of a search."""
    return packed_json(*columns_of_search(result))
