"""Why nothing fits, or what holds the best layout back: as a page, and as plain data for JSON."""

from __future__ import annotations

import json
from typing import Any

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from planner.cost.memory import VERDICTS
from planner.fewest import Fewest
from planner.repairs import Found, Repair, found
from planner.report.formats import scenario_json
from planner.report.text import SHORT_VERDICT, STYLE, no_layout_lines, scenario_line
from planner.report.words import short_label
from planner.targets import attained, stated
from planner.units import GIB, four, nine_digits
from planner.why import Gain, Why


def why_page(answer: Why) -> RenderableType:
    """The whole answer on one page of 100 columns."""
    return _feasible(answer) if answer.feasible else _infeasible(answer)


def _infeasible(answer: Why) -> RenderableType:
    """The books, the limits that exclude each other, the repairs, and the proof of the fewest GPUs."""
    head = no_layout_lines(answer.result) if answer.result else [scenario_line(answer.scenario), "no layout fits."]
    parts: list[RenderableType] = [Text(line) for line in head]
    parts += [Text(""), *(Text(line) for line in conflict_lines(answer)), Text("")]
    if answer.repairs:
        parts += [Text("repairs, each verified by a search:", style="bold"), repairs_table(answer.repairs, stated(answer.scenario.choices))]
        hours = "" if stated(answer.scenario.choices) else "GPU-h/Bt: GPU-hours per billion tokens. "
        parts.append(Text(f"{hours}*: the fewest GPUs, exactly.", style="dim"))
    else:
        parts.append(Text("no repair was found among more GPUs, larger ones, lighter states, other batches and the limits above"))
    if answer.fewest:
        parts += [Text(""), *(Text(line) for line in fewest_lines(answer))]
    return Group(*parts)


def conflict_lines(answer: Why) -> list[str]:
    """The limits that exclude each other, one per line."""
    if not answer.conflict:
        return ["the model's own shape excludes every layout; no limit would help if lifted"]
    kept = " (the type of GPU and the frameworks' rules kept)" if stated(answer.scenario.choices) else ""
    if len(answer.conflict) == 1:
        return [f"one limit alone excludes every layout, even with all others lifted{kept}: {answer.conflict[0].words}"]
    lines = [f"these limits exclude each other, even with all others lifted{kept}; any one of them less, and there is a layout:"]
    return lines + [f"  - {limit.words}" for limit in answer.conflict]


def repairs_table(repairs: tuple[Repair, ...], targets: list[str]) -> Table:
    """One row per repair: the change, its cost in time, what it comes to where targets were missed, and the best layout under it."""
    table = _table("change", "step s", *(["comes to"] if targets else ["GPU-h/Bt"]), "GiB", "", "best layout")
    for repair in repairs:
        best = repair.best
        verdict = VERDICTS[best.verdict]
        words = [
            f"{word}*" if name == "num_gpus" and repair.fewest else word for name, word in zip(repair.lifts, repair.words, strict=True)
        ]
        table.add_row(
            ", ".join(words),
            four(best.step_seconds),
            ", ".join(attained(best.scenario, name, best.job, best.step_seconds) for name in targets)
            or hours_cell(best.gpu_hours_per_billion_tokens),
            f"{best.need_bytes / GIB:.1f}",
            Text(SHORT_VERDICT[verdict], style=STYLE[verdict]),
            short_label(best.layout),
        )
    return table


def hours_cell(hours: float) -> str:
    """Hours in four digits, or whole.

    >>> hours_cell(27.8234), hours_cell(13874.2)
    ('27.82', '13,874')
    """
    return f"{hours:,.0f}" if hours >= 1000 else four(hours)


def fewest_lines(answer: Why) -> list[str]:
    """The proof that no fewer GPUs will do."""
    assert answer.fewest is not None
    fewest, fewer = answer.fewest, answer.fewer
    if not fewest.num_gpus:
        return [f"fewest GPUs: none up to {fewest.tried:,}; the search for them gave up there, so fewer than shown may do"]
    margin = [r.best.scenario.job.num_gpus for r in answer.repairs if r.lifts == ("num_gpus",) and r.fewest is None]
    roomy = f", {margin[0]:,} for a layout that fits with a margin" if fewest.num_gpus > answer.scenario.job.num_gpus and margin else ""
    risky = " (at risk: near or above the limit, it may still run)" if margin else ""
    words = f"fewest GPUs: {fewest.num_gpus:,}{risky}{roomy}; below {fewest.least:,} not even the states fit, "
    lines = [words + "every count from there was tried"]
    return [*lines, f"{fewer.num_gpus:,} fail: {fewer.words}"] if fewer else lines


