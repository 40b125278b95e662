"""torchtitan's own code takes what we export, refuses what our rules forbid, and agrees with our orders, splits and counts."""

from __future__ import annotations

import dataclasses
import json
import os
import shlex
import subprocess
import sys
import tomllib
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from planner.catalogue import load
from planner.catalogue.schema import Model
from planner.cost import orders, parameters
from planner.frameworks.files import Source
from planner.frameworks.torchtitan import RULES
from planner.frameworks.torchtitan_keys import NEW_KEYS, OLD_KEYS, setting
from planner.frameworks.torchtitan_models import FLAVORS, RECIPES, needed_flavor
from planner.frameworks.torchtitan_old import OLD_RULES, TOML_NAME
from planner.frameworks.torchtitan_read import read_command, read_toml
from planner.frameworks.torchtitan_settings import SETTING_RULES
from planner.frameworks.torchtitan_stages import SCHEDULE_NAMES, stage_layers
from planner.frameworks.torchtitan_write import old_toml, write
from planner.frameworks.writing import Launch, Target
from planner.request import Request, make_scenario
from solver.layout import Layout, chunk_sizes
from tests.frameworks import torchtitan_real as real
from tests.frameworks.cases import targets
from tests.frameworks.torchtitan_forbidden import FORBIDDEN, HOLES, SETTING_HOLES, SETTINGS

ASKED = 420
WHOLE_EVERY = 6
"""One in so many models is also made parallel by the framework, which takes longest."""


def words(launch: Launch) -> list[str]:
    """The words of a launch's command line."""
    return [word for lines in launch.arguments.values() for line in lines for word in shlex.split(line)]


def layers_of(parts: Sequence[Sequence[str]]) -> tuple[int, ...]:
    """Layers in each list of modules."""
    return tuple(sum(name.startswith("layers.") for name in part) for part in parts)


def axes(layout: Layout) -> dict[str, Any]:
    """A layout's axes as a file can state them."""
    return {axis: value for axis, value in vars(layout).items() if axis != "recompute_layers"}


def accepted(target: Target, launch: Launch, folder: Path, *, whole: bool = False) -> tuple[int, ...]:
    """Layers of each chunk in the framework's own cut of an export, if it takes it; raises what it raises."""
    for name, text in launch.files.items():
        (folder / name).write_text(text)
    config, parts = real.accept(words(launch), target.job.num_gpus, folder, whole=whole)
    assert config.training.global_batch_size == target.job.global_batch_size
    return layers_of(parts) or target.chunks


def test_the_new_parser_meshes_and_schedules_take_every_export(tmp_path: Path) -> None:
    chosen = targets("torchtitan", ASKED)[::2]
    rejected: list[str] = []
    for place, target in enumerate(chosen):
        try:
            chunks = accepted(target, write(target), tmp_path, whole=place % WHOLE_EVERY == 0)
        except (Exception, SystemExit) as error:
            rejected.append(f"{target.job.model.name} {target.layout.label}: {type(error).__name__}: {error}")
            continue
        if chunks != target.chunks:
            rejected.append(f"{target.job.model.name} {target.layout.label}: cut into {chunks}, not {target.chunks}")
    assert not rejected and len(chosen) >= 200, (len(chosen), rejected)


