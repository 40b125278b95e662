"""The keys of a DeepSpeed 0.19 configuration: which it asks for, which blocks refuse any other, and which it stops at."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

# fmt: off
TOP_KEYS = (
    "activation_checkpointing", "aio", "autotuning", "bf16", "bfloat16", "checkpoint", "comet", "comms_logger",
    "communication_data_type", "compile", "csv_monitor", "data_efficiency", "data_types", "dataloader_drop_last", "datastates_ckpt",
    "disable_allgather", "disable_python_gc", "dump_state", "expert_parallel", "flops_profiler", "fp16", "gradient_accumulation_steps",
    "gradient_allreduce_op", "gradient_clipping", "gradient_predivide_factor", "hybrid_engine", "log_level",
    "managed_gradient_accumulation", "memory_breakdown", "optimizer", "pipeline", "prescale_gradients", "scheduler",
    "seq_parallel_communication_data_type", "sequence_parallel_size", "steps_per_print", "tensor_parallel", "tensorboard", "timers",
    "torch_autocast", "train_batch_size", "train_micro_batch_size_per_gpu", "use_data_before_expert_parallelism", "vocabulary_size",
    "wall_clock_breakdown", "wandb", "weight_quantization", "zero_allow_untested_optimizer", "zero_force_ds_cpu_optimizer",
    "zero_optimization",
)
"""Keys that DeepSpeed looks up. Source: runtime/config.py, every key that its parser asks a configuration for."""

_STAGE3 = (
    "prefetch_bucket_size", "param_persistence_threshold", "model_persistence_threshold", "max_live_parameters", "max_reuse_distance",
    "gather_16bit_weights_on_model_save", "module_granularity_threshold", "use_all_reduce_for_fetch_params", "allgather_sequential",
)
BLOCKS: dict[str, tuple[str, ...]] = {
    "zero_optimization": (
        "stage", "contiguous_gradients", "reduce_scatter", "reduce_bucket_size", "use_multi_rank_bucket_allreduce",
        "allgather_partitions", "allgather_bucket_size", "overlap_comm", "compute_grad_norm", "load_from_fp32_weights",
        "elastic_checkpoint", "offload_param", "offload_optimizer", "zenflow", "sub_group_size", "cpu_offload_param",
        "cpu_offload_use_pin_memory", "cpu_offload", "stage3_gather_fp16_weights_on_model_save", "ignore_unused_parameters",
        "legacy_stage1", "round_robin_gradients", "parameter_alignment", "zero_hpz_partition_size", "zero_quantized_weights",
        "zero_quantized_nontrainable_weights", "zero_quantized_gradients", "memory_efficient_linear", "pipeline_loading_checkpoint",
        "override_module_apply", "log_trace_cache_warnings", "enable_sanity_checks", "save_muon_momentum_buffer_in_memory",
        "leaf_module",
        *_STAGE3, *(f"stage3_{key}" for key in _STAGE3),
    ),
    "bf16": (
        "enabled", "immediate_grad_update", "check_grad_overflow", "bf16_master_weights_and_grads", "bf16_optimizer_states",
    ),
    "fp16": (
        "enabled", "auto_cast", "loss_scale", "initial_scale_power", "loss_scale_window", "hysteresis", "consecutive_hysteresis",
        "min_loss_scale", "fp16_master_weights_and_grads",
    ),
    "tensor_parallel": (
        "dtype", "autotp_size", "tp_overlap_comm", "vocab_parallel_lm_head", "vocab_parallel_ce_backend", "tensor_parallel", "tp",
        "injection_policy_tuple", "partition_config", "preset_model", "keep_module_on_host", "replace_with_kernel_inject",
        "kernel_inject",
    ),
    "zero_optimization.offload_param": ("device", "nvme_path", "buffer_count", "buffer_size", "max_in_cpu", "pin_memory"),
    "zero_optimization.offload_optimizer": (
        "device", "nvme_path", "buffer_count", "pin_memory", "pipeline_read", "pipeline_write", "fast_init", "ratio", "super_offload",
        "cpuadam_cores_perc",
    ),
}
"""Blocks whose keys are closed: DeepSpeed refuses any other. Source: runtime/zero/config.py and offload_config.py,
precision_config.py, tensor_parallel/config.py and config_utils.py (extra="forbid")."""

OPEN_BLOCKS: dict[str, tuple[str, ...]] = {
    "optimizer": ("type", "params", "legacy_fusion"),
    "scheduler": ("type", "params"),
    "data_types": ("grad_accum_dtype",),
    "activation_checkpointing": (
        "partition_activations", "number_checkpoints", "contiguous_memory_optimization", "synchronize_checkpoint_boundary", "profile",
        "cpu_checkpointing",
    ),
    "pipeline": (
        "stages", "partition", "seed_layers", "activation_checkpoint_interval", "pipe_partitioned", "grad_partitioned", "use_reentrant",
    ),
}
"""Blocks of which DeepSpeed reads these keys and passes over any other. Source: runtime/config.py, pipe/engine.py and
activation_checkpointing/config.py."""

REMOVED = (
    "nebula", "compression_training", "amp", "quantize_training", "sparse_gradients", "eigenvalue", "sparse_attention", "elasticity",
    "graph_harvesting", "curriculum_learning", "progressive_layer_drop",
    "zero_optimization.mics_shard_size", "zero_optimization.mics_hierarchical_params_gather", "zero_optimization.zeropp_loco_param",
)
"""Keys that DeepSpeed 0.19 stops at. Source: runtime/config.py, _reject_removed_config_keys."""
# fmt: on


def inner_keys(settings: Mapping[str, Any], blocks: Mapping[str, tuple[str, ...]]) -> list[str]:
    """The keys inside some blocks that these do not have, behind dots; ``settings``: keys with those of tables behind a dot.

    >>> inner_keys({"optimizer.type": "Adam", "optimizer.lr": 1e-4, "zero_optimization.offload_param": {"to": "cpu"}}, OPEN_BLOCKS)
    ['optimizer.lr']
    >>> inner_keys({"optimizer.type": "Adam", "zero_optimization.offload_param": {"to": "cpu"}}, BLOCKS)
    ['zero_optimization.offload_param.to']
    """
    deeper = {f"{key}.{inner}": 0 for key, value in settings.items() if key in blocks and isinstance(value, dict) for inner in value}
    found = []
    for key in (*settings, *deeper):
        block, dot, name = key.rpartition(".") if key in deeper else key.partition(".")
        if dot and name and block in blocks and name not in blocks[block] and key not in REMOVED:
            found.append(key)
    return found
