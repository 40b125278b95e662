"""A timeline as a trace that Chrome's tracing page and Perfetto open: one thread per stage, one complete event per action."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import numpy as np

from planner.cost.timeline import KINDS, Timeline

COLOURS = {
    "communication": "yellow",
    "recompute": "olive",
    "forward": "thread_state_running",
    "backward": "thread_state_runnable",
    "backward input": "thread_state_runnable",
    "backward weight": "rail_response",
    "gradients": "bad",
    "optimizer": "grey",
}
"""Kind of an event -> one of the colour names that Chrome's tracing page knows; Perfetto colours by the events' names."""

ROWS_AT_ONCE = 4096
"""Events per piece of text."""


def trace_pieces(timeline: Timeline, title: str) -> Iterator[str]:
    """The trace as JSON in the trace event format, in pieces; ``title`` names the process.

    Times are microseconds, whole nanoseconds of them; events of a stage follow each other without overlap.
    """
    yield '{"displayTimeUnit":"ms","traceEvents":[\n'
    yield ",\n".join(_plain(event) for event in _names(timeline.num_stages, title))
    start, end = (np.rint(column * 1e9).astype(np.int64) for column in (timeline.start_seconds, timeline.end_seconds))
    follows = timeline.stage[1:] == timeline.stage[:-1]
    start[1:] = np.where(follows, np.maximum(start[1:], end[:-1]), start[1:])  # rounding must not make neighbours overlap
    end = np.maximum(start, end)
    columns = [timeline.stage, timeline.kind, timeline.chunk, timeline.micro_batch, start, end - start]
    rows = np.stack(columns, axis=1).tolist()
    for first in range(0, len(rows), ROWS_AT_ONCE):
        yield "".join(",\n" + _plain(_event(*row)) for row in rows[first : first + ROWS_AT_ONCE])
    yield "\n]}\n"


def _plain(event: dict[str, Any]) -> str:
    return json.dumps(event, separators=(",", ":"))


def _names(num_stages: int, title: str) -> Iterator[dict[str, Any]]:
    """What names the process and its threads, and keeps the stages in their order."""
    yield {"ph": "M", "name": "process_name", "pid": 0, "args": {"name": title}}
    for stage in range(num_stages):
        yield {"ph": "M", "name": "thread_name", "pid": 0, "tid": stage, "args": {"name": f"stage {stage}"}}
        yield {"ph": "M", "name": "thread_sort_index", "pid": 0, "tid": stage, "args": {"sort_index": stage}}


def _event(stage: int, code: int, chunk: int, micro_batch: int, start: int, took: int) -> dict[str, Any]:
    """One complete event; ``start`` and ``took`` in nanoseconds."""
    kind = KINDS[code]
    once = chunk < 0
    return {
        "ph": "X",
        "name": kind if once else f"{kind} {micro_batch}",
        "cat": kind,
        "cname": COLOURS[kind],
        "pid": 0,
        "tid": stage,
        "ts": start / 1000,
        "dur": took / 1000,
        "args": {} if once else {"chunk": chunk, "micro_batch": micro_batch},
    }
