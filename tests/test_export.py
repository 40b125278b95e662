"""An export is refused where the layout would not run, says what it expects, starts under bash, and reads back as the same layout."""

from __future__ import annotations

import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from planner.explain import complete_layout
from planner.export import Refused, export
from planner.frameworks import FRAMEWORKS
from planner.frameworks.reading import read_config
from planner.request import Request, make_scenario
from planner.verdict import planned
from tests.conftest import Outcome

Command = Callable[..., Outcome]

DENSE: dict[str, Any] = {"model": "8b", "num_gpus": 64, "global_batch_size": 128, "seq_len": 8192}
LABELS = {
    "megatron": "tp2-pp4-vp2-dp8-zero1-mb1-selective",
    "megatron-bridge": "tp2-pp4-dp8-zero1-mb2-full4",
    "torchtitan": "tp4-pp2-vp2-dp8-zero2-mb1-full",
    "deepspeed": "tp2-pp4-dp8-zero1-mb1-full",
    "accelerate": "tp4-dp16-zero3-mb1-full",
}
READABLE = {"megatron-bridge": ("launch.sh", "megatron_bridge.yaml")}
"""The files of an export that are read back, where that is not the launch script alone."""


@pytest.mark.parametrize("framework", FRAMEWORKS)
def test_an_export_reads_back_as_the_same_layout(tmp_path: Path, command: Command, framework: str) -> None:
    wishes = ("--model", "8b", "--gpus", "64", "--global-batch", "128", "--seq-len", "8192", "--framework", framework)
    done = command("export", *wishes, "--layout", LABELS[framework], "--output", str(tmp_path))
    assert done.code == 0, done.err
    scenario = make_scenario(Request(**DENSE, framework=framework))
    for name in READABLE.get(framework, ("launch.sh",)):
        own = planned(read_config(tmp_path / name, 64), Request(**DENSE))
        assert own.layout == complete_layout(scenario, LABELS[framework])
        assert own.config.framework == framework
    assert read_config(tmp_path / "launch.sh").request.num_gpus == 64


@pytest.mark.parametrize("framework", FRAMEWORKS)
def test_every_file_says_scenario_version_and_what_is_expected(framework: str) -> None:
    scenario = make_scenario(Request(**DENSE, framework=framework), name="eight")
    exported = export(scenario, framework, complete_layout(scenario, LABELS[framework]))
    for text in exported.files.values():
        for telling in ("layout-planner 0.", "scenario eight: llama-3.1-8b on 64 x h100", "s per step", "GiB on the fullest GPU"):
            assert telling in text


@pytest.mark.parametrize("framework", FRAMEWORKS)
def test_bash_starts_the_script_with_every_word_in_its_place(tmp_path: Path, framework: str) -> None:
    """The launcher is replaced by a program that prints its words."""
    scenario = make_scenario(Request(**DENSE, framework=framework))
    for name, text in export(scenario, framework, complete_layout(scenario, LABELS[framework])).files.items():
        (tmp_path / name).write_text(text)
    for launcher in ("torchrun", "accelerate"):
        (tmp_path / launcher).write_text('#!/bin/bash\nprintf "%s\\n" "$@"\n')
        (tmp_path / launcher).chmod(0o755)
    open_ones = (
        "DATA_PATH",
        "TOKENIZER_TYPE",
        "TOKENIZER_MODEL",
        "CHECKPOINT_DIR",
        "SAVE_INTERVAL",
        "LEARNING_RATE",
        "TRAIN_ITERS",
        "ROTARY_BASE",
    )
    environment = {
        "PATH": f"{tmp_path}:/usr/bin:/bin",
        "NODE_RANK": "5",
        "MASTER_ADDR": "first",
        "TRAINING_SCRIPT": "train.py",
        **dict.fromkeys(open_ones, "x"),
    }
    ran = subprocess.run(["bash", "launch.sh", "--extra", "a b"], cwd=tmp_path, env=environment, capture_output=True, text=True, check=True)
    words = ran.stdout.splitlines()
    rank = "--machine_rank" if framework == "accelerate" else "--node-rank"
    assert words[words.index(rank) + 1] == "5" and words[-2:] == ["--extra", "a b"]
    assert not any("$" in word or "@" in word for word in words)


def test_an_open_variable_stops_the_script_with_its_name(tmp_path: Path) -> None:
    scenario = make_scenario(Request(**DENSE, framework="megatron"))
    script = export(scenario, "megatron", complete_layout(scenario, LABELS["megatron"])).files["launch.sh"]
    environment = {"PATH": "/usr/bin:/bin"}
    ran = subprocess.run(["bash", "-c", script], cwd=tmp_path, env=environment, capture_output=True, text=True)
    assert ran.returncode != 0 and "MASTER_ADDR" in ran.stderr
    environment |= {"MASTER_ADDR": "first", "NODE_RANK": "0"}
    ran = subprocess.run(["bash", "-c", script], cwd=tmp_path, env=environment, capture_output=True, text=True)
    assert ran.returncode != 0 and "DATA_PATH" in ran.stderr


@pytest.mark.parametrize(
    ("framework", "label", "why"),
    [
        ("torchtitan", "tp16-pp1-zero3", "torchtitan does not take"),
        ("megatron", "tp2-pp4-zero3", "Megatron-LM does not take"),
        ("deepspeed", "dp64-zero0-mb2", "runs out of memory"),
    ],
)
def test_what_would_not_run_is_not_written(tmp_path: Path, command: Command, framework: str, label: str, why: str) -> None:
    scenario = make_scenario(Request(**DENSE, framework=framework))
    with pytest.raises(Refused, match=why):
        export(scenario, framework, complete_layout(scenario, label))
    folder = tmp_path / "run"
    wishes = ("--model", "8b", "--gpus", "64", "--global-batch", "128", "--seq-len", "8192", "--framework", framework)
    done = command("export", *wishes, "--layout", label, "--output", str(folder))
    assert done.code == 1 and why in done.err and done.err.count("\n") == 1 and not folder.exists()


def test_a_search_exports_its_first_layout(tmp_path: Path, command: Command) -> None:
    done = command("search", "--model", "8b", "--gpus", "8", "--global-batch", "16", "--draws", "0", "--export", str(tmp_path / "run"))
    assert done.code == 0 and "wrote" in done.err
    text = (tmp_path / "run" / "launch.sh").read_text()
    first = next(line.split() for line in done.out.splitlines() if line.strip().startswith("1 "))
    assert f"tp{first[1]}-pp{first[2].rstrip('*')}-" in text


def test_export_needs_a_framework_and_a_folder_that_can_be_made(tmp_path: Path, command: Command) -> None:
    done = command("export", "--model", "8b", "--gpus", "8", "--layout", "dp8", "--output", str(tmp_path))
    assert done.code == 2 and "export needs --framework, one of megatron" in done.err
    (tmp_path / "file").write_text("")
    done = command("export", "--model", "8b", "--gpus", "8", "--global-batch", "8", "--framework", "megatron", "--layout", "dp8-zero1",
                   "--output", str(tmp_path / "file"))  # fmt: skip
    assert done.code == 2 and "cannot be made" in done.err
