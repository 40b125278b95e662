"""The pages of ``validate`` and ``calibrate``."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import pandas as pd
from rich import box
from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from planner.calibrate import IDENTIFIED, PARTLY, Calibration
from planner.units import GIB
from planner.validate import NOISY, Prediction


def percent(value: float | None) -> str:
    """A share in percent, or a dash.

    >>> percent(0.0614), percent(None)
    ('6.1', '-')
    """
    return "-" if value is None else f"{value * 100:.1f}"


def family_table(title: str, measure: Mapping[str, Any]) -> Table:
    """Errors per family."""
    table = Table(title=title, box=None, title_justify="left", pad_edge=False, padding=(0, 2, 0, 0), header_style="bold underline")
    table.add_column("family")
    for head in ("n", "median %", "p90 %", "bias %"):
        table.add_column(head, justify="right")
    for name, f in measure["families"].items():
        shown = name + (" (noisy source)" if name in NOISY else "")
        table.add_row(shown, str(f["n"]), percent(f["median"]), percent(f["p90"]), f"{f['bias'] * 100:+.1f}")
    return table


def summary_lines(report: Mapping[str, Any]) -> list[str]:
    """The figures that decide, in words."""
    lines = []
    for key, name in (("step_time", "step time"), ("memory", "memory, all kinds"), ("memory_allocated", "memory, allocated")):
        measure = report[key]
        worst = measure["worst_family"]
        tail = f"; worst family {worst['name']} {percent(worst['median'])} %" if worst else ""
        lines.append(
            f"{name}: family median {percent(measure['family_median'])} %, row median {percent(measure['row_median'])} % "
            f"over {measure['rows']:,} rows{tail}"
        )
    ranking, verdict = report["ranking"], report["verdict"]
    if ranking["groups"]:
        lines.append(
            f"ranking: {ranking['groups']} groups, mean regret {percent(ranking['mean_regret'])} %, max "
            f"{percent(ranking['max_regret'])} %, Kendall tau {ranking['kendall_tau']:.2f}"
        )
    states = verdict["three_states"]
    lines.append(
        f"verdict: {percent(verdict['accuracy'])} % of {verdict['rows']:,} right; {verdict['false_fits']} false fits, "
        f"{verdict['false_ooms']} false OOMs; in three states {states['at_risk']} at risk, {states['fits_that_ran_out']} of "
        f"{states['fits']} fits ran out, {states['out_of_memory_that_ran']} of {states['out_of_memory']} OOMs ran"
    )
    band = report["band"]
    if band["rows"]:
        lines.append(f"80 % band, own source left out: holds {percent(band['inside'])} % of {band['rows']:,} steps")
    skipped = report["skipped"]
    if skipped:
        lines.append(f"skipped {sum(skipped.values())}: " + ", ".join(f"{reason} {n}" for reason, n in skipped.items()))
    return lines


def validation_page(report: Mapping[str, Any]) -> RenderableType:
    """The whole report."""
    tables: list[RenderableType] = [
        family_table("step time", report["step_time"]),
        Text(""),
        family_table("memory", report["memory"]),
        Text(""),
    ]
    return Group(*tables, *(Text(line) for line in summary_lines(report)))


def validation_frame(report: Mapping[str, Any]) -> pd.DataFrame:
    """One row per run."""
    return pd.DataFrame(report["rows"])


def peaks_table(predictions: Sequence[Prediction]) -> Table:
    """Measured peaks of memory and the predictions of them, which no fit moves."""
    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0), header_style="bold underline")
    table.add_column("memory of")
    for head in ("measured GiB", "predicted GiB", "error %"):
        table.add_column(head, justify="right")
    table.add_column("of what")
    for p in predictions:
        cells = [f"{p.run.peak_bytes / GIB:.2f}", f"{p.memory_bytes / GIB:.2f}", f"{p.memory_error * 100:+.1f}"]
        table.add_row(p.run.id, *cells, p.run.memory_kind)
    return table


def calibration_page(found: Calibration) -> RenderableType:
    """Errors before, after and left out, and what the data say of each constant."""
    errors = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0), header_style="bold underline")
    errors.add_column("run")
    for head in ("measured s", "before %", "after %", "left out %"):
        errors.add_column(head, justify="right")
    for row, run in enumerate(found.runs):
        cells = [f"{values[row] * 100:+.1f}" for values in (found.before, found.after, found.left_out)]
        errors.add_row(run.id, f"{run.step_seconds:.3f}", *cells)
    constants = Table(box=box.SIMPLE_HEAD, pad_edge=False, padding=(0, 1, 0, 0))
    for head in ("constant", "of", "factor", "data say"):
        constants.add_column(head)
    for knob, log, shrunk in zip(found.moving, found.logs, found.shrinkage, strict=True):
        if shrunk < PARTLY:
            word = "identified" if shrunk < IDENTIFIED else "partly"
            constants.add_row(knob[2].field, knob[1], f"{math.exp(log):.3f}", word)
    silent = sorted({knob[2].field for knob, shrunk in zip(found.moving, found.shrinkage, strict=True) if shrunk >= PARTLY})
    medians = [float(pd.Series(abs(v)).median()) for v in (found.before, found.after, found.left_out)]
    return Group(
        errors,
        Text(""),
        constants,
        Text(f"not identified, left at the shipped values: {', '.join(silent)}"),
        Text(f"median error: {percent(medians[0])} % before, {percent(medians[1])} % after, {percent(medians[2])} % on the run left out"),
    )
