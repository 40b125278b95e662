"""Reads accelerate's YAML, and launch scripts that hand it to accelerate's launcher.

Source of keys: accelerate/commands/config/config_args.py (ClusterConfig) and commands/launch.py (the launcher's parser).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from planner.frameworks.config import Config
from planner.frameworks.deepspeed_json import Parts, flat, read_json, stated
from planner.frameworks.files import Source, listed, open_source, shown, table, truth, whole_number, word_of
from planner.frameworks.reading import Reader
from planner.frameworks.shell import read_script
from planner.frameworks.trainer import behind_program, beside, config_of_parts, flags_of, known, read_flags
from planner.frameworks.trainer import is_script as can_be_script

YAML_KIND = "accelerate configuration"
SCRIPT_KIND = "launch script of accelerate"
TELLING = ("distributed_type", "compute_environment", "fsdp_config", "parallelism_config", "deepspeed_config")

KINDS = ("NO", "MULTI_GPU", "FSDP", "DEEPSPEED")
"""Kinds of distribution that the planner knows, of accelerate's."""
PREFIX = "parallelism_config_"
SIZES = {
    "dp_replicate_size": "",
    "dp_shard_size": "",
    "tp_size": "tensor_parallel",
    "cp_size": "context_parallel",
    "sp_size": "context_parallel",
}
"""Key of parallelism_config behind its prefix -> axis; "" = part of data_parallel."""
STRATEGIES = {"FULL_SHARD": 3, "SHARD_GRAD_OP": 2, "NO_SHARD": 0, "HYBRID_SHARD": 3, "HYBRID_SHARD_ZERO2": 2}
"""Sharding strategy of FSDP 1 -> ZeRO stage; it may also be given by its number. Source: utils/constants.py, FSDP_SHARDING_STRATEGY."""
ALL_THERE_ARE = ("num_processes", "-1")
"""A machine that uses all its GPUs."""
PRECISIONS = {"bf16": "bf16", "fp16": "fp16", "fp8": "fp8"}


def is_yaml(source: Source) -> bool:
    """Whether a file is for accelerate."""
    return any(key in (source.data or {}) for key in TELLING) and "num_hidden_layers" not in (source.data or {})


def is_script(source: Source) -> bool:
    """Whether a script calls accelerate's launcher."""
    return can_be_script(source) and ("accelerate launch" in source.text or "accelerate-launch" in source.text)


def read_yaml(source: Source, num_gpus: int | None) -> Config:
    """accelerate's YAML. Raises InputError."""
    parts = Parts(source)
    framework = fill(parts, num_gpus)
    parts.assumed.append("model, sequence and batch are not in accelerate's file: give --model, --seq-len, --global-batch")
    return config_of_parts(parts, YAML_KIND, framework)


def read_launch(source: Source, num_gpus: int | None) -> Config:
    """A script with the file that it hands to the launcher. Raises InputError."""
    script, parts = read_script(source), Parts(source)
    launcher, flags = (flags_of(words) for words in behind_program(script.words))
    named, told = known(launcher, "config_file"), launcher_words(source, launcher)
    path = None if named is None else beside(source, script, named)
    framework = "accelerate"
    if path is None:
        parts.assumed.append("accelerate's file is not beside the script: what only it says is open")
    else:
        parts.source = open_source(path)
        parts.read.append(f"{path}: the file that the script hands to accelerate")
        framework = fill(parts, num_gpus or told.get("num_processes"))
        parts.source = source
    read_launcher_words(parts, told)
    others = [f"--{name}" for name in launcher if name not in (*OF_LAUNCHER, *PER_RUN)]
    if others:
        parts.ignored.append(listed(others))
    read_flags(parts, flags, num_gpus or parts.request.get("num_gpus"))
    return config_of_parts(parts, SCRIPT_KIND, framework)


OF_LAUNCHER = {"num_processes": "num_gpus", "num_machines": "gpus_per_node", "mixed_precision": "precision", "config_file": ""}
"""The launcher's flags that are read -> what they state; "" = what names the file."""
PER_RUN = ("machine_rank", "main_process_ip", "main_process_port", "rdzv_backend", "same_network")


def launcher_words(source: Source, launcher: Mapping[str, str]) -> dict[str, Any]:
    """What the launcher's own flags state; what only the shell knows is left out. Raises InputError."""
    told: dict[str, Any] = {}
    for name, most in (("num_processes", 10_000_000), ("num_machines", 1_000_000)):
        value = known(launcher, name)
        if value is not None and (name, value) != ALL_THERE_ARE:
            told[name] = whole_number(source, f"--{name}", value, most=most)
    if (word := known(launcher, "mixed_precision")) is not None:
        told["mixed_precision"] = word_of(source, "--mixed_precision", word, ("no", *PRECISIONS))
    return told


