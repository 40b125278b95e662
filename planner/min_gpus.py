"""The fewest GPUs for a model, or for a deadline, a budget or a speed: exact, with the best layout there and why fewer do not do."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from planner.cost.memory import AT_RISK, FITS
from planner.fewest import MOST_GPUS, Fewest, fewest_gpus, with_batch
from planner.refine import LISTED, Shortlist, shortlist_of
from planner.scenario import Scenario
from planner.search import SearchResult, searched
from planner.shortfall import Failure, nearest_slower, why_fewer_fail
from solver.problem import divisors

PATIENCE = 1 << 28
"""Layouts weighed in vain before the answer is given up."""


MOST_BATCHES = 4
"""Batches near the one asked for that are tried."""


@dataclass(frozen=True)
class OtherBatch:
    """A batch near the one asked for under which fewer GPUs do."""

    fewest: Fewest
    shortlist: Shortlist
    """Its first layout."""


@dataclass(frozen=True)
class MinGpus:
    """The fewest GPUs at which a layout fits with a margin, and those at which one may fit."""

    scenario: Scenario
    """As asked; its own number of GPUs is set aside."""
    safe: Fewest
    risky: Fewest
    """The fewest with a layout at risk or better; no more than the safe ones."""
    result: SearchResult | None = None
    """The search on the fewest safe GPUs; None where there are none."""
    shortlist: Shortlist | None = None
    """Its first layout."""
    fewer: Failure | None = None
    """Why the next smaller number of GPUs fails."""
    slower: Failure | None = None
    """The next smaller number on which a layout fits, and what it misses; None where no target was asked for."""
    other_batches: tuple[OtherBatch, ...] = ()
    """Fewest GPUs first."""


Counting = Callable[[int], None]
"""Told each number of GPUs that is tried."""


def min_gpus(scenario: Scenario, most: int = MOST_GPUS, batch_within: float = 0.0, progress: Counting | None = None) -> MinGpus:
    """The fewest GPUs, up to ``most``, on which a layout fits and meets the scenario's targets.

    ``batch_within``: also try batches within this share of the one asked for that divide among more numbers of replicas.
    """
    risky = fewest_gpus(scenario, AT_RISK, most=most, patience=PATIENCE, progress=progress)
    safe = fewest_gpus(scenario, FITS, start=risky.num_gpus, most=most, patience=PATIENCE, progress=progress) if risky.num_gpus else risky
    others = other_batches(scenario, safe.num_gpus - 1 if safe.num_gpus else most, batch_within, progress)
    if not safe.num_gpus:
        return MinGpus(scenario, safe, risky, fewer=why_fewer_fail(safe), other_batches=others)
    result = searched(safe.scenario)
    return MinGpus(scenario, safe, risky, result, shortlist_of(result, LISTED).first(1), why_fewer_fail(safe), nearest_slower(safe), others)


def other_batches(scenario: Scenario, most: int, within: float, progress: Counting | None) -> tuple[OtherBatch, ...]:
    """Batches near the scenario's under which at most so many GPUs do, each with its best layout."""
    found = []
    for batch in nearby_batches(scenario.job.global_batch_size, within):
        fewest = fewest_gpus(with_batch(scenario, batch), FITS, most=most, patience=PATIENCE, progress=progress)
        if fewest.num_gpus:
            found.append(OtherBatch(fewest, shortlist_of(searched(fewest.scenario), LISTED).first(1)))
    return tuple(sorted(found, key=lambda other: other.fewest.num_gpus))


def nearby_batches(batch: int, within: float) -> list[int]:
    """Batches within a share of one that have more divisors than it; those with most first, then the nearest.

    >>> nearby_batches(2048, 0.05)
    [2016, 2100, 1980, 2040]
    """
    reach = int(batch * within)
    near = {other: len(divisors(other)) for other in range(max(batch - reach, 1), batch + reach + 1)}
    richer = [other for other, number in near.items() if number > near[batch]]
    return sorted(richer, key=lambda other: (-near[other], abs(other - batch)))[:MOST_BATCHES]
