"""accelerate's files: what a YAML and a launch script with it say, what is wrong with them, and back."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from planner.errors import InputError
from planner.export import target_of
from planner.frameworks import accelerate
from planner.frameworks.accelerate_files import FSDP_KEYS, MESH_KEYS, TOP_KEYS
from planner.frameworks.accelerate_settings import SETTING_RULES
from planner.frameworks.accelerate_write import FILE, write
from planner.frameworks.config import Config
from planner.frameworks.launch_script import launch_script
from planner.frameworks.legality import broken
from planner.frameworks.reading import read_config
from planner.request import Request, make_scenario
from planner.scenario import Job
from solver.layout import Layout, fully_recomputed

Writing = Callable[..., Config]
P = "parallelism_config_"
FSDP2: dict[str, Any] = {
    "compute_environment": "LOCAL_MACHINE",
    "distributed_type": "FSDP",
    "num_processes": 16,
    "num_machines": 2,
    "mixed_precision": "bf16",
    "fsdp_config": {"fsdp_version": 2, "fsdp_auto_wrap_policy": "TRANSFORMER_BASED_WRAP"},
}


def mesh(**sizes: int) -> dict[str, int]:
    """A mesh of the sizes that are stated."""
    return {f"{P}{key}": size for key, size in sizes.items()}


def fsdp(**keys: Any) -> dict[str, Any]:
    """The block of FSDP2 with further keys, or others."""
    return {**FSDP2["fsdp_config"], **keys}


@pytest.fixture
def reading(tmp_path: Path) -> Writing:
    """Writes a file with changes and reads it; a key whose value is ... is left out."""

    def call(num_gpus: int | None = 16, **changes: Any) -> Config:
        path = tmp_path / FILE
        path.write_text(yaml.safe_dump({key: value for key, value in {**FSDP2, **changes}.items() if value is not ...}))
        return read_config(path, num_gpus)

    return call


def job(num_gpus: int = 16) -> Job:
    """A job in accelerate's stack."""
    return make_scenario(Request(model="8b", num_gpus=num_gpus, framework="accelerate")).job_in("accelerate")


def found(config: Config, own: Job) -> dict[str, str]:
    """What the rules about settings say: id -> text."""
    said = {rule.id: rule.finds(config, own) for rule in SETTING_RULES}
    return {rule: text for rule, text in said.items() if text}


# Reading


def test_a_file_states_gpus_nodes_precision_and_sharding_and_leaves_the_model_open(reading: Writing) -> None:
    config = reading()
    assert config.framework == "accelerate" and config.model is None and "micro_batch_size" not in config.layout
    assert (config.request.num_gpus, config.request.gpus_per_node, config.request.precision) == (16, 8, "bf16")
    assert {"zero_stage": 3, "recompute": "none", "pipeline_parallel": 1}.items() <= dict(config.layout).items()
    assert any("--model" in line and "--global-batch" in line for line in config.assumed)


@pytest.mark.parametrize(
    "changes, layout",
    [
        ({"fsdp_config": fsdp(fsdp_reshard_after_forward=False)}, {"zero_stage": 2}),
        ({"fsdp_config": fsdp(reshard_after_forward=False)}, {"zero_stage": 2}),
        ({"fsdp_config": fsdp(fsdp_activation_checkpointing=True)}, {"recompute": "full"}),
        ({"fsdp_config": {"fsdp_sharding_strategy": "SHARD_GRAD_OP"}}, {"zero_stage": 2}),
        ({"fsdp_config": {"fsdp_version": 1, "fsdp_sharding_strategy": 1}}, {"zero_stage": 3}),
        ({"fsdp_config": {"fsdp_sharding_strategy": "NO_SHARD"}}, {"zero_stage": 0}),
        ({"distributed_type": "MULTI_GPU", "fsdp_config": ...}, {"zero_stage": 0}),
        (
            {"parallelism_config": mesh(dp_shard_size=4, tp_size=2, cp_size=2)},
            {"tensor_parallel": 2, "context_parallel": 2, "data_parallel": 4},
        ),
        ({"parallelism_config": mesh(dp_replicate_size=2, dp_shard_size=8)}, {"data_parallel": 16}),
        ({"parallelism_config": {"tp_size": 8}}, {"tensor_parallel": 1}),
        ({"distributed_type": "DEEPSPEED", "deepspeed_config": {"zero_stage": 2}}, {"zero_stage": 2}),
    ],
)
def test_keys_become_axes_as_accelerate_takes_them(reading: Writing, changes: dict[str, Any], layout: dict[str, Any]) -> None:
    assert layout.items() <= dict(reading(**changes).layout).items()


