"""A proven lower bound on the step of a layout under any split of its layers over the stages."""

from __future__ import annotations

import dataclasses
import functools

import numpy as np

from planner.cost.arrays import Floats, Number
from planner.cost.communication import gathers_weights
from planner.cost.memory import Params, pieces, stage_parameters
from planner.cost.passes import Passes, whole_model
from planner.cost.schedules import SCHEDULES as SCHEDULE_TABLE
from planner.cost.stages import Stages
from planner.cost.step import between_seconds, boundary_seconds, fills_of, gradient_transfers, optimizer_seconds, step_seconds, stragglers
from planner.scenario import Job
from solver.layout import AXES, MESH_AXES, SCHEDULES, SPLIT_AXES, V_CODES, Columns, Ints, num_micro_batches
from solver.problem import divisors

HALVINGS = 26
"""Of the interval that holds the least longest stage: enough for seven digits, and its lower end is a bound at any."""

PLAIN_FILLS = [code for code, name in enumerate(SCHEDULES) if not SCHEDULE_TABLE[name].residue]
"""Schedules whose fill is what is left of the way around."""

TINY = 1e-12
"""Seconds: keeps a weight of nothing from dividing by zero."""

SAFETY = 1e-9
"""Share taken off the bound, so that the last bits of a sum never break it."""


def least_step_seconds(job: Job, x: Columns) -> Floats:
    """Seconds below which no split of a layout's layers can bring its step.

    Memory is no limit, the parameters are perfectly balanced and their transfers hidden as well as can be, of two kinds
    of layers only the experts take room. Without a pipeline there is nothing to split: the step itself. Source: the terms
    of :func:`planner.cost.step.step_seconds`, each replaced by the least that a split can make of it; the longest stage by
    the least longest one (:func:`least_longest`).
    """
    bound = np.empty(len(x))
    staged = x.pipeline_parallel > 1
    bound[staged] = _least_with_stages(job, x.take(staged))
    bound[~staged] = step_seconds(job, x.take(~staged)).total
    return bound


def _least_with_stages(job: Job, x: Columns) -> Floats:
    p, m = x.pipeline_parallel, num_micro_batches(x, job.global_batch_size)
    passes = Passes.of(job, x)
    forward, backward, total = main_weights(job, x, m)
    all_forward, all_backward = passes.through(whole_model(job, x))
    average = (forward * all_forward + backward * all_backward) / p
    longest = np.maximum(least_longest(job, x, passes, forward, backward), average)
    around = all_forward + all_backward + 2.0 * p * boundary_seconds(job, x)
    pipeline = (1.0 + stragglers(job)) * (longest + total * around + m * sum(between_seconds(job, x)))
    params = average_parameters(job, x)
    one_pass = longest / np.maximum(np.minimum(forward, backward), TINY)
    data = least_exposed(job, x, params, one_pass, np.maximum(around - one_pass, 0.0) / x.virtual_pipeline)
    return np.asarray((pipeline + data + optimizer_seconds(job, x, params)) * (1.0 - SAFETY))


def least_exposed(job: Job, x: Columns, params: Params, one_pass: Floats, fill: Floats) -> Floats:
    """The least of the gradients' reduction and the parameters' gathering that a step of the least longest stage exposes.

    Forward and backward of one micro-batch and the fill hide them, in whatever proportions. A stage that takes longer
    hides more, yet lengthens the step by more than that from two micro-batches on; so the least longest stage is where
    both together are least. Zero-bubble fills and single micro-batches: all is hidden but the residue that nothing hides.
    """
    reduce, gather = gradient_transfers(job, x, params)
    exposed = reduce + gather
    if job.software.data_overlap:
        physics = job.physics
        window, idle = physics.data_window * one_pass, physics.fill_window * fill
        late = np.maximum(np.maximum(reduce, gather) - window - idle, exposed - window - 2.0 * idle)
        costs_more = physics.data_window <= 1.0 and 2.0 * physics.fill_window <= 1.0  # else longer stages might pay
        countable = (num_micro_batches(x, job.global_batch_size) > 1) & np.isin(x.schedule, PLAIN_FILLS) & costs_more
        exposed = physics.data_residue * exposed + np.where(countable, np.maximum(late, 0.0), 0.0)
    return np.where(gathers_weights(x.zero_stage, x.data_parallel * x.context_parallel), 0.0, exposed)


def main_weights(job: Job, x: Columns, m: Ints) -> tuple[Floats, Floats, Floats]:
    """What a stage's forward, its backward and the way around the pipeline weigh in m micro-batches and the fill."""
    weights = np.zeros((3, len(x)))
    for code in np.unique(x.schedule):
        own = linear_fills(job, SCHEDULES[code], m, x.pipeline_parallel, x.virtual_pipeline)[0]
        weights = np.where(x.schedule == code, np.stack([w + 0.0 * m for w in own]), weights)
    return weights[0] + m, weights[1] + m, weights[2]


def linear_fills(job: Job, schedule: str, m: Number, p: Number, v: Number) -> list[tuple[Number, Number, Number]]:
    """The weights of forward, backward and the way around in each lower bound on a schedule's fill, read off at three points."""
    far = 1e3  # the way around exceeds what one stage does: there the fill of 1F1B is linear
    zero, forward, backward = (fills_of(job, schedule, f, b, far, m, p, v) for f, b in ((0.0, 0.0), (1.0, 0.0), (0.0, 1.0)))
    return [(f - z, b - z, z / far) for z, f, b in zip(zero, forward, backward, strict=True)]


