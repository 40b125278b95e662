"""Claims about the reader of Hugging Face config.json files."""

from __future__ import annotations

import dataclasses
import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from planner.catalogue import load
from planner.catalogue.huggingface import ALIASES, KEYS, TRAITS, ReadConfig, read, read_config
from planner.catalogue.schema import Model
from planner.cost import parameters
from planner.errors import InputError

DATA = Path(__file__).parent / "data" / "huggingface"
FILES = sorted(DATA.glob("*.json"))
TYPES = {json.loads(path.read_text())["model_type"] for path in FILES}
CATALOGUE_ONLY = ("name", "aliases", "source", "published_params", "published_active_params", "published_includes_mtp")

LLAMA: dict[str, Any] = {
    "model_type": "llama",
    "num_hidden_layers": 4,
    "hidden_size": 64,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "intermediate_size": 192,
    "vocab_size": 1000,
    "max_position_embeddings": 512,
    "tie_word_embeddings": False,
}
MOE: dict[str, Any] = {
    **LLAMA,
    "model_type": "qwen3_moe",
    "head_dim": 8,
    "num_experts": 8,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 32,
}
MLA: dict[str, Any] = {
    **LLAMA,
    "model_type": "deepseek_v3",
    "num_key_value_heads": 8,
    "kv_lora_rank": 16,
    "q_lora_rank": None,
    "qk_nope_head_dim": 8,
    "qk_rope_head_dim": 4,
    "v_head_dim": 8,
}
Reader = Callable[..., ReadConfig]


@pytest.fixture
def reading(tmp_path: Path) -> Reader:
    """Writes a base with changes as tiny.json and reads it; a key whose value is ... is left out."""

    def write_and_read(base: dict[str, Any], **changes: Any) -> ReadConfig:
        path = tmp_path / "tiny.json"
        path.write_text(json.dumps({key: value for key, value in {**base, **changes}.items() if value is not ...}))
        return read(path)

    return write_and_read


def shape(model: Model) -> dict[str, Any]:
    """All of a model but what only the catalogue knows."""
    return {key: value for key, value in dataclasses.asdict(model).items() if key not in CATALOGUE_ONLY}


# Against the catalogue


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.stem)
def test_a_published_config_has_the_parameters_of_the_catalogues_model(path: Path) -> None:
    assert parameters.total(read_config(path)) == parameters.total(load.find(Model, path.stem))


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.stem)
def test_a_published_config_agrees_with_the_catalogues_model_in_every_field(path: Path) -> None:
    assert shape(read_config(path)) == shape(load.find(Model, path.stem))


def test_the_published_configs_cover_at_least_eighteen_model_types() -> None:
    assert len(TYPES) >= 18


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.stem)
def test_no_published_config_is_of_unknown_type_or_holds_keys_that_are_not_understood(path: Path) -> None:
    result = read(path)
    assert not [note for note in (*result.assumed, *result.ignored) if "unknown" in note or "not understood" in note]


