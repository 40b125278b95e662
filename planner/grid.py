"""The points of a sweep: lists and ranges of scenario keys, multiplied out and resolved before the first search."""

from __future__ import annotations

import dataclasses
import hashlib
import itertools
import json
import math
import re
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from planner.catalogue import load
from planner.errors import InputError, nearest
from planner.request import SWEEP_TABLE, Request, make_scenario, parse_count, read_request, scenario_path
from planner.scenario import Scenario

MOST_POINTS = 100_000
"""More is a slip of the keyboard: weeks of searching."""

KINDS = {field.name: str(field.type).removesuffix(" | None") for field in dataclasses.fields(Request)}
"""Key of a request -> the kind of its values."""

KEYS = (*(key for key in KINDS if key != "num_gpus"), "num_gpus")
"""The order in which keys vary: the last one fastest."""

Axes = Mapping[str, tuple[Any, ...]]
"""Key of a request -> the values it takes."""


@dataclass(frozen=True)
class Point:
    """One search of a sweep."""

    number: int
    """Its place in the table, from 1."""
    varied: Mapping[str, Any]
    """What it was given of the keys that vary, in the order of KEYS."""
    request: Request
    scenario: Scenario

    @cached_property
    def digest(self) -> str:
        """Of everything that its search reads: two points with one digest have one answer."""
        return hashlib.sha256(json.dumps(self.scenario, default=_fields, sort_keys=True).encode()).hexdigest()

    @property
    def series(self) -> tuple[Any, ...]:
        """What the points that differ in the number of GPUs alone have in common."""
        return self.scenario.name, *(value for key, value in self.varied.items() if key != "num_gpus")


def _fields(record: Any) -> dict[str, Any]:
    """A record as JSON takes it; of a scenario also the stacks that its layouts are costed under."""
    found = {field.name: getattr(record, field.name) for field in dataclasses.fields(record)}
    return found | {"stacks": record.stacks} if isinstance(record, Scenario) else found


def points_of(word: str | None, flags: Request, axes: Axes, *, scale_batch: bool = False) -> tuple[Point, ...]:
    """Every point that a scenario file, a folder of them, or flags alone ask for. Raises InputError.

    Flags override the files. Files vary slowest, then the keys in the order of KEYS. ``scale_batch``: the batch belongs
    to the fewest GPUs of each series and grows with them.
    """
    plans = [(file, flags.over(request), _kept(own, flags, axes) | dict(axes)) for file, request, own in _sources(word)]
    _check_size([own for _, _, own in plans])
    stated = ((file, Request(**varied).over(request), varied) for file, request, own in plans for varied in _products(own))
    points = tuple(_resolved(number, *one) for number, one in enumerate(stated, start=1))
    points = tuple(_weak(points)) if scale_batch else points
    _check_distinct(points)
    return points


def _sources(word: str | None) -> Iterator[tuple[Path | None, Request, Axes]]:
    """Every scenario file with its request and [sweep] table; an empty request where none is named."""
    if word is None:
        yield None, Request(), {}
        return
    path = scenario_path(word)
    files = sorted(path.glob("*.toml")) if path.is_dir() else [path]
    if not files:
        raise InputError(f"{path}: no scenario (*.toml) in this folder")
    for file in files:
        yield file, read_request(file), sweep_table(file)


def sweep_table(path: Path) -> Axes:
    """What the [sweep] table of a scenario file varies. Raises InputError."""
    table = load.read_toml(path).get(SWEEP_TABLE, {})
    if not isinstance(table, dict):
        raise InputError(f"{path}: '{SWEEP_TABLE}' must be a table of keys")
    return {key: values_of(key, content, f"{path}: {SWEEP_TABLE}.{key}") for key, content in table.items()}


