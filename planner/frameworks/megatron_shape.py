"""The model that Megatron's settings describe, Megatron's defaults filled in.

Source: _add_network_size_args, _add_moe_args and validate_args of megatron/training/arguments.py.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from planner.catalogue.schema import Model
from planner.errors import InputError
from planner.frameworks.files import Source, shown, truth, whole_number
from planner.frameworks.megatron_flags import (
    DEFAULT_VOCAB_MULTIPLE,
    EXPERTS,
    LATENT,
    LATENT_DEFAULTS,
    SHAPE,
    TOKENIZERS,
    USUAL_VOCABULARY,
    flag_of,
)

NEEDED = ("num_layers", "hidden_size", "num_attention_heads")
MOST_LAYERS = 10_000
ITEM = re.compile(r"\[([0-9, ]*)\](?:\*(\d{1,5}))?")
PATTERN = re.compile(r"(\()?((?:\[[0-9, ]*\](?:\*\d{1,5})?\+?)+)(?(1)\))(?:\*(\d{1,5}))?")


@dataclass
class Facts:
    """A file's settings, and the notes on how they were understood."""

    source: Source
    settings: Mapping[str, Any]
    read: list[str] = field(default_factory=list)
    assumed: list[str] = field(default_factory=list)
    ignored: list[str] = field(default_factory=list)
    used: set[str] = field(default_factory=set)

    def value(self, key: str) -> Any:
        """A setting as stated, None where it is absent; it counts as read."""
        found = self.settings.get(key)
        if found is not None:
            self.used.add(key)
        return found

    def whole(self, key: str, default: int = 0, least: int = 0) -> int:
        """A setting as a whole number. Raises InputError."""
        found = self.value(key)
        return default if found is None else whole_number(self.source, key, found, least=least)

    def on(self, key: str, default: bool = False) -> bool:
        """A setting as yes or no. Raises InputError."""
        found = self.value(key)
        return default if found is None else truth(self.source, key, found)

    def word(self, key: str, default: str = "") -> str:
        """A setting as a word. Raises InputError."""
        found = self.value(key)
        if found is not None and not isinstance(found, (str, int, float)):
            raise self.source.fail(f"{key} = {shown(found)} must be a word")
        return default if found is None else str(found)

    def share(self, key: str, default: float) -> float:
        """A setting as a number. Raises InputError."""
        found = self.value(key)
        try:
            return default if found is None else float(found)
        except (TypeError, ValueError):
            raise self.source.fail(f"{key} = {shown(found)} must be a number") from None

    def assume(self, line: str) -> None:
        """Note what the file does not say and how it was taken."""
        self.assumed.append(line)


def layer_pattern(text: Any, num_layers: int) -> list[int]:
    """One number per layer, of a list written out or a sum of repeated lists. Raises ValueError.

    >>> layer_pattern("([0]*1+[1]*3)", 4), layer_pattern("([1]*2+[0])*2", 6), layer_pattern(2, 4)
    ([0, 1, 1, 1], [1, 1, 0, 1, 1, 0], [1, 0, 1, 0])
    """
    if isinstance(text, list):
        found = [item if isinstance(item, int) else -1 for item in text]
    elif isinstance(text, int) or str(text).strip().isdigit():
        every = int(text)
        if every < 1:
            raise ValueError("must be positive")
        return [int(layer % every == 0) for layer in range(num_layers)]
    else:
        match = PATTERN.fullmatch(str(text).replace(" ", ""))
        if not match:
            raise ValueError("must be a number or a list such as ([0]*1+[1]*31)")
        found = []
        for items, times in ITEM.findall(match[2]):
            found += [int(item) for item in items.split(",") if item] * int(times or 1)
            if len(found) > MOST_LAYERS:
                raise ValueError("is longer than any model")
        found = found * int(match[3] or 1) if len(found) * int(match[3] or 1) <= MOST_LAYERS else []
    if len(found) != num_layers or not set(found) <= {0, 1}:
        raise ValueError(f"must list 0 or 1 for each of the {num_layers} layers")
    return found


