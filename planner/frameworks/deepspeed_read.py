"""Reads DeepSpeed's files: a ds_config.json, and launch scripts of Megatron-DeepSpeed or of Hugging Face's Trainer that name one."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Mapping, Sequence
from typing import Any

from planner.frameworks.config import Config
from planner.frameworks.deepspeed import stage_layers
from planner.frameworks.deepspeed_json import Parts, batch_of, flat, model_ranks, read_json, settle_batch
from planner.frameworks.files import Source, open_source, shown
from planner.frameworks.reading import Reader
from planner.frameworks.shell import Script, read_script
from planner.frameworks.trainer import behind_program, beside, config_of_parts, flags_of, is_script, known, read_flags, read_launcher
from planner.request import Request
from solver.layout import chunk_sizes

JSON_KIND = "DeepSpeed ds_config.json"
MEGATRON_KIND = "Megatron-DeepSpeed launch script"
TRAINER_KIND = "DeepSpeed launch script of Hugging Face's Trainer"

TELLING = ("zero_optimization", "train_micro_batch_size_per_gpu", "train_batch_size")
"""One of these makes a JSON file a DeepSpeed configuration."""
FOREIGN = ("distributed_type", "compute_environment", "fsdp_config", "model_type", "num_hidden_layers")
"""Keys of accelerate's and of models' files, which may hold some of DeepSpeed's beside them."""

INSIDE = "ds_config:"
"""Stands before the keys of the JSON among a script's settings."""

SHAPE_FLAG = re.compile(r"--(?:num[-_]layers|hidden[-_]size|tensor[-_]model[-_]parallel[-_]size|pipeline[-_]model[-_]parallel[-_]size)\b")
DEEPSPEED_FLAG = re.compile(r"--deepspeed(?:[-_]config)?\b")

RENAMED = {
    "--num-key-value-heads": ("--group-query-attention", "--num-query-groups"),
    "--ds-num-experts": ("--num-experts",),
    "--topk": ("--moe-router-topk",),
    "--model-parallel-size": ("--tensor-model-parallel-size",),
    "--pipe-parallel-size": ("--pipeline-model-parallel-size",),
    "--normalization": ("--normalization",),
}
"""Megatron-DeepSpeed's flags that Megatron core spells otherwise. Source: Megatron-DeepSpeed, megatron/arguments.py."""
SPELLED = {"--normalization": {"rmsnorm": "RMSNorm", "layernorm": "LayerNorm"}}
SWITCHES = (
    *("--deepspeed", "--no-pipeline-parallel", "--checkpoint-activations", "--deepspeed-activation-checkpointing"),
    *("--distribute-checkpointed-activations", "--partition-activations", "--cpu-optimizer", "--create-moe-param-group"),
    *("--use-flash-attn-v1", "--use-flash-attn-v2", "--use-flash-attn-triton", "--use-flash-attn", "--contigious-checkpointing"),
    *("--checkpoint-in-cpu", "--synchronize-each-layer", "--force-ds-sequence-parallel", "--no-query-key-layer-scaling"),
)
VALUES = (
    *("--deepspeed_config", "--deepspeed-config", "--zero-stage", "--ds-sequence-parallel-size", "--moe-expert-parallel-size"),
    *("--checkpoint-num-layers", "--expert-interval", "--mlp-type", "--partition-method"),
)
"""Flags of DeepSpeed that Megatron core does not know, without and with a value."""
FULL_RECOMPUTE = ("--checkpoint-activations", "--deepspeed-activation-checkpointing")
MEGATRON_MULTIPLE = 128
"""Of --make-vocab-size-divisible-by."""
DEFAULT_STAGE = 1
"""Of --zero-stage. Source: Megatron-DeepSpeed, megatron/arguments.py, _add_zero_args."""


# ds_config.json


def is_json(source: Source) -> bool:
    """Whether a file holds DeepSpeed's keys and none that only accelerate or a model has."""
    data = source.data or {}
    return any(key in data for key in TELLING) and not any(key in data for key in FOREIGN)


