"""Rules about DeepSpeed's own settings that no layout expresses: its configuration, Megatron-DeepSpeed's flags, GPT-NeoX's keys."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from planner.frameworks.accelerate_files import FILE_RULES
from planner.frameworks.config import ILLEGAL, TRAP, Config, SettingRule
from planner.frameworks.deepspeed_batches import BATCH_RULES
from planner.frameworks.deepspeed_batches import own_settings as own
from planner.frameworks.deepspeed_keys import BLOCKS, OPEN_BLOCKS, REMOVED, TOP_KEYS, inner_keys
from planner.frameworks.deepspeed_read import INSIDE, JSON_KIND, MEGATRON_KIND
from planner.frameworks.files import each_told, hint, shown
from planner.frameworks.neox_read import KIND as NEOX_KIND
from planner.scenario import Job
from solver.problem import divisors

CONFIG = "runtime/config.py"
ENGINE = "the pipeline engine runs even one stage, and takes stage 0 or 1"


def has_json(config: Config) -> bool:
    """Whether DeepSpeed's own configuration is among the settings."""
    return config.kind == JSON_KIND or any(key.startswith(INSIDE) for key in config.settings)


def unknown_keys(config: Config, job: Job) -> str:
    """Keys that DeepSpeed passes over. A leading underscore marks a comment."""
    if not has_json(config):
        return ""
    names = dict.fromkeys(key.split(".")[0] for key in own(config))
    strange = [name for name in names if name not in TOP_KEYS and name not in REMOVED and not name.startswith("_")]
    return each_told([*strange, *inner_keys(own(config), OPEN_BLOCKS)], _passed_over)


def _passed_over(key: str) -> str:
    block, _, name = key.partition(".")
    if block in OPEN_BLOCKS and name:
        return f"{block} has no key {shown(name)}, and DeepSpeed says nothing{hint(name, OPEN_BLOCKS[block])}"
    return f"{shown(key)} is no key of DeepSpeed, which says nothing{hint(key, TOP_KEYS)}"


def unknown_inner_keys(config: Config, job: Job) -> str:
    """Keys inside blocks whose keys are closed."""
    return each_told(inner_keys(own(config), BLOCKS) if has_json(config) else [], _refused)


def _refused(key: str) -> str:
    block = next(block for block in sorted(BLOCKS, key=len, reverse=True) if key.startswith(f"{block}."))
    name = key.removeprefix(f"{block}.")
    return f"{block} has no key {shown(name)}{hint(name, BLOCKS[block])}"


def removed_keys(config: Config, job: Job) -> str:
    """Keys of features that are gone."""
    if not has_json(config):
        return ""
    stated = own(config)
    tops = {key.split(".")[0] for key in stated}
    gone = [key for key in REMOVED if key in stated or ("." not in key and key in tops)]
    return "; ".join(f"{key} was removed in DeepSpeed 0.19, which stops at it: take it out" for key in gone[:3])


def on(stated: Mapping[str, Any], *keys: str) -> bool:
    """Whether one of the keys is true."""
    return any(stated.get(key) is True for key in keys)


def both_precisions(config: Config, job: Job) -> str:
    """bf16 and fp16 exclude each other."""
    stated = own(config)
    both = on(stated, "bf16.enabled", "bfloat16.enabled") and on(stated, "fp16.enabled", "fp16.fp16")
    return "bf16.enabled and fp16.enabled are both true: switch one off" if both else ""


def single_precision(config: Config, job: Job) -> str:
    """Without a 16-bit block DeepSpeed trains in fp32."""
    stated = own(config)
    if config.kind != JSON_KIND or any(key.split(".")[0] in ("bf16", "bfloat16", "fp16", "torch_autocast") for key in stated):
        return ""
    return "neither bf16 nor fp16 is there: DeepSpeed trains in fp32, with twice the bytes; add bf16.enabled = true"


