"""Megatron's argument list as data: what each flag is called, whether it takes a value, and which of our fields it states."""

from __future__ import annotations

import tomllib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import cache
from importlib import resources
from typing import Any

from planner.frameworks.files import Source, truth, whole_number, word_of

WHOLE, NUMBER, TEXT, SEVERAL, ON, OFF = "whole", "number", "text", "values", "on", "off"
"""What stands behind a flag: one whole number, number or word, several words, or nothing, as the flag turns its field on or off."""

VERSION = "0.19"
MOST_WORDS = 20_000


@dataclass(frozen=True)
class Flag:
    """One flag of Megatron's parser."""

    name: str
    """With its two dashes."""
    field: str
    """The name of its value in the parsed arguments, in a YAML of arguments and in the block that a training log prints."""
    kind: str
    choices: tuple[str, ...] = ()

    @property
    def needs_value(self) -> bool:
        """Whether it means nothing without a value that is written out: a number, or one of some words."""
        return self.kind in (WHOLE, NUMBER) or bool(self.choices)

    @property
    def is_switch(self) -> bool:
        """Whether no value stands behind it."""
        return self.kind in (ON, OFF)


@cache
def flags() -> Mapping[str, Flag]:
    """Every flag of the parser by its name, with dashes."""
    data = tomllib.loads(resources.files("planner.frameworks").joinpath("megatron_flags.toml").read_text(encoding="utf-8"))
    found = {}
    for kind in (WHOLE, NUMBER, TEXT, SEVERAL, ON, OFF):
        for name in data[kind]:
            field = data["field"].get(name, name.replace("-", "_"))
            found[f"--{name}"] = Flag(f"--{name}", field, kind, tuple(data["choices"].get(name, ())))
    return found


@cache
def flags_of_fields() -> Mapping[str, Flag]:
    """The usual flag of each field: the one of its own name, else one that turns it on or states its value, else one that turns it off."""

    def usual(flag: Flag) -> tuple[bool, bool]:
        return flag.name != "--" + flag.field.replace("_", "-"), flag.kind == OFF

    found: dict[str, Flag] = {}
    for flag in sorted(flags().values(), key=usual, reverse=True):
        found[flag.field] = flag
    return found


def flag_of(field: str) -> str:
    """The flag that states a field.

    >>> flag_of("tensor_model_parallel_size"), flag_of("add_bias_linear"), flag_of("fp8")
    ('--tensor-model-parallel-size', '--disable-bias-linear', '--fp8-format')
    """
    known = flags_of_fields().get(field)
    return known.name if known else "--" + field.replace("_", "-")


LAYOUT: Mapping[str, str] = {
    "tensor_parallel": "tensor_model_parallel_size",
    "pipeline_parallel": "pipeline_model_parallel_size",
    "context_parallel": "context_parallel_size",
    "expert_parallel": "expert_model_parallel_size",
    "expert_tensor_parallel": "expert_tensor_parallel_size",
    "micro_batch_size": "micro_batch_size",
}
"""Our axis -> Megatron's field, for the sizes that both state as one number."""

SHAPE: Mapping[str, str] = {
    "num_layers": "num_layers",
    "hidden_size": "hidden_size",
    "num_attention_heads": "num_attention_heads",
    "ffn_hidden_size": "ffn_hidden_size",
}
"""Our field of a model -> Megatron's: sizes of every model."""

EXPERTS: Mapping[str, str] = {
    "num_experts": "num_experts",
    "experts_per_token": "moe_router_topk",
    "moe_ffn_hidden_size": "moe_ffn_hidden_size",
    "shared_ffn_hidden_size": "moe_shared_expert_intermediate_size",
}
"""The same for mixtures of experts."""

LATENT: Mapping[str, str] = {
    "q_lora_rank": "q_lora_rank",
    "kv_lora_rank": "kv_lora_rank",
    "qk_nope_head_dim": "qk_head_dim",
    "qk_rope_head_dim": "qk_pos_emb_head_dim",
    "v_head_dim": "v_head_dim",
}
"""The same for multi-head latent attention."""

