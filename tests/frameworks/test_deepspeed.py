"""DeepSpeed itself takes what we export, and refuses what our rules refuse, but for a list of holes."""

from __future__ import annotations

import itertools
import json
import random
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
from deepspeed.runtime.utils import partition_balanced
from deepspeed.runtime.zero.stage3 import estimate_zero3_model_states_mem_needs
from deepspeed.runtime.zero.stage_1_and_2 import estimate_zero2_model_states_mem_needs

from planner.cost import parameters
from planner.cost.estimate import memory_of
from planner.frameworks import deepspeed
from planner.frameworks.deepspeed_json import Batch
from planner.frameworks.deepspeed_keys import BLOCKS, REMOVED, TOP_KEYS
from planner.frameworks.deepspeed_write import FILE, in_megatron, write
from planner.frameworks.launch_script import launch_script
from planner.frameworks.reading import read_config
from planner.frameworks.writing import Target
from planner.request import Request, make_scenario
from solver.layout import Layout, columns_of, fully_recomputed
from tests.frameworks import deepspeed_real as real
from tests.frameworks.cases import targets

NUMBER = 240
DATA = Path(__file__).parents[1] / "data" / "configs"


@pytest.fixture(scope="module")
def exported() -> tuple[Target, ...]:
    """The layouts that are exported."""
    found = targets("deepspeed", NUMBER)
    assert len(found) >= 200
    return found


def config_of(target: Target) -> dict[str, Any]:
    """The data of the exported ds_config.json."""
    return dict(json.loads(write(target).files[FILE]))


def judge(target: Target, data: dict[str, Any]) -> str:
    """What DeepSpeed says against an exported layout, "" where it takes it."""
    layout, model = target.layout, target.job.model

    def enter() -> None:
        found = real.parsed(data, layout.data_parallel)
        assert found.train_batch_size == target.job.global_batch_size
        assert found.zero_optimization_stage == layout.zero_stage
        assert real.grid(target).world_size() * layout.context_parallel == target.job.num_gpus
        if layout.pipeline_parallel > 1:
            real.enter_pipeline(layout.zero_stage)
            assert real.cut(model.num_layers, layout.pipeline_parallel) == list(
                deepspeed.stage_layers(model.num_layers, layout.pipeline_parallel)
            )
        if layout.context_parallel > 1:
            real.sequence_groups(model.num_attention_heads, model.num_key_value_heads, layout.context_parallel, target.job.seq_len)
        real.expert_groups(data, target.job.num_gpus, layout.context_parallel, layout.zero_stage, model.num_experts)

    return real.refused(enter)


def test_deepspeed_takes_every_exported_layout(exported: tuple[Target, ...]) -> None:
    said = {target.layout.label: answer for target in exported if (answer := judge(target, config_of(target)))}
    assert not said, f"{len(said)} of {len(exported)} refused: {next(iter(said.items()))}"


def test_the_exported_layouts_are_of_many_kinds(exported: tuple[Target, ...]) -> None:
    kinds = Counter[str]()
    for target in exported:
        layout = target.layout
        kinds["experts"] += layout.expert_parallel > 1
        kinds["ulysses"] += layout.context_parallel > 1
        kinds["pipeline"] += layout.pipeline_parallel > 1
        kinds["uneven"] += target.job.model.num_layers % layout.pipeline_parallel > 0
        kinds["megatron"] += in_megatron(target)
        kinds["trainer"] += not in_megatron(target)
        kinds[f"zero{layout.zero_stage}"] += 1
    assert min(kinds.values()) >= 10, kinds


def test_an_exported_file_read_back_gives_the_layout_again(exported: tuple[Target, ...], tmp_path: Path) -> None:
    for target in exported:
        launch = write(target)
        (tmp_path / FILE).write_text(launch.files[FILE])
        script = tmp_path / "launch.sh"
        script.write_text(launch_script(target, launch))
        config = read_config(script, target.job.num_gpus)
        job, stated = target.job, dict(config.layout)
        stated.setdefault("data_parallel", target.layout.data_parallel)
        layout = Layout(**stated)  # type: ignore[arg-type]
        full = fully_recomputed(layout, job.model.num_layers) if layout.recompute == "full" else layout
        assert full == target.layout, (full.label, target.layout.label)
        request = config.request
        assert (request.seq_len, request.global_batch_size, request.precision) == (job.seq_len, job.global_batch_size, job.precision)
        if config.model is not None and not job.model.router_bias and job.model.norms_per_layer == 2:
            assert parameters.total(config.model) == parameters.total(job.model), job.model.name


