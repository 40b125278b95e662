"""transformers' own models have as many parameters as ours, and its configurations say what our importer reads."""

from __future__ import annotations

import json
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from planner.catalogue import load
from planner.catalogue.huggingface import ALIASES, read_config
from planner.catalogue.schema import Model
from planner.cost import parameters

DATA = Path(__file__).parents[1] / "data" / "huggingface"
FILES = sorted(DATA.glob("*.json"))


@cache
def configuration(path: Path) -> Any:
    """transformers' configuration of the language part of a published file, its weights as trained."""
    keys = json.loads(path.read_text())
    keys.pop("quantization_config", None)
    kind = keys.pop("model_type")
    known = kind if kind != "kimi_k2" else ALIASES[kind]  # its own code lies outside of transformers
    return AutoConfig.for_model(known, **keys).get_text_config()


def parameters_of(path: Path) -> int:
    """Parameters of transformers' model, built without memory."""
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(configuration(path))
    return sum(weight.numel() for weight in model.parameters())


def wide_norms(model: Model) -> int:
    """Query and key norms over all channels, where ours have a head's."""
    channels = (model.num_attention_heads + model.num_key_value_heads) * model.head_dim
    return model.num_layers * (channels - 2 * model.head_dim)


DIFFERENCES: dict[str, tuple[str, Callable[[Model], int]]] = {
    "falcon": ("the class ties the vocabulary matrices, the published checkpoints hold both", lambda m: -m.vocab_size * m.hidden_size),
    "gpt_oss": ("attention sinks, one per head, are not counted", lambda m: m.num_layers * m.num_attention_heads),
    "olmo2": ("query and key norms are as wide as all heads", wide_norms),
    "olmoe": ("query and key norms are as wide as all heads", wide_norms),
    "qwen2_moe": ("the gate of the shared expert is not counted", lambda m: m.num_layers * m.hidden_size),
}
"""Model type -> why its count is another than ours, and by how many."""


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.stem)
def test_the_parameters_are_those_of_transformers_own_model(path: Path) -> None:
    own = load.find(Model, path.stem)
    _, difference = DIFFERENCES.get(configuration(path).model_type, ("", lambda m: 0))
    theirs = parameters_of(path) - difference(own)
    assert theirs == parameters.total(read_config(path))
    assert theirs == parameters.total(own)


def test_differences_stay_below_two_percent_and_name_types_that_are_tested() -> None:
    kinds = {configuration(path).model_type: load.find(Model, path.stem) for path in FILES}
    for kind, (reason, difference) in DIFFERENCES.items():
        assert reason and abs(difference(kinds[kind])) < 0.02 * parameters.total(kinds[kind])


ATTRIBUTES: dict[str, tuple[str, ...]] = {
    "num_layers": ("num_hidden_layers",),
    "hidden_size": ("hidden_size",),
    "num_attention_heads": ("num_attention_heads",),
    "vocab_size": ("vocab_size",),
    "tied_embeddings": ("tie_word_embeddings",),
    "num_experts": ("num_experts", "num_local_experts", "n_routed_experts"),
    "experts_per_token": ("num_experts_per_tok",),
    "moe_ffn_hidden_size": ("moe_intermediate_size",),
    "kv_lora_rank": ("kv_lora_rank",),
    "q_lora_rank": ("q_lora_rank",),
    "qk_rope_head_dim": ("qk_rope_head_dim",),
    "v_head_dim": ("v_head_dim",),
    "num_mtp_layers": ("num_nextn_predict_layers",),
}
"""Field of ours -> transformers' names for it."""


def stated(config: Any, names: tuple[str, ...]) -> Any:
    """The first of some attributes that a configuration has, None where it has none."""
    return next((value for name in names if (value := getattr(config, name, None)) is not None), None)


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.stem)
def test_the_importer_reads_what_transformers_configuration_says(path: Path) -> None:
    config, model = configuration(path), read_config(path)
    for field, names in ATTRIBUTES.items():
        value = stated(config, names)
        if value is None or (field == "tied_embeddings" and config.model_type == "falcon"):
            continue
        assert getattr(model, field) == value, field
    if model.kv_lora_rank == 0:
        heads = stated(config, ("num_key_value_heads", "num_kv_heads"))
        if heads is not None and config.model_type != "falcon":
            assert model.num_key_value_heads == heads
        width = stated(config, ("head_dim",))
        assert width is None or model.head_dim == width
    dense = stated(config, ("intermediate_size",))
    if dense is not None and model.num_moe_layers < model.num_layers:
        assert model.ffn_hidden_size == dense


def test_enough_models_are_compared() -> None:
    assert len(FILES) >= 30 and len({configuration(path).model_type for path in FILES}) >= 18
