"""The pictures of a page as files: PNG for documents, SVG for anything that scales; the same input gives the same bytes."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from planner.answer import Answer
from planner.cost.timeline import Timeline
from planner.errors import InputError
from planner.report.html.chart_frames import MOST_BARS
from planner.report.html.chart_style import LIGHT, altair, config
from planner.report.html.html_page import Figure
from planner.report.html.row_ledger import row_ledger
from planner.report.html.search_figures import search_figures
from planner.sensitivity import Sensitivity

WIDTH, SCALE = 820, 2.0
"""Pixels of a picture, and how many real ones a PNG has for each."""


def figures_of(found: Answer, *, timeline: Timeline | None = None, sensitivity: Sensitivity | None = None) -> dict[str, bytes]:
    """File name -> content of every picture of a search, PNG and SVG. Raises InputError without the extra ``report``."""
    altair()
    ledgers = [row_ledger(found, row) for row in range(min(len(found.shortlist.rows), MOST_BARS))]
    return files_of(search_figures(found, ledgers, timeline=timeline, sensitivity=sensitivity, points=True))


def files_of(figures: Sequence[Figure]) -> dict[str, bytes]:
    """Each picture twice, on white, with its title; of several charts of one picture each under its own name, too."""
    import vl_convert

    found: dict[str, bytes] = {}
    for figure in figures:
        for chart in figure.charts:
            name, spec = figure.identity, file_spec(chart, figure.title)
            if len(figure.charts) > 1:
                name += f"-{spec['title'].rpartition(': ')[2]}"
            found[f"{name}.png"] = vl_convert.vegalite_to_png(spec, scale=SCALE)
            found[f"{name}.svg"] = renumbered(vl_convert.vegalite_to_svg(spec)).encode("utf-8")
    return found


def renumbered(svg: str) -> str:
    """The picture with its gradients and clips numbered from 0: the library goes on counting from picture to picture.

    >>> renumbered('<linearGradient id="gradient_7"/><path fill="url(#gradient_7)"/>')
    '<linearGradient id="gradient_0"/><path fill="url(#gradient_0)"/>'
    """
    for kind in ("gradient_", "clip"):
        order = {old: new for new, old in enumerate(dict.fromkeys(re.findall(rf'id="{kind}([0-9]+)"', svg)))}
        svg = re.sub(rf'(id="|url\(#){kind}([0-9]+)', lambda m: f"{m[1]}{kind}{order.get(m[2], m[2])}", svg)  # noqa: B023
    return svg


def file_spec(chart: Any, title: str) -> dict[str, Any]:
    """Vega-Lite of a picture as a file."""
    spec: dict[str, Any] = chart.properties(width=WIDTH).to_dict()
    own = f": {spec['title']}" if "title" in spec else ""
    return {**spec, "title": title + own, "config": config() | {"background": LIGHT}}


def write_figures(folder: Path, files: Mapping[str, bytes]) -> list[Path]:
    """Writes the files into a folder, which is made where it is missing. Raises InputError where it cannot be."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        paths = [folder / name for name in files]
        for path, content in zip(paths, files.values(), strict=True):
            path.write_bytes(content)
    except OSError as error:
        raise InputError(f"{folder}: cannot be written ({error.strerror or error}); give a folder") from None
    return paths
