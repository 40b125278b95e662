"""Files that show a result: pages in HTML, pictures, the pipeline as a trace, a summary in Markdown."""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from planner.cli.options import OutputPath
from planner.errors import InputError

if TYPE_CHECKING:
    from planner.answer import Answer
    from planner.cost.timeline import Timeline
    from planner.scenario import Scenario
    from planner.sensitivity import Sensitivity
    from solver.layout import Layout

html_option = click.option("--html", "html_path", type=OutputPath(), help="Also write one self-contained page (extra: report).")
trace_option = click.option("--trace", "trace_path", type=OutputPath(), help="Also write the pipeline as a Chrome or Perfetto trace.")

SEARCH_OPTIONS: tuple[Callable[..., Any], ...] = (
    html_option,
    click.option("--figures", "figures_folder", type=click.Path(path_type=Path), help="Also write the pictures as PNG and SVG there."),
    click.option("--summary", "summary_path", type=OutputPath(), help="Also write a Markdown summary for a pull request."),
    trace_option,
    click.option("--with-sensitivity", is_flag=True, help="Pages and pictures also vary each property (a search for each: a minute)."),
)


def page_options(command: Callable[..., Any]) -> Callable[..., Any]:
    """The options of a search that write such files."""
    for option in reversed(SEARCH_OPTIONS):
        command = option(command)
    return command


@dataclass(frozen=True, kw_only=True)
class Pages:
    """Which files a search writes beside its result."""

    html_path: Path | None = None
    figures_folder: Path | None = None
    summary_path: Path | None = None
    trace_path: Path | None = None
    with_sensitivity: bool = False

    @property
    def pictured(self) -> bool:
        """Whether any of them needs pictures."""
        return self.html_path is not None or self.figures_folder is not None

    @property
    def any(self) -> bool:
        """Whether any file is wanted."""
        return self.pictured or self.summary_path is not None or self.trace_path is not None

    def check(self, others: list[Path]) -> None:
        """Raise InputError for files that cannot be written or stand in each other's way, before any work is done."""
        check_pages([self.html_path, self.summary_path, self.trace_path], others, pictured=self.pictured)


def check_pages(paths: list[Path | None], others: list[Path], *, pictured: bool) -> None:
    """Raise InputError for files that cannot be written, that are named twice, or whose extra is not installed."""
    from planner.report.write import check_writable

    seen = [path.resolve() for path in others]
    for path in paths:
        if path is None:
            continue
        check_writable(path)
        if path.resolve() in seen:
            raise InputError(f"two outputs name {path}")
        seen.append(path.resolve())
    if pictured:
        from planner.report.html.chart_style import altair

        altair()


def pipeline_of(scenario: Scenario, layout: Layout) -> Timeline | None:
    """What each stage does when, of a layout under its best split; None without a pipeline."""
    from planner.cost.timeline import timeline_of
    from planner.refine import costing_job

    return timeline_of(costing_job(scenario, layout)[0], layout) if layout.pipeline_parallel > 1 else None


def write_pages(found: Answer, wanted: Pages) -> None:
    """Writes them, and names each on standard error."""
    from planner.cli.terminal import working

    rows, scenario = found.shortlist.rows, found.result.scenario
    first = rows.layouts.layout(0) if found.feasible else None
    timeline = pipeline_of(scenario, first) if first is not None else None
    sensitivity = vary_each(scenario, first) if first is not None and wanted.with_sensitivity and wanted.pictured else None
    pictures: list[Path] = []
    if wanted.figures_folder is not None:
        from planner.report.html.figures_files import figures_of, write_figures

        with working("drawing the pictures"):
            pictures = write_figures(wanted.figures_folder, figures_of(found, timeline=timeline, sensitivity=sensitivity))
        click.echo(f"wrote {len(pictures)} pictures into {wanted.figures_folder}", err=True)
    if wanted.html_path is not None:
        from planner.report.html.search_html import search_html

        with working("making the page"):
            write_file(wanted.html_path, search_html(found, timeline=timeline, sensitivity=sensitivity))
    if wanted.summary_path is not None:
        from planner.report.html.markdown_summary import markdown_summary

        write_file(wanted.summary_path, markdown_summary(found, relative(pictures, wanted.summary_path)))
    if wanted.trace_path is not None:
        write_trace(wanted.trace_path, timeline, first.label if first is not None else "")


def relative(pictures: list[Path], document: Path) -> list[str]:
    """The PNG pictures as a document names them: from its own folder."""
    return [os.path.relpath(path, document.parent) for path in pictures if path.suffix == ".png"]


def vary_each(scenario: Scenario, layout: Layout) -> Sensitivity:
    """The pick under each property of cluster and workload, one at a time."""
    from planner.cli.terminal import working
    from planner.sensitivity import sensitivity

    with working("varying each property"):
        return sensitivity(scenario, layout)


def write_trace(path: Path, timeline: Timeline | None, title: str) -> None:
    """Writes a trace; without a pipeline there is none, and that is told."""
    from planner.report.trace import trace_pieces
    from planner.report.write import write_atomically

    if timeline is None:
        click.echo(f"no trace: {f'{title} has one stage' if title else 'nothing fits'}", err=True)
        return
    write_atomically(path, trace_pieces(timeline, title))
    click.echo(f"wrote {path}", err=True)


def write_file(path: Path, text: str) -> None:
    """Writes one file, and names it on standard error."""
    from planner.report.write import write_atomically

    write_atomically(path, [text])
    click.echo(f"wrote {path}", err=True)