def least_longest(job: Job, x: Columns, passes: Passes, forward: Floats, backward: Floats) -> Floats:
    """The least that the heaviest stage can weigh when its layers go where they fit best; found by halving an interval.

    A stage of weight T holds as many layers as fit beside its ends; T is too small while all stages together hold fewer
    layers than the model has. Layers beyond the covered depth of a stage are not recomputed.
    """

    def weight(**counts: Number) -> Floats:
        ones = np.ones(len(x), dtype=np.int64)
        stage = Stages(*(counts.get(field.name, 0) * ones for field in dataclasses.fields(Stages)))
        f, b = passes.through(stage)
        return np.asarray(forward * f + backward * b)

    kind, num_layers = ("moe_layers", job.model.num_moe_layers) if job.model.num_moe_layers else ("dense_layers", job.model.num_layers)
    # a single micro-batch meets every stage once, whichever layers it holds: there a layer weighs nothing
    plain, covered = (np.maximum(weight(**{kind: 1, **more}), TINY) for more in ({}, {"recomputed": 1}))
    embedding, head = weight(has_embedding=1), weight(has_head=1, **{kind: job.num_mtp_layers})
    others, p = job.model.num_layers - num_layers, x.pipeline_parallel
    if others:  # a first stage of one chunk that holds an expert layer holds all dense layers, which come before it
        embedding = embedding + (x.virtual_pipeline == 1) * others * weight(dense_layers=1)
    # dense layers may take up to so much of a stage's covered depth
    deep = np.maximum(x.virtual_pipeline * x.recompute_layers - others, 0)
    together = np.isin(x.schedule, V_CODES)  # both ends on the first stage
    ends = np.where(together, embedding + head, embedding), np.where(together, np.inf, head)
    least, most = np.zeros(len(x)), embedding + head + num_layers * covered
    for _ in range(HALVINGS):
        middle = 0.5 * (least + most)
        held = (p - np.where(together, 1, 2)) * capacity(middle, plain, covered, deep)
        held = held + sum(capacity(middle - end, plain, covered, deep) for end in ends)
        enough = held >= num_layers
        least, most = np.where(enough, least, middle), np.where(enough, middle, most)
    return least


def capacity(room: Floats, plain: Floats, covered: Floats, deep: Ints) -> Floats:
    """Layers that fit into some weight, the first ``deep`` of them recomputed.

    >>> [float(capacity(np.array(room), 2.0, 3.0, 2)) for room in (2.0, 6.0, 11.0, -1.0)]
    [0.0, 2.0, 4.0, 0.0]
    """
    inside = np.minimum(np.floor(np.maximum(room, 0.0) / covered), deep)
    beyond = np.floor(np.maximum(room - deep * covered, 0.0) / plain)
    return np.asarray(inside + beyond)


def average_parameters(job: Job, x: Columns) -> Params:
    """Parameters of a stage if every stage held the same."""
    params = stage_parameters(job, x, whole_model(job, x), pieces(job, x))
    share = 1.0 / x.pipeline_parallel
    return dataclasses.replace(params, dense=share * params.dense, expert=share * params.expert)


MANY_GPUS = 1 << 22
"""Stands for any number of them: kernels do not ask."""

MOST_CONTEXT = 256
"""Context-parallel sizes beyond are not tried for the least work: attention's kernels gain nothing there."""


@functools.lru_cache(maxsize=64)
def _least_work(job: Job) -> float:
    model = job.model
    axes = {
        "tensor_parallel": divisors(model.num_attention_heads),
        "context_parallel": [c for c in divisors(job.seq_len) if c <= MOST_CONTEXT],
        "micro_batch_size": divisors(job.global_batch_size),
        "expert_parallel": divisors(model.num_experts) if model.num_experts else [1],
        "expert_tensor_parallel": divisors(model.num_attention_heads) if model.num_experts else [1],
    }
    grid = dict(zip(axes, (part.ravel() for part in np.meshgrid(*map(np.array, axes.values()))), strict=True))
    ones = np.ones(len(grid["tensor_parallel"]), dtype=np.int64)
    sizes = {**dict.fromkeys(MESH_AXES + SPLIT_AXES, ones), **grid}
    x = Columns(**{axis: sizes.get(axis, 0 * ones) for axis in AXES})
    passes, whole = Passes.of(job, x), whole_model(job, x)
    kernels = passes.parts(("compute",), whole)["compute"] + passes.ends.forward(whole) + passes.ends.backward(whole)
    return float(np.min(kernels * x.tensor_parallel * x.context_parallel / x.micro_batch_size)) * job.global_batch_size


def least_work(job: Job) -> float:
    """GPU-seconds of a step's kernels alone, under the group sizes and the micro-batch that suit them best.

    No layout's GPUs do less, however many they are: forward and backward of every layer and of the ends, without
    launches, transfers, recompute, bubbles, gradients and optimizer. So step >= work / N.
    """
    return _least_work(dataclasses.replace(job, num_gpus=MANY_GPUS, layers_per_stage=(), recomputed_per_stage=())) * (1.0 - SAFETY)
