"""``planner diff``: two layouts side by side."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import click

from planner.cli.options import CONTEXT, OutputPath, request_options, scenario_of
from planner.cli.page_files import check_pages, html_option, write_file
from planner.cli.terminal import emit, rendered


@click.command(context_settings=CONTEXT)
@click.argument("a")
@click.argument("b")
@request_options
@click.option("--format", "style", type=click.Choice(["table", "json", "csv"]), default="table", show_default=True)
@click.option("--output", type=OutputPath(), help="Write the comparison there instead of printing it.")
@html_option
def diff(scenario_word: str | None, a: str, b: str, style: str, output: Path | None, html_path: Path | None, **wishes: Any) -> None:
    """Say where the seconds and bytes of two layouts differ, part by part, and why.

    A and B are labels such as tp8-pp4-dp64-zero1-mb1; what is left out is filled in.
    """
    from planner.difference import compare
    from planner.report import difference_text, formats
    from planner.report.write import check_writable

    if output is not None:
        check_writable(output)
    check_pages([html_path], [output] if output else [], pictured=html_path is not None)
    scenario = scenario_of(scenario_word, wishes)
    found = compare(scenario, a, b)
    pages: dict[str, Callable[[], Iterable[str]]] = {
        "csv": lambda: formats.csv_pieces(difference_text.difference_frame(found)),
        "json": lambda: [json.dumps(difference_text.comparison_json(found), indent=1) + "\n"],
        "table": lambda: [rendered(difference_text.comparison_page(scenario, found), to_file=output is not None)],
    }
    if html_path is not None:
        from planner.report.html.other_pages import diff_html

        write_file(html_path, diff_html(scenario, found))
    emit(pages[style](), output, code=1 if found.illegal else 0)
    if found.illegal:
        if style == "csv":
            click.echo("\n".join(line for refused in found.illegal for line in difference_text.refused_lines(refused)), err=True)
        click.get_current_context().exit(1)