LATENT_DEFAULTS: Mapping[str, int] = {"kv_lora_rank": 32, "qk_head_dim": 128, "qk_pos_emb_head_dim": 64, "v_head_dim": 128}
"""What Megatron takes where latent attention is on and a size is not stated."""

OPTIMIZERS: Mapping[str, str] = {"adam": "adam", "muon": "muon", "sgd-momentum": "sgd"}
"""Our optimizer -> the word behind --optimizer; adam-8bit is adam with moments in 8 bits."""

LOW_PRECISION: Mapping[str, tuple[tuple[str, str], ...]] = {
    "fp8": (("fp8", "hybrid"), ("fp8_recipe", "tensorwise")),
    "mxfp8": (("fp8", "e4m3"), ("fp8_recipe", "mxfp8")),
    "nvfp4": (("fp4", "e2m1"), ("fp4_recipe", "nvfp4")),
}
"""Our precision -> the fields that ask for it, beside bf16."""

TOKENIZERS: Mapping[str, int] = {
    "GPT2BPETokenizer": 50257,
    "Llama2Tokenizer": 32000,
    "BertWordPieceLowerCase": 30522,
    "BertWordPieceCase": 28996,
}
"""Vocabulary of the tokenizers that have only one."""
USUAL_VOCABULARY = 128256

DEFAULT_VOCAB_MULTIPLE = 128
DEFAULT_DROPOUT = 0.1


def unresolved(value: Any) -> bool:
    """Whether a word holds something that only the shell would know."""
    return isinstance(value, str) and ("$" in value or "`" in value)


def settings_of_words(source: Source, words: Iterable[str]) -> dict[str, Any]:
    """Megatron's fields with their values, as the words of a command line state them: whole numbers, texts, lists and truths.

    A flag that the parser does not know keeps its dashes, and takes what stands behind it as its value. What only the shell
    knows stays a text. Raises InputError for a flag without its value, or with one of the wrong kind.
    """
    listed = list(words)[:MOST_WORDS]
    known = flags()
    found: dict[str, Any] = {}
    place = 0
    while place < len(listed):
        name, equals, inline = listed[place].partition("=")
        place += 1
        if not name.startswith("--") or len(name) < 4:
            continue
        behind = [inline] if equals else []
        while not equals and place < len(listed) and not listed[place].startswith("--"):
            behind.append(listed[place])
            place += 1
        flag = known.get(name)
        if flag is None:
            found[name] = behind[0] if behind else True
        elif behind or flag.needs_value or flag.is_switch:  # a path may be the script's own $1, which is empty here
            found[flag.field] = _value(source, flag, behind)
    return found


def _value(source: Source, flag: Flag, behind: list[str]) -> Any:
    if flag.is_switch:
        return flag.kind == ON
    if not behind:
        raise source.fail(f"{flag.name} takes a value, and none stands behind it")
    return behind if flag.kind == SEVERAL else typed(source, flag, behind[0])


def typed(source: Source, flag: Flag, value: Any) -> Any:
    """A flag's value as its kind. Raises InputError."""
    if unresolved(value):
        return value
    if flag.is_switch:
        return truth(source, flag.name, value)
    if flag.kind == WHOLE:
        return whole_number(source, flag.name, value, least=-(1 << 40))
    if flag.kind == NUMBER:
        return _number(source, flag.name, value)
    if flag.choices:
        return word_of(source, flag.name, value, flag.choices)
    return value


def _number(source: Source, key: str, value: Any) -> float:
    try:
        if isinstance(value, bool) or not isinstance(value, (int, float, str)):
            raise ValueError
        return float(value)
    except (ValueError, OverflowError):
        raise source.fail(f"{key} = {str(value)[:40]!r} must be a number") from None
