"""Reads Megatron-LM's arguments: from a launch script, a YAML of arguments, or the block that a training log prints."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Mapping
from typing import Any

from planner.frameworks.config import Config
from planner.frameworks.files import LOG_ENDINGS, Source
from planner.frameworks.megatron_config import config_of
from planner.frameworks.megatron_flags import OFF, SEVERAL, flag_of, flags, flags_of_fields, settings_of_words, typed, unresolved
from planner.frameworks.reading import Reader
from planner.frameworks.shell import read_script

SCRIPT, ARGUMENTS, LOG = (
    "Megatron-LM arguments of a shell script",
    "Megatron-LM arguments in YAML",
    "Megatron-LM arguments printed in a training log",
)
LOG_LINE = re.compile(r"^\s*(?:\[[^\]\n]{0,40}\]:?\s*|\d{1,6}:\s*)?([a-z][A-Za-z0-9_]{1,80}) \.{2,60} ?(.*)$", re.MULTILINE)
BLOCK_START, BLOCK_END = "------------------------ arguments ------------------------", "end of arguments"
SCRIPT_ENDINGS = ("", ".sh", ".bash", ".slurm", ".sbatch", ".sub", ".job", ".txt", ".args", *LOG_ENDINGS)
TELLING = ("--tensor-model-parallel-size", "--num-layers", "--micro-batch-size", "--pipeline-model-parallel-size")
"""Flags, one of which every launch of Megatron states."""
FIELDS = ("tensor_model_parallel_size", "pipeline_model_parallel_size", "num_attention_heads", "micro_batch_size")
"""Fields, two of which every YAML of arguments states."""
SECTIONS = ("language_model", "model_parallel")
"""Tables of a file for --yaml-cfg, whose fields the parser takes as if they stood at the top."""
RENAMED = {"num_moe_experts": "num_experts"}


def is_script(source: Source) -> bool:
    """Whether a file launches Megatron by flags."""
    return source.data is None and source.ending in SCRIPT_ENDINGS and any(flag in source.text for flag in TELLING)


def is_log(source: Source) -> bool:
    """Whether a file holds the block of arguments that Megatron prints."""
    return source.data is None and bool(re.search(r"^.{0,60}tensor_model_parallel_size \.{2,60} ?\d", source.text, re.MULTILINE))


def is_arguments(source: Source) -> bool:
    """Whether a YAML file states Megatron's arguments, with underscores or hyphens, at its top or in the tables of --yaml-cfg."""
    if source.data is None or source.ending not in (".yaml", ".yml"):
        return False
    return sum(field in _flat(source.data) for field in FIELDS) >= 2


def read_launch(source: Source, num_gpus: int | None = None) -> Config:
    """The arguments of a launch script. Raises InputError."""
    script = read_script(source)
    settings = settings_of_words(source, arguments_of(script.words)) | cluster_of(script.words)
    settings["CUDA_DEVICE_MAX_CONNECTIONS"] = script.environment.get("CUDA_DEVICE_MAX_CONNECTIONS", "")
    return config_of(source, SCRIPT, settings, num_gpus)


def arguments_of(words: tuple[str, ...]) -> tuple[str, ...]:
    """What stands behind the program in the words of a command.

    >>> arguments_of(("torchrun", "--nnodes", "2", "pretrain_gpt.py", "--num-layers", "4"))
    ('--num-layers', '4')
    """
    places = [place for place, word in enumerate(words) if word.endswith(".py")]
    return words[places[0] + 1 :] if places else words


def cluster_of(words: tuple[str, ...]) -> dict[str, int]:
    """GPUs, and GPUs per node, as torchrun's own words state them.

    >>> cluster_of(("torchrun", "--nproc-per-node=8", "--nnodes", "4", "pretrain_gpt.py", "--num-layers", "4"))
    {'gpus_per_node': 8, 'world_size': 32}
    """
    places = [place for place, word in enumerate(words) if word.endswith(".py")]
    return launcher_sizes(words[: places[0]] if places else ())


