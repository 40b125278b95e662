"""The catalogue: complete, consistent, and as published."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

import planner
from planner.catalogue.load import find, names, parse_file, records
from planner.catalogue.schema import Cluster, Generation, Gpu, Model, Software
from planner.cost import parameters
from planner.errors import InputError
from planner.units import GIB

CATALOGUE = Path(planner.__file__).parent / "catalogue"
MODELS = list(records(Model))
GPUS = list(records(Gpu))


def test_the_catalogue_is_as_large_as_promised() -> None:
    assert len(MODELS) >= 30 and len(GPUS) >= 15


@pytest.mark.parametrize("model", [m for m in MODELS if m.published_params], ids=lambda m: m.name)
def test_parameters_from_the_shape_are_the_published_ones(model: Model) -> None:
    assert parameters.total(model) == pytest.approx(model.published_params, rel=0.005)


@pytest.mark.parametrize(
    "alias, name",
    [
        ("7b", "llama-2-7b"),
        ("8b", "llama-3.1-8b"),
        ("13b", "llama-2-13b"),
        ("70b", "llama-3.1-70b"),
        ("405b", "llama-3.1-405b"),
        ("175b", "gpt-3-175b"),
    ],
)
def test_common_aliases_mean_what_people_mean(alias: str, name: str) -> None:
    assert find(Model, alias).name == name


def test_70b_is_80_layers_of_8192_with_64_heads_and_8_kv_heads() -> None:
    model = find(Model, "70b")
    assert (model.num_layers, model.hidden_size, model.num_attention_heads, model.num_key_value_heads) == (80, 8192, 64, 8)


def nominal_gigabytes(gpu: Gpu) -> list[int]:
    """The memory that the card's names state."""
    return [int(size) for name in (gpu.name, *gpu.aliases) for size in re.findall(r"(\d+)gb(?:-|$)", name)]


@pytest.mark.parametrize("gpu", GPUS, ids=lambda g: g.name)
def test_usable_memory_is_below_what_the_name_of_the_card_states(gpu: Gpu) -> None:
    for nominal in nominal_gigabytes(gpu):
        assert 0.9 * nominal < gpu.memory_bytes / GIB
        assert gpu.memory_bytes / GIB < nominal or "that are GiB" in gpu.source  # AMD counts in GiB


def test_most_cards_state_their_memory_in_a_name() -> None:
    assert sum(bool(nominal_gigabytes(gpu)) for gpu in GPUS) >= 12


@pytest.mark.parametrize("gpu", GPUS, ids=lambda g: g.name)
def test_accelerators_are_plausible_and_refer_to_what_exists(gpu: Gpu) -> None:
    assert find(Generation, gpu.generation) and find(Cluster, gpu.default_cluster)
    sixteen = max(gpu.peak_bf16_flops, gpu.peak_fp16_flops)
    assert gpu.peak_fp8_flops == 0 or 1.9 <= gpu.peak_fp8_flops / sixteen <= 2.3
    assert gpu.price_usd_per_hour > 0 and gpu.price_date


def test_stacks_and_clusters_load() -> None:
    assert len(list(records(Software))) >= 10 and len(names(Cluster)) >= 5


GOOD = "[model]\nnum_layers = 2\nhidden_size = 64\nnum_attention_heads = 4\nffn_hidden_size = 256\nvocab_size = 100\n"
BAD = {
    "unknown key": (GOOD + "num_layer = 3\n", "unknown key 'num_layer'; did you mean 'num_layers'"),
    "missing key": (GOOD.replace("vocab_size = 100\n", ""), "vocab_size is missing"),
    "wrong type": (GOOD.replace("= 64", '= "wide"'), "hidden_size = 'wide' must be a whole number"),
    "negative": (GOOD.replace("= 64", "= -64"), "hidden_size = -64 must be finite and not negative"),
    "not a number": (GOOD.replace("= 64", "= nan"), "hidden_size = nan must be"),
    "fraction": (GOOD.replace("= 64", "= 64.5"), "hidden_size = 64.5 must be a whole number"),
    "boolean": (GOOD.replace("= 64", "= true"), "hidden_size = True must be a whole number"),
    "contradiction": (GOOD.replace("num_attention_heads = 4", "num_attention_heads = 5"), "does not divide by num_attention_heads = 5"),
    "twice": (GOOD + "[more]\nnum_layers = 3\n", "num_layers is stated twice"),
    "not TOML": ("[model\n", "not valid TOML"),
}


@pytest.mark.parametrize("name", BAD)
def test_a_broken_file_names_file_key_and_value(tmp_path: Path, name: str) -> None:
    text, message = BAD[name]
    path = tmp_path / "mine.toml"
    path.write_text(text)
    with pytest.raises(InputError) as error:
        parse_file(Model, path)
    assert str(path) in str(error.value) or "'mine'" in str(error.value)
    assert message in str(error.value)


SHIPPED = {Gpu: "gpus/h100-sxm-80gb", Cluster: "clusters/hgx-200g", Generation: "generations/hopper", Software: "software/fsdp2"}


def file_keys() -> list[Any]:
    """Every numeric key of one shipped file of each kind."""
    found = []
    for kind, stem in SHIPPED.items():
        for key in re.findall(r"^(\w+) = [\d.]+$", (CATALOGUE / f"{stem}.toml").read_text(), re.MULTILINE):
            found.append(pytest.param(kind, key, id=f"{stem}-{key}"))
    return found


def refusal(kind: type, path: Path, key: str, line: str) -> str:
    """What is said of a shipped file in which the line of one key reads differently."""
    text = (CATALOGUE / f"{SHIPPED[kind]}.toml").read_text()
    path.write_text(re.sub(rf"^{key} = .*$", line, text, flags=re.MULTILINE))
    with pytest.raises(InputError) as error:
        parse_file(kind, path)
    return str(error.value)


@pytest.mark.parametrize("kind, key", file_keys())
def test_a_bad_number_is_refused_under_the_key_of_the_file(tmp_path: Path, kind: type, key: str) -> None:
    path = tmp_path / "mine.toml"
    for value in ("nan", "inf", "-3", '"much"', "[1]", "true"):
        message = refusal(kind, path, key, f"{key} = {value}")
        assert message.startswith(f"{path}: {key} = ")


@pytest.mark.parametrize("key", ["hbm_gb_per_s", "peak_bf16_tflops", "memory_gib"])
def test_an_unknown_key_with_a_unit_is_named_as_it_was_written(tmp_path: Path, key: str) -> None:
    assert f"unknown key 'x{key}'; did you mean '{key}'" in refusal(Gpu, tmp_path / "mine.toml", key, f"x{key} = 3000")


def test_a_users_own_file_is_a_model(tmp_path: Path) -> None:
    path = tmp_path / "mine.toml"
    path.write_text(GOOD)
    assert find(Model, str(path)).name == "mine"


def test_an_unknown_published_key_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "mine.toml"
    path.write_text(GOOD + "[published]\nparam = 5\n")
    with pytest.raises(InputError, match="published has no key 'param'; did you mean 'params'"):
        parse_file(Model, path)