# Counts of transformers 4.57 itself: AutoModelForCausalLM on the meta device, numel of all parameters, for 6 layers, width
# 256, 8 heads, 4 KV heads, MLP 640, vocabulary 1000 and 512 positions. The catalogue has no model of these types.
TINY: dict[str, Any] = {
    "num_hidden_layers": 6,
    "hidden_size": 256,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "intermediate_size": 640,
    "vocab_size": 1000,
    "max_position_embeddings": 512,
}
TINY_GPT: dict[str, Any] = {"n_layer": 6, "n_embd": 256, "n_head": 8, "n_positions": 512, "vocab_size": 1000}
TINY_MOE: dict[str, Any] = {**TINY, "num_local_experts": 8, "num_experts_per_tok": 2}
TINY_FALCON: dict[str, Any] = {"num_hidden_layers": 6, "hidden_size": 256, "num_attention_heads": 8, "vocab_size": 1000}
COUNTED: dict[str, tuple[dict[str, Any], int]] = {
    "starcoder2": (TINY, 3_418_368),
    "gpt_bigcode": (TINY_GPT, 4_435_328),
    "gpt_bigcode+mha": ({**TINY_GPT, "multi_query": False}, 5_126_144),
    "gpt2": (TINY_GPT, 5_126_144),
    "opt": ({**TINY_FALCON, "ffn_dim": 700, "max_position_embeddings": 512}, 4_129_384),
    "phimoe": (TINY_MOE, 25_303_552),
    "granite": (TINY, 4_644_096),
    "granitemoe": (TINY_MOE, 25_300_224),
    "cohere": (TINY, 4_386_560),
    "cohere2": (TINY, 4_386_560),
    "glm": ({**TINY, "head_dim": 32}, 4_647_168),
    "glm4": ({**TINY, "head_dim": 32}, 4_650_240),
    "smollm3": (TINY, 4_388_096),
    "seed_oss": (TINY, 8_195_328),
    "ernie4_5": (TINY, 7_927_040),
    "gemma2": (TINY, 12_648_704),
    "gemma3_text": (TINY, 12_651_776),
    "nemotron": (TINY, 3_664_384),
    "mixtral": (TINY_MOE, 25_300_224),
    "llama4_text": (
        {**TINY_MOE, "num_experts_per_tok": 1, "head_dim": 32, "intermediate_size_mlp": 900, "interleave_moe_layer_step": 2},
        17_045_760,
    ),
    "falcon+mqa": (TINY_FALCON, 4_546_048),
    "falcon+rw": ({**TINY_FALCON, "multi_query": False, "alibi": True, "bias": True, "parallel_attn": False}, 5_251_072),
    "falcon+11b": (
        {
            **TINY_FALCON,
            "num_kv_heads": 2,
            "new_decoder_architecture": True,
            "num_ln_in_parallel_attn": 1,
            "ffn_hidden_size": 900,
        },
        4_263_424,
    ),
    "llama+bias": ({**TINY, "attention_bias": True, "mlp_bias": True}, 4_657_920),
}


@pytest.mark.parametrize("case", COUNTED)
def test_a_tiny_model_has_the_parameters_that_transformers_gives_it(case: str, reading: Reader) -> None:
    config, count = COUNTED[case]
    assert parameters.total(reading(config, model_type=case.split("+")[0]).model) == count


# Single keys


def test_head_dim_null_means_the_hidden_size_over_the_heads(reading: Reader) -> None:
    assert reading(LLAMA, head_dim=None).model.head_dim == 8


def test_key_value_heads_absent_or_null_means_one_per_head(reading: Reader) -> None:
    assert reading(LLAMA, num_key_value_heads=None).model.num_key_value_heads == 8
    assert reading(LLAMA, num_key_value_heads=...).model.num_key_value_heads == 8


def test_a_whole_number_may_be_written_as_a_float(reading: Reader) -> None:
    assert reading(LLAMA, num_hidden_layers=4.0).model.num_layers == 4


@pytest.mark.parametrize("model_type, tied", [("llama", False), ("gemma", True), ("gpt2", True), ("bloom", True), ("falcon", False)])
def test_tying_follows_the_model_type_where_the_file_is_silent(model_type: str, tied: bool, reading: Reader) -> None:
    result = reading(LLAMA, model_type=model_type, tie_word_embeddings=...)
    assert result.model.tied_embeddings is tied
    assert any("tie_word_embeddings" in note for note in result.assumed)


@pytest.mark.parametrize("tied", [True, False])
def test_a_stated_tying_wins_over_the_model_type(tied: bool, reading: Reader) -> None:
    for model_type in ("llama", "gemma"):
        assert reading(LLAMA, model_type=model_type, tie_word_embeddings=tied).model.tied_embeddings is tied


def test_a_fully_stated_llama_leaves_nothing_to_assume_or_ignore(reading: Reader) -> None:
    result = reading(LLAMA, attention_bias=False, mlp_bias=False)
    assert (result.assumed, result.ignored) == ((), ())


def test_llamas_biases_follow_their_keys(reading: Reader) -> None:
    both = reading(LLAMA, attention_bias=True, mlp_bias=True)
    assert (both.model.qkv_bias, both.model.linear_bias, both.ignored) == (True, True, ())


def test_a_bias_that_the_model_cannot_hold_is_reported(reading: Reader) -> None:
    result = reading(LLAMA, attention_bias=True)
    assert (result.model.qkv_bias, result.model.linear_bias) == (True, False)
    assert result.ignored == ("the bias of the output projection is not counted",)


