"""Memory, verdict and step time of many layouts under one job: the whole cost model behind one call."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from planner.cost import memory
from planner.cost.arrays import Floats
from planner.cost.memory import Memory
from planner.cost.stages import each_candidate
from planner.cost.step import StepSeconds, step_seconds
from planner.scenario import Job
from solver.layout import Columns, Ints


@dataclass(frozen=True)
class MemoryEstimate:
    """The fullest stage of every layout."""

    parts: Memory
    need_bytes: Floats
    verdict: Ints
    """Indices into :data:`planner.cost.memory.VERDICTS`."""


def memory_of(job: Job, x: Columns) -> MemoryEstimate:
    """Memory of every layout on its fullest stage, and the worst verdict of any stage."""
    load = memory.loads(job, x)
    candidates, _ = each_candidate(job, x)
    found = [memory.stage_memory(job, x, stage, load) for stage in candidates]
    needs = np.stack([memory.need_bytes(job, parts) for parts in found])
    fullest, rows = np.argmax(needs, axis=0), np.arange(len(x))
    parts = Memory(*(np.stack([getattr(m, name) for m in found])[fullest, rows] for name in Memory.__dataclass_fields__))
    verdicts = [memory.verdicts(job, need, own.logits + own.transient) for need, own in zip(needs, found, strict=True)]
    return MemoryEstimate(parts, needs[fullest, rows], np.max(verdicts, axis=0))


def time_of(job: Job, x: Columns) -> StepSeconds:
    """Step time of every layout, in parts."""
    return step_seconds(job, x)
