"""The best uneven split of a layout: as brute force finds it, legal, no more memory than allowed, printable."""

from __future__ import annotations

import dataclasses
import itertools
import re
from typing import Any

import pytest

from planner.cost.estimate import memory_of, time_of
from planner.explain import complete_layout
from planner.frameworks.megatron import pipeline_layout
from planner.request import Request, make_scenario
from planner.scenario import Job
from planner.split import best_split, even_layers, pipeline_of, with_split
from solver import partition
from solver.layout import V_SHAPED, Layout, columns_of

GLM = ("glm-4.5-air", 256, "h100-sxm-80gb", "tp2-pp4-ep16-dp32-zero1-mb1")
NAMED = {
    "deepseek-v3 over 16": ("deepseek-v3", 2048, "h800-sxm-80gb", "pp16-ep64-dp128-zero1-mb1-full"),
    "llama 405b over 16": ("405b", 16384, "h100-sxm-80gb", "tp8-pp16-dp128-zero1-mb1-full"),
    "glm over 4": GLM,
    "qwen3 over 8 with 4 chunks": ("qwen3-235b-a22b", 512, "h100-sxm-80gb", "tp2-pp8-vp4-ep16-dp32-zero1-mb1"),
}


def question(model: str, num_gpus: int, gpu: str, label: str, **wishes: Any) -> tuple[Job, Layout]:
    """A job under Megatron's stack, and a layout of it."""
    scenario = make_scenario(Request(model=model, num_gpus=num_gpus, gpu=gpu, **wishes))
    return scenario.job_in("megatron"), complete_layout(scenario, label)


def small(layers: int, vocab: int, label: str, **wishes: Any) -> tuple[Job, Layout]:
    """A small dense model and a layout of it."""
    request = Request(model_shape=f"layers={layers},hidden=4096,heads=32,vocab={vocab}", num_gpus=8, global_batch_size=32, **wishes)
    scenario = make_scenario(request)
    return scenario.job_in("megatron"), complete_layout(scenario, label)


def step_seconds(job: Job, layout: Layout) -> float:
    """Seconds of a step."""
    return float(time_of(job, columns_of([layout])).total[0])


def pipeline_seconds(job: Job, layout: Layout) -> float:
    """What the split decides of a step: all but gradients and optimizer."""
    step = time_of(job, columns_of([layout]))
    return float(step.total[0] - step.data[0] - step.optimizer[0])


def last_of(layout: Layout) -> int:
    """The stage of the last chunk, which the loss follows."""
    return 0 if layout.schedule in V_SHAPED else layout.pipeline_parallel - 1


def compositions(total: int, stages: int, least: int, last: int) -> list[tuple[int, ...]]:
    """Every split of some layers that leaves a layer in each chunk, but for the last chunk of all."""
    cuts = itertools.product(range(least - 1, total + 1), repeat=stages - 1)
    every = [(*cut, total - sum(cut)) for cut in cuts]
    return [split for split in every if all(count >= least - (stage == last) for stage, count in enumerate(split))]


@pytest.mark.parametrize(
    ("layers", "vocab", "label"),
    [
        (13, 128000, "pp4-dp2-zero1-mb1"),
        (13, 512000, "pp4-dp2-zero1-mb1-full"),
        (14, 256000, "pp2-vp2-dp4-zero1-mb1"),
        (12, 256000, "pp4-dp2-zero1-mb2-full2"),
        (11, 64000, "tp2-pp4-vp2-dp1-zero1-mb1-full1"),
        (13, 256000, "pp4-dp2-zero1-mb1-zero_bubble_h1"),
        (12, 256000, "pp2-vp2-dp4-zero1-mb1-zero_bubble_v"),
    ],
)
def test_the_solver_finds_the_split_that_brute_force_finds(layers: int, vocab: int, label: str) -> None:
    job, layout = small(layers, vocab, label)
    found = partition.solve(pipeline_of(job, layout), hint=even_layers(job, layout))
    every = compositions(layers, layout.pipeline_parallel, layout.virtual_pipeline, last_of(layout))
    best = min(pipeline_seconds(with_split(job, split), layout) for split in every)
    assert found.status == "optimal"
    assert pipeline_seconds(with_split(job, found.layers), layout) == pytest.approx(best, rel=1e-6)


def test_with_free_recompute_the_solver_finds_what_brute_force_finds() -> None:
    roomy, layout = small(8, 128000, "pp2-dp4-zero1-mb4-full")
    x, plain = columns_of([layout]), columns_of([dataclasses.replace(layout, recompute="none", recompute_layers=0)])
    between = float(memory_of(roomy, x).need_bytes[0] + memory_of(roomy, plain).need_bytes[0]) / 2
    job = with_memory(roomy, 1.15 * between)
    found = partition.solve(pipeline_of(job, layout, free_recompute=True))
    most = int(memory_of(job, x).verdict[0])
    fitting = []
    for layers in compositions(8, 2, 1, 1):
        for recomputed in itertools.product(*(range(count + 1) for count in layers)):
            uneven = with_split(job, layers, recomputed)
            if memory_of(uneven, x).verdict[0] <= most:
                fitting.append((pipeline_seconds(uneven, layout), layers, recomputed))
    best = min(fitting)[0]
    assert found.status == "optimal" and 0 < sum(found.recomputed) < 8  # memory forces some, not all
    assert pipeline_seconds(with_split(job, found.layers, found.recomputed), layout) == pytest.approx(best, rel=1e-6)


