"""Stages: no layer is lost, splits are even, and the stages looked at include the fullest and the slowest."""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from planner.catalogue.load import find
from planner.catalogue.schema import Software
from planner.cost import compute, memory
from planner.cost.estimate import memory_of, time_of
from planner.cost.layer import layer_seconds
from planner.cost.stages import all_stages, chunk_sizes, recomputed_layers, stage_of_chunk
from planner.cost.step import StepSeconds
from planner.scenario import Job
from solver.layout import RECOMPUTE, SCHEDULES, V_SHAPED, Columns, Layout, columns_of
from tests.builders import sampled_layouts

MANY = settings(max_examples=200, deadline=None, derandomize=True)
DENSE = (("model_shape", "layers=22,hidden=2048,heads=16,vocab=32000"), ("num_gpus", 16), ("global_batch_size", 32))
MIXED = (("model", "deepseek-v2-lite"), ("num_gpus", 16), ("global_batch_size", 64))
PREDICTING = (("model", "glm-4.5-air"), ("num_gpus", 16), ("global_batch_size", 32))
JOBS = pytest.mark.parametrize("wishes", [DENSE, MIXED, PREDICTING], ids=["dense", "dense-and-experts", "multi-token"])
STACKS = pytest.mark.parametrize("stack", ["megatron-core", "fsdp2", "deepspeed"])


def job_and_layouts(wishes: tuple[tuple[str, Any], ...], stack: str, count: int) -> tuple[Job, Columns]:
    """A job under a stack, and some of its legal layouts."""
    scenario, layouts = sampled_layouts(wishes, count)
    return scenario.job.under(find(Software, stack)), layouts


@MANY
@given(st.integers(1, 130), st.data())
def test_chunks_hold_every_layer_once_as_even_as_possible_with_light_ends(num_layers: int, data: st.DataObject) -> None:
    chunks = data.draw(st.integers(1, num_layers))
    sizes = chunk_sizes(num_layers, chunks)
    assert sizes.sum() == num_layers and len(sizes) == chunks
    assert sizes.max() - sizes.min() <= 1
    assert sizes[-1] == sizes.min()  # head and loss come on top of the last chunk
    assert sizes[0] == sizes.min() or np.sum(sizes == sizes.min()) == 1  # and the embedding on top of the first


@pytest.mark.parametrize(("pipeline", "per_stage", "v_shaped"), [(4, 1, False), (4, 3, False), (4, 2, True), (1, 2, True)])
def test_every_stage_holds_equally_many_chunks(pipeline: int, per_stage: int, v_shaped: bool) -> None:
    owner = stage_of_chunk(pipeline, per_stage, v_shaped)
    assert np.bincount(owner).tolist() == [per_stage] * pipeline
    assert owner[0] == 0 and owner[-1] == (0 if v_shaped else pipeline - 1)


@JOBS
@pytest.mark.parametrize("v_shaped", [False, True])
def test_the_stages_hold_every_layer_both_ends_and_the_predicting_layers(wishes: tuple[tuple[str, Any], ...], v_shaped: bool) -> None:
    job, _ = job_and_layouts(wishes, "megatron-core", 1)
    stages = all_stages(job, 4, 2, v_shaped)
    assert stages.layers.sum() == job.model.num_layers + job.num_mtp_layers
    assert stages.moe_layers.sum() == (job.model.num_moe_layers + job.num_mtp_layers if job.model.num_experts else 0)
    assert stages.has_embedding.tolist() == [1, 0, 0, 0]
    assert stages.has_head.tolist() == ([1, 0, 0, 0] if v_shaped else [0, 0, 0, 1])


@JOBS
@STACKS
def test_the_memory_of_a_layout_is_that_of_the_fullest_of_all_its_stages(wishes: tuple[tuple[str, Any], ...], stack: str) -> None:
    job, x = job_and_layouts(wishes, stack, 120)
    found = memory_of(job, x).need_bytes
    for row in range(len(x)):
        layout = x.layout(row)
        stages = all_stages(job, layout.pipeline_parallel, layout.virtual_pipeline, layout.schedule in V_SHAPED)
        rows = x.take(np.full(layout.pipeline_parallel, row))
        every = memory.need_bytes(job, memory.stage_memory(job, rows, stages, memory.loads(job, rows)))
        assert found[row] == pytest.approx(every.max(), rel=1e-12), layout.label


