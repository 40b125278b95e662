"""torchtitan's files and commands in our words, and back; what is wrong with their settings, with the numbers and the way out."""

from __future__ import annotations

import dataclasses
import tomllib
from pathlib import Path
from typing import Any

import pytest

from planner.errors import InputError
from planner.frameworks.config import Config
from planner.frameworks.files import Source
from planner.frameworks.reading import read_config
from planner.frameworks.torchtitan_models import FLAVORS, RECIPES, find_flavor, own_config, recipe_of
from planner.frameworks.torchtitan_old import TOML_NAME
from planner.frameworks.torchtitan_read import is_command, is_toml, options, read_command, read_toml
from planner.frameworks.torchtitan_settings import SETTING_RULES
from planner.frameworks.torchtitan_write import write
from planner.frameworks.writing import Target
from planner.request import Request, make_scenario
from solver.layout import Layout, chunk_sizes

CONFIGS = Path(__file__).parent / "data" / "configs"
RUN = "torchrun -m torchtitan.train --module llama3 --config "


def toml(text: str, gpus: int | None = 64) -> Config:
    """What a TOML text says."""
    return read_toml(Source(Path("run.toml"), text, tomllib.loads(text)), gpus)


def command(text: str, gpus: int | None = 64) -> Config:
    """What a launch command says."""
    return read_command(Source(Path("run.sh"), text), gpus)


def found(config: Config, **wishes: Any) -> dict[str, str]:
    """The setting rules that a configuration breaks, with what they say."""
    asked = dataclasses.replace(config.request, **{"num_gpus": 64, **wishes})
    if asked.global_batch_size is None:
        asked = dataclasses.replace(asked, global_batch_size=64)
    job = make_scenario(asked).job_in("torchtitan")
    return {rule.id: text for rule in SETTING_RULES if (text := rule.finds(config, job))}


def target(wishes: dict[str, Any], chunks: tuple[int, ...] = (), **sizes: Any) -> Target:
    """A layout to be written."""
    scenario = make_scenario(Request(framework="torchtitan", **wishes))
    job, layout = scenario.job_in("torchtitan"), Layout(**sizes)
    even = chunk_sizes(job.model.num_layers, layout.pipeline_parallel * layout.virtual_pipeline)
    return Target(scenario=scenario, job=job, layout=layout, chunks=chunks or even, head=("made by a test",))


def line(launch: Any) -> str:
    """A launch's command as one line."""
    return "torchrun -m torchtitan.train " + " ".join(text for lines in launch.arguments.values() for text in lines)


# The published 405B run


def test_the_405b_file_reads_as_sharded_tensor_groups_with_full_recompute() -> None:
    config = read_config(CONFIGS / "torchtitan_llama3_405b.toml", 512)
    assert (config.framework, config.kind) == ("torchtitan", "torchtitan 0.2 TOML")
    assert config.layout == {
        "tensor_parallel": 8,
        "pipeline_parallel": 1,
        "virtual_pipeline": 1,
        "context_parallel": 1,
        "expert_parallel": 1,
        "expert_tensor_parallel": 1,
        "data_parallel": 64,
        "zero_stage": 3,
        "micro_batch_size": 2,
        "recompute": "full",
        "schedule": "1f1b",
    }
    asked = config.request
    assert (asked.model, asked.seq_len, asked.global_batch_size, asked.precision) == ("llama-3.1-405b", 8192, 128, "fp8")
    assert (asked.software, asked.num_gpus, asked.optimizer) == ("fsdp2", 512, "adam")
    assert found(config, num_gpus=512) == {}
    assert any("async" in text for text in config.assumed) and "training.seq_len 8192: seq_len" in config.read
    assert "checkpoint.interval" in config.ignored


def test_the_405b_command_reads_as_an_interleaved_pipeline_with_the_default_uneven_split() -> None:
    config = read_config(CONFIGS / "torchtitan_llama3_405b.sh")
    assert config.request.num_gpus == 512 and config.request.precision == "fp8" and config.request.software == "fsdp2"
    assert config.layout["virtual_pipeline"] == 2 and config.layout["schedule"] == "interleaved_1f1b"
    assert (config.layout["data_parallel"], config.layout["zero_stage"], config.layout["micro_batch_size"]) == (8, 2, 1)
    assert config.request.global_batch_size == 256
    assert sum(config.layers_per_stage) in (0, 126)
    assert set(found(config, num_gpus=512)) == {"TS16"}  # weights stay gathered


