"""What surrounds the steps: failures, checkpoints, goodput, days and money."""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from planner import operations as ops
from planner.catalogue import load
from planner.catalogue.schema import Operations
from planner.refine import shortlist_of
from planner.report.frame import shortlist_frame
from planner.report.operations_text import operations_json, operations_lines
from planner.request import Request, make_scenario
from planner.scenario import Scenario
from planner.search import search
from planner.textbook import figures
from tests.conftest import Outcome

STALLS = st.floats(0.5, 600.0)
MTBFS = st.floats(600.0, 1e7)
RESTARTS = st.floats(0.0, 3600.0)


def scenario_of(**wishes: Any) -> Scenario:
    """70B on 2,048 H100 over 1.4T tokens, with some wishes."""
    return make_scenario(Request(**{"model": "70b", "num_gpus": 2048, "training_tokens": 1.4e12, **wishes}))


def least(cost: Any, low: float, high: float) -> float:
    """Where a function of one minimum is least, by golden section on a logarithmic axis."""
    a, b, ratio = math.log(low), math.log(high), (math.sqrt(5.0) - 1.0) / 2.0
    for _ in range(200):
        c, d = b - ratio * (b - a), a + ratio * (b - a)
        a, b = (a, d) if cost(math.exp(c)) < cost(math.exp(d)) else (c, b)
    return math.exp((a + b) / 2.0)


@given(stall=STALLS, mtbf=MTBFS, restart=RESTARTS)
def test_youngs_interval_minimises_the_first_order_waste(stall: float, mtbf: float, restart: float) -> None:
    found = least(lambda interval: ops.first_order_waste(interval, stall, mtbf, restart), 0.01, 1e9)
    assert ops.young_interval(stall, mtbf) == pytest.approx(found, rel=1e-5)


@given(stall=STALLS, mtbf=MTBFS, restart=RESTARTS)
def test_dalys_interval_loses_hardly_any_goodput(stall: float, mtbf: float, restart: float) -> None:
    """Beside the interval that is best by the complete model; Daly states the form for C < 2 M, best where C << M."""

    def lost(interval: float) -> float:
        shares = ops.shares_of(interval=interval, stall=stall, mtbf=mtbf, restart=restart, behind=0.0, evaluation=0.0)
        return -math.log(shares.training)

    best = least(lost, 1e-3, 1e9)
    assert lost(ops.daly_interval(stall, mtbf)) <= lost(best) * 1.001 + 1e-9


@given(
    interval=st.floats(1.0, 1e6),
    stall=STALLS,
    mtbf=st.one_of(MTBFS, st.just(math.inf)),
    restart=RESTARTS,
    behind=st.floats(0.0, 600.0),
    evaluation=st.floats(0.0, 1.0),
)
def test_the_shares_of_the_time_sum_to_one_and_none_is_negative(**times: float) -> None:
    shares = vars(ops.shares_of(**times))
    assert sum(shares.values()) == pytest.approx(1.0) and min(shares.values()) >= -1e-12


def test_dalys_complete_model_is_what_a_simulation_of_failures_finds() -> None:
    interval, stall, mtbf, restart = 900.0, 60.0, 5000.0, 300.0
    random = np.random.default_rng(7)
    wall, segments = 0.0, 20_000
    for _ in range(segments):
        while True:
            fails_in = random.exponential(mtbf)
            if fails_in >= interval + stall:
                wall += interval + stall
                break
            wall += fails_in
            while (again := random.exponential(mtbf)) < restart:
                wall += again
            wall += restart
    shares = ops.shares_of(interval=interval, stall=stall, mtbf=mtbf, restart=restart, behind=0.0, evaluation=0.0)
    assert shares.training == pytest.approx(segments * interval / wall, rel=0.01)


@given(rate=st.floats(1e-3, 100.0), num_gpus=st.integers(1, 200_000))
def test_goodput_falls_with_the_number_of_gpus_and_with_the_rate_of_failures(rate: float, num_gpus: int) -> None:
    scenario = scenario_of(interruptions_per_1000_gpu_days=rate, num_gpus=num_gpus)
    own = ops.upkeep_of(scenario.operations, scenario.job).goodput
    more = dataclasses.replace(scenario.job, num_gpus=2 * num_gpus)
    worse = dataclasses.replace(scenario.operations, interruptions_per_1000_gpu_days=2 * rate)
    assert ops.upkeep_of(scenario.operations, more).goodput <= own * (1 + 1e-9)
    assert ops.upkeep_of(worse, scenario.job).goodput <= own


def test_a_checkpoint_behind_the_training_never_costs_more_time() -> None:
    for name in load.names(Operations):
        for model, num_gpus in (("8b", 64), ("70b", 2048), ("405b", 16384)):
            waiting = scenario_of(model=model, num_gpus=num_gpus, operations=name, asynchronous_checkpoints=False)
            behind = scenario_of(model=model, num_gpus=num_gpus, operations=name, asynchronous_checkpoints=True)
            stalls = [ops.upkeep_of(s.operations, s.job) for s in (waiting, behind)]
            assert stalls[1].goodput >= stalls[0].goodput, (name, model)
            assert stalls[1].interval_seconds >= stalls[1].write_seconds


def test_llama_3_kept_its_gpus_training_for_more_than_nine_tenths_of_the_time() -> None:
    """Published: 16,384 H100, an interruption every three hours, more than 90 % effective training time."""
    scenario = scenario_of(model="405b", num_gpus=16384, operations="llama-3")
    upkeep = ops.upkeep_of(scenario.operations, scenario.job)
    assert upkeep.mtbf_seconds / 3600 == pytest.approx(54 * 24 / 419, rel=1e-3)
    assert 0.90 <= upkeep.goodput <= 0.95


