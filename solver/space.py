"""The space of a search by constraint programming: variables, one function per rule, and their enumeration.

Each rule carries the name of its plain twin in :mod:`solver.check`.
"""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import numpy as np
from ortools.sat.python import cp_model

from solver.grouping import ragged
from solver.layout import MESH_AXES, SPLIT_AXES, V_CODES, Ints
from solver.problem import Problem, divisors

SPLIT_KEYS = ("pipeline_parallel", "data_parallel")
"""The axes that a mesh and a split have in common."""


def variables(model: cp_model.CpModel, problem: Problem, axes: tuple[str, ...]) -> Any:
    """A namespace with one integer variable per axis, over its domain."""
    return SimpleNamespace(**{axis: _among(model, problem.domains[axis], axis) for axis in axes})


def _among(model: cp_model.CpModel, values: tuple[int, ...], name: str) -> cp_model.IntVar:
    return model.new_int_var_from_domain(cp_model.Domain.from_values(list(values)), name)


def _divides(model: cp_model.CpModel, divisor: cp_model.IntVar, number: int) -> None:
    model.add_modulo_equality(0, number, divisor)


def _product(model: cp_model.CpModel, factors: list[cp_model.IntVar], most: int, name: str) -> cp_model.IntVar:
    product = model.new_int_var(1, most, name)
    model.add_multiplication_equality(product, factors)
    return product


def _quotient(model: cp_model.CpModel, number: cp_model.LinearExprT, by: cp_model.IntVar, most: int, name: str) -> cp_model.IntVar:
    quotient = model.new_int_var(0, most, name)
    model.add_division_equality(quotient, number, by)
    return quotient


def tensor_group_in_node(model: cp_model.CpModel, x: Any, problem: Problem) -> None:
    """A tensor group stays inside a node (a limit that can be lifted)."""
    if not problem.tensor_across_nodes:
        _divides(model, x.tensor_parallel, problem.gpus_per_node)


def heads(model: cp_model.CpModel, x: Any, problem: Problem) -> None:
    """The tensor group divides the attention heads."""
    _divides(model, x.tensor_parallel, problem.num_attention_heads)


def key_value_heads(model: cp_model.CpModel, x: Any, problem: Problem) -> None:
    """The tensor group divides the KV heads, or holds a whole number of copies of them."""
    copies = [problem.num_key_value_heads * k for k in range(1, problem.num_attention_heads + 1)]
    allowed = set(divisors(problem.num_key_value_heads)) | (set(copies) if problem.replicate_key_values else set())
    model.add_linear_expression_in_domain(x.tensor_parallel, cp_model.Domain.from_values(sorted(allowed)))


def ffn(model: cp_model.CpModel, x: Any, problem: Problem) -> None:
    """The tensor group divides the width of the MLP (and of the shared experts)."""
    for width in (problem.ffn_hidden_size, problem.shared_ffn_hidden_size):
        if width:
            _divides(model, x.tensor_parallel, width)


def vocabulary(model: cp_model.CpModel, x: Any, problem: Problem) -> None:
    """The tensor group divides the vocabulary, unless the vocabulary may be padded."""
    if not problem.pad_vocabulary:
        _divides(model, x.tensor_parallel, problem.vocab_size)


def pipeline_depth(model: cp_model.CpModel, x: Any, problem: Problem) -> None:
    """The pipeline is no deeper than allowed, and has a layer for every stage."""
    model.add(x.pipeline_parallel <= min(problem.max_pipeline_parallel, problem.num_layers))


def sequence(model: cp_model.CpModel, x: Any, problem: Problem) -> None:
    """The sequence splits into two chunks per context rank, evenly over the tensor group, with enough tokens each."""
    shares = {}
    for context in problem.domains["context_parallel"]:
        share = problem.seq_len // context
        if context == 1 or (problem.seq_len % (2 * context) == 0 and share >= problem.min_context_tokens):
            shares[context] = share
    model.add_linear_expression_in_domain(x.context_parallel, cp_model.Domain.from_values(sorted(shares)))
    if problem.sequence_parallel:
        even = [(c, t) for c, share in shares.items() for t in problem.domains["tensor_parallel"] if share % t == 0]
        model.add_allowed_assignments([x.context_parallel, x.tensor_parallel], even)


