"""Bad input: one clear line on standard error and exit code 2, never a traceback, a hang, a half file or an absurd number."""

from __future__ import annotations

import json
import os
import re
import resource
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.conftest import Outcome

Command = Callable[..., Outcome]
Rejected = Callable[[list[str], str], None]

pytestmark = pytest.mark.filterwarnings("error::RuntimeWarning")

JOB = ["search", "--model", "7b", "--gpus", "8"]
SHAPE = "layers=4,hidden=512,heads=8"
SCENARIO = '[model]\nname = "7b"\n[cluster]\nnum_gpus = 8\n'
MODEL = "num_layers = 4\nhidden_size = 512\nnum_attention_heads = 8\nffn_hidden_size = 1024\nvocab_size = 1000\n"
ABSURD = re.compile(r"\b(nan|inf)\b|(?<!\S)-\d", re.IGNORECASE)
"""A number that no page may print."""


@pytest.fixture
def rejected(command: Command) -> Rejected:
    """Runs a command that must refuse its input with one line that matches a pattern."""

    def check(arguments: list[str], telling: str) -> None:
        done = command(*arguments)
        assert (done.code, done.out) == (2, ""), done
        assert done.err.startswith("error: ") and done.err.count("\n") == 1, done.err
        assert re.search(telling, done.err), done.err

    return check


def cases(text: str) -> list[tuple[list[str], str]]:
    """Lines of ``arguments => pattern``; the arguments are split at blanks, ``''`` is an empty one and ``~`` a blank in one."""
    found = []
    for line in filter(None, map(str.strip, text.splitlines())):
        words, pattern = line.split(" => ")
        found.append(([word.replace("''", "").replace("~", " ") for word in words.split()], pattern))
    return found


NAMES = """
    --model lama --gpus 8 => no model called 'lama'; did you mean '
    --model zzz --gpus 8 => no model called 'zzz'; known: .*deepseek-v3.* and [0-9]+ more
    --model '' --gpus 8 => model
    --model llama/3 --gpus 8 => no model file 'llama/3'; give a catalogue name
    --model /etc/passwd --gpus 8 => no model file '/etc/passwd'
    --model missing.toml --gpus 8 => missing.toml: cannot be read
    --model planner/catalogue/gpus/h200-sxm-141gb.toml --gpus 8 => h200-sxm-141gb.toml: unknown key 'generation'
    --model 7b => num_gpus is missing: give --gpus
    --gpus 8 => model is missing: name one with --model
    --model 7b --gpus 8 --model-shape layers=2,hidden=512 => model_shape|--model-shape
    --model-shape '' --gpus 8 => model.shape
    --model 7b --gpus 8 --gpu h10 => no gpu called 'h10'; did you mean 'h100'
    --model 7b --gpus 8 --gpu '' => gpu
    --model 7b --gpus 8 --cluster hgxx => no cluster called 'hgxx'; did you mean 'hgx'
    --model 7b --gpus 8 --cluster '' => cluster
    --model 7b --gpus 8 --software megatorn => no software called 'megatorn'; did you mean 'megatron'
    --model 7b --gpus 8 --software '' => software
    --model 7b --gpus 8 --framework megatorn => framework = 'megatorn'; did you mean 'megatron'
    --model 7b --gpus 8 --precision bf61 => precision = 'bf61'; did you mean 'bf16'
    --model 7b --gpus 8 --precision '' => precision
    --model 7b --gpus 8 --optimizer adamw => optimizer = 'adamw'; did you mean 'adam'
    --model 7b --gpus 8 --optimizer '' => optimizer
    --model 7b --gpus 8 --recompute ful => recompute = 'ful'; did you mean 'full'
    --model 7b --gpus 8 --schedule 1f1c => schedule = '1f1c'; did you mean '1f1b'
    --model 7b --gpus 8 --sort speed => --sort.*'step', 'memory'
    --model 7b --gpus 8 --format yaml => --format.*'table', 'csv'
    --scenario 70b-46 => no scenario called '70b-46'.*did you mean '70b-64'
    --scenario '' => scenario
    --modle 7b --gpus 8 => --modle.*--model
    extra --model 7b --gpus 8 => unexpected extra argument .*extra
"""


@pytest.mark.parametrize(("arguments", "telling"), cases(NAMES))
def test_unknown_names(rejected: Rejected, arguments: list[str], telling: str) -> None:
    rejected(["search", *arguments], telling)


@pytest.mark.parametrize("length", [300, 5000])
@pytest.mark.parametrize("option", ["--model", "--gpu", "--scenario"])
def test_names_longer_than_a_file_name(rejected: Rejected, option: str, length: int) -> None:
    rejected([*JOB, option, "a" * length], option.strip("-"))


