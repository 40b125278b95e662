"""torchtitan 0.3's own code on a CPU: parser, meshes on a process group without peers, cut and parallel model, PyTorch's schedules."""

from __future__ import annotations

import importlib
import logging
import sys
import types
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from typing import Any
from unittest.mock import patch

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


sys.modules.setdefault("torchtitan.distributed.minimal_async_ep.kernels", _Absent("kernels"))

from torchtitan.components import quantization  # noqa: E402
from torchtitan.config import ConfigManager  # noqa: E402
from torchtitan.distributed import ParallelDims, full_dtensor, parallel_dims, pipeline_parallel  # noqa: E402
from torchtitan.distributed import utils as runtime  # noqa: E402

parallel_dims.device_type = "cpu"
schedules._add_unshard_reshard = lambda actions, *rest: list(actions)  # gathers of weights: slow to place, and judge nothing
logging.getLogger().setLevel(logging.ERROR)


class _NoConverter:
    """Stands for a converter to 8-bit layers, which needs torchao and a GPU: leaves the model as it is."""

    def convert(self, config: Any) -> Any:
        return config


CONVERTERS = (
    "NVFP4LinearConverter",
    "Float8LinearConverter",
    "Float8GroupedExpertsConverter",
    "MXFP8LinearConverter",
    "MXFP8GroupedExpertsConverter",
)


@contextmanager
def without_converters() -> Iterator[None]:
    """8-bit configurations can be built although neither torchao nor a GPU is here."""
    configs = [getattr(quantization, name).Config for name in CONVERTERS]
    with patch.multiple("torchtitan.models.utils", validate_converter_order=lambda converters: None):
        patches = [patch.object(config, "build", lambda self, **kwargs: _NoConverter()) for config in configs]
        for each in patches:
            each.start()
        try:
            yield
        finally:
            for each in patches:
                each.stop()


@contextmanager
def process_group(world: int, rank: int = 0) -> Iterator[None]:
    """This process as one rank of a world whose other ranks are not there."""
    dist.init_process_group("fake", rank=rank, world_size=world, store=FakeStore())
    try:
        yield
    finally:
        dist.destroy_process_group()


def parse(words: Sequence[str], folder: Path | None = None) -> Any:
    """The configuration that torchtitan makes of a command line; ``folder`` holds a module of our own."""
    sys.modules.pop("planned_models", None)
    importlib.invalidate_caches()
    path = [str(folder), *sys.path] if folder else sys.path
    with without_converters(), patch.object(sys, "path", path):
        return ConfigManager().parse_args(list(words))


def registry(module: str) -> Any:
    """A model's package."""
    return importlib.import_module(f"torchtitan.models.{module}")


def built_model(module: str, flavor: str) -> Any:
    """The flavor's model without weights."""
    with torch.device("meta"):
        return registry(module).model_registry(flavor).model.build()


@cache
def one_layer(module: str, flavor: str) -> Any:
    """The flavor's model with its first layer alone: enough to see which attention it runs."""
    config = registry(module).model_registry(flavor).model
    config.layers = config.layers[:1]
    with torch.device("meta"):
        return config.build()


def recipe(module: str, name: str) -> Any:
    """What one of torchtitan's configuration functions returns."""
    with without_converters():
        return getattr(importlib.import_module(f"torchtitan.models.{module}.config_registry"), name)()


def module_split(config: Any, dims: ParallelDims) -> list[list[str]]:
    """The modules of each chunk, as torchtitan cuts the model."""
    found = pipeline_parallel._get_pipeline_metadata(dims, config.parallelism, config.model_spec.model)
    return config.parallelism.module_fqns_per_model_part or pipeline_parallel._generate_llm_fqn_per_model_part(*found)


def schedule_of(config: Any, dims: ParallelDims, parts: int) -> Any:
    """PyTorch's schedule of this rank, with a stand-in for each of its chunks."""
    stages = dims.pp
    mesh, name = dims.get_mesh("pp"), config.parallelism.pipeline_parallel_schedule
    compiled = config.compile.enable and "model" in config.compile.components
    module = torch.compile(torch.nn.Identity()) if compiled else torch.nn.Identity()
    places = pipeline_parallel._get_pp_rank_to_stage_indices_mapping(mesh.get_local_rank(), stages, name, parts)
    chunks = [PipelineStage(module, place, parts, torch.device("cpu"), group=mesh.get_group()) for place in places]
    return pipeline_parallel._build_pipeline_schedule(
        parallelism=config.parallelism, local_batch_size=config.training.local_batch_size, stages=chunks, loss_fn=lambda x: (x, 0)
    )


def parallelize(config: Any, dims: ParallelDims) -> None:
    """The model's first and last layer, without weights, under tensor, context, expert and data groups, checkpointing and compilation.

    DTensors on the model's axes stand for the newest representation, whose sharded weights this PyTorch does not know yet.
    """
    spec, config.parallelism.spmd_backend = config.model_spec, "partial_dtensor"
    spec.model.layers = [spec.model.layers[0], spec.model.layers[-1]]
    dims = ParallelDims.from_config(config.parallelism, world_size=dims.world_size)
    dims.build_mesh()
    runtime.set_spmd_backend(config.parallelism.spmd_backend)
    with torch.device("meta"):
        model = spec.model.build()
    spec.parallelize_fn(
        model,
        parallel_dims=dims,
        training=config.training,
        parallelism=config.parallelism,
        compile_config=config.compile,
        ac_config=config.activation_checkpoint,
        dump_folder="",
    )


def accept(words: Sequence[str], world: int, folder: Path | None = None, *, whole: bool = False) -> tuple[Any, list[list[str]]]:
    """The configuration and its cut into chunks, if torchtitan takes the command on so many ranks; raises what it raises.

    ``whole``: the model is made parallel too, which takes longest.
    """
    config = parse(words, folder)
    spec = config.model_spec
    spec.model.update_from_config(config=config)
    config._validate_cuda_graphs()
    with process_group(world):
        dims = ParallelDims.from_config(config.parallelism, world_size=world)
        dims.build_mesh()
        full_dtensor.validate_config(dims, one_layer(spec.name, spec.flavor))
        parts = module_split(config, dims) if dims.pp > 1 else []
        if parts:
            schedule_of(config, dims, len(parts))
        if whole:
            parallelize(config, dims)
        return config, parts


def torch_order(name: str, stages: int, chunks: int, micro_batches: int) -> dict[int, list[Any]]:
    """PyTorch's own order of actions on every rank, pauses and gradient reductions left out."""
    kind = schedules.get_schedule_class(name)
    parts = stages * chunks
    with process_group(stages):
        places = pipeline_parallel._get_pp_rank_to_stage_indices_mapping(0, stages, name, parts)
        own = [PipelineStage(torch.nn.Identity(), place, parts, torch.device("cpu")) for place in places]
        multi = issubclass(kind, schedules.PipelineScheduleMulti)
        made = kind(own if multi else own[0], n_microbatches=micro_batches, loss_fn=lambda out, label: out.sum())
        found = made.pipeline_order if multi else made._get_pipeline_order()
    return {rank: [action for action in actions if action is not None] for rank, actions in found.items()}
