"""One point of a sweep searched: its layouts as CSV text, or the reason why there are none."""

from __future__ import annotations

import gzip
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pandas as pd

from planner.cost.arrays import Floats
from planner.errors import InputError
from planner.frameworks.legality import jobs_by_framework
from planner.pareto import front
from planner.rank import order
from planner.refine import LISTED, Shortlist, ranking, same_rows, shortlist_of
from planner.report.formats import ROWS_AT_ONCE, csv_pieces
from planner.report.frame import layouts_frame, shortlist_frame
from planner.report.text import no_layout_lines
from planner.scenario import Scenario
from planner.search import Scored, SearchResult, searched
from planner.units import nine_digits
from solver.layout import Layout, columns_of

OK, NOTHING_FITS, MISSES_TARGET, FAILED = "ok", "nothing fits", "misses target", "failed"

DTYPES = {"i": "Int64", "f": "float64", "b": "boolean", "O": "string", "U": "string"}
"""Kind of a numpy dtype -> the dtype of a column with empty cells."""


@dataclass(frozen=True)
class Task:
    """What a worker is given."""

    point: int
    scenario: Scenario
    columns: tuple[str, ...]
    """Of the CSV text that it returns."""
    top: int = 1
    sort: str = "step"
    every: bool = False
    """All layouts, not the first ones."""


@dataclass(frozen=True)
class Outcome:
    """What became of a point; plain data but for ``others``."""

    point: int
    status: str
    reason: str = ""
    space: int | None = None
    survivors: int | None = None
    best: float | None = None
    """Tokens per second and GPU of the first layout."""
    front: list[list[float]] = field(default_factory=list)
    """Rank and :func:`goals` of the layouts that no other of the point dominates."""
    rows: str = ""
    """CSV of the first layouts, without a header."""
    others: bytes = b""
    """CSV of the layouts that follow, compressed."""


def row_dtypes(scenario: Scenario) -> dict[str, str]:
    """The columns of a layout's row and their dtypes, whatever a search finds: those of a layout that nobody searched."""
    number, one = next(iter(jobs_by_framework(scenario))), np.ones(1)
    code = np.array([number], dtype=np.int64)
    scored = Scored(columns_of([Layout()]), code, code, one, np.zeros(1, dtype=np.int64), one, one, one)
    frame = shortlist_frame(scenario, Shortlist(scored, (None,)))
    return {str(name): DTYPES[dtype.kind] for name, dtype in frame.dtypes.items()}


def goals(frame: pd.DataFrame) -> list[Floats]:
    """What the Pareto front minimises, of the numbers as they are exported: seconds per token of the run, dollars per token, memory.

    Memory is the share of what the GPU has: GiB of different GPUs say nothing about each other.
    """
    names = ("tokens_per_second", "goodput", "usd_per_billion_tokens", "memory_gib", "usable_gib")
    rate, goodput, dollars, memory, usable = (np.char.mod("%.9g", frame[name].to_numpy()).astype(np.float64) for name in names)
    return [1.0 / (rate * goodput), dollars, memory / usable]


def evaluate(task: Task) -> Outcome:
    """Searches one point; whatever stops it becomes its reason."""
    try:
        return _outcome(task, searched(task.scenario, task.sort))
    except InputError as error:  # a batch that no number of replicas divides
        return Outcome(task.point, NOTHING_FITS, str(error))
    except Exception as error:  # one point must not end a sweep of hundreds
        return Outcome(task.point, FAILED, " ".join(f"{type(error).__name__}: {error}".split()))


def _outcome(task: Task, result: SearchResult) -> Outcome:
    space, survivors = int(result.funnel.space), int(result.funnel.survivors)
    shortlist = shortlist_of(result, LISTED if task.every else task.top, sort=task.sort)
    if not len(shortlist.rows):
        status = MISSES_TARGET if result.too_late or len(result.ranked) else NOTHING_FITS
        return Outcome(task.point, status, reason_of(result), space, survivors)
    first = shortlist_frame(task.scenario, shortlist)
    fronts, others = [_front(first)], []
    for frame in _others(task, result, shortlist) if task.every else ():
        fronts.append(_front(frame))
        others.append(gzip.compress(_text(task, frame).encode(), compresslevel=1, mtime=0))
    return Outcome(
        task.point,
        OK,
        space=space,
        survivors=survivors,
        best=nine_digits(float(first["tokens_per_second_per_gpu"].iloc[0])),
        front=merged(np.concatenate(fronts)).tolist(),
        rows=_text(task, first),
        others=b"".join(others),
    )


def reason_of(result: SearchResult) -> str:
    """Why a search found nothing, in one sentence: what came nearest, or the target that nothing meets."""
    return no_layout_lines(result)[-2]


def _others(task: Task, result: SearchResult, shortlist: Shortlist) -> Iterator[pd.DataFrame]:
    """The layouts after the shortlist in rank order, some at once."""
    scored = result.ranked if task.sort == "memory" else ranking(result)
    scored = scored.take(order(task.scenario, scored, task.sort))
    known = [same_rows(scored.layouts, shortlist.rows.layouts.layout(row)) for row in range(len(shortlist.rows))]
    rest = np.flatnonzero(~np.any(known, axis=0))
    for start in range(0, len(rest), ROWS_AT_ONCE):
        rows = rest[start : start + ROWS_AT_ONCE]
        rank = len(known) + start + 1 + np.arange(len(rows))
        yield layouts_frame(task.scenario, scored.take(rows)).assign(rank=rank)


def _text(task: Task, frame: pd.DataFrame) -> str:
    pieces = csv_pieces(frame.reindex(columns=list(task.columns)))
    next(pieces)  # the header
    return "".join(pieces)


def _front(frame: pd.DataFrame) -> np.ndarray:
    return merged(np.column_stack([frame["rank"], *goals(frame)]))


def merged(rows: np.ndarray) -> np.ndarray:
    """Of rows of a key and goals those on the common front."""
    return np.asarray(rows[front(list(rows[:, 1:].T))])


def killed(task: Task, deaths: int) -> Outcome:
    """What is said of a point whose workers died."""
    return Outcome(task.point, FAILED, f"its worker died {deaths} times (out of memory?)")


def plain(outcome: Outcome) -> dict[str, Any]:
    """An outcome as a line of the journal."""
    return {key: value for key, value in vars(outcome).items() if key != "others"}
