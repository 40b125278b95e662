"""Everything that the answer to one search holds: the search, its shortlist, what is known of it, and why there is none."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass

import numpy as np

from planner.explain import shortlist_flags
from planner.long_context import LongPhase, long_phase
from planner.refine import Shortlist, on_front, pareto_of, shortlist_of
from planner.robustness import Robustness, robustness_of
from planner.scenario import Scenario
from planner.search import Progress, SearchResult, searched
from planner.why import Why, why_nothing


@dataclass(frozen=True, kw_only=True)
class Wanted:
    """What a search is asked for beside the layouts."""

    sort: str = "step"
    top: int = 10
    prove: bool = False
    """Split every layout that could overtake the first one."""
    pareto: bool = False
    """Only layouts on the front of time, money and memory."""
    draws: int = 1000
    """Of the model's uncertainty."""
    flagged: int = 100
    """Layouts that the checklist looks at."""
    phases: tuple[tuple[int, float], ...] = ()
    """Sequence length and tokens of each long-context phase; 0 tokens: the usual share."""


@dataclass(frozen=True)
class Answer:
    """A search with all that its page says."""

    result: SearchResult
    shortlist: Shortlist
    robust: Robustness | None
    on_front: np.ndarray
    """For each layout of the shortlist, whether no other is at least as fast, cheap and small, and better in one of them."""
    findings: list[dict[str, str]]
    """Red flags of each layout of the shortlist."""
    phases: tuple[LongPhase, ...]
    why: Why | None = None
    """Why the shortlist is empty, once that was asked."""

    @property
    def scenario(self) -> Scenario:
        """The question."""
        return self.result.scenario

    @property
    def feasible(self) -> bool:
        """Whether there is a layout."""
        return len(self.shortlist.rows) > 0


def answer(scenario: Scenario, wanted: Wanted, progress: Progress | None = None) -> Answer:
    """Search, refine, judge. Raises InputError for a batch that no replica count divides."""
    result = searched(scenario, wanted.sort, progress)
    trade_offs, sort = wanted.pareto, wanted.sort
    shortlist = pareto_of(result, wanted.top) if trade_offs else shortlist_of(result, wanted.top, sort=sort, prove=wanted.prove)
    found = len(shortlist.rows) > 0
    drawn = found and wanted.draws > 0 and sort == "step" and not trade_offs
    first = shortlist.rows.layouts.layout(0) if found else None
    return Answer(
        result=result,
        shortlist=shortlist,
        robust=robustness_of(result, shortlist, wanted.draws) if drawn else None,
        on_front=on_front(result, shortlist.rows),
        findings=shortlist_flags(scenario, shortlist, wanted.flagged),
        phases=tuple(long_phase(scenario, first, seq_len=s, tokens=t, progress=progress) for s, t in wanted.phases) if first else (),
    )


def with_reasons(found: Answer) -> Answer:
    """The answer with the limits that exclude each other and the repairs, where there is no layout."""
    return found if found.feasible else dataclasses.replace(found, why=why_nothing(found.scenario, found.result))
