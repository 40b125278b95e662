"""The flags of Hugging Face's Trainer in a launch script: read into the planner's words, and written for a layout."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from planner.catalogue import load
from planner.catalogue.schema import Model
from planner.errors import InputError
from planner.frameworks.config import Config
from planner.frameworks.deepspeed_json import Batch, Parts, model_ranks, settle_batch
from planner.frameworks.files import Source, listed, shown, truth, whole_number
from planner.frameworks.shell import Script
from planner.frameworks.writing import Target
from planner.request import Request
from solver.layout import num_micro_batches

MICRO = "per_device_train_batch_size"
ACCUMULATION = "gradient_accumulation_steps"
RECOMPUTE = "gradient_checkpointing"
RECOMPUTE_FLAGS = (RECOMPUTE, "activation_checkpointing")
"""The usual name, and the one that transformers gave it in version 5."""
MODEL_FLAGS = ("model_name_or_path", "config_name")
LENGTH_FLAGS = ("max_seq_length", "max_length", "model_max_length", "block_size", "cutoff_len", "seq_length")
OPTIMIZERS = {
    "adamw_torch": "adam",
    "adamw_torch_fused": "adam",
    "adamw_hf": "adam",
    "adamw_apex_fused": "adam",
    "adamw_bnb_8bit": "adam-8bit",
    "adamw_8bit": "adam-8bit",
    "paged_adamw_8bit": "adam-8bit",
    "sgd": "sgd-momentum",
    "lion_32bit": "sgd-momentum",
}
"""Names of --optim -> the planner's optimizer with as many moments. Source: transformers, training_args.py, OptimizerNames."""

SCRIPT_ENDINGS = ("", ".sh", ".bash", ".slurm", ".sbatch", ".sub", ".job", ".txt")

OWN = (MICRO, ACCUMULATION, *RECOMPUTE_FLAGS, *MODEL_FLAGS, *LENGTH_FLAGS, "bf16", "fp16", "optim", "deepspeed", "config_file")


def flags_of(words: Sequence[str]) -> dict[str, str]:
    """Flag -> value, hyphens as underscores; a flag without a value is "true".

    >>> flags_of(["train.py", "--bf16", "--optim=sgd", "--per-device-train-batch-size", "2"])
    {'bf16': 'true', 'optim': 'sgd', 'per_device_train_batch_size': '2'}
    """
    found: dict[str, str] = {}
    for place, word in enumerate(words):
        if not word.startswith("--"):
            continue
        name, equals, value = word[2:].partition("=")
        following = words[place + 1] if place + 1 < len(words) else "--"
        found[name.replace("-", "_")] = value if equals else "true" if following.startswith("--") else following
    return found


def known(flags: Mapping[str, str], name: str) -> str | None:
    """The value of a flag; None where the script leaves it to the shell, or out."""
    value = flags.get(name)
    return None if value is None or "$" in value else value


def read_flags(parts: Parts, flags: Mapping[str, str], num_gpus: int | None) -> None:
    """What the Trainer's flags say, put into the parts. Raises InputError."""
    read_words(parts, flags)
    numbers = {name: known(flags, name) for name in (MICRO, ACCUMULATION)}
    sizes = {name: whole_number(parts.source, f"--{name}", text, most=1 << 30) for name, text in numbers.items() if text is not None}
    for name, size in sizes.items():
        parts.note(f"--{name}", size, "batch")
    if MICRO in sizes:
        batch = Batch(parts.request.get("global_batch_size"), sizes[MICRO], sizes.get(ACCUMULATION))
        settle_batch(parts, batch, model_ranks(parts.layout), num_gpus)
    parts.settings |= {f"--{name}": value for name, value in flags.items() if name in OWN}
    others = [f"--{name}" for name in flags if name not in OWN]
    if others:
        parts.ignored.append(listed(others))


def behind_program(words: Sequence[str]) -> tuple[Sequence[str], Sequence[str]]:
    """The launcher's words, and those behind the program."""
    place = next((place for place, word in enumerate(words) if word.endswith(".py")), len(words))
    return words[:place], words[place:]


def read_launcher(parts: Parts, words: Sequence[str]) -> None:
    """GPUs, and GPUs per node, as the words of torchrun or of DeepSpeed's launcher state them."""
    flags = flags_of(words)
    stated = [known(flags, "nproc_per_node") or known(flags, "num_gpus"), known(flags, "nnodes") or known(flags, "num_nodes")]
    each, nodes = (int(text) if text is not None and text.isdigit() and len(text) < 8 else 0 for text in stated)
    if each:
        parts.request["gpus_per_node"] = each
    if each and nodes:
        parts.request["num_gpus"] = each * nodes
        parts.read.append(f"{nodes} nodes of {each} GPUs in the launcher's words: num_gpus")


