"""Factors that no cluster size changes: computed once per process, never taken from another job, never too many."""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from planner import spec
from planner.cost import layer, shared
from planner.cost.ends import end_seconds
from planner.cost.estimate import time_of
from planner.cost.passes import Passes
from planner.cost.shared import AXES, Factors, factors, sizeless
from planner.cost.stages import layer_kinds
from planner.request import Request, make_scenario
from planner.scenario import Job, Scenario
from planner.search import enumerate_layouts, search
from solver.layout import AXES as EVERY_AXIS
from solver.layout import Columns
from tests.builders import random_scenario, without_floor

SEEDS = st.integers(0, 10_000)
MANY = settings(max_examples=60, deadline=None, derandomize=True)


@pytest.fixture(autouse=True)
def nothing_remembered() -> Iterator[None]:
    """Each test starts as a process does."""
    shared._memory.cache_clear()
    yield
    shared._memory.cache_clear()


@pytest.fixture
def computed(monkeypatch: pytest.MonkeyPatch) -> Counter[Any]:
    """How often each key of each job was computed."""
    counter: Counter[Any] = Counter()
    whole = shared._computed

    def counting(job: Job, x: Columns) -> Factors:
        counter.update((job, key) for key in keys_of(x))
        return whole(job, x)

    monkeypatch.setattr(shared, "_computed", counting)
    return counter


def keys_of(x: Columns) -> list[tuple[int, ...]]:
    """What the factors read of each layout."""
    return list(zip(*(getattr(x, axis).tolist() for axis in AXES), strict=True))


def known_of(job: Job) -> list[tuple[int, ...]]:
    """The keys that are remembered of a job."""
    keys, found = shared._memory(sizeless(job)).known
    assert all(len(part.ends.embedding) == len(keys[0]) for part in found)
    return list(zip(*(key.tolist() for key in keys), strict=True))


def afresh(job: Job, x: Columns) -> Factors:
    """The factors of each layout without any memory, under the job as it is."""
    kinds = {moe: layer.unsharded(job, x, moe=moe) for moe, present in layer_kinds(job.model).items() if present}
    return Factors(end_seconds(job, x), kinds)


def assert_same(one: Any, other: Any) -> None:
    """Two records of arrays, bit for bit."""
    for field in dataclasses.fields(one):
        np.testing.assert_array_equal(getattr(one, field.name), getattr(other, field.name), err_msg=field.name)


def assert_right(job: Job, x: Columns) -> None:
    """The factors are those of the job, bit for bit."""
    found, expected = factors(job, x), afresh(job, x)
    assert found.kinds.keys() == expected.kinds.keys()
    assert_same(found.ends, expected.ends)
    for moe, seconds in expected.kinds.items():
        assert_same(found.kinds[moe], seconds)


def any_layouts(seed: int, count: int) -> Columns:
    """Random layouts, legal or not: the formulas do not ask."""
    pick = np.random.default_rng(seed)
    sizes = {axis: pick.choice((1, 2, 3, 4, 8, 16), count) for axis in EVERY_AXIS}
    switches = {axis: pick.integers(0, 3, count) for axis in ("schedule", "recompute", "recompute_layers")}
    return Columns(**{**sizes, **switches, "zero_stage": pick.integers(0, 4, count)})


def legal_layouts(scenario: Scenario, count: int, seed: int) -> Columns:
    """A random sample of the scenario's layouts, whatever memory they need."""
    every = enumerate_layouts(without_floor(spec.problem(scenario)))
    assume(len(every))
    whole = next(every.pieces(len(every)))
    return whole.take(np.random.default_rng(seed).permutation(len(every))[:count])


@pytest.mark.parametrize("model", ("8b", "mixtral-8x7b"))
def test_searches_of_other_sizes_compute_no_key_twice(model: str, computed: Counter[Any]) -> None:
    wishes = Request(model=model, micro_batch_size=(1, 2), virtual_pipeline=(1,), recompute_layers=(0,))
    search(make_scenario(Request(num_gpus=64).over(wishes)))
    before = set(computed)
    search(make_scenario(Request(num_gpus=64).over(wishes)))
    assert set(computed) == before and len(before) > 20
    for num_gpus, batch in ((128, 512), (96, 768), (32, 1024)):
        found = search(make_scenario(Request(num_gpus=num_gpus, global_batch_size=batch).over(wishes)))
        assert {key for _, key in before} & set(keys_of(found.ranked.layouts))
    assert set(computed.values()) == {1}
    assert {job for job, _ in computed} == {job for job, _ in before}


@MANY
@given(SEEDS, st.integers(2, 5))
def test_warm_steps_equal_cold_ones_bit_for_bit(seed: int, times: int) -> None:
    scenario = random_scenario(seed)
    x = legal_layouts(scenario, 200, seed)
    for job in (scenario.job_in("megatron"), scenario.job_in("torchtitan")):
        shared._memory.cache_clear()
        cold = time_of(job, x)
        shared._memory.cache_clear()
        larger = dataclasses.replace(job, num_gpus=job.num_gpus * times, global_batch_size=job.global_batch_size * times)
        assume(larger.fast_domain == job.fast_domain)
        for rows in np.array_split(np.random.default_rng(seed).permutation(len(x)), times):  # piece by piece, in another order
            piece = x.take(rows)
            time_of(larger, dataclasses.replace(piece, data_parallel=times * piece.data_parallel))
        assert set(known_of(job)) == set(keys_of(x))
        assert_same(time_of(job, x), cold)


