"""The rules of a layout in plain arithmetic: why is this one not allowed? Specification, oracle and counter.

Every rule of :mod:`solver.space` has its twin here under the same name. A twin reads numbers or arrays alike and
answers with a truth value for each.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import numpy as np

from solver.layout import (
    AXES,
    DUALPIPE,
    FULL,
    INTERLEAVED,
    MESH_AXES,
    PLAIN_1F1B,
    SPLIT_AXES,
    SWITCH_AXES,
    V_CODES,
    Layout,
    columns_of,
    deepest_chunk,
    num_micro_batches,
)
from solver.problem import Problem

Truth = Any  # bool or an array of bool


def heads(x: Any, problem: Problem) -> Truth:
    """The tensor group divides the attention heads."""
    return problem.num_attention_heads % x.tensor_parallel == 0


def key_value_heads(x: Any, problem: Problem) -> Truth:
    """The tensor group divides the KV heads, or holds a whole number of copies of them."""
    divides = problem.num_key_value_heads % x.tensor_parallel == 0
    return divides | (problem.replicate_key_values & (x.tensor_parallel % problem.num_key_value_heads == 0))


def ffn(x: Any, problem: Problem) -> Truth:
    """The tensor group divides the width of the MLP (and of the shared experts)."""
    return (problem.ffn_hidden_size % x.tensor_parallel == 0) & (problem.shared_ffn_hidden_size % x.tensor_parallel == 0)


def vocabulary(x: Any, problem: Problem) -> Truth:
    """The tensor group divides the vocabulary, unless the vocabulary may be padded."""
    return problem.pad_vocabulary | (problem.vocab_size % x.tensor_parallel == 0)


def tensor_group_in_node(x: Any, problem: Problem) -> Truth:
    """A tensor group stays inside a node (a limit that can be lifted)."""
    return problem.tensor_across_nodes | (problem.gpus_per_node % x.tensor_parallel == 0)


def pipeline_depth(x: Any, problem: Problem) -> Truth:
    """The pipeline is no deeper than allowed, and has a layer for every stage."""
    return (x.pipeline_parallel <= problem.max_pipeline_parallel) & (x.pipeline_parallel <= problem.num_layers)


def sequence(x: Any, problem: Problem) -> Truth:
    """The sequence splits into two chunks per context rank, evenly over the tensor group, with enough tokens each."""
    chunks = np.where(x.context_parallel > 1, 2 * x.context_parallel, 1)
    even = problem.seq_len % chunks == 0
    share = problem.seq_len // x.context_parallel
    enough = (x.context_parallel == 1) | (share >= problem.min_context_tokens)
    over_tensor = (not problem.sequence_parallel) | (share % x.tensor_parallel == 0)
    return even & enough & over_tensor


def gpu_product(x: Any, problem: Problem) -> Truth:
    """tensor x pipeline x context x data = number of GPUs."""
    model_ranks, replica_ranks = x.tensor_parallel * x.pipeline_parallel, x.context_parallel * x.data_parallel
    return (problem.num_gpus % model_ranks == 0) & (replica_ranks == problem.num_gpus // model_ranks)


def experts(x: Any, problem: Problem) -> Truth:
    """The expert group divides the experts; without experts there is no expert group."""
    if not problem.num_experts:
        return (x.expert_parallel == 1) & (x.expert_tensor_parallel == 1)
    return problem.num_experts % x.expert_parallel == 0


def expert_tensor(x: Any, problem: Problem) -> Truth:
    """An expert is whole or split like the dense layers, and the split divides its width."""
    shape = (x.expert_tensor_parallel == 1) | (x.expert_tensor_parallel == x.tensor_parallel)
    return shape & (problem.moe_ffn_hidden_size % x.expert_tensor_parallel == 0)


def expert_grid(x: Any, problem: Problem) -> Truth:
    """expert x expert tensor divides tensor x context x data: the expert axes add no factor to the GPUs."""
    grid = x.tensor_parallel * x.context_parallel * x.data_parallel
    return grid % (x.expert_parallel * x.expert_tensor_parallel) == 0


def replicas(x: Any, problem: Problem) -> Truth:
    """The replicas share the global batch evenly."""
    return problem.global_batch_size % x.data_parallel == 0


def batch(x: Any, problem: Problem) -> Truth:
    """data parallel x micro-batch divides the global batch."""
    return problem.global_batch_size % (x.data_parallel * x.micro_batch_size) == 0


def layers(x: Any, problem: Problem) -> Truth:
    """Every chunk of every stage holds at least one layer (uneven counts are allowed)."""
    return x.pipeline_parallel * x.virtual_pipeline <= problem.num_layers


def interleaving(x: Any, problem: Problem) -> Truth:
    """Interleaved stages need a pipeline and a micro-batch for every stage (V-shaped pairs of chunks do not)."""
    enough = num_micro_batches(x, problem.global_batch_size) >= x.pipeline_parallel
    v_pair = (x.virtual_pipeline == 2) & any(code in problem.domains["schedule"] for code in V_CODES)
    return (x.virtual_pipeline == 1) | ((x.pipeline_parallel > 1) & (enough | v_pair))


def memory_floor(x: Any, problem: Problem) -> Truth:
    """The least that any split and any switch needs fits: unshardable states, and the inputs of the layers in flight.

    The first stage keeps at least num_layers // pipeline layers for min(micro-batches, stages) micro-batches in every
    schedule, which is least for a micro-batch of one sequence. Sizes are KiB; all products stay below 2**62.
    """
    dense = problem.whole_dense_kib // (x.tensor_parallel * x.pipeline_parallel)
    expert = problem.whole_expert_kib // (x.expert_parallel * x.expert_tensor_parallel * x.pipeline_parallel)
    room = problem.usable_kib - dense - expert - problem.sharded_kib // problem.num_gpus
    in_flight = np.minimum(problem.global_batch_size // x.data_parallel, x.pipeline_parallel)
    held = (problem.num_layers // x.pipeline_parallel) * in_flight
    return problem.kept_kib * held <= room * x.tensor_parallel * x.context_parallel


def schedule(x: Any, problem: Problem) -> Truth:
    """The schedule suits its chunks: interleaved needs several, a V shape two, the rest one; without a pipeline it is 1f1b."""
    m = num_micro_batches(x, problem.global_batch_size)
    v_shaped = np.isin(x.schedule, V_CODES)
    interleaved = x.schedule == INTERLEAVED
    plain = ~v_shaped & ~interleaved
    return (
        (plain & (x.virtual_pipeline == 1) & ((x.pipeline_parallel > 1) | (x.schedule == PLAIN_1F1B)))
        | (interleaved & (x.virtual_pipeline > 1) & (m >= x.pipeline_parallel))
        | (v_shaped & (x.virtual_pipeline == 2) & ((x.schedule != DUALPIPE) | (m >= 2 * x.pipeline_parallel)))
    )


def recompute_depth(x: Any, problem: Problem) -> Truth:
    """Full recompute states how many layers of a chunk it covers, at most all of them; the other modes state none."""
    deepest = deepest_chunk(x, problem.num_layers)
    full = x.recompute == FULL
    return np.where(full, (x.recompute_layers >= 1) & (x.recompute_layers <= deepest), x.recompute_layers == 0)


@dataclass(frozen=True)
class Rule:
    """A rule with its twin, the axes that it reads, and how to say that it is broken."""

    name: str
    holds: Callable[[Any, Problem], Truth]
    axes: tuple[str, ...]
    broken: str
    """Template over the layout's axes, the problem's sizes, num_micro_batches and grid."""

    @property
    def sentence(self) -> str:
        """The rule as people say it."""
        return (self.holds.__doc__ or "").strip().split("\n")[0]


def _rule(twin: Callable[[Any, Problem], Truth], axes: str, broken: str) -> Rule:
    return Rule(twin.__name__, twin, tuple(axes.split()), broken)


RULES: tuple[Rule, ...] = (
    _rule(
        tensor_group_in_node,
        "tensor_parallel",
        "tensor_parallel = {tensor_parallel} does not divide the {gpus_per_node} GPUs of a node, so a tensor group would cross nodes",
    ),
    _rule(
        heads,
        "tensor_parallel",
        "num_attention_heads = {num_attention_heads} does not divide by tensor_parallel = {tensor_parallel}",
    ),
    _rule(
        key_value_heads,
        "tensor_parallel",
        "num_key_value_heads = {num_key_value_heads} and tensor_parallel = {tensor_parallel}: neither divides the other, or copies are not allowed",
    ),
    _rule(
        ffn,
        "tensor_parallel",
        "ffn_hidden_size = {ffn_hidden_size} (shared experts: {shared_ffn_hidden_size}) does not divide by tensor_parallel = {tensor_parallel}",
    ),
    _rule(
        vocabulary,
        "tensor_parallel",
        "vocab_size = {vocab_size} does not divide by tensor_parallel = {tensor_parallel} and padding is off",
    ),
    _rule(
        pipeline_depth,
        "pipeline_parallel",
        "pipeline_parallel = {pipeline_parallel} is above max_pipeline_parallel = {max_pipeline_parallel} or num_layers = {num_layers}",
    ),
    _rule(
        sequence,
        "tensor_parallel context_parallel",
        "seq_len = {seq_len} does not split over context_parallel = {context_parallel} (two chunks each, at least {min_context_tokens} tokens) and tensor_parallel = {tensor_parallel}",
    ),
    _rule(
        gpu_product,
        "tensor_parallel pipeline_parallel context_parallel data_parallel",
        "tensor {tensor_parallel} x pipeline {pipeline_parallel} x context {context_parallel} x data {data_parallel} = {gpus_asked}, not num_gpus = {num_gpus}",
    ),
    _rule(
        experts,
        "expert_parallel expert_tensor_parallel",
        "{expert_reason}",
    ),
    _rule(
        expert_tensor,
        "tensor_parallel expert_tensor_parallel",
        "expert_tensor_parallel = {expert_tensor_parallel} must be 1 or tensor_parallel = {tensor_parallel}, and divide moe_ffn_hidden_size = {moe_ffn_hidden_size}",
    ),
    _rule(
        expert_grid,
        "tensor_parallel context_parallel data_parallel expert_parallel expert_tensor_parallel",
        "tensor x context x data = {grid} does not divide by expert {expert_parallel} x expert tensor {expert_tensor_parallel}",
    ),
    _rule(replicas, "data_parallel", "global_batch_size = {global_batch_size} does not divide by data_parallel = {data_parallel}"),
    _rule(
        memory_floor,
        " ".join(MESH_AXES),
        "even with full recompute and all sharding the search allows, these groups need more than the {usable_gib:.1f} GiB of a GPU",
    ),
    _rule(
        batch,
        "data_parallel micro_batch_size",
        "global_batch_size = {global_batch_size} does not divide by data_parallel {data_parallel} x micro_batch_size {micro_batch_size}",
    ),
    _rule(
        layers,
        "pipeline_parallel virtual_pipeline",
        "pipeline {pipeline_parallel} x virtual {virtual_pipeline} asks for more chunks than num_layers = {num_layers}",
    ),
    _rule(
        interleaving,
        "pipeline_parallel data_parallel micro_batch_size virtual_pipeline",
        "virtual_pipeline = {virtual_pipeline} needs pipeline_parallel > 1 and a micro-batch for every stage; there are {num_micro_batches} for {pipeline_parallel} stages",
    ),
    _rule(
        schedule,
        "pipeline_parallel data_parallel micro_batch_size virtual_pipeline schedule",
        "schedule {schedule} does not suit virtual_pipeline = {virtual_pipeline}, pipeline_parallel = {pipeline_parallel} and {num_micro_batches} micro-batches",
    ),
    _rule(
        recompute_depth,
        "pipeline_parallel virtual_pipeline recompute recompute_layers",
        "recompute {recompute} with {recompute_layers} layers does not suit chunks of at most {deepest} layers",
    ),
)
"""In the order in which a layout is tried: it counts under the first rule that it breaks."""

MESH_RULES = tuple(rule for rule in RULES if set(rule.axes) <= set(MESH_AXES))
SPLIT_RULES = tuple(rule for rule in RULES if set(rule.axes) & set(SPLIT_AXES) and not set(rule.axes) & set(SWITCH_AXES))
SWITCH_RULES = tuple(rule for rule in RULES if set(rule.axes) & set(SWITCH_AXES))


def facts(layout: Layout, problem: Problem) -> Mapping[str, Any]:
    """All numbers that a message may name."""
    grid = layout.tensor_parallel * layout.context_parallel * layout.data_parallel
    no_experts = "the model has no experts, so expert_parallel and expert_tensor_parallel must be 1"
    derived = {
        "expert_reason": f"num_experts = {problem.num_experts} does not divide by expert_parallel = {layout.expert_parallel}"
        if problem.num_experts
        else no_experts,
        "num_micro_batches": num_micro_batches(layout, problem.global_batch_size),
        "grid": grid,
        "gpus_asked": grid * layout.pipeline_parallel,
        "deepest": deepest_chunk(layout, problem.num_layers),
        "usable_gib": problem.usable_kib / 2**20,
    }
    return {**vars(problem), **vars(layout), **derived}


def broken_rules(layout: Layout, problem: Problem) -> dict[str, str]:
    """Every rule that the layout breaks, with the sentence that names the numbers; empty when it is legal."""
    one = SimpleNamespace(**{axis: getattr(columns_of([layout]), axis) for axis in AXES})
    known = facts(layout, problem)
    return {rule.name: rule.broken.format(**known) for rule in RULES if not np.all(rule.holds(one, problem))}


def legal_values(layout: Layout, problem: Problem, axis: str, *, product: bool = False) -> list[int]:
    """The values of one axis, all others kept, that break none of the rules which read it.

    ``product``: the GPU product is asked too; without it the other groups are understood to make up for the change.
    """
    base = columns_of([layout])
    values = np.array(problem.domains[axis])
    trial = SimpleNamespace(**{other: values if other == axis else getattr(base, other) for other in AXES})
    allowed = np.ones(len(values), dtype=bool)
    for rule in RULES:
        if axis in rule.axes and (product or rule.name != "gpu_product"):
            allowed &= np.broadcast_to(rule.holds(trial, problem), values.shape)
    return [int(value) for value in values[allowed]]
