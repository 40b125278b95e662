"""Reads a Hugging Face config.json into a model: keys by name, the rest by what its model type always has.

Source of the tables: the classes of transformers 4.57, ``models/TYPE/configuration_TYPE.py`` for keys and defaults and
``models/TYPE/modeling_TYPE.py`` for biases, norms and gates. The file is data: nothing in it is ever run.
"""

from __future__ import annotations

import dataclasses
import json
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple

from planner.catalogue.load import MAX_FILE_BYTES
from planner.catalogue.schema import Model
from planner.errors import InputError

KEYS: dict[str, tuple[str, ...]] = {
    "num_layers": ("num_hidden_layers", "n_layer", "n_layers", "num_layers"),
    "hidden_size": ("hidden_size", "n_embd", "n_embed", "d_model"),
    "num_attention_heads": ("num_attention_heads", "n_head", "n_heads"),
    "num_key_value_heads": ("num_key_value_heads", "num_kv_heads", "n_head_kv"),
    "head_dim": ("head_dim",),
    "vocab_size": ("vocab_size",),
    "ffn_hidden_size": ("intermediate_size", "n_inner", "ffn_hidden_size", "ffn_dim"),
    "max_seq_len": ("max_position_embeddings", "n_positions", "max_seq_len", "seq_length", "n_ctx"),
    "sliding_window": ("sliding_window", "attention_chunk_size"),
    "num_experts": ("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts"),
    "experts_per_token": ("num_experts_per_tok", "num_experts_per_token", "experts_per_token", "moe_top_k", "moe_k"),
    "moe_ffn_hidden_size": ("moe_intermediate_size",),
    "num_shared_experts": ("n_shared_experts", "num_shared_experts", "moe_num_shared_experts"),
    "shared_ffn_hidden_size": ("shared_expert_intermediate_size", "shared_intermediate_size"),
    "q_lora_rank": ("q_lora_rank",),
    "kv_lora_rank": ("kv_lora_rank",),
    "qk_nope_head_dim": ("qk_nope_head_dim",),
    "qk_rope_head_dim": ("qk_rope_head_dim",),
    "v_head_dim": ("v_head_dim",),
    "num_mtp_layers": ("num_nextn_predict_layers", "mtp_num_hidden_layers"),
    "leading_dense": ("first_k_dense_replace", "moe_layer_start_index"),
    "sparse_step": ("decoder_sparse_step", "interleave_moe_layer_step", "moe_layer_interval"),
    "moe_layer_freq": ("moe_layer_freq",),
    "window_pattern": ("sliding_window_pattern",),
    "max_window_layers": ("max_window_layers",),
    "intermediate_size_mlp": ("intermediate_size_mlp",),
    "num_ln_in_parallel_attn": ("num_ln_in_parallel_attn",),
}
"""Field -> the keys that may state it, the usual one first."""

WIDE, NARROW = 1 << 24, 1 << 16
LIMITS: dict[str, int] = {
    "num_layers": 10_000,
    "hidden_size": 1 << 20,
    **dict.fromkeys(("num_attention_heads", "num_key_value_heads", "head_dim", "num_experts", "experts_per_token"), NARROW),
    **dict.fromkeys(("num_shared_experts", "q_lora_rank", "kv_lora_rank", "v_head_dim"), NARROW),
    **dict.fromkeys(("qk_nope_head_dim", "qk_rope_head_dim", "num_mtp_layers"), NARROW),
}
"""Largest legal value of a field, far above any model; WIDE where not listed. Keeps all products inside 64 bits."""
AT_LEAST_ONE = ("num_layers", "hidden_size", "num_attention_heads", "vocab_size", "sparse_step", "window_pattern")

