"""The best uneven split is the one that trying every split finds, it is proven, and it is a split of the model."""

from __future__ import annotations

import dataclasses
import itertools
import math
import random
from collections.abc import Iterator
from fractions import Fraction
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from ortools.sat.python import cp_model

from planner.cost import stages
from planner.cost.schedules import fill_1f1b
from solver import partition
from solver.partition import Option, Partition, Piece, Pipeline, solve, step_of

MANY = settings(max_examples=300, deadline=None, derandomize=True)
SOME = settings(max_examples=40, deadline=None, derandomize=True)
FEW = settings(max_examples=12, deadline=None, derandomize=True)

Splits = Iterator[tuple[Option, ...]]


def random_pipeline(r: random.Random) -> Pipeline:
    """A small pipeline with every feature, about one in ten without any split; times of unlike loads have nothing in common."""
    p, v, min_chunk = r.randint(1, 4), r.choice([1, 1, 2, 2, 3]), r.choice([0, 1, 1, 1, 2])
    least = min_chunk * v
    held = [least + r.randint(0, 3) for _ in range(p)]
    total = sum(held)
    dense = r.choice([0, total, r.randint(0, total), r.randint(0, min(3, total))])
    missing, longest = r.choice([0.0, 0.1, 0.3]), r.choice([1, 1, 20])  # short times: many splits as good

    def options() -> tuple[Option, ...]:
        found = []
        for layers in range(max(0, least - 1), least + 4):
            for first in range(max(0, layers - (total - dense)), min(layers, dense) + 1):
                for _ in range(0 if r.random() < missing else r.randint(1, 2)):
                    found.append(
                        Option(
                            first, layers - first, r.randint(0, layers), r.randint(0, longest), r.randint(0, 2 * longest), r.randint(0, 9)
                        )
                    )
        return tuple(found)

    pieces = [Piece(r.randint(0, 9), r.randint(0, 9), r.choice([0, 0, 1, 3])) for _ in range(r.randint(1, 3))]
    return Pipeline(
        num_stages=p,
        chunks_per_stage=v,
        owner=tuple(stages.stage_of_chunk(p, v, v == 2 and r.random() < 0.5).tolist()),
        layer_kinds=(dense, total - dense),
        options=tuple([options()] * p if r.random() < 0.3 else [options() for _ in range(p)]),
        pieces=tuple(pieces),
        scale=r.randint(1, 4),
        min_chunk=min_chunk,
    )


