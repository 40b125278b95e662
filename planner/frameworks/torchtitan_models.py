"""The models that torchtitan ships, by our catalogue's names, and what its own configurations set.

Source: torchtitan 0.3, models/MODULE/__init__.py (flavors) and config_registry.py (configurations); 0.2, models/MODULE/__init__.py.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from planner.catalogue import load
from planner.catalogue.schema import Model
from planner.errors import InputError


@dataclass(frozen=True, kw_only=True)
class Flavor:
    """One size of a model."""

    module: str
    flavor: str
    """Its key in 0.3."""
    model: str = ""
    """Our catalogue's name; "" where the catalogue has no such model."""
    positions: int = 0
    """Longest sequence that 0.3 builds rotary tables for; it refuses longer ones."""
    old: str = ""
    """Its key in 0.2; "" where 0.2 has no such model."""
    context: bool = True
    """Whether 0.3 splits its attention over context ranks: its configurations use FlexAttention."""
    old_context: bool = True
    """Whether 0.2 does: only plain attention (llama3: FlexAttention too)."""
    old_pipeline: bool = True
    """Whether 0.2 can cut it into stages."""
    written: bool = True
    """Whether exports use it; False where its configuration needs more than its own sizes, such as another optimizer."""


def _llama(flavor: str, model: str, old: str = "") -> Flavor:
    return Flavor(module="llama3", flavor=flavor, model=model, positions=131_072, old=old)


def _deepseek(flavor: str, model: str) -> Flavor:
    return Flavor(module="deepseek_v3", flavor=flavor, model=model, positions=16_384, old=flavor, old_context=False)


def _qwen(flavor: str, model: str = "") -> Flavor:
    return Flavor(module="qwen3", flavor=flavor, model=model, positions=40_960, old=flavor, old_pipeline=False)


def _gpt_oss(flavor: str, model: str) -> Flavor:
    plain = {"context": False, "old_context": False, "old_pipeline": False}
    return Flavor(module="gpt_oss", flavor=flavor, model=model, positions=131_072, old=flavor, **plain)


FLAVORS: tuple[Flavor, ...] = (
    _llama("1B", "llama-3.2-1b"),
    _llama("3B", "llama-3.2-3b"),
    _llama("8B", "llama-3.1-8b", "8B"),
    _llama("70B", "llama-3.1-70b", "70B"),
    _llama("405B", "llama-3.1-405b", "405B"),
    _deepseek("16B", "deepseek-v2-lite"),
    _deepseek("236B", "deepseek-v2"),
    _deepseek("671B", "deepseek-v3"),
    *(_qwen(small) for small in ("0.6B", "1.7B", "4B")),  # not in the catalogue: too small to need a plan
    _qwen("8B", "qwen3-8b"),
    _qwen("14B", "qwen3-14b"),
    _qwen("32B", "qwen3-32b"),
    _qwen("30B-A3B", "qwen3-30b-a3b"),
    _qwen("235B-A22B", "qwen3-235b-a22b"),
    _gpt_oss("20b", "gpt-oss-20b"),
    _gpt_oss("120b", "gpt-oss-120b"),
    Flavor(module="kimi_k2_7", flavor="moonlight-16B-A3B", model="moonlight-16b-a3b", positions=8_192, context=False, written=False),
)

WITHOUT_CATALOGUE: Mapping[str, str] = {
    "debugmodel": "torchtitan's debug models are for its own tests",
    "0.6B": "the catalogue has no Qwen3 below 8B",
    "1.7B": "the catalogue has no Qwen3 below 8B",
    "4B": "the catalogue has no Qwen3 below 8B",
    "17bx16e": "the catalogue has no Llama 4",
    "17bx128e": "the catalogue has no Llama 4",
    "Kimi-VL-A3B": "it carries a vision tower, which the catalogue does not hold",
    "Kimi-K2.5": "it carries a vision tower, which the catalogue does not hold",
    "30B": "the catalogue has no Muse Glimmer",
}
"""Flavors that torchtitan has and the catalogue has not, with the reason."""