def test_qwen2_has_a_bias_on_queries_keys_and_values_without_saying_so(reading: Reader) -> None:
    assert reading(LLAMA, model_type="qwen2").model.qkv_bias


@pytest.mark.parametrize("model_type", ["qwen3", "olmo2", "gemma3_text"])
def test_query_and_key_norms_follow_the_model_type(model_type: str, reading: Reader) -> None:
    assert reading(LLAMA, model_type=model_type, head_dim=8).model.qk_norm
    assert not reading(LLAMA, model_type="llama").model.qk_norm


@pytest.mark.parametrize("model_type", ["gpt2", "gpt_neox", "bloom", "falcon", "nemotron", "starcoder2", "opt"])
def test_older_types_have_no_gate_and_layer_norms(model_type: str, reading: Reader) -> None:
    model = reading(LLAMA, model_type=model_type).model
    assert (model.gated_mlp, model.norm) == (False, "layernorm")


def test_an_absent_gpt2_width_is_four_times_the_hidden_size(reading: Reader) -> None:
    result = reading(TINY_GPT, model_type="gpt2", n_inner=None)
    assert result.model.ffn_hidden_size == 1024
    assert "the MLP's width is not stated: 4 x hidden_size" in result.assumed


def test_gpt2_has_learned_positions_and_dropout(reading: Reader) -> None:
    model = reading(TINY_GPT, model_type="gpt2", resid_pdrop=0.1).model
    assert (model.learned_positions, model.dropout) == (512, True)


def test_the_first_falcons_share_one_key_value_head_and_one_norm(reading: Reader) -> None:
    model = reading(TINY_FALCON, model_type="falcon", multi_query=True).model
    assert (model.num_key_value_heads, model.norms_per_layer) == (1, 1)


def test_next_token_layers_are_read(reading: Reader) -> None:
    assert reading(MLA, num_nextn_predict_layers=2).model.num_mtp_layers == 2


def test_latent_attention_reads_its_ranks_and_ignores_the_key_value_heads(reading: Reader) -> None:
    model = reading(MLA, num_key_value_heads=2, q_lora_rank=24).model
    assert (model.kv_lora_rank, model.q_lora_rank, model.num_key_value_heads) == (16, 24, 8)


# Windows


def test_sliding_layers_are_counted_from_layer_types(reading: Reader) -> None:
    types = ["sliding_attention", "full_attention", "sliding_attention", "sliding_attention"]
    model = reading(LLAMA, sliding_window=128, layer_types=types).model
    assert (model.sliding_window, model.num_window_layers) == (128, 3)


def test_use_sliding_window_false_means_no_window(reading: Reader) -> None:
    model = reading(LLAMA, model_type="mistral", sliding_window=128, use_sliding_window=False).model
    assert (model.sliding_window, model.num_window_layers) == (0, 0)


def test_qwen_windows_only_where_the_file_turns_them_on(reading: Reader) -> None:
    changes = {"model_type": "qwen2", "sliding_window": 128, "max_window_layers": 3}
    assert reading(LLAMA, **changes).model.num_window_layers == 0
    assert reading(LLAMA, **changes, use_sliding_window=True).model.num_window_layers == 1


def test_mistral_windows_every_layer(reading: Reader) -> None:
    assert reading(LLAMA, model_type="mistral", sliding_window=128).model.num_window_layers == 4


@pytest.mark.parametrize("model_type, windowed", [("gemma2", 6), ("gemma3_text", 10), ("gpt_oss", 6), ("cohere2", 9)])
def test_a_known_alternation_fills_in_for_layer_types(model_type: str, windowed: int, reading: Reader) -> None:
    experts = {"num_local_experts": 4, "num_experts_per_tok": 2} if model_type == "gpt_oss" else {}
    result = reading(LLAMA, model_type=model_type, num_hidden_layers=12, sliding_window=128, **experts)
    assert result.model.num_window_layers == windowed
    assert any("layer_types is not stated" in note for note in result.assumed)


def test_a_stated_pattern_wins_over_the_known_alternation(reading: Reader) -> None:
    result = reading(LLAMA, model_type="gemma3_text", num_hidden_layers=12, sliding_window=128, sliding_window_pattern=3)
    assert result.model.num_window_layers == 8