def read_launcher_words(parts: Parts, told: Mapping[str, Any]) -> None:
    """What the launcher's flags state, put over what the file says: they win. Source: commands/launch.py, _validate_launch_command."""
    parts.settings |= told
    parts.read += [f"--{name} {value}: {OF_LAUNCHER[name]}" for name, value in told.items()]
    processes, machines = parts.settings.get("num_processes"), parts.settings.get("num_machines")
    if "num_processes" in told:
        parts.request["num_gpus"] = told["num_processes"]
    if told.keys() & {"num_processes", "num_machines"} and isinstance(processes, int) and isinstance(machines, int):
        parts.request.pop("gpus_per_node", None)
        if processes >= 1 and machines >= 1 and processes % machines == 0:
            parts.request["gpus_per_node"] = processes // machines
    if "mixed_precision" in told:
        parts.request["precision"] = PRECISIONS.get(told["mixed_precision"])


def fill(parts: Parts, num_gpus: int | None) -> str:
    """Everything that accelerate's file says, put into the parts; which framework shards. Raises InputError."""
    source, data = parts.source, parts.source.data or {}
    parts.settings |= flat(data)
    kind = word_of(source, "distributed_type", data.get("distributed_type", "NO"), KINDS)
    parts.note("distributed_type", kind, "who shards")
    read_cluster(parts, data)
    read_precision(parts, data)
    if kind == "DEEPSPEED":
        read_deepspeed(parts, data, num_gpus or parts.request.get("num_gpus"))
        read_sizes(parts, data)
        return "deepspeed"
    read_sizes(parts, data)
    if kind == "FSDP":
        read_fsdp(parts, data)
    else:
        parts.layout["zero_stage"] = 0
        parts.assumed.append(f"distributed_type = {kind}: every GPU holds everything, zero_stage = 0")
    return "accelerate"


def read_cluster(parts: Parts, data: Mapping[str, Any]) -> None:
    """Processes are GPUs, machines nodes. Raises InputError."""
    number, machines = data.get("num_processes"), data.get("num_machines")
    if number is not None and number != -1:
        parts.request["num_gpus"] = whole_number(parts.source, "num_processes", number, most=10_000_000)
        parts.note("num_processes", number, "num_gpus")
        if machines is not None:
            nodes = whole_number(parts.source, "num_machines", machines, most=1_000_000)
            if parts.request["num_gpus"] % nodes == 0:
                parts.request["gpus_per_node"] = parts.request["num_gpus"] // nodes
                parts.note("num_machines", machines, "gpus_per_node")


def read_precision(parts: Parts, data: Mapping[str, Any]) -> None:
    """The precision of autocast. Raises InputError."""
    word = data.get("mixed_precision")
    word = "no" if word is False or word is None else word  # YAML reads an unquoted no as false
    word = word_of(parts.source, "mixed_precision", word, ("no", *PRECISIONS))
    if word in PRECISIONS:
        parts.request["precision"] = PRECISIONS[word]
        parts.note("mixed_precision", word, "precision")
    else:
        parts.assumed.append("mixed_precision is off: precision is the training program's")


def read_sizes(parts: Parts, data: Mapping[str, Any]) -> None:
    """The mesh. Keys without their prefix reach nobody. Raises InputError."""
    block = table(parts.source, data, "parallelism_config")
    sizes: dict[str, int] = {}
    for key, axis in SIZES.items():
        value = block.get(PREFIX + key)
        if value is None:
            continue
        sizes[key] = whole_number(parts.source, f"parallelism_config.{PREFIX}{key}", value)
        if axis and sizes[key] > 1:
            parts.layout[axis] = sizes[key]
        parts.note(f"parallelism_config.{PREFIX}{key}", value, axis or "data_parallel")
    replicas, shards = sizes.get("dp_replicate_size", 1), sizes.get("dp_shard_size", 1)
    if "dp_replicate_size" in sizes or "dp_shard_size" in sizes:
        parts.layout["data_parallel"] = replicas * shards
        if replicas > 1 and shards > 1:
            parts.assumed.append(
                f"weights are sharded over {shards} ranks and copied {replicas} times: memory counts shards over all of them"
            )
    for axis in ("tensor_parallel", "context_parallel", "pipeline_parallel", "expert_parallel"):
        parts.layout.setdefault(axis, 1)


