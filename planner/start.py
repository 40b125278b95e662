"""The console scripts: Ctrl-C is answered from the first moment on, then the command line is loaded."""

from __future__ import annotations

import os
import signal
from typing import NoReturn


def _leave(*_: object) -> NoReturn:
    """Ends at once: nothing has begun that could be left half done."""
    os.write(2, b"interrupted\n")
    os._exit(130)


def _answer_signals() -> None:
    signal.signal(signal.SIGINT, _leave)
    signal.signal(signal.SIGTERM, _leave)


def main() -> NoReturn:
    """Console script ``planner``."""
    _answer_signals()
    from planner import cli

    cli.main()


def search_main() -> NoReturn:
    """Console script ``search``: the same as ``planner search``."""
    _answer_signals()
    from planner import cli

    cli.search_main()
