"""The command line: reads what was typed, calls one library function, prints what comes back."""

from __future__ import annotations

import json
import os
import re
import signal
import sys
import threading
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, NoReturn

import click

from planner.errors import InputError, NoLayoutFits
from planner.request import Request, import_notes, make_scenario, parse_count, read_request, scenario_path
from planner.scenario import FRAMEWORK_CHOICES, SORTS, Scenario

LONG_WORK = 1_500_000
"""Layouts from which on a progress bar is worth its place."""

MOST_FLAGGED = 100
"""Layouts of a shortlist that the checklist looks at."""

FORMATS = ("table", "csv", "json", "markdown")


class Count(click.ParamType[Any]):
    """A count such as 2048, 2,048, 4M or 1.4T."""

    name = "count"

    def __init__(self, *, whole: bool = True) -> None:
        self.whole = whole

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> int | float:
        """The number. Raises InputError."""
        if isinstance(value, (int, float)):
            return value
        option = param.opts[0] if param else "value"
        number = parse_count(value, option)
        if self.whole and not number.is_integer():
            raise InputError(f"{option} = {value} must be a whole number")
        return int(number) if self.whole else number


class OutputPath(click.ParamType[Any]):
    """Where to write a result: a file's name."""

    name = "file"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Path:
        """The path. Raises InputError for a folder's name."""
        if not str(value) or str(value).endswith("/"):
            raise InputError(f"{value or (param.opts[0] if param else 'path')}: names a folder; give a file name")
        return Path(value)


class ReaderLeft(BaseException):
    """Standard output is a pipe that nobody reads any more (click would make it a failure)."""


class Interrupted(BaseException):
    """Ctrl-C."""


def _interrupt(*_: object) -> NoReturn:
    raise Interrupted


class Values(click.ParamType[Any]):
    """Comma-separated whole numbers or words: the only values of an axis to search."""

    name = "values"

    def __init__(self, *, words: bool = False) -> None:
        self.words = words

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> tuple[Any, ...]:
        """The values. Raises InputError."""
        if isinstance(value, tuple):
            return value
        option = param.opts[0] if param else "value"
        pieces = [piece.strip() for piece in value.split(",")]
        if self.words:
            return tuple(pieces)
        if not all(re.fullmatch(r"-?[0-9]+", piece, re.ASCII) for piece in pieces):
            raise InputError(f"{option} = {value} must be whole numbers separated by commas, such as 2,4,8")
        return tuple(int(piece[:20]) for piece in pieces)


REQUEST_OPTIONS: tuple[Callable[..., Any], ...] = (
    click.option("--scenario", "scenario_word", metavar="NAME|FILE", help="A file of scenarios/ or a path; flags override it."),
    click.option("--model", help="Catalogue name or alias (70b), a Hugging Face config.json, or a model .toml."),
    click.option("--model-shape", metavar="KEY=V,..", help="Any other shape: layers=..,hidden=..,heads=..,ffn=..,vocab=.."),
    click.option("--gpus", "num_gpus", type=Count(), help="Number of GPUs."),
    click.option("--gpu", help="Accelerator  [default: h100-sxm-80gb]"),
    click.option("--cluster", help="Cluster wiring  [default: the GPU's usual one]"),
    click.option("--gpus-per-node", type=Count(), help="GPUs of one fast domain."),
    click.option("--nic", "nic_gbit_per_s", type=Count(whole=False), help="Network per GPU, Gb/s."),
    click.option("--gpu-memory", "gpu_memory_gib", type=Count(whole=False), help="Usable memory per GPU, GiB."),
    click.option("--price", "price_usd_per_hour", type=Count(whole=False), help="Dollars per GPU-hour."),
    click.option("--seq-len", type=Count(), help="Tokens per sequence  [default: 4096]"),
    click.option("--global-batch", "global_batch_size", type=Count(), help="Sequences per step  [default: 4M tokens]"),
    click.option("--batch-tokens", "global_batch_tokens", type=Count(), help="The same in tokens."),
    click.option("--precision", help="bf16, fp16, fp8, mxfp8 or nvfp4  [default: bf16]"),
    click.option("--optimizer", help="adam, adam-8bit, muon or sgd-momentum  [default: adam]"),
    click.option("--tokens", "training_tokens", type=Count(whole=False), help="Tokens of the whole run (1.4T): adds days and cost."),
    click.option("--sequence-parallel/--no-sequence-parallel", default=None, help="With tensor parallelism  [default: on]"),
    click.option("--mtp/--no-mtp", "multi_token_prediction", default=None, help="Train the model's multi-token prediction."),
    click.option("--framework", help=f"{', '.join(FRAMEWORK_CHOICES)}  [default: any]"),
    click.option("--software", help="Cost every layout under this training stack."),
    click.option("--profile", help="Constants that `planner calibrate` fitted to your own runs."),
    click.option("--tp", "tensor_parallel", type=Values(), help="Pin tensor-parallel sizes."),
    click.option("--pp", "pipeline_parallel", type=Values(), help="Pin pipeline stages."),
    click.option("--vp", "virtual_pipeline", type=Values(), help="Pin chunks per stage."),
    click.option("--cp", "context_parallel", type=Values(), help="Pin context-parallel sizes."),
    click.option("--ep", "expert_parallel", type=Values(), help="Pin expert-parallel sizes."),
    click.option("--etp", "expert_tensor_parallel", type=Values(), help="Pin tensor splits inside experts."),
    click.option("--dp", "data_parallel", type=Values(), help="Pin data-parallel sizes."),
    click.option("--zero", "zero_stage", type=Values(), help="Pin ZeRO stages."),
    click.option("--mb", "micro_batch_size", type=Values(), help="Pin micro-batch sizes."),
    click.option("--recompute", type=Values(words=True), help="Pin none, selective, full."),
    click.option("--recompute-layers", type=Values(), help="Pin layers of a chunk that full recompute covers."),
    click.option("--schedule", type=Values(words=True), help="Pin schedules (1f1b, interleaved_1f1b, gpipe, ...)."),
    click.option("--tensor-across-nodes", is_flag=True, default=None, help="Allow tensor groups to leave a node."),
    click.option("--max-pp", "max_pipeline_parallel", type=Count(), help="Deepest pipeline  [default: 64]"),
)


