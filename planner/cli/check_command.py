"""``planner check``: the verdict on a configuration that somebody has."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import click

from planner.cli.options import CONTEXT, OutputPath, open_options, request_of
from planner.cli.terminal import emit, rendered


@click.command(name="check", context_settings=CONTEXT)
@click.argument("file", type=click.Path(path_type=Path))
@open_options
@click.option("--format", "style", type=click.Choice(["table", "json"]), default="table", show_default=True)
@click.option("--output", type=OutputPath(), help="Write the verdict there instead of printing it.")
def check_command(file: Path, scenario_word: str | None, style: str, output: Path | None, **wishes: Any) -> None:
    """Judge the training configuration FILE: legal, fits, how fast, its rank, and the best change.

    FILE is a launch script with Megatron, Megatron-DeepSpeed or torchtitan flags, a YAML of Megatron arguments, a log that
    prints them, a Megatron-Bridge or NeMo YAML, a torchtitan TOML, a ds_config.json, an accelerate or a GPT-NeoX YAML.
    What it leaves open is said by options. Exit code 1: not legal, or out of memory.
    """
    from planner.frameworks.reading import read_config
    from planner.report.check_text import check_json, check_page
    from planner.report.write import check_writable
    from planner.verdict import check

    if output is not None:
        check_writable(output)
    request, _ = request_of(scenario_word, wishes)
    found = check(read_config(file, request.num_gpus), request)
    text = json.dumps(check_json(found), indent=1) + "\n" if style == "json" else rendered(check_page(found), to_file=output is not None)
    emit([text], output, code=0 if found.good else 1)
    if not found.good:
        click.get_current_context().exit(1)
