"""The best uneven split of the layers over pipeline stages, by CP-SAT, with a proof.

Every stage takes one of its options (so many layers of each kind, so many of them recomputed); the options together hold
the model; the slowest stage and the time around the pipeline decide the step. Everything is an integer, so the best step
and its bound are exact.
"""

from __future__ import annotations

import math
import time
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, fields
from fractions import Fraction
from itertools import accumulate
from typing import Literal

from ortools.sat.python import cp_model

from solver.layout import chunk_sizes

Status = Literal["optimal", "feasible", "infeasible", "unknown"]

EXACT = 1 << 53
"""Steps (times their scale) stay below: the solver reports its bound as a double."""
DETERMINISTIC_PER_SECOND = 0.25
"""Units of the solver's own clock per second of the limit: few enough for that clock to stop a search before the wall clock does."""
FOUND = ("OPTIMAL", "FEASIBLE")
"""How a search ends that found something."""


@dataclass(frozen=True)
class Option:
    """One load that a stage may have."""

    first: int
    """Layers of kind 0."""
    second: int
    """Layers of kind 1."""
    recomputed: int
    """Layers of both kinds that are recomputed."""
    forward: int
    """Nanoseconds of one micro-batch through the whole stage, ends included."""
    backward: int
    """Nanoseconds of one micro-batch, ends and recompute included."""
    kib: int = 0
    """Memory that the stage needs; only options that fit are offered, so this decides nothing but ties."""

    @property
    def layers(self) -> int:
        """Layers of both kinds."""
        return self.first + self.second

    @property
    def passes(self) -> int:
        """Nanoseconds of forward and backward."""
        return self.forward + self.backward


@dataclass(frozen=True)
class Piece:
    """One linear piece of the step that a stage dictates; the numbers multiply nanoseconds."""

    forward: int
    """Times the forward pass of the stage."""
    backward: int
    """Times the backward pass of the stage."""
    around: int
    """Times forward and backward of all stages together."""


@dataclass(frozen=True, kw_only=True)
class Pipeline:
    """One pipeline whose split is sought: integers only."""

    num_stages: int
    chunks_per_stage: int = 1
    owner: tuple[int, ...]
    """The stage that owns each chunk, in model order: each stage owns ``chunks_per_stage`` of them."""
    layer_kinds: tuple[int, int]
    """Layers of kind 0, which come first in the model, and of kind 1."""
    options: tuple[tuple[Option, ...], ...]
    """For each stage what it may hold; a load that is not here does not fit."""
    pieces: tuple[Piece, ...]
    """The step is the largest of all pieces of all stages, divided by ``scale``.

    1F1B with m micro-batches through v chunks: one piece (m v - 1, m v - 1, 1) and scale v.
    """
    scale: int = 1
    min_chunk: int = 1
    """Layers that every chunk holds at least."""

    def __post_init__(self) -> None:
        _check_sizes(self)
        for stage, options in enumerate(self.options):
            for option in options:
                _check_whole(f"stage {stage}", option)
                if option.recomputed > option.layers:
                    raise ValueError(f"stage {stage} cannot recompute {option.recomputed} of {option.layers} layers")
        for piece in self.pieces:
            _check_whole("a piece", piece)
        if self.longest_step >= EXACT:
            raise ValueError(f"the longest step times its scale, {self.longest_step}, must be below 2^53: use a coarser unit of time")

    @property
    def longest_step(self) -> int:
        """Nanoseconds times scale, and nanoseconds around the pipeline, that no choice of options exceeds."""
        every = [option for options in self.options for option in options]
        forward, backward = max((o.forward for o in every), default=0), max((o.backward for o in every), default=0)
        around = sum(max((o.passes for o in options), default=0) for options in self.options)
        return max(around, *(p.forward * forward + p.backward * backward + p.around * around for p in self.pieces))


