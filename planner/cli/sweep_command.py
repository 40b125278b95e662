"""``planner sweep``: many scenarios in one table."""

from __future__ import annotations

import sys
import tempfile
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

import click

from planner.cli.options import CONTEXT, OutputPath, request_options
from planner.cli.page_files import check_pages, html_option, write_file
from planner.cli.terminal import Interrupted, emit, fail, rendered
from planner.errors import InputError
from planner.request import Request, import_notes
from planner.scenario import SORTS

if TYPE_CHECKING:
    from planner.engine import Engine
    from planner.grid import Point
    from planner.journal import Journal
    from planner.sweep import Sweep

LISTED = {
    "model": "--model",
    "num_gpus": "--gpus",
    "gpu": "--gpu",
    "cluster": "--cluster",
    "nic_gbit_per_s": "--nic",
    "price_usd_per_hour": "--price",
    "seq_len": "--seq-len",
    "global_batch_size": "--global-batch",
    "global_batch_tokens": "--batch-tokens",
    "precision": "--precision",
    "optimizer": "--optimizer",
    "framework": "--framework",
}
"""Keys whose flags take several values; --vary does it for the others."""

FORMATS = ("table", "csv", "json", "parquet")


def listed_options(command: Callable[..., Any]) -> Callable[..., Any]:
    """All options that make a scenario; those of LISTED take lists and ranges."""
    command = request_options(command)
    for option in command.__click_params__:  # type: ignore[attr-defined]
        if option.name in LISTED:
            option.type, option.metavar = click.STRING, "VALUES"
        elif option.name == "scenario_word":
            option.metavar, option.help = "NAME|FILE|FOLDER", "A scenario, or a folder of them; flags override; [sweep] varies."
    return command


@click.command(name="sweep", context_settings=CONTEXT)
@listed_options
@click.option("--vary", multiple=True, metavar="KEY=VALUES", help="Vary any other key of a scenario file (repeatable).")
@click.option("--scale-batch", is_flag=True, help="Weak scaling: the batch is that of the fewest GPUs and grows with them.")
@click.option("--sort", type=click.Choice(SORTS), default="step", show_default=True, help="What is best.")
@click.option("--top", type=click.IntRange(1, 1000), default=1, show_default=True, help="Layouts of each point.")
@click.option("--all", "every", is_flag=True, help="Every layout of each point that was scored for step time: not those out of memory.")
@click.option("--pareto", is_flag=True, help="Only what no other row of its model beats in time and dollars per token and memory share.")
@click.option("--jobs", type=click.IntRange(1, 1024), help="Processes  [default: the processors of this one]")
@click.option("--dask", "address", metavar="ADDRESS", help="Search on a Dask cluster that has this program: tcp://host:port, or local.")
@click.option("--resume", is_flag=True, help="Go on from FILE.journal, which a stopped sweep left beside its first file.")
@click.option("--format", "style", type=click.Choice(FORMATS), default="table", show_default=True)
@click.option("--output", type=OutputPath(), help="Write the result there instead of printing it.")
@click.option("--csv", "csv_path", type=OutputPath(), help="Also write CSV.")
@click.option("--json", "json_path", type=OutputPath(), help="Also write JSON.")
@click.option("--parquet", "parquet_path", type=OutputPath(), help="Also write Parquet.")
@html_option
def sweep_command(
    scenario_word: str | None,
    vary: tuple[str, ...],
    scale_batch: bool,
    sort: str,
    top: int,
    every: bool,
    pareto: bool,
    jobs: int | None,
    address: str | None,
    resume: bool,
    style: str,
    output: Path | None,
    csv_path: Path | None,
    json_path: Path | None,
    parquet_path: Path | None,
    html_path: Path | None,
    **wishes: Any,
) -> None:
    """Search every point of a grid and put the best layouts in one table.

    VALUES are lists and ranges: 64,128 or 64:16384:x2 or 256:4096:+256. The order of the points is that of the keys in
    scenario files, the number of GPUs varying fastest. A point without a layout is a row that says why.
    """
    from planner.journal import counted
    from planner.report.sweep_files import holds
    from planner.sweep import Sweep, run

    files = output_files(style, output, {"csv": csv_path, "json": json_path, "parquet": parquet_path})
    check_pages([html_path], [path for _, path in files], pictured=html_path is not None)
    if resume and not files:
        raise InputError("--resume needs the file that the sweep is written to: --csv, --json or --parquet FILE")
    sweep = Sweep(points=points(scenario_word, wishes, vary, scale_batch), top=top, sort=sort, every=every, pareto=pareto)
    engine = engine_of(address, jobs, len(sweep.points))
    for line in notes(sweep):
        click.echo(line, err=True)
    lasting = journal_path(files)
    if resume and lasting and not lasting.exists() and {holds(path, kind, sweep) for kind, path in files} == {True}:
        click.echo(f"nothing to do: {files[0][1]} already holds {counted(len(sweep.points))}", err=True)
        return
    with opened(sweep, lasting, resume) as journal:
        try:
            with points_bar() as progress:
                run(sweep, engine, journal, progress)
        except (Interrupted, KeyboardInterrupt):
            journal.settle()  # it may have come between a line and the note of it
            kept = earlier_results(files, style, output)
            if len(journal) and not kept:
                publish(sweep, journal, files, style, output)
            leave(sweep, journal, kept, resumable=lasting is not None)
        if html_path is not None:
            from planner.report.html.other_pages import sweep_html

            write_file(html_path, sweep_html(sweep, journal))
        found = publish(sweep, journal, files, style, output)
    if not found:
        click.get_current_context().exit(1)


