"""Training logs: what is read of them does not depend on how they were written, and a file that is none is refused in one line."""

from __future__ import annotations

import dataclasses
import json
import math
import os
import random
from collections.abc import Callable, Iterable
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from planner import logged
from planner.errors import InputError
from planner.frameworks import logs
from planner.frameworks.logs import SAMPLES, SECONDS, TOKENS, Measured, read_log
from planner.request import Request, make_scenario
from planner.scenario import Job
from planner.units import GIB, MIB
from solver.layout import Layout
from tests.conftest import Outcome
from tests.test_validate import own_runs, write_runs

FOLDER = Path(__file__).with_name("data") / "logs"
LOGS = ("megatron", "torchtitan", "deepspeed", "deepspeed_pipeline")


def job(**changes: object) -> Job:
    """An 8B model on 16 H100, 128 sequences of 8,192."""
    wishes = {"model": "llama-3-8b", "num_gpus": 16, "seq_len": 8192, "global_batch_size": 128, **changes}
    return make_scenario(Request(**wishes)).job  # type: ignore[arg-type]


LAYOUT = Layout(tensor_parallel=2, pipeline_parallel=2, data_parallel=4, zero_stage=1)


def written(path: Path, text: str) -> Path:
    """A file with that text."""
    path.write_text(text)
    return path


def megatron_line(step: int, milliseconds: object, batch: int = 8) -> str:
    """A line of an iteration as Megatron prints it."""
    head = f" iteration {step:8d}/     500 | consumed samples: {step * batch:12d}"
    return f"{head} | elapsed time per iteration (ms): {milliseconds} | global batch size: {batch:5d} |"


def test_megatron_prints_milliseconds_batch_rate_and_tensors_in_mib() -> None:
    found = read_log(FOLDER / "megatron.log")
    assert (found.framework, found.quantity, found.global_batch_size) == ("Megatron", SECONDS, 128)
    assert (found.iterations, found.logged) == (17, 21)
    assert found.value == pytest.approx(8.91, rel=0.01) and found.spread < 0.01
    assert (found.peak_bytes, found.memory_kind) == (39873.25 * MIB, "allocated"), "the second of two ranks in one line"
    assert found.flops_per_gpu == pytest.approx(429e12, rel=0.01)
    assert found.step_seconds(job()) == found.value


def test_torchtitan_prints_tokens_per_second_and_reserved_memory() -> None:
    found = read_log(FOLDER / "torchtitan.log")
    assert (found.quantity, found.global_batch_size, found.seq_len) == (TOKENS, 8, 8192)
    assert found.value == pytest.approx(5850, rel=0.01), "neither the validation nor the line that was cut short"
    assert (found.peak_bytes, found.memory_kind) == (51.28 * GIB, "reserved")
    assert found.step_seconds(job(num_gpus=8)) == pytest.approx(8 * 8192 / (8 * found.value))


def test_deepspeed_prints_samples_per_second_of_the_whole_batch() -> None:
    found = read_log(FOLDER / "deepspeed.log")
    assert (found.quantity, found.global_batch_size) == (SAMPLES, 64)
    assert (found.peak_bytes, found.memory_kind) == (34.77 * GIB, "allocated"), "not what building the optimizer took"
    assert found.step_seconds(job()) == pytest.approx(64 / 6.3, rel=0.01)


def test_a_deepspeed_pipeline_prints_seconds() -> None:
    found = read_log(FOLDER / "deepspeed_pipeline.log")
    assert (found.quantity, found.iterations, found.logged) == (SECONDS, 10, 12)
    assert found.value == pytest.approx(4.3, rel=0.01) and math.isnan(found.peak_bytes)


OTHER_LINES = {
    "seconds of BigScience": (
        " iteration      100/  115311 | consumed samples: 9 | consumed tokens: 9 | elapsed time per iteration (s): 104.70 | "
        "global batch size:  2048 | samples per second: 19.562 | TFLOPs: 149.77 |",
        104.7,
        2048,
    ),
    "GPT-NeoX": (
        " samples/sec: 7.799 | iteration       34/   10000 | elapsed time per iteration (ms): 4103.1 | approx flops per GPU: 112.9TFLOPS |",
        4.1031,
        0,
    ),
    "NeMo": (
        "Training epoch 0, iteration 12/149 | lr: 3e-05 | global_batch_size: 512 | global_step: 12 | train_step_timing in s: 3.146 | x: 1",
        3.146,
        512,
    ),
    "the timer of 2022": ("[timer.py:197:stop] 0/17, RunningAvgSamplesPerSec=158.3, CurrSamplesPerSec=159.6, MemAllocated=1.7GB", 159.6, 0),
    "the timer of 2021": ("[timer.py:189:stop] 0/40, SamplesPerSec=83.5, MemAllocated=0.26GB, MaxMemAllocated=9.02GB", 83.5, 0),
}


@pytest.mark.parametrize("name", OTHER_LINES)
def test_relatives_of_the_formats_are_read(name: str, tmp_path: Path) -> None:
    line, value, batch = OTHER_LINES[name]
    found = read_log(written(tmp_path / "run.log", line + "\n"))
    assert found.value == pytest.approx(value) and found.global_batch_size == batch


