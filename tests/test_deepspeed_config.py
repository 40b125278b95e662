"""DeepSpeed's files: what a ds_config.json, a Megatron-DeepSpeed script and a GPT-NeoX YAML say, what is wrong with them, and back."""

from __future__ import annotations

import dataclasses
import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from planner.cost import parameters
from planner.errors import InputError
from planner.export import target_of
from planner.frameworks import deepspeed
from planner.frameworks.config import Config
from planner.frameworks.deepspeed_json import AUTO, flat
from planner.frameworks.deepspeed_keys import BLOCKS, TOP_KEYS
from planner.frameworks.deepspeed_settings import SETTING_RULES
from planner.frameworks.deepspeed_write import FILE, write
from planner.frameworks.launch_script import launch_script
from planner.frameworks.reading import read_config
from planner.request import Request, make_scenario
from planner.scenario import Job
from solver.layout import Layout, fully_recomputed

DATA = Path(__file__).parent / "data" / "configs"
ZERO3, NEOX = DATA / "deepspeed_zero3_70b.json", DATA / "neox_20b.yml"
Writing = Callable[..., Config]

JSON: dict[str, Any] = {
    "train_batch_size": 256,
    "train_micro_batch_size_per_gpu": 2,
    "zero_optimization": {"stage": 1},
    "bf16": {"enabled": True},
}
SCRIPT = """
torchrun --nproc-per-node 8 --nnodes 4 pretrain_gpt.py \\
    --deepspeed --deepspeed_config {file} {flags} \\
    --num-layers 30 --hidden-size 4096 --num-attention-heads 32 --num-key-value-heads 8 --ffn-hidden-size 11008 \\
    --seq-length 4096 --max-position-embeddings 4096 --micro-batch-size 2 --global-batch-size 256 \\
    --swiglu --normalization rmsnorm --use-rotary-position-embeddings --disable-bias-linear \\
    --untie-embeddings-and-output-weights --vocab-size 32000 --bf16
"""


@pytest.fixture
def reading(tmp_path: Path) -> Writing:
    """Writes a ds_config.json with changes and reads it for a number of GPUs; a key whose value is ... is left out."""

    def call(num_gpus: int | None = 8, **changes: Any) -> Config:
        path = tmp_path / "ds_config.json"
        path.write_text(json.dumps({key: value for key, value in {**JSON, **changes}.items() if value is not ...}))
        return read_config(path, num_gpus)

    return call


@pytest.fixture
def scripting(tmp_path: Path) -> Writing:
    """Writes a Megatron-DeepSpeed script with further flags, with or without its JSON beside it, and reads it."""

    def call(flags: str = "", data: dict[str, Any] | None = None, num_gpus: int | None = 32) -> Config:
        if data is not None:
            (tmp_path / FILE).write_text(json.dumps(data))
        path = tmp_path / "train.sh"
        path.write_text(SCRIPT.format(file=FILE, flags=flags))
        return read_config(path, num_gpus)

    return call


def job(num_gpus: int = 8, model: str = "8b", **wishes: Any) -> Job:
    """A job in DeepSpeed's stack."""
    return make_scenario(Request(model=model, num_gpus=num_gpus, framework="deepspeed", **wishes)).job_in("deepspeed")


def found(config: Config, own: Job) -> dict[str, str]:
    """What the rules about settings say: id -> text."""
    said = {rule.id: rule.finds(config, own) for rule in SETTING_RULES}
    return {rule: text for rule, text in said.items() if text}


# ds_config.json


def test_a_configuration_says_batch_stage_and_precision(reading: Writing) -> None:
    config = reading(gradient_accumulation_steps=16, optimizer={"type": "Muon"})
    assert config.framework == "deepspeed" and config.model is None
    assert config.layout["zero_stage"] == 1 and config.layout["micro_batch_size"] == 2
    assert (config.request.global_batch_size, config.request.precision, config.request.optimizer) == (256, "bf16", "muon")
    assert any("model" in line for line in config.assumed)


def test_the_batch_keys_imply_the_gpus_where_nobody_states_them(reading: Writing) -> None:
    config = reading(None, gradient_accumulation_steps=4, tensor_parallel={"autotp_size": 2})
    assert config.request.num_gpus == 256 // (2 * 4) * 2


