"""Rules about Megatron's batches, sequences and groups of ranks, as far as no layout expresses them."""

from __future__ import annotations

from math import prod

from planner.frameworks.config import ILLEGAL, Config, SettingRule
from planner.frameworks.megatron_flags import flag_of
from planner.frameworks.megatron_stages import listing, nearest_number, number
from planner.scenario import Job
from solver.layout import group_suits, micro_batch_group

ARGUMENTS = "megatron/training/arguments.py, validate_args"


def size(config: Config, axis: str) -> int:
    """The value of an axis, 1 where it is not stated."""
    value = config.layout.get(axis, 1)
    return value if isinstance(value, int) else 1


def data_parallel(config: Config, job: Job) -> int:
    """Replicas: what the GPUs leave; 0 where they do not divide."""
    ranks = size(config, "tensor_parallel") * size(config, "pipeline_parallel") * size(config, "context_parallel")
    return job.num_gpus // ranks if job.num_gpus % ranks == 0 else 0


def nearest_multiples(value: int, of: int) -> str:
    """The multiples on both sides.

    >>> nearest_multiples(100, 3), nearest_multiples(1, 4)
    ('99, 102', '4')
    """
    low = value // of * of
    return ", ".join(str(n) for n in (low, low + of) if n > 0)


def whole_batches(config: Config, job: Job) -> str:
    """The global batch, training and evaluation, divides into micro-batches of every replica."""
    data = data_parallel(config, job)
    micro = size(config, "micro_batch_size")
    pairs = [("global_batch_size", job.global_batch_size, micro)]
    pairs.append(
        (
            "eval_global_batch_size",
            number(config.settings, "eval_global_batch_size"),
            number(config.settings, "eval_micro_batch_size", micro),
        )
    )
    for field, batch, each in pairs:
        if data and batch and batch % (each * data):
            return (
                f"{flag_of(field)} = {batch} does not divide by micro-batch {each} x data_parallel {data} = {each * data}; "
                f"nearest: {nearest_multiples(batch, each * data)}"
            )
    return ""


def ramp(config: Config, job: Job) -> str:
    """Every batch of a ramp-up divides, and its steps end at the global batch. Source: core/num_microbatches_calculator.py."""
    stated = config.settings.get("rampup_batch_size")
    if not isinstance(stated, list) or len(stated) != 3 or not all(str(item).isdigit() and len(str(item)) < 16 for item in stated):
        return ""
    start, step = int(stated[0]), int(stated[1])
    each = size(config, "micro_batch_size") * max(data_parallel(config, job), 1)
    for name, value in (("start", start), ("increment", step)):
        if value % each or not value:
            near = nearest_multiples(value, each)
            return f"--rampup-batch-size: {name} = {value} does not divide by micro-batch x data_parallel = {each}; nearest: {near}"
    rest = (job.global_batch_size - start) % step
    return f"--rampup-batch-size: from {start} in steps of {step} the batch {job.global_batch_size} is missed by {rest}" if rest else ""


def group_of_micro_batches(config: Config, job: Job) -> str:
    """Interleaved stages take micro-batches in groups: stages <= group <= micro-batches, the last one whole or filling the stages."""
    stages, data = size(config, "pipeline_parallel"), data_parallel(config, job)
    batches = job.global_batch_size // (data * size(config, "micro_batch_size")) if data else 0
    if size(config, "virtual_pipeline") == 1 or stages == 1 or batches < 1:
        return ""
    field = "microbatch_group_size_per_vp_stage"
    group = number(config.settings, field, stages)
    if group > 0 and group_suits(group, batches, stages):
        return ""
    if batches < stages:
        ways = "use a larger batch, a smaller micro-batch or fewer replicas"
        return f"{batches} micro-batches for {stages} interleaved stages: needs at least {stages}; {ways}"
    legal = [n for n in range(stages, min(batches, 4096) + 1) if group_suits(n, batches, stages)]
    return (
        f"{flag_of(field)} = {group}{'' if field in config.settings else ' (the number of stages)'} with {batches} micro-batches "
        f"on {stages} stages leaves {batches % max(group, 1)}; legal: {listing(legal)}; smallest: {micro_batch_group(batches, stages)}"
    )