NESTED = ("text_config", "llm_config", "language_config")
"""Where vision-language models keep the language part."""
LEFT_OUT = {
    "vision_config": "the vision encoder is not counted",
    "audio_config": "the audio encoder is not counted",
    "quantization_config": "weights are taken as trained, not as stored",
}
REFUSED_TYPES = dict.fromkeys(("bert", "roberta", "xlm-roberta", "distilbert", "albert", "electra", "deberta-v2"), "an encoder")
REFUSED_KEYS = {
    "is_encoder_decoder": "an encoder-decoder",
    **dict.fromkeys(("mamba_d_state", "mamba_num_heads", "ssm_state_size", "ssm_cfg", "state_size"), "a state-space model"),
    **dict.fromkeys(("linear_num_value_heads", "linear_attn_config", "attn_type_list"), "a model with linear attention"),
    **dict.fromkeys(("hybrid_override_pattern", "block_configs", "lru_width"), "a model of unlike layers"),
}
LEGAL_KIND = "must be a decoder-only transformer of like layers"
WINDOWED = ("sliding_attention", "chunked_attention")
LAYER_TYPES = ("full_attention", *WINDOWED)
DROPOUT_KEYS = ("resid_pdrop", "hidden_dropout", "residual_dropout", "dropout")
PLAIN_ACTIVATIONS = ("relu", "relu2", "gelu_new", "gelu_fast")
"""Activations that a model of unknown type is taken to use without a gate."""
DOUBTFUL = re.compile(r"expert|moe_|mamba|ssm_|lora|mtp|^index_n|^index_head")
HARMLESS = re.compile(r"coef|loss|router|scal|norm|type|impl|jitter|capacity|group|drop|weights|ep_size|token")
"""Keys that sound as if they changed the model's size (DOUBTFUL) and do not (HARMLESS)."""
MAX_NOTES = 10


class Switch(NamedTuple):
    """A yes or no: the key that states it ("" = no key), and the answer where the key is absent."""

    key: str
    default: bool = False


ON, OFF = Switch("", True), Switch("", False)
WINDOW_ON = Switch("use_sliding_window", True)


@dataclass(frozen=True, kw_only=True)
class Traits:
    """What all models of one type share and their config.json need not say."""

    tied: bool = False
    gated: bool = True
    norm: str = "rmsnorm"
    """"layernorm" only where the norm has a bias beside its weight."""
    norms_per_layer: int = 2
    qk_norm: Switch = OFF
    full_width_qk_norm: bool = False
    """The query and key norms have a weight for every channel, not only for those of one head."""
    qkv_bias: Switch = OFF
    output_bias: Switch = OFF
    mlp_bias: Switch = OFF
    expert_bias: bool = False
    router_bias: bool = False
    learned_positions: bool = False
    extra_positions: int = 0
    embedding_norm: bool = False
    latent: bool = False
    """Multi-head latent attention: kv_lora_rank must be stated."""
    expert_width: str = "moe_ffn_hidden_size"
    """Field whose key holds the expert width; "" = moe_intermediate_size where stated, else intermediate_size."""
    dense_width: str = "ffn_hidden_size"
    """Field whose key holds the width of the dense MLP."""
    window_switch: Switch = WINDOW_ON
    full_every: int = 0
    """One layer in so many has full attention where the file lists no layer types; 0 = all layers are windowed."""
    ffn_multiple: int = 0
    """MLP width over the hidden size where the file states none; 0 = the file must."""
    defaults: Mapping[str, int] = dataclasses.field(default_factory=dict)
    """Sizes that published files leave out because they equal the class's default."""
    unmodelled: tuple[str, ...] = ()
    derive: Callable[[Section], dict[str, int]] = lambda section: {}
    """Fields that follow from keys of this type alone."""


@dataclass(frozen=True, kw_only=True)
class Section:
    """The part of a file that describes the language model, with the traits of its type."""

    path: Path
    prefix: str
    keys: Mapping[str, Any]
    model_type: str
    traits: Traits
    known: bool
    left_out: tuple[str, ...] = ()

    def where(self, key: str) -> str:
        """File and key, as the start of an error message."""
        return f"{self.path}: {self.prefix}{key}"


@dataclass(frozen=True, kw_only=True)
class ReadConfig:
    """A model with what its file did not say and what of the file it does not hold, one line each."""

    model: Model
    assumed: tuple[str, ...]
    ignored: tuple[str, ...]


def show(value: Any) -> str:
    """A value of a file in a few printable characters.

    >>> show("a" * 99), show([1, 2]), show(None), show(True)
    ("'aaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaa...", 'a list', 'null', 'true')
    """
    kinds = {dict: "an object", list: "a list", bool: str(value).lower() if isinstance(value, bool) else "", type(None): "null"}
    text = kinds.get(type(value)) or ascii(value)
    return text if len(text) <= 40 else f"{text[:37]}..."


# Reading keys


def whole(value: Any, where: str, limits: tuple[int, int]) -> int:
    """``value`` as a whole number between the limits. Raises InputError."""
    low, high = limits
    number = int(value) if isinstance(value, float) and value.is_integer() else value
    if isinstance(number, bool) or not isinstance(number, int) or not low <= number <= high:
        raise InputError(f"{where} = {show(value)} must be a whole number from {low} to {high}")
    return number


