"""Megatron-LM / Megatron-Core (0.19): its main legality rules."""

from __future__ import annotations

from typing import Any

from planner.frameworks.rule import FrameworkRule, low_precision_shapes, sharded_pipeline
from planner.scenario import Job
from solver.layout import INTERLEAVED, PLAIN_1F1B


def sequence_parallel_experts(x: Any, job: Job) -> Any:
    """Experts with a tensor group need sequence parallelism."""
    return (x.tensor_parallel == 1) | job.sequence_parallel | (job.model.num_experts == 0)


def schedules(x: Any, job: Job) -> Any:
    """Pipelines run 1F1B, interleaved or not."""
    return (x.schedule == PLAIN_1F1B) | (x.schedule == INTERLEAVED)


RULES: tuple[FrameworkRule, ...] = (
    FrameworkRule(
        "M4",
        "a mixture of experts with tensor_parallel > 1 needs sequence parallelism",
        "megatron/core/transformer/moe/moe_layer.py",
        sequence_parallel_experts,
        switches=False,
    ),
    FrameworkRule(
        "M17",
        "the schedule is 1f1b or interleaved_1f1b",
        "megatron/core/pipeline_parallel/schedules.py",
        schedules,
        switches=True,
    ),
    FrameworkRule(
        "M20",
        "zero_stage 2 and 3 need pipeline_parallel = 1",
        "megatron/training/arguments.py, FSDP checks",
        sharded_pipeline,
        switches=True,
    ),
    FrameworkRule(
        "M25",
        "8-bit formats need the tokens of a rank in multiples of 16 (MX: 32)",
        "transformer_engine/pytorch/utils.py and tensor/mxfp8_tensor.py",
        low_precision_shapes,
        switches=False,
    ),
)
