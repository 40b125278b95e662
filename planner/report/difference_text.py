"""Two layouts side by side: as a page, as plain data for JSON, and as a table for CSV."""

from __future__ import annotations

import math
from typing import Any

import pandas as pd
from rich import box
from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from planner.cost.memory import OUT_OF_MEMORY, VERDICTS
from planner.costed import RESERVE, Costed
from planner.difference import Comparison, Difference, Part, main_cause, reasons
from planner.explain import MEMORY_FORMULAS, STEP_FORMULAS, Explanation
from planner.report.ledger import ledger_json
from planner.report.text import STYLE, illegal_lines, scenario_line
from planner.scenario import Scenario
from planner.units import GIB, four, nine_digits, three

MEANING = {name: meaning for name, (_, meaning) in {**MEMORY_FORMULAS, RESERVE: ("", "unusable fragments")}.items()}
"""Part of the memory -> what it is."""

CSV_COLUMNS = ("quantity", "part", "unit", "a", "b", "difference", "share")


def comparison_page(scenario: Scenario, found: Comparison) -> RenderableType:
    """The answer to `planner diff`: what distinguishes the layouts, or why one is not legal."""
    if found.difference is None:
        return Group(*(Text(line) for refused in found.illegal for line in refused_lines(refused)))
    return difference_page(scenario, found.difference)


def refused_lines(found: Explanation) -> list[str]:
    """Why a layout is not legal: its label, the broken rules with the legal values, and who refuses it."""
    return [f"layout {found.layout.label} is not legal:", *illegal_lines(found)]


def difference_page(scenario: Scenario, found: Difference) -> RenderableType:
    """The whole page of two legal layouts."""
    parts: list[RenderableType] = [Text(scenario_line(scenario)), layout_text("A", found.a), layout_text("B", found.b)]
    parts += [*memory_texts(found), Text(""), *cause_texts(found)]
    parts += [Text(""), step_parts_table(found, "A", "B"), Text(""), memory_parts_table(found, "A", "B")]
    return Group(*parts)


def layout_text(name: str, c: Costed) -> Text:
    """One layout in two lines: label and stack, then what it yields and needs."""
    verdict = VERDICTS[c.verdict]
    line = Text(f"{name}  {c.layout.label}, software {c.job.software.name}\n   ")
    line.append(f"step {four(c.step_seconds)} s, MFU {c.mfu:.1%}, {c.tokens_per_second:,.0f} tokens/s/GPU; ")
    line.append(f"{c.need_bytes / GIB:.1f} of {c.job.gpu.memory_bytes / GIB:.1f} GiB: {verdict}", style=STYLE[verdict])
    return line


def memory_texts(found: Difference) -> list[RenderableType]:
    """A line for each layout that runs out of memory."""
    sides = [("A", found.a), ("B", found.b)]
    return [Text(f"{name} runs out of memory; compared as if it fitted", style="red") for name, c in sides if c.verdict == OUT_OF_MEMORY]


def cause_texts(found: Difference) -> list[RenderableType]:
    """The main cause in a sentence, then the reasons behind the other parts that matter."""
    lines = [main_cause(found)]
    fast, slow = found.faster_slower
    for part, why in reasons(found).items():
        if why not in lines[0]:
            more = slow.step[part] - fast.step[part]
            lines.append(f"- {part}, {three(abs(more))} s {'more' if more > 0 else 'less'}: {why}")
    return [Text(line) for line in lines]


def step_parts_table(found: Difference, name_a: str, name_b: str) -> Table:
    """Seconds part by part, largest difference first; parts that neither layout has are left out."""
    rows = [(part, STEP_FORMULAS[part.name][1]) for part in found.step]
    total = Part("total", found.a.step_seconds, found.b.step_seconds)
    return _parts_table("step, seconds", rows, total, (name_a, name_b), 1.0, 4)


