"""Pages are whole, closed, small and true to the search; pictures and summaries state the search's own figures."""

from __future__ import annotations

import base64
import dataclasses
import hashlib
import json
import re
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest

pytest.importorskip("altair", reason="needs the extra report")
pytest.importorskip("vl_convert", reason="needs the extra report")

from planner.answer import Answer, Wanted, answer, with_reasons
from planner.cost.memory import OUT_OF_MEMORY
from planner.cost.timeline import KINDS, timeline_of
from planner.difference import compare
from planner.engine import inline
from planner.explain import complete_layout, explain
from planner.grid import points_of
from planner.journal import Journal
from planner.report.html import chart_frames, chart_style, charts, figures_files, heat_cells, markup, payload
from planner.report.html.html_page import library
from planner.report.html.markdown_summary import markdown_summary
from planner.report.html.other_pages import diff_html, explain_html, sweep_html, validate_html
from planner.report.html.row_ledger import row_ledger
from planner.report.html.search_html import search_html
from planner.request import Request, make_scenario
from planner.scenario import Scenario
from planner.search import enumerate_layouts, estimate
from planner.sweep import Sweep, run
from planner.units import GIB
from planner.validate import SHIPPED, read_rows, validate
from solver.layout import AXES, Columns

EVIL = "<script>alert(1)</script>"


class Reader(HTMLParser):
    """Elements of a page, in order, with their attributes and the text of scripts."""

    def __init__(self, page: str) -> None:
        super().__init__()
        self.elements: list[tuple[str, dict[str, str | None]]] = []
        self.open: list[str] = []
        self.texts: dict[str, list[str]] = {}
        self.feed(page)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.elements.append((tag, dict(attrs)))
        if tag not in ("meta", "link", "br", "input"):
            self.open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        if self.open:
            self.texts.setdefault(self.open[-1], []).append(data)

    def named(self, tag: str) -> list[dict[str, str | None]]:
        """The attributes of every element of a name."""
        return [attributes for name, attributes in self.elements if name == tag]


def named(scenario: Scenario, name: str) -> Scenario:
    """The scenario with another name of its model."""
    model = dataclasses.replace(scenario.job.model, name=name)
    return dataclasses.replace(scenario, job=dataclasses.replace(scenario.job, model=model))


@pytest.fixture(scope="module")
def found() -> Answer:
    return answer(make_scenario(Request(model="13b", num_gpus=16, training_tokens=1e11), name="small"), Wanted(draws=50))


@pytest.fixture(scope="module")
def nothing() -> Answer:
    return with_reasons(answer(make_scenario(Request(model="70b", num_gpus=8), name="too-small"), Wanted(draws=0)))


@pytest.fixture(scope="module")
def page(found: Answer) -> str:
    return search_html(found)


def many(found: Answer, rows: int) -> Answer:
    """The answer with so many made-up ranked layouts, no two alike in time or memory."""
    own, rng = found.result.ranked, np.random.default_rng(0)
    wide = own.take(np.resize(np.arange(len(own)), rows))
    steps = np.sort(wide.step_seconds * rng.uniform(1.0, 3.0, rows))
    noisy = dataclasses.replace(wide, step_seconds=steps, need_bytes=wide.need_bytes * rng.uniform(0.3, 1.0, rows))
    return dataclasses.replace(found, result=dataclasses.replace(found.result, ranked=noisy))


def test_elements_close_in_order_and_identities_are_unique(page: str, nothing: Answer) -> None:
    for text in (page, search_html(nothing)):
        reader = Reader(text)
        assert reader.open == []
        identities = [a["id"] for _, a in reader.elements if "id" in a]
        assert len(identities) == len(set(identities))
        targets = [a["href"] for a in reader.named("a")]
        assert all(target and target[0] == "#" and target[1:] in identities for target in targets)


def test_nothing_in_the_page_is_fetched(page: str) -> None:
    reader = Reader(page)
    fetching = [
        (tag, a) for tag, a in reader.elements if {"src", "srcset", "poster", "action", "background"} & set(a) or tag in ("link", "iframe")
    ]
    assert fetching == []
    assert all(str(a.get("href", "#")).startswith("#") for _, a in reader.elements)
    own = page.replace(library(), "")
    assert not re.search(r"https?:|url\(|@import|cdn", own)