def _check_sizes(pipeline: Pipeline) -> None:
    """The sizes are whole numbers and agree with each other."""
    p, v = pipeline.num_stages, pipeline.chunks_per_stage
    for name, least in (("num_stages", 1), ("chunks_per_stage", 1), ("scale", 1), ("min_chunk", 0)):
        _check_number(name, getattr(pipeline, name), least)
    if len(pipeline.layer_kinds) != 2:
        raise ValueError(f"layer_kinds must count the layers of two kinds: {pipeline.layer_kinds}")
    for count in pipeline.layer_kinds:
        _check_number("layer_kinds", count, 0)
    if sorted(pipeline.owner) != sorted(list(range(p)) * v):
        raise ValueError(f"owner must name each of the {p} stages {v} times: {pipeline.owner}")
    if len(pipeline.options) != p:
        raise ValueError(f"options must be given for each of the {p} stages, not for {len(pipeline.options)}")
    if not pipeline.pieces:
        raise ValueError("pieces must not be empty: without one no stage takes any time")


def _check_whole(where: str, numbers: Option | Piece) -> None:
    for field in fields(numbers):
        _check_number(f"{field.name} of {where}", getattr(numbers, field.name), 0)


def _check_number(name: str, value: object, least: int) -> None:
    if not isinstance(value, int) or value < least:
        raise ValueError(f"{name} must be a whole number of at least {least}: {value!r}")


@dataclass(frozen=True)
class Partition:
    """The best split found; without one ``loads`` and ``chunks`` are empty."""

    status: Status
    """"optimal" and "infeasible" are proven; "feasible" and "unknown" mean that the time ran out."""
    loads: tuple[Option, ...] = ()
    """What each stage holds."""
    chunks: tuple[int, ...] = ()
    """Layers of each chunk, in model order."""
    step: Fraction | None = None
    """Nanoseconds."""
    bound: Fraction | None = None
    """Nanoseconds that no split undercuts; None if no split exists."""

    @property
    def layers(self) -> tuple[int, ...]:
        """Layers of each stage."""
        return tuple(load.layers for load in self.loads)

    @property
    def recomputed(self) -> tuple[int, ...]:
        """Recomputed layers of each stage."""
        return tuple(load.recomputed for load in self.loads)

    @property
    def gap(self) -> float:
        """The share of the step that a better split might still save: 0 if proven best, infinite without a split."""
        if self.step is None or self.bound is None:
            return math.inf
        return float((self.step - self.bound) / self.step) if self.step else 0.0


def split_chunks(pipeline: Pipeline, layers: Sequence[int]) -> tuple[int, ...]:
    """Layers of each chunk in model order, if the stages hold ``layers``."""
    of_stage = [iter(chunk_sizes(count, pipeline.chunks_per_stage)) for count in layers]
    return tuple(next(of_stage[stage]) for stage in pipeline.owner)


def first_layers(pipeline: Pipeline, layers: Sequence[int]) -> tuple[int, ...]:
    """Layers of kind 0 on each stage, if the stages hold ``layers``: those that lie in the model's first ones."""
    first = [0] * pipeline.num_stages
    end = 0
    for stage, size in zip(pipeline.owner, split_chunks(pipeline, layers), strict=True):
        start, end = end, end + size
        first[stage] += min(end, pipeline.layer_kinds[0]) - min(start, pipeline.layer_kinds[0])
    return tuple(first)


def step_of(pipeline: Pipeline, loads: Sequence[Option]) -> Fraction:
    """Nanoseconds of the step if the stages hold ``loads``."""
    return Fraction(_scaled_step(pipeline, loads), pipeline.scale)


def _scaled_step(pipeline: Pipeline, loads: Sequence[Option]) -> int:
    """Nanoseconds times scale."""
    around = sum(load.passes for load in loads)
    own = [_own(pipeline, load) for load in loads]
    return max(max(stage[number] for stage in own) + times * around for number, times in enumerate(_arounds(pipeline)))


