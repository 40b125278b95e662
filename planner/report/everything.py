"""Every layout of the declared space as CSV rows: ranked, out of memory, not launchable, and refused by a rule.

A rule refuses partial layouts: such a row leaves the later axes empty and states in ``layouts`` how many complete
layouts it stands for, so that the column sums to the size of the space.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import pandas as pd

from planner.cost.arrays import PIECE
from planner.cost.memory import OUT_OF_MEMORY, VERDICTS
from planner.frameworks.legality import REFUSED, assign
from planner.report.formats import csv_pieces
from planner.report.frame import axis_frame, layouts_frame, software_names, worded
from planner.scenario import Scenario
from planner.search import Scored, SearchResult, weigh
from planner.units import GIB
from solver import prune
from solver.layout import AXES, LABEL_ORDER, WORDS, Columns


def everything(result: SearchResult) -> Iterator[str]:
    """CSV text in pieces: the ranked layouts first, then the rejected ones with their reason."""
    ranked = result.ranked
    header = _frame_of(result.scenario, ranked.take(slice(0, 0)), 1).columns
    yield pd.DataFrame(columns=header).to_csv(index=False, lineterminator="\n")
    for start in range(0, len(ranked), PIECE):
        best = ranked.take(slice(start, start + PIECE))
        yield from _rows(_frame_of(result.scenario, best, start + 1), header)
    for piece in result.layouts.pieces(PIECE):
        bits, stack = assign(result.scenario, piece)
        yield from _rows(_not_launchable(result.scenario, piece.take(stack == REFUSED)), header)
        for _, weighed in weigh(result.scenario, piece, bits, stack):
            yield from _rows(_out_of_memory(result.scenario, weighed.take(np.flatnonzero(weighed.verdict == OUT_OF_MEMORY))), header)
    for step in prune.walk(result.problem, {}, AXES):
        if isinstance(step, prune.Dropped):
            yield from _rows(_refused(result, step), header)


def _rows(frame: pd.DataFrame, header: pd.Index) -> Iterator[str]:
    if len(frame):
        whole = {axis: "Int64" for axis in frame.columns if pd.api.types.is_integer_dtype(frame[axis])}
        pieces = csv_pieces(frame.astype(whole).reindex(columns=header))
        next(pieces)  # the header is written once
        yield from pieces


def _frame_of(scenario: Scenario, scored: Scored, first_rank: int) -> pd.DataFrame:
    frame = layouts_frame(scenario, scored)
    frame.insert(0, "rank", np.arange(first_rank, first_rank + len(frame)))
    frame.insert(1, "reason", "ranked")
    frame.insert(2, "layouts", 1)
    return frame


def _not_launchable(scenario: Scenario, refused: Columns) -> pd.DataFrame:
    frame = axis_frame(refused)
    wanted = scenario.choices.framework
    frame["reason"] = "launchable: no framework accepts it" if wanted == "any" else f"launchable: {wanted} refuses it"
    return frame.assign(layouts=1)


def _out_of_memory(scenario: Scenario, lost: Scored) -> pd.DataFrame:
    frame = axis_frame(lost.layouts)
    excess = (lost.need_bytes - scenario.job.gpu.memory_bytes) / GIB
    frame["reason"] = [f"memory: {gib:.2f} GiB too much" for gib in excess]
    frame["memory_gib"] = lost.need_bytes / GIB
    frame["verdict"] = VERDICTS[OUT_OF_MEMORY]
    frame["software"] = software_names(scenario, lost)
    return frame.assign(layouts=1)


def _refused(result: SearchResult, step: prune.Dropped) -> pd.DataFrame:
    """One row per partial layout: the values of the last axis that the rule refuses are listed in its cell."""
    frame = pd.DataFrame({axis: worded(axis, step.table[axis]) for axis in LABEL_ORDER if axis in step.table})
    frame[step.axis] = [_values_cell(step.axis, step.refused[kind]) for kind in step.kind]
    frame["layouts"] = [len(step.refused[kind]) * step.layouts_each for kind in step.kind]
    frame["reason"] = f"{step.rule.name}: {step.rule.sentence}"
    return frame


def _values_cell(axis: str, values: list[int]) -> str:
    if axis in WORDS:
        return " ".join(WORDS[axis][value] for value in values)
    return str(values[0]) if len(values) == 1 else " ".join(map(str, values)) if len(values) < 13 else f"{len(values)} values"
