"""How sure the first place is: draws of what the model does not know, and what is said of them."""

from __future__ import annotations

import dataclasses
import functools
from collections import Counter

import numpy as np
import pytest

from planner import robustness as module
from planner.calibrate import CONSTANTS, adjusted
from planner.cost.estimate import time_of
from planner.frameworks.legality import jobs_by_framework
from planner.refine import Shortlist, evenly
from planner.report.robustness_text import robustness_columns, robustness_json, robustness_lines
from planner.request import Request, make_scenario
from planner.robustness import (
    SCATTER,
    UNFITTED,
    Response,
    constants_read,
    deviations,
    respond,
    rivals,
    robustness,
    robustness_of,
    shipped_deviations,
)
from planner.scenario import Job, Scenario
from planner.search import SearchResult, search
from planner.validate import SHIPPED, layout_groups, predict, read_rows, runs_of
from solver.layout import MESH_AXES, Columns, Layout, columns_of
from tests.builders import by_formula


@functools.cache
def outcome(model: str, gpus: int) -> SearchResult:
    """A search with several meshes near the top, of two stacks."""
    return search(make_scenario(Request(model=model, num_gpus=gpus)))


def shortlist(model: str = "8b", gpus: int = 64, rows: int = 12) -> tuple[list[Job], Columns]:
    """The first and some later layouts of a search, each with its job."""
    result = outcome(model, gpus)
    places = np.unique(np.geomspace(1, min(2000, len(result.ranked)), rows).astype(int)) - 1
    scored, jobs = result.ranked.take(places), jobs_by_framework(result.scenario)
    return [jobs[int(stack)] for stack in scored.stack], scored.layouts


def exact_logs(jobs: list[Job], layouts: Columns, response: Response, z: np.ndarray) -> np.ndarray:
    """Log step times of each draw by the cost model itself."""
    logs = np.zeros((len(z), len(layouts)))
    for draw, row in np.ndindex(*logs.shape):
        own = deviations(jobs[row])
        settings = {key: float(z[draw, k]) * own[key] for k, key in enumerate(response.keys) if key in own}
        logs[draw, row] = np.log(time_of(adjusted(jobs[row], settings), layouts.take(np.array([row]))).total[0])
    return logs


@pytest.mark.parametrize(("model", "gpus"), [("8b", 64), ("mixtral-8x7b", 64)])
def test_the_approximation_is_near_the_cost_model_itself(model: str, gpus: int) -> None:
    jobs, layouts = shortlist(model, gpus)
    response = respond(jobs, layouts)
    z = np.random.default_rng(7).standard_normal((12, len(response.keys)))
    exact = exact_logs(jobs, layouts, response, z)
    error = response.logs(z) - exact
    assert np.sqrt(np.mean(error**2)) < 0.02 and np.abs(error).max() < 0.1
    apart, off = exact - exact[:, :1], error - error[:, :1]
    assert np.std(off) < 0.35 * np.std(apart - apart.mean(axis=0))  # what ranks them is smaller, and closer


def test_the_approximation_passes_through_its_points_exactly() -> None:
    jobs, layouts = shortlist(rows=4)
    with by_formula():
        response = respond(jobs, layouts)
    z = np.concatenate([np.zeros((1, len(response.keys))), module.NODE * np.eye(len(response.keys))[::7]])
    assert response.logs(z) == pytest.approx(exact_logs(jobs, layouts, response, z), abs=1e-9)


def test_a_split_of_its_own_keeps_its_step_and_nearly_its_derivatives() -> None:
    job = outcome("8b", 64).scenario.job
    uneven = dataclasses.replace(job, layers_per_stage=(7, 9, 9, 7))
    layouts = columns_of([Layout(pipeline_parallel=4, data_parallel=16, zero_stage=1)] * 2)
    response = respond([job, uneven], layouts)
    assert np.exp(response.base) == pytest.approx([time_of(j, layouts).total[0] for j in (job, uneven)])
    z = np.random.default_rng(3).standard_normal((8, len(response.keys)))
    assert response.logs(z) == pytest.approx(exact_logs([job, uneven], layouts, response, z), abs=0.05)


def test_the_same_seed_gives_the_same_and_another_gives_another() -> None:
    first, second, other = (robustness(*shortlist(), seed=seed) for seed in (5, 5, 6))
    assert np.array_equal(first.logs, second.logs) and robustness_lines(first) == robustness_lines(second)
    assert np.array_equal(first.scattered_share, second.scattered_share)
    assert not np.array_equal(first.logs, other.logs)
    assert np.abs(first.lead_share - other.lead_share).max() < 0.1  # 1,000 draws are enough to say it in tenths


