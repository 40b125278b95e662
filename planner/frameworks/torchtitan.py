"""torchtitan (0.3) on PyTorch: its legality rules."""

from __future__ import annotations

from typing import Any

import numpy as np

from planner.frameworks.rule import (
    FrameworkRule,
    everywhere,
    low_precision_shapes,
    rule,
    tell_key_value_heads,
    tell_low_precision_shapes,
    tell_whole_recompute,
    whole_key_value_heads,
    whole_recompute,
)
from planner.frameworks.torchtitan_models import flavor_of
from planner.frameworks.torchtitan_stages import SCHEDULE_NAMES, few_micro_batches, num_rounds
from planner.scenario import Job
from solver.layout import DUALPIPE, INTERLEAVED, PLAIN_1F1B, SCHEDULES, SELECTIVE, V_SHAPED, Layout, num_micro_batches

OWN_SCHEDULES = tuple(SCHEDULE_NAMES)
OWN_CODES = [SCHEDULES.index(name) for name in OWN_SCHEDULES]
H1 = SCHEDULES.index("zero_bubble_h1")
SPLIT_BACKWARD = ("zero_bubble_h1", *V_SHAPED)
SPLIT_CODES = [SCHEDULES.index(name) for name in SPLIT_BACKWARD]
"""Schedules that run the weight gradients apart from the input gradients."""
FLEX_BLOCK = 128
"""Tokens of a block of FlexAttention's mask. Source: torch/nn/attention/flex_attention.py."""


def sharding(x: Any, job: Job) -> Any:
    """FSDP2 keeps weights gathered (2) or not (3), or the mesh only replicates (0); there is no ZeRO-1."""
    return x.zero_stage != 1


def tell_sharding(layout: Layout, job: Job) -> str:
    """Twin of :func:`sharding`."""
    return "zero_stage = 1" if layout.zero_stage == 1 else ""


def replication(x: Any, job: Job) -> Any:
    """Pure replication leaves no shard dimension for context or expert parallelism."""
    return (x.zero_stage != 0) | ((x.context_parallel == 1) & (x.expert_parallel == 1))


def tell_replication(layout: Layout, job: Job) -> str:
    """Twin of :func:`replication`."""
    if layout.zero_stage != 0 or (layout.context_parallel == 1 and layout.expert_parallel == 1):
        return ""
    return f"zero_stage = 0 with context_parallel = {layout.context_parallel}, expert_parallel = {layout.expert_parallel}"


def sequence_chunks(x: Any, job: Job) -> Any:
    """The sequence divides by tensor x 2 context."""
    context = np.where(x.context_parallel > 1, 2 * x.context_parallel, 1)
    return job.seq_len % (x.tensor_parallel * context) == 0


def tell_sequence_chunks(layout: Layout, job: Job) -> str:
    """Twin of :func:`sequence_chunks`."""
    ranks = layout.tensor_parallel * (2 * layout.context_parallel if layout.context_parallel > 1 else 1)
    return f"seq_len = {job.seq_len} does not divide by {ranks}" if job.seq_len % ranks else ""


def expert_tensor(x: Any, job: Job) -> Any:
    """Without expert groups the tensor group splits every expert; with them experts are whole."""
    if not job.model.num_experts:
        return x.expert_tensor_parallel == 1
    return x.expert_tensor_parallel == np.where(x.expert_parallel == 1, x.tensor_parallel, 1)


def tell_expert_tensor(layout: Layout, job: Job) -> str:
    """Twin of :func:`expert_tensor`."""
    legal = layout.tensor_parallel if job.model.num_experts and layout.expert_parallel == 1 else 1
    if layout.expert_tensor_parallel == legal:
        return ""
    return f"expert_tensor_parallel = {layout.expert_tensor_parallel} with expert_parallel = {layout.expert_parallel}: must be {legal}"


def schedules(x: Any, job: Job) -> Any:
    """Schedules of torch.distributed.pipelining with as many micro-batches as they need."""
    batches, stages = num_micro_batches(x, job.global_batch_size), x.pipeline_parallel
    looped = (x.schedule == H1) | (x.schedule == INTERLEAVED)
    return (
        np.isin(x.schedule, OWN_CODES)
        & ((x.schedule != PLAIN_1F1B) | (batches >= stages))
        & ((x.schedule != DUALPIPE) | (batches >= 2 * stages))
        & (~looped | (batches % num_rounds(batches, stages) == 0))
    )


def tell_schedules(layout: Layout, job: Job) -> str:
    """Twin of :func:`schedules`."""
    if layout.schedule not in OWN_SCHEDULES:
        return f"schedule = {layout.schedule}"
    return few_micro_batches(layout.schedule, num_micro_batches(layout, job.global_batch_size), layout.pipeline_parallel)


def split_backward(x: Any, job: Job) -> Any:
    """Zero-bubble schedules split the backward, which a compiled model and op-level recompute do not allow."""
    return ~np.isin(x.schedule, SPLIT_CODES) | ((x.recompute != SELECTIVE) & (not job.software.compiled))


def tell_split_backward(layout: Layout, job: Job) -> str:
    """Twin of :func:`split_backward`."""
    if layout.schedule not in SPLIT_BACKWARD:
        return ""
    if job.software.compiled:
        return f"schedule = {layout.schedule} under a compiled model"
    return f"schedule = {layout.schedule} with selective recompute" if layout.recompute == "selective" else ""