def test_a_window_no_shorter_than_the_longest_sequence_is_no_window(reading: Reader) -> None:
    assert reading(LLAMA, model_type="phi3", sliding_window=512).model.sliding_window == 0


# Mixtures of experts


def test_mixtral_states_the_expert_width_as_intermediate_size(reading: Reader) -> None:
    changes = {"model_type": "mixtral", "num_local_experts": 8, "num_experts_per_tok": 2}
    model = reading(LLAMA, **changes).model
    assert (model.moe_ffn_hidden_size, model.ffn_hidden_size, model.num_dense_layers) == (192, 0, 0)


def test_experts_of_null_or_none_mean_a_dense_model(reading: Reader) -> None:
    for none in (None, 0):
        assert reading(MOE, num_experts=none).model.num_experts == 0


@pytest.mark.parametrize(
    "keys",
    [{"mlp_only_layers": [0, 1]}, {"first_k_dense_replace": 2}, {"moe_layer_freq": [0, 0, 1, 1]}, {"moe_layers": [2, 3]}],
    ids=lambda keys: next(iter(keys)),
)
def test_leading_dense_layers_are_read_without_assumption(keys: dict[str, Any], reading: Reader) -> None:
    result = reading(MOE, **keys)
    assert (result.model.num_dense_layers, result.model.ffn_hidden_size, result.assumed) == (2, 192, ())


@pytest.mark.parametrize(
    "keys",
    [{"mlp_only_layers": [1, 3]}, {"decoder_sparse_step": 2}, {"moe_layer_freq": 2}, {"moe_layer_freq": [1, 0, 1, 0]}],
    ids=str,
)
def test_alternating_dense_layers_are_counted_and_said_to_be_in_front(keys: dict[str, Any], reading: Reader) -> None:
    result = reading(MOE, **keys)
    assert result.model.num_dense_layers == 2
    assert result.assumed == ("dense and expert layers alternate: taken as 2 dense layers in front of 2",)


def test_shared_experts_come_as_a_count_or_as_a_width(reading: Reader) -> None:
    by_count = reading(MOE, n_shared_experts=2).model
    by_width = reading(MOE, shared_expert_intermediate_size=96).model
    assert (by_count.num_shared_experts, by_count.shared_ffn_hidden_size) == (2, 64)
    assert (by_width.num_shared_experts, by_width.shared_ffn_hidden_size) == (1, 96)


# Nesting, unknown types, names


@pytest.mark.parametrize("key", ["text_config", "llm_config", "language_config"])
def test_the_language_part_of_a_vision_model_is_read_and_the_rest_reported(key: str, reading: Reader) -> None:
    result = reading({"model_type": "some_vl", key: LLAMA, "vision_config": {"hidden_size": 3}})
    assert shape(result.model) == shape(reading(LLAMA).model)
    assert result.ignored == ("vision_config: the vision encoder is not counted",)


def test_the_language_part_may_take_its_tying_from_the_whole(reading: Reader) -> None:
    inner = {key: value for key, value in LLAMA.items() if key != "tie_word_embeddings"}
    assert reading({"text_config": inner, "tie_word_embeddings": True}).model.tied_embeddings


def test_an_unknown_type_is_read_like_llama_and_says_so(reading: Reader) -> None:
    result = reading(LLAMA, model_type="nobody_knows")
    assert shape(result.model) == shape(reading(LLAMA).model)
    assert result.assumed == ("model_type = 'nobody_knows' is unknown: read like llama, with RMS norms and a gated MLP",)


def test_a_missing_type_is_read_like_llama_and_says_so(reading: Reader) -> None:
    assert reading(LLAMA, model_type=...).assumed[0].startswith("model_type is missing: read like llama")


def test_an_unknown_type_with_a_plain_activation_has_no_gate(reading: Reader) -> None:
    result = reading(LLAMA, model_type="nobody_knows", hidden_act="relu2")
    assert not result.model.gated_mlp
    assert "a plain MLP" in result.assumed[0]


def test_an_unknown_type_with_experts_says_where_it_took_their_width(reading: Reader) -> None:
    result = reading(LLAMA, model_type="nobody_knows", num_experts=8, num_experts_per_tok=2)
    assert result.model.moe_ffn_hidden_size == 192
    assert result.assumed[-1].startswith("moe_intermediate_size is not stated")


