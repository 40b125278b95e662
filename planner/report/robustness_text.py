"""What many draws say of a shortlist: short lines under it, and its columns for exports."""

from __future__ import annotations

from typing import Any

import numpy as np

from planner.report.words import ranges
from planner.robustness import LEADS, SCATTER, Cause, Robustness
from planner.units import nine_digits


def robustness_lines(found: Robustness) -> list[str]:
    """Two to four lines: how often the first leads and what choosing it costs, its strongest rival, what the model misses, luck."""
    if found.rival < 0:
        alone = len(found.equals) == 1
        return ["no other layout was drawn against #1" if alone else "all that was drawn against #1 is equal to it"]
    share, mesh = found.group_share, _mesh(found)
    lines = [
        f"{_first(found)} {_percent(share[0])} of {found.draws:,} draws of the model's constants, {mesh} with any other choices in "
        f"{_percent(found.lead_share[found.mesh].sum())}; choosing #1 costs {_cost(found.regret_mean[0])} on average, "
        f"{_cost(found.regret_p90[0])} at the 90th percentile"
    ]
    if found.lead_share[found.rival] > 0:
        lines.append(f"{_name(found, found.rival)} leads in {_percent(share[found.rival])}{_causes(found.causes)}")
    lines.append(
        f"with the {_cost(SCATTER)} per doubling of an axis that no constant explains: #1 "
        f"{_percent(found.scattered_share[found.equals].sum())}, {mesh} {_percent(found.scattered_share[found.mesh].sum())}"
    )
    if found.by_luck:
        lines.append(
            "#1 is first by luck: " + ("another leads as often" if share[0] >= LEADS else "it leads in less than half of the draws")
        )
        safest = int(np.argmin(found.regret_mean[: found.shown]))
        if safest not in found.equals:
            lines.append(f"the safest choice on the page is #{safest + 1}: it costs {_cost(found.regret_mean[safest])} on average")
    return lines


def robustness_columns(found: Robustness, rows: int) -> dict[str, list[Any]]:
    """The columns of a shortlist of ``rows`` layouts; empty (nan) for those that do not compete."""
    nan = [float("nan")] * (rows - found.shown)
    return {
        "lead_share": [*map(float, found.lead_share[: found.shown]), *nan],
        "regret_mean": [*map(float, found.regret_mean[: found.shown]), *nan],
        "regret_p90": [*map(float, found.regret_p90[: found.shown]), *nan],
        "scattered_lead_share": [*map(float, found.scattered_share[: found.shown]), *nan],
        "equal_to_rank": [*(int(first) + 1 for first in found.group[: found.shown]), *nan],
    }


def robustness_json(found: Robustness) -> dict[str, Any]:
    """What is said of the first layout, for machines."""
    rival = None
    if found.rival >= 0:
        rival = {
            "rank": found.rival + 1 if found.rival < found.shown else None,
            "layout": found.layouts.layout(found.rival).label,
            "lead_share": nine_digits(float(found.lead_share[found.rival])),
        }
    return {
        "draws": found.draws,
        "by_luck": found.by_luck,
        "equal_ranks": [int(row) + 1 for row in found.equals if row < found.shown],
        "lead_share": nine_digits(float(found.group_share[0])),
        "scattered_lead_share": nine_digits(float(found.scattered_share[found.equals].sum())),
        "mesh_lead_share": nine_digits(float(found.lead_share[found.mesh].sum())),
        "mesh_scattered_lead_share": nine_digits(float(found.scattered_share[found.mesh].sum())),
        "regret_mean": nine_digits(float(found.regret_mean[0])),
        "regret_p90": nine_digits(float(found.regret_p90[0])),
        "rival": rival,
        "causes": [{"what": cause.words, "rival_leads_where_higher": cause.higher, "share": cause.share} for cause in found.causes],
    }


def _first(found: Robustness) -> str:
    shown = [int(row) + 1 for row in found.equals if row < found.shown]
    return f"#{ranges(shown)} are equal and lead in" if len(shown) > 1 else "#1 leads in"


def _name(found: Robustness, row: int) -> str:
    return f"#{row + 1}" if row < found.shown else f"{found.layouts.layout(row).label} (below the shortlist)"


def _mesh(found: Robustness) -> str:
    """The parallel sizes of the first layout that are not 1.

    The same words as a label's.
    """
    pieces = found.layouts.layout(0).label.split("-")
    sizes = [piece for piece in pieces if piece.startswith(("tp", "pp", "cp", "ep", "etp", "dp")) and piece.strip("tpcde") != "1"]
    return "-".join(sizes) or "one GPU"


def _percent(share: float) -> str:
    """A share in whole per cent; what is rare but not never says so.

    >>> _percent(0.004), _percent(0.0), _percent(0.834), _percent(0.9996)
    ('under 1 %', '0 %', '83 %', 'over 99 %')
    """
    if 0 < share < 0.005:
        return "under 1 %"
    if 0.995 <= share < 1:
        return "over 99 %"
    return f"{share * 100:.0f} %"


def _cost(share: float) -> str:
    """A small share in per cent.

    >>> _cost(0.0123)
    '1.2 %'
    """
    return f"{share * 100:.1f} %"


def _causes(causes: tuple[Cause, ...]) -> str:
    """The constants that put the rival first, with their direction."""
    words = [f"the {cause.words} is {'higher' if cause.higher else 'lower'}" for cause in causes]
    return f", where {' or '.join(words)}" if words else ""
