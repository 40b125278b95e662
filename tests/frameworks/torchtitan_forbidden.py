"""Layouts and settings that our rules forbid, and the few of them that torchtitan's own checks let through, each with the reason."""

from __future__ import annotations

from typing import Any

EIGHT = {"model": "8b", "num_gpus": 64, "global_batch_size": 128, "seq_len": 8192}
SEVENTY = {"model": "70b", "num_gpus": 64, "global_batch_size": 128}
EAGER = {**EIGHT, "software": "fsdp2-eager"}
EXPERTS = {"model": "qwen3-30b-a3b", "num_gpus": 64, "global_batch_size": 128}
FORBIDDEN: dict[str, tuple[str, dict[str, Any], dict[str, Any]]] = {
    "more tensor ranks than KV heads": ("T1", SEVENTY, {"tensor_parallel": 16, "data_parallel": 4, "zero_stage": 3}),
    "sequence over tensor ranks": ("T2", {**SEVENTY, "seq_len": 4100}, {"tensor_parallel": 8, "data_parallel": 8, "zero_stage": 3}),
    "whole experts under a tensor group": ("T3", EXPERTS, {"tensor_parallel": 4, "data_parallel": 16, "zero_stage": 3}),
    "fp16": ("T4", {**SEVENTY, "precision": "fp16"}, {"data_parallel": 64, "zero_stage": 3}),
    "fp8 rows": ("T5", {**SEVENTY, "precision": "fp8", "seq_len": 2056}, {"data_parallel": 64, "zero_stage": 3}),
    "ZeRO-1": ("T6", SEVENTY, {"data_parallel": 64, "zero_stage": 1}),
    "replication with context groups": ("T7", SEVENTY, {"context_parallel": 2, "data_parallel": 32}),
    "replication with expert groups": ("T7", EXPERTS, {"expert_parallel": 2, "data_parallel": 64}),
    "1f1b of few micro-batches": ("T8", EIGHT, {"pipeline_parallel": 8, "data_parallel": 8, "micro_batch_size": 16, "zero_stage": 2}),
    "DualPipe of few micro-batches": (
        "T8",
        EAGER,
        {
            "pipeline_parallel": 4,
            "virtual_pipeline": 2,
            "data_parallel": 16,
            "zero_stage": 2,
            "schedule": "dualpipe",
            "micro_batch_size": 2,
        },
    ),
    "rounds of a zero-bubble schedule": (
        "T8",
        {**EAGER, "global_batch_size": 144},
        {"pipeline_parallel": 4, "data_parallel": 16, "zero_stage": 2, "schedule": "zero_bubble_h1"},
    ),
    "no such schedule": ("T8", EAGER, {"pipeline_parallel": 4, "data_parallel": 16, "zero_stage": 2, "schedule": "zero_bubble_2p"}),
    "some layers recomputed": ("T9", SEVENTY, {"data_parallel": 64, "zero_stage": 3, "recompute": "full", "recompute_layers": 40}),
    "compiled zero-bubble": (
        "T10",
        EIGHT,
        {"pipeline_parallel": 4, "virtual_pipeline": 2, "data_parallel": 16, "zero_stage": 2, "schedule": "zero_bubble_v"},
    ),
    "selective zero-bubble": (
        "T10",
        EAGER,
        {"pipeline_parallel": 4, "data_parallel": 16, "zero_stage": 2, "schedule": "zero_bubble_h1", "recompute": "selective"},
    ),
    "tied embedding on two stages": (
        "T11",
        {"model": "llama-3.2-1b", "num_gpus": 16, "global_batch_size": 64},
        {"pipeline_parallel": 4, "data_parallel": 4, "zero_stage": 2},
    ),
    "attention blocks over context ranks": (
        "T12",
        {**EIGHT, "seq_len": 8320},
        {"context_parallel": 2, "data_parallel": 32, "zero_stage": 3},
    ),
    "context groups of gpt-oss": (
        "T13",
        {"model": "gpt-oss-20b", "num_gpus": 32, "global_batch_size": 128},
        {"context_parallel": 2, "data_parallel": 16, "zero_stage": 3},
    ),
}
HOLES: dict[str, str] = {
    "sequence over tensor ranks": "the trainer's constructor refuses it, which needs GPUs",
    "whole experts under a tensor group": "there is no such setting: it would run with the experts split by the tensor group",
    "fp8 rows": "the matrix units refuse the shapes when they run",
    "replication with context groups": "the mesh shards the weights over the context ranks, so it would be another layout",
    "some layers recomputed": "there is no such setting: it would recompute every layer",
    "selective zero-bubble": "it fails in the first backward pass (PyTorch issue 161904)",
    "attention blocks over context ranks": "the first mask that is built refuses it",
}
"""What our rules forbid and the framework's parser, meshes and schedules let through, with the reason that it is forbidden."""

PIPE = "--parallelism.pipeline_parallel_degree 4 --training.disable_cuda_graphs --training.local_batch_size 8"
SETTINGS: dict[str, tuple[str, str]] = {
    "product": ("TS1", "--parallelism.data_parallel_shard_degree 5"),
    "product of the rest": ("TS1", "--parallelism.context_parallel_degree 3"),
    "no degree": ("TS2", "--parallelism.tensor_parallel_degree 0"),
    "unknown key": ("TS3", "--parallelism.tensor_parallel_size 8"),
    "unknown schedule": ("TS4", f"{PIPE} --parallelism.pipeline_parallel_schedule 1F2B"),
    "unknown mode": ("TS5", "activation-checkpoint:half"),
    "sequence": ("TS6", "--training.seq_len 8190 --parallelism.tensor_parallel_degree 4"),
    "positions": ("TS6", "--training.seq_len 262144"),
    "global batch": ("TS7", "--training.global_batch_size 100"),
    "micro-batch": ("TS8", f"{PIPE} --parallelism.pipeline_parallel_microbatch_size 3"),
    "few micro-batches": ("TS9", f"{PIPE} --parallelism.pipeline_parallel_microbatch_size 4"),
    "chunks": ("TS12", f"{PIPE} --parallelism.pipeline_parallel_layers_per_stage 5"),
    "too many stages": ("TS12", f"{PIPE.replace('4', '64', 1)} --parallelism.pipeline_parallel_layers_per_stage 1"),
    "lists of modules": ("TS12", f"{PIPE} --parallelism.module_fqns_per_model_part a b c"),
    "graphs": ("TS14", "--parallelism.pipeline_parallel_degree 4 --training.local_batch_size 8"),
    "compiled": (
        "TS15",
        f"{PIPE} --parallelism.pipeline_parallel_schedule ZBVZeroBubble --compile.enable",
    ),
    "memory budget": ("TS19", "activation-checkpoint:memory-budget"),
    "async": ("TS19", "--compile.enable_async_tensor_parallel"),
}
SETTING_HOLES = {
    "sequence": "the trainer's constructor refuses it, which needs GPUs",
    "global batch": "the trainer's constructor refuses it, which needs GPUs",
}