def test_keys_that_sound_like_weights_and_are_not_read_are_reported(reading: Reader) -> None:
    assert reading(LLAMA, index_n_heads=64, router_aux_loss_coef=0.1).ignored == ("'index_n_heads' = 64 is not understood",)


def test_defaults_that_published_files_leave_out_are_reported(reading: Reader) -> None:
    result = reading(LLAMA, model_type="gemma3_text", vocab_size=...)
    assert result.model.vocab_size == 262208
    assert "vocab_size is not stated: 262208, the default of gemma3_text" in result.assumed


@pytest.mark.parametrize("stated, name", [("meta-llama/Llama-2-7b-hf", "Llama-2-7b-hf"), ("/a/b/", "b"), ("", "tiny"), (7, "tiny")])
def test_the_name_is_the_last_part_of_name_or_path_else_the_files(stated: Any, name: str, reading: Reader) -> None:
    assert reading(LLAMA, _name_or_path=stated).model.name == name


def test_a_name_keeps_printable_ascii_only(reading: Reader) -> None:
    assert reading(LLAMA, _name_or_path="x/a\n\ud800b").model.name == "a-b"


def test_a_folder_stands_for_its_config_and_gives_the_name(tmp_path: Path) -> None:
    folder = tmp_path / "my-model"
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(LLAMA))
    assert read_config(folder) == read_config(folder / "config.json")
    assert read_config(folder).name == "my-model"


def test_a_byte_order_mark_is_no_obstacle(tmp_path: Path) -> None:
    path = tmp_path / "x.json"
    path.write_bytes(b"\xef\xbb\xbf" + json.dumps(LLAMA).encode())
    assert read_config(path).num_layers == 4


def test_every_alias_names_a_type_in_the_table() -> None:
    assert set(ALIASES.values()) <= set(TRAITS)
    assert not set(ALIASES) & set(TRAITS)


# Broken files

BROKEN_TEXT: dict[str, tuple[bytes, str]] = {
    "empty": (b"", "not valid JSON"),
    "not json": (b"model_type: llama", "not valid JSON"),
    "truncated": (json.dumps(LLAMA).encode()[:-20], "not valid JSON"),
    "binary": (bytes(range(256)), "not a text file in UTF-8"),
    "utf-16": (json.dumps(LLAMA).encode("utf-16"), "not a text file in UTF-8"),
    "list": (b"[1, 2]", "must hold a JSON object, holds a list"),
    "text": (b'"llama"', "must hold a JSON object"),
    "null": (b"null", "must hold a JSON object, holds null"),
    "deep": (b"[" * 100_000, "not valid JSON"),
    "deep value": (b'{"num_hidden_layers":' + b"[" * 900 + b"]" * 900 + b"}", "num_hidden_layers = a list"),
    "long number": (b'{"vocab_size": ' + b"9" * 5000 + b"}", "not valid JSON"),
    "huge": (b" " * (4 << 20) + b"{}", "larger than 4 MiB"),
    "empty object": (b"{}", "num_hidden_layers is missing"),
    "NaN": (json.dumps({**LLAMA, "hidden_size": float("nan")}).encode(), "hidden_size = nan must be a whole number"),
    "1e400": (json.dumps(LLAMA).replace("1000", "1e400").encode(), "vocab_size = inf must be a whole number"),
}


@pytest.mark.parametrize("case", BROKEN_TEXT)
def test_a_file_that_holds_no_config_is_refused_in_one_line(case: str, tmp_path: Path) -> None:
    content, message = BROKEN_TEXT[case]
    path = tmp_path / "config.json"
    path.write_bytes(content)
    assert_refused(path, message)


