"""What may be typed: the options that make a scenario, and the kinds of their values."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import click

from planner.errors import InputError
from planner.request import Request, import_notes, make_scenario, parse_count, read_request, scenario_path
from planner.scenario import FRAMEWORK_CHOICES, Scenario

CONTEXT: dict[str, Any] = {"help_option_names": ["-h", "--help"], "max_content_width": 100}
"""Settings of every command."""


class Count(click.ParamType[Any]):
    """A count such as 2048, 2,048, 4M or 1.4T."""

    name = "count"

    def __init__(self, *, whole: bool = True) -> None:
        self.whole = whole

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> int | float:
        """The number. Raises InputError."""
        if isinstance(value, (int, float)):
            return value
        option = param.opts[0] if param else "value"
        number = parse_count(value, option)
        if self.whole and not number.is_integer():
            raise InputError(f"{option} = {value} must be a whole number")
        return int(number) if self.whole else number


class Days(click.ParamType[Any]):
    """A span of time such as 30d, 36h or 30 (days)."""

    name = "days"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> float:
        """Days. Raises InputError."""
        if isinstance(value, (int, float)):
            return float(value)
        option = param.opts[0] if param else "value"
        number, unit = (value[:-1], value[-1]) if value[-1:] in ("d", "h") else (value, "d")
        try:
            return parse_count(number, option) / (24.0 if unit == "h" else 1.0)
        except InputError:
            raise InputError(f"{option} = '{value}' must be a span of time such as 30d, 36h or 30 (days)") from None


class OutputPath(click.ParamType[Any]):
    """Where to write a result: a file's name."""

    name = "file"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Path:
        """The path. Raises InputError for a folder's name."""
        if not str(value) or str(value).endswith("/"):
            raise InputError(f"{value or (param.opts[0] if param else 'path')}: names a folder; give a file name")
        return Path(value)


class Values(click.ParamType[Any]):
    """Comma-separated whole numbers or words: the only values of an axis to search."""

    name = "values"

    def __init__(self, *, words: bool = False) -> None:
        self.words = words

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> tuple[Any, ...]:
        """The values. Raises InputError."""
        if isinstance(value, tuple):
            return value
        option = param.opts[0] if param else "value"
        pieces = [piece.strip() for piece in value.split(",")]
        if self.words:
            return tuple(pieces)
        if not all(re.fullmatch(r"-?[0-9]+", piece, re.ASCII) for piece in pieces):
            raise InputError(f"{option} = {value} must be whole numbers separated by commas, such as 2,4,8")
        return tuple(int(piece[:20]) for piece in pieces)


