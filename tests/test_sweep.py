"""`planner sweep`: one table from many searches, the same bytes however it was come by."""

from __future__ import annotations

import json
import random
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from contextlib import nullcontext
from csv import DictReader
from io import StringIO
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest

import planner.journal
import planner.sweep
from planner import evaluation
from planner.journal import Journal
from tests.conftest import Outcome
from tests.test_pareto import dominated

Command = Callable[..., Outcome]

SMALL = ("sweep", "--model", "llama-3.2-1b", "--global-batch", "64")
PINS = ("--tp", "1", "--recompute", "none")
"""Make a space small."""

GRID = (*SMALL, *PINS, "--gpus", "1:4:x2,17,8", "--vary", "zero_stage=1,3", "--tokens", "1B")
"""Ten points; on 17 GPUs nothing divides the batch."""

LONG = (*SMALL, "--recompute", "none", "--gpus", "1:16:+1")
"""Some seconds of searching."""


def csv_of(command: Command, *arguments: str) -> pd.DataFrame:
    """The table of a sweep."""
    done = command(*arguments, "--jobs", "1", "--format", "csv")
    assert done.code in (0, 1), done.err
    return pd.read_csv(StringIO(done.out), keep_default_na=False, na_values=[""])


def files(folder: Path, name: str = "t") -> list[str]:
    """Flags that write every kind of file."""
    return [text for kind in ("csv", "json", "parquet") for text in (f"--{kind}", str(folder / f"{name}.{kind}"))]


def contents(folder: Path, name: str = "t") -> list[bytes]:
    """What those files hold."""
    return [(folder / f"{name}.{kind}").read_bytes() for kind in ("csv", "json", "parquet")]


PROGRAM = (sys.executable, "-m", "planner.cli")


@pytest.fixture(scope="module")
def grid() -> pd.DataFrame:
    """The table of GRID."""
    done = subprocess.run([*PROGRAM, *GRID, "--jobs", "1", "--format", "csv"], capture_output=True, text=True, check=True)
    return pd.read_csv(StringIO(done.stdout), keep_default_na=False, na_values=[""])


def texts(csv: str) -> list[dict[str, str]]:
    """The rows of a CSV as they are written."""
    return list(DictReader(StringIO(csv)))


@pytest.mark.parametrize(
    ("more", "other"),
    [(("--top", "3"), ()), (("--all", "--gpus", "2,17"), ("--dask", "local"))],
    ids=["top on a pool", "all on dask"],
)
def test_no_byte_depends_on_the_engine(command: Command, tmp_path: Path, more: tuple[str, ...], other: tuple[str, ...]) -> None:
    found = []
    for engine in (("--jobs", "1"), (*other, "--jobs", "2")):
        done = command(*GRID, *more, *engine, *files(tmp_path))
        assert done.code == 0 and "wrote" in done.err
        found.append((done.out, contents(tmp_path)))
    assert found[0] == found[1]
    assert sorted(path.name for path in tmp_path.iterdir()) == ["t.csv", "t.json", "t.parquet"]


def test_the_three_formats_hold_one_table(command: Command, tmp_path: Path) -> None:
    command(*GRID, "--top", "2", "--jobs", "1", *files(tmp_path))
    table = pd.read_csv(tmp_path / "t.csv", dtype={"pinned_zero_stage": str}, keep_default_na=False, na_values=[""])
    content = json.loads((tmp_path / "t.json").read_text())
    parquet = pd.read_parquet(tmp_path / "t.parquet")
    assert list(table.columns) == [*content["rows"][0], "sweep", "version"] == [*parquet.columns, "sweep", "version"]
    assert set(table["sweep"]) == {content["sweep"]} and set(table["version"]) == {content["version"]}
    for other in (pd.DataFrame(content["rows"]), parquet):
        filled = other.replace({np.nan: None, "": None})
        pd.testing.assert_frame_equal(table.iloc[:, :-2].replace({np.nan: None}), filled, check_dtype=False)


