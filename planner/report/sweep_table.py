"""A sweep as one tidy table: a row per layout, with the facts of its point and how the point stands among the others."""

from __future__ import annotations

import gzip
import zlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from io import StringIO
from typing import Any, TextIO

import numpy as np
import pandas as pd

from planner.errors import InputError
from planner.evaluation import OK, merged
from planner.grid import KINDS, Point, shown
from planner.journal import Entry, Journal
from planner.sweep import Sweep
from planner.units import nine_digits
from solver.layout import Ints

ROWS_AT_ONCE = 10_000
"""Of the table, in memory."""

FACTS: dict[str, tuple[str, Callable[[Point], Any]]] = {
    "point": ("Int64", lambda point: point.number),
    "scenario": ("string", lambda point: point.scenario.name),
    "model": ("string", lambda point: point.scenario.job.model.name),
    "gpu": ("string", lambda point: point.scenario.job.gpu.name),
    "num_gpus": ("Int64", lambda point: point.scenario.job.num_gpus),
    "num_nodes": ("Int64", lambda point: -(-point.scenario.job.num_gpus // point.scenario.job.cluster.gpus_per_node)),
    "seq_len": ("Int64", lambda point: point.scenario.job.seq_len),
    "global_batch_size": ("Int64", lambda point: point.scenario.job.global_batch_size),
    "tokens_per_step": ("Int64", lambda point: point.scenario.job.tokens_per_step),
    "precision": ("string", lambda point: point.scenario.job.precision),
    "optimizer": ("string", lambda point: point.scenario.job.optimizer),
    "framework": ("string", lambda point: point.scenario.choices.framework),
}
"""What is known of a point before it is searched: column -> dtype, value."""

VARIED_DTYPES = {"int": "Int64", "float": "float64", "bool": "boolean"}

BOOKS = {"status": "string", "reason": "string"}
"""Columns between the facts and the layout."""

COUNTS = {"space": "Int64", "survivors": "Int64"}
STANDING = {"scaling_efficiency": "float64", "fastest_num_gpus": "Int64", "pareto": "boolean"}
"""Columns behind the layout."""


@dataclass(frozen=True)
class Standing:
    """What only all points together tell."""

    base: dict[int, float]
    """Point -> the best tokens per second and GPU of the fewest GPUs of its series on which something fits."""
    fastest: dict[int, int]
    """Point -> the number of GPUs of its series, no larger than its own, with most tokens per second: others may stay unused."""
    front: Ints
    """Keys of the layouts that no other of the same model, sequence and run dominates."""


def key_of(point: Any, rank: Any) -> Any:
    """One number for a row of the table, or for many."""
    return point * (1 << 32) + rank


def standing(sweep: Sweep, journal: Journal) -> Standing:
    """How the finished points stand among each other."""
    best: dict[int, float] = {}
    fronts: dict[tuple[Any, ...], list[np.ndarray]] = {}
    for entry in journal:
        if entry["status"] == OK:
            scenario, own = sweep.points[entry["point"] - 1].scenario, np.array(entry["front"])
            own[:, 0] = key_of(entry["point"], own[:, 0])
            fronts.setdefault((scenario.job.model.name, scenario.job.seq_len, scenario.training_tokens), []).append(own)
            best[entry["point"]] = entry["best"]
    rows = [merged(np.concatenate(found)) for found in fronts.values()]
    return Standing(bases(sweep, best), fastest(sweep, best), np.concatenate([np.zeros(0), *(own[:, 0] for own in rows)]).astype(np.int64))


def bases(sweep: Sweep, best: dict[int, float]) -> dict[int, float]:
    """Of each point with a best rate: that of the fewest GPUs of its series."""
    fewest: dict[tuple[Any, ...], int] = {}
    for point in sorted(best, key=lambda point: sweep.points[point - 1].scenario.job.num_gpus):
        fewest.setdefault(sweep.points[point - 1].series, point)
    return {point: best[fewest[sweep.points[point - 1].series]] for point in best}


def fastest(sweep: Sweep, best: dict[int, float]) -> dict[int, int]:
    """For every point the number of GPUs, no larger than its own, with most tokens per second of its series; 0 where there is none."""
    found: dict[int, int] = {}
    leader: dict[tuple[Any, ...], tuple[float, int]] = {}
    for point in sorted(sweep.points, key=lambda point: point.scenario.job.num_gpus):
        num_gpus = point.scenario.job.num_gpus
        rate = nine_digits(best.get(point.number, 0.0) * num_gpus)
        if rate > leader.get(point.series, (0.0, 0))[0]:
            leader[point.series] = rate, num_gpus
        found[point.number] = leader.get(point.series, (0.0, 0))[1]
    return found


def varied_columns(sweep: Sweep) -> dict[str, tuple[str, Callable[[Point], Any]]]:
    """The varied keys that no fact shows; a key that is also a layout's column says that it was asked for."""

    def fact(key: str) -> tuple[str, Callable[[Point], Any]]:
        dtype = VARIED_DTYPES.get(KINDS[key], "string")
        return dtype, lambda point: shown(point.varied[key]) if dtype == "string" and key in point.varied else point.varied.get(key)

    return {f"pinned_{key}" if key in sweep.dtypes else key: fact(key) for key in sweep.varied if key not in FACTS}


def dtypes_of(sweep: Sweep) -> dict[str, str]:
    """The columns of the table and their dtypes, whatever the searches find."""
    facts = {name: dtype for name, (dtype, _) in (FACTS | varied_columns(sweep)).items()}
    return facts | BOOKS | sweep.dtypes | COUNTS | STANDING


def frames(sweep: Sweep, journal: Journal) -> Iterator[pd.DataFrame]:
    """The table of the finished points in their order, some rows at once."""
    found = standing(sweep, journal)
    empty = "," * (len(sweep.dtypes) - 1) + "\n"
    for entries in _batches(journal, 1 if sweep.every else ROWS_AT_ONCE):
        texts = [entry["rows"] or empty for entry in entries]
        for rows in _read(StringIO("".join(texts)), sweep):
            yield _tidy(sweep, found, entries, rows, [text.count("\n") for text in texts])
        for entry in entries:
            for rows in _others(sweep, journal, entry):
                yield _tidy(sweep, found, [entry], rows, [len(rows)])


def _batches(journal: Journal, rows: int) -> Iterator[list[Entry]]:
    """Finished points, as many at once as have at most so many rows, but at least one."""
    batch: list[Entry] = []
    size = 0
    for entry in journal:
        own = max(entry["rows"].count("\n"), 1)
        if batch and size + own > rows:
            yield batch
            batch, size = [], 0
        batch.append(entry)
        size += own
    if batch:
        yield batch


def _others(sweep: Sweep, journal: Journal, entry: Entry) -> Iterator[pd.DataFrame]:
    """The layouts after the first ones of a point, where all were asked for. Raises InputError where somebody took them away."""
    if not sweep.every or entry["status"] != OK or entry["rows"].count("\n") == entry["survivors"]:
        return
    part = journal.part(entry["point"])
    try:
        with gzip.open(part, "rt", encoding="utf-8") as text:
            yield from _read(text, sweep)
    except (OSError, EOFError, zlib.error) as error:
        raise InputError(
            f"{part}: cannot be read ({getattr(error, 'strerror', None) or error}): delete {journal.path} to start anew"
        ) from None


def _read(text: TextIO, sweep: Sweep) -> Iterator[pd.DataFrame]:
    """Rows of layouts from CSV text, some at once."""
    yield from pd.read_csv(
        text,
        header=None,
        names=list(sweep.dtypes),
        dtype=sweep.dtypes,
        keep_default_na=False,
        na_values=[""],
        chunksize=ROWS_AT_ONCE,
    )


def _tidy(sweep: Sweep, found: Standing, entries: list[Entry], rows: pd.DataFrame, counts: list[int]) -> pd.DataFrame:
    """Layout rows beside the facts and books of their points; ``counts`` says how many belong to each."""
    facts = FACTS | varied_columns(sweep)
    points = [sweep.points[entry["point"] - 1] for entry in entries]
    columns: dict[str, Any] = {name: [value(point) for point in points] for name, (_, value) in facts.items()}
    columns |= {name: [entry[name] for entry in entries] for name in (*BOOKS, *COUNTS)}
    columns["fastest_num_gpus"] = [found.fastest[entry["point"]] or None for entry in entries]
    known = pd.DataFrame(columns).loc[np.repeat(np.arange(len(entries)), counts)].reset_index(drop=True)
    table = pd.concat([known, rows.reset_index(drop=True)], axis=1)
    base = table["point"].map(found.base).astype("float64")
    table["scaling_efficiency"] = (table["tokens_per_second_per_gpu"] / base).map(nine_digits)
    keys = key_of(table["point"], table["rank"])
    table["pareto"] = keys.isin(found.front).where(keys.notna())
    dtypes = dtypes_of(sweep)
    table = table[list(dtypes)].astype(dtypes)
    return table[table["pareto"].fillna(False)] if sweep.pareto else table