@pytest.mark.parametrize("text", ["", " ", "-1", "nan", "inf", "0x10", "4e", "1e-3", "+8", "٣", "eight", "8,", "1,2", "1,02,4", "8__"])
@pytest.mark.parametrize("option", ["--gpus", "--seq-len", "--tokens"])
def test_counts_that_are_no_counts(rejected: Rejected, option: str, text: str) -> None:
    rejected([*JOB, option, text], f"{option} = '{re.escape(text)}' must be a positive number such as")


COUNTS = """
    --gpus 0 => num_gpus = 0 must lie between 1 and
    --gpus 2.5 => --gpus = 2.5 must be a whole number
    --gpus 1e30 => num_gpus = 1\\d+ must lie between 1 and
    --seq-len 0 => seq.len = 0 must
    --seq-len 0 --batch-tokens 4096 => seq.len = 0
    --seq-len 1e30 => seq.len = 1\\d+ must lie between 1 and
    --global-batch 0 => global_batch_size = 0 must lie between 1 and
    --global-batch 1e30 => global_batch_size = 1\\d+ must lie between 1 and
    --batch-tokens 0 => (global_batch|batch.tokens).* = 0
    --batch-tokens 4M => global_batch_tokens = 4000000 is no multiple of seq_len = 4096; nearest: 3997696, 4001792
    --batch-tokens 4194304 --global-batch 1024 => not both
    --global-batch 7 --dp 8 => global_batch_size = 7 does not divide by any data_parallel .*nearest legal: 8
    --gpus 10007 => global_batch_size = 1024 .*10,007.*nearest legal: 10007
    --gpus-per-node 0 => gpus_per_node = 0
    --gpus-per-node 1e20 => gpus_per_node = 1\\d+
    --max-pp 0 => max_pipeline_parallel = 0
    --nic 0 => nic_gbit_per_s = 0
    --nic 1e30 => nic_gbit_per_s = 1
    --gpus 16 --nic 0.0000001 => nic_gbit_per_s = 1e-07
    --gpu-memory 0 => memory.* = 0
    --gpu-memory 0.001 => memory.* = 0.001
    --gpu-memory 1T => memory.* = 1
    --gpu-memory 1e30 => memory.* = 1
    --tokens 0.0000001 => tokens = 1e-07
    --tokens 1e99 => tokens = 1e\\+99
    --price 2,50 => price.* = '2,50'
    --price 1e99 => price.* = 1e\\+99
    --top 0 => --top.*0 is not in the range 1<=x
    --top x => --top.*'x'
    --all => --all writes CSV: give --csv FILE
    --seq-len 4096 --model gpt-3-175b => seq_len = 4096 is beyond the 2048 learned positions of gpt-3-175b
    --precision fp8 --gpu a100 => precision = 'fp8': a100-sxm-80gb has no such
    --precision bf16 --gpu v100 => precision = 'bf16': v100\\S+ has no such .*fp16
    --precision nvfp4 => precision = 'nvfp4': h100-sxm-80gb has no such
    --tp 0 => tensor_parallel = 0 must lie between 1 and
    --tp '' => --tp = .*whole numbers separated by commas
    --tp 2.0 => --tp = 2.0 must be whole numbers separated by commas
    --tp 2,,4 => --tp = 2,,4 must be whole numbers separated by commas
    --tp ٢ => --tp = ٢ must be whole numbers separated by commas
    --tp 1_6 => --tp = 1_6 must be whole numbers separated by commas
    --tp 99999999999999999999999 => tensor_parallel = 9+ must lie between 1 and
    --zero 4 => zero_stage = 4 must lie between 0 and 3
    --recompute-layers -1 => recompute_layers = -1 must lie between 0 and
"""


@pytest.mark.parametrize(("arguments", "telling"), cases(COUNTS))
def test_impossible_counts(rejected: Rejected, arguments: list[str], telling: str) -> None:
    rejected([*JOB, *arguments], telling)