def old_results(trials: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """What 0.2 makes of trials, in a process of its own."""
    environment = {**os.environ, "PYTHONPATH": os.environ["PLANNER_TITAN02"]}
    script = Path(real.__file__).with_name("torchtitan_old_real.py")
    run = subprocess.run(
        [sys.executable, str(script)], input=json.dumps(trials), capture_output=True, text=True, env=environment, check=False
    )
    assert run.returncode == 0, run.stderr[-2000:]
    return list(json.loads(run.stdout.split("RESULT ")[1]))


def test_the_old_parser_meshes_and_schedules_take_every_toml_file() -> None:
    chosen = [(target, launch.files[TOML_NAME]) for target in targets("torchtitan", ASKED) if TOML_NAME in (launch := write(target)).files]
    every = 2 * WHOLE_EVERY
    trials = [{"toml": text, "world": t.job.num_gpus, "whole": place % every == 0} for place, (t, text) in enumerate(chosen)]
    rejected = []
    for (target, _), found in zip(chosen, old_results(trials)):
        if "error" in found or (layers_of(found["chunks"]) or target.chunks) != target.chunks:
            rejected.append((target.job.model.name, target.layout.label, found.get("error", found.get("chunks"))))
    assert not rejected and len(chosen) >= 200, (len(chosen), rejected)


def test_every_export_reads_back_as_the_same_layout_and_workload() -> None:
    for target in targets("torchtitan", ASKED):
        launch = write(target)
        script = "torchrun -m torchtitan.train " + " ".join(line for lines in launch.arguments.values() for line in lines)
        found = [read_command(Source(Path("launch.sh"), script), target.job.num_gpus)]
        if TOML_NAME in launch.files:
            found.append(read_toml(Source(Path(TOML_NAME), "", tomllib.loads(launch.files[TOML_NAME])), target.job.num_gpus))
        for config in found:
            asked = config.request
            assert dict(config.layout) == axes(target.layout), (config.kind, target.layout.label)
            assert (asked.model, asked.seq_len, asked.global_batch_size) == (
                target.job.model.name,
                target.job.seq_len,
                target.job.global_batch_size,
            )
            assert (asked.precision, asked.software) == (target.job.precision, target.job.software.name)
            even = target.chunks == chunk_sizes(target.job.model.num_layers, len(target.chunks))
            assert not (even and config.layers_per_stage), (target.layout.label, config.layers_per_stage)
            job = dataclasses.replace(target.job, layers_per_stage=config.layers_per_stage)
            assert not [text for rule in SETTING_RULES if (text := rule.finds(config, job))], target.layout.label


# What our rules forbid


def forbidden(name: str) -> tuple[str, Target]:
    """The rule that a forbidden layout breaks, and the layout as if it were to be written."""
    rule, wishes, sizes = FORBIDDEN[name]
    scenario = make_scenario(Request(framework="torchtitan", tensor_across_nodes=True, **wishes))
    layout = Layout(**sizes)
    job = scenario.job_in("torchtitan")
    chunks = chunk_sizes(job.model.num_layers, layout.pipeline_parallel * layout.virtual_pipeline)
    return rule, Target(scenario=scenario, job=job, layout=layout, chunks=chunks)


@pytest.mark.parametrize("name", FORBIDDEN)
def test_what_our_rules_forbid_cannot_be_written_or_is_refused_or_is_a_known_hole(name: str, tmp_path: Path) -> None:
    broken, target = forbidden(name)
    assert next(rule for rule in RULES if rule.id == broken).twin(target.layout, target.job)
    try:
        accepted(target, write(target), tmp_path, whole=True)
        taken = True
    except (Exception, SystemExit):
        taken = False
    assert taken == (name in HOLES), name


def test_every_rule_has_a_forbidden_layout() -> None:
    assert {rule for rule, _, _ in FORBIDDEN.values()} == {rule.id for rule in RULES}


@pytest.mark.parametrize("name", SETTINGS)
def test_settings_that_our_rules_call_illegal_are_refused_or_a_known_hole(name: str) -> None:
    rule, flags = SETTINGS[name]
    command = f"--module llama3 --config llama3_8b {flags}"
    config = read_command(Source(Path("x.sh"), f"torchrun -m torchtitan.train {command}"), 64)
    job = make_scenario(dataclasses.replace(config.request, num_gpus=64, global_batch_size=64)).job_in("torchtitan")
    found = {own.id for own in SETTING_RULES if own.finds(config, job)}
    assert rule in found, found
    try:
        real.accept(shlex.split(command), 64)
        taken = True
    except (Exception, SystemExit):
        taken = False
    assert taken == (name in SETTING_HOLES)


def test_the_old_version_refuses_what_its_rules_forbid() -> None:
    base = {"model": "8b", "num_gpus": 64, "global_batch_size": 128}
    cases: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
        "TO1": ({**base, "model": "qwen3-32b"}, {"pipeline_parallel": 4, "data_parallel": 16, "zero_stage": 2}),
        "TO2": ({**base, "model": "deepseek-v2-lite"}, {"context_parallel": 2, "data_parallel": 32, "zero_stage": 3}),
        "TO3": (base, {"tensor_parallel": 2, "data_parallel": 32}),
        "TO4": ({**base, "seq_len": 4100}, {"tensor_parallel": 4, "data_parallel": 16, "zero_stage": 3}),
    }
    trials = []
    for rule, (wishes, sizes) in cases.items():
        scenario = make_scenario(Request(framework="torchtitan", **wishes))
        job, layout = scenario.job_in("torchtitan"), Layout(**sizes)
        assert next(own for own in OLD_RULES if own.id == rule).twin(layout, job), rule
        target = Target(scenario=scenario, job=job, layout=layout, chunks=chunk_sizes(job.model.num_layers, layout.pipeline_parallel))
        trials.append({"toml": old_toml(target, needed_flavor(job.model)), "world": 64, "whole": True})
    assert all("error" in found for found in old_results(trials))


