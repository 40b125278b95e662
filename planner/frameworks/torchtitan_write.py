"""Writes a layout for torchtitan: the command line of 0.3, and a TOML file for 0.2 where 0.2 can run it."""

from __future__ import annotations

import shlex
from collections.abc import Mapping
from typing import Any

from planner.errors import InputError
from planner.frameworks.torchtitan_models import (
    BASE_RECIPE,
    CONVERTERS,
    OWN_MODULE,
    RECIPES,
    Flavor,
    needed_flavor,
    own_config,
    usual_recipe,
)
from planner.frameworks.torchtitan_old import OLD_RULES, TOML_NAME, toml_text
from planner.frameworks.torchtitan_stages import SCHEDULE_NAMES, chunk_count, module_lists, stage_layers
from planner.frameworks.writing import Launch, Target

MODULE_FILE = f"{OWN_MODULE}.py"
WEIGHTS = ((0, 0), (1, 1), (1, 0), (0, 1))
"""Layers that embedding and head may count as, where torchtitan's own cut is tried; other cuts are written as lists of modules."""
MODES = {"none": "none", "selective": "selective", "full": "full"}
EXPERT_CONVERTERS = {"fp8": "Float8GroupedExpertsConverter", "mxfp8": "MXFP8GroupedExpertsConverter"}


def write(target: Target) -> Launch:
    """The launch. Raises InputError for a model or a workload that torchtitan's own configurations do not have."""
    flavor = needed_flavor(target.job.model)
    if target.job.seq_len > flavor.positions:
        raise InputError(
            f"torchtitan's {flavor.module} {flavor.flavor} takes sequences of at most {flavor.positions} tokens, not seq_len = "
            f"{target.job.seq_len}"
        )
    if target.job.precision not in CONVERTERS:
        raise InputError(f"torchtitan cannot train all layers in precision '{target.job.precision}'; it can in {', '.join(CONVERTERS)}")
    usual = usual_recipe(flavor, target.job.precision)
    files = {} if usual else {MODULE_FILE: own_module(target, flavor)}
    if flavor.old and not any(rule.twin(target.layout, target.job) for rule in OLD_RULES):
        files[TOML_NAME] = old_toml(target, flavor)
    return Launch(
        files=files,
        arguments=arguments(target, flavor, usual),
        launcher_arguments=("-m",),
        program="torchtitan.train",
    )


def arguments(target: Target, flavor: Flavor, usual: str) -> dict[str, tuple[str, ...]]:
    """The words of 0.3's command line, in arrays. The choice of checkpointing is a subcommand and so stands last."""
    module, config = (flavor.module, usual) if usual else (OWN_MODULE, own_config(flavor, target.job.precision))
    recipe = RECIPES[usual or BASE_RECIPE[flavor.module]]
    mode = MODES[target.layout.recompute]
    words = {
        "MODEL_ARGS": (f"--module {module}", f"--config {config}"),
        "TRAINING_ARGS": flags("training", training(target) | {"disable_cuda_graphs": target.job.software.cuda_graphs == "none"}),
        "PARALLEL_ARGS": flags("parallelism", parallelism(target, "lm_head") | sequence_parallel(target)),
        "COMPILE_ARGS": flags("compile", compilation(target)),
    }
    if mode != recipe.settings["activation_checkpoint.mode"]:
        words["CHECKPOINTING_ARGS"] = (f"activation-checkpoint:{mode}",)
    return words


def flags(section: str, values: Mapping[str, Any]) -> tuple[str, ...]:
    """Settings as words of a shell, one flag with its values per text.

    >>> flags("compile", {"enable": False, "components": ["model", "loss"]}), flags("parallelism", {"x": [["a", "b"], ["c"]]})
    (('--compile.no_enable', '--compile.components model,loss'), ('--parallelism.x a,b c',))
    """
    return tuple(_flag(section, key, value) for key, value in values.items())


def _flag(section: str, key: str, value: Any) -> str:
    if isinstance(value, bool):
        return f"--{section}.{'' if value else 'no_'}{key}"
    if not isinstance(value, list):
        return f"--{section}.{key} {shlex.quote(str(value))}"
    lists = value if value and isinstance(value[0], list) else [value]
    return " ".join([f"--{section}.{key}", *(shlex.quote(",".join(names)) for names in lists)])


# What both versions state


def training(target: Target) -> dict[str, Any]:
    """Batch and sequence. A pipeline takes a replica's whole batch at once; without one, micro-batches accumulate."""
    layout, batch = target.layout, target.job.global_batch_size
    local = batch // layout.data_parallel if layout.pipeline_parallel > 1 else layout.micro_batch_size
    return {"local_batch_size": local, "global_batch_size": batch, "seq_len": target.job.seq_len}


