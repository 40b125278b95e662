"""Rules about torchtitan's settings of pipelines: micro-batches, the cut into stages, CUDA graphs, compilation."""

from __future__ import annotations

import re
from collections import Counter

from planner.frameworks.config import Config
from planner.frameworks.files import hint, listed, shown
from planner.frameworks.torchtitan_keys import MODULE_LISTS, NEW_KIND, setting
from planner.frameworks.torchtitan_meaning import P, chunk_layers, degree, schedule_name
from planner.frameworks.torchtitan_stages import MULTI, SCHEDULE_NAMES, SINGLE, few_micro_batches, stage_layers
from planner.scenario import Job
from solver.problem import divisors

OURS = {name: ours for ours, name in SCHEDULE_NAMES.items()}
SPLIT = ("InterleavedZeroBubble", "ZBVZeroBubble", "DualPipeV")
MOST_LISTED = 6
GRAPHED = re.compile("hybridep|minimal_async_ep")
"""Configurations whose expert groups CUDA graphs can hold."""


def around(value: int, unit: int) -> str:
    """The multiples of a unit next to a value.

    >>> around(100, 24), around(5, 8)
    ('96 or 120', '8')
    """
    below = value // unit * unit
    return f"{below} or {below + unit}" if below else str(unit)


def number(config: Config, key: str) -> int:
    """A whole number among the settings."""
    return int(setting(config.settings, key))


def of(config: Config, axis: str) -> int:
    """A degree of parallelism among the settings, at least 1."""
    return degree(config.settings, axis)


def old(config: Config) -> bool:
    """Whether the settings are of 0.2."""
    return config.kind != NEW_KIND


