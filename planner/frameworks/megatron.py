"""Megatron-LM / Megatron-Core (0.19): its legality rules, and its notation of uneven pipelines."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any

from planner.frameworks.rule import (
    FrameworkRule,
    everywhere,
    low_precision_shapes,
    rule,
    sharded_pipeline,
    tell_low_precision_shapes,
    tell_sharded_pipeline,
)
from planner.scenario import Job
from solver.layout import INTERLEAVED, PLAIN_1F1B, SELECTIVE, Layout


def sequence_parallel_experts(x: Any, job: Job) -> Any:
    """Experts with a tensor group need sequence parallelism."""
    return (x.tensor_parallel == 1) | job.sequence_parallel | (job.model.num_experts == 0)


def tell_sequence_parallel_experts(layout: Layout, job: Job) -> str:
    """Twin of :func:`sequence_parallel_experts`."""
    if layout.tensor_parallel == 1 or job.sequence_parallel or not job.model.num_experts:
        return ""
    return f"{job.model.num_experts} experts with tensor_parallel = {layout.tensor_parallel} and sequence parallelism off: turn it on"


def schedules(x: Any, job: Job) -> Any:
    """Pipelines run 1F1B, interleaved or not."""
    return (x.schedule == PLAIN_1F1B) | (x.schedule == INTERLEAVED)


def tell_schedules(layout: Layout, job: Job) -> str:
    """Twin of :func:`schedules`."""
    return "" if layout.schedule in ("1f1b", "interleaved_1f1b") else f"schedule = {layout.schedule}"


def fsdp_optimizer(x: Any, job: Job) -> Any:
    """Megatron-FSDP steps with Adam or SGD alone."""
    return (x.zero_stage < 2) | (job.optimizer in FSDP_OPTIMIZERS)


def tell_fsdp_optimizer(layout: Layout, job: Job) -> str:
    """Twin of :func:`fsdp_optimizer`."""
    if layout.zero_stage < 2 or job.optimizer in FSDP_OPTIMIZERS:
        return ""
    return f"zero_stage = {layout.zero_stage} with optimizer = {job.optimizer}: Megatron-FSDP has adam and sgd alone"


FSDP_OPTIMIZERS = ("adam", "adam-8bit", "sgd-momentum")


def lean_states(x: Any, job: Job) -> Any:
    """Moments in fewer than 4 bytes come with the precision-aware optimizer, which is a distributed one."""
    return (x.zero_stage >= 1) | (not needs_precision_aware(job))


def tell_lean_states(layout: Layout, job: Job) -> str:
    """Twin of :func:`lean_states`."""
    if layout.zero_stage >= 1 or not needs_precision_aware(job):
        return ""
    return "zero_stage = 0 with optimizer moments below 4 bytes: they need the distributed optimizer, zero_stage >= 1"


def needs_precision_aware(job: Job) -> bool:
    """Whether the job's moments are kept in fewer than 4 bytes."""
    return job.optimizer == "adam-8bit" or moment_bytes(job) < 4


def moment_bytes(job: Job) -> float:
    """Bytes of each of the stack's two moments per parameter; Megatron's stacks count four for master weights beside them."""
    if job.software.framework != "megatron":
        return 4.0
    states = job.software.moe_optimizer_bytes if job.model.num_experts else job.software.optimizer_bytes
    return max((states - 4) / 2, 0.0)


def whole_biased_experts(x: Any, job: Job) -> Any:
    """Experts with biases are not split by a tensor group of their own."""
    return (x.expert_tensor_parallel == 1) | (not biased_experts(job))


def tell_whole_biased_experts(layout: Layout, job: Job) -> str:
    """Twin of :func:`whole_biased_experts`."""
    if layout.expert_tensor_parallel == 1 or not biased_experts(job):
        return ""
    return f"expert_tensor_parallel = {layout.expert_tensor_parallel} with biases inside the experts: legal is 1"


def biased_experts(job: Job) -> bool:
    """Whether Megatron gives the experts biases: its one switch serves all linear layers."""
    return job.model.num_experts > 0 and (job.model.linear_bias or job.model.expert_bias)


