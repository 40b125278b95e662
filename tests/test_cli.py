"""The command line: what it prints, where, and with which exit code."""

from __future__ import annotations

import json
from collections.abc import Callable
from io import StringIO
from pathlib import Path

import pandas as pd
import pytest

from tests.conftest import Outcome

Command = Callable[..., Outcome]
SMALL = ("search", "--model", "8b", "--gpus", "16", "--global-batch", "256")
FAST = ("--even", "--draws", "0", "--format", "json")
"""The search alone: no uneven splits, no draws."""


def test_the_shortlist_fits_in_100_columns_and_its_books_close(command: Command) -> None:
    done = command("search", "--gpus", "2048", "--model", "70b", "--tokens", "1.4T")
    assert done.code == 0
    assert max(len(line) for line in done.out.splitlines()) <= 100
    assert "…" not in done.out
    assert "days" in done.out and "the counts close" in done.out
    assert done.err == ""


def test_scenario_file_and_flags_say_the_same(command: Command) -> None:
    from_file = command("search", "--scenario", "70b-2048", "--format", "csv")
    from_flags = command("search", "--model", "70b", "--gpus", "2048", "--tokens", "1.4T", "--format", "csv")
    assert from_file.out == from_flags.out


def test_flags_override_the_file(command: Command) -> None:
    done = command("search", "--scenario", "70b-2048", "--gpus", "1024", "--tp", "8", "--format", "json")
    content = json.loads(done.out)
    assert content["scenario"]["num_gpus"] == 1024
    assert {row["tensor_parallel"] for row in content["layouts"]} == {8}


def test_pins_are_the_only_values_searched(command: Command) -> None:
    done = command(*SMALL, "--pp", "2,4", "--zero", "1", "--recompute", "full", "--format", "csv", "--top", "500")
    frame = pd.read_csv(StringIO(done.out))
    assert set(frame["pipeline_parallel"]) <= {2, 4}
    assert set(frame["zero_stage"]) == {1}
    assert set(frame["recompute"]) == {"full"}


@pytest.mark.parametrize("style", ["table", "csv", "json", "markdown"])
def test_the_same_input_gives_the_same_bytes(command: Command, style: str) -> None:
    first, second = (command(*SMALL, "--format", style).out for _ in range(2))
    assert first == second


def test_output_and_csv_files_hold_what_would_be_printed(command: Command, tmp_path: Path) -> None:
    printed = command(*SMALL, "--format", "csv").out
    done = command(*SMALL, "--csv", str(tmp_path / "review.csv"), "--output", str(tmp_path / "page.txt"))
    assert done.out == ""
    assert (tmp_path / "review.csv").read_text() == printed
    assert "the counts close" in (tmp_path / "page.txt").read_text()
    assert sorted(path.name for path in tmp_path.iterdir()) == ["page.txt", "review.csv"]


def test_all_lists_the_whole_space_with_reasons(command: Command, tmp_path: Path) -> None:
    path = tmp_path / "all.csv"
    done = command("search", "--model", "llama-3.2-1b", "--gpus", "4", "--gpu", "v100", "--global-batch", "8", "--all", "--csv", str(path))
    space = int(done.out.split(" layouts in the declared space")[0].splitlines()[-1].replace(",", ""))
    frame = pd.read_csv(path, low_memory=False)
    assert frame["layouts"].sum() == space
    reasons = set(frame["reason"].str.split(":").str[0])
    assert {"ranked", "launchable", "memory", "gpu_product", "interleaving"} <= reasons
    assert frame["rank"].dropna().is_monotonic_increasing


def test_csv_numbers_are_the_json_numbers(command: Command) -> None:
    frame = pd.read_csv(StringIO(command(*SMALL, "--format", "csv").out))
    rows = json.loads(command(*SMALL, "--format", "json").out)["layouts"]
    assert frame["step_seconds"].tolist() == pytest.approx([row["step_seconds"] for row in rows])
    assert frame["layout"].tolist() == [row["layout"] for row in rows]


def test_nothing_feasible_exits_1_with_the_reason(command: Command) -> None:
    done = command("search", "--model", "8b", "--gpus", "1")
    assert done.code == 1
    assert "no layout fits" in done.out and "GiB too much" in done.out and "dropped:" in done.out


def test_nothing_feasible_keeps_to_the_format_and_still_lists_the_reasons(command: Command, tmp_path: Path) -> None:
    wishes = ("search", "--model", "8b", "--gpus", "1")
    done = command(*wishes, "--format", "json")
    content = json.loads(done.out)
    assert done.code == 1 and content["layouts"] == [] and content["nearest"]["excess_bytes"] > 0
    assert command(*wishes, "--all", "--csv", str(tmp_path / "all.csv")).code == 1
    frame = pd.read_csv(tmp_path / "all.csv", low_memory=False)
    assert frame["layouts"].sum() == content["space"]


def test_an_explained_layout_must_not_contradict_a_pin(command: Command) -> None:
    done = command("explain", "--model", "8b", "--gpus", "8", "--layout", "dp8", "--tp", "4")
    assert done.code == 2 and "tensor_parallel is pinned to [4]" in done.err


def test_a_prime_cluster_says_which_batches_would_do(command: Command) -> None:
    done = command("search", "--model", "70b", "--gpus", "10007")
    assert done.code == 2
    assert done.out == "" and done.err.count("\n") == 1
    assert "global_batch_size = 1024" in done.err and "10007" in done.err


def test_a_single_gpu_has_a_shortlist(command: Command) -> None:
    done = command("search", "--model", "llama-3.2-1b", "--gpus", "1", "--format", "json")
    best = json.loads(done.out)["layouts"][0]
    assert best["exposed_communication_share"] == 0 and best["bubble_share"] == 0


def test_a_red_flag_is_shown_with_its_threshold(command: Command) -> None:
    done = command("explain", "--model", "70b", "--gpus", "2048", "--layout", "tp8-pp4-mb1")
    assert "! communication (#1; exposed above 20 % of compute): exposed communication is" in " ".join(done.out.split())


def test_uneven_layer_counts_are_legal(command: Command) -> None:
    for model, stages in (("deepseek-v3", 8), ("qwen3-235b-a22b", 16), ("405b", 4)):
        done = command(
            "search", "--model", model, "--gpus", "1024", "--pp", str(stages), "--vp", "1", "--mb", "1", "--recompute", "full", *FAST
        )
        assert done.code == 0 and json.loads(done.out)["layouts"]


def test_a_framework_narrows_and_none_lifts(command: Command) -> None:
    counts = {}
    for framework in ("megatron", "torchtitan", "deepspeed", "any", "none"):
        content = json.loads(command(*SMALL, "--framework", framework, *FAST).out)
        counts[framework] = content["dropped"]["launchable"]
    assert counts["none"] == 0 < counts["any"] < min(counts["megatron"], counts["torchtitan"], counts["deepspeed"])


@pytest.mark.parametrize("kind", ["models", "gpus", "clusters", "software", "operations"])
def test_the_catalogue_lists(command: Command, kind: str) -> None:
    done = command("list", kind)
    assert done.code == 0 and len(done.out.splitlines()) > 6