def test_a_point_is_the_search_of_its_scenario(command: Command) -> None:
    sweep = command(*SMALL, "--gpus", "4,8", "--vary", "zero_stage=1,3", "--tokens", "1B", "--jobs", "1", "--format", "csv")
    search = command("search", *SMALL[1:], "--gpus", "8", "--zero", "3", "--tokens", "1B", "--top", "1", "--draws", "0", "--format", "csv")
    row, alone = texts(sweep.out)[3], texts(search.out)[0]
    shared = (row.keys() & alone.keys()) - {"pareto"}  # of a search it is among its own layouts
    assert len(shared) > 30 and {name: row[name] for name in shared} == {name: alone[name] for name in shared}


def test_a_point_without_a_layout_keeps_its_reason_and_the_others_their_columns(command: Command, grid: pd.DataFrame) -> None:
    lost = grid[grid["status"] != "ok"]
    assert set(lost["num_gpus"]) == {17} and lost["reason"].str.contains("does not divide by any data_parallel|refused").all()
    assert lost["layout"].isna().all() and (grid.groupby("point").size() == 1).all()
    nothing = csv_of(command, "sweep", "--model", "70b", "--gpus", "1,2", "--tokens", "1B", "--vary", "zero_stage=1,3")
    assert nothing.columns.tolist() == grid.columns.tolist()
    assert set(nothing["status"]) == {"nothing fits"} and nothing["reason"].str.contains(r"nearest: tp.*GiB too much").all()
    assert (nothing["survivors"] == 0).all() and (nothing["space"] > 0).all()


def test_where_nothing_fits_anywhere_the_exit_code_says_so(command: Command) -> None:
    done = command("sweep", "--model", "70b", "--gpus", "1,2", "--jobs", "1")
    assert done.code == 1 and "#1 nothing fits; nearest: tp1-pp1" in done.out
    assert command("sweep", "--model", "8b", "--gpus", "1,8", "--jobs", "1").code == 0