def _arounds(pipeline: Pipeline) -> tuple[int, ...]:
    """The distinct multiples of the time around, ascending: pieces that share one are a single maximum."""
    return tuple(sorted({piece.around for piece in pipeline.pieces}))


def _own(pipeline: Pipeline, option: Option) -> tuple[int, ...]:
    """For each multiple of the time around, what the stage adds to it by itself: nanoseconds times scale."""
    return tuple(
        max(p.forward * option.forward + p.backward * option.backward for p in pipeline.pieces if p.around == around)
        for around in _arounds(pipeline)
    )


def _weights(pipeline: Pipeline, option: Option) -> tuple[int, ...]:
    """All by which an option lengthens the step: an option with no greater weight is no slower in any split."""
    around = option.passes if _arounds(pipeline)[-1] else 0
    return (*_own(pipeline, option), around)


def useful_options(pipeline: Pipeline) -> tuple[tuple[Option, ...], ...]:
    """For each stage its options by load, without those that cannot be part of a split and those that never win.

    An option never wins if another of the same load is no slower in any piece nor around the pipeline.
    """
    return tuple(_useful(pipeline, options) for options in pipeline.options)


def _useful(pipeline: Pipeline, options: Iterable[Option]) -> tuple[Option, ...]:
    kept: dict[tuple[int, int], list[tuple[tuple[int, ...], Option]]] = {}
    possible = [option for option in options if _possible(pipeline, option)]
    weighed = [(_weights(pipeline, option), option) for option in possible]
    for weights, option in sorted(weighed, key=lambda pair: (pair[1].first, pair[1].second, pair[0], pair[1].recomputed, pair[1].kib)):
        rivals = kept.setdefault((option.first, option.second), [])
        if not any(all(a <= b for a, b in zip(rival, weights, strict=True)) for rival, _ in rivals):
            rivals.append((weights, option))
    return tuple(option for rivals in kept.values() for _, option in rivals)


def _possible(pipeline: Pipeline, option: Option) -> bool:
    enough = option.layers >= pipeline.min_chunk * pipeline.chunks_per_stage
    return enough and option.first <= pipeline.layer_kinds[0] and option.second <= pipeline.layer_kinds[1]


@dataclass(frozen=True)
class _Group:
    """Stages that may swap their loads without any effect on the step."""

    stages: tuple[int, ...]
    options: tuple[Option, ...]
    """Of the first stage; those of the others differ at most in what does not reach the step."""
    counts: tuple[cp_model.IntVar, ...]
    """How many of the stages take each option."""


def _first_chunks(pipeline: Pipeline, options: Sequence[tuple[Option, ...]]) -> int:
    """How many chunks can hold layers of kind 0, if there are two kinds; 0 if there is one: then no position matters."""
    if 0 in pipeline.layer_kinds:
        return 0
    least = split_chunks(pipeline, [min(option.layers for option in of_stage) for of_stage in options])
    return sum(start < pipeline.layer_kinds[0] for start in accumulate(least[:-1], initial=0))


def _grouped(model: cp_model.CpModel, pipeline: Pipeline, options: Sequence[tuple[Option, ...]], first_chunks: int) -> list[_Group]:
    """The stages in groups, each of which takes as many options as it has stages.

    A stage that can hold layers of kind 0 stands alone, for there the positions of its chunks count. All chunks of the
    other stages lie behind those layers in every split, so alike ones may swap their loads: counting how many take which
    leaves the solver no symmetry.
    """
    alone = set(pipeline.owner[:first_chunks])
    alike: dict[object, list[int]] = {}
    for stage, of_stage in enumerate(options):
        what_counts = tuple((option.first, option.second, _weights(pipeline, option)) for option in of_stage)
        alike.setdefault(stage if stage in alone else what_counts, []).append(stage)
    groups = []
    for stages in alike.values():
        of_first = options[stages[0]]
        counts = tuple(model.new_int_var(0, len(stages), f"stage_{stages[0]}_option_{number}") for number in range(len(of_first)))
        model.add(sum(counts) == len(stages))
        groups.append(_Group(tuple(stages), of_first, counts))
    return groups


