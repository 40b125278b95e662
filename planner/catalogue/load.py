"""Reads catalogue files into the frozen records of the schema: keys checked, units scaled once, names resolved."""

from __future__ import annotations

import dataclasses
import functools
import math
import tomllib
import types
import typing
from collections.abc import Hashable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from importlib import resources
from pathlib import Path
from typing import Any, TypeVar, cast

from planner.catalogue.schema import Cluster, Generation, Gpu, Model, Operations, Physics, Software
from planner.errors import InputError, nearest
from planner.units import SUFFIXES, base_unit

Record = TypeVar("Record")

FOLDERS: dict[type, str] = {
    Model: "models",
    Gpu: "gpus",
    Cluster: "clusters",
    Generation: "generations",
    Software: "software",
    Physics: "physics",
    Operations: "operations",
}
MAX_FILE_BYTES = 4 << 20


def exists(path: Path) -> bool:
    """Whether a path names something; names that no file could have do not."""
    try:
        return path.exists()
    except (OSError, ValueError):
        return False


def read_toml(path: Path) -> dict[str, Any]:
    """The tables of a TOML file. Raises InputError with the path and what is wrong in one line."""
    try:
        if path.exists() and not path.is_file() and not path.is_dir():
            raise InputError(f"{path}: is a pipe or device, not a file")
        if path.stat().st_size > MAX_FILE_BYTES:
            raise InputError(f"{path}: larger than {MAX_FILE_BYTES >> 20} MiB, so not a file of this kind")
        return tomllib.loads(path.read_text(encoding="utf-8-sig"))
    except OSError as error:
        raise InputError(f"{path}: cannot be read ({error.strerror or error})") from None
    except UnicodeDecodeError:
        raise InputError(f"{path}: not a text file in UTF-8") from None
    except RecursionError:
        raise InputError(f"{path}: not valid TOML: nested too deeply") from None
    except tomllib.TOMLDecodeError as error:
        raise InputError(f"{path}: not valid TOML: {error}") from None


def human_keys(field: str) -> list[str]:
    """The keys under which a file may state a field: every unit that scales to it, and the field's own name.

    >>> human_keys("memory_bytes"), human_keys("num_layers")
    (['memory_gb', 'memory_gib', 'memory_bytes'], ['num_layers'])
    """
    units = [field.removesuffix(base) + human for human, (base, _) in SUFFIXES.items() if field.endswith(base)]
    return [*sorted(units), field]


@dataclass(frozen=True)
class Stated:
    """A value as a file states it."""

    key: str
    value: Any

    @property
    def field(self) -> str:
        """The field that the key scales to."""
        return base_unit(self.key)[0]


def flatten(tables: Mapping[str, Any], where: str) -> list[Stated]:
    """All keys of all tables side by side, as written; ``source`` texts are joined, ``uncertainty`` left out."""
    stated: list[Stated] = []
    sources: list[str] = []
    pairs = [pair for key, value in tables.items() for pair in (value.items() if isinstance(value, dict) else [(key, value)])]
    for key, value in pairs:
        if key == "source":
            sources.append(str(value))
        elif key not in ("uncertainty", "meaning"):
            one = Stated(key, value)
            if any(other.field == one.field for other in stated):
                raise InputError(f"{where}: {key} is stated twice")
            stated.append(one)
    return [*stated, Stated("source", "; ".join(sources))]


def build(cls: type[Record], stated: Iterable[Stated], where: str) -> Record:
    """The record, checked as written and then scaled to base units.

    Raises InputError for an unknown, missing or ill-typed key, naming it as the file does, with the nearest.
    """
    fields = {field.name: field for field in dataclasses.fields(cls)}  # type: ignore[arg-type]
    hints = typing.get_type_hints(cls)
    values: dict[str, Any] = {}
    for one in stated:
        if one.field not in fields:
            known = [key for name in fields for key in human_keys(name)]
            raise InputError(f"{where}: unknown key '{one.key}'{nearest(one.key, known)}")
        value = checked(hints[one.field], one.value, f"{where}: {one.key}")
        factor = base_unit(one.key)[1]
        values[one.field] = value if factor == 1.0 else value * factor
    for name, field in fields.items():
        if name not in values and field.default is dataclasses.MISSING and field.default_factory is dataclasses.MISSING:
            raise InputError(f"{where}: {human_keys(name)[0]} is missing")
    return cls(**values)