def test_the_policy_allows_no_network_and_only_the_page_s_own_scripts(page: str) -> None:
    reader = Reader(page)
    policy = next(str(a["content"]) for a in reader.named("meta") if a.get("http-equiv") == "Content-Security-Policy")
    assert policy.startswith("default-src 'none';") and "http" not in policy and "script-src 'sha256-" in policy
    scripts = re.findall(r"<script>(.*?)</script>", page, re.DOTALL)
    assert len(scripts) == 2
    for script in scripts:
        digest = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
        assert f"'sha256-{digest}'" in policy


def test_a_hostile_name_is_text_wherever_it_appears(found: Answer) -> None:
    evil = dataclasses.replace(found, result=dataclasses.replace(found.result, scenario=named(found.scenario, EVIL)))
    text = search_html(evil)
    assert text.count("<script") == search_html(found).count("<script")
    assert EVIL not in text and "&lt;script&gt;alert(1)&lt;/script&gt;" in text
    assert EVIL not in markdown_summary(evil)


@pytest.mark.parametrize("value", [EVIL, "</script>", "<!--", "]]>", "&amp;", "\u2028", "a\"b'c"])
def test_data_in_a_script_element_comes_back_whole_and_cannot_end_it(value: str) -> None:
    text = markup.data_script("x", {"key": value}).text
    inside = text[text.index(">") + 1 : text.rindex("</script>")]
    assert json.loads(inside) == {"key": value}
    assert not set("<>&") & set(inside) and inside.isascii()


@pytest.mark.parametrize("value", ['" onclick="x', "<b>", "'"])
def test_attributes_cannot_be_left(value: str) -> None:
    reader = Reader(markup.tag("p", "x", title=value).text)
    assert reader.elements == [("p", {"title": value})]


def test_a_page_of_100_000_layouts_is_below_6_mb(found: Answer) -> None:
    text = search_html(many(found, 100_000))
    assert len(text.encode()) < 6_000_000


def test_the_same_answer_gives_the_same_bytes(found: Answer, page: str) -> None:
    assert search_html(found) == page


def test_packed_columns_come_back_as_the_search_has_them(found: Answer) -> None:
    packed = payload.search_payload(found.result)
    columns, ranked = payload.unpacked(packed), found.result.ranked
    assert packed["rows"] == len(ranked)
    for axis in AXES:
        assert np.array_equal(columns[axis], getattr(ranked.layouts, axis)), axis
    assert np.allclose(columns["step_seconds"], ranked.step_seconds, rtol=1e-6)
    assert np.allclose(columns["memory_gib"], ranked.need_bytes / GIB, rtol=1e-6)
    assert np.allclose(columns["bubble_share"] / payload.SHARE_STEPS, ranked.bubble_seconds / ranked.step_seconds, atol=1e-5)
    about = {column["key"]: column for column in packed["columns"]}
    assert [about["verdict"]["words"][v] for v in columns["verdict"][:5]] == ["fits"] * 5


@pytest.mark.parametrize(("most", "dtype"), [(255, "<u1"), (256, "<u2"), (65535, "<u2"), (65536, "<u4")])
def test_whole_numbers_are_packed_as_narrow_as_they_allow(most: int, dtype: str) -> None:
    found = payload.smallest(np.array([0, most]))
    assert found.dtype == np.dtype(dtype) and int(found[1]) == most


def test_days_and_dollars_that_the_page_derives_are_those_of_the_table(found: Answer) -> None:
    packed = payload.search_payload(found.result)
    derived = {d["key"]: d for d in packed["derived"]}
    columns = payload.unpacked(packed)
    from planner.report.frame import layouts_frame

    frame = layouts_frame(found.scenario, found.result.ranked.take(slice(0, 20)))
    step, stack = columns["step_seconds"][:20], columns["software"][:20]
    for key in ("total_days", "cost_usd"):
        assert np.allclose(np.array(derived[key]["factors"])[stack] * step, frame[key], rtol=1e-5), key
    for key in ("tokens_per_second_per_gpu", "mfu"):
        assert np.allclose(np.array(derived[key]["factors"])[stack] / step, frame[key], rtol=1e-5), key