def _total(groups: Iterable[_Group], weigh: Callable[[Option], int]) -> cp_model.LinearExpr:
    """A number of every option, summed over what the stages take."""
    pairs = [(count, weigh(option)) for group in groups for option, count in zip(group.options, group.counts, strict=True)]
    return cp_model.LinearExpr.weighted_sum([count for count, _ in pairs], [weight for _, weight in pairs])


def _hold_the_model(model: cp_model.CpModel, pipeline: Pipeline, groups: Sequence[_Group], first_chunks: int) -> None:
    """The stages hold all layers of both kinds, and those of kind 0 lie where the model begins.

    The solver chooses the chunk in which kind 0 ends. Then the layers of a stage say how many of them are of kind 0, but
    for the owner of that chunk; and as they sum to the model, the owner holds what is left.
    """
    model.add(_total(groups, lambda option: option.first) == pipeline.layer_kinds[0])
    model.add(_total(groups, lambda option: option.second) == pipeline.layer_kinds[1])
    if not first_chunks:
        return
    ends = [model.new_bool_var(f"kind_0_ends_in_{chunk}") for chunk in range(first_chunks)]
    model.add_exactly_one(ends)
    for group in groups:
        of_end: list[list[cp_model.IntVar]] = [[] for _ in ends]
        for option, count in zip(group.options, group.counts, strict=True):
            chunks = _kind_0_ends(pipeline, group.stages[0], option.layers, first_chunks).get(option.first, [])
            model.add(count <= len(group.stages) * sum(ends[chunk] for chunk in chunks))  # implied by what follows, yet quicker
            for chunk in chunks:
                of_end[chunk].append(count)
        for end, counts in zip(ends, of_end, strict=True):
            model.add(sum(counts) >= len(group.stages) * end)


def _kind_0_ends(pipeline: Pipeline, stage: int, layers: int, first_chunks: int) -> dict[int, list[int]]:
    """For each number of layers of kind 0 that a stage of so many layers can have: the chunks of the model in which kind 0 may end."""
    sizes = iter(chunk_sizes(layers, pipeline.chunks_per_stage))
    chunks: dict[int, list[int]] = {}
    held = 0
    for chunk, owner in enumerate(pipeline.owner[:first_chunks]):
        before = held
        held += next(sizes) if owner == stage else 0
        for first in range(before + 1, held + 1) if owner == stage else (held,):
            chunks.setdefault(first, []).append(chunk)
    return chunks


def _dictate_the_step(model: cp_model.CpModel, pipeline: Pipeline, groups: Sequence[_Group]) -> cp_model.IntVar:
    """A variable that is no smaller than the step times its scale."""
    step = model.new_int_var(0, pipeline.longest_step, "step")
    around = _total(groups, lambda option: option.passes)
    own = {option: _own(pipeline, option) for group in groups for option in group.options}
    taken = [(option, _taken(model, count, len(group.stages))) for group in groups for option, count in zip(group.options, group.counts)]
    for number, times in enumerate(_arounds(pipeline)):
        values = sorted({of_option[number] for of_option in own.values()})
        slowest = model.new_int_var_from_domain(cp_model.Domain.from_values(values), f"slowest_{times}")
        for option, is_taken in taken:
            model.add(slowest >= own[option][number]).only_enforce_if(is_taken)
        for group in groups:
            if len(group.stages) == 1:  # implied, yet it shows the maximum to the linear relaxation
                model.add(slowest >= _total([group], lambda option: own[option][number]))  # noqa: B023
        model.add(step >= slowest + times * around)
    return step


def _taken(model: cp_model.CpModel, count: cp_model.IntVar, most: int) -> cp_model.IntVar:
    """True if any stage takes the option."""
    taken = model.new_bool_var("taken")
    model.add(count <= most * taken)
    model.add(count >= taken)
    return taken


