"""The page of a search: decision first, then the table, the pictures, the books and the assumptions."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pandas as pd

from planner import advice
from planner.answer import Answer
from planner.cost.timeline import Timeline
from planner.report.frame import answer_frame
from planner.report.html.chart_style import altair
from planner.report.html.html_page import figures_html, page
from planner.report.html.ledger_html import ledgers_html
from planner.report.html.markup import Cell, Content, Html, data_script, details, items, joined, table, tag
from planner.report.html.payload import MOST_LAYOUTS, search_payload
from planner.report.html.row_ledger import RowLedger, row_ledger
from planner.report.html.search_figures import search_figures
from planner.report.operations_text import operations_lines
from planner.report.robustness_text import robustness_lines
from planner.report.text import band_line, books, no_layout_lines, other_meshes, proof_line, scenario_line, split_lines
from planner.report.why_text import conflict_lines, fewest_lines
from planner.report.words import money_cell, ranges, short_label
from planner.report.workload_text import long_phase_lines, workload_lines
from planner.scenario import Scenario
from planner.sensitivity import Sensitivity
from planner.units import GIB, four, three
from solver.layout import LABEL_ORDER

MOST_ROWS, MOST_LEDGERS = 200, 20
"""Rows of the shortlist's table, and of them those with a ledger on the page."""

COLUMNS: dict[str, tuple[str, str]] = {
    "rank": ("#", "d"),
    "layout": ("layout", ""),
    "step_seconds": ("step s", ".3f"),
    "step_seconds_low": ("80 % low", ".3f"),
    "step_seconds_high": ("80 % high", ".3f"),
    "tokens_per_second_per_gpu": ("tok/s/GPU", ",.0f"),
    "mfu": ("MFU", ".1%"),
    "bubble_share": ("bubble", ".1%"),
    "exposed_communication_share": ("exposed comm.", ".1%"),
    "memory_gib": ("GiB", ".1f"),
    "verdict": ("verdict", ""),
    "total_days": ("days", ".2f"),
    "cost_usd": ("cost $", ",.0f"),
    "lead_share": ("leads in", ".0%"),
    "frameworks": ("accepted by", ""),
    "tensor_parallel": ("TP", "d"),
    "pipeline_parallel": ("PP", "d"),
    "virtual_pipeline": ("VP", "d"),
    "context_parallel": ("CP", "d"),
    "expert_parallel": ("EP", "d"),
    "data_parallel": ("DP", "d"),
    "zero_stage": ("ZeRO", "d"),
    "micro_batch_size": ("MB", "d"),
    "recompute": ("recompute", ""),
    "schedule": ("schedule", ""),
    "layers_per_stage": ("layers per stage", ""),
    "pipeline_layout": ("pipeline layout", ""),
}
"""Columns of the shortlist: head, format."""

HIDDEN = frozenset((*LABEL_ORDER, "step_seconds_low", "step_seconds_high", "layers_per_stage", "pipeline_layout"))
"""Columns that only the column chooser brings forth: the layout's label says most of them."""

BADGES = {"fits": "good", "at risk": "warn", "out of memory": "bad"}


def search_html(found: Answer, *, timeline: Timeline | None = None, sensitivity: Sensitivity | None = None) -> str:
    """The whole page. ``timeline``: the simulated step of the first layout. Raises InputError without the extra ``report``."""
    altair()
    title = f"{found.scenario.job.model.name} on {found.scenario.job.num_gpus:,} x {found.scenario.job.gpu.name}"
    return _feasible(found, title, timeline, sensitivity) if found.feasible else _infeasible(found, title)


def _feasible(found: Answer, title: str, timeline: Timeline | None, sensitivity: Sensitivity | None) -> str:
    ledgers = [row_ledger(found, row) for row in range(min(len(found.shortlist.rows), MOST_LEDGERS))]
    frame = answer_frame(found)
    figures = search_figures(found, ledgers, timeline=timeline, sensitivity=sensitivity)
    sections = [
        ("decision", "Decision", decision(found, frame)),
        ("shortlist", "Shortlist", joined([shortlist_table(found, frame, len(ledgers)), all_layouts(found)])),
        ("ledgers", "Ledgers", ledgers_html(found.scenario, ledgers)),
        ("pictures", "Pictures", figures_html(figures)),
        ("books", "Books", items(books(found.result))),
        ("assumptions", "Assumptions", assumptions(found, ledgers[0])),
    ]
    return page(title, sections, figures, [data_script("layouts-data", search_payload(found.result))])


def decision(found: Answer, frame: pd.DataFrame) -> Html:
    """The question, the pick, what is proven, the checklist, what would change the answer."""
    proof = [proof_line(found.shortlist.proof)] if found.shortlist.proof else []
    proof += [*split_lines(found.shortlist), *([band_line(frame)] if "step_seconds_low" in frame else [])]
    doubts = [*(robustness_lines(found.robust) if found.robust else []), *other_meshes(found.result, found.shortlist)]
    parts: list[Content] = [
        tag("p", tag("strong", "Question: "), scenario_line(found.scenario)),
        tag("p", *pick_sentence(frame), class_="pick"),
        cards(found, frame),
    ]
    for heading, content in (
        ("What is proven", items(proof)),
        ("Checklist of the pick", checklist_html(found)),
        ("What would change the answer", items(doubts)),
    ):
        parts += [tag("h3", heading), content] if content.text else []
    return joined(parts)