def test_parts_of_every_ledger_sum_to_the_shortlist_s_figures(found: Answer) -> None:
    for row in range(len(found.shortlist.rows)):
        ledger = row_ledger(found, row)
        assert sum(ledger.step_parts.values()) == pytest.approx(float(found.shortlist.rows.step_seconds[row]), rel=1e-9)
        need = ledger.memory_gib.sum(axis=1).to_numpy() * GIB
        assert np.allclose(need, ledger.need_bytes, rtol=1e-9)
        assert float(ledger.need_bytes.max()) == pytest.approx(float(found.shortlist.rows.need_bytes[row]), rel=1e-9)


def test_bars_of_the_breakdown_sum_to_the_step(found: Answer) -> None:
    ledgers = [row_ledger(found, row) for row in range(3)]
    bars = chart_frames.breakdown_frame(ledgers).groupby("rank")["seconds"].sum()
    assert [bars[f"#{rank}"] for rank in (1, 2, 3)] == pytest.approx(found.shortlist.rows.step_seconds[:3].tolist())


def test_every_part_and_kind_has_words_and_a_colour_that_is_legible_on_both_pages() -> None:
    from planner.explain import MEMORY_FORMULAS, STEP_FORMULAS

    assert set(chart_style.PARTS) == set(STEP_FORMULAS)
    assert set(chart_style.MEMORY_PARTS) == {*MEMORY_FORMULAS, "reserve"}
    colours = [colour for table in (chart_style.PARTS, chart_style.MEMORY_PARTS, chart_style.KINDS) for _, colour in table.values()]
    for colour in (*colours, *chart_style.SERIES):
        assert min(chart_style.contrast(colour, chart_style.LIGHT), chart_style.contrast(colour, chart_style.DARK)) >= 3.0, colour


def test_the_funnel_begins_with_the_space_and_ends_with_what_is_ranked(found: Answer, nothing: Answer) -> None:
    for one in (found, nothing):
        frame = chart_frames.funnel_frame(one.result.funnel)
        assert int(frame["left"].iloc[0]) == one.result.funnel.space
        assert int(frame["left"].iloc[-1]) == len(one.result.ranked)
        assert (frame["left"].shift(1)[1:] - frame["left"][1:]).tolist() == frame["dropped"][1:].tolist()


def test_a_cell_of_the_heat_map_is_the_best_over_the_rest(found: Answer) -> None:
    frame, x = heat_cells.heat_frame(found.result), found.result.ranked.layouts
    assert not frame[["tensor_parallel", "pipeline_parallel"]].duplicated().any()
    for row in frame.to_dict("records"):
        own = (x.tensor_parallel == row["tensor_parallel"]) & (x.pipeline_parallel == row["pipeline_parallel"])
        if own.any():
            assert row["step_seconds"] == found.result.ranked.step_seconds[np.flatnonzero(own)[0]]
        else:
            assert np.isnan(row["step_seconds"]) and row["rule"] and row["text"]


@pytest.mark.parametrize("name", ["found", "nothing"])
def test_a_cell_that_says_memory_has_layouts_that_only_memory_stops(name: str, request: pytest.FixtureRequest) -> None:
    result = request.getfixturevalue(name).result
    frame = heat_cells.heat_frame(result)
    said = {(r["tensor_parallel"], r["pipeline_parallel"]) for r in frame.to_dict("records") if r["rule"] in ("memory", "memory_floor")}
    free = dataclasses.replace(result.problem, usable_kib=1 << 50)
    stopped = set()
    for piece in enumerate_layouts(free).pieces(1 << 40):
        for _, lost in estimate(result.scenario, piece):
            assert np.all(lost.verdict == OUT_OF_MEMORY)
            stopped |= pairs(lost.layouts)
    assert said <= stopped
    ranked = pairs(result.ranked.layouts)
    assert {cell for cell in stopped - ranked if cell in set(heat_cells.cells_of(result))} == said


