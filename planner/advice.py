"""The checklist: what an experienced engineer would flag on a layout, each check named, with its threshold."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from planner.cost import parameters
from planner.cost.memory import VERDICTS
from planner.scenario import Scenario
from planner.workload import USUAL_CRITICAL_TOKENS, critical_tokens
from solver.layout import Layout


@dataclass(frozen=True)
class Facts:
    """What the checks read of one layout."""

    scenario: Scenario
    layout: Layout
    headroom: float
    """Share of the usable memory left free."""
    verdict: int
    communication: float
    """Exposed communication over compute."""
    bubble: float
    """Share of the step."""
    mfu: float
    num_micro_batches: int
    need_without_recompute: float
    """Share of usable memory that the layout would need without recompute."""
    launch: float
    """Share of the step in which the GPU waits for kernel launches."""


@dataclass(frozen=True)
class Check:
    """A red flag: a name, its threshold in words, and the finding (None = nothing to flag)."""

    name: str
    threshold: str
    finding: Callable[[Facts], str | None]


LEAST_HEADROOM, MOST_COMMUNICATION, MOST_BUBBLE, MOST_LAUNCH = 0.10, 0.20, 0.15, 0.10
LEAST_MFU, ROOMY = 0.30, 0.85
MOST_STAGES, LEAST_TOKENS = 32, 4096
LARGE_PARAMS, HEAD_MULTIPLE = 13e9, 8
"""What the checks compare with and their thresholds state."""


def headroom(facts: Facts) -> str | None:
    if facts.headroom < LEAST_HEADROOM:
        return f"{facts.headroom:.1%} of the memory is free; verdict: {VERDICTS[facts.verdict]}"
    return None


def communication(facts: Facts) -> str | None:
    return f"exposed communication is {facts.communication:.0%} of compute" if facts.communication > MOST_COMMUNICATION else None


def bubble(facts: Facts) -> str | None:
    if facts.bubble > MOST_BUBBLE:
        return f"the pipeline idles {facts.bubble:.0%} of the step; more micro-batches or virtual stages shrink it"
    return None


def tensor_across_nodes(facts: Facts) -> str | None:
    domain = facts.scenario.job.fast_domain
    if facts.layout.tensor_parallel > domain or domain % facts.layout.tensor_parallel:
        return f"tensor_parallel = {facts.layout.tensor_parallel} leaves the {domain} GPUs of a node"
    return None


def deep_pipeline(facts: Facts) -> str | None:
    return f"{facts.layout.pipeline_parallel} stages" if facts.layout.pipeline_parallel > MOST_STAGES else None


def few_micro_batches(facts: Facts) -> str | None:
    if facts.num_micro_batches < facts.layout.pipeline_parallel:
        return f"{facts.num_micro_batches} micro-batches for {facts.layout.pipeline_parallel} stages: some stages always idle"
    return None


def large_batch(facts: Facts) -> str | None:
    tokens, critical = facts.scenario.job.tokens_per_step, critical_tokens(facts.scenario)
    if tokens > critical:
        return f"{tokens / 1e6:.1f}M tokens per step may be beyond the critical batch, about {critical / 1e6:.3g}M"
    return None


def low_utilisation(facts: Facts) -> str | None:
    return f"MFU is {facts.mfu:.0%}" if facts.mfu < LEAST_MFU else None


def recompute_missing(facts: Facts) -> str | None:
    big = parameters.total(facts.scenario.job.model) > LARGE_PARAMS
    if big and facts.layout.recompute == "none" and facts.headroom < LEAST_HEADROOM:
        return "no recompute although memory is short"
    return None


def thin_steps(facts: Facts) -> str | None:
    tokens = facts.scenario.job.rank_tokens(facts.layout)
    if facts.num_micro_batches == 1 and tokens < LEAST_TOKENS:
        return f"one micro-batch of {tokens:.0f} tokens per GPU: communication has little to hide behind"
    return None


def lonely_shards(facts: Facts) -> str | None:
    if facts.layout.zero_stage > 0 and facts.layout.data_parallel * facts.layout.context_parallel == 1:
        return f"zero_stage = {facts.layout.zero_stage} with one replica shards nothing"
    return None


def needless_recompute(facts: Facts) -> str | None:
    if facts.layout.recompute != "none" and facts.need_without_recompute < ROOMY:
        return f"without recompute it would need {facts.need_without_recompute:.0%} of the memory"
    return None


def padded_vocabulary(facts: Facts) -> str | None:
    job, t = facts.scenario.job, facts.layout.tensor_parallel
    padded = int(parameters.padded_vocabulary(job.model, t, job.software.vocab_multiple))
    return f"the vocabulary grows from {job.model.vocab_size} to {padded}" if padded != job.model.vocab_size else None


def launch_bound(facts: Facts) -> str | None:
    if facts.launch > MOST_LAUNCH:
        return f"the GPU waits for kernel launches {facts.launch:.0%} of the step: a larger micro-batch is nearly free"
    return None


def misaligned_heads(facts: Facts) -> str | None:
    dim = facts.scenario.job.model.head_dim
    if dim % HEAD_MULTIPLE:
        return f"head_dim = {dim} is no multiple of {HEAD_MULTIPLE}: attention products run several times slower"
    return None


CHECKS: tuple[Check, ...] = (
    Check("headroom", f"under {LEAST_HEADROOM * 100:g} % of usable memory", headroom),
    Check("communication", f"exposed above {MOST_COMMUNICATION * 100:g} % of compute", communication),
    Check("bubble", f"above {MOST_BUBBLE * 100:g} % of the step", bubble),
    Check("tensor parallel across nodes", "group leaves the fast domain", tensor_across_nodes),
    Check("deep pipeline", f"more than {MOST_STAGES} stages", deep_pipeline),
    Check("few micro-batches", "fewer than stages", few_micro_batches),
    Check(
        "large batch",
        f"beyond the critical batch, {USUAL_CRITICAL_TOKENS / 1e6:g}M tokens per step where the training tokens are not given",
        large_batch,
    ),
    Check("low utilisation", f"MFU below {LEAST_MFU * 100:g} %", low_utilisation),
    Check("recompute missing", f"none above {LARGE_PARAMS / 1e9:g}B when headroom is under {LEAST_HEADROOM * 100:g} %", recompute_missing),
    Check("thin steps", f"gradient accumulation 1 and under {LEAST_TOKENS:,} tokens per GPU", thin_steps),
    Check("sharding without replicas", "zero_stage > 0 with one replica", lonely_shards),
    Check("needless recompute", f"would fit in {ROOMY * 100:g} % without", needless_recompute),
    Check("padded vocabulary", "vocabulary rounded up for the tensor group", padded_vocabulary),
    Check("launch-bound", f"waiting for launches above {MOST_LAUNCH * 100:g} % of the step", launch_bound),
    Check("misaligned heads", f"head size no multiple of {HEAD_MULTIPLE}", misaligned_heads),
)


def flags(facts: Facts) -> dict[str, str]:
    """The findings of all checks that fire, by name."""
    found = {check.name: check.finding(facts) for check in CHECKS}
    return {name: finding for name, finding in found.items() if finding}
