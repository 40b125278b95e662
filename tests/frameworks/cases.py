"""Legal layouts of many kinds for each framework, sampled from our own searches: what the real parsers have to accept."""

from __future__ import annotations

import random
from collections.abc import Iterator
from functools import cache
from typing import Any

import numpy as np

from planner.errors import NoLayoutFits
from planner.export import target_of
from planner.frameworks.writing import Target
from planner.request import Request, make_scenario
from planner.scenario import Scenario
from planner.search import search
from solver.layout import AXES, Columns

QUESTIONS: tuple[dict[str, Any], ...] = (
    {"model": "8b", "num_gpus": 64, "global_batch_size": 128, "seq_len": 8192, "precision": "fp8"},
    {"model": "8b", "num_gpus": 64, "global_batch_size": 128, "seq_len": 8192},
    {"model": "8b", "num_gpus": 64, "global_batch_size": 128, "seq_len": 8192, "software": "fsdp2-eager"},
    {"model": "qwen3-8b", "num_gpus": 48, "global_batch_size": 96, "seq_len": 16384},
    {"model": "70b", "num_gpus": 256, "global_batch_size": 512},
    {"model": "70b", "num_gpus": 96, "global_batch_size": 480, "gpu": "b200"},
    {"model": "405b", "num_gpus": 1024, "global_batch_size": 1024, "seq_len": 8192},
    {"model": "llama-3.2-1b", "num_gpus": 16, "global_batch_size": 64},
    {"model": "qwen3-32b", "num_gpus": 128, "global_batch_size": 256, "seq_len": 32768},
    {"model": "mixtral-8x7b", "num_gpus": 64, "global_batch_size": 256},
    {"model": "qwen3-30b-a3b", "num_gpus": 64, "global_batch_size": 256},
    {"model": "deepseek-v3", "num_gpus": 1024, "global_batch_size": 4096},
    {"model": "deepseek-v2-lite", "num_gpus": 32, "global_batch_size": 128},
    {"model": "gpt-3-175b", "num_gpus": 192, "global_batch_size": 768, "seq_len": 2048},
    {"model": "gpt-oss-20b", "num_gpus": 32, "global_batch_size": 128},
)
"""Dense with and without grouped queries, tied and untied, experts, latent attention, long sequences, layers that do not divide."""

WITHOUT: dict[str, tuple[str, ...]] = {"torchtitan": ("mixtral-8x7b", "gpt-3-175b")}
"""Models that a framework's own registry lacks, so that nothing can be written for them."""


def scenarios(framework: str) -> Iterator[Scenario]:
    """The questions that are asked of a framework."""
    for wishes in QUESTIONS:
        if wishes["model"] not in WITHOUT.get(framework, ()):
            yield make_scenario(Request(**{"framework": framework, **wishes}))


def diverse(x: Columns, number: int, seed: int) -> list[int]:
    """Rows that differ in as many axes as can be: each new one has values or pairs of values that the earlier ones lack."""
    rows = list(range(len(x)))
    random.Random(seed).shuffle(rows)
    table = np.stack([getattr(x, axis) for axis in AXES], axis=1)
    seen: set[tuple[int, int, int, int]] = set()
    chosen: list[int] = []
    for row in rows:
        pairs = {(i, int(table[row, i]), j, int(table[row, j])) for i in range(len(AXES)) for j in range(i + 1)}
        if not pairs <= seen:
            seen |= pairs
            chosen.append(row)
        if len(chosen) == number:
            return chosen
    return (chosen + [row for row in rows if row not in set(chosen)])[:number]


@cache
def targets(framework: str, number: int) -> tuple[Target, ...]:
    """So many legal layouts that do not run out of memory, spread over the questions; fewer only where there are no more."""
    asked = list(scenarios(framework))
    found: list[Target] = []
    for place, scenario in enumerate(asked):
        try:
            ranked = search(scenario).ranked
        except NoLayoutFits:
            continue
        share = -(-(number - len(found)) // (len(asked) - place))
        found += [target_of(scenario, framework, ranked.layouts.layout(row)) for row in diverse(ranked.layouts, share, place)]
    return tuple(found)
