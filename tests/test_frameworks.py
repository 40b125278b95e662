"""Each framework's main rules: every one refuses something, and the known differences between frameworks hold."""

from __future__ import annotations

import dataclasses
import random
from typing import Any

import numpy as np
import pytest

from planner.frameworks import FRAMEWORKS
from planner.frameworks.legality import accepting, broken, framework_names, reason
from planner.request import Request, make_scenario
from planner.scenario import Scenario
from solver.layout import MESH_AXES, RECOMPUTE, SCHEDULES, Layout, columns_of, fully_recomputed
from solver.problem import divisors

LEARNED = "layers=8,hidden=1024,heads=8,ffn=4096,vocab=32000,gated=false,learned_positions=4096,num_mtp_layers=1"
DENSE: dict[str, Any] = {"model": "70b", "num_gpus": 64, "global_batch_size": 128}
MOE: dict[str, Any] = {"model": "mixtral-8x7b", "num_gpus": 64, "global_batch_size": 128}


def scenario(**wishes: Any) -> Scenario:
    """A scenario of flags."""
    return make_scenario(Request(**wishes))


def refusing(wishes: dict[str, Any], framework: str, **axes: Any) -> set[str]:
    """The ids of the framework's rules that a layout breaks."""
    stated = dict(wishes)
    modules = stated.pop("recompute_modules", None)
    job = scenario(**stated).job_in(framework)
    if modules:
        job = job.under(dataclasses.replace(job.software, recompute_modules=modules))
    return {rule.id for rule in broken(job, Layout(**axes), framework)}


REFUSED: dict[str, tuple[str, dict[str, Any], dict[str, Any]]] = {
    "M4": ("megatron", {**MOE, "sequence_parallel": False}, {"tensor_parallel": 2, "data_parallel": 32}),
    "M17": ("megatron", DENSE, {"pipeline_parallel": 4, "data_parallel": 16, "schedule": "gpipe"}),
    "M20": ("megatron", DENSE, {"pipeline_parallel": 4, "data_parallel": 16, "zero_stage": 3}),
    "M25": ("megatron", {**DENSE, "precision": "fp8", "seq_len": 2056}, {"data_parallel": 64}),
    "T1": ("torchtitan", DENSE, {"tensor_parallel": 16, "data_parallel": 4}),
    "T2": ("torchtitan", {**DENSE, "seq_len": 4104}, {"tensor_parallel": 4, "context_parallel": 4, "data_parallel": 4}),
    "T3": ("torchtitan", MOE, {"tensor_parallel": 2, "expert_parallel": 2, "expert_tensor_parallel": 2, "data_parallel": 32}),
    "T4": ("torchtitan", {**DENSE, "precision": "fp16"}, {"data_parallel": 64}),
    "T5": ("torchtitan", {**DENSE, "precision": "fp8", "seq_len": 2056}, {"data_parallel": 64}),
    "T6": ("torchtitan", DENSE, {"data_parallel": 64, "zero_stage": 1}),
    "T7": ("torchtitan", DENSE, {"context_parallel": 2, "data_parallel": 32}),
    "T8": ("torchtitan", DENSE, {"pipeline_parallel": 8, "data_parallel": 8, "micro_batch_size": 16, "zero_stage": 2}),
    "T9": ("torchtitan", DENSE, {"data_parallel": 64, "zero_stage": 3, "recompute": "full", "recompute_layers": 40}),
    "T10": (
        "torchtitan",
        DENSE,
        {"pipeline_parallel": 4, "virtual_pipeline": 2, "data_parallel": 16, "zero_stage": 2, "schedule": "zero_bubble_v"},
    ),
    "T11": ("torchtitan", {**DENSE, "model": "llama-3.2-1b"}, {"pipeline_parallel": 2, "data_parallel": 32, "zero_stage": 3}),
    "T12": ("torchtitan", {**DENSE, "seq_len": 1536}, {"context_parallel": 8, "data_parallel": 8, "zero_stage": 3}),
    "T13": ("torchtitan", {**DENSE, "model": "gpt-oss-20b"}, {"context_parallel": 2, "data_parallel": 32, "zero_stage": 3}),
    "M26": ("megatron", {**DENSE, "optimizer": "muon"}, {"data_parallel": 64, "zero_stage": 3}),
    "M27": ("megatron", {**DENSE, "optimizer": "adam-8bit"}, {"data_parallel": 64, "zero_stage": 0}),
    "M28": (
        "megatron",
        {**DENSE, "model": "gpt-oss-20b"},
        {"tensor_parallel": 2, "expert_tensor_parallel": 2, "data_parallel": 32, "zero_stage": 1},
    ),
    "M29": ("megatron", {**DENSE, "recompute_modules": ("moe_act",)}, {"data_parallel": 64, "zero_stage": 1, "recompute": "selective"}),
    "M47": ("megatron", {**DENSE, "model_shape": LEARNED, "model": None}, {"data_parallel": 64, "zero_stage": 1}),
    "D9": ("deepspeed", MOE, {"context_parallel": 2, "expert_parallel": 2, "data_parallel": 32, "zero_stage": 3}),
    "A1": ("accelerate", DENSE, {"pipeline_parallel": 2, "data_parallel": 32, "zero_stage": 3}),
    "A2": ("accelerate", DENSE, {"tensor_parallel": 16, "data_parallel": 4, "zero_stage": 3}),
    "A3": ("accelerate", DENSE, {"data_parallel": 64, "zero_stage": 1}),
    "A4": ("accelerate", DENSE, {"data_parallel": 64, "zero_stage": 3, "recompute": "selective"}),
    "A5": ("accelerate", {**DENSE, "num_gpus": 8}, {"tensor_parallel": 8, "zero_stage": 3}),
    "A6": ("accelerate", {**DENSE, "precision": "fp8"}, {"data_parallel": 64, "zero_stage": 3}),
    "D1": ("deepspeed", DENSE, {"pipeline_parallel": 4, "virtual_pipeline": 2, "data_parallel": 16, "schedule": "interleaved_1f1b"}),
    "D2": ("deepspeed", DENSE, {"tensor_parallel": 16, "data_parallel": 4}),
    "D3": ("deepspeed", DENSE, {"tensor_parallel": 2, "context_parallel": 2, "data_parallel": 16}),
    "D4": ("deepspeed", MOE, {"tensor_parallel": 2, "data_parallel": 32, "expert_parallel": 8}),
    "D5": ("deepspeed", {**DENSE, "precision": "fp8"}, {"data_parallel": 64}),
    "D6": ("deepspeed", DENSE, {"pipeline_parallel": 4, "data_parallel": 16, "zero_stage": 2}),
    "D7": ("deepspeed", DENSE, {"pipeline_parallel": 4, "data_parallel": 16, "schedule": "gpipe"}),
    "D8": ("deepspeed", DENSE, {"data_parallel": 64, "recompute": "selective"}),
}


