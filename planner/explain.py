"""One layout taken apart: every part of its bytes per stage and of its seconds, with the formula's name."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from planner import advice, spec, textbook
from planner.cost import memory
from planner.cost.estimate import memory_of
from planner.cost.flops import mfu
from planner.cost.memory import OUT_OF_MEMORY, Memory
from planner.cost.stages import Stages, all_stages
from planner.cost.step import StepSeconds
from planner.errors import InputError, nearest
from planner.frameworks import FRAMEWORKS
from planner.frameworks.legality import assign, broken, framework_names, framework_of, jobs_by_framework, reason
from planner.refine import Shortlist, costing_job
from planner.scenario import Job, Scenario
from planner.simulated import step_of
from planner.split import Split
from solver import check
from solver.layout import (
    RECOMPUTE,
    SCHEDULES,
    V_SHAPED,
    WORDS,
    Columns,
    Layout,
    columns_of,
    fully_recomputed,
    natural_schedule,
    num_micro_batches,
    parse_label,
)
from solver.problem import UNLIMITED_KIB

MEMORY_FORMULAS: dict[str, tuple[str, str]] = {
    "weights": ("state_bytes", "working copy; sharded by ZeRO-3"),
    "gradients": ("state_bytes", "sharded from ZeRO-2 on"),
    "optimizer": ("state_bytes", "master weights and moments; sharded from ZeRO-1 on"),
    "activations": ("activation_bytes", "in flight x layers x bytes per layer"),
    "logits": ("stage_memory", "head input, logits and loss on the last stage"),
    "transient": ("stage_memory", "live gradients; one whole layer under full recompute"),
    "buffers": ("buffer_bytes", "gathers, buckets, stage boundaries, scratch"),
    "context": ("stage_memory", "CUDA context and communicators"),
}
"""Part -> (function in planner/cost/memory.py, what it is)."""

STEP_FORMULAS: dict[str, tuple[str, str]] = {
    "compute": ("layer.dense_kernels, layer.moe_kernels, compute.head_seconds", "kernels of an average stage"),
    "imbalance": ("step.step_seconds", "what the slowest stage computes beyond the average"),
    "recompute": ("layer.layer_seconds", "forward kernels run again"),
    "launch": ("compute.launch_floor", "GPU waiting for kernel launches"),
    "tensor": ("communication.tensor_seconds", "exposed tensor-parallel transfers"),
    "context": ("communication.context_seconds", "exposed K/V exchange"),
    "expert": ("communication.expert_seconds", "exposed all-to-all"),
    "sharding": ("communication.sharded_pass", "ZeRO-3 gathers not hidden, and their disturbance"),
    "pipeline": ("communication.boundary_seconds", "stage boundaries"),
    "bubble": ("schedules.SCHEDULES", "filling and draining"),
    "data": ("communication.gradient_seconds", "gradient reduction and gathering not hidden"),
    "optimizer": ("step.optimizer_seconds", "Adam and the step's fixed time"),
    "overhead": ("step.step_seconds", "per micro-batch, and stragglers"),
}
"""Part -> (module.function in planner/cost/, what it is)."""


@dataclass(frozen=True)
class Explanation:
    """Everything known of one layout."""

    scenario: Scenario
    layout: Layout
    broken_rules: Mapping[str, str]
    """Solver rules that it breaks, with numbers; empty when it is legal."""
    legal_values: Mapping[str, list[int]]
    """For each axis that a broken rule reads, the values that would be legal."""
    refused_by: Mapping[str, list[str]]
    """Framework -> its rules that the layout breaks."""
    accepted_by: list[str]
    job: Job
    """Under the stack that the layout is costed with, and its best split of layers."""
    split: Split | None = None
    """The uneven split, where it is better than the even one."""
    stages: Stages | None = None
    memory: Memory | None = None
    """One row per stage."""
    need_bytes: np.ndarray | None = None
    verdict: int = OUT_OF_MEMORY
    step: StepSeconds | None = None
    flags: Mapping[str, str] = dataclasses.field(default_factory=dict)
    figures: list[textbook.Figure] = dataclasses.field(default_factory=list)

    @property
    def legal(self) -> bool:
        """Whether the solver's rules hold and a framework that the search may use accepts it."""
        in_play = {framework_of(number) for number in jobs_by_framework(self.scenario)}
        return not self.broken_rules and ("none" in in_play or bool(in_play & set(self.accepted_by)))

    @property
    def mfu(self) -> float:
        """Model FLOPs utilisation of the step."""
        return 0.0 if self.step is None else float(mfu(self.job, self.step.total)[0])


def complete_layout(scenario: Scenario, label: str) -> Layout:
    """The layout of a label, what it leaves out filled in. Raises InputError.

    Missing sizes are 1, data_parallel is what the GPUs leave, zero_stage 1, full recompute covers every layer.
    """
    if not label.strip():
        raise InputError("layout '' is empty: name its parts, such as tp8-pp4-dp64-zero1-mb1")
    try:
        stated = parse_label(label)
    except ValueError as error:
        known = ("tp8", "pp4", "vp2", "cp1", "ep1", "dp64", "zero1", "mb1", *RECOMPUTE, *SCHEDULES)
        piece = str(error).split("'")[1] if "'" in str(error) else label
        hint = nearest(piece, known) if "is no part" in str(error) else ""
        raise InputError(f"layout '{label}': {error}{hint}") from None
    return completed(scenario, stated, f"layout '{label}'")