def request_options(command: Callable[..., Any]) -> Callable[..., Any]:
    """All options that make a scenario."""
    for option in reversed(REQUEST_OPTIONS):
        command = option(command)
    return command


def scenario_of(scenario_word: str | None, wishes: dict[str, Any]) -> Scenario:
    """The scenario of a file, flags, or both; what an imported config left open is told on standard error."""
    request, name = Request(**wishes), "flags"
    if scenario_word is not None:
        path = scenario_path(scenario_word)
        request, name = request.over(read_request(path)), path.stem
    scenario = make_scenario(request, name=name)
    for line in import_notes(request):
        click.echo(line, err=True)
    return scenario


@click.group(context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 100})
@click.version_option(package_name="layout-planner", prog_name="planner")
def planner() -> None:
    """Finds the fastest parallel layout for training a large language model: every one, proven, explained."""


@planner.command(name="search", context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 100})
@request_options
@click.option("--sort", type=click.Choice(SORTS), default="step", show_default=True, help="What is best.")
@click.option("--top", type=click.IntRange(1, 100_000), default=10, show_default=True, help="Rows of the shortlist.")
@click.option("--format", "style", type=click.Choice(FORMATS), default="table", show_default=True)
@click.option("--output", type=OutputPath(), help="Write the result there instead of printing it.")
@click.option("--csv", "csv_path", type=OutputPath(), help="Also write the CSV for review.")
@click.option("--all", "every", is_flag=True, help="The CSV holds every layout of the space, rejected ones with their reason.")
def search_command(
    scenario_word: str | None,
    sort: str,
    top: int,
    style: str,
    output: Path | None,
    csv_path: Path | None,
    every: bool,
    **wishes: Any,
) -> None:
    """Search every layout of a model on a cluster and print a ranked shortlist."""
    from planner.explain import shortlist_flags
    from planner.report import formats, text
    from planner.report.everything import everything
    from planner.report.frame import shortlist_frame
    from planner.report.write import check_writable, write_atomically
    from planner.search import search

    if every and style != "csv" and csv_path is None:
        raise InputError("--all writes CSV: give --csv FILE, or --format csv")
    for path in (output, csv_path):
        if path is not None:
            check_writable(path)
    if output is not None and csv_path is not None and output.resolve() == csv_path.resolve():
        raise InputError(f"--output and --csv both name {output}")
    scenario = scenario_of(scenario_word, wishes)
    try:
        with progress_bar() as progress:
            result = search(scenario, sort, progress)
    except NoLayoutFits as nothing:
        result = nothing.result
    if sys.stderr.isatty():  # not on standard output: the same question prints the same bytes
        click.echo(f"searched in {result.seconds:.2f} s", err=True)
    frame = shortlist_frame(result, top)
    findings = shortlist_flags(scenario, result.ranked.take(slice(0, min(top, MOST_FLAGGED if style in ("table", "json") else 0))))
    pages: dict[str, Callable[[], Iterable[str]]] = {
        "csv": lambda: everything(result) if every else formats.csv_pieces(frame),
        "json": lambda: [formats.json_text(result, frame, findings)],
        "markdown": lambda: [formats.markdown_text(frame)],
        "table": lambda: [
            rendered(text.shortlist_page(result, frame, findings), to_file=output is not None)
            if len(result.ranked)
            else "\n".join([*text.no_layout_lines(result), ""])
        ],
    }
    if output is not None:
        emit(pages[style](), output)
    if csv_path is not None:
        write_atomically(csv_path, pages["csv"]())
        click.echo(f"wrote {csv_path}", err=True)
    if output is None:
        emit(pages[style](), None, code=0 if len(result.ranked) else 1)
    if not len(result.ranked):
        click.get_current_context().exit(1)


