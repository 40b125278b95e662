"""Opens a file that people have: small, text, parsed as data by its ending. Nothing in it is ever run."""

from __future__ import annotations

import json
import re
import tomllib
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from planner.errors import InputError, nearest

MAX_BYTES = dict.fromkeys((".yaml", ".yml", ".toml"), 1 << 17)
"""YAML and TOML are slow to parse; no configuration is this large."""
MAX_OTHER_BYTES = 4 << 20
LOG_ENDINGS = (".log", ".out")
"""Logs may be long: their head holds the arguments."""


@dataclass(frozen=True)
class Source:
    """A file's text, and what it says where it is JSON, TOML or YAML."""

    path: Path
    text: str
    data: dict[str, Any] | None = None

    @property
    def ending(self) -> str:
        """The file's ending in lower case, with its dot; "" where it has none."""
        return self.path.suffix.lower()

    def fail(self, message: str) -> InputError:
        """The error to raise: the file's name and what is wrong with it."""
        return InputError(f"{self.path}: {message}")


def open_source(path: Path) -> Source:
    """The file of a path. Raises InputError, one line, for what cannot be read, is too large, binary, or not what its ending says."""
    text = read_text(path)
    parse = PARSERS.get(path.suffix.lower())
    if parse is None:
        return Source(path, text)
    data = parse(path, text)
    if not isinstance(data, dict):
        raise InputError(f"{path}: holds {_kind(data)}, must hold keys with values")
    return Source(path, text, data)


def read_text(path: Path) -> str:
    """The text of a file, of a log its head. Raises InputError."""
    ending = path.suffix.lower()
    most = MAX_BYTES.get(ending, MAX_OTHER_BYTES)
    try:
        if path.is_dir():
            raise InputError(f"{path}: is a folder; name a file")
        if path.exists() and not path.is_file():
            raise InputError(f"{path}: is a pipe or device, not a file")
        with path.open("rb") as file:
            raw = file.read(most + 1)
    except (OSError, ValueError) as error:
        raise InputError(f"{path}: cannot be read ({getattr(error, 'strerror', None) or error})") from None
    if len(raw) > most and ending not in LOG_ENDINGS:
        raise InputError(f"{path}: larger than {most >> 10:,} KiB, so not a configuration")
    if b"\0" in raw[:most]:
        raise InputError(f"{path}: not a text file: it holds zero bytes")
    try:
        text = raw[:most].decode("utf-8-sig", errors="strict" if len(raw) <= most else "ignore")
    except UnicodeDecodeError:
        raise InputError(f"{path}: not a text file in UTF-8") from None
    if not text.strip():
        raise InputError(f"{path}: is empty")
    return text


def _json(path: Path, text: str) -> Any:
    try:
        return json.loads(text)
    except json.JSONDecodeError as error:
        raise InputError(f"{path}: not valid JSON: line {error.lineno}: {error.msg}") from None
    except (RecursionError, ValueError):  # nested too deeply, or a number of thousands of digits
        raise InputError(f"{path}: not valid JSON: nested too deeply, or a number too long") from None


DOTTED = re.compile(r"(?:[\w\"'-]+\s*\.\s*){40}")
"""A key of so many parts takes tomllib quadratic time."""


HUGE_NUMBER = re.compile(r"\b0[xob]?[0-9A-Fa-f_]{200}|(?::[0-5]?\d){20}")
"""Numbers that YAML and TOML read at any length, and that Python then refuses to print: by powers of two, and by sixties."""


def _check_numbers(path: Path, text: str, format_name: str) -> None:
    if HUGE_NUMBER.search(text):
        raise InputError(f"{path}: not valid {format_name} here: a number has more than 200 digits")


def _toml(path: Path, text: str) -> Any:
    _check_numbers(path, text, "TOML")
    if DOTTED.search(text):
        raise InputError(f"{path}: not valid TOML here: a key has more than 40 parts")
    try:
        return tomllib.loads(text)
    except (tomllib.TOMLDecodeError, ValueError) as error:
        raise InputError(f"{path}: not valid TOML: {error}") from None
    except RecursionError:
        raise InputError(f"{path}: not valid TOML: nested too deeply") from None


LOADER = getattr(yaml, "CSafeLoader", yaml.SafeLoader)
"""Plain types alone, and fast where libyaml is there."""


MOST_MERGES = 50
"""Merged tables (<<) unfold into each other."""


def _yaml(path: Path, text: str) -> Any:
    if text.count("<<") > MOST_MERGES:
        raise InputError(f"{path}: not valid YAML here: more than {MOST_MERGES} merges (<<)")
    _check_numbers(path, text, "YAML")
    try:
        return yaml.load(text, Loader=LOADER)
    except yaml.YAMLError as error:
        mark = getattr(error, "problem_mark", None)
        where = f"line {mark.line + 1}: " if mark else ""
        raise InputError(f"{path}: not valid YAML: {where}{getattr(error, 'problem', None) or 'it cannot be read'}") from None
    except (RecursionError, ValueError, LookupError, AttributeError, OverflowError, TypeError):  # what its converters raise
        raise InputError(f"{path}: not valid YAML: nested too deeply, or a value that is none of its kind") from None


