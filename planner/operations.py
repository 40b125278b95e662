"""What surrounds the steps of a run: failures and restarts, checkpoints, evaluation, spare nodes, money and energy."""

from __future__ import annotations

import math
from dataclasses import dataclass
from statistics import NormalDist

import numpy as np

from planner.catalogue.schema import Operations
from planner.cost import parameters
from planner.cost.arrays import Floats, Number
from planner.frameworks.legality import jobs_by_framework
from planner.scenario import Job, Scenario, optimizer_state_bytes
from planner.units import SECONDS_PER_DAY
from solver.layout import Ints

GPUS_PER_SERVER = 8
"""A fast domain of more GPUs is a rack of several servers, each with storage, power and failures of its own."""

FULL_STATES_BYTES = 12.0
"""Per parameter of Adam in a checkpoint: fp32 weights and two moments, whatever else the stack keeps while it trains."""

MOST_EXPONENT = 200.0
"""Times between failures that fit into one segment, as far as they are told apart: a run under more never ends either."""


def mtbf_seconds(interruptions_per_1000_gpu_days: float, num_gpus: int) -> float:
    """Mean seconds between interruptions of a job: every GPU brings its share of them.

    >>> round(mtbf_seconds(0.4736, 16384) / 3600, 1), round(mtbf_seconds(0.4736, 2048) / 3600, 1)
    (3.1, 24.7)
    """
    rate = interruptions_per_1000_gpu_days * num_gpus
    return 1000.0 * SECONDS_PER_DAY / rate if rate else math.inf


def checkpoint_bytes(job: Job) -> float:
    """Bytes of one checkpoint: master weights and moments, and the working copy where the stack keeps one beside them.

    12 or 14 bytes per parameter under Adam. Source: Megatron-Core's distributed checkpoint (bf16 weights, fp32 master
    weights, two fp32 moments); FSDP saves its fp32 shards and the moments.
    """
    stack = job.software
    kept = stack.moe_optimizer_bytes if job.model.num_experts else stack.optimizer_bytes
    states = optimizer_state_bytes(min(kept, FULL_STATES_BYTES), job.optimizer)
    if stack.sharded_weights_bytes > stack.weight_bytes:  # the shards are the master weights: nothing stands beside them
        return parameters.total(job.model) * max(states, optimizer_state_bytes(FULL_STATES_BYTES, job.optimizer))
    return parameters.total(job.model) * (states + stack.weight_bytes)


def young_interval(stall: float, mtbf: float) -> float:
    """Seconds of work between checkpoints that waste least to first order: sqrt(2 C M).

    Source: Young 1974.

    >>> round(young_interval(18.0, 88_900.0))
    1789
    """
    return math.sqrt(2.0 * stall * mtbf)


def daly_interval(stall: float, mtbf: float) -> float:
    """The same to higher order, which short times between failures need: at most M.

    sqrt(2 C M) (1 + sqrt(C / 2M) / 3 + (C / 2M) / 9) - C; M where C >= 2 M. Source: Daly 2006, equation 37.

    >>> round(daly_interval(18.0, 88_900.0)), daly_interval(500.0, 200.0)
    (1777, 200.0)
    """
    if stall >= 2.0 * mtbf:
        return mtbf
    ratio = stall / (2.0 * mtbf)
    return young_interval(stall, mtbf) * (1.0 + math.sqrt(ratio) / 3.0 + ratio / 9.0) - stall


def first_order_waste(interval: Number, stall: float, mtbf: float, restart: float) -> Number:
    """Share of the time that is lost, to first order: C / tau + tau / 2M + R / M. Source: Young 1974.

    >>> round(first_order_waste(1789.0, 18.0, 88_900.0, 900.0), 4)
    0.0302
    """
    return stall / interval + interval / (2.0 * mtbf) + restart / mtbf


@dataclass(frozen=True)
class Shares:
    """Where the time of a run goes; the shares sum to one."""

    training: float
    """The goodput."""
    evaluation: float
    checkpoint: float
    """Training waits for checkpoints."""
    lost: float
    """Work since the last checkpoint, done again."""
    restart: float


def shares_of(*, interval: float, stall: float, mtbf: float, restart: float, behind: float, evaluation: float) -> Shares:
    """Where the time goes when every ``interval`` seconds of work a checkpoint stalls for ``stall``, failures being Poisson.

    A segment takes M e^(R/M) (e^((tau + C)/M) - 1) seconds on average (Daly 2006, equation 20), of it 1 - e^(-R/M) in
    restarts. A checkpoint that is written ``behind`` the training for so many seconds is of no use until then, so each
    failure loses as much more. ``evaluation``: seconds per second of training.

    >>> found = shares_of(interval=1777.0, stall=18.0, mtbf=88_900.0, restart=900.0, behind=0.0, evaluation=0.0)
    >>> round(found.training, 4), round(sum(vars(found).values()), 12)
    (0.9701, 1.0)
    """
    if math.isinf(mtbf):
        work, stalled, wall, away = interval, stall, interval + stall, 0.0
        if math.isinf(interval):
            work, stalled, wall = 1.0, 0.0, 1.0
    else:
        work, stalled = interval, stall
        attempts = mtbf * math.expm1(min((interval + stall) / mtbf, MOST_EXPONENT))
        wall = attempts * math.exp(min((restart + behind) / mtbf, MOST_EXPONENT))
        away = wall - attempts
    restarts = away * restart / (restart + behind) if away else 0.0
    return Shares(
        training=work / (1.0 + evaluation) / wall,
        evaluation=work * evaluation / (1.0 + evaluation) / wall,
        checkpoint=stalled / wall,
        lost=max(wall - work - stalled - restarts, 0.0) / wall,
        restart=restarts / wall,
    )


