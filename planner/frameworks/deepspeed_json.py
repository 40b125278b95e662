"""What a DeepSpeed configuration says in the planner's words, whichever file holds it: keys, batch, precision, sharding."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from planner.frameworks.deepspeed_keys import REMOVED, TOP_KEYS
from planner.frameworks.files import Source, listed, shown, table, truth, whole_number

AUTO = "auto"
"""Hugging Face's Trainer and accelerate put a value in its place before DeepSpeed reads it."""

OPTIMIZERS = {
    **dict.fromkeys(
        ("adam", "adamw", "fusedadam", "cpuadam", "lamb", "onebitadam", "onebitlamb", "zerooneadam", "muadam", "muadamw"), "adam"
    ),
    **dict.fromkeys(("adam8bit", "adamw8bit"), "adam-8bit"),
    "muon": "muon",
    **dict.fromkeys(("sgd", "musgd", "lion", "adagrad"), "sgd-momentum"),
}
"""DeepSpeed's optimizer -> the planner's with as many moments. Source: runtime/config.py, DEEPSPEED_OPTIMIZERS."""

BUCKET_COPIES = 2 * 2
"""Bytes per element of a reduction bucket: two of them in 16 bits while reduction overlaps the backward."""


@dataclass
class Parts:
    """The pieces of a :class:`planner.frameworks.config.Config` while a file is read."""

    source: Source
    layout: dict[str, int | str] = field(default_factory=dict)
    request: dict[str, Any] = field(default_factory=dict)
    software: dict[str, Any] = field(default_factory=dict)
    settings: dict[str, Any] = field(default_factory=dict)
    read: list[str] = field(default_factory=list)
    assumed: list[str] = field(default_factory=list)
    ignored: list[str] = field(default_factory=list)

    def note(self, key: str, value: Any, what: str) -> None:
        """One line of what was read."""
        self.read.append(f"{key} = {shown(value)}: {what}")

    def axis(self, key: str, value: Any, axis: str, *, least: int = 1, most: int = 1 << 20) -> int:
        """A size of the layout as the file states it, kept and noted. Raises InputError."""
        number = whole_number(self.source, key, value, least=least, most=most)
        self.layout[axis] = number
        self.note(key, value, axis)
        return number


def flat(data: Mapping[str, Any]) -> dict[str, Any]:
    """The keys of a configuration with those of its blocks behind a dot; what lies deeper stays as it is.

    >>> flat({"train_batch_size": 8, "bf16": {"enabled": True}, "fp16": {}})
    {'train_batch_size': 8, 'bf16.enabled': True, 'fp16': {}}
    """
    found: dict[str, Any] = {}
    for key, value in data.items():
        if isinstance(value, dict) and value:
            found |= {f"{key}.{inner}": deep for inner, deep in value.items()}
        else:
            found[str(key)] = value
    return found


def stated(value: Any) -> bool:
    """Whether a value is more than absent or left to the caller."""
    return value is not None and value != AUTO


def read_json(parts: Parts, data: Mapping[str, Any], num_gpus: int | None) -> None:
    """Everything that DeepSpeed's own keys say, put into the parts. Raises InputError."""
    for key in ("zero_optimization", "tensor_parallel", "expert_parallel", "optimizer", "bf16", "fp16", "pipeline", "data_types"):
        if not (key == "zero_optimization" and isinstance(data.get(key), bool)):
            table(parts.source, data, key)
    read_groups(parts, data)
    read_sharding(parts, data)
    read_precision(parts, data)
    read_optimizer(parts, data)
    read_recompute(parts, data)
    read_batch(parts, data, num_gpus)
    strange = [str(key) for key in data if str(key) not in TOP_KEYS and str(key) not in REMOVED]
    if strange:
        parts.ignored.append(f"no keys of DeepSpeed: {listed(strange)}")