def recompute_modules(x: Any, job: Job) -> Any:
    """Selective recompute names modules that the model has."""
    return (x.recompute != SELECTIVE) | bool(known_modules(job))


def tell_recompute_modules(layout: Layout, job: Job) -> str:
    """Twin of :func:`recompute_modules`."""
    if layout.recompute != "selective" or known_modules(job):
        return ""
    return f"selective recompute of {', '.join(job.software.recompute_modules) or 'nothing'}: the model has none of these"


EXPERT_MODULES = ("moe", "moe_act", "shared_experts")


def known_modules(job: Job) -> tuple[str, ...]:
    """The modules of the stack's selective recompute that the model has.

    Source: megatron/core/transformer/transformer_config.py: moe_act needs grouped products, mla_up_proj latent attention.
    """
    model = job.model
    missing = set() if model.num_experts else set(EXPERT_MODULES)
    if not model.shared_ffn_hidden_size:
        missing.add("shared_experts")
    if not model.kv_lora_rank:
        missing.add("mla_up_proj")
    return tuple(module for module in job.software.recompute_modules if module not in missing)


def prediction_positions(x: Any, job: Job) -> Any:
    """Multi-token prediction has rotary positions."""
    return everywhere(x, not (job.num_mtp_layers and job.model.learned_positions))


def tell_prediction_positions(layout: Layout, job: Job) -> str:
    """Twin of :func:`prediction_positions`."""
    if not (job.num_mtp_layers and job.model.learned_positions):
        return ""
    return f"{job.num_mtp_layers} multi-token-prediction layers with learned positions: leave them out or take rotary ones"


def needs_one_connection(job: Job) -> bool:
    """Whether tensor and context groups on these GPUs need CUDA_DEVICE_MAX_CONNECTIONS = 1: those before Blackwell."""
    return not job.generation.name.startswith("blackwell")


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
    rule(
        "M4",
        "a mixture of experts with tensor_parallel > 1 needs sequence parallelism",
        "megatron/core/transformer/moe/moe_layer.py",
        "tensor_parallel",
        sequence_parallel_experts,
        tell_sequence_parallel_experts,
    ),
    rule(
        "M17",
        "the schedule is 1f1b or interleaved_1f1b",
        "megatron/core/pipeline_parallel/schedules.py",
        "schedule",
        schedules,
        tell_schedules,
    ),
    rule(
        "M20",
        "zero_stage 2 and 3 need pipeline_parallel = 1",
        "megatron/training/arguments.py, FSDP checks",
        "zero_stage pipeline_parallel",
        sharded_pipeline,
        tell_sharded_pipeline,
    ),
    rule(
        "M26",
        "zero_stage 2 and 3 need the optimizer adam or sgd",
        "megatron/training/arguments.py, Megatron-FSDP checks",
        "zero_stage",
        fsdp_optimizer,
        tell_fsdp_optimizer,
    ),
    rule(
        "M27",
        "optimizer moments in fewer than 4 bytes need zero_stage >= 1",
        "megatron/core/optimizer/optimizer_config.py, precision-aware optimizer",
        "zero_stage",
        lean_states,
        tell_lean_states,
    ),
    rule(
        "M28",
        "experts with biases need expert_tensor_parallel = 1",
        "megatron/core/transformer/transformer_config.py",
        "expert_tensor_parallel",
        whole_biased_experts,
        tell_whole_biased_experts,
    ),
    rule(
        "M29",
        "selective recompute names a module that the model has",
        "megatron/core/transformer/transformer_config.py",
        "recompute",
        recompute_modules,
        tell_recompute_modules,
    ),
    rule(
        "M47",
        "multi-token prediction needs rotary positions",
        "megatron/training/arguments.py",
        "",
        prediction_positions,
        tell_prediction_positions,
    ),
    rule(
        "M25",
        "8-bit formats need the tokens and widths of a rank in multiples of 16 (MX: 32)",
        "transformer_engine/pytorch/utils.py and tensor/mxfp8_tensor.py",
        "tensor_parallel context_parallel expert_tensor_parallel micro_batch_size",
        low_precision_shapes,
        tell_low_precision_shapes,
    ),
)
