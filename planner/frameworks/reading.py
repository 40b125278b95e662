"""Which reader a file is for, and what it says: the one door to every configuration that people have."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from planner.errors import InputError
from planner.frameworks.config import Config, SettingRule
from planner.frameworks.files import LOG_ENDINGS, Source, open_source
from planner.frameworks.shell import read_script


@dataclass(frozen=True)
class Reader:
    """One kind of file."""

    kind: str
    """What people call it; KINDS lists them all in short, where a file is of none."""
    recognises: Callable[[Source], bool]
    """Whether a file is of this kind; cheap, and sure enough that its errors are worded for this kind."""
    read: Callable[[Source, int | None], Config]
    """(file, number of GPUs or None) -> what it says. Raises InputError."""


KINDS = (
    "launch scripts of Megatron-LM, Megatron-DeepSpeed, torchtitan and accelerate, Megatron arguments in YAML or a log, NeMo or "
    "Megatron-Bridge YAML, torchtitan TOML, ds_config.json, accelerate and GPT-NeoX YAML"
)


def readers() -> tuple[Reader, ...]:
    """All readers, the more particular kinds first."""
    from planner.frameworks import accelerate_read, bridge_read, deepspeed_read, megatron_read, neox_read, torchtitan_read

    modules = (accelerate_read, neox_read, deepspeed_read, torchtitan_read, bridge_read, megatron_read)
    return tuple(reader for module in modules for reader in module.READERS)


def setting_rules(config: Config) -> tuple[SettingRule, ...]:
    """The rules about settings of a configuration's framework."""
    from planner.frameworks import accelerate_settings, deepspeed_settings, megatron_settings, torchtitan_settings

    rules = {
        "megatron": megatron_settings.SETTING_RULES,
        "megatron-bridge": megatron_settings.SETTING_RULES,
        "torchtitan": torchtitan_settings.SETTING_RULES,
        "deepspeed": deepspeed_settings.SETTING_RULES,
        "accelerate": accelerate_settings.SETTING_RULES,
    }
    return tuple(rules[config.framework])


def script_notes(source: Source) -> tuple[str, ...]:
    """What was taken for granted in reading a launch script; nothing for other files."""
    if source.data is not None or source.ending in LOG_ENDINGS:
        return ()
    try:
        return read_script(source).notes
    except InputError:
        return ()


def read_config(path: Path, num_gpus: int | None = None) -> Config:
    """What a training configuration says. Raises InputError for a file that is broken or of no known kind."""
    source = open_source(path)
    for reader in readers():
        if reader.recognises(source):
            config = reader.read(source, num_gpus)
            return dataclasses.replace(config, assumed=(*config.assumed, *script_notes(source)))
    raise InputError(f"{path}: no configuration that is read here: {KINDS}")