def replicas(config: Config, job: Job) -> int:
    """Data-parallel ranks."""
    stated = number(config, P + "data_parallel_shard_degree")
    others = of(config, "context_parallel") * of(config, "tensor_parallel") * of(config, "pipeline_parallel")
    replicate = of(config, "data_parallel_replicate")
    return max(1, replicate * (stated if stated >= 1 else job.num_gpus // (replicate * others)))


def micro_batches(config: Config, job: Job) -> str:
    """In a pipeline the local batch is a whole number of micro-batches."""
    local, micro = number(config, "training.local_batch_size"), number(config, P + "pipeline_parallel_microbatch_size")
    if of(config, "pipeline_parallel") == 1 or micro < 1 or local < 1 or local % micro == 0:
        return ""
    legal = ", ".join(map(str, divisors(local)))
    return f"training.local_batch_size = {local} must divide by {P}pipeline_parallel_microbatch_size = {micro}; legal: {legal}"


def enough_micro_batches(config: Config, job: Job) -> str:
    """One pass through the pipeline has the micro-batches that its schedule needs: fewer hang or are refused."""
    stages, name = of(config, "pipeline_parallel"), schedule_name(config.settings)
    local, micro = number(config, "training.local_batch_size"), number(config, P + "pipeline_parallel_microbatch_size")
    if stages == 1 or name not in OURS or micro < 1 or local < micro:
        return ""
    found = few_micro_batches(OURS[name], local // micro, stages)
    return f"local_batch_size {local} / pipeline_parallel_microbatch_size {micro}: {found}" if found else ""


def accumulated_pipeline(config: Config, job: Job) -> str:
    """A pipeline takes the whole batch of a replica at once: every accumulation step fills and drains it anew."""
    batch, local, ranks = number(config, "training.global_batch_size"), number(config, "training.local_batch_size"), replicas(config, job)
    steps = batch // (max(1, local) * ranks) if batch > 0 else 1
    if of(config, "pipeline_parallel") == 1 or steps <= 1:
        return ""
    return (
        f"training.global_batch_size = {batch} makes {steps} passes of local_batch_size {local} that each fill and drain the pipeline; "
        f"training.local_batch_size = {batch // ranks} makes it one"
    )


def default_split(config: Config, job: Job) -> str:
    """Without being told, torchtitan counts embedding and head as a layer each, so the stages are not even."""
    stages = of(config, "pipeline_parallel")
    ends = [P + f"pipeline_parallel_{end}_stage_less_layers" for end in ("first", "last")]
    if stages == 1 or setting(config.settings, MODULE_LISTS) or any(key in config.settings for key in ends):
        return ""
    chunks = chunk_layers(config.settings, job.model.num_layers)
    if not chunks or len(set(chunks)) == 1 or job.model.num_layers % len(chunks):
        return ""
    even = stage_layers(job.model.num_layers, len(chunks), 0, 0)
    told = f"{job.model.num_layers} layers on {len(chunks)} chunks are cut {'-'.join(map(str, chunks))}"
    return (
        f"{told}; state pipeline_parallel_first_stage_less_layers = 0 and pipeline_parallel_last_stage_less_layers = 0 for {even[0]} each"
    )


def whole_split(config: Config, job: Job) -> str:
    """The chunks are a whole number per stage, as many as the schedule takes, and hold every layer once."""
    stages, layers = of(config, "pipeline_parallel"), job.model.num_layers
    if stages == 1:
        return ""
    name = schedule_name(config.settings)
    chunks = chunk_layers(config.settings, layers)
    if not chunks:
        share = number(config, P + "pipeline_parallel_layers_per_stage")
        schedule = listed([name])
        told = f"pipeline_parallel_layers_per_stage = {share}" if share else f"pipeline_parallel_degree = {stages}"
        return f"{told} does not cut {layers} layers over {stages} stages for {schedule}; at most {layers} chunks, a whole number each"
    if len(chunks) % stages:
        return f"{MODULE_LISTS} has {len(chunks)} lists; it must have a multiple of {stages} stages"
    if (name in SINGLE and len(chunks) != stages) or (name in SPLIT[1:] and len(chunks) != 2 * stages):
        return f"{MODULE_LISTS} has {len(chunks)} lists; {name} takes {stages if name in SINGLE else 2 * stages}"
    return ""


def lost_layers(config: Config, job: Job) -> str:
    """Modules that no list names are dropped from the model without a word."""
    listed = setting(config.settings, MODULE_LISTS)
    if not listed or of(config, "pipeline_parallel") == 1:
        return ""
    names = [name for part in listed for name in part]
    head = "output" if old(config) else "lm_head"
    wanted = ["tok_embeddings", *(f"layers.{layer}" for layer in range(job.model.num_layers)), "norm", head]
    counted = Counter(names)
    lost = [name for name in wanted if name not in counted]
    twice = [name for name, count in counted.items() if count > 1]
    odd = sorted(counted.keys() - set(wanted))
    if twice or odd:
        return (
            f"{MODULE_LISTS}: {shown(twice[0])} is listed twice"
            if twice
            else f"{MODULE_LISTS}: {shown(odd[0])} is no module{hint(odd[0], wanted)}"
        )
    return f"{MODULE_LISTS} leaves out {', '.join(lost[:MOST_LISTED])}: they are not trained" if lost else ""


def cuda_graphs(config: Config, job: Job) -> str:
    """CUDA graphs, on by default in 0.3, take neither pipelines nor the usual expert groups."""
    if old(config) or setting(config.settings, "training.disable_cuda_graphs"):
        return ""
    if of(config, "pipeline_parallel") > 1:
        return f"CUDA graphs do not take pipeline_parallel_degree = {of(config, 'pipeline_parallel')}; set --training.disable_cuda_graphs"
    if job.model.num_experts and of(config, "expert_parallel") > 1 and not GRAPHED.search(str(config.settings.get("config", ""))):
        return f"CUDA graphs do not take expert_parallel_degree = {of(config, 'expert_parallel')}; set --training.disable_cuda_graphs"
    return ""


def compiled_split(config: Config, job: Job) -> str:
    """Schedules with weight gradients apart run no compiled model."""
    name = schedule_name(config.settings)
    compiled = setting(config.settings, "compile.enable") and "model" in setting(config.settings, "compile.components")
    if of(config, "pipeline_parallel") == 1 or name not in SPLIT or not compiled:
        return ""
    return f"pipeline_parallel_schedule = {name} with a compiled model; set compile.components = loss, or take {' or '.join(MULTI[:1])}"


def gathered_weights(config: Config, job: Job) -> str:
    """In a pipeline, weights stay gathered between forward and backward unless fsdp_reshard_after_forward is always."""
    policy = setting(config.settings, P + "fsdp_reshard_after_forward")
    if of(config, "pipeline_parallel") == 1 or policy != "default" or config.layout.get("zero_stage") != 2:
        return ""
    return "fsdp_reshard_after_forward is default: in a pipeline every rank keeps its stage's weights whole (as ZeRO-2); always shards them"
