"""What a sweep has done so far, on disk: one line per finished point, which a crash at any moment leaves readable."""

from __future__ import annotations

import fcntl
import json
import os
import shutil
import zlib
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from io import FileIO
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from planner.errors import InputError

Entry = Mapping[str, Any]
"""One finished point as plain data; ``point`` is its number."""


def sealed(entry: Entry) -> bytes:
    """A line of the file: the checksum of the JSON text, a space, and the text."""
    text = json.dumps(entry, separators=(",", ":")).encode()
    return b"%08x %s\n" % (zlib.crc32(text), text)


def unsealed(line: bytes) -> dict[str, Any]:
    """What a line says. Raises ValueError where the text is not what was written.

    >>> unsealed(sealed({"point": 1}))
    {'point': 1}
    """
    seal, _, text = line.removesuffix(b"\n").partition(b" ")
    if seal != b"%08x" % zlib.crc32(text):
        raise ValueError("wrong checksum")
    entry: dict[str, Any] = json.loads(text)
    return entry


class Journal:
    """An append-only file of JSON lines with checksums, the header first. It knows where each point's line begins, not what it says."""

    def __init__(self, path: Path, header: Entry, *, resume: bool = False) -> None:
        """Begins the file, or goes on from what it holds. Raises InputError if it belongs to another sweep or another process."""
        self.path, self.header = path, header
        self._starts: dict[int, int] = {}
        try:
            self._file: FileIO = path.open("ab", buffering=0)
        except OSError as error:
            raise InputError(f"{path}: cannot be written ({error.strerror or error})") from None
        try:
            _lock(self._file, path)
            self.settle(resume=resume)
            if not self._end:
                self._write(header)
        except BaseException:
            self._file.close()
            raise

    def settle(self, *, resume: bool = True) -> None:
        """Finds what the file holds, and cuts off what a crash or an interrupt tore: the file is right, whatever was noted of it."""
        self._starts.clear()
        self._end = self._read(resume)
        self._file.truncate(self._end)

    def _read(self, resume: bool) -> int:
        """Finds the whole lines; returns where the last of them ends, 0 where no point is done. Raises InputError."""
        end = 0
        found: dict[str, Any] | None = None
        with self.path.open("rb") as file:
            for number, line in enumerate(file, start=1):
                if not line.endswith(b"\n"):
                    break
                entry = self._parsed(line, number, found)
                if found is None:
                    found = entry
                else:
                    self._starts[int(entry["point"])] = end
                end += len(line)
        if found is None or not self._starts:
            return 0
        self._check(found, resume)
        return end

    def _parsed(self, line: bytes, number: int, header: Entry | None) -> dict[str, Any]:
        """A line's entry, behind the header a point of its sweep. Raises InputError where the line is not as it was written."""
        try:
            entry = unsealed(line)
            if header is not None and not 1 <= int(entry["point"]) <= int(header["points"]):
                raise ValueError("no point of this sweep")
        except (ValueError, KeyError, TypeError):
            raise InputError(f"{self.path}: line {number} is damaged: delete the file to start anew") from None
        return entry

    def _check(self, found: Entry, resume: bool) -> None:
        """Raise InputError unless the file may be gone on from."""
        if not resume:
            state = f"{len(self):,} of {counted(found.get('points', 0))} of a sweep that was stopped"
            raise InputError(f"{self.path} holds {state}: --resume goes on; delete the file to start anew")
        if found != self.header:
            raise InputError(f"{self.path} belongs to another sweep ({difference(found, self.header)}): delete it to start anew")

    def _write(self, entry: Entry) -> None:
        line = sealed(entry)
        try:
            written = 0
            while written < len(line):
                written += self._file.write(line[written:])
            os.fsync(self._file.fileno())
        except OSError as error:
            with suppress(OSError):
                self._file.truncate(self._end)
            kept = f"{counted(len(self), 'point is', 'points are')} kept: --resume goes on"
            raise InputError(f"{self.path}: cannot be written ({error.strerror or error}); {kept}") from None
        self._end += len(line)

    def append(self, entry: Entry, part: bytes = b"") -> None:
        """Writes a finished point down, so that no crash takes it away. Raises InputError when the disk refuses.

        ``part``: what is too long for a line.
        """
        start, point = self._end, int(entry["point"])
        if part:
            self._keep(self.part(point), part)
        self._write(entry)
        self._starts[point] = start

    def _keep(self, path: Path, part: bytes) -> None:
        try:
            path.parent.mkdir(exist_ok=True)
            with appearing(path) as unfinished:
                unfinished.write_bytes(part)
        except OSError as error:
            raise InputError(f"{path}: cannot be written ({error.strerror or error}); --resume goes on") from None

    def part(self, point: int) -> Path:
        """Where a point's part is kept."""
        return self.path.with_name(f"{self.path.name}.parts") / str(point)

    def __len__(self) -> int:
        return len(self._starts)

    def __contains__(self, point: int) -> bool:
        return point in self._starts

    def __iter__(self) -> Iterator[Entry]:
        """The finished points in the order of their numbers, one in memory at a time."""
        with self.path.open("rb") as file:
            for point in sorted(self._starts):
                file.seek(self._starts[point])
                yield unsealed(file.readline())

    @property
    def complete(self) -> bool:
        """Whether every point is done."""
        return len(self) == int(self.header["points"])

    def remove(self) -> None:
        """Deletes the file and its folder: the results stand elsewhere."""
        shutil.rmtree(self.part(0).parent, ignore_errors=True)
        self.path.unlink(missing_ok=True)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self._file.close()


def counted(number: int, one: str = "point", many: str = "points") -> str:
    """A number and its noun.

    >>> counted(1), counted(2000)
    ('1 point', '2,000 points')
    """
    return f"{number:,} {one if number == 1 else many}"


def difference(found: Entry, wanted: Entry) -> str:
    """The first key by which two headers differ, with both values; a sweep's hash only where nothing else tells.

    >>> difference({"sweep": "a1", "top": 1}, {"sweep": "b2", "top": 3})
    'top = 1 there, 3 here'
    """
    keys = [key for key in [*wanted, *found] if found.get(key) != wanted.get(key)]
    key = next((key for key in keys if key != "sweep"), "sweep")
    return f"{key} = {found.get(key)} there, {wanted.get(key)} here"


def _lock(file: FileIO, path: Path) -> None:
    """Raise InputError while another process has the file; some shared disks know no locks."""
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        raise InputError(f"{path}: another sweep is writing it now") from None
    except OSError:
        return


@contextmanager
def appearing(path: Path) -> Iterator[Path]:
    """A file to write that takes its name when it is whole and on the disk; until then, or after a failure, nothing changes."""
    unfinished = path.with_name(f".{path.name}.unfinished")  # one name: what a crash leaves is overwritten
    try:
        yield unfinished
        with unfinished.open("rb") as file:
            os.fsync(file.fileno())
        unfinished.replace(path)
    finally:
        unfinished.unlink(missing_ok=True)
