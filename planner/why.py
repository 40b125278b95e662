"""Why nothing fits, or what holds the best layout back: limits that exclude each other, repairs, and what each limit costs.

A limit is something that a user could lift. All limits but some are lifted to ask whether these alone exclude every
layout; :mod:`solver.conflict` finds the fewest that do. A lifted limit never takes a layout away: where lifting changes
more than the set of layouts (another stack, a larger batch), the scenario as it was counts too.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from functools import partial

import numpy as np

from planner.catalogue import load
from planner.catalogue.schema import Cluster, Generation, Gpu
from planner.cost.memory import AT_RISK, FITS
from planner.errors import InputError, NoLayoutFits
from planner.fewest import (
    MOST_BATCH,
    Failure,
    Fewest,
    divisible_batch,
    fewest_gpus,
    fits,
    launchable,
    node_counts,
    on_gpus,
    weighed,
    why_fewer_fail,
    with_batch,
)
from planner.frameworks.legality import framework_names, jobs_by_framework
from planner.profile import tuned
from planner.rank import order
from planner.scenario import Choices, Scenario
from planner.search import SearchResult, concatenate, search, timed
from planner.units import GIB
from solver.conflict import Conflict, Possible, remembered, smallest_conflict, smallest_corrections
from solver.layout import DUALPIPE, LABEL_ORDER, WORDS, Layout

MOST_GPUS = 4096
"""Up to here a lifted number of GPUs is tried, or up to four times the number asked for if that is more."""

UNLIMITED_BYTES = 1e14
"""More memory than any layout needs, the most that a GPU may state."""

PATIENCE = 1 << 20
"""Layouts weighed in vain before the fewest GPUs of one repair are given up."""

ENOUGH, MOST_REPAIRS, MOST_PARTS, MOST_COUNTS, MOST_TRIES = 3, 6, 2, 3, 48
"""Corrections sought at least, repairs shown, larger GPUs and numbers of GPUs proposed, counts tried beside the one asked for."""

MORE_BYTES = 8 * GIB
LEAST_GAIN = 0.001
"""What relaxing memory means, and the share of the time per token below which a limit does not bind."""

AXIS_WORDS = {
    "tensor_parallel": "tensor parallel",
    "pipeline_parallel": "pipeline parallel",
    "virtual_pipeline": "virtual pipeline",
    "context_parallel": "context parallel",
    "expert_parallel": "expert parallel",
    "expert_tensor_parallel": "expert tensor parallel",
    "data_parallel": "data parallel",
    "zero_stage": "ZeRO stage",
    "micro_batch_size": "micro-batch",
    "recompute": "recompute",
    "recompute_layers": "recomputed layers per chunk",
    "schedule": "schedule",
}
FRAMEWORK_WORDS = {"megatron": "Megatron-LM", "torchtitan": "torchtitan", "deepspeed": "DeepSpeed"}

FAMILIES = (
    ("volta", "ampere", "ada", "hopper", "blackwell", "blackwell-gb200", "blackwell-gb300"),
    ("cdna3", "cdna4"),
)
"""Generations of one maker, oldest first."""

LARGER = 1.25
"""A GPU is a repair when it has so much more memory than the one before it."""


@dataclass(frozen=True)
class Limit:
    """Something that a user could lift."""

    name: str
    """A key that stays: "memory", or the key of a scenario file."""
    words: str
    """With the user's numbers."""
    lift: Callable[[Scenario], Iterable[Scenario]]
    """The scenario in every way in which it may be lifted; at least one."""


@dataclass(frozen=True)
class Found:
    """The best layout of a search, as a page states it."""

    scenario: Scenario
    layout: Layout
    frameworks: tuple[str, ...]
    verdict: int
    need_bytes: float
    step_seconds: float

    @property
    def tokens_per_second(self) -> float:
        """Of the whole cluster."""
        return self.scenario.job.tokens_per_step / self.step_seconds

    @property
    def gpu_hours_per_billion_tokens(self) -> float:
        """The cost in time, comparable between clusters and batches."""
        return self.scenario.job.num_gpus / self.tokens_per_second * 1e9 / 3600