def read_config_json(source: Source, num_gpus: int | None) -> Config:
    """A ds_config.json. Raises InputError."""
    parts = Parts(source)
    data = source.data or {}
    read_json(parts, data, num_gpus)
    parts.settings |= flat(data)
    parts.assumed.append("the model is not in a ds_config.json: give --model (and --seq-len)")
    single = [axis for axis in ("tensor_parallel", "pipeline_parallel", "context_parallel", "expert_parallel") if parts.layout[axis] == 1]
    if single:
        parts.assumed.append(f"{', '.join(single)} = 1: no groups are stated")
    return config_of_parts(parts, JSON_KIND, "deepspeed")


# Launch scripts


def is_megatron_script(source: Source) -> bool:
    """Whether a script starts Megatron under DeepSpeed."""
    return is_script(source) and bool(DEEPSPEED_FLAG.search(source.text)) and bool(SHAPE_FLAG.search(source.text))


def is_trainer_script(source: Source) -> bool:
    """Whether a script gives a training program a DeepSpeed configuration."""
    return is_script(source) and ".py" in source.text and bool(DEEPSPEED_FLAG.search(source.text))


def json_beside(parts: Parts, script: Script, value: str | None) -> Source:
    """The DeepSpeed configuration that a script names, one without keys where it is not there. Raises InputError for a broken one."""
    nothing = Source(parts.source.path, "", {})
    if value is None:
        return nothing
    path = beside(parts.source, script, value)
    if path is None:
        parts.assumed.append(f"the DeepSpeed configuration {shown(value)} is not beside the script: what only it says is open")
        return nothing
    inner = open_source(path)
    parts.read.append(f"{path}: the DeepSpeed configuration that the script names")
    parts.settings |= {f"{INSIDE}{key}": item for key, item in flat(inner.data or {}).items()}
    return inner


def read_trainer_script(source: Source, num_gpus: int | None) -> Config:
    """A script that starts Hugging Face's Trainer, with the configuration beside it. Raises InputError."""
    script, parts = read_script(source), Parts(source)
    launcher, words = behind_program(script.words)
    read_launcher(parts, launcher)
    num_gpus, flags = num_gpus or parts.request.get("num_gpus"), flags_of(words)
    named = known(flags, "deepspeed") or known(flags, "deepspeed_config")
    parts.source = json_beside(parts, script, None if named == "true" else named)
    read_json(parts, parts.source.data or {}, num_gpus)
    parts.source = source
    read_flags(parts, flags, num_gpus)
    if "model" not in parts.request:
        parts.assumed.append("the script names no model of the catalogue: give --model")
    return config_of_parts(parts, TRAINER_KIND, "deepspeed")


def translated(words: Sequence[str]) -> tuple[list[str], dict[str, str]]:
    """A command in Megatron core's words, and DeepSpeed's own flags with their values ("" for a switch).

    >>> translated(["x.py", "--topk", "2", "--zero-stage", "1", "--normalization", "rmsnorm", "--deepspeed"])
    (['x.py', '--moe-router-topk', '2', '--normalization', 'RMSNorm'], {'--zero-stage': '1', '--deepspeed': ''})
    """
    kept: list[str] = []
    own: dict[str, str] = {}
    pieces = [piece for word in words for piece in (word.split("=", 1) if word.startswith("--") and "=" in word else [word])]
    place = 0
    while place < len(pieces):
        word = pieces[place]
        following = pieces[place + 1] if place + 1 < len(pieces) else ""
        if word in SWITCHES:
            own[word] = ""
        elif word in VALUES:
            own[word] = following
            place += 1
        elif word in RENAMED:
            kept += [*RENAMED[word], SPELLED.get(word, {}).get(following, following)]
            place += 1
        else:
            kept.append(word)
        place += 1
    return kept, own


