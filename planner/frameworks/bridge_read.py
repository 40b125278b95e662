"""Reads YAML files of Megatron-Bridge and NeMo, and scripts that hand one to a program, by way of Megatron's own fields."""

from __future__ import annotations

import dataclasses
import itertools
import re
from collections.abc import Iterator, Mapping
from types import MappingProxyType
from typing import Any

from planner.frameworks.bridge_keys import MIXED, MODEL, OTHERS, STRATEGY, TRAINER_PRECISIONS, ZERO_ONE, key_of
from planner.frameworks.config import Config
from planner.frameworks.files import Source, listed, open_source, shown, truth, whole_number, word_of
from planner.frameworks.megatron_config import config_of
from planner.frameworks.megatron_read import TELLING as TELLING_FLAGS
from planner.frameworks.megatron_read import launcher_sizes, settings_of_fields
from planner.frameworks.reading import Reader
from planner.frameworks.shell import read_script
from planner.frameworks.trainer import beside, flags_of, is_script

KIND = "Megatron-Bridge or NeMo configuration in YAML"
SCRIPT_KIND = "launch script of Megatron-Bridge"
TELLING = (
    *("tensor_model_parallel_size", "pipeline_model_parallel_size", "expert_model_parallel_size", "context_parallel_size"),
    *("virtual_pipeline_model_parallel_size", "activations_checkpoint_granularity"),
)
"""Keys of the model, one of which every such file states."""
MOST_KEYS = 5_000
MOST_DEPTH = 12


def is_bridge(source: Source) -> bool:
    """Whether a YAML file has a model's table, or a strategy's, with Megatron's parallel sizes."""
    if source.data is None or source.ending not in (".yaml", ".yml"):
        return False
    keys = {key for key, _ in leaves(source.data)}
    return any(f"{table}.{name}" in keys for table in ("model", "trainer.strategy", "strategy") for name in TELLING)


def leaves(data: Mapping[Any, Any], prefix: str = "", depth: int = 0, seen: set[int] | None = None) -> Iterator[tuple[str, Any]]:
    """Dotted keys with their values; lists are values. A table that several aliases name is entered once: they unfold without end."""
    entered = set() if seen is None else seen
    entered.add(id(data))
    for key, value in list(data.items())[:MOST_KEYS]:
        name = f"{prefix}{key}" if isinstance(key, (str, int)) else ""
        if isinstance(value, dict) and depth < MOST_DEPTH:
            if id(value) not in entered:
                yield from leaves(value, f"{name}.", depth + 1, entered)
        elif name:
            yield name, value


def read_bridge(source: Source, num_gpus: int | None = None) -> Config:
    """What the file says. Raises InputError."""
    return _read(source, keys_of(source), num_gpus)


def keys_of(source: Source) -> dict[str, Any]:
    """The dotted keys of a file with their values. Raises InputError."""
    found = dict(itertools.islice(leaves(source.data or {}), MOST_KEYS + 1))
    if len(found) > MOST_KEYS:
        raise source.fail(f"holds more than {MOST_KEYS:,} keys")
    return found


def _read(source: Source, keys: Mapping[str, Any], num_gpus: int | None, launcher: Mapping[str, Any] = MappingProxyType({})) -> Config:
    """What dotted keys say, beside what the launcher's words do. Raises InputError."""
    stated: dict[str, Any] = {}
    unknown: list[str] = []
    told: dict[str, str] = {}
    raw: dict[str, Any] = {}
    for name, value in keys.items():
        if value is None:
            continue
        for field, found in fields_of(source, name, value):
            if told.get(field) and stated.get(field) != found:
                raise source.fail(f"{name} = {shown(found)} contradicts {told[field]} = {shown(stated[field])}: both state the same")
            stated[field], told[field], raw[name] = found, name, value
        if not known(name):
            unknown.append(name)
    settings, assumed = _completed(source, {**settings_of_fields(source, stated), **launcher})
    found_config = config_of(source, KIND, settings, num_gpus, framework="megatron-bridge")
    read = tuple(dict.fromkeys(f"{name} {_text(raw[name])}" for name in told.values()))
    ignored = tuple(line for line in found_config.ignored if "not modelled" in line)
    left = (listed(unknown),) if unknown else ()
    return dataclasses.replace(found_config, read=read, assumed=(*found_config.assumed, *assumed), ignored=(*ignored, *left))


