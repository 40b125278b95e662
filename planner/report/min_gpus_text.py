"""The fewest GPUs as a page and as plain data for JSON."""

from __future__ import annotations

from typing import Any

from rich.console import Group, RenderableType
from rich.text import Text

from planner.fewest import Fewest
from planner.min_gpus import MinGpus, OtherBatch
from planner.operations import run_under
from planner.report.formats import scenario_json
from planner.report.frame import shortlist_frame
from planner.report.operations_text import operations_lines
from planner.report.plain import plain
from planner.report.text import scenario_line, shortlist_table
from planner.report.words import money_cell, short_label
from planner.report.workload_text import guide_line
from planner.scenario import Scenario
from planner.targets import TARGETS, stated
from planner.units import three


def min_gpus_page(found: MinGpus) -> RenderableType:
    """The number, the best layout on so many GPUs, the proof that fewer will not do, and what the run comes to."""
    parts: list[RenderableType] = [Text(answer_line(found), style="bold")]
    if found.result is not None and found.shortlist is not None:
        parts += [Text(scenario_line(found.result.scenario)), Text("")]
        parts.append(shortlist_table(shortlist_frame(found.result.scenario, found.shortlist)))
    parts += [Text(""), *(Text(line) for line in [*proof_lines(found), *map(other_line, found.other_batches)])]
    if found.result is not None and found.shortlist is not None:
        job, step = found.shortlist.job(found.result.scenario, 0), float(found.shortlist.rows.step_seconds[0])
        parts += [Text(""), *(Text(line) for line in operations_lines(found.result.scenario, job, step))]
    return Group(*parts)


def goal_words(scenario: Scenario) -> str:
    """What is asked for, in words."""
    words = [TARGETS[name].words(scenario) for name in stated(scenario.choices)]
    return " and ".join(["a layout that fits", *words])


def answer_line(found: MinGpus) -> str:
    """The answer in one sentence."""
    scenario, safe, risky = found.scenario, found.safe, found.risky
    asked = f"{scenario.job.model.name} on {scenario.job.gpu.name}, {goal_words(scenario)}"
    if not safe.num_gpus:
        return f"{asked}: no number of GPUs up to {safe.tried:,} does" + (", nor any larger one" if safe.exhausted else "")
    early = f"; at risk from {risky.num_gpus:,}" if risky.num_gpus < safe.num_gpus else ""
    return f"{asked}: {safe.num_gpus:,} GPUs{early}"


def other_line(other: OtherBatch) -> str:
    """A batch near the one asked for under which fewer GPUs do."""
    scenario, rows = other.fewest.scenario, other.shortlist.rows
    job, step = other.shortlist.job(scenario, 0), float(rows.step_seconds[0])
    best = f"{short_label(rows.layouts.layout(0))}, {three(step)} s"
    words = f"with {scenario.job.global_batch_size:,} sequences per step {other.fewest.num_gpus:,} GPUs do: {best}"
    if not scenario.training_tokens:
        return words
    run = run_under(scenario, job, step)
    return f"{words}, {three(float(run.total_days))} days, ${money_cell(float(run.cost_usd))}"


def proof_lines(found: MinGpus) -> list[str]:
    """How it is known that no fewer GPUs do."""
    safe = found.safe
    if not safe.num_gpus:
        return [f"{safe.tried:,} fail: {found.fewer.words}"] if found.fewer else []
    lines = [
        f"exact: below {safe.least:,} not even the states fit; every number of GPUs from there was tried, beyond one node of whole nodes"
    ]
    failures = {failure.num_gpus: failure for failure in (found.fewer, found.slower) if failure}
    lines += [f"{count:,} fail: {failure.words}" for count, failure in failures.items()]
    batch = found.scenario.job.global_batch_size
    if not found.other_batches and any(failure.reason in ("batch", "rules", "time") for failure in failures.values()):
        lines.append(f"replicas must divide the {batch:,} sequences of a step: --batch-within 5 seeks a batch nearby under which fewer do")
    return lines if not found.scenario.training_tokens else [*lines, guide_line(found.scenario)]


def min_gpus_json(found: MinGpus) -> dict[str, Any]:
    """The same as plain data."""
    content: dict[str, Any] = {
        "scenario": scenario_json(found.scenario) | {"num_gpus": None},
        "targets": {name: getattr(found.scenario.choices, name) for name in stated(found.scenario.choices)},
        "fits": _fewest_json(found.safe),
        "at_risk": _fewest_json(found.risky),
        "fewer": vars(found.fewer) if found.fewer else None,
        "slower": vars(found.slower) if found.slower else None,
        "best": None,
        "other_batches": [_other_json(other) for other in found.other_batches],
    }
    if found.result is not None and found.shortlist is not None:
        content["best"] = plain(shortlist_frame(found.result.scenario, found.shortlist).to_dict("records")[0])
    return content


def _fewest_json(fewest: Fewest) -> dict[str, Any]:
    return {"num_gpus": fewest.num_gpus or None, "least": fewest.least, "tried": fewest.tried, "exhausted": fewest.exhausted}


def _other_json(other: OtherBatch) -> dict[str, Any]:
    scenario = other.fewest.scenario
    row = plain(shortlist_frame(scenario, other.shortlist).to_dict("records")[0])
    return {"global_batch_size": scenario.job.global_batch_size, "num_gpus": other.fewest.num_gpus, "best": row}
