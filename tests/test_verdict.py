"""`planner check` judges a file as `explain` and `why --layout` judge its layout, with its own switches and its own split."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from planner.errors import InputError
from planner.explain import explain
from planner.frameworks.reading import read_config
from planner.request import Request
from planner.verdict import better_switches, check, planned
from tests.conftest import Outcome

Command = Callable[..., Outcome]

CONFIGS = Path(__file__).parent / "data" / "configs"

FLAGS = (
    "--num-layers 32 --hidden-size 4096 --ffn-hidden-size 14336 --num-attention-heads 32 --group-query-attention --num-query-groups 8 "
    "--swiglu --normalization RMSNorm --untie-embeddings-and-output-weights --disable-bias-linear --position-embedding-type rope "
    "--vocab-size 128256 --seq-length 8192 --max-position-embeddings 8192 --bf16 --micro-batch-size 1 --global-batch-size 128 "
    "--tensor-model-parallel-size 2 --pipeline-model-parallel-size 4"
)
GOOD = "--sequence-parallel --use-distributed-optimizer --overlap-grad-reduce --overlap-param-gather"


def script(folder: Path, flags: str) -> Path:
    """A launch script of an 8B model on four stages."""
    path = folder / "launch.sh"
    path.write_text(f"export CUDA_DEVICE_MAX_CONNECTIONS=1\ntorchrun pretrain_gpt.py {FLAGS} {flags}\n")
    return path


ON_64 = Request(num_gpus=64)


def test_the_ledger_is_that_of_the_layout(tmp_path: Path) -> None:
    found = check(read_config(script(tmp_path, GOOD), 64), ON_64)
    own = found.planned
    assert own.layout.label == "tp2-pp4-vp1-cp1-ep1-dp8-zero1-mb1-none"
    same = explain(own.scenario, own.layout, own.run_split)
    assert found.explanation.step is not None and same.step is not None
    assert float(found.explanation.step.total[0]) == float(same.step.total[0])
    assert found.legal and found.good and not found.findings and not found.switches


def test_a_switch_that_is_off_costs_what_the_switch_saves(tmp_path: Path) -> None:
    good = check(read_config(script(tmp_path, GOOD), 64), ON_64)
    without = check(read_config(script(tmp_path, "--sequence-parallel --use-distributed-optimizer"), 64), ON_64)
    (overlap,) = [switch for switch in without.switches if switch.words.startswith("overlap")]
    assert good.explanation.step is not None and without.explanation.step is not None
    slower = float(without.explanation.step.total[0]) - float(good.explanation.step.total[0])
    assert overlap.seconds == pytest.approx(slower, rel=1e-4) and slower > 0


def test_sequence_parallelism_left_off_is_told_with_its_memory(tmp_path: Path) -> None:
    found = check(read_config(script(tmp_path, GOOD.replace("--sequence-parallel", "")), 64), ON_64)
    assert found.legal and any("sequence-parallel" in finding.text for finding in found.findings)
    (switch,) = [switch for switch in found.switches if "sequence parallelism" in switch.words]
    assert switch.need_bytes > 0


def test_a_stated_split_is_costed_as_it_is_and_the_best_one_ranks_ahead(tmp_path: Path) -> None:
    uneven = f"{GOOD} --decoder-first-pipeline-num-layers 5 --decoder-last-pipeline-num-layers 13"
    found = check(read_config(script(tmp_path, uneven), 64), ON_64)
    assert found.planned.layers_per_stage == (5, 7, 7, 13)
    assert found.explanation.stages is not None and found.explanation.stages.layers.tolist() == [5, 7, 7, 13]
    even = check(read_config(script(tmp_path, GOOD), 64), ON_64)
    assert found.answer.rank is not None and even.answer.rank is not None and found.answer.rank > even.answer.rank


def test_options_win_over_the_file_and_fill_what_it_leaves_open(tmp_path: Path) -> None:
    config = read_config(script(tmp_path, GOOD), 128)
    own = planned(config, Request(num_gpus=128, global_batch_size=256, gpu="b200"))
    assert (own.scenario.job.num_gpus, own.scenario.job.global_batch_size, own.scenario.job.gpu.name) == (128, 256, "b200")
    assert own.layout.data_parallel == 16


UNEVEN = f"{GOOD} --decoder-first-pipeline-num-layers 5 --decoder-last-pipeline-num-layers 13"
TRIES: tuple[tuple[dict[str, tuple[int | str, ...]], str, tuple[int, ...]], ...] = (
    ({"tensor_parallel": (4,)}, "tp4-pp4-vp1-cp1-ep1-dp4-zero1-mb1-none", (5, 7, 7, 13)),
    ({"pipeline_parallel": (2,)}, "tp2-pp2-vp1-cp1-ep1-dp16-zero1-mb1-none", ()),
    ({"pipeline_parallel": (4,), "micro_batch_size": (2,)}, "tp2-pp4-vp1-cp1-ep1-dp8-zero1-mb2-none", (5, 7, 7, 13)),
    ({"virtual_pipeline": (2,), "recompute": ("full",)}, "tp2-pp4-vp2-cp1-ep1-dp8-zero1-mb1-full4", ()),
    ({"schedule": ("zero_bubble_v",)}, "tp2-pp4-vp2-cp1-ep1-dp8-zero1-mb1-none-zero_bubble_v", ()),
    ({"tensor_parallel": (4,), "data_parallel": (8,)}, "tp4-pp4-vp1-cp1-ep1-dp8-zero1-mb1-none", (5, 7, 7, 13)),
)


@pytest.mark.parametrize(("pins", "label", "split"), TRIES, ids=[label for _, label, _ in TRIES])
def test_an_axis_given_beside_a_file_overrides_the_files_and_what_follows_is_open(
    tmp_path: Path, pins: dict[str, Any], label: str, split: tuple[int, ...]
) -> None:
    own = planned(read_config(script(tmp_path, UNEVEN), 64), Request(num_gpus=64, **pins))
    assert (own.layout.label, own.layers_per_stage) == (label, split)
    told = [axis for axis in pins if any(line.startswith(f"{axis} = ") and "by option" in line for line in own.config.assumed)]
    assert told == [axis for axis, (value,) in pins.items() if (axis, value) != ("pipeline_parallel", 4)]


@pytest.mark.parametrize(("layers", "label"), [(8, "full16"), (3, "full3")])
def test_a_file_that_recomputes_every_layer_still_does_on_fewer_stages(tmp_path: Path, layers: int, label: str) -> None:
    path = script(tmp_path, f"{GOOD} --recompute-granularity full --recompute-method block --recompute-num-layers {layers}")
    own = planned(read_config(path, 64), Request(num_gpus=64, pipeline_parallel=(2,)))
    assert own.layout.label == f"tp2-pp2-vp1-cp1-ep1-dp16-zero1-mb1-{label}"


def test_the_tensor_group_of_experts_follows_where_it_is_that_of_the_rest(tmp_path: Path) -> None:
    experts = f"{GOOD} --num-experts 8 --moe-router-topk 2 --moe-ffn-hidden-size 4096"
    own = planned(read_config(script(tmp_path, experts), 64), Request(num_gpus=64, tensor_parallel=(4,)))
    assert (own.layout.tensor_parallel, own.layout.expert_tensor_parallel) == (4, 4)


def test_several_values_of_an_axis_beside_a_file_are_refused(command: Command, tmp_path: Path) -> None:
    done = command("check", str(script(tmp_path, GOOD)), "--gpus", "64", "--tp", "2,4")
    assert done.code == 2 and "tensor_parallel = 2, 4: one layout is judged, so give one value" in done.err and done.err.count("\n") == 1
    assert "tp4-pp4" in command("check", str(script(tmp_path, GOOD)), "--gpus", "64", "--tp", "4").out


def test_what_nobody_states_is_asked_for(tmp_path: Path) -> None:
    with pytest.raises(InputError, match=r"states no number of GPUs: give --gpus"):
        planned(read_config(script(tmp_path, GOOD)), Request())
    with pytest.raises(InputError, match=r"states no model: name one with --model"):
        planned(read_config(CONFIGS / "deepspeed_zero3_70b.json", 64), ON_64)


def test_the_stack_of_the_configuration_has_nothing_better_than_itself(tmp_path: Path) -> None:
    assert better_switches(planned(read_config(script(tmp_path, GOOD), 64), ON_64)) == ()


@pytest.mark.parametrize(("flags", "code"), [(GOOD, 0), (GOOD.replace("--sequence-parallel", ""), 0), (f"{GOOD} --num-layers 30", 1)])
def test_the_exit_code_says_whether_it_is_good(command: Command, tmp_path: Path, flags: str, code: int) -> None:
    assert command("check", str(script(tmp_path, flags)), "--gpus", "64").code == code


def test_out_of_memory_is_exit_code_1_and_says_how_much_is_lacking(command: Command, tmp_path: Path) -> None:
    done = command("check", str(script(tmp_path, GOOD)), "--gpus", "64", "--gpu-memory", "12")
    assert done.code == 1 and "out of memory: stage 0 needs" in done.out and "GiB too much" in done.out
    assert "the nearest layout that fits" in done.out


def test_json_holds_the_verdict_the_findings_and_the_ledger(command: Command, tmp_path: Path) -> None:
    done = command("check", str(script(tmp_path, GOOD.replace("--sequence-parallel", ""))), "--gpus", "64", "--format", "json")
    found = json.loads(done.out)
    assert found["legal"] and found["verdict"] == "fits" and found["framework"] == "megatron"
    assert [finding["kind"] for finding in found["findings"]] == ["trap"]
    assert found["ledger"]["layout"] == found["layout"] == "tp2-pp4-vp1-cp1-ep1-dp8-zero1-mb1-none"
    assert found["read"] and found["rank"] >= 1


def test_from_a_file_the_search_takes_model_and_workload_and_not_the_layout(command: Command, tmp_path: Path) -> None:
    path = script(tmp_path, GOOD)
    done = command("search", "--from", str(path), "--gpus", "64", "--top", "1", "--format", "json", "--draws", "0")
    assert done.code == 0, done.err
    assert json.loads(done.out)["layouts"][0]["tensor_parallel"] != 0
    same = command("search", "--model", str(path), "--gpus", "64", "--seq-len", "8192", "--global-batch", "128", "--framework", "megatron",
                   "--top", "1", "--format", "json", "--draws", "0")  # fmt: skip
    assert json.loads(same.out)["layouts"][0]["layout"] == json.loads(done.out)["layouts"][0]["layout"]


@pytest.mark.parametrize("name", ["launch.shx", "nothing.yaml"])
def test_a_file_that_is_not_there_is_one_line(command: Command, tmp_path: Path, name: str) -> None:
    done = command("check", str(tmp_path / name), "--gpus", "8")
    assert done.code == 2 and done.err.startswith("error: ") and done.err.count("\n") == 1


def test_a_file_that_states_no_split_is_costed_evenly(tmp_path: Path) -> None:
    found = check(read_config(script(tmp_path, GOOD), 64), ON_64)
    assert found.explanation.stages is not None and found.explanation.stages.layers.tolist() == [8, 8, 8, 8]


def test_json_says_not_legal_where_the_page_does(command: Command, tmp_path: Path) -> None:
    done = command("check", str(script(tmp_path, f"{GOOD} --num-layers 30")), "--gpus", "64", "--format", "json")
    assert done.code == 1 and json.loads(done.out)["legal"] is False


def test_another_framework_than_the_file_s_is_refused(command: Command, tmp_path: Path) -> None:
    done = command("check", str(script(tmp_path, GOOD)), "--gpus", "64", "--framework", "deepspeed")
    assert done.code == 2 and "is a configuration of Megatron-LM" in done.err
