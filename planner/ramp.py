"""The batch ramp of a layout: equal increments up to the full batch, each size launchable, and what the small ones cost."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import takewhile

from planner import spec
from planner.cost.estimate import memory_of, time_of
from planner.frameworks.legality import REFUSED, assign, broken, framework_of
from planner.refine import costing_job
from planner.scenario import Scenario
from planner.units import SECONDS_PER_DAY
from solver import check
from solver.layout import Layout, columns_of, deepest_chunk, group_suits, micro_batch_group, num_micro_batches
from solver.problem import UNLIMITED_KIB

NUM_SIZES = 8
"""About so many sizes make a ramp, which starts at no less than this part of the batch.

Published starts: 1/4 (Llama 3 405B, 4M of 16M tokens), 1/5 (DeepSeek-V3, 3,072 of 15,360 sequences), 1/11 (BLOOM, 192 of 2,048).
"""

RAMP_SHARE = 0.03
"""Of the training tokens.

Published until the full batch: 3.2 % (DeepSeek-V3, 469B of 14.8T), 5.5 % (BLOOM, 20B of 366B), 1.3 to 4 % (GPT-3, 4B to 12B of
300B), 18 % (Llama 3 405B, 2.87T of 15.6T; half of it after 252M).
"""
RAMP_TOKENS = 20e9
"""BLOOM's, where the training tokens are not known."""

MOST_OFF = 256
"""Micro-batches by which an increment may miss an eighth of the batch: interleaved stages take them in multiples of the pipeline."""


@dataclass(frozen=True, kw_only=True)
class Ramp:
    """A batch that grows in equal increments, every size of it legal for one layout and its framework."""

    layout: Layout
    """The layout asked about, or the same under plain 1F1B where that one takes no smaller batch."""
    framework: str
    sizes: tuple[int, ...]
    """Sequences per step, ascending; the full batch is the last."""
    samples: int
    """Sequences until the full batch, shared evenly among the smaller sizes."""
    seq_len: int
    extra_seconds: float
    """Of uninterrupted training, over the same sequences at the full batch."""

    @property
    def start(self) -> int:
        """The first batch."""
        return self.sizes[0]

    @property
    def increment(self) -> int:
        """Sequences by which the batch grows at a time."""
        return self.sizes[1] - self.sizes[0]

    @property
    def tokens(self) -> int:
        """Tokens until the full batch."""
        return self.samples * self.seq_len

    @property
    def extra_days(self) -> float:
        """Days of uninterrupted training that the smaller batches cost."""
        return self.extra_seconds / SECONDS_PER_DAY

    @property
    def flag(self) -> str:
        """Megatron's way to say it; empty for other frameworks."""
        words = f"--rampup-batch-size {self.start} {self.increment} {self.samples}"
        return words if self.framework == "megatron" else ""


