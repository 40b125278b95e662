"""torchtitan 0.2: what it refuses beside the rules of 0.3, and the text of its TOML files."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from planner.frameworks.rule import Twin
from planner.frameworks.torchtitan_models import flavor_of
from planner.scenario import Job
from solver.layout import Layout

TOML_NAME = "torchtitan-0.2.toml"


class OldRule(NamedTuple):
    """A rule of 0.2 alone. The search does not know it: it decides whether an export has a file for 0.2."""

    id: str
    sentence: str
    source: str
    twin: Twin


def tell_old_pipeline(layout: Layout, job: Job) -> str:
    """In 0.2 some models cannot be cut into stages."""
    flavor = flavor_of(job.model)
    none = flavor is not None and not flavor.old_pipeline and layout.pipeline_parallel > 1
    return f"pipeline_parallel = {layout.pipeline_parallel}: torchtitan 0.2 does not cut {job.model.name} into stages" if none else ""


def tell_old_context(layout: Layout, job: Job) -> str:
    """In 0.2 only plain attention is split over context ranks."""
    flavor = flavor_of(job.model)
    none = flavor is not None and not flavor.old_context and layout.context_parallel > 1
    return f"context_parallel = {layout.context_parallel}: torchtitan 0.2 does not split {job.model.name}'s attention" if none else ""


def tell_old_replication(layout: Layout, job: Job) -> str:
    """In 0.2 plain replication stands alone."""
    sizes = (layout.tensor_parallel, layout.pipeline_parallel, layout.context_parallel, layout.expert_parallel)
    if layout.zero_stage or layout.data_parallel == 1 or max(sizes) == 1:
        return ""
    return f"zero_stage = 0 with other groups ({layout.label}): torchtitan 0.2 replicates over all GPUs or none"


def tell_old_sequence(layout: Layout, job: Job) -> str:
    """In 0.2 the sequence divides by tensor x 2 context, also without context groups."""
    ranks = 2 * layout.tensor_parallel * layout.context_parallel
    return f"seq_len = {job.seq_len} does not divide by 2 x tensor x context = {ranks}" if job.seq_len % ranks else ""


def tell_old_precision(layout: Layout, job: Job) -> str:
    """In 0.2 experts and latent attention have no 8-bit tensor groups, and nothing runs in four bits."""
    narrow = job.precision == "nvfp4" or (job.low_precision and job.model.num_experts > 0 and layout.tensor_parallel > 1)
    return f"precision = {job.precision} with tensor_parallel = {layout.tensor_parallel}" if narrow else ""


OLD_RULES: tuple[OldRule, ...] = (
    OldRule("TO1", "qwen3 and gpt_oss have no pipelines", "models/MODULE/__init__.py, pipelining_fn", tell_old_pipeline),
    OldRule("TO2", "deepseek_v3 and gpt_oss have no context groups", "models/MODULE/model/args.py", tell_old_context),
    OldRule("TO3", "replication alone (zero_stage 0) has no other groups", "models/MODULE/infra/parallelize.py", tell_old_replication),
    OldRule("TO4", "seq_len divides by 2 x tensor x context", "distributed/parallel_dims.py, seq_len_divisor", tell_old_sequence),
    OldRule("TO5", "8-bit formats with experts need tensor_parallel = 1", "models/deepseek_v3/infra/parallelize.py", tell_old_precision),
)


def toml_text(head: Sequence[str], tables: Mapping[str, Mapping[str, Any]]) -> str:
    """A TOML file with lines for its head."""
    return "".join(f"# {line}".rstrip() + "\n" for line in head) + "\n".join(_table(name, values) for name, values in tables.items())


def _table(name: str, values: Mapping[str, Any]) -> str:
    return f"[{name}]\n" + "".join(f"{key} = {toml_value(value)}\n" for key, value in values.items())


def toml_value(value: Any) -> str:
    """A value as TOML writes it; lists of lists one line each.

    >>> toml_value(True), toml_value(["a"]), toml_value([["a"], ["b"]])
    ('true', '["a"]', '[\\n    ["a"],\\n    ["b"],\\n]')
    """
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, list) and value and isinstance(value[0], list):
        return "[\n" + "".join(f"    {toml_value(inner)},\n" for inner in value) + "]"
    if isinstance(value, list):
        return f"[{', '.join(toml_value(item) for item in value)}]"
    return f'"{value}"' if isinstance(value, str) else str(value)
