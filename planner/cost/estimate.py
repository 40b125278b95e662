"""Memory, verdict and step time of many layouts under one job: the whole cost model behind one call."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from planner.cost import memory
from planner.cost.arrays import Floats
from planner.cost.memory import Memory
from planner.cost.stages import Stages, worst_stage
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
    load = memory.loads(job, x)
    found: list[Memory] = []

    def need(stage: Stages) -> Floats:
        found.append(memory.stage_memory(job, x, stage, load))
        return memory.need_bytes(job, found[-1])

    stage, best, fullest = worst_stage(job, x, need)
    rows = np.arange(len(x))
    parts = Memory(*(np.stack([getattr(m, name) for m in found])[best, rows] for name in Memory.__dataclass_fields__))
    verdict = memory.verdicts(job, fullest, parts.logits + parts.transient)
    return MemoryEstimate(parts, stage, fullest, verdict)


def time_of(job: Job, x: Columns) -> StepSeconds:
    """Step time of every layout, in parts."""
    return step_seconds(job, x)
