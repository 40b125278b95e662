"""Ledgers as tables: memory per stage and part, seconds per part, each with the function that computes it."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from planner.explain import MEMORY_FORMULAS, STEP_FORMULAS
from planner.report.html.chart_style import MEMORY_PARTS, PARTS
from planner.report.html.markup import Cell, Html, details, joined, table, tag
from planner.report.html.row_ledger import RowLedger
from planner.report.words import ranges
from planner.scenario import Scenario
from planner.units import GIB

RESERVE = ("need_bytes", "unusable fragments")


def ledgers_html(scenario: Scenario, ledgers: Sequence[RowLedger]) -> Html:
    """One ledger per layout, each opened by its link."""
    return joined(
        details(
            f"#{rank} {ledger.layout.label}",
            step_html(ledger, f"#{rank}"),
            memory_html(ledger, f"#{rank}"),
            formulas_html(),
            id=f"ledger-{rank}",
        )
        for rank, ledger in enumerate(ledgers, start=1)
    )


def step_html(ledger: RowLedger, name: str) -> Html:
    """Seconds and share of every part; they sum to the step."""
    total = float(ledger.step.total[0])
    rows = []
    for part, seconds in ledger.step_parts.items():
        function, meaning = STEP_FORMULAS[part]
        rows.append(
            [PARTS[part][0], Cell(f"{seconds:.4f}"), Cell(f"{seconds / total:.1%}"), function, Cell(meaning, number=False, class_="wrap")]
        )
    rows.append(["step", Cell(f"{total:.4f}"), Cell("100.0%"), "step.step_seconds", "their sum"])
    return table(["part", "seconds", "share", "formula (planner/cost/)", "what it is"], rows, f"Step of {name}, seconds")


def memory_html(ledger: RowLedger, name: str) -> Html:
    """GiB of every part per stage, equal stages together."""
    wide = ledger.memory_gib
    need = ledger.need_bytes / GIB
    groups: dict[tuple[float, ...], list[int]] = {}
    values = wide.to_numpy(float)
    for stage, own_parts in enumerate(values):
        key = (float(ledger.stages.layers[stage]), *(round(float(value), 6) for value in own_parts))
        groups.setdefault(key, []).append(stage)
    rows = []
    for stages in groups.values():
        first = stages[0]
        own = [Cell(f"{float(value):.2f}") for value in values[first]]
        rows.append([ranges(stages), Cell(str(int(ledger.stages.layers[first]))), *own, Cell(f"{float(need[first]):.2f}")])
    usable = ledger.job.gpu.memory_bytes / GIB
    heads = ["stage", "layers", *(MEMORY_PARTS[part][0] for part in wide.columns), "need"]
    caption = f"Memory of {name}, GiB per stage; the fullest needs {float(np.max(need)):.2f} of {usable:.1f} usable"
    return table(heads, rows, caption)


def formulas_html() -> Html:
    """What the parts of the memory are and which function computes them."""
    known = [(MEMORY_PARTS[part][0], *MEMORY_FORMULAS[part]) for part in MEMORY_FORMULAS] + [("reserve", *RESERVE)]
    rows = [[name, function, Cell(meaning, number=False, class_="wrap")] for name, function, meaning in known]
    inner = table(["part", "function", "what it is"], rows, "Formulas of the memory (planner/cost/memory.py)")
    return details("Formulas of the memory", inner, tag("p", "Parts of the step name theirs above.", class_="soft"))