def _loads(groups: Iterable[_Group], options: Sequence[tuple[Option, ...]], solver: cp_model.CpSolver) -> tuple[Option, ...]:
    """What each stage holds; of stages that may swap, those in the middle hold more, as under the even split."""
    loads: dict[int, Option] = {}
    for group in groups:
        numbers = [number for number, count in enumerate(group.counts) for _ in range(solver.value(count))]
        numbers.sort(key=lambda number: -group.options[number].layers)
        last = len(group.stages) - 1
        from_the_middle = sorted(range(last + 1), key=lambda place: (abs(2 * place - last), place))
        for place, number in zip(from_the_middle, numbers, strict=True):
            loads[group.stages[place]] = options[group.stages[place]][number]
    return tuple(loads[stage] for stage in range(len(loads)))


def _hint(model: cp_model.CpModel, groups: Iterable[_Group], options: Sequence[tuple[Option, ...]], loads: Sequence[Option]) -> None:
    """Start the search from ``loads``."""
    model.clear_hints()  # type: ignore[no-untyped-call]
    for group in groups:
        numbers = Counter(options[stage].index(loads[stage]) for stage in group.stages)
        for number, count in enumerate(group.counts):
            model.add_hint(count, numbers[number])


def _split_into(pipeline: Pipeline, options: Sequence[tuple[Option, ...]], layers: Sequence[int]) -> tuple[Option, ...] | None:
    """A split into ``layers`` per stage if the options allow one; where several do, all stages choose by the weight that serves best."""
    if len(layers) != pipeline.num_stages or sum(layers) != sum(pipeline.layer_kinds):
        return None
    loads = [(first, count - first) for first, count in zip(first_layers(pipeline, layers), layers, strict=True)]
    offered = [[o for o in of_stage if (o.first, o.second) == load] for of_stage, load in zip(options, loads, strict=True)]
    if not all(offered):
        return None
    weights = range(len(_weights(pipeline, offered[0][0])))
    picked = [tuple(min(of_stage, key=lambda o: _weights(pipeline, o)[weight]) for of_stage in offered) for weight in weights]
    return min(picked, key=lambda loads: _scaled_step(pipeline, loads))


def _least_step(pipeline: Pipeline, options: Sequence[tuple[Option, ...]]) -> int:
    """The step, times its scale, if every stage took its quickest option, whatever the layers sum to."""
    around = sum(min(option.passes for option in of_stage) for of_stage in options)
    own = [[_own(pipeline, option) for option in of_stage] for of_stage in options]
    slowest = [max(min(option[number] for option in of_stage) for of_stage in own) for number in range(len(_arounds(pipeline)))]
    return max(nanoseconds + times * around for nanoseconds, times in zip(slowest, _arounds(pipeline), strict=True))


def _below(bound: float) -> int:
    """A whole number no greater than a bound that the solver reports as a double."""
    return math.floor(bound - abs(bound) * 2**-48) if math.isfinite(bound) else 0


def _unevenness(loads: Iterable[Option]) -> int:
    return sum(load.layers**2 for load in loads)


class _Clock:
    """The time that is left to several searches, on the wall and on the solver's own clock."""

    def __init__(self, seconds: float) -> None:
        self.until = time.monotonic() + seconds
        self.units = DETERMINISTIC_PER_SECOND * seconds

    def search(self, model: cp_model.CpModel) -> tuple[cp_model.CpSolver, str]:
        """The solver after its search, and how that ended."""
        solver = cp_model.CpSolver()
        solver.parameters.num_workers = 1  # one search with one seed: the same answer every time
        solver.parameters.random_seed = 0
        solver.parameters.max_time_in_seconds = max(0.0, self.until - time.monotonic())
        solver.parameters.max_deterministic_time = max(0.0, self.units)
        solver.parameters.catch_sigint_signal = False  # Ctrl-C belongs to the program
        status = solver.status_name(solver.solve(model))
        if status == "MODEL_INVALID":
            raise RuntimeError(f"the solver refuses the model: {model.validate()}")
        self.units -= solver.response_proto.deterministic_time
        return solver, status


