"""The pages of sweep, explain, diff and validate: the same dress as a search's, fewer parts."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import pandas as pd

from planner import advice
from planner.cost.memory import VERDICTS
from planner.cost.timeline import Timeline
from planner.difference import Comparison, Difference
from planner.evaluation import OK
from planner.explain import MEMORY_FORMULAS, STEP_FORMULAS, Explanation
from planner.journal import Journal
from planner.report.accuracy import summary_lines
from planner.report.difference_text import cause_texts, refused_lines
from planner.report.html import charts, run_charts
from planner.report.html.chart_frames import breakdown_frame, timeline_frame
from planner.report.html.chart_style import MEMORY_PARTS, PARTS, altair
from planner.report.html.html_page import Figure, figures_html, page
from planner.report.html.ledger_html import formulas_html, memory_html, step_html
from planner.report.html.markup import Cell, Content, Html, items, joined, table, tag
from planner.report.html.row_ledger import RowLedger
from planner.report.html.search_figures import memory_figure, timeline_figure
from planner.report.html.search_html import badge
from planner.report.operations_text import operations_lines
from planner.report.sweep_table import frames
from planner.report.sweep_text import book_lines, columns_shown, question, reason_lines, unused_lines
from planner.report.text import band_texts, figure_text, illegal_lines, scenario_line, split_words
from planner.report.workload_text import workload_lines
from planner.scenario import Scenario
from planner.sweep import Sweep
from planner.units import GIB, four, three

MOST_POINTS = 2000
"""Rows of a sweep's table."""


def explain_html(found: Explanation, *, timeline: Timeline | None = None) -> str:
    """The ledger of one layout as a page; of an illegal one why it is. ``timeline``: planner.cost.timeline.timeline_of of it."""
    altair()
    title = f"{found.layout.label} for {found.scenario.job.model.name}"
    lines: list[Content] = [tag("p", tag("strong", "Question: "), scenario_line(found.scenario))]
    if not found.legal:
        lines += [tag("p", tag("span", "not legal", class_="badge bad"), " no framework in play runs this layout.", class_="pick")]
        lines += [items(illegal_lines(found))]
    if found.memory is None or found.step is None or found.stages is None or found.need_bytes is None:
        return page(title, [("decision", "Answer", joined(lines))])
    ledger = RowLedger(found.layout, found.job, found.stages, found.memory, found.need_bytes, found.step)
    total, need = float(found.step.total[0]), float(found.need_bytes.max()) / GIB
    words = f"{four(total)} s per step, MFU {found.mfu:.1%}, {need:.1f} of {found.job.gpu.memory_bytes / GIB:.1f} GiB: "
    lines += [tag("p", words, badge(VERDICTS[found.verdict]), class_="pick")]
    known = [text.plain for text in band_texts(found, total)]  # type: ignore[union-attr]
    known += [f"accepted by {', '.join(found.accepted_by) or 'no framework'}", f"software {found.job.software.name}"]
    known += [f"uneven stages: {split_words(found.split)}"] if found.split else []
    thresholds = {check.name: check.threshold for check in advice.CHECKS}
    flags = [
        tag("li", tag("span", "flag", class_="badge warn"), tag("span", f"{name}: {words} ({thresholds[name]})"))
        for name, words in found.flags.items()
    ]
    clear = tag("p", tag("span", "ok", class_="badge good"), " no red flag")
    lines += [items(known), tag("h3", "Checklist"), tag("ul", *flags, class_="checks") if flags else clear]
    frame = breakdown_frame([ledger])
    bars = Figure("step-breakdown", "Where the step's time goes", "Seconds of every part of one step.", (charts.breakdown_chart(frame),))
    figures = [bars, memory_figure(ledger)]
    figures += [timeline_figure(ledger, timeline_frame(timeline))] if timeline is not None else []
    napkin = [[f.name, Cell(figure_text(f)), Cell(f.formula, number=False, class_="wrap")] for f in found.figures]
    around = operations_lines(found.scenario, found.job, total)
    return page(
        title,
        [
            ("decision", "Answer", joined(lines)),
            ("ledger", "Ledger", joined([step_html(ledger, "the layout"), memory_html(ledger, "the layout"), formulas_html()])),
            ("pictures", "Pictures", figures_html(figures)),
            ("napkin", "The same on a napkin", table(["figure", "value", "formula"], napkin, "Textbook figures")),
            ("assumptions", "Around the steps", items([*around[1:], *workload_lines(found.scenario, found.layout)])),
        ],
        figures,
    )


