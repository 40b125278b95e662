"""Pages on disk, and the distribution's Chromium to open them; whatever a page says or asks for is on record."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from playwright.sync_api import Browser, Page, sync_playwright

from planner.answer import Answer, Wanted, answer, with_reasons
from planner.cost.timeline import Timeline, timeline_of
from planner.difference import compare
from planner.engine import inline
from planner.explain import complete_layout, explain
from planner.grid import points_of
from planner.journal import Journal
from planner.report.html.other_pages import diff_html, explain_html, sweep_html, validate_html
from planner.report.html.search_html import search_html
from planner.request import Request, make_scenario
from planner.sweep import Sweep, run
from planner.validate import SHIPPED, read_rows, validate

CHROMIUM = "/usr/bin/chromium"
FLAGS = (
    "--no-sandbox",
    "--disable-gpu",
    "--disable-quic",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
)
EVIL = "<script>window.hacked=1</script><img src=x onerror=window.hacked=1>"


@dataclass
class Opened:
    """A page in the browser and what it did."""

    page: Page
    said: list[str] = field(default_factory=list)
    asked: list[str] = field(default_factory=list)


@pytest.fixture(scope="session")
def browser() -> Iterator[Browser]:
    with sync_playwright() as playwright:
        own = playwright.chromium.launch(executable_path=CHROMIUM, args=list(FLAGS))
        yield own
        own.close()


@pytest.fixture
def opened(browser: Browser) -> Iterator[Callable[..., Opened]]:
    """Opens a file; ``settings`` are those of a browser context (color_scheme, viewport)."""
    contexts = []

    def call(path: Path, **settings: Any) -> Opened:
        context = browser.new_context(accept_downloads=True, **settings)
        contexts.append(context)
        found = Opened(context.new_page())
        found.page.on("console", lambda message: found.said.append(message.text))
        found.page.on("pageerror", lambda error: found.said.append(str(error)))
        found.page.on("request", lambda request: found.asked.append(request.url))
        found.page.goto(path.as_uri())
        return found

    yield call
    for context in contexts:
        context.close()


def drawn(page: Page) -> None:
    """Draws every picture and waits for the last."""
    page.evaluate("drawEverything()")
    page.wait_for_function("[...document.querySelectorAll('.chart')].every((el) => el.dataset.drawn)", timeout=60_000)


@pytest.fixture(scope="session")
def found() -> Answer:
    return answer(make_scenario(Request(model="13b", num_gpus=16, training_tokens=1e11), name="small"), Wanted(draws=50))


@pytest.fixture(scope="session")
def timeline(found: Answer) -> Timeline:
    """The first layout's step."""
    return timeline_of(found.shortlist.job(found.scenario, 0), found.shortlist.rows.layouts.layout(0))


def written(folder: Any, text: str) -> Path:
    """The page as a file."""
    path = Path(folder.mktemp("pages")) / "report.html"
    path.write_text(text, encoding="utf-8")
    return path


@pytest.fixture(scope="session")
def report(found: Answer, timeline: Timeline, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return written(tmp_path_factory, search_html(found, timeline=timeline))


@pytest.fixture(scope="session")
def refusal(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Nothing fits."""
    return written(tmp_path_factory, search_html(with_reasons(answer(make_scenario(Request(model="70b", num_gpus=8)), Wanted(draws=0)))))


@pytest.fixture(scope="session")
def ledger(found: Answer, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """`planner explain` of a layout with a pipeline."""
    own = explain(found.scenario, complete_layout(found.scenario, "tp2-pp4-dp2-zero1-mb1"))
    return written(tmp_path_factory, explain_html(own, timeline=timeline_of(own.job, own.layout)))


@pytest.fixture(scope="session")
def comparison(found: Answer, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """`planner diff`."""
    return written(tmp_path_factory, diff_html(found.scenario, compare(found.scenario, "tp2-pp4-dp2-zero1-mb1", "tp4-pp2-dp2-zero1-mb1")))


@pytest.fixture(scope="session")
def validation(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """`planner validate` on a part of the shipped runs."""
    return written(tmp_path_factory, validate_html(validate(read_rows(SHIPPED)[::5])))


@pytest.fixture(scope="session")
def sweep(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """`planner sweep` over two counts of GPUs of two kinds."""
    request = Request(model="8b", training_tokens=1e11, virtual_pipeline=(1,), tensor_parallel=(1, 2))
    own = Sweep(points=points_of(None, request, {"num_gpus": (8, 16), "gpu": ("h100", "a100-sxm-80gb")}, scale_batch=False))
    with Journal(tmp_path_factory.mktemp("sweep") / "sweep.journal", own.header, resume=False) as journal:
        run(own, inline, journal)
        return written(tmp_path_factory, sweep_html(own, journal))


@pytest.fixture(scope="session")
def hostile(found: Answer, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The model has markup for a name."""
    job = found.scenario.job
    scenario = dataclasses.replace(found.scenario, job=dataclasses.replace(job, model=dataclasses.replace(job.model, name=EVIL)))
    return written(tmp_path_factory, search_html(dataclasses.replace(found, result=dataclasses.replace(found.result, scenario=scenario))))


@pytest.fixture(scope="session")
def large(found: Answer, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """100,000 made-up layouts, no two alike."""
    own, rng, rows = found.result.ranked, np.random.default_rng(0), 100_000
    wide = own.take(np.resize(np.arange(len(own)), rows))
    steps, need = np.sort(wide.step_seconds * rng.uniform(1.0, 3.0, rows)), wide.need_bytes * rng.uniform(0.3, 1.0, rows)
    ranked = dataclasses.replace(wide, step_seconds=steps, need_bytes=need)
    return written(tmp_path_factory, search_html(dataclasses.replace(found, result=dataclasses.replace(found.result, ranked=ranked))))