def test_copies_of_shards_are_said_to_be_counted_as_shards_over_all(reading: Writing) -> None:
    config = reading(parallelism_config=mesh(dp_replicate_size=2, dp_shard_size=8))
    assert any("sharded over 8 ranks and copied 2 times" in line for line in config.assumed)


def test_deepspeed_through_accelerate_is_deepspeed(reading: Writing, tmp_path: Path) -> None:
    (tmp_path / "ds.json").write_text('{"train_batch_size": 64, "train_micro_batch_size_per_gpu": 2, "zero_optimization": {"stage": 3}}')
    config = reading(distributed_type="DEEPSPEED", deepspeed_config={"deepspeed_config_file": "ds.json"}, fsdp_config=...)
    assert config.framework == "deepspeed"
    assert config.layout["zero_stage"] == 3 and config.layout["micro_batch_size"] == 2 and config.request.global_batch_size == 64


def test_a_script_gives_the_batch_that_the_file_lacks(reading: Writing, tmp_path: Path) -> None:
    reading()
    script = tmp_path / "run.sh"
    flags = (
        "--model_name_or_path meta-llama/Llama-3.1-8B --per_device_train_batch_size 2 --gradient_accumulation_steps 4 --max_seq_length 8192"
    )
    script.write_text(f"accelerate launch --config_file {FILE} train.py {flags} --gradient_checkpointing --learning_rate 1e-5\n")
    config = read_config(script, 16)
    assert (config.request.model, config.request.seq_len, config.request.global_batch_size) == ("llama-3.1-8b", 8192, 2 * 4 * 16)
    assert config.layout["micro_batch_size"] == 2 and config.layout["recompute"] == "full"
    assert any("learning_rate" in line for line in config.ignored)


# What is wrong with settings

CASES: dict[str, tuple[dict[str, Any], str]] = {
    "A20": ({"num_proceses": 16}, "did you mean 'num_processes'"),
    "A21": ({"parallelism_config": {"tp_size": 8}}, f"write {P}tp_size"),
    "A22": ({"num_processes": 30, "num_machines": 4}, "7 start on each, 28 in all; nearest: 28, 32"),
    "A23": ({"num_processes": 8, "num_machines": 1}, "num_processes = 8 but 16 GPUs"),
    "A24": ({"parallelism_config": mesh(dp_shard_size=4, tp_size=2)}, "= 8, must be num_processes = 16; dp_shard_size = 8 fits"),
    "A25": ({"parallelism_config": mesh(dp_replicate_size=8, tp_size=2)}, "dp_replicate_size = 1 and dp_shard_size = 8"),
    "A26": ({"parallelism_config": mesh(dp_shard_size=4, cp_size=2, sp_size=2)}, "one of them must be 1"),
    "A27": ({"parallelism_config": mesh(dp_shard_size=16), "fsdp_config": {"fsdp_version": 1}}, "set fsdp_version = 2"),
    "A28": ({"parallelism_config": mesh(tp_size=16)}, "legal: dp_shard_size = 2, 4, 8, 16"),
    "A29": ({"fsdp_config": fsdp(fsdp_reshard_after_forward="FULL_SHARD")}, "must be true or false; nearest: true"),
    "A30": ({"fsdp_config": fsdp(fsdp_sharding_strategy="SHARD_GRAD_OP")}, "is ignored by FSDP2"),
    "A32": ({"fsdp_config": fsdp(fsdp_activation_checkpointing_offload=True)}, "needs fsdp_activation_checkpointing"),
    "A33": ({"fsdp_config": fsdp(fsdp_forward_prefetch=True)}, "is ignored by FSDP2"),
    "A34": (
        {"fsdp_config": fsdp(fsdp_cpu_ram_efficient_loading=True, fsdp_sync_module_states=False)},
        "needs fsdp_sync_module_states = true",
    ),
    "A35": ({"fsdp_config": {"fsdp_version": 2}}, "whole model at once"),
    "A36": ({"mixed_precision": "no"}, "set bf16"),
    "A37": ({"fsdp_config": fsdp(activation_checkpointing=False, fsdp_activation_checkpointing=True)}, "leave one"),
}


