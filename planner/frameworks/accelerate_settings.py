"""Rules about accelerate's own settings that no layout expresses: the mesh, FSDP 1 and 2, precision."""

from __future__ import annotations

from planner.frameworks.accelerate_files import FILE_RULES, block
from planner.frameworks.accelerate_read import PREFIX, fsdp_keys
from planner.frameworks.config import ILLEGAL, TRAP, Config, SettingRule
from planner.frameworks.files import shown
from planner.frameworks.trainer import RECOMPUTE_FLAGS
from planner.scenario import Job
from solver.problem import divisors

MESH = "parallelism_config.py"
PLUGIN = "utils/dataclasses.py, FullyShardedDataParallelPlugin"
LAUNCH = "utils/launch.py, prepare_multi_gpu_env"
TRUTHS = ("true", "false", "yes", "no", "1", "0", "y", "n", "t", "f", "on", "off")
"""Words that accelerate takes for yes or no. Source: utils/environment.py, str_to_bool."""
SIZES = ("dp_replicate_size", "dp_shard_size", "tp_size", "cp_size", "sp_size")


def mesh_sizes(config: Config) -> dict[str, int]:
    """The sizes of the mesh, 1 where they are not stated."""
    stated = block(config, "parallelism_config")
    sizes = {key: stated.get(PREFIX + key, 1) for key in SIZES}
    return {key: value if isinstance(value, int) and not isinstance(value, bool) else 1 for key, value in sizes.items()}


def has_mesh(config: Config) -> bool:
    """Whether the file states a mesh."""
    return bool(block(config, "parallelism_config"))


def fsdp_of(config: Config) -> dict[str, object]:
    """The keys of fsdp_config, each with its prefix; empty where FSDP does not shard."""
    return fsdp_keys(block(config, "fsdp_config")) if config.settings.get("distributed_type") == "FSDP" else {}


def version_of(config: Config) -> int:
    """Which FSDP; 0 where none shards."""
    if config.settings.get("distributed_type") != "FSDP":
        return 0
    return 2 if str(fsdp_of(config).get("fsdp_version", 1)) == "2" else 1


def product(config: Config, job: Job) -> str:
    """The mesh takes all processes: accelerate says so only once training starts."""
    sizes = mesh_sizes(config)
    total = 1
    for size in sizes.values():
        total *= size
    if not has_mesh(config) or total in (1, job.num_gpus):
        return ""
    told = " x ".join(f"{key} {size}" for key, size in sizes.items() if size > 1)
    others = total // sizes["dp_shard_size"]
    legal = f"; dp_shard_size = {job.num_gpus // others} fits" if job.num_gpus % others == 0 else ""
    return f"{told} = {total}, must be num_processes = {job.num_gpus}{legal}"


def lone_copies(config: Config, job: Job) -> str:
    """Tensor and context groups do not go with pure copies."""
    sizes = mesh_sizes(config)
    if max(sizes["tp_size"], sizes["cp_size"]) == 1 or sizes["dp_replicate_size"] == 1 or sizes["dp_shard_size"] > 1:
        return ""
    copies = sizes["dp_replicate_size"]
    return (
        f"tp_size {sizes['tp_size']}, cp_size {sizes['cp_size']} with dp_replicate_size = {copies} and dp_shard_size = 1: "
        f"shard over the copies, dp_replicate_size = 1 and dp_shard_size = {copies}"
    )


def two_splits(config: Config, job: Job) -> str:
    """A sequence is split one way."""
    sizes = mesh_sizes(config)
    if sizes["cp_size"] == 1 or sizes["sp_size"] == 1:
        return ""
    return f"cp_size = {sizes['cp_size']} and sp_size = {sizes['sp_size']}: one of them must be 1"


def mesh_without_fsdp2(config: Config, job: Job) -> str:
    """A mesh with FSDP needs its second version."""
    if version_of(config) != 1 or not has_mesh(config) or max(mesh_sizes(config).values()) == 1:
        return ""
    return "parallelism_config with fsdp_version = 1: set fsdp_version = 2"


def unsharded(config: Config, job: Job) -> str:
    """FSDP2 needs a dimension of the mesh to shard over."""
    sizes = mesh_sizes(config)
    if version_of(config) != 2 or not has_mesh(config) or max(sizes.values()) == 1 or max(sizes["dp_shard_size"], sizes["cp_size"]) > 1:
        return ""
    fits = [size for size in divisors(job.num_gpus) if size > 1]
    return f"FSDP with dp_shard_size = cp_size = 1 has nothing to shard over; legal: dp_shard_size = {', '.join(map(str, fits[:12]))}"


def resharding(config: Config, job: Job) -> str:
    """FSDP2 takes a yes or no."""
    value = fsdp_of(config).get("fsdp_reshard_after_forward")
    if version_of(config) != 2 or value is None or isinstance(value, bool) or str(value).lower() in TRUTHS:
        return ""
    meant = "false" if str(value).upper() == "SHARD_GRAD_OP" else "true"
    return f"fsdp_reshard_after_forward = {shown(value)} with fsdp_version = 2: must be true or false; nearest: {meant}"