@MANY
@given(SEEDS)
def test_the_layers_of_a_pass_are_those_computed_without_a_memory(seed: int) -> None:
    job, x = dataclasses.replace(random_scenario(seed).job, num_gpus=1 << 20), any_layouts(seed, 200)
    for rows in (x.take(slice(100, None)), x):
        passes = Passes.of(job, rows)
        for moe, table in passes.layers.kinds.items():
            each_row = layer.layer_seconds(job, rows, moe=moe)
            for field in dataclasses.fields(table):
                gathered = getattr(table, field.name)[..., passes.layers.key]
                np.testing.assert_array_equal(gathered, getattr(each_row, field.name), err_msg=field.name)


@MANY
@given(SEEDS)
def test_the_factors_read_no_axis_but_theirs(seed: int) -> None:
    job, x = random_scenario(seed).job, any_layouts(seed, 50)
    factors(job, x)
    others = {axis: getattr(any_layouts(seed + 1, 50), axis) for axis in EVERY_AXIS if axis not in AXES}
    assert_right(job, dataclasses.replace(x, **others))


CHANGES: dict[str, tuple[Any, ...]] = {
    "gpu": ("h100", "a100-sxm-40gb", "l4", "b200", "mi300x", "rtx-4090"),
    "software": ("megatron-core", "fsdp2", "deepspeed", "megatron-lm-2022"),
    "seq_len": (512, 2048, 4096, 6144),
    "precision": ("bf16", "fp16", "fp8"),
    "gpus_per_node": (2, 4, 8),
    "nic_gbit_per_s": (100.0, 400.0),
    "sequence_parallel": (True, False),
    "num_gpus": (2, 4, 8, 16, 32),
    "global_batch_size": (8, 16),
}
SIZES = ("num_gpus", "global_batch_size")


@settings(MANY, max_examples=200)
@given(SEEDS, st.sampled_from(list(CHANGES)), st.data())
def test_jobs_share_if_and_only_if_they_differ_in_size_beyond_one_fast_domain(seed: int, wish: str, data: st.DataObject) -> None:
    values = data.draw(st.lists(st.sampled_from(CHANGES[wish]), min_size=2, max_size=2, unique=True))
    jobs = [random_scenario(seed, **{"gpu": "h100", wish: value}).job_in("megatron") for value in values]
    assert (sizeless(jobs[0]) == sizeless(jobs[1])) == (wish in SIZES and jobs[0].fast_domain == jobs[1].fast_domain)
    x = any_layouts(seed, 50)
    for job in (*jobs, *jobs):
        assert_right(job, x)


@MANY
@given(SEEDS, SEEDS)
def test_random_jobs_in_turn_each_get_their_own_factors(seed: int, other: int) -> None:
    jobs, x = [random_scenario(one).job for one in (seed, other)], any_layouts(seed, 50)
    for job in (*jobs, *jobs):
        assert_right(job, x)


def test_a_stated_split_shares_the_factors_of_the_even_one() -> None:
    job = random_scenario(1).job
    assert sizeless(dataclasses.replace(job, layers_per_stage=(1, 2), recomputed_per_stage=(0, 1))) == sizeless(job)


def test_a_full_memory_starts_afresh_and_stays_right(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shared, "MOST_ROWS", 12)
    job, held = random_scenario(3).job, set()
    for seed in range(20):
        assert_right(job, any_layouts(seed, 5))
        held.add(len(known_of(job)))
    assert {0, 5, 10} <= held and max(held) <= 12


def test_a_call_beyond_the_bound_drives_nothing_out(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shared, "MOST_ROWS", 12)
    job, few = random_scenario(3).job, any_layouts(0, 5)
    factors(job, few)
    assert_right(job, any_layouts(1, 100))
    assert known_of(job) == keys_of(few)


def test_thousands_of_jobs_leave_a_bounded_number_behind() -> None:
    job, x = random_scenario(1).job, any_layouts(1, 5)
    for number in range(3 * shared.MOST_JOBS):
        factors(dataclasses.replace(job, seq_len=64 * (number + 1)), x)
    assert shared._memory.cache_info().currsize == shared.MOST_JOBS


def test_a_row_is_as_large_as_the_bound_on_the_memory_counts_on() -> None:
    job, x = make_scenario(Request(model="deepseek-v3", num_gpus=64)).job, any_layouts(1, 50)
    factors(job, x)
    keys, (found,) = shared._memory(sizeless(job)).known
    records = [found.ends, *found.kinds.values()]
    arrays = [*keys, *(getattr(record, field.name) for record in records for field in dataclasses.fields(record))]
    assert len(records) == 3 and sum(array.nbytes for array in arrays) == 432 * len(keys[0])


def test_no_layouts_have_no_factors() -> None:
    job, none = random_scenario(1).job, any_layouts(1, 0)
    assert len(factors(job, none).ends.embedding) == 0 and len(time_of(job, none).total) == 0
