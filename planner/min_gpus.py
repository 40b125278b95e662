"""The fewest GPUs for a model, or for a deadline, a budget or a speed: exact, with the best layout there and why fewer do not do."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from planner.cost.memory import AT_RISK, FITS
from planner.fewest import MOST_GPUS, Fewest, fewest_gpus
from planner.refine import Shortlist, shortlist_of
from planner.scenario import Scenario
from planner.search import SearchResult, searched
from planner.shortfall import Failure, nearest_slower, why_fewer_fail

PATIENCE = 1 << 28
"""Layouts weighed in vain before the answer is given up."""


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


def min_gpus(scenario: Scenario, most: int = MOST_GPUS, progress: Callable[[int], None] | None = None) -> MinGpus:
    """The fewest GPUs, up to ``most``, on which a layout fits and meets the scenario's targets."""
    risky = fewest_gpus(scenario, AT_RISK, most=most, patience=PATIENCE, progress=progress)
    safe = fewest_gpus(scenario, FITS, start=risky.num_gpus, most=most, patience=PATIENCE, progress=progress) if risky.num_gpus else risky
    if not safe.num_gpus:
        return MinGpus(scenario, safe, risky, fewer=why_fewer_fail(safe))
    result = searched(safe.scenario)
    return MinGpus(scenario, safe, risky, result, shortlist_of(result, 1), why_fewer_fail(safe), nearest_slower(safe))