def test_shares_sum_to_one_and_nobody_beats_the_best() -> None:
    found = robustness(*shortlist())
    assert found.lead_share.sum() == pytest.approx(1.0) and found.scattered_share.sum() == pytest.approx(1.0)
    assert found.lead_share.min() >= 0 and found.regret_mean.min() >= 0
    assert np.all(found.regret_p90 >= 0) and found.group_share[0] <= 1 + 1e-12


def test_identical_layouts_are_one_group_and_share_its_draws() -> None:
    jobs, layouts = shortlist(rows=4)
    rows = np.array([0, 0, 1, 0])
    found = robustness([jobs[row] for row in rows], layouts.take(rows))
    assert found.group.tolist() == [0, 0, 2, 0]
    assert len({round(float(share), 12) for share in found.lead_share[[0, 1, 3]]}) == 1
    assert found.group_share[0] == pytest.approx(3 * found.lead_share[0])
    assert "#1-2, 4 are equal and lead in" in robustness_lines(found)[0]


def test_nothing_but_equals_competes_with_itself() -> None:
    jobs, layouts = shortlist(rows=4)
    one, two = (robustness([jobs[0]] * n, layouts.take(np.zeros(n, dtype=np.int64))) for n in (1, 2))
    assert one.lead_share.tolist() == [1.0] and not one.by_luck and one.rival == -1
    assert robustness_lines(one) == ["no other layout was drawn against #1"]
    assert robustness_lines(two) == ["all that was drawn against #1 is equal to it"] and not two.by_luck


def slower(job: Job, factor: float) -> Job:
    """The same job with every rate lower and every fixed time longer."""
    gpu = job.gpu
    rates = ("peak_bf16_flops", "peak_fp16_flops", "hbm_bytes_per_s", "link_bytes_per_s", "nic_bytes_per_s")
    gpu = dataclasses.replace(gpu, **{key: getattr(gpu, key) / factor for key in rates})
    times = {
        kind: {f.name: getattr(record, f.name) * factor for f in dataclasses.fields(record) if f.name.endswith("_seconds")}
        for kind, record in (("generation", job.generation), ("software", job.software), ("physics", job.physics))
    }
    changed = {kind: dataclasses.replace(getattr(job, kind), **times[kind]) for kind in times}
    return dataclasses.replace(job, gpu=gpu, **changed)


def test_a_layout_that_is_a_fifth_slower_in_every_part_never_leads() -> None:
    jobs, layouts = shortlist(rows=4)
    rows = np.array([0, 0])
    found = robustness([jobs[0], slower(jobs[0], 1.2)], layouts.take(rows), widen=2.0)
    assert found.lead_share.tolist() == [1.0, 0.0] and not found.by_luck
    assert found.regret_mean[1] == pytest.approx(0.2, abs=1e-6)
    assert len(robustness_lines(found)) == 2  # no rival to name


def test_the_cost_model_is_asked_no_more_for_more_draws(monkeypatch: pytest.MonkeyPatch) -> None:
    calls: Counter[int] = Counter()
    draws = 0

    def counted(job: Job, x: Columns) -> object:
        calls[draws] += 1
        return time_of(job, x)

    monkeypatch.setattr(module, "time_of", counted)
    for draws in (10, 1000):
        assert robustness(*shortlist(), draws=draws).logs.shape[0] == draws
    assert calls[10] == calls[1000] < 400


def test_without_doubt_the_first_leads_and_doubt_never_makes_it_surer() -> None:
    jobs, layouts = shortlist(rows=12)
    certain, *doubted = (robustness(jobs, layouts, widen=widen) for widen in (0.0, 1.0, 2.0, 4.0))
    assert certain.lead_share[0] == 1.0 and certain.regret_mean[0] == 0.0
    assert all(found.lead_share[0] < 1.0 and found.scattered_share[0] < 1.0 for found in doubted)
    assert doubted[0].regret_mean[0] < doubted[1].regret_mean[0] < doubted[2].regret_mean[0]


def test_luck_is_less_than_half_of_the_draws_or_another_as_often() -> None:
    found = robustness(*shortlist(rows=4), draws=10)
    size = len(found.group)

    def luck(*shares: float) -> bool:
        padded = np.array([*shares, *[0.0] * (size - len(shares))])
        return dataclasses.replace(found, lead_share=padded, group=np.arange(size)).by_luck

    assert luck(0.45, 0.3, 0.25) and luck(0.5, 0.5)
    assert not luck(0.55, 0.45) and not luck(1.0)
    equal = dataclasses.replace(found, lead_share=np.array([0.3, 0.3, 0.4, 0.0][:size]), group=np.array([0, 0, 2, 3][:size]))
    assert not equal.by_luck  # the two are one