def model_of(facts: Facts, *, groups_need_flag: bool) -> Model | None:
    """The model of the settings, None where they state none of its sizes. Raises InputError.

    ``groups_need_flag``: KV groups count only beside --group-query-attention, as on Megatron's command line.
    """
    stated = [key for key in NEEDED if facts.settings.get(key) is not None]
    if not stated:
        return None
    missing = [key for key in NEEDED if key not in stated]
    if missing:
        if not groups_need_flag:  # overrides of a recipe that has the rest
            facts.assume(f"{', '.join(missing)} not stated: the shape is the named recipe's; name the model")
            return None
        raise facts.source.fail(f"{flag_of(missing[0])} is missing: the shape of the model needs {', '.join(map(flag_of, NEEDED))}")
    fields: dict[str, Any] = {ours: facts.whole(theirs, least=0) for ours, theirs in SHAPE.items()}
    fields |= _attention(facts, fields, groups_need_flag) | _mlp(facts, fields) | _norms_and_biases(facts)
    fields |= _experts(facts, fields) | _window(facts, fields["num_layers"])
    fields["num_mtp_layers"] = facts.whole("mtp_num_layers")
    fields["vocab_size"] = vocabulary(facts)
    fields["tied_embeddings"] = not facts.on("untie_embeddings_and_output_weights")
    name = re.sub(r"[^A-Za-z0-9._-]", "-", facts.source.path.stem)[:60] or "model"
    try:
        return Model(name=name, source=f"read from {facts.source.path}", **fields)
    except InputError as error:
        raise facts.source.fail(str(error)) from None


def _attention(facts: Facts, fields: Mapping[str, Any], groups_need_flag: bool) -> dict[str, Any]:
    heads, hidden = fields["num_attention_heads"], fields["hidden_size"]
    learned = facts.word("position_embedding_type", "learned_absolute") == "learned_absolute"
    rotary = facts.on("use_rotary_position_embeddings") or not facts.on("add_position_embedding", True)
    positions = facts.whole("max_position_embeddings") or facts.whole("seq_length")
    found: dict[str, Any] = {"learned_positions": positions if learned and not rotary else 0, "max_seq_len": positions}
    if facts.on("multi_latent_attention"):
        for ours, theirs in LATENT.items():
            found[ours] = facts.whole(theirs, LATENT_DEFAULTS.get(theirs, 0))
        facts.used |= {"qk_layernorm", "kv_channels"}
        return found
    channels = facts.whole("kv_channels")
    if channels and heads and channels * heads != hidden:
        found["head_dim"] = channels
    groups = facts.whole("num_query_groups")
    grouped = facts.on("group_query_attention") or not groups_need_flag
    found["num_key_value_heads"] = (groups or (1 if groups_need_flag else 0)) if grouped else 0
    found["qk_norm"] = facts.on("qk_layernorm")
    return found