def memory_parts_table(found: Difference, name_a: str, name_b: str) -> Table:
    """GiB of the fullest stages part by part, largest difference first."""
    rows = [(part, MEANING[part.name]) for part in found.memory]
    total = Part("need", found.a.need_bytes, found.b.need_bytes)
    return _parts_table("memory, GiB of the fullest stage", rows, total, (name_a, name_b), GIB, 2)


def _parts_table(title: str, rows: list[tuple[Part, str]], total: Part, names: tuple[str, str], unit: float, places: int) -> Table:
    table = Table(title=title, box=box.SIMPLE_HEAD, title_justify="left", pad_edge=False, padding=(0, 1, 0, 0))
    table.add_column("part")
    for head in (*names, f"{names[1]} - {names[0]}", "%"):
        table.add_column(head, justify="right")
    table.add_column("what it is", style="dim")

    def rounded(value: float, digits: int) -> float:
        return round(value, digits) + 0.0  # no negative zero

    def cells(part: Part) -> list[str]:
        share = share_of(part, total)
        more = f"{rounded(part.difference / unit, places):+.{places}f}"
        percent = "" if math.isnan(share) else f"{rounded(share * 100, 1):.1f}"
        return [part.name, f"{part.a / unit:.{places}f}", f"{part.b / unit:.{places}f}", more, percent]

    for part, meaning in rows:
        if part.a or part.b:
            table.add_row(*cells(part), meaning)
    table.add_row(*cells(total), "", style="bold")
    return table


def share_of(part: Part, total: Part) -> float:
    """The part's share of the whole difference; nan where the totals agree."""
    same = abs(total.difference) <= 1e-12 * max(abs(total.a), abs(total.b))
    return math.nan if same else part.difference / total.difference


def difference_frame(found: Comparison) -> pd.DataFrame:
    """One row per part and per total, seconds and bytes; empty for layouts that are not legal."""
    if found.difference is None:
        return pd.DataFrame(columns=list(CSV_COLUMNS))
    pair = found.difference
    rows: list[tuple[Any, ...]] = []
    for quantity, unit, parts, total in (
        ("step", "s", pair.step, Part("total", pair.a.step_seconds, pair.b.step_seconds)),
        ("memory", "B", pair.memory, Part("total", pair.a.need_bytes, pair.b.need_bytes)),
    ):
        rows += [(quantity, p.name, unit, p.a, p.b, p.difference, share_of(p, total)) for p in (*parts, total)]
    return pd.DataFrame(rows, columns=list(CSV_COLUMNS))


def comparison_json(found: Comparison) -> dict[str, Any]:
    """The comparison as plain data; of layouts that are not legal the broken rules."""
    if found.difference is None:
        return {"illegal": [ledger_json(refused) for refused in found.illegal]}
    return difference_json(found.difference)


def difference_json(found: Difference) -> dict[str, Any]:
    """Both layouts, the difference part by part and its reasons."""
    told = reasons(found)
    return {
        "a": layout_json(found.a),
        "b": layout_json(found.b),
        "step_difference_seconds": nine_digits(found.seconds),
        "main_cause": main_cause(found),
        "reasons": told,
        "step_parts": [_part_json(part, nine_digits) for part in found.step],
        "memory_difference_bytes": round(found.bytes),
        "memory_parts": [_part_json(part, round) for part in found.memory],
    }


def _part_json(part: Part, rounded: Any) -> dict[str, Any]:
    return {"part": part.name, "a": rounded(part.a), "b": rounded(part.b), "difference": rounded(part.difference)}


def layout_json(c: Costed) -> dict[str, Any]:
    """One layout's estimates as plain data."""
    return {
        "layout": c.layout.label,
        "software": c.job.software.name,
        "step_seconds": nine_digits(c.step_seconds),
        "mfu": nine_digits(c.mfu),
        "tokens_per_second_per_gpu": nine_digits(c.tokens_per_second),
        "need_bytes": round(c.need_bytes),
        "usable_bytes": round(c.job.gpu.memory_bytes),
        "verdict": VERDICTS[c.verdict],
    }
