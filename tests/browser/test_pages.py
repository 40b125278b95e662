"""What a reader can do with a page in a real browser, with mouse and keyboard, in light and dark, on a phone and on paper."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path

import pytest
from axe_playwright_python.sync_playwright import Axe
from playwright.sync_api import Page

from planner.answer import Answer
from planner.report.html.heat_cells import cells_of
from tests.browser.conftest import EVIL, Opened, drawn

Open = Callable[..., Opened]

SCHEMES = ("light", "dark")
PHONE = {"width": 390, "height": 844}
PAGES = ("report", "refusal", "hostile", "ledger", "comparison", "validation", "sweep")

CONTROLS = 'a[href], button, input, select, summary, [tabindex="0"]'
PICTURES = ".chart svg, .chart canvas"
LETTERS = ".chart svg .role-axis-title text, .chart svg .role-legend-label text"

OPEN_SECONDS = 3.0
"""Until a page of 100,000 layouts shows its table."""


def labels(page: Page) -> list[str]:
    """Layouts of the shortlist in the order shown."""
    return page.locator("#shortlist table[data-sortable] tbody tr .label").all_text_contents()


def shortlist_head(page: Page, key: str) -> None:
    """Presses the head of a column."""
    page.click(f"#shortlist table[data-sortable] th[data-key={key}] button")


@pytest.mark.parametrize("name", PAGES)
@pytest.mark.parametrize("scheme", SCHEMES)
def test_pages_open_without_an_error_and_ask_for_nothing_but_themselves(
    opened: Open, name: str, scheme: str, request: pytest.FixtureRequest
) -> None:
    path: Path = request.getfixturevalue(name)
    found = opened(path, color_scheme=scheme)
    drawn(found.page)
    assert found.said == []
    assert found.asked == [path.as_uri()]


@pytest.mark.parametrize("name", PAGES)
@pytest.mark.parametrize("scheme", SCHEMES)
def test_an_accessibility_checker_finds_nothing_serious(opened: Open, name: str, scheme: str, request: pytest.FixtureRequest) -> None:
    page = opened(request.getfixturevalue(name), color_scheme=scheme).page
    drawn(page)
    page.evaluate("document.querySelectorAll('details').forEach((one) => { one.open = true; })")
    if page.locator("#all-layouts").count():
        page.wait_for_selector("#all-layouts-place tbody tr:nth-child(4)")
    serious = [
        (fault["id"], fault["impact"], [node["html"][:120] for node in fault["nodes"][:3]])
        for fault in Axe().run(page).response["violations"]
        if fault["impact"] in ("serious", "critical")
    ]
    assert serious == []


def test_injected_markup_is_text(opened: Open, hostile: Path) -> None:
    found = opened(hostile)
    drawn(found.page)
    assert found.page.evaluate("window.hacked") is None
    assert EVIL in found.page.inner_text("h1")
    assert found.page.locator("img").count() == 0


def test_the_shortlist_sorts_by_a_column_both_ways_and_back(opened: Open, report: Path) -> None:
    page = opened(report).page
    ranked = labels(page)
    column = "#shortlist table[data-sortable] tbody td:nth-child({n})"
    place = page.evaluate(
        "[...document.querySelector('table[data-sortable]').tHead.rows[0].cells].findIndex((th) => th.dataset.key === 'memory_gib') + 1"
    )
    shown: list[list[float]] = []
    for _ in range(2):
        shortlist_head(page, "memory_gib")
        shown.append([float(text) for text in page.locator(column.format(n=place)).all_text_contents()])
    assert shown[0] == sorted(shown[0]) and shown[1] == sorted(shown[1], reverse=True)
    shortlist_head(page, "memory_gib")
    assert labels(page) == ranked


def test_the_shortlist_filters_by_words_and_comparisons(opened: Open, report: Path, found: Answer) -> None:
    page = opened(report).page
    first = found.shortlist.rows.layouts.layout(0)
    expected = [
        layout.label
        for layout in map(found.shortlist.rows.layouts.layout, range(len(found.shortlist.rows)))
        if layout.tensor_parallel == first.tensor_parallel and layout.recompute == first.recompute
    ]
    page.fill("#shortlist input[type=search] >> nth=0", f"tp{first.tensor_parallel} {first.recompute} step<1000")
    page.wait_for_timeout(300)
    assert labels(page) == expected
    page.fill("#shortlist input[type=search] >> nth=0", "gib<0")
    page.wait_for_timeout(300)
    assert labels(page) == []


def test_columns_can_be_chosen_and_the_csv_holds_what_is_shown(opened: Open, report: Path, tmp_path: Path) -> None:
    page = opened(report).page
    page.click("#shortlist .tools summary >> nth=0")
    page.check("#shortlist .columns >> nth=0 >> label:has-text('TP') >> nth=0 >> input")
    assert page.locator("#shortlist table[data-sortable] th[data-key=tensor_parallel]").is_visible()
    with page.expect_download() as waiting:
        page.click("#shortlist button:has-text('Download CSV') >> nth=0")
    path = tmp_path / "shortlist.csv"
    waiting.value.save_as(path)
    lines = path.read_text().splitlines()
    assert lines[0].startswith("rank,layout,step_seconds") and "tensor_parallel" in lines[0]
    assert len(lines) == 1 + len(labels(page))


def test_a_rank_opens_its_ledger(opened: Open, report: Path) -> None:
    page = opened(report).page
    assert not page.locator("#ledger-2 table >> nth=0").is_visible()
    page.click("#shortlist a[href='#ledger-2']")
    page.wait_for_selector("#ledger-2[open]")
    assert page.locator("#ledger-2").inner_text().count("GiB per stage") == 1
    shares = page.locator("#ledger-2 table >> nth=0 >> tbody td:nth-child(3)").all_text_contents()
    assert sum(float(share.rstrip("%")) for share in shares[:-1]) == pytest.approx(100.0, abs=0.7)


def test_a_link_from_elsewhere_opens_its_ledger(opened: Open, report: Path) -> None:
    page = opened(report).page
    page.goto(f"{report.as_uri()}#ledger-3")
    page.reload()
    page.wait_for_selector("#ledger-3[open]")


def test_the_heat_map_has_a_cell_for_every_pair_of_sizes(opened: Open, report: Path, found: Answer) -> None:
    page = opened(report).page
    drawn(page)
    assert page.locator("#figure-tensor-by-pipeline .chart svg g.mark-rect.role-mark path").count() == len(cells_of(found.result))


def test_pictures_have_letters_with_units(opened: Open, report: Path) -> None:
    page = opened(report).page
    drawn(page)
    words = {name: page.locator(f"#figure-{name} .chart svg").first.text_content() or "" for name in UNITS}
    assert {name: unit in words[name] for name, unit in UNITS.items()} == dict.fromkeys(UNITS, True)
    assert page.locator("#figure-step-against-memory canvas").count() == 1


UNITS = {
    "step-breakdown": "seconds per step",
    "memory-per-stage": "GiB per GPU",
    "tensor-by-pipeline": "GPUs per layer",
    "pipeline-timeline": "seconds from the start",
    "pruning-funnel": "layouts left",
}


def test_points_show_their_layout_and_take_another_colour(opened: Open, report: Path) -> None:
    page = opened(report).page
    drawn(page)
    page.locator("#figure-step-against-memory").scroll_into_view_if_needed()
    before = page.evaluate("document.querySelector('#figure-step-against-memory canvas').toDataURL()")
    page.select_option("#space-colour", "recompute")
    page.wait_for_function("(old) => document.querySelector('#figure-step-against-memory canvas')?.toDataURL() !== old", arg=before)
    box = page.locator("#figure-step-against-memory canvas").bounding_box()
    assert box
    seen = ""
    for x in range(40, int(box["width"]), 12):
        for y in range(20, 330, 14):
            page.mouse.move(box["x"] + x, box["y"] + y)
            seen = page.evaluate("document.querySelector('#vg-tooltip-element.visible')?.textContent ?? ''")
            if "tp" in seen:
                break
        if "tp" in seen:
            break
    assert "layout" in seen and "-dp" in seen


def test_the_keyboard_reaches_every_control_in_the_order_of_the_page(opened: Open, report: Path) -> None:
    page = opened(report).page
    wanted = page.evaluate(f"[...document.querySelectorAll('{CONTROLS}')].filter((el) => el.checkVisibility()).length")
    page.keyboard.press("Tab")
    assert page.evaluate("document.activeElement.textContent") == "Skip to the content"
    places = [page.evaluate("[...document.querySelectorAll('*')].indexOf(document.activeElement)")]
    for _ in range(wanted - 1):
        page.keyboard.press("Tab")
        places.append(page.evaluate("[...document.querySelectorAll('*')].indexOf(document.activeElement)"))
    assert places == sorted(places) and len(set(places)) == wanted


def test_the_keyboard_alone_sorts_and_opens(opened: Open, report: Path) -> None:
    page = opened(report).page
    page.focus("#shortlist table[data-sortable] th[data-key=memory_gib] button")
    page.keyboard.press("Enter")
    assert page.get_attribute("#shortlist table[data-sortable] th[data-key=memory_gib]", "aria-sort") == "ascending"
    page.focus("#all-layouts > summary")
    page.keyboard.press("Enter")
    page.wait_for_selector("#all-layouts-place tbody tr:nth-child(3)")
    page.focus("#all-layouts-place .virtual")
    page.keyboard.press("End")
    page.wait_for_function("document.querySelector('#all-layouts-place .virtual').scrollTop > 0")


@pytest.mark.parametrize("name", PAGES)
def test_a_phone_needs_no_scrolling_sideways(opened: Open, name: str, request: pytest.FixtureRequest) -> None:
    page = opened(request.getfixturevalue(name), viewport=PHONE).page
    drawn(page)
    assert page.evaluate("document.documentElement.scrollWidth") <= PHONE["width"]
    beyond = "(el) => el.getBoundingClientRect().right > innerWidth + 1"
    wide = page.evaluate(f"[...document.querySelectorAll('{PICTURES}')].filter({beyond}).length")
    assert wide == 0


def test_paper_is_light_and_shows_the_first_ledger(opened: Open, report: Path) -> None:
    page = opened(report, color_scheme="dark").page
    drawn(page)
    page.emulate_media(media="print")
    assert page.evaluate("getComputedStyle(document.body).backgroundColor") == "rgb(255, 255, 255)"
    assert page.pdf(format="A4").startswith(b"%PDF")
    assert not page.locator("nav").is_visible()


def test_letters_of_pictures_stand_out_in_both_schemes(opened: Open, report: Path) -> None:
    for scheme, light in (("light", False), ("dark", True)):
        page = opened(report, color_scheme=scheme).page
        drawn(page)
        fills = page.evaluate(f"[...document.querySelectorAll('{LETTERS}')].map((el) => getComputedStyle(el).fill)")
        levels = [sum(map(int, fill[4:-1].split(","))) / 3 for fill in fills]
        assert levels and all((level > 180) is light for level in levels)


def test_100_000_layouts_open_within_seconds_and_stay_responsive(opened: Open, large: Path) -> None:
    started = time.perf_counter()
    page = opened(large).page
    page.click("#all-layouts > summary")
    page.wait_for_selector("#all-layouts-place tbody tr:nth-child(4)")
    assert time.perf_counter() - started < OPEN_SECONDS
    assert "100,000 of 100,000" in page.inner_text("#all-layouts-place .status")
    started = time.perf_counter()
    page.click("#all-layouts-place th[data-key=memory_gib] button")
    page.wait_for_selector("#all-layouts-place th[data-key=memory_gib][aria-sort=ascending]")
    page.fill("#all-layouts-place input[type=search]", "pp1 gib<30")
    page.wait_for_function("!document.querySelector('#all-layouts-place .status').textContent.startsWith('100,000 ')")
    assert time.perf_counter() - started < OPEN_SECONDS
    assert page.locator("#all-layouts-place tbody tr").count() < 100


def test_the_table_of_all_layouts_shows_what_the_search_ranked(opened: Open, report: Path, found: Answer) -> None:
    page = opened(report).page
    page.click("#all-layouts > summary")
    page.wait_for_selector("#all-layouts-place tbody tr:nth-child(4)")
    shown = page.locator("#all-layouts-place tbody tr:not(.spacer) td:nth-child(2)").all_text_contents()
    ranked = found.result.ranked.layouts
    assert shown == [ranked.layout(row).label for row in range(len(shown))]