def read_megatron_script(source: Source, num_gpus: int | None) -> Config:
    """A Megatron-DeepSpeed script, with the configuration beside it. Raises InputError."""
    from planner.frameworks.megatron_read import arguments_of, cluster_of, config_of, settings_of_words

    script = read_script(source)
    words, own = translated(arguments_of(script.words))
    config = config_of(source, MEGATRON_KIND, settings_of_words(source, words) | cluster_of(script.words), num_gpus)
    parts = Parts(source, layout=dict(config.layout), settings=dict(config.settings) | own)
    read_launcher(parts, behind_program(script.words)[0])
    gpus = num_gpus or config.request.num_gpus or parts.request.get("num_gpus")
    inner = Parts(json_beside(parts, script, own.get("--deepspeed_config") or own.get("--deepspeed-config") or None))
    inner.layout["pipeline_parallel"] = parts.layout["pipeline_parallel"]
    read_json(inner, inner.source.data or {}, None)
    _layout_of_flags(parts, own, inner)
    _batch_of_json(parts, inner.source, gpus)
    kernels = {key: config.software[key] for key in ("vocab_multiple",) if key in config.software}
    flash = {"attention_kernel": "flash2"} if any(flag.startswith("--use-flash-attn") for flag in own) else {}
    config = dataclasses.replace(
        config,
        framework="deepspeed",
        request=dataclasses.replace(config.request, framework="deepspeed", **_workload(parts, inner, config.request)),
        layout=parts.layout,
        software={"vocab_multiple": MEGATRON_MULTIPLE, **kernels, **flash, **inner.software},
        settings=parts.settings,
        read=(*config.read, *parts.read, *inner.read),
        assumed=(*config.assumed, *parts.assumed, *(line for line in inner.assumed if "offload" in line)),
    )
    return with_stages(config)


def _workload(parts: Parts, inner: Parts, flags: Request) -> dict[str, Any]:
    """What the JSON says of the workload; the flags win, but for the precision, which DeepSpeed itself sets."""
    found = {**inner.request, **parts.request}
    wanted = ("precision", "optimizer", "num_gpus", "gpus_per_node", "global_batch_size")
    return {key: found[key] for key in wanted if key in found and (getattr(flags, key) is None or key == "precision")}


def _layout_of_flags(parts: Parts, own: Mapping[str, str], inner: Parts) -> None:
    """The axes that DeepSpeed's flags state: sharding, sequence and expert groups, recompute. Raises InputError."""
    if "--zero-stage" in own:
        parts.axis("--zero-stage", own["--zero-stage"], "zero_stage", least=0, most=3)
    elif any(key.startswith(f"{INSIDE}zero_optimization") for key in parts.settings):
        parts.layout["zero_stage"] = inner.layout["zero_stage"]
    else:
        parts.layout["zero_stage"] = DEFAULT_STAGE
        parts.assumed.append(f"--zero-stage is not stated: zero_stage = {DEFAULT_STAGE}, the script's default")
    for flag, axis in (("--ds-sequence-parallel-size", "context_parallel"), ("--moe-expert-parallel-size", "expert_parallel")):
        if flag in own:
            parts.axis(flag, own[flag], axis)
    if any(flag in own for flag in FULL_RECOMPUTE):
        parts.layout["recompute"] = "full"
        parts.layout.pop("recompute_layers", None)
        parts.read.append(f"{next(flag for flag in FULL_RECOMPUTE if flag in own)}: recompute = full")
    parts.layout |= {"virtual_pipeline": 1, "schedule": "1f1b", "expert_tensor_parallel": 1}


def _batch_of_json(parts: Parts, inner: Source, num_gpus: int | None) -> None:
    """The batch as the JSON states it, for what the flags leave open. Raises InputError."""
    micro = parts.layout.get("micro_batch_size")
    settle_batch(parts, batch_of(inner, inner.data or {}), model_ranks(parts.layout), num_gpus)
    if micro is not None:
        parts.layout["micro_batch_size"] = micro


def with_stages(config: Config) -> Config:
    """A configuration with the split that DeepSpeed's pipeline makes, where that is not the even one."""
    stages = int(config.layout.get("pipeline_parallel", 1))
    if config.model is None or stages < 2 or stages > config.model.num_layers:
        return config
    own = stage_layers(config.model.num_layers, stages)
    if own == chunk_sizes(config.model.num_layers, stages):
        return config
    cut = "/".join(map(str, own)) if stages <= 16 else f"{own[0]} and then {own[-1]}"
    line = f"DeepSpeed's pipeline cuts the layers by type: {cut} per stage"
    return dataclasses.replace(config, layers_per_stage=own, assumed=(*config.assumed, line))


READERS = (
    Reader(JSON_KIND, is_json, read_config_json),
    Reader(MEGATRON_KIND, is_megatron_script, read_megatron_script),
    Reader(TRAINER_KIND, is_trainer_script, read_trainer_script),
)
