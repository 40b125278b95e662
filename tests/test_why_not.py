"""Why not this layout: rules, the nearest that works, ranks and what a single change gains, checked by brute force."""

from __future__ import annotations

import dataclasses
import functools
import json
import math
import random

import pytest

from planner import spec, why_not
from planner.cli.terminal import rendered
from planner.cost.memory import OUT_OF_MEMORY
from planner.errors import InputError, NoLayoutFits
from planner.explain import complete_layout, explain
from planner.frameworks import FRAMEWORKS, legality
from planner.rank import order
from planner.refine import refined
from planner.report.why_not_text import why_not_json, why_not_page
from planner.request import Request, make_scenario
from planner.scenario import Scenario
from planner.search import Scored, concatenate, estimate, search
from planner.why_not import WhyNot
from solver import prune
from solver.check import broken_rules
from solver.layout import SCHEDULES, Layout, natural_schedule
from tests.builders import brute_force, by_formula, random_scenario, without_floor

SEEDS = range(12)
SIZES = ("tensor_parallel", "pipeline_parallel", "virtual_pipeline", "context_parallel", "expert_parallel", "expert_tensor_parallel")


@dataclasses.dataclass(frozen=True)
class Book:
    """A small random job without pins, and by brute force all its legal layouts: ranked, and out of memory."""

    scenario: Scenario
    ranked: Scored
    lost: Scored


@functools.cache
def book(seed: int) -> Book:
    """One job; every second one is short of memory."""
    scenario = random_scenario(seed, uneven_stages=False, **({"gpu_memory_gib": 4.0} if seed % 2 else {}))
    scenario = dataclasses.replace(scenario, choices=dataclasses.replace(scenario.choices, pins={}))
    problem = without_floor(spec.problem(scenario))
    every = prune.spread(problem, brute_force(problem))
    parts = [part for piece in every.pieces(1 << 14) for part in estimate(scenario, piece)]
    ranked = concatenate([fits for fits, _ in parts])
    return Book(scenario, ranked.take(order(scenario, ranked)), concatenate([lost for _, lost in parts]))


def layouts_of(scored: Scored) -> list[Layout]:
    """All layouts as objects."""
    return [scored.layouts.layout(row) for row in range(len(scored))]


