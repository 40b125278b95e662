"""Public user reports against the planner: what fits, what runs out, what is refused, what is faster; misses are listed."""

from __future__ import annotations

import csv
import dataclasses
import math
import tomllib
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest

from planner import spec
from planner.cost.estimate import MemoryEstimate, memory_of, time_of
from planner.cost.memory import AT_RISK, FITS, OUT_OF_MEMORY, VERDICTS
from planner.explain import complete_layout
from planner.frameworks.legality import broken
from planner.measured import Run
from planner.request import Request, make_scenario
from planner.scenario import Job, Scenario
from planner.validate import predict
from solver.check import broken_rules
from solver.layout import Layout, columns_of
from tests.builders import without_floor

Case = Mapping[str, Any]

HERE = Path(__file__).parent
FILE: dict[str, Any] = tomllib.loads((HERE / "user_cases.toml").read_text(encoding="utf-8"))
LEFT_OUT: Mapping[str, str] = FILE["left_out"]
CASES: Mapping[str, Case] = {key: table for key, table in FILE.items() if isinstance(table, dict) and key != "left_out"}

TOLERANCE = 0.15
"""Of a measured peak."""

REQUEST_KEYS = {field.name for field in dataclasses.fields(Request)}
OWN_KEYS = {"claim", "kinds", "assumed", "missed", "layout", "layers_per_stage", "stack", "refused_by", "against", "also"}
MEASURED_KEYS = {"peak_gib", "peak_gb", "loss_gb", "memory"}


def question(case: Case) -> tuple[Scenario, Job, Layout]:
    """The case as a user would ask it."""
    scenario = make_scenario(Request(**{key: value for key, value in case.items() if key in REQUEST_KEYS}))
    job = scenario.job_in(case.get("framework", "none"))
    job = job.under(dataclasses.replace(job.software, **case.get("stack", {})))
    job = dataclasses.replace(job, layers_per_stage=tuple(case.get("layers_per_stage", ())))
    return scenario, job, complete_layout(scenario, case["layout"])


def estimate(case: Case) -> MemoryEstimate:
    """The memory of the case's layout."""
    _, job, layout = question(case)
    return memory_of(job, columns_of([layout]))


def verdict(case: Case) -> str:
    """What the planner says of it."""
    return VERDICTS[int(estimate(case).verdict[0])]


def need(case: Case) -> float:
    """Bytes that the card must offer."""
    return float(estimate(case).need_bytes[0])


def rivals_need(case: Case) -> float:
    """The need of the run that the case is compared with."""
    return need({**case, **case["against"]})


def tokens_per_second(case: Case) -> float:
    """Throughput of the whole job."""
    _, job, layout = question(case)
    return job.tokens_per_step / float(time_of(job, columns_of([layout])).total[0])


def rivals_tokens_per_second(case: Case) -> float:
    """The throughput of the run that the case is compared with."""
    return tokens_per_second({**case, **case["against"]})


def rules_broken(case: Case) -> list[str]:
    """Rules of the solver by name and of the framework by id; how much memory there is plays no part."""
    scenario, job, layout = question(case)
    physical = list(broken_rules(layout, without_floor(spec.problem(scenario))))
    framework = case.get("framework")
    return physical + ([rule.id for rule in broken(job, layout, framework)] if framework else [])


def fits(case: Case) -> None:
    assert verdict(case) != VERDICTS[OUT_OF_MEMORY]


def out_of_memory(case: Case) -> None:
    assert verdict(case) != VERDICTS[FITS]


def borderline(case: Case) -> None:
    assert verdict(case) == VERDICTS[AT_RISK]


def peak(case: Case) -> None:
    fits(case)
    _, job, layout = question(case)
    measured = case["peak_gib"] * 2.0**30 if "peak_gib" in case else case["peak_gb"] * 1e9
    run = Run(
        id="",
        family="",
        job=job,
        layout=layout,
        recompute_known=True,
        offloads=False,
        step_seconds=math.nan,
        peak_bytes=measured,
        memory_kind=case["memory"],
        out_of_memory=False,
    )
    assert abs(predict(run).memory_error) <= TOLERANCE


def loss(case: Case) -> None:
    parts = estimate(case).parts
    assert float(parts.logits[0] + parts.transient[0]) == pytest.approx(case["loss_gb"] * 1e9, rel=TOLERANCE)


def more_memory(case: Case) -> None:
    assert need(case) > rivals_need(case)


def no_less_memory(case: Case) -> None:
    assert need(case) >= rivals_need(case)


def faster(case: Case) -> None:
    assert tokens_per_second(case) > rivals_tokens_per_second(case)


def slower(case: Case) -> None:
    assert tokens_per_second(case) < rivals_tokens_per_second(case)


def refused(case: Case) -> None:
    assert rules_broken(case) == case["refused_by"]


def legal(case: Case) -> None:
    assert rules_broken(case) == []


CHECKS = (fits, out_of_memory, borderline, peak, loss, more_memory, no_less_memory, faster, slower, refused, legal)
KINDS: Mapping[str, Callable[[Case], None]] = {check.__name__: check for check in CHECKS}
"""A layout that may or may not fit ("at risk") contradicts neither a run that fitted nor one that ran out."""


def marks(case: Case) -> list[pytest.MarkDecorator]:
    """A missed case must fail its claim: a fix shows."""
    return [pytest.mark.xfail(strict=True, raises=AssertionError, reason=case["missed"])] if "missed" in case else []


@pytest.mark.parametrize("case", [pytest.param(case, id=key, marks=marks(case)) for key, case in CASES.items()])
def test_the_planner_says_what_the_user_saw(case: Case) -> None:
    for run in (case, *({**case, **changes} for changes in case.get("also", ()))):
        for kind in run["kinds"]:
            KINDS[kind](run)


def test_every_report_is_claimed_or_left_out_with_a_reason() -> None:
    with (HERE / "user_cases.csv").open(newline="", encoding="utf-8") as file:
        reports = [row["id"] for row in csv.DictReader(file)]
    assert sorted([*CASES, *LEFT_OUT]) == sorted(reports)
    assert all(LEFT_OUT.values())


def test_the_misses_are_as_many_as_stated() -> None:
    assert sum("missed" in case for case in CASES.values()) == FILE["num_missed"]


@pytest.mark.parametrize("key", CASES)
def test_a_case_says_what_it_claims_in_known_words(key: str) -> None:
    case = CASES[key]
    runs = [case, *case.get("also", ()), case.get("against", {})]
    assert case["claim"] and set(case["kinds"]) <= set(KINDS)
    assert {word for run in runs for word in run} <= REQUEST_KEYS | OWN_KEYS | MEASURED_KEYS