# Oracles


@pytest.mark.parametrize("schedule", SCHEDULE_NAMES)
def test_our_orders_are_those_of_torch(schedule: str) -> None:
    chunks = {"interleaved_1f1b": (2, 3), "zero_bubble_v": (2,), "dualpipe": (2,)}.get(schedule, (1,))
    sizes = [(m, p, v) for p in (2, 3, 4) for v in chunks for m in (p, 2 * p, 2 * p + 2, 3 * p, 10)]
    compared = 0
    for m, p, v in sizes:
        try:
            theirs = real.torch_order(SCHEDULE_NAMES[schedule], p, v, m)
        except ValueError:  # its own rules for the number of micro-batches
            continue
        ours = orders.ORDERS[schedule](m, p, v)
        assert {rank: flat(actions, p) for rank, actions in theirs.items()} == {r: [str(a) for a in line] for r, line in enumerate(ours)}
        compared += 1
    assert compared >= 5


def flat(actions: Sequence[Any], stages: int) -> list[str]:
    """PyTorch's actions as texts, pairs that run side by side one after the other, gradient reductions left out.

    Its listing of 1F1B (not the execution) numbers the last stage's forward passes one too high: put right here.
    """
    plain = [sub for action in actions for sub in (action.sub_actions or (action,)) if "REDUCE_GRAD" not in str(action)]
    texts = [str(action) for action in plain]
    wrong = texts[0] == f"{stages - 1}F1"
    return [f"{a.stage_index}F{a.microbatch_index - 1}" if wrong and "F" in t else t for a, t in zip(plain, texts)]


def test_our_split_is_torchtitans() -> None:
    cut = real.pipeline_parallel._generate_llm_fqn_per_model_part
    for layers in (1, 7, 32, 61, 126):
        for stages in (1, 2, 3, 4, 8, 16, 33, 64, 140):
            for first, last in ((0, 0), (1, 1), (2, 0), (0, 3), (5, 1)):
                try:
                    theirs = layers_of(cut(stages, layers, first, last))
                except ValueError:
                    theirs = ()
                assert stage_layers(layers, stages, first, last) == theirs, (layers, stages, first, last)


@pytest.mark.parametrize("flavor", [row for row in FLAVORS if row.model and row.written], ids=lambda row: row.model)
def test_parameters_and_positions_are_torchtitans(flavor: Any) -> None:
    model = load.find(Model, flavor.model)
    built = real.built_model(flavor.module, flavor.flavor)
    sinks = model.num_layers * model.num_attention_heads if flavor.module == "gpt_oss" else 0  # ours leaves them out
    counted = sum(weight.numel() for weight in {id(w): w for w in built.parameters()}.values())
    assert counted - sinks == parameters.total(model)
    assert real.registry(flavor.module).model_registry(flavor.flavor).model.max_seq_len == flavor.positions


@pytest.mark.parametrize("name", [name for name, row in RECIPES.items() if row.module != "kimi_k2_7"])
def test_recipes_set_what_torchtitans_configurations_set(name: str) -> None:
    row = RECIPES[name]
    theirs = real.recipe(row.module, name)
    assert theirs.model_spec.flavor == row.flavor
    mode = (
        "none"
        if theirs.activation_checkpoint is None
        else type(theirs.activation_checkpoint).__qualname__.removesuffix("AC.Config").lower()
    )
    assert setting(row.settings, "activation_checkpoint.mode") == mode
    for section in ("training", "parallelism", "compile"):
        for key in NEW_KEYS[section].split():
            ours, own = setting(row.settings, f"{section}.{key}"), getattr(getattr(theirs, section), key)
            if ours is not None:
                assert (list(ours) if isinstance(ours, tuple) else ours) == (own or ours if ours in (0, "") else own), (section, key)


def test_keys_are_those_that_both_versions_have() -> None:
    theirs = real.recipe("llama3", "llama3_8b")
    for section in ("training", "parallelism", "compile", "comm", "debug"):
        assert set(NEW_KEYS[section].split()) == {field.name for field in dataclasses.fields(getattr(theirs, section))}, section
    modules = sorted({row.module for row in FLAVORS if row.old})
    found = old_results([{"models": modules}])[0]
    assert {section: sorted(keys.split()) for section, keys in OLD_KEYS.items()} == {s: sorted(k) for s, k in found["keys"].items()}
    assert all(row.old in found["flavors"][row.module] for row in FLAVORS if row.old)