def stated(section: Section, field: str) -> int | None:
    """The number that the file states for a field under any of its keys; null counts as absent. Raises InputError."""
    limits = (int(field in AT_LEAST_ONE), LIMITS.get(field, WIDE))
    present = [key for key in KEYS[field] if section.keys.get(key) is not None]
    values = [whole(section.keys[key], section.where(key), limits) for key in present]
    for key, value in zip(present[1:], values[1:], strict=True):
        if value != values[0] and field != "max_seq_len":
            raise InputError(f"{section.where(key)} = {value} must equal {present[0]} = {values[0]}: both name the same size")
    return values[0] if values else None


def size(section: Section, field: str) -> int:
    """The number for a field: as stated, else the type's default, else 0. Raises InputError."""
    value = stated(section, field)
    return section.traits.defaults.get(field, 0) if value is None else value


def needed(section: Section, field: str) -> int:
    """As :func:`size`, for a field that the model cannot do without. Raises InputError."""
    value = size(section, field)
    if value == 0:
        also = f" (also read: {', '.join(KEYS[field][1:])})" if KEYS[field][1:] else ""
        state = "must be positive" if stated(section, field) == 0 else "is missing; state a positive whole number"
        raise InputError(f"{section.where(KEYS[field][0])} {state}{also}")
    return value


def flag(section: Section, switch: Switch) -> bool:
    """The file's yes or no. Raises InputError."""
    value = section.keys.get(switch.key) if switch.key else None
    if value is not None and not isinstance(value, bool):
        raise InputError(f"{section.where(switch.key)} = {show(value)} must be true or false")
    return switch.default if value is None else value


def listed(section: Section, key: str) -> list[Any] | None:
    """The file's list, None where absent or null. Raises InputError."""
    value = section.keys.get(key)
    if value is not None and not isinstance(value, list):
        raise InputError(f"{section.where(key)} = {show(value)} must be a list")
    return value


def indices(section: Section, key: str, num_layers: int) -> frozenset[int] | None:
    """The layers that a list of the file names. Raises InputError."""
    items = listed(section, key)
    where = section.where(key)
    return None if items is None else frozenset(whole(item, where, (0, num_layers - 1)) for item in items)


def per_layer(section: Section, key: str, num_layers: int) -> list[Any] | None:
    """The file's list of one entry per layer. Raises InputError."""
    items = listed(section, key)
    if items is not None and len(items) != num_layers:
        raise InputError(f"{section.where(key)} has {len(items)} entries, must have one for each of the {num_layers} layers")
    return items


# What single types need


def _falcon(section: Section) -> dict[str, int]:
    """KV heads and norms. Source: FalconAttention and FalconDecoderLayer."""
    new = flag(section, Switch("new_decoder_architecture"))
    single = not new and flag(section, Switch("multi_query", True))
    parallel = flag(section, Switch("parallel_attn", True))
    stated_norms = stated(section, "num_ln_in_parallel_attn")
    two_norms = not parallel or (new if stated_norms is None else stated_norms == 2)
    kv_heads = 1 if single else size(section, "num_key_value_heads")
    return {"num_key_value_heads": kv_heads, "norms_per_layer": 2 if two_norms else 1}


def _gpt_bigcode(section: Section) -> dict[str, int]:
    """One KV head unless multi_query is off. Source: GPTBigCodeAttention."""
    return {"num_key_value_heads": int(flag(section, Switch("multi_query", True)))}


def _llama4(section: Section) -> dict[str, int]:
    """Each of its expert layers has one shared expert. Source: Llama4TextMoe."""
    return {"num_shared_experts": int(size(section, "num_experts") > 0)}


ATTENTION, BIAS = Switch("attention_bias"), Switch("use_bias", True)
QWEN_WINDOW = Switch("use_sliding_window")
HEAD_BIAS = ("the output matrix's bias, where there is one, is not counted",)
INTERMEDIATE = "ffn_hidden_size"

ATTENTION_BIASED = Traits(qkv_bias=ATTENTION, output_bias=ATTENTION)
LLAMA = replace(ATTENTION_BIASED, mlp_bias=Switch("mlp_bias"))
QWEN2 = Traits(qkv_bias=ON, window_switch=QWEN_WINDOW)
QWEN3 = replace(ATTENTION_BIASED, qk_norm=ON, window_switch=QWEN_WINDOW)
GEMMA = replace(ATTENTION_BIASED, tied=True, defaults={"head_dim": 256})
GPT = Traits(gated=False, norm="layernorm", ffn_multiple=4, qkv_bias=ON, output_bias=ON, mlp_bias=ON)
GLM = Traits(qkv_bias=Switch("attention_bias", True), defaults={"head_dim": 128})

