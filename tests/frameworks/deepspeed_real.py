"""DeepSpeed's own checks, called without GPUs: its configuration, partition, pipeline engine, AutoEP and Ulysses."""

from __future__ import annotations

import contextlib
import io
import itertools
import json
import logging
from collections.abc import Callable, Iterator, Mapping
from functools import cache
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import deepspeed
import deepspeed.runtime.config as runtime_config
import torch
from deepspeed.module_inject.auto_ep_config import parse_autoep_config, validate_autoep_config, validate_autoep_post_detection
from deepspeed.module_inject.auto_ep_folding import build_folding_spec, validate_folding_global
from deepspeed.module_inject.auto_ep_layer import AutoEPMoELayer
from deepspeed.runtime.engine import DeepSpeedEngine
from deepspeed.runtime.pipe.engine import PipelineEngine
from deepspeed.runtime.pipe.module import LayerSpec, PipelineModule
from deepspeed.runtime.pipe.topology import PipeModelDataParallelTopology
from deepspeed.runtime.sequence_parallel import ulysses_sp
from deepspeed.runtime.sequence_parallel.ulysses_sp import UlyssesSPAttentionHF

from planner.frameworks.writing import Target

logging.getLogger("DeepSpeed").setLevel(logging.ERROR)
REFUSALS = (AssertionError, ValueError, TypeError, RuntimeError, runtime_config.DeepSpeedConfigError)
"""What DeepSpeed raises; pydantic's errors are ValueErrors."""


def parsed(data: Mapping[str, Any], replicas: int) -> Any:
    """DeepSpeed's configuration of a file's data among so many data-parallel ranks."""
    ranks = SimpleNamespace(get_data_parallel_world_size=lambda: replicas)
    with patch.object(runtime_config.dist, "get_rank", lambda: 0):
        return runtime_config.DeepSpeedConfig(json.loads(json.dumps(data)), mpu=ranks)


def parsed_file(path: Path, replicas: int) -> Any:
    """The same of a file, through DeepSpeed's own reading of it."""
    ranks = SimpleNamespace(get_data_parallel_world_size=lambda: replicas)
    with patch.object(runtime_config.dist, "get_rank", lambda: 0):
        return runtime_config.DeepSpeedConfig(str(path), mpu=ranks)


class Other:
    """Stands for what is no transformer layer: embedding, final norm, head."""


class ParallelTransformerLayerPipe:
    """Has the name by which Megatron-DeepSpeed's layers are found."""


@cache
def cut(num_layers: int, stages: int) -> list[int]:
    """Transformer layers of each stage, cut by PipelineModule itself from Megatron-DeepSpeed's list of layers."""
    module = object.__new__(PipelineModule)
    torch.nn.Module.__init__(module)
    module.num_stages, module.global_rank, module.loss_fn = stages, 0, None
    module._topo = SimpleNamespace(get_coord=lambda rank: SimpleNamespace(pipe=0))
    kinds = [Other, Other, *[ParallelTransformerLayerPipe] * num_layers, Other, Other]
    module._layer_specs = [object.__new__(LayerSpec) for _ in kinds]
    for spec, kind in zip(module._layer_specs, kinds, strict=True):
        spec.typename = kind
    module._set_bounds = lambda start, stop: None
    with contextlib.redirect_stdout(io.StringIO()), patch.object(LayerSpec, "__repr__", lambda self: "layer"):
        module._partition_layers("type:transformer")
    bounds = module.parts
    return [sum(kind is ParallelTransformerLayerPipe for kind in kinds[a:b]) for a, b in itertools.pairwise(bounds)]


def enter_pipeline(stage: int) -> None:
    """The pipeline engine's own look at the ZeRO stage. Raises what it raises."""

    class Entered(Exception):
        """The engine went past its checks."""

    def start(self: Any, *arguments: Any, **settings: Any) -> None:
        torch.nn.Module.__init__(self)
        module = object.__new__(PipelineModule)
        torch.nn.Module.__init__(module)
        self.module = module
        self.zero_optimization_stage = lambda: stage
        self.optimizer = None
        self.train_micro_batch_size_per_gpu = lambda: (_ for _ in ()).throw(Entered)

    with patch.object(DeepSpeedEngine, "__init__", start), contextlib.suppress(Entered):
        PipelineEngine()