def _text(value: Any) -> str:
    return shown(value).strip("'") if not isinstance(value, list) else "(a list)"


def split_key(name: str) -> tuple[str, str]:
    """The table of a dotted key, and the key in it.

    >>> split_key("model.num_layers"), split_key("trainer.strategy.sequence_parallel"), split_key("model.optim.name")
    (('model', 'num_layers'), ('strategy', 'sequence_parallel'), ('optim', 'name'))
    """
    pieces = name.split(".")
    return (pieces[-2] if len(pieces) > 1 else "", pieces[-1])


SPECIAL = (
    *("ddp.grad_reduce_in_fp32", "mixed_precision.grad_reduce_in_fp32"),
    *("trainer.num_nodes", "trainer.devices", "trainer.precision", "mixed_precision", "model.activation", "model.mcore_gpt"),
)
SHARED_NAMES = ("model.share_embeddings_and_output_weights", "model.tie_word_embeddings")


def known(name: str) -> bool:
    """Whether a key is read."""
    table, key = split_key(name)
    if name in SPECIAL or name in SHARED_NAMES or (table == "optim" and key == "name"):
        return True
    return key in tables().get(table, {})


def tables() -> Mapping[str, Mapping[str, str]]:
    """Every table with the keys that are read of it."""
    return {**OTHERS, "model": MODEL, "strategy": STRATEGY, "config": OTHERS["optimizer"], "mixed_precision": {"grad_reduce_in_fp32": ""}}


def fields_of(source: Source, name: str, value: Any) -> list[tuple[str, Any]]:
    """Megatron's fields that a key states, with their values. Raises InputError."""
    table, key = split_key(name)
    if name in SHARED_NAMES:
        return [("untie_embeddings_and_output_weights", not truth(source, name, value))]
    if name == "mixed_precision":
        return list(MIXED[word_of(source, name, value, MIXED)])
    if name == "mixed_precision.grad_reduce_in_fp32" or name == "ddp.grad_reduce_in_fp32":
        return [] if truth(source, name, value) else [("grad_reduce_in_bf16", True)]
    if name == "trainer.num_nodes":
        return [("num_nodes", whole_number(source, name, value))]
    if name == "trainer.devices":
        return [("gpus_per_node", _devices(source, name, value))]
    if name == "trainer.precision":
        return [(TRAINER_PRECISIONS[str(value)], True)] if str(value) in TRAINER_PRECISIONS else []
    if name == "model.activation":
        return [("swiglu", str(value).removeprefix("fast-") in ("swiglu", "geglu", "reglu"))]
    if table == "optim" and key == "name":
        return _optimizer(str(value))
    field = tables().get(table, {}).get(key)
    return _field(source, name, field, value) if field else []


def _devices(source: Source, name: str, value: Any) -> int:
    """GPUs of a node: their number, or a list of theirs. Raises InputError."""
    if not isinstance(value, list):
        return whole_number(source, name, value)
    if not value:
        raise source.fail(f"{name} = an empty list must name at least one GPU, or be their number such as 8")
    return len({whole_number(source, name, item, least=0, most=1 << 20) for item in value})


def _field(source: Source, name: str, field: str, value: Any) -> list[tuple[str, Any]]:
    if field == "normalization":
        return [(field, "RMSNorm" if str(value).lower() == "rmsnorm" else "LayerNorm")]
    if field in ("recompute_granularity", "recompute_method") and value in ("null", "none", ""):
        return []
    if field == "fp8" and isinstance(value, bool):
        return [("fp8", "hybrid")] if value else []
    if field == "pipeline_model_parallel_layout" and not isinstance(value, (str, list)):
        raise source.fail(f"{name} = {shown(value)} must be a string such as 'Et*2|t*2L' or a list of lists")
    return [(field, value)]


def _optimizer(word: str) -> list[tuple[str, Any]]:
    """What an optimizer's name of NeMo says."""
    short = re.sub(r"^(distributed_)?(fused_)?", "", word)
    found: list[tuple[str, Any]] = [("use_distributed_optimizer", True)] if word in ZERO_ONE else []
    return [*found, ("optimizer", {"adam": "adam", "adamw": "adam", "mcore_distributed_optim": "adam"}.get(short, short))]


