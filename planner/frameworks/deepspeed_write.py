"""Writes a layout for DeepSpeed: ds_config.json, and the flags of the program that reads it.

Pipelines, and dense models with tensor groups, run in Megatron-DeepSpeed, which has a pipeline module and sequence parallelism;
everything else in a program of Hugging Face's Trainer, where DeepSpeed itself makes the groups (AutoTP, AutoEP, Ulysses).
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from typing import Any

from planner.frameworks.deepspeed import stage_layers
from planner.frameworks.deepspeed_json import BUCKET_COPIES
from planner.frameworks.megatron_write import lines, model_settings, run_arguments
from planner.frameworks.megatron_write import optimizer_settings as megatron_optimizer
from planner.frameworks.trainer import write_flags
from planner.frameworks.writing import Launch, Target
from planner.scenario import Job
from solver.layout import num_micro_batches

FILE = "ds_config.json"
TRAINER_PROGRAM, MEGATRON_PROGRAM = "train.py", "pretrain_gpt.py"

COMMENT = "_comment"
"""DeepSpeed passes over top-level keys that it does not know."""

RESPELLED: dict[str, str] = {
    "--group-query-attention": "",
    "--position-embedding-type learned_absolute": "",
    "--position-embedding-type rope": "--use-rotary-position-embeddings",
    "--normalization RMSNorm": "--normalization rmsnorm",
    "--normalization LayerNorm": "--normalization layernorm",
    "--moe-grouped-gemm": "",
    "--moe-token-dispatcher-type alltoall": "",
}
"""Flags of Megatron core that Megatron-DeepSpeed has otherwise, or ("") not at all."""
RENAMED = {"--num-query-groups": "--num-key-value-heads", "--moe-router-topk": "--topk"}
OPTIMIZERS = {"muon": "Muon"}
"""Optimizers that DeepSpeed has to make itself, by its name for them."""


def write(target: Target) -> Launch:
    """The launch of a layout."""
    text = json.dumps(ds_config(target), indent=2) + "\n"
    if in_megatron(target):
        arguments = {
            "MODEL_ARGS": model_arguments(target),
            "PARALLEL_ARGS": parallel_arguments(target),
            "TRAINING_ARGS": training_arguments(target.job, target),
            "RUN_ARGS": tuple(run_arguments(target)),
        }
        return Launch(files={FILE: text}, environment=environment(target), arguments=arguments, program=MEGATRON_PROGRAM)
    arguments = {"TRAINER_ARGS": (f"--deepspeed {FILE}", *write_flags(target))}
    return Launch(files={FILE: text}, arguments=arguments, program=TRAINER_PROGRAM)


def in_megatron(target: Target) -> bool:
    """Whether Megatron-DeepSpeed runs the layout."""
    model, layout = target.job.model, target.layout
    plain = not (model.num_experts or model.kv_lora_rank)
    return layout.pipeline_parallel > 1 or (plain and layout.tensor_parallel > 1)


def ds_config(target: Target) -> dict[str, Any]:
    """DeepSpeed's own configuration."""
    job, layout = target.job, target.layout
    found: dict[str, Any] = {
        COMMENT: [*target.head, *partition(target)],
        "train_batch_size": job.global_batch_size,
        "train_micro_batch_size_per_gpu": layout.micro_batch_size,
        "gradient_accumulation_steps": num_micro_batches(layout, job.global_batch_size),
        "zero_optimization": sharding(target),
        job.precision: {"enabled": True},
        "gradient_clipping": 1.0,
        "steps_per_print": 10,
    }
    if job.optimizer in OPTIMIZERS:
        found["optimizer"] = {"type": OPTIMIZERS[job.optimizer], "params": {}}
    elif job.optimizer != "adam":
        found["zero_allow_untested_optimizer"] = True
    return found | ({} if in_megatron(target) else groups(target))