def test_the_published_recipe_is_taken_for_its_own_number_of_gpus_alone() -> None:
    path = DATA / "deepspeed_zero3_70b.json"
    gpus = read_config(path).request.num_gpus
    assert gpus == 64
    assert not real.refused(lambda: real.parsed_file(path, gpus)) and real.refused(lambda: real.parsed_file(path, gpus - 1))


# What is refused


def test_batches_that_do_not_divide_are_refused(exported: tuple[Target, ...]) -> None:
    for target in exported[:60]:
        data = config_of(target)
        for key in ("train_batch_size", "train_micro_batch_size_per_gpu", "gradient_accumulation_steps"):
            assert judge(target, {**data, key: data[key] + 1}), (target.layout.label, key)


def test_our_batch_follows_deepspeeds_own_derivation() -> None:
    rng = random.Random(1)
    keys = {"train": "train_batch_size", "micro": "train_micro_batch_size_per_gpu", "accumulation": "gradient_accumulation_steps"}
    for _ in range(400):
        stated = {key: rng.choice((None, rng.randint(1, 64))) for key in keys}
        if stated["train"] is None and stated["micro"] is None:
            continue
        replicas = rng.choice((1, 2, 3, 8))
        filled = Batch(**stated).filled(replicas)
        data = {keys[key]: value for key, value in stated.items() if value is not None}
        legal = (filled.micro or 0) * (filled.accumulation or 0) * replicas == filled.train and bool(filled.train)
        assert legal == (not real.refused(lambda data=data, replicas=replicas: real.parsed(data, replicas))), (stated, replicas)


BROKEN: dict[str, dict[str, Any]] = {
    "stage 4": {"zero_optimization": {"stage": 4}},
    "an unknown key of the ZeRO block": {"zero_optimization": {"stage": 1, "overlap_com": True}},
    "an unknown key of bf16": {"bf16": {"enabled": True, "loss_scale": 1}},
    "an unknown key of tensor_parallel": {"tensor_parallel": {"autotp": 2}},
    "both precisions": {"bf16": {"enabled": True}, "fp16": {"enabled": True}},
    "a batch left to the caller": {"train_micro_batch_size_per_gpu": "auto"},
    "a batch in quotes": {"train_batch_size": "8"},
    "an unknown offload device": {"zero_optimization": {"stage": 3, "offload_param": {"device": "gpu"}}},
    "partial offload below stage 3": {"zero_optimization": {"stage": 2, "offload_optimizer": {"device": "cpu", "ratio": 0.5}}},
    "no gradient norm under stage 3": {"zero_optimization": {"stage": 3, "compute_grad_norm": False}},
    "16-bit master weights without ZeRO": {"bf16": {"enabled": True, "bf16_master_weights_and_grads": True}},
    "16-bit moments without 16-bit weights": {"zero_optimization": {"stage": 1}, "bf16": {"enabled": True, "bf16_optimizer_states": True}},
    **{f"the removed {key}": {key: {}} for key in REMOVED if "." not in key},
    **{f"the removed {key}": {"zero_optimization": {key.split(".")[1]: 1}} for key in REMOVED if "." in key},
}


@pytest.mark.parametrize("name", BROKEN)
def test_settings_that_our_rules_call_illegal_are_refused(name: str) -> None:
    assert real.refused(lambda: real.parsed({"train_batch_size": 8, "train_micro_batch_size_per_gpu": 2, **BROKEN[name]}, 4))


HOLES = {
    "D1": "no key of DeepSpeed states virtual stages: such a layout cannot be written",
    "D2": "AutoTP only warns and leaves ranks without KV heads",
    "D5": "no key of DeepSpeed states 8-bit formats: such a layout cannot be written",
    "D7": "no key of DeepSpeed states another schedule: the pipeline engine has one",
    "D8": "selective recompute and recompute of some layers are the model's own code, which no parser sees",
}
"""Rules that DeepSpeed's own checks do not enforce, and why ours are stricter."""


def test_every_layout_rule_is_enforced_by_deepspeed_or_stands_on_the_list_of_holes() -> None:
    enforced = {
        "D3": lambda: real.sequence_groups(40, 8, 20),
        "D4": lambda: real.expert_groups({"expert_parallel": {"enabled": True, "autoep_size": 3}}, 64, 1, 1, 8),
        "D6": lambda: real.enter_pipeline(2),
        "D9": lambda: real.expert_groups({"expert_parallel": {"enabled": True, "autoep_size": 2}}, 64, 2, 3, 8),
    }
    assert {*enforced, *HOLES} == {rule.id for rule in deepspeed.RULES}
    assert all(real.refused(call) for call in enforced.values())


