"""The solver's set is the brute-force set, and the books close."""

from __future__ import annotations

import dataclasses
from types import SimpleNamespace

import numpy as np
import pytest
from hypothesis import given, settings

from solver import check, prune, space
from solver.layout import AXES, Layout
from solver.problem import Problem
from tests.builders import BASE_AXES, brute_force, problems, rows_of, small_problem

THOROUGH = settings(max_examples=220, deadline=None, derandomize=True)


def enumerated(problem: Problem) -> np.ndarray:
    """All meshes and splits by CP-SAT, in lexicographic order."""
    found = space.join(problem, space.meshes(problem), space.splits(problem))
    return found[np.lexsort(found.T[::-1])] if len(found) else found


@THOROUGH
@given(problems())
def test_the_solvers_set_is_the_brute_force_set_and_nothing_comes_twice(problem: Problem) -> None:
    found = enumerated(problem)
    assert len(np.unique(found, axis=0)) == len(found)
    np.testing.assert_array_equal(found, brute_force(problem))


@settings(THOROUGH, max_examples=60)
@given(problems(most_gpus=16, most_batch=12, most_layers=6))
def test_counting_without_the_solver_closes_and_agrees_with_what_is_spread(problem: Problem) -> None:
    books = prune.count(problem)
    spread = prune.spread(problem, enumerated(problem))
    assert books.space == sum(books.dropped.values()) + books.survivors
    assert books.survivors == len(spread) == sum(len(piece) for piece in spread.pieces(50))


@settings(THOROUGH, max_examples=15)
@given(problems(most_gpus=6, most_batch=4, most_layers=3))
def test_complete_layouts_are_the_brute_force_layouts_under_all_rules(problem: Problem) -> None:
    pieces = [rows_of(piece) for piece in prune.spread(problem, enumerated(problem)).pieces(1000)]
    found = np.concatenate(pieces) if pieces else np.zeros((0, len(AXES)), dtype=np.int64)
    expected = brute_force(problem, AXES, check.RULES)
    np.testing.assert_array_equal(np.unique(found, axis=0), expected)
    assert len(found) == len(expected)


def test_a_twin_says_the_same_of_one_layout_in_plain_numbers_as_of_many_in_arrays() -> None:
    problem = small_problem(num_experts=4, moe_ffn_hidden_size=64, usable_kib=900, whole_dense_kib=3000, kept_kib=40)
    rows = brute_force(problem, BASE_AXES, ())[::997]
    many = SimpleNamespace(**dict(zip(BASE_AXES, rows.T, strict=True)))
    for rule in (*check.MESH_RULES, *check.SPLIT_RULES):
        together = np.broadcast_to(rule.holds(many, problem), len(rows))
        alone = [bool(rule.holds(SimpleNamespace(**dict(zip(BASE_AXES, map(int, row), strict=True))), problem)) for row in rows]
        assert together.tolist() == alone, rule.name


@pytest.mark.parametrize(
    "rules, posts", [(check.MESH_RULES, space.MESH_POSTS), (check.SPLIT_RULES, space.SPLIT_POSTS)], ids=["mesh", "split"]
)
def test_every_rule_has_a_twin_of_the_same_name_and_sentence(rules: tuple[check.Rule, ...], posts: tuple[space.Post, ...]) -> None:
    twins = {post.__name__: (post.__doc__ or "").strip().split("\n")[0] for post in posts}
    assert {rule.name: rule.sentence for rule in rules} == twins


BROKEN = {
    "tensor_group_in_node": (Layout(tensor_parallel=8, data_parallel=1), {}),
    "heads": (Layout(tensor_parallel=4, data_parallel=2), {"num_attention_heads": 6, "num_key_value_heads": 6}),
    "key_value_heads": (Layout(tensor_parallel=4, data_parallel=2), {"num_key_value_heads": 2, "replicate_key_values": False}),
    "ffn": (Layout(tensor_parallel=4, data_parallel=2), {"ffn_hidden_size": 30}),
    "vocabulary": (Layout(tensor_parallel=4, data_parallel=2), {"vocab_size": 101, "pad_vocabulary": False}),
    "pipeline_depth": (Layout(pipeline_parallel=8), {}),
    "sequence": (Layout(context_parallel=8), {"seq_len": 60}),
    "gpu_product": (Layout(data_parallel=4), {}),
    "experts": (Layout(data_parallel=8, expert_parallel=3), {"num_experts": 4, "moe_ffn_hidden_size": 64}),
    "expert_tensor": (
        Layout(tensor_parallel=4, data_parallel=2, expert_tensor_parallel=2),
        {"num_experts": 4, "moe_ffn_hidden_size": 64},
    ),
    "expert_grid": (Layout(pipeline_parallel=4, data_parallel=2, expert_parallel=4), {"num_experts": 4, "moe_ffn_hidden_size": 64}),
    "replicas": (Layout(data_parallel=8), {}),
    "batch": (Layout(data_parallel=2, pipeline_parallel=4, micro_batch_size=5), {}),
    "layers": (Layout(pipeline_parallel=4, data_parallel=2, virtual_pipeline=2, schedule="interleaved_1f1b"), {}),
    "interleaving": (Layout(data_parallel=4, virtual_pipeline=3, schedule="interleaved_1f1b"), {"num_gpus": 4}),
    "memory_floor": (Layout(pipeline_parallel=4, data_parallel=2), {"usable_kib": 10, "sharded_kib": 800}),
    "schedule": (Layout(pipeline_parallel=4, data_parallel=2, schedule="interleaved_1f1b"), {}),
    "recompute_depth": (Layout(pipeline_parallel=4, data_parallel=2, recompute="full", recompute_layers=3), {}),
}


def test_every_rule_has_a_layout_that_it_refuses_here() -> None:
    assert set(BROKEN) == {rule.name for rule in check.RULES}


@pytest.mark.parametrize("name", BROKEN)
def test_a_broken_rule_is_named_with_the_users_numbers(name: str) -> None:
    layout, sizes = BROKEN[name]
    message = check.broken_rules(layout, small_problem(**sizes))[name]
    assert any(character.isdigit() for character in message) and "{" not in message


def test_legal_values_are_those_for_which_the_rules_hold() -> None:
    problem = small_problem()
    layout = Layout(tensor_parallel=8, data_parallel=1)
    assert check.legal_values(layout, problem, "tensor_parallel") == [1, 2, 4]
    for value in problem.domains["tensor_parallel"]:
        trial = dataclasses.replace(layout, tensor_parallel=value)
        broken = set(check.broken_rules(trial, problem)) - {"gpu_product"}
        reads = {rule.name for rule in check.RULES if "tensor_parallel" in rule.axes}
        assert (value in (1, 2, 4)) == (not broken & reads)


def test_group_sizes_whose_product_overflows_are_still_enumerated() -> None:
    powers = tuple(2**k for k in range(21))
    pins = dict.fromkeys(("tensor_parallel", "pipeline_parallel", "context_parallel", "data_parallel"), powers)
    problem = small_problem(
        pins, num_gpus=1 << 20, gpus_per_node=4, num_layers=64, max_pipeline_parallel=64, seq_len=1 << 20, global_batch_size=1 << 20
    )
    found = space.meshes(problem)
    assert len(found) and np.all(np.prod(found[:, [0, 1, 2, 5]].astype(float), axis=1) == 2.0**20)