def sharding(target: Target) -> dict[str, Any]:
    """The block zero_optimization. The pipeline engine reduces once, behind the last micro-batch, whatever overlap_comm says."""
    software, stage = target.job.software, target.layout.zero_stage
    found: dict[str, Any] = {"stage": stage}
    if stage:
        found["overlap_comm"] = software.data_overlap and target.layout.pipeline_parallel == 1
        found["contiguous_gradients"] = True
        found |= {"reduce_bucket_size": round(software.bucket_bytes / BUCKET_COPIES)} if software.bucket_bytes else {}
    return found


def groups(target: Target) -> dict[str, Any]:
    """Tensor, sequence and expert groups that DeepSpeed makes itself."""
    layout = target.layout
    found: dict[str, Any] = {}
    if layout.tensor_parallel > 1:
        found["tensor_parallel"] = {"autotp_size": layout.tensor_parallel}
    if layout.context_parallel > 1:
        found["sequence_parallel_size"] = layout.context_parallel
    if layout.expert_parallel > 1:
        found["expert_parallel"] = {"enabled": True, "autoep_size": layout.expert_parallel}
    return found


def partition(target: Target) -> tuple[str, ...]:
    """How the pipeline module cuts the layers, and under which cut the layout was costed where that is another one."""
    stages = target.layout.pipeline_parallel
    if stages == 1:
        return ()
    own = stage_layers(target.job.model.num_layers, stages)
    line = f"the pipeline module cuts the layers by type (type:transformer): {slashed(own)} per stage"
    return (line,) if own == target.chunks else (line, f"what is expected was costed under {slashed(target.chunks)}")


def slashed(sizes: Iterable[int]) -> str:
    """Layers per stage in one word.

    >>> slashed((8, 8, 7))
    '8/8/7'
    """
    return "/".join(map(str, sizes))


def model_arguments(target: Target) -> tuple[str, ...]:
    """The shape in Megatron-DeepSpeed's flags."""
    return tuple(respelled(lines(model_settings(target))))


def respelled(flags: Iterable[str]) -> Iterable[str]:
    """Flags of Megatron core as Megatron-DeepSpeed spells them.

    >>> list(respelled(["--group-query-attention", "--num-query-groups 8", "--swiglu"]))
    ['--num-key-value-heads 8', '--swiglu']
    """
    for flag in flags:
        name, _, value = flag.partition(" ")
        line = RESPELLED.get(flag, f"{RENAMED[name]} {value}" if name in RENAMED else flag)
        if line:
            yield line


def parallel_arguments(target: Target) -> tuple[str, ...]:
    """Groups, stages and sharding; without --no-pipeline-parallel even one stage runs in the pipeline engine."""
    layout = target.layout
    found = [
        f"--tensor-model-parallel-size {layout.tensor_parallel}",
        f"--pipeline-model-parallel-size {layout.pipeline_parallel}",
        f"--zero-stage {layout.zero_stage}",
        "--deepspeed",
        f"--deepspeed_config {FILE}",
    ]
    if layout.pipeline_parallel == 1:
        found.append("--no-pipeline-parallel")
    if target.job.sequence_parallel and layout.tensor_parallel > 1:
        found.append("--sequence-parallel")
    return tuple(found)


def training_arguments(job: Job, target: Target) -> tuple[str, ...]:
    """Batch, precision, optimizer, attention kernel, recompute."""
    layout = target.layout
    found = [
        f"--seq-length {job.seq_len}",
        f"--micro-batch-size {layout.micro_batch_size}",
        f"--global-batch-size {job.global_batch_size}",
        f"--{job.precision}",
    ]
    if job.optimizer not in OPTIMIZERS:
        found += [line for line in lines(megatron_optimizer(job)) if line.startswith("--optimizer ")]
    if job.software.attention_kernel in ("flash2", "fused"):
        found.append("--use-flash-attn-v2")
    if layout.recompute == "full":
        found += ["--checkpoint-activations", "--deepspeed-activation-checkpointing"]
    return tuple(found)


def environment(target: Target) -> dict[str, str]:
    """Tensor groups order their transfers and products by a single hardware queue."""
    return {"CUDA_DEVICE_MAX_CONNECTIONS": "1"} if target.layout.tensor_parallel > 1 else {}
