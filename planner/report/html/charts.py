"""The pictures of a search as Vega-Lite: pure functions from a frame to a chart, titles and units on every axis."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

import numpy as np
import pandas as pd

from planner.report.html.chart_frames import LEAST_SHARE, funnel_frame
from planner.report.html.chart_style import BAD, KINDS, MEMORY_PARTS, PARTS, SERIES, SHAPES, altair, data, scale
from planner.units import three
from solver.prune import Funnel

COLOUR_AXES: Mapping[str, str] = MappingProxyType(
    {
        "tensor_parallel": "tensor parallel",
        "pipeline_parallel": "pipeline stages",
        "context_parallel": "context parallel",
        "expert_parallel": "expert parallel",
        "virtual_pipeline": "chunks per stage",
        "micro_batch_size": "micro-batch size",
        "zero_stage": "ZeRO stage",
        "recompute": "recompute",
        "schedule": "schedule",
        "verdict": "verdict",
        "software": "training stack",
    }
)
"""What the points of the space may be coloured by."""


def breakdown_chart(frame: pd.DataFrame) -> Any:
    """Stacked bars: seconds of the step per part, a bar per layout (chart_frames.breakdown_frame)."""
    alt = altair()
    longest = frame.groupby("rank")["seconds"].sum().max()
    large = frame.groupby("part")["seconds"].max() >= LEAST_SHARE * longest
    shown = frame[frame["part"].map(large)]
    return (
        alt.Chart(data(shown, "breakdown"))
        .mark_bar(stroke="#ffffff", strokeWidth=0.5)
        .encode(
            x=alt.X("seconds:Q", title="seconds per step", stack="zero"),
            y=alt.Y("rank:N", title="layout", sort=list(dict.fromkeys(frame["rank"])), axis=alt.Axis(labelOverlap=False)),
            color=alt.Color("words:N", title=None, scale=scale(PARTS, shown["part"])),
            order=alt.Order("order:Q"),
            tooltip=[
                alt.Tooltip("layout:N", title="layout"),
                alt.Tooltip("words:N", title="part"),
                alt.Tooltip("seconds:Q", title="seconds", format=".4f"),
                alt.Tooltip("share:Q", title="share of the step", format=".1%"),
            ],
        )
        .properties(height=26 * max(len(set(frame["rank"])), 1) + 10)
    )


def memory_chart(frame: pd.DataFrame, usable_gib: float) -> Any:
    """Stacked bars: GiB per stage and part with the usable limit as a line (chart_frames.memory_frame)."""
    alt = altair()
    shown = frame[frame["part"].map(frame.groupby("part")["gib"].max() > 0)]
    bars = (
        alt.Chart(data(shown, "memory"))
        .mark_bar(stroke="#ffffff", strokeWidth=0.5)
        .encode(
            x=alt.X("stage:O", title="pipeline stage", axis=alt.Axis(labelAngle=0)),
            y=alt.Y("gib:Q", title="GiB per GPU", stack="zero"),
            color=alt.Color("words:N", title=None, scale=scale(MEMORY_PARTS, shown["part"])),
            order=alt.Order("order:Q"),
            tooltip=[
                alt.Tooltip("stage:O", title="stage"),
                alt.Tooltip("layers:Q", title="layers"),
                alt.Tooltip("words:N", title="part"),
                alt.Tooltip("gib:Q", title="GiB", format=".2f"),
            ],
        )
    )
    limit = pd.DataFrame({"usable": [usable_gib], "text": [f"usable {usable_gib:.1f} GiB"]})
    rule = alt.Chart(data(limit, "limit")).mark_rule(color=BAD, strokeWidth=2, strokeDash=[6, 4]).encode(y="usable:Q")
    words = alt.Chart(data(limit, "limit_words"), name="ink").mark_text(align="left", baseline="bottom", dx=4, dy=-4)
    words = words.encode(x=alt.value(0), y="usable:Q", text="text:N")
    return alt.layer(bars, rule, words)


def space_chart(points: pd.DataFrame, front: pd.DataFrame, colour: str, usable_gib: float) -> Any:
    """Points: step time against memory of many layouts, the Pareto front as a line, coloured and shaped by an axis.

    ``points`` and ``front`` have layout, step_seconds, gib, and points the colour's column, too (chart_frames.space_frame).
    """
    alt = altair()
    x = alt.X("step_seconds:Q", title="seconds per step (log scale)", scale=alt.Scale(type="log", nice=False, padding=12))
    y = alt.Y("gib:Q", title="GiB on the fullest GPU", scale=alt.Scale(zero=False, padding=12))
    tooltip = [
        alt.Tooltip("layout:N", title="layout"),
        alt.Tooltip("step_seconds:Q", title="seconds per step", format=".4g"),
        alt.Tooltip("gib:Q", title="GiB", format=".1f"),
        alt.Tooltip("colour:N", title=COLOUR_AXES[colour]),
    ]
    own = pd.DataFrame({key: points[key] for key in ("layout", "step_seconds", "gib")} | {"colour": points[colour].astype(str)})
    values = _sorted(own["colour"])
    coloured = alt.Scale(domain=values, range=[SERIES[place % len(SERIES)] for place in range(len(values))])
    shaped = alt.Scale(domain=values, range=[SHAPES[place % len(SHAPES)] for place in range(len(values))])
    dots = (
        alt.Chart(data(own, "points"))
        .mark_point(filled=True, size=16, opacity=0.75)
        .encode(
            x=x,
            y=y,
            color=alt.Color("colour:N", title=COLOUR_AXES[colour], scale=coloured),
            shape=alt.Shape("colour:N", title=COLOUR_AXES[colour], scale=shaped),
            tooltip=tooltip,
        )
    )
    edge = alt.Chart(data(front[["layout", "step_seconds", "gib"]], "front"))
    line = edge.mark_line(interpolate="step-after", strokeWidth=1.5, color="#80868f").encode(x=x, y=y, order="step_seconds:Q")
    stops = edge.mark_point(size=30, strokeWidth=1.2, color="#80868f", filled=False).encode(x=x, y=y, tooltip=tooltip[:3])
    limit = alt.Chart(data(pd.DataFrame({"usable": [usable_gib]}), "limit"))
    return alt.layer(limit.mark_rule(color=BAD, strokeDash=[6, 4]).encode(y="usable:Q"), dots, line, stops).properties(height=380)


def _sorted(values: pd.Series) -> list[str]:
    """Distinct words in order, numbers by size."""
    return sorted(set(values), key=lambda word: (not word.isdigit(), int(word) if word.isdigit() else 0, word))


def heat_chart(frame: pd.DataFrame) -> Any:
    """Cells: best step per tensor size and pipeline depth; cells without a layout are empty frames with their reason (heat_cells)."""
    alt = altair()
    known = frame["step_seconds"].dropna()
    fast = float(known.min()) if len(known) else 1.0
    slower = frame["step_seconds"] / fast
    most = max(float(slower.max()) if len(known) else 1.0, 1.001)
    own = frame.assign(slower=slower, shade=np.log(slower) / np.log(most))
    x = alt.X("tensor_parallel:O", title="tensor parallel (GPUs per layer)", axis=alt.Axis(labelAngle=0, orient="top"))
    y = alt.Y("pipeline_parallel:O", title="pipeline stages", axis=alt.Axis(labelOverlap=False))
    tooltip = [
        alt.Tooltip("tensor_parallel:O", title="tensor parallel"),
        alt.Tooltip("pipeline_parallel:O", title="pipeline stages"),
        alt.Tooltip("step_seconds:Q", title="best step, seconds", format=".4g"),
        alt.Tooltip("note:N", title="layout or reason"),
    ]
    base = alt.Chart(data(own, "heat"))
    colour = alt.Color(
        "slower:Q",
        title="times the fastest step (log scale)",
        scale=alt.Scale(type="log", domain=[1, most], range=["#f7d774", "#e0813a", "#a3316f", "#3b1f6b"], interpolate="rgb"),
        legend=alt.Legend(gradientLength=220, format=".3~r", titleLimit=300),
    )
    filled = base.transform_filter("isValid(datum.step_seconds)").mark_rect().encode(x=x, y=y, color=colour, tooltip=tooltip)
    empty = base.transform_filter("!isValid(datum.step_seconds)").encode(x=x, y=y, tooltip=tooltip)
    frames = empty.mark_rect(fill="transparent", stroke="#80868f", strokeDash=[3, 3])
    reasons = empty.mark_text(fontSize=11).encode(text="text:N").properties(name="ink")
    dark = alt.condition("datum.shade > 0.46", alt.value("#ffffff"), alt.value("#1a1e26"))
    seconds = base.transform_filter("isValid(datum.step_seconds)").mark_text(fontWeight=600).encode(x=x, y=y, text="text:N", color=dark)
    rows = frame["pipeline_parallel"].nunique()
    layers = [filled, frames, reasons, seconds] if len(known) else [frames, reasons]
    return alt.layer(*layers).properties(height=max(30 * rows, 60))


def funnel_chart(funnel: Funnel) -> Any:
    """Bars on a log scale: layouts left after each rule, with counts."""
    alt = altair()
    frame = funnel_frame(funnel)
    frame = frame.assign(
        bar=frame["left"].clip(lower=1).astype(float),
        exact=[f"{left:,}" for left in frame["left"]],
        text=[short_count(left) for left in frame["left"]],
        lost=[f"{n:,}" for n in frame["dropped"]],
    )
    y = alt.Y("rule:N", title=None, sort=list(frame["rule"]), axis=alt.Axis(labelOverlap=False, labelLimit=150))
    top = float(frame["bar"].max())
    x = alt.X("bar:Q", title="layouts left (log scale)", scale=alt.Scale(type="log", domain=[1, top**1.25 + 1], nice=False))
    x.axis = alt.Axis(format="~s", tickCount=5)
    tooltip = [alt.Tooltip("rule:N"), alt.Tooltip("lost:N", title="dropped"), alt.Tooltip("exact:N", title="left")]
    base = alt.Chart(data(frame, "funnel"))
    bars = base.mark_bar(color=SERIES[0]).encode(x=x, x2=alt.datum(1), y=y, tooltip=tooltip)
    words = base.mark_text(align="left", dx=5).encode(x=x, y=y, text="text:N").properties(name="ink")
    return alt.layer(bars, words).properties(height=24 * len(frame) + 10)


def short_count(number: int) -> str:
    """A count in three digits.

    >>> short_count(124_157_214_720), short_count(81_353), short_count(7)
    ('124 B', '81.4 k', '7')
    """
    for size, letter in ((1e12, "T"), (1e9, "B"), (1e6, "M"), (1e3, "k")):
        if number >= 0.9995 * size:
            return f"{three(number / size)} {letter}"
    return str(number)


MOST_EVENTS = 1200
"""Of a pipeline's events, shown in at most three stretches: the fill, a steady stretch, the drain."""