RUNS = """
    --deadline abc => --max-days = 'abc' must be a span of time such as 30d, 36h or 30
    --deadline -3d => --max-days = '-3d' must be a span of time
    --deadline '' => --max-days = '' must be a span of time
    --deadline d => --max-days = 'd' must be a span of time
    --deadline 3w => --max-days = '3w' must be a span of time
    --deadline nan => --max-days = 'nan' must be a span of time
    --deadline inf => --max-days = 'inf' must be a span of time
    --deadline 0 => max_days = 0 must lie between 1e-06 and 1,000,000
    --deadline 0h => max_days = 0 must lie between
    --deadline 1e99 => max_days = 1e\\+99 must lie between
    --tokens 0 --deadline 30d => max_days = 30 needs workload.training_tokens .--tokens.
    --budget abc => --max-cost = 'abc' must be a positive number
    --budget -1 => --max-cost = '-1' must be a positive number
    --budget 0 => max_cost_usd = 0 must lie between
    --budget 1e99 => max_cost_usd = 1e\\+99 must lie between
    --tokens 0 --budget 1M => max_cost_usd = 1e\\+06 needs workload.training_tokens .--tokens.
    --step-under fast => --max-step = 'fast' must be a positive number
    --step-under 0 => max_step_seconds = 0 must lie between
    --step-under 1e99 => max_step_seconds = 1e\\+99 must lie between
    --tokens-per-second 0 => min_tokens_per_second = 0 must lie between
    --tokens-per-second 1e99 => min_tokens_per_second = 1e\\+99 must lie between
    --operations nosuch => no operation called 'nosuch'; did you mean
    --operations '' => operations is empty
    --operations missing.toml => missing.toml: cannot be read
    --failures -1 => --failures = '-1' must be a positive number
    --failures 1e6 => interruptions_per_1000_gpu_days = 1e\\+06 must lie between 0.0 and 100,000
    --restart 1e9 => restart_minutes = 1e\\+09 must lie between
    --storage 0 => storage_gb_per_s = 0 must lie between 0.0001 and
    --storage 1e99 => storage_gb_per_s = 1e\\+99 must lie between
    --checkpoint-every 0 => checkpoint_minutes = 0 must lie between 0.01 and
    --checkpoint-every 1e99 => checkpoint_minutes = 1e\\+99 must lie between
    --evaluation 11 => evaluation_share = 11 must lie between 0.0 and 10
    --sort goodputs => --sort.*'goodput'
    --long-context x => x
"""


@pytest.mark.parametrize(("arguments", "telling"), cases(RUNS))
def test_impossible_runs_and_targets(rejected: Rejected, arguments: list[str], telling: str) -> None:
    rejected([*JOB, *([] if "--tokens" in arguments else ["--tokens", "1T"]), *arguments], telling)


@pytest.mark.parametrize("option", [["--deadline", "30d"], ["--budget", "1M"]])
@pytest.mark.parametrize("name", ["search", "min-gpus", "why", "explain", "sensitivity"])
def test_days_and_dollars_need_the_tokens_of_the_run(rejected: Rejected, name: str, option: list[str]) -> None:
    size = [] if name == "min-gpus" else ["--gpus", "8"]
    layout = ["--layout", "tp8"] if name == "explain" else []
    rejected([name, "--model", "7b", *size, *layout, *option], "needs workload.training_tokens .--tokens.")


FEWEST = """
    --gpus 8 => --gpus = 8: min-gpus finds the number; leave it out, or bound it with --most
    --most 0 => --most = 0 must lie between 1 and 10,000,000
    --most 10000001 => --most = 10,000,001 must lie between 1 and 10,000,000
    --most 2.5 => --most = 2.5 must be a whole number
    --most many => --most = 'many' must be a positive number
    --batch-within 51 => --batch-within = 51 must lie between 0 and 50
    --batch-within nan => --batch-within = 'nan' must be a positive number
    --batch-within -1 => --batch-within = '-1' must be a positive number
    --format csv => --format.*'table', 'json'
    --deadline 30 => max_days = 30 needs workload.training_tokens .--tokens.
    --model-shape layers=2,hidden=512 => not both
    --output nowhere/x => the folder nowhere does not exist
"""


@pytest.mark.parametrize(("arguments", "telling"), cases(FEWEST))
def test_impossible_questions_about_the_fewest_gpus(rejected: Rejected, arguments: list[str], telling: str) -> None:
    rejected(["min-gpus", "--model", "7b", *arguments], telling)


SHAPES = """
    ~ => num_layers is missing
    layers=4 => hidden_size is missing
    layers => 'layers' is not key=value
    layrs=4,hidden=512 => 'layrs=4' is not key=value with a known key; did you mean 'layers'
    layers=0,hidden=512 => num_layers = 0 must
    layers=-4,hidden=512 => num_layers = '-4' must be a positive
    layers=nan,hidden=512 => num_layers = 'nan' must be a positive
    layers=4.5,hidden=512 => num_layers = '4.5' must be a whole number
    layers=4,layers=8,hidden=512 => layers.*(twice|second time|more than once)
    layers=4,hidden=500,heads=8 => hidden_size = 500 does not divide by num_attention_heads = 8
    layers=4,hidden=512,heads=8,kv_heads=3 => num_key_value_heads = 3 must divide num_attention_heads = 8
    layers=4,hidden=512,heads=8,experts=8 => experts_per_token = 0 must lie in 1..num_experts = 8
    layers=4,hidden=512,heads=8,experts=8,top_k=2 => moe_ffn_hidden_size is missing
    layers=4,hidden=512,heads=8,experts=8,top_k=9,moe_ffn=128 => experts_per_token = 9 must lie in 1..num_experts = 8
    layers=4,hidden=512,heads=8,experts=8,top_k=2,moe_ffn=128,num_dense_layers=4 => num_dense_layers = 4 must be below
    layers=4,hidden=512,heads=8,sliding_window=10,num_window_layers=100 => num_window_layers = 100
    layers=4,hidden=512,heads=8,tied=2 => tied_embeddings = 2 must be true or false
    layers=4,hidden=512,heads=8,tied=yes => tied_embeddings = '?yes'? must be true or false
    layers=4,hidden=512,heads=8,norm=foo => norm = 'foo' is not one of 'rmsnorm', 'layernorm'
    layers=4,hidden=1e12,heads=1 => hidden_size = 1
    layers=4,hidden=512,heads=8,vocab=1e18 => vocab_size = 1
    layers=4,hidden=512,heads=8,ffn=1e18 => ffn_hidden_size = 1
    layers=4,hidden=512,heads=8,head_dim=1e15 => head_dim = 1
    layers=4,hidden=512,heads=8,experts=1e15,top_k=1,moe_ffn=1e15 => (num_experts|moe_ffn_hidden_size) = 1
    layers=4,hidden=512,heads=8,num_mtp_layers=1e15 => num_mtp_layers = 1
    layers=1e18,hidden=512,heads=8 => num_layers = 1
"""


