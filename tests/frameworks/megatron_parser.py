"""Megatron-core's own parser, rank groups, stage sizes, micro-batch checks and model, run on a CPU: what "accepted" means."""

from __future__ import annotations

import contextlib
import copy
import io
import logging
import os
import re
import shlex
import sys
import types
import typing
import warnings
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any
from unittest.mock import patch

import torch
import typing_extensions

warnings.filterwarnings("ignore")
logging.getLogger("megatron").setLevel(logging.ERROR)
typing.override = typing_extensions.override  # Python 3.12 has it


class _Kernels(types.ModuleType):
    """Stands for the one module of megatron-core that imports triton unguarded; none of its kernels is ever called."""

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return object()


sys.modules.setdefault("megatron.core.transformer.moe.ops.paged_stash", _Kernels("paged_stash"))

import megatron.core.models.common.embeddings.rope_utils as rope_utils  # noqa: E402
import megatron.core.utils as core_utils  # noqa: E402
import megatron.training.arguments as arguments  # noqa: E402
from megatron.core import num_microbatches_calculator, parallel_state  # noqa: E402
from megatron.core.models.gpt import GPTModel  # noqa: E402
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_decoder_block_spec, get_gpt_mtp_block_spec  # noqa: E402
from megatron.core.pipeline_parallel import schedules  # noqa: E402
from megatron.core.transformer import transformer_block  # noqa: E402
from megatron.core.transformer.dot_product_attention import DotProductAttention  # noqa: E402
from megatron.core.transformer.enums import AttnBackend  # noqa: E402
from megatron.training.argument_utils import core_transformer_config_from_args  # noqa: E402
from packaging.version import Version  # noqa: E402
from torch.testing._internal.distributed.fake_pg import FakeStore  # noqa: E402

core_utils._te_version = Version("2.10.0")  # as on a cluster
rope_utils.fused_apply_rotary_pos_emb = rope_utils.fused_apply_rotary_pos_emb or object()

REFUSALS = (AssertionError, ValueError, RuntimeError, SystemExit, ZeroDivisionError, IndexError)
CAPABILITY = {"hopper": 9, "blackwell": 10}
GIVEN = {
    "DATA_PATH": "/data/text",
    "TOKENIZER_TYPE": "NullTokenizer",
    "TOKENIZER_MODEL": "/data/tokenizer",
    "CHECKPOINT_DIR": "/data/checkpoints",
    "SAVE_INTERVAL": "500",
    "LEARNING_RATE": "1e-4",
    "TRAIN_ITERS": "1000",
    "ROTARY_BASE": "500000",
}
"""What a person fills in for the variables that an exported script demands."""


def given(line: str) -> str:
    """A line of an exported script with its demanded variables filled in."""
    return re.sub(r"\$\{(\w+):\?[^}]*\}", lambda found: GIVEN[found[1]], line)


def words_of(launch_arguments: Mapping[str, Sequence[str]]) -> list[str]:
    """The words that the program gets."""
    return [word for lines in launch_arguments.values() for line in lines for word in shlex.split(given(line))]


@dataclass(frozen=True)
class Accepted:
    """What Megatron made of an argument list."""

    args: Any
    config: Any
    chunks: tuple[tuple[int, ...], ...] = ()
    """Layers of each chunk of each stage."""


class Refused(Exception):
    """Megatron's own words."""


@contextlib.contextmanager
def silence() -> Iterator[io.StringIO]:
    """Nothing is printed."""
    held = io.StringIO()
    with contextlib.redirect_stdout(held), contextlib.redirect_stderr(held):
        yield held