def two_stages(config: Config, job: Job) -> str:
    """Interleaving needs a pipeline, of three stages where point-to-point transfers do not overlap."""
    stages, overlap = size(config, "pipeline_parallel"), config.settings.get("overlap_p2p_comm") is not False
    least = 2 if overlap else 3
    if size(config, "virtual_pipeline") == 1 or stages >= least:
        return ""
    more = "" if overlap else f" without {flag_of('overlap_p2p_comm')} 2 stages suffice"
    return f"{size(config, 'virtual_pipeline')} virtual stages with {stages} pipeline stages: needs at least {least};{more}".rstrip(";")


def context_sizes(config: Config, job: Job) -> str:
    """Context groups: their levels multiply to them, and an exchange of heads needs heads and KV heads for every rank."""
    context, settings = size(config, "context_parallel"), config.settings
    levels, kinds = settings.get("hierarchical_context_parallel_sizes"), settings.get("cp_comm_type") or []
    words = kinds if isinstance(kinds, list) else [kinds]
    if isinstance(levels, list) and all(str(item).isdigit() for item in levels):
        whole = prod(int(item) for item in levels[:16])
        if whole != context:
            sizes = " ".join(map(str, levels[:16]))
            return f"--hierarchical-context-parallel-sizes {sizes} multiply to {whole}, context_parallel_size = {context}"
    elif "a2a+p2p" in words:
        example = f"2 {max(context // 2, 1)}"
        return f"--cp-comm-type a2a+p2p needs --hierarchical-context-parallel-sizes whose product is {context}, such as {example}"
    if "a2a" in words and context > 1:
        tensor, model = size(config, "tensor_parallel"), job.model
        for name, heads in (("num_attention_heads", model.num_attention_heads), ("num_query_groups", model.split_key_value_heads)):
            share = max(heads // tensor, 1)
            if share % context:
                legal = [n for n in range(1, share + 1) if share % n == 0]
                per_rank = f"{name} {heads} / tensor {tensor} = {share}"
                return f"--cp-comm-type a2a: {per_rank} does not divide by context_parallel_size = {context}; legal: {listing(legal)}"
    return ""


def positions(config: Config, job: Job) -> str:
    """Positions reach as far as the sequence."""
    stated = number(config.settings, "max_position_embeddings")
    if not stated or stated >= job.seq_len:
        return ""
    return f"{flag_of('max_position_embeddings')} = {stated} is below {flag_of('seq_length')} = {job.seq_len}; legal: {job.seq_len} or more"


def optimizer_instances(config: Config, job: Job) -> str:
    """The distributed optimizer's instances divide the replicas, of the dense layers and of the experts."""
    instances = number(config.settings, "num_distributed_optimizer_instances", 1)
    data = data_parallel(config, job) * size(config, "context_parallel")
    if instances <= 1 or not data:
        return ""
    expert_ranks = size(config, "expert_parallel") * size(config, "expert_tensor_parallel") * size(config, "pipeline_parallel")
    shares = {"data_parallel x context_parallel": data}
    if job.model.num_experts:
        shares["expert data_parallel"] = job.num_gpus // expert_ranks
    for name, ranks in shares.items():
        if ranks % instances:
            legal = [n for n in range(1, ranks + 1) if all(count % n == 0 for count in shares.values())]
            return (
                f"--num-distributed-optimizer-instances = {instances} does not divide {name} = {ranks}; "
                f"legal: {listing(legal)}; nearest: {nearest_number(instances, legal)}"
            )
    return ""


BATCH_RULES: tuple[SettingRule, ...] = (
    SettingRule("M5", "the batch divides by micro-batch x data_parallel", ARGUMENTS, ILLEGAL, whole_batches),
    SettingRule(
        "M6", "a batch ramp-up goes in whole micro-batches of all replicas", "megatron/core/num_microbatches_calculator.py", ILLEGAL, ramp
    ),
    SettingRule(
        "M10", "context levels multiply to context_parallel_size; a2a needs heads for every rank", ARGUMENTS, ILLEGAL, context_sizes
    ),
    SettingRule("M9", "max_position_embeddings reaches as far as the sequence", ARGUMENTS, ILLEGAL, positions),
    SettingRule("M15", "interleaving needs pipeline_parallel > 1, without p2p overlap > 2", ARGUMENTS, ILLEGAL, two_stages),
    SettingRule(
        "M16",
        "interleaved stages take micro-batches in groups that fill the pipeline",
        "megatron/core/pipeline_parallel/schedules.py",
        ILLEGAL,
        group_of_micro_batches,
    ),
    SettingRule(
        "M18",
        "instances of the distributed optimizer divide the replicas",
        "megatron/core/parallel_state.py",
        ILLEGAL,
        optimizer_instances,
    ),
)