def pairs(x: Columns) -> set[tuple[int, int]]:
    """The tensor and pipeline sizes of layouts."""
    return set(zip(x.tensor_parallel.tolist(), x.pipeline_parallel.tolist(), strict=True))


def test_the_front_is_beaten_by_no_layout_and_beats_all_others(found: Answer) -> None:
    space = chart_frames.space_frame(found.result, 100_000)
    front = chart_frames.front_frame(space)
    assert front["step_seconds"].is_monotonic_increasing and front["gib"].is_monotonic_decreasing
    for seconds, gib in zip(space["step_seconds"], space["gib"], strict=True):
        assert ((front["step_seconds"] <= seconds) & (front["gib"] <= gib)).any()


def test_thinning_keeps_the_ends_and_every_colour(found: Answer) -> None:
    space = chart_frames.space_frame(many(found, 20_000).result, 100_000)
    thin = chart_frames.thinned(space, "recompute")
    assert len(thin) < len(space)
    assert set(thin["recompute"]) == set(space["recompute"])
    assert thin["step_seconds"].min() == space["step_seconds"].min()


def events(stages: int, batches: int) -> pd.DataFrame:
    """A made-up timeline."""
    rows = [
        (s, kind, 0, b, s + 3.0 * b + o, s + 3.0 * b + o + 1)
        for s in range(stages)
        for b in range(batches)
        for o, kind in enumerate(("forward", "backward"))
    ]
    return pd.DataFrame(rows, columns=["stage", "kind", "chunk", "micro_batch", "start_seconds", "end_seconds"])


def test_a_long_timeline_is_cut_to_fill_steady_stretch_and_drain() -> None:
    short, long = charts.stretches(events(4, 8)), charts.stretches(events(16, 500))
    assert list(short) == ["the whole step"] and list(long) == ["fill", "steady", "drain"]
    assert sum(map(len, long.values())) < 1.1 * charts.MOST_EVENTS
    assert long["fill"]["start_seconds"].min() == 0.0
    assert long["drain"]["end_seconds"].max() == events(16, 500)["end_seconds"].max()


def titles(spec: Any) -> list[str]:
    """All titles of axes in a Vega-Lite description."""
    if isinstance(spec, dict):
        own = [spec[axis]["title"] for axis in ("x", "y") if isinstance(spec.get(axis), dict) and spec[axis].get("title")]
        return own + [title for value in spec.values() for title in titles(value)]
    return [title for value in spec for title in titles(value)] if isinstance(spec, list) else []


def test_axes_state_their_units(found: Answer) -> None:
    ledger = row_ledger(found, 0)
    breakdown = charts.breakdown_chart(chart_frames.breakdown_frame([ledger])).to_dict()
    memory = charts.memory_chart(chart_frames.memory_frame(ledger), 79.2).to_dict()
    assert any("seconds" in title for title in titles(breakdown))
    assert any("GiB" in title for title in titles(memory))
    assert any("seconds" in title for title in titles(charts.timeline_chart(events(2, 2)).to_dict()))


def test_figures_are_png_and_svg_of_the_same_names_and_bytes(found: Answer) -> None:
    small = dataclasses.replace(found, result=dataclasses.replace(found.result, ranked=found.result.ranked.take(slice(0, 300))))
    timeline = timeline_of(found.shortlist.job(found.scenario, 0), found.shortlist.rows.layouts.layout(0))
    files = figures_files.figures_of(small, timeline=timeline)
    assert {re.sub("-(fill|steady|drain)", "", name) for name in files} == {f"{name}.{kind}" for name in FIGURES for kind in ("png", "svg")}
    for name, content in files.items():
        assert content.startswith(b"\x89PNG" if name.endswith("png") else b"<svg"), name
    assert figures_files.figures_of(small, timeline=timeline) == files


FIGURES = ("step-breakdown", "memory-per-stage", "step-against-memory", "tensor-by-pipeline", "pipeline-timeline", "pruning-funnel")


