"""The seconds of layers and ends that no cluster size changes: computed once per process, shared by all searches that meet them."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from planner.cost.arrays import Floats, each
from planner.cost.ends import EndSeconds, end_seconds
from planner.cost.layer import LayerSeconds, unsharded
from planner.cost.stages import layer_kinds
from planner.scenario import Job
from solver.grouping import distinct
from solver.layout import Columns, Ints

AXES = ("tensor_parallel", "context_parallel", "expert_parallel", "expert_tensor_parallel", "micro_batch_size")
"""All that these seconds read of a layout."""

MOST_ROWS = 1 << 13
"""Settings remembered per job; beyond that it starts afresh. A search meets some hundred, with experts some thousand."""

MOST_JOBS = 16
"""Jobs remembered, the last used; all full, at 432 bytes a row, take 57 MB."""


@dataclass(frozen=True)
class Factors:
    """The ends and the unsharded layers of the kinds that a model has (True: with experts); arrays of one length."""

    ends: EndSeconds
    kinds: dict[bool, LayerSeconds]


NOTHING: tuple[list[Ints], list[Factors]] = ([np.zeros(0, dtype=np.int64)] * len(AXES), [])


@dataclass
class _Memory:
    known: tuple[list[Ints], list[Factors]] = NOTHING
    """Distinct settings of one job, an array per axis, and all their factors; replaced as a whole: no thread meets half of it."""


@functools.lru_cache(maxsize=MOST_JOBS)
def _memory(job: Job) -> _Memory:
    return _Memory()


def sizeless(job: Job) -> Job:
    """The job that stands for all that share its factors: one fast domain of the same GPUs, one sequence, no stated split."""
    return dataclasses.replace(job, num_gpus=job.fast_domain, global_batch_size=1, layers_per_stage=(), recomputed_per_stage=())


def factors(job: Job, x: Columns) -> Factors:
    """The factors of each row of ``x``; what no earlier call met is computed, under the sizeless job: no size can slip in."""
    job = sizeless(job)
    memory = _memory(job)
    keys, found = memory.known
    columns = [np.concatenate([known, getattr(x, axis)]) for known, axis in zip(keys, AXES, strict=True)]
    first, group = distinct(columns)  # in order of appearance: the known settings keep their numbers, new ones follow
    old = len(keys[0])
    if len(first) > old or not found:
        found = [_combined(_joined, *found, _computed(job, x.take(first[old:] - old)))]
        if len(first) <= MOST_ROWS:
            memory.known = [column[first] for column in columns], found
        elif len(x) <= MOST_ROWS:  # a call that is too large by itself is no reason to forget
            memory.known = NOTHING
    return _combined(lambda part: part[..., group[old:]], found[0])


def _computed(job: Job, x: Columns) -> Factors:
    return Factors(end_seconds(job, x), {moe: unsharded(job, x, moe=moe) for moe, present in layer_kinds(job.model).items() if present})


def _joined(*parts: Floats) -> Floats:
    return np.concatenate(parts, axis=-1)


def _combined(change: Callable[..., Floats], *parts: Factors) -> Factors:
    kinds = {moe: each(change, *(part.kinds[moe] for part in parts)) for moe in parts[0].kinds}
    return Factors(each(change, *(part.ends for part in parts)), kinds)
