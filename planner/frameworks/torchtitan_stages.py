"""How torchtitan cuts a model into stages, and the micro-batches that PyTorch's pipeline schedules need."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import numpy as np

SCHEDULE_NAMES = {
    "1f1b": "1F1B",
    "interleaved_1f1b": "Interleaved1F1B",
    "gpipe": "GPipe",
    "zero_bubble_h1": "InterleavedZeroBubble",
    "zero_bubble_v": "ZBVZeroBubble",
    "dualpipe": "DualPipeV",
}
"""Our schedule -> PyTorch's. InterleavedZeroBubble is the H1 schedule where each stage is one chunk: p micro-batches in flight."""

MULTI = ("Interleaved1F1B", "LoopedBFS", "InterleavedZeroBubble", "ZBVZeroBubble", "DualPipeV")
"""PyTorch's schedules of several chunks per stage."""
SINGLE = ("1F1B", "GPipe")


def stage_layers(num_layers: int, stages: int, first_less: int = 1, last_less: int = 1) -> tuple[int, ...]:
    """Layers of each chunk as torchtitan cuts a model by itself: embedding and head count as so many layers, surplus goes first.

    Empty where it refuses: more chunks than layers with those weights, or an end that weighs more than a whole chunk.
    Source: distributed/pipeline_parallel.py, _generate_llm_fqn_per_model_part.

    >>> stage_layers(32, 4), stage_layers(32, 4, 0, 0), stage_layers(32, 40)
    ((8, 9, 8, 7), (8, 8, 8, 8), ())
    """
    if stages == 1:
        return (num_layers,)
    share, surplus = divmod(num_layers + first_less + last_less, stages)
    if share < max(first_less, last_less, 1):
        return ()
    layers = [share + (stage < surplus) for stage in range(stages)]
    layers[0] -= first_less
    layers[-1] -= last_less
    return tuple(layers)


def chunk_count(schedule: str, stages: int) -> int:
    """Chunks that torchtitan makes of a model where nothing states them: one per stage, two under a schedule of several chunks.

    Source: distributed/pipeline_parallel.py, _get_pipeline_metadata.
    """
    return stages * (1 if schedule in ("1f1b", "gpipe") else 2)


def num_rounds(micro_batches: Any, stages: Any) -> Any:
    """Rounds in which PyTorch's looped schedules take the micro-batches, which must divide by them.

    Source: torch/distributed/pipelining/schedules.py, ScheduleInterleaved1F1B.
    """
    return np.maximum(1, micro_batches // stages)


def few_micro_batches(schedule: str, batches: int, stages: int) -> str:
    """What is wrong with the number of micro-batches of one pass through the pipeline; "" where nothing is.

    >>> few_micro_batches("1f1b", 2, 4), few_micro_batches("zero_bubble_h1", 9, 4)
    ('2 micro-batches for 4 stages of 1f1b, which needs 4', '9 micro-batches for 4 stages of zero_bubble_h1: must be a multiple of 2')
    """
    least = {"1f1b": stages, "dualpipe": 2 * stages}.get(schedule, 0)
    if batches < least:
        return f"{batches} micro-batches for {stages} stages of {schedule}, which needs {least}"
    rounds = int(num_rounds(batches, stages)) if schedule in ("zero_bubble_h1", "interleaved_1f1b") else 1
    return f"{batches} micro-batches for {stages} stages of {schedule}: must be a multiple of {rounds}" if batches % rounds else ""


def module_lists(chunks: Iterable[int], head: str) -> list[list[str]]:
    """The modules of each chunk, embedding first, norm and output layer last; ``head`` is a version's name of the output layer.

    >>> module_lists((1, 2), "lm_head")
    [['tok_embeddings', 'layers.0'], ['layers.1', 'layers.2', 'norm', 'lm_head']]
    """
    lists: list[list[str]] = []
    done = 0
    for count in chunks:
        lists.append([f"layers.{layer}" for layer in range(done, done + count)])
        done += count
    lists[0].insert(0, "tok_embeddings")
    lists[-1] += ["norm", head]
    return lists
