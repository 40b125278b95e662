"""The long-context phase of a run: a second search with longer sequences, its best layout, and what it costs."""

from __future__ import annotations

import dataclasses
import math
from dataclasses import dataclass

from planner.cost import flops
from planner.costed import Costed, costed
from planner.errors import InputError
from planner.frameworks.legality import REFUSED, assign, framework_of
from planner.operations import Run, run_under
from planner.refine import costing_job, shortlist_of
from planner.request import parse_count
from planner.scenario import Scenario
from planner.search import Progress, SearchResult, nearest_refused, searched
from planner.targets import untargeted
from planner.units import GIB
from solver.layout import Layout, columns_of

LONG_SHARE = 0.05
"""Of the training tokens. Source: Llama 3 405B (arXiv 2407.21783, section 3.4.2), about 800B of 15.6T in six stages to 128k."""

FREED = ("context_parallel", "data_parallel")
"""Pins of the first phase that the second does not keep: the longer sequence sets the one, what it leaves the other."""

NEARBY = 0.1
"""Share by which the tokens per step may change where the longer sequence does not divide them."""


@dataclass(frozen=True, kw_only=True)
class LongPhase:
    """The phase with long sequences beside the first one."""

    scenario: Scenario
    """Of the phase: its sequences, its batch, its tokens, the framework of the first layout."""
    first_scenario: Scenario
    first: Costed
    """The layout of the first phase."""
    best: Costed | None
    """The best layout of the phase; None where there is none."""
    reason: str = ""
    """Why there is none."""
    ranked: int = 0
    """Layouts among which it is the best."""
    freed: tuple[str, ...] = ()
    """Axes whose pins were dropped."""

    @property
    def run(self) -> Run:
        """Days and money of the phase, failures included; zero without tokens. There must be a best layout."""
        assert self.best is not None
        return run_under(self.scenario, self.best.job, self.best.step_seconds)

    @property
    def short_run(self) -> Run:
        """The same tokens in the first phase's sequences and layout."""
        scenario = dataclasses.replace(self.first_scenario, training_tokens=self.scenario.training_tokens)
        return run_under(scenario, self.first.job, self.first.step_seconds)

    @property
    def speed(self) -> float:
        """Tokens per second over those of the first phase. There must be a best layout."""
        assert self.best is not None
        return self.best.tokens_per_second / self.first.tokens_per_second


def attention_share(scenario: Scenario) -> float:
    """Attention's share of the model FLOPs of a token, its full square counted as in an MFU."""
    model, seq_len = scenario.job.model, scenario.job.seq_len
    return flops.attention_flops_per_token(model, seq_len) / flops.model_flops_per_token(model, seq_len)


def read_phase(text: str) -> tuple[int, float]:
    """Sequence length, and tokens or 0, of SEQ[:TOKENS]; k after a length is 1,024. Raises InputError.

    >>> read_phase("128k"), read_phase("32768:100B")
    ((131072, 0.0), (32768, 100000000000.0))
    """
    length, colon, tokens = text.strip().lower().partition(":")
    unit = 1024 if length.endswith("k") else 1
    seq_len = parse_count(length.removesuffix("k"), "long context") * unit
    if not seq_len.is_integer():
        raise InputError(f"long context = '{text}': {length} is no whole number of tokens")
    return int(seq_len), parse_count(tokens, "long context tokens") if colon else 0.0


def batch_near(tokens_per_step: int, seq_len: int, num_gpus: int) -> int:
    """Sequences of another length for the same tokens per step.

    Where they do not divide: of the numbers within a tenth, or the next two, the one that shares most with the GPUs.

    >>> batch_near(1 << 22, 131072, 2048), batch_near(4_096_000, 131072, 2048), batch_near(4096, 131072, 8)
    (32, 32, 1)
    """
    exact = tokens_per_step / seq_len
    if exact.is_integer():
        return int(exact)
    least = min(math.floor(exact), math.ceil(exact * (1 - NEARBY)))
    most = max(math.ceil(exact), math.floor(exact * (1 + NEARBY)))
    return max(range(max(least, 1), most + 1), key=lambda batch: (math.gcd(batch, num_gpus), -abs(batch - exact)))


def phase_scenario(scenario: Scenario, framework: str, seq_len: int, tokens: float) -> Scenario:
    """The scenario of the phase: longer sequences, the same tokens per step, the framework and the other pins kept.

    Targets on days, money and speed are the first phase's: they are dropped.
    """
    job = scenario.job
    batch = batch_near(job.tokens_per_step, seq_len, job.num_gpus)
    choices = untargeted(scenario).choices
    pins = {axis: values for axis, values in choices.pins.items() if axis not in FREED}
    return dataclasses.replace(
        scenario,
        name=f"{scenario.name}-{seq_len}",
        job=dataclasses.replace(job, seq_len=seq_len, global_batch_size=batch),
        choices=dataclasses.replace(choices, framework=framework, pins=pins),
        training_tokens=tokens or LONG_SHARE * scenario.training_tokens,
    )


def long_phase(scenario: Scenario, layout: Layout, *, seq_len: int, tokens: float = 0.0, progress: Progress | None = None) -> LongPhase:
    """The phase after a first one in ``layout``: longer sequences, for so many tokens (0: a published share of the run's).

    A run keeps its framework, so the second search asks that of the first layout. Raises InputError for a sequence
    that is no longer than the first phase's.
    """
    if seq_len <= scenario.job.seq_len:
        raise InputError(f"long context = {seq_len} must be longer than workload.seq_len = {scenario.job.seq_len}")
    number = int(assign(scenario, columns_of([layout]))[1][0])
    framework = scenario.choices.framework if number == REFUSED else framework_of(number)
    phase = LongPhase(
        scenario=phase_scenario(scenario, framework, seq_len, tokens),
        first_scenario=scenario,
        first=costed(costing_job(scenario, layout)[0], layout),
        best=None,
        freed=tuple(axis for axis in FREED if axis in scenario.choices.pins),
    )
    positions = scenario.job.model.learned_positions
    if positions and seq_len > positions:
        return dataclasses.replace(phase, reason=f"{scenario.job.model.name} has {positions:,} learned positions")
    return with_best(phase, progress)


def with_best(phase: LongPhase, progress: Progress | None = None) -> LongPhase:
    """The phase with the best layout of its own search, or the reason why there is none."""
    try:
        result = searched(phase.scenario, progress=progress)
    except InputError as refused:
        return dataclasses.replace(phase, reason=str(refused))
    shortlist = shortlist_of(result, 1)
    if not len(shortlist.rows):
        return dataclasses.replace(phase, reason=nearest_words(result))
    best = costed(shortlist.job(phase.scenario, 0), shortlist.rows.layouts.layout(0))
    return dataclasses.replace(phase, best=best, ranked=len(result.ranked))


def nearest_words(result: SearchResult) -> str:
    """The layout that came nearest to fitting, and what it lacks."""
    if result.nearest:
        need, usable = result.nearest.need_bytes / GIB, result.scenario.job.gpu.memory_bytes / GIB
        return f"the nearest layout, {result.nearest.layout.label}, needs {need:.1f} of {usable:.1f} GiB"
    refused = nearest_refused(result.problem)
    return f"{refused[0].label} is refused: {refused[1]}" if refused else "no framework accepts any layout"
