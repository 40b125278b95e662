"""The fewest GPUs on which a scenario has a layout: exact, count by count upwards from a proven lower bound.

Counts are whole nodes, and below one node every number. A count fails only when every layout of its space is refused.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from types import SimpleNamespace

import numpy as np

from planner import spec
from planner.cost.estimate import MemoryEstimate, memory_of, time_of
from planner.cost.memory import AT_RISK
from planner.frameworks.legality import NO_STACK, REFUSED, assign, framework_of, jobs_by_framework
from planner.limits import MemoryFloor, memory_floor
from planner.refine import LISTED, shortlist_of, split_of
from planner.scenario import Scenario
from planner.search import Rejected, searched
from planner.splittable import least_steps, splittable
from planner.targets import hopeless, longest_step, stated, untargeted
from solver import check, prune
from solver.layout import MESH_AXES, RECOMPUTE, SPLIT_AXES, Columns, Ints, Layout
from solver.problem import UNLIMITED_KIB, Problem, divisors

PIECE = 1 << 14
"""Layouts weighed at once: small, for the first one that fits ends the scan."""

MOST_GPUS = 1 << 16
"""Counts beyond are not tried unless asked for."""

PATIENCE, COUNT_EFFORT = 1 << 22, 1 << 11
"""Layouts weighed in vain before the search for a count gives up, and as how many a count counts: a limit that no clock moves."""

MOST_BATCH = 1 << 24
"""Sequences per step that a job may have at most."""


@dataclass(frozen=True)
class Fewest:
    """The fewest GPUs of a scenario whose own number of GPUs is set aside."""

    scenario: Scenario
    """On the fewest GPUs; as it was asked where no count was found."""
    num_gpus: int
    """0: none up to ``tried``."""
    least: int
    """Proven lower bound: below it the states alone do not fit."""
    tried: int
    """The last count tried; all those before it were tried as well, or lie below the bound."""
    exhausted: bool
    """None was found and no larger count has a layout either: heads, layers, sequence and batch divide among no more GPUs."""
    before: int
    """The last count that fails, one node or below a node one GPU fewer; 0 where there is none."""
    nearest: Rejected | None
    """Its layout with the least excess among those that were weighed."""
    fastest: Late | None = None
    """Its fastest layout, where some fit but none meets the targets."""
    worst: int = AT_RISK
    """The verdict that a layout had to have at least."""


def fewest_gpus(
    scenario: Scenario,
    worst: int = AT_RISK,
    start: int = 1,
    most: int = MOST_GPUS,
    patience: int = PATIENCE,
    progress: Callable[[int], None] | None = None,
) -> Fewest:
    """The fewest GPUs, from ``start`` on, with a layout whose verdict is ``worst`` or better; model, batch and choices stay.

    Every count from the lower bound upwards is tried, so the answer is exact: neither memory nor a target's step is monotone
    in the number of GPUs, for groups must divide it. The search gives up beyond ``most`` GPUs, or after weighing ``patience``
    layouts in vain. ``progress`` is told each count.
    """
    least, node = least_gpus(scenario), scenario.job.cluster.gpus_per_node
    products = group_products(scenario, most)
    counts = list(node_counts(node, min(most, max(products, default=1))))
    before = effort = 0
    last = Attempt(False, None, 0)
    for count in counts:
        if progress:
            progress(count)
        if count >= max(least, start):
            came = attempt(on_gpus(scenario, count), worst) if count in products else Attempt(False, None, -COUNT_EFFORT)
            if came.fits:
                return Fewest(on_gpus(scenario, count), count, least, count, False, before, last.nearest, last.fastest, worst)
            last = came
            effort += came.weighed + COUNT_EFFORT
        before = count
        if effort >= patience:
            return Fewest(scenario, 0, least, count, False, before, last.nearest, last.fastest, worst)
    largest = math.prod(int(sizes.max(initial=0)) for sizes in group_sizes(scenario))
    return Fewest(scenario, 0, least, before, largest <= most, before, last.nearest, last.fastest, worst)


def group_products(scenario: Scenario, most: int) -> frozenset[int]:
    """Every count up to ``most`` that is a product of group sizes which heads, layers, sequence, batch and pins allow one by one.

    All other counts have no layout, whatever the memory; a proof that needs no search.
    """
    products = np.ones(1, dtype=np.int64)
    for sizes in group_sizes(scenario):
        products = np.unique(np.outer(products, sizes[sizes <= most]))
        products = products[products <= most]
    return frozenset(products.tolist())


def group_sizes(scenario: Scenario) -> list[Ints]:
    """The sizes that tensor, pipeline, context and data groups may have on any number of GPUs, by rules that read one of them."""
    job, pins = scenario.job, scenario.choices.pins
    contexts = np.array(divisors(job.seq_len), dtype=np.int64)
    split = check.sequence(SimpleNamespace(context_parallel=contexts, tensor_parallel=1), spec.problem(scenario))
    natural: dict[str, Iterable[int]] = {
        "tensor_parallel": divisors(job.model.num_attention_heads),
        "pipeline_parallel": range(1, min(scenario.choices.max_pipeline_parallel, job.model.num_layers) + 1),
        "context_parallel": contexts[split].tolist(),
        "data_parallel": divisors(job.global_batch_size),
    }
    return [np.array(sorted(set(sizes) & set(pins.get(axis, sizes))), dtype=np.int64) for axis, sizes in natural.items()]


def node_counts(node: int, most: int) -> Iterator[int]:
    """Every count below one node, then whole nodes, up to ``most`` GPUs.

    >>> list(node_counts(4, 14))
    [1, 2, 3, 4, 8, 12]
    """
    yield from range(1, min(node, most + 1))
    yield from range(node, most + 1, node)


def on_gpus(scenario: Scenario, count: int) -> Scenario:
    """The scenario on another number of GPUs."""
    return dataclasses.replace(scenario, job=dataclasses.replace(scenario.job, num_gpus=count))


def least_gpus(scenario: Scenario) -> int:
    """GPUs below which the states of the model fit under no stack and no ZeRO stage of the search, however they are divided."""
    return max(min(least_of(floor) for floor in floors(scenario).values()), 1)


def floors(scenario: Scenario) -> dict[tuple[int, int], MemoryFloor]:
    """The least memory of any layout under each framework's stack, by its number, and each ZeRO stage."""
    stages = spec.declared_space(scenario)["zero_stage"]
    jobs = jobs_by_framework(scenario).items()
    return {(number, stage): memory_floor(scenario.job, [job.software], [stage]) for number, job in jobs for stage in stages}


