"""The bound on a step under any split of the layers: no split undercuts it, and it is close where stages are alike."""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np
import pytest

from planner.catalogue.load import find
from planner.catalogue.schema import Software
from planner.cost.bound import least_step_seconds
from planner.cost.estimate import time_of
from planner.explain import complete_layout
from planner.request import Request, make_scenario
from planner.scenario import Job
from planner.split import even_layers, with_split
from solver.layout import Columns, Layout, columns_of
from tests.builders import sampled_layouts

DENSE = (("model_shape", "layers=22,hidden=2048,heads=16,vocab=128000"), ("num_gpus", 16), ("global_batch_size", 32))
MIXED = (("model", "deepseek-v2-lite"), ("num_gpus", 16), ("global_batch_size", 64))
PREDICTING = (("model", "glm-4.5-air"), ("num_gpus", 16), ("global_batch_size", 32))
JOBS = pytest.mark.parametrize("wishes", [DENSE, MIXED, PREDICTING], ids=["dense", "dense-and-experts", "multi-token"])
STACKS = pytest.mark.parametrize("stack", ["megatron-core", "fsdp2", "deepspeed", "megatron-lm-2022"])


def pipelines(wishes: tuple[tuple[str, Any], ...], stack: str, count: int) -> tuple[Job, Columns]:
    """A job under a stack, and some of its legal layouts with pipeline stages."""
    scenario, x = sampled_layouts(wishes, 2000)
    staged = np.flatnonzero(x.pipeline_parallel > 1)
    return scenario.job.under(find(Software, stack)), x.take(staged[:: max(len(staged) // count, 1)])


def random_split(pick: np.random.Generator, layout: Layout, num_layers: int) -> tuple[int, ...]:
    """Layers per stage, a layer in every chunk, near the even split or far from it."""
    p, v = layout.pipeline_parallel, layout.virtual_pipeline
    spare = num_layers - p * v
    shares = pick.dirichlet(np.full(p, pick.choice([0.5, 5.0, 200.0])))
    extra = pick.multinomial(spare, shares) if spare else np.zeros(p, dtype=int)
    return tuple(int(v + more) for more in extra)


@JOBS
@STACKS
def test_no_split_undercuts_the_bound(wishes: tuple[tuple[str, Any], ...], stack: str) -> None:
    job, x = pipelines(wishes, stack, 80)
    pick = np.random.default_rng(1)
    bound = least_step_seconds(job, x)
    assert np.all(bound <= time_of(job, x).total) and np.all(bound > 0)
    for row in range(len(x)):
        layout, one = x.layout(row), x.take(slice(row, row + 1))
        for _ in range(4):
            split = with_split(job, random_split(pick, layout, job.model.num_layers))
            assert bound[row] <= time_of(split, one).total[0], (layout.label, split.layers_per_stage)


@STACKS
def test_no_choice_of_recompute_undercuts_the_bound_without_recompute(stack: str) -> None:
    job, x = pipelines(DENSE, stack, 200)
    x = x.take(np.flatnonzero(x.recompute == 2))
    pick = np.random.default_rng(2)
    bound = least_step_seconds(job, dataclasses.replace(x, recompute_layers=np.zeros(len(x), dtype=np.int64)))
    assert len(x) > 30
    for row in range(len(x)):
        layers = random_split(pick, x.layout(row), job.model.num_layers)
        recomputed = tuple(int(pick.integers(0, count + 1)) for count in layers)
        assert bound[row] <= time_of(with_split(job, layers, recomputed), x.take(slice(row, row + 1))).total[0]


def test_without_a_pipeline_the_bound_is_the_step() -> None:
    scenario, x = sampled_layouts(DENSE, 2000)
    flat = x.take(np.flatnonzero(x.pipeline_parallel == 1))
    assert np.array_equal(least_step_seconds(scenario.job, flat), time_of(scenario.job, flat).total)


def test_the_bound_is_within_half_a_percent_where_the_layers_divide_and_ends_weigh_little() -> None:
    wishes = (("model_shape", "layers=64,hidden=8192,heads=64,vocab=1024"), ("num_gpus", 16), ("global_batch_size", 64))
    scenario, x = sampled_layouts(wishes, 3000)
    plain = x.take(np.flatnonzero((x.pipeline_parallel == 4) & (x.virtual_pipeline <= 4) & (x.schedule <= 1) & (x.recompute == 0)))
    ratio = least_step_seconds(scenario.job, plain) / time_of(scenario.job, plain).total
    assert len(plain) > 10 and ratio.min() > 0.995
    assert all(even_layers(scenario.job, plain.layout(row)) == (16, 16, 16, 16) for row in range(len(plain)))


def test_experts_in_the_middle_and_words_at_the_ends_do_not_lift_the_bound() -> None:
    # an average of both kinds of parameters is on no stage: it once put the bound two thirds above the step
    shape = "layers=14,hidden=1024,heads=8,vocab=32000,experts=8,top_k=2,moe_ffn=14336,num_dense_layers=0"
    request = Request(model_shape=shape, num_gpus=32, gpus_per_node=2, nic_gbit_per_s=1.0, seq_len=256, global_batch_size=16)
    scenario = make_scenario(request)
    job = scenario.job_in("megatron")
    for zero_stage in (0, 1):
        x = columns_of([complete_layout(scenario, f"pp4-ep8-dp8-zero{zero_stage}-mb1")])
        assert least_step_seconds(job, x)[0] <= time_of(job, x).total[0]