OTHER_MODULES: Mapping[str, str] = {
    "flux": "an image model",
    "muse_glimmer": "not in the catalogue",
    "qwen3_5": "a model with linear attention",
    "llama4": "not in the catalogue",
    "llama3_ft": "llama3 with fault tolerance, an experiment",
}
"""Modules of which no flavor is in the catalogue."""

OLD_ATTENTION = {"_flex": "flex", "_varlen": "varlen", "_flex_attn": "flex", "_varlen_attn": "varlen", "_irope": "flex"}
"""Endings of 0.2's flavors that change the attention kernel and nothing else."""

OWN_MODULE = "planned_models"
"""The module of an exported configuration function, for flavors whose own configuration does not exist or trains in another precision."""


@dataclass(frozen=True, kw_only=True)
class Recipe:
    """One function of 0.3's config_registry.py: the flavor that it trains, and the settings that it changes."""

    module: str
    flavor: str
    precision: str = "bf16"
    settings: Mapping[str, Any] = field(default_factory=dict)
    plain: bool = True
    """Whether an export may start from it: plain pre-training with the module's usual parts."""


def _sizes(local: int, seq_len: int, mode: str = "selective", **parallelism: Any) -> dict[str, Any]:
    named = {f"parallelism.{key}": value for key, value in parallelism.items()}
    return {"training.local_batch_size": local, "training.seq_len": seq_len, "activation_checkpoint.mode": mode, **named}


_COMPILED = {"compile.enable": True}
_MODEL_ALONE = {"compile.enable": True, "compile.components": ["model"]}
_LOSS_ALONE = {"compile.enable": True, "compile.components": ["loss"]}
_NO_GRAPHS = {"training.disable_cuda_graphs": True}
_LOOPED = "Interleaved1F1B"
_ALONE: dict[str, Any] = {"data_parallel_shard_degree": 1, "enable_sequence_parallel": False}
_ASYNC = {"compile.enable_async_tensor_parallel": True}


def _deep(flavor: str, expert: int, *, precision: str = "bf16", graphs: bool = False, plain: bool = True) -> Recipe:
    sizes = _sizes(4, 4096, pipeline_parallel_schedule=_LOOPED, expert_parallel_degree=expert)
    settings = sizes | _LOSS_ALONE | ({} if graphs else _NO_GRAPHS)
    return Recipe(module="deepseek_v3", flavor=flavor, precision=precision, settings=settings, plain=plain)


def _of(module: str, flavor: str, settings: Mapping[str, Any], precision: str = "bf16", *, plain: bool = True) -> Recipe:
    return Recipe(module=module, flavor=flavor, precision=precision, settings=settings, plain=plain)


RECIPES: Mapping[str, Recipe] = {
    "llama3_8b": _of("llama3", "8B", _sizes(1, 8192)),
    "llama3_8b_mxfp8": _of("llama3", "8B", _sizes(1, 8192) | _MODEL_ALONE, "mxfp8"),
    "llama3_8b_first_85_pct_layers_nvfp4": _of("llama3", "8B", _sizes(1, 8192) | _MODEL_ALONE, "nvfp4", plain=False),
    "llama3_70b": _of("llama3", "70B", _sizes(8, 8192, "full", tensor_parallel_degree=8)),
    "llama3_405b": _of("llama3", "405B", _sizes(2, 8192, "full", tensor_parallel_degree=8) | _COMPILED | _ASYNC, "fp8"),
    "deepseek_v3_16b": _deep("16B", 8),
    "deepseek_v3_16b_hybridep": _deep("16B", 8, graphs=True, plain=False),
    "deepseek_v3_16b_minimal_async_ep": _of("deepseek_v3", "16B", _sizes(4, 4096, **_ALONE) | _LOSS_ALONE, plain=False),
    "deepseek_v3_671b": _deep("671B", 2),
    "deepseek_v3_671b_float8": _deep("671B", 2, precision="fp8"),
    "qwen3_0_6b": _of("qwen3", "0.6B", _sizes(4, 4096)),
    "qwen3_1_7b": _of("qwen3", "1.7B", _sizes(4, 4096)),
    "qwen3_8b_first_85_pct_layers_nvfp4": _of("qwen3", "8B", _sizes(1, 2048) | _MODEL_ALONE, "nvfp4", plain=False),
    "sft_qwen3_8b_math": _of("qwen3", "8B", _sizes(1, 2048), plain=False),
    "qwen3_14b": _of("qwen3", "14B", _sizes(4, 4096, "full")),
    "qwen3_30b_a3b": _of("qwen3", "30B-A3B", _sizes(2, 4096, "full")),
    "qwen3_32b": _of("qwen3", "32B", _sizes(2, 4096, "full")),
    "gpt_oss_20b": _of("gpt_oss", "20b", _sizes(1, 8192, "full")),
    "gpt_oss_120b": _of("gpt_oss", "120b", _sizes(1, 8192, "full")),
    "moonlight_16b_a3b": _of("kimi_k2_7", "moonlight-16B-A3B", _sizes(4, 4096, "full", expert_parallel_degree=8) | _NO_GRAPHS, plain=False),
}
"""Function name -> what it sets. Debug configurations are left out: their models are not in the catalogue."""