def _mlp(facts: Facts, fields: Mapping[str, Any]) -> dict[str, Any]:
    """The width of the MLP: four times the hidden size, two thirds of that where it is gated."""
    gated, hidden = facts.on("swiglu") or facts.on("quick_geglu"), fields["hidden_size"]
    width = fields["ffn_hidden_size"] or (hidden * 8 // 3 // 64 * 64 if facts.on("swiglu") else 4 * hidden)
    if not fields["ffn_hidden_size"]:
        facts.assume(f"{flag_of('ffn_hidden_size')} is not stated: {width}, Megatron's default")
    return {"gated_mlp": gated, "ffn_hidden_size": width}


def _norms_and_biases(facts: Facts) -> dict[str, Any]:
    linear = facts.on("add_bias_linear", True)
    norm = facts.word("normalization", "LayerNorm").lower()
    return {
        "norm": "rmsnorm" if norm == "rmsnorm" else "layernorm",
        "linear_bias": linear,
        "qkv_bias": linear or facts.on("add_qkv_bias"),
    }


def _experts(facts: Facts, fields: Mapping[str, Any]) -> dict[str, Any]:
    """Experts, and the leading layers that have none."""
    if not facts.whole("num_experts"):
        return {}
    found = {ours: facts.whole(theirs) for ours, theirs in EXPERTS.items()}
    found["experts_per_token"] = found["experts_per_token"] or 2
    width = found["moe_ffn_hidden_size"]
    if not width:
        width = found["moe_ffn_hidden_size"] = fields["ffn_hidden_size"]
        facts.assume(f"{flag_of('moe_ffn_hidden_size')} is not stated: {width}, the width of the dense MLP")
    shared = found["shared_ffn_hidden_size"]
    found["num_shared_experts"] = 0 if not shared else max(shared // width, 1) if width and shared % width == 0 else 1
    stated = facts.value("moe_layer_freq")
    try:
        pattern = layer_pattern(1 if stated is None else stated, fields["num_layers"])
    except ValueError as error:
        raise facts.source.fail(f"moe_layer_freq = {shown(stated)} {error}") from None
    dense = pattern.count(0)
    if pattern != [0] * dense + [1] * (len(pattern) - dense):
        facts.assume(f"moe_layer_freq mixes dense and expert layers: the {dense} dense ones are taken as the first")
    biased = fields["linear_bias"]
    found |= {"num_dense_layers": dense, "expert_bias": biased, "router_bias": biased}
    return found if dense else found | {"ffn_hidden_size": 0}


def _window(facts: Facts, num_layers: int) -> dict[str, Any]:
    """Layers whose attention sees a window only."""
    stated = facts.value("window_size")
    if stated is None:
        return {}
    numbers = re.findall(r"-?\d+", str(stated)) if not isinstance(stated, list) else [str(item) for item in stated]
    left = int(numbers[0]) if numbers and re.fullmatch(r"-?\d{1,9}", numbers[0]) else -1
    if left < 0:
        return {}
    skip = facts.value("window_attn_skip_freq")
    try:
        windowed = num_layers if skip is None else _windowed(skip, num_layers)
    except ValueError as error:
        raise facts.source.fail(f"window_attn_skip_freq = {shown(skip)} {error}") from None
    return {"sliding_window": left, "num_window_layers": windowed}


def _windowed(skip: Any, num_layers: int) -> int:
    if isinstance(skip, list) or "[" in str(skip):
        return sum(layer_pattern(skip, num_layers))
    every = int(skip) if str(skip).isdigit() else 0
    if every < 1:
        raise ValueError("must be a positive number or a list")
    return num_layers - num_layers // every


def vocabulary(facts: Facts) -> int:
    """The size of the vocabulary before it is padded: stated, printed in the log, or that of the tokenizer."""
    for key in ("vocab_size", "padded_vocab_size"):
        if facts.settings.get(key) is not None:
            return facts.whole(key, least=1)
    printed = re.search(r"padded vocab \(size: (\d{1,9})\)", facts.source.text)
    if printed:
        facts.read.append(f"padded vocab (size: {printed[1]}): vocab_size")
        return int(printed[1])
    kind = facts.word("tokenizer_type") or ("GPT2BPETokenizer" if facts.settings.get("merge_file") else "")
    size = TOKENIZERS.get(kind, USUAL_VOCABULARY)
    why = f"that of {kind}" if kind in TOKENIZERS else "as Llama 3's; the tokenizer decides"
    facts.assume(f"{flag_of('vocab_size')} is not stated: {size:,}, {why}")
    return size


def vocabulary_multiple(facts: Facts) -> int:
    """What the vocabulary is padded to a multiple of, times the tensor group."""
    padded = facts.on("pad_vocab_size", True)
    return facts.whole("make_vocab_size_divisible_by", DEFAULT_VOCAB_MULTIPLE, least=1) if padded else 1
