"""The printed page of a sweep: the best layout of each point side by side, and why some points have none."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from itertools import islice
from typing import Any

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from planner.evaluation import OK
from planner.grid import shown
from planner.journal import Journal, counted
from planner.report.sweep_files import marks
from planner.report.sweep_table import fastest, frames
from planner.report.text import SHORT_VERDICT, STYLE
from planner.report.words import money_cell, ranges
from planner.scenario import Scenario
from planner.sweep import Sweep
from planner.units import three

MOST_SHOWN = 2000
"""Rows of a page; the files hold all."""

MOST_REASONS = 12

ALONE = ("vp1", "cp1", "ep1")
"""Groups of one that the page leaves out of a layout's label."""

HEADS = {"seq_len": "seq", "global_batch_size": "batch", "price_usd_per_hour": "$/h", "nic_gbit_per_s": "NIC Gb/s"}
"""Table heads of keys that have a shorter word."""

CELLS: dict[str, Callable[[Mapping[str, Any]], str]] = {
    "layout": lambda row: " ".join(piece for piece in row["layout"].split("-") if piece not in ALONE),
    "step s": lambda row: f"{row['step_seconds']:.3f}" if row["step_seconds"] < 100 else f"{row['step_seconds']:.1f}",
    "tok/s": lambda row: f"{row['tokens_per_second_per_gpu']:,.0f}",
    "MFU%": lambda row: f"{row['mfu'] * 100:.1f}",
    "eff%": lambda row: f"{row['scaling_efficiency'] * 100:.1f}",
    "GiB": lambda row: f"{row['memory_gib']:.1f}",
    "": lambda row: SHORT_VERDICT[row["verdict"]],
    "days": lambda row: three(row["total_days"]),
    "cost": lambda row: "$" + money_cell(row["cost_usd"]),
    "$/Gtok": lambda row: three(row["usd_per_billion_tokens"]),
    "P": lambda row: "*" if row["pareto"] else "",
}
"""Columns of the page behind what varies: head -> cell of a row."""

OF_RUNS, OF_TOKENS = ("days", "cost"), ("$/Gtok",)
"""Columns of the page where every point states how long it trains, and those in their place where one does not."""

LEFT = ("layout", "scenario", "", "P", "model", "gpu", "cluster", "precision", "optimizer", "framework")
"""Heads of columns of words."""

TIGHT = ("#", "GPUs", "rank", *(head for head in CELLS if head != "layout"))
"""Heads of columns that are never broken into lines."""


def sweep_page(sweep: Sweep, journal: Journal) -> RenderableType:
    """The whole answer to a sweep."""
    rows = _rows(sweep, journal)
    table = _table(sweep, islice(rows, MOST_SHOWN))
    more = sum(1 for _ in rows)
    cut = [f"and {more:,} more rows: --csv FILE holds them"] if more else []
    below = map(Text, [*cut, *reason_lines(journal), *unused_lines(sweep, journal)])
    books = map(Text, book_lines(sweep, journal))
    return Group(Text(question(sweep)), Text(""), table, *below, Text(LEGEND, style="dim"), Text(""), *books)


def _rows(sweep: Sweep, journal: Journal) -> Iterator[dict[str, Any]]:
    """What the page shows: the first layout of each point, or the layouts of the front."""
    for frame in frames(sweep, journal):
        chosen = frame if sweep.pareto else frame[frame["rank"].fillna(1) == 1]
        yield from ({str(key): value for key, value in row.items()} for row in chosen.to_dict("records"))


def columns_shown(sweep: Sweep) -> dict[str, Callable[[dict[str, Any]], str]]:
    """What tells the points apart: head -> cell of a row."""
    points = sweep.points
    varied = [key for key in sweep.varied if key != "num_gpus" and len({point.varied.get(key) for point in points}) > 1]
    cells: dict[str, Callable[[dict[str, Any]], str]] = {"#": lambda row: str(row["point"])}
    if len({point.scenario.name for point in points}) > 1:
        cells["scenario"] = lambda row: str(row["scenario"])
    for key, fact in DIFFERING.items():
        if key not in varied and len({fact(point.scenario) for point in points}) > 1:
            cells[HEADS.get(key, key)] = lambda row, fact=fact: str(fact(points[row["point"] - 1].scenario))  # type: ignore[misc]
    for key in varied:
        cells[HEADS.get(key, key.replace("_", " "))] = lambda row, key=key: shown(points[row["point"] - 1].varied.get(key, ""))  # type: ignore[misc]
    if len({point.scenario.job.global_batch_size for point in points}) > 1 and not set(varied) & {"seq_len", "global_batch_size"}:
        cells["batch"] = lambda row: f"{row['global_batch_size']:,}"
    cells["GPUs"] = lambda row: f"{row['num_gpus']:,}"
    if sweep.pareto:
        cells["rank"] = lambda row: str(row["rank"])
    return cells


