"""``planner explain``: one layout taken apart."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import click

from planner.cli.options import CONTEXT, OutputPath, request_options, scenario_of
from planner.cli.page_files import check_pages, html_option, pipeline_of, trace_option, write_file, write_trace
from planner.cli.terminal import emit, rendered


@click.command(context_settings=CONTEXT)
@request_options
@click.option("--layout", "label", required=True, help="Such as tp8-pp4-dp64-zero1-mb1; what is left out is filled in.")
@click.option("--format", "style", type=click.Choice(["table", "json"]), default="table", show_default=True)
@click.option("--output", type=OutputPath(), help="Write the ledger there instead of printing it.")
@html_option
@trace_option
def explain(
    scenario_word: str | None,
    label: str,
    style: str,
    output: Path | None,
    html_path: Path | None,
    trace_path: Path | None,
    **wishes: Any,
) -> None:
    """Take one layout apart: bytes per part and stage, seconds per part, each with its formula."""
    from planner.cost.memory import OUT_OF_MEMORY
    from planner.explain import check_pins, complete_layout
    from planner.explain import explain as explain_layout
    from planner.report import text
    from planner.report.ledger import ledger_json
    from planner.report.write import check_writable

    if output is not None:
        check_writable(output)
    check_pages([html_path, trace_path], [output] if output else [], pictured=html_path is not None)
    scenario = scenario_of(scenario_word, wishes)
    layout = complete_layout(scenario, label)
    check_pins(scenario, layout)
    found = explain_layout(scenario, layout)
    if style == "json":
        page = json.dumps(ledger_json(found), indent=1) + "\n"
    elif found.step is None:
        page = "\n".join([f"layout {found.layout.label} is not legal:", *text.illegal_lines(found)]) + "\n"
    else:
        page = rendered(text.ledger_page(found), to_file=output is not None)
    timeline = pipeline_of(scenario, layout) if found.step is not None and (html_path or trace_path) else None
    if html_path is not None:
        from planner.report.html.other_pages import explain_html

        write_file(html_path, explain_html(found, timeline=timeline))
    if trace_path is not None:
        write_trace(trace_path, timeline, layout.label)
    refused = not found.legal or found.verdict == OUT_OF_MEMORY
    emit([page], output, code=1 if refused else 0)
    if refused:
        click.get_current_context().exit(1)
