"""The verdict on a configuration that somebody has: legal or not, does it fit, how fast, and what would be better."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from planner.cost.estimate import memory_of
from planner.cost.memory import OUT_OF_MEMORY
from planner.cost.stages import chunks_of
from planner.errors import InputError
from planner.explain import Explanation, completed
from planner.frameworks import NAMES
from planner.frameworks.config import ILLEGAL, Config, Finding
from planner.frameworks.reading import setting_rules
from planner.request import Request, make_scenario
from planner.scenario import Job, Scenario
from planner.simulated import step_of
from planner.split import with_split
from planner.why_not import WhyNot, why_not
from solver.layout import LABEL_ORDER, V_SHAPED, Layout, columns_of


@dataclass(frozen=True)
class Planned:
    """A configuration as the planner's question and its own answer."""

    config: Config
    scenario: Scenario
    layout: Layout

    @property
    def job(self) -> Job:
        """The job as the configuration runs it: its framework's stack with its switches, its split of layers."""
        own = self.scenario.job_in(self.scenario.choices.framework)
        return with_split(own, self.run_split) if self.run_split else own

    @property
    def layers_per_stage(self) -> tuple[int, ...]:
        """Its split of layers where that is not even; empty: even."""
        return self.config.layers_per_stage

    @property
    def run_split(self) -> tuple[int, ...]:
        """The split that it runs, the even one too: nobody but the file chooses it. Empty without a pipeline."""
        stages, chunks = self.layout.pipeline_parallel, self.layout.virtual_pipeline
        if self.layers_per_stage or stages == 1 or stages * chunks > self.scenario.job.model.num_layers:
            return self.layers_per_stage
        own = self.scenario.job_in(self.scenario.choices.framework)
        sizes, owner = chunks_of(own, stages, chunks, self.layout.schedule in V_SHAPED)
        return tuple(int(sum(sizes[owner == stage])) for stage in range(stages))


def planned(config: Config, request: Request) -> Planned:
    """What a configuration asks for; ``request`` says what it leaves open, and wins. Raises InputError for what is missing."""
    if request.framework not in (None, config.framework):
        raise InputError(f"{config.path}: is a configuration of {NAMES[config.framework]}: leave --framework {request.framework} out")
    config = with_axes(config, request)
    whole = request.over(dataclasses.replace(config.request, framework=config.framework))
    if whole.num_gpus is None:
        raise InputError(f"{config.path}: states no number of GPUs: give --gpus")
    if whole.model is None and whole.model_shape is None:
        raise InputError(f"{config.path}: states no model: name one with --model (see 'planner list models') or give --model-shape")
    scenario = make_scenario(whole, name=config.path.name)
    own = Planned(config, dataclasses.replace(scenario, switches=config.software), completed(scenario, config.layout, str(config.path)))
    check_split(own)
    return own


def with_axes(config: Config, request: Request) -> Config:
    """A configuration whose axes are those that the request pins, and what follows from them. Raises InputError for several values."""
    pins = {axis: values for axis in LABEL_ORDER if (values := getattr(request, axis)) is not None}
    for axis, values in pins.items():
        if len(values) != 1:
            told = ", ".join(map(str, values))
            raise InputError(f"{config.path}: {axis} = {told}: one layout is judged, so give one value (or use 'planner search --from')")
    new = {axis: values[0] for axis, values in pins.items() if config.layout.get(axis) != values[0]}
    if not new:
        return config
    layout = {**{axis: value for axis, value in config.layout.items() if axis not in _left_open(config, new)}, **new}
    groups = config.layout.get("expert_tensor_parallel", 1)
    if groups != 1 and groups == config.layout.get("tensor_parallel") and "expert_tensor_parallel" not in pins:
        layout["expert_tensor_parallel"] = layout["tensor_parallel"]  # experts are split as the rest is
    if layout.get("pipeline_parallel") == 1:
        layout.setdefault("virtual_pipeline", 1)
    recut = bool(new.keys() & CUTTING)
    lines = [f"{axis} = {value} by option, in the file {config.layout.get(axis, 'not stated')}" for axis, value in new.items()]
    lines.append("what is wrong with the file's own settings is told of the file as it stands")
    lines += ["the layers are split evenly over the new stages"] if recut and config.layers_per_stage else []
    kept = () if recut else config.layers_per_stage
    return dataclasses.replace(config, layout=layout, layers_per_stage=kept, assumed=(*config.assumed, *lines))


CUTTING = {"pipeline_parallel", "virtual_pipeline", "schedule"}
"""Axes that cut the model: a split that the file states is one for its own."""
MESH = {"tensor_parallel", "pipeline_parallel", "context_parallel"}


def _left_open(config: Config, new: Mapping[str, int | str]) -> set[str]:
    """The axes of a file that follow from others, and so are open where those change."""
    found: set[str] = set()
    if new.keys() & MESH:
        found.add("data_parallel")
    if "recompute" in new or (new.keys() & CUTTING and _recomputes_all(config)):
        found.add("recompute_layers")
    if new.get("pipeline_parallel") == 1 or new.get("schedule") in V_SHAPED:
        found.add("virtual_pipeline")
    if "virtual_pipeline" in new or "virtual_pipeline" in found:
        found.add("schedule")
    return found


