"""What every picture shares: colours that are legible on white and on dark pages, words and marks, and its data as plain rows."""

from __future__ import annotations

from collections.abc import Iterable
from types import MappingProxyType
from typing import Any

import pandas as pd

from planner.errors import InputError
from planner.report.plain import plain

LIGHT, DARK = "#ffffff", "#1a1e26"
"""Backgrounds of pictures; pages use the same (page.css)."""

INK, FAINT = "#2b313b", "#d5d9e0"
"""Letters and grid lines on white; page.css has the dark page's."""

PARTS = MappingProxyType(
    {
        "compute": ("compute", "#2e78c7"),
        "imbalance": ("slowest stage's surplus", "#5f86b3"),
        "recompute": ("recompute", "#128a8a"),
        "launch": ("launch waits", "#80868f"),
        "tensor": ("TP exposed", "#d0591f"),
        "context": ("CP exposed", "#a87a1c"),
        "expert": ("EP exposed", "#c23f7c"),
        "sharding": ("ZeRO-3 exposed", "#a553c6"),
        "pipeline": ("PP transfers", "#7a6ae0"),
        "bubble": ("bubble", "#666d78"),
        "data": ("DP exposed", "#d33f3f"),
        "optimizer": ("optimizer", "#2f9146"),
        "overhead": ("overhead", "#91714f"),
    }
)
"""Parts of a step: words, colour. Work is blue and green, waiting grey, communication warm."""

MEMORY_PARTS = MappingProxyType(
    {
        "weights": ("weights", "#2e78c7"),
        "gradients": ("gradients", "#d0591f"),
        "optimizer": ("optimizer", "#2f9146"),
        "activations": ("activations", "#a553c6"),
        "logits": ("logits", "#c23f7c"),
        "transient": ("transient", "#a87a1c"),
        "buffers": ("buffers", "#128a8a"),
        "context": ("CUDA context", "#80868f"),
        "reserve": ("reserve", "#666d78"),
    }
)
"""Parts of a stage's memory, the reserve for fragments last."""

KINDS = MappingProxyType(
    {
        "forward": ("forward", "#2e78c7"),
        "recompute": ("recompute", "#128a8a"),
        "backward": ("backward", "#2f9146"),
        "backward input": ("backward, inputs", "#2f9146"),
        "backward weight": ("backward, weights", "#a87a1c"),
        "communication": ("communication", "#d0591f"),
        "gradients": ("DP exposed", "#d33f3f"),
        "optimizer": ("optimizer", "#a553c6"),
    }
)
"""Kinds of a pipeline's events (planner.cost.timeline.KINDS); what is white is idle."""

SERIES = (
    "#2e78c7",
    "#d0591f",
    "#2f9146",
    "#a553c6",
    "#128a8a",
    "#c23f7c",
    "#a87a1c",
    "#d33f3f",
    "#7a6ae0",
    "#666d78",
    "#91714f",
    "#5f86b3",
)
SHAPES = ("circle", "square", "triangle-up", "diamond", "cross", "triangle-down", "triangle-right", "triangle-left")
"""Colour and form of what has no colour of its own, so that none is told by colour alone."""

GOOD, BAD = "#2f9146", "#d33f3f"


def altair() -> Any:
    """The plotting library. Raises InputError where the extra is not installed."""
    try:
        import altair as library
        import vl_convert  # noqa: F401
    except ImportError:
        raise InputError("pictures need the packages altair and vl-convert-python: pip install 'layout-planner[report]'") from None
    return library


def config() -> dict[str, Any]:
    """Vega-Lite settings: plain letters, light grid, legends below. Fresh, so that a caller may change it."""
    text = {"labelColor": INK, "titleColor": INK, "labelFontSize": 12, "titleFontSize": 12, "titleFontWeight": 600}
    return {
        "aria": False,
        "background": "transparent",
        "font": "system-ui, 'Segoe UI', Roboto, 'DejaVu Sans', sans-serif",
        "axis": {
            **text,
            "gridColor": FAINT,
            "domainColor": "#8b929d",
            "tickColor": "#8b929d",
            "labelOverlap": True,
            "labelSeparation": 8,
            "titlePadding": 8,
        },
        "legend": {**text, "orient": "bottom", "columns": 6, "symbolSize": 120, "labelLimit": 170, "symbolStrokeWidth": 0},
        "header": text,
        "title": {"color": INK, "fontSize": 14, "anchor": "start", "offset": 12},
        "text": {"color": INK, "fontSize": 12},
        "view": {"stroke": None, "continuousHeight": 260},
        "range": {"category": list(SERIES), "symbol": list(SHAPES)},
    }


def rows_of(frame: pd.DataFrame) -> list[dict[str, Any]]:
    """A frame's rows as plain data, nine digits, what is not finite as null."""
    return [plain(row) for row in frame.to_dict("records")]


def data(frame: pd.DataFrame, name: str) -> Any:
    """A frame as a named data set inside a picture."""
    return altair().InlineData(values=rows_of(frame), name=name)


def scale(table: Any, used: Iterable[str]) -> Any:
    """Words of a table's used entries with their colours, in the table's order."""
    kept = [table[key] for key in table if key in set(used)]
    return altair().Scale(domain=[words for words, _ in kept], range=[colour for _, colour in kept])


def luminance(colour: str) -> float:
    """Relative luminance of #rrggbb, 0 to 1. Source: WCAG 2.1.

    >>> round(luminance("#ffffff"), 3), round(luminance("#000000"), 3)
    (1.0, 0.0)
    """
    channels = [int(colour[start : start + 2], 16) / 255 for start in (1, 3, 5)]
    red, green, blue = (c / 12.92 if c <= 0.04045 else ((c + 0.055) / 1.055) ** 2.4 for c in channels)
    return 0.2126 * red + 0.7152 * green + 0.0722 * blue


def contrast(one: str, other: str) -> float:
    """Contrast of two colours, 1 to 21. Source: WCAG 2.1.

    >>> contrast("#000000", "#ffffff")
    21.0
    """
    low, high = sorted((luminance(one), luminance(other)))
    return (high + 0.05) / (low + 0.05)
