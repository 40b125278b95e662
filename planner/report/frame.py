"""Ranked layouts as a data frame under the project's names: the one source of every printed and exported column."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import numpy as np
import pandas as pd

from planner.answer import Answer
from planner.cost import flops
from planner.cost.memory import VERDICTS
from planner.frameworks.legality import framework_names, framework_of, jobs_by_framework
from planner.frameworks.megatron import pipeline_layout
from planner.operations import goodput, run_of, usd_per_billion_tokens
from planner.refine import Shortlist
from planner.report.robustness_text import robustness_columns
from planner.scenario import Scenario
from planner.search import Scored
from planner.split import Split, chunks_under
from planner.uncertainty import band
from planner.units import GIB
from solver.layout import LABEL_ORDER, WORDS, Columns, num_micro_batches


def axis_frame(layouts: Columns) -> pd.DataFrame:
    """The axes of layouts, words for recompute and schedule."""
    return pd.DataFrame({axis: worded(axis, getattr(layouts, axis)) for axis in LABEL_ORDER})


def worded(axis: str, values: np.ndarray) -> np.ndarray:
    """The values of an axis as people read them: numbers, or words in place of indices."""
    return np.array(WORDS[axis])[values] if axis in WORDS else values


def layouts_frame(scenario: Scenario, scored: Scored) -> pd.DataFrame:
    """One row per layout: axes, estimates, what they mean for throughput, days and cost. Empty cells where unknown."""
    job = scenario.job
    step = scored.step_seconds
    frame = axis_frame(scored.layouts)
    frame.insert(0, "layout", [scored.layouts.layout(row).label for row in range(len(scored))])
    frame["num_micro_batches"] = num_micro_batches(scored.layouts, job.global_batch_size)
    frame["frameworks"] = ["+".join(framework_names(int(bits))) or "none" for bits in scored.frameworks]
    frame["software"] = software_names(scenario, scored)
    frame["step_seconds"] = step
    frame["tokens_per_second"] = job.tokens_per_step / step
    frame["tokens_per_second_per_gpu"] = job.tokens_per_step / step / job.num_gpus
    frame["mfu"] = flops.mfu(job, step)
    frame["bubble_share"] = scored.bubble_seconds / step
    frame["exposed_communication_share"] = scored.exposed_seconds / step
    frame["memory_gib"] = scored.need_bytes / GIB
    frame["usable_gib"] = job.gpu.memory_bytes / GIB
    frame["headroom_share"] = 1.0 - scored.need_bytes / job.gpu.memory_bytes
    frame["verdict"] = np.array(VERDICTS)[scored.verdict] if len(scored) else []
    frame["goodput"] = goodput(scenario, scored.stack)
    frame["usd_per_billion_tokens"] = usd_per_billion_tokens(scenario, step, frame["goodput"])
    if scenario.training_tokens:
        run = run_of(scenario, step, frame["goodput"].to_numpy())
        frame = frame.assign(**{field.name: getattr(run, field.name) for field in dataclasses.fields(run)})
    return frame


def software_names(scenario: Scenario, scored: Scored) -> list[str]:
    """The training stack that each layout is costed under."""
    return [scenario.stacks[framework_of(int(number))].name for number in scored.stack]


def answer_frame(found: Answer) -> pd.DataFrame:
    """The shortlist of an answer, with its place on the front and how often each layout leads under the model's uncertainty."""
    frame = shortlist_frame(found.scenario, found.shortlist)
    drawn = robustness_columns(found.robust, len(frame)) if found.robust else {}
    return frame.assign(pareto=found.on_front, **drawn)


def shortlist_frame(scenario: Scenario, shortlist: Shortlist) -> pd.DataFrame:
    """The shortlist with ranks, bands and uneven splits."""
    frame = with_bands(scenario, shortlist.rows, layouts_frame(scenario, shortlist.rows))
    frame.insert(0, "rank", np.arange(1, len(frame) + 1))
    return frame.assign(**split_columns(scenario, shortlist))


def chunk_layout(scenario: Scenario, shortlist: Shortlist, row: int) -> str:
    """Megatron's pipeline layout where the layers do not divide by stages and chunks; empty where plain flags do."""
    layout, split, job = shortlist.rows.layouts.layout(row), shortlist.splits[row], shortlist.job(scenario, row)
    chunks = layout.pipeline_parallel * layout.virtual_pipeline
    if split is None and (layout.pipeline_parallel == 1 or job.model.num_layers % chunks == 0):
        return ""
    return pipeline_layout(chunks_under(job, layout, split), job.num_mtp_layers)


def split_columns(scenario: Scenario, shortlist: Shortlist) -> dict[str, list[Any]]:
    """What an uneven split adds to each row; empty cells where the even split is as good."""

    def column(of: Callable[[Split], Any], empty: Any = "") -> list[Any]:
        return [of(split) if split else empty for split in shortlist.splits]

    return {
        "layers_per_stage": column(lambda split: "-".join(map(str, split.layers_per_stage))),
        "recomputed_per_stage": column(lambda split: "-".join(map(str, split.recomputed_per_stage))),
        "pipeline_layout": [chunk_layout(scenario, shortlist, row) for row in range(len(shortlist.splits))],
        "even_step_seconds": column(lambda split: split.even_step_seconds, float("nan")),
        "split_gap": column(lambda split: split.gap, float("nan")),
    }


def with_bands(scenario: Scenario, scored: Scored, frame: pd.DataFrame) -> pd.DataFrame:
    """The frame with the 80 % band of every step time, and whether it extrapolates beyond the measured runs."""
    jobs = jobs_by_framework(scenario)
    bands = [band(jobs[int(scored.stack[row])], scored.layouts.layout(row)) for row in range(len(scored))]
    if any(found is None for found in bands):
        return frame
    kept = [found for found in bands if found is not None]
    seconds = frame["step_seconds"]
    where = list(frame.columns).index("step_seconds") + 1
    frame.insert(where, "step_seconds_low", [s * b.low for s, b in zip(seconds, kept, strict=True)])
    frame.insert(where + 1, "step_seconds_high", [s * b.high for s, b in zip(seconds, kept, strict=True)])
    frame.insert(where + 2, "extrapolates", [b.extrapolates for b in kept])
    return frame
