"""The advice on batch, learning rate, ramp and long context, in sentences that state what they assume, and as plain data for JSON."""

from __future__ import annotations

import dataclasses
from typing import Any

from planner.cost.memory import VERDICTS
from planner.costed import Costed
from planner.drivers import changes
from planner.long_context import LongPhase, attention_share
from planner.operations import Run
from planner.ramp import RAMP_SHARE, Ramp, ramp_of
from planner.report.plain import plain
from planner.report.words import duration, money_cell, short_label
from planner.scenario import Scenario
from planner.targets import stated
from planner.units import GIB, SECONDS_PER_DAY, nine_digits, three
from planner.workload import (
    BASE_BATCH_TOKENS,
    GRADIENT_NORM,
    WARM_UP_SHARES,
    WARM_UP_TOKENS,
    batch_guide,
    learning_rate,
    training_flops,
    warm_up_steps,
)
from solver.layout import Layout, num_micro_batches


def workload_lines(scenario: Scenario, layout: Layout | None = None) -> list[str]:
    """What holds for the batch whatever the layout, and the ramp of one."""
    lines = [batch_line(scenario), guide_line(scenario), rate_line(scenario), warm_up_line(scenario), clip_line()]
    return lines if layout is None else [*lines, ramp_line(scenario, layout, ramp_of(scenario, layout))]


def workload_json(scenario: Scenario, layout: Layout | None = None) -> dict[str, Any]:
    """The same as plain data; what needs the training tokens is null without them, the ramp where no smaller batch is legal."""
    guide, rate, steps = batch_guide(scenario), learning_rate(scenario), warm_up_steps(scenario)
    ramp = ramp_of(scenario, layout) if layout else None
    return {
        "global_batch_size": scenario.job.global_batch_size,
        "tokens_per_step": scenario.job.tokens_per_step,
        "batch_guide": plain(dataclasses.asdict(guide) | {"extra_tokens": guide.extra_tokens, "place": guide.place}) if guide else None,
        "learning_rate": plain({"peak": rate.peak, "rule": rate.rule.words, "factor": rate.factor, "base_tokens": BASE_BATCH_TOKENS}),
        "warm_up_steps": [nine_digits(count) for count in steps] if steps else None,
        "gradient_norm": GRADIENT_NORM,
        "ramp": ramp_json(ramp) if ramp else None,
    }


def amount(count: float) -> str:
    """A count of tokens in three digits.

    >>> amount(4_194_304), amount(1.4e12), amount(512)
    ('4.19M', '1.4T', '512')
    """
    for scale, letter in ((1e12, "T"), (1e9, "B"), (1e6, "M"), (1e3, "k")):
        if count >= 0.9995 * scale:
            return f"{count / scale:.3g}{letter}"
    return f"{count:.3g}"


def batch_line(scenario: Scenario) -> str:
    """The effective batch."""
    job = scenario.job
    return f"effective batch: {job.global_batch_size:,} sequences of {job.seq_len:,}, {amount(job.tokens_per_step)} tokens per step"


def guide_line(scenario: Scenario) -> str:
    """Where the batch lies between the optimal and the critical one, and what its size costs in tokens."""
    guide = batch_guide(scenario)
    if guide is None:
        return "batch guide: give --tokens for the optimal and the critical batch"
    return (
        f"batch guide: {amount(guide.batch_tokens)} is {guide.place} batch: optimal {amount(guide.optimal_tokens)}, critical "
        f"{amount(guide.critical_tokens)} tokens per step for {amount(scenario.training_tokens)} training tokens (Bergsma et al. 2025); "
        f"optimal by compute {amount(guide.compute_optimal_tokens)} (DeepSeek LLM 2024). The same loss takes {guide.extra_tokens:.0%} more "
        "tokens than with very small batches (1 + B / B_crit). Fits of small runs: guides, no laws"
    )


