"""Training logs as measured runs: each with the configuration that made it, ready to be predicted and fitted to."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from planner.cost import flops
from planner.errors import InputError
from planner.frameworks.config import Config
from planner.frameworks.files import open_source
from planner.frameworks.logs import Measured, read_log
from planner.frameworks.reading import read_config, readers
from planner.measured import Run
from planner.request import Request
from planner.scenario import Job
from planner.units import GIB, three
from planner.verdict import planned
from solver.layout import Layout

FAR_FLOPS = 1.5
"""Factor between the log's own operations per second and ours beyond which the shape or the GPUs are doubted: frameworks
count attention and recompute in their own ways."""
FAR_MEMORY = 1.1
"""A peak above this share of the card's memory is another card's."""

NAME_ONE = "name the run's configuration: --config FILE"


@dataclass(frozen=True)
class Logged:
    """A log, and what it says of which run."""

    config: Config
    measured: Measured
    run: Run


def logged_runs(logs: Sequence[Path], configs: Sequence[Path], request: Request) -> list[Logged]:
    """The runs of some logs, under no configuration file (each log prints its arguments), one for all, or one each. Raises InputError."""
    if request.config is not None and not configs:
        configs = [Path(request.config)]
    if len(configs) not in (0, 1, len(logs)):
        raise InputError(f"{len(configs)} configurations for {len(logs)} logs: name one for all, or one per log in their order")
    named = [None] * len(logs) if not configs else list(configs) * (len(logs) if len(configs) == 1 else 1)
    found = []
    for log, path in zip(logs, named, strict=True):
        measured = read_log(log)
        config = config_of(log, path, request.num_gpus)
        printed = Request(global_batch_size=measured.global_batch_size or None, seq_len=measured.seq_len or None)
        plan = planned(dataclasses.replace(config, request=config.request.over(printed)), request)
        found.append(Logged(config, measured, measured_run(plan.job, plan.layout, measured, str(log))))
    return found


def config_of(log: Path, config: Path | None, num_gpus: int | None = None) -> Config:
    """The configuration of a log's run: the file that is named, or the arguments that the log itself prints. Raises InputError."""
    if config is not None:
        return read_config(config, num_gpus)
    try:
        source = open_source(log)
    except InputError as error:
        raise InputError(f"{error}; {NAME_ONE}") from None
    if not any(reader.recognises(source) for reader in readers()):
        raise InputError(f"{log}: does not print the arguments of its run; {NAME_ONE}")
    return read_config(log, num_gpus)


def run_of_log(log: Path, job: Job, layout: Layout) -> Run:
    """The measured run of a log under its job and layout. Raises InputError."""
    return measured_run(job, layout, read_log(log), str(log))


def measured_run(job: Job, layout: Layout, measured: Measured, name: str) -> Run:
    """What a log measured of a job and layout. The batch size that the log prints wins. Raises InputError where they are not of one run."""
    if measured.seq_len and measured.seq_len != job.seq_len:
        raise InputError(
            f"{measured.path}: trains sequences of {measured.seq_len:,} tokens, the configuration {job.seq_len:,}: not its run"
        )
    mesh = layout.tensor_parallel * layout.pipeline_parallel * layout.context_parallel * layout.data_parallel
    if mesh != job.num_gpus:
        raise InputError(f"{measured.path}: {layout.label} is a layout of {mesh:,} GPUs, not of {job.num_gpus:,}: check --gpus")
    if measured.global_batch_size and measured.global_batch_size != job.global_batch_size:
        job = dataclasses.replace(job, global_batch_size=measured.global_batch_size)
    replicas = layout.data_parallel * layout.micro_batch_size
    if job.global_batch_size % replicas:
        raise InputError(
            f"{measured.path}: steps of {job.global_batch_size:,} sequences do not divide by data_parallel {layout.data_parallel} x "
            f"micro_batch_size {layout.micro_batch_size}: the configuration or --gpus is not its run's"
        )
    return Run(
        id=name,
        family="own",
        job=job,
        layout=layout,
        recompute_known=True,
        offloads=False,
        step_seconds=measured.step_seconds(job),
        peak_bytes=measured.peak_bytes,
        memory_kind=measured.memory_kind,
        out_of_memory=False,
    )


def told(measured: Measured, run: Run) -> str:
    """What was taken from a log, in one line."""
    taken = f"{measured.iterations:,} of {measured.logged:,} logged iterations"
    pace = f"median {three(run.step_seconds)} s a step, middle half within {measured.spread * 100:.1f} %"
    peak = f"peak {measured.peak_bytes / GIB:.2f} GiB {measured.memory_kind}" if measured.memory_kind else "no peak of memory"
    return f"{run.id}: {measured.framework}, {taken}: {pace}; {peak}; {run.layout.label}"


def doubts(measured: Measured, run: Run) -> list[str]:
    """Why the configuration may not be that of the run, one line each."""
    job, found = run.job, []
    ours = flops.model_flops_per_step(job) / (run.step_seconds * job.num_gpus)
    theirs = measured.flops_per_gpu
    if theirs and not 1 / FAR_FLOPS < ours / theirs < FAR_FLOPS:
        found.append(
            f"{run.id}: the log says {theirs / 1e12:.0f} TFLOP/s per GPU, this model on {job.num_gpus:,} GPUs makes it {ours / 1e12:.0f}: "
            "check the model, --seq-len and --gpus"
        )
    if run.peak_bytes > FAR_MEMORY * job.gpu.memory_bytes:
        found.append(
            f"{run.id}: the log's peak of {run.peak_bytes / GIB:.1f} GiB is more than {job.gpu.name} has "
            f"({job.gpu.memory_bytes / GIB:.1f} GiB): name the card with --gpu"
        )
    return found
