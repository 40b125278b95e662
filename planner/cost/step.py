"""Seconds of one optimizer step, in named parts that sum to it: the slowest stage, the pipeline's fill, what comes after."""

from __future__ import annotations

from dataclasses import dataclass, fields

import numpy as np

from planner.cost import communication as comm
from planner.cost import compute, parameters
from planner.cost.arrays import Floats, Number
from planner.cost.collectives import Network, all_gather_seconds, members_per_node, network_of
from planner.cost.layer import KEYS, LayerSeconds, layer_seconds
from planner.cost.memory import Params, pieces, stage_parameters
from planner.cost.schedules import SCHEDULES as SCHEDULE_TABLE
from planner.cost.stages import Stages, covered_in_all, covered_layers, layer_kinds, worst_stage
from planner.scenario import Job
from solver.grouping import distinct
from solver.layout import SCHEDULES, SELECTIVE, Columns, Ints, num_micro_batches


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


@dataclass(frozen=True)
class _Modes:
    """For each row the shares of its layers under none, selective and full recompute: shape (modes, n)."""

    shares: Floats

    def of(self, part: Floats, key: Ints) -> Floats:
        """A per-layer part (modes, keys) as seconds of the rows' average layer."""
        return np.asarray(sum(self.shares[mode] * part[mode][key] for mode in range(len(self.shares))))


def _modes_of(x: Columns, stage: Stages) -> _Modes:
    full = covered_layers(x, stage) / np.maximum(stage.layers, 1)
    selective = (x.recompute == SELECTIVE).astype(float)
    return _Modes(np.stack([(1.0 - full) * (1.0 - selective), selective, full]))


@dataclass(frozen=True)
class _Layers:
    """Both kinds of layers under every distinct key, and the key of each row."""

    key: Ints
    kinds: dict[bool, LayerSeconds]

    def sum(self, part: str, stage: Stages, modes: _Modes) -> Floats:
        """One part over the layers of a stage."""
        counts = {False: stage.dense_layers, True: stage.moe_layers}
        total: Number = 0.0
        for moe, layer in self.kinds.items():
            values: Floats = getattr(layer, part)
            each = modes.of(values, self.key) if values.ndim == 2 else values[self.key]
            total = total + counts[moe] * each
        return np.asarray(total)


def step_seconds(job: Job, x: Columns) -> StepSeconds:
    """The step of every layout: m micro-batches through the slowest stage, the fill, gradients, the optimizer.

    step = [max over stages (m stage + fill) + m (boundaries + overhead)] x stragglers + exposed gradients + optimizer.
    Source: Narayanan et al. 2021 for the form; every term as documented where it is computed.
    """
    physics, net, p, v = job.physics, network_of(job), x.pipeline_parallel, x.virtual_pipeline
    m = num_micro_batches(x, job.global_batch_size)
    layers = _layer_table(job, x)
    ends = _EndSeconds.of(job, x)
    boundary = comm.boundary_seconds(job, net, job.rank_tokens(x), x.tensor_parallel, p) * (p > 1)
    alone = _around_seconds(job, x, layers, ends)
    around = alone + 2.0 * p * boundary

    def passes(stage: Stages) -> tuple[Floats, Floats]:
        return _pass_seconds(layers, ends, stage, _modes_of(x, stage))

    def busy_and_idle(stage: Stages) -> Floats:
        forward, backward = passes(stage)
        return np.asarray(m * (forward + backward) + _fill_seconds(job, x, forward, backward, around, m))

    stage, _, _ = worst_stage(job, x, busy_and_idle)
    forward, backward = passes(stage)
    fill = _fill_seconds(job, x, forward, backward, around, m)
    modes = _modes_of(x, stage)
    steady = forward + backward
    per_boundary = 2.0 * v * physics.p2p_exposed * boundary
    per_batch = np.where(p > 1, physics.micro_batch_seconds, physics.micro_batch_no_pipeline_seconds)
    nodes = max(1.0, job.num_gpus / job.fast_domain)
    slowed = physics.straggler * np.log2(nodes) * (m * (steady + per_boundary + per_batch) + fill)
    params = _most_parameters(job, x)
    data = _data_seconds(job, net, x, params, forward, backward, fill, m)
    named = {part: m * layers.sum(part, stage, modes) for part in ("recompute", "launch", "tensor", "context", "expert", "sharding")}
    average = np.minimum(alone / p / steady, 1.0)  # of what the slowest stage does, part by part
    return StepSeconds(
        compute=average * (m * steady - sum(named.values())),
        imbalance=(1.0 - average) * m * steady,
        **{part: average * seconds for part, seconds in named.items()},
        pipeline=m * per_boundary,
        bubble=fill,
        data=data,
        optimizer=_optimizer_seconds(job, x, params),
        overhead=m * per_batch + slowed,
    )