def ladder(full: int, unit: int, legal: Callable[[int], bool]) -> tuple[int, ...]:
    """Legal sizes in equal increments up to the full batch; empty where no smaller one is legal.

    The increment is the multiple of ``unit`` nearest to an eighth of the batch under which the next smaller size is
    legal; the sizes go down from the full batch while they are legal and no smaller than an eighth of it.

    >>> ladder(1024, 64, lambda size: True)
    (128, 256, 384, 512, 640, 768, 896, 1024)
    >>> ladder(1024, 64, lambda size: size % 256 == 0), ladder(1024, 512, lambda size: size > 512)
    ((256, 512, 768, 1024), ())
    """
    eighth = full // (NUM_SIZES * unit)
    counts = range(max(eighth - MOST_OFF, 1), min(eighth + MOST_OFF, full // unit))
    for count in sorted(counts, key=lambda count: (abs(NUM_SIZES * count * unit - full), -count)):
        downwards = range(full - count * unit, -(-full // NUM_SIZES) - 1, -count * unit)
        smaller = list(takewhile(legal, downwards))
        if smaller:
            return (*reversed(smaller), full)
    return ()


def ramp_of(scenario: Scenario, layout: Layout, tokens: float = 0.0) -> Ramp | None:
    """The ramp of a layout, over so many tokens (0: a published share); None where no smaller batch is legal."""
    tokens = tokens or RAMP_SHARE * scenario.training_tokens or RAMP_TOKENS
    samples = max(round(tokens / scenario.job.seq_len), 1)
    for own in candidates(scenario, layout):
        sizes = ladder(scenario.job.global_batch_size, own.data_parallel * own.micro_batch_size, legality(scenario, own))
        if sizes:
            return Ramp(
                layout=own,
                framework=framework_of(stack_of(scenario, own)),
                sizes=sizes,
                samples=samples,
                seq_len=scenario.job.seq_len,
                extra_seconds=ramp_seconds(scenario, own, sizes, samples) - ramp_seconds(scenario, layout, sizes[-1:], samples),
            )
    return None


def candidates(scenario: Scenario, layout: Layout) -> Iterator[Layout]:
    """The layout if it is legal, then the same under plain 1F1B if its framework runs that and the memory's verdict is no worse.

    Micro-batches that just fill interleaved stages leave no smaller batch; plain 1F1B takes any number of them.
    """
    if not legality(scenario, layout)(scenario.job.global_batch_size):
        return
    yield layout
    other = plain(scenario, layout)
    if other == layout or stack_of(scenario, other) != stack_of(scenario, layout):
        return
    if verdict_of(scenario, other) <= verdict_of(scenario, layout):
        yield other


def plain(scenario: Scenario, layout: Layout) -> Layout:
    """The layout under 1F1B with one chunk per stage; full recompute covers as many layers of a stage as before."""
    same = dataclasses.replace(layout, virtual_pipeline=1, schedule="1f1b")
    depth = min(layout.recompute_layers * layout.virtual_pipeline, deepest_chunk(same, scenario.job.model.num_layers))
    return dataclasses.replace(same, recompute_layers=depth)


def stack_of(scenario: Scenario, layout: Layout) -> int:
    """The number of the framework that runs a layout."""
    return int(assign(scenario, columns_of([layout]))[1][0])


def verdict_of(scenario: Scenario, layout: Layout) -> int:
    """The verdict on a layout's memory under its best split."""
    return int(memory_of(costing_job(scenario, layout)[0], columns_of([layout])).verdict[0])


def legality(scenario: Scenario, layout: Layout) -> Callable[[int], bool]:
    """Whether a layout obeys the solver's rules and its framework's with a batch; the memory is not asked: it grows with the batch."""
    problem = dataclasses.replace(spec.problem(scenario), usable_kib=UNLIMITED_KIB)
    number = stack_of(scenario, layout)
    framework = "none" if number == REFUSED else framework_of(number)
    job = scenario.job_in(framework)
    group = micro_batch_group(num_micro_batches(layout, job.global_batch_size), layout.pipeline_parallel)

    def legal(batch: int) -> bool:
        batches = num_micro_batches(layout, batch)
        if layout.schedule == "interleaved_1f1b" and not group_suits(group, batches, layout.pipeline_parallel):
            return False  # the group is set once, for every size of the ramp
        if number == REFUSED or check.broken_rules(layout, dataclasses.replace(problem, global_batch_size=batch)):
            return False
        return framework == "none" or not broken(dataclasses.replace(job, global_batch_size=batch), layout, framework)

    return legal


def ramp_seconds(scenario: Scenario, layout: Layout, sizes: tuple[int, ...], samples: int) -> float:
    """Seconds in which a layout trains so many sequences, shared evenly among the sizes below the last, or all at a single one.

    Source: Megatron-LM's RampupBatchsizeNumMicroBatchesCalculator, which shares the sequences so.
    """
    job, x = costing_job(scenario, layout)[0], columns_of([layout])
    smaller = sizes[:-1] or sizes
    steps = [float(time_of(dataclasses.replace(job, global_batch_size=size), x).total[0]) for size in smaller]
    return sum(samples / len(smaller) / size * seconds for size, seconds in zip(smaller, steps, strict=True))