def _kept(own: Axes, flags: Request, axes: Axes) -> dict[str, tuple[Any, ...]]:
    """What a file varies of the keys that flags leave alone, be it in another way (batch in tokens, shape of the model)."""
    typed = Request(**{key: values[0] for key, values in axes.items()}).over(flags)
    return {
        key: values
        for key, values in own.items()
        if getattr(typed, key) is None and getattr(typed.over(Request(**{key: values[0]})), key) is not None
    }


def _products(axes: Axes) -> Iterator[dict[str, Any]]:
    keys = [key for key in KEYS if key in axes]
    for values in itertools.product(*(axes[key] for key in keys)):
        yield dict(zip(keys, values))


def _check_size(grids: Iterable[Axes]) -> None:
    total = sum(math.prod(map(len, axes.values())) for axes in grids)
    if total > MOST_POINTS:
        raise InputError(f"this sweep has {total:,} points; the most is {MOST_POINTS:,}: give fewer values or larger steps")


def _resolved(number: int, file: Path | None, request: Request, varied: Mapping[str, Any]) -> Point:
    try:
        return Point(number, varied, request, make_scenario(request, name=file.stem if file else "flags"))
    except InputError as error:
        raise InputError(f"{error}{_at(number, varied, file)}") from None


def _at(number: int, varied: Mapping[str, Any], file: Path | None = None) -> str:
    """Where in the grid an error lies."""
    values = ", ".join(f"{key} = {shown(value)}" for key, value in varied.items())
    places = ([str(file)] if file else []) + ([f"point {number}: {values}"] if varied else [])
    return f" ({', '.join(places)})" if places else ""


def shown(value: Any) -> str:
    """A value of a grid as it was typed."""
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, float):
        return f"{value:.12g}".replace("e+", "e")
    return ",".join(map(str, value)) if isinstance(value, tuple) else str(value)


def _check_distinct(points: Sequence[Point]) -> None:
    seen: dict[str, int] = {}
    for point in points:
        first = seen.setdefault(point.digest, point.number)
        if first != point.number:
            raise InputError(f"points {first} and {point.number} of the sweep ask the same question{_at(point.number, point.varied)}")


def _weak(points: Sequence[Point]) -> Iterator[Point]:
    """The points with a batch that grows with the GPUs. Raises InputError where it is no whole number."""
    fewest: dict[tuple[Any, ...], Point] = {}
    for point in sorted(points, key=lambda point: point.scenario.job.num_gpus):
        fewest.setdefault(point.series, point)
    for point in points:
        job, base = point.scenario.job, fewest[point.series].scenario.job
        batch, rest = divmod(base.global_batch_size * job.num_gpus, base.num_gpus)
        if rest:
            step = base.num_gpus // math.gcd(base.global_batch_size, base.num_gpus)
            low = job.num_gpus // step * step
            raise InputError(
                f"--scale-batch: {base.global_batch_size} sequences on {base.num_gpus} GPUs are no whole number on {job.num_gpus}; "
                f"nearest num_gpus: {low}, {low + step}{_at(point.number, point.varied)}"
            )
        scaled = dataclasses.replace(job, global_batch_size=batch)
        yield dataclasses.replace(point, scenario=dataclasses.replace(point.scenario, job=scaled))


def values_of(key: str, content: Any, where: str) -> tuple[Any, ...]:
    """The values that a key takes: a text of values and ranges between commas, or a list of them. Raises InputError.

    >>> values_of("num_gpus", "64:512:x2,1K", "--gpus"), values_of("price_usd_per_hour", [1.5, "2:3:+0.5"], "--price")
    ((64, 128, 256, 512, 1000), (1.5, 2.0, 2.5, 3.0))
    >>> values_of("gpu", "h100, b200", "--gpu"), values_of("zero_stage", "1,3", "--vary")
    (('h100', 'b200'), ((1,), (3,)))
    """
    if key not in KINDS:
        raise InputError(f"{where}: no key '{key}' to vary{nearest(key, KINDS)}")
    split = isinstance(content, str) and key != "model_shape"  # whose own pairs stand between commas
    listed = content.split(",") if split else content if isinstance(content, list) else [content]
    if any(isinstance(item, (list, dict)) for item in listed):
        raise InputError(f"{where} must be a list of values, or a text such as '64:4096:x2'")
    texts = [shown(item).strip() for item in listed]
    values = tuple(itertools.islice((value for text in texts for value in _values(key, text, where)), MOST_POINTS + 1))
    if not values or "" in texts:
        raise InputError(f"{where} = '{content}' has an empty value: write values between commas, such as 64,128")
    repeated = [shown(value) for value, times in Counter(values).items() if times > 1]
    if repeated:
        raise InputError(f"{where} names {', '.join(repeated)} more than once")
    return values


