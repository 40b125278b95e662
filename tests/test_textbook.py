"""The worked example of the field: 70B on 2,048 H100, TP 8 x PP 4 x DP 64, ZeRO-1, micro-batch 1."""

from __future__ import annotations

import dataclasses

import pytest

from planner.explain import complete_layout
from planner.scenario import Scenario
from planner.textbook import Figure, figures
from planner.units import MIB

LABEL = "tp8-pp4-dp64-zero1-mb1"

EXPECTED = {
    "parameters per GPU": (2.19e9, 0.01),
    "weights and gradients, 2 B each": (8.8e9, 0.01),
    "the same with fp32 gradients": (13.2e9, 0.02),
    "optimizer shard (ZeRO-1)": (0.41e9, 0.02),
    "activations per micro-batch and stage, GPT": (2.85e9, 0.02),
    "activations of 4 in flight, GPT": (11.4e9, 0.01),
    "micro-batches": (16, 0),
    "ideal bubble, 1 chunk": (0.158, 0.01),
    "ideal bubble, 2 chunks": (0.0857, 0.01),
    "tensor-parallel all-reduce": (64 * MIB, 0),
    "stage boundary per GPU": (8 * MIB, 0),
    "bf16 gradients per GPU": (4.4e9, 0.01),
    "training FLOPs": (5.9e23, 0.01),
    "steps": (333_786, 1e-5),
    "days at 40% MFU": (8.4, 0.02),
    "attention on top of 6 P": (0.08, 0.06),
}


@pytest.fixture(scope="module")
def found(worked_example: Scenario) -> dict[str, Figure]:
    return {figure.name: figure for figure in figures(worked_example, complete_layout(worked_example, LABEL))}


@pytest.mark.parametrize("name", EXPECTED)
def test_the_worked_example_gives_the_fields_figure(found: dict[str, Figure], name: str) -> None:
    value, tolerance = EXPECTED[name]
    assert found[name].value == pytest.approx(value, rel=tolerance, abs=1e-9)


def test_the_models_own_count_stands_beside_gpts(found: dict[str, Figure]) -> None:
    own = next(figure for name, figure in found.items() if name.startswith("the same, this model (33.5"))
    assert own.value == pytest.approx(33.5 / 34 * found["activations per micro-batch and stage, GPT"].value)


def test_two_chunks_halve_the_ideal_bubble(worked_example: Scenario) -> None:
    layout = dataclasses.replace(complete_layout(worked_example, LABEL), virtual_pipeline=2)
    figure = next(f for f in figures(worked_example, layout) if f.name == "ideal bubble, 2 chunks")
    assert figure.value == pytest.approx(0.09, abs=0.005)