BROKEN_KEYS: list[tuple[dict[str, Any], dict[str, Any], str]] = [
    (LLAMA, {"num_hidden_layers": ...}, "num_hidden_layers is missing; state a positive whole number (also read: n_layer"),
    (LLAMA, {"hidden_size": ...}, "hidden_size is missing"),
    (LLAMA, {"num_attention_heads": None}, "num_attention_heads is missing"),
    (LLAMA, {"vocab_size": ...}, "vocab_size is missing"),
    (LLAMA, {"intermediate_size": ...}, "intermediate_size is missing"),
    (LLAMA, {"num_hidden_layers": "32"}, "num_hidden_layers = '32' must be a whole number from 1 to 10000"),
    (LLAMA, {"num_hidden_layers": 32.5}, "num_hidden_layers = 32.5 must be a whole number"),
    (LLAMA, {"num_hidden_layers": -1}, "num_hidden_layers = -1 must be a whole number"),
    (LLAMA, {"num_hidden_layers": 0}, "num_hidden_layers = 0 must be a whole number"),
    (LLAMA, {"num_hidden_layers": True}, "num_hidden_layers = true must be a whole number"),
    (LLAMA, {"num_hidden_layers": 10**9}, "num_hidden_layers = 1000000000 must be a whole number"),
    (LLAMA, {"num_hidden_layers": [4]}, "num_hidden_layers = a list must be a whole number"),
    (LLAMA, {"vocab_size": {}}, "vocab_size = an object must be a whole number"),
    (LLAMA, {"vocab_size": "x" * 10**6}, "..."),
    (LLAMA, {"intermediate_size": 0}, "intermediate_size must be positive"),
    (LLAMA, {"hidden_size": 65}, "hidden_size = 65 does not divide by num_attention_heads = 8"),
    (LLAMA, {"num_key_value_heads": 3}, "num_key_value_heads = 3 must divide num_attention_heads = 8"),
    (LLAMA, {"n_layer": 5}, "n_layer = 5 must equal num_hidden_layers = 4: both name the same size"),
    (LLAMA, {"model_type": 7}, "model_type = 7 must be a text"),
    (LLAMA, {"model_type": "bert"}, "must be a decoder-only transformer"),
    (LLAMA, {"is_encoder_decoder": True}, "an encoder-decoder; must be a decoder-only transformer"),
    (LLAMA, {"mamba_d_state": 128}, "a state-space model; must be a decoder-only transformer"),
    (LLAMA, {"tie_word_embeddings": "yes"}, "tie_word_embeddings = 'yes' must be true or false"),
    (LLAMA, {"attention_bias": 1}, "attention_bias = 1 must be true or false"),
    (LLAMA, {"resid_pdrop": "0.1"}, "resid_pdrop = '0.1' must be a number from 0 to 1"),
    (LLAMA, {"sliding_window": "128"}, "sliding_window = '128' must be a whole number"),
    (LLAMA, {"layer_types": "sliding"}, "layer_types = 'sliding' must be a list"),
    (LLAMA, {"layer_types": ["full_attention"]}, "layer_types has 1 entries, must have one for each of the 4 layers"),
    (LLAMA, {"layer_types": ["linear_attention"] * 4}, "'linear_attention' must be one of full_attention, sliding_attention"),
    (LLAMA, {"layer_types": [{}] * 4}, "an object must be one of full_attention"),
    ({"text_config": [1]}, {}, "text_config = a list must be an object"),
    ({"text_config": {"model_type": "llama"}}, {}, "text_config.num_hidden_layers is missing"),
    (MOE, {"num_experts_per_tok": ...}, "num_experts_per_tok is missing"),
    (MOE, {"num_experts_per_tok": 9}, "num_experts_per_tok = 9 must be a whole number from 1 to 8"),
    (MOE, {"moe_intermediate_size": ...}, "moe_intermediate_size is missing"),
    (MOE, {"num_local_experts": 4}, "num_local_experts = 4 must equal num_experts = 8"),
    (MOE, {"first_k_dense_replace": 4}, "num_experts = 8, yet no layer holds experts"),
    (MOE, {"decoder_sparse_step": 9}, "num_experts = 8, yet no layer holds experts"),
    (MOE, {"decoder_sparse_step": 0}, "decoder_sparse_step = 0 must be a whole number from 1"),
    (MOE, {"mlp_only_layers": [7]}, "mlp_only_layers = 7 must be a whole number from 0 to 3"),
    (MOE, {"mlp_only_layers": 1}, "mlp_only_layers = 1 must be a list"),
    (MOE, {"moe_layer_freq": [1, 1]}, "moe_layer_freq has 2 entries"),
    (MOE, {"moe_layer_freq": [1, 1, 2, 1]}, "moe_layer_freq = 2 must be a whole number from 0 to 1"),
    (MLA, {"kv_lora_rank": ...}, "kv_lora_rank is missing"),
    (MLA, {"v_head_dim": None}, "v_head_dim is missing"),
]