def stage_seconds(job: Job, x: Columns, layout: Layout) -> np.ndarray:
    """Forward and backward of every stage, each summed from its layers and ends; no recompute."""
    stages = all_stages(job, layout.pipeline_parallel, layout.virtual_pipeline, layout.schedule in V_SHAPED)
    seconds = np.zeros(layout.pipeline_parallel)
    for moe, counts in ((False, stages.dense_layers), (True, stages.moe_layers)):
        if counts.any():
            layer = layer_seconds(job, x, moe=moe)
            seconds += counts * float(layer.forward[0] + layer.backward[0][0])
    rates, tokens = compute.rates_of(job), job.seq_len * layout.micro_batch_size / layout.context_parallel
    head = sum(float(part) for part in compute.head_seconds(job, rates, tokens, layout.tensor_parallel))
    embedding = float(compute.embedding_seconds(job, rates, tokens))
    return np.asarray(seconds + stages.has_head * (1 + job.num_mtp_layers) * head + stages.has_embedding * embedding)


def steady_seconds(step: StepSeconds) -> np.ndarray:
    """All micro-batches through the slowest stage."""
    parts = (step.compute, step.imbalance, step.recompute, step.launch, step.tensor, step.context, step.expert, step.sharding)
    return np.asarray(sum(parts))


@JOBS
@STACKS
def test_the_steady_time_of_a_step_is_that_of_the_slowest_of_all_its_stages(wishes: tuple[tuple[str, Any], ...], stack: str) -> None:
    job, x = job_and_layouts(wishes, stack, 400)
    # a zero-bubble fill depends on the stage, so there the slowest is that with the longest steady time and fill
    plain = x.take(np.flatnonzero((x.recompute == RECOMPUTE.index("none")) & (x.schedule <= SCHEDULES.index("gpipe"))))
    assert len(plain) > 20
    steady = steady_seconds(time_of(job, plain))
    for row in range(len(plain)):
        layout, one = plain.layout(row), plain.take(slice(row, row + 1))
        num_micro_batches = job.global_batch_size // (layout.data_parallel * layout.micro_batch_size)
        if num_micro_batches == 1:  # one passes every stage once: none sets the pace
            continue
        assert steady[row] == pytest.approx(num_micro_batches * stage_seconds(job, one, layout).max(), rel=1e-9), layout.label


def test_of_61_layers_over_4_stages_the_stage_of_16_sets_the_pace() -> None:
    scenario, _ = sampled_layouts((("model_shape", "layers=61,hidden=4096,heads=32,vocab=128"), ("num_gpus", 4)), 1)
    job, x = scenario.job, columns_of([Layout(pipeline_parallel=4)])
    layer = layer_seconds(job, x, moe=False)
    one_pass = float(layer.forward[0] + layer.backward[0][0])
    assert steady_seconds(time_of(job, x))[0] == pytest.approx(job.global_batch_size * 16 * one_pass)


@MANY
@given(st.integers(1, 100), st.integers(1, 8), st.integers(1, 4), st.integers(0, 100))
def test_full_recompute_covers_its_depth_in_every_chunk(num_layers: int, pipeline: int, per_stage: int, depth: int) -> None:
    chunks = pipeline * per_stage
    if chunks > num_layers:
        return
    sizes = chunk_sizes(num_layers, chunks)
    owner = stage_of_chunk(pipeline, per_stage, False)
    for stage in range(pipeline):
        own = sizes[owner == stage]
        assert int(recomputed_layers(own.sum(), per_stage, depth)) == np.minimum(own, depth).sum()


def test_a_stated_split_wins_over_the_even_one() -> None:
    job, _ = job_and_layouts(DENSE, "megatron-core", 1)
    stated = dataclasses.replace(job, layers_per_stage=(2, 8, 8, 4))
    assert all_stages(stated, 4, 1, False).layers.tolist() == [2, 8, 8, 4]
    assert all_stages(stated, 2, 1, False).layers.tolist() == [11, 11]
    assert all_stages(stated, 4, 2, False).layers.tolist() == all_stages(stated, 4, 2, True).layers.tolist() == [2, 8, 8, 4]