def random_chain(r: random.Random) -> Pipeline:
    """One chunk per stage, one option per load, one piece, up to 80 layers of two kinds: as a real pipeline, times near the layers'."""
    p = r.randint(2, 16)
    average = r.randint(1, 80 // p)
    loads = range(max(1, average - 2), average + 4)
    total = sum(r.choice(loads[:-1]) for _ in range(p))
    dense = r.choice([0, 1, 3, r.randint(0, total) if p <= 8 else 0])
    times = r.randint(50, 100), r.randint(80, 200)

    def options(extra: int) -> tuple[Option, ...]:
        found = []
        for first, second in ((first, n - first) for n in loads for first in range(min(n, dense) + 1)):
            forward = first * times[0] + second * times[1] + extra + r.randint(0, 30)
            found.append(Option(first, second, 0, forward, 2 * forward + r.randint(0, 30)))
        return tuple(found)

    micro_batches = r.randint(1, 40)
    return Pipeline(
        num_stages=p,
        owner=tuple(range(p)),
        layer_kinds=(dense, total - dense),
        options=tuple(options(r.choice([0, 0, 100])) for _ in range(p)),
        pieces=(Piece(micro_batches - 1, micro_batches, r.randint(0, 3)),),
    )


PIPELINES = st.integers(0, 1 << 32).map(lambda seed: random_pipeline(random.Random(seed)))
CHAINS = st.integers(0, 1 << 32).map(lambda seed: random_chain(random.Random(seed)))


def kinds_held(pipeline: Pipeline, layers: tuple[int, ...]) -> tuple[list[int], list[tuple[int, int]]]:
    """The chunks in model order and the layers of each kind per stage, dealt out layer by layer."""
    of_stage = [stages.chunk_sizes(count, pipeline.chunks_per_stage).tolist() for count in layers]
    chunks = [of_stage[stage].pop(0) for stage in pipeline.owner]
    model = [0] * pipeline.layer_kinds[0] + [1] * pipeline.layer_kinds[1]
    held = [[0, 0] for _ in layers]
    for stage, size in zip(pipeline.owner, chunks, strict=True):
        for kind in model[:size]:
            held[stage][kind] += 1
        model = model[size:]
    return chunks, [(first, second) for first, second in held]


def every_split(pipeline: Pipeline) -> Splits:
    """All splits that the options allow."""
    counts = [sorted({option.layers for option in options}) for options in pipeline.options]
    for layers in itertools.product(*counts):
        if sum(layers) == sum(pipeline.layer_kinds):
            chunks, loads = kinds_held(pipeline, layers)
            if min(chunks) >= pipeline.min_chunk:
                offered = [[o for o in options if (o.first, o.second) == load] for options, load in zip(pipeline.options, loads)]
                yield from itertools.product(*offered)


def plain_step(pipeline: Pipeline, loads: tuple[Option, ...]) -> Fraction:
    """The definition, written out."""
    around = sum(load.forward + load.backward for load in loads)
    each = (
        piece.forward * load.forward + piece.backward * load.backward + piece.around * around for piece in pipeline.pieces for load in loads
    )
    return Fraction(max(each), pipeline.scale)


def squares(loads: tuple[Option, ...]) -> int:
    return sum(load.layers**2 for load in loads)


def least_step_of_a_chain(pipeline: Pipeline) -> Fraction | None:
    """By dynamic programming: for every limit on the slowest stage the least time around, over prefixes of the model."""
    (piece,) = pipeline.pieces
    total = sum(pipeline.layer_kinds)

    def own(option: Option) -> int:
        return piece.forward * option.forward + piece.backward * option.backward

    def least_around(limit: int) -> float:
        around = {0: 0}  # layers before the stage -> least time of the stages so far
        for options in pipeline.options:
            longer: dict[int, int] = {}
            for option in (option for option in options if own(option) <= limit):
                for start, passes in around.items():
                    end = start + option.layers
                    if end <= total and min(end, pipeline.layer_kinds[0]) - min(start, pipeline.layer_kinds[0]) == option.first:
                        longer[end] = min(longer.get(end, passes + option.passes), passes + option.passes)
            around = longer
        return around.get(total, math.inf)

    best = math.inf
    at_least = piece.around * sum(min(option.passes for option in options) for options in pipeline.options)
    for limit in sorted({own(option) for options in pipeline.options for option in options}):
        if limit + at_least >= best:
            break
        best = min(best, limit + (piece.around * around if (around := least_around(limit)) < math.inf else math.inf))
    return None if best == math.inf else Fraction(int(best), pipeline.scale)


def even_layers(pipeline: Pipeline) -> tuple[int, ...]:
    """Layers per stage if all chunks of the model are as even as possible."""
    p, v = pipeline.num_stages, pipeline.chunks_per_stage
    sizes = stages.chunk_sizes(sum(pipeline.layer_kinds), p * v)
    return tuple(int(sum(size for size, owner in zip(sizes, pipeline.owner) if owner == stage)) for stage in range(p))


@MANY
@given(PIPELINES)
def test_the_answer_is_the_best_of_all_splits_and_of_those_the_most_even(pipeline: Pipeline) -> None:
    ranked = [(plain_step(pipeline, loads), squares(loads)) for loads in every_split(pipeline)]
    found = solve(pipeline)
    if ranked:
        assert (found.status, (found.step, squares(found.loads))) == ("optimal", min(ranked))
        assert found.step == plain_step(pipeline, found.loads)
    else:
        assert found == Partition("infeasible")


def test_the_random_pipelines_cover_what_the_solver_can_do() -> None:
    drawn = [random_pipeline(random.Random(seed)) for seed in range(200)]
    splits = [next(every_split(pipeline), None) for pipeline in drawn]
    feasible = [pipeline for pipeline, split in zip(drawn, splits, strict=True) if split]
    assert len(feasible) < len(drawn)
    assert any(0 not in pipeline.layer_kinds and pipeline.chunks_per_stage == 3 for pipeline in feasible)
    assert any(0 not in p.layer_kinds and p.owner[-1] == 0 and p.num_stages > 1 for p in feasible)  # a V
    assert any(len({piece.around for piece in pipeline.pieces}) > 1 for pipeline in feasible)
    assert any(len(useful) < len(given) for p in feasible for useful, given in zip(partition.useful_options(p), p.options))
    assert any(len({(o.first, o.second) for o in useful}) < len(useful) for p in feasible for useful in partition.useful_options(p))


@FEW
@given(CHAINS)
def test_the_answer_is_that_of_a_dynamic_programme_on_long_chains(pipeline: Pipeline) -> None:
    found, least = solve(pipeline, seconds=20), least_step_of_a_chain(pipeline)
    assert (found.status, found.step) == ("infeasible" if least is None else "optimal", least)


@SOME
@given(PIPELINES)
def test_the_parts_of_an_answer_agree_with_each_other(pipeline: Pipeline) -> None:
    found = solve(pipeline)
    if found.status == "infeasible":
        assert (found.step, found.bound, found.layers, found.chunks, found.gap) == (None, None, (), (), math.inf)
        return
    chunks, held = kinds_held(pipeline, found.layers)
    assert list(found.chunks) == chunks
    assert sum(found.layers) == sum(found.chunks) == sum(pipeline.layer_kinds)
    assert [(load.first, load.second) for load in found.loads] == held
    assert all(load in options for load, options in zip(found.loads, pipeline.options, strict=True))
    assert found.recomputed == tuple(load.recomputed for load in found.loads)
    assert found.bound == found.step == step_of(pipeline, found.loads)
    assert found.gap == 0


@SOME
@given(PIPELINES, st.randoms(use_true_random=False))
def test_the_answer_is_never_worse_than_the_hint_and_is_the_hint_if_as_good_and_as_even(pipeline: Pipeline, r: random.Random) -> None:
    splits = list(every_split(pipeline))
    layers = tuple(load.layers for load in r.choice(splits)) if splits and r.random() < 0.7 else even_layers(pipeline)
    same = [(plain_step(pipeline, loads), squares(loads)) for loads in splits if tuple(load.layers for load in loads) == layers]
    found, alone = solve(pipeline, hint=layers), solve(pipeline)
    assert (found.status, found.step) == (alone.status, alone.step)
    if same:
        assert found.step is not None and found.step <= min(same)[0]
        if (alone.step, squares(alone.loads)) == min(same) and len(same) == 1:
            assert found.layers == layers


def test_a_hint_comes_with_the_recompute_that_makes_it_shortest() -> None:
    lean, quick = Option(0, 1, 0, 12, 15), Option(0, 1, 1, 10, 20)
    rest = (Option(0, 2, 0, 1, 1),)
    for pieces, best in (
        ((Piece(9, 1, 0), Piece(0, 0, 1)), quick),
        ((Piece(1, 9, 0), Piece(0, 0, 1)), lean),
        ((Piece(9, 1, 0), Piece(0, 0, 9)), lean),  # around decides
    ):
        pipeline = two_stages(options=((lean, quick), rest), pieces=pieces)
        assert solve(pipeline, hint=(1, 2), seconds=0).loads == solve(pipeline).loads == (best, *rest)


@FEW
@given(CHAINS)
def test_without_any_time_the_hint_is_the_answer_and_nothing_is_called_proven(pipeline: Pipeline) -> None:
    best = solve(pipeline, seconds=20)
    if best.status == "optimal":
        found = solve(pipeline, seconds=0, hint=best.layers)
        assert (found.status, found.layers, found.step) == ("feasible", best.layers, best.step)
        assert found.bound is not None and best.step is not None and found.bound <= best.step
    unknown = solve(pipeline, seconds=0)
    assert (unknown.status, unknown.step, unknown.gap) == ("unknown", None, math.inf)
    assert best.step is None or (unknown.bound is not None and unknown.bound <= best.step)


@SOME
@given(PIPELINES, st.data())
def test_one_more_option_never_makes_the_step_longer(pipeline: Pipeline, data: st.DataObject) -> None:
    stage = data.draw(st.integers(0, pipeline.num_stages - 1))
    first, second = data.draw(st.integers(0, 4)), data.draw(st.integers(0, 4))
    option = Option(first, second, 0, data.draw(st.integers(0, 30)), data.draw(st.integers(0, 30)))
    more = tuple((*options, option) if number == stage else options for number, options in enumerate(pipeline.options))
    before, after = solve(pipeline), solve(dataclasses.replace(pipeline, options=more))
    if before.step is not None:
        assert after.step is not None and after.step <= before.step


@SOME
@given(PIPELINES)
def test_the_same_question_has_the_same_answer_twice(pipeline: Pipeline) -> None:
    assert repr(solve(pipeline)) == repr(solve(pipeline))


def test_a_search_that_the_solvers_clock_stops_repeats_itself_and_its_bound_holds(monkeypatch: pytest.MonkeyPatch) -> None:
    stopped = 0
    for seed in range(8):
        pipeline = random_chain(random.Random(seed))
        best = solve(pipeline, seconds=20)
        with monkeypatch.context() as patch:
            patch.setattr(partition, "DETERMINISTIC_PER_SECOND", 0.0002)
            one, other = solve(pipeline, seconds=30), solve(pipeline, seconds=30)
        assert repr(one) == repr(other)
        if best.step is not None and one.status != "optimal":
            stopped += 1
            assert one.status in ("feasible", "unknown")
            assert one.bound is not None and one.bound <= best.step
            assert one.step is None or (best.step <= one.step and one.gap >= 0)
    assert stopped


@pytest.mark.parametrize("num_layers", [64, 126, 128])
@pytest.mark.parametrize("p", [1, 7, 16, 64])
def test_equal_stages_get_the_even_split(p: int, num_layers: int) -> None:
    average = num_layers // p
    stage = tuple(Option(0, n, 0, 10 * n, 20 * n) for n in range(max(1, average - 3), average + 4))
    pipeline = Pipeline(num_stages=p, owner=tuple(range(p)), layer_kinds=(0, num_layers), options=(stage,) * p, pieces=(Piece(9, 9, 1),))
    assert solve(pipeline).layers == tuple(stages.chunk_sizes(num_layers, p).tolist())


def test_a_stage_with_a_heavy_head_gets_fewer_layers() -> None:
    def stage(head: int) -> tuple[Option, ...]:
        return tuple(Option(0, n, 0, 10 * n + head, 20 * n + 2 * head) for n in range(1, 9))

    pipeline = Pipeline(
        num_stages=4, owner=(0, 1, 2, 3), layer_kinds=(0, 18), options=(stage(0),) * 3 + (stage(20),), pieces=(Piece(31, 31, 1),)
    )
    assert solve(pipeline, hint=(4, 5, 5, 4)).layers == (5, 5, 5, 3)


@SOME
@given(st.integers(1, 64), st.integers(1, 4), st.lists(st.tuples(st.integers(1, 99), st.integers(1, 99)), min_size=1, max_size=8))
def test_one_piece_says_1f1b_as_the_cost_model_does(micro_batches: int, chunks: int, times: list[tuple[int, int]]) -> None:
    p, v, m = len(times), chunks, micro_batches
    loads = tuple(Option(0, v, 0, forward, backward) for forward, backward in times)
    pipeline = Pipeline(
        num_stages=p,
        chunks_per_stage=v,
        owner=tuple(range(p)) * v,
        layer_kinds=(0, p * v),
        options=tuple((load,) for load in loads),
        pieces=(Piece(m * v - 1, m * v - 1, 1),),
        scale=v,
    )
    around = float(sum(load.passes for load in loads))
    each = [m * load.passes + float(fill_1f1b(load.forward, load.backward, around, m, p, v)) for load in loads]
    assert float(step_of(pipeline, loads)) == pytest.approx(max(each), rel=1e-12)
    assert solve(pipeline).step == step_of(pipeline, loads)


def test_chunks_of_a_stage_are_cut_as_the_cost_model_cuts_them() -> None:
    for layers, chunks in itertools.product(range(50), range(1, 9)):
        assert list(partition.chunk_sizes(layers, chunks)) == stages.chunk_sizes(layers, chunks).tolist()


def two_stages(**changes: Any) -> Pipeline:
    """Two stages of one or two layers each, three layers in all."""
    stage = (Option(0, 1, 0, 10, 20), Option(0, 2, 1, 20, 40))
    sizes = {"num_stages": 2, "owner": (0, 1), "layer_kinds": (0, 3), "options": (stage, stage), "pieces": (Piece(7, 7, 1),)}
    return Pipeline(**{**sizes, **changes})


def test_options_that_never_win_are_dropped_and_the_rest_stays() -> None:
    quick, slow, other = Option(0, 1, 0, 10, 20), Option(0, 1, 1, 10, 25), Option(0, 1, 1, 12, 15)
    lone = (Option(0, 2, 0, 90, 90),)
    pieces = (Piece(9, 1, 0), Piece(1, 9, 1))
    assert partition.useful_options(two_stages(options=((slow, other, quick), lone), pieces=pieces)) == ((quick, other), lone)
    assert partition.useful_options(two_stages(options=((slow, other, quick), lone)))[0] == (other,)  # 7 (F + B) + around


@pytest.mark.parametrize(
    "changes",
    [
        {"layer_kinds": (0, 5)},
        {"layer_kinds": (0, 1)},
        {"layer_kinds": (1, 2)},
        {"min_chunk": 2},
        {"options": ((), (Option(0, 3, 0, 1, 1),))},
        {"options": ((Option(0, 1, 0, 1, 1),), (Option(0, 1, 0, 1, 1), Option(0, 3, 0, 1, 1)))},
    ],
)
def test_a_split_that_cannot_be_is_called_infeasible(changes: dict[str, Any]) -> None:
    assert solve(two_stages(**changes)) == solve(two_stages(**changes), hint=(1, 2)) == Partition("infeasible")


def test_layers_of_kind_0_come_first_whatever_the_options_offer() -> None:
    late = two_stages(layer_kinds=(1, 2), options=((Option(0, 1, 0, 1, 1),), (Option(1, 1, 0, 1, 1),)))
    early = two_stages(layer_kinds=(1, 2), options=((Option(1, 0, 0, 1, 1),), (Option(0, 2, 0, 1, 1),)))
    assert (solve(late).status, solve(early).status) == ("infeasible", "optimal")


@pytest.mark.parametrize("hint", [(), (3,), (1, 1), (2, 2), (0, 3), (-1, 4), (1, 1, 1)])
def test_a_hint_that_is_no_split_is_passed_over(hint: tuple[int, ...]) -> None:
    assert solve(two_stages(), hint=hint) == solve(two_stages())


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"num_stages": 0}, "num_stages must be a whole number of at least 1: 0"),
        ({"chunks_per_stage": 0}, "chunks_per_stage must be a whole number of at least 1: 0"),
        ({"scale": 0}, "scale must be a whole number of at least 1: 0"),
        ({"scale": 0.5}, "scale must be a whole number of at least 1: 0.5"),
        ({"min_chunk": -1}, "min_chunk must be a whole number of at least 0: -1"),
        ({"layer_kinds": (3,)}, "layer_kinds must count the layers of two kinds: (3,)"),
        ({"layer_kinds": (-1, 4)}, "layer_kinds must be a whole number of at least 0: -1"),
        ({"owner": (0, 0)}, "owner must name each of the 2 stages 1 times: (0, 0)"),
        ({"owner": (0, 1, 1, 0)}, "owner must name each of the 2 stages 1 times: (0, 1, 1, 0)"),
        ({"options": ((),)}, "options must be given for each of the 2 stages, not for 1"),
        ({"options": ((Option(0, 1, 0, 1.5, 1),), ())}, "forward of stage 0 must be a whole number of at least 0: 1.5"),  # type: ignore[arg-type]
        ({"options": ((), (Option(-1, 2, 0, 1, 1),))}, "first of stage 1 must be a whole number of at least 0: -1"),
        ({"options": ((), (Option(1, 1, 3, 1, 1),))}, "stage 1 cannot recompute 3 of 2 layers"),
        ({"pieces": ()}, "pieces must not be empty"),
        ({"pieces": (Piece(1, -1, 0),)}, "backward of a piece must be a whole number of at least 0: -1"),
        ({"pieces": (Piece(1 << 50, 0, 0),)}, "must be below 2^53: use a coarser unit of time"),
        ({"options": ((Option(0, 1, 0, 0, 1 << 53),), ()), "pieces": (Piece(1, 0, 0),)}, "must be below 2^53"),
    ],
)
def test_a_pipeline_that_makes_no_sense_is_refused(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError) as refused:
        two_stages(**changes)
    assert message in str(refused.value)


def test_a_model_that_the_solver_refuses_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cp_model.CpSolver, "solve", lambda *_: cp_model.MODEL_INVALID)
    with pytest.raises(RuntimeError, match="refuses the model"):
        solve(two_stages())