DIFFERING: dict[str, Callable[[Scenario], Any]] = {
    "model": lambda s: s.job.model.name,
    "gpu": lambda s: s.job.gpu.name,
    "seq_len": lambda s: s.job.seq_len,
}
"""What is shown wherever it differs, whatever was varied."""


def _table(sweep: Sweep, rows: Iterable[dict[str, Any]]) -> Table:
    """One row per layout at 100 columns."""
    hidden = OF_TOKENS if all(point.scenario.training_tokens for point in sweep.points) else OF_RUNS
    known = {head: cell for head, cell in CELLS.items() if head not in hidden}
    table = Table(box=None, pad_edge=False, padding=(0, 1, 0, 0), header_style="bold underline")
    front = columns_shown(sweep)
    for head in (*front, *known):
        table.add_column(head, justify="left" if head in LEFT else "right", no_wrap=head in TIGHT, overflow="fold")
    for row in rows:
        cells = [Text(cell(row)) for cell in front.values()]
        if row["status"] == OK:
            cells += [Text(cell(row), style=STYLE[row["verdict"]] if head == "" else "") for head, cell in known.items()]
        else:
            cells.append(Text(row["status"], style="red"))
        table.add_row(*cells)
    return table


def question(sweep: Sweep) -> str:
    """How many points, and what they all share."""
    scenarios = [point.scenario for point in sweep.points]
    shared = [word for word in (_shared(scenarios, fact) for fact in SHARED) if word]
    many = f"{len(scenarios):,} points, each" if len(scenarios) > 1 else "one point,"
    return f"{many} an exhaustive search{': ' if shared else ''}{', '.join(shared)}"


def _shared(scenarios: list[Scenario], fact: Callable[[Scenario], str]) -> str:
    found = {fact(scenario) for scenario in scenarios}
    return found.pop() if len(found) == 1 else ""


SHARED: tuple[Callable[[Scenario], str], ...] = (
    lambda s: s.job.model.name,
    lambda s: s.job.gpu.name,
    lambda s: s.job.cluster.name,
    lambda s: f"sequences of {s.job.seq_len:,}",
    lambda s: f"{s.job.global_batch_size:,} per step ({s.job.tokens_per_step / 1e6:.2f}M tokens)",
    lambda s: s.job.precision,
    lambda s: s.job.optimizer,
    lambda s: f"{s.training_tokens / 1e9:,.6g}B tokens in all" if s.training_tokens else "",
)
"""What the first line says of all points where it is the same for all."""


def reason_lines(journal: Journal) -> list[str]:
    """Why points have no layout, equal reasons on one line."""
    points: dict[str, list[int]] = {}
    for entry in journal:
        if entry["status"] != OK:
            points.setdefault(f"{entry['status']}; {entry['reason']}", []).append(entry["point"])
    lines = [f"#{ranges(own)} {reason}" for reason, own in points.items()]
    more = len(lines) - MOST_REASONS
    return lines[:MOST_REASONS] + ([f"and {more:,} more reasons: --csv FILE holds them"] if more > 0 else [])


def unused_lines(sweep: Sweep, journal: Journal) -> list[str]:
    """Which points are slower than one of their series with fewer GPUs."""
    best = {entry["point"]: entry["best"] for entry in journal if entry["status"] == OK}
    sizes, used = {point.number: point.scenario.job.num_gpus for point in sweep.points}, fastest(sweep, best)
    slower = [point for point in best if used[point] < sizes[point]]
    return [f"#{ranges(slower)} slower than fewer GPUs of the series, others unused (CSV: fastest_num_gpus)"] if slower else []


LEGEND = (
    "tok/s: tokens per second and GPU. eff%: that, over the fewest GPUs of the series on which something fits. "
    "P *: no other row of the same model is faster per token, cheaper per token and leaves more memory free "
    "(failures and checkpoints counted)."
)


def book_lines(sweep: Sweep, journal: Journal) -> list[str]:
    """How much was searched, and which sweep this is."""
    books = [(entry["status"] == OK, entry["space"] or 0, entry["survivors"] or 0) for entry in journal]
    found, space, ranked = (sum(column) for column in zip(*books)) if books else (0, 0, 0)
    told = marks(sweep, journal)
    return [
        f"{counted(len(books))} searched, {found:,} with a layout; {space:,} layouts in their spaces, {ranked:,} ranked",
        f"sweep {told['sweep']}, version {told['version']}",
    ]