def _completed(source: Source, settings: dict[str, Any]) -> tuple[dict[str, Any], list[str]]:
    """The settings with what follows from others, and what recipes have where a file of overrides states nothing."""
    found, assumed = dict(settings), []
    nodes, each = found.pop("num_nodes", None), found.get("gpus_per_node")
    if nodes and each:
        found["world_size"] = nodes * each
    virtual = found.get("virtual_pipeline_model_parallel_size")
    if virtual is not None:
        found["virtual_pipeline_model_parallel_size"] = whole_number(source, "virtual_pipeline_model_parallel_size", virtual)
    if found.get("use_megatron_fsdp"):
        found.setdefault("ckpt_format", "fsdp_dtensor")
    for field, meaning in RECIPES_HAVE.items():
        if field not in found and "optimizer" not in found:
            found[field] = True
            assumed.append(f"{key_of(field)} is not stated: on, as in the recipes ({meaning})")
    return found, assumed


RECIPES_HAVE = {"use_distributed_optimizer": "zero_stage 1", "overlap_grad_reduce": "reduction overlaps with compute"}
"""Switches that every recipe has on. A file that states its optimizer states them too."""


# Launch scripts

CONFIG_FILE = re.compile(r"(?<![\w.-])--config-file\b")
OVERRIDE = re.compile(r"\+{0,2}([A-Za-z_]\w*(?:\.\w+)+)=(.*)", re.DOTALL)
"""A word that overrides a key of the file: model.tensor_model_parallel_size=4."""


def is_launch(source: Source) -> bool:
    """Whether a script hands a configuration to a program, and no flags of Megatron itself."""
    return is_script(source) and bool(CONFIG_FILE.search(source.text)) and not any(flag in source.text for flag in TELLING_FLAGS)


def read_launch(source: Source, num_gpus: int | None = None) -> Config:
    """A script, the YAML file beside it that it names, and what its words override. Raises InputError."""
    script = read_script(source)
    place = next((place for place, word in enumerate(script.words) if word.endswith(".py") or CONFIG_FILE.match(word)), len(script.words))
    launcher, words = script.words[:place], script.words[place:]
    flags = flags_of(words)
    named = flags.pop("config_file", "")
    path = beside(source, script, named)
    if path is None:
        raise source.fail(f"--config-file {shown(named)} is not there; put the file beside the script")
    inner = open_source(path)
    overrides = {match[1]: overriding(match[2]) for word in words if (match := OVERRIDE.fullmatch(word))}
    if not is_bridge(inner):
        raise source.fail(f"--config-file {shown(path.name)} is no Megatron-Bridge configuration: it states no parallel size of the model")
    connections = "CUDA_DEVICE_MAX_CONNECTIONS"
    known_words = launcher_sizes(launcher) | {connections: script.environment.get(connections, "")}
    found = _read(inner, keys_of(inner) | overrides, num_gpus, known_words)
    read = (f"{path}: the configuration that the script names", *found.read)
    others = [f"--{name}" for name in flags]
    ignored = (*found.ignored, *((listed(others),) if others else ()))
    return dataclasses.replace(found, path=source.path, kind=SCRIPT_KIND, read=read, ignored=ignored)


def overriding(text: str) -> Any:
    """The value behind key= on a command line.

    >>> overriding("4"), overriding("true"), overriding("[mlp,moe]"), overriding("null"), overriding("'Et*2|t*2L'")
    (4, True, ['mlp', 'moe'], None, 'Et*2|t*2L')
    """
    words = {"true": True, "false": False, "null": None}
    if text.lower() in words:
        return words[text.lower()]
    if text.startswith("[") and text.endswith("]"):
        return [overriding(item.strip()) for item in text[1:-1].split(",") if item.strip()]
    return int(text) if re.fullmatch(r"-?[0-9]{1,18}", text) else text.strip("'\"")


READERS = (Reader(SCRIPT_KIND, is_launch, read_launch), Reader(KIND, is_bridge, read_bridge))