def _most_even(
    model: cp_model.CpModel, groups: Sequence[_Group], options: Sequence[tuple[Option, ...]], clock: _Clock
) -> tuple[tuple[Option, ...] | None, str]:
    """Of the splits that the model allows the one with the smallest sum of squared layers, if any is found; how the search ended."""
    model.minimize(_total(groups, lambda option: option.layers**2))
    solver, status = clock.search(model)
    return (_loads(groups, options, solver) if status in FOUND else None), status


def solve(pipeline: Pipeline, *, seconds: float = 2.0, hint: Sequence[int] | None = None) -> Partition:
    """The split with the shortest step; of equally short ones the one with the smallest sum of squared layers per stage.

    ``hint`` is a split known beforehand, as layers per stage: the answer is never slower, and is the hint itself if none
    is shorter or as short and more even. A hint that the options do not allow is passed over.

    Only a search that ends is a proof ("optimal", "infeasible"). It gives the same answer on every call. So does one that
    the solver's own clock stops; only if the wall clock stops it first, on a slow or busy core, the answers may differ
    ("feasible", "unknown", or which of equally short splits it is).

    >>> stage = tuple(Option(0, n, 0, 10 * n, 20 * n) for n in (1, 2, 3))
    >>> last = tuple(Option(0, n, 0, 10 * n + 15, 20 * n + 30) for n in (1, 2, 3))  # and the head
    >>> split = solve(Pipeline(num_stages=3, owner=(0, 1, 2), layer_kinds=(0, 6), options=(stage, stage, last), pieces=(Piece(7, 7, 1),)))
    >>> split.status, split.layers, split.step == 7 * 90 + 225
    ('optimal', (3, 2, 1), True)
    """
    clock = _Clock(seconds)
    options = useful_options(pipeline)
    if not all(options):
        return Partition("infeasible")
    model = cp_model.CpModel()
    first_chunks = _first_chunks(pipeline, options)
    groups = _grouped(model, pipeline, options, first_chunks)
    _hold_the_model(model, pipeline, groups, first_chunks)
    known = None if hint is None else _split_into(pipeline, options, hint)
    if known is None:  # some split to undercut makes the search for the best one many times faster
        even, status = _most_even(model, groups, options, clock)
        if status == "INFEASIBLE":
            return Partition("infeasible")
        known = even and _split_into(pipeline, options, [load.layers for load in even])
    step = _dictate_the_step(model, pipeline, groups)
    if known:
        model.add(step <= _scaled_step(pipeline, known))
        _hint(model, groups, options, known)
    model.minimize(step)
    solver, status = clock.search(model)
    if status == "INFEASIBLE":
        return Partition("infeasible")
    loads = _loads(groups, options, solver) if status in FOUND else known
    least = max(_least_step(pipeline, options), _below(solver.best_objective_bound))
    if loads is None:
        return Partition("unknown", bound=Fraction(least, pipeline.scale))
    shortest = _scaled_step(pipeline, loads)
    if status == "OPTIMAL":
        least = shortest
        model.add(step <= shortest)
        _hint(model, groups, options, loads)
        loads = _most_even(model, groups, options, clock)[0] or loads
    if known and _scaled_step(pipeline, known) == shortest and _unevenness(known) <= _unevenness(loads):
        loads = known
    return Partition(
        status="optimal" if status == "OPTIMAL" else "feasible",
        loads=loads,
        chunks=split_chunks(pipeline, [load.layers for load in loads]),
        step=Fraction(shortest, pipeline.scale),
        bound=Fraction(min(least, shortest), pipeline.scale),
    )
