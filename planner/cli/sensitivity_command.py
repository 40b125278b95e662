"""``planner sensitivity``: what each property of cluster and workload is worth."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import click

from planner.cli.options import CONTEXT, OutputPath, request_options, scenario_of
from planner.cli.terminal import emit, rendered
from planner.errors import NoLayoutFits


@click.command(context_settings=CONTEXT)
@request_options
@click.option("--layout", "label", help="The layout that is kept  [default: the fastest]")
@click.option("--factors", metavar="F,F,..", help="Multiply each property by these  [default: 0.5,0.8,1.25,2; counts 0.5,2]")
@click.option("--format", "style", type=click.Choice(["table", "csv", "json"]), default="table", show_default=True)
@click.option("--output", type=OutputPath(), help="Write the result there instead of printing it.")
def sensitivity(scenario_word: str | None, label: str | None, factors: str | None, style: str, output: Path | None, **wishes: Any) -> None:
    """Change HBM, links, network, latency, peak, sequence and batch one at a time, and search again."""
    from planner.explain import check_pins, complete_layout
    from planner.report import formats, sensitivity_text, text
    from planner.report.write import check_writable
    from planner.sensitivity import parse_factors
    from planner.sensitivity import sensitivity as change_each

    if output is not None:
        check_writable(output)
    chosen = parse_factors(factors) if factors is not None else ()
    scenario = scenario_of(scenario_word, wishes)
    layout = complete_layout(scenario, label) if label is not None else None
    if layout is not None:
        check_pins(scenario, layout)
    try:
        with points_bar() as progress:
            found = change_each(scenario, layout, chosen, progress)
    except NoLayoutFits as nothing:
        if style == "json":
            emit([json.dumps({"pick": None, "points": [], "reason": "no layout fits"}) + "\n"], output, code=1)
        click.echo("\n".join(text.no_layout_lines(nothing.result)), err=style != "table" or output is not None)
        click.get_current_context().exit(1)
    pages: dict[str, Callable[[], Iterable[str]]] = {
        "csv": lambda: formats.csv_pieces(sensitivity_text.sensitivity_frame(found)),
        "json": lambda: [sensitivity_text.sensitivity_json(found)],
        "table": lambda: [rendered(sensitivity_text.sensitivity_page(found), to_file=output is not None)],
    }
    emit(pages[style](), output, code=0 if found.pick else 1)
    if found.pick is None:
        click.get_current_context().exit(1)


@contextmanager
def points_bar() -> Iterator[Callable[[int, int], None] | None]:
    """A callback that draws a bar on standard error, on a terminal only."""
    if not sys.stderr.isatty():
        yield None
        return
    from rich.console import Console
    from rich.progress import MofNCompleteColumn, Progress, TimeRemainingColumn

    columns = (*Progress.get_default_columns()[:2], MofNCompleteColumn(), TimeRemainingColumn())
    with Progress(*columns, console=Console(stderr=True), transient=True) as bar:
        task = bar.add_task("searching again", total=None)
        yield lambda done, total: bar.update(task, completed=done, total=total)