@pytest.mark.parametrize(("arguments", "telling"), cases(SHAPES))
def test_nonsense_shapes(rejected: Rejected, arguments: list[str], telling: str) -> None:
    rejected(["search", "--gpus", "8", "--model-shape", *arguments], telling)


FILES: dict[str, tuple[str | bytes, str]] = {
    "broken": ("[model\nname = 7b\n", "not valid TOML: .*line 1"),
    "repeated": ('[model]\nname = "7b"\nname = "8b"\n', "not valid TOML: .*line 3"),
    "binary": (b"\x00\x01\xff\xfe", "not a text file in UTF-8"),
    "large": (b"#" * (10 << 20), "larger than 4 MiB"),
    "deep": ("x = " + "[" * 20_000 + "]" * 20_000, "not valid TOML|nested"),
    "deep_tables": ("x = " + "{a=" * 3_000 + "1" + "}" * 3_000, "not valid TOML|nested"),
    "empty": ("", "model is missing"),
    "table": ('[modle]\nname = "7b"\n', "unknown table 'modle'; did you mean 'model'"),
    "array_of_tables": ('[[model]]\nname = "7b"\n', "'model' must be a table"),
    "flat": ('model = "7b"\nnum_gpus = 8\n', "'model' must be a table"),
    "key": ('[model]\nname = "7b"\n[cluster]\nnum_gpu = 8\n', "cluster has no key 'num_gpu'; did you mean 'num_gpus'"),
    "word": ('[model]\nname = "7b"\n[cluster]\nnum_gpus = "eight"\n', "cluster.num_gpus = 'eight' must be a positive number"),
    "list": ('[model]\nname = "7b"\n[cluster]\nnum_gpus = [8]\n', r"cluster.num_gpus = \[8\] must be a whole number"),
    "truth": ('[model]\nname = "7b"\n[cluster]\nnum_gpus = true\n', "cluster.num_gpus = [Tt]rue must be a whole number"),
    "fraction": ('[model]\nname = "7b"\n[cluster]\nnum_gpus = 8.5\n', "cluster.num_gpus = 8.5 must be a whole number"),
    "date": ('[model]\nname = "7b"\n[cluster]\nnum_gpus = 1979-05-27\n', "cluster.num_gpus = .* must be a whole number"),
    "number_as_name": ("[model]\nname = 7\n[cluster]\nnum_gpus = 8\n", "model.name = 7 must be a text"),
    "nan": (SCENARIO + "gpu_memory_gib = nan\n", "cluster.gpu_memory_gib = nan must be finite"),
    "inf": (SCENARIO + "gpu_memory_gib = inf\n", "cluster.gpu_memory_gib = inf must be finite"),
    "negative": (SCENARIO + "price_usd_per_hour = -3\n", "cluster.price_usd_per_hour = -3.0 must be finite and not negative"),
    "no_values": (SCENARIO + "[choices]\ntensor_parallel = []\n", "choices.tensor_parallel is an empty list"),
    "nested_values": (SCENARIO + "[choices]\ntensor_parallel = [[2]]\n", r"choices.tensor_parallel = \[2\] must be a whole number"),
    "text_for_truth": (SCENARIO + '[choices]\npad_vocabulary = "yes"\n', "choices.pad_vocabulary = 'yes' must be true or false"),
    "operations_key": (SCENARIO + "[operations]\nfailures = 1\n", "operations has no key 'failures'"),
    "operations_near": (
        SCENARIO + "[operations]\nrestart_minute = 1\n",
        "operations has no key 'restart_minute'; did you mean 'restart_minutes'",
    ),
    "operations_range": (SCENARIO + "[operations]\nstorage_gb_per_s = 0\n", "operations.storage_gb_per_s = 0 must lie between"),
    "operations_name": (SCENARIO + '[operations]\nname = "nosuch"\n', "no operation called 'nosuch'"),
    "operations_truth": (SCENARIO + "[operations]\nasynchronous_checkpoints = 1\n", "asynchronous_checkpoints = 1 must be true or false"),
    "operations_nan": (SCENARIO + "[operations]\nevaluation_share = nan\n", "operations.evaluation_share = nan must be finite"),
    "choices_key": (SCENARIO + "[choices]\nmax_day = 3\n", "choices has no key 'max_day'; did you mean 'max_days'"),
    "choices_deadline": (SCENARIO + "[choices]\ndeadline = 3\n", "choices has no key 'deadline'"),
    "choices_target": (SCENARIO + "[choices]\nmax_step_seconds = -1\n", "choices.max_step_seconds = -1.0 must be finite and not negative"),
    "choices_zero": (SCENARIO + "[choices]\nmin_tokens_per_second = 0\n", "choices.min_tokens_per_second = 0 must lie between"),
    "choices_tokens": (SCENARIO + "[choices]\nmax_days = 3\n", "choices.max_days = 3 needs workload.training_tokens"),
    "nested_name": ("[model.name]\nx = 1\n[cluster]\nnum_gpus = 8\n", "nested_name.toml: model.name = .* must be a text"),
}