def pick_sentence(frame: pd.DataFrame) -> list[Content]:
    """The first layout in one sentence, with its band."""
    first = frame.iloc[0]
    words: list[Content] = ["Run ", tag("span", str(first["layout"]), class_="label"), f": {four(first['step_seconds'])} s per step"]
    if "step_seconds_low" in frame:
        words.append(f" (80 % band {three(first['step_seconds_low'])} to {three(first['step_seconds_high'])} s)")
    words.append(f", {first['tokens_per_second_per_gpu']:,.0f} tokens per second and GPU, MFU {first['mfu']:.1%}, ")
    words += [f"{first['memory_gib']:.1f} of {first['usable_gib']:.1f} GiB: ", badge(str(first["verdict"]))]
    if "total_days" in frame:
        words.append(f"; the run takes {three(first['total_days'])} days and ${money_cell(first['cost_usd'])}")
    return [*words, "."]


def badge(verdict: str) -> Html:
    """A verdict in words and colour."""
    return tag("span", verdict, class_=f"badge {BADGES[verdict]}")


def cards(found: Answer, frame: pd.DataFrame) -> Html:
    """The pick's figures at a glance."""
    first = frame.iloc[0]
    own = {
        "seconds per step": four(first["step_seconds"]),
        "tokens per second": three(first["tokens_per_second"]),
        "model FLOPs utilisation": f"{first['mfu']:.1%}",
        "memory, GiB": f"{first['memory_gib']:.1f} of {first['usable_gib']:.1f}",
        "pipeline bubble": f"{first['bubble_share']:.1%}",
        "exposed communication": f"{first['exposed_communication_share']:.1%}",
    }
    if "total_days" in frame:
        own |= {"days in all": three(first["total_days"]), "cost": "$" + money_cell(first["cost_usd"])}
    return tag("dl", *(tag("div", tag("dt", name), tag("dd", value)) for name, value in own.items()), class_="cards")


def checklist_html(found: Answer) -> Html:
    """Every check of the pick: flagged ones with their finding, passed ones folded away; what only others raise at the end."""
    if not found.findings:
        return Html("")
    first = found.findings[0]
    flagged = [c for c in advice.CHECKS if c.name in first]
    passed = [c for c in advice.CHECKS if c.name not in first]
    lines = [_check("warn", "flag", f"{c.name}: {first[c.name]}", c.threshold) for c in flagged]
    others = {c.name: [rank for rank, own in enumerate(found.findings, start=1) if c.name in own] for c in passed}
    later = [f"{name}: only #{ranges(rows)}" for name, rows in others.items() if rows]
    fine = [_check("good", "ok", c.name, c.threshold) for c in passed]
    return joined(
        [
            tag("ul", *lines, class_="checks") if lines else tag("p", tag("span", "ok", class_="badge good"), " no red flag on the pick"),
            details(f"{len(passed)} checks passed", tag("ul", *fine, class_="checks")),
            tag("p", f"Raised by others of the shortlist: {'; '.join(later)}.", class_="soft") if later else Html(""),
        ]
    )


def _check(kind: str, word: str, text: str, threshold: str) -> Html:
    words = tag("span", text, tag("span", f" ({threshold})", class_="soft"))
    return tag("li", tag("span", word, class_=f"badge {kind}"), words)


def shortlist_table(found: Answer, frame: pd.DataFrame, ledgers: int) -> Html:
    """The shortlist: the page's script makes it sortable, filterable and gives it a column chooser."""
    columns = [column for column in COLUMNS if column in frame]
    heads = [
        tag("th", COLUMNS[column][0], scope="col", data_key=column, data_off=column in HIDDEN, class_="num" if COLUMNS[column][1] else None)
        for column in columns
    ]
    rows = [tag("tr", *_cells(row, columns, ledgers)) for row in frame.head(MOST_ROWS).to_dict("records")]
    cut = "" if len(frame) <= MOST_ROWS else f" The first {MOST_ROWS} of {len(frame):,}."
    caption = tag("caption", "Best layouts, each under its best split of layers.", cut)
    own = tag("table", caption, tag("thead", tag("tr", *heads)), tag("tbody", *rows), data_sortable=True)
    words = (
        "Sort by a column's head; filter by sizes (tp4), words (fits, selective) and comparisons (gib<70, step<2). A rank opens its ledger."
    )
    return joined(
        [tag("p", words, class_="soft screen"), tag("div", own, class_="scroll", tabindex="0", role="region", aria_label="Shortlist")]
    )