def rate_line(scenario: Scenario) -> str:
    """How to scale a known learning rate, and that of the fit."""
    rate = learning_rate(scenario)
    line = f"learning rate: from a run at {amount(BASE_BATCH_TOKENS)} tokens per step scale by {rate.rule.words} = {rate.factor:.2f}"
    line += f" ({rate.rule.grounds})"
    if rate.peak is None:
        return line
    spent = f"{training_flops(scenario):.1e} FLOPs"
    return f"{line}; by compute a peak of {rate.peak:.2g} for {spent} (DeepSeek LLM 2024; dense models, fitted to 2e19)"


def warm_up_line(scenario: Scenario) -> str:
    """How many steps the learning rate rises."""
    least, most = (f"{share * 100:g}" for share in WARM_UP_SHARES)
    published = f"published: Llama 3 405B 8,000 steps, DeepSeek-V3 2,000, GPT-3 and BLOOM {amount(WARM_UP_TOKENS)} tokens"
    steps = warm_up_steps(scenario)
    if steps is None:
        return f"warm-up: {least}-{most} % of the steps (give --tokens for the number); {published}"
    low, high = (max(round(count), 1) for count in steps)
    total = scenario.training_tokens / scenario.job.tokens_per_step
    return f"warm-up: {least}-{most} % of {total:,.0f} steps = {low:,} to {high:,} steps; {published}"


def clip_line() -> str:
    """Where to clip the gradient."""
    return f"clip the global gradient norm at {GRADIENT_NORM:.1f} (GPT-3, BLOOM, DeepSeek-V3)"


def ramp_line(scenario: Scenario, layout: Layout, ramp: Ramp | None) -> str:
    """The ramp of a layout, its cost and Megatron's flag; or that it has none."""
    count = num_micro_batches(layout, scenario.job.global_batch_size)
    fewest = f"no batch below {count:,} micro-batch{'es' if count > 1 else ''} per replica is legal for {short_label(layout)}"
    if ramp is None:
        return f"batch ramp: {fewest}"
    under = "" if ramp.layout == layout else f"{fewest}; under plain 1F1B "
    share = f"{RAMP_SHARE:.0%} of the training tokens, " if scenario.training_tokens else "BLOOM's "
    flag = f"; {ramp.flag} with --train-samples" if ramp.flag else ""
    more = "more" if ramp.extra_seconds >= 0 else "less"
    return (
        f"batch ramp: {under}{ramp.start:,} to {ramp.sizes[-1]:,} sequences by {ramp.increment:,}, every size legal, over {share}"
        f"{amount(ramp.tokens)} (assumed; published 1 to 18 %): {duration(abs(ramp.extra_seconds))} {more} than at the full batch{flag}"
    )


def ramp_json(ramp: Ramp) -> dict[str, Any]:
    """A ramp as plain data."""
    return {
        "layout": ramp.layout.label,
        "framework": ramp.framework,
        "sizes": list(ramp.sizes),
        "increment": ramp.increment,
        "samples": ramp.samples,
        "tokens": ramp.tokens,
        "extra_days": nine_digits(ramp.extra_days),
        "flag": ramp.flag,
    }


def long_phase_lines(phase: LongPhase) -> list[str]:
    """The phase, its layout against the first one's, its speed and its cost; or why there is none."""
    head = phase_line(phase)
    if phase.best is None:
        return [head, f"- no layout: {phase.reason}"]
    lines = [layout_line(phase, phase.best), speed_line(phase, phase.best), cost_line(phase), assumed_line(phase)]
    return [head, *(f"- {line}" for line in lines)]


def phase_line(phase: LongPhase) -> str:
    """How long, how many, for how many tokens."""
    job, first = phase.scenario.job, phase.first_scenario.job
    change = job.tokens_per_step / first.tokens_per_step - 1
    same = "as before" if not change else f"{change:+.1%}: no whole number of sequences gives the same"
    tokens = phase.scenario.training_tokens
    last = f" for {amount(tokens)} tokens" if tokens else ""
    share = (
        f", {tokens / phase.first_scenario.training_tokens:.1%} of the run, not in its total"
        if tokens and phase.first_scenario.training_tokens
        else ""
    )
    return (
        f"long context: {job.seq_len:,} after {first.seq_len:,}{last}{share}; {job.global_batch_size:,} sequences, "
        f"{amount(job.tokens_per_step)} tokens per step ({same})"
    )