def plain(values: Mapping[str, Any]) -> list[Stated]:
    """Keys and values that no file states, in the form that :func:`build` takes."""
    return [Stated(key, value) for key, value in values.items()]


PUBLISHED = ("params", "active_params", "includes_mtp")
"""Keys of a model's [published] table, beside its source."""


WORDS = {int: "a whole number", float: "a number", bool: "true or false", str: "a text"}


def checked(kind: Any, value: Any, where: str) -> Any:
    """``value`` as ``kind`` (int, float, bool, str, a tuple of one of them). Raises InputError."""
    if typing.get_origin(kind) is tuple:
        inner = typing.get_args(kind)[0]
        if not isinstance(value, (list, tuple)):
            raise InputError(f"{where} = {value!r} must be a list")
        return tuple(checked(inner, item, where) for item in value)
    if typing.get_origin(kind) in (types.UnionType, typing.Union):
        return checked(next(arg for arg in typing.get_args(kind) if arg is not type(None)), value, where)
    if kind is float and isinstance(value, int) and not isinstance(value, bool):
        value = float(value)
    if kind is int and isinstance(value, float) and value.is_integer():
        value = int(value)
    if not isinstance(value, kind) or (kind in (int, float) and isinstance(value, bool)):
        raise InputError(f"{where} = {value!r} must be {WORDS.get(kind, kind)}")
    if kind in (int, float) and not (0 <= value < math.inf and value < 1e30):
        raise InputError(f"{where} = {value!r} must be finite and not negative")
    return value


def parse_file(cls: type[Record], path: Path) -> Record:
    """One catalogue file, also of the user's own; its stem is the record's name."""
    where = str(path)
    tables = dict(read_toml(path))
    published = tables.pop("published", None)
    stated = flatten(tables, where)
    if published is not None:
        if not isinstance(published, dict):
            raise InputError(f"{where}: published must be a table")
        for key, value in published.items():
            if key in PUBLISHED:
                stated.append(Stated(f"published_{key}", value))
            elif key != "source":
                raise InputError(f"{where}: published has no key '{key}'{nearest(key, PUBLISHED)}")
    return build(cls, [Stated("name", path.stem), *stated], where)


def _folder(cls: type) -> Path:
    return Path(str(resources.files("planner.catalogue"))) / FOLDERS[cls]


def names(cls: type) -> list[str]:
    """The names of all records of a kind, sorted."""
    return sorted(path.stem for path in _folder(cls).glob("*.toml"))


def records(cls: type[Record]) -> Iterator[Record]:
    """All records of a kind, by name."""
    return (_shipped(cast(Hashable, cls), name) for name in names(cls))


@functools.cache
def _shipped(cls: Hashable, name: str) -> Any:
    return parse_file(cast(type, cls), _folder(cast(type, cls)) / f"{name}.toml")


@functools.cache
def _aliases(cls: Hashable) -> dict[str, str]:
    found: dict[str, str] = {}
    for record in records(cast(type[Any], cls)):
        for word in (record.name, *getattr(record, "aliases", ())):
            if found.setdefault(word, record.name) != record.name:
                raise InputError(f"{FOLDERS[cast(type, cls)]}: '{word}' names both {found[word]} and {record.name}")
    return found


def find(cls: type[Record], word: str) -> Record:
    """The record that a name, an alias or the path of a TOML file stands for. Raises InputError with the nearest names."""
    if word.endswith(".toml"):
        return parse_file(cls, Path(word))
    name = word.strip().lower()
    if "/" not in name and name in names(cls):
        return cast(Record, _shipped(cast(Hashable, cls), name))
    known = _aliases(cast(Hashable, cls))
    if name not in known:
        kind = FOLDERS[cls].removesuffix("s")
        raise InputError(f"no {kind} called '{word}'{nearest(word, known)}")
    return cast(Record, _shipped(cast(Hashable, cls), known[name]))
