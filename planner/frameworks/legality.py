"""Which frameworks accept which layouts, and whose stack each is costed under, for many layouts at once."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from types import SimpleNamespace

import numpy as np

from planner.frameworks import FRAMEWORKS, USUAL
from planner.frameworks.rule import FrameworkRule
from planner.scenario import Job, Scenario
from solver.grouping import distinct
from solver.layout import AXES, MESH_AXES, SPLIT_AXES, WORDS, Columns, Ints, Layout, columns_of, deepest_chunk
from solver.problem import divisors

NO_STACK, REFUSED = -1, -2
"""Numbers beside those of the frameworks: the physical rules alone, and a layout that no framework in play accepts."""


def framework_of(number: int) -> str:
    """The name of a framework's number; "none" stands for the physical rules alone."""
    return "none" if number == NO_STACK else list(FRAMEWORKS)[number]


def jobs_by_framework(scenario: Scenario) -> dict[int, Job]:
    """The job under the stack of each framework that the search may use, by the framework's number."""
    wanted = scenario.choices.framework
    in_play = USUAL if wanted == "any" else (wanted,)
    named = {number: framework_of(number) for number in (NO_STACK, *range(len(FRAMEWORKS)))}
    return {number: scenario.job_in(name) for number, name in named.items() if name in in_play}


def assign(scenario: Scenario, x: Columns) -> tuple[Ints, Ints]:
    """For each layout the bit set of frameworks that accept it, and the number of the one it is costed under."""
    bits = accepting({name: scenario.job_in(name) for name in FRAMEWORKS}, x)
    stack = np.full(len(x), REFUSED, dtype=np.int64)
    for number in sorted(jobs_by_framework(scenario), reverse=True):
        stack = np.where(bits >> number & 1 if number != NO_STACK else True, number, stack)
    return bits, stack


def accepting(jobs: Mapping[str, Job], x: Columns) -> Ints:
    """For each layout a bit per framework, in the order of :data:`FRAMEWORKS`: 1 where all its rules hold.

    ``jobs`` is the job under each framework's stack. Rules that read no switch are asked once per mesh and split.
    """
    first, mesh = distinct(getattr(x, axis) for axis in MESH_AXES + SPLIT_AXES)
    meshes = x.take(first)
    bits = np.zeros(len(x), dtype=np.int64)
    for number, (name, rules) in enumerate(FRAMEWORKS.items()):
        job = jobs[name]
        fixed = np.ones(len(first), dtype=bool)
        for rule in rules:
            if not rule.switches:
                fixed &= rule.holds(meshes, job)
        legal = fixed[mesh]
        for rule in rules:
            if rule.switches:
                legal &= rule.holds(x, job)
        bits |= legal.astype(np.int64) << number
    return bits


def framework_names(bits: int) -> list[str]:
    """The frameworks of a bit set.

    >>> framework_names(5)
    ['megatron', 'deepspeed']
    """
    return [name for number, name in enumerate(FRAMEWORKS) if bits >> number & 1]


def broken(job: Job, layout: Layout, framework: str) -> list[FrameworkRule]:
    """The rules of a framework that one layout breaks."""
    one = SimpleNamespace(**{axis: getattr(columns_of([layout]), axis) for axis in AXES})
    return [rule for rule in FRAMEWORKS[framework] if not np.all(rule.holds(one, job))]


def reason(rule: FrameworkRule, layout: Layout, job: Job) -> str:
    """What a layout breaks: the rule, its own numbers, and the values of each axis that would be legal, all else kept."""
    values = {axis: legal_values(rule, layout, job, axis) for axis in rule.axes}
    legal = "; ".join(f"legal {axis}: {', '.join(map(str, found))}" for axis, found in values.items() if found)
    return f"{rule.id}: {rule.sentence}; here {rule.twin(layout, job)}" + (f" ({legal})" if legal else "")


MOST_VALUES = 12


def legal_values(rule: FrameworkRule, layout: Layout, job: Job, axis: str) -> list[int | str]:
    """The values of one axis under which the rule holds, all else kept; of many the nearest ones."""
    values = _candidates(layout, job, axis)
    base = columns_of([layout])
    trial = SimpleNamespace(**{other: values if other == axis else getattr(base, other) for other in AXES})
    legal = values[np.broadcast_to(rule.holds(trial, job), values.shape)]
    own = int(getattr(base, axis)[0])
    near = sorted(sorted(legal.tolist(), key=lambda value: abs(value - own))[:MOST_VALUES])
    return [WORDS[axis][value] for value in near] if axis in WORDS else near


def _candidates(layout: Layout, job: Job, axis: str) -> Ints:
    """Every value that an axis could have."""
    deepest = deepest_chunk(layout, job.model.num_layers)
    ranges: dict[str, Sequence[int]] = {
        "zero_stage": range(4),
        "recompute_layers": range(1, deepest + 1) if layout.recompute == "full" else (0,),
        "virtual_pipeline": range(1, deepest_chunk(dataclasses.replace(layout, virtual_pipeline=1), job.model.num_layers) + 1),
        "micro_batch_size": divisors(job.global_batch_size),
        **{axis: range(len(words)) for axis, words in WORDS.items()},
    }
    return np.array(ranges.get(axis, divisors(job.num_gpus)), dtype=np.int64)