def gpu_product(model: cp_model.CpModel, x: Any, problem: Problem) -> None:
    """tensor x pipeline x context x data = number of GPUs."""
    halves = [(x.tensor_parallel, x.pipeline_parallel, "model_ranks"), (x.context_parallel, x.data_parallel, "replica_ranks")]
    products = []
    for one, other, name in halves:  # two by two: four factors at once overflow on large clusters
        products.append(_among(model, divisors(problem.num_gpus), name))
        model.add_multiplication_equality(products[-1], [one, other])
    model.add_multiplication_equality(problem.num_gpus, products)


def experts(model: cp_model.CpModel, x: Any, problem: Problem) -> None:
    """The expert group divides the experts; without experts there is no expert group."""
    if problem.num_experts:
        _divides(model, x.expert_parallel, problem.num_experts)
    else:
        model.add(x.expert_parallel == 1)
        model.add(x.expert_tensor_parallel == 1)


def expert_tensor(model: cp_model.CpModel, x: Any, problem: Problem) -> None:
    """An expert is whole or split like the dense layers, and the split divides its width."""
    split = model.new_bool_var("expert_is_split")
    model.add(x.expert_tensor_parallel == x.tensor_parallel).only_enforce_if(split)
    model.add(x.expert_tensor_parallel == 1).only_enforce_if(~split)
    model.add(x.expert_tensor_parallel > 1).only_enforce_if(split)  # one way only to say "whole": no solution twice
    if problem.moe_ffn_hidden_size:
        _divides(model, x.expert_tensor_parallel, problem.moe_ffn_hidden_size)


def expert_grid(model: cp_model.CpModel, x: Any, problem: Problem) -> None:
    """expert x expert tensor divides tensor x context x data: the expert axes add no factor to the GPUs."""
    if not problem.num_experts:
        return
    grid = _among(model, divisors(problem.num_gpus), "grid")  # tensor x context x data: the GPUs of a stage
    model.add_multiplication_equality(problem.num_gpus, [grid, x.pipeline_parallel])
    expert_ranks = _product(model, [x.expert_parallel, x.expert_tensor_parallel], problem.num_gpus, "expert_ranks")
    model.add_modulo_equality(0, grid, expert_ranks)


def replicas(model: cp_model.CpModel, x: Any, problem: Problem) -> None:
    """The replicas share the global batch evenly."""
    _divides(model, x.data_parallel, problem.global_batch_size)


def batch(model: cp_model.CpModel, x: Any, problem: Problem) -> None:
    """data parallel x micro-batch divides the global batch."""
    x.num_micro_batches = _among(model, divisors(problem.global_batch_size), "num_micro_batches")
    per_replica = _among(model, divisors(problem.global_batch_size), "per_replica")
    model.add_multiplication_equality(per_replica, [x.micro_batch_size, x.num_micro_batches])
    model.add_multiplication_equality(problem.global_batch_size, [per_replica, x.data_parallel])


def layers(model: cp_model.CpModel, x: Any, problem: Problem) -> None:
    """Every chunk of every stage holds at least one layer (uneven counts are allowed)."""
    _product(model, [x.pipeline_parallel, x.virtual_pipeline], problem.num_layers, "chunks")


def interleaving(model: cp_model.CpModel, x: Any, problem: Problem) -> None:
    """Interleaved stages need a pipeline and a micro-batch for every stage (V-shaped pairs of chunks do not)."""
    several = model.new_bool_var("several_chunks")
    model.add(x.virtual_pipeline >= 2).only_enforce_if(several)
    model.add(x.virtual_pipeline == 1).only_enforce_if(~several)
    model.add(x.pipeline_parallel > 1).only_enforce_if(several)
    filled = several
    if any(code in problem.domains["schedule"] for code in V_CODES):
        filled = model.new_bool_var("more_than_a_pair")
        model.add(x.virtual_pipeline >= 3).only_enforce_if(filled)
        model.add(x.virtual_pipeline <= 2).only_enforce_if(~filled)
    model.add(x.num_micro_batches >= x.pipeline_parallel).only_enforce_if(filled)


