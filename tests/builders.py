"""What several test files build alike: problems, scenarios and layouts, random ones too, and the brute force over them."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import random
from collections.abc import Iterable, Iterator, Mapping
from types import SimpleNamespace
from typing import Any

import numpy as np
from hypothesis import strategies as st

from planner import refinement, simulated, spec
from planner.cost import parameters
from planner.request import Request, make_scenario
from planner.scenario import Scenario
from planner.search import enumerate_layouts
from planner.units import GIB
from solver.check import MESH_RULES, SPLIT_RULES, Rule
from solver.layout import AXES, MESH_AXES, RECOMPUTE, SCHEDULES, SPLIT_AXES, Columns, Ints
from solver.problem import UNLIMITED_KIB, Problem, divisors

BASE_AXES = MESH_AXES + SPLIT_AXES
BASE_RULES = MESH_RULES + SPLIT_RULES

SMALL: Mapping[str, Any] = {
    "num_gpus": 8,
    "gpus_per_node": 4,
    "num_layers": 6,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "ffn_hidden_size": 64,
    "vocab_size": 100,
    "seq_len": 64,
    "global_batch_size": 12,
}


def natural_domains(sizes: Mapping[str, Any]) -> dict[str, tuple[int, ...]]:
    """Each axis over what GPUs, layers, experts and batch allow one by one."""
    of_gpus, experts = divisors(sizes["num_gpus"]), sizes.get("num_experts", 0)
    return {
        **dict.fromkeys(MESH_AXES, of_gpus),
        "expert_parallel": divisors(experts) if experts else (1,),
        "expert_tensor_parallel": of_gpus if experts else (1,),
        "micro_batch_size": divisors(sizes["global_batch_size"]),
        "virtual_pipeline": tuple(range(1, sizes["num_layers"] + 1)),
        "schedule": tuple(range(len(SCHEDULES))),
        "zero_stage": (0, 1, 2, 3),
        "recompute": tuple(range(len(RECOMPUTE))),
        "recompute_layers": tuple(range(sizes["num_layers"] + 1)),
    }


def small_problem(pins: Mapping[str, tuple[int, ...]] | None = None, **sizes: Any) -> Problem:
    """The small problem with some sizes changed and some axes pinned."""
    chosen = {**SMALL, **sizes}
    return Problem(**chosen, domains={**natural_domains(chosen), **(pins or {})})


@st.composite
def problems(draw: st.DrawFn, most_gpus: int = 64, most_batch: int = 48, most_layers: int = 12) -> Problem:
    """Dense and mixture-of-experts problems with odd sizes, every switch, memory floors and pins."""
    num_gpus = draw(likely(divisors(most_gpus)[2:], st.integers(1, most_gpus)))
    heads = draw(likely((8, 12, 24, 48), st.integers(1, 48)))
    width = likely((64, 96, 1024), st.sampled_from((30, 210)))
    experts = draw(st.sampled_from((0, 0, 2, 3, 4, 6, 8, 16)))
    sizes: dict[str, Any] = {
        "num_gpus": num_gpus,
        "gpus_per_node": min(draw(likely((4, 8, 64), st.sampled_from((1, 2, 6)))), num_gpus),
        "tensor_across_nodes": draw(st.booleans()),
        "num_layers": draw(st.integers(1, most_layers)),
        "num_attention_heads": heads,
        "num_key_value_heads": draw(st.sampled_from(divisors(heads))),
        "replicate_key_values": draw(st.booleans()),
        "ffn_hidden_size": draw(likely((0, 64, 96, 1024), width)),
        "vocab_size": draw(st.integers(1, 1000)),
        "pad_vocabulary": draw(st.booleans()),
        "num_experts": experts,
        "moe_ffn_hidden_size": draw(width) if experts else 0,
        "shared_ffn_hidden_size": draw(likely((0,), width)) if experts else 0,
        "seq_len": draw(likely((48, 96, 128, 1000, 4096), st.integers(1, 4096))),
        "sequence_parallel": draw(st.booleans()),
        "min_context_tokens": draw(likely((1, 16), st.just(256))),
        "max_pipeline_parallel": draw(likely((64,), st.sampled_from((1, 2, 4)))),
        "global_batch_size": draw(likely(divisors(most_batch)[2:], st.integers(1, most_batch))),
    }
    if draw(st.booleans()):
        sizes |= {
            "usable_kib": draw(st.integers(0, 20_000)),
            "whole_dense_kib": draw(st.integers(0, 60_000)),
            "whole_expert_kib": draw(st.integers(0, 60_000)) if experts else 0,
            "sharded_kib": draw(likely((0,), st.integers(0, 400_000))),
            "kept_kib": draw(st.integers(0, 2_000)),
        }
    return small_problem(draw(likely(({},), pins(sizes))), **sizes)


def likely(usual: tuple[Any, ...], rare: st.SearchStrategy[Any]) -> st.SearchStrategy[Any]:
    """Mostly one of the usual values, so that most problems have layouts; now and then a rare one."""
    return st.integers(0, 4).flatmap(lambda die: rare if die == 0 else st.sampled_from(usual))


@st.composite
def pins(draw: st.DrawFn, sizes: Mapping[str, Any]) -> dict[str, tuple[int, ...]]:
    """Domains of up to three axes as a user may restrict them, values that cannot work included."""
    natural = natural_domains(sizes)
    found = {}
    for axis in draw(st.sets(st.sampled_from((*BASE_AXES, "schedule")), max_size=3)):
        values = st.sampled_from(natural[axis])
        if axis != "schedule":
            values = st.one_of(values, st.integers(1, 64))
        found[axis] = tuple(sorted(draw(st.sets(values, min_size=1, max_size=4))))
    return found


def brute_force(problem: Problem, axes: tuple[str, ...] = BASE_AXES, rules: Iterable[Rule] = BASE_RULES) -> Ints:
    """Every combination of the axes' values under which the rules hold, in lexicographic order."""
    values = [np.array(problem.domains[axis]) for axis in axes]
    grid = np.meshgrid(*values, indexing="ij", sparse=True)
    x = SimpleNamespace(**dict(zip(axes, grid, strict=True)))
    legal = np.ones([len(column) for column in values], dtype=bool)
    for rule in rules:
        legal &= rule.holds(x, problem)
    return np.stack([column[index] for column, index in zip(values, np.nonzero(legal), strict=True)], axis=1)