def layout_line(phase: LongPhase, best: Costed) -> str:
    """The layout, its memory, and what changes."""
    changed = ", ".join(changes(phase.first.layout, best.layout)) or "nothing"
    usable = best.job.gpu.memory_bytes / GIB
    return (
        f"{short_label(best.layout)}, best of {phase.ranked:,}; {VERDICTS[best.verdict]}, {best.need_bytes / GIB:.1f} of {usable:.1f} GiB; "
        f"changed: {changed}"
    )


def speed_line(phase: LongPhase, best: Costed) -> str:
    """Step, throughput and MFU beside the first phase's."""
    first, share, first_share = phase.first, attention_share(phase.scenario), attention_share(phase.first_scenario)
    return (
        f"step {three(best.step_seconds)} s; {best.tokens_per_second:,.0f} tokens/s/GPU, {phase.speed:.0%} of the first phase's "
        f"{first.tokens_per_second:,.0f}; MFU {best.mfu:.1%} after {first.mfu:.1%}; attention {share:.0%} of the model FLOPs "
        f"after {first_share:.0%} (its full square)"
    )


def cost_line(phase: LongPhase) -> str:
    """Days and money, failures included, beside the same tokens in short sequences."""
    if not phase.scenario.training_tokens:
        return "give --tokens, or the phase's own, for days and money"
    short = phase.first_scenario.job.seq_len
    return f"{run_words(phase.run)}, failures included; the same tokens at {short:,}: {run_words(phase.short_run)}"


def run_words(run: Run) -> str:
    """Days and money of a run."""
    return f"{duration(float(run.total_days) * SECONDS_PER_DAY)} and ${money_cell(float(run.cost_usd))}"


def assumed_line(phase: LongPhase) -> str:
    """What the phase takes for granted."""
    framework = phase.scenario.choices.framework
    words = ["the physical rules alone" if framework == "none" else f"{framework} as in the first phase"]
    if stated(phase.first_scenario.choices):
        words.append("targets on days, money and speed not asked")
    if phase.freed:
        words.append(f"pins of {' and '.join(phase.freed)} dropped")
    positions = phase.scenario.job.model.max_seq_len
    if 0 < positions < phase.scenario.job.seq_len:
        words.append(f"positions beyond the model's {positions:,} rescaled")
    return "assumed: " + "; ".join([*words, "published phases took 5 % (Llama 3 405B) and 0.9 % (DeepSeek-V3) of the tokens"])


def long_phase_json(phase: LongPhase) -> dict[str, Any]:
    """The same as plain data."""
    job, best = phase.scenario.job, phase.best
    content: dict[str, Any] = {
        "seq_len": job.seq_len,
        "global_batch_size": job.global_batch_size,
        "training_tokens": phase.scenario.training_tokens,
        "framework": phase.scenario.choices.framework,
        "freed_pins": list(phase.freed),
        "layout": best.layout.label if best else None,
        "reason": phase.reason,
    }
    return content if best is None else content | plain(_figures(phase, best))


def _figures(phase: LongPhase, best: Costed) -> dict[str, Any]:
    run = plain(dataclasses.asdict(phase.run)) if phase.scenario.training_tokens else None
    return {
        "layers_per_stage": list(best.job.layers_per_stage),
        "step_seconds": best.step_seconds,
        "mfu": best.mfu,
        "memory_bytes": round(best.need_bytes),
        "verdict": VERDICTS[best.verdict],
        "tokens_per_second_per_gpu": best.tokens_per_second,
        "speed": phase.speed,
        "attention_share": attention_share(phase.scenario),
        "run": run,
    }