def _cells(row: dict[Any, Any], columns: list[str], ledgers: int) -> Iterator[Html]:
    for column in columns:
        value, style = row[column], COLUMNS[column][1]
        if column == "rank" and int(value) <= ledgers:
            link = tag("a", str(value), href=f"#ledger-{value}", aria_label=f"{value}: open the ledger")
            yield tag("td", link, class_="num", data_v=str(value))
        elif column == "layout":
            yield tag("td", tag("span", str(value), class_="label"))
        elif column == "verdict":
            yield tag("td", badge(str(value)))
        elif style:
            known = not pd.isna(value)
            yield tag("td", format(value, style) if known else "", class_="num", data_v=f"{value:.9g}" if known else "")
        else:
            yield tag("td", str(value).replace("+", ", ") if column == "frameworks" else str(value))


def all_layouts(found: Answer) -> Html:
    """Where the page's script puts the table of all layouts, on demand."""
    number = len(found.result.ranked)
    words = f"All {number:,} ranked layouts" if number <= MOST_LAYOUTS else f"The first {MOST_LAYOUTS:,} of {number:,} ranked layouts"
    note = "Under even splits of the layers: the shortlist's own splits are not in it."
    return details(words, tag("p", note, class_="soft"), tag("div", id="all-layouts-place"), id="all-layouts", class_="screen")


def assumptions(found: Answer, first: RowLedger) -> Html:
    """What the figures rest on."""
    scenario = found.scenario
    around = operations_lines(scenario, first.job, float(first.step.total[0]))
    phases = [line for phase in found.phases for line in long_phase_lines(phase)]
    return joined(
        [
            items(meanings(scenario)),
            tag("h3", "Batch and learning rate"),
            items(workload_lines(scenario, first.layout)),
            tag("h3", "Around the steps"),
            tag("p", around[0]),
            items(line.removeprefix("- ") for line in around[1:]),
            *([tag("h3", "Long context"), items(phases)] if phases else []),
        ]
    )


def meanings(scenario: Scenario) -> list[str]:
    """What the columns mean, and the reserve behind the verdict."""
    job = scenario.job
    return [
        f"GiB: what the fullest stage needs of {job.gpu.memory_bytes / GIB:.1f} usable: tensors, {job.software.reserve_share:.0%} reserve, "
        "CUDA context and communicators",
        f"verdict: fits is more than {job.physics.fits_sigmas:g} standard deviations below the limit, out of memory "
        f"{job.physics.oom_sigmas:g} above it, at risk between them",
        "layout: tensor (tp), pipeline (pp), chunks per stage (vp), context (cp), expert (ep), data parallel (dp), ZeRO stage, "
        "micro-batch size (mb), recompute (none, selective, full with layers per chunk), and the schedule where it is not 1F1B, plain "
        "or interleaved",
        "exposed comm.: communication that compute does not hide, as a share of the step; bubble: filling and draining the pipeline",
        "leads in: share of the draws of the model's uncertain constants in which the layout is the fastest",
        "80 % band: from the errors of the model on the measured runs nearest in kind, each predicted without its source",
    ]


def _infeasible(found: Answer, title: str) -> str:
    """Why nothing fits: decision, repairs, picture of the reasons, books."""
    question, verdict, *rest = no_layout_lines(found.result)
    figures = search_figures(found, [])
    parts: list[Content] = [
        tag("p", tag("strong", "Question: "), question),
        tag("p", badge("out of memory") if found.result.nearest else tag("span", "none", class_="badge bad"), f" {verdict}", class_="pick"),
        items(rest),
    ]
    if found.why:
        first, *limits = conflict_lines(found.why)
        parts += [tag("h3", "Limits that exclude each other"), tag("p", first), items(line.strip(" -") for line in limits)]
        parts += [tag("h3", "What would make it fit"), repairs_html(found)]
        parts += [items(fewest_lines(found.why))] if found.why.fewest else []
    sections = [
        ("decision", "Decision", joined(parts)),
        ("pictures", "Pictures", figures_html(figures)),
        ("books", "Books", items(books(found.result))),
    ]
    return page(title, sections, figures)


def repairs_html(found: Answer) -> Html:
    """One row per repair, each verified by a search."""
    assert found.why is not None
    if not found.why.repairs:
        return tag("p", "No repair was found among more GPUs, larger ones, lighter states, other batches and the limits above.")
    rows = []
    for repair in found.why.repairs:
        best = repair.best
        words = ", ".join(repair.words) + (" (the fewest, exactly)" if repair.fewest else "")
        hours = three(best.gpu_hours_per_billion_tokens)
        gib = f"{best.need_bytes / GIB:.1f}"
        verdict = ("fits", "at risk", "out of memory")[best.verdict]
        label = tag("span", short_label(best.layout), class_="label")
        numbers = [Cell(text) for text in (four(best.step_seconds), hours, gib)]
        rows.append([Cell(words, number=False, class_="wrap"), *numbers, Cell(badge(verdict), number=False), Cell(label, number=False)])
    heads = ["change", "step s", "GPU-hours per billion tokens", "GiB", "verdict", "best layout"]
    return table(heads, rows, "Repairs, nearest first, each verified by a search")
