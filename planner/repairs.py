"""The nearest changes under which a search finds a layout where it found none, each verified by a search."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import islice

import numpy as np

from planner.catalogue import load
from planner.catalogue.schema import Cluster, Generation, Gpu
from planner.cost.memory import AT_RISK, FITS
from planner.errors import InputError, NoLayoutFits
from planner.fewest import (
    Fewest,
    divisible_batch,
    fewest_gpus,
    fits,
    node_counts,
    on_gpus,
    weighed,
    with_batch,
)
from planner.frameworks.legality import framework_names, jobs_by_framework
from planner.lifting import (
    AXIS_WORDS,
    MOST_GPUS,
    Limit,
    gpu_counts,
    gpus_words,
    lifted,
    value_words,
)
from planner.profile import tuned
from planner.refine import evenly, shortlist_of
from planner.scenario import Job, Scenario
from planner.search import SearchResult, search
from planner.targets import TARGETS, attained, longest_steps, stated
from planner.units import GIB
from solver.conflict import Conflict, Possible, smallest_corrections
from solver.layout import DUALPIPE, Layout

PATIENCE = 1 << 20
"""Layouts weighed in vain before the fewest GPUs of one repair are given up."""

ENOUGH, MOST_REPAIRS, MOST_PARTS, MOST_COUNTS, MOST_TRIES = 3, 6, 2, 3, 48
"""Corrections sought at least, repairs shown, larger GPUs and numbers of GPUs proposed, counts tried beside the one asked for."""

FAMILIES = (
    ("volta", "ampere", "ada", "hopper", "blackwell", "blackwell-gb200", "blackwell-gb300"),
    ("cdna3", "cdna4"),
)
"""Generations of one maker, oldest first."""

LARGER = 1.25
"""A GPU is a repair when it has so much more memory than the one before it."""


@dataclass(frozen=True)
class Found:
    """The best layout of a search, as a page states it."""

    scenario: Scenario
    job: Job
    """Under the stack that the layout is costed with."""
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


def changes(old: Scenario, best: Found) -> dict[str, str]:
    """What differs between a scenario and that of a layout found, by its key, in words; what was freed takes its value from the layout."""
    new, layout = best.scenario, best.layout
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
    for name in stated(old.choices):
        if not getattr(new.choices, name) and not still_met(old, name, best):
            words[name] = f"{attained(new, name, best.job, best.step_seconds)} instead of {TARGETS[name].words(old)}"
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


def still_met(old: Scenario, name: str, best: Found) -> bool:
    """Whether a layout found without a target meets it all the same."""
    asked = dataclasses.replace(best.scenario, choices=old.choices)
    return best.step_seconds <= longest_steps(asked, best.job)[name]


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
    if stated(scenario.choices):
        newer = (verified(scenario, part) for part in newer_parts(scenario) if fits(part))
        tried += islice(filter(None, newer), MOST_PARTS)
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


def family_of(gpu: Gpu) -> tuple[str, ...]:
    """The generations of a GPU's maker, oldest first."""
    return next((family for family in FAMILIES if gpu.generation in family), (gpu.generation,))


def no_older(gpu: Gpu) -> list[Gpu]:
    """GPUs of the same maker, of the same generation or a later one, with no slower a link."""
    family = family_of(gpu)
    newer = family[family.index(gpu.generation) :]
    return [one for one in load.records(Gpu) if one.generation in newer and one.link_bytes_per_s >= gpu.link_bytes_per_s]


def larger_parts(scenario: Scenario) -> list[Scenario]:
    """The scenario on GPUs of the catalogue with more memory: of the same maker, no older, no slower link, each a step larger."""
    family, memory = family_of(scenario.job.gpu), scenario.job.gpu.memory_bytes

    def rank(gpu: Gpu) -> tuple[int, float, float, str]:
        return family.index(gpu.generation), gpu.memory_bytes, gpu.price_usd_per_hour, gpu.name

    steps: list[Scenario] = []
    for gpu in sorted(no_older(scenario.job.gpu), key=rank):
        one = with_part(scenario, gpu) if gpu.memory_bytes >= LARGER * memory else None
        if one is not None:
            steps.append(one)
            memory = gpu.memory_bytes
    return steps


def newer_parts(scenario: Scenario) -> list[Scenario]:
    """The scenario on GPUs of the same maker and a later generation, cheapest per hour first."""
    parts = [gpu for gpu in no_older(scenario.job.gpu) if gpu.generation != scenario.job.gpu.generation]
    found_here = [with_part(scenario, gpu) for gpu in sorted(parts, key=lambda gpu: (gpu.price_usd_per_hour, gpu.name))]
    return [one for one in found_here if one is not None]


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
        best = found(search(new), uneven=bool(stated(old.choices)))
    except (NoLayoutFits, InputError):
        return None
    words = changes(old, best)
    return Repair(tuple(words), tuple(words.values()), best, fewest)


def found(result: SearchResult, *, uneven: bool = False) -> Found:
    """The first layout of a search that found some, under the even split unless a target, or the caller, needs the best one."""
    split = uneven or stated(result.scenario.choices)
    first = (shortlist_of if split else evenly)(result, 1).rows
    if not len(first):
        raise NoLayoutFits(result)
    return Found(
        scenario=result.scenario,
        job=jobs_by_framework(result.scenario)[int(first.stack[0])],
        layout=first.layouts.layout(0),
        frameworks=tuple(framework_names(int(first.frameworks[0]))),
        verdict=int(first.verdict[0]),
        need_bytes=float(first.need_bytes[0]),
        step_seconds=float(first.step_seconds[0]),
    )