@pytest.mark.parametrize("name", FILES)
def test_malformed_scenario_files(rejected: Rejected, tmp_path: Path, name: str) -> None:
    content, telling = FILES[name]
    path = tmp_path / f"{name}.toml"
    path.write_bytes(content.encode() if isinstance(content, str) else content)
    rejected(["search", "--scenario", str(path)], telling)


@pytest.mark.parametrize(("word", "telling"), [("missing.toml", "No such file"), (".", "Is a directory"), ("planner", "Is a directory")])
def test_scenarios_that_are_no_files(rejected: Rejected, word: str, telling: str) -> None:
    rejected(["search", "--scenario", word], telling)


MODELS = {
    "num_layer = 4": "unknown key 'num_layer'; did you mean 'num_layers'",
    "num_layers = nan": "num_layers = nan must be a whole number",
    "num_layers = -4": "num_layers = -4 must be finite and not negative",
    'tied_embeddings = "no"': "tied_embeddings = 'no' must be true or false",
    'aliases = "x"': "aliases = 'x' must be a list",
    "published = 3": "published",
}


@pytest.mark.parametrize("line", MODELS)
def test_malformed_model_files(rejected: Rejected, tmp_path: Path, line: str) -> None:
    path = tmp_path / "mine.toml"
    rest = [row for row in MODEL.splitlines() if not row.startswith(line.split(" =")[0] + " ")]
    path.write_text("\n".join([*rest, line]) + "\n")
    rejected(["search", "--gpus", "8", "--model", str(path)], f"mine.toml: .*{MODELS[line]}")


RECORDS = {
    "software": ("--software", "fsdp2", ["matmul_quality = 0", "matmul_quality = 1e9", "vocab_multiple = 0", "memory_uncertainty = 100"]),
    "gpus": (
        "--gpu",
        "h200-sxm-141gb",
        ["memory_gib = 0", "memory_gib = 1e20", "hbm_gb_per_s = 0", "peak_bf16_tflops = 1e-20", "sustained_share = 2"],
    ),
    "clusters": ("--cluster", "hgx", ["gpus_per_node = 0", "oversubscription = 0.5", "nic_gbit_per_s = 1e-20"]),
}


@pytest.mark.parametrize(("kind", "line"), [(kind, line) for kind, (_, _, lines) in RECORDS.items() for line in lines])
def test_absurd_figures_of_own_records(rejected: Rejected, tmp_path: Path, kind: str, line: str) -> None:
    option, shipped, _ = RECORDS[kind]
    key = line.split(" = ")[0]
    text = Path(f"planner/catalogue/{kind}/{shipped}.toml").read_text()
    changed, found = re.subn(rf"(?m)^{key}\s*=.*$", line, text)
    path = tmp_path / "mine.toml"
    path.write_text(changed if found else f"{line}\n{text}")
    stem = re.sub("_(gib|gb_per_s|tflops|gbit_per_s)$", "", key)
    rejected(["search", "--model", "7b", "--gpus", "16", option, str(path)], f"mine.*{stem}")


@pytest.mark.parametrize("kind", RECORDS)
def test_own_records_with_sound_figures_work(command: Command, tmp_path: Path, kind: str) -> None:
    option, shipped, _ = RECORDS[kind]
    path = tmp_path / "mine.toml"
    path.write_text(Path(f"planner/catalogue/{kind}/{shipped}.toml").read_text())
    done = command("search", "--model", "7b", "--gpus", "16", option, str(path), "--top", "1")
    assert (done.code, done.err) == (0, "") and not ABSURD.search(done.out)


