"""The table of a sweep as CSV, JSON and Parquet, each naming the sweep that it holds."""

from __future__ import annotations

import csv
import json
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pandas as pd

from planner.errors import InputError
from planner.journal import Journal, appearing
from planner.report.formats import csv_pieces
from planner.report.sweep_table import dtypes_of, frames
from planner.report.write import check_writable, write_atomically
from planner.sweep import Sweep

HEAD_BYTES = 4096
"""Of a JSON file, enough to read what sweep it holds."""


def marks(sweep: Sweep, journal: Journal) -> dict[str, str]:
    """What every file says of itself: hash and version; the hash of an unfinished sweep says so."""
    state = "" if journal.complete else f" ({len(journal)} of {len(sweep.points)} points)"
    return {"sweep": sweep.header["sweep"] + state, "version": sweep.header["version"]}


def csv_text(sweep: Sweep, journal: Journal) -> Iterator[str]:
    """CSV in pieces; its last columns name the sweep."""
    told = marks(sweep, journal)
    empty = pd.DataFrame(columns=[*dtypes_of(sweep), *told])
    yield from csv_pieces(empty)
    for frame in frames(sweep, journal):
        pieces = csv_pieces(frame.assign(**told))
        next(pieces)  # the header is written once
        yield from pieces


def json_text(sweep: Sweep, journal: Journal) -> Iterator[str]:
    """One object in pieces: the sweep, and its rows."""
    head = json.dumps({**sweep.header, **marks(sweep, journal)}, indent=1)
    yield head.removesuffix("\n}") + ',\n "rows": ['
    between = "\n"
    for frame in frames(sweep, journal):
        for row in frame.astype(object).where(frame.notna(), None).to_dict("records"):
            yield f"{between}  {json.dumps(row)}"
            between = ",\n"
    yield "\n ]\n}\n"


def write_parquet(path: Path, sweep: Sweep, journal: Journal) -> None:
    """A Parquet file; its metadata names the sweep. Raises InputError."""
    arrow, parquet = pyarrow(), pyarrow("parquet")
    kinds = {"Int64": arrow.int64(), "float64": arrow.float64(), "boolean": arrow.bool_(), "string": arrow.string()}
    schema = arrow.schema([(name, kinds[dtype]) for name, dtype in dtypes_of(sweep).items()], metadata=marks(sweep, journal))
    check_writable(path)
    path = path.resolve()
    try:
        with appearing(path) as unfinished, parquet.ParquetWriter(unfinished, schema) as writer:
            for frame in frames(sweep, journal):
                writer.write_table(arrow.Table.from_pandas(frame, schema=schema, preserve_index=False).cast(schema))
    except OSError as error:
        raise InputError(f"{path}: cannot be written ({error.strerror or error})") from None


def pyarrow(module: str = "") -> Any:
    """The package that writes Parquet, or a module of it. Raises InputError where it is not installed."""
    from importlib import import_module

    try:
        return import_module(f"pyarrow.{module}".rstrip("."))
    except ImportError:
        raise InputError("Parquet needs the package pyarrow: pip install 'layout-planner[parquet]'") from None


WRITERS: dict[str, Callable[[Path, Sweep, Journal], None]] = {
    "csv": lambda path, sweep, journal: write_atomically(path, csv_text(sweep, journal)),
    "json": lambda path, sweep, journal: write_atomically(path, json_text(sweep, journal)),
    "parquet": write_parquet,
}


def _csv_marks(path: Path) -> dict[str, str]:
    with path.open(encoding="utf-8", newline="") as file:
        return next(csv.DictReader(file), {})


def _json_marks(path: Path) -> dict[str, str]:
    with path.open(encoding="utf-8") as file:
        return dict(re.findall(r'"(sweep|version)": "([^"]*)"', file.read(HEAD_BYTES)))


def _parquet_marks(path: Path) -> dict[str, str]:
    metadata = pyarrow("parquet").read_schema(path).metadata or {}
    return {key.decode(): value.decode(errors="replace") for key, value in metadata.items()}


MARKS: dict[str, Callable[[Path], dict[str, str]]] = {"csv": _csv_marks, "json": _json_marks, "parquet": _parquet_marks}


UNFINISHED = re.compile(r"\(\d+ of \d+ points\)")
"""What marks the file of a sweep that was stopped."""


def replaceable(path: Path, kind: str) -> bool:
    """Whether a stopped sweep may write there: nothing is lost but what another one left unfinished."""
    if not path.exists() or not path.is_file() or not path.stat().st_size:
        return True
    try:
        found = MARKS[kind](path).get("sweep") if kind in MARKS else path.read_text(encoding="utf-8")
    except (OSError, ValueError, csv.Error):
        return False
    return bool(UNFINISHED.search(found or ""))


def holds(path: Path, kind: str, sweep: Sweep) -> bool:
    """Whether a file holds the whole sweep. Raises InputError for the file of another one."""
    if not path.exists():
        return False
    try:
        found = MARKS[kind](path)
    except (OSError, ValueError, csv.Error) as error:
        raise InputError(f"{path}: no {kind} of a sweep ({' '.join(str(error).split())})") from None
    wanted = {key: sweep.header[key] for key in ("sweep", "version")}
    different = [key for key, value in wanted.items() if found.get(key) != value]
    if different:
        key = different[0]
        raise InputError(f"{path} holds another sweep ({key} = {found.get(key) or 'none'} there, {wanted[key]} here): name another file")
    return True
