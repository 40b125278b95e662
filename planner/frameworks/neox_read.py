"""Reads a GPT-NeoX YAML: Megatron's shape and DeepSpeed's keys in one file, spelled with hyphens or underscores.

Source of keys and defaults: gpt-neox, megatron/neox_arguments/neox_args.py; of widths, megatron/model/transformer.py.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

from planner.catalogue.schema import Model
from planner.errors import InputError
from planner.frameworks.config import Config
from planner.frameworks.deepspeed_json import AUTO, Parts, flat, read_json
from planner.frameworks.deepspeed_keys import BLOCKS, OPEN_BLOCKS, inner_keys
from planner.frameworks.deepspeed_read import with_stages
from planner.frameworks.files import Source, listed, shown, truth, whole_number, word_of
from planner.frameworks.reading import Reader
from planner.frameworks.trainer import config_of_parts

KIND = "GPT-NeoX YAML"
TELLING = ("pipe_parallel_size", "model_parallel_size")
"""One of these, which no other file has, beside one of the next makes a file a GPT-NeoX configuration."""
ALSO = ("num_layers", "hidden_size", "seq_length", "train_micro_batch_size_per_gpu", "zero_optimization", "checkpoint_activations")
SHAPE = ("num_layers", "hidden_size", "num_attention_heads")

VOCABULARIES = {"GPT2BPETokenizer": 50257, "HFTokenizer": 50277, "CharLevelTokenizer": 512, "HFGPT2Tokenizer": 50257}
"""Tokenizer -> entries of its usual vocabulary: GPT-2's, and the one of GPT-NeoX-20B. Source: megatron/tokenizer/tokenizer.py."""
DEFAULT_TOKENIZER = "GPT2BPETokenizer"
GATED = ("geglu", "swiglu", "reglu", "bilinear", "glu")
LLAMA_MULTIPLE = 256
FLASH, LOCAL = "flash", ("local", "sparse_fixed", "sparse_variable", "bigbird", "bslongformer")
PRECISIONS = {"fp16": "fp16", "bfloat16": "bf16", "bf16": "bf16"}
OPTIMIZERS = {"adam": "adam", "onebitadam": "adam", "cpu_adam": "adam", "cpu_torch_adam": "adam", "sgd": "sgd-momentum"}


def plain(data: Mapping[str, Any]) -> dict[str, Any]:
    """The file's keys with underscores.

    >>> plain({"num-layers": 2, "hidden_size": 8})
    {'num_layers': 2, 'hidden_size': 8}
    """
    return {str(key).replace("-", "_"): value for key, value in data.items()}


def recognises(source: Source) -> bool:
    """Whether a file states a model or its training in GPT-NeoX's keys."""
    keys = plain(source.data or {})
    return any(key in keys for key in TELLING) and any(key in keys for key in ALSO) and "tensor_model_parallel_size" not in keys


def read(source: Source, num_gpus: int | None) -> Config:
    """A GPT-NeoX configuration. Raises InputError."""
    data, parts = plain(source.data or {}), Parts(source)
    stages = _size(parts, data, "pipe_parallel_size", "pipeline_parallel", 0)
    _size(parts, data, "model_parallel_size", "tensor_parallel", 1)
    parts.layout["pipeline_parallel"] = max(stages, 1)
    read_json(parts, _deepspeed_keys(data), num_gpus)
    parts.ignored.clear()
    _workload(parts, data)
    _recompute(parts, data)
    _kernels(parts, data)
    parts.settings |= flat(data)
    model = _model(parts, data)
    _rest(parts, data)
    config = config_of_parts(parts, KIND, "deepspeed", model=model)
    if model is not None:
        config = dataclasses.replace(config, request=dataclasses.replace(config.request, model=str(source.path)))
    else:
        config = dataclasses.replace(config, assumed=(*config.assumed, "this file states no model: give --model"))
    return with_stages(config)


def _size(parts: Parts, data: Mapping[str, Any], key: str, axis: str, least: int) -> int:
    """A size of the layout, the default 0 or 1 where it is absent. Raises InputError."""
    if data.get(key) is None:
        parts.assumed.append(f"{key} is not stated: {least}")
        parts.layout[axis] = max(least, 1)
        return least
    return parts.axis(key, data[key], axis, least=least)


def _deepspeed_keys(data: Mapping[str, Any]) -> dict[str, Any]:
    """The keys that GPT-NeoX hands to DeepSpeed, its own spellings replaced."""
    found = dict(data)
    if isinstance(found.get("zero_stage"), int) and "zero_optimization" not in found:
        found["zero_optimization"] = {"stage": found["zero_stage"]}
    half = found.get("fp16")
    if isinstance(half, dict) and "enabled" not in half and "fp16" in half:
        found["fp16"] = {"enabled": half["fp16"]}
    if isinstance(half, dict) and half.get("type") in ("bfloat16", "bf16"):
        found["bf16"], found["fp16"] = {"enabled": half.get("enabled", half.get("fp16", True))}, {"enabled": False}
    for key in ("tensor_parallel", "expert_parallel", "pipeline", "data_types"):
        found.pop(key, None)
    found["pipeline"] = {"stages": AUTO}
    return found