def _layer_table(job: Job, x: Columns) -> _Layers:
    first, key = distinct(getattr(x, axis) for axis in KEYS)
    rows = x.take(first)
    return _Layers(key, {moe: layer_seconds(job, rows, moe=moe) for moe, present in layer_kinds(job.model).items() if present})


@dataclass(frozen=True)
class _EndSeconds:
    """Embedding on the first stage, head and loss on the last, per row and micro-batch."""

    embedding: Floats
    head_forward: Floats
    head_backward: Floats

    @staticmethod
    def of(job: Job, x: Columns) -> _EndSeconds:
        first, key = distinct([x.tensor_parallel, x.context_parallel, x.micro_batch_size])
        rows = x.take(first)
        rates = compute.rates_of(job)
        tokens = job.rank_tokens(rows)
        heads = 1 + job.num_mtp_layers
        forward, backward = compute.head_seconds(job, rates, tokens, rows.tensor_parallel)
        embedding = compute.embedding_seconds(job, rates, tokens)
        return _EndSeconds(embedding[key], heads * forward[key], heads * backward[key])

    def forward(self, stage: Stages) -> Floats:
        """Forward seconds at the ends that the stage holds."""
        return stage.has_embedding * self.embedding / 3 + stage.has_head * self.head_forward

    def backward(self, stage: Stages) -> Floats:
        """Backward seconds at the ends that the stage holds."""
        return stage.has_embedding * self.embedding * 2 / 3 + stage.has_head * self.head_backward


def _pass_seconds(layers: _Layers, ends: _EndSeconds, stage: Stages, modes: _Modes) -> tuple[Floats, Floats]:
    """Forward and backward of one micro-batch through a stage, ends included."""
    forward = layers.sum("forward", stage, modes) + ends.forward(stage)
    return forward, layers.sum("backward", stage, modes) + ends.backward(stage)


def _most_parameters(job: Job, x: Columns) -> Params:
    """Parameters of the stage that holds the most: its gradients and optimizer end the step, whichever stage computes longest."""
    piece = pieces(job, x)
    stage, _, _ = worst_stage(job, x, lambda stage: stage_parameters(job, x, stage, piece).whole)
    return stage_parameters(job, x, stage, piece)


def _whole_model(job: Job, x: Columns) -> Stages:
    """All stages together as one, to sum seconds over a pipeline."""
    model = job.model
    ones = np.ones(len(x), dtype=np.int64)
    dense, moe = model.num_layers - model.num_moe_layers, model.num_moe_layers
    if moe:
        moe += job.num_mtp_layers
    else:
        dense += job.num_mtp_layers
    return Stages(0 * ones, dense * ones, moe * ones, model.num_layers * ones, ones, ones, covered_in_all(job, x))


def _around_seconds(job: Job, x: Columns, layers: _Layers, ends: _EndSeconds) -> Floats:
    """One micro-batch forward and backward through all stages."""
    everything = _whole_model(job, x)
    return np.asarray(sum(_pass_seconds(layers, ends, everything, _modes_of(x, everything))))


