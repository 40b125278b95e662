"""Reads catalogue files into the frozen records of the schema: keys checked, units scaled once, names resolved."""

from __future__ import annotations

import dataclasses
import functools
import math
import tomllib
import types
import typing
from collections.abc import Hashable, Iterator, Mapping
from importlib import resources
from pathlib import Path
from typing import Any, TypeVar, cast

from planner.catalogue.schema import Cluster, Generation, Gpu, Model, Physics, Software
from planner.errors import InputError, nearest
from planner.units import base_unit

Record = TypeVar("Record")

FOLDERS: dict[type, str] = {
    Model: "models",
    Gpu: "gpus",
    Cluster: "clusters",
    Generation: "generations",
    Software: "software",
    Physics: "physics",
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


def human_key(field: str) -> str:
    """The key under which a file states a field: the inverse of the unit scaling.

    >>> human_key("hbm_bytes_per_s"), human_key("peak_bf16_flops"), human_key("num_layers")
    ('hbm_gb_per_s', 'peak_bf16_tflops', 'num_layers')
    """
    if field.startswith("nic_") and field.endswith("_bytes_per_s"):
        return field.removesuffix("_bytes_per_s") + "_gbit_per_s"
    for human, base in (("_gb_per_s", "_bytes_per_s"), ("_tflops", "_flops")):
        if field.endswith(base):
            return field.removesuffix(base) + human
    return field


def flatten(tables: Mapping[str, Any], where: str) -> dict[str, Any]:
    """All keys of all tables side by side, units scaled to base; ``source`` texts are joined, ``uncertainty`` left out."""
    flat: dict[str, Any] = {}
    sources: list[str] = []

    def put(key: str, value: Any) -> None:
        if key == "source":
            sources.append(str(value))
            return
        if key in ("uncertainty", "meaning"):
            return
        name, factor = base_unit(key)
        if name in flat:
            raise InputError(f"{where}: {key} is stated twice")
        scaled = factor != 1.0 and isinstance(value, (int, float)) and not isinstance(value, bool)
        flat[name] = value * factor if scaled else value

    for key, value in tables.items():
        if isinstance(value, dict):
            for inner, inner_value in value.items():
                put(inner, inner_value)
        else:
            put(key, value)
    return {**flat, "source": "; ".join(sources)}


def build(cls: type[Record], flat: Mapping[str, Any], where: str) -> Record:
    """The record from flat keys. Raises InputError for an unknown, missing or ill-typed key, naming the nearest."""
    fields = {field.name: field for field in dataclasses.fields(cls)}  # type: ignore[arg-type]
    hints = typing.get_type_hints(cls)
    values: dict[str, Any] = {}
    for key, value in flat.items():
        if key not in fields:
            raise InputError(f"{where}: unknown key '{key}'{nearest(key, fields)}")
        values[key] = checked(hints[key], value, f"{where}: {human_key(key)}")
    for name, field in fields.items():
        if name not in values and field.default is dataclasses.MISSING and field.default_factory is dataclasses.MISSING:
            raise InputError(f"{where}: {human_key(name)} is missing")
    return cls(**values)


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
    flat = flatten(tables, where)
    if published is not None:
        if not isinstance(published, dict):
            raise InputError(f"{where}: published must be a table")
        for key in ("params", "active_params", "includes_mtp"):
            if key in published:
                flat[f"published_{key}"] = published[key]
    return build(cls, {"name": path.stem, **flat}, where)


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
