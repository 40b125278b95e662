"""Pictures of sweeps, comparisons and validations: pure functions from a frame to a chart."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

import pandas as pd

from planner.report.html.chart_style import BAD, PARTS, SERIES, SHAPES, altair, data

SWEEP_MEASURES: Mapping[str, tuple[str, str, bool]] = MappingProxyType(
    {
        "tokens_per_second": ("Throughput", "tokens per second", True),
        "scaling_efficiency": ("Efficiency", "efficiency (1: the fewest GPUs)", False),
        "total_days": ("Days", "days in all", True),
        "cost_usd": ("Cost", "dollars", False),
        "usd_per_billion_tokens": ("Cost per token", "dollars per billion tokens", False),
    }
)
"""Column -> title, axis with unit, whether its axis is logarithmic. The last only where the run's tokens are unknown."""


def sweep_chart(frame: pd.DataFrame, measure: str) -> Any:
    """Lines: one measure of the best layout against the number of GPUs. Columns num_gpus, series, layout and the measure."""
    alt = altair()
    _, unit, logarithmic = SWEEP_MEASURES[measure]
    own = frame[["num_gpus", "series", "layout", measure]].dropna()
    scale = alt.Scale(type="log", nice=False, padding=12) if logarithmic else alt.Scale(zero=True)
    names = list(dict.fromkeys(own["series"]))
    legend = {} if len(names) > 1 else {"legend": None}
    colour = alt.Scale(domain=names, range=[SERIES[place % len(SERIES)] for place in range(len(names))])
    shape = alt.Scale(domain=names, range=[SHAPES[place % len(SHAPES)] for place in range(len(names))])
    base = alt.Chart(data(own, measure)).encode(
        x=alt.X("num_gpus:Q", title="GPUs (log scale)", scale=alt.Scale(type="log", base=2, nice=False, padding=12)),
        y=alt.Y(f"{measure}:Q", title=unit + (" (log scale)" if logarithmic else ""), scale=scale),
        color=alt.Color("series:N", title=None, scale=colour, **legend),
        tooltip=[
            alt.Tooltip("series:N"),
            alt.Tooltip("num_gpus:Q", title="GPUs", format=","),
            alt.Tooltip(f"{measure}:Q", title=unit, format=",.4~g"),
            alt.Tooltip("layout:N"),
        ],
    )
    dots = base.mark_point(filled=True, size=70).encode(shape=alt.Shape("series:N", title=None, scale=shape, **legend))
    return alt.layer(base.mark_line(strokeWidth=2), dots).properties(height=260)


def difference_chart(frame: pd.DataFrame) -> Any:
    """Bars to both sides: seconds that b has beyond a, part by part. Columns part, difference."""
    alt = altair()
    own = frame.assign(
        words=[PARTS[part][0] for part in frame["part"]], slower=frame["difference"].map(lambda d: "b slower" if d > 0 else "b faster")
    )
    colours = alt.Scale(domain=["b slower", "b faster"], range=[SERIES[1], SERIES[0]])
    return (
        alt.Chart(data(own, "difference"))
        .mark_bar()
        .encode(
            x=alt.X("difference:Q", title="seconds per step, b minus a", axis=alt.Axis(format="+.3~g")),
            y=alt.Y("words:N", title=None, sort=list(own["words"]), axis=alt.Axis(labelOverlap=False)),
            color=alt.Color("slower:N", title=None, scale=colours),
            tooltip=[alt.Tooltip("words:N", title="part"), alt.Tooltip("difference:Q", title="seconds", format="+.4f")],
        )
        .properties(height=26 * len(own) + 10)
    )


def measured_chart(frame: pd.DataFrame) -> Any:
    """Points: predicted against measured seconds per step, the diagonal, 20 % to both sides. Columns id, family, measured, predicted."""
    alt = altair()
    low, high = _ends(frame)
    axis = {"type": "log", "domain": [low, high], "nice": False}
    lines = pd.DataFrame(
        [(name, x, x * factor) for name, factor in (("equal", 1.0), ("20 % more", 1.2), ("20 % less", 0.8)) for x in (low, high)],
        columns=["line", "measured", "predicted"],
    )
    x = alt.X("measured:Q", title="measured seconds per step (log scale)", scale=alt.Scale(**axis))
    y = alt.Y("predicted:Q", title="predicted seconds per step (log scale)", scale=alt.Scale(**axis))
    rules = (
        alt.Chart(data(lines, "lines"))
        .mark_line(color="#80868f", clip=True)
        .encode(x=x, y=y, detail="line:N", strokeDash=alt.condition("datum.line == 'equal'", alt.value([1, 0]), alt.value([5, 4])))
    )
    dots = alt.Chart(data(frame, "runs")).mark_point(filled=True, size=18, opacity=0.6, color=SERIES[0])
    tooltip = [
        alt.Tooltip("id:N", title="run"),
        alt.Tooltip("family:N"),
        alt.Tooltip("measured:Q", format=".4g"),
        alt.Tooltip("predicted:Q", format=".4g"),
    ]
    return alt.layer(rules, dots.encode(x=x, y=y, tooltip=tooltip)).properties(height=380)


def _ends(frame: pd.DataFrame) -> tuple[float, float]:
    values = frame[["measured", "predicted"]].to_numpy(float)
    return float(values.min()) * 0.9, float(values.max()) * 1.1


def family_chart(frame: pd.DataFrame) -> Any:
    """Per family the band that holds 80 % of its runs, and the median. Columns family, runs, low, median, high: predicted over measured."""
    alt = altair()
    x = alt.X("low:Q", title="predicted over measured (log scale)", scale=alt.Scale(type="log", nice=False, padding=10))
    y = alt.Y("family:N", title=None, sort=list(frame["family"]), axis=alt.Axis(labelOverlap=False, labelLimit=140))
    tooltip = [
        alt.Tooltip("family:N"),
        alt.Tooltip("runs:Q"),
        *(alt.Tooltip(f"{key}:Q", format=".2f") for key in ("low", "median", "high")),
    ]
    base = alt.Chart(data(frame, "families"))
    bands = base.mark_bar(height=9, color=SERIES[0], opacity=0.6).encode(x=x, x2="high:Q", y=y, tooltip=tooltip)
    middle = base.mark_tick(thickness=3, height=15, color=SERIES[1]).encode(x="median:Q", y=y, tooltip=tooltip)
    right = alt.Chart(data(pd.DataFrame({"right": [1.0]}), "right")).mark_rule(color=BAD, strokeDash=[6, 4]).encode(x="right:Q")
    return alt.layer(right, bands, middle).properties(height=22 * len(frame) + 10)
