"""One question: a model on a cluster under a workload, and what the search may choose."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

from planner.catalogue import load
from planner.catalogue.schema import PRECISIONS, Cluster, Generation, Gpu, Model, Operations, Physics, Software, require
from planner.errors import InputError, nearest
from planner.profile import Profile, tuned

OPTIMIZERS: dict[str, tuple[int, float]] = {"adam": (2, 4.0), "adam-8bit": (2, 1.0), "muon": (1, 4.0), "sgd-momentum": (1, 4.0)}
"""Moments that an optimizer keeps per parameter, and the bytes of each unless the stack keeps them in fewer."""


def optimizer_state_bytes(adam_bytes: float, optimizer: str) -> float:
    """Bytes per parameter of master weights and moments, from those of a stack's Adam (at most 8 of them for moments).

    >>> optimizer_state_bytes(12.0, "adam-8bit"), optimizer_state_bytes(4.0, "adam-8bit"), optimizer_state_bytes(12.0, "muon")
    (6.0, 2.0, 8.0)
    """
    moment = min(adam_bytes / 2, 4.0)
    moments, size = OPTIMIZERS[optimizer]
    return adam_bytes - 2 * moment + moments * min(moment, size)


LOW_PRECISION = ("fp8", "mxfp8", "nvfp4")


@dataclass(frozen=True, kw_only=True)
class Job:
    """Everything that the cost of a layout depends on besides the layout itself."""

    model: Model
    gpu: Gpu
    generation: Generation
    cluster: Cluster
    software: Software
    physics: Physics
    num_gpus: int
    seq_len: int
    global_batch_size: int
    """Sequences per optimizer step."""
    precision: str = "bf16"
    optimizer: str = "adam"
    sequence_parallel: bool = True
    """Norms and residuals are split along the sequence wherever tensor parallelism is on."""
    dropout: bool = False
    """Dropout masks are kept for the backward."""
    multi_token_prediction: bool = True
    """Train the model's multi-token-prediction layers, where it has any."""
    layers_per_stage: tuple[int, ...] = ()
    """A stated split for pipelines of that many stages; empty: as even as possible."""
    recomputed_per_stage: tuple[int, ...] = ()
    """With a stated split: layers of each stage that full recompute covers; empty: as deep as the layout says."""

    def __post_init__(self) -> None:
        require(
            0 < self.num_gpus <= 10_000_000,
            f"cluster.num_gpus = {self.num_gpus} must lie between 1 and 10,000,000",
        )
        require(0 < self.seq_len <= 1 << 26, f"workload.seq_len = {self.seq_len} must lie between 1 and {1 << 26}")
        require(
            0 < self.global_batch_size <= 1 << 24,
            f"workload.global_batch_size = {self.global_batch_size} must lie between 1 and {1 << 24} sequences",
        )
        for key, value, known in (("precision", self.precision, PRECISIONS), ("optimizer", self.optimizer, OPTIMIZERS)):
            if value not in known:  # jobs are made by the thousand: the message only when it is needed
                raise InputError(f"workload.{key} = '{value}'{nearest(value, known)}")
        require(
            self.peak_flops > 0,
            f"workload.precision = '{self.precision}': {self.gpu.name} has no such matrix units"
            + ("; it computes in fp16" if self.gpu.peak_bf16_flops == 0 else ""),
        )
        if self.precision == "nvfp4":
            require(self.generation.fp4_share > 0, f"workload.precision = 'nvfp4': no 4-bit rate for {self.gpu.name}")

    @property
    def peak_flops(self) -> float:
        """Dense peak of the workload's precision, operations per second; the base of its MFU."""
        peaks = {
            "bf16": self.gpu.peak_bf16_flops,
            "fp16": self.gpu.peak_fp16_flops,
            "fp8": self.gpu.peak_fp8_flops,
            "mxfp8": self.gpu.peak_fp8_flops if self.generation.name.startswith("blackwell") else 0.0,
            "nvfp4": self.gpu.peak_fp4_flops,
        }
        return peaks[self.precision]

    @property
    def fast_domain(self) -> int:
        """GPUs that reach each other over the fast link, among those of the job."""
        return min(self.cluster.gpus_per_node, self.num_gpus)

    @property
    def link_bytes_per_s(self) -> float:
        """Fast link per GPU and direction, as on the data sheet."""
        return self.cluster.link_bytes_per_s or self.gpu.link_bytes_per_s

    @property
    def nic_bytes_per_s(self) -> float:
        """Network per GPU and direction that the fabric sustains."""
        return (self.cluster.nic_bytes_per_s or self.gpu.nic_bytes_per_s) / self.cluster.oversubscription

    @property
    def low_precision(self) -> bool:
        """Whether the linear layers multiply in 8 or 4 bits."""
        return self.precision in LOW_PRECISION

    @property
    def num_mtp_layers(self) -> int:
        """Multi-token-prediction layers that are trained."""
        return self.model.num_mtp_layers if self.multi_token_prediction else 0

    @property
    def tokens_per_step(self) -> int:
        """Tokens of one optimizer step."""
        return self.seq_len * self.global_batch_size

    def rank_tokens(self, x: Any) -> Any:
        """Tokens of one micro-batch on a context rank, of one layout or many: s b / c."""
        return self.seq_len * x.micro_batch_size / x.context_parallel

    def under(self, software: Software) -> Job:
        """The same job run by another stack."""
        return dataclasses.replace(self, software=software)