def stretches(frame: pd.DataFrame, most: int = MOST_EVENTS) -> dict[str, pd.DataFrame]:
    """A timeline in pieces of equal length that together hold about ``most`` events at most; whole where it has no more."""
    if len(frame) <= most:
        return {"the whole step": frame}
    start, end = float(frame["start_seconds"].min()), float(frame["end_seconds"].max())
    width = (end - start) * most / len(frame) / 3
    middle = (start + end) / 2
    spans = {"fill": (start, start + width), "steady": (middle - width / 2, middle + width / 2), "drain": (end - width, end)}
    return {name: _clipped(frame, low, high) for name, (low, high) in spans.items()}


def _clipped(frame: pd.DataFrame, low: float, high: float) -> pd.DataFrame:
    inside = frame[(frame["end_seconds"] > low) & (frame["start_seconds"] < high)]
    return inside.assign(start_seconds=inside["start_seconds"].clip(lower=low), end_seconds=inside["end_seconds"].clip(upper=high))


def timeline_chart(frame: pd.DataFrame, title: str = "") -> Any:
    """Bars in time: what every stage does when. Columns stage, kind, chunk, micro_batch, start_seconds, end_seconds."""
    alt = altair()
    own = frame.assign(
        words=[KINDS.get(kind, (kind, ""))[0] for kind in frame["kind"]], second=frame["chunk"] // frame["stage"].nunique() % 2
    )
    x = alt.X("start_seconds:Q", title="seconds from the start of the step", scale=alt.Scale(zero=False, nice=False))
    return (
        alt.Chart(data(own, "timeline"))
        .mark_bar(stroke="#ffffff", strokeWidth=0.3)
        .encode(
            x=x,
            x2="end_seconds:Q",
            y=alt.Y("stage:O", title="pipeline stage", axis=alt.Axis(labelOverlap=True)),
            color=alt.Color("words:N", title=None, scale=scale(KINDS, own["kind"])),
            opacity=alt.Opacity("second:O", scale=alt.Scale(domain=[0, 1], range=[1.0, 0.65]), legend=None),
            tooltip=[
                alt.Tooltip("stage:O"),
                alt.Tooltip("words:N", title="what"),
                alt.Tooltip("micro_batch:Q", title="micro-batch"),
                alt.Tooltip("chunk:Q"),
                alt.Tooltip("start_seconds:Q", title="from, s", format=".4f"),
                alt.Tooltip("end_seconds:Q", title="to, s", format=".4f"),
            ],
        )
        .properties(height=max(16 * frame["stage"].nunique(), 60), **({"title": title} if title else {}))
    )


