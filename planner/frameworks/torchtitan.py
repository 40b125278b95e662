"""torchtitan (0.3) on PyTorch: its main legality rules."""

from __future__ import annotations

from typing import Any

import numpy as np

from planner.frameworks.rule import FrameworkRule, low_precision_shapes, whole_key_value_heads, whole_recompute
from planner.scenario import Job
from solver.layout import PLAIN_1F1B, SCHEDULES, SELECTIVE, V_CODES, num_micro_batches

OWN_SCHEDULES = [SCHEDULES.index(n) for n in ("1f1b", "interleaved_1f1b", "gpipe", "zero_bubble_v", "dualpipe")]


def sharding(x: Any, job: Job) -> Any:
    """FSDP2 keeps weights gathered (2) or not (3), or the mesh only replicates (0); there is no ZeRO-1."""
    return x.zero_stage != 1


def replication(x: Any, job: Job) -> Any:
    """Pure replication leaves no shard dimension for context or expert parallelism."""
    return (x.zero_stage != 0) | ((x.context_parallel == 1) & (x.expert_parallel == 1))


def sequence_chunks(x: Any, job: Job) -> Any:
    """The sequence divides by tensor x 2 context."""
    context = np.where(x.context_parallel > 1, 2 * x.context_parallel, 1)
    return job.seq_len % (x.tensor_parallel * context) == 0


def expert_tensor(x: Any, job: Job) -> Any:
    """Experts are not split by a tensor group of their own."""
    return x.expert_tensor_parallel == 1


def schedules(x: Any, job: Job) -> Any:
    """Schedules of torch.distributed.pipelining; plain 1F1B needs a micro-batch for every stage."""
    known = np.isin(x.schedule, OWN_SCHEDULES)
    enough = (x.schedule != PLAIN_1F1B) | (num_micro_batches(x, job.global_batch_size) >= x.pipeline_parallel)
    return known & enough


def split_backward(x: Any, job: Job) -> Any:
    """V-shaped schedules split the backward, which a compiled model and op-level recompute do not allow."""
    return ~np.isin(x.schedule, V_CODES) | ((x.recompute != SELECTIVE) & (not job.software.compiled))


def precision(x: Any, job: Job) -> Any:
    """Training runs in bf16 or 8-bit formats, not in fp16."""
    return (x.tensor_parallel > 0) & (job.precision != "fp16")


RULES: tuple[FrameworkRule, ...] = (
    FrameworkRule(
        "T1", "num_key_value_heads divides by tensor_parallel", "models/common/decoder.py", whole_key_value_heads, switches=False
    ),
    FrameworkRule("T2", "seq_len divides by tensor_parallel x 2 context_parallel", "trainer.py", sequence_chunks, switches=False),
    FrameworkRule("T3", "expert_tensor_parallel = 1", "distributed/parallel_dims.py", expert_tensor, switches=False),
    FrameworkRule("T4", "the precision is not fp16", "config/job_config.py", precision, switches=False),
    FrameworkRule(
        "T5",
        "8-bit formats need the tokens of a rank in multiples of 16 (MX: 32)",
        "components/quantization",
        low_precision_shapes,
        switches=False,
    ),
    FrameworkRule("T6", "zero_stage is 0, 2 or 3", "distributed/fsdp.py", sharding, switches=True),
    FrameworkRule(
        "T7",
        "zero_stage 0 needs context_parallel = expert_parallel = 1",
        "distributed/parallel_dims.py",
        replication,
        switches=True,
    ),
    FrameworkRule(
        "T8",
        "the schedule is one of torch.distributed.pipelining's, and 1f1b has micro-batches >= stages",
        "torch/distributed/pipelining/schedules.py",
        schedules,
        switches=True,
    ),
    FrameworkRule(
        "T10",
        "zero_bubble_v and dualpipe need an uncompiled model (software fsdp2-eager) without selective recompute",
        "PyTorch issue 161904",
        split_backward,
        switches=True,
    ),
    FrameworkRule("T9", "full recompute covers every layer", "distributed/activation_checkpoint.py", whole_recompute, switches=True),
)
