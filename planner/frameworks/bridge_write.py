"""Writes a layout as a Megatron-Bridge configuration in YAML, with the same as key=value overrides in its head."""

from __future__ import annotations

import json
from collections.abc import Iterator

from planner.frameworks.bridge_keys import PRECISIONS, key_of
from planner.frameworks.launch_script import comment
from planner.frameworks.megatron_shape import layer_pattern
from planner.frameworks.megatron_write import environment, model_settings, parallel_settings, training_settings, unstated
from planner.frameworks.writing import Launch, Target

FILE = "megatron_bridge.yaml"
PROGRAM = '"${TRAINING_SCRIPT:?your Megatron-Bridge training script, one that takes --config-file}"'
Setting = tuple[str, object]

OF_THE_RECIPE = ("bf16", "fp16", "fp8", "fp8_recipe", "fp4", "fp4_recipe", "accumulate_allreduce_grads_in_fp32", "grad_reduce_in_bf16")
"""Fields that the precision recipe and ddp.grad_reduce_in_fp32 state instead."""
NO_KEY = ("group_query_attention", "create_attention_mask_in_dataloader", "check_for_nan_in_loss_and_grad")
"""Fields that Bridge has no key for, or does not need: groups of KV heads count by their number alone."""
PATTERNS = ("moe_layer_freq", "window_attn_skip_freq")
"""Fields that take one number per layer, as a list."""
OVERRIDES = (
    *("model.tensor_model_parallel_size", "model.pipeline_model_parallel_size", "model.virtual_pipeline_model_parallel_size"),
    *("model.pipeline_model_parallel_layout", "model.context_parallel_size", "model.expert_model_parallel_size"),
    *("model.expert_tensor_parallel_size", "model.sequence_parallel", "model.recompute_granularity", "model.recompute_method"),
    *("model.recompute_num_layers", "model.recompute_modules", "model.microbatch_group_size_per_vp_stage"),
    *("train.global_batch_size", "train.micro_batch_size", "ddp.use_distributed_optimizer", "ddp.use_megatron_fsdp"),
    *("ddp.data_parallel_sharding_strategy", "mixed_precision"),
)
"""Keys that make the layout: those of the head, for a recipe that states the rest."""


def write(target: Target) -> Launch:
    """The launch of a layout."""
    keys = dict(keys_of(target))
    return Launch(
        files={FILE: head(target, keys) + body(keys)},
        environment=environment(target),
        arguments={"CONFIG_ARGS": (f"--config-file {FILE}",)},
        program=PROGRAM,
    )


def keys_of(target: Target) -> Iterator[Setting]:
    """Dotted keys with their values."""
    job = target.job
    for settings in (model_settings(target), parallel_settings(target), training_settings(target)):
        for field, value in settings:
            if field not in OF_THE_RECIPE and field not in NO_KEY:
                yield translated(target, field, value)
    if target.layout.virtual_pipeline > 1:
        yield "model.virtual_pipeline_model_parallel_size", target.layout.virtual_pipeline
    yield "dataset.sequence_length", job.seq_len
    yield "mixed_precision", PRECISIONS[job.precision]
    yield "ddp.grad_reduce_in_fp32", job.software.gradient_bytes >= 4
    if target.layout.zero_stage >= 2:
        yield "dist.use_megatron_fsdp", True


def translated(target: Target, field: str, value: object) -> Setting:
    """A Megatron field under Bridge's key, and its value as Bridge takes it."""
    if field == "untie_embeddings_and_output_weights":
        return "model.share_embeddings_and_output_weights", not value
    if field == "num_virtual_stages_per_pipeline_rank":
        return "model.virtual_pipeline_model_parallel_size", value
    if field in PATTERNS and not str(value).isdigit():
        return key_of(field), layer_pattern(value, target.job.model.num_layers)
    if field == "window_size":
        return key_of(field), [int(part) for part in str(value).split(",")]
    if isinstance(value, str) and value.isdigit():
        return key_of(field), int(value)
    return key_of(field), list(value) if isinstance(value, tuple) else value


def head(target: Target, keys: dict[str, object]) -> str:
    """Comment lines: what the file is, what no key says, and the layout as overrides of a recipe."""
    overrides = [f"#   {key}={override(keys[key])}" for key in OVERRIDES if key in keys]
    notes = [f"# {line}" for line in unstated(target.job.model)]
    if target.job.model.gated_mlp:
        notes.append("# The gate's activation function is the recipe's: a function cannot be stated here.")
    return "\n".join([comment(target).rstrip("\n"), *notes, "# The layout as overrides of a recipe:", *overrides, ""])


def override(value: object) -> str:
    """A value behind key= on a command line.

    >>> override("Et*2|t*2L"), override(True), override(["mlp", "moe"])
    ("'Et*2|t*2L'", 'true', "'[mlp,moe]'")
    """
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, list):
        return f"'[{','.join(map(str, value))}]'"
    return str(value) if not isinstance(value, str) or value.replace("_", "").isalnum() else f"'{value}'"


def body(keys: dict[str, object]) -> str:
    """The keys as tables of YAML; JSON's scalars and lists are YAML's."""
    tables: dict[str, list[str]] = {}
    for name, value in keys.items():
        table, dot, key = name.partition(".")
        tables.setdefault(table if dot else "", []).append(f"{'  ' if dot else ''}{key or name}: {json.dumps(value)}")
    lines = [line for table, rows in tables.items() for line in ([f"{table}:"] if table else []) + rows]
    return "\n".join(lines) + "\n"