@pytest.mark.parametrize("name", ["torchtitan_llama3_405b.toml", "torchtitan_llama3_405b.sh"])
def test_the_405b_run_exports_and_reads_back_alike(name: str) -> None:
    config = read_config(CONFIGS / name, 512)
    scenario = make_scenario(config.request)
    layout = Layout(**config.layout)  # type: ignore[arg-type]
    chunks = chunk_sizes(126, layout.pipeline_parallel * layout.virtual_pipeline)
    launch = write(Target(scenario=scenario, job=scenario.job_in("torchtitan"), layout=layout, chunks=chunks))
    assert command(line(launch), 512).layout == config.layout
    assert toml(launch.files[TOML_NAME], 512).layout == config.layout


# Reading


def test_what_a_command_does_not_say_its_recipe_says() -> None:
    config = command(RUN + "llama3_70b")
    assert config.layout["tensor_parallel"] == 8 and config.layout["recompute"] == "full"
    assert config.layout["data_parallel"] == 8 and config.request.seq_len == 8192 and config.request.software == "fsdp2-eager"


def test_deepseek_compiles_its_loss_alone_and_trains_no_extra_prediction() -> None:
    config = command("torchrun -m torchtitan.train --module deepseek_v3 --config deepseek_v3_671b", 256)
    assert config.request.software == "fsdp2-eager" and config.request.multi_token_prediction is False
    assert (config.layout["expert_parallel"], config.layout["expert_tensor_parallel"]) == (2, 1)


def test_without_expert_groups_the_tensor_group_splits_the_experts() -> None:
    config = command("torchrun -m torchtitan.train --module qwen3 --config qwen3_30b_a3b --parallelism.tensor_parallel_degree 4")
    assert (config.layout["expert_parallel"], config.layout["expert_tensor_parallel"]) == (1, 4)


def test_without_gpus_the_shard_degree_and_the_batch_stay_open() -> None:
    config = command(RUN + "llama3_8b", None)
    assert "data_parallel" not in config.layout and config.request.global_batch_size is None
    assert config.layout["zero_stage"] == 3


@pytest.mark.parametrize(
    ("flags", "stage"),
    [
        ("", 3),
        ("--parallelism.fsdp_reshard_after_forward never", 2),
        ("--parallelism.pipeline_parallel_degree 4", 2),
        ("--parallelism.pipeline_parallel_degree 4 --parallelism.fsdp_reshard_after_forward always", 3),
        ("--parallelism.data_parallel_replicate_degree 64", 0),
        ("--parallelism.data_parallel_replicate_degree 8", 3),
    ],
)
def test_zero_stage_follows_from_degrees_and_policy(flags: str, stage: int) -> None:
    assert command(f"{RUN}llama3_8b {flags}").layout["zero_stage"] == stage


def test_hybrid_sharding_is_said_to_be_counted_as_full_sharding() -> None:
    config = command(RUN + "llama3_8b --parallelism.data_parallel_replicate_degree 8")
    assert any("sharded over 8 and replicated over 8" in text for text in config.assumed)
    assert config.layout["data_parallel"] == 64


def test_the_default_split_of_32_layers_on_4_stages_is_uneven() -> None:
    config = command(RUN + "llama3_8b --parallelism.pipeline_parallel_degree 4 --training.local_batch_size 8")
    assert config.layers_per_stage == (8, 9, 8, 7)
    assert "8-9-8-7" in found(config)["TS11"] and "for 8 each" in found(config)["TS11"]
    stated = "--parallelism.pipeline_parallel_first_stage_less_layers 0 --parallelism.pipeline_parallel_last_stage_less_layers 0"
    even = command(f"{RUN}llama3_8b --parallelism.pipeline_parallel_degree 4 --training.local_batch_size 8 {stated}")
    assert even.layers_per_stage == () and "TS11" not in found(even)


