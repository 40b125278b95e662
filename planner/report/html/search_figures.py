"""The pictures of one search, in the order in which a reader asks for them."""

from __future__ import annotations

from collections.abc import Sequence

import pandas as pd

from planner.answer import Answer
from planner.cost.timeline import Timeline
from planner.report.html import charts
from planner.report.html.chart_frames import (
    MOST_BARS,
    breakdown_frame,
    front_frame,
    funnel_frame,
    memory_frame,
    space_frame,
    thinned,
    timeline_frame,
    with_labels,
)
from planner.report.html.heat_cells import heat_frame
from planner.report.html.html_page import Figure
from planner.report.html.markup import Html, joined, tag
from planner.report.html.payload import MOST_LAYOUTS
from planner.report.html.row_ledger import RowLedger
from planner.sensitivity import Sensitivity
from planner.units import GIB


def search_figures(
    found: Answer,
    ledgers: Sequence[RowLedger],
    *,
    timeline: Timeline | None = None,
    sensitivity: Sensitivity | None = None,
    points: bool = False,
) -> list[Figure]:
    """The pictures of an answer. ``points``: the space's points are in its picture, not left to the page's payload."""
    own = []
    if ledgers:
        own += [breakdown_figure(ledgers), memory_figure(ledgers[0]), space_figure(found, points=points)]
    own.append(heat_figure(found))
    if timeline is not None and ledgers:
        own.append(timeline_figure(ledgers[0], timeline_frame(timeline)))
    if sensitivity is not None and (figure := tornado_figure(sensitivity)):
        own.append(figure)
    return [*own, funnel_figure(found)]


def breakdown_figure(ledgers: Sequence[RowLedger]) -> Figure:
    """Where the seconds of the first layouts go."""
    frame = breakdown_frame(ledgers)
    wide = frame.pivot_table(index="part", columns="rank", values="seconds", sort=False).reset_index()
    words = f"Seconds of every part of one step, for the first {min(len(ledgers), MOST_BARS)} layouts; exposed: what compute does not hide."
    return Figure("step-breakdown", "Where the step's time goes", words, (charts.breakdown_chart(frame),), wide)


def memory_figure(ledger: RowLedger) -> Figure:
    """What fills the GPUs of each stage of the pick."""
    frame = memory_frame(ledger)
    usable = ledger.job.gpu.memory_bytes / GIB
    wide = frame.pivot_table(index=["stage", "layers"], columns="words", values="gib", sort=False).reset_index()
    words = (
        f"GiB on one GPU of every stage of {ledger.layout.label}, by part, against the usable {usable:.1f} GiB (dashed). "
        f"The reserve, {ledger.job.software.reserve_share:.0%} of the tensors, is for memory lost in fragments."
    )
    return Figure("memory-per-stage", "Memory per stage", words, (charts.memory_chart(frame, usable),), wide)


def space_figure(found: Answer, *, points: bool) -> Figure:
    """Every layout in time and memory."""
    colour = "tensor_parallel"
    space = space_frame(found.result, MOST_LAYOUTS)
    front = with_labels(front_frame(space))
    shown = with_labels(thinned(space, colour)) if points else space.head(0).assign(layout="")
    usable = found.scenario.job.gpu.memory_bytes / GIB
    choices = [tag("option", words, value=axis, selected=axis == colour) for axis, words in charts.COLOUR_AXES.items()]
    controls = tag("p", tag("label", "Colour by ", tag("select", *choices, id="space-colour")), class_="tools")
    number = len(found.result.ranked)
    counted = f"{number:,}" if number == len(space) else f"The best {len(space):,} of {number:,}"
    words = (
        f"{counted} ranked layouts under even splits; the line joins those that none beats in both (Pareto front, {len(front)}); "
        "dashed: the usable memory. Points that would lie under others are not drawn."
    )
    numbers = front[["layout", "step_seconds", "gib", "verdict"]]
    chart = charts.space_chart(shown, front, colour, usable)
    title = "Step time against memory"
    return Figure("step-against-memory", title, words, (chart,), numbers, Html("") if points else joined([controls]), canvas=True)


def heat_figure(found: Answer) -> Figure:
    """The best layout per tensor size and pipeline depth."""
    frame = heat_frame(found.result)
    words = (
        "Seconds of the best step for every tensor size and pipeline depth, whatever the other axes; "
        "framed cells have no layout and name the rule that stopped those that came furthest."
    )
    numbers = frame[["tensor_parallel", "pipeline_parallel", "step_seconds", "note"]]
    return Figure("tensor-by-pipeline", "Tensor by pipeline sizes", words, (charts.heat_chart(frame),), numbers)


def timeline_figure(ledger: RowLedger, timeline: pd.DataFrame) -> Figure:
    """What every stage of the pick does when."""
    pieces = charts.stretches(timeline)
    shown = "one step" if len(pieces) == 1 else "the fill, a steady stretch and the drain of one step"
    words = f"Every stage of {ledger.layout.label} over time, {shown}; every second chunk of a stage is paler, gaps are idle."
    drawn = tuple(charts.timeline_chart(piece, "" if len(pieces) == 1 else name) for name, piece in pieces.items())
    return Figure("pipeline-timeline", "Pipeline timeline", words, drawn, timeline.head(200))


def tornado_figure(found: Sensitivity) -> Figure | None:
    """What each property of the cluster is worth to the pick; None where it cannot run."""
    if found.pick is None:
        return None
    base = found.pick.tokens_per_second_per_gpu
    rows = [(p.knob, p.factor, p.pick.tokens_per_second_per_gpu / base - 1.0) for p in found.points if p.pick]
    every = pd.DataFrame(rows, columns=["knob", "factor", "change"])
    ends = every.sort_values("factor", kind="stable").groupby("knob", sort=False)["factor"].agg(["min", "max"])
    frame = every[[factor in tuple(ends.loc[knob]) for knob, factor in zip(every["knob"], every["factor"], strict=True)]]
    words = f"Change of {found.layout.label} where one property of cluster or workload shrinks or grows, all else kept."
    return Figure("sensitivity", "What would make it faster", words, (charts.tornado_chart(frame),), every)


def funnel_figure(found: Answer) -> Figure:
    """What each rule leaves."""
    words = "Layouts left after each rule, on a log scale; every dropped layout is counted under the first rule that it breaks."
    return Figure("pruning-funnel", "Pruning funnel", words, (charts.funnel_chart(found.result.funnel),), funnel_frame(found.result.funnel))
