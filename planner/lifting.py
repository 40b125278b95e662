"""The limits of a scenario that a user could lift, and which of them exclude each other.

All limits but some are lifted to ask whether these alone exclude every layout; :mod:`solver.conflict` finds the fewest that
do. A lifted limit never takes a layout away: where lifting changes more than the set of layouts (another stack, a larger
batch), the scenario as it was counts too.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from functools import partial

from planner.fewest import (
    divisible_batch,
    fits,
    launchable,
    on_gpus,
    with_batch,
)
from planner.frameworks import NAMES
from planner.scenario import Choices, Scenario
from planner.targets import TARGETS, stated, without
from planner.units import GIB
from solver.conflict import Conflict, Possible, smallest_conflict
from solver.layout import LABEL_ORDER, WORDS

MOST_GPUS = 4096
"""Up to here a lifted number of GPUs is tried, or up to four times the number asked for if that is more."""

UNLIMITED_BYTES = 1e14
"""More memory than any layout needs, the most that a GPU may state."""

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


@dataclass(frozen=True)
class Limit:
    """Something that a user could lift."""

    name: str
    """A key that stays: "memory", or the key of a scenario file."""
    words: str
    """With the user's numbers."""
    lift: Callable[[Scenario], Iterable[Scenario]]
    """The scenario in every way in which it may be lifted; at least one."""


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
    limits += [Limit(name, TARGETS[name].words(scenario), partial(_without_target, name=name)) for name in stated(choices)]
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


def _without_target(scenario: Scenario, name: str) -> list[Scenario]:
    return [without(scenario, name)]


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
    untimed = set(stated(scenario.choices)) <= {limit.name for limit in gone}
    answer = launchable if untimed and "memory" in {limit.name for limit in gone} else fits
    return any(answer(one) for one in lifted(scenario, gone))


def conflict_of(limits: tuple[Limit, ...], ask: Possible) -> Conflict:
    """The smallest set of limits that exclude each other, where all of them together do."""
    return smallest_conflict(len(limits), ask)


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
    return f"launchable in {NAMES[framework]}"
