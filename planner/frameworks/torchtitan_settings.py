"""Rules about torchtitan's settings that no layout expresses: what it refuses, and what runs but is not what was meant."""

from __future__ import annotations

from planner.frameworks.config import ILLEGAL, TRAP, Config, SettingRule
from planner.frameworks.files import each_told, hint, shown
from planner.frameworks.torchtitan_keys import WHOLE, has_key, setting, unknown_key
from planner.frameworks.torchtitan_meaning import P, schedule_name
from planner.frameworks.torchtitan_models import FLAVORS, find_flavor, flavor_of
from planner.frameworks.torchtitan_pipeline import (
    MOST_LISTED,
    accumulated_pipeline,
    around,
    compiled_split,
    cuda_graphs,
    default_split,
    enough_micro_batches,
    gathered_weights,
    lost_layers,
    micro_batches,
    number,
    of,
    old,
    replicas,
    whole_split,
)
from planner.frameworks.torchtitan_stages import MULTI, SINGLE
from planner.scenario import Job
from solver.problem import divisors

AXES = ("data_parallel_replicate", "data_parallel_shard", "context_parallel", "tensor_parallel", "pipeline_parallel")
MODES = ("none", "selective", "full", "memory_budget")


def product(config: Config, job: Job) -> str:
    """The degrees multiply to the number of GPUs."""
    sizes = {axis: number(config, f"{P}{axis}_degree") for axis in AXES}
    total = 1
    for size in sizes.values():
        total *= max(1, size)
    told = " x ".join(f"{axis} {size}" for axis, size in sizes.items() if size != 1) or "all degrees 1"
    if sizes["data_parallel_shard"] == -1:
        if job.num_gpus % total == 0:
            return ""
        return (
            f"{told}: the other degrees multiply to {total}, which must divide {job.num_gpus} GPUs; legal products: {_some(job.num_gpus)}"
        )
    if total == job.num_gpus:
        return ""
    rest = total // max(1, sizes["data_parallel_shard"])
    fit = job.num_gpus // rest if job.num_gpus % rest == 0 else 0
    way = f"data_parallel_shard_degree = {fit} or -1 fits" if fit else f"give {around(job.num_gpus, rest)} GPUs"
    return f"{told} = {total}, not {job.num_gpus} GPUs; {way}"


def _some(whole: int) -> str:
    found = divisors(whole)
    return ", ".join(map(str, found[-MOST_LISTED:]))


def positive(config: Config, job: Job) -> str:
    """Degrees and batches are at least 1; -1 means the rest for the shard degree, and one accumulation step for the batch."""
    least = {P + "data_parallel_shard_degree": -1, "training.global_batch_size": -1}
    zero_allowed = ("first_stage_less_layers", "last_stage_less_layers", "layers_per_stage")
    for key in WHOLE:
        value = number(config, key)
        if value < 0 if key.endswith(zero_allowed) else value < 1 and value != least.get(key):
            rest = " (or -1)" if key in least else ""
            return f"{key} = {value} must be at least {0 if key.endswith(zero_allowed) else 1}{rest}"
    return ""


def known_keys(config: Config, job: Job) -> str:
    """Every key is one of torchtitan's."""
    wrong = [key for key in config.settings if not has_key(key, config.kind)]
    return each_told(wrong, lambda key: unknown_key(key, config.kind))


def known_schedule(config: Config, job: Job) -> str:
    """The schedule is one of PyTorch's."""
    name = schedule_name(config.settings)
    known = (*SINGLE, *MULTI)
    if name in known:
        return ""
    return f"{P}pipeline_parallel_schedule = {shown(name)} is no schedule of PyTorch{hint(name, known)}"


