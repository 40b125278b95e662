"""Seconds of one layer on one GPU for one micro-batch, in named parts, for every distinct setting at once."""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np

from planner.cost import communication as comm
from planner.cost import compute, parameters
from planner.cost.arrays import Floats, Number, smooth_max
from planner.cost.collectives import Network, network_of
from planner.scenario import Job
from solver.layout import MESH_AXES, RECOMPUTE, Columns

KEYS = (*MESH_AXES, "micro_batch_size", "zero_stage")
"""The axes that a layer's seconds depend on."""


@dataclass(frozen=True)
class Kernels:
    """GPU seconds of a layer's own work, forward and backward, before launches and sharding."""

    linear_forward: Number
    linear_backward: Number
    attention_forward: Number
    attention_backward: Number
    mlp_forward: Number
    """The part of the linear forward that the MLP or the experts take."""
    elementwise_forward: Number
    elementwise_backward: Number
    accumulate: Number

    @property
    def forward(self) -> Number:
        """All forward kernels."""
        return self.linear_forward + self.attention_forward + self.elementwise_forward

    @property
    def backward(self) -> Number:
        """All backward kernels."""
        return self.linear_backward + self.attention_backward + self.elementwise_backward + self.accumulate


@dataclass(frozen=True)
class LayerSeconds:
    """One layer's pass in parts; arrays of one length. ``backward`` and ``recompute`` are indexed by recompute mode."""

    forward: Floats
    """Whole forward pass."""
    backward: Floats
    """Shape (modes, n): whole backward pass under none, selective and full recompute."""
    compute: Floats
    """Kernels of forward and backward, without recompute."""
    recompute: Floats
    """Shape (modes, n)."""
    tensor: Floats
    """Shape (modes, n), as the next two: exposed transfers; full recompute pays the forward ones again."""
    context: Floats
    expert: Floats
    sharding: Floats
    """Shape (modes, n): what ZeRO-3 transfers add."""
    launch: Floats
    """Shape (modes, n): waiting for the CPU to launch kernels."""

    def exposed(self) -> Floats:
        """Shape (modes, n): all communication that adds to the pass."""
        return self.sharding + self.tensor + self.context + self.expert


def dense_kernels(job: Job, x: Columns) -> Kernels:
    """Kernels of a layer with a dense MLP."""
    r = compute.rates_of(job)
    tokens = job.rank_tokens(x)
    t = x.tensor_parallel
    width = job.model.ffn_hidden_size
    mlp = compute.mlp_linears(job, r, tokens, width, t)
    elementwise = compute.elementwise_seconds(job, r, tokens, t, width / t)
    weights = parameters.attention_linear(job.model, t) + parameters.mlp(job.model, width, t)
    return _kernels(job, r, x, tokens, mlp, elementwise, weights)


def moe_kernels(job: Job, x: Columns) -> Kernels:
    """Kernels of a mixture-of-experts layer: routed experts as one grouped product, shared experts, permutation.

    Every local expert sees S k e e_t / (t E) tokens when routing is even; the fullest rank gets a little more.
    """
    model, physics = job.model, job.physics
    r = compute.rates_of(job)
    tokens = job.rank_tokens(x)
    t, split = x.tensor_parallel, x.expert_tensor_parallel
    local = model.num_experts / x.expert_parallel
    per_expert = tokens * model.experts_per_token * x.expert_parallel * split / (t * model.num_experts)
    routed = compute.mlp_linears(job, r, per_expert, model.moe_ffn_hidden_size, split, local)
    slow = physics.expert_imbalance / physics.grouped_factor
    forward, backward = routed[0] * slow, routed[1] * slow
    if model.shared_ffn_hidden_size:
        shared = compute.mlp_linears(job, r, tokens, model.shared_ffn_hidden_size, t)
        forward, backward = forward + shared[0], backward + shared[1]
    visits = model.experts_per_token / t
    channels = visits * model.moe_ffn_hidden_size + model.shared_ffn_hidden_size / t
    elementwise = compute.elementwise_seconds(job, r, tokens, t, channels)
    elementwise = elementwise + physics.permutation_passes * 4.0 * tokens * visits * model.hidden_size / r.hbm
    weights = (
        parameters.attention_linear(model, t)
        + parameters.mlp(model, model.shared_ffn_hidden_size, t)
        + parameters.experts(model, x.expert_parallel, split)
    )
    return _kernels(job, r, x, tokens, (forward, backward), elementwise, weights)


def _kernels(
    job: Job,
    r: compute.Rates,
    x: Columns,
    tokens: Number,
    mlp: tuple[Number, Number],
    elementwise: Number,
    weights: Number,
) -> Kernels:
    linear = compute.attention_linears(job, r, tokens, x.tensor_parallel)
    attention = compute.attention_core(job, r, x.micro_batch_size, x.tensor_parallel, x.context_parallel)
    return Kernels(
        linear_forward=linear[0] + mlp[0],
        linear_backward=linear[1] + mlp[1],
        attention_forward=attention[0],
        attention_backward=attention[1],
        mlp_forward=mlp[0],
        elementwise_forward=elementwise,
        elementwise_backward=2.0 * elementwise,
        accumulate=compute.accumulate_seconds(job, r, weights),
    )