def _values(key: str, text: str, where: str) -> Iterator[Any]:
    """The values of one piece between commas."""
    kind = KINDS[key]
    if kind.startswith("tuple[int") and ":" in text:
        yield from ((_number(value, "int", text, where),) for value in expanded(text, where))
    elif kind in ("int", "float") and ":" in text:
        yield from (_number(value, kind, text, where) for value in expanded(text, where))
    elif kind in ("int", "float"):
        yield _number(parse_count(text, where), kind, text, where)
    elif kind == "bool":
        if text not in ("true", "false"):
            raise InputError(f"{where} = '{text}' must be true or false")
        yield text == "true"
    elif kind.startswith("tuple[int"):
        yield (_number(parse_count(text, where), "int", text, where),)
    else:
        yield (text,) if kind.startswith("tuple") else text


def _number(value: float, kind: str, text: str, where: str) -> int | float:
    if kind == "float":
        return value
    if not value.is_integer():
        raise InputError(f"{where} = {text}: {value:.12g} is no whole number")
    return int(value)


STEP = re.compile(r"([x+*])(.+)")

EXAMPLE = "64:16384:x2"
"""A range that is legal for every number."""


def _legal(text: str) -> str:
    """The range that a message proposes: this one, or the example where this one would be refused too."""
    first, last, step = text.split(":")
    try:
        begin, end, by = (parse_count(piece, "") for piece in (first, last, step[1:]))
    except InputError:
        return EXAMPLE
    return text if begin <= end and (by > 0 if step[0] == "+" else by > 1 and begin > 0) else EXAMPLE


def expanded(text: str, where: str) -> Iterator[float]:
    """The numbers of a range FIRST:LAST:xFACTOR or FIRST:LAST:+STEP; LAST is one of them where it is hit. Raises InputError.

    >>> list(expanded("64:512:x2", "--gpus")), list(expanded("256:1K:+256", "--gpus"))
    ([64.0, 128.0, 256.0, 512.0], [256.0, 512.0, 768.0])
    """
    pieces = [piece.strip() for piece in text.split(":")]
    step = STEP.fullmatch(pieces[2]) if len(pieces) == 3 and all(pieces) else None
    if step is None:
        example = _legal(f"{pieces[0]}:{pieces[1]}:x2")
        raise InputError(f"{where} = {text} is no range: write FIRST:LAST:xFACTOR or FIRST:LAST:+STEP, such as {example}")
    first, last, by = (parse_count(piece, where) for piece in (*pieces[:2], step[2]))
    if first > last:
        raise InputError(f"{where} = {text} descends: write {_legal(f'{pieces[1]}:{pieces[0]}:{pieces[2]}')}")
    grows = step[1] == "+"
    if (grows and by <= 0) or (not grows and (by <= 1 or first <= 0)):
        start = pieces[0] if first > 0 or grows else "1"
        proposed = _legal(f"{start}:{pieces[1]}:{'+1' if grows else 'x2'}")
        raise InputError(f"{where} = {text} never reaches its end: write {proposed}")
    steps = ((first + by * place if grows else first * by**place) for place in itertools.count())
    return itertools.takewhile(lambda value: value <= last * (1 + 1e-12), steps)
