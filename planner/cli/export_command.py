"""``planner export``: a layout as the files that a framework launches."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from planner.cli.options import CONTEXT, request_options, scenario_of
from planner.cli.terminal import emit, fail
from planner.errors import InputError

if TYPE_CHECKING:
    from planner.scenario import Scenario
    from solver.layout import Layout


@click.command(name="export", context_settings=CONTEXT)
@request_options
@click.option("--layout", "label", required=True, help="Such as tp8-pp4-dp64-zero1-mb1; what is left out is filled in.")
@click.option("--output", "folder", type=click.Path(path_type=Path), required=True, help="Folder to write the files into.")
def export_command(scenario_word: str | None, label: str, folder: Path, **wishes: Any) -> None:
    """Write a layout as launchable files: flags, environment and a Slurm or torchrun script of one framework.

    --framework says which: megatron, megatron-bridge, torchtitan, deepspeed or accelerate. Data, tokenizer, nodes, ranks and
    ports stay variables of the script.
    """
    from planner.explain import complete_layout

    scenario = scenario_of(scenario_word, wishes)
    export_to(scenario, complete_layout(scenario, label), folder, scenario.choices.framework)


def export_to(scenario: Scenario, layout: Layout, folder: Path, framework: str) -> None:
    """Writes the files and names them on standard output. Exits with 1 where the framework refuses the layout, or memory does."""
    from planner.export import Refused, export, write
    from planner.frameworks import FRAMEWORKS
    from planner.report.text import illegal_lines

    if framework not in FRAMEWORKS:
        raise InputError(f"export needs --framework, one of {', '.join(FRAMEWORKS)}")
    try:
        exported = export(scenario, framework, layout)
    except Refused as refused:
        fail("; ".join([f"{refused}: nothing was written", *illegal_lines(refused.found)]), 1)
    emit("".join(f"{path}\n" for path in write(exported, folder)), None)
