"""One legality rule of a framework."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from planner.scenario import Job


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


def micro_batches(x: Any, job: Job) -> Any:
    """Micro-batches per step and replica."""
    return job.global_batch_size // (x.data_parallel * x.micro_batch_size)


def aligned(x: Any, job: Job, eight_bit: int, mx: int) -> Any:
    """Whether the rank's rows of every product are a multiple of what 8-bit kernels want; always true in 16 bit."""
    multiple = {"fp8": eight_bit, "mxfp8": mx, "nvfp4": mx}.get(job.precision, 1)
    rows = job.seq_len * x.micro_batch_size // (x.context_parallel * x.tensor_parallel)
    return rows % multiple == 0
