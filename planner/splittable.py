"""Which layouts an uneven split of their layers could shorten, and how far at most."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator

import numpy as np

from planner.cost.arrays import PIECE, Floats
from planner.cost.bound import least_step_seconds
from planner.frameworks import FRAMEWORKS, UNEVEN
from planner.frameworks.legality import NO_STACK, framework_of
from planner.scenario import Job, Scenario
from planner.split import recomputes_all
from solver.layout import Columns, Ints

RUNS_UNEVEN = np.array([name in UNEVEN for name in FRAMEWORKS] + [True])
"""By the number of a framework; the last is NO_STACK, the physical rules alone."""


def splittable(scenario: Scenario, number: int, x: Columns) -> np.ndarray:
    """Layouts of one stack whose stages may be split unevenly; none of those that no framework accepts."""
    runs = scenario.choices.uneven_stages and (number == NO_STACK or (number >= 0 and framework_of(number) in UNEVEN))
    return np.asarray((x.pipeline_parallel > 1) & runs)


def least_steps(number: int, job: Job, x: Columns) -> Floats:
    """The proven lower bound on the step of each layout of one stack under any split.

    Where stages may choose what they recompute, the bound without any recompute holds.
    """
    if number == NO_STACK:
        free = recomputes_all(x, job.model.num_layers)
        x = dataclasses.replace(x, recompute_layers=np.where(free, 0, x.recompute_layers))
    found = np.empty(len(x))
    for rows in _pieces(len(x)):
        found[rows] = least_step_seconds(job, x.take(rows))
    return found


def _pieces(length: int) -> Iterator[Ints]:
    for start in range(0, length, PIECE):
        yield np.arange(start, min(start + PIECE, length), dtype=np.int64)