def tornado_chart(frame: pd.DataFrame) -> Any:
    """Bars to both sides: change of the pick's tokens per second where a property halves or doubles. Columns knob, factor, change."""
    alt = altair()
    order = list(frame.assign(size=frame["change"].abs()).groupby("knob")["size"].max().sort_values(ascending=False).index)
    own = frame.assign(
        direction=["less of it" if factor < 1 else "more of it" for factor in frame["factor"]],
        text=[f"x{three(factor)}" for factor in frame["factor"]],
    )
    colours = alt.Scale(domain=["less of it", "more of it"], range=[SERIES[1], SERIES[0]])
    y = alt.Y("knob:N", title=None, sort=order, axis=alt.Axis(labelOverlap=False))
    x = alt.X("change:Q", title="change of tokens per second", axis=alt.Axis(format="+.0%"), stack=None)
    tooltip = [alt.Tooltip("knob:N"), alt.Tooltip("text:N", title="times today's"), alt.Tooltip("change:Q", format="+.1%")]
    bars = (
        alt.Chart(data(own, "tornado")).mark_bar(opacity=0.85).encode(y=y, x=x, color=alt.Color("direction:N", title=None, scale=colours))
    )
    return bars.encode(tooltip=tooltip).properties(height=28 * len(order) + 10)