def completed(scenario: Scenario, axes: Mapping[str, int | str], where: str) -> Layout:
    """The layout of some axes, the others filled in. Raises InputError, beginning with ``where``, for values that no layout has."""
    stated = dict(axes)
    for axis, value in stated.items():
        if isinstance(value, int) and value < 1 and axis not in ("zero_stage", "recompute_layers"):
            raise InputError(f"{where}: {axis} = {value} must be at least 1")
    if isinstance(stated.get("zero_stage"), int) and int(stated["zero_stage"]) > 3:
        raise InputError(f"{where}: zero_stage = {stated['zero_stage']} must be 0, 1, 2 or 3")
    sizes = {axis: int(stated.get(axis, 1)) for axis in ("tensor_parallel", "pipeline_parallel", "context_parallel")}
    product = int(np.prod(list(sizes.values())))
    stated.setdefault("data_parallel", max(scenario.job.num_gpus // product, 1))
    stated.setdefault("zero_stage", 1)
    if stated.get("schedule") in V_SHAPED:
        stated.setdefault("virtual_pipeline", 2)
    stated.setdefault("schedule", natural_schedule(int(stated.get("virtual_pipeline", 1))))
    layout = Layout(**stated)  # type: ignore[arg-type]
    deepest = layout.recompute == "full" and "recompute_layers" not in stated
    return fully_recomputed(layout, scenario.job.model.num_layers) if deepest else layout


def check_pins(scenario: Scenario, layout: Layout) -> None:
    """Raise InputError for a layout that contradicts the axes that were pinned beside it."""
    for axis, pinned in scenario.choices.pins.items():
        words = [WORDS[axis][value] for value in pinned] if axis in WORDS else list(pinned)
        if getattr(layout, axis) not in words:
            raise InputError(f"layout '{layout.label}' has {axis} = {getattr(layout, axis)}, yet {axis} is pinned to {words}")


def explain(scenario: Scenario, layout: Layout, layers_per_stage: tuple[int, ...] = ()) -> Explanation:
    """The ledger of one layout; of an illegal one, why it is illegal and what would be legal.

    ``layers_per_stage``: its split, where that is given; empty: the best one.
    """
    unpinned = dataclasses.replace(scenario, choices=dataclasses.replace(scenario.choices, pins={}))
    problem = dataclasses.replace(spec.problem(unpinned), usable_kib=UNLIMITED_KIB)  # memory is judged stage by stage below
    x = columns_of([layout])
    bits, _ = assign(scenario, x)
    accepted = framework_names(int(bits[0]))
    broken_rules = check.broken_rules(layout, problem)
    axes = sorted({axis for rule in check.RULES if rule.name in broken_rules for axis in rule.axes})
    base = Explanation(
        scenario=scenario,
        layout=layout,
        broken_rules=broken_rules,
        legal_values={axis: check.legal_values(layout, problem, axis, product="gpu_product" in broken_rules) for axis in axes},
        refused_by={
            name: [reason(rule, layout, scenario.job_in(name)) for rule in broken(scenario.job_in(name), layout, name)]
            for name in FRAMEWORKS
            if name not in accepted
        },
        accepted_by=accepted,
        job=scenario.job,
    )
    countable = {"gpu_product", "replicas", "batch", "layers", "expert_grid", "experts", "schedule"}
    if countable & set(broken_rules):
        return dataclasses.replace(base, job=scenario.job_in("none"))
    job, split = costing_job(scenario, layout, layers_per_stage)
    return _ledger(dataclasses.replace(base, job=job, split=split), x)


def _ledger(base: Explanation, x: Columns) -> Explanation:
    layout, job = base.layout, base.job
    stages = all_stages(job, layout.pipeline_parallel, layout.virtual_pipeline, layout.schedule in V_SHAPED)
    rows = x.take(np.zeros(layout.pipeline_parallel, dtype=np.int64))
    per_stage = memory.stage_memory(job, rows, stages, memory.loads(job, rows))
    need = memory.need_bytes(job, per_stage)
    found = facts(base.scenario, job, layout)
    return dataclasses.replace(
        base,
        stages=stages,
        memory=per_stage,
        need_bytes=need,
        verdict=found.verdict,
        step=step_of(job, layout),
        flags=advice.flags(found),
        figures=textbook.figures(base.scenario, layout),
    )


def facts(scenario: Scenario, job: Job, layout: Layout) -> advice.Facts:
    """What the checklist reads of a layout under the stack that it is costed with."""
    x = columns_of([layout])
    own, step = memory_of(job, x), step_of(job, layout)
    keeping = dataclasses.replace(job, recomputed_per_stage=())
    plain = memory_of(keeping, columns_of([dataclasses.replace(layout, recompute="none", recompute_layers=0)]))
    total = float(step.total[0])
    return advice.Facts(
        scenario=dataclasses.replace(scenario, job=job),
        layout=layout,
        headroom=1.0 - float(own.need_bytes[0]) / job.gpu.memory_bytes,
        verdict=int(own.verdict[0]),
        communication=float(step.exposed_communication[0] / step.compute[0]),
        bubble=float(step.bubble[0]) / total,
        mfu=float(mfu(job, step.total)[0]),
        num_micro_batches=num_micro_batches(layout, job.global_batch_size),
        need_without_recompute=float(plain.need_bytes[0]) / job.gpu.memory_bytes,
        launch=float(step.launch[0]) / total,
    )


def shortlist_flags(scenario: Scenario, shortlist: Shortlist, most: int) -> list[dict[str, str]]:
    """The checklist's findings for each of the first ``most`` layouts of a shortlist, under its split."""
    rows = range(min(most, len(shortlist.rows)))
    return [advice.flags(facts(scenario, shortlist.job(scenario, row), shortlist.rows.layouts.layout(row))) for row in rows]
