"""Which frameworks accept which layouts, for many layouts at once."""

from __future__ import annotations

from collections.abc import Mapping
from types import SimpleNamespace

import numpy as np

from planner.frameworks import FRAMEWORKS
from planner.frameworks.rule import FrameworkRule
from planner.scenario import Job
from solver.grouping import distinct
from solver.layout import AXES, MESH_AXES, SPLIT_AXES, Columns, Ints, Layout, columns_of


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
