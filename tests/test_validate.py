"""The validate command and its measures."""

from __future__ import annotations

import csv
import json
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from planner.validate import SHIPPED, kendall_tau, read_rows, regret
from tests.conftest import Outcome

KEYS = {
    "step_time": {"rows", "family_median", "worst_family", "row_median", "families"},
    "memory": {"rows", "family_median", "worst_family", "row_median", "families"},
    "ranking": {"groups", "mean_regret", "max_regret", "kendall_tau"},
    "verdict": {"rows", "accuracy", "false_fits", "false_ooms"},
}


@pytest.fixture(scope="module")
def small(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A runs file with a few rows of three sources, one of them unusable."""
    keep = [r for r in read_rows(SHIPPED) if r["family"] in ("korthikanti22", "simumax", "alpa")][:14]
    keep.append({**keep[0], "id": "unusable", "hidden_size": ""})
    path = tmp_path_factory.mktemp("runs") / "runs.csv"
    with path.open("w", newline="") as file:
        writer = csv.DictWriter(file, list(keep[0]))
        writer.writeheader()
        writer.writerows(keep)
    return path


def test_json_has_the_promised_keys_and_one_row_per_run(command: Callable[..., Outcome], small: Path) -> None:
    report = json.loads(command("validate", "--runs", str(small), "--format", "json").out)
    for key, inner in KEYS.items():
        assert inner <= set(report[key])
    assert report["skipped"] == {"no hidden_size": 1}
    assert len(report["rows"]) == 14
    assert {"id", "predicted_step_seconds", "measured_step_seconds", "predicted_memory_bytes"} <= set(report["rows"][0])


def test_a_family_narrows_and_an_unknown_one_is_refused(command: Callable[..., Outcome], small: Path) -> None:
    one = json.loads(command("validate", "--runs", str(small), "--family", "korthikanti22", "--format", "json").out)
    assert set(one["step_time"]["families"]) == {"korthikanti22"}
    wrong = command("validate", "--runs", str(small), "--family", "korthikanti")
    assert wrong.code == 2 and "did you mean 'korthikanti22'" in wrong.err


def test_a_runs_file_without_columns_is_refused(command: Callable[..., Outcome], tmp_path: Path) -> None:
    path = tmp_path / "runs.csv"
    path.write_text("id,family\nx,y\n")
    wrong = command("validate", "--runs", str(path))
    assert wrong.code == 2 and "columns missing: framework, gpu" in wrong.err


def test_perfect_and_reversed_orders_have_tau_one_and_minus_one() -> None:
    up = np.arange(1.0, 6.0)
    assert kendall_tau(up, up) == 1.0 and kendall_tau(up, -up) == -1.0
    assert regret(up, up) == 0.0 and regret(-up, up) == 4.0


def write_runs(path: Path, rows: list[dict[str, str]]) -> Path:
    """Rows as a runs file."""
    with path.open("w", newline="") as file:
        writer = csv.DictWriter(file, list(rows[0]))
        writer.writeheader()
        writer.writerows(rows)
    return path


def own_runs(factor: float, count: int = 4) -> list[dict[str, str]]:
    """Some steps of one cluster, slowed by a factor."""
    rows = [r for r in read_rows(SHIPPED) if r["family"] == "korthikanti22" and r["step_seconds"]][:count]
    return [{**row, "step_seconds": str(float(row["step_seconds"]) * factor)} for row in rows]


def test_calibration_to_a_slower_cluster_finds_most_of_the_slowdown(command: Callable[..., Outcome], tmp_path: Path) -> None:
    runs = write_runs(tmp_path / "mine.csv", own_runs(1.25))
    profile = tmp_path / "mine.toml"
    done = command("calibrate", str(runs), "--write", str(profile))
    assert done.code == 0 and "not identified" in done.out
    before, after, left_out = _medians(done.out)
    assert before > 15 and after < before / 2 and left_out < before
    report = json.loads(command("validate", "--runs", str(runs), "--profile", str(profile), "--format", "json").out)
    assert report["step_time"]["row_median"] * 100 == pytest.approx(after, abs=2.5)


def _medians(page: str) -> list[float]:
    words = page.split("median error:")[1].replace("%", " ").split()
    return [float(word) for word in words if word.replace(".", "").isdigit()]


def test_calibration_refuses_a_run_above_the_peak_by_name(command: Callable[..., Outcome], tmp_path: Path) -> None:
    rows = own_runs(0.1)
    done = command("calibrate", str(write_runs(tmp_path / "mine.csv", rows)))
    assert done.code == 2 and rows[0]["id"] in done.err and "above the peak" in done.err


def test_a_profile_changes_the_search_and_a_broken_one_is_refused(command: Callable[..., Outcome], tmp_path: Path) -> None:
    good, bad = tmp_path / "good.toml", tmp_path / "bad.toml"
    good.write_text("[generation.hopper]\nmatmul_efficiency = 0.4\n")
    bad.write_text("[generation.hopper]\nmatmul_eficiency = 0.4\n")
    wishes = ("search", "--model", "8b", "--gpus", "8", "--format", "json", "--top", "1")
    plain, slow = (json.loads(command(*wishes, *extra).out)["layouts"][0]["step_seconds"] for extra in ((), ("--profile", str(good))))
    assert slow > 1.2 * plain
    wrong = command(*wishes, "--profile", str(bad))
    assert wrong.code == 2 and "did you mean 'matmul_efficiency'" in wrong.err


def test_predictions_carry_a_band_and_say_when_they_extrapolate(command: Callable[..., Outcome]) -> None:
    row = json.loads(command("search", "--model", "8b", "--gpus", "8", "--format", "json", "--top", "1").out)["layouts"][0]
    assert row["step_seconds_low"] < row["step_seconds"] < row["step_seconds_high"] and not row["extrapolates"]
    far = json.loads(command("search", "--model", "8b", "--gpus", "8", "--gpu", "mi300x", "--format", "json", "--top", "1").out)["layouts"][
        0
    ]
    assert far["extrapolates"]