@dataclass(frozen=True)
class Repair:
    """A change under which a search finds a layout."""

    lifts: tuple[str, ...]
    """Names of the limits that it changes; other changes have the name of their key."""
    words: tuple[str, ...]
    """One per change."""
    best: Found
    fewest: Fewest | None = None
    """Where the number of GPUs is the fewest: its proof; where the fewest were sought in vain: how far."""

    @property
    def exact(self) -> bool:
        """Whether no fewer GPUs will do."""
        return self.fewest is not None and self.fewest.num_gpus > 0


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
        return self.result is not None and len(self.result.ranked) > 0


def why(scenario: Scenario) -> Why:
    """Why nothing fits, or what holds the best layout back."""
    try:
        result = search(scenario)
    except NoLayoutFits as nothing:
        return why_nothing(scenario, nothing.result)
    except InputError:  # no replicas divide the batch
        return why_nothing(scenario, None)
    gains, slack = binding(result)
    return Why(scenario, result, gains=gains, slack=slack)


def why_nothing(scenario: Scenario, result: SearchResult | None) -> Why:
    """The limits that exclude each other, and the nearest repairs, of a search that found nothing."""
    limits = limits_of(scenario)
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


# What a user could lift


def limits_of(scenario: Scenario, most_gpus: int = 0) -> tuple[Limit, ...]:
    """The limits of a scenario; between equally small conflicts those that come first here are named.

    ``most_gpus``: up to where a lifted number of GPUs is tried; 0: :data:`MOST_GPUS`, or four times the number asked for.
    """
    job, choices = scenario.job, scenario.choices
    most_gpus = most_gpus or max(MOST_GPUS, 4 * job.num_gpus)
    limits = [
        Limit("memory", f"{job.gpu.memory_bytes / GIB:.1f} GiB usable per GPU", lambda s: [with_memory(s, UNLIMITED_BYTES)]),
        Limit("num_gpus", gpus_words(job.num_gpus), partial(_more_gpus, most=most_gpus)),
        Limit("global_batch_size", f"{job.global_batch_size:,} sequences per step", _more_sequences),
    ]
    limits += [
        Limit(axis, pin_words(axis, choices.pins[axis]), partial(_unpinned, axis=axis)) for axis in LABEL_ORDER if axis in choices.pins
    ]
    if not choices.tensor_across_nodes:
        words = f"tensor groups inside a node of {job.fast_domain}"
        limits.append(Limit("tensor_across_nodes", words, partial(_with_choices, tensor_across_nodes=True)))
    if choices.max_pipeline_parallel < job.model.num_layers:
        words = f"pipelines of at most {choices.max_pipeline_parallel} stages"
        limits.append(Limit("max_pipeline_parallel", words, partial(_with_choices, max_pipeline_parallel=job.model.num_layers)))
    if not choices.pad_vocabulary:
        limits.append(Limit("pad_vocabulary", "no padding of the vocabulary", partial(_with_choices, pad_vocabulary=True)))
    if choices.min_context_tokens > Choices().min_context_tokens:
        words = f"at least {choices.min_context_tokens:,} tokens per context rank"
        limits.append(Limit("min_context_tokens", words, partial(_with_choices, min_context_tokens=Choices().min_context_tokens)))
    if choices.framework != "none":
        limits.append(Limit("framework", framework_words(choices.framework), _other_frameworks))
    return tuple(limits)


def with_memory(scenario: Scenario, memory_bytes: float) -> Scenario:
    """The scenario with another usable memory per GPU."""
    gpu = dataclasses.replace(scenario.job.gpu, memory_bytes=memory_bytes)
    return dataclasses.replace(scenario, job=dataclasses.replace(scenario.job, gpu=gpu))