def test_every_rule_has_a_layout_that_it_refuses_here() -> None:
    assert set(REFUSED) == {rule.id for rules in FRAMEWORKS.values() for rule in rules}


@pytest.mark.parametrize("rule", REFUSED)
def test_the_rule_refuses_its_layout(rule: str) -> None:
    framework, wishes, axes = REFUSED[rule]
    assert rule in refusing(wishes, framework, **axes)


SOUND = {
    "megatron": {"tensor_parallel": 8, "pipeline_parallel": 4, "data_parallel": 2, "zero_stage": 1},
    "torchtitan": {"tensor_parallel": 8, "data_parallel": 8, "zero_stage": 3},
    "deepspeed": {"data_parallel": 64, "zero_stage": 3},
    "megatron-bridge": {"tensor_parallel": 8, "pipeline_parallel": 4, "data_parallel": 2, "zero_stage": 1},
    "accelerate": {"tensor_parallel": 8, "data_parallel": 8, "zero_stage": 3},
}


@pytest.mark.parametrize("framework", SOUND)
def test_what_each_framework_is_used_for_is_accepted(framework: str) -> None:
    assert refusing(DENSE, framework, **SOUND[framework]) == set()


def test_kv_heads_below_the_tensor_group_are_copied_by_megatron_alone() -> None:
    own = scenario(**DENSE, tensor_across_nodes=True)
    wide = columns_of([Layout(tensor_parallel=16, data_parallel=4, zero_stage=1)])
    bits = accepting({name: own.job_in(name) for name in FRAMEWORKS}, wide)
    assert framework_names(int(bits[0])) == ["megatron", "megatron-bridge"]


