"""``planner why``: why nothing fits, what holds the best layout back, or why not a certain layout."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import click

from planner.cli.options import CONTEXT, OutputPath, request_options, scenario_of
from planner.cli.terminal import emit, rendered, working


@click.command(context_settings=CONTEXT)
@request_options
@click.option("--layout", "label", help="Why not this one? Such as tp8-pp4-dp64-zero1-mb1; what is left out is filled in.")
@click.option("--format", "style", type=click.Choice(["table", "json"]), default="table", show_default=True)
@click.option("--output", type=OutputPath(), help="Write the answer there instead of printing it.")
def why(scenario_word: str | None, label: str | None, style: str, output: Path | None, **wishes: Any) -> None:
    """Say which limits exclude every layout and what would help, or which limits hold the best layout back."""
    from planner.report.write import check_writable

    if output is not None:
        check_writable(output)
    scenario = scenario_of(scenario_word, wishes)
    content: dict[str, Any]
    if label is not None:
        from planner.explain import complete_layout
        from planner.report.why_not_text import why_not_json, why_not_page
        from planner.why_not import why_not

        refused = why_not(scenario, complete_layout(scenario, label))
        page, content, feasible = why_not_page(refused), why_not_json(refused), refused.feasible
    else:
        from planner.report.why_text import why_json, why_page
        from planner.why import why as ask

        with working("asking what excludes what"):
            answer = ask(scenario)
        page, content, feasible = why_page(answer), why_json(answer), answer.feasible
    text = json.dumps(content, indent=1) + "\n" if style == "json" else rendered(page, to_file=output is not None)
    emit([text], output, code=0 if feasible else 1)
    if not feasible:
        click.get_current_context().exit(1)