def test_lines_cut_short_and_numbers_that_are_none_do_not_count(tmp_path: Path) -> None:
    good = [megatron_line(step, 1000 + step) for step in range(10)]
    bad = [megatron_line(20, word) for word in ("nan", "inf", "-5.0", "0.0", "", "1e")]
    whole = megatron_line(30, 12345.6)
    cut = [whole[:length] for length in range(whole.index("12345.6") + 8)]
    assert read_log(written(tmp_path / "run.log", "\n".join([*good, *bad, *cut]))).logged == 10


def test_the_batch_size_of_most_iterations_counts(tmp_path: Path) -> None:
    ramp = [megatron_line(step, 100, batch=4) for step in range(6)] + [megatron_line(step, 200, batch=8) for step in range(6, 20)]
    found = read_log(written(tmp_path / "run.log", "\n".join(ramp)))
    assert (found.global_batch_size, found.value, found.iterations) == (8, 0.2, 12)


def test_warm_up_checkpoints_and_restarts_do_not_move_the_median(tmp_path: Path) -> None:
    steady = [megatron_line(step, 1000) for step in range(1, 41)]
    disturbed = [megatron_line(1, 90000), *steady[1:20], megatron_line(21, 30000), *steady[21:30], megatron_line(25, 80000), *steady[25:]]
    found = read_log(written(tmp_path / "run.log", "\n".join(disturbed)))
    assert (found.value, found.spread) == (1.0, 0.0)


PREFIXES = ("", "[default0]:", "[rank3]:", "17: ", "node-3: ", "stdout: ", "2026-05-01T10:00:00.123Z ", "(trainer pid=77, ip=10.0.0.1) ")


def coloured(line: str, chance: random.Random) -> str:
    """The line with colours around some of its words."""
    return " ".join(
        f"\x1b[{chance.choice(('31', '1;32', '38;5;9'))}m{word}\x1b[0m" if chance.random() < 0.3 else word for word in line.split(" ")
    )


@given(seed=st.integers(0, 10**9), name=st.sampled_from(LOGS))
@settings(max_examples=60, deadline=None)
def test_prefixes_colours_order_of_ranks_and_line_ends_do_not_change_what_is_read(seed: int, name: str) -> None:
    chance = random.Random(seed)
    lines = (FOLDER / f"{name}.log").read_text().split("\n")
    plain = _measured(lines)
    built = max((place for place, line in enumerate(lines) if "Max_MA" in line), default=-1) + 1  # of building the model: stays in front
    later = [line for line in lines[built:] if any(mark.decode() in line for mark in logs.MARKS)]
    noise = [chance.choice(("", "step time", "| iteration", "é" * 50, "\x1b[31m", "tps", "loss: 3")) for _ in range(20)]
    mixed = later + later[:3] * chance.randint(0, 1) + noise
    chance.shuffle(mixed)
    changed = [chance.choice(PREFIXES) + (coloured(line, chance) if chance.random() < 0.5 else line) for line in lines[:built] + mixed]
    assert _measured(changed, end=chance.choice(("\n", "\r\n", "\r"))) == plain


def _measured(lines: Iterable[str], end: str = "\n") -> Measured:
    """What lines say, without a file, in blocks of odd sizes."""
    raw, found = end.join(lines).encode(), logs._Found()
    for line in logs.marked_lines(raw[at : at + 997] for at in range(0, len(raw), 997)):
        found.line(line)
    index = min(found.paces)
    return logs._measured(Path("x"), logs.PACES[index], found.paces[index], found)


@pytest.mark.parametrize("name", ("megatron_broken", "torchtitan_broken", "deepspeed_broken"))
def test_a_log_without_an_iteration_is_refused_in_one_line(name: str) -> None:
    with pytest.raises(InputError, match="no line with the time or speed of an iteration") as told:
        read_log(FOLDER / f"{name}.log")
    assert "\n" not in str(told.value) and len(str(told.value)) < 400


def test_what_is_no_log_is_refused_before_it_is_read(tmp_path: Path) -> None:
    sparse, pipe = tmp_path / "huge.log", tmp_path / "pipe.log"
    with sparse.open("wb") as file:
        file.truncate((64 << 20) + 1)
    os.mkfifo(pipe)
    binary = tmp_path / "binary.log"
    binary.write_bytes(megatron_line(1, 5).encode() + b"\n\0\1\2")
    wanted = {
        sparse: "larger than 64 MiB",
        pipe: "pipe or device",
        tmp_path: "is a folder",
        binary: "zero bytes",
        tmp_path / "none": "No such file",
    }
    for path, words in wanted.items():
        with pytest.raises(InputError, match=words):
            read_log(path)


