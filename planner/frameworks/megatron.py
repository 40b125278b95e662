"""Megatron-LM / Megatron-Core (0.19): its main legality rules."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
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


def pipeline_layout(chunks: Sequence[int], num_mtp_layers: int = 0) -> str:
    """Megatron's ``--pipeline-model-parallel-layout``: E embedding, t layer, m multi-token prediction, L loss, | between chunks.

    Source: megatron/core/transformer/pipeline_parallel_layer_layout.py; commas separate for the eye only.

    >>> pipeline_layout([7, 8, 8, 8, 7]), pipeline_layout([2, 3, 1], 1)
    ('Et*7|(t*8|)*3,t*7L', 'Et*2|t*3|tmL')
    """

    def decoder(layers: int) -> str:
        return {0: "", 1: "t"}.get(layers, f"t*{layers}")

    pieces = ["E" + decoder(chunks[0])]
    for layers, run in itertools.groupby(chunks[1:-1]):
        many = len(list(run))
        pieces.append(f"({decoder(layers)}|)*{many}," if many > 1 else decoder(layers) + "|")
    tail = "m" * num_mtp_layers + "L"
    if len(chunks) == 1:
        return pieces[0] + tail
    return pieces[0] + "|" + "".join(pieces[1:]) + decoder(chunks[-1]) + tail


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