def test_ulysses_sizes_are_those_that_deepspeed_takes() -> None:
    for heads, key_values in ((40, 8), (64, 8), (32, 32), (96, 96), (128, 16), (48, 6), (71, 1), (24, 3)):
        taken = [
            size for size in range(1, heads + 1) if not real.refused(lambda s=size, a=heads, k=key_values: real.sequence_groups(a, k, s))
        ]
        assert taken == deepspeed.ulysses_sizes(heads, key_values)


def test_expert_tensor_groups_are_refused_and_expert_groups_must_divide() -> None:
    def groups(expert: int, tensor: int) -> str:
        block = {"enabled": True, "autoep_size": expert, "expert_tensor_parallel_size": tensor}
        return real.refused(lambda: real.expert_groups({"expert_parallel": block}, 64, 1, 1, 8))

    assert groups(8, 2) and groups(16, 1) and not groups(8, 1)


def test_experts_with_a_tensor_group_are_a_place_where_we_are_stricter() -> None:
    data = {"expert_parallel": {"enabled": True, "autoep_size": 8}, "tensor_parallel": {"autotp_size": 2}}
    assert not real.refused(lambda: real.expert_groups(data, 64, 1, 1, 8))


def test_an_unknown_top_level_key_passes_silently() -> None:
    assert not real.refused(lambda: real.parsed({"train_batch_size": 8, "zero_optimisation": {"stage": 3}, "_comment": ["x"]}, 4))


# Our tables are DeepSpeed's


def test_our_list_of_top_level_keys_is_what_deepspeed_looks_up() -> None:
    asked = real.recorded({"train_batch_size": 8})
    assert asked - set(REMOVED) <= set(TOP_KEYS)
    assert set(TOP_KEYS) - asked == {"sequence_parallel_size"}  # looked up where there is no grid of ranks
    assert {key for key in REMOVED if "." not in key} <= asked


def test_our_lists_of_closed_blocks_are_deepspeeds_fields() -> None:
    from deepspeed.runtime.precision_config import DeepSpeedBF16Config, DeepSpeedFP16Config
    from deepspeed.runtime.tensor_parallel.config import TPTrainingConfig
    from deepspeed.runtime.zero.config import DeepSpeedZeroConfig

    models = {"zero_optimization": DeepSpeedZeroConfig, "bf16": DeepSpeedBF16Config, "fp16": DeepSpeedFP16Config}
    for block, model in {**models, "tensor_parallel": TPTrainingConfig}.items():
        fields = model.model_fields
        names = {*fields, *(field.alias for field in fields.values() if field.alias)}
        assert names == set(BLOCKS[block]), block


def test_stages_are_cut_as_deepspeed_cuts_them() -> None:
    for num_layers in (5, 16, 17, 30, 44, 61, 62, 80, 94, 126):
        for stages in (2, 3, 4, 5, 7, 8, 12, 16):
            if stages <= num_layers:
                bounds = partition_balanced([1] * num_layers, stages)
                assert [b - a for a, b in itertools.pairwise(bounds)] == list(deepspeed.stage_layers(num_layers, stages))


# Memory


@pytest.mark.parametrize("model, num_gpus", [("8b", 8), ("8b", 64), ("70b", 64), ("70b", 256), ("gpt-neox-20b", 96)])
def test_sharded_states_are_deepspeeds_own_estimate(model: str, num_gpus: int) -> None:
    """ZeRO-2: 2 + 18/N bytes per parameter in both. ZeRO-3: DeepSpeed's 18/N leave out the sharded 16-bit gradients."""
    scenario = make_scenario(Request(model=model, num_gpus=num_gpus, global_batch_size=num_gpus, framework="deepspeed"))
    job = scenario.job_in("deepspeed")
    total = parameters.total(job.model)

    def ours(stage: int) -> float:
        memory = memory_of(job, columns_of([Layout(data_parallel=num_gpus, zero_stage=stage)])).parts
        return float((memory.weights + memory.gradients + memory.optimizer)[0])

    nodes = num_gpus // 8
    _, second = estimate_zero2_model_states_mem_needs(total, 8, nodes, cpu_offload=False)
    _, third, layer = estimate_zero3_model_states_mem_needs(total, 0, 8, nodes, cpu_offload=False)
    assert ours(2) == pytest.approx(second, rel=1e-3)
    assert ours(3) - 2 * total / num_gpus == pytest.approx(third - layer, rel=1e-3)
