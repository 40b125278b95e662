"""Hugging Face accelerate (1.15) with FSDP2: its legality rules. A mesh of data, tensor and context groups, without pipelines."""

from __future__ import annotations

from typing import Any

from planner.frameworks.rule import (
    FrameworkRule,
    everywhere,
    rule,
    tell_key_value_heads,
    tell_whole_recompute,
    whole_key_value_heads,
    whole_recompute,
)
from planner.scenario import Job
from solver.layout import SELECTIVE, Layout


def no_pipeline(x: Any, job: Job) -> Any:
    """There are no pipelines and no expert groups."""
    return (x.pipeline_parallel == 1) & (x.virtual_pipeline == 1) & (x.expert_parallel == 1) & (x.expert_tensor_parallel == 1)


def tell_no_pipeline(layout: Layout, job: Job) -> str:
    """Twin of :func:`no_pipeline`."""
    sizes = ("pipeline_parallel", "virtual_pipeline", "expert_parallel", "expert_tensor_parallel")
    return ", ".join(f"{size} = {getattr(layout, size)}" for size in sizes if getattr(layout, size) > 1)


def sharding(x: Any, job: Job) -> Any:
    """FSDP2 keeps weights gathered (2) or not (3); plain replication (0) stands alone, and so does a lone tensor group."""
    alone = (x.tensor_parallel == 1) | (x.data_parallel == 1)
    return (x.zero_stage >= 2) | ((x.zero_stage == 0) & (x.context_parallel == 1) & alone)


def tell_sharding(layout: Layout, job: Job) -> str:
    """Twin of :func:`sharding`."""
    if layout.zero_stage >= 2:
        return ""
    if layout.zero_stage == 0 and layout.context_parallel == 1 and 1 in (layout.tensor_parallel, layout.data_parallel):
        return ""
    sizes = ("tensor_parallel", "context_parallel", "data_parallel")
    return f"zero_stage = {layout.zero_stage} with " + ", ".join(f"{size} = {getattr(layout, size)}" for size in sizes)


def shard_dimension(x: Any, job: Job) -> Any:
    """FSDP2 shards over data and context ranks: there must be several."""
    return (x.zero_stage < 2) | (x.data_parallel * x.context_parallel > 1)


def tell_shard_dimension(layout: Layout, job: Job) -> str:
    """Twin of :func:`shard_dimension`."""
    if layout.zero_stage < 2 or layout.data_parallel * layout.context_parallel > 1:
        return ""
    return f"zero_stage = {layout.zero_stage} with data_parallel = context_parallel = 1: FSDP2 has nothing to shard over"


def precision(x: Any, job: Job) -> Any:
    """Training runs in bf16 or fp16; 8-bit formats need a backend of their own."""
    return everywhere(x, not job.low_precision)


def tell_precision(layout: Layout, job: Job) -> str:
    """Twin of :func:`precision`."""
    return f"precision = {job.precision}" if job.low_precision else ""


def recompute(x: Any, job: Job) -> Any:
    """Activation checkpointing is off or covers every layer."""
    return (x.recompute != SELECTIVE) & whole_recompute(x, job)


def tell_recompute(layout: Layout, job: Job) -> str:
    """Twin of :func:`recompute`."""
    return "recompute = selective" if layout.recompute == "selective" else tell_whole_recompute(layout, job)


RULES: tuple[FrameworkRule, ...] = (
    rule(
        "A1",
        "pipeline_parallel = expert_parallel = 1",
        "accelerate/parallelism_config.py",
        "pipeline_parallel virtual_pipeline expert_parallel expert_tensor_parallel",
        no_pipeline,
        tell_no_pipeline,
    ),
    rule(
        "A2",
        "num_key_value_heads divides by tensor_parallel",
        "transformers, integrations/tensor_parallel.py",
        "tensor_parallel",
        whole_key_value_heads,
        tell_key_value_heads,
    ),
    rule(
        "A3",
        "zero_stage is 2 or 3; 0 only without context groups and with a tensor or a data group, not both",
        "accelerate/parallelism_config.py, __post_init__",
        "zero_stage tensor_parallel context_parallel data_parallel",
        sharding,
        tell_sharding,
    ),
    rule(
        "A4",
        "recompute is none, or full for every layer",
        "accelerate/utils/fsdp_utils.py",
        "recompute recompute_layers pipeline_parallel virtual_pipeline",
        recompute,
        tell_recompute,
    ),
    rule(
        "A5",
        "zero_stage 2 and 3 need data_parallel x context_parallel > 1",
        "accelerate/parallelism_config.py, _validate_accelerator",
        "zero_stage data_parallel context_parallel",
        shard_dimension,
        tell_shard_dimension,
    ),
    rule("A6", "the precision is bf16 or fp16", "accelerate/utils/launch.py, prepare_multi_gpu_env", "", precision, tell_precision),
)