def _feasible(answer: Why) -> RenderableType:
    """The best layout, and what relaxing each limit by itself would buy."""
    assert answer.result is not None
    best = found(answer.result)
    usable, word = answer.scenario.job.gpu.memory_bytes / GIB, VERDICTS[best.verdict]
    parts: list[RenderableType] = [
        Text(scenario_line(answer.scenario)),
        Text(
            f"best: {best.layout.label}, step {four(best.step_seconds)} s, {best.need_bytes / GIB:.1f} of {usable:.1f} GiB: {word}",
            style=STYLE[word],
        ),
        Text(""),
    ]
    if answer.gains:
        parts += [Text("binding limits: what relaxing one at a time would buy", style="bold"), gains_table(answer.gains, best)]
        splits = "The best splits that meet the targets." if stated(answer.scenario.choices) else "Stages split evenly."
        parts.append(Text(f"time: change of the seconds per token. {splits}", style="dim"))
    else:
        parts.append(Text("no limit binds: relaxing any one of them buys nothing"))
    if answer.slack:
        parts.append(Text(f"no gain from: {'; '.join(answer.slack)}"))
    return Group(*parts)


def gains_table(gains: tuple[Gain, ...], old: Found) -> Table:
    """One row per limit: what relaxing it buys, and the best layout then."""
    table = _table("relaxed", "time", "step s", "", "best layout then")
    for gain in gains:
        word = VERDICTS[gain.best.verdict]
        same = gain.best.layout == old.layout
        table.add_row(
            gain.words,
            f"{gain.change * 100:+.1f} %",
            four(gain.best.step_seconds),
            Text(SHORT_VERDICT[word], style=STYLE[word]),
            "the same" if same else short_label(gain.best.layout),
        )
    return table


def _table(*heads: str) -> Table:
    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0), header_style="bold underline")
    for head in heads:
        wide = head in ("change", "relaxed") or "layout" in head
        table.add_column(
            head,
            justify="left" if wide or not head else "right",
            overflow="fold",
            no_wrap="layout" in head or not wide,  # a label is copied whole
            min_width=20 if wide else None,
        )
    return table


def why_json(answer: Why) -> dict[str, Any]:
    """The whole answer as plain data, base units."""
    return {
        "scenario": scenario_json(answer.scenario),
        "feasible": answer.feasible,
        "best": _found_json(found(answer.result)) if answer.result is not None and answer.feasible else None,
        **diagnosis_json(answer),
        "gains": [
            {"limit": gain.name, "words": gain.words, "time_change": nine_digits(gain.change), **_found_json(gain.best)}
            for gain in answer.gains
        ],
        "no_gain": list(answer.slack),
    }


def diagnosed(text: str, answer: Why | None) -> str:
    """The JSON of a search, with the diagnosis where it found nothing."""
    return text if answer is None else json.dumps(json.loads(text) | diagnosis_json(answer), indent=1) + "\n"


def diagnosis_json(answer: Why) -> dict[str, Any]:
    """Conflict, repairs and the fewest GPUs; empty where something fits."""
    return {
        "conflict": [{"limit": limit.name, "words": limit.words} for limit in answer.conflict],
        "repairs": [
            {"limits": list(repair.lifts), "words": list(repair.words), "fewest": repair.exact, **_found_json(repair.best)}
            for repair in answer.repairs
        ],
        "fewest_gpus": _fewest_json(answer.fewest, answer),
    }


def _fewest_json(fewest: Fewest | None, answer: Why) -> dict[str, Any] | None:
    if fewest is None:
        return None
    fewer = answer.fewer
    below = {"num_gpus": fewer.num_gpus, "reason": fewer.reason, "words": fewer.words} if fewer else None
    return {"num_gpus": fewest.num_gpus or None, "none_up_to": fewest.before, "lower_bound": fewest.least, "one_fewer": below}


def _found_json(best: Found) -> dict[str, Any]:
    job = best.scenario.job
    return {
        "gpu": job.gpu.name,
        "num_gpus": job.num_gpus,
        "global_batch_size": job.global_batch_size,
        "layout": best.layout.label,
        "frameworks": list(best.frameworks),
        "verdict": VERDICTS[best.verdict],
        "need_bytes": round(best.need_bytes),
        "step_seconds": nine_digits(best.step_seconds),
        "tokens_per_second": nine_digits(best.tokens_per_second),
        "gpu_hours_per_billion_tokens": nine_digits(best.gpu_hours_per_billion_tokens),
    }
