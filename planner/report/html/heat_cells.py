"""The grid of tensor by pipeline sizes: the best layout of every cell, or the rule that stopped those that came furthest."""

from __future__ import annotations

from types import MappingProxyType

import numpy as np
import pandas as pd

from planner import targets
from planner.cost.memory import OUT_OF_MEMORY
from planner.frameworks.legality import REFUSED, assign
from planner.search import LAUNCHABLE, MEMORY, SearchResult, weigh
from planner.units import GIB
from solver import prune
from solver.grouping import distinct
from solver.layout import MESH_AXES, SPLIT_AXES, Columns

MOST_PIPELINES = 24
"""Rows of the grid."""

Cell = tuple[int, int]

SHORT = MappingProxyType(
    {
        "tensor_group_in_node": "node",
        "gpu_product": "GPUs",
        "pipeline_depth": "depth",
        "memory_floor": "memory",
        "memory": "memory",
        "key_value_heads": "KV heads",
        "expert_tensor": "experts",
        "expert_grid": "experts",
        "launchable": "refused",
        "max_days": "too slow",
        "max_cost_usd": "too dear",
        "max_step_seconds": "too slow",
        "min_tokens_per_second": "too slow",
    }
)
"""What a cell says for a rule whose name is too long for it."""


def heat_frame(result: SearchResult) -> pd.DataFrame:
    """A row per cell: tensor_parallel, pipeline_parallel, step_seconds (nan: none), layout, rule, text, note."""
    best, why = best_of_cells(result), reasons_of_cells(result)
    rows = []
    for cell in cells_of(result):
        if cell in best:
            row = best[cell]
            seconds, label = float(result.ranked.step_seconds[row]), result.ranked.layouts.layout(row).label
            rows.append((*cell, seconds, label, "", f"{seconds:#.3g}".rstrip("."), label))
        else:
            rule, note = why.get(cell, ("gpu_product", "no sizes of the other axes fill the GPUs"))
            rows.append((*cell, float("nan"), "", rule, SHORT.get(rule, rule.split("_")[0]), f"{rule.replace('_', ' ')}: {note}"))
    columns = ["tensor_parallel", "pipeline_parallel", "step_seconds", "layout", "rule", "text", "note"]
    return pd.DataFrame(rows, columns=columns)


def cells_of(result: SearchResult) -> list[Cell]:
    """The cells shown: tensor sizes within a fast domain or in use, at most MOST_PIPELINES pipelines up to the deepest allowed."""
    used, domains = result.ranked.layouts, result.problem.domains
    within = result.scenario.job.fast_domain
    deepest = min(result.problem.max_pipeline_parallel, result.problem.num_layers)
    tensor = [size for size in domains["tensor_parallel"] if size <= within or size in used.tensor_parallel]
    pipeline = [size for size in domains["pipeline_parallel"] if size <= deepest or size in used.pipeline_parallel]
    if len(pipeline) > MOST_PIPELINES:
        seen = [size for size in pipeline if size in used.pipeline_parallel]
        pipeline = sorted((seen + [size for size in pipeline if size not in seen])[:MOST_PIPELINES])
    return [(int(t), int(p)) for p in pipeline for t in tensor]


def best_of_cells(result: SearchResult) -> dict[Cell, int]:
    """The first ranked layout of every cell that has one."""
    x = result.ranked.layouts
    first, _ = distinct((x.tensor_parallel, x.pipeline_parallel))
    return {(int(x.tensor_parallel[row]), int(x.pipeline_parallel[row])): int(row) for row in first}


def reasons_of_cells(result: SearchResult) -> dict[Cell, tuple[str, str]]:
    """For cells without a ranked layout the last rule on the way, and its words."""
    return {**_by_solver(result), **_by_estimates(result)}


def _by_solver(result: SearchResult) -> dict[Cell, tuple[str, str]]:
    """The last solver rule that dropped something of each cell, for all cells that a rule met."""
    found: dict[Cell, tuple[str, str]] = {}
    pipelines = np.array(result.problem.domains["pipeline_parallel"])
    for step in prune.walk(result.problem, {}, MESH_AXES + SPLIT_AXES):
        if not isinstance(step, prune.Dropped) or not step.refuses.any():
            continue
        own = (step.rule.name, step.rule.sentence)
        if step.axis == "tensor_parallel":
            refused = step.values[step.refuses.any(axis=0)]
            met = [(t, p) for t in refused for p in pipelines]
        elif step.axis == "pipeline_parallel":
            rows, values = np.nonzero(step.refuses[step.kind])
            met = list(zip(step.table["tensor_parallel"][rows], step.values[values], strict=True))
        else:
            met = np.unique(np.stack([step.table["tensor_parallel"], step.table["pipeline_parallel"]], axis=1), axis=0).tolist()
        found.update({(int(t), int(p)): own for t, p in met})
    return found


def _by_estimates(result: SearchResult) -> dict[Cell, tuple[str, str]]:
    """Cells whose layouts the solver allows, yet none is ranked: no framework launches them, they run out of memory, or miss a target."""
    lost, least = dict[Cell, tuple[str, str]](), dict[Cell, float]()
    asked = np.array([_key(cell) for cell in _allowed(result) - set(best_of_cells(result))], dtype=np.int64)
    if not len(asked):
        return lost
    wanted = result.scenario.choices.framework
    refused = "no framework accepts any" if wanted == "any" else f"{wanted} accepts none"
    missed = "; ".join(targets.TARGETS[name].words(result.scenario) for name in targets.stated(result.scenario.choices))
    target = next(iter(targets.stated(result.scenario.choices)), "")
    for piece in result.layouts.pieces(1_000_000):
        own = piece.take(np.isin(_keys(piece), asked))
        if not len(own):
            continue
        bits, stack = assign(result.scenario, own)
        for cell in _distinct(own.take(stack == REFUSED)):
            lost.setdefault(cell, (LAUNCHABLE, refused))
        for _, weighed in weigh(result.scenario, own, bits, stack):
            over = weighed.verdict == OUT_OF_MEMORY
            for cell in _distinct(weighed.layouts.take(~over)):
                lost[cell] = (target or MEMORY, f"fits, yet not {missed}")
            for cell in _distinct(weighed.layouts.take(over)):
                need = float(weighed.need_bytes[over & (_keys(weighed.layouts) == _key(cell))].min())
                least[cell] = min(least.get(cell, need), need)
    usable = result.scenario.job.gpu.memory_bytes
    for cell, need in least.items():
        if lost.get(cell, (LAUNCHABLE, ""))[0] == LAUNCHABLE:
            lost[cell] = (MEMORY, f"needs at least {need / GIB:.1f} of {usable / GIB:.1f} GiB")
    return lost


def _allowed(result: SearchResult) -> set[Cell]:
    """The cells in which the solver's rules leave a mesh."""
    tensor, pipeline = (result.layouts.base[:, MESH_AXES.index(axis)].tolist() for axis in ("tensor_parallel", "pipeline_parallel"))
    return set(zip(tensor, pipeline, strict=True))


def _key(cell: Cell) -> int:
    return cell[0] << 32 | cell[1]


def _keys(x: Columns) -> np.ndarray:
    return np.asarray(x.tensor_parallel << 32 | x.pipeline_parallel)


def _distinct(x: Columns) -> list[Cell]:
    first, _ = distinct((x.tensor_parallel, x.pipeline_parallel))
    return [(int(x.tensor_parallel[row]), int(x.pipeline_parallel[row])) for row in first]
