"""Why a number of GPUs does not do: states, memory, time, batch, or rules."""

from __future__ import annotations

from dataclasses import dataclass

from planner import spec
from planner.cost.memory import AT_RISK
from planner.fewest import (
    Fewest,
    Late,
    divisible_batch,
    fits,
    floors,
    group_products,
    launchable,
    least_of,
    node_counts,
    on_gpus,
    states_kib,
    with_batch,
)
from planner.frameworks.legality import framework_of, jobs_by_framework
from planner.limits import KIB
from planner.refine import LISTED, shortlist_of
from planner.scenario import Job, Scenario
from planner.search import nearest_refused, searched
from planner.targets import TARGETS, attained, hopeless, least_step, longest_steps, stated, untargeted
from planner.units import GIB
from solver.layout import Layout


@dataclass(frozen=True)
class Failure:
    """Why a count of GPUs has no layout."""

    num_gpus: int
    reason: str
    """"states", "work", "time", "batch", "memory" or "rules"."""
    words: str


def why_fewer_fail(fewest: Fewest) -> Failure | None:
    """Why the last count that fails does so; None where there is none."""
    if not fewest.before:
        return None
    trial = on_gpus(fewest.scenario, fewest.before)
    count, usable = fewest.before, trial.job.gpu.memory_bytes / GIB
    if count < fewest.least:
        states = min(floors(trial).values(), key=least_of)
        share = states_kib(states) * KIB / count / GIB
        return Failure(
            count, "states", f"weights, gradients and optimizer states alone are {share:.1f} GiB per GPU, of {usable:.1f} usable"
        )
    if hopeless(trial):
        framework, job = fastest_kernels(trial)
        least = Late(Layout(), framework, least_step(job))
        return Failure(count, "work", f"the kernels alone, perfectly shared out, come to {missed(trial, least)}")
    if fewest.fastest is not None:
        late = fewest.fastest
        return Failure(count, "time", f"its fastest layout {late.layout.label} comes to {missed(trial, late)}")
    slow = too_late(trial, fewest.worst)
    if slow is not None:
        return slow
    batch = divisible_batch(trial)
    if batch is not None and batch != trial.job.global_batch_size and fits(with_batch(trial, batch), fewest.worst):
        return Failure(count, "batch", f"no replicas that would fit divide the {trial.job.global_batch_size:,} sequences of a step")
    if fewest.nearest is not None:
        near = fewest.nearest
        risky = ": at risk" if fewest.worst < AT_RISK and fits(trial) else ""
        return Failure(count, "memory", f"{near.layout.label} needs {near.need_bytes / GIB:.1f} GiB, of {usable:.1f} usable{risky}")
    if launchable(trial):
        return Failure(count, "memory", f"states and the layers in flight alone exceed the {usable:.1f} GiB of a GPU")
    if count not in group_products(trial, count):
        words = "no tensor, pipeline, context and data groups that heads, layers, sequence, batch and pins allow multiply to so many"
        return Failure(count, "rules", words)
    refused = nearest_refused(spec.problem(trial))
    return Failure(
        count, "rules", f"{refused[0].label} is refused: {refused[1]}" if refused else "no framework in play launches any layout"
    )


def fastest_kernels(scenario: Scenario) -> tuple[str, Job]:
    """The framework whose stack has the fastest kernels, and the job under it."""
    number, job = min(jobs_by_framework(scenario).items(), key=lambda item: least_step(item[1]))
    return framework_of(number), job


def missed(scenario: Scenario, late: Late) -> str:
    """What a layout that takes too long comes to, in the terms of the targets that it misses."""
    job = scenario.job_in(late.framework)
    names = [name for name, seconds in longest_steps(scenario, job).items() if late.step_seconds > seconds]
    return ", ".join(f"{attained(scenario, name, job, late.step_seconds)} ({TARGETS[name].words(scenario)})" for name in names)


MOST_LOOKS = 16
"""Smaller numbers of GPUs that are looked at for one with a layout that fits."""


def nearest_slower(fewest: Fewest) -> Failure | None:
    """The next smaller number of GPUs on which a layout fits, and what its fastest comes to; None where no target was asked for."""
    scenario = fewest.scenario
    if not fewest.num_gpus or not stated(scenario.choices):
        return None
    products = group_products(scenario, fewest.before)
    counts = [n for n in node_counts(scenario.job.cluster.gpus_per_node, fewest.before) if n in products and n >= fewest.least]
    looks = (too_late(on_gpus(scenario, count), fewest.worst) for count in list(reversed(counts))[:MOST_LOOKS])
    return next((failure for failure in looks if failure), None)


def too_late(trial: Scenario, worst: int) -> Failure | None:
    """What the fastest layout of a number of GPUs on which none meets the targets comes to; None where none fits without them."""
    if not stated(trial.choices) or not fits(untargeted(trial), worst):
        return None
    best = shortlist_of(searched(untargeted(trial)), LISTED).rows
    late = Late(best.layouts.layout(0), framework_of(int(best.stack[0])), float(best.step_seconds[0]))
    return Failure(trial.job.num_gpus, "time", f"its fastest layout {late.layout.label} comes to {missed(trial, late)}")
