"""The workload's advice agrees with the papers it cites, and every size of a ramp can be launched."""

from __future__ import annotations

import dataclasses
import json
import math

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from planner import spec
from planner.advice import flags
from planner.cost.estimate import memory_of, time_of
from planner.explain import complete_layout, facts
from planner.fewest import with_batch
from planner.frameworks.legality import NO_STACK, broken, framework_of
from planner.ramp import NUM_SIZES, RAMP_SHARE, RAMP_TOKENS, ladder, plain, ramp_of, stack_of
from planner.refine import costing_job
from planner.report.workload_text import workload_json, workload_lines
from planner.request import Request, make_scenario
from planner.scenario import OPTIMIZERS, Scenario
from planner.search import enumerate_layouts
from planner.workload import (
    RATE_RULES,
    USUAL_CRITICAL_TOKENS,
    batch_guide,
    compute_optimal_batch_tokens,
    critical_batch_tokens,
    learning_rate,
    peak_learning_rate,
    training_flops,
    warm_up_steps,
)
from solver import check
from solver.layout import Layout, columns_of
from tests.builders import random_scenario, without_floor

DEEPSEEK_67B = Request(
    model_shape="layers=95,hidden=8192,heads=64,kv_heads=8,ffn=22016,vocab=102400",
    num_gpus=1024,
    global_batch_size=4608,
    training_tokens=2e12,
)
"""Source: DeepSeek LLM (arXiv 2401.02954), tables 2 and 3."""
LLAMA_3 = Request(model="405b", num_gpus=16384, seq_len=8192, global_batch_size=2048, training_tokens=15.6e12)
"""Source: Llama 3 (arXiv 2407.21783), section 3.4.1: 16M tokens per step in the end."""


def test_the_fit_gives_the_batch_and_the_learning_rate_of_deepseek_67b() -> None:
    scenario = make_scenario(DEEPSEEK_67B)
    guide, rate = batch_guide(scenario), learning_rate(scenario)
    assert guide is not None and rate.peak is not None
    assert guide.compute_optimal_tokens == pytest.approx(4608 * 4096, rel=0.1)
    assert rate.peak == pytest.approx(3.2e-4, rel=0.05)


def test_the_fits_give_what_their_papers_tabulate() -> None:
    assert critical_batch_tokens(1e12) == pytest.approx(16_500 * 2048, rel=0.01)
    assert compute_optimal_batch_tokens(1e20) == pytest.approx(1e6, rel=0.05)
    assert peak_learning_rate(1e20) == pytest.approx(9.9e-4, rel=0.02)


@pytest.mark.parametrize("request_", [DEEPSEEK_67B, LLAMA_3], ids=["deepseek-67b", "llama-3-405b"])
def test_published_batches_lie_between_the_optimal_and_the_critical(request_: Request) -> None:
    guide = batch_guide(make_scenario(request_))
    assert guide is not None and guide.place == "between the optimal and the critical"
    assert guide.optimal_tokens < guide.batch_tokens < guide.critical_tokens


def test_the_compute_of_a_run_is_six_times_its_inner_parameters_and_attention(worked_example: Scenario) -> None:
    layer = 2 * 8192**2 + 2 * 8192 * 1024 + 3 * 8192 * 28672
    by_hand = (6 * 80 * layer + 12 * 80 * 8192 * 4096) * 1.4e12
    assert training_flops(worked_example) == pytest.approx(by_hand, rel=1e-3)


def test_the_worked_example_is_as_by_hand(worked_example: Scenario) -> None:
    guide = batch_guide(worked_example)
    assert guide is not None
    assert guide.batch_tokens == 1024 * 4096
    assert guide.critical_tokens == pytest.approx(0.0471 * math.exp(0.462 * math.log(1.4e12)) * 2048)
    assert guide.extra_tokens == pytest.approx(guide.batch_tokens / guide.critical_tokens)
    assert warm_up_steps(worked_example) == pytest.approx((1.4e12 / 2**22 / 1000, 1.4e12 / 2**22 / 100))


@given(tokens=st.floats(1e8, 1e14), more=st.floats(1.01, 10.0))
def test_more_data_bears_a_larger_batch_and_the_critical_lies_above_the_optimal(tokens: float, more: float) -> None:
    guides = [batch_guide(make_scenario(dataclasses.replace(LLAMA_3, training_tokens=t))) for t in (tokens, tokens * more)]
    few, many = (guide for guide in guides if guide is not None)
    assert few.critical_tokens < many.critical_tokens and few.optimal_tokens < many.optimal_tokens
    assert few.optimal_tokens < few.critical_tokens