def states_kib(floor: MemoryFloor) -> int:
    """KiB of the states that all GPUs together hold at least."""
    return floor.whole_dense_kib + floor.whole_expert_kib + floor.sharded_kib


def least_of(floor: MemoryFloor) -> int:
    """GPUs that together hold the states: each GPU of a layout holds at least its even share.

    The solver's floor rounds three quotients down to whole KiB, so a GPU may seem to offer that much more.
    """
    return math.ceil(states_kib(floor) / (floor.usable_kib + 3))


@dataclass(frozen=True)
class Late:
    """A layout that fits, yet takes too long."""

    layout: Layout
    framework: str
    step_seconds: float


@dataclass(frozen=True)
class Attempt:
    """Whether one count of GPUs has a layout, and if not, the one that came nearest."""

    fits: bool
    nearest: Rejected | None
    weighed: int
    """Layouts whose memory was asked for."""
    fastest: Late | None = None
    """Of the layouts that fit the one with the shortest step, where none meets the scenario's targets."""


def attempt(scenario: Scenario, worst: int = AT_RISK) -> Attempt:
    """Whether any layout of the scenario has a verdict of ``worst`` or better and meets its targets; stops at the first."""
    if hopeless(scenario) or too_slow(scenario):
        return Attempt(False, None, 0)
    nearest, fastest, number_weighed, roomier = None, None, 0, False
    for number, layouts, memory in weighed(scenario):
        number_weighed += len(layouts)
        roomier = roomier or bool(np.any(splittable(scenario, number, layouts) & (memory.verdict == AT_RISK)))
        fitting = np.flatnonzero(memory.verdict <= worst)
        if len(fitting):
            late = latest(scenario, number, layouts.take(fitting))
            if late is None:
                return executed_attempt(scenario, worst, number_weighed)
            fastest = min(fastest or late, late, key=lambda one: one.step_seconds)
        row = int(np.argmin(memory.need_bytes))
        if nearest is None or memory.need_bytes[row] < nearest.need_bytes:
            nearest = Rejected(layouts.layout(row), framework_of(number), float(memory.need_bytes[row]))
    if worst < AT_RISK and roomier:  # the split that suits the step may also take a layout at risk below the limit
        shown = shortlist_of(searched(scenario), LISTED).rows
        if np.any(shown.verdict <= worst):
            return Attempt(True, None, number_weighed)
    return Attempt(False, nearest, number_weighed, fastest)


def executed_attempt(scenario: Scenario, worst: int, number_weighed: int) -> Attempt:
    """The attempt once a layout meets the targets by the formulas: whether one does whose pipeline is executed where they do not hold."""
    if not stated(scenario.choices):
        return Attempt(True, None, number_weighed)
    if np.any(shortlist_of(searched(scenario), LISTED).rows.verdict <= worst):
        return Attempt(True, None, number_weighed)
    free = shortlist_of(searched(untargeted(scenario)), LISTED).rows
    best = Late(free.layouts.layout(0), framework_of(int(free.stack[0])), float(free.step_seconds[0]))
    return Attempt(False, None, number_weighed, best)


