"""What surrounds the steps of a run, in sentences that state every assumption, and as plain data for JSON."""

from __future__ import annotations

import dataclasses
import math
from typing import Any

from planner.catalogue import load
from planner.catalogue.schema import Operations
from planner.operations import Run, Upkeep, run_of, run_under, upkeep_of
from planner.report.plain import plain
from planner.report.words import duration, money_cell
from planner.scenario import Job, Scenario
from planner.units import three


def operations_lines(scenario: Scenario, job: Job, step_seconds: float) -> list[str]:
    """Failures, checkpoints, goodput, and where the tokens are known days, money and energy, of one layout's job."""
    own, upkeep = scenario.operations, upkeep_of(scenario.operations, job)
    changed = own.name in load.names(Operations) and own != load.find(Operations, own.name)
    asked = ", but for what was asked" if changed else ""
    lines = [failure_line(own, job, upkeep), checkpoint_line(own, upkeep, step_seconds), goodput_line(upkeep)]
    if scenario.training_tokens:
        lines += [run_line(scenario, run_of(scenario, step_seconds, upkeep.goodput)), elsewhere_line(scenario, job, step_seconds)]
    return [f"operations as in '{own.name}'{asked}:", *(f"- {line}" for line in lines)]


def failure_line(operations: Operations, job: Job, upkeep: Upkeep) -> str:
    """How often the job is interrupted, and the spares that this asks for."""
    rate = operations.interruptions_per_1000_gpu_days
    if math.isinf(upkeep.mtbf_seconds):
        return "failures: none assumed"
    nodes = f"{upkeep.spare_nodes} spare node{'s' if upkeep.spare_nodes != 1 else ''} (not in the cost)"
    return (
        f"failures: {three(rate)} per 1,000 GPU-days, so one every {duration(upkeep.mtbf_seconds)} on {job.num_gpus:,} GPUs; "
        f"back after {duration(upkeep.restart_seconds)}; {nodes} for {operations.spare_probability:.0%} "
        f"({operations.node_share:.0%} take a node out, for {duration(operations.repair_seconds)})"
    )


def checkpoint_line(operations: Operations, upkeep: Upkeep, step_seconds: float) -> str:
    """Size and time of a checkpoint, and the interval."""
    waits = f"{upkeep.write_seconds:.1f} s at {operations.storage_bytes_per_s / 1e9:.3g} GB/s per node"
    words = f"written behind the training in {waits}" if operations.asynchronous else f"{waits}"
    every = "never needed" if math.isinf(upkeep.interval_seconds) else f"every {duration(upkeep.interval_seconds)}"
    steps = "" if math.isinf(upkeep.interval_seconds) else f" = {max(round(upkeep.interval_seconds / step_seconds), 1):,} steps"
    best = "none needed" if math.isinf(upkeep.best_seconds) else f"best {duration(upkeep.best_seconds)}"
    source = f"as asked; {best}" if operations.checkpoint_interval_seconds else "the best by Daly"
    young = f"Young {duration(upkeep.young_seconds)}" if not math.isinf(upkeep.young_seconds) else ""
    return (
        f"checkpoint: {upkeep.checkpoint_bytes / 1e12:.3g} TB, {words}; training waits {upkeep.stall_seconds:.1f} s, "
        f"{operations.checkpoint_fixed_seconds:g} of them whatever the size, {every}{steps} ({'; '.join(filter(None, (source, young)))})"
    )


def goodput_line(upkeep: Upkeep) -> str:
    """Where the time goes."""
    shares = upkeep.shares
    return (
        f"goodput {shares.training:.1%}; the rest: evaluation {shares.evaluation:.1%}, checkpoints {shares.checkpoint:.1%}, "
        f"work lost {shares.lost:.1%}, restarts {shares.restart:.1%}"
    )


def run_line(scenario: Scenario, run: Run) -> str:
    """Days, money and energy of the whole run."""
    gpu, site = scenario.job.gpu, scenario.operations.power_usage_effectiveness
    days = f"{float(run.training_days):.3g} days of steps, {float(run.total_days):.3g} days in all"
    money = f"{three(float(run.gpu_hours))} GPU-hours, ${money_cell(float(run.cost_usd))} at ${scenario.price_usd_per_hour:.2f}"
    energy = f"{three(float(run.energy_kwh) / 1000)} MWh ({gpu.power_watts:g} W boards, PUE {site:g}; hosts and switches not counted)"
    return f"run: {days}; {money}; {energy}"


def elsewhere_line(scenario: Scenario, job: Job, step_seconds: float) -> str:
    """The same run under what the other published runs reported of failures and checkpoints."""
    words = []
    for other in load.records(Operations):
        if other.name != scenario.operations.name:
            moved = dataclasses.replace(scenario, operations=other)
            run = run_under(moved, job, step_seconds)
            words.append(f"'{other.name}' {float(run.total_days):.3g} days, ${money_cell(float(run.cost_usd))}")
    return f"as others reported: {'; '.join(words)}"


def operations_json(scenario: Scenario, job: Job, step_seconds: float) -> dict[str, Any]:
    """The same as plain data; infinite times are null."""
    upkeep = upkeep_of(scenario.operations, job)
    assumed = {key: value for key, value in dataclasses.asdict(scenario.operations).items() if key != "aliases"}
    content: dict[str, Any] = {"assumed": plain(assumed), **plain(dataclasses.asdict(upkeep))}
    if scenario.training_tokens:
        content["run"] = plain(dataclasses.asdict(run_of(scenario, step_seconds, upkeep.goodput)))
    return content
