"""What `planner sweep` makes of lists, ranges, [sweep] tables and folders."""

from __future__ import annotations

import re
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from planner.errors import InputError
from planner.grid import KEYS, MOST_POINTS, Axes, Point, points_of, values_of
from planner.request import Request

SMALL = Request(model="llama-3.2-1b")


def axes(**texts: Any) -> Axes:
    """Axes as flags state them."""
    return {key: values_of(key, text, key) for key, text in texts.items()}


def told(points: tuple[Point, ...]) -> list[tuple[Any, ...]]:
    """The varied values of each point."""
    return [tuple(point.varied.values()) for point in points]


def scenario_file(folder: Path, name: str, text: str) -> Path:
    """A scenario of a small model on eight GPUs with more tables."""
    path = folder / f"{name}.toml"
    path.write_text(f'[model]\nname = "llama-3.2-1b"\n[cluster]\nnum_gpus = 8\n{text}')
    return path


@given(st.integers(1, 50), st.integers(0, 400), st.integers(1, 40))
def test_an_arithmetic_range_is_that_of_python(first: int, more: int, step: int) -> None:
    last = first + more
    assert values_of("num_gpus", f"{first}:{last}:+{step}", "") == tuple(range(first, last + 1, step))


@given(st.integers(1, 50), st.integers(1, 10_000), st.integers(2, 9))
def test_a_geometric_range_multiplies_up_to_its_end(first: int, times: int, factor: int) -> None:
    values = values_of("num_gpus", f"{first}:{first * times}:x{factor}", "")
    assert values[0] == first and values[-1] <= first * times < values[-1] * factor
    assert all(after == before * factor for before, after in pairwise(values))


def test_lists_ranges_and_counts_mix() -> None:
    assert values_of("seq_len", "4K,8192, 16384:65536:x2", "") == (4000, 8192, 16384, 32768, 65536)
    assert values_of("training_tokens", ["1.4T", 2e12, "1T:1.2T:+0.1T"], "") == (1.4e12, 2e12, 1e12, 1.1e12, 1.2e12)
    assert values_of("dropout", [True, False], "") == values_of("dropout", "true,false", "") == (True, False)
    assert values_of("micro_batch_size", "1:8:x2,16", "") == ((1,), (2,), (4,), (8,), (16,))
    assert values_of("recompute", "none,full", "") == (("none",), ("full",))
    assert values_of("model_shape", "layers=2,hidden=512", "") == ("layers=2,hidden=512",)


BAD = [
    ("num_gpus", "64:128", "is no range: write FIRST:LAST:xFACTOR or FIRST:LAST:+STEP, such as 64:128:x2"),
    ("num_gpus", "64:128:2", "such as 64:128:x2"),
    ("num_gpus", "::", "such as 64:16384:x2"),
    ("num_gpus", "::x2", "such as 64:16384:x2"),
    ("num_gpus", "8:", "such as 64:16384:x2"),
    ("num_gpus", "128:64", "such as 64:16384:x2"),
    ("micro_batch_size", "1:8", "such as 1:8:x2"),
    ("micro_batch_size", "1:8:x1.5", "1:8:x1.5: 1.5 is no whole number"),
    ("num_gpus", "128:64:x2", "descends: write 64:128:x2"),
    ("num_gpus", "128:64:x1", "descends: write 64:16384:x2"),
    ("num_gpus", "64:128:x1", "never reaches its end: write 64:128:x2"),
    ("num_gpus", "64:128:+0", "never reaches its end: write 64:128:+1"),
    ("num_gpus", "0:128:x2", "never reaches its end: write 1:128:x2"),
    ("num_gpus", "8:64:x1.5", "8:64:x1.5: 40.5 is no whole number"),
    ("num_gpus", "a:b:x2", "'a' must be a positive number"),
    ("num_gpus", "64,-8", "'-8' must be a positive number"),
    ("num_gpus", "1.5", "1.5 is no whole number"),
    ("num_gpus", "8,16,8", "names 8 more than once"),
    ("num_gpus", "8:32:x2,16", "names 16 more than once"),
    ("num_gpus", "", "must be a positive number"),
    ("num_gpus", [], "has an empty value"),
    ("num_gpus", [[8]], "must be a list of values, or a text such as '64:4096:x2'"),
    ("num_gpus", {"first": 8}, "must be a list of values"),
    ("gpu", "h100,", "has an empty value"),
    ("dropout", "yes", "'yes' must be true or false"),
    ("zero", "1,3", "no key 'zero' to vary; did you mean 'zero_stage'"),
]


