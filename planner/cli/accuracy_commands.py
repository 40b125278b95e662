"""``planner validate`` and ``planner calibrate``: the model against measured runs."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from planner.cli.options import CONTEXT, OutputPath, request_of, request_options
from planner.cli.page_files import check_pages, html_option, write_file
from planner.cli.terminal import emit, rendered
from planner.errors import InputError
from planner.request import Request

if TYPE_CHECKING:
    from planner.measured import Run


@click.command(context_settings=CONTEXT)
@click.option("--runs", "runs_path", type=click.Path(path_type=Path), help="Runs file  [default: the shipped measured runs]")
@click.option("--family", help="Only the rows of one source.")
@click.option("--profile", type=click.Path(path_type=Path), help="Constants that `planner calibrate` wrote.")
@click.option("--format", "style", type=click.Choice(["table", "csv", "json"]), default="table", show_default=True)
@click.option("--output", type=OutputPath(), help="Write the report there instead of printing it.")
@html_option
def validate(
    runs_path: Path | None, family: str | None, profile: Path | None, style: str, output: Path | None, html_path: Path | None
) -> None:
    """Predict measured runs and report how right the model is: time, memory, ranking, verdicts."""
    from planner.profile import read_profile
    from planner.report import accuracy, formats
    from planner.report.write import check_writable
    from planner.validate import SHIPPED, read_rows
    from planner.validate import validate as validate_rows

    if output is not None:
        check_writable(output)
    check_pages([html_path], [output] if output else [], pictured=html_path is not None)
    report = validate_rows(read_rows(runs_path or SHIPPED), family, read_profile(profile) if profile else None)
    pages: dict[str, Callable[[], Iterable[str]]] = {
        "csv": lambda: formats.csv_pieces(accuracy.validation_frame(report)),
        "json": lambda: [json.dumps(report, indent=1) + "\n"],
        "table": lambda: [rendered(accuracy.validation_page(report), to_file=output is not None)],
    }
    if html_path is not None:
        from planner.report.html.other_pages import validate_html

        write_file(html_path, validate_html(report))
    emit(pages[style](), output)


@click.command(context_settings=CONTEXT)
@click.argument("measured", required=False, type=click.Path(path_type=Path))
@click.option("--log", "logs", multiple=True, type=click.Path(path_type=Path), help="A training log of Megatron, torchtitan, DeepSpeed.")
@click.option(
    "--config", "configs", multiple=True, type=click.Path(path_type=Path), help="The log's configuration  [default: what it prints]"
)
@click.option("--write", "profile_path", type=OutputPath(), help="Write the fitted constants as a profile.")
@request_options
def calibrate(
    measured: Path | None,
    logs: tuple[Path, ...],
    configs: tuple[Path, ...],
    profile_path: Path | None,
    scenario_word: str | None,
    **wishes: Any,
) -> None:
    """Fit the physical constants to your own measured steps: 1 to 20 rows of the runs file's columns, logs (--log), or both.

    The other options say of a log's run what its configuration leaves open, such as --gpus, --gpu and --model.
    """
    from rich.console import Group
    from rich.text import Text

    from planner.calibrate import calibrate as fit
    from planner.profile import profile_text
    from planner.report.accuracy import calibration_page, peaks_table
    from planner.report.write import check_writable, write_atomically
    from planner.validate import predict

    if profile_path is not None:
        check_writable(profile_path)
    request, _ = request_of(scenario_word, wishes)
    if not logs and (configs or request != Request(profile=request.profile)):
        raise InputError("--config and what describes a run go with --log FILE; a runs file says all of its runs")
    if measured is None and not logs:
        raise InputError("nothing to fit to: name a runs file (MEASURED.csv), a training log (--log FILE), or both")
    runs = _rows(measured, request.profile) if measured else []
    own = _logged(logs, configs, request)
    found = fit(runs + own)
    peaks = [predict(run) for run in own if run.peak_bytes > 0]
    page = calibration_page(found)
    click.echo(rendered(Group(page, Text(""), peaks_table(peaks)) if peaks else page, to_file=False), nl=False)
    if profile_path is not None:
        names = ", ".join(path.name for path in ((measured,) if measured else ()) + logs)
        write_atomically(profile_path, [profile_text(found.profile(), f"fitted to {len(found.runs)} runs of {names}")])
        click.echo(f"wrote {profile_path}", err=True)


def _rows(path: Path, profile: str | None) -> list[Run]:
    """The timed runs of a file; what is left out is told on standard error."""
    from collections import Counter

    from planner.profile import read_profile
    from planner.validate import read_rows, runs_of

    skipped: Counter[str] = Counter()
    constants = read_profile(Path(profile)) if profile else None
    runs = [run for run in runs_of(read_rows(path), skipped, constants) if run.step_seconds > 0]
    for reason, number in sorted(skipped.items()):
        click.echo(f"skipped {number}: {reason}", err=True)
    return runs


def _logged(logs: tuple[Path, ...], configs: tuple[Path, ...], request: Request) -> list[Run]:
    """The runs of training logs; what was taken from each is told on standard error."""
    if not logs:
        return []
    from planner.logged import doubts, logged_runs, told

    found = logged_runs(logs, configs, request)
    for one in found:
        lines = [told(one.measured, one.run), *(f"{one.config.path}: assumed {line}" for line in one.config.assumed)]
        for line in lines + doubts(one.measured, one.run):
            click.echo(line, err=True)
    return [one.run for one in found]