def output_files(style: str, output: Path | None, others: Mapping[str, Path | None]) -> list[tuple[str, Path]]:
    """The data files that are written, with their kinds. Raises InputError."""
    from planner.report.sweep_files import pyarrow
    from planner.report.write import check_writable

    if style == "parquet" and output is None:
        raise InputError("--format parquet needs --output FILE")
    named = [(kind, path) for kind, path in [*others.items(), (style, output)] if path is not None]
    for number, (kind, path) in enumerate(named):
        check_writable(path)
        if path.resolve() in [other.resolve() for _, other in named[:number]]:
            raise InputError(f"two outputs name {path}")
        if kind == "parquet":
            pyarrow()
            if path.exists() and not path.is_file():
                raise InputError(f"{path}: Parquet needs a file, not a pipe or device")
    return [(kind, path) for kind, path in named if kind != "table"]


def points(word: str | None, wishes: Mapping[str, Any], vary: tuple[str, ...], scale_batch: bool) -> tuple[Point, ...]:
    """The grid that was typed. Raises InputError."""
    from planner.grid import points_of, values_of

    stated = {key: value for key, value in wishes.items() if value is not None}
    flags = {key: value for key, value in stated.items() if key not in LISTED}
    axes = {key: values_of(key, stated[key], flag) for key, flag in LISTED.items() if key in stated}
    for text in vary:
        key, equals, values = text.partition("=")
        if not equals:
            raise InputError(f"--vary {text}: write KEY=VALUES, such as zero_stage=1,3")
        if key in flags or key in axes:
            raise InputError(f"--vary {key}: it is stated twice")
        axes[key] = values_of(key, values, f"--vary {key}")
    return points_of(word, Request(**flags), axes, scale_batch=scale_batch)


def engine_of(address: str | None, jobs: int | None, most: int) -> Engine:
    """Where the points are searched. Raises InputError."""
    from planner.engine import LOCAL, dask, processes, usable_cpus

    if address is not None and address != LOCAL and jobs is not None:
        raise InputError(f"--jobs counts processes of this machine; the workers of {address} are as many as they are")
    local = min(jobs or usable_cpus(), most)
    return processes(local) if address is None else dask(address, local)


