"""What a command does with its result: print or write it, show progress, end with the right exit code."""

from __future__ import annotations

import os
import signal
import sys
import threading
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, NoReturn

import click

from planner.errors import InputError

LONG_WORK = 1_500_000
"""Layouts from which on a progress bar is worth its place."""


class ReaderLeft(BaseException):
    """Standard output is a pipe that nobody reads any more (click would make it a failure)."""


class Interrupted(BaseException):
    """Ctrl-C."""


_signals: list[bool] = []
"""Not empty once Ctrl-C was pressed."""


def _interrupt(*_: object) -> NoReturn:
    _signals.append(True)
    raise Interrupted


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


@contextmanager
def working(words: str) -> Iterator[None]:
    """Says on standard error what takes so long, on a terminal only."""
    if not sys.stderr.isatty():
        yield
        return
    from rich.console import Console

    with Console(stderr=True).status(words):
        yield


@contextmanager
def counting(words: str) -> Iterator[Callable[[int], None] | None]:
    """A callback that shows a number on standard error, on a terminal only."""
    if not sys.stderr.isatty():
        yield None
        return
    from rich.console import Console

    with Console(stderr=True).status(words) as status:
        yield lambda number: status.update(f"{words}: {number:,}")


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
    except ImportError:
        if not _signals:
            raise
        fail("interrupted", 130)  # an extension that is being loaded reports the interruption as its own failure
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
