"""The ledger of one row of a shortlist: bytes per stage and seconds per part, under the job that the row is costed with."""

from __future__ import annotations

from dataclasses import dataclass, fields

import numpy as np
import pandas as pd

from planner.answer import Answer
from planner.cost import memory
from planner.cost.arrays import Floats
from planner.cost.memory import Memory
from planner.cost.stages import Stages, all_stages
from planner.cost.step import StepSeconds
from planner.scenario import Job
from planner.simulated import step_of
from planner.units import GIB
from solver.layout import V_SHAPED, Layout, columns_of


@dataclass(frozen=True)
class RowLedger:
    """One layout taken apart."""

    layout: Layout
    job: Job
    """Under the stack of the row, with its split."""
    stages: Stages
    memory: Memory
    """One entry per stage."""
    need_bytes: Floats
    step: StepSeconds

    @property
    def step_parts(self) -> dict[str, float]:
        """Seconds per part; they sum to the step."""
        return {field.name: float(getattr(self.step, field.name)[0]) for field in fields(self.step)}

    @property
    def memory_gib(self) -> pd.DataFrame:
        """GiB per stage (rows) and part, the reserve last; a row sums to the stage's need."""
        parts = {field.name: getattr(self.memory, field.name) / GIB for field in fields(self.memory)}
        return pd.DataFrame(parts | {"reserve": self.memory.tensors * self.job.software.reserve_share / GIB})


def row_ledger(found: Answer, row: int) -> RowLedger:
    """The ledger of one row of an answer's shortlist."""
    return job_ledger(found.shortlist.job(found.scenario, row), found.shortlist.rows.layouts.layout(row))


def job_ledger(job: Job, layout: Layout) -> RowLedger:
    """The ledger of a layout under a job whose split, if any, is stated."""
    x = columns_of([layout])
    stages = all_stages(job, layout.pipeline_parallel, layout.virtual_pipeline, layout.schedule in V_SHAPED)
    rows = x.take(np.zeros(layout.pipeline_parallel, dtype=np.int64))
    per_stage = memory.stage_memory(job, rows, stages, memory.loads(job, rows))
    return RowLedger(layout, job, stages, per_stage, memory.need_bytes(job, per_stage), step_of(job, layout))
