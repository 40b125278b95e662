"""What must hold of the cost model whatever its constants are."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from planner.catalogue.load import find
from planner.catalogue.schema import Software
from planner.cost import memory, parameters
from planner.cost.estimate import memory_of, time_of
from planner.cost.memory import Memory
from planner.cost.stages import all_stages
from planner.cost.step import StepSeconds
from planner.explain import complete_layout
from planner.scenario import Job
from solver.layout import V_SHAPED, Columns, Layout, columns_of
from tests.builders import sampled_layouts

DENSE = (("model", "70b"), ("num_gpus", 64), ("global_batch_size", 256))
MOE = (("model", "mixtral-8x7b"), ("num_gpus", 32), ("global_batch_size", 128))
LATENT = (("model", "deepseek-v2-lite"), ("num_gpus", 16), ("global_batch_size", 64))
KINDS = pytest.mark.parametrize("wishes", [DENSE, MOE, LATENT], ids=["dense", "moe", "latent"])
STACKS = pytest.mark.parametrize("stack", ["megatron-core", "fsdp2", "deepspeed"])
Wishes = tuple[tuple[str, Any], ...]


def sample(wishes: Wishes, stack: str = "megatron-core") -> tuple[Job, Columns]:
    """A job under a stack and 400 of its legal layouts."""
    scenario, layouts = sampled_layouts(wishes, 400)
    return scenario.job.under(find(Software, stack)), layouts


def changed(x: Columns, **axes: Any) -> Columns:
    """The layouts with some axes set to one value, or one per layout."""
    return dataclasses.replace(x, **{axis: np.broadcast_to(value, len(x)).astype(np.int64) for axis, value in axes.items()})


def parts_of(record: Memory | StepSeconds) -> dict[str, np.ndarray]:
    """The parts of a record by name."""
    return {field.name: getattr(record, field.name) for field in dataclasses.fields(record)}


@KINDS
@STACKS
def test_parts_sum_to_the_total_and_none_is_negative(wishes: Wishes, stack: str) -> None:
    job, x = sample(wishes, stack)
    step, found = time_of(job, x), memory_of(job, x)
    np.testing.assert_allclose(sum(parts_of(step).values()), step.total)
    tensors = sum(values for name, values in parts_of(found.parts).items() if name != "context")
    np.testing.assert_allclose(tensors, found.parts.tensors)
    for values in [*parts_of(step).values(), *parts_of(found.parts).values()]:
        assert np.all(values >= -1e-9 * step.total.max()) and np.all(np.isfinite(values))


@KINDS
@STACKS
def test_many_layouts_at_once_cost_what_each_costs_alone(wishes: Wishes, stack: str) -> None:
    job, x = sample(wishes, stack)
    together_seconds, together_bytes = time_of(job, x).total, memory_of(job, x).need_bytes
    for row in range(0, len(x), 29):
        alone = x.take(slice(row, row + 1))
        assert time_of(job, alone).total[0] == pytest.approx(together_seconds[row], rel=1e-12)
        assert memory_of(job, alone).need_bytes[0] == pytest.approx(together_bytes[row], rel=1e-12)


def with_gpu(job: Job, factor: float, *keys: str) -> Job:
    """The job on a GPU of which some figures are larger."""
    return dataclasses.replace(job, gpu=dataclasses.replace(job.gpu, **{key: factor * getattr(job.gpu, key) for key in keys}))


FASTER: dict[str, Callable[..., Job]] = {
    "link": lambda job, factor=2.0: with_gpu(job, factor, "link_bytes_per_s"),
    "network": lambda job, factor=2.0: with_gpu(job, factor, "nic_bytes_per_s"),
    "memory bandwidth": lambda job, factor=2.0: with_gpu(job, factor, "hbm_bytes_per_s"),
    "peak": lambda job, factor=2.0: with_gpu(job, factor, "peak_bf16_flops", "peak_fp16_flops"),
}


@KINDS
@STACKS
@pytest.mark.parametrize("part", FASTER)
def test_faster_hardware_makes_no_step_slower_and_some_faster(wishes: Wishes, stack: str, part: str) -> None:
    job, x = sample(wishes, stack)
    before, after = time_of(job, x).total, time_of(FASTER[part](job), x).total
    # what hides gradient traffic shrinks with faster compute, so a step may give back a little of the gain elsewhere
    assert np.all(after <= before * (1 + 1e-9)) and np.any(after < before * 0.99)


FLIPS = {
    "peak": ("deepspeed", "tp2-pp2-vp2-cp1-ep1-dp4-zero0-mb8-full2-zero_bubble_v"),
    "link": ("fsdp1", "tp1-pp8-vp1-cp2-ep2-dp1-zero0-mb64-full4-zero_bubble_2p"),
}
"""Layouts whose slowest stage changes when a part gets 5 % faster."""


@pytest.mark.parametrize("part", FLIPS)
def test_a_step_gets_no_slower_where_another_stage_becomes_the_slowest(part: str) -> None:
    stack, label = FLIPS[part]
    job, x = sample(LATENT, stack)[0], columns_of([complete_layout(sampled_layouts(LATENT, 1)[0], label)])
    assert time_of(FASTER[part](job, 1.05), x).total[0] <= time_of(job, x).total[0]


@KINDS
@STACKS
def test_more_memory_never_turns_a_fit_into_a_failure(wishes: Wishes, stack: str) -> None:
    job, x = sample(wishes, stack)
    found = [memory_of(with_gpu(job, factor, "memory_bytes"), x).verdict for factor in (0.3, 0.6, 1.0, 1.01, 1.5)]
    assert np.all(np.diff(found, axis=0) <= 0)
    assert {0, 1, 2} <= set(np.ravel(found).tolist())


@KINDS
@STACKS
def test_each_zero_stage_keeps_no_more_states_than_the_one_before(wishes: Wishes, stack: str) -> None:
    job, x = sample(wishes, stack)
    for row in range(0, len(x), 8):
        layout = x.layout(row)
        found = [states(job, dataclasses.replace(layout, zero_stage=stage)) for stage in range(4)]
        assert np.all(np.diff(found, axis=0) <= 0), layout.label


def every_stage(job: Job, layout: Layout) -> Memory:
    """The memory of each stage of a layout."""
    stages = all_stages(job, layout.pipeline_parallel, layout.virtual_pipeline, layout.schedule in V_SHAPED)
    rows = columns_of([layout] * layout.pipeline_parallel)
    return memory.stage_memory(job, rows, stages, memory.loads(job, rows))


def states(job: Job, layout: Layout) -> np.ndarray:
    """Weights, gradients and optimizer states of each stage."""
    found = every_stage(job, layout)
    return found.weights + found.gradients + found.optimizer


LONE = Layout(tensor_parallel=8, pipeline_parallel=8)
"""All 64 GPUs hold one replica: ZeRO has nothing to shard over."""


@pytest.mark.parametrize("zero_stage", [1, 2])
@STACKS
def test_sharding_over_one_replica_saves_no_memory(stack: str, zero_stage: int) -> None:
    job = sample(DENSE, stack)[0]
    whole, sharded = (every_stage(job, dataclasses.replace(LONE, zero_stage=stage)) for stage in (0, zero_stage))
    np.testing.assert_array_equal(sharded.tensors, whole.tensors)


@pytest.mark.parametrize("stack", ["fsdp2", "deepspeed"])
def test_zero_3_over_one_replica_saves_no_memory(stack: str) -> None:
    job = sample(DENSE, stack)[0]
    whole, sharded = (every_stage(job, dataclasses.replace(LONE, zero_stage=stage)) for stage in (0, 3))
    np.testing.assert_array_equal(sharded.tensors, whole.tensors)


@KINDS
@STACKS
def test_twice_the_tensor_group_never_more_than_halves_the_weights(wishes: Wishes, stack: str) -> None:
    job, x = sample(wishes, stack)
    for row in np.flatnonzero(x.expert_tensor_parallel == 1)[:60]:
        layout = x.layout(int(row))
        double = dataclasses.replace(layout, tensor_parallel=2 * layout.tensor_parallel)
        once, twice = (every_stage(job, dataclasses.replace(one, zero_stage=0)).weights for one in (layout, double))
        assert np.all(twice >= once / 2) and np.all(twice <= once), layout.label


@KINDS
@STACKS
def test_recomputing_more_layers_never_keeps_more_activations_on_any_stage(wishes: Wishes, stack: str) -> None:
    job, x = sample(wishes, stack)
    for row in range(0, len(x), 20):
        layout = dataclasses.replace(x.layout(row), recompute="none", recompute_layers=0)
        deepest = -(-job.model.num_layers // (layout.pipeline_parallel * layout.virtual_pipeline))
        depths = [layout, *(dataclasses.replace(layout, recompute="full", recompute_layers=k) for k in range(1, deepest + 1))]
        found = [every_stage(job, one).activations for one in depths]
        assert np.all(np.diff(found, axis=0) <= 0) and found[-1].sum() < found[0].sum(), layout.label


@KINDS
@STACKS
def test_recompute_costs_time_and_the_more_layers_the_more(wishes: Wishes, stack: str) -> None:
    job, x = sample(wishes, stack)
    plain = x.take(np.flatnonzero((x.schedule == 0) | (x.schedule == 1)))
    deepest = -(-job.model.num_layers // (plain.pipeline_parallel * plain.virtual_pipeline))
    none, selective = (time_of(job, changed(plain, recompute=mode, recompute_layers=0)).total for mode in (0, 1))
    full = [
        time_of(job, changed(plain, recompute=2, recompute_layers=np.minimum(depth, deepest))).total
        for depth in range(1, deepest.max() + 1)
    ]
    assert np.all(selective >= none) and np.all(full[0] > none)
    assert np.all(np.diff(full, axis=0) >= -1e-12 * full[0])


def test_recompute_costs_time_under_zero_bubble_schedules_too() -> None:
    job = sample(LATENT)[0]
    axes = {"tensor_parallel": 4, "pipeline_parallel": 4, "expert_parallel": 2, "micro_batch_size": 64, "schedule": "zero_bubble_h1"}
    less, more = (cost(job, **axes, recompute="full", recompute_layers=depth)[0] for depth in (6, 7))
    assert more >= less


@KINDS
def test_more_chunks_never_lengthen_the_bubble_of_even_stages(wishes: Wishes) -> None:
    job = sample(wishes)[0]
    layers = 24
    even = dataclasses.replace(job, model=dataclasses.replace(job.model, num_layers=layers))
    axes = {"tensor_parallel": 1, "pipeline_parallel": 4, "data_parallel": job.num_gpus // 4}
    interleaved = {"schedule": "interleaved_1f1b"}
    bubbles = [cost(even, **axes, virtual_pipeline=v, **(interleaved if v > 1 else {}))[2].bubble[0] for v in (1, 2, 3, 6)]
    assert np.all(np.diff(bubbles) < 0)


def cost(job: Job, **axes: Any) -> tuple[float, Memory, StepSeconds]:
    """Total seconds, memory parts and step parts of one layout."""
    x = columns_of([Layout(**axes)])
    step = time_of(job, x)
    return float(step.total[0]), memory_of(job, x).parts, step


def dense_job() -> Job:
    """70B on 64 GPUs."""
    return sample(DENSE)[0]


def test_one_gpu_has_no_communication_and_no_bubble() -> None:
    scenario, _ = sampled_layouts((("model", "llama-3.2-1b"), ("num_gpus", 1), ("global_batch_size", 8)), 10)
    for zero_stage in range(4):
        _, _, step = cost(scenario.job, micro_batch_size=2, zero_stage=zero_stage)
        assert step.exposed_communication[0] == 0 and step.bubble[0] == 0


def test_each_zero_stage_keeps_less_and_one_replica_saves_nothing() -> None:
    job = dense_job()
    sizes = []
    for stage in range(4):
        parts = cost(job, tensor_parallel=8, data_parallel=8, zero_stage=stage)[1]
        sizes.append([float(parts.weights[0]), float(parts.gradients[0]), float(parts.optimizer[0])])
    assert sizes[0][2] == pytest.approx(8 * sizes[1][2])  # ZeRO-1 shards the optimizer over 8 replicas
    assert sizes[1][1] == pytest.approx(8 * sizes[2][1])  # ZeRO-2 the gradients
    assert sizes[2][0] == pytest.approx(8 * sizes[3][0])  # ZeRO-3 the weights
    whole = [cost(job, tensor_parallel=8, pipeline_parallel=8, zero_stage=stage)[1].optimizer[0] for stage in (0, 1)]
    assert whole[0] == whole[1]


def test_zero_stages_change_the_step_time_too() -> None:
    seconds = [cost(dense_job(), tensor_parallel=8, data_parallel=8, zero_stage=stage)[0] for stage in (1, 2, 3)]
    assert seconds[0] < seconds[1] < seconds[2]


def test_tensor_parallelism_divides_weights_once() -> None:
    four, eight = (cost(dense_job(), tensor_parallel=t, data_parallel=64 // t, zero_stage=1)[1].weights[0] for t in (4, 8))
    assert 0.5 < eight / four < 0.51


def test_recomputing_more_layers_saves_memory_and_costs_time() -> None:
    job = dense_job()
    depths = (1, 5, 10, 20)
    found = [cost(job, tensor_parallel=4, pipeline_parallel=4, data_parallel=4, recompute="full", recompute_layers=k) for k in depths]
    assert np.all(np.diff([seconds for seconds, _, _ in found]) > 0)
    assert np.all(np.diff([float(parts.activations[0]) for _, parts, _ in found]) < 0)
    none = cost(job, tensor_parallel=4, pipeline_parallel=4, data_parallel=4)
    assert none[2].recompute[0] == 0 and found[-1][0] > 1.2 * none[0]


def test_interleaving_divides_the_bubble() -> None:
    job = dense_job()
    plain = cost(job, tensor_parallel=4, pipeline_parallel=4, data_parallel=4)[2].bubble[0]
    halved = cost(job, tensor_parallel=4, pipeline_parallel=4, data_parallel=4, virtual_pipeline=2, schedule="interleaved_1f1b")
    assert halved[2].bubble[0] == pytest.approx(plain / 2, rel=0.02)


def test_sequence_parallelism_divides_what_tensor_parallelism_leaves_whole() -> None:
    job = dense_job()
    without = dataclasses.replace(job, sequence_parallel=False)
    axes: dict[str, Any] = {"tensor_parallel": 8, "data_parallel": 8}
    assert cost(without, **axes)[1].activations[0] > 2 * cost(job, **axes)[1].activations[0]


def test_attention_without_a_flash_kernel_keeps_and_moves_the_scores() -> None:
    job = dense_job()
    plain = job.under(dataclasses.replace(job.software, attention_kernel="fused_softmax"))
    axes: dict[str, Any] = {"tensor_parallel": 8, "data_parallel": 8}
    scores = 5.0 * 80 * 64 * 4096**2 / 8  # bytes x layers x heads x s^2 / t
    assert cost(plain, **axes)[1].activations[0] - cost(job, **axes)[1].activations[0] == pytest.approx(scores)
    assert cost(plain, **axes)[0] > cost(job, **axes)[0]


def test_the_head_and_the_vocabulary_sit_on_the_last_stage() -> None:
    job = dense_job()
    layout = Layout(tensor_parallel=4, pipeline_parallel=4, data_parallel=4)
    stages = all_stages(job, 4, 1, False)
    rows = columns_of([layout] * 4)
    found = memory.stage_memory(job, rows, stages, memory.loads(job, rows))
    assert np.all(found.logits[:3] == 0) and found.logits[3] > 0
    words = parameters.padded_vocabulary(job.model, 4, job.software.vocab_multiple) * job.model.hidden_size / 4
    assert found.weights[3] - found.weights[1] == pytest.approx(2 * (words + job.model.hidden_size))


def test_the_fullest_and_slowest_of_uneven_stages_count() -> None:
    scenario, _ = sampled_layouts((("model_shape", "layers=61,hidden=4096,heads=32,vocab=32000"), ("num_gpus", 32)), 1)
    job, axes = scenario.job, {"pipeline_parallel": 4, "data_parallel": 8}
    uneven = cost(job, **axes)[0]
    deeper = cost(dataclasses.replace(job, layers_per_stage=(15, 15, 15, 16)), **axes)[0]
    lopsided = cost(dataclasses.replace(job, layers_per_stage=(10, 10, 10, 31)), **axes)[0]
    assert uneven <= deeper < 0.7 * lopsided


def test_expert_parallelism_needs_no_further_gpus() -> None:
    job, x = sample(MOE)
    product = x.tensor_parallel * x.pipeline_parallel * x.context_parallel * x.data_parallel
    assert np.all(product == job.num_gpus) and np.any(x.expert_parallel > 1)


def test_gibibytes_are_not_gigabytes_and_peaks_are_dense() -> None:
    job = dense_job()
    assert job.gpu.memory_bytes == pytest.approx(79.2 * 2**30)
    assert job.peak_flops == pytest.approx(989e12, rel=1e-3)


def test_gradients_hide_behind_one_micro_batch_not_all() -> None:
    job = dataclasses.replace(dense_job(), global_batch_size=2048)
    slow = dataclasses.replace(job, cluster=dataclasses.replace(job.cluster, nic_bytes_per_s=1e9))
    assert cost(slow, tensor_parallel=8, data_parallel=8, zero_stage=1)[2].data[0] > 1.0


def test_sharded_weights_are_neither_fully_hidden_nor_fully_exposed() -> None:
    job = dense_job()
    _, _, step = cost(job, data_parallel=64, zero_stage=3, micro_batch_size=1, recompute="full", recompute_layers=80)
    all_gathers = 3 * 2 * 70.5e9 / (8 * 50e9) * 4  # bytes over the nodes' NICs, four micro-batches
    assert 0 < step.sharding[0] < all_gathers


def test_sharding_with_one_replica_is_neither_faster_nor_slower_than_none() -> None:
    scenario, _ = sampled_layouts((("model", "llama-3.2-1b"), ("num_gpus", 1), ("global_batch_size", 8)), 10)
    seconds = [cost(scenario.job, zero_stage=stage)[0] for stage in range(4)]
    assert seconds == [seconds[0]] * 4
