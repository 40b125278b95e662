"""The keys of torchtitan's configurations: TOML tables of 0.2, command-line flags of 0.3, with what they are when not stated.

Source: 0.2, config/job_config.py; 0.3, config/configs.py, trainer.py and the Config classes of its components.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from planner.frameworks.files import Source, hint, shown, truth, whole_number

OLD_KIND = "torchtitan 0.2 TOML"
NEW_KIND = "torchtitan 0.3 command line"
OLD_COMMAND = "torchtitan 0.2 command line"

LOADER = "num_workers persistent_workers pin_memory prefetch_factor"
STAGES = (
    "pipeline_parallel_degree module_fqns_per_model_part pipeline_parallel_first_stage_less_layers "
    "pipeline_parallel_last_stage_less_layers pipeline_parallel_layers_per_stage pipeline_parallel_schedule "
    "pipeline_parallel_schedule_csv pipeline_parallel_microbatch_size"
)
DEGREES = (
    "data_parallel_replicate_degree data_parallel_shard_degree fsdp_reshard_after_forward tensor_parallel_degree "
    "context_parallel_degree context_parallel_load_balancer expert_parallel_degree"
)
BATCH = (
    "local_batch_size global_batch_size seq_len max_norm steps enable_cpu_offload dtype mixed_precision_param "
    "mixed_precision_reduce gc_freq gc_debug"
)
COMM = "init_timeout_seconds train_timeout_seconds trace_buf_size save_traces_folder save_traces_file_prefix mode"

OLD_KEYS: Mapping[str, str] = {
    "job": "config_file dump_folder description print_config save_config_file custom_config_module",
    "profiling": "enable_profiling save_traces_folder profile_freq profiler_active profiler_warmup enable_memory_snapshot "
    "save_memory_snapshot_folder",
    "metrics": "log_freq enable_tensorboard disable_color_printing save_tb_folder save_for_all_ranks enable_wandb",
    "model": "name flavor hf_assets_path tokenizer_path converters print_after_conversion",
    "optimizer": "name lr beta1 beta2 eps weight_decay implementation early_step_in_backward",
    "lr_scheduler": "warmup_steps total_steps decay_ratio decay_type min_lr_factor",
    "training": f"dataset dataset_path {BATCH}",
    "training.dataloader": LOADER,
    "parallelism": f"{DEGREES} {STAGES} disable_loss_parallel enable_async_tensor_parallel "
    "pipeline_parallel_expert_parallel_overlap context_parallel_rotate_method expert_tensor_parallel_degree "
    "expert_parallel_comm_backend",
    "checkpoint": "enable enable_ft_dataloader_checkpoints folder interval initial_load_path initial_load_model_only "
    "initial_load_in_hf initial_load_in_hf_quantized last_save_model_only last_save_in_hf export_dtype async_mode "
    "keep_latest_k load_step exclude_from_loading enable_first_step_checkpoint create_seed_checkpoint load_only",
    "activation_checkpoint": "mode selective_ac_option per_op_sac_force_recompute_mm_shapes_by_fqns early_stop memory_budget "
    "visualize_memory_budget_pareto preserve_rng_state determinism_check debug",
    "compile": "enable components backend",
    "quantize.linear.float8": "enable_fsdp_float8_all_gather precompute_float8_dynamic_scale_for_fsdp recipe_name filter_fqns emulate",
    "quantize.linear.mx": "mxfp8_dim1_cast_kernel_choice recipe_name filter_fqns",
    "quantize.grouped_mm.float8": "fqns",
    "quantize.grouped_mm.mx": "recipe_name fqns",
    "comm": COMM,
    "memory_estimation": "enable disable_fake_mode",
    "fault_tolerance": "enable process_group process_group_timeout_ms replica_id group_size min_replica_size semi_sync_method",
    "experimental": "custom_import custom_args_module",
    "validation": "enable dataset dataset_path local_batch_size seq_len freq steps",
    "validation.dataloader": LOADER,
    "debug": "seed deterministic deterministic_warn_only moe_force_load_balance",
}
NEW_KEYS: Mapping[str, str] = {
    "training": f"{BATCH} disable_cuda_graphs",
    "parallelism": f"{DEGREES} {STAGES} enable_fsdp_symm_mem enable_sequence_parallel spmd_backend context_parallel_ptrr_mask_key",
    "compile": "enable enable_async_tensor_parallel components backend",
    "activation_checkpoint": "mode preserve_rng_state determinism_check debug force_recompute_mm_shapes_by_fqns memory_budget "
    "visualize_memory_budget_pareto",
    "comm": COMM,
    "debug": "seed spmd_typechecking deterministic deterministic_warn_only moe_force_load_balance detect_anomaly batch_invariant "
    "print_config save_config_file enable_structured_logging",
}
OPEN_SECTIONS = (
    "profiler",
    "metrics",
    "tokenizer",
    "dataloader",
    "optimizer",
    "lr_scheduler",
    "checkpoint",
    "validator",
    "override",
    "loss",
)
"""Sections of 0.3 whose keys depend on the configuration function: they say nothing about layouts and are not checked."""
NEW_TOP = ("module", "config", "hf_assets_path", "dump_folder")

WHOLE = {
    "parallelism.data_parallel_replicate_degree": 1,
    "parallelism.data_parallel_shard_degree": -1,
    "parallelism.tensor_parallel_degree": 1,
    "parallelism.context_parallel_degree": 1,
    "parallelism.expert_parallel_degree": 1,
    "parallelism.expert_tensor_parallel_degree": 1,
    "parallelism.pipeline_parallel_degree": 1,
    "parallelism.pipeline_parallel_first_stage_less_layers": 1,
    "parallelism.pipeline_parallel_last_stage_less_layers": 1,
    "parallelism.pipeline_parallel_layers_per_stage": 0,
    "parallelism.pipeline_parallel_microbatch_size": 1,
    "training.local_batch_size": 8,
    "training.global_batch_size": -1,
    "training.seq_len": 2048,
}
SWITCHES = {
    "parallelism.enable_sequence_parallel": True,
    "parallelism.enable_async_tensor_parallel": False,
    "parallelism.pipeline_parallel_expert_parallel_overlap": True,
    "training.disable_cuda_graphs": False,
    "training.enable_cpu_offload": False,
    "compile.enable": False,
    "compile.enable_async_tensor_parallel": False,
}
TEXTS = {
    "parallelism.fsdp_reshard_after_forward": "default",
    "parallelism.pipeline_parallel_schedule": "1F1B",
    "parallelism.pipeline_parallel_schedule_csv": "",
    "training.dtype": "float32",
    "training.mixed_precision_param": "bfloat16",
    "activation_checkpoint.mode": "selective",
    "activation_checkpoint.selective_ac_option": "2",
    "model.name": "llama3",
    "model.flavor": "debugmodel",
    "optimizer.name": "AdamW",
    "quantize.linear.float8.recipe_name": "",
}
LISTS: Mapping[str, tuple[str, ...]] = {"compile.components": ("model", "loss"), "model.converters": ()}
MODULE_LISTS = "parallelism.module_fqns_per_model_part"
LEGAL_WORDS: Mapping[str, tuple[str, ...]] = {
    "parallelism.fsdp_reshard_after_forward": ("default", "always", "never"),
    "training.dtype": ("bfloat16", "float32"),
    "training.mixed_precision_param": ("bfloat16", "float32"),
}


def setting(settings: Mapping[str, Any], key: str) -> Any:
    """A setting as stated, else as torchtitan takes it.

    >>> setting({}, "training.seq_len"), setting({"training.seq_len": 4096}, "training.seq_len")
    (2048, 4096)
    """
    for defaults in (WHOLE, SWITCHES, TEXTS, LISTS):
        if key in defaults:
            return settings.get(key, defaults[key])
    return settings.get(key)


def typed(source: Source, key: str, value: Any) -> Any:
    """A file's or flag's value in the type that its key has. Raises InputError naming what is legal."""
    if key in WHOLE:
        if value in ("None", "none", None) and key.endswith("layers_per_stage"):
            return 0
        return whole_number(source, key, value, least=-1, most=1 << 30)
    if key in SWITCHES:
        return truth(source, key, value)
    if key == MODULE_LISTS:
        return None if value in ("None", None) else _module_lists(source, value)
    if key in LISTS:
        return _names(source, key, value)
    if key in TEXTS:
        if value is None and key.startswith("quantize"):
            return ""
        if not isinstance(value, (str, int)) or isinstance(value, bool):
            raise source.fail(f"{key} = {shown(value)} must be a text")
        legal = LEGAL_WORDS.get(key, ())
        if legal and value not in legal:
            raise source.fail(f"{key} = {shown(value)} must be one of {', '.join(legal)}{hint(value, legal)}")
        return str(value)
    return value


def _names(source: Source, key: str, value: Any) -> list[str]:
    listed = value.split(",") if isinstance(value, str) else value
    if not isinstance(listed, list) or not all(isinstance(item, str) for item in listed):
        raise source.fail(f"{key} = {shown(value)} must be a list of texts")
    return [item for item in listed if item]


def _module_lists(source: Source, value: Any) -> list[list[str]]:
    parts = [value] if isinstance(value, str) else value
    if not isinstance(parts, list) or not parts:
        raise source.fail(f"{MODULE_LISTS} = {shown(value)} must be a list of lists of module names")
    return [_names(source, MODULE_LISTS, part) for part in parts]


def has_key(key: str, kind: str) -> bool:
    """Whether torchtitan has a key."""
    new = kind == NEW_KIND
    section, _, name = key.rpartition(".")
    if new and (section.partition(".")[0] in OPEN_SECTIONS or (not section and name in NEW_TOP)):
        return True
    return name in (NEW_KEYS if new else OLD_KEYS).get(section, "").split()


def unknown_key(key: str, kind: str) -> str:
    """What is wrong with a key that torchtitan does not have, with the nearest that it has; "" where it has it.

    >>> unknown_key("training.seqlen", OLD_KIND), unknown_key("training.steps", OLD_KIND)
    ("[training] has no key 'seqlen'; did you mean 'seq_len'?", '')
    """
    if has_key(key, kind):
        return ""
    new = kind == NEW_KIND
    section, _, name = key.rpartition(".")
    tables = NEW_KEYS if new else OLD_KEYS
    if section not in tables:
        return f"there is no section {shown(section or name)}{hint(section or name, [*tables, *(OPEN_SECTIONS if new else ())])}"
    return f"[{section}] has no key {shown(name)}{hint(name, tables[section].split())}"