def read_words(parts: Parts, flags: Mapping[str, str]) -> None:
    """Model, sequence, precision, recompute and optimizer. Raises InputError."""
    source = parts.source
    for name in MODEL_FLAGS:
        if (value := known(flags, name)) is not None and "model" not in parts.request:
            read_model(parts, f"--{name}", value)
    for name in LENGTH_FLAGS:
        if (value := known(flags, name)) is not None and "seq_len" not in parts.request:
            parts.request["seq_len"] = whole_number(source, f"--{name}", value, most=1 << 26)
            parts.note(f"--{name}", value, "seq_len")
    for name in ("bf16", "fp16"):
        if (value := known(flags, name)) is not None and truth(source, f"--{name}", value):
            parts.request["precision"] = name
            parts.note(f"--{name}", value, "precision")
    for name in RECOMPUTE_FLAGS:
        if (value := known(flags, name)) is not None:
            parts.layout["recompute"] = "full" if truth(source, f"--{name}", value) else "none"
            parts.note(f"--{name}", value, "recompute")
    if (value := known(flags, "optim")) is not None:
        parts.request["optimizer"] = OPTIMIZERS.get(value, "adam")
        parts.note("--optim", value, f"optimizer = {parts.request['optimizer']}")


def read_model(parts: Parts, key: str, value: str) -> None:
    """The catalogue's model of a hub name such as owner/Model-8B-Instruct, where there is one."""
    name = catalogue_name(value)
    if name is None:
        parts.assumed.append(f"{key} = {shown(value)} is no model of the catalogue: give --model")
        return
    parts.request["model"] = name
    parts.note(key, value, f"model {name}")


def catalogue_name(value: str) -> str | None:
    """The catalogue's name for a hub name; None where it has none.

    >>> catalogue_name("somebody/Llama-3.1-70B-Instruct"), catalogue_name("./checkpoint")
    ('llama-3.1-70b', None)
    """
    last = value.rstrip("/").rsplit("/", 1)[-1].lower()
    for word in (last, re.sub(r"-(instruct|chat|base|hf|it|v0\.[0-9])+$", "", last)):
        try:
            return load.find(Model, word).name
        except InputError:
            continue
    return None


def in_quotes(text: str) -> str:
    """A text as bash takes it as a default inside double quotes.

    >>> in_quotes("llama-3.1-8b"), in_quotes("a $b}")
    ('llama-3.1-8b', 'a \\\\$b\\\\}')
    """
    return re.sub(r'([\\"$`}])', r"\\\1", text)


def write_flags(target: Target) -> tuple[str, ...]:
    """The flags that say what a layout's configuration files do not.

    MODEL is for the one who launches to set, to a hub id or a folder: the catalogue's name is neither.
    """
    job, layout = target.job, target.layout
    optimizers = [name for name, own in OPTIMIZERS.items() if own == job.optimizer]
    return (
        f'--model_name_or_path "${{MODEL:-{in_quotes(job.model.name)}}}"',
        f"--max_seq_length {job.seq_len}",
        f"--{MICRO} {layout.micro_batch_size}",
        f"--{ACCUMULATION} {num_micro_batches(layout, job.global_batch_size)}",
        f"--{job.precision} true",
        f"--{RECOMPUTE} {'true' if layout.recompute == 'full' else 'false'}",
        *(f"--optim {name}" for name in optimizers[:1]),
    )


def is_script(source: Source) -> bool:
    """Whether a file can be a launch script by its ending."""
    return source.data is None and source.ending in SCRIPT_ENDINGS


def beside(source: Source, script: Script, value: str) -> Path | None:
    """The file that a script names, beside the script where the name is relative; None where there is none."""
    if "$" in value:
        value = value.rsplit("/", 1)[-1]
    path = Path(value) if Path(value).is_absolute() else source.path.parent / value
    try:
        return path if "$" not in value and path.is_file() else None
    except (OSError, ValueError):
        return None


def config_of_parts(parts: Parts, kind: str, framework: str, **others: Any) -> Config:
    """The configuration that the parts make up; both frameworks run their stages, if any, one after another."""
    return Config(
        path=parts.source.path,
        kind=kind,
        framework=framework,
        request=Request(framework=framework, **parts.request),
        layout={"virtual_pipeline": 1, "schedule": "1f1b", "expert_tensor_parallel": 1, **parts.layout},
        software=parts.software,
        settings=parts.settings,
        read=tuple(parts.read),
        assumed=tuple(parts.assumed),
        ignored=tuple(parts.ignored),
        **others,
    )