def read_fsdp(parts: Parts, data: Mapping[str, Any]) -> None:
    """FSDP 1 or 2: what is sharded, and whether every layer is recomputed. Raises InputError."""
    source = parts.source
    block = fsdp_keys(table(source, data, "fsdp_config"))
    version = whole_number(source, "fsdp_config.fsdp_version", block.get("fsdp_version", 1), most=2)
    parts.note("fsdp_config.fsdp_version", version, "which FSDP")
    parts.layout["zero_stage"] = stage_two(parts, block) if version == 2 else stage_one(parts, block)
    on = truth(source, "fsdp_config.fsdp_activation_checkpointing", block.get("fsdp_activation_checkpointing", False))
    parts.layout["recompute"] = "full" if on else "none"
    parts.note("fsdp_config.fsdp_activation_checkpointing", on, f"recompute = {parts.layout['recompute']}")
    if truth(source, "fsdp_config.fsdp_offload_params", block.get("fsdp_offload_params", False)):
        parts.assumed.append("fsdp_offload_params: not modelled, memory counts everything on the GPU")


def fsdp_keys(block: Mapping[str, Any]) -> dict[str, Any]:
    """The block's keys with the prefix that the launcher gives those without.

    >>> fsdp_keys({"reshard_after_forward": True, "fsdp_version": 2})
    {'fsdp_reshard_after_forward': True, 'fsdp_version': 2}
    """
    return {key if str(key).startswith("fsdp") else f"fsdp_{key}": value for key, value in block.items()}


def stage_two(parts: Parts, block: Mapping[str, Any]) -> int:
    """FSDP 2: weights are freed behind the forward (3) or kept (2)."""
    value = block.get("fsdp_reshard_after_forward", True)
    freed = value if isinstance(value, bool) else str(value).lower() not in ("false", "no", "0", "shard_grad_op")
    parts.note("fsdp_config.fsdp_reshard_after_forward", value, f"zero_stage = {3 if freed else 2}")
    return 3 if freed else 2


def stage_one(parts: Parts, block: Mapping[str, Any]) -> int:
    """FSDP 1: by its strategy. Raises InputError."""
    value = block.get("fsdp_sharding_strategy", "FULL_SHARD")
    names = list(STRATEGIES)
    if isinstance(value, int) and not isinstance(value, bool) and 1 <= value <= len(names):
        value = names[value - 1]
    name = value.upper() if isinstance(value, str) else value
    word = word_of(parts.source, "fsdp_config.fsdp_sharding_strategy", name, names)
    parts.note("fsdp_config.fsdp_sharding_strategy", value, f"zero_stage = {STRATEGIES[word]}")
    if word.startswith("HYBRID"):
        parts.assumed.append(f"{word}: weights are sharded inside a node and copied between nodes; memory counts shards over all GPUs")
    return STRATEGIES[word]


def read_deepspeed(parts: Parts, data: Mapping[str, Any], num_gpus: int | None) -> None:
    """DeepSpeed by accelerate's own keys, or by the file that they name. Raises InputError."""
    source = parts.source
    block = table(source, data, "deepspeed_config")
    named = block.get("deepspeed_config_file")
    path = source.path.parent / named if isinstance(named, str) else None
    if path is not None and path.is_file():
        parts.source = open_source(path)
        read_json(parts, parts.source.data or {}, num_gpus)
        parts.source = source
        parts.read.append(f"{path}: the file that deepspeed_config_file names")
        return
    if named is not None:
        parts.assumed.append(f"deepspeed_config_file = {shown(named)} is not beside this file: what only it says is open")
        return
    stage = block.get("zero_stage", 2)
    parts.axis("deepspeed_config.zero_stage", stage, "zero_stage", least=0, most=3)
    steps = block.get("gradient_accumulation_steps", 1)
    if stated(steps):
        whole_number(source, "deepspeed_config.gradient_accumulation_steps", steps, most=1 << 30)
        parts.note("deepspeed_config.gradient_accumulation_steps", steps, "batch, with the training program's micro-batch")
    for key in ("offload_optimizer_device", "offload_param_device"):
        if block.get(key, "none") != "none":
            parts.assumed.append(f"deepspeed_config.{key} = {shown(block[key])}: not modelled, memory counts everything on the GPU")
    parts.assumed.append("recompute is left to the training program")


READERS = (Reader(YAML_KIND, is_yaml, read_yaml), Reader(SCRIPT_KIND, is_script, read_launch))