REQUEST_OPTIONS: tuple[Callable[..., Any], ...] = (
    click.option("--scenario", "scenario_word", metavar="NAME|FILE", help="A file of scenarios/ or a path; flags override it."),
    click.option("--from", "config", metavar="FILE", help="Model, cluster and workload of a training configuration; flags override."),
    click.option("--model", help="Catalogue name or alias (70b), a config.json, a training configuration, or a model .toml."),
    click.option("--model-shape", metavar="KEY=V,..", help="Any other shape: layers=..,hidden=..,heads=..,ffn=..,vocab=.."),
    click.option("--gpus", "num_gpus", type=Count(), help="Number of GPUs."),
    click.option("--gpu", help="Accelerator  [default: h100-sxm-80gb]"),
    click.option("--cluster", help="Cluster wiring  [default: the GPU's usual one]"),
    click.option("--gpus-per-node", type=Count(), help="GPUs of one fast domain."),
    click.option("--nic", "nic_gbit_per_s", type=Count(whole=False), help="Network per GPU, Gb/s."),
    click.option("--gpu-memory", "gpu_memory_gib", type=Count(whole=False), help="Usable memory per GPU, GiB."),
    click.option("--price", "price_usd_per_hour", type=Count(whole=False), help="Dollars per GPU-hour."),
    click.option("--seq-len", type=Count(), help="Tokens per sequence  [default: 4096]"),
    click.option("--global-batch", "global_batch_size", type=Count(), help="Sequences per step  [default: 4M tokens]"),
    click.option("--batch-tokens", "global_batch_tokens", type=Count(), help="The same in tokens."),
    click.option("--precision", help="bf16, fp16, fp8, mxfp8 or nvfp4  [default: bf16]"),
    click.option("--optimizer", help="adam, adam-8bit, muon or sgd-momentum  [default: adam]"),
    click.option("--tokens", "training_tokens", type=Count(whole=False), help="Tokens of the whole run (1.4T): adds days and cost."),
    click.option("--operations", help="Failures and checkpoints as reported by today, llama-3, opt-175b, rsc-1  [default: today]"),
    click.option("--failures", "interruptions_per_1000_gpu_days", type=Count(whole=False), help="Interruptions per 1,000 GPU-days."),
    click.option("--restart", "restart_minutes", type=Count(whole=False), help="Minutes from a failure to the next step."),
    click.option("--storage", "storage_gb_per_s", type=Count(whole=False), help="GB/s that a node writes to shared storage."),
    click.option("--async-checkpoints/--sync-checkpoints", "asynchronous_checkpoints", default=None, help="[default: training waits]"),
    click.option("--checkpoint-every", "checkpoint_minutes", type=Count(whole=False), help="Minutes  [default: the best interval]"),
    click.option("--evaluation", "evaluation_share", type=Count(whole=False), help="Seconds of evaluation per second of training."),
    click.option("--max-days", "--deadline", "max_days", type=Days(), help="Longest run, failures included: 30d, 36h (needs --tokens)."),
    click.option("--max-cost", "--budget", "max_cost_usd", type=Count(whole=False), help="Dearest run in dollars (needs --tokens)."),
    click.option("--max-step", "--step-under", "max_step_seconds", type=Count(whole=False), help="Longest step in seconds."),
    click.option(
        "--min-tokens-per-second", "--tokens-per-second", "min_tokens_per_second", type=Count(whole=False), help="Of the whole cluster."
    ),
    click.option("--sequence-parallel/--no-sequence-parallel", default=None, help="With tensor parallelism  [default: on]"),
    click.option("--mtp/--no-mtp", "multi_token_prediction", default=None, help="Train the model's multi-token prediction."),
    click.option("--framework", help=f"{', '.join(FRAMEWORK_CHOICES)}  [default: any]"),
    click.option("--software", help="Cost every layout under this training stack."),
    click.option("--profile", help="Constants that `planner calibrate` fitted to your own runs."),
    click.option("--tp", "tensor_parallel", type=Values(), help="Pin tensor-parallel sizes."),
    click.option("--pp", "pipeline_parallel", type=Values(), help="Pin pipeline stages."),
    click.option("--vp", "virtual_pipeline", type=Values(), help="Pin chunks per stage."),
    click.option("--cp", "context_parallel", type=Values(), help="Pin context-parallel sizes."),
    click.option("--ep", "expert_parallel", type=Values(), help="Pin expert-parallel sizes."),
    click.option("--etp", "expert_tensor_parallel", type=Values(), help="Pin tensor splits inside experts."),
    click.option("--dp", "data_parallel", type=Values(), help="Pin data-parallel sizes."),
    click.option("--zero", "zero_stage", type=Values(), help="Pin ZeRO stages."),
    click.option("--mb", "micro_batch_size", type=Values(), help="Pin micro-batch sizes."),
    click.option("--recompute", type=Values(words=True), help="Pin none, selective, full."),
    click.option("--recompute-layers", type=Values(), help="Pin layers of a chunk that full recompute covers."),
    click.option("--schedule", type=Values(words=True), help="Pin schedules (1f1b, interleaved_1f1b, gpipe, ...)."),
    click.option("--tensor-across-nodes", is_flag=True, default=None, help="Allow tensor groups to leave a node."),
    click.option("--uneven/--even", "uneven_stages", default=None, help="Seek the best uneven split of layers  [default: uneven]"),
    click.option("--max-pp", "max_pipeline_parallel", type=Count(), help="Deepest pipeline  [default: 64]"),
)


def request_options(command: Callable[..., Any]) -> Callable[..., Any]:
    """All options that make a scenario."""
    for option in reversed(REQUEST_OPTIONS):
        command = option(command)
    return command


def open_options(command: Callable[..., Any]) -> Callable[..., Any]:
    """The options that say what a configuration leaves open: all that make a scenario but --from, for the file is named already."""
    command = request_options(command)
    options = command.__click_params__  # type: ignore[attr-defined]
    options[:] = [option for option in options if option.name != "config"]
    return command


def request_of(scenario_word: str | None, wishes: dict[str, Any]) -> tuple[Request, str]:
    """What was asked for in a file, flags, or both, and the name of the question."""
    if scenario_word is None:
        return Request(**wishes), "flags"
    path = scenario_path(scenario_word)
    return Request(**wishes).over(read_request(path)), path.stem


def scenario_of(scenario_word: str | None, wishes: dict[str, Any]) -> Scenario:
    """The scenario of a file, flags, or both; what an imported config left open is told on standard error."""
    request, name = request_of(scenario_word, wishes)
    scenario = make_scenario(request, name=name)
    for line in import_notes(request):
        click.echo(line, err=True)
    return scenario