TRAITS: dict[str, Traits] = {
    "llama": LLAMA,
    "llama4_text": replace(
        ATTENTION_BIASED,
        expert_width=INTERMEDIATE,
        dense_width="intermediate_size_mlp",
        full_every=4,
        defaults={"head_dim": 128, "intermediate_size_mlp": 16384},
        derive=_llama4,
    ),
    "mistral": Traits(),
    "mixtral": Traits(expert_width=INTERMEDIATE),
    "qwen2": QWEN2,
    "qwen2_moe": replace(
        QWEN2,
        qkv_bias=Switch("qkv_bias", True),
        unmodelled=("the shared expert's gate (one weight per channel) is not counted",),
    ),
    "qwen3": replace(QWEN3, defaults={"head_dim": 128}),
    "qwen3_moe": QWEN3,
    "olmo2": replace(ATTENTION_BIASED, qk_norm=ON, full_width_qk_norm=True),
    "olmo3": replace(ATTENTION_BIASED, qk_norm=ON, full_every=4, full_width_qk_norm=True),
    "olmoe": replace(ATTENTION_BIASED, qk_norm=ON, expert_width=INTERMEDIATE, full_width_qk_norm=True),
    "phi": replace(GPT, norms_per_layer=1, qk_norm=Switch("qk_layernorm"), unmodelled=HEAD_BIAS),
    "phi3": Traits(),
    "phimoe": replace(ATTENTION_BIASED, norm="layernorm", expert_width=INTERMEDIATE, unmodelled=HEAD_BIAS),
    "gemma": GEMMA,
    "gemma2": replace(GEMMA, norms_per_layer=4, full_every=2),
    # Published files of the larger Gemma 3 models state only what differs from the class's defaults.
    "gemma3_text": replace(
        GEMMA,
        norms_per_layer=4,
        qk_norm=ON,
        full_every=6,
        defaults={
            "num_attention_heads": 8,
            "num_key_value_heads": 4,
            "head_dim": 256,
            "vocab_size": 262208,
            "max_seq_len": 131072,
            "sliding_window": 4096,
        },
    ),
    "nemotron": replace(LLAMA, gated=False, norm="layernorm"),
    "starcoder2": Traits(tied=True, gated=False, norm="layernorm", qkv_bias=BIAS, output_bias=BIAS, mlp_bias=BIAS),
    "gpt2": replace(GPT, tied=True, learned_positions=True),
    "gpt_bigcode": replace(GPT, tied=True, learned_positions=True, derive=_gpt_bigcode),
    "gpt_neox": replace(GPT, qkv_bias=Switch("attention_bias", True), output_bias=Switch("attention_bias", True)),
    "gptj": replace(GPT, norms_per_layer=1, qkv_bias=OFF, output_bias=OFF, unmodelled=HEAD_BIAS),
    "opt": replace(
        GPT,
        tied=True,
        learned_positions=True,
        extra_positions=2,
        qkv_bias=Switch("enable_bias", True),
        output_bias=Switch("enable_bias", True),
        mlp_bias=Switch("enable_bias", True),
    ),
    "bloom": replace(GPT, tied=True, embedding_norm=True),
    # The class ties the vocabulary matrices, the published checkpoints hold both (element counts of 7B, 40B and 180B).
    "falcon": replace(
        GPT,
        qkv_bias=Switch("bias"),
        output_bias=Switch("bias"),
        mlp_bias=Switch("bias"),
        defaults={"max_seq_len": 2048},
        derive=_falcon,
    ),
    "deepseek_v2": replace(LLAMA, latent=True),
    "deepseek_v3": replace(ATTENTION_BIASED, latent=True),
    "gpt_oss": Traits(
        qkv_bias=Switch("attention_bias", True),
        output_bias=Switch("attention_bias", True),
        expert_width=INTERMEDIATE,
        expert_bias=True,
        router_bias=True,
        full_every=2,
        defaults={"head_dim": 64},
        unmodelled=("attention sinks (one weight per head) are not counted",),
    ),
    "glm": GLM,
    "glm4": replace(GLM, norms_per_layer=4),
    "glm4_moe": Traits(qkv_bias=ATTENTION, qk_norm=Switch("use_qk_norm")),
    "cohere": replace(ATTENTION_BIASED, tied=True, norms_per_layer=1, qk_norm=Switch("use_qk_norm"), full_width_qk_norm=True),
    "cohere2": replace(ATTENTION_BIASED, tied=True, norms_per_layer=1, full_every=4),
    "granite": LLAMA,
    "granitemoe": replace(ATTENTION_BIASED, expert_width=INTERMEDIATE),
    "smollm3": replace(LLAMA, tied=True, window_switch=QWEN_WINDOW),
    "seed_oss": replace(
        LLAMA, qkv_bias=Switch("attention_bias", True), output_bias=Switch("attention_out_bias"), defaults={"head_dim": 128}
    ),
    "ernie4_5": Traits(
        tied=True,
        qkv_bias=Switch("use_bias"),
        output_bias=Switch("use_bias"),
        mlp_bias=Switch("use_bias"),
        defaults={"head_dim": 128},
    ),
}
ALIASES = {
    "gemma3": "gemma3_text",
    "llama4": "llama4_text",
    "kimi_k2": "deepseek_v3",
    "deepseek_v32": "deepseek_v3",
    "qwen2_vl": "qwen2",
    "qwen2_vl_text": "qwen2",
    "qwen2_5_vl": "qwen2",
    "qwen2_5_vl_text": "qwen2",
    "qwen3_vl_text": "qwen3",
    "qwen3_vl_moe_text": "qwen3_moe",
    "glm4v_text": "glm4",
    "glm4v_moe_text": "glm4_moe",
}
UNKNOWN = replace(LLAMA, qk_norm=Switch("use_qk_norm"), expert_width="")


