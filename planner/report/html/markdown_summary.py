"""A search as Markdown for a pull request or a design document: question, pick, proof, checklist, table, funnel."""

from __future__ import annotations

import re
from collections.abc import Sequence

import pandas as pd

from planner import advice
from planner.answer import Answer
from planner.report.frame import answer_frame
from planner.report.operations_text import operations_lines
from planner.report.robustness_text import robustness_lines
from planner.report.text import band_line, no_layout_lines, other_meshes, proof_line, scenario_line, split_lines
from planner.report.why_text import conflict_lines, fewest_lines
from planner.report.words import money_cell, ranges, short_label
from planner.units import GIB, four, three

MOST_LINES = 10
"""Layouts in the table."""


def markdown_summary(found: Answer, figures: Sequence[str] = ()) -> str:
    """The whole summary. ``figures``: paths of picture files to show, relative to the document."""
    lines = [f"# {escaped(found.scenario.job.model.name)} on {found.scenario.job.num_gpus:,} x {found.scenario.job.gpu.name}", ""]
    lines += _feasible(found) if found.feasible else _infeasible(found)
    lines += ["", "## Pruning", "", *table(["rule", "dropped", "left"], _funnel_rows(found))]
    if figures:
        lines += ["", "## Pictures", "", *(f"![{name.rpartition('/')[2].partition('.')[0].replace('-', ' ')}]({name})" for name in figures)]
    return "\n".join(lines) + "\n"


def escaped(text: str) -> str:
    """Text in which Markdown and HTML find nothing of theirs.

    >>> escaped("a|b <i> *c*")
    'a\\\\|b \\\\<i\\\\> \\\\*c\\\\*'
    """
    return re.sub(r"([\\\\`*_\[\]<>|#])", r"\\\1", text.replace("\n", " "))


def table(heads: Sequence[str], rows: Sequence[Sequence[str]]) -> list[str]:
    """A Markdown table; cells are text."""
    return [f"| {' | '.join(heads)} |", f"|{'---|' * len(heads)}", *(f"| {' | '.join(map(escaped, row))} |" for row in rows)]


def _bullets(lines: Sequence[str]) -> list[str]:
    return [f"- {escaped(line.removeprefix('- '))}" for line in lines]


def _feasible(found: Answer) -> list[str]:
    frame = answer_frame(found)
    proof = [proof_line(found.shortlist.proof)] if found.shortlist.proof else []
    proof += split_lines(found.shortlist)
    doubts = [*(robustness_lines(found.robust) if found.robust else []), *other_meshes(found.result, found.shortlist)]
    around = operations_lines(found.scenario, found.shortlist.job(found.scenario, 0), float(found.shortlist.rows.step_seconds[0]))
    lines = [f"**Question.** {escaped(scenario_line(found.scenario))}", "", f"**Pick.** {_pick(frame)}"]
    if "step_seconds_low" in frame:
        lines += ["", f"{escaped(band_line(frame))}."]
    for heading, own in (
        ("What is proven", _bullets(proof)),
        ("Checklist", _checklist(found)),
        ("What would change the answer", _bullets(doubts)),
        ("Shortlist", _shortlist(frame)),
        ("Around the steps", [escaped(around[0]), "", *_bullets(around[1:])]),
    ):
        lines += ["", f"## {heading}", "", *own] if own else []
    return lines


def _pick(frame: pd.DataFrame) -> str:
    first = frame.iloc[0]
    words = (
        f"`{first['layout']}`: {four(first['step_seconds'])} s per step, {first['tokens_per_second_per_gpu']:,.0f} tokens/s/GPU, "
        f"MFU {first['mfu']:.1%}, {first['memory_gib']:.1f} of {first['usable_gib']:.1f} GiB: {first['verdict']}"
    )
    money = f"; {three(first['total_days'])} days, ${money_cell(first['cost_usd'])}" if "total_days" in frame else ""
    return f"{words}{money}."


def _checklist(found: Answer) -> list[str]:
    """Every check that some layout of the shortlist raises, a flag where the pick does."""
    if not found.findings:
        return []
    lines = []
    for check in advice.CHECKS:
        raised = [rank for rank, own in enumerate(found.findings, start=1) if check.name in own]
        if not raised:
            continue
        finding = found.findings[raised[0] - 1][check.name]
        tick = " " if raised[0] == 1 else "x"
        lines.append(f"- [{tick}] {escaped(f'{check.name} (#{ranges(raised)}; {check.threshold}): {finding}')}")
    passed = sum(check.name not in found.findings[0] for check in advice.CHECKS)
    return [*lines, f"- [x] {passed} of {len(advice.CHECKS)} checks pass for the pick"]


def _shortlist(frame: pd.DataFrame) -> list[str]:
    heads = ["#", "layout", "step s", "tok/s/GPU", "MFU", "bubble", "exposed comm.", "GiB", "verdict", "accepted by"]
    rows = []
    for row in frame.head(MOST_LINES).to_dict("records"):
        shares = [f"{row[key]:.1%}" for key in ("mfu", "bubble_share", "exposed_communication_share")]
        speed = [four(row["step_seconds"]), f"{row['tokens_per_second_per_gpu']:,.0f}"]
        place = [f"{row['memory_gib']:.1f}", str(row["verdict"]), str(row["frameworks"]).replace("+", ", ")]
        rows.append([str(row["rank"]), str(row["layout"]), *speed, *shares, *place])
    return table(heads, rows)


def _infeasible(found: Answer) -> list[str]:
    question, verdict, *rest = no_layout_lines(found.result)
    lines = [f"**Question.** {escaped(question)}", "", f"**Answer.** {escaped(verdict)}", "", *_bullets(rest)]
    if found.why is None:
        return lines
    first, *limits = conflict_lines(found.why)
    lines += ["", "## Limits that exclude each other", "", escaped(first), "", *_bullets([line.strip(" -") for line in limits])]
    rows = [
        [
            ", ".join(repair.words) + (" (the fewest)" if repair.fewest else ""),
            four(repair.best.step_seconds),
            f"{repair.best.need_bytes / GIB:.1f}",
            short_label(repair.best.layout),
        ]
        for repair in found.why.repairs
    ]
    lines += ["", "## What would make it fit", "", *table(["change", "step s", "GiB", "best layout"], rows)] if rows else []
    return lines + (["", *_bullets(fewest_lines(found.why))] if found.why.fewest else [])


def _funnel_rows(found: Answer) -> list[list[str]]:
    left = found.result.funnel.space
    rows = [["declared space", "", f"{left:,}"]]
    for rule, dropped in found.result.funnel.dropped.items():
        left -= dropped
        if dropped:
            rows.append([rule.replace("_", " "), f"{dropped:,}", f"{left:,}"])
    return rows