LAYOUTS = """
    '' => layout ''
    tp0 => tensor_parallel = 0 must be at least 1
    tp-1 => 'tp' is no part of a layout label; did you mean 'tp8'
    tp8tp8 => 'tp8tp8' is no part of a layout label; did you mean 'tp8'
    8tp => '8tp' is no part of a layout label; did you mean 'tp8'
    tp8- => '' is no part of a layout label
    tp8~pp1 => 'tp8 pp1' is no part of a layout label
    tp٨ => 'tp٨' is no part of a layout label
    tp8-tp4 => 'tp4' states tensor_parallel a second time
    dp8-full2-none => 'none' states recompute a second time
    dp8-full1.5 => 'full1.5' is no part of a layout label; did you mean 'full'
    dp8-foo => 'foo' is no part of a layout label; known: .*tp8
    zero9 => zero_stage = 9 must be 0, 1, 2 or 3
    dp8-mb0 => micro_batch_size = 0 must be at least 1
    tp99999999999 => tp99999999999
"""


@pytest.mark.parametrize(("arguments", "telling"), cases(LAYOUTS))
def test_labels_that_are_no_layouts(rejected: Rejected, arguments: list[str], telling: str) -> None:
    rejected(["explain", "--model", "7b", "--gpus", "8", "--layout", *arguments], telling)


ILLEGAL = [
    ("tp8-pp2", "gpu_product: tensor 8 x pipeline 2 x context 1 x data 1 = 16, not num_gpus = 8"),
    ("tp8-pp2-dp1", r"legal pipeline_parallel, all else kept: 1\n"),
    ("tp3", "heads: num_attention_heads = 32 does not divide by tensor_parallel = 3"),
    ("tp999999999-pp999999999-cp999999999-dp999999999", "not num_gpus = 8"),
    ("dp8-mb3", r"legal micro_batch_size, all else kept: 1, 2, 4, 8, 16, 32, 64, 128\n"),
    ("dp8-full999", "recompute_depth: recompute full with 999 layers does not suit chunks of at most 32"),
    ("dp7", "replicas: global_batch_size = 1024 does not divide by data_parallel = 7"),
    ("ep2-dp8", r"legal expert_parallel, all else kept: 1\n"),
    ("pp8-vp999999999", "asks for more chunks than num_layers = 32"),
    ("pp8-vp2-1f1b", "legal schedule, all else kept: .*interleaved_1f1b"),
    ("pp4-vp3-dualpipe-dp2", "schedule dualpipe does not suit"),
    ("pp2-vp1-zero_bubble_v-dp4", "schedule zero_bubble_v does not suit"),
]


@pytest.mark.parametrize(("label", "telling"), ILLEGAL)
def test_illegal_layouts_exit_1_with_the_rule_and_what_is_legal(command: Command, label: str, telling: str) -> None:
    done = command("explain", "--model", "7b", "--gpus", "8", "--layout", label)
    assert (done.code, done.err) == (1, "")
    assert re.search(telling, done.out), done.out


def test_an_illegal_layout_is_called_illegal_before_its_figures(command: Command) -> None:
    done = command("explain", "--model", "7b", "--gpus", "8", "--layout", "dp8-full999")
    assert re.search("not legal|illegal", done.out) and "verdict: fits" not in done.out


def test_a_dense_model_has_no_expert_rule_about_zero_experts(command: Command) -> None:
    done = command("explain", "--model", "7b", "--gpus", "8", "--layout", "etp2-dp8")
    assert done.code == 1 and "num_experts = 0 does not divide by expert_parallel = 1" not in done.out


PINS = [
    (["--tp", "3"], "tensor_group_in_node"),
    (["--tp", "8", "--pp", "8"], "gpu_product"),
    (["--dp", "3"], "gpu_product"),
    (["--ep", "2"], "experts"),
    (["--vp", "2", "--pp", "1"], "interleaving"),
    (["--pp", "8", "--max-pp", "4"], "pipeline_depth"),
    (["--mb", "1025"], "batch"),
    (["--recompute", "none", "--recompute-layers", "4"], "recompute_depth"),
    (["--cp", "8", "--seq-len", "4095"], "sequence"),
    (["--model", "mixtral-8x7b", "--etp", "2", "--tp", "4"], "expert_tensor"),
    (["--gpu-memory", "1"], "memory(_floor)?"),
    (["--model", "405b", "--seq-len", "67108864", "--global-batch", "8"], "memory_floor"),
]