def too_slow(scenario: Scenario) -> bool:
    """Whether no layout meets the targets even if memory did not count: one without recompute would be as fast.

    Every layout without recompute is asked under every stack in play, whether or not its framework accepts it: a proof that
    weighs far fewer layouts than there are. Recompute only ever adds to a step's least seconds.
    """
    if not stated(scenario.choices):
        return False
    problem = dataclasses.replace(spec.problem(scenario), usable_kib=UNLIMITED_KIB)
    none = RECOMPUTE.index("none")
    without = none in problem.domains["recompute"] and 0 in problem.domains["recompute_layers"]  # the pins allow it
    plain = dataclasses.replace(problem, domains={**problem.domains, "recompute": (none,)}) if without else problem
    jobs = {number: (job, longest_step(scenario, job)) for number, job in jobs_by_framework(scenario).items()}
    for x in layouts_on(plain, meshes(plain)):
        for number, (job, limit) in jobs.items():
            least = time_of(job, x).total
            rows = np.flatnonzero((least > limit) & splittable(scenario, number, x))
            if np.any(least <= limit) or np.any(least_steps(number, job, x.take(rows)) <= limit):
                return False
    return True


def latest(scenario: Scenario, number: int, x: Columns) -> Late | None:
    """Of layouts of one stack that fit the fastest, if no one meets the scenario's targets even under its best split; else None."""
    job = jobs_by_framework(scenario)[number]
    limit = longest_step(scenario, job)
    if math.isinf(limit):
        return None
    steps = time_of(job, x).total
    late = Late(x.layout(int(np.argmin(steps))), framework_of(number), float(steps.min()))
    if late.step_seconds <= limit:
        return None
    rows = np.flatnonzero(splittable(scenario, number, x))
    least = least_steps(number, job, x.take(rows))
    for place in np.argsort(least, kind="stable"):
        if least[place] > limit:
            break
        split = split_of(scenario, number, job, x.layout(int(rows[place])))
        if split is not None and float(split.step.total[0]) <= limit:
            return None
        if split is not None and float(split.step.total[0]) < late.step_seconds:
            late = Late(x.layout(int(rows[place])), framework_of(number), float(split.step.total[0]))
    return late


def fits(scenario: Scenario, worst: int = AT_RISK) -> bool:
    """Whether any layout of the scenario has a verdict of ``worst`` or better and meets its targets: what a search would find."""
    return attempt(scenario, worst).fits


def weighed(scenario: Scenario) -> Iterator[tuple[int, Columns, MemoryEstimate]]:
    """Every layout that may fit, in pieces: their framework's number, and their memory. The rest lies above the solver's floor.

    The floor is asked once per stack and ZeRO stage: under one of each it is far higher than under all together, so that
    near the limit most meshes are refused before a layout is weighed.
    """
    jobs, problem = jobs_by_framework(scenario), spec.problem(scenario)
    table = meshes(problem)
    # high ZeRO stages, which need least, first
    for (number, stage), floor in sorted(floors(scenario).items(), key=lambda item: -item[0][1]):
        if least_of(floor) > scenario.job.num_gpus:
            continue
        own = dataclasses.replace(problem, domains={**problem.domains, "zero_stage": (stage,)}, **vars(floor))
        low = np.flatnonzero(check.memory_floor(SimpleNamespace(**table), own))
        for piece in layouts_on(own, {axis: column[low] for axis, column in table.items()}):
            mine = piece.take(assign(scenario, piece)[1] == number)  # of the frameworks in play the first that accepts it
            if len(mine):
                yield number, mine, memory_of(jobs[number], mine)


def meshes(problem: Problem) -> prune.Table:
    """Every mesh that the solver's rules allow whatever its memory, by plain arithmetic: CP-SAT's answer in a tenth of its time."""
    return _survivors(dataclasses.replace(problem, usable_kib=UNLIMITED_KIB), {}, MESH_AXES)


def layouts_on(problem: Problem, table: prune.Table) -> Iterator[Columns]:
    """Every layout on some meshes that the solver's rules allow, in pieces."""
    table = _survivors(problem, table, SPLIT_AXES)
    base = np.stack([table[axis] for axis in MESH_AXES + SPLIT_AXES], axis=1)
    if len(base):
        yield from prune.spread(problem, base).pieces(PIECE)


def _survivors(problem: Problem, table: prune.Table, axes: tuple[str, ...]) -> prune.Table:
    last = None
    for step in prune.walk(problem, table, axes):
        last = step
    assert isinstance(last, dict)
    return last


def launchable(scenario: Scenario) -> bool:
    """Whether the scenario has a layout if memory did not count."""
    problem = spec.problem(scenario)
    pieces = layouts_on(problem, meshes(problem))
    if NO_STACK in jobs_by_framework(scenario):
        return any(len(piece) for piece in pieces)
    return any(np.any(assign(scenario, piece)[1] != REFUSED) for piece in pieces)


def divisible_batch(scenario: Scenario) -> int | None:
    """The least multiple of the global batch that every mesh, micro-batch and schedule divides; None if a job cannot be so large.

    Twice the GPUs: DualPipe wants two micro-batches per stage.
    """
    micro_batch = math.lcm(*(max(size, 1) for size in scenario.choices.pins.get("micro_batch_size", (1,))))
    batch = math.lcm(scenario.job.global_batch_size, 2 * scenario.job.num_gpus * micro_batch)
    return batch if batch <= MOST_BATCH else None


def with_batch(scenario: Scenario, batch: int) -> Scenario:
    """The scenario with another number of sequences per step."""
    return dataclasses.replace(scenario, job=dataclasses.replace(scenario.job, global_batch_size=batch))
