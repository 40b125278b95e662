"""accelerate itself takes what we export, and refuses what our rules refuse, but for a list of holes."""

from __future__ import annotations

from collections import Counter
from dataclasses import fields
from pathlib import Path
from typing import Any

import pytest
import yaml
from accelerate.commands.config.config_args import ClusterConfig
from accelerate.commands.launch import launch_command_parser
from transformers import HfArgumentParser, TrainingArguments

from planner.frameworks import accelerate
from planner.frameworks.accelerate_files import FSDP_KEYS, MESH_KEYS, TOP_KEYS
from planner.frameworks.accelerate_write import FILE, settings, sharded, write
from planner.frameworks.launch_script import launch_script
from planner.frameworks.reading import read_config
from planner.frameworks.writing import Target
from solver.layout import Layout, fully_recomputed
from tests.frameworks import accelerate_real as real
from tests.frameworks.cases import targets

NUMBER = 240
PROGRAMS_OWN = ("--model_name_or_path", "--max_seq_length")
"""Flags that the training program defines beside the Trainer's."""


@pytest.fixture(scope="module")
def exported() -> tuple[Target, ...]:
    """The layouts that are exported."""
    found = targets("accelerate", NUMBER)
    assert len(found) >= 200
    return found


def judge(text: str, processes: int, folder: Path) -> str:
    """What accelerate says against a file, "" where it takes it."""
    path = folder / FILE
    path.write_text(text)
    return real.refused(lambda: real.started(real.environment(path), processes))


def test_accelerate_takes_every_exported_layout(exported: tuple[Target, ...], tmp_path: Path) -> None:
    said = {t.layout.label: answer for t in exported if (answer := judge(write(t).files[FILE], t.job.num_gpus, tmp_path))}
    assert not said, f"{len(said)} of {len(exported)} refused: {next(iter(said.items()))}"


def test_the_exported_layouts_are_of_many_kinds(exported: tuple[Target, ...]) -> None:
    kinds = Counter[str]()
    for target in exported:
        kinds["tensor"] += target.layout.tensor_parallel > 1
        kinds["context"] += target.layout.context_parallel > 1
        kinds["experts"] += target.job.model.num_experts > 0
        kinds["zero2"] += target.layout.zero_stage == 2
        kinds["zero3"] += target.layout.zero_stage == 3
        kinds["recompute"] += target.layout.recompute == "full"
    assert min(kinds.values()) >= 10, kinds
    assert len({(t.job.model.name, t.job.num_gpus, t.layout) for t in exported}) >= 200


def test_accelerates_environment_says_the_layout(exported: tuple[Target, ...], tmp_path: Path) -> None:
    for target in exported:
        layout, path = target.layout, tmp_path / FILE
        path.write_text(write(target).files[FILE])
        variables = real.environment(path)
        mesh, plugin = real.started(variables, target.job.num_gpus)
        assert variables["ACCELERATE_MIXED_PRECISION"] == target.job.precision
        if plugin is not None:
            assert plugin.fsdp_version == 2
            assert plugin.reshard_after_forward is (layout.zero_stage == 3)
            assert plugin.activation_checkpointing is (layout.recompute == "full")
        if mesh is not None:
            assert mesh.total_size == target.job.num_gpus
            assert (mesh.tp_size, mesh.cp_size, mesh.dp_shard_size) == (
                layout.tensor_parallel,
                layout.context_parallel,
                layout.data_parallel,
            )


def test_the_trainer_takes_the_exported_flags(exported: tuple[Target, ...]) -> None:
    parser = HfArgumentParser(TrainingArguments)
    for target in exported[:40]:
        lines = [line for line in write(target).arguments["TRAINER_ARGS"] if line.split()[0] not in PROGRAMS_OWN]
        words = [word for line in lines for word in line.split() if word not in ("--bf16", "--fp16")]
        flags = [word for word in words if word.startswith("--")]
        known = {action for option in parser._actions for action in option.option_strings}
        assert set(flags) <= known, set(flags) - known


def test_an_exported_file_read_back_gives_the_layout_again(exported: tuple[Target, ...], tmp_path: Path) -> None:
    for target in exported:
        launch = write(target)
        (tmp_path / FILE).write_text(launch.files[FILE])
        script = tmp_path / "launch.sh"
        script.write_text(launch_script(target, launch))
        config = read_config(script, target.job.num_gpus)
        stated = dict(config.layout)
        stated.setdefault("data_parallel", target.layout.data_parallel)
        layout = Layout(**stated)  # type: ignore[arg-type]
        full = fully_recomputed(layout, target.job.model.num_layers) if layout.recompute == "full" else layout
        assert full == target.layout, (full.label, target.layout.label)
        request, job = config.request, target.job
        assert (request.model, request.seq_len, request.global_batch_size) == (job.model.name, job.seq_len, job.global_batch_size)
        alone = read_config(tmp_path / FILE, target.job.num_gpus)
        assert alone.layout.items() <= {**dict(config.layout)}.items()


# What is refused

