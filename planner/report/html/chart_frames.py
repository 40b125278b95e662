"""The numbers behind a search's pictures, one tidy frame per picture."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pandas as pd

from planner.cost.memory import VERDICTS
from planner.cost.timeline import KINDS, Timeline
from planner.frameworks.legality import framework_names
from planner.pareto import front
from planner.report.frame import axis_frame, software_names
from planner.report.html.chart_style import MEMORY_PARTS, PARTS
from planner.report.html.row_ledger import RowLedger
from planner.search import Scored, SearchResult
from planner.units import GIB
from solver.layout import LABEL_ORDER, Layout
from solver.prune import Funnel

MOST_BARS = 10
"""Layouts whose step is broken down in a picture."""

LEAST_SHARE = 5e-4
"""Of the longest step: parts below it in every layout are left out of the picture, never out of the table."""


def breakdown_frame(ledgers: Sequence[RowLedger]) -> pd.DataFrame:
    """Seconds of every part of the step of the first layouts: rank, layout, part, words, seconds, share. Parts sum to the step."""
    rows = []
    for rank, ledger in enumerate(ledgers[:MOST_BARS], start=1):
        total = float(ledger.step.total[0])
        for order, (part, seconds) in enumerate(ledger.step_parts.items()):
            words, _ = PARTS[part]
            rows.append((f"#{rank}", ledger.layout.label, part, words, order, seconds, seconds / total))
    return pd.DataFrame(rows, columns=["rank", "layout", "part", "words", "order", "seconds", "share"])


def memory_frame(ledger: RowLedger) -> pd.DataFrame:
    """GiB of every part of every stage of one layout, the reserve last: stage, layers, part, words, gib. A stage sums to its need."""
    wide = ledger.memory_gib
    rows = []
    for stage, values in enumerate(wide.to_numpy(float)):
        for order, (part, gib) in enumerate(zip(wide.columns, values, strict=True)):
            words, _ = MEMORY_PARTS[part]
            rows.append((stage, int(ledger.stages.layers[stage]), part, words, order, float(gib)))
    return pd.DataFrame(rows, columns=["stage", "layers", "part", "words", "order", "gib"])


def funnel_frame(funnel: Funnel) -> pd.DataFrame:
    """Layouts left after each rule that dropped some: rule, dropped, left. The first row is the declared space, the last what is ranked."""
    rows, left = [("declared space", 0, funnel.space)], funnel.space
    for rule, dropped in funnel.dropped.items():
        left -= dropped
        if dropped:
            rows.append((rule.replace("_", " "), dropped, left))
    return pd.DataFrame(rows, columns=["rule", "dropped", "left"])


def space_frame(result: SearchResult, most: int) -> pd.DataFrame:
    """The best ranked layouts, at most so many: axes, frameworks, software, verdict, step_seconds, gib. Even splits."""
    rows = result.ranked.take(slice(0, most))
    frame = axis_frame(rows.layouts)
    frame["frameworks"] = framework_words(rows)
    frame["software"] = software_names(result.scenario, rows)
    frame["verdict"] = np.array(VERDICTS)[rows.verdict] if len(rows) else []
    return frame.assign(step_seconds=rows.step_seconds, gib=rows.need_bytes / GIB)


def framework_words(rows: Scored) -> list[str]:
    """The frameworks that accept each layout, joined by +."""
    known = {int(bits): "+".join(framework_names(int(bits))) or "none" for bits in np.unique(rows.frameworks)}
    return [known[int(bits)] for bits in rows.frameworks]


def with_labels(frame: pd.DataFrame) -> pd.DataFrame:
    """The frame with the label of every layout in front."""
    axes = frame[list(LABEL_ORDER)].to_dict("records")
    return frame.assign(layout=[Layout(**{str(axis): value for axis, value in row.items()}).label for row in axes])


def front_frame(space: pd.DataFrame) -> pd.DataFrame:
    """The layouts of a space that none beats in both step time and memory, fastest first; of equal ones the first."""
    kept = space[front([space["step_seconds"].to_numpy(float), space["gib"].to_numpy(float)])]
    return kept.sort_values(["step_seconds", "gib"], kind="stable").drop_duplicates(["step_seconds", "gib"]).reset_index(drop=True)


def timeline_frame(found: Timeline) -> pd.DataFrame:
    """Events of a simulated step: stage, kind, chunk, micro_batch, start_seconds, end_seconds; chunk 0 for what is done once per step."""
    kinds = np.array(KINDS)[found.kind]
    times = {"start_seconds": found.start_seconds, "end_seconds": found.end_seconds}
    chunk = np.maximum(found.chunk, 0)
    return pd.DataFrame({"stage": found.stage, "kind": kinds, "chunk": chunk, "micro_batch": found.micro_batch, **times})


PIXELS = (200, 140)
"""Cells of a file's picture of many points: of points in one cell only the best is drawn, the others would lie under it."""


def thinned(space: pd.DataFrame, colour: str) -> pd.DataFrame:
    """The points of a space that show in a picture: per cell and colour the best ranked."""
    if not len(space):
        return space
    cells = {}
    for column, count in zip(("step_seconds", "gib"), PIXELS, strict=True):
        values = np.log(space[column].to_numpy(float)) if column == "step_seconds" else space[column].to_numpy(float)
        width = max(float(values.max() - values.min()), 1e-12)
        cells[column] = np.minimum((values - values.min()) / width * count, count - 1).astype(int)
    return space[~pd.DataFrame({**cells, "colour": space[colour].to_numpy()}).duplicated().to_numpy()].reset_index(drop=True)