@pytest.mark.parametrize(("key", "content", "telling"), BAD)
def test_bad_values_are_refused_with_the_way_out(key: str, content: Any, telling: str) -> None:
    with pytest.raises(InputError) as error:
        values_of(key, content, "--flag")
    line = str(error.value)
    assert line.startswith("--flag") and "\n" not in line and telling in line


@pytest.mark.parametrize(
    "content", [content for key, content, telling in BAD if key == "num_gpus" and re.search(r"(write|such as) [0-9]+:.*$", telling)]
)
def test_the_range_that_a_message_proposes_is_legal(content: str) -> None:
    with pytest.raises(InputError) as error:
        values_of("num_gpus", content, "--gpus")
    assert values_of("num_gpus", str(error.value).split()[-1], "--gpus")


def test_the_number_of_gpus_varies_fastest_and_the_other_keys_in_a_fixed_order() -> None:
    points = points_of(None, SMALL, axes(num_gpus="8,16", precision="bf16,fp8", gpu="h100,b200"))
    assert [point.number for point in points] == list(range(1, 9))
    assert told(points)[:5] == [("h100", "bf16", 8), ("h100", "bf16", 16), ("h100", "fp8", 8), ("h100", "fp8", 16), ("b200", "bf16", 8)]
    assert KEYS[-1] == "num_gpus" and [p.scenario.job.num_gpus for p in points[:2]] == [8, 16]
    assert len({point.series for point in points}) == 4


def test_flags_override_the_table_of_a_file_in_every_way_that_says_the_same(tmp_path: Path) -> None:
    path = str(scenario_file(tmp_path, "own", '[sweep]\nnum_gpus = "8:32:x2"\nglobal_batch_size = [64, 128]\n'))
    assert len(points_of(path, Request(), {})) == 6
    assert told(points_of(path, Request(), axes(num_gpus="4"))) == [(64, 4), (128, 4)]
    assert told(points_of(path, Request(), axes(global_batch_tokens="524288", num_gpus="4"))) == [(524288, 4)]
    assert told(points_of(path, Request(num_gpus=4, global_batch_size=8), {})) == [()]


def test_a_value_of_a_file_yields_to_a_varied_one(tmp_path: Path) -> None:
    path = str(scenario_file(tmp_path, "own", "[workload]\nglobal_batch_size = 64\n"))
    points = points_of(path, Request(), axes(global_batch_tokens="524288,1048576"))
    assert [point.scenario.job.global_batch_size for point in points] == [128, 256]


def test_a_folder_is_a_series_for_each_of_its_scenarios(tmp_path: Path) -> None:
    scenario_file(tmp_path, "b", '[sweep]\nnum_gpus = "8,16"\n')
    scenario_file(tmp_path, "a", "")
    points = points_of(str(tmp_path), Request(), {})
    assert [(p.number, p.scenario.name, p.scenario.job.num_gpus) for p in points] == [(1, "a", 8), (2, "b", 8), (3, "b", 16)]
    assert [point.series[0] for point in points] == ["a", "b", "b"]


@pytest.mark.parametrize(("text", "telling"), [("", "model is missing"), ('[model]\nname = "8b"\n', "num_gpus is missing")])
def test_an_incomplete_file_of_a_folder_is_named(tmp_path: Path, text: str, telling: str) -> None:
    scenario_file(tmp_path, "a", "")
    (tmp_path / "b.toml").write_text(text)
    with pytest.raises(InputError, match=rf"{telling}.*\({tmp_path}/b.toml\)"):
        points_of(str(tmp_path), Request(), {})
    (tmp_path / "b.toml").write_text(text + '[sweep]\nprecision = "bf16"\n')
    with pytest.raises(InputError, match=rf"{telling}.*\({tmp_path}/b.toml, point 2: precision = bf16\)"):
        points_of(str(tmp_path), Request(), {})


