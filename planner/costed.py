"""One layout with all its estimates, as comparisons read it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from planner.cost import memory
from planner.cost.estimate import memory_of
from planner.cost.flops import mfu
from planner.explain import MEMORY_FORMULAS, STEP_FORMULAS
from planner.scenario import Job
from planner.simulated import step_of
from solver.layout import Layout, columns_of, num_micro_batches

RESERVE = "reserve"
"""The part of the memory that no tensor can use: fragments."""


@dataclass(frozen=True)
class Costed:
    """One layout with its estimates under the job whose stack runs it."""

    job: Job
    layout: Layout
    step: Mapping[str, float]
    """Part -> seconds, in the order of :data:`planner.explain.STEP_FORMULAS`."""
    memory: Mapping[str, float]
    """Part -> bytes on the fullest stage, the unusable fragments among them."""
    verdict: int

    @property
    def step_seconds(self) -> float:
        """Seconds of a step."""
        return sum(self.step.values())

    @property
    def need_bytes(self) -> float:
        """Need of the fullest stage."""
        return sum(self.memory.values())

    @property
    def mfu(self) -> float:
        """Model FLOPs utilisation."""
        return float(mfu(self.job, np.asarray(self.step_seconds)))

    @property
    def tokens_per_second(self) -> float:
        """Tokens per second and GPU."""
        return self.job.tokens_per_step / self.step_seconds / self.job.num_gpus

    @property
    def micro_batches(self) -> int:
        """Micro-batches per replica and step."""
        return int(num_micro_batches(self.layout, self.job.global_batch_size))

    @property
    def tokens(self) -> float:
        """Tokens of a micro-batch on a rank."""
        return float(self.job.rank_tokens(self.layout))

    @property
    def layers(self) -> float:
        """Layers of an average stage."""
        return self.job.model.num_layers / self.layout.pipeline_parallel

    @property
    def passes(self) -> float:
        """Layers that a GPU runs forward and backward in a step, micro-batches counted one by one."""
        return self.micro_batches * self.layers


def costed(job: Job, layout: Layout) -> Costed:
    """The estimates of one layout under one job."""
    x = columns_of([layout])
    step, found = step_of(job, layout), memory_of(job, x)
    held = {part: float(getattr(found.parts, part)[0]) for part in MEMORY_FORMULAS}
    held[RESERVE] = float(memory.need_bytes(job, found.parts)[0]) - sum(held.values())
    return Costed(job, layout, {part: float(getattr(step, part)[0]) for part in STEP_FORMULAS}, held, int(found.verdict[0]))
