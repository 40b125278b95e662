"""A whole page: style, scripts and data in one file that asks no network for anything, and says so in its security policy."""

from __future__ import annotations

import base64
import functools
import hashlib
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pandas as pd

from planner.report.html.chart_style import altair, config
from planner.report.html.markup import Cell, Content, Html, data_script, details, joined, raw, section, table, tag

HERE = Path(__file__).parent
MOST_NUMBERS = 400
"""Rows of the table of numbers under a picture."""


@dataclass(frozen=True)
class Figure:
    """One picture with its words."""

    identity: str
    """Part of a file's name, too."""
    title: str
    words: str
    """What it shows, in a sentence or two."""
    charts: tuple[Any, ...]
    """Usually one."""
    numbers: pd.DataFrame | None = None
    """What is drawn, for those who cannot see it."""
    controls: Content = field(default_factory=lambda: Html(""))
    canvas: bool = False
    """Drawn as pixels: many points."""

    @property
    def specs(self) -> list[dict[str, Any]]:
        """Vega-Lite of its charts, as wide as their place."""
        return [_page_spec(chart) for chart in self.charts]


def _page_spec(chart: Any) -> dict[str, Any]:
    spec: dict[str, Any] = chart.properties(width="container").to_dict()
    spec.pop("$schema", None)  # an address that nothing should ask for
    spec.pop("config", None)
    return {**spec, "autosize": {"type": "fit-x", "contains": "padding"}}


def page(title: str, sections: Sequence[tuple[str, str, Content]], figures: Sequence[Figure] = (), data: Sequence[Html] = ()) -> str:
    """The page: sections as (id, heading, content), of which one may be ``figures_html(figures)``; data are data_script elements.

    Raises InputError where the plotting library is missing.
    """
    altair()
    style, script = (HERE / "page.css").read_text(encoding="utf-8"), (HERE / "page.js").read_text(encoding="utf-8")
    scripts = [library(), script] if figures else [script]
    known = " ".join(f"'sha256-{_hash(text)}'" for text in scripts)
    policy = f"default-src 'none'; style-src 'unsafe-inline'; img-src data: blob:; script-src {known} 'unsafe-eval'"
    links = [tag("a", heading, href=f"#{identity}") for identity, heading, _ in sections]
    specs = [data_script(f"spec-{figure.identity}-{number}", spec) for figure in figures for number, spec in enumerate(figure.specs)]
    settings = [data_script("chart-config", config())] if figures else []
    body = [
        tag("a", "Skip to the content", href="#content", class_="skip"),
        tag("header", tag("h1", title), tag("nav", joined(links, " "), aria_label="parts of this page")),
        tag("main", *(section(*own) for own in sections), id="content", tabindex="-1"),
        *settings,
        *specs,
        *data,
        *(Html(f"<script>{text}</script>") for text in scripts),
    ]
    head = [
        '<meta charset="utf-8">',
        f'<meta http-equiv="Content-Security-Policy" content="{raw(policy)}">',
        '<meta name="viewport" content="width=device-width, initial-scale=1">',
        '<meta name="color-scheme" content="light dark">',
        f"<title>{raw(title)}</title>",
        f"<style>{style}</style>",
    ]
    return "\n".join(
        ["<!DOCTYPE html>", '<html lang="en">', "<head>", *head, "</head>", "<body>", *map(raw, body), "</body>", "</html>", ""]
    )


def _hash(script: str) -> str:
    return base64.b64encode(hashlib.sha256(script.encode("utf-8")).digest()).decode("ascii")


@functools.cache
def library() -> str:
    """Vega, Vega-Lite and Vega-Embed as one script, from the installed package: about 0.9 MB."""
    import vl_convert

    script: str = vl_convert.javascript_bundle()  # type: ignore[call-arg]  # the snippet is optional
    if "</script" in script or "<!--" in script:
        raise RuntimeError("the plotting library's script would end its element")
    return f"(function () {{{script}\n}})();"  # its names stay its own


def figures_html(figures: Sequence[Figure]) -> Html:
    """The places of pictures; the page's script draws them when they come into view."""
    return joined(map(_figure, figures))


def _figure(figure: Figure) -> Html:
    places = [
        tag(
            "div",
            class_="chart",
            role="img",
            aria_label=f"{figure.title}. {figure.words}",
            data_spec=f"spec-{figure.identity}-{number}",
            data_renderer="canvas" if figure.canvas else "svg",
        )
        for number in range(len(figure.charts))
    ]
    numbers = [] if figure.numbers is None or not len(figure.numbers) else [details("The numbers of this picture", numbers_table(figure))]
    caption = tag("figcaption", tag("h3", figure.title), tag("p", figure.words))
    return tag("figure", caption, figure.controls, *places, *numbers, id=f"figure-{figure.identity}")


def numbers_table(figure: Figure) -> Html:
    """A picture's numbers as a table, the first ones of many."""
    assert figure.numbers is not None
    shown = figure.numbers.head(MOST_NUMBERS)
    rows = [[number_cell(value) for value in row] for row in shown.itertuples(index=False)]
    more = "" if len(shown) == len(figure.numbers) else f", the first {len(shown):,} of {len(figure.numbers):,} rows"
    return table([str(column) for column in shown.columns], rows, f"{figure.title}{more}")


def number_cell(value: Any) -> Cell:
    """A number in four digits, or words."""
    if isinstance(value, float):
        return Cell("" if pd.isna(value) else f"{value:,.4g}" if abs(value) < 1e6 else f"{value:,.0f}")
    if hasattr(value, "item") or isinstance(value, int):
        return Cell(f"{int(value):,}")
    return Cell(str(value), number=False)