@pytest.mark.parametrize("case", NAMED)
def test_known_models_split_legally_evenly_enough_and_no_slower_than_the_even_split(case: str) -> None:
    job, layout = question(*NAMED[case])
    found = partition.solve(pipeline_of(job, layout), hint=even_layers(job, layout))
    assert found.status == "optimal"
    assert sum(found.layers) == job.model.num_layers == sum(found.chunks) and min(found.chunks[:-1]) >= 1
    x = columns_of([layout])
    own = memory_of(with_split(job, found.layers), x)
    assert own.verdict[0] <= memory_of(job, x).verdict[0]
    assert pipeline_seconds(with_split(job, found.layers), layout) <= pipeline_seconds(job, layout) * (1 + 1e-6)
    passes = [load.forward + load.backward for load in found.loads]
    assert max(passes) <= 1.1 * sorted(passes)[len(passes) // 2]  # no stage sets a pace of its own
    assert unrolled(pipeline_layout(found.chunks, job.num_mtp_layers)) == written_out(found.chunks, job.num_mtp_layers)


def written_out(chunks: tuple[int, ...], mtp: int) -> str:
    """A Megatron layout with a letter for every layer."""
    letters = ["t" * count for count in chunks]
    letters[0], letters[-1] = "E" + letters[0], letters[-1] + "m" * mtp + "L"
    return "|".join(letters)


def unrolled(layout: str) -> str:
    """A Megatron layout as its parser reads it: commas dropped, then (..)*n and x*n written out."""
    text = layout.replace(",", "")
    text = re.sub(r"\(([^)]*)\)\*(\d+)", lambda m: re.sub(r"(.)\*(\d+)", lambda n: n[1] * int(n[2]), m[1]) * int(m[2]), text)
    return re.sub(r"(.)\*(\d+)", lambda m: m[1] * int(m[2]), text)


def test_a_heavy_head_takes_layers_from_its_stage_and_the_gain_is_stated() -> None:
    job, layout = question(*GLM)
    split, status = best_split(job, layout, even_step_seconds=step_seconds(job, layout))
    assert split is not None and status == split.status == "optimal" and split.gap == 0.0
    assert split.layers_per_stage == (13, 12, 12, 9)
    uneven, even = (time_of(j, columns_of([layout])).total[0] for j in (with_split(job, split.layers_per_stage), job))
    assert split.gain == pytest.approx(1 - uneven / even) and split.gain > 0.05


def test_where_the_even_split_is_best_there_is_no_other() -> None:
    job, layout = small(16, 1000, "pp4-dp2-zero1-mb1")
    assert best_split(job, layout, even_step_seconds=step_seconds(job, layout)) == (None, "optimal")


def test_64_stages_are_proven_optimal() -> None:
    job, layout = question("405b", 4096, "h100-sxm-80gb", "pp64-dp64-zero1-mb1-full")
    assert best_split(job, layout, even_step_seconds=step_seconds(job, layout))[1] == "optimal"


@pytest.mark.parametrize("share", [0.7, 0.85, 1.0, 1.2])
def test_a_split_never_needs_more_than_the_verdict_of_the_even_one_allows(share: float) -> None:
    roomy, layout = small(16, 512000, "pp4-dp2-zero1-mb1")
    x = columns_of([layout])
    job = with_memory(roomy, share * float(memory_of(roomy, x).need_bytes[0]))
    split, _ = best_split(job, layout, even_step_seconds=step_seconds(job, layout))
    if split is not None:
        assert split.verdict <= memory_of(job, x).verdict[0]
        assert split.verdict == memory_of(with_split(job, split.layers_per_stage), x).verdict[0]


def with_memory(job: Job, memory_bytes: float) -> Job:
    """The job on GPUs that offer so much."""
    return dataclasses.replace(job, gpu=dataclasses.replace(job.gpu, memory_bytes=memory_bytes))


def test_free_recompute_drops_no_load_for_a_recompute_that_it_may_do_without() -> None:
    request = Request(model_shape="layers=7,hidden=2048,heads=16,vocab=74000", num_gpus=2, global_batch_size=32)
    scenario = make_scenario(request)
    job, layout = scenario.job_in("megatron"), complete_layout(scenario, "pp2-dp1-zero1-mb1-full4")
    found = partition.solve(pipeline_of(job, layout, free_recompute=True), hint=even_layers(job, layout))
    every = compositions(7, 2, 1, 1)
    best = min(pipeline_seconds(with_split(job, layers, (0, 0)), layout) for layers in every)
    assert pipeline_seconds(with_split(job, found.layers, found.recomputed), layout) == pytest.approx(best, rel=1e-6)


def test_a_stage_at_risk_makes_its_layout_at_risk_though_another_is_fuller() -> None:
    request = Request(model_shape="layers=13,hidden=2048,heads=16,vocab=128000", num_gpus=2, seq_len=2048, global_batch_size=16)
    scenario = make_scenario(request)
    layout = complete_layout(scenario, "pp2-dp1-zero1-mb2")
    job = with_memory(scenario.job_in("megatron"), 22917909519.0)
    found = partition.solve(pipeline_of(job, layout), hint=even_layers(job, layout))
    x = columns_of([layout])
    assert memory_of(with_split(job, found.layers), x).verdict[0] <= memory_of(job, x).verdict[0]
