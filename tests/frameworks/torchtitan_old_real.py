"""torchtitan 0.2's own code on a CPU, in a process of its own: reads trials as JSON from its input, writes what it found to its output.

A trial is {"toml": text, "world": ranks, "whole": truth}; its result {"error": text} or {"chunks": module lists, "seen": settings}.
"""

from __future__ import annotations

import copy
import dataclasses
import json
import logging
import sys
import tempfile
import types
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.pipelining import PipelineStage, schedules
from torch.testing._internal.distributed.fake_pg import FakeStore


class _Absent(types.ModuleType):
    """Stands for a module of GPU kernels that needs triton: imported, never called."""

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return lambda *args, **kwargs: None


sys.modules.setdefault("torchtitan.models.moe.kernels", _Absent("kernels"))

import torchtitan.protocols.train_spec as train_spec  # noqa: E402
from torchtitan.config import ConfigManager, JobConfig  # noqa: E402
from torchtitan.distributed import ParallelDims, parallel_dims, pipeline_parallel  # noqa: E402

parallel_dims.device_type = "cpu"
schedules._add_unshard_reshard = lambda actions, *rest: list(actions)  # gathers of weights: slow to place, and judge nothing
logging.getLogger().setLevel(logging.ERROR)


def parse(text: str) -> Any:
    """The configuration that torchtitan makes of a TOML file."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "x.toml"
        path.write_text(text)
        return ConfigManager().parse_args(["--job.config_file", str(path)])


def split_of(config: Any, layers: int) -> list[list[str]]:
    """The modules of each chunk; the number of chunks is found as torchtitan's pipeline_llm finds it, which cannot be called alone."""
    own = config.parallelism
    if own.module_fqns_per_model_part:
        return own.module_fqns_per_model_part
    kind = pipeline_parallel.get_schedule_class(own.pipeline_parallel_schedule)
    single = issubclass(kind, pipeline_parallel.PipelineScheduleSingle)
    first, last = own.pipeline_parallel_first_stage_less_layers, own.pipeline_parallel_last_stage_less_layers
    share = own.pipeline_parallel_layers_per_stage
    chunks = own.pipeline_parallel_degree * (1 if single else 2) if share is None else -(-(layers + first + last) // share)
    return pipeline_parallel.generate_llm_fqn_per_model_part(chunks, layers, first, last)


def schedule(config: Any, dims: ParallelDims, parts: list[list[str]]) -> None:
    """The split of a stand-in for the model over the stages, and PyTorch's schedule of this rank."""
    names = [name for part in parts for name in part]
    whole = torch.nn.Module()
    for name in names:
        if not name.startswith("layers."):
            setattr(whole, name, torch.nn.Identity())
    whole.layers = torch.nn.ModuleDict({name.removeprefix("layers."): torch.nn.Identity() for name in names if name.startswith("layers.")})
    device = torch.device("cpu")
    stages, _ = pipeline_parallel.pipeline_module_split(
        whole, dims.get_mesh("pp"), config.parallelism.pipeline_parallel_schedule, device, parts
    )
    if config.compile.enable and "model" in config.compile.components:
        stages = [
            PipelineStage(torch.compile(torch.nn.Identity()), stage.stage_index, len(parts), device, group=dims.get_mesh("pp").get_group())
            for stage in stages
        ]
    pipeline_parallel.build_pipeline_schedule(config, stages, lambda out, label: out.sum())


def trial(text: str, world: int, whole: bool) -> dict[str, Any]:
    """What torchtitan makes of one file on so many ranks; raises what it raises."""
    config = parse(text)
    spec = train_spec.get_train_spec(config.model.name)
    args = copy.deepcopy(spec.model_args[config.model.flavor])
    args.update_from_config(config)
    own = config.parallelism
    dist.init_process_group("fake", rank=0, world_size=world, store=FakeStore())
    try:
        dims = ParallelDims(
            dp_replicate=own.data_parallel_replicate_degree,
            dp_shard=own.data_parallel_shard_degree,
            cp=own.context_parallel_degree,
            tp=own.tensor_parallel_degree,
            pp=own.pipeline_parallel_degree,
            ep=own.expert_parallel_degree,
            etp=own.expert_tensor_parallel_degree,
            world_size=world,
        )
        dims.build_mesh()
        parts: list[list[str]] = []
        if dims.pp_enabled:
            if not spec.pipelining_fn:
                raise RuntimeError(f"{config.model.name} does not support pipelining")
            parts = split_of(config, args.n_layers)
            schedule(config, dims, parts)
        if whole:
            config.model.converters = []  # they need torchao and a GPU
            args.n_layers = min(args.n_layers, getattr(args, "n_dense_layers", 1) + 1)
            with torch.device("meta"):
                model = spec.model_cls(args)
            spec.parallelize_fn(model, dims, config)
    finally:
        dist.destroy_process_group()
    return {"chunks": parts}


def keys(kind: Any, prefix: str = "") -> dict[str, list[str]]:
    """Section -> its keys, of the class of all settings."""
    found: dict[str, list[str]] = {}
    for field in dataclasses.fields(kind):
        value = field.default_factory() if field.default_factory is not dataclasses.MISSING else field.default
        if dataclasses.is_dataclass(value):
            found |= keys(type(value), f"{prefix}{field.name}.")
        else:
            found.setdefault(prefix.rstrip("."), []).append(field.name)
    return found


def result(asked: dict[str, Any]) -> dict[str, Any]:
    """A trial's result, an error as its text; without a file, all keys that there are and the flavors of each model."""
    try:
        if "toml" not in asked:
            flavors = {name: list(train_spec.get_train_spec(name).model_args) for name in asked["models"]}
            return {"keys": keys(JobConfig), "flavors": flavors}
        return trial(asked["toml"], asked["world"], asked.get("whole", False))
    except (Exception, SystemExit) as error:
        return {"error": f"{type(error).__name__}: {error}"[:600]}


if __name__ == "__main__":
    trials = json.load(sys.stdin)
    found = [result(asked) for asked in trials]
    print("RESULT " + json.dumps(found))
