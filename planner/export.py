"""A layout as the files that a framework launches."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path

from planner.cost.estimate import memory_of
from planner.cost.memory import OUT_OF_MEMORY, VERDICTS
from planner.errors import InputError
from planner.explain import Explanation, explain
from planner.frameworks import FRAMEWORKS, NAMES
from planner.frameworks.launch_script import launch_script
from planner.frameworks.writing import Target, writers
from planner.refine import costing_job
from planner.scenario import Scenario
from planner.simulated import step_of
from planner.split import chunks_under
from planner.units import GIB
from solver.layout import Layout, columns_of

SCRIPT = "launch.sh"


class Refused(Exception):
    """The framework does not take the layout, or it runs out of memory: nothing is written. ``found`` says why."""

    def __init__(self, found: Explanation, message: str) -> None:
        super().__init__(message)
        self.found = found


@dataclass(frozen=True)
class Exported:
    """What was made for one layout."""

    target: Target
    files: Mapping[str, str]
    """Name -> text; the launch script is among them."""


def within(scenario: Scenario, framework: str) -> Scenario:
    """The scenario in one framework, its pins lifted: what is exported was chosen already."""
    return dataclasses.replace(scenario, choices=dataclasses.replace(scenario.choices, framework=framework, pins={}))


def target_of(scenario: Scenario, framework: str, layout: Layout) -> Target:
    """What is to be written: the layout under its best split in the framework. Raises InputError for a framework without files."""
    if framework not in FRAMEWORKS:
        raise InputError(f"--framework {framework}: export needs one of {', '.join(FRAMEWORKS)}")
    own = within(scenario, framework)
    job, split = costing_job(own, layout)
    target = Target(scenario=own, job=job, layout=layout, chunks=chunks_under(job, layout, split))
    return dataclasses.replace(target, head=head_lines(target, framework))


def head_lines(target: Target, framework: str) -> tuple[str, ...]:
    """What every file says of itself: the scenario, the program, and what is expected of the run."""
    job, layout = target.job, target.layout
    x = columns_of([layout])
    need, step = memory_of(job, x), float(step_of(job, layout).total[0])
    memory = f"{float(need.need_bytes[0]) / GIB:.1f} of {job.gpu.memory_bytes / GIB:.1f} GiB"
    return (
        f"{layout.label} for {NAMES[framework]}, written by layout-planner {metadata.version('layout-planner')}",
        f"scenario {target.scenario.name}: {job.model.name} on {job.num_gpus:,} x {job.gpu.name} ({job.cluster.name}), "
        f"{job.global_batch_size:,} sequences of {job.seq_len:,} tokens per step, {job.precision}, {job.optimizer}",
        f"expected: {step:.4g} s per step, {job.tokens_per_step / step / job.num_gpus:,.0f} tokens/s per GPU; "
        f"{memory} on the fullest GPU: {VERDICTS[int(need.verdict[0])]}",
    )


def export(scenario: Scenario, framework: str, layout: Layout) -> Exported:
    """The files of a layout. Raises Refused where the framework refuses it or it runs out of memory, InputError as target_of."""
    target = target_of(scenario, framework, layout)
    found = explain(target.scenario, layout)
    if not found.legal:
        raise Refused(found, f"{NAMES[framework]} does not take {layout.label}")
    if found.verdict == OUT_OF_MEMORY:
        raise Refused(found, f"{layout.label} runs out of memory")
    launch = writers()[framework](target)
    return Exported(target, {**launch.files, SCRIPT: launch_script(target, launch)})


def write(exported: Exported, folder: Path) -> list[Path]:
    """Writes the files into a folder, which is made. Raises InputError where that cannot be."""
    from planner.report.write import write_atomically

    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise InputError(f"{folder}: cannot be made ({error.strerror or error})") from None
    paths = []
    for name, text in exported.files.items():
        write_atomically(folder / name, [text])
        paths.append(folder / name)
    return paths
