"""Configurations with wrong values, keys and sizes: each is refused in one line, or read with what is wrong noted; no exception."""

from __future__ import annotations

import copy
import random
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from planner.frameworks.config import Config
from tests.good_configs import GOOD, SCRIPTS, TEXTS, TREES, Place, Told, Tree, judged


@pytest.fixture(autouse=True)
def _in_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


WITHOUT_TENSOR = ("deepspeed_json", "trainer_script", "accelerate_deepspeed_yaml")


@pytest.mark.parametrize("kind", GOOD)
def test_the_good_files_are_read_and_planned(kind: str) -> None:
    good = GOOD[kind]
    told = judged(good.write(good.text))
    assert told.config is not None and told.message == ""
    assert told.config.layout.get("tensor_parallel") == (1 if kind in WITHOUT_TENSOR else 2)


# One value at a time

WRONG: tuple[Any, ...] = (
    *([1, 2], [], {"a": 1}, {}, "abc", "", "-1", "nan", -1, 0, 1.5, 1e308, 10**30, -(10**30), float("nan"), float("inf")),
    *(True, False, None, "9" * 5000, "x" * 5000, "a\nb", "\x1b[31m", [[[[[]]]]], "${oc.env:HOME}", "1e400", "0x10", "١٢"),
)
SAID_TO_BE_RIGHT = {
    ("num_processes", "-1"): "accelerate: all that there are",
    ("data_parallel_shard_degree", "-1"): "torchtitan: what the others leave",
    ("parallelism.data_parallel_shard_degree", "-1"): "torchtitan: what the others leave",
    ("global_batch_size", "-1"): "torchtitan: the local one on every replica",
    ("training.global_batch_size", "-1"): "torchtitan: the local one on every replica",
    ("devices", "[1, 2]"): "NeMo: the GPUs by their numbers",
}
"""Key and word that look wrong and mean something -> what."""
NEVER_A_NUMBER = (str([1, 2]), str([]), "{'a': 1}", "abc", "nan", "inf", "1.5", "-1", str(10**30), str(-(10**30)))


def leaves(tree: Any, place: Place = ()) -> Iterator[Place]:
    """The places of all values of a tree, tables among them."""
    if isinstance(tree, dict):
        for key, value in tree.items():
            yield (*place, key)
            yield from leaves(value, (*place, key))


def changed(tree: Tree, place: Place, value: Any) -> Tree:
    """The tree with another value at a place."""
    new = copy.deepcopy(tree)
    inner = new
    for key in place[:-1]:
        inner = inner[key]
    inner[place[-1]] = value
    return new


@pytest.mark.parametrize("kind", TREES)
def test_a_wrong_value_of_any_key_of_a_data_file_is_refused_or_noted(kind: str) -> None:
    good = TREES[kind]
    tree = good.tree or {}
    plain = judged(good.write(good.text)).config
    assert plain is not None
    silent = []
    for place in leaves(tree):
        for value in WRONG:
            told = judged(good.write(good.dumped(changed(tree, place, value))))
            if swallowed(plain, told, str(place[-1]), _at(tree, place), str(value)):
                silent.append((place, value))
    assert silent == []


def _at(tree: Any, place: Place) -> Any:
    for key in place:
        tree = tree[key]
    return tree


def swallowed(plain: Config, told: Told, key: str, before: Any, after: str) -> bool:
    """Whether a number that decides something became nonsense, and nobody says so."""
    decides = any(re.search(rf"(?<![A-Za-z_-]){re.escape(key)}(?![A-Za-z_-])", line.split(":")[0]) for line in plain.read)
    number = isinstance(before, int) and not isinstance(before, bool)
    if (key, after) in SAID_TO_BE_RIGHT:
        return False
    return decides and number and after in NEVER_A_NUMBER and told.config is not None and not told.noted(key)


LINES: dict[str, re.Pattern[str]] = {
    ".sh": re.compile(r"--(?P<key>[A-Za-z0-9._-]+)[ =](?P<value>(?!-)[^\s\\]+)"),
    ".toml": re.compile(r"(?m)^(?P<key>\w+) = (?P<value>.+)$"),
    ".log": re.compile(r"(?m)^  (?P<key>\w+) \.{2,} (?P<value>.+)$"),
}
WORDS = (
    "",
    "abc",
    "-1",
    "0",
    "1.5",
    "nan",
    "inf",
    "1e400",
    str(10**30),
    "9" * 5000,
    "x" * 5000,
    "true",
    "None",
    "$UNSET",
    "[1, 2]",
    "'a b'",
    '"',
    "(",
)
TOML_WORDS = (*WORDS, '"abc"', '""', "[]", "{}", "{a = 1}", "2026-01-01", "0x10", "[[1]]", '"""a\nb"""', "12:00:00", "1_000")


@pytest.mark.parametrize("kind", TEXTS)
def test_a_wrong_word_anywhere_in_a_text_is_refused_or_noted(kind: str) -> None:
    good = TEXTS[kind]
    plain = judged(good.write(good.text)).config
    assert plain is not None
    silent = []
    words = TOML_WORDS if good.ending == ".toml" else WORDS
    for number, match in enumerate(LINES[good.ending].finditer(good.text)):
        for word in words[number % 2 :: 2]:  # neighbours share the work: every word meets every second value
            text = good.text[: match.start("value")] + word + good.text[match.end("value") :]
            told = judged(good.write(text))
            before = int(match["value"]) if match["value"].isdigit() else match["value"]
            if swallowed(plain, told, match["key"], before, word.strip("'\"")):
                silent.append((match["key"], word))
    assert silent == []