def test_what_decides_is_what_differs() -> None:
    base = outcome("8b", 64).scenario.job
    layouts = columns_of([Layout(data_parallel=64, zero_stage=1), Layout(tensor_parallel=8, data_parallel=8, zero_stage=1)])
    causes = robustness([base, base], layouts).causes
    assert causes and sum(cause.share for cause in causes) <= 1.0
    tensor = [cause for cause in causes if cause.words in ("exposed share of tensor traffic", "NVLink efficiency")]
    assert tensor and all(cause.higher == (cause.words == "NVLink efficiency") for cause in tensor)


def test_a_constant_of_one_stack_moves_only_its_layouts_and_one_of_the_silicon_moves_all() -> None:
    scenario: Scenario = outcome("8b", 64).scenario
    jobs = [scenario.job_in("megatron"), scenario.job_in("torchtitan")]
    response = respond(jobs, columns_of([Layout(data_parallel=64, zero_stage=1)] * 2))
    for key, slopes in zip(response.keys, response.slopes, strict=True):
        if key[0] == "software":
            assert slopes[[job.software.name != key[1] for job in jobs]] == 0
    silicon = response.slopes[response.keys.index(("generation", "hopper", "matmul_efficiency"))]
    assert np.all(silicon < 0)


def test_shipped_deviations_never_exceed_their_priors_and_name_constants_that_exist() -> None:
    prior = {(constant.record, constant.field): constant.width for constant in CONSTANTS}
    shipped = shipped_deviations()
    assert len(shipped) > 100
    assert all(0 < value <= prior[kind, field] + 1e-4 for (kind, _, field), value in shipped.items())
    assert any(value < 0.6 * prior[kind, field] for (kind, _, field), value in shipped.items())


def test_silicon_that_nobody_measured_keeps_its_prior() -> None:
    job = make_scenario(Request(model="8b", num_gpus=8, gpu="l40s")).job
    measured = {name for kind, name, _ in shipped_deviations() if kind == "generation"}
    assert job.generation.name not in measured
    width = next(constant.width for constant in CONSTANTS if constant.field == "matmul_efficiency")
    assert deviations(job)["generation", job.generation.name, "matmul_efficiency"] == width


EXACT = {"reduce_bytes", "optimizer_bytes", "weight_bytes"}
"""What a stack does by design; no measurement could move it."""


@pytest.mark.parametrize(
    "request_",
    [
        Request(model="70b", num_gpus=64),
        Request(model="mixtral-8x7b", num_gpus=64, precision="fp8"),
        Request(model="gpt-3-13b", num_gpus=64, gpu="v100-sxm-32gb", software="megatron-lm-2021"),
        Request(model="8b", num_gpus=64, software="hf-deepspeed-2021"),
    ],
    ids=lambda request: request.model,
)
def test_every_number_that_a_step_reads_is_drawn_or_exact(request_: Request) -> None:
    job = make_scenario(request_).job
    known = {(constant.record, constant.field) for constant in CONSTANTS} | {(u.record, u.field) for u in UNFITTED}
    layouts = columns_of(
        [Layout(tensor_parallel=2, pipeline_parallel=2, data_parallel=16), Layout(data_parallel=64, zero_stage=3, recompute="selective")]
    )
    base = time_of(job, layouts).total
    for kind in ("generation", "software", "physics"):
        record = getattr(job, kind)
        for field in dataclasses.fields(record):
            value = getattr(record, field.name)
            if not isinstance(value, float) or value <= 0 or (kind, field.name) in known or field.name in EXACT:
                continue
            moved = dataclasses.replace(job, **{kind: dataclasses.replace(record, **{field.name: value * 1.1})})
            assert np.array_equal(time_of(moved, layouts).total, base), f"{kind}.{field.name} is neither drawn nor exact"


def test_constants_that_are_not_read_would_change_nothing() -> None:
    job = outcome("8b", 64).scenario.job
    layouts = columns_of([Layout(data_parallel=64, zero_stage=1)])
    unread = {key: deviation for key, deviation in deviations(job).items() if key not in constants_read(job, layouts)}
    assert ("generation", "hopper", "flash1") in unread and ("physics", "today", "permutation_passes") in unread
    assert np.array_equal(time_of(adjusted(job, unread), layouts).total, time_of(job, layouts).total)


