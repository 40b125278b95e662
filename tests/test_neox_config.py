"""GPT-NeoX's YAML, and two published recipes: what they say, what is wrong with them, and what is written again from them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import yaml
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from planner.catalogue import load
from planner.catalogue.schema import Model
from planner.cost import parameters
from planner.errors import InputError
from planner.export import export
from planner.frameworks.config import Config
from planner.frameworks.deepspeed_settings import SETTING_RULES
from planner.frameworks.reading import read_config
from planner.request import Request, make_scenario
from planner.scenario import Job
from planner.verdict import check

DATA = Path(__file__).parent / "data" / "configs"
ZERO3, NEOX = DATA / "deepspeed_zero3_70b.json", DATA / "neox_20b.yml"


def job() -> Job:
    """A job in DeepSpeed's stack."""
    return make_scenario(Request(model="8b", num_gpus=8, framework="deepspeed")).job_in("deepspeed")


def found(config: Config, own: Job) -> dict[str, str]:
    """What the rules about settings say: id -> text."""
    said = {rule.id: rule.finds(config, own) for rule in SETTING_RULES}
    return {rule: text for rule, text in said.items() if text}


def test_gpt_neox_20b_is_the_catalogues_model() -> None:
    config, own = read_config(NEOX, 96), load.find(Model, "gpt-neox-20b")
    assert config.model is not None and parameters.total(config.model) == parameters.total(own)
    names = (
        "num_layers",
        "hidden_size",
        "ffn_hidden_size",
        "vocab_size",
        "norm",
        "gated_mlp",
        "qkv_bias",
        "linear_bias",
        "tied_embeddings",
    )
    assert all(getattr(config.model, name) == getattr(own, name) for name in names)
    wanted = {"tensor_parallel": 2, "pipeline_parallel": 4, "zero_stage": 1, "micro_batch_size": 4, "recompute": "full"}
    assert wanted.items() <= dict(config.layout).items()
    assert (config.request.global_batch_size, config.request.precision, config.request.seq_len) == (4 * 32 * 12, "fp16", 2048)


def neox(path: Path, **keys: Any) -> Config:
    """A GPT-NeoX file of some keys, read."""
    file = path / "neox.yml"
    shape = {"num_layers": 32, "hidden_size": 4096, "num_attention_heads": 32, "seq_length": 4096, "model_parallel_size": 1}
    file.write_text(yaml.safe_dump({**shape, "train_micro_batch_size_per_gpu": 1, **keys}))
    return read_config(file, 8)


def test_a_stated_width_of_a_gated_mlp_is_that_of_a_plain_one_with_as_many_weights(tmp_path: Path) -> None:
    llama = {"activation": "swiglu", "intermediate_size": 32768, "mlp_multiple_of": 256, "norm": "rmsnorm", "no_weight_tying": True}
    model = neox(tmp_path, **llama, use_bias_in_attn_linear=False, pos_emb="rotary", make_vocab_size_divisible_by=1, vocab_size=32000).model
    assert model is not None and model.gated_mlp and model.ffn_hidden_size == 11008
    assert parameters.total(model) == parameters.total(load.find(Model, "llama-2-7b"))
    assert (neox(tmp_path, mlp_type="llama").model or model).ffn_hidden_size == 11008


def test_attention_kinds_decide_the_kernel(tmp_path: Path) -> None:
    assert neox(tmp_path, attention_config=[[["flash"], 32]]).software["attention_kernel"] == "flash2"
    assert neox(tmp_path).software["attention_kernel"] == "torch"
    with pytest.raises(InputError, match="attention-config = 'flsh' is not known here; did you mean 'flash'"):
        neox(tmp_path, attention_config=[[["flsh"], 32]])


def test_gpt_neox_with_one_stage_runs_the_pipeline_engine(tmp_path: Path) -> None:
    assert "set pipe-parallel-size = 0" in found(neox(tmp_path, pipe_parallel_size=1, zero_optimization={"stage": 2}), job())["D29"]
    assert "D29" not in found(neox(tmp_path, pipe_parallel_size=0, zero_optimization={"stage": 2}), job())


# Published recipes


@pytest.mark.parametrize(
    "path, request_of", [(ZERO3, Request(model="70b")), (NEOX, Request(num_gpus=96, gpu="a100-sxm-40gb"))], ids=("zero3", "neox")
)
def test_a_published_recipe_is_read_judged_and_written_again(path: Path, request_of: Request, tmp_path: Path) -> None:
    config = read_config(path, request_of.num_gpus)
    judged = check(config, request_of)
    assert judged.legal and judged.good, judged.findings
    layout, scenario = judged.planned.layout, judged.planned.scenario
    made = export(scenario, "deepspeed", layout)
    for name, text in made.files.items():
        (tmp_path / name).write_text(text)
    again = read_config(tmp_path / "launch.sh", scenario.job.num_gpus)
    shared = {axis: value for axis, value in again.layout.items() if axis in config.layout}
    assert shared == {axis: value for axis, value in config.layout.items() if axis in again.layout}
    assert again.request.global_batch_size == config.request.global_batch_size


# Arbitrary input

VALUES = st.recursive(
    st.none() | st.booleans() | st.integers(-2, 1 << 45) | st.floats() | st.text(max_size=6) | st.just("auto"),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=6), inner, max_size=3),
    max_leaves=6,
)
NEOX_KEYS = sorted(
    {key.replace("-", "_") for key in yaml.safe_load(NEOX.read_text())} | {"attention_config", "num_kv_heads", "moe_num_experts"}
)


@settings(max_examples=100, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(changes=st.dictionaries(st.sampled_from(NEOX_KEYS), VALUES | st.integers(0, 64), max_size=5))
def test_arbitrary_gpt_neox_values_raise_nothing_but_input_errors(changes: dict[str, Any], tmp_path: Path) -> None:
    own = job()
    try:
        config = neox(tmp_path, **changes)
    except InputError as error:
        assert "\n" not in str(error)
    else:
        assert all("\n" not in text for text in found(config, own).values())
