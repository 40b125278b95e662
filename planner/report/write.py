"""Writes results so that nothing is ever half-written: to a neighbouring file first, then one rename."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Iterable
from pathlib import Path

from planner.errors import InputError


def check_writable(path: Path) -> None:
    """Raise InputError when a result could not be written there, before any work is done."""
    try:
        path.exists()
    except (OSError, ValueError) as error:
        raise InputError(f"{path}: cannot be written ({getattr(error, 'strerror', None) or error})") from None
    if path.is_dir() or str(path).endswith("/"):
        raise InputError(f"{path}: is a folder; give a file name")
    folder = path.parent
    if not folder.is_dir():
        raise InputError(f"{path}: the folder {folder} does not exist")
    if not os.access(folder, os.W_OK) or (path.exists() and not os.access(path, os.W_OK)):
        raise InputError(f"{path}: cannot be written (permission denied)")


def write_atomically(path: Path, pieces: Iterable[str]) -> None:
    """The pieces as one text file: all of it or nothing. Raises InputError when the disk refuses."""
    check_writable(path)
    path = path.resolve()  # through a link to what it names
    if path.exists() and not path.is_file():  # a pipe or device cannot be renamed onto
        _write_through(path, pieces)
        return
    try:
        handle, name = tempfile.mkstemp(prefix=f".{path.name}.", dir=path.parent)
    except OSError as error:
        raise InputError(f"{path}: cannot be written ({error.strerror or error})") from None
    try:
        with os.fdopen(handle, "w", encoding="utf-8", newline="") as file:
            for piece in pieces:
                file.write(piece)
            file.flush()
            os.fsync(file.fileno())
        os.chmod(name, _mode(path))
        os.replace(name, path)
    except OSError as error:
        Path(name).unlink(missing_ok=True)
        raise InputError(f"{path}: cannot be written ({error.strerror or error})") from None
    except BaseException:
        Path(name).unlink(missing_ok=True)
        raise


def _mode(path: Path) -> int:
    """The permissions of the file that is replaced, or those that a new one would get."""
    if path.exists():
        return path.stat().st_mode & 0o777
    mask = os.umask(0)
    os.umask(mask)
    return 0o666 & ~mask


def _write_through(path: Path, pieces: Iterable[str]) -> None:
    try:
        with path.open("w", encoding="utf-8", newline="") as file:
            file.writelines(pieces)
    except OSError as error:
        raise InputError(f"{path}: cannot be written ({error.strerror or error})") from None
