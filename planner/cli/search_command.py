"""``planner search``: the ranked shortlist."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from planner.cli.options import CONTEXT, OutputPath, request_options, scenario_of
from planner.cli.page_files import Pages, page_options, write_pages
from planner.cli.terminal import emit, progress_bar, rendered, working
from planner.errors import InputError
from planner.scenario import SORTS

if TYPE_CHECKING:
    import pandas as pd

    from planner.answer import Answer

MOST_FLAGGED = 100
"""Layouts of a shortlist that the checklist looks at."""

FORMATS = ("table", "csv", "json", "markdown")


@click.command(name="search", context_settings=CONTEXT)
@request_options
@click.option("--sort", type=click.Choice(SORTS), default="step", show_default=True, help="What is best.")
@click.option("--top", type=click.IntRange(1, 100_000), default=10, show_default=True, help="Rows of the shortlist.")
@click.option("--pareto", is_flag=True, help="Only layouts that none beats in time, money and memory at once.")
@click.option("--prove", is_flag=True, help="Split every layout that could overtake the first one, however many there are.")
@click.option("--draws", type=click.IntRange(0, 100_000), default=1000, show_default=True, help="Of the model's uncertainty; 0 = none.")
@click.option("--long-context", "longer", multiple=True, metavar="SEQ[:TOKENS]", help="Also plan a phase of such sequences (128k:100B).")
@click.option("--format", "style", type=click.Choice(FORMATS), default="table", show_default=True)
@click.option("--output", type=OutputPath(), help="Write the result there instead of printing it.")
@click.option("--csv", "csv_path", type=OutputPath(), help="Also write the CSV for review.")
@page_options
@click.option("--export", "folder", type=click.Path(path_type=Path), help="Also write the first layout as launchable files there.")
@click.option("--all", "every", is_flag=True, help="The CSV holds every layout of the space, rejected ones with their reason.")
def search_command(
    scenario_word: str | None,
    sort: str,
    top: int,
    pareto: bool,
    prove: bool,
    draws: int,
    longer: tuple[str, ...],
    style: str,
    output: Path | None,
    csv_path: Path | None,
    folder: Path | None,
    every: bool,
    html_path: Path | None,
    figures_folder: Path | None,
    summary_path: Path | None,
    trace_path: Path | None,
    with_sensitivity: bool,
    **wishes: Any,
) -> None:
    """Search every layout of a model on a cluster and print a ranked shortlist."""
    from planner.answer import Wanted, answer, with_reasons
    from planner.long_context import read_phase
    from planner.report import formats
    from planner.report.everything import everything
    from planner.report.frame import answer_frame
    from planner.report.write import write_atomically

    check_outputs(style, output, csv_path, every)
    shown = Pages(
        html_path=html_path,
        figures_folder=figures_folder,
        summary_path=summary_path,
        trace_path=trace_path,
        with_sensitivity=with_sensitivity,
    )
    shown.check([path for path in (output, csv_path) if path is not None])
    if folder is not None and wishes["framework"] == "none":
        raise InputError("--export needs a framework: leave --framework out, or name one that launches layouts")
    pages = style in ("table", "json") or shown.any
    wanted = Wanted(
        sort=sort,
        top=top,
        prove=prove,
        pareto=pareto,
        draws=draws if style != "markdown" or shown.any else 0,
        flagged=MOST_FLAGGED if pages else 0,
        phases=tuple(read_phase(word) for word in longer),
    )
    scenario = scenario_of(scenario_word, wishes)
    with progress_bar() as progress:
        found = answer(scenario, wanted, progress)
    if pages and not found.feasible:
        with working("nothing fits; asking why"):
            found = with_reasons(found)
    if sys.stderr.isatty():  # not on standard output: the same question prints the same bytes
        click.echo(f"searched in {found.result.seconds:.2f} s", err=True)
    if every and any(found.shortlist.splits):
        click.echo("the CSV of every layout ranks them under the even split; the page splits its first ones unevenly", err=True)
    frame = answer_frame(found)
    rows: Callable[[], Iterable[str]] = lambda: everything(found.result) if every else formats.csv_pieces(frame)  # noqa: E731
    page = rows() if style == "csv" else [page_of(found, frame, style, to_file=output is not None)]
    if output is not None:
        emit(page, output)
    if csv_path is not None:
        write_atomically(csv_path, rows())
        click.echo(f"wrote {csv_path}", err=True)
    if folder is not None and found.feasible:
        export_first(found, folder)
    if shown.any:
        write_pages(found, shown)
    if output is None:
        emit(page, None, code=0 if found.feasible else 1)
    if not found.feasible:
        click.get_current_context().exit(1)


def export_first(found: Answer, folder: Path) -> None:
    """Writes the first layout for the framework whose stack it is costed under."""
    from planner.export import export, write
    from planner.frameworks.legality import framework_of

    rows, scenario = found.shortlist.rows, found.result.scenario
    for path in write(export(scenario, framework_of(int(rows.stack[0])), rows.layouts.layout(0)), folder):
        click.echo(f"wrote {path}", err=True)


def check_outputs(style: str, output: Path | None, csv_path: Path | None, every: bool) -> None:
    """Raise InputError for files that cannot be written, before any work is done."""
    from planner.report.write import check_writable

    if every and style != "csv" and csv_path is None:
        raise InputError("--all writes CSV: give --csv FILE, or --format csv")
    for path in (output, csv_path):
        if path is not None:
            check_writable(path)
    if output is not None and csv_path is not None and output.resolve() == csv_path.resolve():
        raise InputError(f"--output and --csv both name {output}")


def page_of(found: Answer, frame: pd.DataFrame, style: str, *, to_file: bool) -> str:
    """The answer as a table, JSON or Markdown."""
    from planner.report import formats, text
    from planner.report.why_text import diagnosed, why_page

    if style == "json":
        return diagnosed(formats.json_text(found, frame), found.why)
    if style == "markdown":
        return formats.markdown_text(frame)
    return rendered(why_page(found.why) if found.why else text.shortlist_page(found, frame), to_file=to_file)