# From the path to the section


def config_path(path: Path) -> Path:
    """The file itself, or config.json inside the folder. Raises InputError."""
    found = path / "config.json" if path.is_dir() else path
    if found.is_file():
        return found
    if path.is_dir():
        raise InputError(f"{path}: the folder holds no config.json")
    reason = "is not a regular file" if found.exists() else "there is no such file"
    raise InputError(f"{path}: {reason}; give a config.json or a folder that holds one")


def read_text(path: Path) -> str:
    """The text of a file of at most 4 MiB. Raises InputError."""
    try:
        with path.open("rb") as file:
            content = file.read(MAX_FILE_BYTES + 1)
        if len(content) > MAX_FILE_BYTES:
            raise InputError(f"{path}: larger than {MAX_FILE_BYTES >> 20} MiB, so not a config.json")
        return content.decode("utf-8-sig")
    except UnicodeDecodeError:
        raise InputError(f"{path}: not a text file in UTF-8") from None


def parse(path: Path) -> dict[str, Any]:
    """The object that a JSON file holds. Raises InputError."""
    try:
        value = json.loads(read_text(path))
    except json.JSONDecodeError as error:
        raise InputError(f"{path}: not valid JSON: {error}") from None
    except (ValueError, RecursionError):
        raise InputError(f"{path}: not valid JSON: a number too long or nesting too deep") from None
    if not isinstance(value, dict):
        raise InputError(f"{path}: must hold a JSON object, holds {show(value)}")
    return value


def language_part(path: Path, top: Mapping[str, Any]) -> tuple[str, Mapping[str, Any]]:
    """The nested object of a vision-language model with its prefix, else the whole. Raises InputError."""
    for key in NESTED:
        inner = top.get(key)
        if inner is None:
            continue
        if not isinstance(inner, dict):
            raise InputError(f"{path}: {key} = {show(inner)} must be an object")
        shared = {name: top[name] for name in ("model_type", "tie_word_embeddings") if name in top}
        return f"{key}.", {**shared, **inner}
    return "", top


def type_of(path: Path, prefix: str, keys: Mapping[str, Any]) -> str:
    """The model type, "" where the file has none. Raises InputError also for types that are no decoder."""
    value = keys.get("model_type")
    if value is not None and not isinstance(value, str):
        raise InputError(f"{path}: {prefix}model_type = {show(value)} must be a text such as 'llama'")
    if value in REFUSED_TYPES:
        raise InputError(f"{path}: {prefix}model_type = {show(value)}: {REFUSED_TYPES[value]}; {LEGAL_KIND}")
    return value or ""


