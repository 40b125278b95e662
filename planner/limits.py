"""Pruning limits that need physics, as the integers that the solver's memory floor reads."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass

from planner.catalogue.schema import Software
from planner.cost import parameters
from planner.cost.memory import MOST_ROOM_SHARE
from planner.scenario import Job, optimizer_state_bytes

KIB = 1024


@dataclass(frozen=True)
class MemoryFloor:
    """Least memory of any layout, in the terms of :class:`solver.problem.Problem`; every number rounds in favour of fitting."""

    usable_kib: int
    whole_dense_kib: int
    whole_expert_kib: int
    sharded_kib: int
    kept_kib: int


def least_state_bytes(stack: Software, zero_stages: Iterable[int], optimizer: str) -> tuple[float, float]:
    """Bytes per parameter that the highest ZeRO stage of the search leaves whole, and that it shards.

    Gradients of a stack that frees them early may not meet the peak, so they do not count there.
    """
    highest = max(zero_stages)
    gradient = 0.0 if stack.lazy_gradients else stack.gradient_bytes
    states = optimizer_state_bytes(min(stack.optimizer_bytes, stack.moe_optimizer_bytes), optimizer)
    whole, sharded = [stack.weight_bytes, gradient, states], [0.0, 0.0, 0.0]
    if highest >= 1:
        whole[2], sharded[2] = 0.0, states
    if highest >= 2 and stack.sharded_gradients:
        whole[1], sharded[1] = 0.0, gradient
    if highest == 3:
        whole[0], sharded[0] = 0.0, min(stack.weight_bytes, stack.sharded_weights_bytes)
    return sum(whole), sum(sharded)


def memory_floor(job: Job, stacks: Iterable[Software], zero_stages: Iterable[int]) -> MemoryFloor:
    """The floor under every stack that the search may cost a layout with."""
    stacks, zero_stages = list(stacks), list(zero_stages)
    expert = parameters.routed(job.model)
    dense = parameters.total(job.model) - expert
    bytes_each = [least_state_bytes(stack, zero_stages, job.optimizer) for stack in stacks]
    whole, sharded = min(b[0] for b in bytes_each), min(b[1] for b in bytes_each)
    return MemoryFloor(
        usable_kib=math.ceil(max(_most_tensor_bytes(job, stack) for stack in stacks) / KIB),
        whole_dense_kib=int(whole * dense / KIB),
        whole_expert_kib=int(whole * expert / KIB),
        sharded_kib=int(sharded * (dense + expert) / KIB),
        kept_kib=int(2.0 * job.seq_len * job.model.hidden_size / KIB),
    )


def _most_tensor_bytes(job: Job, stack: Software) -> float:
    """Tensors beyond which the verdict is "out of memory" whatever they are made of: the widest uncertainty applies."""
    physics, usable = job.physics, job.gpu.memory_bytes
    widest = math.hypot(stack.memory_uncertainty, physics.loss_uncertainty, min(physics.room_uncertainty_bytes / usable, MOST_ROOM_SHARE))
    need = usable * math.exp(physics.oom_sigmas * widest)
    return max((need - stack.context_bytes - stack.communicator_bytes) / (1.0 + stack.reserve_share), 0.0)
