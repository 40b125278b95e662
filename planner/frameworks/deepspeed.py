"""DeepSpeed (0.19) with its pipeline engine, AutoTP, AutoEP and Ulysses: its legality rules, and how it cuts a pipeline."""

from __future__ import annotations

from typing import Any

from planner.frameworks.rule import (
    FrameworkRule,
    everywhere,
    rule,
    sharded_pipeline,
    tell_key_value_heads,
    tell_sharded_pipeline,
    tell_whole_recompute,
    whole_key_value_heads,
    whole_recompute,
)
from planner.scenario import Job
from solver.layout import PLAIN_1F1B, SELECTIVE, Layout


def stage_layers(num_layers: int, stages: int) -> tuple[int, ...]:
    """Decoder layers of each stage as the pipeline engine cuts them by type: as even as possible, the surplus in the first ones.

    Source: PipelineModule._partition_layers with the method type:transformer (runtime/pipe/module.py) over partition_balanced
    (runtime/utils.py), the method of Megatron-DeepSpeed and GPT-NeoX.

    >>> stage_layers(30, 4), stage_layers(44, 4)
    ((8, 8, 7, 7), (11, 11, 11, 11))
    """
    base, surplus = divmod(num_layers, stages)
    return tuple(base + (stage < surplus) for stage in range(stages))


def ulysses_sizes(num_heads: int, num_key_value_heads: int) -> list[int]:
    """Sizes of a Ulysses group that the heads allow.

    >>> ulysses_sizes(40, 8), ulysses_sizes(64, 64)
    ([1, 2, 4, 8, 40], [1, 2, 4, 8, 16, 32, 64])
    """
    sizes = [size for size in range(1, num_heads + 1) if num_heads % size == 0]
    return [size for size in sizes if num_key_value_heads % size == 0 or size % num_key_value_heads == 0]


def one_chunk(x: Any, job: Job) -> Any:
    """Stages are not interleaved."""
    return (x.virtual_pipeline == 1) & (x.pipeline_parallel <= job.model.num_layers)


def tell_one_chunk(layout: Layout, job: Job) -> str:
    """Twin of :func:`one_chunk`."""
    if layout.virtual_pipeline > 1:
        return f"virtual_pipeline = {layout.virtual_pipeline}"
    deep = layout.pipeline_parallel > job.model.num_layers
    return f"pipeline_parallel = {layout.pipeline_parallel} is above num_layers = {job.model.num_layers}" if deep else ""


def schedules(x: Any, job: Job) -> Any:
    """The pipeline engine runs 1F1B."""
    return x.schedule == PLAIN_1F1B


def tell_schedules(layout: Layout, job: Job) -> str:
    """Twin of :func:`schedules`."""
    return "" if layout.schedule == "1f1b" else f"schedule = {layout.schedule}"


def ulysses(x: Any, job: Job) -> Any:
    """Sequences are split by heads, alone."""
    a, kv, c = job.model.num_attention_heads, job.model.num_key_value_heads, x.context_parallel
    heads = (a % c == 0) & ((kv % c == 0) | (c % kv == 0))
    return (c == 1) | ((x.tensor_parallel == 1) & (x.pipeline_parallel == 1) & heads)


def tell_ulysses(layout: Layout, job: Job) -> str:
    """Twin of :func:`ulysses`."""
    a, kv, c = job.model.num_attention_heads, job.model.num_key_value_heads, layout.context_parallel
    if c == 1:
        return ""
    if layout.tensor_parallel > 1 or layout.pipeline_parallel > 1:
        return f"context_parallel = {c} with tensor_parallel = {layout.tensor_parallel}, pipeline_parallel = {layout.pipeline_parallel}"
    legal = f"; legal sizes: {', '.join(map(str, ulysses_sizes(a, kv)))}"
    if a % c:
        return f"num_attention_heads = {a} does not divide by context_parallel = {c}{legal}"
    wrong = f"num_key_value_heads = {kv} and context_parallel = {c}: neither divides the other{legal}"
    return "" if kv % c == 0 or c % kv == 0 else wrong


def experts(x: Any, job: Job) -> Any:
    """Expert groups stand without tensor groups and pipelines."""
    alone = (x.tensor_parallel == 1) & (x.pipeline_parallel == 1)
    return ((x.expert_parallel == 1) & (x.expert_tensor_parallel == 1)) | (alone & (x.expert_tensor_parallel == 1))