def sixteen_bit_states(config: Config, job: Job) -> str:
    """Master weights and moments in 16 bits need ZeRO."""
    stated, stage = own(config), config.layout.get("zero_stage", 0)
    keys = [key for key in SIXTEEN_BIT if stated.get(key) is True]
    if keys and stage == 0:
        return f"{keys[0]} needs zero_optimization.stage = 1, 2 or 3, here 0"
    if on(stated, "bf16.bf16_optimizer_states") and not on(stated, "bf16.bf16_master_weights_and_grads"):
        return "bf16.bf16_optimizer_states needs bf16.bf16_master_weights_and_grads = true"
    return ""


SIXTEEN_BIT = ("bf16.bf16_master_weights_and_grads", "fp16.fp16_master_weights_and_grads", "bf16.bf16_optimizer_states")


def partial_offload(config: Config, job: Job) -> str:
    """A share of the optimizer on the host needs ZeRO-3, and so does a gradient norm left out need 1 or 2."""
    stated, stage = own(config), config.layout.get("zero_stage", 0)
    block = stated.get("zero_optimization.offload_optimizer")
    ratio = block.get("ratio", 1) if isinstance(block, dict) else 1
    if isinstance(ratio, (int, float)) and ratio < 1 and stage != 3:
        return f"zero_optimization.offload_optimizer.ratio = {ratio:g} needs stage 3, here {stage}"
    if stated.get("zero_optimization.compute_grad_norm") is False and stage not in (1, 2):
        return f"zero_optimization.compute_grad_norm = false needs stage 1 or 2, here {stage}"
    return ""


def pipeline_engine(config: Config, job: Job) -> str:
    """Megatron-DeepSpeed and GPT-NeoX run even one stage in the pipeline engine, which takes no ZeRO-2 or 3."""
    stage = int(config.layout.get("zero_stage", 0))
    if stage < 2 or config.layout.get("pipeline_parallel", 1) != 1:
        return ""
    if config.kind == MEGATRON_KIND and "--no-pipeline-parallel" not in config.settings:
        return f"ZeRO stage {stage} without --no-pipeline-parallel: {ENGINE}; add the flag"
    if config.kind == NEOX_KIND and config.settings.get("pipe_parallel_size", 0) == 1:
        return f"ZeRO stage {stage} with pipe-parallel-size = 1: {ENGINE}; set pipe-parallel-size = 0"
    return ""


def nothing_to_shard(config: Config, job: Job) -> str:
    """With one data-parallel rank ZeRO saves nothing."""
    stage = int(config.layout.get("zero_stage", 0))
    sizes = {axis: int(config.layout.get(axis, 1)) for axis in ("tensor_parallel", "pipeline_parallel", "context_parallel")}
    if not stage or sizes["tensor_parallel"] * sizes["pipeline_parallel"] != job.num_gpus or job.num_gpus == 1:
        return ""
    return (
        f"ZeRO stage {stage} saves nothing: tensor_parallel {sizes['tensor_parallel']} x pipeline_parallel {sizes['pipeline_parallel']} "
        f"take all {job.num_gpus} GPUs, so data_parallel = 1"
    )


def secondary_shards(config: Config, job: Job) -> str:
    """The ranks of a second copy of the weights divide the GPUs; the copy is meant for a node."""
    size = own(config).get("zero_optimization.zero_hpz_partition_size", 1)
    if not isinstance(size, int) or isinstance(size, bool) or size <= 1 or job.num_gpus % size == 0:
        return ""
    return f"zero_hpz_partition_size = {shown(size)} does not divide {job.num_gpus} GPUs; legal: {_listed(divisors(job.num_gpus))}"


def idle_overlap(config: Config, job: Job) -> str:
    """The pipeline engine reduces gradients itself: overlap_comm does nothing."""
    stages = int(config.layout.get("pipeline_parallel", 1))
    if own(config).get("zero_optimization.overlap_comm") is not True or stages == 1:
        return ""
    return f"overlap_comm = true does nothing with {stages} pipeline stages: the engine reduces behind the last micro-batch"