def memory_floor(model: cp_model.CpModel, x: Any, problem: Problem) -> None:
    """The least that any split and any switch needs fits: unshardable states, and the inputs of the layers in flight."""
    states: list[cp_model.IntVar] = []
    if problem.whole_dense_kib:
        parts = _product(model, [x.tensor_parallel, x.pipeline_parallel], problem.num_gpus, "dense_parts")
        states.append(_quotient(model, problem.whole_dense_kib, parts, problem.whole_dense_kib, "dense_states"))
    if problem.whole_expert_kib:
        parts = _product(model, [x.expert_parallel, x.expert_tensor_parallel, x.pipeline_parallel], problem.num_gpus, "expert_parts")
        states.append(_quotient(model, problem.whole_expert_kib, parts, problem.whole_expert_kib, "expert_states"))
    least = -problem.whole_dense_kib - problem.whole_expert_kib - problem.sharded_kib
    room = model.new_int_var(least, problem.usable_kib, "room")
    model.add(room == problem.usable_kib - problem.sharded_kib // problem.num_gpus - sum(states))
    shares = _product(model, [x.tensor_parallel, x.context_parallel], problem.num_gpus, "activation_shares")
    offered = model.new_int_var(least * problem.num_gpus, problem.usable_kib * problem.num_gpus, "offered")
    model.add_multiplication_equality(offered, [room, shares])
    per_replica = _quotient(model, problem.global_batch_size, x.data_parallel, problem.global_batch_size, "per_replica")
    in_flight = model.new_int_var(0, problem.num_layers, "in_flight")
    model.add_min_equality(in_flight, [per_replica, x.pipeline_parallel])
    stage_layers = _quotient(model, problem.num_layers, x.pipeline_parallel, problem.num_layers, "stage_layers")
    held = _product(model, [stage_layers, in_flight], problem.num_layers, "held_layers")
    model.add(problem.kept_kib * held <= offered)


Post = Callable[[cp_model.CpModel, Any, Problem], None]
MESH_POSTS: tuple[Post, ...] = (
    tensor_group_in_node,
    heads,
    key_value_heads,
    ffn,
    vocabulary,
    pipeline_depth,
    sequence,
    gpu_product,
    experts,
    expert_tensor,
    expert_grid,
    replicas,
    memory_floor,
)
SPLIT_POSTS: tuple[Post, ...] = (batch, layers, interleaving)


class _Collector(cp_model.CpSolverSolutionCallback):
    """Keeps every solution."""

    def __init__(self, axes: list[cp_model.IntVar]) -> None:
        super().__init__()
        self.axes = axes
        self.found: list[list[int]] = []

    def on_solution_callback(self) -> None:
        self.found.append([self.value(axis) for axis in self.axes])


def _solutions(problem: Problem, axes: tuple[str, ...], posts: tuple[Post, ...]) -> Ints:
    """Every assignment of ``axes`` under the posted rules: an array (solutions, axes) in lexicographic order, none twice.

    Raises RuntimeError unless the solver proves that it found them all.
    """
    model = cp_model.CpModel()
    x = variables(model, problem, axes)
    for post in posts:
        post(model, x, problem)
    collector = _Collector([getattr(x, axis) for axis in axes])
    solver = cp_model.CpSolver()
    solver.parameters.enumerate_all_solutions = True
    solver.parameters.num_workers = 1  # enumeration is sequential
    solver.parameters.catch_sigint_signal = False  # Ctrl-C belongs to the program
    solver.parameters.linearization_level = 0  # no objective to bound: nine times faster
    status = solver.solve(model, collector)
    if status not in (cp_model.OPTIMAL, cp_model.INFEASIBLE):
        raise RuntimeError(f"the enumeration ended with {solver.status_name(status)}, not with a proof")
    found = np.array(collector.found, dtype=np.int64).reshape(-1, len(axes))
    return np.unique(found, axis=0) if len(found) else found


def meshes(problem: Problem) -> Ints:
    """Every mesh that breaks no mesh rule: shape (meshes, MESH_AXES)."""
    return _solutions(problem, MESH_AXES, MESH_POSTS)


def splits(problem: Problem) -> Ints:
    """Every way to cut batch and layers: shape (splits, SPLIT_KEYS + SPLIT_AXES)."""
    return _solutions(problem, SPLIT_KEYS + SPLIT_AXES, SPLIT_POSTS)


def join(problem: Problem, found_meshes: Ints, found_splits: Ints) -> Ints:
    """Each mesh with each split of its pipeline and data size: shape (n, MESH_AXES + SPLIT_AXES).

    No rule reads both a mesh-only and a split axis, so the join is exactly the set that one joint model would have.
    """
    width = problem.num_gpus + 1
    keys = [MESH_AXES.index(axis) for axis in SPLIT_KEYS]
    mesh_code = found_meshes[:, keys[0]] * width + found_meshes[:, keys[1]]
    split_code = found_splits[:, 0] * width + found_splits[:, 1]  # ascending: splits come in lexicographic order
    first = np.searchsorted(split_code, mesh_code, side="left")
    count = np.searchsorted(split_code, mesh_code, side="right") - first
    mesh, within = ragged(count)
    return np.hstack([found_meshes[mesh], found_splits[first[mesh] + within, len(SPLIT_KEYS) :]])