def test_lines_that_only_look_like_a_log_end_the_reading(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    looked: list[bytes] = []
    seen = logs._Found.line

    def counted(self: logs._Found, raw: bytes) -> None:
        looked.append(raw)
        seen(self, raw)

    monkeypatch.setattr(logs._Found, "line", counted)
    with pytest.raises(InputError):
        read_log(written(tmp_path / "run.log", "tps: soon\n" * 200_000))
    assert len(looked) <= logs.MOST_MISSES + 1


def test_the_run_of_a_log_has_the_batch_size_that_the_log_prints() -> None:
    run = logged.run_of_log(FOLDER / "megatron.log", job(global_batch_size=256), LAYOUT)
    assert run.job.global_batch_size == 128 and run.step_seconds == pytest.approx(8.9, rel=0.01) and run.memory_kind == "allocated"


def test_a_log_of_another_configuration_is_refused() -> None:
    found = read_log(FOLDER / "torchtitan.log")
    with pytest.raises(InputError, match="sequences of 8,192 tokens, the configuration 4,096"):
        logged.measured_run(job(seq_len=4096), LAYOUT, found, "x")
    with pytest.raises(InputError, match="steps of 8 sequences do not divide by data_parallel 16"):
        logged.measured_run(job(), Layout(data_parallel=16), found, "x")
    with pytest.raises(InputError, match="is a layout of 32 GPUs, not of 16"):
        logged.measured_run(job(), Layout(data_parallel=32), found, "x")


def test_wrong_gpus_or_a_wrong_card_are_doubted() -> None:
    found = read_log(FOLDER / "megatron.log")
    right = logged.measured_run(job(), LAYOUT, found, "run")
    assert logged.doubts(found, right) == []
    wide = logged.measured_run(job(num_gpus=64), dataclasses.replace(LAYOUT, data_parallel=16), found, "run")
    assert "check the model, --seq-len and --gpus" in logged.doubts(found, wide)[0]
    small = dataclasses.replace(right, job=job(gpu="v100-sxm-32gb", precision="fp16"))
    assert "name the card with --gpu" in logged.doubts(found, small)[-1]


def test_calibrate_fits_to_a_log_that_prints_its_arguments(command: Callable[..., Outcome], tmp_path: Path) -> None:
    profile = tmp_path / "mine.toml"
    done = command("calibrate", "--log", str(FOLDER / "megatron.log"), "--write", str(profile))
    assert done.code == 0, done.err
    assert "17 of 21 logged iterations: median 8.9 s a step" in done.err and "tp2-pp2-vp1-cp1-ep1-dp4-zero1-mb1-none" in done.err
    assert "median error" in done.out and "memory of" in done.out and "38.94" in done.out
    assert "fitted to 1 runs of megatron.log" in profile.read_text()


def test_calibrate_without_a_configuration_says_how_to_name_one(command: Callable[..., Outcome]) -> None:
    done = command("calibrate", "--log", str(FOLDER / "torchtitan.log"), "--gpus", "8")
    assert done.code == 2 and done.err.count("\n") == 1
    assert "does not print the arguments of its run; name the run's configuration: --config FILE" in done.err


def test_calibrate_takes_what_a_configuration_leaves_open_from_the_flags(command: Callable[..., Outcome], tmp_path: Path) -> None:
    config = written(tmp_path / "ds_config.json", json.dumps({"train_micro_batch_size_per_gpu": 1, "zero_optimization": {"stage": 3}}))
    wishes = ("calibrate", "--log", str(FOLDER / "deepspeed.log"), "--config", str(config))
    assert "states no" in command(*wishes).err
    done = command(*wishes, "--gpus", "8", "--gpu", "a100-sxm-80gb", "--model", "llama-2-7b", "--seq-len", "4096")
    assert done.code == 0 and "dp8-zero3-mb1" in done.err, done.err


def test_calibrate_fits_rows_and_logs_together(command: Callable[..., Outcome], tmp_path: Path) -> None:
    runs = write_runs(tmp_path / "mine.csv", own_runs(1.25, count=3))
    done = command("calibrate", str(runs), "--log", str(FOLDER / "megatron.log"), "--write", str(tmp_path / "mine.toml"))
    assert done.code == 0, done.err
    assert "fitted to 4 runs of mine.csv, megatron.log" in (tmp_path / "mine.toml").read_text()


def test_one_configuration_serves_all_logs_or_each_its_own(command: Callable[..., Outcome]) -> None:
    log = str(FOLDER / "megatron.log")
    done = command("calibrate", "--log", log, "--log", log, "--log", log, "--config", log, "--config", log)
    assert done.code == 2 and "2 configurations for 3 logs" in done.err
    assert command("calibrate", "--log", log, "--log", log, "--config", log).code == 0


def test_calibrate_refuses_what_it_cannot_use(command: Callable[..., Outcome], tmp_path: Path) -> None:
    assert "nothing to fit to" in command("calibrate").err
    runs = write_runs(tmp_path / "mine.csv", own_runs(1.0, count=3))
    assert "go with --log" in command("calibrate", str(runs), "--gpus", "8").err
    done = command("calibrate", "--log", str(FOLDER / "torchtitan_broken.log"), "--config", "x.toml")
    assert done.code == 2 and "no line with the time or speed of an iteration" in done.err
