"""What is wrong with torchtitan's settings is named with the numbers, the legal values and the nearest of them."""

from __future__ import annotations

import pytest

from planner.frameworks.config import ILLEGAL, TRAP
from planner.frameworks.torchtitan import RULES
from planner.frameworks.torchtitan_settings import SETTING_RULES
from tests.test_torchtitan_config import command, found, toml

PIPE = "--parallelism.pipeline_parallel_degree 4 --training.disable_cuda_graphs --training.local_batch_size 8"
OLD = '[model]\nname = "{name}"\nflavor = "{flavor}"\n[parallelism]\n{degrees}\n'
WRONG: dict[str, tuple[str, str, str]] = {
    "TS1": ("8b", "--parallelism.data_parallel_shard_degree 5", "data_parallel_shard_degree = 64 or -1 fits"),
    "TS2": ("8b", "--parallelism.tensor_parallel_degree 0", "tensor_parallel_degree = 0 must be at least 1"),
    "TS3": ("8b", "--parallelism.tensor_paralel_degree 2", "did you mean 'tensor_parallel_degree'"),
    "TS4": ("8b", f"{PIPE} --parallelism.pipeline_parallel_schedule Interleaved", "did you mean 'Interleaved1F1B'"),
    "TS5": ("8b", "activation-checkpoint:ful", "did you mean 'full'"),
    "TS6": ("8b", "--training.seq_len 8190 --parallelism.tensor_parallel_degree 4", "nearest: 8188 or 8192"),
    "TS7": ("8b", "--training.global_batch_size 100", "nearest: 64 or 128"),
    "TS8": ("8b", f"{PIPE} --parallelism.pipeline_parallel_microbatch_size 3", "legal: 1, 2, 4, 8"),
    "TS9": ("8b", f"{PIPE} --parallelism.pipeline_parallel_microbatch_size 4", "2 micro-batches for 4 stages of 1f1b, which needs 4"),
    "TS10": ("8b", f"{PIPE} --training.global_batch_size 512", "makes 4 passes"),
    "TS11": ("8b", PIPE, "cut 8-9-8-7"),
    "TS12": ("8b", f"{PIPE} --parallelism.pipeline_parallel_layers_per_stage 5", "does not cut 32 layers over 4 stages"),
    "TS13": (
        "8b",
        f"{PIPE} --parallelism.module_fqns_per_model_part tok_embeddings,layers.0 layers.1 layers.2 layers.3,norm,lm_head",
        "leaves out layers.4",
    ),
    "TS14": ("8b", "--parallelism.pipeline_parallel_degree 4", "set --training.disable_cuda_graphs"),
    "TS15": ("8b", f"{PIPE} --parallelism.pipeline_parallel_schedule ZBVZeroBubble --compile.enable", "with a compiled model"),
    "TS16": ("8b", PIPE, "keeps its stage's weights whole"),
    "TS17": ("16b", "--parallelism.expert_parallel_degree 48", "legal: 1, 2, 4, 8, 16, 32, 64"),
    "TS19": ("8b", "--compile.enable_async_tensor_parallel", "needs compile.enable"),
}


@pytest.mark.parametrize("rule", WRONG)
def test_a_wrong_setting_is_named_with_its_numbers_and_the_way_out(rule: str) -> None:
    model, flags, message = WRONG[rule]
    module, name = {"8b": ("llama3", "llama3_8b"), "16b": ("deepseek_v3", "deepseek_v3_16b")}[model]
    said = found(command(f"torchrun -m torchtitan.train --module {module} --config {name} {flags}"))
    assert message in said[rule], said


@pytest.mark.parametrize(
    ("name", "flavor", "degrees", "message"),
    [
        ("qwen3", "32B", "pipeline_parallel_degree = 4", "does not cut qwen3 into stages"),
        ("deepseek_v3", "671B", "context_parallel_degree = 4", "does not split the attention of deepseek_v3"),
        ("llama3", "1B", "tensor_parallel_degree = 2", "0.2 has no flavor 1B of llama3"),
        ("llama3", "8B_varlen", "context_parallel_degree = 4", "does not split the attention of llama3 8B_varlen"),
        ("llama3", "8B", "data_parallel_replicate_degree = 8\ntensor_parallel_degree = 8", "must be all 64 GPUs"),
        (
            "deepseek_v3",
            "16B",
            'pipeline_parallel_degree = 4\npipeline_parallel_schedule = "DualPipeV"\nexpert_parallel_degree = 2',
            "needs activation_checkpoint.mode = none",
        ),
    ],
)
def test_what_the_old_version_lacks_is_named(name: str, flavor: str, degrees: str, message: str) -> None:
    assert message in found(toml(OLD.format(name=name, flavor=flavor, degrees=degrees)))["TS18"]


def test_every_setting_rule_has_a_case_a_source_and_a_kind() -> None:
    assert {rule.id for rule in SETTING_RULES} == {*WRONG, "TS18"}
    assert all(rule.sentence and rule.source and rule.kind in (ILLEGAL, TRAP) for rule in SETTING_RULES)
    assert not {rule.id for rule in SETTING_RULES} & {rule.id for rule in RULES}


def test_unknown_old_keys_and_sections_are_named() -> None:
    said = found(toml('[model]\nflavor = "8B"\n[training]\nbatch_size = 8\n[paralelism]\nx = 1'))["TS3"]
    assert "[training] has no key 'batch_size'" in said and "there is no section 'paralelism'; did you mean 'parallelism'" in said
