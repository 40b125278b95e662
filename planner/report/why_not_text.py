"""The answer to "why not mine": as a page, and as plain data for JSON."""

from __future__ import annotations

from typing import Any

from rich.console import Group, RenderableType
from rich.text import Text

from planner.cost.memory import VERDICTS
from planner.difference import main_cause
from planner.report.difference_text import MEANING, cause_texts, difference_json, step_parts_table
from planner.report.ledger import ledger_json
from planner.report.text import STYLE, illegal_lines, scenario_line
from planner.units import GIB, four, nine_digits, three
from planner.why_not import Nearby, WhyNot

MOST_PARTS = 4
"""Parts of a memory that is too large which the page names."""


def why_not_page(found: WhyNot) -> RenderableType:
    """The whole answer on one page of 100 columns."""
    parts: list[RenderableType] = [Text(scenario_line(found.scenario)), Text(f"layout {found.layout.label}"), Text("")]
    parts += [Text(f"the pins exclude it: {line}", style="yellow") for line in found.outside_pins]
    if found.feasible:
        parts += feasible_texts(found)
        if found.rank != 1 and found.difference is not None:
            parts += [Text(""), step_parts_table(found.difference, "first", "this")]
    elif found.legal:
        parts += _out_of_memory(found)
    else:
        parts += _illegal(found)
    return Group(*parts)


def _illegal(found: WhyNot) -> list[RenderableType]:
    """Rules with their numbers, legal values and refusals; the nearest layout that works; what it would cost if it were legal."""
    lines: list[RenderableType] = [Text("not legal:", style="red")]
    lines += [Text(line) for line in illegal_lines(found.explanation)]
    lines += [Text(""), *nearest_texts(found, "the nearest legal layout")]
    if found.difference is not None and found.winner is not None:
        mine = found.difference.b
        lines.append(
            Text(
                f"if it were legal: step {four(mine.step_seconds)} s, {_than_winner(found)}; "
                f"{_gib(mine.need_bytes, found)}: {VERDICTS[mine.verdict]}"
            )
        )
        if found.difference.seconds > 0:
            lines.append(Text(main_cause(found.difference)))
    return lines


def _out_of_memory(found: WhyNot) -> list[RenderableType]:
    """How much is lacking where, and the nearest layout that fits."""
    short, usable = found.shortage, found.explanation.job.gpu.memory_bytes
    assert short is not None
    lines: list[RenderableType] = [
        Text(
            f"out of memory: stage {short.stage} needs {short.need_bytes / GIB:.1f} GiB of {usable / GIB:.1f} usable, "
            f"{short.excess_bytes / GIB:.1f} GiB too much",
            style=STYLE["out of memory"],
        )
    ]
    for part, size in list(short.parts.items())[:MOST_PARTS]:
        lines.append(Text(f"  {part} {size / GIB:.1f} GiB: {MEANING[part]}"))
    return [*lines, Text(""), *nearest_texts(found, "the nearest layout that fits")]


def feasible_texts(found: WhyNot) -> list[RenderableType]:
    """Rank, loss against the winner part by part, and the best single change."""
    assert found.difference is not None and found.winner is not None and found.rank is not None
    mine = found.difference.b
    verdict = VERDICTS[mine.verdict]
    lines: list[RenderableType] = [
        Text(
            f"rank {found.rank:,} of {found.num_ranked:,}{_split_words(found)}: step {four(mine.step_seconds)} s, "
            f"MFU {mine.mfu:.1%}, {mine.tokens_per_second:,.0f} tokens/s/GPU; {_gib(mine.need_bytes, found)}: {verdict}",
            style=STYLE[verdict],
        )
    ]
    if found.rank == 1:
        return [*lines, Text("it is the first of the ranking"), *_neighbour_texts(found)]
    best = found.difference.a
    lines.append(
        Text(
            f"first: {best.layout.label}, step {four(best.step_seconds)} s, {best.need_bytes / GIB:.1f} GiB, {VERDICTS[best.verdict]}; "
            f"this one is {_than_winner(found)}"
        )
    )
    if mine.verdict > best.verdict:
        lines.append(Text("layouts that fit rank before those at risk of running out of memory"))
    return [*lines, *_neighbour_texts(found), Text(""), *cause_texts(found.difference)]


def _than_winner(found: WhyNot) -> str:
    """The layout's step against the winner's, in words."""
    assert found.difference is not None
    seconds, best = found.difference.seconds, found.difference.a.step_seconds
    word = "slower" if seconds >= 0 else "faster"
    return f"{three(abs(seconds))} s ({abs(seconds) / best:.1%}) {word} than the first"


def nearest_texts(found: WhyNot, what: str) -> list[RenderableType]:
    """The nearest layout with what changes, its rank and step."""
    near = found.nearest
    if near is None:
        return [Text("no layout of this model fits these GPUs at all; `search` says what lacks", style="red")]
    return [
        Text(f"{what}: {near.layout.label}", style="bold"),
        Text(f"  changes: {', '.join(near.changes)}"),
        Text(f"  {_figures(found, near)}"),
    ]


def _neighbour_texts(found: WhyNot) -> list[RenderableType]:
    """The best layout one change away with its gain."""
    near = found.neighbour
    if near is None:
        return [Text("no other layout is one change away")]
    gain = found.gain_seconds
    word = f"best single change gains {three(gain)} s" if gain >= 0 else f"every single change loses, the best one {three(-gain)} s"
    return [
        Text(f"{word}: {', '.join(near.changes)}", style="bold"),
        Text(f"  {near.layout.label}: {_figures(found, near)}"),
    ]


def _figures(found: WhyNot, near: Nearby) -> str:
    memory = f"{_gib(near.need_bytes, found)}: {VERDICTS[near.verdict]}"
    return f"rank {near.rank:,} of {found.num_ranked:,}, step {four(near.step_seconds)} s, {memory}"


def _gib(need_bytes: float, found: WhyNot) -> str:
    return f"{need_bytes / GIB:.1f} of {found.scenario.job.gpu.memory_bytes / GIB:.1f} GiB"


def why_not_json(found: WhyNot) -> dict[str, Any]:
    """The answer as plain data; keys that do not apply are null."""
    short = found.shortage
    return {
        "layout": found.layout.label,
        "legal": found.legal,
        "feasible": found.feasible,
        "outside_pins": found.outside_pins,
        "num_ranked": found.num_ranked,
        "rank": found.rank,
        "winner": _nearby_json(found.winner),
        "nearest": _nearby_json(found.nearest),
        "best_single_change": _nearby_json(found.neighbour),
        "gain_seconds": None if found.neighbour is None else nine_digits(found.gain_seconds),
        "shortage": None
        if short is None
        else {
            "stage": short.stage,
            "need_bytes": round(short.need_bytes),
            "excess_bytes": round(short.excess_bytes),
            "parts": {part: round(size) for part, size in short.parts.items()},
        },
        "against_winner": None if found.difference is None else difference_json(found.difference),
        "ledger": ledger_json(found.explanation) | {"legal": found.legal},
    }


def _nearby_json(near: Nearby | None) -> dict[str, Any] | None:
    if near is None:
        return None
    return {
        "layout": near.layout.label,
        "software": near.software,
        "rank": near.rank,
        "step_seconds": nine_digits(near.step_seconds),
        "need_bytes": round(near.need_bytes),
        "verdict": VERDICTS[near.verdict],
        "distance": nine_digits(near.distance),
        "changes": near.changes,
    }


def _split_words(found: WhyNot) -> str:
    split = found.explanation.split
    return f" with {'-'.join(map(str, split.layers_per_stage))} layers per stage" if split else ""
