"""The checklist fires where an engineer would look twice, and stays silent elsewhere."""

from __future__ import annotations

import pytest

from planner.advice import CHECKS, flags
from planner.explain import complete_layout, facts
from planner.request import Request, make_scenario

SHOWS: dict[str, tuple[dict[str, object], str]] = {
    "headroom": ({"model": "70b", "num_gpus": 64, "global_batch_size": 512}, "tp4-pp4-mb2"),
    "communication": ({"model": "70b", "num_gpus": 2048}, "tp8-pp4-mb1"),
    "bubble": ({"model": "70b", "num_gpus": 2048}, "tp8-pp8-mb4"),
    "tensor parallel across nodes": ({"model": "70b", "num_gpus": 2048}, "tp16-pp4-mb1"),
    "deep pipeline": ({"model": "70b", "num_gpus": 2048}, "tp1-pp64-mb1"),
    "few micro-batches": ({"model": "70b", "num_gpus": 2048}, "tp8-pp8-mb8"),
    "large batch": ({"model": "70b", "num_gpus": 2048, "global_batch_size": 4096}, "tp8-pp4-mb1"),
    "low utilisation": ({"model": "8b", "num_gpus": 64}, "tp8-pp8-dp1-mb1"),
    "recompute missing": ({"model": "70b", "num_gpus": 64, "global_batch_size": 512}, "tp4-pp4-mb2"),
    "thin steps": ({"model": "8b", "num_gpus": 1024, "seq_len": 2048, "global_batch_size": 1024}, "mb1"),
    "sharding without replicas": ({"model": "8b", "num_gpus": 8}, "tp8-dp1-zero1-mb1"),
    "needless recompute": ({"model": "8b", "num_gpus": 64}, "tp2-pp2-mb1-full"),
    "padded vocabulary": ({"model": "gpt-3-175b", "num_gpus": 1024, "seq_len": 2048}, "tp8-pp8-mb1"),
    "launch-bound": ({"model": "8b", "num_gpus": 64, "seq_len": 512, "global_batch_size": 1024}, "tp8-mb1"),
    "misaligned heads": (
        {"model_shape": "layers=8,hidden=1200,heads=8,head_dim=150,ffn=4800,vocab=32000", "num_gpus": 8},
        "mb1",
    ),
}


def found_flags(wishes: dict[str, object], label: str) -> dict[str, str]:
    scenario = make_scenario(Request(**wishes))  # type: ignore[arg-type]
    return flags(facts(scenario, scenario.job, complete_layout(scenario, label)))


def test_every_check_has_an_example_here() -> None:
    assert {check.name for check in CHECKS} == set(SHOWS)


@pytest.mark.parametrize("name", SHOWS)
def test_the_check_fires_on_its_example(name: str) -> None:
    assert name in found_flags(*SHOWS[name])


@pytest.mark.parametrize("check", CHECKS, ids=lambda check: check.name)
def test_the_check_is_silent_on_a_sound_layout(check: object) -> None:
    sound = found_flags({"model": "llama-2-7b", "num_gpus": 8, "global_batch_size": 256}, "dp8-zero1-mb1")
    assert check.name not in sound  # type: ignore[attr-defined]
