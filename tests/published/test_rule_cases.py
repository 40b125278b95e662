"""Reports of users whose configuration broke a rule, or ran and did something else: `planner check` says which, with the legal values.

Each case is the configuration as its user would have it; tests/published/user_cases.csv has the reports and their addresses.
"""

from __future__ import annotations

import csv
import json
import re
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from tests.conftest import Outcome

Command = Callable[..., Outcome]

HERE = Path(__file__).parent

SHAPE = (
    "--num-layers {layers} --hidden-size 4096 --ffn-hidden-size 14336 --num-attention-heads 32 --group-query-attention "
    "--num-query-groups 8 --swiglu --normalization RMSNorm --untie-embeddings-and-output-weights --disable-bias-linear "
    "--position-embedding-type rope --vocab-size 32000 --seq-length {seq} --max-position-embeddings {seq} --bf16 "
    "--use-distributed-optimizer --overlap-grad-reduce --overlap-param-gather --micro-batch-size {mb} --global-batch-size {gbs}"
)


def megatron(flags: str, *, layers: int = 32, seq: int = 4096, mb: int = 1, gbs: int = 64) -> str:
    """A launch script."""
    shape = SHAPE.format(layers=layers, seq=seq, mb=mb, gbs=gbs)
    return f"export CUDA_DEVICE_MAX_CONNECTIONS=1\ntorchrun --nproc_per_node 8 pretrain_gpt.py \\\n  {shape} \\\n  {flags}\n"


def torchtitan(*flags: str) -> str:
    """A command of torchtitan 0.3."""
    return f"torchrun --nproc_per_node 8 -m torchtitan.train --module llama3 --config llama3_8b {' '.join(flags)}\n"


def deepspeed(**keys: object) -> str:
    """A ds_config.json."""
    return json.dumps({"bf16": {"enabled": True}, **keys})


@dataclass(frozen=True)
class Case:
    """A configuration, and what the verdict must say."""

    name: str
    text: str
    options: str
    says: tuple[str, ...]
    """Regular expressions, all of which the page matches."""
    never: tuple[str, ...] = ()
    code: int = 1
    more: dict[str, str] = field(default_factory=dict)


AIR = "--num-experts 128 --moe-router-topk 8 --moe-ffn-hidden-size 1408 --moe-grouped-gemm"

