"""Commands write their pages, pictures, summaries and traces beside the result, which stays as it is."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.conftest import Outcome

Command = Callable[..., Outcome]

SMALL = ("--model", "llama-3.2-1b", "--gpus", "8", "--global-batch", "16", "--draws", "0", "--framework", "megatron")


def test_a_search_writes_all_files_and_prints_the_same_page(command: Command, tmp_path: Path) -> None:
    names = {"--html": "r.html", "--summary": "s.md", "--trace": "t.json"}
    files = [word for option, name in names.items() for word in (option, str(tmp_path / name))]
    done = command("search", *SMALL, "--pp", "2", *files, "--figures", str(tmp_path / "pictures"))
    assert done.code == 0, done.err
    assert done.out == command("search", *SMALL, "--pp", "2").out
    assert (tmp_path / "r.html").read_text().startswith("<!DOCTYPE html>")
    assert (tmp_path / "s.md").read_text().startswith("# llama-3.2-1b on 8 x h100")
    assert {event["ph"] for event in json.loads((tmp_path / "t.json").read_text())["traceEvents"]} == {"M", "X"}
    assert {path.suffix for path in (tmp_path / "pictures").iterdir()} == {".png", ".svg"}


@pytest.mark.parametrize(
    "words",
    [
        ("explain", "--model", "llama-3.2-1b", "--gpus", "8", "--global-batch", "16", "--layout", "pp2-mb1"),
        ("diff", "tp2-dp4", "dp8", "--model", "llama-3.2-1b", "--gpus", "8", "--global-batch", "16"),
        ("sweep", "--model", "llama-3.2-1b", "--gpus", "1:4:x2", "--global-batch", "16", "--jobs", "1"),
        ("validate", "--family", "zb23"),
        ("search", "--model", "70b", "--gpus", "1", "--draws", "0"),
    ],
)
def test_every_page_is_whole(command: Command, tmp_path: Path, words: tuple[str, ...]) -> None:
    done = command(*words, "--html", str(tmp_path / "page.html"))
    assert done.code in (0, 1), done.err
    text = (tmp_path / "page.html").read_text()
    assert text.startswith("<!DOCTYPE html>") and text.rstrip().endswith("</html>")


def test_without_a_pipeline_there_is_no_trace(command: Command, tmp_path: Path) -> None:
    done = command("search", *SMALL, "--pp", "1", "--trace", str(tmp_path / "t.json"))
    assert done.code == 0 and "no trace" in done.err and not (tmp_path / "t.json").exists()


@pytest.mark.parametrize("option", ["--html", "--figures"])
def test_without_the_extra_one_line_says_how_to_get_it(
    command: Command, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, option: str
) -> None:
    monkeypatch.setitem(sys.modules, "altair", None)
    done = command("search", *SMALL, option, str(tmp_path / "out"))
    assert done.code == 2 and "pip install 'layout-planner[report]'" in done.err and done.err.count("\n") == 1


def test_two_outputs_of_one_name_are_refused_before_any_work(command: Command, tmp_path: Path) -> None:
    path = str(tmp_path / "same")
    done = command("search", *SMALL, "--html", path, "--trace", path)
    assert done.code == 2 and f"two outputs name {path}" in done.err
