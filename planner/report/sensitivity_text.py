"""Sensitivity as a page of two tables, as a data frame for CSV, and as JSON."""

from __future__ import annotations

import json
import math
from typing import Any

import pandas as pd
from rich import box
from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from planner.report.text import scenario_line
from planner.sensitivity import KNOBS, Outcome, Point, Sensitivity
from planner.units import nine_digits
from solver.layout import LABEL_AXES, Layout, natural_schedule

SHORT = {"at risk": " r"}
"""What stands behind a step whose layout does not fit for sure."""


def sensitivity_page(found: Sensitivity) -> RenderableType:
    """What matters first, then every point."""
    pick = f"{found.pick.step_seconds:.3f} s, {found.pick.tokens_per_second_per_gpu:,.0f} tok/s per GPU" if found.pick else found.note
    best = found.best
    lines = [scenario_line(found.scenario), f"pick: {found.layout.label}, {pick}"]
    if best.layout != found.layout:
        lines.append(f"best: {best.layout.label}, {best.step_seconds:.3f} s, {best.tokens_per_second_per_gpu:,.0f} tok/s per GPU")
    legend = (
        "%: change of tokens per second and GPU against today. The pick is the same layout throughout; best is the first of a new "
        "search at that point, named where it differs from the pick. r: at risk of running out of memory; what fits ranks before it, "
        "even if slower. Latency: of links, network and stage boundaries together, the network's shown. Sequence length keeps the tokens "
        "per step. All under even splits of the layers."
    )
    parts: list[RenderableType] = [Text(line) for line in lines]
    return Group(*parts, Text(""), elasticity_table(found), Text(""), points_table(found), Text(legend, style="dim"))


def elasticity_table(found: Sensitivity) -> Table:
    """Per knob what one per cent more of it does to the pick's step, the largest first."""
    table = Table(title="what 1 % more does to the pick's step", box=box.SIMPLE_HEAD, title_justify="left", pad_edge=False)
    for head in ("knob", "today", "step %"):
        table.add_column(head, justify="left" if head == "knob" else "right", no_wrap=True)
    known = {name: value for name, value in found.elasticity.items() if not math.isnan(value)}
    today = {knob.name: value_text(knob.value(found.scenario.job), knob.unit) for knob in KNOBS}
    for name in sorted(known, key=lambda name: -round(abs(known[name]), 9)):
        table.add_row(name, today[name], "only what fits" if name == "HBM size" else f"{known[name] + 0.0:+.3f}")
    for name in found.elasticity:
        if name not in known:
            table.add_row(name, today[name], "unknown")
    return table


def points_table(found: Sensitivity) -> Table:
    """Every knob and factor."""
    table = Table(box=None, pad_edge=False, padding=(0, 1, 0, 0), header_style="bold underline")
    for head in ("knob", "x", "value", "pick s", "%", "best s", "%"):
        table.add_column(head, justify="left" if head == "knob" else "right", no_wrap=True)
    table.add_column("best layout", overflow="fold")
    last = ""
    for point in found.points:
        cells = [point.knob if point.knob != last else "", f"{point.factor:g}", value_text(point.value, point.unit)]
        cells += [*step_cells(point.pick, found.pick), *step_cells(point.best, found.best)]
        table.add_row(*(Text(cell) for cell in cells), Text(remark(found, point)))
        last = point.knob
    return table


def step_cells(outcome: Outcome | None, base: Outcome | None) -> tuple[str, str]:
    """A step and its change in throughput; n/a where there is none."""
    if outcome is None:
        return "n/a", ""
    seconds = f"{outcome.step_seconds:.3f}{SHORT.get(outcome.verdict, '')}"
    return seconds, f"{change(outcome, base) * 100 + 0.0:+.1f}" if base else ""


def change(outcome: Outcome, base: Outcome) -> float:
    """Relative change of tokens per second and GPU, rounded so that no change is none."""
    return round(outcome.tokens_per_second_per_gpu / base.tokens_per_second_per_gpu - 1.0, 9)


def remark(found: Sensitivity, point: Point) -> str:
    """The best layout where it differs from the pick, and why there is none or no pick."""
    layout = ""
    if point.best is not None:
        layout = " ".join(differences(found.layout, point.best.layout)) or "the pick"
    return "; ".join(filter(None, [layout, point.note]))


def differences(base: Layout, other: Layout) -> list[str]:
    """The pieces of a layout's label that another one's does not have.

    >>> differences(Layout(tensor_parallel=8), Layout(tensor_parallel=4, recompute="full", recompute_layers=2))
    ['tp4', 'full2']
    """
    pieces = [f"{short}{getattr(other, axis)}" for short, axis in LABEL_AXES.items() if getattr(base, axis) != getattr(other, axis)]
    if (base.recompute, base.recompute_layers) != (other.recompute, other.recompute_layers):
        pieces.append(f"full{other.recompute_layers}" if other.recompute == "full" else other.recompute)
    natural = all(layout.schedule == natural_schedule(layout.virtual_pipeline) for layout in (base, other))
    return pieces + ([other.schedule] if base.schedule != other.schedule and not natural else [])


def value_text(value: float, unit: str) -> str:
    """A knob's value with its unit.

    >>> value_text(3350.0, "GB/s"), value_text(4.7, "us")
    ('3,350 GB/s', '4.7 us')
    """
    return f"{value:,.0f} {unit}" if value >= 1000 or float(value).is_integer() else f"{value:.3g} {unit}"


def sensitivity_frame(found: Sensitivity) -> pd.DataFrame:
    """One row per knob and factor; empty cells where there is no layout."""
    return pd.DataFrame([_row(found, point) for point in found.points])


def _row(found: Sensitivity, point: Point) -> dict[str, Any]:
    row: dict[str, Any] = {"knob": point.knob, "factor": point.factor, "value": point.value, "unit": point.unit}
    row["elasticity"] = found.elasticity[point.knob]
    for name, outcome, base in (("pick", point.pick, found.pick), ("best", point.best, found.best)):
        row[f"{name}_layout"] = outcome.layout.label if outcome else ""
        row[f"{name}_step_seconds"] = outcome.step_seconds if outcome else math.nan
        row[f"{name}_tokens_per_second_per_gpu"] = outcome.tokens_per_second_per_gpu if outcome else math.nan
        row[f"{name}_change"] = change(outcome, base) if outcome and base else math.nan
        row[f"{name}_verdict"] = outcome.verdict if outcome else ""
    return row | {"note": point.note}


def sensitivity_json(found: Sensitivity) -> str:
    """One object: the scenario, the pick, the best layout, elasticities, and the points."""
    job = found.scenario.job
    content = {
        "scenario": {
            "name": found.scenario.name,
            "model": job.model.name,
            "gpu": job.gpu.name,
            "num_gpus": job.num_gpus,
            "seq_len": job.seq_len,
            "global_batch_size": job.global_batch_size,
        },
        "pick": {"layout": found.layout.label, "step_seconds": _plain(found.pick.step_seconds) if found.pick else None},
        "best": {"layout": found.best.layout.label, "step_seconds": _plain(found.best.step_seconds)},
        "elasticity": {name: _plain(value) for name, value in found.elasticity.items()},
        "points": [{key: _plain(value) for key, value in _row(found, point).items()} for point in found.points],
    }
    return json.dumps(content, indent=1) + "\n"


def _plain(value: Any) -> Any:
    if not isinstance(value, float):
        return value or None if isinstance(value, str) else value
    return nine_digits(value) if math.isfinite(value) else None