def test_the_rates_are_those_of_the_published_counts() -> None:
    published = {
        "today": 419 / (54 * 16384),
        "llama-3": 419 / (54 * 16384),
        "opt-175b": 105 / (60 * 992),
        "rsc-1": 6.5 / 1000 / 8,
    }
    for name, rate in published.items():
        assert load.find(Operations, name).interruptions_per_1000_gpu_days == pytest.approx(1000 * rate, rel=1e-3)


def test_blooms_checkpoint_has_the_published_size() -> None:
    """2.3 TiB for 176B parameters: bf16 weights, fp32 master weights and moments."""
    scenario = make_scenario(Request(model="bloom-176b", num_gpus=384, gpu="a100", software="megatron-deepspeed-2022"))
    assert ops.checkpoint_bytes(scenario.job_in("megatron")) == pytest.approx(2.3 * 2**40, rel=0.03)


def test_the_worked_example_of_70b_on_2048_h100() -> None:
    """8.4 days at 40 % MFU, 8 % more for attention, a checkpoint of about 1 TB every 20 to 40 minutes, 10 to 11 days on a new cluster."""
    scenario = scenario_of()
    layout = shortlist_of(search(scenario), 1).rows.layouts.layout(0)
    napkin = next(figure.value for figure in figures(scenario, layout) if figure.name == "days at 40% MFU")
    assert napkin == pytest.approx(8.4, abs=0.1)
    upkeep = ops.upkeep_of(scenario.operations, scenario.job)
    assert 0.95e12 < upkeep.checkpoint_bytes < 1.15e12
    assert 20 * 60 < upkeep.interval_seconds < 40 * 60
    with_attention = napkin * 1.08 * 86400 / (scenario.training_tokens / scenario.job.tokens_per_step)
    new = scenario_of(operations="opt-175b")
    run = ops.run_of(new, with_attention, ops.upkeep_of(new.operations, new.job).goodput)
    assert 10.0 < run.total_days < 11.0


def test_days_money_and_energy_agree_with_hand_arithmetic() -> None:
    scenario = scenario_of(price_usd_per_hour=3.0, power_usage_effectiveness=1.2)
    run = ops.run_of(scenario, 2.0, 0.8)
    steps = 1.4e12 / (1024 * 4096)
    assert run.training_days == pytest.approx(steps * 2.0 / 86400)
    assert run.total_days == pytest.approx(run.training_days / 0.8)
    assert run.gpu_hours == pytest.approx(steps * 2.0 / 3600 / 0.8 * 2048)
    assert run.cost_usd == pytest.approx(3.0 * run.gpu_hours)
    assert run.energy_kwh == pytest.approx(run.gpu_hours * 0.7 * 1.2)
    assert ops.usd_per_billion_tokens(scenario, 2.0, 0.8) == pytest.approx(run.cost_usd / 1400)


def test_the_shortlists_columns_are_those_figures() -> None:
    scenario = scenario_of()
    row = shortlist_frame(scenario, shortlist_of(search(scenario), 1)).iloc[0]
    run = ops.run_of(scenario, row["step_seconds"], row["goodput"])
    for column in ("training_days", "total_days", "gpu_hours", "cost_usd", "energy_kwh"):
        assert row[column] == pytest.approx(float(getattr(run, column)))


@given(mean=st.floats(0.0, 2000.0), probability=st.floats(0.01, 0.999))
def test_so_many_spares_suffice_and_one_fewer_do_not(mean: float, probability: float) -> None:
    def reached(count: int) -> float:
        """P(X <= count) of a Poisson variable."""
        terms = (math.exp(k * math.log(mean) - mean - math.lgamma(k + 1)) if mean else float(k == 0) for k in range(count + 1))
        return math.fsum(terms)

    spares = ops.spare_nodes(mean, probability)
    slack = 0.01 if mean > 500 else 1e-9  # a normal limit there
    assert reached(spares) >= probability - slack
    assert spares == 0 or reached(spares - 1) < probability + slack


def test_every_assumption_is_printed_and_overridable(command: Any) -> None:
    job = ("explain", "--model", "8b", "--gpus", "64", "--tokens", "1T", "--layout", "dp64-zero1")
    own = ("--failures", "2", "--restart", "20", "--storage", "0.5", "--checkpoint-every", "30", "--evaluation", "0.1", "--price", "4")
    done: Outcome = command(*job, *own)
    page = " ".join(done.out.split())
    assert done.code == 0
    for words in ("2 per 1,000 GPU-days", "back after 20", "0.5 GB/s per node", "every 30 min", "evaluation 8.9%", "at $4.00"):
        assert words in page, words
    for other in load.names(Operations):
        assert f"'{other}'" in page


def test_without_failures_nothing_is_lost() -> None:
    scenario = scenario_of(interruptions_per_1000_gpu_days=0.0, evaluation_share=0.0)
    upkeep = ops.upkeep_of(scenario.operations, scenario.job)
    assert upkeep.goodput == 1.0 and upkeep.spare_nodes == 0
    page = " ".join(operations_lines(scenario, scenario.job, 2.0)) + str(operations_json(scenario, scenario.job, 2.0))
    assert "inf" not in page and "nan" not in page and "none assumed" in page