@pytest.mark.parametrize("rule", CASES)
def test_the_rule_finds_its_case(rule: str, reading: Writing) -> None:
    changes, text = CASES[rule]
    assert text in found(reading(**changes), job())[rule]
    assert not found(reading(), job())


def test_the_launchers_flags_win_over_the_file_and_its_rules_read_them(reading: Writing, tmp_path: Path) -> None:
    reading()
    script = tmp_path / "run.sh"
    flags = "--num_processes 30 --num_machines 4 --mixed_precision fp16 --debug"
    script.write_text(f"accelerate launch --config_file {FILE} {flags} train.py\n")
    config = read_config(script)
    assert (config.request.num_gpus, config.request.gpus_per_node, config.request.precision) == (30, None, "fp16")
    assert "30 on num_machines = 4: 7 start on each" in found(config, job(30))["A22"] and "--debug" in config.ignored
    script.write_text(f"accelerate launch --config_file {FILE} --num_processes 8.5 train.py\n")
    with pytest.raises(InputError, match=r"run.sh: --num_processes = '8.5' must be a whole number from 1 to 10,000,000"):
        read_config(script)


def test_an_unknown_key_of_the_deepspeed_block_is_found(reading: Writing) -> None:
    config = reading(distributed_type="DEEPSPEED", fsdp_config=..., deepspeed_config={"zero_stage": 2, "zero_stag": 3})
    assert "deepspeed_config.'zero_stag' is read by nobody; did you mean 'zero_stage'" in found(config, job())["A21"]


def test_recompute_by_both_is_found_where_the_script_shows_it(reading: Writing, tmp_path: Path) -> None:
    reading(fsdp_config=fsdp(fsdp_activation_checkpointing=True))
    script = tmp_path / "run.sh"
    script.write_text(f"accelerate launch --config_file {FILE} train.py --gradient_checkpointing true\n")
    assert "leave one" in found(read_config(script, 16), job())["A31"]


def test_every_rule_about_settings_has_a_case_here() -> None:
    assert {rule.id for rule in SETTING_RULES} == {*CASES, "A31"}


REFUSED = {
    "A1": {"pipeline_parallel": 2, "data_parallel": 8, "zero_stage": 3},
    "A2": {"tensor_parallel": 16, "zero_stage": 0},
    "A3": {"tensor_parallel": 2, "data_parallel": 8},
    "A4": {"data_parallel": 16, "zero_stage": 3, "recompute": "selective"},
    "A5": {"tensor_parallel": 16, "zero_stage": 3},
}


@pytest.mark.parametrize("rule", REFUSED)
def test_the_layout_rule_refuses_its_layout_and_says_why(rule: str) -> None:
    layout = Layout(**REFUSED[rule])  # type: ignore[arg-type]
    refusing = {one.id: one for one in broken(job(), layout, "accelerate")}
    assert rule in refusing and refusing[rule].twin(layout, job())
    assert not broken(job(), Layout(tensor_parallel=2, data_parallel=8, zero_stage=3), "accelerate")


def test_a_lone_tensor_group_and_plain_copies_are_taken() -> None:
    assert not broken(job(8), Layout(tensor_parallel=8), "accelerate")
    assert not broken(job(), Layout(data_parallel=16), "accelerate")
    assert {rule.id for rule in accelerate.RULES} == {*REFUSED, "A6"}


# There and back

LAYOUTS: tuple[dict[str, Any], ...] = (
    {"data_parallel": 64, "zero_stage": 3, "recompute": "full"},
    {"data_parallel": 64, "zero_stage": 2, "micro_batch_size": 2},
    {"tensor_parallel": 8, "data_parallel": 8, "zero_stage": 3},
    {"tensor_parallel": 2, "context_parallel": 8, "data_parallel": 4, "zero_stage": 2, "recompute": "full"},
    {"context_parallel": 64, "zero_stage": 3},
    {"data_parallel": 64},
)