def section_of(path: Path, top: Mapping[str, Any]) -> Section:
    """The language part of a file with its traits. Raises InputError."""
    prefix, keys = language_part(path, top)
    model_type = type_of(path, prefix, keys)
    for key, kind in REFUSED_KEYS.items():
        if keys.get(key):
            raise InputError(f"{path}: {prefix}{key} = {show(keys[key])}: {kind}; {LEGAL_KIND}")
    traits = TRAITS.get(ALIASES.get(model_type, model_type))
    return Section(
        path=path,
        prefix=prefix,
        keys=keys,
        model_type=model_type,
        traits=traits or UNKNOWN,
        known=traits is not None,
        left_out=tuple(f"{key}: {meaning}" for key, meaning in LEFT_OUT.items() if top.get(key)),
    )


def name_of(path: Path, top: Mapping[str, Any]) -> str:
    """The last part of _name_or_path, else the folder of a config.json or the stem of another name.

    >>> name_of(Path("/models/mine/config.json"), {}), name_of(Path("x.json"), {"_name_or_path": "meta-llama/Llama-2-7b-hf"})
    ('mine', 'Llama-2-7b-hf')
    """
    stated_name = top.get("_name_or_path")
    own = path.resolve().parent.name if path.stem == "config" else path.stem
    for name in (stated_name if isinstance(stated_name, str) else "", own):
        last = re.split(r"[/\\]", name.rstrip("/\\"))[-1]
        clean = re.sub(r"[^A-Za-z0-9._+-]+", "-", last[:200]).strip("-.")[:80]
        if clean:
            return clean
    return "model"


# From the section to the model


def moe_pattern(section: Section, num_layers: int) -> list[bool]:
    """Which layers hold experts. Raises InputError.

    Source: DeepseekV2DecoderLayer, Qwen2MoeDecoderLayer, Llama4TextDecoderLayer; moe_layer_freq in DeepSeek's own code.
    """
    leading, step = size(section, "leading_dense"), stated(section, "sparse_step") or 1
    dense = indices(section, "mlp_only_layers", num_layers) or frozenset()
    sparse = indices(section, "moe_layers", num_layers)
    often = often_sparse(section, num_layers)
    return [
        i >= leading and i not in dense and often[i] and ((i + 1) % step == 0 if sparse is None else i in sparse) for i in range(num_layers)
    ]


def often_sparse(section: Section, num_layers: int) -> list[bool]:
    """Which layers moe_layer_freq lets hold experts: every so many, or a list of one 0 or 1 per layer. Raises InputError."""
    if isinstance(section.keys.get("moe_layer_freq"), list):
        where = section.where("moe_layer_freq")
        return [bool(whole(item, where, (0, 1))) for item in per_layer(section, "moe_layer_freq", num_layers) or ()]
    step = stated(section, "moe_layer_freq") or 1
    return [i % step == 0 for i in range(num_layers)]


def experts_per_token(section: Section, num_experts: int) -> int:
    """Routed experts that one token visits. Raises InputError."""
    number = needed(section, "experts_per_token")
    key = next((key for key in KEYS["experts_per_token"] if section.keys.get(key) is not None), "")
    return whole(number, section.where(key), (1, num_experts))


def expert_width(section: Section) -> int:
    """Width of one routed expert. Raises InputError."""
    field = section.traits.expert_width
    if not field:
        field = "moe_ffn_hidden_size" if size(section, "moe_ffn_hidden_size") else "ffn_hidden_size"
    return needed(section, field)


def expert_fields(section: Section, num_layers: int) -> dict[str, Any]:
    """Everything about the experts; nothing for a dense model. Raises InputError."""
    num_experts = size(section, "num_experts")
    if not num_experts:
        return {}
    pattern = moe_pattern(section, num_layers)
    if not any(pattern):
        raise InputError(f"{section.where('num_experts')} = {num_experts}, yet no layer holds experts; at least one must")
    shared_width = size(section, "shared_ffn_hidden_size")
    return {
        "num_experts": num_experts,
        "experts_per_token": experts_per_token(section, num_experts),
        "moe_ffn_hidden_size": expert_width(section),
        "num_shared_experts": size(section, "num_shared_experts") or int(shared_width > 0),
        "shared_ffn_hidden_size": shared_width,
        "num_dense_layers": pattern.count(False),
        "expert_bias": section.traits.expert_bias,
        "router_bias": section.traits.router_bias,
    }


def latent_fields(section: Section) -> dict[str, int]:
    """Ranks and widths of multi-head latent attention; nothing where there is none. Raises InputError."""
    if section.traits.latent and "kv_lora_rank" not in section.keys:
        needed(section, "kv_lora_rank")
    if not size(section, "kv_lora_rank"):
        return {}
    widths = {field: needed(section, field) for field in ("kv_lora_rank", "qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim")}
    uneven = needed(section, "hidden_size") % needed(section, "num_attention_heads")
    head_dim = widths["v_head_dim"] if uneven else 0
    return {**widths, "q_lora_rank": size(section, "q_lora_rank"), "num_key_value_heads": 0, "head_dim": head_dim}