def test_full_recompute_of_every_layer_is_whole_also_where_chunks_are_refused() -> None:
    stages = {"pipeline_parallel": 4, "virtual_pipeline": 2, "data_parallel": 16, "schedule": "interleaved_1f1b"}
    assert "D8" not in refusing(DENSE, "deepspeed", **stages, recompute="full", recompute_layers=10)
    assert "D8" in refusing(DENSE, "deepspeed", **stages, recompute="full", recompute_layers=9)


def test_an_eager_stack_lets_v_shaped_schedules_through() -> None:
    own = scenario(**DENSE, software="fsdp2-eager")
    layout = Layout(pipeline_parallel=4, virtual_pipeline=2, data_parallel=16, zero_stage=2, schedule="zero_bubble_v")
    assert not broken(own.job_in("torchtitan"), layout, "torchtitan")


def test_every_rule_says_its_sentence_and_source() -> None:
    rules = RULES.values()
    assert len({rule.id for rule in rules}) == len({id(rule) for rule in rules})
    assert all(rule.sentence and rule.source for rule in rules)


RULES = {f"{framework}-{rule.id}": rule for framework, rules in FRAMEWORKS.items() for rule in rules}

JOBS = (
    DENSE,
    {**DENSE, "num_gpus": 96, "global_batch_size": 96, "seq_len": 2056, "precision": "fp8"},
    {**DENSE, "gpu": "b200", "precision": "mxfp8", "software": "fsdp2-eager"},
    {**DENSE, "precision": "fp16", "sequence_parallel": False},
    {**MOE, "sequence_parallel": False},
    {**MOE, "gpu": "b200"},
    {"model": "deepseek-v3", "num_gpus": 64, "global_batch_size": 120},
    {"model": "qwen2.5-14b", "num_gpus": 80, "global_batch_size": 160, "seq_len": 8200},
)


def random_layout(draw: random.Random, own: Scenario) -> Layout:
    """A layout of any values, legal or not."""
    of_gpus = divisors(own.job.num_gpus)
    sizes = {axis: draw.choice((1, 1, *of_gpus)) for axis in (*MESH_AXES, "virtual_pipeline")}
    mode = draw.choice(RECOMPUTE)
    plain = Layout(
        **sizes,
        micro_batch_size=draw.choice((1, 2, 3, 4)),
        zero_stage=draw.randrange(4),
        schedule=draw.choice(SCHEDULES),
        recompute=mode,
        recompute_layers=draw.randrange(1, 5) if mode == "full" else 0,
    )
    whole = mode == "full" and draw.random() < 0.5
    return fully_recomputed(plain, own.job.model.num_layers) if whole else plain


@pytest.mark.parametrize("name", RULES)
def test_a_rule_and_its_plain_twin_agree(name: str) -> None:
    rule, draw = RULES[name], random.Random(name)
    for wishes in JOBS:
        own = scenario(**wishes)
        job = own.job_in(name.rpartition("-")[0])
        layouts = [random_layout(draw, own) for _ in range(300)]
        holds = np.broadcast_to(rule.holds(columns_of(layouts), job), len(layouts))
        for layout, legal in zip(layouts, holds, strict=True):
            assert bool(legal) == (rule.twin(layout, job) == ""), (layout.label, rule.twin(layout, job))


@pytest.mark.parametrize("name", RULES)
def test_a_rule_reads_no_axis_that_it_does_not_name(name: str) -> None:
    rule, draw = RULES[name], random.Random(name)
    for wishes in JOBS:
        own = scenario(**wishes)
        job = own.job_in(name.rpartition("-")[0])
        for _ in range(50):
            one, other = random_layout(draw, own), random_layout(draw, own)
            mixed = dataclasses.replace(other, **{axis: getattr(one, axis) for axis in rule.axes})
            both = np.broadcast_to(rule.holds(columns_of([one, mixed]), job), 2)
            assert both[0] == both[1], (one.label, mixed.label)


def test_a_refusal_names_the_numbers_and_the_legal_values() -> None:
    own = scenario(**DENSE)
    layout = Layout(tensor_parallel=16, data_parallel=4, zero_stage=3)
    (rule,) = broken(own.job_in("torchtitan"), layout, "torchtitan")
    told = reason(rule, layout, own.job_in("torchtitan"))
    assert "num_key_value_heads = 8 does not divide by tensor_parallel = 16" in told
    assert told.endswith("(legal tensor_parallel: 1, 2, 4, 8)")