def rows_of(layouts: Columns) -> Ints:
    """Layouts as an array of shape (layouts, AXES)."""
    return np.stack([getattr(layouts, axis) for axis in AXES], axis=1)


def without_floor(problem: Problem) -> Problem:
    """The problem with more memory than anything needs."""
    return dataclasses.replace(problem, usable_kib=UNLIMITED_KIB)


def random_scenario(seed: int, **wishes: Any) -> Scenario:
    """A small custom model on a few accelerators, from plenty of memory to far too little."""
    pick = random.Random(seed)
    heads = pick.choice((4, 6, 8, 16, 32))
    shape: dict[str, Any] = {
        "layers": pick.randint(1, 6),
        "hidden": heads * pick.choice((64, 128, 256)),
        "heads": heads,
        "kv_heads": pick.choice(divisors(heads)),
        "vocab": pick.choice((1000, 32000, 50257, 128256)),
        "gated": pick.choice(("true", "false")),
        "tied": pick.choice(("true", "false")),
    }
    if pick.random() < 0.35:
        shape |= {"experts": pick.choice((4, 6, 8)), "top_k": 2, "moe_ffn": pick.choice((768, 2048, 14336))}
        shape |= {"num_dense_layers": pick.randint(0, shape["layers"] - 1)}
    request = Request(
        model_shape=",".join(f"{key}={value}" for key, value in shape.items()),
        num_gpus=pick.choice((1, 2, 4, 6, 8, 8, 12, 16, 16)),
        gpu=pick.choice(("h100", "a100-sxm-40gb", "l4", "v100-sxm-16gb", "b200", "mi300x", "rtx-4090")),
        gpus_per_node=pick.choice((2, 4, 8)),
        gpu_memory_gib=pick.choice((None, None, 4.0, 8.0, 12.0)),
        seq_len=pick.choice((512, 2048, 4096, 6144)),
        global_batch_size=pick.choice((1, 2, 4, 6, 8, 12, 16)),
        zero_stage=pick.choice((None, None, None, (0,), (0, 1), (3,))),
    )
    return make_scenario(Request(**wishes).over(request), name=f"random-{seed}")


