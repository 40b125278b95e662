"""One property at a time: what it does to the pick, and to the best of a new search."""

from __future__ import annotations

import dataclasses
import functools
import json
import math
from collections.abc import Callable
from io import StringIO
from pathlib import Path

import pandas as pd
import pytest

from planner.explain import complete_layout
from planner.report.sensitivity_text import change, sensitivity_frame
from planner.request import Request, make_scenario
from planner.scenario import Scenario
from planner.search import search
from planner.sensitivity import KNOBS, Knob, Point, Sensitivity, sensitivity
from tests.conftest import Outcome

Command = Callable[..., Outcome]
RATES = tuple(knob for knob in KNOBS if knob.rate)
WISHES = ("--model", "8b", "--gpus", "16", "--global-batch", "256", "--framework", "megatron", "--vp", "1,2", "--mb", "1,2")


@functools.cache
def scenario() -> Scenario:
    """A job on two nodes, with few micro-batches and chunks to choose from."""
    request = Request(
        model="8b", num_gpus=16, global_batch_size=256, framework="megatron", virtual_pipeline=(1, 2), micro_batch_size=(1, 2)
    )
    return make_scenario(request)


@functools.cache
def outcome(factors: tuple[float, ...] = (), label: str = "") -> Sensitivity:
    """The sensitivity of the job."""
    return sensitivity(scenario(), complete_layout(scenario(), label) if label else None, factors)


def points(found: Sensitivity, name: str) -> list[Point]:
    """The points of one knob."""
    return [point for point in found.points if point.knob == name]


def test_a_factor_of_one_changes_nothing() -> None:
    found = outcome((1.0,))
    assert len(found.points) == len(KNOBS)
    for point in found.points:
        assert point.pick == found.pick and point.best == found.best and not point.note
        assert found.pick is not None and point.pick is not None and change(point.pick, found.pick) == 0.0


def test_the_pick_is_the_first_of_the_search_unless_a_layout_is_named() -> None:
    best = search(scenario()).ranked
    assert outcome().layout == best.layouts.layout(0) and outcome().best.step_seconds == best.step_seconds[0]
    named = outcome((2.0,), "tp4-pp2-mb1")
    assert named.layout.tensor_parallel == 4 and named.best.layout == outcome().layout
    assert all(point.pick is None or point.pick.layout == named.layout for point in named.points)


def test_more_memory_never_hurts_the_best() -> None:
    found = outcome()
    steps = [point.best.step_seconds for point in points(found, "HBM size") if point.best]
    assert len(steps) > 2 and steps == sorted(steps, reverse=True)


@pytest.mark.parametrize("knob", RATES, ids=lambda knob: knob.name)
def test_a_faster_part_never_slows_the_pick_or_the_best(knob: Knob) -> None:
    own = points(outcome(), knob.name)
    for outcomes in ([point.pick for point in own], [point.best for point in own]):
        steps = [found.step_seconds for found in outcomes if found]
        assert len(steps) == 4 and steps == sorted(steps, reverse=knob.name != "latency")


def test_the_best_of_a_new_search_is_never_slower_than_the_pick() -> None:
    for label in ("", "tp4-pp2-mb1"):
        for point in outcome(label=label).points:
            if point.pick and point.best and (point.pick.verdict == "fits" or point.best.verdict == point.pick.verdict):
                assert point.best.step_seconds <= point.pick.step_seconds * (1 + 1e-12)


@pytest.mark.parametrize("factor", [0.5, 2.0])
@pytest.mark.parametrize("knob", RATES, ids=lambda knob: knob.name)
def test_timing_again_finds_what_a_whole_search_finds(knob: Knob, factor: float) -> None:
    point = next(p for p in points(outcome(), knob.name) if p.factor == factor)
    changed = dataclasses.replace(scenario(), job=knob.change(scenario().job, factor))
    whole = search(changed).ranked
    assert point.best is not None
    assert (point.best.layout, point.best.step_seconds) == (whole.layouts.layout(0), whole.step_seconds[0])


@pytest.mark.parametrize("knob", KNOBS, ids=lambda knob: knob.name)
def test_a_knob_changes_what_it_names(knob: Knob) -> None:
    job = scenario().job
    assert knob.value(knob.change(job, 2.0)) == pytest.approx(2.0 * knob.value(job))
    others = [other for other in KNOBS if other is not knob and {other.name, knob.name} != {"sequence length", "global batch"}]
    assert all(other.value(knob.change(job, 2.0)) == other.value(job) for other in others)


def test_a_clusters_own_links_are_the_ones_that_change() -> None:
    job = make_scenario(Request(model="8b", num_gpus=16, nic_gbit_per_s=100.0)).job
    nic = next(knob for knob in KNOBS if knob.name == "NIC bandwidth")
    assert nic.value(job) == 100.0 and nic.value(nic.change(job, 2.0)) == 200.0


def test_longer_sequences_keep_the_tokens_of_a_step_or_say_why_not() -> None:
    sequence = next(knob for knob in KNOBS if knob.name == "sequence length")
    assert sequence.change(scenario().job, 2.0).tokens_per_step == scenario().job.tokens_per_step
    odd, whole = points(outcome((0.8, 1.25)), "sequence length")
    assert odd.pick is None and odd.best is None and "3,276.8 is no whole number" in odd.note
    assert whole.best is None and "no whole number of sequences of 5,120" in whole.note