@pytest.mark.parametrize("axes", LAYOUTS, ids=lambda axes: Layout(**axes).label)
def test_what_is_written_is_read_back(axes: dict[str, Any], tmp_path: Path) -> None:
    scenario = make_scenario(Request(model="8b", num_gpus=64, global_batch_size=128, seq_len=32768, framework="accelerate"))
    layout = Layout(**axes)
    layout = fully_recomputed(layout, scenario.job.model.num_layers) if layout.recompute == "full" else layout
    target = target_of(scenario, "accelerate", layout)
    launch = write(target)
    (tmp_path / FILE).write_text(launch.files[FILE])
    (tmp_path / "launch.sh").write_text(launch_script(target, launch))
    config = read_config(tmp_path / "launch.sh", 64)
    again = Layout(**{"data_parallel": layout.data_parallel, **config.layout})  # type: ignore[arg-type]
    again = fully_recomputed(again, scenario.job.model.num_layers) if again.recompute == "full" else again
    assert again == layout
    assert (config.request.model, config.request.global_batch_size, config.request.seq_len) == (scenario.job.model.name, 128, 32768)
    own = scenario.job_in("accelerate")
    assert not found(config, own) and not found(read_config(tmp_path / FILE, 64), own)


def test_the_model_is_a_variable_whose_default_is_read_back(tmp_path: Path) -> None:
    scenario = make_scenario(Request(model="8b", num_gpus=64, global_batch_size=128, framework="accelerate"))
    target = target_of(scenario, "accelerate", Layout(data_parallel=64, zero_stage=3))
    script = launch_script(target, write(target))
    assert '--model_name_or_path "${MODEL:-llama-3.1-8b}"' in script
    (tmp_path / "launch.sh").write_text("MODEL=meta-llama/Llama-3.2-1B\n" + script)
    assert read_config(tmp_path / "launch.sh", 64).request.model == "llama-3.2-1b"


# Broken files

BROKEN: dict[str, tuple[dict[str, Any], str]] = {
    "an unknown kind": ({"distributed_type": "FDSP"}, "distributed_type = 'FDSP' is not known here; known: DEEPSPEED, FSDP, MULTI_GPU, NO"),
    "a list for a block": ({"fsdp_config": [1]}, "fsdp_config = a list must be a table of keys"),
    "no processes": ({"num_processes": 0}, "num_processes = 0 must be a whole number from 1"),
    "a size that is none": ({"parallelism_config": mesh(tp_size=0)}, f"{P}tp_size = 0 must be a whole number from 1"),
    "a third FSDP": ({"fsdp_config": {"fsdp_version": 3}}, "fsdp_version = 3 must be a whole number from 1 to 2"),
    "a strategy": (
        {"fsdp_config": {"fsdp_sharding_strategy": "FULL"}},
        "fsdp_sharding_strategy = 'FULL' is not known here; known: FULL_SHARD",
    ),
    "a precision": ({"mixed_precision": "bf8"}, "mixed_precision = 'bf8' is not known here"),
}


@pytest.mark.parametrize("name", BROKEN)
def test_a_broken_value_is_refused_in_one_line_with_what_is_legal(name: str, reading: Writing) -> None:
    changes, message = BROKEN[name]
    with pytest.raises(InputError) as caught:
        reading(**changes)
    assert message in str(caught.value) and "\n" not in str(caught.value)


VALUES = st.recursive(
    st.none() | st.booleans() | st.integers(-2, 1 << 45) | st.floats() | st.text("abc#:", max_size=6),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.sampled_from([*FSDP_KEYS, *MESH_KEYS]), inner, max_size=3),
    max_leaves=6,
)


@settings(max_examples=150, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(changes=st.dictionaries(st.sampled_from(TOP_KEYS), VALUES, max_size=4))
def test_arbitrary_values_raise_nothing_but_input_errors(changes: dict[str, Any], reading: Writing) -> None:
    own = job()
    try:
        config = reading(**changes)
    except InputError as error:
        assert "\n" not in str(error)
    else:
        assert all("\n" not in text for text in found(config, own).values())