def test_a_point_that_breaks_the_search_is_a_row(command: Command, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(scenario: Any, sort: str) -> Any:
        if scenario.job.num_gpus == 2:
            raise MemoryError("no\nroom")
        return found(scenario, sort)

    found = evaluation.searched
    monkeypatch.setattr(evaluation, "searched", broken)
    table = csv_of(command, *SMALL, "--gpus", "1,2,4")
    assert table["status"].tolist() == ["ok", "failed", "ok"] and table["reason"].tolist()[1] == "MemoryError: no room"


def test_efficiency_is_that_of_the_fewest_gpus_of_its_series(grid: pd.DataFrame) -> None:
    for _, series in grid[grid["status"] == "ok"].groupby("pinned_zero_stage"):
        first = series.loc[series["num_gpus"].idxmin()]
        assert first["scaling_efficiency"] == 1
        expected = series["tokens_per_second_per_gpu"] / first["tokens_per_second_per_gpu"]
        assert series["scaling_efficiency"].tolist() == pytest.approx(expected.tolist())


def test_every_row_has_its_own_efficiency(command: Command) -> None:
    table = csv_of(command, *SMALL, "--gpus", "2,4", "--top", "3")
    best = table["tokens_per_second_per_gpu"][0]
    assert table["scaling_efficiency"].tolist() == pytest.approx((table["tokens_per_second_per_gpu"] / best).tolist())
    assert len(table) == 6 and table["scaling_efficiency"].nunique() > 2


def test_weak_scaling_keeps_the_work_of_a_gpu(command: Command) -> None:
    table = csv_of(command, *SMALL, "--gpus", "8,2,4", "--scale-batch")
    assert table["global_batch_size"].tolist() == [256, 64, 128]
    assert table["scaling_efficiency"].tolist()[1] == 1 and table["scaling_efficiency"].between(0.9, 1.1).all()


def test_the_front_is_what_no_row_of_the_same_question_dominates(command: Command) -> None:
    wishes = (*SMALL, "--gpus", "2", "--recompute", "none", "--seq-len", "1024,4096", "--gpu", "h100,b200", "--all")
    table = csv_of(command, *wishes)
    for _, rows in table.groupby("seq_len"):
        goals = [1 / (rows["tokens_per_second"] * rows["goodput"]), rows["usd_per_billion_tokens"], rows["memory_gib"] / rows["usable_gib"]]
        values = list(zip(*(goal.tolist() for goal in goals)))
        best = [value for value, on in zip(values, rows["pareto"]) if on]
        assert not [value for value in best if dominated(value, best)]
        assert all(dominated(value, best) or value in best for value in values)
        assert rows["pareto"].tolist() == [not dominated(value, best) for value in values]
    kept = csv_of(command, *wishes, "--pareto")
    assert kept[["point", "rank"]].values.tolist() == table.loc[table["pareto"], ["point", "rank"]].values.tolist()


def test_all_lists_what_was_ranked_once_and_begins_with_the_shortlist(command: Command) -> None:
    wishes = (*SMALL, "--recompute", "none", "--gpus", "2,6,17")
    table, short = csv_of(command, *wishes, "--all"), csv_of(command, *wishes, "--top", "10")
    for _, rows in table[table["status"] == "ok"].groupby("point"):
        assert len(rows) == rows["survivors"].iloc[0] == rows["layout"].nunique()
        assert rows["rank"].tolist() == list(range(1, len(rows) + 1))
        assert rows["step_seconds"][rows["verdict"] == "fits"].is_monotonic_increasing
    first = table[~(table["rank"] > 10)].drop(columns=["sweep", "pareto"]).reset_index(drop=True)
    pd.testing.assert_frame_equal(first, short.drop(columns=["sweep", "pareto"]), check_dtype=False)


def test_a_target_that_nothing_meets_is_the_reason(command: Command) -> None:
    for more in ((), ("--all",)):
        table = csv_of(command, *SMALL, "--gpus", "1,4", "--max-step", "2", *more)
        lost = table[table["num_gpus"] == 1]
        assert lost["status"].tolist() == ["misses target"] and lost["reason"].str.contains("steps of at most 2 s").all()
        assert (table[table["num_gpus"] == 4]["status"] == "ok").all()


def test_the_page_fits_in_100_columns_and_says_what_it_does_not_know(command: Command) -> None:
    done = command(*SMALL, "--gpu", "h100,b200", "--precision", "bf16,fp8", "--gpus", "4", "--jobs", "1", "--pareto")
    assert max(map(len, done.out.splitlines())) <= 100
    page = command("sweep", "--model", "8b,70b", "--gpus", "4,8", "--tokens", "1T", "--jobs", "1").out
    assert max(map(len, page.splitlines())) <= 100 and "…" not in page + done.out and "nan" not in page + done.out
    assert "4 points, each an exhaustive search" in page and "#3 nothing fits; nearest:" in page and "days" in page


def test_the_page_shows_what_differs_without_being_varied(command: Command, tmp_path: Path) -> None:
    page = command(*SMALL, *PINS, "--gpus", "4", "--cluster", "hgx,hgx-200g", "--jobs", "1").out
    gpus = {"h100-sxm-80gb" in page, "a100-sxm-80gb" in page}
    assert gpus == {True} and re.search(r"# +gpu +cluster", page), page
    for name, more in (("a", 'seq_len = 1024\n[cluster]\ngpu = "b200"'), ("b", 'seq_len = 2048\n[cluster]\ngpu = "h100"')):
        (tmp_path / f"{name}.toml").write_text(
            f'[model]\nname = "llama-3.2-1b"\n[workload]\nglobal_batch_size = 64\n{more}\nnum_gpus = 2\n'
        )
    page = command("sweep", "--scenario", str(tmp_path), *PINS, "--jobs", "1").out
    assert re.search(r"# +scenario +gpu +seq +GPUs", page) and "1024" in page and "2048" in page, page
    assert max(map(len, page.splitlines())) <= 100


def test_one_point_is_singular(command: Command) -> None:
    page = command(*SMALL, *PINS, "--gpus", "1", "--jobs", "1").out
    assert page.startswith("one point, an exhaustive search") and "\n1 point searched, 1 with a layout" in page


REFUSED = [
    (["--gpus", "8:4:x2"], r"--gpus = 8:4:x2 descends: write 4:8:x2"),
    (["--gpus", "8", "--vary", "zero=1"], r"no key 'zero' to vary; did you mean 'zero_stage'"),
    (["--gpus", "8", "--vary", "zero_stage"], r"--vary zero_stage: write KEY=VALUES"),
    (["--gpus", "8", "--vary", "num_gpus=8"], r"--vary num_gpus: it is stated twice"),
    (["--gpus", "8", "--zero", "1", "--vary", "zero_stage=1"], r"--vary zero_stage: it is stated twice"),
    (["--gpus", "8", "--gpu", "h100,h10"], r"no gpu called 'h10'.*\(point 2"),
    (["--gpus", "8", "--scenario", "/nowhere/at/all"], r"no scenario called"),
    (["--gpus", "8", "--resume"], r"--resume needs the file"),
    (["--gpus", "8", "--format", "parquet"], r"--format parquet needs --output FILE"),
    (["--gpus", "8", "--csv", "/tmp/a.csv", "--json", "/tmp/a.csv"], r"two outputs name /tmp/a.csv"),
    (["--gpus", "8", "--csv", "/nowhere/a.csv"], r"the folder /nowhere does not exist"),
    (["--gpus", "8", "--dask", "tcp://h:1", "--jobs", "2"], r"--jobs counts processes of this machine"),
    (["--gpus", "8", "--top", "0"], r"--top"),
]


@pytest.mark.parametrize(("arguments", "telling"), REFUSED)
def test_bad_input_is_one_line(command: Command, arguments: list[str], telling: str) -> None:
    done = command(*SMALL, *arguments)
    assert (done.code, done.out) == (2, "") and done.err.startswith("error: ") and done.err.count("\n") == 1
    assert re.search(telling, done.err), done.err


def test_without_pyarrow_the_message_says_how_to_get_it(command: Command, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "pyarrow", None)
    done = command(*SMALL, "--gpus", "1", "--parquet", str(tmp_path / "t.parquet"))
    assert done.code == 2 and "pip install 'layout-planner[parquet]'" in done.err


def stopped(folder: Path, after: float, end: signal.Signals, *more: str) -> None:
    """LONG, ended from outside unless it is faster."""
    with subprocess.Popen(
        [*PROGRAM, *LONG, "--jobs", "1", *files(folder, "cut"), *more], stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True
    ) as running:
        try:
            running.communicate(timeout=after)
        except subprocess.TimeoutExpired:
            running.send_signal(end)
            running.communicate()


@pytest.fixture(scope="module")
def uninterrupted(tmp_path_factory: pytest.TempPathFactory) -> list[bytes]:
    """The files of LONG."""
    folder = tmp_path_factory.mktemp("whole")
    subprocess.run([*PROGRAM, *LONG, "--jobs", "1", *files(folder)], capture_output=True, check=True)
    return contents(folder)


def test_killed_at_random_moments_and_gone_on_with_it_gives_the_same_bytes(
    command: Command, tmp_path: Path, uninterrupted: list[bytes]
) -> None:
    moments = random.Random(7)
    for _ in range(2):
        stopped(tmp_path, moments.uniform(1.0, 2.0), signal.SIGKILL, "--resume")
    done = command(*LONG, "--jobs", "1", *files(tmp_path, "cut"), "--resume")
    assert done.code == 0, done.err
    assert contents(tmp_path, "cut") == uninterrupted
    assert sorted(path.name for path in tmp_path.iterdir()) == ["cut.csv", "cut.json", "cut.parquet"]


def test_ctrl_c_leaves_valid_files_of_the_finished_points(command: Command, tmp_path: Path, uninterrupted: list[bytes]) -> None:
    journal = tmp_path / "cut.csv.journal"
    wishes = (*LONG, "--jobs", "2", *files(tmp_path, "cut"))
    with subprocess.Popen([*PROGRAM, *wishes], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as running:
        until = time.monotonic() + 60
        while time.monotonic() < until and not (journal.exists() and journal.read_bytes().count(b"\n") > 4):
            time.sleep(0.02)
        running.send_signal(signal.SIGINT)
        _, told = running.communicate()
    assert running.returncode == 130
    number = int(re.search(r"stopped after (\d+) of 16 points; --resume goes on\n$", told)[1])  # type: ignore[index]
    table = pd.read_csv(tmp_path / "cut.csv")
    assert len(table) == number == len(pd.read_parquet(tmp_path / "cut.parquet")) >= 4
    assert set(table["sweep"].str.partition(" ")[2]) == {f"({number} of 16 points)"}
    refused = command(*wishes)
    assert refused.code == 2 and f"holds {number} of 16 points of a sweep that was stopped: --resume goes on" in refused.err
    assert command(*wishes, "--jobs", "1", "--resume").code == 0
    assert contents(tmp_path, "cut") == uninterrupted


def interrupted(task: evaluation.Task) -> evaluation.Outcome:
    """The search of a point; Ctrl-C comes amid the second."""
    if task.point == 2:
        raise KeyboardInterrupt
    return evaluation.evaluate(task)


@pytest.mark.parametrize("kind", ["csv", "json", "parquet", "output"])
def test_ctrl_c_never_replaces_the_whole_result_of_an_earlier_run(
    command: Command, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str
) -> None:
    path, journal = tmp_path / "t", tmp_path / ("t.journal" if kind != "output" else "other.csv.journal")
    other = ("--csv", str(tmp_path / "other.csv")) if kind == "output" else ()
    wishes = (*SMALL, *PINS, "--gpus", "1,2", "--jobs", "1", f"--{kind}", str(path), *other)
    assert command(*wishes).code == 0
    before = path.read_bytes()
    with monkeypatch.context() as patched:
        patched.setattr(planner.sweep, "evaluate", interrupted)
        done = command(*wishes)
    assert done.code == 130 and f"{path}" in done.err and path.read_bytes() == before
    assert done.err.endswith(f" left as before; what is done is in {journal}; --resume goes on\n")
    assert command(*wishes, "--resume").code == 0
    assert path.read_bytes() == before and not journal.exists()


def test_ctrl_c_replaces_what_another_one_left(command: Command, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    wishes = (*SMALL, *PINS, "--gpus", "1,2", "--jobs", "1", *files(tmp_path), "--output", str(tmp_path / "page"))
    monkeypatch.setattr(planner.sweep, "evaluate", interrupted)
    for more in ((), ("--resume",)):
        done = command(*wishes, *more)
        assert done.code == 130 and done.err.endswith("stopped after 1 of 2 points; --resume goes on\n")
        assert "1 point searched" in (tmp_path / "page").read_text()


def test_ctrl_c_between_a_point_s_line_and_the_note_of_it_counts_the_point(
    command: Command, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The disk may take long to say that it has the line."""
    wishes = (*SMALL, *PINS, "--gpus", "1,2,4", "--jobs", "1", *files(tmp_path))
    writes = iter(range(100))

    def synced(_: int) -> None:
        if next(writes) == 2:  # the header, the first point, the second
            raise KeyboardInterrupt

    with monkeypatch.context() as patched:
        patched.setattr(planner.journal.os, "fsync", synced)
        done = command(*wishes)
    assert done.code == 130 and done.err.endswith("stopped after 2 of 3 points; --resume goes on\n")
    assert len(pd.read_csv(tmp_path / "t.csv")) == 2
    assert "holds 2 of 3 points" in command(*wishes).err


def test_only_the_same_sweep_of_the_same_version_goes_on(command: Command, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    wishes = (*SMALL, "--gpus", "1,2", "--jobs", "1", "--csv", str(tmp_path / "t.csv"))
    with monkeypatch.context() as patched:
        patched.setattr(planner.sweep, "evaluate", interrupted)
        done = command(*wishes)
        assert done.code == 130 and done.err.endswith("stopped after 1 of 2 points; --resume goes on\n")
    assert "(top = 1 there, 3 here)" in command(*wishes, "--top", "3", "--resume").err
    assert "(points = 2 there, 3 here)" in command(*wishes, "--gpus", "1,2,3", "--resume").err
    assert "(sweep = " in command(*wishes, "--tokens", "1B", "--resume").err
    with monkeypatch.context() as patched:
        patched.setattr(planner.sweep, "version", lambda: "9")
        assert "(version = " in command(*wishes, "--resume").err
    assert command(*wishes, "--resume").code == 0
    assert pd.read_csv(tmp_path / "t.csv")["point"].tolist() == [1, 2]


@pytest.mark.parametrize("kind", ["csv", "json", "parquet"])
def test_a_finished_file_is_known_and_no_other_is_touched(command: Command, tmp_path: Path, kind: str) -> None:
    path = tmp_path / "t"
    wishes = (*SMALL, "--gpus", "1,2", "--jobs", "1", f"--{kind}", str(path))
    assert command(*wishes, "--resume").code == 0
    before = path.read_bytes()
    done = command(*wishes, "--resume")
    assert (done.code, done.out) == (0, "") and "nothing to do" in done.err and "2 points" in done.err
    other = command(*wishes, "--top", "2", "--resume")
    assert other.code == 2 and "holds another sweep (sweep = " in other.err and path.read_bytes() == before
    path.write_text("something else\n")
    assert command(*wishes, "--resume").code == 2 and path.read_text() == "something else\n"


def test_the_bar_says_how_many_points_are_done(command: Command, monkeypatch: pytest.MonkeyPatch) -> None:
    told: list[tuple[int, int]] = []
    module = sys.modules["planner.cli.sweep_command"]
    monkeypatch.setattr(module, "points_bar", lambda: nullcontext(lambda done, total: told.append((done, total))))
    command(*SMALL, "--gpus", "1,2", "--jobs", "1")
    assert told == [(0, 2), (1, 2), (2, 2)]


def test_a_part_that_somebody_took_away_is_missed(command: Command, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Journal, "part", lambda journal, point: tmp_path / "gone" / str(point))
    monkeypatch.setattr(Journal, "_keep", lambda journal, path, part: None)
    done = command(*SMALL, "--gpus", "1", "--all", "--jobs", "1", "--csv", str(tmp_path / "t.csv"))
    assert done.code == 2 and re.search(r"gone/1: cannot be read .*: delete .*t.csv.journal to start anew", done.err)


def test_more_gpus_never_take_longer_when_some_may_stay_unused(command: Command) -> None:
    done = command(*SMALL, "--recompute", "none", "--zero", "1", "--gpus", "1:12:+1", "--jobs", "1", "--format", "csv")
    rows = [row for row in texts(done.out) if row["status"] == "ok"]
    steps = {row["num_gpus"]: float(row["step_seconds"]) for row in rows}
    used = [steps[row["fastest_num_gpus"]] for row in rows]
    assert used == sorted(used, reverse=True)
    assert all(int(row["fastest_num_gpus"]) <= int(row["num_gpus"]) for row in rows)
    assert any(row["fastest_num_gpus"] != row["num_gpus"] for row in rows)  # odd counts divide badly


def test_the_page_says_where_gpus_had_better_stay_unused(command: Command) -> None:
    done = command(*SMALL, "--recompute", "none", "--zero", "1", "--gpus", "8,9", "--jobs", "1")
    assert "#2 slower than fewer GPUs of the series" in " ".join(done.out.split())