CASES: dict[str, Case] = {
    "u026": Case(
        "launch.sh",
        megatron("--pipeline-model-parallel-size 16 --num-layers-per-virtual-pipeline-stage 2", layers=80),
        "--gpus 16",
        (r"M14", r"\b5 layers\b.*\b2\b", r"\b1\b.*\b5\b"),
    ),
    "u028": Case(
        "launch.sh",
        megatron("--pipeline-model-parallel-size 2", layers=7),
        "--gpus 8",
        (r"M11", r"num_layers = 7", r"(decoder-first|account-for)"),
    ),
    "u029": Case(
        "launch.sh",
        megatron("--pipeline-model-parallel-size 2 --num-virtual-stages-per-pipeline-rank 2"),
        "--gpus 8",
        (r"legal for Megatron-LM",),
        (r"M15", r"NOT legal"),
        code=0,
    ),
    "u029-without-overlap": Case(
        "launch.sh",
        megatron("--pipeline-model-parallel-size 2 --num-virtual-stages-per-pipeline-rank 2 --no-overlap-p2p-communication"),
        "--gpus 8",
        (r"M15", r"NOT legal", r"pipeline.*(> 2|3|4)"),
    ),
    "u030": Case(
        "launch.sh",
        megatron(
            f"{AIR} --tensor-model-parallel-size 8 --sequence-parallel --pipeline-model-parallel-size 4 --expert-model-parallel-size 4 "
            "--expert-tensor-parallel-size 1 --recompute-granularity full --recompute-method uniform --recompute-num-layers 1",
            layers=46,
            mb=2,
            gbs=16,
        ),
        "--gpus 32",
        (r"M11", r"num_layers = 46", r"\b11\b"),
    ),
    "u031": Case(
        "launch.sh",
        megatron("--pipeline-model-parallel-size 4 --num-layers-in-first-pipeline-stage 7", layers=31),
        "--gpus 8",
        (r"num-layers-in-first-pipeline-stage", r"decoder-first-pipeline-num-layers"),
    ),
    "u036": Case(
        "launch.sh",
        megatron("--pipeline-model-parallel-size 4 --num-virtual-stages-per-pipeline-rank 4", gbs=4),
        "--gpus 4",
        (r"legal for Megatron-LM",),
        (r"NOT legal",),
        code=0,
    ),
    "u038": Case(
        "config.yaml",
        "model:\n  num_layers: 48\n  hidden_size: 2048\n  ffn_hidden_size: 8192\n  num_attention_heads: 16\n  vocab_size: 32000\n"
        "  num_moe_experts: 8\n  moe_router_topk: 2\n  moe_ffn_hidden_size: 1024\n  seq_length: 2048\n"
        "  tensor_model_parallel_size: 1\n  pipeline_model_parallel_size: 2\n  virtual_pipeline_model_parallel_size: 24\n"
        "  expert_model_parallel_size: 2\ntrain:\n  micro_batch_size: 1\n  global_batch_size: 512\n",
        "--gpus 4 --gpus-per-node 2",
        (r"[^T] legal for Megatron-Bridge|^legal for Megatron-Bridge", r"expert_tensor_parallel"),
        (r"NOT legal",),
        code=0,
    ),
    "u040": Case(
        "launch.sh",
        megatron(
            "--num-experts 8 --moe-router-topk 2 --moe-ffn-hidden-size 1024 --tensor-model-parallel-size 2 --sequence-parallel "
            "--expert-model-parallel-size 2 --num-distributed-optimizer-instances 2",
            layers=8,
        ),
        "--gpus 4 --gpus-per-node 4",
        (r"M18", r"instances", r"\b1\b"),
    ),
    "u045": Case(
        "ds_config.json",
        deepspeed(train_batch_size=80, train_micro_batch_size_per_gpu=1, sequence_parallel_size=16, zero_optimization={"stage": 3}),
        "--gpus 80 --gpus-per-node 8 --model qwen2.5-14b --seq-len 65600",
        (r"num_attention_heads = 40", r"context_parallel = 16", r"legal context_parallel[^:]*: 1, 2, 4, 8, 40"),
    ),
    "u046": Case(
        "ds_config.json",
        deepspeed(train_batch_size=1, train_micro_batch_size_per_gpu=1, sequence_parallel_size=8, zero_optimization={"stage": 3}),
        "--gpus 8 --model qwen2.5-7b",
        (r"num_attention_heads = 28", r"context_parallel = 8", r"legal context_parallel[^:]*: 1, 2, 4\b"),
    ),
    "u047": Case(
        "ds_config.json",
        deepspeed(train_batch_size=1, train_micro_batch_size_per_gpu=1, sequence_parallel_size=8, zero_optimization={"stage": 3}),
        "--gpus 8 --model qwen3-32b --seq-len 32768",
        (r"D39", r"ignores it", r"check that the memory drops"),
        code=-1,
    ),
    "u048": Case(
        "launch.sh",
        megatron("--tensor-model-parallel-size 4 --sequence-parallel --fp8-format e4m3", seq=16368),
        "--gpus 8",
        (r"M25", r"4092", r"\b16\b"),
    ),
    "u050": Case(
        "launch.sh",
        megatron("--tensor-model-parallel-size 2 --sequence-parallel --context-parallel-size 2 --fp8-format hybrid", seq=4104),
        "--gpus 8",
        (r"M25", r"1026", r"\b16\b"),
    ),
    "u051": Case(
        "launch.sh",
        megatron("--tensor-model-parallel-size 4 --sequence-parallel --pipeline-model-parallel-size 2", seq=4090),
        "--gpus 8",
        (r"4,?090", r"tensor_parallel", r"legal tensor_parallel[^:]*: 1, 2\b"),
    ),
    "u056": Case(
        "ds_config.json",
        deepspeed(train_batch_size=256, train_micro_batch_size_per_gpu=4, gradient_accumulation_steps=8, zero_optimization={"stage": 3}),
        "--gpus 8 --model gpt-3-13b",
        (r"legal for DeepSpeed",),
        (r"NOT legal",),
        code=-1,
    ),
    "u056-on-one-gpu": Case(
        "ds_config.json",
        deepspeed(train_batch_size=256, train_micro_batch_size_per_gpu=4, gradient_accumulation_steps=8, zero_optimization={"stage": 3}),
        "--gpus 1 --model gpt-3-13b",
        (r"256", r"4 x 8 x 1|32"),
    ),
    "u057": Case(
        "ds_config.json",
        deepspeed(train_batch_size=256, train_micro_batch_size_per_gpu=2, zero_optimization={"stage": 3}),
        "--gpus 7 --gpus-per-node 7 --model 8b",
        (r"D20", r"256", r"252", r"\b8 GPUs\b"),
    ),
    "u058": Case(
        "launch.sh",
        torchtitan("--parallelism.data_parallel_shard_degree 16", "--parallelism.tensor_parallel_degree 2"),
        "--gpus 8 --global-batch 64",
        (r"32", r"\b8\b", r"data_parallel_shard_degree.*\b4\b"),
    ),
    "u059": Case(
        "config.yml",
        "pipe-parallel-size: 2\nmodel-parallel-size: 1\nnum-layers: 24\nhidden-size: 1024\nnum-attention-heads: 16\nseq-length: 2048\n"
        "max-position-embeddings: 2048\nvocab_size: 50304\ntrain_micro_batch_size_per_gpu: 4\ngradient_accumulation_steps: 2\n"
        "bf16:\n  enabled: true\nzero_optimization:\n  stage: 2\n",
        "--gpus 8",
        (r"D6", r"zero_stage = 2 with pipeline_parallel = 2", r"legal zero_stage: 0, 1"),
    ),
    "u061": Case(
        "launch.sh",
        "torchrun --nproc_per_node 8 pretrain_gpt.py --num-layers 24 --hidden-size 1024 --num-attention-heads 16 --seq-length 2048 "
        "--max-position-embeddings 2048 --vocab-size 50304 --micro-batch-size 4 --global-batch-size 64 --bf16 "
        "--tensor-model-parallel-size 2 --pipeline-model-parallel-size 2 --deepspeed --deepspeed_config ds.json --zero-stage 2\n",
        "--gpus 8",
        (r"D6", r"zero_stage = 2 with pipeline_parallel = 2", r"legal zero_stage: 0, 1"),
        more={"ds.json": deepspeed(train_batch_size=64, train_micro_batch_size_per_gpu=4, zero_optimization={"stage": 2})},
    ),
    "u062": Case(
        "launch.sh",
        torchtitan(
            "--parallelism.pipeline_parallel_degree 4",
            "--parallelism.pipeline_parallel_schedule 1F1B",
            "--training.local_batch_size 2",
            "--training.disable_cuda_graphs",
        ),
        "--gpus 8",
        (r"T8", r"2 micro-batches for 4 stages", r"hang"),
    ),
    "u063": Case(
        "launch.sh",
        torchtitan(
            "--parallelism.pipeline_parallel_degree 2",
            "--parallelism.pipeline_parallel_schedule GPipe",
            "--parallelism.pipeline_parallel_microbatch_size 3",
            "--training.local_batch_size 8",
            "--training.disable_cuda_graphs",
        ),
        "--gpus 8",
        (r"local_batch_size", r"8", r"3"),
    ),
}
CASES["u060"] = CASES["u059"]  # the same question, asked of the assertion itself


@pytest.mark.parametrize("key", CASES)
def test_the_verdict_names_the_rule_and_what_is_legal(command: Command, tmp_path: Path, key: str) -> None:
    case = CASES[key]
    (tmp_path / case.name).write_text(case.text)
    for name, text in case.more.items():
        (tmp_path / name).write_text(text)
    done = command("check", str(tmp_path / case.name), *case.options.split())
    page = " ".join(done.out.split())
    assert done.code == case.code or (case.code == -1 and done.code in (0, 1)), done.err or done.out
    for telling in case.says:
        assert re.search(telling, page), f"{telling} is not in: {done.out}"
    for wrong in case.never:
        assert not re.search(wrong, page), f"{wrong} is in: {done.out}"


def test_every_report_of_a_broken_rule_or_a_silent_error_is_a_case() -> None:
    with (HERE / "user_cases.csv").open(newline="", encoding="utf-8") as file:
        rows = [row["id"] for row in csv.DictReader(file) if row["verdict_class"] in ("invalid_rule", "silent_error")]
    assert set(rows) <= set(CASES)
