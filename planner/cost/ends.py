"""Seconds of what only the first and the last stage hold, for every distinct setting at once."""

from __future__ import annotations

from dataclasses import dataclass

from planner.cost import compute
from planner.cost.arrays import Floats
from planner.cost.stages import Stages
from planner.scenario import Job
from solver.layout import Columns


@dataclass(frozen=True)
class EndSeconds:
    """Embedding on the first stage, head and loss on the last, per micro-batch; arrays of one length."""

    embedding: Floats
    """Look-up and its gradient: a third of it forward."""
    head_forward: Floats
    """With the heads of the multi-token-prediction layers, as the next."""
    head_backward: Floats

    def forward(self, stage: Stages) -> Floats:
        """Forward seconds at the ends that the stage holds."""
        return stage.has_embedding * self.embedding / 3 + stage.has_head * self.head_forward

    def backward(self, stage: Stages) -> Floats:
        """Backward seconds at the ends that the stage holds."""
        return stage.has_embedding * self.embedding * 2 / 3 + stage.has_head * self.head_backward


def end_seconds(job: Job, x: Columns) -> EndSeconds:
    """The ends for each row of ``x`` (its tensor and context size and its micro-batch are read)."""
    rates, tokens = compute.rates_of(job), job.rank_tokens(x)
    heads = 1 + job.num_mtp_layers
    forward, backward = compute.head_seconds(job, rates, tokens, x.tensor_parallel)
    return EndSeconds(compute.embedding_seconds(job, rates, tokens), heads * forward, heads * backward)