def parsed(words: Sequence[str], world: int, environment: Mapping[str, str], generation: str = "hopper") -> Accepted:
    """Stage 1: the arguments through Megatron's parser and checks. Raises Refused."""
    major = CAPABILITY[generation.split("-")[0]]
    variables = {"WORLD_SIZE": str(world), "RANK": "0", **environment}
    with (
        silence() as said,
        patch.object(sys, "argv", ["pretrain_gpt.py", *words]),
        patch.dict(os.environ, variables),
        patch.object(arguments, "get_device_arch_version", lambda: major),
        patch.object(torch.cuda, "get_device_capability", lambda *_: (major, 0)),
    ):
        if "CUDA_DEVICE_MAX_CONNECTIONS" not in environment:
            os.environ.pop("CUDA_DEVICE_MAX_CONNECTIONS", None)
        try:
            args = arguments.parse_args()
            arguments.validate_args(args)
            return Accepted(args, core_transformer_config_from_args(args))
        except REFUSALS as error:
            detail = said.getvalue().strip().splitlines()[-1:] if isinstance(error, SystemExit) else [str(error)]
            raise Refused(f"arguments: {detail[0] if detail else type(error).__name__}") from None


@contextlib.contextmanager
def groups(args: Any, rank: int = 0) -> Iterator[None]:
    """Stage 2: Megatron's process groups as one rank of a fake world sees them. Raises Refused."""
    torch.distributed.init_process_group("fake", rank=rank, world_size=args.world_size, store=FakeStore())
    try:
        _make_groups(args)
        yield
    finally:
        parallel_state.destroy_model_parallel()
        torch.distributed.destroy_process_group()


def _make_groups(args: Any) -> None:
    try:
        with silence():
            parallel_state.initialize_model_parallel(
                args.tensor_model_parallel_size,
                args.pipeline_model_parallel_size,
                args.virtual_pipeline_model_parallel_size,
                context_parallel_size=args.context_parallel_size,
                expert_model_parallel_size=args.expert_model_parallel_size,
                expert_tensor_parallel_size=args.expert_tensor_parallel_size,
                num_distributed_optimizer_instances=args.num_distributed_optimizer_instances,
                create_gloo_process_groups=False,
            )
    except REFUSALS as error:
        raise Refused(f"groups: {error}") from None


def stage_layers(found: Accepted) -> tuple[tuple[int, ...], ...]:
    """Stage 3, inside the groups: layers of each chunk of each stage. Raises Refused."""
    config = found.config
    virtual = config.virtual_pipeline_model_parallel_size or 1
    layout = config.pipeline_model_parallel_layout
    if layout is not None:
        return tuple(tuple(sum(part.name == "decoder" for part in chunk) for chunk in stage) for stage in layout.layout)
    try:
        return tuple(
            tuple(
                transformer_block.get_num_layers_to_build(config, vp_stage=chunk if virtual > 1 else None, pp_rank=stage)
                for chunk in range(virtual)
            )
            for stage in range(config.pipeline_model_parallel_size)
        )
    except REFUSALS as error:
        raise Refused(f"stages: {error}") from None


def micro_batches(found: Accepted) -> int:
    """Stage 4: micro-batches per step, checked as the interleaved schedule does. Raises Refused."""
    args, config = found.args, found.config
    num_microbatches_calculator.unset_num_microbatches_calculator()
    try:
        with silence():
            num_microbatches_calculator.init_num_microbatches_calculator(
                0, args.rampup_batch_size, args.global_batch_size, args.micro_batch_size, args.data_parallel_size, False
            )
        count = int(num_microbatches_calculator.get_num_microbatches())
        if config.virtual_pipeline_model_parallel_size:
            _interleaved(config, args, count)
        return count
    except REFUSALS as error:
        raise Refused(f"micro-batches: {error}") from None


class _Past(Exception):
    """The schedule went past its checks."""


def _interleaved(config: Any, args: Any, count: int) -> None:
    """Megatron's interleaved schedule up to the end of its checks of micro-batches."""

    def past(*_: Any, **__: Any) -> None:
        raise _Past

    chunks = [torch.nn.Identity() for _ in range(config.virtual_pipeline_model_parallel_size)]
    zeros = torch.zeros
    communicator = types.SimpleNamespace(config=config, pp_group=parallel_state.get_pipeline_model_parallel_group())
    collection = types.SimpleNamespace(tp=parallel_state.get_tensor_model_parallel_group(), cp=parallel_state.get_context_parallel_group())
    with (
        patch.object(schedules, "get_model_config", lambda _: config),
        patch.object(schedules, "get_model_type", lambda _: None),
        patch.object(schedules, "get_pp_rank_microbatches", past),
        patch.object(torch, "zeros", lambda *a, **k: zeros(*a, **{**k, "device": "cpu"})),
        contextlib.suppress(_Past),
    ):
        schedules.forward_backward_pipelining_with_interleaving(
            forward_step_func=past,
            data_iterator=[iter(()) for _ in chunks],
            model=chunks,
            num_microbatches=count,
            seq_length=args.seq_length,
            micro_batch_size=args.micro_batch_size,
            forward_only=False,
            p2p_communicator=communicator,
            pg_collection=collection,
        )


