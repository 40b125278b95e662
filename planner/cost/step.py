"""Seconds of one optimizer step, in named parts that sum to it: the slowest stage, the pipeline's fill, what comes after."""

from __future__ import annotations

import functools
from dataclasses import dataclass, fields, replace

import numpy as np

from planner.cost import communication as comm
from planner.cost import compute, parameters
from planner.cost.arrays import Floats, Number
from planner.cost.collectives import all_gather_seconds, members_per_node, network_of
from planner.cost.memory import Params, pieces, stage_parameters
from planner.cost.passes import Passes
from planner.cost.schedules import fills as schedule_fills
from planner.cost.stages import Stages, chosen, each_candidate
from planner.scenario import Job
from solver.layout import SCHEDULES, Columns, Ints, num_micro_batches


@dataclass(frozen=True)
class StepSeconds:
    """The parts of a step; arrays of one length. All but the last four are of the slowest stage, what it has beyond the average apart."""

    compute: Floats
    """Forward and backward kernels, embedding, head and loss included, as far as an average stage has them."""
    imbalance: Floats
    """What the slowest stage computes beyond the average stage."""
    recompute: Floats
    launch: Floats
    """GPU waiting for the CPU to launch kernels."""
    tensor: Floats
    context: Floats
    expert: Floats
    sharding: Floats
    """ZeRO-3 gathers and scatters that compute does not hide, and their disturbance of it."""
    pipeline: Floats
    """Stage boundaries."""
    bubble: Floats
    """Filling and draining the pipeline."""
    data: Floats
    """Gradient reduction and parameter gathering that nothing hides."""
    optimizer: Floats
    overhead: Floats
    """Fixed time per micro-batch, and stragglers."""

    @property
    def total(self) -> Floats:
        """Seconds of the step."""
        return np.asarray(sum(getattr(self, field.name) for field in fields(self)))

    @property
    def exposed_communication(self) -> Floats:
        """All communication that adds to the step."""
        return self.tensor + self.context + self.expert + self.sharding + self.pipeline + self.data

    def take(self, index: object) -> StepSeconds:
        """The selected rows."""
        return StepSeconds(*(getattr(self, field.name)[index] for field in fields(self)))


def step_seconds(job: Job, x: Columns) -> StepSeconds:
    """The step of every layout: m micro-batches through the slowest stage, the fill, gradients, the optimizer.

    step = [max over stages (m stage + fill) + m (boundaries + overhead)] x stragglers + exposed gradients + optimizer.
    Source: Narayanan et al. 2021 for the form; every term as documented where it is computed.
    """
    p = x.pipeline_parallel
    m = num_micro_batches(x, job.global_batch_size)
    passes = Passes.of(job, x)
    candidates, alike = each_candidate(job, x)
    through = [passes.through(stage) for stage in candidates]
    alone: Floats = np.asarray(sum(count * (forward + backward) for count, (forward, backward) in zip(alike, through, strict=True)))
    around = alone + 2.0 * p * boundary_seconds(job, x)
    fills = [_fill_seconds(job, x, forward, backward, around, m) for forward, backward in through]
    longest = [m * (forward + backward) + fill for (forward, backward), fill in zip(through, fills, strict=True)]
    slowest, rows = np.argmax(longest, axis=0), np.arange(len(x))
    stage = chosen(candidates, slowest)
    forward, backward = (np.stack([one[side] for one in through])[slowest, rows] for side in (0, 1))
    fill = np.stack(fills)[slowest, rows]
    steady = forward + backward
    per_boundary, per_batch = between_seconds(job, x)
    slowed = stragglers(job) * (m * (steady + per_boundary + per_batch) + fill)
    params = _most_parameters(job, x, candidates)
    data = _data_seconds(job, x, params, forward, backward, fill, m)
    own = passes.parts(("recompute", "launch", "tensor", "context", "expert", "sharding"), stage)
    named = {part: m * seconds for part, seconds in own.items()}
    average = np.minimum(alone / p / steady, 1.0)  # of what the slowest stage does, part by part
    return StepSeconds(
        compute=average * (m * steady - sum(named.values())),
        imbalance=(1.0 - average) * m * steady,
        **{part: average * seconds for part, seconds in named.items()},
        pipeline=m * per_boundary,
        bubble=fill,
        data=data,
        optimizer=optimizer_seconds(job, x, params),
        overhead=m * per_batch + slowed,
    )


def _most_parameters(job: Job, x: Columns, candidates: list[Stages]) -> Params:
    """The most dense and the most expert parameters that a stage holds: whose transfers and optimizer end the step.

    Each kind is reduced and sharded over a group of its own, so each counts where there is most of it.
    """
    piece = pieces(job, x)
    held = [stage_parameters(job, x, stage, piece) for stage in candidates]
    dense, expert = (np.max([getattr(params, kind) for params in held], axis=0) for kind in ("dense", "expert"))
    return replace(held[0], dense=dense, expert=expert)


def boundary_seconds(job: Job, x: Columns) -> Floats:
    """One transfer to the next stage; 0 without a pipeline."""
    seconds = comm.boundary_seconds(job, network_of(job), job.rank_tokens(x), x.tensor_parallel, x.pipeline_parallel)
    return np.asarray(seconds * (x.pipeline_parallel > 1))