@pytest.mark.parametrize(("arguments", "rule"), PINS)
def test_contradicting_pins_exit_1_with_the_counts_and_the_nearest(command: Command, arguments: list[str], rule: str) -> None:
    done = command(*JOB, *arguments)
    assert done.code == 1 and not ABSURD.search(done.out)
    assert re.search(rf"dropped: .*{rule} [\d,]+", " ".join(done.out.split())), done.out
    assert "nearest" in done.out


def test_flags_win_over_the_file(command: Command, tmp_path: Path) -> None:
    path = tmp_path / "mine.toml"
    path.write_text(f'[model]\nshape = "{SHAPE}"\n[cluster]\nnum_gpus = 8\n[workload]\nglobal_batch_size = 64\n')
    flags = ["--model", "7b", "--batch-tokens", str(4096 * 32)]
    done = command("search", "--scenario", str(path), *flags, "--format", "json", "--top", "1")
    assert done.code == 0, done.err
    assert (json.loads(done.out)["scenario"]["model"], json.loads(done.out)["scenario"]["global_batch_size"]) == ("llama-2-7b", 32)


@pytest.mark.parametrize(
    "arguments",
    [
        ["--tp", "2,2,2", "--pp", "1"],
        ["--tokens", "1T", "--price", "0", "--sort", "cost"],
        ["--gpus", "131072", "--model", "70b", "--tp", "8", "--mb", "1"],
        ["--gpus", "1", "--model", "llama-3.2-1b", "--global-batch", "1"],
        ["--seq-len", "1", "--mb", "64"],
    ],
)
def test_odd_but_legal_input_gives_plain_numbers(command: Command, arguments: list[str]) -> None:
    done = command(*JOB, *arguments, "--format", "json", "--top", "3")
    assert (done.code, done.err) == (0, "")
    assert "NaN" not in done.out and "Infinity" not in done.out
    for row in json.loads(done.out)["layouts"]:
        assert row["step_seconds"] > 0 and 0 < row["mfu"] < 1 and row["memory_gib"] > 0


SEVERE = ["--failures", "100000", "--restart", "100000", "--checkpoint-every", "60", "--storage", "0.0001"]


@pytest.mark.parametrize(
    ("arguments", "code", "telling"),
    [
        (["--failures", "0"], 0, "failures: none assumed.*never needed.*goodput 96.8%.*work lost 0.0%, restarts 0.0%"),
        (["--failures", "0", "--checkpoint-every", "60", "--async-checkpoints"], 0, "every 60 min .* steps"),
        (["--failures", "0", "--evaluation", "0"], 0, "goodput 100.0%"),
        (["--price", "0", "--budget", "1"], 0, "[$]0 at [$]0.00"),
        (["--restart", "0", "--storage", "1000000"], 0, "goodput"),
        (SEVERE, 0, "goodput 0.0%.*restarts 100.0%"),
        ([*SEVERE, "--deadline", "30d", "--budget", "1M"], 1, "no layout meets the target .at most 30 days .*at most [$]1,000,000"),
        (["--budget", "0.5"], 1, "at most [$]0.5 for 1,000B tokens"),
        (["--deadline", "0.000001"], 1, "at most 1e-06 days"),
    ],
)
def test_odd_but_legal_runs_give_a_page_of_plain_numbers(command: Command, arguments: list[str], code: int, telling: str) -> None:
    done = command(*JOB, "--tokens", "1T", "--tp", "1", "--pp", "1", "--mb", "1", "--draws", "0", "--top", "2", *arguments)
    page = " ".join(done.out.split())
    assert (done.code, done.err) == (code, "") and re.search(telling, page), page
    assert not ABSURD.search(done.out) and not re.search(r"\d{16}|-0\.0", page.replace(",", ""))


def test_cost_zero_ranks_like_step_time(command: Command) -> None:
    free = ("--price", "0", "--draws", "0", "--format", "csv", "--top", "20")
    assert command(*JOB, "--sort", "cost", *free).out == command(*JOB, *free).out


PLACES = [
    ("/nonexistent/x", "/nonexistent/x: the folder /nonexistent does not exist"),
    ("{tmp}", "is a folder; give a file name"),
    ("{tmp}/new/", "folder"),
    ("/dev/full", "/dev/full: cannot be written .No space left"),
    ("pyproject.toml/x", "the folder pyproject.toml does not exist"),
    ("{tmp}/" + "a" * 260, "cannot be written .File name too long"),
    ("/proc/x", "/proc/x: cannot be written"),
]


@pytest.mark.parametrize("option", ["--output", "--csv"])
@pytest.mark.parametrize(("place", "telling"), PLACES)
def test_unwritable_places(rejected: Rejected, tmp_path: Path, option: str, place: str, telling: str) -> None:
    rejected([*JOB, "--tp", "1", "--top", "1", option, place.format(tmp=tmp_path)], telling)
    assert list(tmp_path.iterdir()) == []


