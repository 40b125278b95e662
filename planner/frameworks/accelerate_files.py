"""Rules about accelerate's file itself, whichever framework it hands the run to."""

from __future__ import annotations

from planner.frameworks.accelerate_read import PREFIX, SCRIPT_KIND, SIZES, YAML_KIND
from planner.frameworks.config import ILLEGAL, TRAP, Config, SettingRule
from planner.frameworks.files import each_told, hint, shown
from planner.scenario import Job

KINDS = (YAML_KIND, SCRIPT_KIND)

# fmt: off
TOP_KEYS = (
    "command_file", "commands", "compute_environment", "debug", "deepspeed_config", "distributed_type", "downcast_bf16",
    "dynamo_backend", "dynamo_config", "enable_cpu_affinity", "fp16", "fp8_config", "fsdp_config", "gpu_ids", "machine_rank",
    "main_process_ip", "main_process_port", "main_training_function", "megatron_lm_config", "mixed_precision", "mpirun_config",
    "num_machines", "num_processes", "parallelism_config", "rdzv_backend", "same_network", "tpu_env", "tpu_name",
    "tpu_use_cluster", "tpu_use_sudo", "tpu_vm", "tpu_zone", "use_cpu",
)
"""Source: commands/config/config_args.py, fields of ClusterConfig and the older keys that process_config replaces."""

FSDP_KEYS = (
    "fsdp_activation_checkpointing", "fsdp_activation_checkpointing_offload", "fsdp_auto_wrap_policy", "fsdp_backward_prefetch",
    "fsdp_cpu_ram_efficient_loading", "fsdp_forward_prefetch", "fsdp_ignored_modules", "fsdp_min_num_params", "fsdp_offload_params",
    "fsdp_reshard_after_forward", "fsdp_sharding_strategy", "fsdp_state_dict_type", "fsdp_sync_module_states",
    "fsdp_transformer_layer_cls_to_wrap", "fsdp_use_orig_params", "fsdp_version",
)
"""Source: commands/launch.py and utils/launch.py, what becomes an environment variable."""

DEEPSPEED_KEYS = (
    "deepspeed_config_file", "deepspeed_exclusion_filter", "deepspeed_hostfile", "deepspeed_inclusion_filter",
    "deepspeed_moe_layer_cls_names", "deepspeed_multinode_launcher", "gradient_accumulation_steps", "gradient_clipping",
    "offload_optimizer_device", "offload_optimizer_nvme_path", "offload_param_device", "offload_param_nvme_path",
    "zero3_init_flag", "zero3_save_16bit_model", "zero_stage",
)
"""Source: commands/launch.py, the arguments of DeepSpeed, which the block fills in."""
# fmt: on
MESH_KEYS = (
    *(PREFIX + key for key in SIZES),
    *(PREFIX + key for key in ("cp_backend", "cp_comm_strategy", "sp_backend", "sp_seq_length", "sp_seq_length_is_variable")),
    f"{PREFIX}sp_attn_implementation",
)


def block(config: Config, name: str) -> dict[str, object]:
    """The keys of a block of the file."""
    return {key.partition(".")[2]: value for key, value in config.settings.items() if key.startswith(f"{name}.")}


def unknown_top(config: Config, job: Job) -> str:
    """accelerate refuses top-level keys that it does not know."""
    if config.kind not in KINDS:
        return ""
    names = dict.fromkeys(key.split(".")[0] for key in config.settings if not key.startswith("--"))
    strange = [name for name in names if name not in TOP_KEYS]
    return each_told(strange, lambda name: f"{shown(name)} is no key of accelerate{hint(name, TOP_KEYS)}")


INNER_KEYS = {"fsdp_config": FSDP_KEYS, "parallelism_config": MESH_KEYS, "deepspeed_config": DEEPSPEED_KEYS}
"""Block -> its keys that reach somebody."""


def unknown_inner(config: Config, job: Job) -> str:
    """Keys inside the blocks that reach nobody."""
    if config.kind not in KINDS:
        return ""
    strange = [
        f"{name}.{key}"
        for name, known in INNER_KEYS.items()
        for key in block(config, name)
        if key not in known and not (name == "fsdp_config" and f"fsdp_{key}" in known)
    ]
    return each_told(strange, _read_by_nobody)


def _read_by_nobody(place: str) -> str:
    name, _, key = place.partition(".")
    known, whole = INNER_KEYS[name], PREFIX + key
    return f"{name}.{shown(key)} is read by nobody{f'; write {whole}' if whole in known else hint(key, known)}"


def whole_machines(config: Config, job: Job) -> str:
    """Every machine starts the same number of processes, rounded down."""
    processes, machines = config.settings.get("num_processes"), config.settings.get("num_machines")
    if config.kind not in KINDS or not isinstance(processes, int) or not isinstance(machines, int) or machines < 1:
        return ""
    if processes % machines == 0:
        return ""
    each = processes // machines
    return (
        f"num_processes = {processes} on num_machines = {machines}: {each} start on each, {each * machines} in all; "
        f"nearest: {each * machines}, {(each + 1) * machines}"
    )


def stated_processes(config: Config, job: Job) -> str:
    """The file's number of processes is that of the GPUs."""
    processes = config.settings.get("num_processes")
    if config.kind not in KINDS or not isinstance(processes, int) or processes in (-1, job.num_gpus):
        return ""
    return f"num_processes = {processes} but {job.num_gpus} GPUs are asked about: that number is what starts"


FILE_RULES: tuple[SettingRule, ...] = (
    SettingRule("A20", "top-level keys are accelerate's", "commands/config/config_args.py, from_yaml_file", ILLEGAL, unknown_top),
    SettingRule("A21", "keys inside the file's blocks are the launcher's", "commands/launch.py", TRAP, unknown_inner),
    SettingRule("A22", "num_processes divides by num_machines", "utils/launch.py, prepare_multi_gpu_env", TRAP, whole_machines),
    SettingRule("A23", "num_processes is the number of GPUs", "commands/launch.py", TRAP, stated_processes),
)