FSDP2: dict[str, Any] = {
    "distributed_type": "FSDP",
    "num_processes": 16,
    "num_machines": 2,
    "mixed_precision": "bf16",
    "fsdp_config": {"fsdp_version": 2, "fsdp_auto_wrap_policy": "TRANSFORMER_BASED_WRAP"},
}
P = "parallelism_config_"


def mesh(**sizes: int) -> dict[str, int]:
    """A mesh of the sizes that are stated."""
    return {f"{P}{key}": size for key, size in sizes.items()}


BROKEN: dict[str, tuple[str, dict[str, Any]]] = {
    "A20": ("an unknown top-level key", {"num_proceses": 16}),
    "A24": ("a product that is not the processes", {"parallelism_config": mesh(dp_shard_size=4, tp_size=2)}),
    "A25": ("tensor groups with pure copies", {"parallelism_config": mesh(dp_replicate_size=8, tp_size=2)}),
    "A26": ("two ways to split a sequence", {"parallelism_config": mesh(dp_shard_size=4, cp_size=2, sp_size=2)}),
    "A27": ("a mesh under FSDP 1", {"parallelism_config": mesh(dp_shard_size=16), "fsdp_config": {"fsdp_version": 1}}),
    "A28": ("nothing to shard over", {"parallelism_config": mesh(tp_size=16)}),
    "A29": ("a strategy where a truth belongs", {"fsdp_config": {"fsdp_version": 2, "fsdp_reshard_after_forward": "FULL_SHARD"}}),
    "A32": ("offloaded checkpoints without any", {"fsdp_config": {"fsdp_version": 2, "fsdp_activation_checkpointing_offload": True}}),
    "A34": (
        "lean loading alone",
        {"fsdp_config": {"fsdp_version": 1, "fsdp_cpu_ram_efficient_loading": True, "fsdp_sync_module_states": False}},
    ),
}


def test_a_sound_file_is_taken(tmp_path: Path) -> None:
    assert not judge(yaml.safe_dump({**FSDP2, "parallelism_config": mesh(dp_shard_size=8, tp_size=2)}), 16, tmp_path)


@pytest.mark.parametrize("rule", BROKEN)
def test_settings_that_our_rules_call_illegal_are_refused(rule: str, tmp_path: Path) -> None:
    assert judge(yaml.safe_dump({**FSDP2, **BROKEN[rule][1]}), 16, tmp_path), BROKEN[rule][0]


HOLES = {
    "A1": "no key of accelerate's mesh states pipelines or expert groups: such a layout cannot be written",
    "A2": "the tensor plan of transformers splits KV heads when the model is built, which no parser sees",
    "A4": "selective recompute, and of some layers, has no key: such a layout cannot be written",
}
"""Rules that accelerate's own checks do not enforce, and why ours are stricter."""


def written(layout: Layout, like: Target, **changes: Any) -> str:
    """The file of a layout that our rules refuse, as if they did not."""
    target = Target(scenario=like.scenario, job=like.job, layout=layout, chunks=(like.job.model.num_layers,))
    return yaml.safe_dump({**settings(target), "num_processes": 16, "num_machines": 2, **changes})


def test_every_layout_rule_is_enforced_by_accelerate_or_stands_on_the_list_of_holes(exported: tuple[Target, ...], tmp_path: Path) -> None:
    like = next(target for target in exported if sharded(target))
    copies = written(Layout(tensor_parallel=2, data_parallel=8), like, parallelism_config=mesh(dp_replicate_size=8, tp_size=2))
    enforced = {
        "A3": copies,
        "A5": written(Layout(tensor_parallel=16, zero_stage=3), like),
        "A6": written(Layout(data_parallel=16, zero_stage=3), like, mixed_precision="mxfp8"),
    }
    assert {*enforced, *HOLES} == {rule.id for rule in accelerate.RULES}
    assert all(judge(text, 16, tmp_path) for text in enforced.values())


def test_mutated_meshes_are_refused(exported: tuple[Target, ...], tmp_path: Path) -> None:
    for target in exported[:60]:
        data = settings(target)
        if "parallelism_config" not in data:
            continue
        for key in ("dp_shard_size", "tp_size"):
            wrong = {**data["parallelism_config"], P + key: data["parallelism_config"][P + key] + 1}
            assert judge(yaml.safe_dump({**data, "parallelism_config": wrong}), target.job.num_gpus, tmp_path), key


def test_keys_without_their_prefix_pass_silently(tmp_path: Path) -> None:
    assert not judge(yaml.safe_dump({**FSDP2, "parallelism_config": {"tp_size": 3}}), 16, tmp_path)


# Our tables are accelerate's


def test_our_lists_of_keys_are_accelerates() -> None:
    assert {field.name for field in fields(ClusterConfig)} | {"fp16", "dynamo_backend"} == set(TOP_KEYS)
    flags = {option.lstrip("-") for action in launch_command_parser()._actions for option in action.option_strings}
    assert {flag for flag in flags if flag.startswith("fsdp_")} <= set(FSDP_KEYS)
    assert set(FSDP_KEYS) - flags <= {"fsdp_ignored_modules"}
    assert {flag for flag in flags if flag.startswith(P)} == set(MESH_KEYS)