def parallelism(target: Target, head: str) -> dict[str, Any]:
    """Degrees, sharding and stages; ``head`` is the version's name of the output layer."""
    layout = target.layout
    replicated = layout.zero_stage == 0
    settings: dict[str, Any] = {
        "data_parallel_replicate_degree": layout.data_parallel if replicated else 1,
        "data_parallel_shard_degree": 1 if replicated else layout.data_parallel,
        "fsdp_reshard_after_forward": {0: "default", 2: "never", 3: "always"}[layout.zero_stage],
        "tensor_parallel_degree": layout.tensor_parallel,
        "context_parallel_degree": layout.context_parallel,
        "expert_parallel_degree": layout.expert_parallel,
        "pipeline_parallel_degree": layout.pipeline_parallel,
    }
    if layout.pipeline_parallel == 1:
        return settings
    schedule = {
        "pipeline_parallel_schedule": SCHEDULE_NAMES[layout.schedule],
        "pipeline_parallel_microbatch_size": layout.micro_batch_size,
    }
    return settings | schedule | stage_split(target, head)


def sequence_parallel(target: Target) -> dict[str, bool]:
    """Whether norms are split along the sequence; 0.3 alone has the switch."""
    return {"enable_sequence_parallel": target.job.sequence_parallel}


def stage_split(target: Target, head: str) -> dict[str, Any]:
    """How the layers are cut: by the weights of the ends where torchtitan then cuts alike, else by a list of modules per chunk."""
    chunks, layers = target.chunks, sum(target.chunks)
    for first, last in WEIGHTS:
        ends = {"pipeline_parallel_first_stage_less_layers": first, "pipeline_parallel_last_stage_less_layers": last}
        if chunks != stage_layers(layers, len(chunks), first, last):
            continue
        if len(chunks) == chunk_count(target.layout.schedule, target.layout.pipeline_parallel):
            return ends
        share = -(-(layers + first + last) // len(chunks))
        if -(-(layers + first + last) // share) == len(chunks) and target.layout.virtual_pipeline > 1:
            return {**ends, "pipeline_parallel_layers_per_stage": share}
    return {"module_fqns_per_model_part": module_lists(chunks, head)}


def compilation(target: Target) -> dict[str, Any]:
    """Whether model and loss are compiled."""
    compiled = target.job.software.compiled
    return {"enable": compiled, **({"components": ["model", "loss"]} if compiled else {})}


# 0.3: a configuration function of our own, for flavors or precisions without one


def own_module(target: Target, flavor: Flavor) -> str:
    """A Python file that defines the flavor's configuration from the module's usual one."""
    base, precision = BASE_RECIPE[flavor.module], target.job.precision
    experts = target.job.model.num_experts > 0
    converters = [CONVERTERS[precision]] if CONVERTERS[precision] else []
    converters += [EXPERT_CONVERTERS[precision]] if converters and experts else []
    lines = [
        *(f"# {line}".rstrip() for line in target.head),
        f'"""The configuration of {target.job.model.name} in {precision}, beside torchtitan\'s own."""',
        "",
        *([f"from torchtitan.components.quantization import {', '.join(converters)}"] if converters else []),
        "from torchtitan.models.common.config_utils import decoder_vocab_size",
        f"from torchtitan.models.{flavor.module} import model_registry",
        f"from torchtitan.models.{flavor.module}.config_registry import {base}",
        "",
        "",
        f"def {own_config(flavor, precision)}():",
        f"    config = {base}()",
        f"    config.model_spec = model_registry({_arguments(target, flavor, converters)})",
        "    config.loss.loss_fn.global_vocab_size = decoder_vocab_size(config.model_spec)",
        f'    config.hf_assets_path = "./assets/hf/{target.job.model.name}"  # the tokenizer\'s folder',
        "    return config",
    ]
    return "\n".join(lines) + "\n"


def _arguments(target: Target, flavor: Flavor, converters: list[str]) -> str:
    compiled = f"model_compile_enabled={target.job.software.compiled}"
    made = []
    for name in converters:
        skipped = ' filter_fqns=["lm_head", "router.gate"],' if name == "Float8LinearConverter" else ""
        skipped = ' fqns=["layers"],' if name == "MXFP8LinearConverter" else skipped
        made.append(f"{name}.Config({skipped.strip()} {compiled})".replace("( ", "("))
    listed = f", converters=[{', '.join(made)}]" if made else ""
    return f'"{flavor.flavor}"{listed}'


# 0.2


def old_toml(target: Target, flavor: Flavor) -> str:
    """The TOML file of 0.2."""
    layout = target.layout
    degrees = parallelism(target, "output")
    if layout.schedule == "dualpipe" and layout.recompute != "none":
        degrees["pipeline_parallel_expert_parallel_overlap"] = False
    converters = {"fp8": ["quantize.linear.float8"], "mxfp8": ["quantize.linear.mx"]}.get(target.job.precision, [])
    selective = {"selective_ac_option": "op"} if layout.recompute == "selective" else {}
    tables: dict[str, dict[str, Any]] = {
        "job": {"description": f"{target.job.model.name} {layout.label}"},
        "model": {"name": flavor.module, "flavor": flavor.old, "converters": converters},
        "training": training(target),
        "parallelism": degrees,
        "activation_checkpoint": {"mode": MODES[layout.recompute], **selective},
        "compile": compilation(target),
    }
    if target.job.precision == "fp8":
        tables["quantize.linear.float8"] = {"filter_fqns": ["output"]}
    return toml_text(target.head, tables)