def test_the_decision_comes_first_and_says_what_the_search_says(found: Answer, page: str) -> None:
    label = found.shortlist.rows.layouts.layout(0).label
    first = page[page.index("<main") :]
    assert first.index("Question") < first.index(label) < first.index("What is proven") < first.index("Checklist") < first.index("<table")
    assert "80 % band" in first[: first.index("What is proven")]


def test_where_nothing_fits_the_page_says_why_and_what_would(nothing: Answer) -> None:
    text = search_html(nothing)
    assert "no layout fits" in text and "Limits that exclude each other" in text and "What would make it fit" in text
    assert nothing.why is not None
    for repair in nothing.why.repairs:
        assert repair.words[0] in text


def test_the_summary_has_question_pick_proof_checklist_table_and_funnel(found: Answer, nothing: Answer) -> None:
    text = markdown_summary(found, ["figures/step-breakdown.svg"])
    for heading in ("**Question.**", "**Pick.**", "## What is proven", "## Checklist", "## Shortlist", "## Pruning", "## Pictures"):
        assert heading in text, heading
    rows = [line for line in text.splitlines() if re.match(r"\| \d+ \|", line)]
    assert len(rows) == len(found.shortlist.rows)
    assert f"{found.result.funnel.space:,}" in text
    other = markdown_summary(nothing)
    assert "no layout fits" in other and "## What would make it fit" in other


def test_rows_of_the_shortlist_open_ledgers_that_exist(found: Answer, page: str) -> None:
    reader = Reader(page)
    links = [str(a["href"]) for a in reader.named("a") if str(a["href"]).startswith("#ledger-")]
    ledgers = [str(a["id"]) for a in reader.named("details") if str(a.get("id", "")).startswith("ledger-")]
    assert [link[1:] for link in links] == ledgers == [f"ledger-{rank}" for rank in range(1, len(found.shortlist.rows) + 1)]


def test_explain_has_a_page_for_legal_and_illegal_layouts(found: Answer) -> None:
    legal, illegal = (explain(found.scenario, complete_layout(found.scenario, label)) for label in ("tp2-pp4-dp2", "tp3-dp5"))
    text = explain_html(legal)
    assert f"{float(legal.step.total[0]):.4f}" in text if legal.step else False
    assert Reader(text).open == []
    refused = explain_html(illegal)
    for rule in illegal.broken_rules:
        assert rule in refused


def test_the_parts_of_a_comparison_sum_to_its_seconds(found: Answer) -> None:
    own = compare(found.scenario, "tp2-pp4-dp2-zero1-mb1", "tp4-pp2-dp2-zero1-mb1")
    assert own.difference is not None
    text = diff_html(found.scenario, own)
    assert f"{own.difference.seconds:+.4f} s" in text and Reader(text).open == []
    assert "is not legal" in diff_html(found.scenario, compare(found.scenario, "tp3-dp5", "tp4-pp2-dp2"))


def test_validation_names_every_family(found: Answer) -> None:
    report = validate(read_rows(SHIPPED)[::10])
    text = validate_html(report)
    assert Reader(text).open == []
    for family in report["step_time"]["families"]:
        assert f"<td>{family}</td>" in text


def test_a_sweep_shows_every_point_also_those_without_a_layout(tmp_path: Path) -> None:
    own = Sweep(points=points_of(None, Request(model="13b", pipeline_parallel=(1,)), {"num_gpus": (1, 8)}, scale_batch=False))
    with Journal(tmp_path / "sweep.journal", own.header, resume=False) as journal:
        run(own, inline, journal)
        text = sweep_html(own, journal)
    assert Reader(text).open == []
    assert "2 of 2 points" in text and "tokens per second" in text


def test_events_of_a_simulated_step_keep_their_kinds(found: Answer) -> None:
    own = explain(found.scenario, complete_layout(found.scenario, "tp2-pp4-dp2-zero1-mb1"))
    simulated = timeline_of(own.job, own.layout)
    frame = chart_frames.timeline_frame(simulated)
    assert len(frame) == len(simulated) and set(frame["kind"]) <= set(KINDS) == set(chart_style.KINDS)
    assert (frame["end_seconds"] > frame["start_seconds"]).all()
