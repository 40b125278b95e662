"""``planner search``: the ranked shortlist."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import click

from planner.cli.options import CONTEXT, OutputPath, request_options, scenario_of
from planner.cli.terminal import emit, progress_bar, rendered, working
from planner.errors import InputError, NoLayoutFits
from planner.scenario import SORTS

MOST_FLAGGED = 100
"""Layouts of a shortlist that the checklist looks at."""

FORMATS = ("table", "csv", "json", "markdown")


@click.command(name="search", context_settings=CONTEXT)
@request_options
@click.option("--sort", type=click.Choice(SORTS), default="step", show_default=True, help="What is best.")
@click.option("--top", type=click.IntRange(1, 100_000), default=10, show_default=True, help="Rows of the shortlist.")
@click.option("--prove", is_flag=True, help="Split every layout that could overtake the first one, however many there are.")
@click.option("--draws", type=click.IntRange(0, 100_000), default=1000, show_default=True, help="Of the model's uncertainty; 0 = none.")
@click.option("--format", "style", type=click.Choice(FORMATS), default="table", show_default=True)
@click.option("--output", type=OutputPath(), help="Write the result there instead of printing it.")
@click.option("--csv", "csv_path", type=OutputPath(), help="Also write the CSV for review.")
@click.option("--all", "every", is_flag=True, help="The CSV holds every layout of the space, rejected ones with their reason.")
def search_command(
    scenario_word: str | None,
    sort: str,
    top: int,
    prove: bool,
    draws: int,
    style: str,
    output: Path | None,
    csv_path: Path | None,
    every: bool,
    **wishes: Any,
) -> None:
    """Search every layout of a model on a cluster and print a ranked shortlist."""
    from planner.explain import shortlist_flags
    from planner.refine import shortlist_of
    from planner.report import formats, text
    from planner.report.everything import everything
    from planner.report.frame import shortlist_frame
    from planner.report.why_text import diagnosed, why_page
    from planner.report.write import check_writable, write_atomically
    from planner.robustness import robustness_of
    from planner.search import search
    from planner.why import Why, why_nothing

    if every and style != "csv" and csv_path is None:
        raise InputError("--all writes CSV: give --csv FILE, or --format csv")
    for path in (output, csv_path):
        if path is not None:
            check_writable(path)
    if output is not None and csv_path is not None and output.resolve() == csv_path.resolve():
        raise InputError(f"--output and --csv both name {output}")
    scenario = scenario_of(scenario_word, wishes)
    answer: Why | None = None
    try:
        with progress_bar() as progress:
            result = search(scenario, sort, progress)
    except NoLayoutFits as nothing:
        result = nothing.result
        if style in ("table", "json"):
            with working("nothing fits; asking why"):
                answer = why_nothing(scenario, result)
    if sys.stderr.isatty():  # not on standard output: the same question prints the same bytes
        click.echo(f"searched in {result.seconds:.2f} s", err=True)
    shortlist = shortlist_of(result, top, uneven=sort == "step" and scenario.choices.uneven_stages, prove=prove)
    robust = robustness_of(result, shortlist, draws) if sort == "step" and style != "markdown" else None
    frame = shortlist_frame(scenario, shortlist, robust)
    findings = shortlist_flags(scenario, shortlist, MOST_FLAGGED if style in ("table", "json") else 0)
    pages: dict[str, Callable[[], Iterable[str]]] = {
        "csv": lambda: everything(result) if every else formats.csv_pieces(frame),
        "json": lambda: [diagnosed(formats.json_text(result, shortlist, robust, frame, findings), answer)],
        "markdown": lambda: [formats.markdown_text(frame)],
        "table": lambda: [
            rendered(
                why_page(answer) if answer else text.shortlist_page(result, shortlist, robust, frame, findings),
                to_file=output is not None,
            )
        ],
    }
    if output is not None:
        emit(pages[style](), output)
    if every and len(result.ranked) and any(shortlist.splits):
        click.echo("the CSV of every layout ranks them under the even split; the page splits its first ones unevenly", err=True)
    if csv_path is not None:
        write_atomically(csv_path, pages["csv"]())
        click.echo(f"wrote {csv_path}", err=True)
    if output is None:
        emit(pages[style](), None, code=0 if len(result.ranked) else 1)
    if not len(result.ranked):
        click.get_current_context().exit(1)