def random_layout(scenario: Scenario, pick: random.Random) -> Layout:
    """Sizes that may be illegal in every way, yet can be written as a label."""
    job = scenario.job
    virtual = pick.choice((1, 1, 2, 3))
    schedule = pick.choice((natural_schedule(virtual), natural_schedule(virtual), *SCHEDULES))
    mode = pick.choice(("none", "selective", "full"))
    tensor, pipeline, context = pick.choice((1, 2, 3, 4, 16)), pick.choice((1, 2, 3, 4)), pick.choice((1, 1, 2))
    return Layout(
        tensor_parallel=tensor,
        pipeline_parallel=pipeline,
        virtual_pipeline=virtual,
        context_parallel=context,
        expert_parallel=pick.choice((1, 1, 2, 5)),
        data_parallel=pick.choice((max(job.num_gpus // (tensor * pipeline * context), 1), 1, 2, 5)),
        zero_stage=pick.randint(0, 3),
        micro_batch_size=pick.choice((1, 1, 2, 3)),
        recompute=mode,
        recompute_layers=pick.randint(1, job.model.num_layers) if mode == "full" else 0,
        schedule=schedule,
    )


def asked(seed: int) -> list[Layout]:
    """Layouts to ask about: ranked ones, ones out of memory, and random ones."""
    own, pick = book(seed), random.Random(seed)
    legal = [scored.layouts.layout(pick.randrange(len(scored))) for scored in (own.ranked, own.lost) if len(scored) for _ in range(2)]
    return legal + [random_layout(own.scenario, pick) for _ in range(3)]


@functools.cache
def answers(seed: int) -> list[WhyNot]:
    """What is answered, by the formulas, about the layouts of a random job; empty where its batch suits no replica count."""
    scenario = book(seed).scenario
    try:
        with by_formula():
            return [why_not.why_not(scenario, layout) for layout in asked(seed)]
    except InputError:
        return []


def axes_apart(one: Layout, other: Layout, num_layers: int) -> dict[str, float]:
    """The distance along each axis, in plain arithmetic."""
    apart = {axis: abs(math.log2(getattr(one, axis) / getattr(other, axis))) for axis in (*SIZES, "micro_batch_size", "data_parallel")}
    natural = all(layout.schedule == natural_schedule(layout.virtual_pipeline) for layout in (one, other))
    apart["schedule"] = float(one.schedule != other.schedule and not natural)
    apart["zero_stage"] = float(one.zero_stage != other.zero_stage)
    apart["recompute"] = float(one.recompute != other.recompute)
    if one.recompute == other.recompute == "full":
        whole = [
            layout.recompute_layers == -(-num_layers // (layout.pipeline_parallel * layout.virtual_pipeline)) for layout in (one, other)
        ]
        apart["recompute"] = 0.0 if all(whole) else abs(math.log2(one.recompute_layers / other.recompute_layers))
    return {axis: distance for axis, distance in apart.items() if distance}


def test_the_random_jobs_ask_about_every_kind_of_layout() -> None:
    every = [found for seed in SEEDS for found in answers(seed)]
    assert sum(found.feasible for found in every) > 15
    assert sum(not found.legal for found in every) > 15
    assert sum(found.legal and not found.feasible for found in every) > 5
    assert sum(found.difference is None and found.winner is not None for found in every) > 5


@pytest.mark.parametrize("seed", SEEDS)
def test_legal_and_feasible_are_what_the_rules_the_frameworks_and_the_memory_say(seed: int) -> None:
    scenario, ranked = book(seed).scenario, book(seed).ranked
    problem = without_floor(spec.problem(scenario))
    ranked_layouts = set(layouts_of(ranked))
    for found in answers(seed):
        accepted = any(not legality.broken(scenario.job_in(name), found.layout, name) for name in FRAMEWORKS)
        assert found.legal == (not broken_rules(found.layout, problem) and accepted)
        assert found.feasible == (found.layout in ranked_layouts)
        assert found.num_ranked == len(ranked)
        assert found.legal or found.explanation.broken_rules or all(found.explanation.refused_by[name] for name in FRAMEWORKS)


@pytest.mark.parametrize("seed", SEEDS)
def test_the_nearest_layout_works_and_none_that_works_is_nearer(seed: int) -> None:
    scenario, ranked = book(seed).scenario, book(seed).ranked
    num_layers = scenario.job.model.num_layers
    every = layouts_of(ranked)
    fitting = [row for row in range(len(every)) if ranked.verdict[row] == 0]
    for found in answers(seed):
        near = found.nearest
        assert (near is None) == (found.feasible or not every)
        if near is None:
            continue
        rows = fitting if found.legal and fitting else range(len(every))
        away = {row: round(sum(axes_apart(found.layout, every[row], num_layers).values()), 9) for row in rows}
        first = min(away, key=lambda row: (away[row], row))  # of equals the best ranked
        assert near.layout == every[first] and near.rank == first + 1
        assert near.distance == pytest.approx(away[first])
        assert near.verdict != OUT_OF_MEMORY and not broken_rules(near.layout, spec.problem(scenario))
        assert near.step_seconds == ranked.step_seconds[first]


@pytest.mark.parametrize("seed", SEEDS)
def test_the_rank_and_the_loss_against_the_winner_are_right(seed: int) -> None:
    ranked = book(seed).ranked
    every = layouts_of(ranked)
    for found in answers(seed):
        assert (found.rank is None) == (not found.feasible)
        if found.rank is None:
            continue
        assert found.winner is not None and found.difference is not None
        assert every[found.rank - 1] == found.layout
        assert found.winner.layout == every[0] == found.difference.a.layout
        lost = float(ranked.step_seconds[found.rank - 1] - ranked.step_seconds[0])
        assert found.difference.seconds == pytest.approx(lost, abs=1e-12)
        assert sum(part.difference for part in found.difference.step) == pytest.approx(lost, abs=1e-12)


@pytest.mark.parametrize("seed", SEEDS)
def test_the_best_single_change_changes_one_axis_and_no_other_one_ranks_better(seed: int) -> None:
    scenario, ranked = book(seed).scenario, book(seed).ranked
    num_layers = scenario.job.model.num_layers
    every = layouts_of(ranked)
    for found in answers(seed):
        if not found.feasible:
            assert found.neighbour is None
            continue
        single = [row for row, other in enumerate(every) if len(set(axes_apart(found.layout, other, num_layers)) - {"data_parallel"}) == 1]
        assert (found.neighbour is None) == (not single)
        if found.neighbour is not None and found.difference is not None:
            assert found.neighbour.rank == single[0] + 1
            gain = found.difference.b.step_seconds - float(ranked.step_seconds[single[0]])
            assert found.gain_seconds == pytest.approx(gain)


@pytest.mark.parametrize("seed", SEEDS)
def test_every_answer_can_be_printed_and_exported(seed: int) -> None:
    for found in answers(seed):
        page = rendered(why_not_page(found), to_file=True)
        assert max(len(line) for line in page.splitlines()) <= 100 and "nan" not in page
        content = json.loads(json.dumps(why_not_json(found), allow_nan=False))
        assert content["layout"] == found.layout.label and content["rank"] == found.rank
        verdict = "rank " if found.feasible else "out of memory: stage" if found.legal else "not legal:"
        assert verdict in page


def page_of(scenario: Scenario, label: str) -> tuple[WhyNot, str]:
    """The answer and its page, line breaks taken out."""
    found = why_not.why_not(scenario, complete_layout(scenario, label))
    return found, " ".join(rendered(why_not_page(found), to_file=True).split())


def test_an_illegal_layout_names_the_rule_its_numbers_the_legal_values_and_the_nearest(worked_example: Scenario) -> None:
    found, page = page_of(worked_example, "tp16-pp2-dp64")
    assert not found.legal and found.rank is None
    assert "tensor_group_in_node: tensor_parallel = 16 does not divide the 8 GPUs of a node" in page
    assert "legal tensor_parallel, all else kept: 1, 2, 4, 8" in page
    assert found.nearest is not None
    assert found.nearest.changes == ["tensor_parallel 16 -> 8", "data_parallel 64 -> 128"]
    assert found.nearest.distance == 2.0
    assert f"rank {found.nearest.rank:,} of {found.num_ranked:,}, step {found.nearest.step_seconds:.4g} s" in page
    assert "if it were legal: step" in page and "its tensor groups span 2 fast domains instead of 1" in page


def test_a_layout_that_the_chosen_framework_refuses_is_illegal_and_the_rule_is_told(worked_example: Scenario) -> None:
    narrow = dataclasses.replace(worked_example, choices=dataclasses.replace(worked_example.choices, framework="megatron"))
    found, page = page_of(narrow, "tp8-pp4-zero3")
    assert not found.legal
    assert (
        "megatron refuses it by M20: zero_stage 2 and 3 need pipeline_parallel = 1; here zero_stage = 3 with pipeline_parallel = 4" in page
    )
    assert "(legal zero_stage: 0, 1; legal pipeline_parallel: 1) torchtitan would accept it" in page
    assert found.nearest is not None and found.nearest.changes == ["zero_stage 3 -> 1"]
    assert why_not.why_not(worked_example, complete_layout(worked_example, "tp8-pp4-zero3")).legal


def test_sizes_that_do_not_multiply_still_have_a_nearest_layout(worked_example: Scenario) -> None:
    found, page = page_of(worked_example, "tp8-pp3")
    assert found.difference is None
    assert "tensor 8 x pipeline 3 x context 1 x data 85 = 2040, not num_gpus = 2048" in page
    assert found.nearest is not None and found.nearest.layout.pipeline_parallel in (2, 4)


def test_a_layout_out_of_memory_says_by_how_much_where_and_what_fits(worked_example: Scenario) -> None:
    found, page = page_of(worked_example, "tp2-pp2-dp512")
    assert found.legal and not found.feasible and found.shortage is not None
    assert found.shortage.stage == 0
    assert found.shortage.excess_bytes == pytest.approx(sum(found.shortage.parts.values()) - worked_example.job.gpu.memory_bytes)
    assert f"GiB of 79.2 usable, {found.shortage.excess_bytes / 2**30:.1f} GiB too much" in page
    assert next(iter(found.shortage.parts)) in page
    assert found.nearest is not None and found.nearest.verdict == 0
    assert "the nearest layout that fits: " in page


def test_another_stack_is_said_among_the_changes() -> None:
    scenario = make_scenario(Request(model="mixtral-8x7b", num_gpus=64))
    sharded = why_not.why_not(scenario, complete_layout(scenario, "tp2-pp2-ep8-zero1"))
    assert sharded.feasible
    around = why_not.Surroundings(scenario, sharded.layout, search(scenario).ranked, "megatron-core")
    rows = [row for row in range(200) if around.nearby(row).software != "megatron-core"]
    assert rows and all(around.nearby(row).changes[-1].startswith("software megatron-core -> ") for row in rows[:5])


def test_the_winner_has_nothing_to_lose(worked_example: Scenario) -> None:
    label = search(worked_example).ranked.layouts.layout(0).label
    found, page = page_of(worked_example, label)
    assert found.rank == 1 and found.difference is not None and found.difference.seconds == 0
    assert found.neighbour is not None and found.gain_seconds <= 0
    assert "it is the first of the ranking" in page and "every single change loses" in page


def test_a_feasible_layout_is_told_its_rank_and_where_its_seconds_go(worked_example: Scenario) -> None:
    found, page = page_of(worked_example, "tp8-pp4-dp64-zero1-mb1")
    assert found.feasible and found.rank is not None and found.rank > 1
    assert f"rank {found.rank:,} of {found.num_ranked:,}" in page and "slower than the first" in page
    assert "step, seconds" in page and "filling and draining" in page
    assert found.neighbour is not None and found.gain_seconds > 0
    assert f"best single change gains {found.gain_seconds:.3g} s: {', '.join(found.neighbour.changes)}" in page


def test_pins_are_lifted_and_those_that_exclude_the_layout_are_told(worked_example: Scenario) -> None:
    pinned = dataclasses.replace(worked_example, choices=dataclasses.replace(worked_example.choices, pins={"tensor_parallel": (4, 8)}))
    found, page = page_of(pinned, "tp2-pp8-full")
    free = why_not.why_not(worked_example, complete_layout(worked_example, "tp2-pp8-full"))
    assert found.outside_pins == ["tensor_parallel = 2 is not among the pinned 4, 8"] and found.outside_pins[0] in page
    assert found.rank == free.rank and found.num_ranked == free.num_ranked and free.outside_pins == []


def test_where_nothing_fits_there_is_no_nearest() -> None:
    scenario = make_scenario(Request(model="405b", num_gpus=16))
    with pytest.raises(NoLayoutFits):
        search(scenario)
    found, page = page_of(scenario, "tp4-pp4")
    assert found.legal and not found.feasible and found.nearest is None and found.winner is None
    assert "no layout of this model fits these GPUs at all" in page
    assert not why_not.why_not(scenario, complete_layout(scenario, "tp16")).legal


def test_one_question_is_one_search(worked_example: Scenario, monkeypatch: pytest.MonkeyPatch) -> None:
    scenarios: list[Scenario] = []

    def counted(scenario: Scenario) -> object:
        scenarios.append(scenario)
        return search(scenario)

    monkeypatch.setattr(why_not, "search", counted)
    for label in ("tp16-pp2", "tp8-pp4", "tp1-pp4"):
        scenarios.clear()
        why_not.why_not(worked_example, complete_layout(worked_example, label))
        assert len(scenarios) == 1


def test_the_same_question_gives_the_same_bytes(worked_example: Scenario) -> None:
    first, second = (page_of(worked_example, "tp8-pp8-vp2")[1] for _ in range(2))
    assert first == second


def test_a_label_that_cannot_be_read_is_bad_input(worked_example: Scenario) -> None:
    with pytest.raises(InputError, match="'tq8' is no part of a layout label"):
        why_not.why_not(worked_example, complete_layout(worked_example, "tq8"))
    assert complete_layout(worked_example, "tp8").data_parallel == 256


def test_the_pick_of_a_search_is_the_first_under_the_split_that_the_search_gave_it() -> None:
    request = Request(model_shape="layers=13,hidden=4096,heads=32,vocab=512000", num_gpus=16, global_batch_size=32, pipeline_parallel=(4,))
    scenario = make_scenario(request)
    shortlist = refined(search(scenario), 10)
    label = shortlist.rows.layouts.layout(0).label
    assert shortlist.splits[0] is not None
    found = why_not.why_not(scenario, complete_layout(scenario, label))
    pinned = explain(scenario, complete_layout(scenario, label))
    assert pinned.split is not None and pinned.split.layers_per_stage == shortlist.splits[0].layers_per_stage
    assert pinned.step is not None and pinned.step.total[0] == pytest.approx(shortlist.rows.step_seconds[0], rel=1e-12)
    assert found.difference is not None and found.difference.b.step_seconds == pytest.approx(shortlist.rows.step_seconds[0], rel=1e-12)
