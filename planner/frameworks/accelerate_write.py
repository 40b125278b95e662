"""Writes a layout for accelerate: its YAML with FSDP2 settings, and the flags of a training program of Hugging Face's Trainer."""

from __future__ import annotations

from typing import Any

from planner.frameworks.accelerate_read import PREFIX
from planner.frameworks.launch_script import comment, gpus_per_host
from planner.frameworks.trainer import RECOMPUTE, write_flags
from planner.frameworks.writing import Launch, Target

FILE = "accelerate.yaml"
PROGRAM = "train.py"


def write(target: Target) -> Launch:
    """The launch of a layout."""
    flags = [flag for flag in write_flags(target) if not (flag.startswith(f"--{RECOMPUTE} ") and sharded(target))]
    return Launch(
        files={FILE: comment(target) + "".join(f"{line}\n" for line in lines(settings(target)))},
        arguments={"TRAINER_ARGS": tuple(flags)},
        program=PROGRAM,
        launcher="accelerate",
        launcher_arguments=(f"--config_file {FILE}",),
    )


def sharded(target: Target) -> bool:
    """Whether FSDP2 runs the layout."""
    return target.layout.zero_stage >= 2


def settings(target: Target) -> dict[str, Any]:
    """The keys of the file. Machine ranks and addresses are the launcher's arguments."""
    job, layout = target.job, target.layout
    ranks = layout.data_parallel * layout.context_parallel * layout.tensor_parallel
    kind = "FSDP" if sharded(target) else "MULTI_GPU" if ranks > 1 else "NO"
    found: dict[str, Any] = {
        "compute_environment": "LOCAL_MACHINE",
        "distributed_type": kind,
        "num_processes": job.num_gpus,
        "num_machines": max(job.num_gpus // gpus_per_host(target), 1),
        "mixed_precision": job.precision,
    }
    if sharded(target):
        found["fsdp_config"] = fsdp(target)
    if sharded(target) or layout.tensor_parallel > 1:
        found["parallelism_config"] = mesh(target)
    return found


def fsdp(target: Target) -> dict[str, Any]:
    """FSDP2: one unit per layer, weights freed behind the forward (ZeRO-3) or kept (ZeRO-2)."""
    return {
        "fsdp_version": 2,
        "fsdp_auto_wrap_policy": "TRANSFORMER_BASED_WRAP",
        "fsdp_reshard_after_forward": target.layout.zero_stage == 3,
        "fsdp_activation_checkpointing": target.layout.recompute == "full",
        "fsdp_offload_params": False,
        "fsdp_state_dict_type": "SHARDED_STATE_DICT",
    }


def mesh(target: Target) -> dict[str, Any]:
    """The mesh of ranks, every size stated."""
    layout = target.layout
    sizes = {
        "dp_replicate_size": 1,
        "dp_shard_size": layout.data_parallel,
        "tp_size": layout.tensor_parallel,
        "cp_size": layout.context_parallel,
    }
    return {PREFIX + key: size for key, size in sizes.items()}


def lines(data: dict[str, Any], indent: str = "") -> list[str]:
    """YAML of tables, words, numbers and truths.

    >>> lines({"a": 1, "b": {"c": True, "d": "no"}})
    ['a: 1', 'b:', '  c: true', "  d: 'no'"]
    """
    found: list[str] = []
    for key, value in data.items():
        if isinstance(value, dict):
            found += [f"{indent}{key}:", *lines(value, indent + "  ")]
        else:
            found.append(f"{indent}{key}: {scalar(value)}")
    return found


def scalar(value: bool | int | str) -> str:
    """One value of YAML; words that YAML takes for truths are quoted."""
    if isinstance(value, bool):
        return str(value).lower()
    return f"'{value}'" if str(value).lower() in ("no", "yes", "on", "off") else str(value)