@pytest.mark.parametrize(
    "changes, layout, batch",
    [
        ({"train_batch_size": ...}, {"micro_batch_size": 2}, 16),
        ({"train_batch_size": ..., "gradient_accumulation_steps": 4}, {"micro_batch_size": 2}, 64),
        ({"train_micro_batch_size_per_gpu": ..., "gradient_accumulation_steps": 8}, {"micro_batch_size": 4}, 256),
        ({"train_micro_batch_size_per_gpu": AUTO, "gradient_accumulation_steps": AUTO}, {"micro_batch_size": 32}, 256),
        ({"zero_optimization": True}, {"zero_stage": 1}, 256),
        ({"zero_optimization": ...}, {"zero_stage": 0}, 256),
        ({"zero_optimization": {"stage": AUTO}}, {"zero_stage": 0}, 256),
        ({"tensor_parallel": {"autotp_size": 4}}, {"tensor_parallel": 4}, 256),
        ({"sequence_parallel_size": 4}, {"context_parallel": 4}, 256),
        ({"expert_parallel": {"enabled": True, "autoep_size": 4}}, {"expert_parallel": 4}, 256),
        ({"expert_parallel": {"autoep_size": 4}}, {"expert_parallel": 1}, 256),
        ({"activation_checkpointing": {"partition_activations": True}}, {"recompute": "full"}, 256),
    ],
)
def test_keys_become_axes_as_deepspeed_takes_them(reading: Writing, changes: dict[str, Any], layout: dict[str, Any], batch: int) -> None:
    config = reading(8, **changes)
    assert layout.items() <= dict(config.layout).items()
    assert config.request.global_batch_size == batch


def test_what_is_left_to_the_caller_stays_open_and_is_said(reading: Writing) -> None:
    auto = dict.fromkeys(("train_batch_size", "train_micro_batch_size_per_gpu", "gradient_accumulation_steps"), AUTO)
    config = reading(8, **auto, bf16={"enabled": AUTO})
    assert "micro_batch_size" not in config.layout and config.request.global_batch_size is None and config.request.precision is None
    assert sum('"auto"' in line for line in config.assumed) == 3


def test_offload_is_said_to_be_missing_from_the_memory(reading: Writing) -> None:
    config = reading(zero_optimization={"stage": 3, "offload_param": {"device": "nvme"}, "overlap_comm": False, "reduce_bucket_size": 1e8})
    assert any("offload_param" in line for line in config.assumed)
    assert config.software == {"data_overlap": False, "bucket_bytes": 4e8}


# Megatron-DeepSpeed


def test_old_flag_names_give_shape_and_layout(scripting: Writing) -> None:
    config = scripting("--tensor-model-parallel-size 2 --pipeline-model-parallel-size 4 --zero-stage 1 --checkpoint-activations")
    assert config.framework == "deepspeed" and config.model is not None
    assert (config.model.num_layers, config.model.num_key_value_heads, config.model.norm) == (30, 8, "rmsnorm")
    wanted = {"tensor_parallel": 2, "pipeline_parallel": 4, "zero_stage": 1, "micro_batch_size": 2, "recompute": "full"}
    assert wanted.items() <= dict(config.layout).items()
    assert config.request.global_batch_size == 256 and config.request.precision == "bf16"


def test_layers_that_do_not_divide_are_cut_as_the_pipeline_module_cuts_them(scripting: Writing) -> None:
    assert scripting("--pipeline-model-parallel-size 4").layers_per_stage == (8, 8, 7, 7)
    assert scripting("--pipeline-model-parallel-size 5").layers_per_stage == ()


def test_the_json_beside_a_script_is_read_with_it(scripting: Writing) -> None:
    config = scripting("--no-pipeline-parallel", {**JSON, "zero_optimization": {"stage": 2}, "fp16": {"enabled": True}, "bf16": {}})
    assert config.layout["zero_stage"] == 2 and config.request.precision == "fp16"
    assert any(FILE in line for line in config.read)
    alone = scripting("--zero-stage 3")
    assert alone.layout["zero_stage"] == 3


