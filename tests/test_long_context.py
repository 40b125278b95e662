"""The phase with long sequences is a search of its own that keeps the tokens per step, the framework and most pins."""

from __future__ import annotations

import dataclasses
import functools
import json
import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from planner.errors import InputError
from planner.explain import complete_layout
from planner.long_context import LONG_SHARE, NEARBY, LongPhase, attention_share, batch_near, long_phase, read_phase
from planner.operations import run_of, upkeep_of
from planner.refine import shortlist_of
from planner.report.workload_text import long_phase_json, long_phase_lines
from planner.request import Request, make_scenario
from planner.scenario import Scenario
from planner.search import search

SMALL = Request(model="8b", num_gpus=64, training_tokens=1e12, framework="megatron")
FIRST = "tp1-pp2-vp5-dp32-zero1-mb2"


@functools.cache
def phase_of(request: Request, label: str, seq_len: int, tokens: float = 0.0) -> LongPhase:
    scenario = make_scenario(request)
    return long_phase(scenario, complete_layout(scenario, label), seq_len=seq_len, tokens=tokens)


@given(
    batch=st.integers(1, 20_000), seq_len=st.sampled_from((512, 2048, 4096, 8192)), longer=st.integers(2, 300), gpus=st.integers(1, 4096)
)
def test_the_tokens_per_step_stay_or_come_as_near_as_stated(batch: int, seq_len: int, longer: int, gpus: int) -> None:
    tokens, long_seq = batch * seq_len, seq_len * longer
    found = batch_near(tokens, long_seq, gpus)
    exact = tokens / long_seq
    if exact.is_integer():
        assert found * long_seq == tokens
    assert found >= 1
    assert max(1, math.floor(exact)) <= found <= math.ceil(exact) or abs(found / exact - 1) <= NEARBY


@pytest.mark.parametrize("seq_len", [32_768, 131_072])
def test_the_worked_example_turns_to_context_parallelism_and_keeps_its_tokens_per_step(worked_example: Scenario, seq_len: int) -> None:
    phase = long_phase(worked_example, complete_layout(worked_example, "tp8-pp4-vp5-dp64-zero1-mb1"), seq_len=seq_len)
    assert phase.best is not None
    assert phase.scenario.job.tokens_per_step == worked_example.job.tokens_per_step
    assert phase.scenario.training_tokens == pytest.approx(LONG_SHARE * 1.4e12)
    assert phase.best.layout.context_parallel > 1
    assert phase.speed < 1.0
    assert attention_share(phase.scenario) > attention_share(worked_example)


def test_the_phase_is_what_a_search_with_those_sequences_finds() -> None:
    phase = phase_of(SMALL, FIRST, 131_072)
    alone = make_scenario(dataclasses.replace(SMALL, seq_len=131_072, global_batch_size=32, training_tokens=LONG_SHARE * 1e12))
    shortlist = shortlist_of(search(alone), 1)
    assert phase.best is not None
    assert phase.best.layout == shortlist.rows.layouts.layout(0)
    step = float(shortlist.rows.step_seconds[0])
    assert phase.best.step_seconds == pytest.approx(step)
    run = run_of(alone, step, upkeep_of(alone.operations, alone.job_in("megatron")).goodput)
    assert phase.run.cost_usd == pytest.approx(run.cost_usd) and phase.run.total_days == pytest.approx(run.total_days)


def test_longer_sequences_cost_more_per_token() -> None:
    short, long = (phase_of(SMALL, FIRST, seq_len, 50e9) for seq_len in (32_768, 131_072))
    assert float(short.short_run.cost_usd) < float(short.run.cost_usd) < float(long.run.cost_usd)
    assert float(short.short_run.cost_usd) == pytest.approx(float(long.short_run.cost_usd))


def test_the_phase_keeps_the_framework_of_the_first_layout_where_any_would_do() -> None:
    wishes = dataclasses.replace(SMALL, framework="any")
    assert phase_of(wishes, FIRST, 32_768).scenario.choices.framework == "megatron"
    assert phase_of(wishes, "dp64-zero3-mb1-full", 32_768).scenario.choices.framework == "megatron"
    assert phase_of(wishes, "pp2-dp32-zero0-mb1-gpipe", 32_768).scenario.choices.framework == "torchtitan"


def test_pins_of_context_and_data_parallel_are_dropped_with_the_targets_and_the_others_kept() -> None:
    wishes = dataclasses.replace(SMALL, tensor_parallel=(4,), context_parallel=(1,), data_parallel=(16,), max_days=400.0)
    phase = phase_of(wishes, "tp4-dp16-zero1-mb1", 131_072)
    assert phase.freed == ("context_parallel", "data_parallel")
    assert phase.best is not None and phase.best.layout.tensor_parallel == 4 and phase.best.layout.context_parallel > 1
    assert phase.scenario.choices.max_days == 0.0
    assumed = long_phase_lines(phase)[-1]
    assert "pins of context_parallel and data_parallel dropped" in assumed and "targets" in assumed


def test_a_phase_that_fits_nowhere_says_what_came_nearest() -> None:
    phase = phase_of(Request(model="70b", num_gpus=8), "tp8-full", 131_072)
    assert phase.best is None
    head, reason = long_phase_lines(phase)
    assert "131,072 after 4,096" in head and "needs" in reason and "of 79.2 GiB" in reason
    assert long_phase_json(phase)["layout"] is None


def test_learned_positions_forbid_longer_sequences() -> None:
    phase = phase_of(Request(model="gpt-3-175b", num_gpus=1024, seq_len=2048), "tp8-pp8", 32_768)
    assert phase.best is None and "2,048 learned positions" in phase.reason


def test_a_phase_without_longer_sequences_is_refused() -> None:
    with pytest.raises(InputError, match=r"longer than workload\.seq_len = 4096"):
        phase_of(SMALL, FIRST, 4096)


@pytest.mark.parametrize(
    ("text", "found"), [("32k", (32_768, 0.0)), ("131072", (131_072, 0.0)), ("128K:800B", (131_072, 8e11)), ("0.5k:1e9", (512, 1e9))]
)
def test_a_length_in_k_is_binary_and_tokens_are_decimal(text: str, found: tuple[int, float]) -> None:
    assert read_phase(text) == found


@pytest.mark.parametrize("text", ["", "k", "128k:", "1.0001k", "long", "128k:800B:2"])
def test_what_is_no_phase_is_refused(text: str) -> None:
    with pytest.raises(InputError):
        read_phase(text)


def test_lines_and_data_agree() -> None:
    phase = phase_of(SMALL, FIRST, 131_072)
    data = json.loads(json.dumps(long_phase_json(phase)))
    text = "\n".join(long_phase_lines(phase))
    assert data["global_batch_size"] == 32 and "32 sequences, 4.19M tokens per step (as before)" in text
    assert f"{data['mfu']:.1%}" in text and f"{data['speed']:.0%}" in text
    assert phase.best is not None and data["layout"] == phase.best.layout.label


def test_without_tokens_there_are_no_days() -> None:
    phase = phase_of(dataclasses.replace(SMALL, training_tokens=None), FIRST, 32_768)
    assert phase.scenario.training_tokens == 0.0
    assert "for days and money" in "\n".join(long_phase_lines(phase)) and long_phase_json(phase)["run"] is None