def window_fields(section: Section, num_layers: int) -> dict[str, int]:
    """Attention span and how many layers have it. Raises InputError.

    A window that is no shorter than the longest sequence never cuts anything and counts as none.
    """
    span, longest = size(section, "sliding_window"), size(section, "max_seq_len")
    num_windowed = windowed_layers(section, num_layers)
    if not span or not num_windowed or span >= longest > 0 or not flag(section, section.traits.window_switch):
        return {}
    return {"sliding_window": span, "num_window_layers": num_windowed}


def windowed_layers(section: Section, num_layers: int) -> int:
    """Layers without full attention: by layer_types, by pattern, or behind max_window_layers. Raises InputError."""
    types = per_layer(section, "layer_types", num_layers)
    if types is not None:
        for item in types:
            if item not in LAYER_TYPES:
                raise InputError(f"{section.where('layer_types')}: {show(item)} must be one of {', '.join(LAYER_TYPES)}")
        return sum(item in WINDOWED for item in types)
    behind = stated(section, "max_window_layers")
    if behind is not None:
        return max(0, num_layers - behind)
    every = stated(section, "window_pattern") or section.traits.full_every
    return num_layers - num_layers // every if every else num_layers


def bias_fields(section: Section, *, has_dense: bool) -> dict[str, bool]:
    """Biases: those of the output projection and the MLP count only together, as the model knows them. Raises InputError."""
    output, mlp = flag(section, section.traits.output_bias), flag(section, section.traits.mlp_bias)
    return {"qkv_bias": flag(section, section.traits.qkv_bias), "linear_bias": output and (mlp or not has_dense)}


def mlp_width(section: Section) -> int:
    """Width of the dense MLP. Raises InputError."""
    multiple = section.traits.ffn_multiple * needed(section, "hidden_size")
    return size(section, section.traits.dense_width) or multiple or needed(section, section.traits.dense_width)


def has_dropout(section: Section) -> bool:
    """Whether hidden dropout is on. Raises InputError."""
    for key in DROPOUT_KEYS:
        value = section.keys.get(key)
        if isinstance(value, bool) or not isinstance(value, (int, float, type(None))) or not 0 <= (value or 0) <= 1:
            raise InputError(f"{section.where(key)} = {show(value)} must be a number from 0 to 1")
    return any(section.keys.get(key) for key in DROPOUT_KEYS)


def gated(section: Section) -> bool:
    """Whether the MLP has a gate: by type, and by activation where the type is unknown."""
    activation = section.keys.get("hidden_act")
    return section.traits.gated and (section.known or activation not in PLAIN_ACTIVATIONS)


def shape_fields(section: Section) -> dict[str, Any]:
    """Sizes that every model has. Raises InputError."""
    plain = ("num_key_value_heads", "head_dim", "max_seq_len", "num_mtp_layers")
    return {
        **{field: needed(section, field) for field in ("num_layers", "hidden_size", "num_attention_heads", "vocab_size")},
        **{field: size(section, field) for field in plain},
    }


def trait_fields(section: Section) -> dict[str, Any]:
    """What the type settles alone or together with one key. Raises InputError."""
    traits = section.traits
    return {
        "gated_mlp": gated(section),
        "tied_embeddings": flag(section, Switch("tie_word_embeddings", traits.tied)),
        "norm": traits.norm,
        "norms_per_layer": traits.norms_per_layer,
        "qk_norm": flag(section, traits.qk_norm),
        "learned_positions": needed(section, "max_seq_len") + traits.extra_positions if traits.learned_positions else 0,
        "embedding_norm": traits.embedding_norm,
        "dropout": has_dropout(section),
    }


def fields_of(section: Section) -> dict[str, Any]:
    """All fields of the model but its name and source. Raises InputError."""
    shape = shape_fields(section)
    num_layers = shape["num_layers"]
    experts = expert_fields(section, num_layers)
    has_dense = not experts or experts["num_dense_layers"] > 0
    return {
        **shape,
        **trait_fields(section),
        **bias_fields(section, has_dense=has_dense),
        **window_fields(section, num_layers),
        **experts,
        "ffn_hidden_size": mlp_width(section) if has_dense else 0,
        **latent_fields(section),
        **section.traits.derive(section),
    }


# What was assumed and what was left out