def diff_html(scenario: Scenario, found: Comparison) -> str:
    """Two layouts compared: the main cause first, then part by part; why one is not legal, where that is so."""
    altair()
    asked = tag("p", tag("strong", "Question: "), scenario_line(scenario))
    if found.difference is None:
        refused = [items(refused_lines(one)) for one in found.illegal]
        return page("Two layouts compared", [("decision", "Answer", joined([asked, *refused]))])
    own = found.difference
    cause, *others = [text.plain for text in cause_texts(own)]  # type: ignore[union-attr]
    changed = [part for part in own.step if part.difference]
    frame = pd.DataFrame({"part": [p.name for p in changed], "difference": [p.difference for p in changed]})
    picture = run_charts.difference_chart(frame) if len(frame) else None
    words = f"Seconds that {own.b.layout.label} (b) has beyond {own.a.layout.label} (a); the bars sum to {own.seconds:+.4f} s."
    figures = [Figure("step-difference", "Where the difference lies", words, (picture,), frame)] if picture else []
    sections: list[tuple[str, str, Content]] = [
        ("decision", "Answer", joined([asked, tag("p", cause, class_="pick"), items(line.removeprefix("- ") for line in others)])),
        ("layouts", "Layouts", _sides(own)),
        ("parts", "Part by part", _parts(own)),
    ]
    if figures:
        sections.append(("pictures", "Pictures", figures_html(figures)))
    return page("Two layouts compared", sections, figures)


def _sides(found: Difference) -> Html:
    rows = []
    for name, c in (("a", found.a), ("b", found.b)):
        numbers = [four(c.step_seconds), f"{c.mfu:.1%}", f"{c.tokens_per_second:,.0f}", f"{c.need_bytes / GIB:.1f}"]
        cells = [Cell(tag("span", c.layout.label, class_="label"), number=False), c.job.software.name, *map(Cell, numbers)]
        rows.append([name, *cells, Cell(badge(VERDICTS[c.verdict]), number=False)])
    return table(["", "layout", "software", "step s", "MFU", "tok/s/GPU", "GiB", "verdict"], rows, "Both layouts")


def _parts(found: Difference) -> Html:
    step = [[PARTS[p.name][0], *_numbers(p.a, p.b, 1.0, 4), STEP_FORMULAS[p.name][1]] for p in found.step if p.a or p.b]
    step.append(["step", *_numbers(found.a.step_seconds, found.b.step_seconds, 1.0, 4), "their sum"])
    meaning = {part: words for part, (_, words) in MEMORY_FORMULAS.items()} | {"reserve": "unusable fragments"}
    need = [[MEMORY_PARTS[p.name][0], *_numbers(p.a, p.b, GIB, 2), meaning[p.name]] for p in found.memory if p.a or p.b]
    need.append(["need", *_numbers(found.a.need_bytes, found.b.need_bytes, GIB, 2), "their sum"])
    heads = ["part", "a", "b", "b - a", "what it is"]
    return joined([table(heads, step, "Step, seconds"), table(heads, need, "Memory of the fullest stages, GiB")])


def _numbers(a: float, b: float, unit: float, places: int) -> list[Cell]:
    more = round((b - a) / unit, places) + 0.0  # no negative zero
    return [Cell(f"{a / unit:.{places}f}"), Cell(f"{b / unit:.{places}f}"), Cell(f"{more:+.{places}f}")]


def sweep_html(sweep: Sweep, journal: Journal) -> str:
    """All points of a sweep side by side: table first, then throughput, efficiency, days and cost against GPUs."""
    altair()
    every = list(frames(sweep, journal))
    frame = pd.concat(every, ignore_index=True) if every else pd.DataFrame(columns=["status", "rank"])
    best = frame[frame["rank"].fillna(1) == 1].reset_index(drop=True)
    fine = best[best["status"] == OK].reset_index(drop=True)
    own = {head: cell for head, cell in columns_shown(sweep).items() if head not in ("#", "GPUs", "rank")}
    names = [" ".join(f"{head} {cell(row)}".strip() for head, cell in own.items()) or "best layout" for row in fine.to_dict("records")]  # type: ignore[arg-type]
    fine = fine.assign(series=names)
    figures = _sweep_figures(fine)
    sections: list[tuple[str, str, Content]] = [
        (
            "decision",
            "Question",
            joined([tag("p", question(sweep), class_="pick"), items([*reason_lines(journal), *unused_lines(sweep, journal)])]),
        ),
        ("points", "Best layout of each point", _sweep_rows(sweep, best)),
    ]
    if figures:
        sections.append(("pictures", "Pictures", figures_html(figures)))
    return page(f"Sweep of {len(sweep.points):,} points", [*sections, ("books", "Books", items(book_lines(sweep, journal)))], figures)