def test_flags_take_hyphens_underscores_equals_signs_and_negations() -> None:
    source = Source(Path("x.sh"), "")
    read = options(source, ["--a.b-c=1", "--compile.no-enable", "--x.list", "a,b", "c", "--y", "activation-checkpoint:full", "--z"])
    assert read == {
        "a.b_c": "1",
        "compile.enable": False,
        "x.list": ["a,b", "c"],
        "y": True,
        "activation_checkpoint.mode": "full",
        "z": True,
    }


def test_an_old_command_reads_the_file_that_it_names_and_wins_over_it(tmp_path: Path) -> None:
    (tmp_path / "x.toml").write_text('[model]\nname = "llama3"\nflavor = "8B"\n[training]\nseq_len = 4096\nlocal_batch_size = 2\n')
    script = tmp_path / "run.sh"
    script.write_text("torchrun --nproc_per_node 8 torchtitan/train.py --job.config_file configs/x.toml --training.seq_len 8192\n")
    config = read_config(script)
    assert (config.request.seq_len, config.request.num_gpus, config.layout["micro_batch_size"]) == (8192, 8, 2)
    script.write_text("torchrun --nproc_per_node 8 torchtitan/train.py --job.config_file gone.toml\n")
    with pytest.raises(InputError, match=r"gone.toml.*put the file beside the script"):
        read_config(script)


def test_bf16_training_halves_the_states() -> None:
    config = toml('[model]\nflavor = "8B"\n[training]\ndtype = "bfloat16"\n[activation_checkpoint]\nmode = "none"')
    assert config.software["optimizer_bytes"] == 4.0 and config.layout["recompute"] == "none"


def test_every_second_layer_is_counted_as_selective_and_said_to_be() -> None:
    config = toml('[model]\nflavor = "8B"\n[activation_checkpoint]\nmode = "selective"\nselective_ac_option = "2"')
    assert config.layout["recompute"] == "selective" and any("selective_ac_option '2'" in text for text in config.assumed)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ('[model]\nname = "llama3"\nflavor = "9B"', "model.flavor = '9B' is no flavor of llama3; known: 405B, 70B, 8B"),
        ('[model]\nname = "lama3"\nflavor = "8B"', "'lama3' is no model of torchtitan; did you mean 'llama3'"),
        ('[model]\nflavor = "8B"\n[training]\nseq_len = "long"', "training.seq_len = 'long' must be a whole number"),
        ('[model]\nflavor = "8B"\n[training]\nseq_len = [1]', "training.seq_len = a list must be a whole number"),
        ('[model]\nflavor = "8B"\n[compile]\nenable = 3', "compile.enable = 3 must be true or false"),
        ('[model]\nflavor = "8B"\n[parallelism]\nmodule_fqns_per_model_part = 3', "must be a list of lists"),
        ('[model]\nflavor = "8B"\n[parallelism]\nmodule_fqns_per_model_part = [[1]]', "must be a list of texts"),
        ('[model]\nflavor = "8B"\n[parallelism]\nfsdp_reshard_after_forward = "maybe"', "must be one of default, always, never"),
        ('seq_len = 3\n[model]\nflavor = "8B"', "stands outside any table"),
    ],
)
def test_a_broken_toml_file_gives_one_line_with_the_way_out(text: str, message: str) -> None:
    with pytest.raises(InputError) as caught:
        toml(text)
    assert message in str(caught.value) and "\n" not in str(caught.value) and str(caught.value).startswith("run.toml: ")


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("torchrun -m torchtitan.train --module llama3", "needs --config"),
        ("torchrun -m torchtitan.train --module llama3 --config llama3_80b", "did you mean 'llama3_8b'"),
        ("torchrun -m torchtitan.train --module lama3 --config llama3_8b", "did you mean 'llama3'"),
        ("torchrun -m torchtitan.train", "states neither --module and --config"),
        (f"{RUN}llama3_8b --training.seq_len many", "training.seq_len = 'many' must be a whole number"),
        ("torchrun -m torchtitan.train llama3 --config llama3_8b", "'llama3' belongs to no setting"),
    ],
)
def test_a_broken_command_gives_one_line_with_the_way_out(text: str, message: str) -> None:
    with pytest.raises(InputError) as caught:
        command(text)
    assert message in str(caught.value) and "\n" not in str(caught.value)