def read_sharding(parts: Parts, data: Mapping[str, Any]) -> None:
    """The ZeRO stage with its buckets, overlap and offload. A bare true, the oldest form, is stage 1."""
    zero = data.get("zero_optimization")
    if isinstance(zero, bool):
        parts.layout["zero_stage"] = int(zero)
        parts.note("zero_optimization", zero, "zero_stage")
        return
    zero = table(parts.source, data, "zero_optimization")
    if stated(zero.get("stage")):
        parts.axis("zero_optimization.stage", zero["stage"], "zero_stage", least=0, most=3)
    else:
        parts.layout["zero_stage"] = 0
        parts.assumed.append("zero_optimization.stage is not stated: zero_stage = 0, DeepSpeed's default")
    if stated(zero.get("overlap_comm")):
        overlap = truth(parts.source, "zero_optimization.overlap_comm", zero["overlap_comm"])
        parts.note("zero_optimization.overlap_comm", overlap, "whether reduction overlaps with compute, where there is no pipeline")
        if parts.layout.get("pipeline_parallel", 1) == 1:
            parts.software["data_overlap"] = overlap
    if stated(zero.get("reduce_bucket_size")):
        elements = whole_number(parts.source, "zero_optimization.reduce_bucket_size", zero["reduce_bucket_size"])
        parts.software["bucket_bytes"] = float(BUCKET_COPIES * elements)
        parts.note("zero_optimization.reduce_bucket_size", zero["reduce_bucket_size"], "memory of the reduction buckets")
    for key in ("offload_optimizer", "offload_param"):
        device = table(parts.source, zero, key, prefix="zero_optimization.").get("device", "none")
        if device != "none":
            parts.assumed.append(f"zero_optimization.{key} to {shown(device)}: not modelled, memory counts everything on the GPU")


def read_groups(parts: Parts, data: Mapping[str, Any]) -> None:
    """Tensor, sequence, expert and pipeline groups, where DeepSpeed itself makes them."""
    tensor = table(parts.source, data, "tensor_parallel").get("autotp_size")
    if stated(tensor) and whole_number(parts.source, "tensor_parallel.autotp_size", tensor, least=0):
        parts.axis("tensor_parallel.autotp_size", tensor, "tensor_parallel")
        parts.request["sequence_parallel"] = False
        parts.assumed.append("AutoTP keeps norms and residuals whole on every GPU: no sequence parallelism")
    sequence = data.get("sequence_parallel_size")
    if stated(sequence):
        parts.axis("sequence_parallel_size", sequence, "context_parallel")
    expert = table(parts.source, data, "expert_parallel")
    if stated(expert.get("autoep_size")) and truth(parts.source, "expert_parallel.enabled", expert.get("enabled", False)):
        parts.axis("expert_parallel.autoep_size", expert["autoep_size"], "expert_parallel")
        if stated(expert.get("expert_tensor_parallel_size")):
            key = "expert_parallel.expert_tensor_parallel_size"
            parts.axis(key, expert["expert_tensor_parallel_size"], "expert_tensor_parallel")
    stages = table(parts.source, data, "pipeline").get("stages")
    if stated(stages):
        parts.axis("pipeline.stages", stages, "pipeline_parallel")
    for axis in ("tensor_parallel", "pipeline_parallel", "context_parallel", "expert_parallel"):
        parts.layout.setdefault(axis, 1)


def read_precision(parts: Parts, data: Mapping[str, Any]) -> None:
    """bf16 or fp16, and how gradients accumulate."""
    for name, keys in (("bf16", ("bf16", "bfloat16")), ("fp16", ("fp16",))):
        for key in keys:
            enabled = table(parts.source, data, key).get("enabled")
            if stated(enabled) and truth(parts.source, f"{key}.enabled", enabled):
                parts.request.setdefault("precision", name)
                parts.note(f"{key}.enabled", enabled, f"precision = {name}")
    if "precision" not in parts.request:
        parts.assumed.append("neither bf16 nor fp16 is switched on here: precision is the caller's")
    kind = table(parts.source, data, "data_types").get("grad_accum_dtype")
    if kind in ("fp32", "fp16", "bf16"):
        parts.software["gradient_bytes"] = 4.0 if kind == "fp32" else 2.0
        parts.note("data_types.grad_accum_dtype", kind, "bytes of a gradient")


def read_optimizer(parts: Parts, data: Mapping[str, Any]) -> None:
    """The optimizer by the number of its moments."""
    name = table(parts.source, data, "optimizer").get("type")
    if not stated(name):
        return
    known = OPTIMIZERS.get(name.lower()) if isinstance(name, str) else None
    if known is None:
        parts.assumed.append(f"optimizer.type = {shown(name)} is not known: counted as adam")
        return
    parts.request["optimizer"] = known
    parts.note("optimizer.type", name, f"optimizer = {known}")


