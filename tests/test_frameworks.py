"""Each framework's main rules: every one refuses something, and the known differences between frameworks hold."""

from __future__ import annotations

from typing import Any

import pytest

from planner.frameworks import FRAMEWORKS
from planner.frameworks.legality import accepting, broken, framework_names
from planner.request import Request, make_scenario
from planner.scenario import Scenario
from solver.layout import Layout, columns_of

DENSE: dict[str, Any] = {"model": "70b", "num_gpus": 64, "global_batch_size": 128}
MOE: dict[str, Any] = {"model": "mixtral-8x7b", "num_gpus": 64, "global_batch_size": 128}


def scenario(**wishes: Any) -> Scenario:
    """A scenario of flags."""
    return make_scenario(Request(**wishes))


def refusing(wishes: dict[str, Any], framework: str, **axes: Any) -> set[str]:
    """The ids of the framework's rules that a layout breaks."""
    own = scenario(**wishes)
    return {rule.id for rule in broken(own.job_in(framework), Layout(**axes), framework)}


REFUSED: dict[str, tuple[str, dict[str, Any], dict[str, Any]]] = {
    "M4": ("megatron", {**MOE, "sequence_parallel": False}, {"tensor_parallel": 2, "data_parallel": 32}),
    "M17": ("megatron", DENSE, {"pipeline_parallel": 4, "data_parallel": 16, "schedule": "gpipe"}),
    "M20": ("megatron", DENSE, {"pipeline_parallel": 4, "data_parallel": 16, "zero_stage": 3}),
    "M25": ("megatron", {**DENSE, "precision": "fp8", "seq_len": 2056}, {"data_parallel": 64}),
    "T1": ("torchtitan", DENSE, {"tensor_parallel": 16, "data_parallel": 4}),
    "T2": ("torchtitan", {**DENSE, "seq_len": 4104}, {"tensor_parallel": 4, "context_parallel": 4, "data_parallel": 4}),
    "T3": ("torchtitan", MOE, {"tensor_parallel": 2, "expert_tensor_parallel": 2, "data_parallel": 32}),
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
}


@pytest.mark.parametrize("framework", SOUND)
def test_what_each_framework_is_used_for_is_accepted(framework: str) -> None:
    assert refusing(DENSE, framework, **SOUND[framework]) == set()


def test_kv_heads_below_the_tensor_group_are_copied_by_megatron_alone() -> None:
    own = scenario(**DENSE, tensor_across_nodes=True)
    wide = columns_of([Layout(tensor_parallel=16, data_parallel=4, zero_stage=1)])
    bits = accepting({name: own.job_in(name) for name in FRAMEWORKS}, wide)
    assert framework_names(int(bits[0])) == ["megatron"]


def test_full_recompute_of_every_layer_is_whole_also_where_chunks_are_refused() -> None:
    stages = {"pipeline_parallel": 4, "virtual_pipeline": 2, "data_parallel": 16, "schedule": "interleaved_1f1b"}
    assert "D8" not in refusing(DENSE, "deepspeed", **stages, recompute="full", recompute_layers=10)
    assert "D8" in refusing(DENSE, "deepspeed", **stages, recompute="full", recompute_layers=9)


def test_an_eager_stack_lets_v_shaped_schedules_through() -> None:
    own = scenario(**DENSE, software="fsdp2-eager")
    layout = Layout(pipeline_parallel=4, virtual_pipeline=2, data_parallel=16, zero_stage=2, schedule="zero_bubble_v")
    assert not broken(own.job_in("torchtitan"), layout, "torchtitan")


def test_every_rule_says_its_sentence_and_source() -> None:
    rules = [rule for rules in FRAMEWORKS.values() for rule in rules]
    assert len({rule.id for rule in rules}) == len(rules)
    assert all(rule.sentence and rule.source for rule in rules)