def known_mode(config: Config, job: Job) -> str:
    """The checkpointing mode is a known one."""
    mode = str(setting(config.settings, "activation_checkpoint.mode"))
    if mode not in MODES:
        return f"activation_checkpoint.mode = {shown(mode)} must be one of {', '.join(MODES)}{hint(mode, MODES)}"
    option = str(setting(config.settings, "activation_checkpoint.selective_ac_option"))
    if old(config) and mode == "selective" and option != "op" and not (option.isdigit() and int(option) > 0):
        return f"activation_checkpoint.selective_ac_option = {shown(option)} must be op or a whole number of layers such as 2"
    return ""


def sequence(config: Config, job: Job) -> str:
    """The sequence divides over tensor and context ranks, and 0.3 has positions for it."""
    length, tensor, context = number(config, "training.seq_len"), of(config, "tensor_parallel"), of(config, "context_parallel")
    split = tensor if old(config) or setting(config.settings, P + "enable_sequence_parallel") else 1
    ranks = split * (2 * context if old(config) or context > 1 else 1)
    if length % ranks:
        return f"training.seq_len = {length} must divide by {ranks} (tensor x 2 context); nearest: {around(length, ranks)}"
    flavor = flavor_of(job.model)
    if flavor and not old(config) and length > flavor.positions:
        return f"training.seq_len = {length} is beyond the {flavor.positions} positions of torchtitan's {flavor.module} {flavor.flavor}"
    return ""


def accumulation(config: Config, job: Job) -> str:
    """The global batch is a whole number of local batches of all replicas."""
    batch, local, ranks = number(config, "training.global_batch_size"), number(config, "training.local_batch_size"), replicas(config, job)
    unit = max(1, local) * ranks
    if batch < 1 or batch % unit == 0:
        return ""
    told = f"local_batch_size {local} x {ranks} data-parallel ranks"
    return f"training.global_batch_size = {batch} must divide by {told} = {unit}; nearest: {around(batch, unit)}"


def expert_groups(config: Config, job: Job) -> str:
    """An expert group lies inside one replica, and in 0.2 experts are whole or split like the dense layers."""
    expert, tensor = of(config, "expert_parallel"), of(config, "tensor_parallel")
    if not job.model.num_experts:
        return ""
    inside = replicas(config, job) // of(config, "data_parallel_replicate") * of(config, "context_parallel") * tensor
    if inside % expert or job.model.num_experts % expert:
        legal = [size for size in divisors(inside) if job.model.num_experts % size == 0]
        told = f"data_parallel_shard x context x tensor = {inside} and num_experts = {job.model.num_experts}"
        return f"expert_parallel_degree = {expert} must divide {told}; legal: {', '.join(map(str, legal))}"
    split = number(config, P + "expert_tensor_parallel_degree")
    if old(config) and expert > 1 and split not in (1, tensor):
        return f"expert_tensor_parallel_degree = {split} must be 1 or tensor_parallel_degree = {tensor}"
    return ""


def old_limits(config: Config, job: Job) -> str:
    """What single models and combinations of 0.2 do not have."""
    if not old(config):
        return ""
    module, written = (str(setting(config.settings, f"model.{key}")) for key in ("name", "flavor"))
    flavor = find_flavor(module, written)
    stages, context = of(config, "pipeline_parallel"), of(config, "context_parallel")
    if flavor and not flavor.old:
        known = ", ".join(row.old for row in FLAVORS if row.module == module and row.old)
        return f"model.flavor = {written}: 0.2 has no flavor {written} of {module}; it has {known}"
    if flavor and stages > 1 and not flavor.old_pipeline:
        return f"pipeline_parallel_degree = {stages}: 0.2 does not cut {module} into stages; it must be 1"
    flexible = module == "llama3" and not written.endswith(("varlen", "varlen_attn"))
    if flavor and context > 1 and not (flavor.old_context and (flexible or "_" not in written)):
        return f"context_parallel_degree = {context}: 0.2 does not split the attention of {module} {written}; it must be 1"
    replicate, shard = of(config, "data_parallel_replicate"), replicas(config, job) // of(config, "data_parallel_replicate")
    if replicate > 1 and shard * context == 1 and replicate != job.num_gpus:
        return f"data_parallel_replicate_degree = {replicate} without sharding must be all {job.num_gpus} GPUs"
    overlap = setting(config.settings, P + "pipeline_parallel_expert_parallel_overlap")
    checkpointed = setting(config.settings, "activation_checkpoint.mode") != "none"
    if stages > 1 and schedule_name(config.settings) == "DualPipeV" and of(config, "expert_parallel") > 1 and overlap and checkpointed:
        return "DualPipeV with expert groups needs activation_checkpoint.mode = none, or pipeline_parallel_expert_parallel_overlap = false"
    return ""