def gpu_counts(scenario: Scenario, most: int) -> list[int]:
    """The numbers of GPUs that count as lifting theirs: the one asked for, whole nodes and the pinned groups, each in powers of two.

    Multiples go up to ``most``; the number asked for comes first, then the largest.
    """
    job, pins = scenario.job, scenario.choices.pins
    sizes = [pins[axis] for axis in ("tensor_parallel", "pipeline_parallel", "context_parallel", "data_parallel") if axis in pins]
    groups = {math.prod(end(values) for values in sizes) for end in (min, max)}
    experts = max(math.prod(max(pins.get(axis, (1,))) for axis in ("expert_parallel", "expert_tensor_parallel")), 1)
    units = {job.num_gpus, job.cluster.gpus_per_node, *groups, *(group * experts for group in groups)}
    odd = {unit // (unit & -unit) for unit in units if 0 < unit <= 10_000_000}
    counts = {part << power for part in odd for power in range(24) if part << power <= max(most, part)}
    return [job.num_gpus, *sorted(counts - {job.num_gpus}, reverse=True)]


def _more_gpus(scenario: Scenario, most: int) -> Iterator[Scenario]:
    return (on_gpus(scenario, count) for count in gpu_counts(scenario, most))


def _more_sequences(scenario: Scenario) -> Iterator[Scenario]:
    yield scenario
    batch = divisible_batch(scenario)
    if batch is not None and batch != scenario.job.global_batch_size:
        yield with_batch(scenario, batch)


def _unpinned(scenario: Scenario, axis: str) -> list[Scenario]:
    pins = {other: values for other, values in scenario.choices.pins.items() if other != axis}
    return _with_choices(scenario, pins=pins)


def _with_choices(scenario: Scenario, **changed: object) -> list[Scenario]:
    choices = dataclasses.replace(scenario.choices, **changed)  # type: ignore[arg-type]
    return [dataclasses.replace(scenario, choices=choices)]


def _other_frameworks(scenario: Scenario) -> Iterator[Scenario]:
    """As it was, in any framework, by the physical rules alone: each costs layouts under stacks of its own."""
    for framework in dict.fromkeys((scenario.choices.framework, "any", "none")):
        yield from _with_choices(scenario, framework=framework)


def lifted(scenario: Scenario, limits: Iterable[Limit]) -> Iterator[Scenario]:
    """The scenario with some limits lifted, in every combination of the ways to lift them."""
    remaining = tuple(limits)
    if not remaining:
        yield scenario
        return
    for one in remaining[0].lift(scenario):
        yield from lifted(one, remaining[1:])


def possible(scenario: Scenario, limits: tuple[Limit, ...], kept: frozenset[int]) -> bool:
    """Whether a layout keeps some of the limits, all others lifted; memory that does not count is not weighed."""
    gone = [limit for number, limit in enumerate(limits) if number not in kept]
    answer = launchable if "memory" in {limit.name for limit in gone} else fits
    return any(answer(one) for one in lifted(scenario, gone))


def conflict_of(limits: tuple[Limit, ...], ask: Possible) -> Conflict:
    """The smallest set of limits that exclude each other, where all of them together do."""
    return smallest_conflict(len(limits), ask)


# Words


def gpus_words(count: int) -> str:
    """A number of GPUs.

    >>> gpus_words(1), gpus_words(2048)
    ('1 GPU', '2,048 GPUs')
    """
    return f"{count:,} GPU{'s' if count > 1 else ''}"


def pin_words(axis: str, values: tuple[int, ...]) -> str:
    """A pinned axis as people say it.

    >>> pin_words("recompute", (0,)), pin_words("tensor_parallel", (4, 8))
    ('no recompute', 'tensor parallel 4 or 8')
    """
    if axis == "recompute" and values == (0,):
        return "no recompute"
    return f"{AXIS_WORDS[axis]} {value_words(axis, values)}"


def value_words(axis: str, values: Iterable[int]) -> str:
    """Values of an axis: numbers, or words in place of indices; many of them as a range."""
    words = [WORDS[axis][value] if axis in WORDS else str(value) for value in values]
    return " or ".join(words) if len(words) <= 3 else f"one of {words[0]} to {words[-1]}"


def framework_words(framework: str) -> str:
    """The rules of a framework choice."""
    if framework == "any":
        return "launchable in Megatron-LM, torchtitan or DeepSpeed"
    return f"launchable in {FRAMEWORK_WORDS[framework]}"


def changes(old: Scenario, new: Scenario, layout: Layout) -> dict[str, str]:
    """What differs between two scenarios, by its key, in words; an axis that was freed takes its value from the layout."""
    before, after, words = old.job, new.job, dict[str, str]()
    if after.num_gpus != before.num_gpus:
        words["num_gpus"] = gpus_words(after.num_gpus)
    if after.gpu.name != before.gpu.name or after.gpu.memory_bytes != before.gpu.memory_bytes:
        words["memory"] = f"{after.gpu.name} ({after.gpu.memory_bytes / GIB:.0f} GiB)"
    if after.global_batch_size != before.global_batch_size:
        words["global_batch_size"] = f"{after.global_batch_size:,} sequences per step"
    if after.optimizer != before.optimizer:
        words["optimizer"] = "8-bit Adam" if after.optimizer == "adam-8bit" else after.optimizer
    if after.sequence_parallel != before.sequence_parallel:
        words["sequence_parallel"] = "sequence parallelism"
    for axis in old.choices.pins:
        if axis not in new.choices.pins:
            words[axis] = f"{AXIS_WORDS[axis]} {getattr(layout, axis)} instead of {value_words(axis, old.choices.pins[axis])}"
    if new.choices.tensor_across_nodes != old.choices.tensor_across_nodes:
        words["tensor_across_nodes"] = f"tensor groups of {layout.tensor_parallel} across nodes"
    if new.choices.max_pipeline_parallel != old.choices.max_pipeline_parallel:
        words["max_pipeline_parallel"] = f"a pipeline of {layout.pipeline_parallel} stages"
    if new.choices.pad_vocabulary != old.choices.pad_vocabulary:
        words["pad_vocabulary"] = "a padded vocabulary"
    if new.choices.min_context_tokens != old.choices.min_context_tokens:
        words["min_context_tokens"] = f"at least {new.choices.min_context_tokens} tokens per context rank"
    if new.choices.framework != old.choices.framework:
        words["framework"] = "any framework" if new.choices.framework == "any" else "physical rules alone"
    return words


# Repairs


def repairs_of(scenario: Scenario, limits: tuple[Limit, ...], conflict: Conflict, ask: Possible) -> tuple[Repair, ...]:
    """The nearest changes under which a search finds a layout: fewest changes first, then the shortest step."""
    if not conflict.members:
        return ()
    small = smallest_corrections(len(limits), conflict.members, ask, ENOUGH, most=2)
    corrections = small if len(small) >= ENOUGH else tuple(dict.fromkeys([*small, *sorted(conflict.corrections, key=len)]))
    tried = [repair for correction in corrections for repair in lifting(scenario, [limits[n] for n in sorted(correction)])]
    if "memory" in {limits[n].name for n in conflict.members}:
        more_gpus = any({limits[n].name for n in correction} == {"num_gpus"} for correction in corrections)
        tried += lighter(scenario, more_gpus, {repair.lifts for repair in tried})
    changed = [set(repair.words) for repair in tried]
    needed = [repair for repair, words in zip(tried, changed, strict=True) if not any(other < words for other in changed)]
    distinct = {repair.words: repair for repair in needed}
    ranked = sorted(distinct.values(), key=lambda repair: (len(repair.words), repair.best.verdict, repair.best.step_seconds))
    shown, rest = ranked[:MOST_REPAIRS], ranked[MOST_REPAIRS:]
    cut = [repair for repair in rest if repair.lifts == ("num_gpus",) and repair.fewest]
    return tuple([*shown[:-1], *cut] if cut else shown)  # the fewest GPUs are always told


def lifting(scenario: Scenario, limits: list[Limit]) -> list[Repair]:
    """Repairs that lift exactly some limits, each made concrete: a number of GPUs, a GPU, a batch, a value."""
    names = {limit.name for limit in limits}
    sized = {"memory", "num_gpus", "global_batch_size"}
    most = MOST_PARTS if "memory" in names else MOST_COUNTS if names & sized == {"num_gpus"} else 1
    for base in lifted(scenario, [limit for limit in limits if limit.name not in sized]):
        found_here: list[Repair] = []
        for one, fewest in concrete(base, names & sized):
            repair = verified(scenario, one, fewest)
            if repair is not None:
                found_here.append(repair)
            if len(found_here) == most:
                break
        if found_here:
            return found_here
    return []


def concrete(scenario: Scenario, sized: set[str]) -> Iterator[tuple[Scenario, Fewest | None]]:
    """A scenario with memory, GPUs or batch changed to something that exists and fits, nearest first."""
    if "memory" in sized:
        for part in larger_parts(scenario):
            yield from concrete(part, sized - {"memory"})
    elif "global_batch_size" in sized and "num_gpus" in sized:
        asked = scenario.job.num_gpus
        for count in sorted(gpu_counts(scenario, MOST_GPUS), key=lambda count: abs(count - asked)):
            yield from concrete(on_gpus(scenario, count), {"global_batch_size"})
    elif "num_gpus" in sized:
        yield from other_counts(scenario)
    elif "global_batch_size" in sized:
        yield from ((one, None) for one in nearest_batches(scenario))
    elif fits(scenario):
        yield scenario, None


def other_counts(scenario: Scenario) -> Iterator[tuple[Scenario, Fewest | None]]:
    """The fewest GPUs, and the fewest that leave a margin; where fewer than asked for would do, the nearest on either side."""
    asked, fewest = scenario.job.num_gpus, fewest_gpus(scenario, patience=PATIENCE)
    if not fewest.num_gpus:  # given up: a count that fits, yet perhaps not the fewest
        far = (on_gpus(scenario, count) for count in sorted(gpu_counts(scenario, MOST_GPUS)) if count > fewest.tried)
        near = next((one for one in far if fits(one)), None)
        if near is not None:
            yield near, fewest
        return
    if fewest.num_gpus < asked:
        counts = list(node_counts(scenario.job.cluster.gpus_per_node, 2 * asked + scenario.job.cluster.gpus_per_node))
        below = [count for count in reversed(counts) if fewest.num_gpus < count < asked][:MOST_TRIES]
        above = [count for count in counts if count > asked][:MOST_TRIES]
        for side in (below, above):
            near = next((one for one in (on_gpus(scenario, count) for count in side) if fits(one)), None)
            if near is not None:
                yield near, None
    yield fewest.scenario, fewest
    if fewest.num_gpus > asked and not fits(fewest.scenario, FITS):
        roomy = fewest_gpus(scenario, FITS, start=fewest.num_gpus + 1, patience=PATIENCE)
        if roomy.num_gpus:
            yield roomy.scenario, None


def nearest_batches(scenario: Scenario) -> Iterator[Scenario]:
    """The scenario with the global batches nearest to its own under which something fits."""
    asked, batch = scenario.job.global_batch_size, divisible_batch(scenario)
    if batch is None:
        return
    units: set[int] = set()
    for _, x, memory in weighed(with_batch(scenario, batch)):
        rounds = np.where(x.virtual_pipeline > 1, x.pipeline_parallel, 1) * np.where(x.schedule == DUALPIPE, 2, 1)
        units |= set(np.unique((x.data_parallel * x.micro_batch_size * rounds)[memory.verdict <= AT_RISK]).tolist())
    near = {multiple for unit in units for multiple in (asked // unit * unit, -(-asked // unit) * unit) if multiple}
    for multiple in sorted(near, key=lambda n: (abs(n - asked), n))[:MOST_TRIES]:
        one = with_batch(scenario, multiple)
        if fits(one):
            yield one
            return


def larger_parts(scenario: Scenario) -> list[Scenario]:
    """The scenario on GPUs of the catalogue with more memory: of the same maker, no older, no slower link, each a step larger."""
    job = scenario.job
    family = next((family for family in FAMILIES if job.gpu.generation in family), (job.gpu.generation,))

    def rank(gpu: Gpu) -> tuple[int, float, float, str]:
        return family.index(gpu.generation), gpu.memory_bytes, gpu.price_usd_per_hour, gpu.name

    newer = family[family.index(job.gpu.generation) :]
    parts = [gpu for gpu in load.records(Gpu) if gpu.generation in newer and gpu.link_bytes_per_s >= job.gpu.link_bytes_per_s]
    steps: list[Scenario] = []
    memory = job.gpu.memory_bytes
    for gpu in sorted(parts, key=rank):
        one = with_part(scenario, gpu) if gpu.memory_bytes >= LARGER * memory else None
        if one is not None:
            steps.append(one)
            memory = gpu.memory_bytes
    return steps


def with_part(scenario: Scenario, gpu: Gpu) -> Scenario | None:
    """The scenario on another GPU, in its usual server where the old one was in its own; None where it lacks the precision."""
    job = scenario.job
    usual = job.cluster == load.find(Cluster, job.gpu.default_cluster)
    try:
        changed = dataclasses.replace(
            job,
            gpu=gpu,
            generation=tuned(load.find(Generation, gpu.generation), scenario.profile),
            cluster=load.find(Cluster, gpu.default_cluster) if usual else job.cluster,
        )
    except InputError:
        return None
    price = gpu.price_usd_per_hour if scenario.price_usd_per_hour == job.gpu.price_usd_per_hour else scenario.price_usd_per_hour
    return dataclasses.replace(scenario, job=changed, price_usd_per_hour=price)


def lighter(scenario: Scenario, more_gpus: bool, known: set[tuple[str, ...]]) -> list[Repair]:
    """Repairs that are no limits lifted: fewer bytes of states, larger GPUs; with the fewest GPUs where they do not suffice alone."""
    job, options = scenario.job, list[Scenario]()
    if job.optimizer == "adam":
        options.append(dataclasses.replace(scenario, job=dataclasses.replace(job, optimizer="adam-8bit")))
    if not job.sequence_parallel:
        options.append(dataclasses.replace(scenario, job=dataclasses.replace(job, sequence_parallel=True)))
    if ("memory",) not in known:
        options += larger_parts(scenario)[:MOST_PARTS]
    found_here: list[Repair | None] = []
    for one in options:
        if fits(one):
            found_here.append(verified(scenario, one))
        elif more_gpus:
            fewest = fewest_gpus(one, patience=PATIENCE)
            if fewest.num_gpus:
                found_here.append(verified(scenario, fewest.scenario, fewest))
    return [repair for repair in found_here if repair is not None]


def verified(old: Scenario, new: Scenario, fewest: Fewest | None = None) -> Repair | None:
    """The change as a repair if a search finds a layout under it."""
    try:
        best = found(search(new))
    except (NoLayoutFits, InputError):
        return None
    words = changes(old, new, best.layout)
    return Repair(tuple(words), tuple(words.values()), best, fewest)


def found(result: SearchResult) -> Found:
    """The first layout of a search that found some."""
    first = result.ranked
    return Found(
        scenario=result.scenario,
        layout=first.layouts.layout(0),
        frameworks=tuple(framework_names(int(first.frameworks[0]))),
        verdict=int(first.verdict[0]),
        need_bytes=float(first.need_bytes[0]),
        step_seconds=float(first.step_seconds[0]),
    )


# What holds the best layout back


def binding(result: SearchResult) -> tuple[tuple[Gain, ...], tuple[str, ...]]:
    """What relaxing each limit by itself would buy, largest gain first; and the relaxations that would buy nothing."""
    old, gains, slack = found(result), list[Gain](), list[str]()
    for name, words, again in relaxations(result):
        try:
            best = found(again())
        except (NoLayoutFits, InputError):
            continue
        change = old.tokens_per_second / best.tokens_per_second - 1.0
        gain = Gain(name, words or changes(result.scenario, best.scenario, best.layout)[name], change, best)
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
        if limit.name not in ("memory", "num_gpus", "global_batch_size"):
            *_, widest = limit.lift(scenario)
            yield limit.name, "", partial(search, widest)


def with_wires(scenario: Scenario, **changed: float) -> Scenario:
    """The scenario with other bandwidths, bytes per second per GPU and direction."""
    cluster = dataclasses.replace(scenario.job.cluster, **changed)  # type: ignore[arg-type]
    return dataclasses.replace(scenario, job=dataclasses.replace(scenario.job, cluster=cluster))


def timed_again(result: SearchResult, scenario: Scenario) -> SearchResult:
    """The search under a scenario that changes bandwidths alone: the same layouts fit, so they are only timed anew."""
    ranked = result.ranked
    parts = []
    for number, job in jobs_by_framework(scenario).items():
        rows = np.flatnonzero(ranked.stack == number)
        if len(rows):
            parts.append(timed(job, ranked.take(rows)))
    again = concatenate(parts)
    return dataclasses.replace(result, scenario=scenario, ranked=again.take(order(scenario, again)))
