"""Rules about DeepSpeed's three batch keys: train_batch_size = micro-batch x accumulation x data-parallel ranks, exactly."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from planner.frameworks.config import ILLEGAL, TRAP, Config, SettingRule
from planner.frameworks.deepspeed_json import AUTO, BATCH_KEYS, Batch, model_ranks, stated
from planner.frameworks.deepspeed_read import INSIDE, JSON_KIND, MEGATRON_KIND, TRAINER_KIND
from planner.frameworks.files import shown
from planner.frameworks.trainer import ACCUMULATION, MICRO
from planner.scenario import Job
from solver.problem import divisors

SOURCE = "runtime/config.py, _batch_assertion"


def own_settings(config: Config) -> Mapping[str, Any]:
    """DeepSpeed's own keys among the settings: those of the JSON that a script names, else all."""
    inside = {key.removeprefix(INSIDE): value for key, value in config.settings.items() if key.startswith(INSIDE)}
    return inside or config.settings


def batch_stated(config: Config) -> Batch:
    """The batch keys as stated."""
    values = {name: own_settings(config).get(key) for name, key in BATCH_KEYS.items()}
    return Batch(**{name: int(value) if isinstance(value, int) and not isinstance(value, bool) else None for name, value in values.items()})


def replicas_of(config: Config, job: Job) -> int:
    """Data-parallel ranks; 0 where the groups do not divide the GPUs."""
    ranks = model_ranks(config.layout)
    return job.num_gpus // ranks if ranks and job.num_gpus % ranks == 0 else 0


def around(value: int, step: int) -> str:
    """The multiples of a step next to a value.

    >>> around(256, 14), around(5, 14)
    ('252, 266', '14')
    """
    low = value // step * step
    return ", ".join(str(one) for one in (low, low + step) if one > 0)


def fitting_gpus(train: int, each: int, replicas: int, ranks: int) -> str:
    """The nearest number of GPUs among which a batch of so many per replica divides, as the end of a sentence."""
    if train % each:
        return ""
    best = min(divisors(train // each), key=lambda size: (abs(size - replicas), size))
    return f", or {best * ranks} GPUs"


def identity(config: Config, job: Job) -> str:
    """The three keys agree with the data-parallel ranks."""
    batch, replicas = batch_stated(config), replicas_of(config, job)
    if not replicas or (batch.train is None and batch.micro is None):
        return ""
    filled = batch.filled(replicas)
    train, micro, accumulation = filled.train or 0, filled.micro or 0, filled.accumulation or 0
    if train == micro * accumulation * replicas and train > 0:
        return ""
    ranks = model_ranks(config.layout)
    where = f"{replicas} data-parallel ranks ({job.num_gpus} GPUs / {ranks})" if ranks > 1 else f"{replicas} GPUs"
    if None not in (batch.train, batch.micro, batch.accumulation):
        each = micro * accumulation
        legal = f"legal: train_batch_size = {each * replicas}"
        legal += f", or {train // each * ranks} GPUs" if train % each == 0 else ""
        return f"train_batch_size = {train} is not micro-batch {micro} x accumulation {accumulation} x {where} = {each * replicas}; {legal}"
    each = batch.micro or batch.accumulation or 1
    name = "micro-batch" if batch.micro else "accumulation" if batch.accumulation else ""
    of = f"{name} {each} x {where}" if name else where
    nearest = around(batch.train or 0, each * replicas)
    return f"train_batch_size = {batch.train} does not divide by {of}; nearest: {nearest}{fitting_gpus(train, each, replicas, ranks)}"


def flags_agree(config: Config, job: Job) -> str:
    """A script's batch flags say what its JSON says."""
    batch = batch_stated(config)
    for name, flag, written in FLAGS.get(config.kind, ()):
        value, text = getattr(batch, name), str(config.settings.get(flag, ""))
        if value is not None and text.isdigit() and int(text[:12]) != value:
            return f"{written} {text[:12]} but {BATCH_KEYS[name]} = {value} in the JSON: they must be equal"
    return ""


FLAGS: Mapping[str, tuple[tuple[str, str, str], ...]] = {
    MEGATRON_KIND: (("micro", "micro_batch_size", "--micro-batch-size"), ("train", "global_batch_size", "--global-batch-size")),
    TRAINER_KIND: tuple((name, f"--{flag}", f"--{flag}") for name, flag in (("micro", MICRO), ("accumulation", ACCUMULATION))),
}
"""Kind of script -> its batch flags: which key of the JSON each repeats, the setting, and how it is written."""


def open_batch(config: Config) -> list[str]:
    """Batch keys that are left to the caller although nothing else gives them."""
    values = own_settings(config)
    return [key for key in BATCH_KEYS.values() if values.get(key) == AUTO]


def auto_alone(config: Config, job: Job) -> str:
    """ "auto" needs somebody who replaces it."""
    keys = open_batch(config)
    if config.kind != JSON_KIND or not keys or "micro_batch_size" in config.layout:
        return ""
    given = [key for name, key in BATCH_KEYS.items() if stated(own_settings(config).get(BATCH_KEYS[name]))]
    rest = f"; stated: {', '.join(given)}" if given else ""
    return f'{", ".join(keys)} = "auto": only Hugging Face\'s Trainer and accelerate fill it in, DeepSpeed itself stops at it{rest}'


def auto_in_megatron(config: Config, job: Job) -> str:
    """Megatron-DeepSpeed does not replace "auto"."""
    keys = open_batch(config)
    return f'{keys[0]} = "auto": Megatron-DeepSpeed does not fill it in; state a number' if config.kind == MEGATRON_KIND and keys else ""


def text_batch(config: Config, job: Job) -> str:
    """DeepSpeed reckons with the batch keys as they stand: a text of digits is no number to it."""
    for key in BATCH_KEYS.values():
        value = own_settings(config).get(key)
        if isinstance(value, str) and value != AUTO:
            return f"{key} = {shown(value)} is a text: write the number without quotes"
    return ""


BATCH_RULES: tuple[SettingRule, ...] = (
    SettingRule("D20", "train_batch_size = micro-batch x accumulation x data-parallel ranks", SOURCE, ILLEGAL, identity),
    SettingRule(
        "D21", "batch flags agree with the DeepSpeed configuration", "transformers, integrations/deepspeed.py", ILLEGAL, flags_agree
    ),
    SettingRule("D36", 'somebody replaces "auto"', "runtime/config.py, _set_batch_related_parameters", TRAP, auto_alone),
    SettingRule("D37", '"auto" stands nowhere in a Megatron run', "runtime/config.py", ILLEGAL, auto_in_megatron),
    SettingRule("D38", "batch keys are numbers", "runtime/config.py, _set_batch_related_parameters", ILLEGAL, text_batch),
)