def _workload(parts: Parts, data: Mapping[str, Any]) -> None:
    """Sequence, precision, dropout, optimizer. Raises InputError."""
    if data.get("seq_length") is not None:
        parts.request["seq_len"] = whole_number(parts.source, "seq-length", data["seq_length"], most=1 << 26)
        parts.note("seq-length", data["seq_length"], "seq_len")
    precision = data.get("precision")
    if isinstance(precision, str) and precision in PRECISIONS:
        parts.request["precision"] = PRECISIONS[str(precision)]
        parts.note("precision", precision, "precision")
    dropouts = [data.get(key, 0) for key in ("hidden_dropout", "attention_dropout")]
    parts.request["dropout"] = any(isinstance(value, (int, float)) and value > 0 for value in dropouts)
    parts.request["sequence_parallel"] = truth(parts.source, "sequence_parallel", data.get("sequence_parallel", False))
    kind = data.get("optimizer_type")
    if isinstance(kind, str) and kind.lower() in OPTIMIZERS:
        parts.request.setdefault("optimizer", OPTIMIZERS[kind.lower()])


def _recompute(parts: Parts, data: Mapping[str, Any]) -> None:
    """Activation checkpointing is off unless it is switched on. Raises InputError."""
    on = truth(parts.source, "checkpoint-activations", data.get("checkpoint_activations", False))
    parts.layout["recompute"] = "full" if on else "none"
    parts.assumed[:] = [line for line in parts.assumed if "recompute" not in line]
    parts.read.append(f"checkpoint-activations = {shown(on)}: recompute = {parts.layout['recompute']}")
    every = data.get("checkpoint_num_layers", 1)
    if on and whole_number(parts.source, "checkpoint-num-layers", every) > 1:
        parts.assumed.append(f"checkpoint-num-layers = {shown(every)}: taken as one checkpoint per layer")


def _kernels(parts: Parts, data: Mapping[str, Any]) -> None:
    """Attention by its configuration: a flash kernel, or a softmax over all scores."""
    kinds = _attention_kinds(parts.source, data)
    if kinds == {FLASH}:
        parts.software["attention_kernel"] = "flash2"
    else:
        fused = truth(
            parts.source, "scaled-upper-triang-masked-softmax-fusion", data.get("scaled_upper_triang_masked_softmax_fusion", False)
        )
        parts.software["attention_kernel"] = "fused_softmax" if fused else "torch"
    parts.read.append(f"attention-config: {', '.join(sorted(kinds))}: attention_kernel = {parts.software['attention_kernel']}")
    if kinds & set(LOCAL):
        parts.assumed.append("local and sparse attention are counted as full attention")
    parts.software["vocab_multiple"] = _multiple(parts.source, data)


def _attention_kinds(source: Source, data: Mapping[str, Any]) -> set[str]:
    """The kinds of attention that the layers have. Raises InputError."""
    listed = data.get("attention_config")
    if listed is None:
        return {"global"}
    if not isinstance(listed, list) or not all(isinstance(item, list) and item for item in listed):
        raise source.fail(f"attention-config = {shown(listed)} must be a list of [[kinds], repeats]")
    known = ("global", FLASH, *LOCAL, "gmlp", "amlp", "mamba", "rwkv")
    found: set[str] = set()
    for item in listed:
        kinds = item[0] if isinstance(item[0], list) else item[:1]
        found |= {word_of(source, "attention-config", kind, known) for kind in kinds[:1000]}
    if found & {"gmlp", "amlp", "mamba", "rwkv"}:
        raise source.fail(f"attention-config holds {sorted(found)[0]}: layers other than attention are not modelled")
    return found


def _multiple(source: Source, data: Mapping[str, Any]) -> int:
    """The vocabulary is padded to a multiple of this x model-parallel-size. Raises InputError."""
    return whole_number(source, "make-vocab-size-divisible-by", data.get("make_vocab_size_divisible_by", 128), most=1 << 20)


def _model(parts: Parts, data: Mapping[str, Any]) -> Model | None:
    """The shape, None where the file states none of it. Raises InputError."""
    source = parts.source
    given = [key for key in SHAPE if data.get(key) is not None]
    if not given:
        return None
    for key in SHAPE:
        if key not in given:
            raise source.fail(f"{key.replace('_', '-')} is missing: a shape needs {', '.join(k.replace('_', '-') for k in SHAPE)}")
    sizes = {key: whole_number(source, key.replace("_", "-"), data[key], most=1 << 24) for key in SHAPE}
    for key in SHAPE:
        parts.note(key.replace("_", "-"), data[key], key)
    heads = data.get("num_kv_heads")
    fields = {**sizes, **_mlp(source, data, sizes["hidden_size"]), **_traits(source, data), **_experts(source, data)}
    if heads is not None:
        fields["num_key_value_heads"] = whole_number(source, "num-kv-heads", heads, most=1 << 20)
    fields["vocab_size"] = _vocabulary(parts, data)
    if fields.get("num_experts"):
        fields["moe_ffn_hidden_size"] = fields["ffn_hidden_size"]
    try:
        return Model(name=source.path.stem, source=f"read from {source.path}", **fields)
    except InputError as error:
        raise source.fail(str(error)) from None


