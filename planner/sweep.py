"""Many scenarios searched one by one: what is done is written down at once, so that a sweep can be stopped and gone on with."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Iterator
from contextlib import closing
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from planner.engine import MOST_DEATHS, Engine, completed, version
from planner.evaluation import OK, Task, evaluate, killed, plain, row_dtypes
from planner.grid import Point
from planner.journal import Journal

Progress = Callable[[int, int], None]
"""(points done, points in all)"""


@dataclass(frozen=True, kw_only=True)
class Sweep:
    """What is to be searched, and what is kept of it."""

    points: tuple[Point, ...]
    top: int = 1
    """Layouts of each point."""
    sort: str = "step"
    every: bool = False
    """All layouts of each point in place of the first."""
    pareto: bool = False
    """The table holds the layouts on the front alone."""

    @cached_property
    def varied(self) -> tuple[str, ...]:
        """The keys that were given values of their own at any point."""
        return tuple(dict.fromkeys(key for point in self.points for key in point.varied))

    @cached_property
    def header(self) -> dict[str, Any]:
        """Tells this sweep from others, whatever they are written to: a hash of all that its table depends on, and its parts."""
        options = {key: getattr(self, key) for key in ("top", "sort", "every", "pareto")}
        described = {"points": len(self.points), **options, "varied": ", ".join(self.varied)}
        text = json.dumps([described, [point.digest for point in self.points]])
        return {"sweep": hashlib.sha256(text.encode()).hexdigest()[:16], "version": version(), **described}

    @cached_property
    def dtypes(self) -> dict[str, str]:
        """The columns of a layout's row, the same for all points; those of the whole run where any point states one."""
        return row_dtypes(max((point.scenario for point in self.points), key=lambda scenario: scenario.training_tokens > 0))

    def tasks(self) -> Iterator[Task]:
        """The work, point by point."""
        columns = tuple(self.dtypes)
        return (Task(point.number, point.scenario, columns, self.top, self.sort, self.every) for point in self.points)


def run(sweep: Sweep, engine: Engine, journal: Journal, progress: Progress | None = None) -> None:
    """Searches every point that the journal does not hold, and writes each down as soon as it is done."""
    missing = (task for task in sweep.tasks() if task.point not in journal)
    tell = progress or (lambda done, total: None)
    tell(len(journal), len(sweep.points))
    with closing(completed(engine, evaluate, missing)) as finished:
        for task, found in finished:
            outcome = found or killed(task, MOST_DEATHS)
            journal.append(plain(outcome), outcome.others)
            tell(len(journal), len(sweep.points))


def any_found(journal: Journal) -> bool:
    """Whether a finished point has a layout."""
    return any(entry["status"] == OK for entry in journal)