def test_every_optimizer_has_a_rule_and_four_times_the_batch_doubles_the_rate_of_adam() -> None:
    assert set(RATE_RULES) == set(OPTIMIZERS)
    wishes = Request(model="8b", num_gpus=8, global_batch_size=4096)
    factors = {name: learning_rate(make_scenario(dataclasses.replace(wishes, optimizer=name))).factor for name in RATE_RULES}
    assert factors == {"adam": 2.0, "adam-8bit": 2.0, "muon": 2.0, "sgd-momentum": 4.0}


def test_only_adam_gets_the_absolute_rate_and_only_with_training_tokens() -> None:
    wishes = Request(model="8b", num_gpus=8, training_tokens=1e12)
    known = {name for name in RATE_RULES if learning_rate(make_scenario(dataclasses.replace(wishes, optimizer=name))).peak}
    assert known == {"adam", "adam-8bit"}
    assert learning_rate(make_scenario(Request(model="8b", num_gpus=8))).peak is None


@pytest.mark.parametrize(("tokens", "flagged"), [(1.4e12, False), (1e9, True), (None, False)])
def test_the_check_on_large_batches_follows_the_guide(tokens: float | None, flagged: bool) -> None:
    scenario = make_scenario(Request(model="8b", num_gpus=8, training_tokens=tokens))
    assert scenario.job.tokens_per_step < USUAL_CRITICAL_TOKENS
    assert ("large batch" in flags(facts(scenario, scenario.job, complete_layout(scenario, "dp8-zero1")))) == flagged


def one_layout(scenario: Scenario, seed: int) -> Layout | None:
    """Some layout that a framework in play runs, whatever memory it needs; None where there is none."""
    layouts = next(enumerate_layouts(without_floor(spec.problem(scenario))).pieces(1 << 40), None)
    for row in range(0 if layouts is None else min(len(layouts), 40)):
        assert layouts is not None
        layout = layouts.layout((row * 7919 + seed * 104_729) % len(layouts))
        if stack_of(scenario, layout) >= NO_STACK:
            return layout
    return None


def launchable(scenario: Scenario, layout: Layout, batch: int, framework: str) -> bool:
    """Whether the solver's rules and the framework's hold in a scenario made anew with that batch."""
    other = with_batch(scenario, batch)
    legal = not check.broken_rules(layout, without_floor(spec.problem(other)))
    return legal and (framework == "none" or not broken(other.job_in(framework), layout, framework))


def sample(seed: int) -> tuple[Scenario, Layout] | None:
    """A random scenario with a batch that leaves several micro-batches, and a layout of it."""
    framework = ("any", "none", "megatron", "torchtitan", "deepspeed")[seed % 5]
    scenario = random_scenario(seed, global_batch_size=(16, 24, 48, 60)[seed % 4], framework=framework)
    layout = one_layout(scenario, seed)
    return None if layout is None else (scenario, layout)


@settings(max_examples=40, deadline=None)
@given(seed=st.integers(0, 100_000))
def test_every_size_of_a_ramp_can_be_launched_in_equal_increments(seed: int) -> None:
    found = sample(seed)
    ramp = ramp_of(*found) if found else None
    if found is None or ramp is None:
        return
    scenario, layout = found
    assert ramp.sizes[-1] == scenario.job.global_batch_size
    assert {later - earlier for earlier, later in zip(ramp.sizes, ramp.sizes[1:], strict=False)} == {ramp.increment}
    assert NUM_SIZES * ramp.start >= ramp.sizes[-1]
    assert ramp.framework == framework_of(stack_of(scenario, layout))
    assert all(launchable(scenario, ramp.layout, size, ramp.framework) for size in ramp.sizes)