@pytest.mark.parametrize("base, changes, message", BROKEN_KEYS, ids=lambda value: str(value)[:40] if isinstance(value, dict) else "")
def test_a_bad_value_is_refused_with_path_key_value_and_what_is_legal(
    base: dict[str, Any], changes: dict[str, Any], message: str, tmp_path: Path
) -> None:
    path = tmp_path / "config.json"
    path.write_text(json.dumps({key: value for key, value in {**base, **changes}.items() if value is not ...}))
    assert_refused(path, message)


def assert_refused(path: Path, message: str) -> None:
    """Reading raises one line that starts with the path and contains the message."""
    with pytest.raises(InputError) as caught:
        read_config(path)
    text = str(caught.value)
    assert text.startswith(f"{path}: ") and message in text
    assert "\n" not in text and len(text) < len(str(path)) + 300


def test_a_path_that_leads_to_no_file_is_refused(tmp_path: Path) -> None:
    assert_refused(tmp_path / "none.json", "there is no such file")
    assert_refused(tmp_path, "the folder holds no config.json")
    assert_refused(tmp_path / ("x" * 5000), "cannot be read (File name too long)")


def test_a_path_with_a_null_byte_is_refused(tmp_path: Path) -> None:
    with pytest.raises(InputError):
        read_config(tmp_path / "a\0b.json")


def test_a_pipe_is_refused_instead_of_waited_for(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe.json")
    assert_refused(tmp_path / "pipe.json", "is not a regular file")


@pytest.mark.skipif(not Path("/dev/zero").exists(), reason="needs a device file")
def test_a_device_is_refused_instead_of_read() -> None:
    assert_refused(Path("/dev/zero"), "is not a regular file")


# Arbitrary input

VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.integers(0, 64) | st.floats() | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=8), inner, max_size=4),
    max_leaves=8,
)
KNOWN_KEYS = sorted({key for keys in KEYS.values() for key in keys} | set(LLAMA) | {"layer_types", "mlp_only_layers"})
MODEL_TYPES = st.sampled_from(sorted(TRAITS))


def never_fails_otherwise(path: Path, content: bytes) -> None:
    """Reads bytes: a model whose parameters can be counted, or an InputError of one line."""
    path.write_bytes(content)
    try:
        model = read(path).model
    except InputError as error:
        assert "\n" not in str(error)
    else:
        assert parameters.total(model) > 0


@pytest.fixture(scope="module")
def scratch(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """One file that every example overwrites."""
    return tmp_path_factory.mktemp("arbitrary") / "config.json"


@settings(deadline=None)
@given(content=st.binary(max_size=200))
def test_arbitrary_bytes_raise_nothing_but_input_errors(content: bytes, scratch: Path) -> None:
    never_fails_otherwise(scratch, content)


@settings(deadline=None)
@given(value=VALUES)
def test_arbitrary_json_raises_nothing_but_input_errors(value: Any, scratch: Path) -> None:
    never_fails_otherwise(scratch, json.dumps(value).encode())


@settings(max_examples=400, deadline=None)
@given(
    base=st.sampled_from([LLAMA, MOE, MLA]),
    model_type=MODEL_TYPES,
    changes=st.dictionaries(st.sampled_from(KNOWN_KEYS), VALUES),
)
def test_arbitrary_values_under_known_keys_raise_nothing_but_input_errors(
    base: dict[str, Any], model_type: str, changes: dict[str, Any], scratch: Path
) -> None:
    never_fails_otherwise(scratch, json.dumps({**base, "model_type": model_type, **changes}).encode())


SMALL = st.dictionaries(st.sampled_from(KNOWN_KEYS), st.integers(0, 40) | st.booleans() | st.lists(st.integers(0, 3), max_size=4))


@settings(max_examples=400, deadline=None)
@given(base=st.sampled_from([LLAMA, MOE, MLA]), model_type=MODEL_TYPES, changes=SMALL)
def test_small_numbers_under_known_keys_give_a_countable_model_or_an_input_error(
    base: dict[str, Any], model_type: str, changes: dict[str, Any], scratch: Path
) -> None:
    never_fails_otherwise(scratch, json.dumps({**base, "model_type": model_type, **changes}).encode())