def needs_compile(config: Config, job: Job) -> str:
    """A memory budget and async tensor parallelism need a compiled model."""
    compiled = setting(config.settings, "compile.enable") and "model" in setting(config.settings, "compile.components")
    if compiled:
        return ""
    if setting(config.settings, "activation_checkpoint.mode") == "memory_budget":
        return "activation_checkpoint.mode = memory_budget needs compile.enable with model among compile.components"
    keys = (P + "enable_async_tensor_parallel", "compile.enable_async_tensor_parallel")
    return next((f"{key} needs compile.enable with model among compile.components" for key in keys if setting(config.settings, key)), "")


SETTING_RULES: tuple[SettingRule, ...] = (
    SettingRule("TS1", "the degrees multiply to the number of GPUs", "distributed/parallel_dims.py, _validate", ILLEGAL, product),
    SettingRule("TS2", "degrees and batches are at least 1", "distributed/parallel_dims.py, _validate", ILLEGAL, positive),
    SettingRule("TS3", "every key is known", "config/manager.py", ILLEGAL, known_keys),
    SettingRule(
        "TS4", "the schedule is PyTorch's", "torch/distributed/pipelining/schedules.py, get_schedule_class", ILLEGAL, known_schedule
    ),
    SettingRule("TS5", "the checkpointing mode is known", "distributed/activation_checkpoint.py", ILLEGAL, known_mode),
    SettingRule(
        "TS6", "seq_len divides by tensor x 2 context and has positions", "trainer.py; models/common/decoder.py", ILLEGAL, sequence
    ),
    SettingRule("TS7", "global_batch_size divides by local_batch_size x replicas", "trainer.py", ILLEGAL, accumulation),
    SettingRule("TS8", "local_batch_size divides by the pipeline's micro-batch", "trainer.py, Config", ILLEGAL, micro_batches),
    SettingRule(
        "TS9", "a pass has the micro-batches that its schedule needs", "torch/distributed/pipelining", ILLEGAL, enough_micro_batches
    ),
    SettingRule("TS10", "a pipeline takes the whole batch in one pass", "trainer.py, train_step", TRAP, accumulated_pipeline),
    SettingRule("TS11", "an even split is stated", "distributed/pipeline_parallel.py", TRAP, default_split),
    SettingRule("TS12", "the chunks suit stages and schedule", "distributed/pipeline_parallel.py", ILLEGAL, whole_split),
    SettingRule("TS13", "the lists of modules hold every layer once", "distributed/pipeline_parallel.py, _split_module", TRAP, lost_layers),
    SettingRule("TS14", "CUDA graphs are off with pipelines and expert groups", "trainer.py, _validate_cuda_graphs", ILLEGAL, cuda_graphs),
    SettingRule("TS15", "zero-bubble schedules run uncompiled", "_check_torch_compile_compatibility", ILLEGAL, compiled_split),
    SettingRule("TS16", "sharding of weights in a pipeline is stated", "distributed/fsdp.py", TRAP, gathered_weights),
    SettingRule("TS17", "expert groups lie inside a replica", "distributed/parallel_dims.py, build_mesh", ILLEGAL, expert_groups),
    SettingRule("TS18", "0.2 has the model's combination", "models/MODULE/infra/parallelize.py of 0.2", ILLEGAL, old_limits),
    SettingRule("TS19", "what needs a compiler has one", "trainer.py, Config", ILLEGAL, needs_compile),
)
