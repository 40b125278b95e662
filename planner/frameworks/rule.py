"""One legality rule of a framework with its plain twin, and the predicates that several frameworks share."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np

from planner.scenario import Job
from solver.layout import FULL, SWITCH_AXES, Layout, deepest_chunk

Twin = Callable[[Layout, Job], str]
"""(one layout, job) -> what is wrong, with the numbers; "" where the rule holds."""


@dataclass(frozen=True)
class FrameworkRule:
    """A layout is legal in a framework when every rule of it holds."""

    id: str
    sentence: str
    source: str
    axes: tuple[str, ...]
    """The axes that it reads: where it is broken, legal values of these are sought."""
    holds: Callable[[Any, Job], Any]
    """(layout or columns, job) -> truth per layout."""
    twin: Twin
    """The same rule in plain Python, for one layout: the specification that tests hold ``holds`` against."""

    @property
    def switches(self) -> bool:
        """Whether it reads schedule, ZeRO stage or recompute; if not, one answer serves every setting of a mesh."""
        return bool(set(self.axes) & set(SWITCH_AXES))


def whole_key_value_heads(x: Any, job: Job) -> Any:
    """Each tensor rank has KV heads of its own: they are never copied."""
    return job.model.split_key_value_heads % x.tensor_parallel == 0


def tell_key_value_heads(layout: Layout, job: Job) -> str:
    """Twin of :func:`whole_key_value_heads`."""
    heads, tensor = job.model.split_key_value_heads, layout.tensor_parallel
    return "" if heads % tensor == 0 else f"num_key_value_heads = {heads} does not divide by tensor_parallel = {tensor}"


def sharded_pipeline(x: Any, job: Job) -> Any:
    """ZeRO-2 and 3 do not combine with pipeline stages."""
    return (x.zero_stage < 2) | (x.pipeline_parallel == 1)


def tell_sharded_pipeline(layout: Layout, job: Job) -> str:
    """Twin of :func:`sharded_pipeline`."""
    if layout.zero_stage < 2 or layout.pipeline_parallel == 1:
        return ""
    return f"zero_stage = {layout.zero_stage} with pipeline_parallel = {layout.pipeline_parallel}"


def whole_recompute(x: Any, job: Job) -> Any:
    """Full activation checkpointing covers every layer."""
    return (x.recompute != FULL) | (x.recompute_layers == deepest_chunk(x, job.model.num_layers))


def tell_whole_recompute(layout: Layout, job: Job) -> str:
    """Twin of :func:`whole_recompute`."""
    deepest = deepest_chunk(layout, job.model.num_layers)
    if layout.recompute != "full" or layout.recompute_layers == deepest:
        return ""
    return f"full recompute covers {layout.recompute_layers} of the {deepest} layers of a chunk"


ALIGNMENT = {"fp8": 16, "mxfp8": 32, "nvfp4": 32}
"""Multiples that both dimensions of a low-precision product must have. Source: Transformer Engine, pytorch/utils.py (8 and 16
forward, 16 on both backward) and tensor/mxfp8_tensor.py (32)."""


def low_precision_shapes(x: Any, job: Job) -> Any:
    """8-bit products want the rank's tokens and widths in multiples of 16, MX formats of 32; 16-bit ones take any."""
    multiple = ALIGNMENT.get(job.precision, 1)
    aligned = job.seq_len * x.micro_batch_size // (x.context_parallel * x.tensor_parallel) % multiple == 0
    for width in split_widths(job):
        aligned = aligned & (width // x.tensor_parallel % multiple == 0)
    return aligned & (job.model.moe_ffn_hidden_size // x.expert_tensor_parallel % multiple == 0)


def tell_low_precision_shapes(layout: Layout, job: Job) -> str:
    """Twin of :func:`low_precision_shapes`."""
    multiple = ALIGNMENT.get(job.precision)
    if multiple is None:
        return ""
    tensor, ranks = layout.tensor_parallel, layout.context_parallel * layout.tensor_parallel
    sizes = {"the tokens of a rank (seq_len x micro_batch_size / context / tensor)": job.seq_len * layout.micro_batch_size // ranks}
    sizes |= {f"the width {width} / tensor_parallel {tensor}": width // tensor for width in split_widths(job)}
    expert = job.model.moe_ffn_hidden_size
    sizes[f"the expert width {expert} / expert_tensor_parallel {layout.expert_tensor_parallel}"] = expert // layout.expert_tensor_parallel
    wrong = [f"{name} = {size}" for name, size in sizes.items() if size % multiple]
    return f"{job.precision} needs multiples of {multiple}: {wrong[0]}" if wrong else ""


def split_widths(job: Job) -> tuple[int, ...]:
    """Widths of the linear layers that a tensor group splits."""
    model = job.model
    heads = model.num_attention_heads * model.value_head_dim
    return tuple(width for width in (heads, model.ffn_hidden_size, model.shared_ffn_hidden_size) if width)


def rule(id: str, sentence: str, source: str, axes: str, holds: Callable[[Any, Job], Any], twin: Twin) -> FrameworkRule:
    """A rule; its axes separated by spaces."""
    return FrameworkRule(id, sentence, source, tuple(axes.split()), holds, twin)


def everywhere(x: Any, truth: bool) -> Any:
    """One truth for every layout, in the shape of its columns."""
    return np.full(np.shape(x.tensor_parallel), truth)