@contextlib.contextmanager
def by_formula() -> Iterator[None]:
    """Every step is the formula's, as if it knew the fill of every schedule: for claims about order and proof that brute force checks."""
    rule = simulated.inexact
    simulated.step_of.cache_clear()
    simulated.inexact = refinement.inexact = lambda x: np.zeros(len(x), dtype=bool)  # type: ignore[attr-defined]
    try:
        yield
    finally:
        simulated.inexact = refinement.inexact = rule  # type: ignore[attr-defined]
        simulated.step_of.cache_clear()


def starved_scenario(seed: int) -> Scenario:
    """A deep model whose states alone fill the GPUs unless many share them: the memory floor drops some meshes, not all."""
    pick = random.Random(seed)
    heads = pick.choice((8, 16, 32))
    shape = f"layers={pick.randint(9, 30)},hidden={128 * heads},heads={heads},vocab={pick.choice((1000, 32000))}"
    if pick.random() < 0.4:
        shape += f",experts=8,top_k=2,moe_ffn={128 * heads}"
    request = Request(
        model_shape=shape,
        num_gpus=pick.choice((8, 8, 12, 16)),
        framework=pick.choice(("any", "none", "megatron", "torchtitan", "deepspeed")),
        seq_len=pick.choice((256, 512, 4096)),
        global_batch_size=pick.choice((8, 12, 16, 48)),
        zero_stage=pick.choice(((0,), (0,), (0, 1), (0, 1, 2, 3))),
        virtual_pipeline=(1, 2),
        micro_batch_size=(1, 2),
        recompute_layers=(0, *range(pick.randint(1, 3), 31)),
    )
    scenario = make_scenario(request, name=f"starved-{seed}")
    states = 18.0 * parameters.total(scenario.job.model)
    share = pick.choice((0.08, 0.1, 0.15, 0.2))
    gpu = dataclasses.replace(scenario.job.gpu, memory_bytes=share * states + 2.0 * GIB)
    return dataclasses.replace(scenario, job=dataclasses.replace(scenario.job, gpu=gpu))


def tight_scenario(seed: int) -> Scenario:
    """A small model on 1 to 8 GPUs of 1.6 to 3 GiB, some axes pinned, for one framework or any: often nothing fits."""
    pick = random.Random(seed)
    heads = pick.choice((4, 6, 8))
    shape = f"layers={pick.randint(2, 8)},hidden={heads * 128},heads={heads},vocab={pick.choice((1000, 32000))}"
    values: dict[str, tuple[Any, ...]] = {
        "tensor_parallel": (1, 2, 4),
        "pipeline_parallel": (1, 2, 4),
        "context_parallel": (1, 2),
        "data_parallel": (1, 2, 3, 4),
        "zero_stage": (0, 1, 2, 3),
        "micro_batch_size": (1, 2, 4),
        "recompute": ("none", "selective", "full"),
        "schedule": ("1f1b", "gpipe", "zero_bubble_v"),
    }
    if pick.random() < 0.3:
        shape += f",experts=4,top_k=2,moe_ffn={pick.choice((512, 2048))}"
        values["expert_parallel"] = (1, 2, 4)
    pins: Any = {axis: (pick.choice(values[axis]),) for axis in pick.sample(sorted(values), pick.choice((0, 1, 2, 3, 4)))}
    request = Request(
        model_shape=shape,
        num_gpus=pick.choice((1, 2, 3, 4, 6, 8)),
        gpus_per_node=pick.choice((2, 4)),
        gpu_memory_gib=pick.choice((1.6, 1.8, 2.0, 2.2, 2.5, 3.0)),
        seq_len=512,
        global_batch_size=pick.choice((1, 2, 4, 6, 8)),
        framework=pick.choice(("any", "any", "none", "megatron", "torchtitan", "deepspeed")),
        max_pipeline_parallel=pick.choice((None, None, 1, 2)),
        **pins,
    )
    return make_scenario(request, name=f"tight-{seed}")


@functools.cache
def sampled_layouts(scenario_key: tuple[tuple[str, Any], ...], count: int) -> tuple[Scenario, Columns]:
    """The scenario of the wishes, and a fixed random sample of its legal layouts, whatever memory they need."""
    scenario = make_scenario(Request(**dict(scenario_key)))
    layouts = next(enumerate_layouts(without_floor(spec.problem(scenario))).pieces(1 << 40))
    rows = np.random.default_rng(0).choice(len(layouts), min(count, len(layouts)), replace=False)
    return scenario, layouts.take(np.sort(rows))