def spare_nodes(mean_away: float, probability: float) -> int:
    """Fewest spares so that with this probability a node that fails finds one: the quantile of a Poisson number of nodes in repair.

    >>> spare_nodes(1.0, 0.99), spare_nodes(0.0, 0.99)
    (4, 0)
    """
    if mean_away > 500.0:  # the normal limit, where the first terms of the sum would underflow
        return math.ceil(NormalDist(mean_away, math.sqrt(mean_away)).inv_cdf(probability)) if probability else 0
    count, term = 0, math.exp(-mean_away)
    reached = term
    while reached < probability and term:
        count += 1
        term *= mean_away / count
        reached += term
    return count


@dataclass(frozen=True)
class Upkeep:
    """What failures and checkpoints of a job come to under its stack, whatever the layout."""

    mtbf_seconds: float
    checkpoint_bytes: float
    write_seconds: float
    load_seconds: float
    stall_seconds: float
    """Training waits so long for each checkpoint."""
    behind_seconds: float
    """Until an asynchronous checkpoint is of use; 0 where training waits for it."""
    restart_seconds: float
    """Loading the checkpoint included."""
    young_seconds: float
    best_seconds: float
    """Daly's interval, at least as long as a checkpoint is written."""
    interval_seconds: float
    """The one assumed: the best, or the user's."""
    shares: Shares
    spare_nodes: int

    @property
    def goodput(self) -> float:
        """Share of the time in which the run trains."""
        return self.shares.training


def num_servers(job: Job) -> int:
    """Machines of the job."""
    return -(-job.num_gpus // min(job.cluster.gpus_per_node, GPUS_PER_SERVER))


def upkeep_of(operations: Operations, job: Job) -> Upkeep:
    """Failures and checkpoints of a job: every node writes its share of the states to storage, all at once."""
    size, servers = checkpoint_bytes(job), num_servers(job)
    write = size / (servers * operations.storage_bytes_per_s)
    load = size / (servers * operations.storage_read_bytes_per_s)
    copied = size / (job.num_gpus * operations.copy_bytes_per_s)
    stall = operations.checkpoint_fixed_seconds + (copied if operations.asynchronous else write)
    behind = write if operations.asynchronous else 0.0
    mtbf = mtbf_seconds(operations.interruptions_per_1000_gpu_days, job.num_gpus)
    best = max(daly_interval(stall, mtbf), behind)
    interval = operations.checkpoint_interval_seconds or best
    restart = operations.restart_seconds + load
    away = operations.interruptions_per_1000_gpu_days * job.num_gpus / (1000.0 * SECONDS_PER_DAY) * operations.node_share
    return Upkeep(
        mtbf_seconds=mtbf,
        checkpoint_bytes=size,
        write_seconds=write,
        load_seconds=load,
        stall_seconds=stall,
        behind_seconds=behind,
        restart_seconds=restart,
        young_seconds=young_interval(stall, mtbf),
        best_seconds=best,
        interval_seconds=interval,
        shares=shares_of(interval=interval, stall=stall, mtbf=mtbf, restart=restart, behind=behind, evaluation=operations.evaluation_share),
        spare_nodes=spare_nodes(away * operations.repair_seconds, operations.spare_probability),
    )


def goodput(scenario: Scenario, stack: Ints) -> Floats:
    """Goodput of layouts by the number of the framework whose stack each is costed under."""
    found = np.ones(len(stack))
    for number, job in jobs_by_framework(scenario).items():
        found[stack == number] = upkeep_of(scenario.operations, job).goodput
    return found


@dataclass(frozen=True)
class Run:
    """A whole training run; numbers, or arrays of one length."""

    training_days: Number
    """Uninterrupted steps alone."""
    total_days: Number
    """With evaluation, checkpoints, failures."""
    gpu_hours: Number
    cost_usd: Number
    energy_kwh: Number
    """Of the boards at their rated power, and the site's share on top; hosts and switches are not counted."""


def run_of(scenario: Scenario, step_seconds: Number, goodput: Number) -> Run:
    """Days, money and energy for the scenario's tokens: D / (G s) steps, over the goodput."""
    job = scenario.job
    training = scenario.training_tokens / job.tokens_per_step * step_seconds / SECONDS_PER_DAY
    total = training / goodput
    hours = total * 24.0 * job.num_gpus
    kilowatts = job.gpu.power_watts / 1000.0 * scenario.operations.power_usage_effectiveness
    return Run(training, total, hours, hours * scenario.price_usd_per_hour, hours * kilowatts)


def run_under(scenario: Scenario, job: Job, step_seconds: float) -> Run:
    """The whole run at one layout's step, under the stack of the job that it is costed with."""
    return run_of(scenario, step_seconds, upkeep_of(scenario.operations, job).goodput)


def usd_per_billion_tokens(scenario: Scenario, step_seconds: Number, goodput: Number) -> Number:
    """What a billion tokens cost, failures included: comparable between clusters and batches."""
    seconds = 1e9 / scenario.job.tokens_per_step * step_seconds / goodput
    return seconds / 3600.0 * scenario.job.num_gpus * scenario.price_usd_per_hour
