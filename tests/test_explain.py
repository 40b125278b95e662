"""One layout taken apart."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable

import numpy as np
import pytest

from planner.cost import memory
from planner.explain import MEMORY_FORMULAS, STEP_FORMULAS, complete_layout, explain
from planner.refine import shortlist_of
from planner.report.frame import layouts_frame
from planner.report.text import illegal_lines
from planner.request import Request, make_scenario
from planner.scenario import Scenario
from planner.search import search
from solver.layout import Layout

LABEL = "tp8-pp4-dp64-zero1-mb1"


def test_a_short_label_is_completed(worked_example: Scenario) -> None:
    assert complete_layout(worked_example, "tp8-pp4") == Layout(tensor_parallel=8, pipeline_parallel=4, data_parallel=64, zero_stage=1)
    assert complete_layout(worked_example, "tp8-pp4-vp2-full").recompute_layers == 10
    assert complete_layout(worked_example, "tp8-pp4-zero_bubble_v").virtual_pipeline == 2


def test_the_ledger_agrees_with_the_shortlist(worked_example: Scenario) -> None:
    shown = shortlist_of(search(worked_example), 5)
    assert any(shown.formula_seconds)
    frame = layouts_frame(worked_example, shown.rows)
    for row, label in enumerate(frame["layout"]):
        found = explain(worked_example, complete_layout(worked_example, label))
        assert found.step is not None and found.need_bytes is not None
        assert float(found.step.total[0]) == pytest.approx(frame["step_seconds"][row], rel=1e-12)
        assert found.need_bytes.max() / 2**30 == pytest.approx(frame["memory_gib"][row], rel=1e-12)


def test_every_part_names_a_formula_that_exists(worked_example: Scenario) -> None:
    found = explain(worked_example, complete_layout(worked_example, LABEL))
    assert set(MEMORY_FORMULAS) == {field.name for field in dataclasses.fields(memory.Memory)}
    assert set(STEP_FORMULAS) == {field.name for field in dataclasses.fields(type(found.step))}
    for function, _ in MEMORY_FORMULAS.values():
        assert callable(getattr(memory, function))
    for path, _ in STEP_FORMULAS.values():
        for dotted in path.split(", "):
            module, name = dotted.split(".")
            assert hasattr(__import__(f"planner.cost.{module}", fromlist=[name]), name)


def test_the_models_memory_matches_the_worked_example(worked_example: Scenario) -> None:
    found = explain(worked_example, complete_layout(worked_example, LABEL))
    assert found.memory is not None
    first = {part: float(getattr(found.memory, part)[0]) for part in MEMORY_FORMULAS}
    even = 70.55e9 / 32
    assert first["weights"] + first["gradients"] == pytest.approx(6 * even, rel=0.04)  # the embedding sits on this stage
    assert first["optimizer"] == pytest.approx(12 * even / 64, rel=0.04)
    assert first["activations"] == pytest.approx(4 * 33.5 / 34 * 2.85e9, rel=0.01)
    assert np.all(np.diff(np.asarray(found.memory.activations)) < 0)  # fewer micro-batches in flight down the pipeline


def test_an_illegal_layout_names_the_rule_the_numbers_and_what_is_legal(worked_example: Scenario) -> None:
    found = explain(worked_example, complete_layout(worked_example, "tp16-pp4-dp32"))
    assert not found.legal
    assert "tensor_parallel = 16 does not divide the 8 GPUs of a node" in found.broken_rules["tensor_group_in_node"]
    assert found.legal_values["tensor_parallel"] == [1, 2, 4, 8]
    assert found.step is not None  # the numbers are still worth seeing


def test_a_layout_for_other_gpus_is_refused_without_numbers(worked_example: Scenario) -> None:
    found = explain(worked_example, complete_layout(worked_example, "tp8-pp4-dp32"))
    assert "= 1024, not num_gpus = 2048" in found.broken_rules["gpu_product"]
    assert found.step is None


def test_a_framework_says_by_which_rule_it_refuses(worked_example: Scenario) -> None:
    found = explain(worked_example, complete_layout(worked_example, "tp8-pp4-zero3"))
    assert found.accepted_by == ["torchtitan"]
    assert any(rule.startswith("M20") for rule in found.refused_by["megatron"])


def test_json_ledger_has_all_parts_and_sums(command: Callable[..., object]) -> None:
    done = command("explain", "--model", "70b", "--gpus", "2048", "--layout", LABEL, "--format", "json")
    ledger = json.loads(done.out)  # type: ignore[attr-defined]
    assert sum(ledger["step_parts"].values()) == pytest.approx(ledger["step_seconds"], rel=1e-6)
    assert len(ledger["stages"]) == 4
    assert ledger["verdict"] == "fits"


def test_a_layout_that_only_another_framework_accepts_is_not_legal() -> None:
    scenario = make_scenario(Request(model="70b", num_gpus=64, framework="megatron"))
    found = explain(scenario, complete_layout(scenario, "tp8-pp4-zero3"))
    assert found.accepted_by and "megatron" not in found.accepted_by and not found.legal
    assert any(line.startswith("megatron refuses it by") for line in illegal_lines(found))