def test_the_shipped_sweep_has_the_points_of_its_description() -> None:
    points = points_of("sweep-70b", Request(), {})
    assert [point.scenario.job.num_gpus for point in points] == [64 << n for n in range(9)]
    assert {point.scenario.training_tokens for point in points} == {1.4e12}


def test_the_batch_grows_with_the_gpus_of_its_own_series() -> None:
    points = points_of(None, SMALL, axes(num_gpus="16,8,24", global_batch_size="64,100"), scale_batch=True)
    assert [point.scenario.job.global_batch_size for point in points] == [128, 64, 192, 200, 100, 300]
    assert len({point.series for point in points}) == 2


REFUSED = [
    (axes(num_gpus="8", gpu="h100,h10"), "no gpu called 'h10'; did you mean .*\\(point 2: gpu = h10, num_gpus = 8\\)"),
    (axes(num_gpus="8", gpu="a100,h100", precision="bf16,fp8"), "no such matrix units \\(point 2: gpu = a100, precision = fp8"),
    (axes(num_gpus="8", gpu="h100,h100-sxm-80gb"), "points 1 and 2 of the sweep ask the same question"),
    (axes(num_gpus="1:1000:+1", global_batch_size="1:1000:+1"), f"1,000,000 points; the most is {MOST_POINTS:,}"),
    (axes(num_gpus="1:1T:+1"), f"the most is {MOST_POINTS:,}"),
    (axes(gpu="h100"), "num_gpus is missing"),
]


@pytest.mark.parametrize(("given", "telling"), REFUSED)
def test_a_grid_with_a_bad_point_is_refused_before_any_search(given: Axes, telling: str) -> None:
    with pytest.raises(InputError, match=telling):
        points_of(None, SMALL, given)


def test_a_scaled_batch_that_is_no_whole_number_names_point_and_neighbours() -> None:
    with pytest.raises(InputError, match=r"100 sequences on 8 GPUs .* on 9; nearest num_gpus: 8, 10 \(point 2: num_gpus = 9\)"):
        points_of(None, Request(model="llama-3.2-1b", global_batch_size=100), axes(num_gpus="8,9"), scale_batch=True)


@pytest.mark.parametrize(
    ("text", "telling"),
    [
        ("[sweep]\ngpus = [8]\n", r"own.toml: sweep.gpus: no key 'gpus' to vary; did you mean"),
        ("[sweep]\nnum_gpus = '8:4:x2'\n", r"own.toml: sweep.num_gpus = 8:4:x2 descends"),
        ("[sweeps]\n", "unknown table 'sweeps'"),
    ],
)
def test_a_bad_table_names_file_and_key(tmp_path: Path, text: str, telling: str) -> None:
    with pytest.raises(InputError, match=telling):
        points_of(str(scenario_file(tmp_path, "own", text)), Request(), {})


def test_a_sweep_that_is_no_table_and_an_empty_folder_are_refused(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="no scenario"):
        points_of(str(tmp_path), Request(), {})
    path = tmp_path / "own.toml"
    path.write_text('sweep = 1\n[model]\nname = "8b"\n')
    with pytest.raises(InputError, match="'sweep' must be a table"):
        points_of(str(path), Request(), {})


def test_the_digest_reads_everything_that_a_search_reads() -> None:
    base = points_of(None, SMALL, axes(num_gpus="8"))[0]
    again = points_of(None, SMALL, axes(num_gpus="8"))[0]
    others = [
        Request(model="llama-3.2-1b", **one)
        for one in (
            {"software": "fsdp2"},
            {"seq_len": 2048},
            {"training_tokens": 1e9},
            {"tensor_parallel": (1,)},
            {"nic_gbit_per_s": 100.0},
        )
    ]
    digests = {points_of(None, request, axes(num_gpus="8"))[0].digest for request in others}
    assert base.digest == again.digest and len(digests | {base.digest}) == len(others) + 1