@planner.command(context_settings={"max_content_width": 100})
@request_options
@click.option("--layout", "label", required=True, help="Such as tp8-pp4-dp64-zero1-mb1; what is left out is filled in.")
@click.option("--format", "style", type=click.Choice(["table", "json"]), default="table", show_default=True)
@click.option("--output", type=OutputPath(), help="Write the ledger there instead of printing it.")
def explain(scenario_word: str | None, label: str, style: str, output: Path | None, **wishes: Any) -> None:
    """Take one layout apart: bytes per part and stage, seconds per part, each with its formula."""
    from planner.cost.memory import OUT_OF_MEMORY
    from planner.explain import check_pins, complete_layout
    from planner.explain import explain as explain_layout
    from planner.report import text
    from planner.report.ledger import ledger_json
    from planner.report.write import check_writable

    if output is not None:
        check_writable(output)
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
    emit([page], output)
    if not found.legal or found.verdict == OUT_OF_MEMORY:
        click.get_current_context().exit(1)


@planner.command(context_settings={"max_content_width": 100})
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


@planner.command(context_settings={"max_content_width": 100})
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


@planner.command(name="list")
@click.argument("kind", type=click.Choice(["models", "gpus", "clusters", "software"]))
def list_command(kind: str) -> None:
    """List the catalogue: names, aliases, and the figures that matter."""
    from planner.report.listing import listing

    click.echo(rendered(listing(kind), to_file=False), nl=False)


def emit(pieces: Iterable[str], output: Path | None, code: int = 0) -> None:
    """A result to standard output, or whole into a file; ``code`` is how the command will end."""
    if output is not None:
        from planner.report.write import write_atomically

        write_atomically(output, pieces)
        return
    try:
        for piece in pieces:
            click.echo(piece, nl=False)
    except BrokenPipeError:
        raise ReaderLeft(code) from None


def rendered(page: Any, *, to_file: bool) -> str:
    """A rich page as text of a fixed width, coloured only on a terminal."""
    from io import StringIO

    from rich.console import Console

    from planner.report.text import WIDTH

    colour = not to_file and sys.stdout.isatty() and "NO_COLOR" not in os.environ
    console = Console(file=StringIO(), width=WIDTH, force_terminal=colour, color_system="auto" if colour else None, highlight=False)
    console.print(page)
    text = console.file.getvalue()  # type: ignore[attr-defined]
    return text if colour else "\n".join(line.rstrip() for line in text.splitlines()) + "\n"


@contextmanager
def progress_bar() -> Iterator[Callable[[int, int], None] | None]:
    """A callback that draws a bar on standard error for long work, on a terminal only."""
    if not sys.stderr.isatty():
        yield None
        return
    from rich.console import Console
    from rich.progress import MofNCompleteColumn, Progress, TimeRemainingColumn

    with Progress(
        *Progress.get_default_columns()[:2],
        MofNCompleteColumn(),
        TimeRemainingColumn(),
        console=Console(stderr=True),
        transient=True,
    ) as bar:
        tasks: list[Any] = []

        def advance(done: int, total: int) -> None:
            if total < LONG_WORK:
                return
            if not tasks:
                tasks.append(bar.add_task("scoring layouts", total=total))
            bar.update(tasks[0], completed=done)

        yield advance


def fail(message: str, code: int) -> NoReturn:
    """One line on standard error, and out."""
    with suppress(OSError):
        click.echo(" ".join(message.split()), err=True)
    raise SystemExit(code)


def run(command: click.Command, arguments: list[str] | None = None) -> NoReturn:
    """A command with the exit codes that people rely on: 0 ok, 1 nothing feasible, 2 bad input, 130 interrupted."""
    if sys.stdout is None:  # started without standard output: nothing to say, and nowhere
        sys.stdout = open(os.devnull, "w")  # noqa: SIM115
    code = 0
    if threading.current_thread() is threading.main_thread():
        signal.signal(signal.SIGINT, _interrupt)  # click would print a line of its own
        signal.signal(signal.SIGTERM, _interrupt)
    try:
        try:
            code = command.main(args=arguments, standalone_mode=False) or 0
        except click.exceptions.NoArgsIsHelpError as error:
            click.echo(error.format_message())
        sys.stdout.flush()
    except InputError as error:
        fail(f"error: {error}", 2)
    except click.ClickException as error:
        fail(f"error: {error.format_message()}", 2)
    except (click.Abort, KeyboardInterrupt, Interrupted):
        fail("interrupted", 130)
    except (BrokenPipeError, ReaderLeft) as left:
        _silence_output()  # the reader left: nothing more to say
        code = left.args[0] if isinstance(left, ReaderLeft) else code
    except OSError as error:
        _silence_output()
        fail(f"error: standard output: {error.strerror or error}", 2)
    except MemoryError:
        fail("error: not enough memory for this space; pin some axes (--tp, --pp, --mb, ...)", 2)
    raise SystemExit(code)


def _silence_output() -> None:
    """Standard output cannot take more: keep the interpreter from trying again at its end."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def main() -> NoReturn:
    """Console script ``planner``."""
    run(planner)


def search_main() -> NoReturn:
    """Console script ``search``: the same as ``planner search``."""
    run(search_command)


if __name__ == "__main__":
    main()