OPEN_TABLES = (("optimizer", "params"),)
"""What stands there is handed on to whatever optimizer is named."""


@pytest.mark.parametrize("kind", TREES)
def test_a_key_that_is_missing_or_unknown_is_refused_or_noted(kind: str) -> None:
    good = TREES[kind]
    tree = good.tree or {}
    unnoted = []
    for place in leaves(tree):
        smaller = copy.deepcopy(tree)
        del _at(smaller, place[:-1])[place[-1]]
        judged(good.write(good.dumped(smaller)))
        if isinstance(_at(tree, place), dict):
            continue
        told = judged(good.write(good.dumped(changed(tree, (*place[:-1], "qqzz_no_such_key"), 7))))
        if not told.noted("qqzz_no_such_key") and place[:-1] not in OPEN_TABLES:
            unnoted.append(place[:-1])
    assert sorted(set(unnoted)) == []


def test_keys_that_are_no_text_are_refused_or_passed_over() -> None:
    for kind, good in TREES.items():
        if good.ending == ".json":
            continue
        for key in (1, 1.5, True, None, "", "2026-01-01", (1, 2)):
            tree: dict[Any, Any] = {key: good.tree, **(good.tree or {})}
            tree |= {name: {key: 1, **value} for name, value in (good.tree or {}).items() if isinstance(value, dict)}
            told = judged(good.write(yaml.dump(tree)))
            assert told.config is not None or told.message, kind


@pytest.mark.parametrize("kind", SCRIPTS)
def test_an_unknown_flag_is_refused_or_noted(kind: str) -> None:
    good = GOOD[kind]
    arguments = good.text.index("--num-layers") if "--num-layers" in good.text else good.text.index(" --", good.text.index("train")) + 1
    text = f"{good.text[:arguments]}--qqzz-no-such-flag 7 {good.text[arguments:]}"
    told = judged(good.write(text))
    assert told.noted("qqzz-no-such-flag")


# Whole files


@pytest.mark.parametrize("kind", GOOD)
def test_a_file_cut_short_anywhere_is_refused_or_read(kind: str) -> None:
    good = GOOD[kind]
    ends = {index for index, letter in enumerate(good.text) if letter == "\n"} | set(range(0, len(good.text), max(len(good.text) // 60, 1)))
    for end in sorted(ends)[:150]:
        judged(good.write(good.text[:end]))


@pytest.mark.parametrize("kind", GOOD)
def test_letters_lost_or_changed_are_refused_or_read(kind: str) -> None:
    good, chance = GOOD[kind], random.Random(kind)
    signs = "\"'{}[]()$\\#=:,-+ \n\t\0\x1bé٣0 9"
    for _ in range(60):
        text = good.text
        for _ in range(chance.randint(1, 4)):
            place = chance.randrange(len(text))
            text = text[:place] + chance.choice((chance.choice(signs), "", text[place] * 3)) + text[place + chance.randint(0, 2) :]
        judged(good.write(text))


@pytest.mark.parametrize("kind", GOOD)
@pytest.mark.parametrize("num_gpus", (None, 1, 7, 24, 10_000_000))
def test_other_numbers_of_gpus_are_refused_or_read(kind: str, num_gpus: int | None) -> None:
    good = GOOD[kind]
    judged(good.write(good.text), num_gpus)


CONTRADICTIONS: dict[str, tuple[str, str, str]] = {
    "stages beyond the layers": ("megatron_script", "pipeline-model-parallel-size 2", "pipeline-model-parallel-size 64"),
    "a mesh beyond the GPUs": ("megatron_script", "--tensor-model-parallel-size 2", "--tensor-model-parallel-size 64"),
    "chunks that do not divide": (
        "megatron_script",
        "--num-layers-per-virtual-pipeline-stage 8",
        "--num-layers-per-virtual-pipeline-stage 7",
    ),
    "heads that do not divide": ("megatron_script", "--num-attention-heads 32", "--num-attention-heads 33"),
    "more groups than heads": ("megatron_yaml", "num_query_groups: 8", "num_query_groups: 64"),
    "a batch below the replicas": ("megatron_yaml", "global_batch_size: 128", "global_batch_size: 3"),
    "degrees beyond the GPUs": ("torchtitan_toml", "tensor_parallel_degree = 2", "tensor_parallel_degree = 3"),
    "degrees that leave none": ("torchtitan_command", "data_parallel_shard_degree 4", "data_parallel_shard_degree 5"),
    "processes beside the sizes": ("accelerate_yaml", "num_processes: 16", "num_processes: 15"),
    "a model of no layers": ("bridge_yaml", "num_layers: 32", "num_layers: 1"),
    "a batch of the wrong product": (
        "neox_yml",
        '"gradient_accumulation_steps": 8,',
        '"gradient_accumulation_steps": 8, "train_batch_size": 77,',
    ),
}


@pytest.mark.parametrize("name", CONTRADICTIONS)
def test_sizes_that_contradict_each_other_are_refused_or_read(name: str) -> None:
    kind, before, after = CONTRADICTIONS[name]
    good = GOOD[kind]
    assert before in good.text
    judged(good.write(good.text.replace(before, after)), None)
    judged(good.write(good.text.replace(before, after)))