def strategy_ignored(config: Config, job: Job) -> str:
    """FSDP2 does not read the strategy of FSDP 1, and FSDP 1 not the switch of FSDP2."""
    keys, version = fsdp_of(config), version_of(config)
    if version == 2 and "fsdp_sharding_strategy" in keys:
        return f"fsdp_sharding_strategy = {shown(keys['fsdp_sharding_strategy'])} is ignored by FSDP2: fsdp_reshard_after_forward decides"
    if version == 1 and "fsdp_reshard_after_forward" in keys:
        return "fsdp_reshard_after_forward is ignored by FSDP 1: fsdp_sharding_strategy decides"
    return ""


def recompute_twice(config: Config, job: Job) -> str:
    """Either FSDP or the training program recomputes, not both."""
    on = fsdp_of(config).get("fsdp_activation_checkpointing") is True
    flags = [flag for flag in RECOMPUTE_FLAGS if str(config.settings.get(f"--{flag}", "false")).lower() in ("true", "1")]
    return f"fsdp_activation_checkpointing = true and --{flags[0]} are both on: leave one" if on and flags else ""


def recompute_contradicted(config: Config, job: Job) -> str:
    """The block says once whether it recomputes: a key with its prefix and one without are the same."""
    inner = block(config, "fsdp_config")
    own = inner.get("activation_checkpointing"), inner.get("fsdp_activation_checkpointing")
    if None in own or own[0] == own[1]:
        return ""
    return "fsdp_config states activation_checkpointing and fsdp_activation_checkpointing, one true and one false: leave one"


def offloaded_checkpoints(config: Config, job: Job) -> str:
    """Offloading checkpoints needs checkpoints, and FSDP2."""
    keys = fsdp_of(config)
    if keys.get("fsdp_activation_checkpointing_offload") is not True:
        return ""
    if keys.get("fsdp_activation_checkpointing") is not True:
        return "fsdp_activation_checkpointing_offload needs fsdp_activation_checkpointing = true"
    return "" if version_of(config) == 2 else "fsdp_activation_checkpointing_offload needs fsdp_version = 2"


def forward_prefetch(config: Config, job: Job) -> str:
    """FSDP2 prefetches by itself: the launcher's variable reaches nobody."""
    on = fsdp_of(config).get("fsdp_forward_prefetch") is True
    return "fsdp_forward_prefetch = true is ignored by FSDP2, which prefetches by itself" if on and version_of(config) == 2 else ""


def lean_loading(config: Config, job: Job) -> str:
    """Loading on one process needs the others to be told."""
    keys = fsdp_of(config)
    if keys.get("fsdp_cpu_ram_efficient_loading") is not True or keys.get("fsdp_sync_module_states", True) is not False:
        return ""
    return "fsdp_cpu_ram_efficient_loading needs fsdp_sync_module_states = true"


def one_unit(config: Config, job: Job) -> str:
    """Without a wrapping policy the whole model is gathered at once."""
    policy = fsdp_of(config).get("fsdp_auto_wrap_policy", "NO_WRAP")
    if not version_of(config) or str(policy).upper() != "NO_WRAP":
        return ""
    return "fsdp_auto_wrap_policy is not set: FSDP gathers the whole model at once; set TRANSFORMER_BASED_WRAP"


def single_precision(config: Config, job: Job) -> str:
    """Training in fp32 is rarely meant."""
    value = config.settings.get("mixed_precision")
    if "distributed_type" not in config.settings or value not in (None, "no", False) or config.request.precision:
        return ""
    return "mixed_precision is off: training runs in the weights' own type, fp32 for most; set bf16"


SETTING_RULES: tuple[SettingRule, ...] = (
    *FILE_RULES,
    SettingRule("A24", "the mesh's sizes multiply to num_processes", f"{MESH}, _validate_accelerator", ILLEGAL, product),
    SettingRule("A25", "tensor and context groups do not go with pure copies", f"{MESH}, __post_init__", ILLEGAL, lone_copies),
    SettingRule("A26", "cp_size or sp_size is 1", f"{MESH}, __post_init__", ILLEGAL, two_splits),
    SettingRule("A27", "a mesh with FSDP needs fsdp_version 2", f"{MESH}, _validate_accelerator", ILLEGAL, mesh_without_fsdp2),
    SettingRule("A28", "FSDP2 has a dimension to shard over", f"{MESH}, _validate_accelerator", ILLEGAL, unsharded),
    SettingRule("A29", "fsdp_reshard_after_forward is true or false under FSDP2", PLUGIN, ILLEGAL, resharding),
    SettingRule("A30", "the sharding key is that of its FSDP version", PLUGIN, TRAP, strategy_ignored),
    SettingRule("A31", "FSDP or the training program recomputes, not both", "transformers, trainer.py", ILLEGAL, recompute_twice),
    SettingRule("A37", "activation checkpointing is stated once", "commands/launch.py", TRAP, recompute_contradicted),
    SettingRule("A32", "offloaded checkpoints need checkpoints and FSDP2", PLUGIN, ILLEGAL, offloaded_checkpoints),
    SettingRule("A33", "fsdp_forward_prefetch is for FSDP 1", PLUGIN, TRAP, forward_prefetch),
    SettingRule("A34", "efficient loading synchronises module states", LAUNCH, ILLEGAL, lean_loading),
    SettingRule("A35", "layers are wrapped one by one", PLUGIN, TRAP, one_unit),
    SettingRule("A36", "precision is 16 bits", "commands/launch.py", TRAP, single_precision),
)