def _mlp(source: Source, data: Mapping[str, Any], hidden: int) -> dict[str, Any]:
    """Width and gate of the MLP: a stated width of a gated one is that of the plain MLP with as many weights. Raises InputError."""
    llama = data.get("mlp_type") == "llama"
    gated = llama or data.get("activation") in GATED
    stated = data.get("intermediate_size")
    width = whole_number(source, "intermediate-size", stated, most=1 << 26) if stated is not None else 4 * hidden
    multiple = whole_number(source, "mlp-multiple-of", data.get("mlp_multiple_of", LLAMA_MULTIPLE if llama else 1), most=1 << 20)
    if gated:
        width = int(2 * width / 3) if llama else int(2 * width / 3) // 2 if stated is not None else int(2 * width / 3)
    return {"ffn_hidden_size": -(-width // multiple) * multiple, "gated_mlp": gated}


def _traits(source: Source, data: Mapping[str, Any]) -> dict[str, Any]:
    """Norms, biases, positions, tying. Raises InputError."""

    def on(key: str, default: bool) -> bool:
        return truth(source, key.replace("_", "-"), data.get(key, default))

    tied_norm = on("gpt_j_residual", False) and on("gpt_j_tied", False)
    gated = data.get("mlp_type") == "llama" or data.get("activation") in GATED
    attention_bias = on("use_bias_in_attn_linear", True)
    learned = data.get("pos_emb", "learned") == "learned"
    positions = whole_number(
        source, "max-position-embeddings", data.get("max_position_embeddings", data.get("seq_length", 2048)), most=1 << 26
    )
    return {
        "norm": "rmsnorm" if data.get("norm") in ("rmsnorm", "te_rmsnorm", "scalenorm") else "layernorm",
        "norms_per_layer": 1 if tied_norm else 2,
        "qkv_bias": attention_bias,
        "linear_bias": attention_bias and not gated,
        "learned_positions": positions if learned else 0,
        "max_seq_len": positions,
        "tied_embeddings": not on("no_weight_tying", False),
    }


def _experts(source: Source, data: Mapping[str, Any]) -> dict[str, Any]:
    """A mixture of experts in every layer, where there are several. Raises InputError."""
    number = whole_number(source, "moe-num-experts", data.get("moe_num_experts", 1), most=1 << 16)
    if number == 1:
        return {}
    return {"num_experts": number, "experts_per_token": whole_number(source, "moe-top-k", data.get("moe_top_k", 1), most=number)}


def _vocabulary(parts: Parts, data: Mapping[str, Any]) -> int:
    """The padded vocabulary: stated, else the usual one of the tokenizer. Raises InputError."""
    source = parts.source
    stated = data.get("padded_vocab_size", data.get("vocab_size"))
    if stated is not None:
        size = whole_number(source, "vocab-size", stated, most=1 << 27)
        parts.note("vocab-size", stated, "vocab_size")
    else:
        tokenizer = data.get("tokenizer_type", DEFAULT_TOKENIZER)
        size = VOCABULARIES.get(tokenizer, VOCABULARIES[DEFAULT_TOKENIZER]) if isinstance(tokenizer, str) else 0
        size = size or VOCABULARIES[DEFAULT_TOKENIZER]
        parts.assumed.append(f"the vocabulary lies in the tokenizer {shown(tokenizer)}: taken as {size:,} entries before padding")
    whole = _multiple(source, data) * int(parts.layout["tensor_parallel"])
    return -(-size // whole) * whole


def _rest(parts: Parts, data: Mapping[str, Any]) -> None:
    """Expert groups, and what changes nothing here. Raises InputError."""
    expert = data.get("moe_expert_parallel_size")
    if expert is not None:
        parts.axis("moe-expert-parallel-size", expert, "expert_parallel")
    used = {line.split(" ")[0].split(".")[0].replace("-", "_") for line in parts.read}
    left = [*inner_keys(flat(data), INNER), *sorted(key for key in data if key not in used and key not in USED)]
    if left:
        parts.ignored.append(listed(left))


INNER = {**BLOCKS, **OPEN_BLOCKS, "fp16": (*BLOCKS["fp16"], "fp16", "type")}
"""Blocks that are handed to DeepSpeed -> their keys. GPT-NeoX brings a DeepSpeed of its own: others are told, not refused."""

USED = (
    *("norm", "pos_emb", "no_weight_tying", "num_kv_heads", "activation", "mlp_type", "intermediate_size", "mlp_multiple_of"),
    *("make_vocab_size_divisible_by", "max_position_embeddings", "gpt_j_residual", "gpt_j_tied", "hidden_dropout"),
    *("attention_dropout", "tokenizer_type", "moe_num_experts", "moe_top_k", "scaled_upper_triang_masked_softmax_fusion"),
    *("use_bias_in_attn_linear", "zero_optimization", "fp16", "bf16", "attention_config", "checkpoint_num_layers", "optimizer"),
)
"""Keys that the model or the stack follow from, beside those that are noted."""

READERS = (Reader(KIND, recognises, read),)