def launcher_sizes(launcher: tuple[str, ...]) -> dict[str, int]:
    """The sizes among the launcher's own words."""
    numbers: dict[str, int] = {}
    for word, behind in zip(launcher, (*launcher[1:], ""), strict=False):
        name, equals, inline = word.partition("=")
        value = inline if equals else behind
        if re.fullmatch(r"[0-9]{1,7}", value):
            numbers[name.lstrip("-").replace("_", "-")] = int(value)
    each, nodes = numbers.get("nproc-per-node"), numbers.get("nnodes")
    found = {"gpus_per_node": each} if each else {}
    return found | ({"world_size": each * nodes} if each and nodes else {})


def read_arguments(source: Source, num_gpus: int | None = None) -> Config:
    """The arguments of a YAML file. Raises InputError."""
    return config_of(source, ARGUMENTS, settings_of_fields(source, _flat(source.data or {})), num_gpus)


def _flat(data: Mapping[Any, Any]) -> dict[str, Any]:
    """The keys of a file by their fields' names, those of the tables of --yaml-cfg among them."""
    found: dict[str, Any] = {}
    for key, value in data.items():
        if not isinstance(key, str):
            continue
        if key in SECTIONS and isinstance(value, dict):
            found |= {RENAMED.get(str(inner), str(inner)): item for inner, item in value.items()}
        else:
            found[key.lstrip("-").replace("-", "_")] = value
    return found


def settings_of_fields(source: Source, values: Mapping[str, Any]) -> dict[str, Any]:
    """Fields with their values, each as its flag's kind; null counts as absent. Raises InputError."""
    found: dict[str, Any] = {}
    for key, value in values.items():
        if value is None or key.startswith("_"):
            continue
        name, stated = field_of(key, value)
        flag = flags_of_fields().get(name)
        if isinstance(stated, list) or flag is None:
            found[name] = stated
        elif flag.kind == SEVERAL:
            found[name] = stated if isinstance(stated, list) else str(stated).split()
        elif isinstance(stated, bool) and not flag.is_switch:
            found[name] = stated
        else:
            found[name] = typed(source, flag, stated)
    return found


def field_of(key: str, value: Any) -> tuple[str, Any]:
    """The field that a key means and its value: a key may also be a flag's name with underscores.

    >>> field_of("disable_bias_linear", True), field_of("fp8_format", "hybrid"), field_of("num_layers", 4)
    (('add_bias_linear', False), ('fp8', 'hybrid'), ('num_layers', 4))
    """
    flag = flags().get("--" + key.replace("_", "-"))
    if flag is None or key in flags_of_fields():
        return key, value
    return flag.field, (not value if flag.kind == OFF and isinstance(value, bool) else value)


def read_log(source: Source, num_gpus: int | None = None) -> Config:
    """The arguments that a training log prints, as Megatron resolved them. Raises InputError."""
    start = source.text.find(BLOCK_START)
    begin = max(start, 0)
    end = source.text.find(BLOCK_END, begin)
    block = source.text[begin : end if end > 0 else begin + (1 << 18)]
    printed = {name: _printed(text.strip()) for name, text in LOG_LINE.findall(block)}
    values = {name: value for name, value in printed.items() if value is not None and _counts(name, value)}
    found = config_of(source, LOG, settings_of_fields(source, values), num_gpus)
    return dataclasses.replace(found, ignored=tuple(line for line in found.ignored if "not modelled" in line))  # it prints every default


def _printed(text: str) -> Any:
    """A value as Python prints it."""
    words = {"None": None, "True": True, "False": False, "": None}
    if text in words:
        return words[text]
    if text.startswith("[") and text.endswith("]"):
        items = [item.strip().strip("'\"") for item in text[1:-1].split(",") if item.strip()]
        return [int(item) if re.fullmatch(r"-?[0-9]{1,9}", item) else item.rsplit(".", 1)[-1] for item in items] or None
    if re.fullmatch(r"-?[0-9]{1,12}", text):
        return int(text)
    return text.rsplit(".", 1)[-1] if re.match(r"^[A-Z]\w*\.\w+$", text) else text


def _counts(name: str, value: Any) -> bool:
    """Whether a printed value says anything: the block also prints every default."""
    flag = flags_of_fields().get(name)
    return not (flag and flag.kind not in ("on", "off") and value is False) and not unresolved(value)


READERS = (
    Reader(LOG, is_log, read_log),
    Reader(SCRIPT, is_script, read_launch),
    Reader(ARGUMENTS, is_arguments, read_arguments),
)

__all__ = ["READERS", "config_of", "flag_of", "settings_of_words"]
