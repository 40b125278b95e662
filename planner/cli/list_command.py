"""``planner list``: the catalogue."""

from __future__ import annotations

import click

from planner.cli.options import CONTEXT
from planner.cli.terminal import rendered


@click.command(name="list", context_settings=CONTEXT)
@click.argument("kind", type=click.Choice(["models", "gpus", "clusters", "software", "operations"]))
def list_command(kind: str) -> None:
    """List the catalogue: names, aliases, and the figures that matter."""
    from planner.report.listing import listing

    click.echo(rendered(listing(kind), to_file=False), nl=False)