PARSERS = {".json": _json, ".toml": _toml, ".yaml": _yaml, ".yml": _yaml}


def _kind(value: Any) -> str:
    kinds = {dict: "a table", list: "a list", str: "a text", type(None): "nothing"}
    return kinds.get(type(value), "a single value")


def shown(value: Any) -> str:
    """A file's value in an error message, in a few characters: containers by their kind, for an alias may unfold to any size.

    >>> shown([1]), shown("auto"), shown(True), shown(None)
    ('a list', "'auto'", 'true', 'null')
    """
    if isinstance(value, (dict, list)):
        return _kind(value)
    text = str(value).lower() if isinstance(value, bool) else "null" if value is None else ascii(value)
    return text if len(text) <= 40 else f"{text[:37]}..."


MOST_KNOWN = 8
"""Known words that a message about a file lists where none is close: it stays one line that a person reads."""
LONGEST_LINE = 360
MOST_STRANGE = 3


def hint(word: Any, known: Iterable[str]) -> str:
    """The known words closest to a file's word, as the end of a message.

    >>> hint("stge", ["stage", "device"]), hint(1, map(str, range(20)))[:22]
    ("; did you mean 'stage'?", "; did you mean '1', '1")
    """
    return nearest(str(word)[:60], known, MOST_KNOWN)


def each_told(words: Sequence[str], tell: Callable[[str], str]) -> str:
    """What is wrong with some words, the first ones one by one and the others by their number, in one line.

    >>> each_told(["a", "b", "c", "d"], "{} is unknown".format)
    'a is unknown; b is unknown; c is unknown; and 1 more'
    """
    kept: list[str] = []
    for word in words[:MOST_STRANGE]:
        text = tell(word)
        if kept and len("; ".join([*kept, text])) > LONGEST_LINE:
            break
        kept.append(text)
    more = len(words) - len(kept)
    return "; ".join([*kept, f"and {more} more"] if more else kept)


def listed(words: Sequence[str], longest: int = LONGEST_LINE) -> str:
    """Some of a file's words in one line, as many as it holds, and the number of the others.

    >>> listed(["one", "two", "three"]), listed(["one", "two", "three"], 9)
    ('one, two, three', 'one, two and 1 more')
    """
    kept: list[str] = []
    room = longest
    for word in words:
        short = shown(word).strip("'\"")
        room -= len(short) + 2
        if kept and room < -2:
            break
        kept.append(short)
    more = len(words) - len(kept)
    return f"{', '.join(kept)} and {more} more" if more else ", ".join(kept)


def whole_number(source: Source, key: str, value: Any, *, least: int = 1, most: int = 1 << 40) -> int:
    """A file's value as a whole number; texts of digits count, as flags are texts. Raises InputError with key, value and what is legal."""
    number = value
    if isinstance(value, str):
        digits = value.strip().replace("_", "")
        number = int(digits) if digits.lstrip("-").isdigit() and digits.isascii() and len(digits) < 20 else value
    if isinstance(number, float) and number.is_integer():
        number = int(number)
    if isinstance(number, bool) or not isinstance(number, int) or not least <= number <= most:
        raise source.fail(f"{key} = {shown(value)} must be a whole number from {least} to {most:,}")
    return number


def truth(source: Source, key: str, value: Any) -> bool:
    """A file's value as yes or no. Raises InputError."""
    words = {"true": True, "false": False, "yes": True, "no": False, "1": True, "0": False}
    found = value if isinstance(value, bool) else words.get(str(value).lower()) if isinstance(value, (str, int)) else None
    if found is None:
        raise source.fail(f"{key} = {shown(value)} must be true or false")
    return found


def word_of(source: Source, key: str, value: Any, known: Iterable[str]) -> str:
    """A file's value as one of some words. Raises InputError with the nearest."""
    names = list(known)
    if not isinstance(value, str) or value not in names:
        told = hint(value, names) if isinstance(value, str) else f"; known: {listed(names, 200)}"
        raise source.fail(f"{key} = {shown(value)} is not known here{told}")
    return value


def table(source: Source, data: Mapping[str, Any], key: str, *, prefix: str = "") -> Mapping[str, Any]:
    """A table inside a file's data, empty where it is absent or null. Raises InputError."""
    value = data.get(key)
    if value is None:
        return {}
    if not isinstance(value, dict):
        raise source.fail(f"{prefix}{key} = {shown(value)} must be a table of keys")
    return value
