"""The vocabulary of a layout: its axes, its label, and many layouts at once as columns of integers."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, fields, replace
from functools import cache
from typing import Any

import numpy as np
import numpy.typing as npt

Ints = npt.NDArray[np.int64]

RECOMPUTE = ("none", "selective", "full")
SCHEDULES = ("1f1b", "interleaved_1f1b", "gpipe", "zero_bubble_h1", "zero_bubble_2p", "zero_bubble_v", "dualpipe")
V_SHAPED = ("zero_bubble_v", "dualpipe")
"""Schedules whose stage holds two chunks, the second in reverse order: the last chunk sits on the first stage."""

WORDS: Mapping[str, tuple[str, ...]] = {"recompute": RECOMPUTE, "schedule": SCHEDULES}
"""The axes whose values are words; arrays hold indices into them."""

PLAIN_1F1B, INTERLEAVED, DUALPIPE = (SCHEDULES.index(name) for name in ("1f1b", "interleaved_1f1b", "dualpipe"))
V_CODES = tuple(SCHEDULES.index(name) for name in V_SHAPED)
SELECTIVE, FULL = RECOMPUTE.index("selective"), RECOMPUTE.index("full")

MESH_AXES = (
    "tensor_parallel",
    "pipeline_parallel",
    "context_parallel",
    "expert_parallel",
    "expert_tensor_parallel",
    "data_parallel",
)
"""Who shares what: the coupled integers that CP-SAT enumerates as meshes."""
SPLIT_AXES = ("micro_batch_size", "virtual_pipeline")
"""How a replica cuts its batch and a stage its layers: CP-SAT enumerates them per pipeline and data size."""
SWITCH_AXES = ("schedule", "zero_stage", "recompute", "recompute_layers")
"""The independent switches: numpy spreads them over every mesh and split."""
SIZES = (
    "tensor_parallel",
    "pipeline_parallel",
    "virtual_pipeline",
    "context_parallel",
    "expert_parallel",
    "expert_tensor_parallel",
    "micro_batch_size",
)
"""The sizes that somebody chooses: data_parallel is what they leave of the GPUs."""
AXES = MESH_AXES + SPLIT_AXES + SWITCH_AXES


@dataclass(frozen=True, kw_only=True)
class Layout:
    """One layout in words and numbers."""

    tensor_parallel: int = 1
    pipeline_parallel: int = 1
    virtual_pipeline: int = 1
    context_parallel: int = 1
    expert_parallel: int = 1
    expert_tensor_parallel: int = 1
    data_parallel: int = 1
    zero_stage: int = 0
    micro_batch_size: int = 1
    recompute: str = "none"
    recompute_layers: int = 0
    """With full recompute: layers recomputed in each chunk; 0 means none are."""
    schedule: str = "1f1b"

    @property
    def label(self) -> str:
        """The printed name, from which :func:`parse_label` gives the layout back.

        >>> Layout(tensor_parallel=8, pipeline_parallel=4, data_parallel=64, zero_stage=1).label
        'tp8-pp4-vp1-cp1-ep1-dp64-zero1-mb1-none'
        """
        tail = f"full{self.recompute_layers}" if self.recompute == "full" else self.recompute
        expert = f"ep{self.expert_parallel}"
        if self.expert_tensor_parallel > 1:
            expert += f"-etp{self.expert_tensor_parallel}"
        schedule = "" if self.schedule == natural_schedule(self.virtual_pipeline) else f"-{self.schedule}"
        return (
            f"tp{self.tensor_parallel}-pp{self.pipeline_parallel}-vp{self.virtual_pipeline}-cp{self.context_parallel}"
            f"-{expert}-dp{self.data_parallel}-zero{self.zero_stage}-mb{self.micro_batch_size}-{tail}{schedule}"
        )


LABEL_ORDER = tuple(field.name for field in fields(Layout))
"""The axes in the order in which a label names them: of scenario keys and exported columns too."""

LABEL_AXES = {
    "tp": "tensor_parallel",
    "pp": "pipeline_parallel",
    "vp": "virtual_pipeline",
    "cp": "context_parallel",
    "ep": "expert_parallel",
    "etp": "expert_tensor_parallel",
    "dp": "data_parallel",
    "zero": "zero_stage",
    "mb": "micro_batch_size",
}


def parse_label(text: str) -> dict[str, int | str]:
    """The axes that a label names, in any order; axes that it leaves out are absent.

    ``full`` without a number leaves ``recompute_layers`` out: the caller fills in every layer of a chunk.
    Raises ValueError with the offending piece.

    >>> parse_label("tp8-pp4-dp64-zero1-mb1")
    {'tensor_parallel': 8, 'pipeline_parallel': 4, 'data_parallel': 64, 'zero_stage': 1, 'micro_batch_size': 1}
    >>> parse_label("dp8-full2-gpipe")
    {'data_parallel': 8, 'recompute': 'full', 'recompute_layers': 2, 'schedule': 'gpipe'}
    """
    found: dict[str, int | str] = {}

    def put(key: str, value: int | str, piece: str) -> None:
        if key in found:
            raise ValueError(f"'{piece}' states {key} a second time")
        found[key] = value

    for piece in text.strip().lower().split("-"):
        number = re.fullmatch(r"([a-z]+)([0-9]{1,9})", piece)
        if piece in SCHEDULES:
            put("schedule", piece, piece)
        elif piece in RECOMPUTE:
            put("recompute", piece, piece)
        elif number and number[1] == "full":
            put("recompute", "full", piece)
            put("recompute_layers", int(number[2]), piece)
        elif number and number[1] in LABEL_AXES:
            put(LABEL_AXES[number[1]], int(number[2]), piece)
        else:
            raise ValueError(f"'{piece}' is no part of a layout label")
    return found


def natural_schedule(virtual_pipeline: int) -> str:
    """The schedule that goes without saying: 1F1B, interleaved where a stage holds several chunks."""
    return "interleaved_1f1b" if virtual_pipeline > 1 else "1f1b"


def num_micro_batches(x: Any, global_batch_size: int) -> Any:
    """Micro-batches per step and replica of one layout or many, rounded down where the batch does not divide."""
    return global_batch_size // (x.data_parallel * x.micro_batch_size)


def group_suits(group: int, num_micro_batches: int, stages: int) -> bool:
    """Whether interleaved stages can take micro-batches in such groups: the last one is whole or still fills the pipeline.

    Source: Megatron-Core, pipeline_parallel/schedules.py.

    >>> group_suits(4, 6, 4), group_suits(6, 6, 4), group_suits(6, 11, 4)
    (False, True, True)
    """
    rest = num_micro_batches % group
    return stages <= group <= num_micro_batches and (rest == 0 or rest >= stages)


@cache
def _smallest_group(num_micro_batches: int, stages: int) -> int:
    groups = range(stages, num_micro_batches + 1)
    return next((group for group in groups if group_suits(group, num_micro_batches, stages)), stages)


def micro_batch_group(num_micro_batches: Any, pipeline_parallel: Any) -> Any:
    """Micro-batches that an interleaved stage takes through one chunk before it turns to the next, of one layout or many.

    The fewest that suit: the number of stages where that divides the micro-batches.

    >>> micro_batch_group(8, 4), micro_batch_group(6, 4), micro_batch_group(11, 4)
    (4, 6, 6)
    >>> micro_batch_group(np.array([8, 6, 11]), 4)
    array([4, 6, 6])
    """
    if np.ndim(num_micro_batches) == 0 and np.ndim(pipeline_parallel) == 0:
        return _smallest_group(int(num_micro_batches), int(pipeline_parallel))
    batches, stages = np.broadcast_arrays(num_micro_batches, pipeline_parallel)
    group = stages.copy()
    odd = np.flatnonzero(batches % stages != 0)
    if len(odd):
        pairs, kind = np.unique(np.stack([batches[odd], stages[odd]]), axis=1, return_inverse=True)
        group[odd] = np.array([_smallest_group(int(m), int(p)) for m, p in pairs.T])[kind.reshape(-1)]
    return group


@cache
def chunk_sizes(num_layers: int, chunks: int) -> tuple[int, ...]:
    """Layers of each of some chunks, in their order: as even as possible, the surplus in the middle ones.

    >>> chunk_sizes(61, 8)
    (7, 8, 8, 8, 8, 8, 7, 7)
    """
    base, surplus = divmod(num_layers, chunks)
    first = (chunks - surplus) // 2
    return tuple(base + (first <= chunk < first + surplus) for chunk in range(chunks))


def deepest_chunk(x: Any, num_layers: int) -> Any:
    """Layers of the largest chunk of one layout or many under the even split."""
    return -(-num_layers // (x.pipeline_parallel * x.virtual_pipeline))


def fully_recomputed(layout: Layout, num_layers: int) -> Layout:
    """The layout with every layer recomputed.

    >>> fully_recomputed(Layout(pipeline_parallel=4, virtual_pipeline=2), 61).recompute_layers
    8
    """
    return replace(layout, recompute="full", recompute_layers=deepest_chunk(layout, num_layers))


@dataclass(frozen=True)
class Columns:
    """Many layouts, one int64 array of equal length per axis; the axes of :data:`WORDS` hold indices."""

    tensor_parallel: Ints
    pipeline_parallel: Ints
    context_parallel: Ints
    expert_parallel: Ints
    expert_tensor_parallel: Ints
    data_parallel: Ints
    micro_batch_size: Ints
    virtual_pipeline: Ints
    schedule: Ints
    zero_stage: Ints
    recompute: Ints
    recompute_layers: Ints

    def __post_init__(self) -> None:
        lengths = {len(getattr(self, axis)) for axis in AXES}
        if len(lengths) != 1:
            raise ValueError(f"columns of unequal length: {sorted(lengths)}")

    def __len__(self) -> int:
        return len(self.tensor_parallel)

    def take(self, index: npt.NDArray[np.integer] | npt.NDArray[np.bool_] | slice) -> Columns:
        """The rows that ``index`` selects."""
        return Columns(*(getattr(self, field.name)[index] for field in fields(self)))

    def layout(self, row: int) -> Layout:
        """One row as a :class:`Layout`."""
        values = {axis: int(getattr(self, axis)[row]) for axis in AXES}
        names = {axis: words[values[axis]] for axis, words in WORDS.items()}
        return Layout(**{**values, **names})  # type: ignore[arg-type]


def columns_of(layouts: list[Layout]) -> Columns:
    """The columns of a list of layouts, in its order."""

    def column(axis: str) -> Ints:
        values = [getattr(layout, axis) for layout in layouts]
        return np.array([WORDS[axis].index(v) if axis in WORDS else v for v in values], dtype=np.int64)

    return Columns(*(column(axis) for axis in (field.name for field in fields(Columns))))