def idle_experts(config: Config, job: Job) -> str:
    """Expert groups are off until they are switched on."""
    stated = own(config)
    size = stated.get("expert_parallel.autoep_size")
    if size in (None, 1) or stated.get("expert_parallel.enabled") is True:
        return ""
    return f"expert_parallel.autoep_size = {shown(size)} without expert_parallel.enabled = true: every GPU keeps all experts"


def whole_tokens(config: Config, job: Job) -> str:
    """Ulysses gives every rank an equal piece of the sequence."""
    size = int(config.layout.get("context_parallel", 1))
    if job.seq_len % size == 0:
        return ""
    low = job.seq_len // size * size
    return f"seq_len = {job.seq_len} does not divide by sequence_parallel_size = {size}; nearest: {low or size}, {low + size}"


def half_on(config: Config, job: Job) -> str:
    """--sequence-parallel and DeepSpeed's own sequence groups exclude each other."""
    size = int(config.layout.get("context_parallel", 1))
    if config.kind != MEGATRON_KIND or size == 1 or not config.settings.get("sequence_parallel"):
        return ""
    return f"--ds-sequence-parallel-size {size} together with --sequence-parallel: take one of the two out"


def ignored_sequence(config: Config, job: Job) -> str:
    """Ulysses works in attention code that knows it; other models run every rank on the whole sequence."""
    size = int(config.layout.get("context_parallel", 1))
    if size == 1:
        return ""
    return (
        f"sequence_parallel_size = {size} is up to the model's attention: code that does not know it ignores it and keeps whole "
        f"sequences of {job.seq_len:,} tokens on every rank; check that the memory drops"
    )


def _listed(sizes: Iterable[int]) -> str:
    return ", ".join(map(str, sizes))


SETTING_RULES: tuple[SettingRule, ...] = (
    *BATCH_RULES,
    SettingRule("D22", "keys are DeepSpeed's", CONFIG, TRAP, unknown_keys),
    SettingRule(
        "D23",
        "keys inside zero_optimization, its offload blocks, bf16, fp16 and tensor_parallel are DeepSpeed's",
        "runtime/config_utils.py",
        ILLEGAL,
        unknown_inner_keys,
    ),
    SettingRule("D24", "no key of a removed feature is left", f"{CONFIG}, _reject_removed_config_keys", ILLEGAL, removed_keys),
    SettingRule("D25", "bf16 and fp16 are not both on", CONFIG, ILLEGAL, both_precisions),
    SettingRule("D26", "bf16 or fp16 is on", "runtime/precision_config.py", TRAP, single_precision),
    SettingRule("D27", "16-bit master weights and moments need ZeRO", f"{CONFIG}, _do_error_check", ILLEGAL, sixteen_bit_states),
    SettingRule("D28", "partial offload needs ZeRO-3, no gradient norm ZeRO-1 or 2", "runtime/zero/config.py", ILLEGAL, partial_offload),
    SettingRule("D29", "ZeRO-2 and 3 stay out of the pipeline engine", "runtime/pipe/engine.py", ILLEGAL, pipeline_engine),
    SettingRule("D30", "ZeRO has data-parallel ranks to shard over", "runtime/zero/stage_1_and_2.py", TRAP, nothing_to_shard),
    SettingRule("D31", "zero_hpz_partition_size divides the GPUs", "utils/groups.py", ILLEGAL, secondary_shards),
    SettingRule("D32", "overlap_comm is on only without a pipeline", "runtime/engine.py", TRAP, idle_overlap),
    SettingRule("D33", "expert groups are switched on", "module_inject/auto_ep_config.py, parse_autoep_config", TRAP, idle_experts),
    SettingRule("D34", "seq_len divides by sequence_parallel_size", "runtime/sequence_parallel/ulysses_sp.py", ILLEGAL, whole_tokens),
    SettingRule("D35", "one kind of sequence parallelism", "Megatron-DeepSpeed, megatron/arguments.py", ILLEGAL, half_on),
    SettingRule(
        "D39",
        "the model's attention takes part in sequence parallelism",
        "runtime/sequence_parallel/ulysses_sp.py, register_with_transformers",
        TRAP,
        ignored_sequence,
    ),
    *FILE_RULES,
)