def test_sequences_beyond_the_learned_positions_are_refused_in_their_row() -> None:
    small = make_scenario(Request(model="gpt-3-1.3b", num_gpus=8, global_batch_size=64))
    row = points(sensitivity(small, factors=(2.0,)), "sequence length")[0]
    assert row.best is None and "beyond the 2,048 learned positions" in row.note


def test_the_elasticities_are_those_of_a_step_made_of_times() -> None:
    found = outcome().elasticity
    rates = [found[name] for name in ("peak FLOP rate", "HBM bandwidth", "NVLink bandwidth", "NIC bandwidth")]
    assert all(-1.0 <= value <= 0.0 for value in rates) and 0.0 <= found["latency"] < 0.1
    assert -1.0 - 1e-3 <= sum(rates) - found["latency"] < -0.5  # the rest is launches and other fixed times
    assert found["peak FLOP rate"] == min(rates) and found["HBM size"] == 0.0
    assert math.isnan(found["global batch"]) or 0.5 < found["global batch"] <= 1.0


def test_a_point_at_which_nothing_fits_says_so() -> None:
    row = points(outcome((0.05,)), "HBM size")[0]
    assert row.pick is None and row.best is None
    assert "the pick is out of memory" in row.note and "nothing fits; " in row.note and "GiB too few" in row.note


def test_the_csv_reads_back_as_the_frame_and_as_the_json(command: Command) -> None:
    done = command("sensitivity", *WISHES, "--format", "csv")
    read = pd.read_csv(StringIO(done.out), keep_default_na=False, na_values={"elasticity": [""], "pick_step_seconds": [""]})
    frame = sensitivity_frame(outcome())
    assert done.code == 0 and list(read.columns) == list(frame.columns) and len(read) == len(outcome().points)
    assert read["pick_step_seconds"].tolist() == pytest.approx(frame["pick_step_seconds"].tolist(), nan_ok=True)
    assert read[["knob", "best_layout", "note"]].equals(frame[["knob", "best_layout", "note"]])
    rows = json.loads(command("sensitivity", *WISHES, "--format", "json").out)["points"]
    assert [row["best_step_seconds"] for row in rows] == pytest.approx(read["best_step_seconds"].astype(float).tolist())


def test_the_table_fits_in_100_columns_in_the_order_of_knobs_and_factors(command: Command) -> None:
    first, second = (command("sensitivity", *WISHES, "--factors", "2,0.5") for _ in range(2))
    assert first.code == 0 and first.err == "" and first.out == second.out
    lines = first.out.splitlines()
    assert max(map(len, lines)) <= 100 and "…" not in first.out
    table = lines[next(n for n, line in enumerate(lines) if line.startswith("knob ") and "best layout" in line) :]
    places = [next(n for n, line in enumerate(table) if line.startswith(knob.name)) for knob in KNOBS]
    assert places == sorted(places)
    assert [point.factor for point in outcome((0.5, 2.0)).points] == [0.5, 2.0] * len(KNOBS)


def test_the_knob_that_matters_most_comes_first(command: Command) -> None:
    page = command("sensitivity", *WISHES, "--factors", "1").out
    names = [knob.name for knob in RATES]
    rows = page[: page.index("best layout")]
    assert min(names, key=rows.index) == "peak FLOP rate"


@pytest.mark.parametrize("factors", ["", "0", "-1", "two", "nan", "inf", "1e9", "0.5;2", ",".join(str(1 + n / 10) for n in range(13))])
def test_factors_that_make_no_sense_are_refused_in_one_line(command: Command, factors: str) -> None:
    done = command("sensitivity", *WISHES, "--factors", factors)
    assert done.code == 2 and done.out == "" and done.err.count("\n") == 1 and "--factors" in done.err


def test_a_layout_that_cannot_run_is_told_with_exit_1(command: Command) -> None:
    full = command("sensitivity", *WISHES, "--layout", "dp16-zero0-mb1", "--factors", "4")
    assert full.code == 1 and "pick: tp1-pp1-vp1-cp1-ep1-dp16-zero0-mb1-none, the pick is out of memory" in " ".join(full.out.split())
    illegal = command("sensitivity", *WISHES, "--layout", "tp16-dp1", "--factors", "1")
    assert illegal.code == 1 and "the pick is illegal (tensor_group_in_node)" in " ".join(illegal.out.split())
    pinned = command("sensitivity", *WISHES, "--layout", "dp16", "--tp", "4")
    assert pinned.code == 2 and "tensor_parallel is pinned" in pinned.err


def test_a_job_that_fits_nowhere_ends_as_a_search_does(command: Command) -> None:
    done = command("sensitivity", "--model", "405b", "--gpus", "8")
    assert done.code == 1 and "no layout fits" in done.out and done.err == ""
    machine = command("sensitivity", "--model", "405b", "--gpus", "8", "--format", "json")
    assert machine.code == 1 and json.loads(machine.out)["pick"] is None and "no layout fits" in machine.err


def test_the_output_file_holds_what_would_be_printed(command: Command, tmp_path: Path) -> None:
    wishes = ("sensitivity", *WISHES, "--factors", "2", "--format", "csv")
    path = tmp_path / "sensitivity.csv"
    assert command(*wishes, "--output", str(path)).out == ""
    assert path.read_text() == command(*wishes).out