def _recomputes_all(config: Config) -> bool:
    """Whether the layers that a file recomputes are all those of a chunk."""
    chunks = int(config.layout.get("pipeline_parallel", 1)) * int(config.layout.get("virtual_pipeline", 1))
    return config.model is not None and int(config.layout.get("recompute_layers", 0)) * chunks >= config.model.num_layers


def check_split(own: Planned) -> None:
    """Raise InputError for a split that is not one of the model over the stages."""
    layers, stages, model = own.layers_per_stage, own.layout.pipeline_parallel, own.scenario.job.model
    if layers and (len(layers) != stages or sum(layers) != model.num_layers):
        told = "-".join(map(str, layers))
        raise InputError(
            f"{own.config.path}: layers per stage {told} are {sum(layers)} layers on {len(layers)} stages; "
            f"{model.name} has {model.num_layers} and the layout {stages} stages"
        )


@dataclass(frozen=True)
class Switch:
    """A setting beside the layout that could be another, and what that would do."""

    words: str
    """Such as "overlap the gradient reduction with the backward"."""
    seconds: float
    """Of the step, saved."""
    need_bytes: float
    """Of the fullest GPU, saved."""


@dataclass(frozen=True)
class Checked:
    """Everything that the check of a configuration says."""

    planned: Planned
    findings: tuple[Finding, ...]
    answer: WhyNot
    """Its layout among all others of its framework, under the same switches."""
    switches: tuple[Switch, ...]
    """Settings that would save time or memory, the most time first."""

    @property
    def explanation(self) -> Explanation:
        """The ledger of its layout."""
        return self.answer.explanation

    @property
    def legal(self) -> bool:
        """Whether the framework launches it."""
        return self.answer.legal and not any(finding.kind == ILLEGAL for finding in self.findings)

    @property
    def good(self) -> bool:
        """Legal, and not out of memory."""
        return self.legal and self.explanation.verdict != OUT_OF_MEMORY


def check(config: Config, request: Request) -> Checked:
    """Judges a configuration. Raises InputError for what is missing or contradicts itself."""
    own = planned(config, request)
    found = why_not(own.scenario, own.layout, own.run_split)
    return Checked(
        planned=own,
        findings=findings(own),
        answer=found,
        switches=better_switches(own) if found.explanation.step is not None else (),
    )


def findings(own: Planned) -> tuple[Finding, ...]:
    """What is wrong with its settings, what the framework refuses first."""
    job = own.scenario.job_in(own.scenario.choices.framework)
    told = [(rule, rule.finds(own.config, job)) for rule in setting_rules(own.config)]
    found = [Finding(rule.id, rule.kind, text) for rule, text in told if text]
    return tuple(sorted(found, key=lambda finding: finding.kind != ILLEGAL))


def _restored(field: str) -> Callable[[Planned], Planned]:
    """A planned run with one switch as the framework's stack has it by default."""

    def change(own: Planned) -> Planned:
        switches = {key: value for key, value in own.scenario.switches.items() if key != field}
        return dataclasses.replace(own, scenario=dataclasses.replace(own.scenario, switches=switches))

    return change


def _with_sequence_parallel(own: Planned) -> Planned:
    job = dataclasses.replace(own.scenario.job, sequence_parallel=True)
    return dataclasses.replace(own, scenario=dataclasses.replace(own.scenario, job=job))


SWITCH_WORDS: Mapping[str, str] = {
    "data_overlap": "overlap gradient reduction and parameter gathering with compute",
    "attention_kernel": "use the fused (flash) attention kernel",
    "gradient_bytes": "keep gradients in the stack's usual precision",
    "reduce_bytes": "reduce gradients in the stack's usual precision",
    "compiled": "compile the model",
    "recompute_modules": "recompute the modules that the stack recomputes by default",
    "cuda_graphs": "use CUDA graphs as the stack does",
    "tensor_exposed_forward": "hide tensor-parallel transfers as the stack does",
    "tensor_exposed_backward": "hide tensor-parallel transfers in the backward as the stack does",
    "expert_exposed": "hide the experts' all-to-all as the stack does",
    "optimizer_bytes": "keep optimizer states in the stack's usual precision",
    "eager_norm": "use the fused norm kernels",
}
"""Field of the training stack -> what setting it back to the stack's own value means."""

WORTH_TELLING = 0.002
"""Share of step or memory from which on a switch is told."""


def better_switches(own: Planned) -> tuple[Switch, ...]:
    """The settings whose usual value would save time or memory, one at a time."""
    changes: dict[str, Callable[[Planned], Planned]] = {
        SWITCH_WORDS.get(field, f"{field} as the stack has it"): _restored(field) for field in own.scenario.switches
    }
    if own.layout.tensor_parallel > 1 and not own.scenario.job.sequence_parallel:
        changes["turn sequence parallelism on"] = _with_sequence_parallel
    step, need = _figures(own)
    found = []
    for words, change in changes.items():
        other_step, other_need = _figures(change(own))
        if step - other_step > WORTH_TELLING * step or need - other_need > WORTH_TELLING * own.job.gpu.memory_bytes:
            found.append(Switch(words, step - other_step, need - other_need))
    return tuple(sorted(found, key=lambda switch: -switch.seconds))


def _figures(own: Planned) -> tuple[float, float]:
    """Seconds of the step and bytes of the fullest GPU."""
    x: Any = columns_of([own.layout])
    return float(step_of(own.job, own.layout).total[0]), float(memory_of(own.job, x).need_bytes[0])