def notes(sweep: Sweep) -> list[str]:
    """What imported configs left open, each once."""
    requests = {point.request.model: point.request for point in sweep.points}
    return list(dict.fromkeys(line for request in requests.values() for line in import_notes(request)))


def journal_path(files: list[tuple[str, Path]]) -> Path | None:
    """Beside the first file that can be gone on with; None where there is none, only pipes or the terminal."""
    lasting = [path for _, path in files if not path.exists() or path.is_file()]
    return lasting[0].with_name(f"{lasting[0].name}.journal") if lasting else None


@contextmanager
def opened(sweep: Sweep, path: Path | None, resume: bool) -> Iterator[Journal]:
    """The journal beside a file, or one that goes with the command."""
    from planner.journal import Journal

    with tempfile.TemporaryDirectory(prefix="planner-sweep-") as folder, ExitStack() as stack:
        yield stack.enter_context(Journal(path or Path(folder) / "sweep.journal", sweep.header, resume=resume))


def publish(sweep: Sweep, journal: Journal, files: list[tuple[str, Path]], style: str, output: Path | None) -> bool:
    """Writes the files, prints the page; what is complete needs no journal any more. Returns whether any layout was found."""
    from planner.report.sweep_files import WRITERS, csv_text, json_text
    from planner.report.sweep_text import sweep_page
    from planner.sweep import any_found

    for kind, path in files:
        WRITERS[kind](path, sweep, journal)
        click.echo(f"wrote {path}", err=True)
    pages: dict[str, Callable[[], Iterable[str]]] = {
        "csv": lambda: csv_text(sweep, journal),
        "json": lambda: json_text(sweep, journal),
        "table": lambda: [rendered(sweep_page(sweep, journal), to_file=output is not None)],
    }
    found = any_found(journal)
    try:
        if output is None or style == "table":
            emit(pages[style](), output, code=0 if found else 1)
    finally:
        if journal.complete:
            journal.remove()
    return found


def earlier_results(files: list[tuple[str, Path]], style: str, output: Path | None) -> list[Path]:
    """The files with whole results of an earlier run, which a stopped sweep leaves alone."""
    from planner.report.sweep_files import replaceable

    page = [(style, output)] if style == "table" and output is not None else []
    return [path for kind, path in [*files, *page] if not replaceable(path, kind)]


def leave(sweep: Sweep, journal: Journal, kept: list[Path], *, resumable: bool) -> NoReturn:
    """Ends an interrupted sweep; a journal without points is of no use. ``kept``: files that it did not replace."""
    from planner.journal import counted

    if not len(journal):
        journal.remove()
    lasting = resumable and len(journal) > 0
    more = ["--resume goes on"] if lasting else []
    if kept and len(journal):
        where = [f"what is done is in {journal.path}"] if lasting else []
        more = [f"{', '.join(map(str, kept))} left as before", *where, *more]
    fail("; ".join([f"stopped after {len(journal):,} of {counted(len(sweep.points))}", *more]), 130)


@contextmanager
def points_bar() -> Iterator[Callable[[int, int], None] | None]:
    """A callback that draws a bar with rate and time left on standard error, on a terminal only."""
    if not sys.stderr.isatty():
        yield None
        return
    from rich.console import Console
    from rich.progress import MofNCompleteColumn, Progress, ProgressColumn, Task, TimeRemainingColumn
    from rich.text import Text

    class Rate(ProgressColumn):
        """Points per second."""

        def render(self, task: Task) -> Text:
            return Text(f"{task.speed:.2f}/s" if task.speed else "")

    columns = (*Progress.get_default_columns()[:2], MofNCompleteColumn(), Rate(), TimeRemainingColumn())
    with Progress(*columns, console=Console(stderr=True), transient=True) as bar:
        tasks: list[Any] = []

        def advance(done: int, total: int) -> None:
            if not tasks:
                tasks.append(bar.add_task("searching points", total=total, completed=done))
            bar.update(tasks[0], completed=done)

        yield advance
