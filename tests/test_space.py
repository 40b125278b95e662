"""CP-SAT finds exactly the layouts that plain arithmetic allows, and counting closes on the same number."""

from __future__ import annotations

import dataclasses
import itertools
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from ortools.sat.python import cp_model

from solver import check, prune, space
from solver.check import MESH_RULES, RULES, SPLIT_RULES, SWITCH_RULES, broken_rules, legal_values
from solver.layout import AXES, MESH_AXES, RECOMPUTE, SCHEDULES, Layout
from solver.problem import Problem
from tests.builders import BASE_AXES, BASE_RULES, brute_force, problems, rows_of, small_problem, without_floor

MANY = settings(max_examples=200, deadline=None, derandomize=True)
SOME = settings(max_examples=50, deadline=None, derandomize=True)
TINY = {"most_gpus": 8, "most_batch": 6, "most_layers": 3}

POSTERS = {post.__name__: post for post in space.MESH_POSTS + space.SPLIT_POSTS}


def solved(problem: Problem) -> np.ndarray:
    """Every mesh with every split, as the search enumerates them."""
    return space.join(problem, space.meshes(problem), space.splits(problem))


def first_sentence(thing: Any) -> str:
    """The first line of a docstring."""
    return (thing.__doc__ or "").strip().split("\n")[0]


@MANY
@given(problems())
def test_the_solver_finds_exactly_what_brute_force_allows_and_nothing_twice(problem: Problem) -> None:
    assert np.array_equal(solved(problem), brute_force(problem))  # brute force never repeats a row


@SOME
@given(problems(**TINY))
def test_the_vectorised_brute_force_agrees_with_a_plain_loop(problem: Problem) -> None:
    def allowed(values: tuple[int, ...]) -> bool:
        x = SimpleNamespace(**dict(zip(BASE_AXES, values, strict=True)))
        return all(bool(rule.holds(x, problem)) for rule in BASE_RULES)

    every = itertools.product(*(problem.domains[axis] for axis in BASE_AXES))
    assert [values for values in every if allowed(values)] == [tuple(row) for row in brute_force(problem).tolist()]


@MANY
@given(problems())
def test_counting_leaves_as_many_layouts_as_the_solver_spreads(problem: Problem) -> None:
    books = prune.count(problem)
    assert books.space == problem.space_size == sum(books.dropped.values()) + books.survivors
    assert books.survivors == len(prune.spread(problem, solved(problem)))


@SOME
@given(problems(**TINY))
def test_spread_layouts_are_exactly_those_that_break_no_rule(problem: Problem) -> None:
    pieces = list(prune.spread(problem, solved(problem)).pieces(100))
    found = np.concatenate([rows_of(piece) for piece in pieces]) if pieces else np.zeros((0, len(AXES)))
    expected = brute_force(problem, AXES, RULES)
    assert np.array_equal(found[np.lexsort(found.T[::-1])], expected)


def test_an_unfinished_enumeration_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cp_model.CpSolver, "solve", lambda *_: cp_model.UNKNOWN)
    with pytest.raises(RuntimeError, match="UNKNOWN"):
        space.meshes(small_problem())


def test_every_mesh_and_split_rule_has_a_poster_and_every_poster_a_rule() -> None:
    assert {rule.name for rule in MESH_RULES} == {post.__name__ for post in space.MESH_POSTS}
    assert {rule.name for rule in SPLIT_RULES} == {post.__name__ for post in space.SPLIT_POSTS}
    assert set(MESH_RULES + SPLIT_RULES + SWITCH_RULES) == set(RULES)
    assert len({rule.name for rule in RULES}) == len(RULES) == len(MESH_RULES + SPLIT_RULES + SWITCH_RULES)


@pytest.mark.parametrize("rule", BASE_RULES, ids=lambda rule: rule.name)
def test_poster_and_twin_state_the_rule_in_the_same_words(rule: check.Rule) -> None:
    assert rule.sentence
    assert rule.sentence == first_sentence(POSTERS[rule.name])