def _fill_seconds(job: Job, x: Columns, forward: Floats, backward: Floats, around: Floats, m: Ints) -> Floats:
    """Idle seconds of the pipeline's fill and drain under each row's schedule; 0 without a pipeline.

    Unless the optimizer is validated afterwards every stage waits for the last one, which begins when the first
    micro-batch reaches it: at least (p - 1) F / v. Source: Qi et al. 2023, section 4 and table 10.
    """
    p, v = x.pipeline_parallel, x.virtual_pipeline
    plain = SCHEDULE_TABLE["1f1b"].fill(forward, backward, around, m, p, v)
    fill = np.zeros(len(x))
    first_arrival = 0.0 if job.software.post_validation else (p - 1) * forward / v
    for code in np.unique(x.schedule):
        schedule = SCHEDULE_TABLE[SCHEDULES[code]]
        seconds = schedule.fill(forward, backward, around, m, p, v)
        if schedule.residue:
            seconds = np.maximum(np.maximum(seconds, job.physics.zero_bubble_residue * plain), first_arrival)
        fill = np.where(x.schedule == code, seconds, fill)
    return np.where(p > 1, fill, 0.0)


def _data_seconds(job: Job, net: Network, x: Columns, params: Params, forward: Floats, backward: Floats, fill: Floats, m: Ints) -> Floats:
    """Exposed reduction of the stage's gradients and gathering of its parameters, once per step (ZeRO-3: in its layers).

    ZeRO-2 without a pipeline scatters every micro-batch's gradients, each behind its own backward, which it disturbs
    as ZeRO-3's transfers do.
    """
    s, zero = job.software, x.zero_stage
    replicas = comm.data_group(net, x.tensor_parallel, x.context_parallel, x.data_parallel)
    expert_group = comm.expert_data_group(net, job, x.pipeline_parallel, x.expert_parallel, x.expert_tensor_parallel)

    def over_replicas(bytes_each: Number) -> Floats:
        dense = comm.shard_gather_seconds(job, net, bytes_each * params.dense, replicas)
        if not job.model.num_moe_layers:
            return np.asarray(dense)
        return np.asarray(dense + comm.shard_gather_seconds(job, net, bytes_each * params.expert, expert_group))

    reduce = over_replicas(s.reduce_bytes)
    gather = np.where(zero == 0, reduce, over_replicas(s.weight_bytes))
    exposed = comm.gradient_seconds(job, reduce, gather, backward, forward, fill)
    each_time = (zero == 2) & (x.pipeline_parallel == 1) & (replicas.size > 1)
    late = np.maximum(reduce - job.physics.data_window * backward, 0.0)
    disturbed = job.physics.fsdp_disturbance * s.reduce_bytes * params.whole / job.link_bytes_per_s
    exposed = exposed + np.where(each_time, (m - 1) * late + m * disturbed, 0.0)
    tied: Number = 0.0
    if job.model.tied_embeddings:
        words = parameters.padded_vocabulary(job.model, x.tensor_parallel, s.vocab_multiple) * job.model.hidden_size
        stride = job.num_gpus // x.pipeline_parallel
        pair = all_gather_seconds(net, 2.0 * s.reduce_bytes * words / x.tensor_parallel, 2, members_per_node(2, stride, net.domain))
        tied = np.where(x.pipeline_parallel > 1, pair, 0.0)
    return np.asarray(np.where(comm.gathers_weights(zero, replicas.size), 0.0, exposed) + tied)


def _optimizer_seconds(job: Job, x: Columns, params: Params) -> Floats:
    """Clearing, scaling and norm of the gradients, Adam over the sharded states, and the step's fixed time."""
    physics, s = job.physics, job.software
    own = np.where(x.zero_stage >= 1, params.sharded, params.whole)
    traffic = physics.optimizer_traffic_bytes if s.optimizer_bytes > 4 else physics.half_optimizer_traffic_bytes
    fsdp = comm.gathers_weights(x.zero_stage, params.dense_replicas)
    gradients = np.where(fsdp, 0.0, physics.gradient_passes * s.reduce_bytes * params.whole)
    fixed = s.fixed_step_seconds * (physics.fixed_step_graphs if s.cuda_graphs != "none" else 1.0)
    return np.asarray((gradients + traffic * own) / compute.rates_of(job).hbm + fixed)