def read_recompute(parts: Parts, data: Mapping[str, Any]) -> None:
    """DeepSpeed's block says how checkpoints are kept, never whether the model makes any."""
    interval = table(parts.source, data, "pipeline").get("activation_checkpoint_interval")
    if stated(interval):
        number = whole_number(parts.source, "pipeline.activation_checkpoint_interval", interval, least=0)
        parts.layout["recompute"] = "full" if number else "none"
        parts.note("pipeline.activation_checkpoint_interval", interval, "recompute")
        return
    block = table(parts.source, data, "activation_checkpointing")
    if any(block.get(key) is True for key in ("partition_activations", "cpu_checkpointing", "contiguous_memory_optimization")):
        parts.layout["recompute"] = "full"
        parts.assumed.append("activation_checkpointing is set up: recompute = full; the model's own code switches it on")
    else:
        parts.assumed.append("recompute is left to the model's own code: a DeepSpeed configuration does not switch it on")


@dataclass(frozen=True)
class Batch:
    """The three batch keys; None = not stated or "auto"."""

    train: int | None
    micro: int | None
    accumulation: int | None

    def filled(self, replicas: int) -> Batch:
        """With what DeepSpeed derives from the data-parallel size, rounded down as it does.

        Source: runtime/config.py, _set_batch_related_parameters.

        >>> Batch(256, 2, None).filled(8), Batch(None, 4, None).filled(2)
        (Batch(train=256, micro=2, accumulation=16), Batch(train=8, micro=4, accumulation=1))
        """
        train, micro, accumulation = self.train, self.micro, self.accumulation
        if train is not None and micro is not None and accumulation is None:
            accumulation = train // micro // replicas
        elif train is not None and micro is None:
            accumulation = 1 if accumulation is None else accumulation
            micro = train // replicas // accumulation
        elif train is None and micro is not None:
            accumulation = 1 if accumulation is None else accumulation
            train = micro * accumulation * replicas
        return Batch(train, micro, accumulation)


BATCH_KEYS = {"train": "train_batch_size", "micro": "train_micro_batch_size_per_gpu", "accumulation": "gradient_accumulation_steps"}


def batch_of(source: Source, data: Mapping[str, Any]) -> Batch:
    """The batch keys of a configuration. Raises InputError."""
    values = {name: data.get(key) for name, key in BATCH_KEYS.items()}
    return Batch(**{name: whole_number(source, BATCH_KEYS[name], v, most=1 << 30) if stated(v) else None for name, v in values.items()})


def model_ranks(layout: Mapping[str, int | str]) -> int:
    """GPUs that share one replica of the model and its batch."""
    sizes = (layout.get(axis, 1) for axis in ("tensor_parallel", "pipeline_parallel", "context_parallel"))
    product = 1
    for size in sizes:
        product *= int(size)
    return product


def read_batch(parts: Parts, data: Mapping[str, Any], num_gpus: int | None) -> None:
    """The global and the micro-batch, what is missing of them derived as DeepSpeed does."""
    batch, ranks = batch_of(parts.source, data), model_ranks(parts.layout)
    settle_batch(parts, batch, ranks, num_gpus)
    for name, key in BATCH_KEYS.items():
        if getattr(batch, name) is not None:
            parts.note(key, getattr(batch, name), "batch")
        elif data.get(key) == AUTO:
            parts.assumed.append(f'{key} = "auto" is left to the caller (Hugging Face\'s Trainer fills it in)')


def settle_batch(parts: Parts, batch: Batch, ranks: int, num_gpus: int | None) -> None:
    """Global batch, micro-batch and, where the three keys imply them, the GPUs, into the parts."""
    if num_gpus is None and None not in (batch.train, batch.micro, batch.accumulation):
        replicas, rest = divmod(int(batch.train or 0), int(batch.micro or 1) * int(batch.accumulation or 1))
        if replicas and not rest:
            num_gpus = parts.request["num_gpus"] = replicas * ranks
            parts.assumed.append(f"the batch keys imply {replicas} data-parallel ranks: {num_gpus} GPUs")
    if num_gpus is not None and num_gpus % ranks == 0:
        batch = batch.filled(num_gpus // ranks)
    if batch.train is not None and batch.train > 0:
        parts.request["global_batch_size"] = batch.train
    if batch.micro is not None and batch.micro > 0:
        parts.layout["micro_batch_size"] = batch.micro