MOE: dict[str, Any] = {"num_experts": 8, "moe_ffn_hidden_size": 96, "ffn_hidden_size": 0}
REFUSALS: dict[str, tuple[dict[str, Any], dict[str, Any], tuple[str, ...]]] = {
    "tensor_group_in_node": ({}, {"tensor_parallel": 8}, ("tensor_parallel = 8", "4 GPUs")),
    "heads": ({"num_attention_heads": 12}, {"tensor_parallel": 8}, ("num_attention_heads = 12", "tensor_parallel = 8")),
    "key_value_heads": (
        {"replicate_key_values": False},
        {"tensor_parallel": 4},
        ("num_key_value_heads = 2", "tensor_parallel = 4"),
    ),
    "ffn": ({"ffn_hidden_size": 66}, {"tensor_parallel": 4}, ("ffn_hidden_size = 66", "tensor_parallel = 4")),
    "vocabulary": (
        {"vocab_size": 101, "pad_vocabulary": False},
        {"tensor_parallel": 2},
        ("vocab_size = 101", "tensor_parallel = 2"),
    ),
    "pipeline_depth": (
        {"max_pipeline_parallel": 4},
        {"pipeline_parallel": 8},
        ("pipeline_parallel = 8", "max_pipeline_parallel = 4", "num_layers = 6"),
    ),
    "sequence": ({"seq_len": 50}, {"context_parallel": 2}, ("seq_len = 50", "context_parallel = 2")),
    "gpu_product": ({}, {"tensor_parallel": 2, "data_parallel": 2}, ("tensor 2", "data 2", "= 4", "num_gpus = 8")),
    "experts": (MOE, {"expert_parallel": 3}, ("num_experts = 8", "expert_parallel = 3")),
    "expert_tensor": (
        MOE,
        {"tensor_parallel": 4, "expert_tensor_parallel": 2},
        ("expert_tensor_parallel = 2", "tensor_parallel = 4", "moe_ffn_hidden_size = 96"),
    ),
    "expert_grid": (MOE, {"pipeline_parallel": 4, "data_parallel": 2, "expert_parallel": 8}, ("= 2", "expert 8")),
    "replicas": ({}, {"data_parallel": 8}, ("global_batch_size = 12", "data_parallel = 8")),
    "memory_floor": ({"usable_kib": 3 << 20, "whole_dense_kib": (3 << 20) + 1}, {}, ("3.0 GiB",)),
    "batch": (
        {},
        {"data_parallel": 4, "micro_batch_size": 2},
        ("global_batch_size = 12", "data_parallel 4", "micro_batch_size 2"),
    ),
    "layers": ({}, {"pipeline_parallel": 4, "virtual_pipeline": 2}, ("pipeline 4", "virtual 2", "num_layers = 6")),
    "interleaving": (
        {},
        {"pipeline_parallel": 2, "virtual_pipeline": 3, "data_parallel": 4, "micro_batch_size": 3},
        ("virtual_pipeline = 3", "there are 1 for 2 stages"),
    ),
    "schedule": (
        {},
        {"pipeline_parallel": 2, "schedule": "interleaved_1f1b"},
        ("interleaved_1f1b", "virtual_pipeline = 1", "pipeline_parallel = 2", "12 micro-batches"),
    ),
    "recompute_depth": (
        {},
        {"pipeline_parallel": 2, "recompute": "full", "recompute_layers": 4},
        ("full with 4 layers", "at most 3 layers"),
    ),
}
"""Rule -> a problem, a layout that breaks the rule, and the numbers that the message must name."""


def test_every_rule_has_a_layout_here_that_it_refuses() -> None:
    assert set(REFUSALS) == {rule.name for rule in RULES}


@pytest.mark.parametrize("name", REFUSALS)
def test_a_refusal_names_the_numbers_of_the_user(name: str) -> None:
    sizes, axes, numbers = REFUSALS[name]
    message = broken_rules(Layout(**axes), small_problem(**sizes))[name]
    assert [number for number in numbers if number not in message] == []


def test_one_kib_decides_the_memory_floor() -> None:
    layout = Layout(tensor_parallel=2, pipeline_parallel=2, data_parallel=2)
    need = 4000 // 4 + 800 // 8 + 50 * 3 * 2 // 2  # dense states, sharded states, 3 layers x 2 micro-batches over tensor 2
    sizes: dict[str, Any] = {"whole_dense_kib": 4000, "sharded_kib": 800, "kept_kib": 50}
    assert not broken_rules(layout, small_problem(usable_kib=need, **sizes))
    assert set(broken_rules(layout, small_problem(usable_kib=need - 1, **sizes))) == {"memory_floor"}


@MANY
@given(problems(), st.data())
def test_legal_values_are_exactly_those_for_which_the_broken_rules_vanish(problem: Problem, data: st.DataObject) -> None:
    words = {"recompute": RECOMPUTE, "schedule": SCHEDULES}

    def worded(axis: str, value: int) -> dict[str, Any]:
        return {axis: words[axis][value] if axis in words else value}

    layout = Layout()
    for each in AXES:
        layout = dataclasses.replace(layout, **worded(each, data.draw(st.sampled_from(problem.domains[each]))))
    axis = data.draw(st.sampled_from(AXES))
    readers = {rule.name for rule in RULES if axis in rule.axes}

    def vanish(value: int, rules: set[str]) -> bool:
        trial = dataclasses.replace(layout, **worded(axis, value))
        return not rules & set(broken_rules(trial, problem))

    for product, rules in ((True, readers), (False, readers - {"gpu_product"})):  # other axes can make up for the GPUs
        expected = [value for value in problem.domains[axis] if vanish(value, rules)]
        assert legal_values(layout, problem, axis, product=product) == expected


@SOME
@given(problems())
def test_lifting_the_memory_floor_only_adds_layouts(problem: Problem) -> None:
    tight = {tuple(row) for row in solved(problem).tolist()}
    loose = {tuple(row) for row in solved(without_floor(problem)).tolist()}
    assert tight <= loose


def test_the_expert_axes_add_no_factor_to_the_gpus() -> None:
    found = solved(small_problem(**MOE))
    world = np.prod([found[:, MESH_AXES.index(f"{axis}_parallel")] for axis in ("tensor", "pipeline", "context", "data")], axis=0)
    assert (world == 8).all()
    assert (found[:, MESH_AXES.index("expert_parallel")] == 8).any()


def test_group_sizes_whose_product_overflows_are_still_enumerated() -> None:
    powers = tuple(2**k for k in range(21))
    pins = dict.fromkeys(("tensor_parallel", "pipeline_parallel", "context_parallel", "data_parallel"), powers)
    sizes: dict[str, Any] = {
        "num_gpus": 1 << 20,
        "num_layers": 64,
        "max_pipeline_parallel": 64,
        "seq_len": 1 << 20,
        "global_batch_size": 1 << 20,
    }
    found = space.meshes(small_problem(pins, **sizes))
    world = [MESH_AXES.index(f"{axis}_parallel") for axis in ("tensor", "pipeline", "context", "data")]
    assert len(found) and np.all(np.prod(found[:, world].astype(float), axis=1) == 2.0**20)