def test_a_script_without_its_json_says_so(scripting: Writing) -> None:
    assert any("not beside" in line for line in scripting().assumed)


def test_a_broken_json_beside_a_script_is_named(tmp_path: Path, scripting: Writing) -> None:
    (tmp_path / FILE).write_text('{"zero_optimization": {"stage": 9}}')
    with pytest.raises(InputError, match=f"{FILE}: zero_optimization.stage = 9 must be a whole number from 0 to 3"):
        scripting()


def test_a_script_of_the_trainer_gives_what_its_json_leaves_open(tmp_path: Path) -> None:
    auto = dict.fromkeys(("train_batch_size", "train_micro_batch_size_per_gpu", "gradient_accumulation_steps"), AUTO)
    (tmp_path / FILE).write_text(json.dumps({**JSON, **auto, "zero_optimization": {"stage": 3}, "bf16": {"enabled": AUTO}}))
    script = tmp_path / "run.sh"
    flags = "--per_device_train_batch_size 4 --gradient_accumulation_steps 2 --bf16 --gradient_checkpointing true --max_seq_length 2048"
    script.write_text(f"deepspeed --num_gpus 8 --num_nodes 2 train.py --deepspeed {FILE} --model_name_or_path x/Llama-3.1-8B {flags}\n")
    config = read_config(script)
    assert (config.request.num_gpus, config.request.gpus_per_node, config.request.precision) == (16, 8, "bf16")
    assert (config.request.model, config.request.seq_len, config.request.global_batch_size) == ("llama-3.1-8b", 2048, 4 * 2 * 16)
    assert {"zero_stage": 3, "micro_batch_size": 4, "recompute": "full"}.items() <= dict(config.layout).items()
    (tmp_path / FILE).write_text(json.dumps({"train_micro_batch_size_per_gpu": 2, "gradient_accumulation_steps": 2}))
    assert "--per_device_train_batch_size 4 but train_micro_batch_size_per_gpu = 2" in found(read_config(script), job(16))["D21"]


# What is wrong with settings


def test_a_batch_that_does_not_divide_names_the_nearest_batch_and_the_nearest_gpus(reading: Writing) -> None:
    text = found(reading(7), job(7))["D20"]
    assert "train_batch_size = 256 does not divide by micro-batch 2 x 7 GPUs" in text
    assert "nearest: 252, 266, or 8 GPUs" in text


def test_three_batch_keys_that_disagree_name_the_product(reading: Writing) -> None:
    text = found(reading(8, gradient_accumulation_steps=8), job(8))["D20"]
    assert "not micro-batch 2 x accumulation 8 x 8 GPUs = 128" in text and "or 16 GPUs" in text


TRAPS: dict[str, tuple[dict[str, Any], str]] = {
    "D22": ({"zero_optimisation": {"stage": 3}}, "did you mean 'zero_optimization'"),
    "D23": ({"zero_optimization": {"stage": 1, "overlap_com": True}}, "did you mean 'overlap_comm'"),
    "D24": ({"zero_optimization": {"stage": 3, "mics_shard_size": 8}}, "mics_shard_size was removed"),
    "D25": ({"fp16": {"enabled": True}}, "both true"),
    "D26": ({"bf16": ...}, "trains in fp32"),
    "D27": ({"zero_optimization": {"stage": 0}, "bf16": {"enabled": True, "bf16_master_weights_and_grads": True}}, "1, 2 or 3"),
    "D28": ({"zero_optimization": {"stage": 2, "offload_optimizer": {"device": "cpu", "ratio": 0.5}}}, "needs stage 3"),
    "D30": ({"tensor_parallel": {"autotp_size": 8}, "train_micro_batch_size_per_gpu": 256}, "data_parallel = 1"),
    "D31": ({"zero_optimization": {"stage": 3, "zero_hpz_partition_size": 3}}, "legal: 1, 2, 4, 8"),
    "D32": ({"pipeline": {"stages": 2}, "zero_optimization": {"stage": 1, "overlap_comm": True}}, "does nothing"),
    "D33": ({"expert_parallel": {"autoep_size": 4}}, "enabled = true"),
    "D34": ({"sequence_parallel_size": 8}, "nearest: 4096, 4104"),
    "D36": ({"train_micro_batch_size_per_gpu": AUTO, "train_batch_size": AUTO}, "DeepSpeed itself stops"),
    "D38": ({"train_batch_size": "256"}, "without quotes"),
    "D39": ({"sequence_parallel_size": 8}, "is up to the model's attention"),
}