def accept(words: Sequence[str], world: int, environment: Mapping[str, str], generation: str = "hopper") -> Accepted:
    """All four stages. Raises Refused."""
    found = parsed(words, world, environment, generation)
    with groups(found.args):
        chunks = stage_layers(found)
        micro_batches(found)
    return Accepted(found.args, found.config, chunks)


def group_ranks(kind: str) -> list[list[int]]:
    """Inside the groups: the ranks of every group of a kind, as Megatron's generator lists them. Unused ones are absent."""
    getter = {
        "tensor": parallel_state.get_tensor_model_parallel_group,
        "context": parallel_state.get_context_parallel_group,
        "pipeline": parallel_state.get_pipeline_model_parallel_group,
        "expert": parallel_state.get_expert_model_parallel_group,
        "data": parallel_state.get_data_parallel_group,
    }[kind]
    return [torch.distributed.get_process_group_ranks(getter())]


def parameters(found: Accepted, stage: int, vocabulary: int) -> int:
    """Parameters that one rank of a stage holds, counted on Megatron's own model, built without memory."""
    args, config = copy.copy(found.args), copy.copy(found.config)
    args.context_parallel_size = 1  # splits tokens, never weights, and has no local kernels
    config.use_cpu_initialization, config.context_parallel_size, config.attention_backend = True, 1, AttnBackend.auto
    for feature in ("sequence_parallel", "persist_layer_norm", "gradient_accumulation_fusion"):
        setattr(config, feature, False)  # none changes a shape, and each needs kernels that are not here
    ranks = args.world_size // args.pipeline_model_parallel_size
    virtual = config.virtual_pipeline_model_parallel_size
    total = 0
    with (
        groups(args, stage * ranks),
        silence(),
        torch.device("meta"),
        patch.object(torch.Tensor, "cuda", lambda tensor: tensor),
        patch.object(torch.cuda, "current_device", lambda: "meta"),
        patch.object(torch.cuda, "Stream", lambda *_, **__: None),
        patch.object(DotProductAttention, "__init__", _without_widths(DotProductAttention.__init__)),
    ):
        for chunk in range(virtual or 1):
            spec = get_gpt_decoder_block_spec(
                config, use_transformer_engine=False, normalization=args.normalization, vp_stage=chunk if virtual else None
            )
            mtp = (
                get_gpt_mtp_block_spec(config, spec, use_transformer_engine=False, vp_stage=chunk if virtual else None)
                if args.mtp_num_layers
                else None
            )
            first, last = _ends(stage, chunk, args.pipeline_model_parallel_size, virtual or 1)
            model = GPTModel(
                config=config,
                transformer_layer_spec=spec,
                vocab_size=vocabulary,
                max_sequence_length=args.max_position_embeddings,
                pre_process=first,
                post_process=last,
                share_embeddings_and_output_weights=not args.untie_embeddings_and_output_weights,
                position_embedding_type=args.position_embedding_type,
                mtp_block_spec=mtp,
                vp_stage=chunk if virtual else None,
            )
            total += sum(parameter.numel() for parameter in model.parameters())
    return total


def _without_widths(make: Any) -> Any:
    """The local attention kernel's constructor, deaf to the widths of latent attention: it holds no parameter."""
    return lambda self, *given, k_channels=None, v_channels=None, **named: make(self, *given, **named)


def _ends(stage: int, chunk: int, pipeline: int, virtual: int) -> tuple[bool, bool]:
    return stage == 0 and chunk == 0, stage == pipeline - 1 and chunk == virtual - 1