def expert_groups(data: Mapping[str, Any], world: int, sequence: int, stage: int, num_experts: int) -> None:
    """AutoEP's checks before and behind the search for expert layers. Raises what they raise."""
    config = parse_autoep_config(data.get("expert_parallel", {}))
    tensor = data.get("tensor_parallel", {}).get("autotp_size", 1)
    validate_autoep_config(config, world, 1, tensor, sequence)
    if not config.enabled:
        return
    spec = build_folding_spec(
        world_size=world, pp_size=1, tp_size=tensor, ep_size=config.autoep_size, etp_size=config.expert_tensor_parallel_size
    )
    validate_folding_global(spec, zero_stage=stage, sp_size=sequence)
    layer = SimpleNamespace(
        num_experts=num_experts, moe_module_name="mlp", score_apply="post", num_expert_groups=None, num_limited_groups=None
    )
    validate_autoep_post_detection(config, [layer])
    if stage == 3:
        sharded_experts(sequence, config)


def sharded_experts(sequence: int, config: Any) -> None:
    """The engine's look at expert layers under ZeRO-3. Raises what it raises."""
    layer = object.__new__(AutoEPMoELayer)
    engine = SimpleNamespace(
        has_moe_layers=True,
        module=SimpleNamespace(named_modules=lambda: [("mlp", layer)]),
        sequence_parallel_size=sequence,
        zero_quantized_gradients=lambda: False,
        _config=SimpleNamespace(zero_config=SimpleNamespace(zero_hpz_partition_size=1), expert_parallel_config=config),
    )
    DeepSpeedEngine._validate_zero3_moe_compatibility(engine)


def sequence_groups(heads: int, key_value_heads: int, size: int, seq_len: int = 4096) -> None:
    """Ulysses' attention for a group of so many. Raises what it raises."""
    with (
        patch.object(ulysses_sp.dist, "get_world_size", lambda group: size),
        patch.object(ulysses_sp.dist, "get_rank", lambda group: 0),
        patch.object(ulysses_sp, "register_all_to_all_group", lambda group: None),
    ):
        UlyssesSPAttentionHF(
            attn=None,
            batch_size=1,
            attn_head_count=heads,
            attn_head_size=128,
            kv_head_count=key_value_heads,
            num_hidden_layers=2,
            process_group=None,
            local_seq_length=seq_len // size,
            global_seq_length=seq_len,
        )


def grid(target: Target) -> PipeModelDataParallelTopology:
    """DeepSpeed's grid of ranks for a layout."""
    layout = target.layout
    return PipeModelDataParallelTopology(num_pp=layout.pipeline_parallel, num_mp=layout.tensor_parallel, num_dp=layout.data_parallel)


def refused(call: Callable[[], Any]) -> str:
    """What DeepSpeed says where it refuses, "" where it does not."""
    try:
        call()
    except REFUSALS as error:
        return f"{type(error).__name__}: {error}"
    return ""


def version() -> str:
    """Of the installed DeepSpeed."""
    return str(deepspeed.__version__)


def recorded(data: Mapping[str, Any]) -> set[str]:
    """The top-level keys that DeepSpeed asks a configuration for."""
    seen: set[str] = set()

    class Asked(dict):  # type: ignore[type-arg]
        """Notes which keys are looked up."""

        def __getitem__(self, key: str) -> Any:
            seen.add(key)
            return super().__getitem__(key)

        def get(self, key: str, default: Any = None) -> Any:
            seen.add(key)
            return super().get(key, default)

        def __contains__(self, key: object) -> bool:
            seen.add(str(key))
            return super().__contains__(key)

        def __copy__(self) -> Asked:
            return Asked(self)

        def keys(self) -> Any:
            return Keys(self)

    class Keys:
        """A view of the keys that notes which are asked for."""

        def __init__(self, data: Asked) -> None:
            self.data = data

        def __contains__(self, key: object) -> bool:
            return key in self.data

        def __iter__(self) -> Iterator[str]:
            return dict.__iter__(self.data)

    with patch.object(runtime_config.dist, "get_rank", lambda: 0):
        runtime_config.DeepSpeedConfig(Asked(data), mpu=SimpleNamespace(get_data_parallel_world_size=lambda: 1))
    return seen