def precision(x: Any, job: Job) -> Any:
    """Training runs in bf16 or 8-bit formats, not in fp16."""
    return everywhere(x, job.precision != "fp16")


def tell_precision(layout: Layout, job: Job) -> str:
    """Twin of :func:`precision`."""
    return "precision = fp16" if job.precision == "fp16" else ""


def untied(x: Any, job: Job) -> Any:
    """A tied embedding cannot sit on two stages."""
    return (x.pipeline_parallel == 1) | (not job.model.tied_embeddings)


def tell_untied(layout: Layout, job: Job) -> str:
    """Twin of :func:`untied`."""
    tied = job.model.tied_embeddings and layout.pipeline_parallel > 1
    return f"pipeline_parallel = {layout.pipeline_parallel} with tied embeddings" if tied else ""


def attention_blocks(x: Any, job: Job) -> Any:
    """Context groups share whole blocks of FlexAttention's mask."""
    return (x.context_parallel == 1) | (job.seq_len % (FLEX_BLOCK * x.context_parallel) == 0)


def tell_attention_blocks(layout: Layout, job: Job) -> str:
    """Twin of :func:`attention_blocks`."""
    context = layout.context_parallel
    if context == 1 or job.seq_len % (FLEX_BLOCK * context) == 0:
        return ""
    return f"seq_len = {job.seq_len} does not divide by {FLEX_BLOCK} x context_parallel = {FLEX_BLOCK * context}"


def flexible_attention(x: Any, job: Job) -> Any:
    """Context groups need FlexAttention, which gpt_oss's configurations do not use."""
    return (x.context_parallel == 1) | _has_context(job)


def tell_flexible_attention(layout: Layout, job: Job) -> str:
    """Twin of :func:`flexible_attention`."""
    if layout.context_parallel == 1 or _has_context(job):
        return ""
    return f"context_parallel = {layout.context_parallel}: torchtitan's {job.model.name} runs variable-length attention"


def _has_context(job: Job) -> bool:
    flavor = flavor_of(job.model)
    return flavor is None or flavor.context


RULES: tuple[FrameworkRule, ...] = (
    rule(
        "T1",
        "num_key_value_heads divides by tensor_parallel",
        "models/common/decoder.py",
        "tensor_parallel",
        whole_key_value_heads,
        tell_key_value_heads,
    ),
    rule(
        "T2",
        "seq_len divides by tensor_parallel x 2 context_parallel",
        "trainer.py",
        "tensor_parallel context_parallel",
        sequence_chunks,
        tell_sequence_chunks,
    ),
    rule(
        "T3",
        "expert_tensor_parallel is 1, or tensor_parallel where expert_parallel = 1",
        "models/common/moe_sharding.py",
        "expert_tensor_parallel expert_parallel tensor_parallel",
        expert_tensor,
        tell_expert_tensor,
    ),
    rule("T4", "the precision is not fp16", "config/job_config.py", "", precision, tell_precision),
    rule(
        "T5",
        "8-bit formats need the tokens and widths of a rank in multiples of 16 (MX: 32)",
        "components/quantization",
        "tensor_parallel context_parallel expert_tensor_parallel micro_batch_size",
        low_precision_shapes,
        tell_low_precision_shapes,
    ),
    rule("T6", "zero_stage is 0, 2 or 3", "distributed/fsdp.py", "zero_stage", sharding, tell_sharding),
    rule(
        "T7",
        "zero_stage 0 needs context_parallel = expert_parallel = 1",
        "distributed/parallel_dims.py",
        "zero_stage context_parallel expert_parallel",
        replication,
        tell_replication,
    ),
    rule(
        "T8",
        "the schedule is one of torch.distributed.pipelining's and has the micro-batches that it needs",
        "torch/distributed/pipelining/schedules.py",
        "schedule pipeline_parallel micro_batch_size data_parallel",
        schedules,
        tell_schedules,
    ),
    rule(
        "T10",
        "zero_bubble_h1, zero_bubble_v and dualpipe need an uncompiled model (software fsdp2-eager) without selective recompute",
        "torch/distributed/pipelining/schedules.py, _check_torch_compile_compatibility; PyTorch issue 161904",
        "schedule recompute",
        split_backward,
        tell_split_backward,
    ),
    rule(
        "T9",
        "full recompute covers every layer",
        "distributed/activation_checkpoint.py",
        "recompute recompute_layers pipeline_parallel virtual_pipeline",
        whole_recompute,
        tell_whole_recompute,
    ),
    rule(
        "T11",
        "tied embeddings need pipeline_parallel = 1",
        "models/common/decoder.py",
        "pipeline_parallel",
        untied,
        tell_untied,
    ),
    rule(
        "T12",
        "with context groups seq_len divides by 128 x context_parallel",
        "torch/distributed/tensor/experimental/_context_parallel/_attention.py, FlexAttention's blocks",
        "context_parallel",
        attention_blocks,
        tell_attention_blocks,
    ),
    rule(
        "T13",
        "context_parallel > 1 needs a model with FlexAttention (not gpt_oss)",
        "distributed/full_dtensor.py, validate_config",
        "context_parallel",
        flexible_attention,
        tell_flexible_attention,
    ),
)
