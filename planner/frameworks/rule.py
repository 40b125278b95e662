"""One legality rule of a framework, and the predicates that several frameworks share."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from planner.scenario import Job
from solver.layout import FULL, deepest_chunk


@dataclass(frozen=True)
class FrameworkRule:
    """A layout is legal in a framework when every rule of it holds."""

    id: str
    sentence: str
    source: str
    holds: Callable[[Any, Job], Any]
    """(layout or columns, job) -> truth per layout."""
    switches: bool
    """Whether the rule reads schedule, ZeRO stage or recompute; if not, one answer serves every setting of a mesh."""


def whole_key_value_heads(x: Any, job: Job) -> Any:
    """Each tensor rank has KV heads of its own: they are never copied."""
    return job.model.split_key_value_heads % x.tensor_parallel == 0


def sharded_pipeline(x: Any, job: Job) -> Any:
    """ZeRO-2 and 3 do not combine with pipeline stages."""
    return (x.zero_stage < 2) | (x.pipeline_parallel == 1)


def whole_recompute(x: Any, job: Job) -> Any:
    """Full activation checkpointing covers every layer."""
    return (x.recompute != FULL) | (x.recompute_layers == deepest_chunk(x, job.model.num_layers))


def low_precision_shapes(x: Any, job: Job) -> Any:
    """8-bit products want the rank's tokens in multiples of 16, MX formats of 32; 16-bit ones take any."""
    multiple = {"fp8": 16, "mxfp8": 32, "nvfp4": 32}.get(job.precision, 1)
    rows = job.seq_len * x.micro_batch_size // (x.context_parallel * x.tensor_parallel)
    return rows % multiple == 0
