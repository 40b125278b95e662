"""The shortlist as CSV, JSON and Markdown: the frame's columns, numbers rounded to nine significant digits."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Iterator
from typing import Any

import pandas as pd

from planner.answer import Answer
from planner.refine import Shortlist
from planner.report.operations_text import operations_json
from planner.report.plain import plain
from planner.report.robustness_text import robustness_json
from planner.report.workload_text import long_phase_json, workload_json
from planner.scenario import Scenario
from planner.search import SearchResult

ROWS_AT_ONCE = 50_000


def csv_pieces(frame: pd.DataFrame) -> Iterator[str]:
    """CSV text in pieces, header first."""
    yield frame.head(0).to_csv(index=False, lineterminator="\n")
    for start in range(0, len(frame), ROWS_AT_ONCE):
        piece = frame.iloc[start : start + ROWS_AT_ONCE]
        yield piece.to_csv(index=False, header=False, lineterminator="\n", float_format="%.9g")


def scenario_json(scenario: Scenario) -> dict[str, Any]:
    """The question as plain data."""
    job = scenario.job
    return {
        "name": scenario.name,
        "model": job.model.name,
        "gpu": job.gpu.name,
        "num_gpus": job.num_gpus,
        "seq_len": job.seq_len,
        "global_batch_size": job.global_batch_size,
        "precision": job.precision,
        "optimizer": job.optimizer,
        "framework": scenario.choices.framework,
    }


def json_text(found: Answer, frame: pd.DataFrame) -> str:
    """One object: the scenario, the books, what is proven, and the layouts in rank order."""
    result, shortlist = found.result, found.shortlist
    content: dict[str, Any] = {
        "scenario": scenario_json(found.scenario),
        "space": result.funnel.space,
        "dropped": result.funnel.dropped,
        "survivors": result.funnel.survivors,
        "nearest": _nearest(result),
        "proof": plain(dataclasses.asdict(shortlist.proof)) if shortlist.proof else None,
        "robustness": robustness_json(found.robust) if found.robust else None,
        "operations": _operations(result, shortlist),
        "workload": workload_json(found.scenario, shortlist.rows.layouts.layout(0) if found.feasible else None),
        "long_context": [long_phase_json(phase) for phase in found.phases],
        "layouts": [plain(row) for row in frame.to_dict("records")],
    }
    for row, flags in zip(content["layouts"], found.findings, strict=False):
        row["flags"] = flags
    return json.dumps(content, indent=1) + "\n"


def _operations(result: SearchResult, shortlist: Shortlist) -> dict[str, Any] | None:
    """What surrounds the steps of the first layout."""
    if not len(shortlist.rows):
        return None
    return operations_json(result.scenario, shortlist.job(result.scenario, 0), float(shortlist.rows.step_seconds[0]))


def _nearest(result: SearchResult) -> dict[str, Any] | None:
    """The layout out of memory that came nearest, where nothing fits."""
    if result.nearest is None or len(result.ranked):
        return None
    need, usable = result.nearest.need_bytes, result.scenario.job.gpu.memory_bytes
    return {"layout": result.nearest.layout.label, "need_bytes": round(need), "excess_bytes": round(need - usable)}


MARKDOWN_COLUMNS = (
    "rank",
    "layout",
    "frameworks",
    "layers_per_stage",
    "step_seconds",
    "tokens_per_second_per_gpu",
    "mfu",
    "bubble_share",
    "exposed_communication_share",
    "memory_gib",
    "verdict",
    "total_days",
    "cost_usd",
)


def markdown_text(frame: pd.DataFrame) -> str:
    """A Markdown table of the columns that a reviewer reads."""
    columns = [column for column in MARKDOWN_COLUMNS if column in frame]
    lines = ["| " + " | ".join(columns) + " |", "|" + "---|" * len(columns)]
    for row in frame[columns].to_dict("records"):
        lines.append("| " + " | ".join(f"{v:.4g}" if isinstance(v, float) else str(v) for v in row.values()) + " |")
    return "\n".join(lines) + "\n"