@pytest.mark.parametrize("rule", TRAPS)
def test_the_rule_finds_its_case(rule: str, reading: Writing) -> None:
    changes, text = TRAPS[rule]
    config = reading(8, **changes)
    own = job(8, seq_len=4100) if rule == "D34" else job(8)
    assert text in found(config, own)[rule]
    assert rule not in found(reading(8), own)


def test_unknown_keys_inside_blocks_are_told_as_refused_or_passed_over(reading: Writing) -> None:
    offload = {"stage": 3, "offload_optimizer": {"device": "none", "rato": 0.5}}
    said = found(reading(8, zero_optimization=offload, optimizer={"type": "Adam", "lr": 1}), job())
    assert said["D23"] == "zero_optimization.offload_optimizer has no key 'rato'; did you mean 'ratio'?"
    assert said["D22"].startswith("optimizer has no key 'lr', and DeepSpeed says nothing; known: ")
    many = found(reading(8, **{f"key{place}": 1 for place in range(1000)}), job())["D22"]
    assert re.search(r"; and 99[789] more$", many) and len(many) < 400


def test_scripts_have_rules_of_their_own(scripting: Writing) -> None:
    own = job(32)
    assert "add the flag" in found(scripting("--zero-stage 2"), own)["D29"]
    assert "D29" not in found(scripting("--zero-stage 2 --no-pipeline-parallel"), own)
    assert "must be equal" in found(scripting("", {**JSON, "train_micro_batch_size_per_gpu": 4}), own)["D21"]
    assert "take one of the two out" in found(scripting("--ds-sequence-parallel-size 2 --sequence-parallel"), own)["D35"]
    assert "state a number" in found(scripting("", {**JSON, "train_batch_size": AUTO}), own)["D37"]


def test_every_rule_about_settings_has_a_case_here() -> None:
    own = {rule.id for rule in SETTING_RULES if rule.id.startswith("D")}
    assert own == {*TRAPS, "D20", "D21", "D29", "D35", "D37"}
    assert len({rule.id for rule in SETTING_RULES}) == len(SETTING_RULES)


def test_ulysses_names_its_legal_sizes() -> None:
    shape = dataclasses.replace(job(32), model=dataclasses.replace(job().model, num_attention_heads=40, head_dim=128))
    told = deepspeed.tell_ulysses(Layout(context_parallel=16, data_parallel=2), shape)
    assert told.endswith("legal sizes: 1, 2, 4, 8, 40")


# There and back

LAYOUTS: tuple[tuple[str, int, dict[str, Any]], ...] = (
    ("8b", 64, {"data_parallel": 64, "zero_stage": 3, "recompute": "full"}),
    ("8b", 64, {"context_parallel": 8, "data_parallel": 8, "zero_stage": 2}),
    ("70b", 64, {"tensor_parallel": 8, "pipeline_parallel": 4, "data_parallel": 2, "zero_stage": 1, "micro_batch_size": 2}),
    ("70b", 64, {"tensor_parallel": 8, "data_parallel": 8, "zero_stage": 2, "recompute": "full"}),
    ("llama-3.2-1b", 16, {"pipeline_parallel": 2, "data_parallel": 8}),
    ("gpt-3-175b", 96, {"tensor_parallel": 8, "pipeline_parallel": 12, "data_parallel": 1, "recompute": "full"}),
    ("mixtral-8x7b", 64, {"expert_parallel": 8, "data_parallel": 64, "zero_stage": 3}),
    ("mixtral-8x7b", 64, {"tensor_parallel": 4, "pipeline_parallel": 4, "data_parallel": 4, "zero_stage": 1}),
    ("deepseek-v3", 256, {"expert_parallel": 32, "data_parallel": 256, "zero_stage": 2}),
)


ALWAYS_TOLD = {"D39"}
"""True of every layout that splits the sequence, ours too: whether the model's attention takes part stands in no file."""


