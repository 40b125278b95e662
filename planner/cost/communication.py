"""Exposed seconds of each kind of communication: tensor, context, expert, pipeline, sharded weights, gradients."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from planner.cost.arrays import Number, smooth_max
from planner.cost.collectives import (
    Network,
    all_gather_seconds,
    all_to_all_seconds,
    members_per_node,
    point_to_point_seconds,
)
from planner.scenario import Job


def tensor_seconds(job: Job, net: Network, tokens: Number, tensor: Number, blocks: float) -> tuple[Number, Number]:
    """Exposed tensor-parallel transfers of a layer, forward and backward.

    Each block (attention, MLP) gathers and scatters the S h activations once per direction, with or without sequence
    parallelism (an all-reduce is one of each). The backward hides part behind the weight-gradient products.
    Source: Korthikanti et al. 2022, section 4.2.2; exposed shares per stack fitted.
    """
    per_node = members_per_node(tensor, 1, net.domain)
    call = all_gather_seconds(net, 2.0 * tokens * job.model.hidden_size, tensor, per_node)
    calls = 2.0 * blocks
    return calls * job.software.tensor_exposed_forward * call, calls * job.software.tensor_exposed_backward * call


def context_seconds(job: Job, net: Network, batch: Number, tensor: Number, context: Number) -> tuple[Number, Number]:
    """Exposed exchange of keys and values over a context group, forward and twice that backward.

    4 s b n_kv d / t bytes per layer; for latent attention K and V are as wide as their heads.
    """
    model = job.model
    if model.kv_lora_rank:
        width = model.num_attention_heads * (model.qk_head_dim + model.v_head_dim) / 2
    else:
        width = np.maximum(model.num_key_value_heads, tensor) * model.head_dim
    per_node = members_per_node(context, tensor, net.domain)
    call = all_gather_seconds(net, 4.0 * job.seq_len * batch * width / tensor, context, per_node)
    forward = job.physics.context_exposed * call
    return forward, 2.0 * forward


def expert_seconds(job: Job, net: Network, tokens: Number, tensor: Number, expert: Number, split: Number) -> Number:
    """Exposed dispatch and combine of a mixture-of-experts layer, one direction of the pass (two all-to-alls).

    T h 2 bytes each with T = S k / t routed copies of the rank's tokens; a split expert also gathers over its group.
    """
    model, share = job.model, job.software.expert_exposed
    routed = 2.0 * tokens * model.experts_per_token * model.hidden_size / tensor
    per_node = members_per_node(expert, split, net.domain)
    exchange = 2.0 * all_to_all_seconds(net, routed, expert, per_node, max(model.experts_per_token, 1))
    gather = 2.0 * all_gather_seconds(net, routed * split, split, members_per_node(split, 1, net.domain))
    return share * exchange + job.software.tensor_exposed_forward * gather


def boundary_seconds(job: Job, net: Network, tokens: Number, tensor: Number, pipeline: Number) -> Number:
    """One activation (or its gradient) to the next stage: 2 S h bytes, 1/t of it per GPU where the stack scatters."""
    parts = tensor if job.software.p2p_scattered else 1
    sent = 2.0 * tokens * job.model.hidden_size / parts
    inside = (pipeline > 1) & (job.num_gpus <= net.domain)  # else some neighbours sit in different nodes
    return point_to_point_seconds(net, sent, inside, job.physics.p2p_latency_seconds)


@dataclass(frozen=True)
class ShardGroup:
    """The ranks over which a set of parameters is replicated, and how many of them share a node."""

    size: Number
    per_node: Number


def data_group(net: Network, tensor: Number, context: Number, data: Number) -> ShardGroup:
    """Replicas of the dense parameters: data x context ranks, every ``tensor``-th rank."""
    size = data * context
    return ShardGroup(size, members_per_node(size, tensor, net.domain))


def expert_data_group(net: Network, job: Job, pipeline: Number, expert: Number, split: Number) -> ShardGroup:
    """Replicas of an expert: what is left of a stage's GPUs beside its expert grid."""
    size = job.num_gpus // (pipeline * expert * split)
    return ShardGroup(size, members_per_node(size, expert * split, net.domain))


def shard_gather_seconds(job: Job, net: Network, full_bytes: Number, group: ShardGroup) -> Number:
    """All-gather (or reduce-scatter) of parameters sharded over their replicas."""
    seconds = all_gather_seconds(net, full_bytes, group.size, group.per_node)
    share = job.software.single_nic_share
    if not share:
        return seconds
    slow = full_bytes / (share * job.nic_bytes_per_s)
    return np.where(group.size > group.per_node, slow, seconds)


def gathers_weights(zero_stage: Number, replicas: Number) -> Number:
    """Whether weights are gathered layer by layer: ZeRO-3 with more than one replica. A lone one runs as without sharding."""
    return (zero_stage == 3) & (replicas > 1)


def sharded_pass(compute: Number, transfer: Number, traffic: Number, job: Job) -> Number:
    """A layer's pass under ZeRO-3: transfers hide behind compute, yet disturb it by their bytes over the fast link.

    Source: fitted on FSDP runs; a transfer that crawls over a slow NIC hardly disturbs the SMs.
    """
    return smooth_max(compute, transfer, 4) + job.physics.fsdp_disturbance * traffic / job.link_bytes_per_s


def gradient_seconds(job: Job, reduce: Number, gather: Number, backward: Number, forward: Number, fill: Number) -> Number:
    """Exposed gradient reduction and parameter gathering of one step.

    What hides the reduction is the last micro-batch's backward on the stage, and half of the pipeline's drain; the
    gathering the first micro-batch's forward. Stacks that do not overlap expose all of it.
    Source: structure fitted on measured runs (not all micro-batches hide it: that would be 4-10 % off).
    """
    physics = job.physics
    if not job.software.data_overlap:
        return reduce + gather
    idle = physics.fill_window * fill
    late_reduce = np.maximum(0.0, reduce - physics.data_window * backward - idle)
    late_gather = np.maximum(0.0, gather - physics.data_window * forward - idle)
    return late_reduce + late_gather + physics.data_residue * (reduce + gather)