def between_seconds(job: Job, x: Columns) -> tuple[Floats, Floats]:
    """What every micro-batch adds to the stage's own work: exposed transfers at the stage's boundaries, and a fixed time."""
    physics = job.physics
    transfers = 2.0 * x.virtual_pipeline * physics.p2p_exposed * boundary_seconds(job, x)
    return transfers, np.where(x.pipeline_parallel > 1, physics.micro_batch_seconds, physics.micro_batch_no_pipeline_seconds)


def stragglers(job: Job) -> float:
    """Share by which the slowest of many nodes lengthens the pipeline's work."""
    return job.physics.straggler * float(np.log2(max(1.0, job.num_gpus / job.fast_domain)))


def fills_of(job: Job, schedule: str, *times: Number) -> list[Number]:
    """The lower bounds on a schedule's fill under a job's stack; ``times`` as :func:`planner.cost.schedules.fills` has them."""
    return schedule_fills(schedule, *times, residue=job.physics.zero_bubble_residue, synchronised=not job.software.post_validation)


def _fill_seconds(job: Job, x: Columns, forward: Floats, backward: Floats, around: Floats, m: Ints) -> Floats:
    """Idle seconds of the pipeline's fill and drain under each row's schedule; 0 without a pipeline."""
    p, v = x.pipeline_parallel, x.virtual_pipeline
    fill = np.zeros(len(x))
    for code in np.unique(x.schedule):
        longest = functools.reduce(np.maximum, fills_of(job, SCHEDULES[code], forward, backward, around, m, p, v))
        fill = np.where(x.schedule == code, longest, fill)
    return np.where(p > 1, fill, 0.0)


def gradient_transfers(job: Job, x: Columns, params: Params) -> tuple[Floats, Floats]:
    """Seconds to reduce a stage's gradients over its replicas, and to gather its parameters again, hidden or not."""
    net, s = network_of(job), job.software
    replicas = comm.data_group(net, x.tensor_parallel, x.context_parallel, x.data_parallel)
    expert_group = comm.expert_data_group(net, job, x.pipeline_parallel, x.expert_parallel, x.expert_tensor_parallel)

    def over_replicas(bytes_each: Number) -> Floats:
        dense = comm.shard_gather_seconds(job, net, bytes_each * params.dense, replicas)
        if not job.model.num_moe_layers:
            return np.asarray(dense)
        return np.asarray(dense + comm.shard_gather_seconds(job, net, bytes_each * params.expert, expert_group))

    reduce = over_replicas(s.reduce_bytes)
    return reduce, np.where(x.zero_stage == 0, reduce, over_replicas(s.weight_bytes))


def _data_seconds(job: Job, x: Columns, params: Params, forward: Floats, backward: Floats, fill: Floats, m: Ints) -> Floats:
    """Exposed reduction of the stage's gradients and gathering of its parameters, once per step (ZeRO-3: in its layers).

    ZeRO-2 without a pipeline scatters every micro-batch's gradients, each behind its own backward, which it disturbs
    as ZeRO-3's transfers do.
    """
    s, zero, replicas = job.software, x.zero_stage, x.data_parallel * x.context_parallel
    reduce, gather = gradient_transfers(job, x, params)
    exposed = comm.gradient_seconds(job, reduce, gather, backward, forward, fill)
    each_time = (zero == 2) & (x.pipeline_parallel == 1) & (replicas > 1)
    late = np.maximum(reduce - job.physics.data_window * backward, 0.0)
    disturbed = job.physics.fsdp_disturbance * s.reduce_bytes * params.whole / job.link_bytes_per_s
    exposed = exposed + np.where(each_time, (m - 1) * late + m * disturbed, 0.0)
    return np.asarray(np.where(comm.gathers_weights(zero, replicas), 0.0, exposed) + _tied_seconds(job, x))


def _tied_seconds(job: Job, x: Columns) -> Floats:
    """Adding up the gradients of embeddings that both ends of a pipeline hold."""
    if not job.model.tied_embeddings:
        return np.zeros(len(x))
    net, multiple = network_of(job), job.software.vocab_multiple
    words = parameters.padded_vocabulary(job.model, x.tensor_parallel, multiple) * job.model.hidden_size
    stride = job.num_gpus // x.pipeline_parallel
    sent = 2.0 * job.software.reduce_bytes * words / x.tensor_parallel
    pair = all_gather_seconds(net, sent, 2, members_per_node(2, stride, net.domain))
    return np.where(x.pipeline_parallel > 1, pair, 0.0)


def optimizer_seconds(job: Job, x: Columns, params: Params) -> Floats:
    """Clearing, scaling and norm of the gradients, Adam over the sharded states, and the step's fixed time."""
    physics, s = job.physics, job.software
    own = np.where(x.zero_stage >= 1, params.sharded, params.whole)
    traffic = physics.optimizer_traffic_bytes if s.optimizer_bytes > 4 else physics.half_optimizer_traffic_bytes
    fsdp = comm.gathers_weights(x.zero_stage, params.dense_replicas)
    gradients = np.where(fsdp, 0.0, physics.gradient_passes * s.reduce_bytes * params.whole)
    fixed = s.fixed_step_seconds * (physics.fixed_step_graphs if s.cuda_graphs != "none" else 1.0)
    return np.asarray((gradients + traffic * own) / compute.rates_of(job).hbm + fixed)
