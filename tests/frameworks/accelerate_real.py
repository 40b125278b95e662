"""accelerate's own code on a CPU: its launcher's parser and environment, its plugin and mesh, its last look before training."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import accelerate
import accelerate.utils.launch as launching
from accelerate.commands.launch import _validate_launch_command, launch_command_parser
from accelerate.parallelism_config import ParallelismConfig
from accelerate.utils import DistributedType, FullyShardedDataParallelPlugin

REFUSALS = (ValueError, TypeError, KeyError, RuntimeError, NotImplementedError, SystemExit)


def environment(path: Path) -> dict[str, str]:
    """The variables that accelerate's launcher sets for a file. Raises what it raises."""
    parser = launch_command_parser()
    args = parser.parse_args(["--config_file", str(path), "--machine_rank", "0", "--main_process_ip", "localhost", "train.py"])
    args, _, _ = _validate_launch_command(args)
    with patch.object(launching, "is_port_in_use", lambda port: False):
        return dict(launching.prepare_multi_gpu_env(args))


def started(variables: Mapping[str, str], processes: int) -> tuple[ParallelismConfig | None, FullyShardedDataParallelPlugin | None]:
    """Plugin and mesh as every process makes them from its environment, after accelerate's last check of the two."""
    own = {key: value for key, value in variables.items() if key.startswith(("FSDP_", "PARALLELISM_CONFIG_", "ACCELERATE_"))}
    with patch.dict(os.environ, own):
        plugin = FullyShardedDataParallelPlugin() if own.get("ACCELERATE_USE_FSDP") == "true" else None
        if "PARALLELISM_CONFIG_TP_SIZE" not in own:
            return None, plugin
        mesh = ParallelismConfig()
    fsdp2 = plugin is not None and plugin.fsdp_version == 2
    mesh._validate_accelerator(
        SimpleNamespace(
            multi_device=plugin is None and processes > 1,
            num_processes=processes,
            is_fsdp2=fsdp2,
            distributed_type=DistributedType.FSDP if plugin else DistributedType.MULTI_GPU,
            is_main_process=False,
        )
    )
    return mesh, plugin


def refused(call: Callable[[], Any]) -> str:
    """What accelerate says where it refuses, "" where it does not."""
    try:
        call()
    except REFUSALS as error:
        return f"{type(error).__name__}: {error}"
    return ""


def version() -> str:
    """Of the installed accelerate."""
    return str(accelerate.__version__)