def _shard_transfers(job: Job, net: Network, x: Columns, moe: bool) -> tuple[Number, Number, Number, Number]:
    """Seconds and bytes of one layer's weight gathering, then of its gradient scattering, under ZeRO-3."""
    model = job.model
    whole = parameters.moe_layer(model, x.tensor_parallel) if moe else parameters.dense_layer(model, x.tensor_parallel)
    replicas = comm.data_group(net, x.tensor_parallel, x.context_parallel, x.data_parallel)
    gather = comm.shard_gather_seconds(job, net, 2.0 * whole, replicas)
    scatter = comm.shard_gather_seconds(job, net, job.software.reduce_bytes * whole, replicas)
    if moe:
        expert = parameters.experts(model, x.expert_parallel, x.expert_tensor_parallel)
        group = comm.expert_data_group(net, job, x.pipeline_parallel, x.expert_parallel, x.expert_tensor_parallel)
        gather = gather + comm.shard_gather_seconds(job, net, 2.0 * expert, group)
        scatter = scatter + comm.shard_gather_seconds(job, net, job.software.reduce_bytes * expert, group)
        whole = whole + np.where(group.size > 1, expert, 0.0)
    return gather, 2.0 * whole, scatter, job.software.reduce_bytes * whole


def unsharded(job: Job, x: Columns, *, moe: bool) -> LayerSeconds:
    """A layer's forward and backward for each row of ``x`` on GPUs that hold its weights: whatever the pipeline and the replicas."""
    net = network_of(job)
    kernels = moe_kernels(job, x) if moe else dense_kernels(job, x)
    tokens = job.rank_tokens(x)
    t = x.tensor_parallel
    zeros = np.zeros(len(x))

    tensor = comm.tensor_seconds(job, net, tokens, t, 1.5 if moe else 2.0)
    context = comm.context_seconds(job, net, x.micro_batch_size, t, x.context_parallel)
    expert = comm.expert_seconds(job, net, tokens, t, x.expert_parallel, x.expert_tensor_parallel) if moe else zeros
    if moe:
        floor = compute.moe_launch_floor(job, job.model.num_experts / x.expert_parallel)
        power = 4.0
    else:
        floor, power = compute.launch_floor(job, t), 2.0
    floor = floor + zeros

    busy_forward = kernels.forward + tensor[0] + context[0] + expert
    forward = smooth_max(busy_forward, floor, power)
    again = _recomputed(job, kernels)
    busy_backward = kernels.backward + tensor[1] + context[1] + expert
    backward = np.stack(
        [
            smooth_max(busy_backward + again["none"], job.physics.floor_backward * floor, power),
            smooth_max(busy_backward + again["selective"], job.physics.floor_backward * floor, power),
            smooth_max(busy_backward, job.physics.floor_backward * floor, power) + forward,
        ]
    )
    repeated = np.stack([zeros, zeros, tensor[0] + context[0] + expert])
    recompute = np.stack([again["none"] + zeros, again["selective"] + zeros, kernels.forward])
    return LayerSeconds(
        forward=forward,
        backward=backward,
        compute=kernels.forward + kernels.backward + zeros,
        recompute=recompute,
        tensor=tensor[0] + tensor[1] + _again(tensor[0], zeros),
        context=context[0] + context[1] + _again(context[0], zeros),
        expert=2.0 * expert + _again(expert, zeros),
        sharding=np.zeros_like(backward),
        launch=forward + backward - (busy_forward + busy_backward + recompute + repeated),
    )


def sharded(job: Job, x: Columns, layer: LayerSeconds, *, moe: bool) -> LayerSeconds:
    """The layer with the transfers of ZeRO-3 in the rows of ``x`` that gather its weights."""
    gathering = comm.gathers_weights(x.zero_stage, x.data_parallel * x.context_parallel)
    if not np.any(gathering):  # many stacks never shard weights
        return layer
    gather, gather_bytes, scatter, scatter_bytes = _shard_transfers(job, network_of(job), x, moe)
    unhidden = job.physics.fsdp_first_layer / job.model.num_layers
    back = gather + scatter
    slower_forward = comm.sharded_pass(layer.forward, gather, gather_bytes, job) + unhidden * gather
    slower_backward = comm.sharded_pass(layer.backward, back, gather_bytes + scatter_bytes, job) + unhidden * back
    forward = np.where(gathering, slower_forward, layer.forward)
    backward = np.where(gathering, slower_backward, layer.backward)
    sharding = np.where(gathering, forward + backward - layer.forward - layer.backward, 0.0)
    return replace(layer, forward=forward, backward=backward, sharding=sharding)


def layer_seconds(job: Job, x: Columns, *, moe: bool) -> LayerSeconds:
    """A layer's forward and backward for each row of ``x`` (its schedule and recompute are not read)."""
    return sharded(job, x, unsharded(job, x, moe=moe), moe=moe)


def _again(forward_part: Number, zeros: Floats) -> Floats:
    """Full recompute pays a forward part once more: shape (modes, n)."""
    return np.stack([zeros, zeros, forward_part + zeros])


def _recomputed(job: Job, kernels: Kernels) -> dict[str, Number]:
    """GPU seconds that a partial recompute adds inside the backward pass."""
    nothing = 0.0 * kernels.attention_forward
    if job.software.selective_recompute == "ops":
        return {RECOMPUTE[0]: nothing, RECOMPUTE[1]: 0.5 * kernels.linear_forward + kernels.elementwise_forward}
    modules = job.software.recompute_modules
    again = nothing
    if "core_attn" in modules:
        again = again + kernels.attention_forward
    if "moe" in modules or "mlp" in modules:
        again = again + kernels.mlp_forward
    if "mla_up_proj" in modules:
        again = again + 0.5 * (kernels.linear_forward - kernels.mlp_forward)  # the up projections of queries, keys and values
    small = 0.25 * len({"layernorm", "moe_act", "moe", "mlp", "shared_experts"} & set(modules))
    return {RECOMPUTE[0]: nothing, RECOMPUTE[1]: again + min(small, 1.0) * kernels.elementwise_forward}