BASE_RECIPE = {"llama3": "llama3_8b", "deepseek_v3": "deepseek_v3_16b", "qwen3": "qwen3_14b", "gpt_oss": "gpt_oss_20b"}
"""Module -> the function that an exported configuration starts from."""


def own_config(flavor: Flavor, precision: str) -> str:
    """The name of the configuration function that an export defines for a flavor.

    >>> own_config(find_flavor("deepseek_v3", "236B"), "bf16")
    'deepseek_v3_236b_bf16'
    """
    return f"{flavor.module}_{flavor.flavor}_{precision}".lower().replace("-", "_").replace(".", "_")


def recipe_of(name: str, module: str) -> Recipe | None:
    """The configuration function of a module by its name, those that exports define included; None where there is none."""
    if module != OWN_MODULE:
        found = RECIPES.get(name)
        return found if found and found.module == module else None
    for flavor in FLAVORS:
        for precision in CONVERTERS:
            if name == own_config(flavor, precision) and flavor.written:
                base = RECIPES[BASE_RECIPE[flavor.module]]
                return Recipe(module=flavor.module, flavor=flavor.flavor, precision=precision, settings=base.settings)
    return None


CONVERTERS: Mapping[str, str] = {
    "bf16": "",
    "fp8": "Float8LinearConverter",
    "mxfp8": "MXFP8LinearConverter",
}
"""Precision -> the class that converts the linear layers. Source: components/quantization/__init__.py."""


def find_flavor(module: str, flavor: str) -> Flavor | None:
    """The flavor of a module, by its key in either version, whatever its attention kernel; None where the table has none."""
    for ending in sorted(OLD_ATTENTION, key=len, reverse=True):
        flavor = flavor.removesuffix(ending)
    return next((row for row in FLAVORS if row.module == module and flavor in (row.flavor, row.old)), None)


SHAPE = ("num_layers", "hidden_size", "num_attention_heads", "num_key_value_heads", "ffn_hidden_size", "vocab_size", "num_experts")


@functools.cache
def flavor_of(model: Model) -> Flavor | None:
    """The flavor that is a model, by its catalogue name or by its sizes; None where torchtitan has none.

    >>> flavor_of(load.find(Model, "70b")).flavor, flavor_of(load.find(Model, "mixtral-8x7b"))
    ('70B', None)
    """
    named = [row for row in FLAVORS if row.model]

    def alike(row: Flavor) -> bool:
        other = load.find(Model, row.model)
        return all(getattr(model, key) == getattr(other, key) for key in SHAPE)

    return next((row for row in named if row.model == model.name), None) or next((row for row in named if alike(row)), None)


def needed_flavor(model: Model) -> Flavor:
    """The flavor that is a model, to be written. Raises InputError naming the models that torchtitan has."""
    found = flavor_of(model)
    if found is None or not found.written:
        known = ", ".join(row.model for row in FLAVORS if row.model and row.written)
        raise InputError(f"torchtitan has no configuration for the model '{model.name}'; it has {known}")
    return found


def usual_recipe(flavor: Flavor, precision: str) -> str:
    """The name of the configuration function that trains a flavor in a precision; "" where there is none."""
    wanted = (flavor.module, flavor.flavor, precision, True)
    return next((name for name, row in RECIPES.items() if (row.module, row.flavor, row.precision, row.plain) == wanted), "")