def _sweep_figures(fine: pd.DataFrame) -> list[Figure]:
    if not len(fine):
        return []
    drawn = [name for name in run_charts.SWEEP_MEASURES if name in fine and fine[name].notna().any()]
    if "cost_usd" in drawn:
        drawn.remove("usd_per_billion_tokens")
    found = []
    for name in drawn:
        title, unit, _ = run_charts.SWEEP_MEASURES[name]
        words = f"Best layout of each point: {unit}, against the number of GPUs."
        numbers = fine[["series", "num_gpus", name, "layout"]]
        found.append(
            Figure(f"sweep-{name.replace('_', '-')}", f"{title} against GPUs", words, (run_charts.sweep_chart(fine, name),), numbers)
        )
    return found


def _sweep_rows(sweep: Sweep, best: pd.DataFrame) -> Html:
    own = columns_shown(sweep)
    measures: dict[str, Callable[[dict[Any, Any]], str]] = {
        "step s": lambda r: four(r["step_seconds"]),
        "tok/s/GPU": lambda r: f"{r['tokens_per_second_per_gpu']:,.0f}",
        "MFU": lambda r: f"{r['mfu']:.1%}",
        "efficiency": lambda r: f"{r['scaling_efficiency']:.1%}",
        "GiB": lambda r: f"{r['memory_gib']:.1f}",
        "days": lambda r: three(r["total_days"]) if not pd.isna(r.get("total_days")) else "",
        "cost $": lambda r: f"{r['cost_usd']:,.0f}" if not pd.isna(r.get("cost_usd")) else "",
    }
    rows = []
    for row in best.head(MOST_POINTS).to_dict("records"):
        front: list[Cell | str] = [cell(row) for cell in own.values()]  # type: ignore[arg-type]
        if row["status"] == OK:
            label = Cell(tag("span", row["layout"], class_="label"), number=False)
            rows.append([*front, label, *(Cell(cell(row)) for cell in measures.values()), Cell(badge(row["verdict"]), number=False)])
        else:
            rows.append([*front, Cell(str(row["status"]), number=False, class_="bad"), *[""] * (len(measures) + 1)])
    return table([*own, "layout", *measures, "verdict"], rows, f"{len(rows):,} of {len(best):,} points")


def validate_html(report: Mapping[str, Any]) -> str:
    """How right the model is on measured runs: the figures that decide, pictures, then every family."""
    altair()
    frame = pd.DataFrame(report["rows"]).rename(columns={"predicted_step_seconds": "predicted", "measured_step_seconds": "measured"})
    runs = frame[(frame["outcome"] == "ok")].dropna(subset=["predicted", "measured"])
    runs = runs[runs["measured"] > 0][["id", "family", "measured", "predicted"]].reset_index(drop=True)
    figures = _validation_figures(runs) if len(runs) else []
    rows = [
        [name, *(Cell(text) for text in (f"{f['n']:,}", f"{f['median']:.1%}", f"{f['p90']:.1%}", f"{f['bias']:+.1%}"))]
        for name, f in report["step_time"]["families"].items()
    ]
    heads = ["family", "runs", "median error", "90th percentile", "bias"]
    sections: list[tuple[str, str, Content]] = [("decision", "Answer", items(summary_lines(report)))]
    if figures:
        sections.append(("pictures", "Pictures", figures_html(figures)))
    sections.append(("families", "Families", table(heads, rows, "Errors of the step time by family of measured runs")))
    return page("Predicted against measured", sections, figures)


def _validation_figures(runs: pd.DataFrame) -> list[Figure]:
    ratio = (runs["predicted"] / runs["measured"]).groupby(runs["family"])
    rows = [(name, len(own), *map(float, np.quantile(own, (0.1, 0.5, 0.9)))) for name, own in ratio]
    families = pd.DataFrame(rows, columns=["family", "runs", "low", "median", "high"])
    words = f"{len(runs):,} measured steps; the line is equality, dashed 20 % more and less."
    spread = "Predicted over measured step time: the bar holds the middle 80 % of a family's runs, the tick is their median."
    return [
        Figure("predicted-against-measured", "Predicted against measured", words, (run_charts.measured_chart(runs),), canvas=True),
        Figure("error-by-family", "Error by family", spread, (run_charts.family_chart(families),), families),
    ]
