"""DeepSpeed (0.19) with its pipeline engine, AutoTP, AutoEP and Ulysses: its main legality rules."""

from __future__ import annotations

from typing import Any

from planner.frameworks.rule import FrameworkRule, sharded_pipeline, whole_key_value_heads, whole_recompute
from planner.scenario import Job
from solver.layout import PLAIN_1F1B, SELECTIVE


def one_chunk(x: Any, job: Job) -> Any:
    """Stages are not interleaved."""
    return (x.virtual_pipeline == 1) & (x.pipeline_parallel <= job.model.num_layers)


def schedules(x: Any, job: Job) -> Any:
    """The pipeline engine runs 1F1B."""
    return x.schedule == PLAIN_1F1B


def ulysses(x: Any, job: Job) -> Any:
    """Sequences are split by heads, alone."""
    a, kv, c = job.model.num_attention_heads, job.model.num_key_value_heads, x.context_parallel
    heads = (a % c == 0) & ((kv % c == 0) | (c % kv == 0))
    return (c == 1) | ((x.tensor_parallel == 1) & (x.pipeline_parallel == 1) & heads)


def experts(x: Any, job: Job) -> Any:
    """Expert groups stand without tensor groups and pipelines."""
    alone = (x.tensor_parallel == 1) & (x.pipeline_parallel == 1)
    return ((x.expert_parallel == 1) & (x.expert_tensor_parallel == 1)) | (alone & (x.expert_tensor_parallel == 1))


def recompute(x: Any, job: Job) -> Any:
    """Activation checkpointing is off or covers every layer."""
    return (x.recompute != SELECTIVE) & whole_recompute(x, job)


def precision(x: Any, job: Job) -> Any:
    """Training runs in bf16 or fp16."""
    return (x.tensor_parallel > 0) & (not job.low_precision)


RULES: tuple[FrameworkRule, ...] = (
    FrameworkRule("D1", "virtual_pipeline = 1", "runtime/pipe/engine.py", one_chunk, switches=False),
    FrameworkRule(
        "D2", "num_key_value_heads divides by tensor_parallel", "runtime/engine.py, AutoTP", whole_key_value_heads, switches=False
    ),
    FrameworkRule(
        "D3",
        "context_parallel (Ulysses) divides the heads and needs tensor_parallel = pipeline_parallel = 1",
        "runtime/sequence_parallel/ulysses_sp.py",
        ulysses,
        switches=False,
    ),
    FrameworkRule(
        "D4",
        "expert_parallel > 1 needs tensor_parallel = pipeline_parallel = 1",
        "docs, config-json: AutoEP",
        experts,
        switches=False,
    ),
    FrameworkRule("D5", "the precision is bf16 or fp16", "runtime/config.py", precision, switches=False),
    FrameworkRule("D6", "zero_stage 2 and 3 need pipeline_parallel = 1", "runtime/pipe/engine.py", sharded_pipeline, switches=True),
    FrameworkRule("D7", "the schedule is 1f1b", "runtime/pipe/schedule.py", schedules, switches=True),
    FrameworkRule("D8", "recompute is none, or full for every layer", "runtime/activation_checkpointing", recompute, switches=True),
)