@pytest.mark.parametrize("model, num_gpus, axes", LAYOUTS)
def test_what_is_written_is_read_back(model: str, num_gpus: int, axes: dict[str, Any], tmp_path: Path) -> None:
    scenario = make_scenario(Request(model=model, num_gpus=num_gpus, global_batch_size=256, seq_len=2048, framework="deepspeed"))
    layout = Layout(**axes)
    layout = fully_recomputed(layout, scenario.job.model.num_layers) if layout.recompute == "full" else layout
    target = target_of(scenario, "deepspeed", layout)
    launch = write(target)
    (tmp_path / FILE).write_text(launch.files[FILE])
    (tmp_path / "launch.sh").write_text(launch_script(target, launch))
    config = read_config(tmp_path / "launch.sh", num_gpus)
    again = Layout(**{"data_parallel": layout.data_parallel, **config.layout})  # type: ignore[arg-type]
    again = fully_recomputed(again, scenario.job.model.num_layers) if again.recompute == "full" else again
    assert again == layout
    assert (config.request.global_batch_size, config.request.seq_len) == (256, 2048)
    if config.model is not None:
        assert parameters.total(config.model) == parameters.total(scenario.job.model)
    assert set(found(config, scenario.job_in("deepspeed"))) == (ALWAYS_TOLD if layout.context_parallel > 1 else set())


def test_the_exported_json_holds_no_key_that_deepspeed_does_not_know(tmp_path: Path) -> None:
    scenario = make_scenario(Request(model="8b", num_gpus=64, global_batch_size=128, framework="deepspeed"))
    data = json.loads(write(target_of(scenario, "deepspeed", Layout(data_parallel=64, zero_stage=3))).files[FILE])
    assert {key for key in data if not key.startswith("_")} <= set(TOP_KEYS)
    inner = [key.split(".") for key in flat(data) if "." in key]
    assert all(name in BLOCKS[block] for block, name in inner if block in BLOCKS)


# Broken files

BROKEN: dict[str, tuple[dict[str, Any], str]] = {
    "stage": ({"zero_optimization": {"stage": 4}}, "zero_optimization.stage = 4 must be a whole number from 0 to 3"),
    "a text for a block": ({"zero_optimization": "3"}, "zero_optimization = '3' must be a table of keys"),
    "a list for a batch": ({"train_batch_size": [256]}, "train_batch_size = a list must be a whole number"),
    "no batch": ({"train_batch_size": 0}, "train_batch_size = 0 must be a whole number from 1"),
    "a word for a truth": ({"bf16": {"enabled": "maybe"}}, "bf16.enabled = 'maybe' must be true or false"),
    "a list for a block": ({"fp16": []}, "fp16 = a list must be a table of keys"),
    "a negative group": ({"tensor_parallel": {"autotp_size": -1}}, "tensor_parallel.autotp_size = -1"),
}


@pytest.mark.parametrize("name", BROKEN)
def test_a_broken_value_is_refused_in_one_line_with_what_is_legal(name: str, reading: Writing) -> None:
    changes, message = BROKEN[name]
    with pytest.raises(InputError) as caught:
        reading(8, **changes)
    assert message in str(caught.value) and "\n" not in str(caught.value)


VALUES = st.recursive(
    st.none() | st.booleans() | st.integers(-2, 1 << 45) | st.floats() | st.text(max_size=6) | st.just(AUTO),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=6), inner, max_size=3),
    max_leaves=6,
)
INNER = sorted({"enabled", "autotp_size", "autoep_size", "type", "params", "stages", "grad_accum_dtype", *BLOCKS["zero_optimization"]})
TABLES = st.dictionaries(st.sampled_from(INNER), VALUES, max_size=4)


@settings(max_examples=150, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(changes=st.dictionaries(st.sampled_from(TOP_KEYS), VALUES | TABLES, max_size=5))
def test_arbitrary_values_raise_nothing_but_input_errors(changes: dict[str, Any], reading: Writing) -> None:
    own = job()
    try:
        config = reading(8, **changes)
    except InputError as error:
        assert "\n" not in str(error)
    else:
        assert all("\n" not in text for text in found(config, own).values())