def test_one_file_for_page_and_csv(rejected: Rejected, tmp_path: Path) -> None:
    (tmp_path / "x").write_text("old")
    rejected([*JOB, "--tp", "1", "--csv", f"{tmp_path}/x", "--output", f"{tmp_path}/../{tmp_path.name}/x"], "--csv|--output|same file")
    assert (tmp_path / "x").read_text() == "old"


def test_a_failing_page_leaves_no_csv(rejected: Rejected, tmp_path: Path) -> None:
    rejected([*JOB, "--tp", "1", "--csv", f"{tmp_path}/x.csv", "--output", "/dev/full"], "No space left")
    assert list(tmp_path.iterdir()) == []


def test_nothing_is_written_when_the_input_is_bad(rejected: Rejected, tmp_path: Path) -> None:
    (tmp_path / "kept").write_text("old")
    rejected([*JOB, "--gpu", "zzz", "--output", f"{tmp_path}/kept", "--csv", f"{tmp_path}/new"], "no gpu called 'zzz'")
    assert [(path.name, path.read_text()) for path in tmp_path.iterdir()] == [("kept", "old")]


# what only a process of its own shows: closed pipes, full disks, signals, hangs, memory

RUN = [sys.executable, "-c", "from planner.cli import main; main()"]
GB = 1 << 30


def spawn(arguments: list[str], *, stdout: int = subprocess.PIPE, close_stdout: bool = False) -> subprocess.Popen[str]:
    """``planner`` in a process with little memory, Ctrl-C as in a terminal."""

    def prepare() -> None:
        resource.setrlimit(resource.RLIMIT_AS, (3 * GB, 3 * GB))
        signal.signal(signal.SIGINT, signal.SIG_DFL)
        if close_stdout:
            os.close(1)

    return subprocess.Popen([*RUN, *arguments], stdout=stdout, stderr=subprocess.PIPE, text=True, preexec_fn=prepare)


def ended(process: subprocess.Popen[str], seconds: float) -> Outcome:
    """Its end, within ``seconds``."""
    try:
        out, err = process.communicate(timeout=seconds)
    except subprocess.TimeoutExpired:
        process.kill()
        process.communicate()
        pytest.fail(f"no end within {seconds} s")
    return Outcome(process.returncode, out or "", err)


@pytest.mark.parametrize(
    ("arguments", "telling"),
    [
        (["--model-shape", "layers=1e9,hidden=512,heads=8"], "num_layers = 1000000000"),
        (["--model-shape", "layers=100000,hidden=512,heads=8"], "num_layers = 100000"),
        (["--model-shape", "layers=4,hidden=1e8,heads=1e8,head_dim=1"], "(heads|hidden_size) = 100000000"),
        (["--scenario", "/dev/zero"], "/dev/zero"),
        (["--scenario", "{tmp}/pipe.toml"], "pipe.toml"),
    ],
)
def test_no_hang_and_no_gigabytes(tmp_path: Path, arguments: list[str], telling: str) -> None:
    os.mkfifo(tmp_path / "pipe.toml")
    words = [word.format(tmp=tmp_path) for word in arguments]
    done = ended(spawn(["search", "--gpus", "8", *words]), 4)
    assert done.code == 2 and re.search(telling, done.err) and done.err.count("\n") == 1, done


def test_a_full_disk_behind_standard_output() -> None:
    full = os.open("/dev/full", os.O_WRONLY)
    done = ended(spawn([*JOB, "--tp", "1", "--top", "1"], stdout=full), 20)
    os.close(full)
    assert done.code == 2 and "No space left" in done.err and done.err.count("\n") == 1


def test_closed_standard_output() -> None:
    done = ended(spawn([*JOB, "--tp", "1", "--top", "1"], close_stdout=True), 20)
    assert "Traceback" not in done.err and done.err.count("\n") <= 1


@pytest.mark.parametrize(("gpu", "code"), [("h100", 0), ("v100", 1)])
def test_the_reader_leaves_early(gpu: str, code: int) -> None:
    read, write = os.pipe()
    os.close(read)
    done = ended(spawn([*JOB, "--gpu", gpu, "--tp", "1", "--zero", "0", "--recompute", "none", "--mb", "4"], stdout=write), 60)
    os.close(write)
    assert (done.code, done.err) == (code, "")


def test_ctrl_c_while_writing_leaves_no_file(tmp_path: Path) -> None:
    process = spawn(["search", "--model", "70b", "--gpus", "64", "--all", "--csv", str(tmp_path / "all.csv")])
    deadline = time.monotonic() + 15
    while not list(tmp_path.iterdir()) and time.monotonic() < deadline and process.poll() is None:
        time.sleep(0.05)
    assert process.poll() is None
    process.send_signal(signal.SIGINT)
    done = ended(process, 10)
    assert (done.code, done.err.strip()) == (130, "interrupted")  # click ends the line that the terminal's ^C began
    assert list(tmp_path.iterdir()) == []
