"""Traces of timelines: what the trace event format asks for, and the same bytes every time."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from planner.cost.timeline import KINDS, Timeline, timeline_of
from planner.report.trace import COLOURS, trace_pieces
from planner.request import Request, make_scenario
from solver.layout import Layout

SCENARIO = make_scenario(Request(model="llama-3.1-8b", gpu="h100", num_gpus=32, seq_len=4096, global_batch_size=128))
PIPELINE = Layout(pipeline_parallel=4, data_parallel=8, zero_stage=1)
LAYOUTS = [
    replace(PIPELINE, recompute="full", recompute_layers=3),
    replace(PIPELINE, virtual_pipeline=2, schedule="interleaved_1f1b"),
    replace(PIPELINE, virtual_pipeline=2, schedule="zero_bubble_v"),
    replace(PIPELINE, virtual_pipeline=2, schedule="dualpipe"),
    Layout(data_parallel=32, zero_stage=1),
]


def text_of(layout: Layout, title: str = "a step") -> str:
    """The whole trace."""
    return "".join(trace_pieces(timeline_of(SCENARIO.job_in("none"), layout), title))


def events(layout: Layout, phase: str) -> list[dict[str, Any]]:
    """The events of one phase: complete events (X) or names (M)."""
    return [event for event in json.loads(text_of(layout))["traceEvents"] if event["ph"] == phase]


@pytest.mark.parametrize("layout", LAYOUTS, ids=lambda layout: layout.label)
def test_every_event_is_a_complete_event_of_the_trace_event_format(layout: Layout) -> None:
    known = json.loads(text_of(layout))
    assert set(known) == {"displayTimeUnit", "traceEvents"} and known["displayTimeUnit"] in ("ms", "ns")
    for event in events(layout, "X"):
        assert set(event) == {"ph", "name", "cat", "cname", "pid", "tid", "ts", "dur", "args"}
        assert event["cat"] in KINDS and event["name"].startswith(event["cat"]) and event["cname"] == COLOURS[event["cat"]]
        assert isinstance(event["ts"], (int, float)) and event["ts"] >= 0 and event["dur"] >= 0
        assert 0 <= event["tid"] < layout.pipeline_parallel and event["pid"] == 0
        once = event["cat"] in ("gradients", "optimizer")
        assert set(event["args"]) == (set() if once else {"chunk", "micro_batch"})


@pytest.mark.parametrize("layout", LAYOUTS, ids=lambda layout: layout.label)
def test_a_trace_holds_every_event_of_the_timeline_at_its_microsecond(layout: Layout) -> None:
    timeline, found = timeline_of(SCENARIO.job_in("none"), layout), events(layout, "X")
    assert len(found) == len(timeline)
    for name, column in (("ts", timeline.start_seconds), ("dur", timeline.end_seconds - timeline.start_seconds)):
        assert [event[name] for event in found] == pytest.approx(1e6 * column, abs=2e-3)
    assert [event["tid"] for event in found] == timeline.stage.tolist()
    assert [event["args"].get("micro_batch", -1) for event in found] == timeline.micro_batch.tolist()


@pytest.mark.parametrize("layout", LAYOUTS, ids=lambda layout: layout.label)
def test_events_of_a_thread_follow_each_other_to_the_nanosecond(layout: Layout) -> None:
    before: dict[int, int] = {}
    for event in events(layout, "X"):
        start, took = round(1000 * event["ts"]), round(1000 * event["dur"])
        assert start >= before.get(event["tid"], 0)
        before[event["tid"]] = start + took


def test_every_stage_is_a_named_thread_in_its_place() -> None:
    names = events(LAYOUTS[0], "M")
    assert [event["args"]["name"] for event in names if event["name"] == "thread_name"] == [f"stage {stage}" for stage in range(4)]
    assert [event["args"]["sort_index"] for event in names if event["name"] == "thread_sort_index"] == [0, 1, 2, 3]
    assert [event["args"]["name"] for event in names if event["name"] == "process_name"] == ["a step"]


def test_any_title_is_text() -> None:
    title = 'a "step" </script>\n\u2028 é'
    found = json.loads(text_of(LAYOUTS[0], title))["traceEvents"]
    assert found[0]["args"]["name"] == title


def test_the_same_step_gives_the_same_bytes() -> None:
    assert [text_of(layout) for layout in LAYOUTS] == [text_of(layout) for layout in LAYOUTS]


def test_every_kind_of_event_has_a_colour() -> None:
    assert tuple(COLOURS) == KINDS


def test_rounding_makes_no_neighbours_overlap() -> None:
    third = np.arange(400) * 1e-9 / 3
    zeros = np.zeros(400, dtype=np.int64)
    timeline = Timeline(zeros, zeros, zeros, np.arange(400), third, third + 1e-9 / 3, 1e-6, 1e-6)
    ends = 0
    for event in json.loads("".join(trace_pieces(timeline, "tiny")))["traceEvents"][3:]:
        assert round(1000 * event["ts"]) >= ends
        ends = round(1000 * (event["ts"] + event["dur"]))