def tell_experts(layout: Layout, job: Job) -> str:
    """Twin of :func:`experts`."""
    expert, split = layout.expert_parallel, layout.expert_tensor_parallel
    if split > 1:
        return f"expert_tensor_parallel = {split}"
    if expert == 1 or (layout.tensor_parallel == 1 and layout.pipeline_parallel == 1):
        return ""
    return f"expert_parallel = {expert} with tensor_parallel = {layout.tensor_parallel}, pipeline_parallel = {layout.pipeline_parallel}"


def sharded_experts(x: Any, job: Job) -> Any:
    """ZeRO-3 shards the weights of expert groups only where no sequence is split."""
    return (x.zero_stage < 3) | (x.expert_parallel == 1) | (x.context_parallel == 1)


def tell_sharded_experts(layout: Layout, job: Job) -> str:
    """Twin of :func:`sharded_experts`."""
    if layout.zero_stage < 3 or layout.expert_parallel == 1 or layout.context_parallel == 1:
        return ""
    return f"zero_stage = 3 with expert_parallel = {layout.expert_parallel}, context_parallel = {layout.context_parallel}"


def recompute(x: Any, job: Job) -> Any:
    """Activation checkpointing is off or covers every layer."""
    return (x.recompute != SELECTIVE) & whole_recompute(x, job)


def tell_recompute(layout: Layout, job: Job) -> str:
    """Twin of :func:`recompute`."""
    return "recompute = selective" if layout.recompute == "selective" else tell_whole_recompute(layout, job)


def precision(x: Any, job: Job) -> Any:
    """Training runs in bf16 or fp16."""
    return everywhere(x, not job.low_precision)


def tell_precision(layout: Layout, job: Job) -> str:
    """Twin of :func:`precision`."""
    return f"precision = {job.precision}" if job.low_precision else ""


RULES: tuple[FrameworkRule, ...] = (
    rule(
        "D1",
        "virtual_pipeline = 1",
        "runtime/pipe/schedule.py, TrainSchedule: one run of layers per stage",
        "virtual_pipeline pipeline_parallel",
        one_chunk,
        tell_one_chunk,
    ),
    rule(
        "D2",
        "num_key_value_heads divides by tensor_parallel",
        "runtime/engine.py, AutoTP",
        "tensor_parallel",
        whole_key_value_heads,
        tell_key_value_heads,
    ),
    rule(
        "D3",
        "context_parallel (Ulysses) divides the heads and needs tensor_parallel = pipeline_parallel = 1",
        "runtime/sequence_parallel/ulysses_sp.py",
        "context_parallel tensor_parallel pipeline_parallel",
        ulysses,
        tell_ulysses,
    ),
    rule(
        "D4",
        "expert_parallel > 1 needs tensor_parallel = pipeline_parallel = 1",
        "module_inject/auto_ep_folding.py, validate_folding_global; with a tensor group AutoEP is newer than its checkpoints",
        "expert_parallel expert_tensor_parallel tensor_parallel pipeline_parallel",
        experts,
        tell_experts,
    ),
    rule("D5", "the precision is bf16 or fp16", "runtime/precision_config.py", "", precision, tell_precision),
    rule(
        "D6",
        "zero_stage 2 and 3 need pipeline_parallel = 1",
        "runtime/pipe/engine.py, PipelineEngine.__init__",
        "zero_stage pipeline_parallel",
        sharded_pipeline,
        tell_sharded_pipeline,
    ),
    rule("D7", "the schedule is 1f1b", "runtime/pipe/schedule.py", "schedule", schedules, tell_schedules),
    rule(
        "D8",
        "recompute is none, or full for every layer",
        "runtime/activation_checkpointing",
        "recompute recompute_layers pipeline_parallel virtual_pipeline",
        recompute,
        tell_recompute,
    ),
    rule(
        "D9",
        "zero_stage 3 with expert_parallel > 1 needs context_parallel = 1",
        "runtime/engine.py, _validate_zero3_moe_compatibility",
        "zero_stage expert_parallel context_parallel",
        sharded_experts,
        tell_sharded_experts,
    ),
)