def test_other_peoples_files_are_left_to_their_readers() -> None:
    assert not is_toml(Source(Path("scenario.toml"), "", {"model": {"name": "70b"}, "cluster": {"num_gpus": 8}}))
    assert not is_command(Source(Path("x.sh"), "torchrun pretrain_gpt.py --num-layers 32"))
    assert is_command(Source(Path("x.sh"), RUN + "llama3_8b"))


# Writing

EIGHT = {"model": "8b", "num_gpus": 64, "global_batch_size": 128, "seq_len": 8192}


def test_an_even_split_is_stated_with_weightless_ends() -> None:
    launch = write(target(EIGHT, pipeline_parallel=4, data_parallel=16, zero_stage=2))
    words = launch.arguments["PARALLEL_ARGS"]
    assert "--parallelism.pipeline_parallel_first_stage_less_layers 0" in words
    assert not any("module_fqns" in word for word in words)
    assert "activation-checkpoint:none" in launch.arguments["CHECKPOINTING_ARGS"]


def test_a_split_of_its_own_is_stated_as_lists_of_modules_and_reads_back() -> None:
    uneven = target(EIGHT, (5, 10, 10, 7), pipeline_parallel=4, data_parallel=16, zero_stage=3)
    launch = write(uneven)
    assert command(line(launch)).layers_per_stage == toml(launch.files[TOML_NAME]).layers_per_stage == (5, 10, 10, 7)
    assert '"norm", "output"' in launch.files[TOML_NAME] and "norm,lm_head" in line(launch)


def test_v_shaped_splits_read_back_by_stage() -> None:
    shape = {"pipeline_parallel": 2, "virtual_pipeline": 2, "data_parallel": 32, "zero_stage": 2, "schedule": "dualpipe"}
    launch = write(target({**EIGHT, "software": "fsdp2-eager"}, (7, 9, 9, 7), **shape))
    assert command(line(launch)).layers_per_stage == (14, 18)


def test_flavors_without_a_configuration_get_one_of_their_own() -> None:
    launch = write(target({"model": "405b", "num_gpus": 512, "global_batch_size": 512}, tensor_parallel=8, data_parallel=64, zero_stage=3))
    text = launch.files["planned_models.py"]
    assert 'model_registry("405B")' in text and "def llama3_405b_bf16():" in text
    assert "--module planned_models" in launch.arguments["MODEL_ARGS"]
    compile(text, "planned_models.py", "exec")
    assert command(line(launch), 512).request.model == "llama-3.1-405b"


def test_models_and_lengths_that_torchtitan_lacks_are_refused_with_those_that_it_has() -> None:
    with pytest.raises(InputError, match=r"no configuration for the model 'mixtral-8x7b'; it has llama-3.2-1b"):
        write(target({"model": "mixtral-8x7b", "num_gpus": 64, "global_batch_size": 64}, data_parallel=64, zero_stage=3))
    with pytest.raises(InputError, match="at most 16384 tokens, not seq_len = 32768"):
        long = {"model": "deepseek-v3", "num_gpus": 64, "global_batch_size": 64, "seq_len": 32768}
        write(target(long, expert_parallel=64, data_parallel=64, zero_stage=3))


def test_the_old_file_is_left_out_where_the_old_version_cannot_run_the_layout() -> None:
    layout = {"pipeline_parallel": 4, "data_parallel": 16, "zero_stage": 2}
    assert TOML_NAME not in write(target({"model": "qwen3-32b", "num_gpus": 64, "global_batch_size": 64}, **layout)).files
    assert TOML_NAME in write(target(EIGHT, **layout)).files


def test_names_of_own_configurations_are_distinct_and_found_again() -> None:
    names = [own_config(row, precision) for row in FLAVORS if row.written for precision in ("bf16", "fp8", "mxfp8")]
    assert len(set(names)) == len(names)
    for name in names:
        row = recipe_of(name, "planned_models")
        assert row is not None and own_config(find_flavor(row.module, row.flavor), row.precision) == name  # type: ignore[arg-type]
    assert all(find_flavor(row.module, row.flavor) for row in RECIPES.values())