def assumed(section: Section) -> tuple[str, ...]:
    """One line for each thing that the file does not say."""
    return (*_type_notes(section), *_default_notes(section), *_moe_notes(section), *_window_notes(section))


def _type_notes(section: Section) -> list[str]:
    if section.known:
        return []
    stated_type = f"model_type = {show(section.model_type)} is unknown" if section.model_type else "model_type is missing"
    gate = "gated" if gated(section) else "plain"
    return [f"{section.prefix}{stated_type}: read like llama, with RMS norms and a {gate} MLP"]


def _default_notes(section: Section) -> list[str]:
    traits = section.traits
    notes = [
        f"{KEYS[name][0]} is not stated: {value}, the default of {section.model_type}"
        for name, value in traits.defaults.items()
        if stated(section, name) is None
    ]
    if section.keys.get("tie_word_embeddings") is None:
        notes.append(f"tie_word_embeddings is not stated: {str(traits.tied).lower()}, as usual for this type")
    if traits.ffn_multiple and not size(section, "ffn_hidden_size"):
        notes.append(f"the MLP's width is not stated: {traits.ffn_multiple} x hidden_size")
    return notes


def _moe_notes(section: Section) -> list[str]:
    num_layers = needed(section, "num_layers")
    if not size(section, "num_experts"):
        return []
    pattern = moe_pattern(section, num_layers)
    dense = pattern.count(False)
    notes = []
    if any(pattern[:dense]):
        notes.append(f"dense and expert layers alternate: taken as {dense} dense layers in front of {num_layers - dense}")
    if not section.traits.expert_width and not size(section, "moe_ffn_hidden_size"):
        notes.append("moe_intermediate_size is not stated: intermediate_size is taken as the width of one expert")
    return notes


def _window_notes(section: Section) -> list[str]:
    every = section.traits.full_every
    by_file = any(section.keys.get(key) is not None for key in ("layer_types", "sliding_window_pattern", "max_window_layers"))
    if by_file or not every or not window_fields(section, needed(section, "num_layers")):
        return []
    return [f"layer_types is not stated: one layer in {every} has full attention, as usual for {section.model_type}"]


def ignored(section: Section) -> tuple[str, ...]:
    """One line for each part of the file's model that the read model does not hold."""
    traits = section.traits
    wide_norm = traits.full_width_qk_norm and flag(section, traits.qk_norm)
    norm_notes = ["query and key norms span the full projection and are counted as spanning one head"] if wide_norm else []
    return (*section.left_out, *traits.unmodelled, *norm_notes, *_bias_notes(section), *_doubtful(section))


def _bias_notes(section: Section) -> list[str]:
    experts = expert_fields(section, needed(section, "num_layers"))
    has_dense = not experts or experts["num_dense_layers"] > 0
    kept = bias_fields(section, has_dense=has_dense)["linear_bias"]
    places = {"the output projection": section.traits.output_bias, "the MLP": section.traits.mlp_bias}
    return [f"the bias of {place} is not counted" for place, switch in places.items() if flag(section, switch) and not kept]


def _doubtful(section: Section) -> list[str]:
    """Keys that sound as if they changed the model's size and that are not read."""
    read = {key for keys in KEYS.values() for key in keys} | {"mlp_only_layers", "moe_layers", *REFUSED_KEYS}
    unread = sorted(key for key, value in section.keys.items() if value and key not in read)
    names = [key for key in unread if DOUBTFUL.search(key) and not HARMLESS.search(key)]
    return [f"{show(key)} = {show(section.keys[key])} is not understood" for key in names[:MAX_NOTES]]


# The two ways in


def read(path: Path) -> ReadConfig:
    """The model of a config.json (or of the folder that holds one), with notes. Raises InputError, in one line."""
    try:
        found = config_path(path)
        top = parse(found)
        section, name = section_of(found, top), name_of(found, top)
    except (OSError, ValueError) as error:
        reason = error.strerror if isinstance(error, OSError) else error
        raise InputError(f"{path}: cannot be read ({reason or error})") from None
    fields = fields_of(section)
    try:
        model = Model(name=name, source=f"read from {found}", **fields)
    except InputError as error:
        raise InputError(f"{found}: {error}") from None
    return ReadConfig(model=model, assumed=assumed(section), ignored=ignored(section))


def read_config(path: Path) -> Model:
    """The model of a config.json or of the folder that holds one. Raises InputError, in one line."""
    return read(path).model


__all__ = ["ReadConfig", "read", "read_config"]
