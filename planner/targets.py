"""What a run must achieve: limits on days, money, seconds per step and tokens per second, each as the longest step it allows."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from planner.cost.arrays import Floats
from planner.cost.bound import least_work
from planner.frameworks.legality import jobs_by_framework
from planner.operations import run_of, upkeep_of
from planner.scenario import Choices, Job, Scenario
from planner.splittable import least_steps, splittable
from planner.units import SECONDS_PER_DAY, four, three
from solver.layout import Columns

if TYPE_CHECKING:
    from planner.search import Scored


@dataclass(frozen=True)
class Target:
    """One limit on the whole run."""

    words: Callable[[Scenario], str]
    """With the user's number."""
    longest_step: Callable[[Scenario, float], float]
    """Seconds of the longest step that meets it, given the goodput."""
    attained: Callable[[Scenario, float, float], str]
    """What a step of so many seconds comes to, given the goodput."""


def _tokens(scenario: Scenario) -> str:
    return f"{three(scenario.training_tokens / 1e9)}B tokens"


def _steps(scenario: Scenario) -> float:
    return scenario.training_tokens / scenario.job.tokens_per_step


TARGETS: dict[str, Target] = {
    "max_days": Target(
        lambda s: f"at most {four(s.choices.max_days)} days for {_tokens(s)}",
        lambda s, goodput: s.choices.max_days * SECONDS_PER_DAY * goodput / _steps(s),
        lambda s, step, goodput: f"{four(float(run_of(s, step, goodput).total_days))} days",
    ),
    "max_cost_usd": Target(
        lambda s: f"at most ${three(s.choices.max_cost_usd)} for {_tokens(s)}",
        lambda s, goodput: s.choices.max_cost_usd / max(float(run_of(s, 1.0, goodput).cost_usd), 1e-300),
        lambda s, step, goodput: f"${three(float(run_of(s, step, goodput).cost_usd))}",
    ),
    "max_step_seconds": Target(
        lambda s: f"steps of at most {four(s.choices.max_step_seconds)} s",
        lambda s, goodput: s.choices.max_step_seconds,
        lambda s, step, goodput: f"steps of {four(step)} s",
    ),
    "min_tokens_per_second": Target(
        lambda s: f"at least {four(s.choices.min_tokens_per_second)} tokens per second",
        lambda s, goodput: s.job.tokens_per_step / s.choices.min_tokens_per_second,
        lambda s, step, goodput: f"{three(s.job.tokens_per_step / step)} tokens per second",
    ),
}
"""By their key in a scenario file, in the order in which they drop layouts."""


def stated(choices: Choices) -> list[str]:
    """The targets that a search must meet."""
    return [name for name in TARGETS if getattr(choices, name)]


def without(scenario: Scenario, *names: str) -> Scenario:
    """The scenario without some of its targets."""
    return dataclasses.replace(scenario, choices=dataclasses.replace(scenario.choices, **dict.fromkeys(names, 0.0)))  # type: ignore[arg-type]


def untargeted(scenario: Scenario) -> Scenario:
    """The scenario without any of its targets."""
    return without(scenario, *TARGETS)


def longest_steps(scenario: Scenario, job: Job) -> dict[str, float]:
    """Seconds of the longest step that each stated target allows under a stack."""
    names = stated(scenario.choices)
    goodput = upkeep_of(scenario.operations, job).goodput if names else 1.0
    return {name: TARGETS[name].longest_step(scenario, goodput) for name in names}


def longest_step(scenario: Scenario, job: Job) -> float:
    """Seconds of the longest step that meets every target under a stack; infinite where there is none."""
    return min(longest_steps(scenario, job).values(), default=math.inf)


def attained(scenario: Scenario, name: str, job: Job, step_seconds: float) -> str:
    """What a step comes to in the terms of a target."""
    return TARGETS[name].attained(scenario, step_seconds, upkeep_of(scenario.operations, job).goodput)


def met(scenario: Scenario, scored: Scored) -> np.ndarray:
    """Which layouts meet every target as they are costed."""
    longest = np.full(len(scored), np.inf)
    if stated(scenario.choices):
        for number, job in jobs_by_framework(scenario).items():
            longest[scored.stack == number] = longest_step(scenario, job)
    return np.asarray(scored.step_seconds <= longest)


def out_of_reach(scenario: Scenario, number: int, job: Job, x: Columns, step_seconds: Floats) -> dict[str, np.ndarray]:
    """Per target the layouts of one stack that cannot meet it under any split of their layers, each layout under its first."""
    limits = longest_steps(scenario, job)
    if not limits:
        return {}
    least, late = step_seconds.copy(), step_seconds > min(limits.values())
    rows = np.flatnonzero(late & splittable(scenario, number, x))
    least[rows] = least_steps(number, job, x.take(rows))
    found, told = dict[str, np.ndarray](), np.zeros(len(x), dtype=bool)
    for name, seconds in limits.items():
        found[name] = (least > seconds) & ~told
        told |= found[name]
    return found


def hopeless(scenario: Scenario) -> bool:
    """Whether no layout on these GPUs can meet the targets: the kernels alone, perfectly shared out, take too long."""
    if not stated(scenario.choices):
        return False
    return all(least_step(job) > longest_step(scenario, job) for job in jobs_by_framework(scenario).values())


def least_step(job: Job) -> float:
    """Seconds below which no layout's step lies: its kernels' GPU-seconds over the GPUs."""
    return least_work(job) / job.num_gpus
