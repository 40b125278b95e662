"""What a training configuration says, in the planner's words, and what may be wrong with its own settings."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from planner.catalogue.schema import Model
from planner.request import Request
from planner.scenario import Job

ILLEGAL, TRAP = "illegal", "trap"
"""What is wrong: the framework refuses it or dies of it; or it runs, and does not do what was meant."""


@dataclass(frozen=True, kw_only=True)
class Config:
    """One file, read. Nothing of it was run."""

    path: Path
    kind: str
    """What it is, such as "Megatron-LM arguments of a shell script"."""
    framework: str
    """A key of FRAMEWORKS."""
    model: Model | None = None
    """The shape that the file itself states."""
    request: Request = field(default_factory=Request)
    """Model, cluster, workload and stack as far as the file states them; never the sizes of the layout. ``model`` is the path of
    the file where it states a shape, or the catalogue name of the model that it names."""
    layout: Mapping[str, int | str] = field(default_factory=dict)
    """Axis -> value, for those that the file states or that its framework's defaults imply. Without ``recompute_layers``
    full recompute covers every layer; without ``data_parallel`` it is what the GPUs leave."""
    layers_per_stage: tuple[int, ...] = ()
    """Where it differs from an even split: as stated, or as the framework splits by default."""
    software: Mapping[str, Any] = field(default_factory=dict)
    """Fields of :class:`Software` that the file's switches change, such as data_overlap."""
    settings: Mapping[str, Any] = field(default_factory=dict)
    """The framework's own keys with their values, as stated: what setting rules read."""
    read: tuple[str, ...] = ()
    """One line per key that was used: "--seq-length 4096: seq_len"."""
    assumed: tuple[str, ...] = ()
    ignored: tuple[str, ...] = ()
    """Keys that change nothing that the planner knows."""


@dataclass(frozen=True)
class SettingRule:
    """A rule about a framework's own settings, which no layout expresses."""

    id: str
    sentence: str
    source: str
    kind: str
    """ILLEGAL or TRAP."""
    finds: Callable[[Config, Job], str]
    """What is wrong, with the numbers, the legal values and the nearest of them; "" where nothing is."""


@dataclass(frozen=True)
class Finding:
    """A rule that a configuration breaks."""

    rule: str
    kind: str
    text: str
