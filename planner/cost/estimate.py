"""Memory, verdict and step time of many layouts under one job: the whole cost model behind one call."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from planner.cost import memory
from planner.cost.arrays import Floats
from planner.cost.memory import Memory
from planner.cost.stages import Stages, candidate_stages
from planner.cost.step import StepSeconds, step_seconds
from planner.scenario import Job
from solver.layout import Columns, Ints


@dataclass(frozen=True)
class MemoryEstimate:
    """The fullest stage of every layout."""

    parts: Memory
    stage: Stages
    need_bytes: Floats
    verdict: Ints
    """Indices into :data:`planner.cost.memory.VERDICTS`."""


def memory_of(job: Job, x: Columns) -> MemoryEstimate:
    """Memory of every layout on its fullest stage."""
    table, kind = candidate_stages(job, x)
    best = np.zeros(len(x), dtype=np.int64)
    fullest = np.full(len(x), -np.inf)
    found: list[Memory] = []
    load = memory.loads(job, x)
    for number in range(table.rank.shape[1]):
        found.append(memory.stage_memory(job, x, table.take((slice(None), number)).take(kind), load))
        need = memory.need_bytes(job, found[-1])
        best, fullest = np.where(need > fullest, number, best), np.maximum(need, fullest)
    rows = np.arange(len(x))
    parts = Memory(*(np.stack([getattr(m, name) for m in found])[best, rows] for name in Memory.__dataclass_fields__))
    verdict = memory.verdicts(job, fullest, parts.logits + parts.transient)
    return MemoryEstimate(parts, table.take((kind, best)), fullest, verdict)


def time_of(job: Job, x: Columns) -> StepSeconds:
    """Step time of every layout, in parts."""
    return step_seconds(job, x)
