"""Every layout of the declared space as CSV rows: ranked, out of memory, not launchable, and refused by a rule.

A rule refuses partial layouts: such a row leaves the later axes empty and states in ``layouts`` how many complete
layouts it stands for, so that the column sums to the size of the space.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import pandas as pd

from planner.frameworks import FRAMEWORKS
from planner.report.formats import csv_pieces
from planner.report.frame import AXIS_COLUMNS, axis_frame, layouts_frame
from planner.scenario import Scenario
from planner.search import PIECE, Scored, SearchResult, assign, enumerate_layouts, estimate
from planner.units import GIB
from solver import prune
from solver.layout import AXES, RECOMPUTE, SCHEDULES, Columns

WORDS = {"recompute": RECOMPUTE, "schedule": SCHEDULES}


def everything(result: SearchResult) -> Iterator[str]:
    """CSV text in pieces: the ranked layouts first, then the rejected ones with their reason."""
    ranked = result.ranked
    header = _frame_of(result.scenario, ranked.take(slice(0, 0)), 1).columns
    yield pd.DataFrame(columns=header).to_csv(index=False, lineterminator="\n")
    for start in range(0, len(ranked), PIECE):
        piece = ranked.take(slice(start, start + PIECE))
        yield from _rows(_frame_of(result.scenario, piece, start + 1), header)
    for layouts in enumerate_layouts(result.problem).pieces(PIECE):
        yield from _rows(_not_launchable(result.scenario, layouts), header)
        for _, lost in estimate(result.scenario, layouts):
            yield from _rows(_out_of_memory(result.scenario, lost), header)
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


def _not_launchable(scenario: Scenario, layouts: Columns) -> pd.DataFrame:
    _, stack = assign(scenario, layouts)
    refused = layouts.take(np.flatnonzero(stack == -2))
    frame = axis_frame(refused)
    wanted = scenario.choices.framework
    frame["reason"] = "launchable: no framework accepts it" if wanted == "any" else f"launchable: {wanted} refuses it"
    return frame.assign(layouts=1)


def _out_of_memory(scenario: Scenario, lost: Scored) -> pd.DataFrame:
    frame = axis_frame(lost.layouts)
    excess = (lost.need_bytes - scenario.job.gpu.memory_bytes) / GIB
    frame["reason"] = [f"memory: {gib:.2f} GiB too much" for gib in excess]
    frame["memory_gib"] = lost.need_bytes / GIB
    frame["verdict"] = "out of memory"
    names = list(FRAMEWORKS)
    frame["software"] = [scenario.stacks[names[n] if n >= 0 else "none"].name for n in lost.stack]
    return frame.assign(layouts=1)


def _refused(result: SearchResult, step: prune.Dropped) -> pd.DataFrame:
    """One row per partial layout: the values of the last axis that the rule refuses are listed in its cell."""
    columns = {axis: _worded(axis, values) for axis, values in step.table.items()}
    frame = pd.DataFrame({axis: columns[axis] for axis in AXIS_COLUMNS if axis in columns})
    frame[step.axis] = [_values_cell(step.axis, step.refused[kind]) for kind in step.kind]
    frame["layouts"] = [len(step.refused[kind]) * step.layouts_each for kind in step.kind]
    frame["reason"] = f"{step.rule.name}: {step.rule.sentence}"
    return frame


def _worded(axis: str, values: np.ndarray) -> np.ndarray:
    return np.array(WORDS[axis])[values] if axis in WORDS else values


def _values_cell(axis: str, values: list[int]) -> str:
    if axis in WORDS:
        return " ".join(WORDS[axis][value] for value in values)
    return str(values[0]) if len(values) == 1 else " ".join(map(str, values)) if len(values) < 13 else f"{len(values)} values"
