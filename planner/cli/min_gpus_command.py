"""``planner min-gpus``: the fewest GPUs for a model, a deadline, a budget or a speed."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import click

from planner.cli.options import CONTEXT, Count, OutputPath, request_options, scenario_of
from planner.cli.terminal import counting, emit, rendered
from planner.errors import InputError


@click.command(name="min-gpus", context_settings=CONTEXT)
@request_options
@click.option("--most", type=Count(), default=65536, show_default=True, help="Larger numbers of GPUs are not tried.")
@click.option("--batch-within", type=Count(whole=False), default=0, help="Also try batches within so many percent that divide better.")
@click.option("--format", "style", type=click.Choice(["table", "json"]), default="table", show_default=True)
@click.option("--output", type=OutputPath(), help="Write the answer there instead of printing it.")
def min_gpus_command(scenario_word: str | None, most: int, batch_within: float, style: str, output: Path | None, **wishes: Any) -> None:
    """Find the fewest GPUs on which the model fits, or also meets --deadline, --budget, --step-under, --tokens-per-second."""
    from planner.min_gpus import min_gpus
    from planner.report.min_gpus_text import min_gpus_json, min_gpus_page
    from planner.report.write import check_writable

    if output is not None:
        check_writable(output)
    if wishes["num_gpus"] is not None:
        raise InputError(f"--gpus = {wishes['num_gpus']}: min-gpus finds the number; leave it out, or bound it with --most")
    for option, value, least, highest in (("--most", most, 1, 10_000_000), ("--batch-within", batch_within, 0, 50)):
        if not least <= value <= highest:
            raise InputError(f"{option} = {value:,.10g} must lie between {least} and {highest:,}")
    scenario = scenario_of(scenario_word, {**wishes, "num_gpus": 1})
    with counting("GPUs tried") as progress:
        found = min_gpus(scenario, most, batch_within / 100, progress)
    if style == "json":
        page = json.dumps(min_gpus_json(found), indent=1) + "\n"
    else:
        page = rendered(min_gpus_page(found), to_file=output is not None)
    emit([page], output, code=0 if found.safe.num_gpus else 1)
    if not found.safe.num_gpus:
        click.get_current_context().exit(1)
