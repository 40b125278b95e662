"""``planner validate`` and ``planner calibrate``: the model against measured runs."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable
from pathlib import Path

import click

from planner.cli.options import CONTEXT, OutputPath
from planner.cli.terminal import emit, rendered


@click.command(context_settings=CONTEXT)
@click.option("--runs", "runs_path", type=click.Path(path_type=Path), help="Runs file  [default: the shipped measured runs]")
@click.option("--family", help="Only the rows of one source.")
@click.option("--profile", type=click.Path(path_type=Path), help="Constants that `planner calibrate` wrote.")
@click.option("--format", "style", type=click.Choice(["table", "csv", "json"]), default="table", show_default=True)
@click.option("--output", type=OutputPath(), help="Write the report there instead of printing it.")
def validate(runs_path: Path | None, family: str | None, profile: Path | None, style: str, output: Path | None) -> None:
    """Predict measured runs and report how right the model is: time, memory, ranking, verdicts."""
    from planner.profile import read_profile
    from planner.report import accuracy, formats
    from planner.report.write import check_writable
    from planner.validate import SHIPPED, read_rows
    from planner.validate import validate as validate_rows

    if output is not None:
        check_writable(output)
    report = validate_rows(read_rows(runs_path or SHIPPED), family, read_profile(profile) if profile else None)
    pages: dict[str, Callable[[], Iterable[str]]] = {
        "csv": lambda: formats.csv_pieces(accuracy.validation_frame(report)),
        "json": lambda: [json.dumps(report, indent=1) + "\n"],
        "table": lambda: [rendered(accuracy.validation_page(report), to_file=output is not None)],
    }
    emit(pages[style](), output)


@click.command(context_settings=CONTEXT)
@click.argument("measured", type=click.Path(path_type=Path))
@click.option("--write", "profile_path", type=OutputPath(), help="Write the fitted constants as a profile.")
def calibrate(measured: Path, profile_path: Path | None) -> None:
    """Fit the physical constants to your own measured steps (1 to 20 rows of the runs file's columns)."""
    from collections import Counter

    from planner.calibrate import calibrate as fit
    from planner.profile import profile_text
    from planner.report.accuracy import calibration_page
    from planner.report.write import check_writable, write_atomically
    from planner.validate import read_rows, runs_of

    if profile_path is not None:
        check_writable(profile_path)
    skipped: Counter[str] = Counter()
    runs = [run for run in runs_of(read_rows(measured), skipped) if run.step_seconds > 0]
    for reason, number in sorted(skipped.items()):
        click.echo(f"skipped {number}: {reason}", err=True)
    found = fit(runs)
    click.echo(rendered(calibration_page(found), to_file=False), nl=False)
    if profile_path is not None:
        write_atomically(profile_path, [profile_text(found.profile(), f"fitted to {len(runs)} runs of {measured.name}")])
        click.echo(f"wrote {profile_path}", err=True)
