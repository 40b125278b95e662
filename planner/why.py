"""Why nothing fits (limits that exclude each other, and repairs), or what holds the best layout back (what each limit costs)."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial

from planner.errors import InputError, NoLayoutFits
from planner.fewest import (
    MOST_BATCH,
    Fewest,
    fits,
    with_batch,
)
from planner.lifting import (
    AXIS_WORDS,
    Limit,
    conflict_of,
    limits_of,
    possible,
    with_memory,
)
from planner.repairs import Found, Repair, changes, found, repairs_of
from planner.scenario import Scenario
from planner.search import SearchResult, retimed, search
from planner.shortfall import Failure, why_fewer_fail
from planner.targets import TARGETS, stated, untargeted
from planner.units import GIB
from solver.conflict import remembered

MORE_BYTES = 8 * GIB
LEAST_GAIN = 0.001
"""What relaxing memory means, and the share of the time per token below which a limit does not bind."""


STRUCTURE = ("tensor_across_nodes", "max_pipeline_parallel", "pad_vocabulary", "min_context_tokens", "framework")
"""Limits that stay as they are where a target on time or money is missed: lifting them makes spaces ten times as large."""


@dataclass(frozen=True)
class Gain:
    """What relaxing one limit would buy."""

    name: str
    words: str
    change: float
    """Of the time per token: -0.031 is 3.1 % faster."""
    best: Found


@dataclass(frozen=True)
class Why:
    """Why nothing fits (conflict and repairs), or what holds the best layout back (gains)."""

    scenario: Scenario
    result: SearchResult | None
    """The search itself; None where no replicas divide the batch."""
    conflict: tuple[Limit, ...] = ()
    """The smallest set of limits that exclude each other."""
    repairs: tuple[Repair, ...] = ()
    """Nearest first."""
    fewest: Fewest | None = None
    """The fewest GPUs where nothing else changes, if more or fewer of them are a repair; also where they were sought in vain."""
    fewer: Failure | None = None
    """Why the next smaller number of GPUs fails."""
    gains: tuple[Gain, ...] = ()
    """Largest first."""
    slack: tuple[str, ...] = ()
    """Relaxations that would buy nothing, in words."""

    @property
    def feasible(self) -> bool:
        """Whether the search finds a layout."""
        return self.result is not None and len(self.result.ranked) > 0 and not self.conflict


def why(scenario: Scenario) -> Why:
    """Why nothing fits, or what holds the best layout back."""
    try:
        result = search(scenario)
    except NoLayoutFits as nothing:
        return why_nothing(scenario, nothing.result)
    except InputError:  # no replicas divide the batch
        return why_nothing(scenario, None)
    try:
        gains, slack = binding(result)
    except NoLayoutFits:  # layouts that might meet the targets under a split, yet none does
        return why_nothing(scenario, result)
    return Why(scenario, result, gains=gains, slack=slack)


def why_nothing(scenario: Scenario, result: SearchResult | None) -> Why:
    """The limits that exclude each other, and the nearest repairs, of a search that found nothing."""
    if stated(scenario.choices) and not fits(untargeted(scenario)):
        return why_nothing(untargeted(scenario), result)  # no target is to blame
    limits = limits_of(scenario)
    if stated(scenario.choices):
        limits = tuple(limit for limit in limits if limit.name not in STRUCTURE)
    ask = remembered(partial(possible, scenario, limits))
    conflict = conflict_of(limits, ask)
    repairs = repairs_of(scenario, limits, conflict, ask)
    fewest = next((repair.fewest for repair in repairs if repair.lifts == ("num_gpus",) and repair.fewest), None)
    return Why(
        scenario=scenario,
        result=result,
        conflict=tuple(limits[number] for number in sorted(conflict.members)),
        repairs=repairs,
        fewest=fewest,
        fewer=why_fewer_fail(fewest) if fewest and fewest.num_gpus else None,
    )


def binding(result: SearchResult) -> tuple[tuple[Gain, ...], tuple[str, ...]]:
    """What relaxing each limit by itself would buy, largest gain first; and the relaxations that would buy nothing."""
    old, gains, slack = found(result), list[Gain](), list[str]()
    for name, words, again in relaxations(result):
        try:
            best = found(again())
        except (NoLayoutFits, InputError):
            continue
        change = old.tokens_per_second / best.tokens_per_second - 1.0
        gain = Gain(name, words or changes(result.scenario, best)[name], change, best)
        if change <= -LEAST_GAIN or best.verdict < old.verdict:
            gains.append(gain)
        else:
            slack.append(words or RELAXED[name])
    gains.sort(key=lambda gain: (gain.best.verdict >= old.verdict, gain.change))
    return tuple(gains), tuple(slack)


RELAXED = {
    **{axis: f"any {words}" for axis, words in AXIS_WORDS.items()},
    "tensor_across_nodes": "tensor groups across nodes",
    "max_pipeline_parallel": "deeper pipelines",
    "pad_vocabulary": "a padded vocabulary",
    "min_context_tokens": "fewer tokens per context rank",
    "framework": "other frameworks' rules",
}
"""Limits that are lifted whole, as a relaxation that buys nothing."""


def relaxations(result: SearchResult) -> Iterator[tuple[str, str, Callable[[], SearchResult]]]:
    """Name, words (empty: the best layout's value says them) and the search of every relaxation."""
    scenario, job = result.scenario, result.scenario.job
    larger = with_memory(scenario, job.gpu.memory_bytes + MORE_BYTES)
    yield "memory", f"+{MORE_BYTES / GIB:.0f} GiB per GPU", partial(search, larger)
    if job.num_gpus > job.fast_domain:
        faster = with_wires(scenario, nic_bytes_per_s=2 * job.nic_bytes_per_s * job.cluster.oversubscription)
        yield "nic", f"{2 * job.nic_bytes_per_s * 8 / 1e9:.0f} Gb/s NICs", partial(timed_again, result, faster)
    if job.fast_domain > 1:
        faster = with_wires(scenario, link_bytes_per_s=2 * job.link_bytes_per_s)
        yield "link", f"{2 * job.link_bytes_per_s / 1e9:.0f} GB/s links in a node", partial(timed_again, result, faster)
    if not job.sequence_parallel:
        split = dataclasses.replace(scenario, job=dataclasses.replace(job, sequence_parallel=True))
        yield "sequence_parallel", "sequence parallelism", partial(search, split)
    if 2 * job.global_batch_size <= MOST_BATCH:
        twice = with_batch(scenario, 2 * job.global_batch_size)
        yield "global_batch_size", f"{2 * job.global_batch_size:,} sequences per step", partial(search, twice)
    for limit in limits_of(scenario):
        if limit.name not in ("memory", "num_gpus", "global_batch_size", *TARGETS):  # a target that is met binds nothing
            *_, widest = limit.lift(scenario)
            yield limit.name, "", partial(search, widest)


def with_wires(scenario: Scenario, **changed: float) -> Scenario:
    """The scenario with other bandwidths, bytes per second per GPU and direction."""
    cluster = dataclasses.replace(scenario.job.cluster, **changed)  # type: ignore[arg-type]
    return dataclasses.replace(scenario, job=dataclasses.replace(scenario.job, cluster=cluster))


def timed_again(result: SearchResult, scenario: Scenario) -> SearchResult:
    """The search under a scenario that changes bandwidths alone: the same layouts fit, so they are only timed anew.

    Targets drop layouts by their time, so that under them the search is made anew.
    """
    if stated(scenario.choices):
        return search(scenario)
    return dataclasses.replace(result, scenario=scenario, ranked=retimed(scenario, result.ranked))