@settings(max_examples=40, deadline=None)
@given(seed=st.integers(0, 100_000))
def test_there_is_no_ramp_only_where_no_smaller_batch_of_an_eighth_or_more_is_legal(seed: int) -> None:
    found = sample(seed)
    if found is None or ramp_of(*found) is not None:
        return
    scenario, layout = found
    framework, full = framework_of(stack_of(scenario, layout)), scenario.job.global_batch_size
    assert not [batch for batch in range(-(-full // NUM_SIZES), full) if launchable(scenario, layout, batch, framework)]


@settings(max_examples=25, deadline=None)
@given(seed=st.integers(0, 100_000))
def test_a_ramp_fits_where_the_layout_fits_and_saves_no_time(seed: int) -> None:
    found = sample(seed)
    ramp = ramp_of(*found) if found else None
    if found is None or ramp is None:
        return
    scenario, layout = found
    asked, own, x = costing_job(scenario, layout)[0], costing_job(scenario, ramp.layout)[0], columns_of([ramp.layout])
    verdict = int(memory_of(asked, columns_of([layout])).verdict[0])
    found_at = [memory_of(dataclasses.replace(own, global_batch_size=size), x) for size in ramp.sizes]
    assert all(int(memory.verdict[0]) <= verdict for memory in found_at)
    assert all(memory.need_bytes[0] <= found_at[-1].need_bytes[0] * (1 + 1e-9) for memory in found_at)
    if ramp.layout == layout:
        assert ramp.extra_seconds >= -1e-9 * ramp.samples


def test_the_cost_of_a_ramp_is_as_by_hand(worked_example: Scenario) -> None:
    layout = complete_layout(worked_example, "tp8-pp4-vp5-dp64-zero1-mb1")
    ramp = ramp_of(worked_example, layout)
    assert ramp is not None
    assert ramp.flag == f"--rampup-batch-size 256 256 {round(RAMP_SHARE * 1.4e12 / 4096)}"
    job, x = costing_job(worked_example, layout)[0], columns_of([layout])
    steps = {size: float(time_of(dataclasses.replace(job, global_batch_size=size), x).total[0]) for size in (256, 512, 768, 1024)}
    third = ramp.samples / 3
    by_hand = third / 256 * steps[256] + third / 512 * steps[512] + third / 768 * steps[768] - ramp.samples / 1024 * steps[1024]
    assert ramp.extra_seconds == pytest.approx(by_hand)


def test_a_batch_that_just_fills_interleaved_stages_ramps_under_plain_1f1b(worked_example: Scenario) -> None:
    layout = complete_layout(worked_example, "tp4-pp4-vp20-dp128-zero1-mb2")
    ramp = ramp_of(worked_example, layout)
    assert ramp is not None and ramp.layout == plain(worked_example, layout)
    assert ramp.sizes == (256, 512, 768, 1024)
    assert "no batch below 4 micro-batches" in workload_lines(worked_example, layout)[-1]


def test_one_micro_batch_per_replica_leaves_no_ramp() -> None:
    scenario = make_scenario(Request(model="8b", num_gpus=64, global_batch_size=64))
    layout = complete_layout(scenario, "dp64-zero3-mb1")
    assert ramp_of(scenario, layout) is None
    assert workload_json(scenario, layout)["ramp"] is None
    assert "no batch below 1 micro-batch per replica is legal" in workload_lines(scenario, layout)[-1]


def test_without_training_tokens_a_ramp_takes_blooms() -> None:
    scenario = make_scenario(Request(model="8b", num_gpus=8))
    ramp = ramp_of(scenario, complete_layout(scenario, "dp8-zero1"))
    assert ramp is not None and ramp.tokens == pytest.approx(RAMP_TOKENS, rel=1e-6)


@given(full=st.integers(1, 5000), unit=st.integers(1, 64), period=st.integers(1, 9), least=st.integers(0, 20))
def test_a_ladder_climbs_legal_rungs_only(full: int, unit: int, period: int, least: int) -> None:
    full *= unit

    def legal(size: int) -> bool:
        return size % (unit * period) == 0 and size >= least * unit

    sizes = ladder(full, unit, legal)
    assert not sizes or (sizes[-1] == full and len(sizes) > 1 and all(legal(size) for size in sizes[:-1]))
    if full % (unit * period) == 0 and full // (unit * period) > 1 and least == 0:
        assert sizes


def test_the_lines_name_every_number_and_assumption(worked_example: Scenario) -> None:
    text = "\n".join(workload_lines(worked_example, complete_layout(worked_example, "tp8-pp4-dp64-zero1-mb1")))
    for words in (
        "1,024 sequences",
        "4.19M is between the optimal and the critical batch: optimal 2.81M, critical 39.4M",
        "takes 11% more tokens",
        "guides, no laws",
        "sqrt(batch ratio) = 1.00",
        "334 to 3,338 steps",
        "clip the global gradient norm at 1.0",
        "128 to 1,024 sequences by 128",
        "--rampup-batch-size 128 128 10253906",
    ):
        assert words in text


def test_without_training_tokens_the_lines_say_what_is_missing() -> None:
    text = "\n".join(workload_lines(make_scenario(Request(model="8b", num_gpus=8))))
    assert text.count("give --tokens") == 2 and "ramp" not in text


def test_the_data_are_plain_and_hold_the_numbers_of_the_lines(worked_example: Scenario) -> None:
    data = json.loads(json.dumps(workload_json(worked_example, complete_layout(worked_example, "tp8-pp4-dp64-zero1-mb1"))))
    assert data["tokens_per_step"] == 1 << 22
    assert data["batch_guide"]["place"] == "between the optimal and the critical"
    assert data["ramp"]["sizes"] == [128 * n for n in range(1, 9)]