def test_every_stated_width_has_a_reason_and_no_constant_two_widths() -> None:
    fitted = {(constant.record, constant.field) for constant in CONSTANTS}
    stated = [(u.record, u.field) for u in UNFITTED]
    assert len(set(stated)) == len(stated) and not fitted & set(stated)
    assert all(u.reason and 0 < u.width <= 0.75 for u in UNFITTED)


def test_rivals_are_the_best_of_other_meshes() -> None:
    result = outcome("8b", 64)
    shown = result.ranked.layouts.take(slice(0, 5))
    rows = rivals(result.ranked, shown)
    axes = (*MESH_AXES, "micro_batch_size")

    def meshes(layouts: Columns) -> list[tuple[int, ...]]:
        return list(zip(*(getattr(layouts, axis).tolist() for axis in axes), strict=True))

    found, every = meshes(result.ranked.layouts.take(rows)), meshes(result.ranked.layouts)
    assert len(set(found)) == len(found) == module.MOST_RIVALS and not set(found) & set(meshes(shown))
    assert all(every.index(mesh) == row for mesh, row in zip(found, rows, strict=True)) and np.all(np.diff(rows) > 0)


def test_layouts_at_risk_do_not_compete_with_one_that_fits() -> None:
    result = outcome("8b", 64)
    rows = result.ranked.take(slice(0, 6))
    rows = dataclasses.replace(rows, verdict=np.array([0, 0, 0, 0, 1, 1]))
    found = robustness_of(result, Shortlist(rows, (None,) * len(rows)))
    assert found is not None and found.shown == 4 and len(found.lead_share) == 4 + module.MOST_RIVALS
    columns = robustness_columns(found, 6)
    assert all(len(values) == 6 and np.isnan(values[4:]).all() for values in columns.values())
    assert robustness_of(result, Shortlist(rows.take(slice(0, 0)), ())) is None
    assert robustness_of(result, evenly(result, 6), draws=0) is None


def test_of_a_long_shortlist_the_first_compete() -> None:
    result = outcome("8b", 64)
    found = robustness_of(result, evenly(result, 500), draws=10)
    assert found is not None and found.shown == module.MOST_SHOWN
    assert len(robustness_columns(found, 500)["lead_share"]) == 500


def test_what_is_said_is_short_and_what_machines_read_agrees() -> None:
    found = robustness(*shortlist())
    lines, content = robustness_lines(found), robustness_json(found)
    assert 2 <= len(lines) <= 4 and all(len(line) < 260 for line in lines)
    assert "of 1,000 draws" in lines[0] and "90th percentile" in lines[0]
    assert content["by_luck"] == found.by_luck == any("by luck" in line for line in lines)
    assert content["lead_share"] == pytest.approx(float(found.group_share[0]))


@functools.cache
def measured_pairs() -> tuple[tuple[str, float], ...]:
    """For measured layouts of one job that differ by a doubling along one axis: the axis, and how far apart the model errs."""
    kept = ("vtrain-multi", "bloomprep", "titan", "zb23")
    runs = runs_of([row for row in read_rows(SHIPPED) if row["family"] in kept], Counter())
    predictions = [predict(run) for run in runs if run.step_seconds > 0 and not run.out_of_memory]
    found = []
    for group in layout_groups(predictions):
        errors = [float(np.log(p.step_seconds / p.run.step_seconds)) for p in group]
        for one in range(len(group)):
            for two in range(one):
                layouts = (group[one].run.layout, group[two].run.layout)
                differ = [axis for axis in module.SIZES if getattr(layouts[0], axis) != getattr(layouts[1], axis)]
                if len(differ) != 1 or any(getattr(layouts[0], axis) != getattr(layouts[1], axis) for axis in module.SWITCHES):
                    continue
                sizes = sorted(getattr(layout, differ[0]) for layout in layouts)
                if sizes[1] == 2 * sizes[0]:
                    found.append((differ[0], abs(errors[one] - errors[two])))
    return tuple(found)


def test_the_scatter_between_layouts_is_that_of_measured_pairs() -> None:
    errors = [error for _, error in measured_pairs()]
    assert len(errors) > 50
    typical = 0.6745 * np.hypot(SCATTER, np.sqrt(2) * 0.016)  # and what two runs of one layout differ by
    assert 0.5 * typical < np.median(errors) < 2.0 * typical
