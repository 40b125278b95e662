"""The command line: reads what was typed, calls one library function, prints what comes back. One file per command."""

from __future__ import annotations

from typing import NoReturn

import click

from planner.cli.accuracy_commands import calibrate, validate
from planner.cli.check_command import check_command
from planner.cli.diff_command import diff
from planner.cli.explain_command import explain
from planner.cli.export_command import export_command
from planner.cli.list_command import list_command
from planner.cli.min_gpus_command import min_gpus_command
from planner.cli.options import CONTEXT
from planner.cli.search_command import search_command
from planner.cli.sensitivity_command import sensitivity
from planner.cli.sweep_command import sweep_command
from planner.cli.terminal import run
from planner.cli.why_command import why


@click.group(context_settings=CONTEXT)
@click.version_option(package_name="layout-planner", prog_name="planner")
def planner() -> None:
    """Finds the fastest parallel layout for training a large language model: every one, proven, explained."""


for command in (
    search_command,
    explain,
    check_command,
    export_command,
    why,
    diff,
    sensitivity,
    sweep_command,
    min_gpus_command,
    validate,
    calibrate,
    list_command,
):
    planner.add_command(command)


def main() -> NoReturn:
    """Console script ``planner``."""
    run(planner)


def search_main() -> NoReturn:
    """Console script ``search``: the same as ``planner search``."""
    run(search_command)