FRAMEWORK_CHOICES = ("any", "megatron", "megatron-bridge", "torchtitan", "deepspeed", "accelerate", "none")
SORTS = ("step", "memory", "cost", "gpu-hours", "goodput")


@dataclass(frozen=True, kw_only=True)
class Choices:
    """What the search may vary, and the limits that it keeps."""

    framework: str = "any"
    """"any": launchable in at least one framework; a framework's name; "none": physical rules alone."""
    software: str = ""
    """Catalogue name of the stack that every layout is costed under; empty: the framework's own of today."""
    pins: Mapping[str, tuple[int, ...]] = field(default_factory=dict)
    """Axis -> the only values allowed; recompute and schedule by their index."""
    tensor_across_nodes: bool = False
    uneven_stages: bool = True
    """Layouts of the shortlist and those asked about are costed under their best split of layers over stages."""
    max_pipeline_parallel: int = 64
    min_context_tokens: int = 256
    pad_vocabulary: bool = True
    max_days: float = 0.0
    """Of the whole run, failures included; 0 = no limit, as for the next three."""
    max_cost_usd: float = 0.0
    max_step_seconds: float = 0.0
    min_tokens_per_second: float = 0.0
    """Of the whole cluster, while it trains."""

    def __post_init__(self) -> None:
        require(
            self.framework in FRAMEWORK_CHOICES,
            f"choices.framework = '{self.framework}'{nearest(self.framework, FRAMEWORK_CHOICES)}",
        )
        require(self.max_pipeline_parallel > 0, f"choices.max_pipeline_parallel = {self.max_pipeline_parallel} must be positive")


@dataclass(frozen=True, kw_only=True)
class Scenario:
    """A job, the search's choices, and what the whole training run is to be."""

    name: str
    job: Job
    choices: Choices = field(default_factory=Choices)
    training_tokens: float = 0.0
    """Tokens of the whole run; 0 = not given, so no days and no cost."""
    price_usd_per_hour: float = 0.0
    profile: Profile = field(default_factory=dict)
    """Constants of the user's own cluster and stack."""
    switches: Mapping[str, Any] = field(default_factory=dict)
    """Fields of the training stack that a configuration sets otherwise, whatever the framework."""
    operations: Operations = field(default_factory=lambda: load.find(Operations, DEFAULT_OPERATIONS))
    """What is assumed of failures, checkpoints, evaluation and power."""

    def __post_init__(self) -> None:
        for key in ("max_days", "max_cost_usd"):
            if getattr(self.choices, key) and not self.training_tokens:
                raise InputError(f"choices.{key} = {getattr(self.choices, key):g} needs workload.training_tokens (--tokens)")

    @cached_property
    def stacks(self) -> Mapping[str, Software]:
        """Framework -> the training stack that its layouts are costed under."""
        named = dict.fromkeys(DEFAULT_STACKS, self.choices.software) if self.choices.software else DEFAULT_STACKS
        tuned_stacks = {name: tuned(load.find(Software, stack), self.profile) for name, stack in named.items()}
        return {name: dataclasses.replace(stack, **self.switches) for name, stack in tuned_stacks.items()}

    def job_in(self, framework: str) -> Job:
        """The job under a framework's stack ("none": the physical rules alone)."""
        own = self.job.under(self.stacks[framework])
        return dataclasses.replace(own, sequence_parallel=False) if framework in WITHOUT_SEQUENCE_PARALLEL else own


WITHOUT_SEQUENCE_PARALLEL = ("accelerate",)
"""Frameworks whose tensor groups keep norms and residuals whole. Source: transformers' tensor plans of its models are column-wise
and row-wise."""
DEFAULT_OPERATIONS = "today"
DEFAULT_STACKS = {
    "megatron": "megatron-core",
    "torchtitan": "fsdp2",
    "deepspeed": "deepspeed",
    "megatron-bridge": "megatron-bridge",
    "accelerate": "fsdp2-eager",
    "none": "megatron-core",
}


def make_job(
    *,
    model: Model,
    gpu: Gpu,
    num_gpus: int,
    seq_len: int,
    global_batch_size: int,
    cluster: Cluster | None = None,
    software: Software | None = None,
    precision: str = "",
    optimizer: str = "adam",
    sequence_parallel: bool = True,
    dropout: bool | None = None,
    multi_token_prediction: bool = True,
    profile: Profile | None = None,
) -> Job:
    """A job with the catalogue's defaults for what is not given. Raises InputError."""
    if not precision:
        precision = "bf16" if gpu.peak_bf16_flops > 0 else "fp16"
    if model.max_seq_len and model.learned_positions and seq_len > model.learned_positions:
        raise InputError(f"workload.seq_len = {seq_len} is beyond the {model.learned_positions} learned positions of {model.name}")
    return Job(
        model=model,
        gpu=gpu,
        generation=tuned(load.find(Generation, gpu.generation), profile or {}),
        cluster=cluster or load.find(Cluster, gpu.default_cluster),
        software=tuned(software or load.find(Software, DEFAULT_STACKS["megatron"]), profile or {}),
        physics=tuned(load.find(Physics, "today"), profile or {}),
        num_gpus=num_gpus,
        seq_len=seq_len,
        global_batch_size=global_batch_size,
        precision=precision,
        optimizer=optimizer,
        sequence_parallel=sequence_parallel,
        dropout=model.dropout if dropout is None else dropout,
        multi_token_prediction=multi_token_prediction,
    )
