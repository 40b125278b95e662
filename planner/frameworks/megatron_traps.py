"""What Megatron runs without a word and does otherwise than was meant, and flags that it does not know."""

from __future__ import annotations

import difflib

from planner.frameworks.config import ILLEGAL, TRAP, Config, SettingRule
from planner.frameworks.megatron import needs_one_connection
from planner.frameworks.megatron_batches import ARGUMENTS, size
from planner.frameworks.megatron_combinations import CONFIG, on
from planner.frameworks.megatron_flags import VERSION, flag_of, flags
from planner.frameworks.megatron_stages import listing, number, split_of
from planner.scenario import Job
from planner.units import GIB

LONG = 32768
"""From this sequence length on a mask per sequence is gigabytes."""
UNFUSED = ("fused_softmax", "torch")
CLOSE = 0.85
"""Likeness from which an unknown flag is a slip of the keyboard."""


def lost_groups(config: Config, job: Job) -> str:
    """KV groups count only beside the flag that turns grouped queries on."""
    groups, heads = number(config.settings, "num_query_groups"), number(config.settings, "num_attention_heads")
    if config.framework != "megatron" or groups <= 1 or groups == heads or on(config.settings, "group_query_attention"):
        return ""
    return (
        f"{flag_of('num_query_groups')} {groups} without {flag_of('group_query_attention')} is ignored: the model trains with "
        f"{heads} KV heads (multi-head attention); add {flag_of('group_query_attention')}"
    )


def whole_sequences(config: Config, job: Job) -> str:
    """Tensor groups without sequence parallelism keep norms and residuals whole on every rank."""
    tensor = size(config, "tensor_parallel")
    if tensor == 1 or config.framework not in ("megatron", "megatron-bridge") or on(config.settings, "sequence_parallel"):
        return ""
    whole, split = 10 + 24 / tensor, 34 / tensor
    return (
        f"tensor_model_parallel_size = {tensor} without {flag_of('sequence_parallel')}: activations per layer are about "
        f"{whole:.1f} instead of {split:.1f} x tokens x hidden bytes, {whole / split:.1f} times as many; add it"
    )


def inherited_split(config: Config, job: Job) -> str:
    """Experts inherit the tensor group's size unless theirs is stated."""
    expert, tensor = size(config, "expert_parallel"), size(config, "tensor_parallel")
    if not job.model.num_experts or tensor == 1 or config.settings.get("expert_tensor_parallel_size") is not None:
        return ""
    stages = size(config, "pipeline_parallel")
    grid = expert * tensor * stages
    fails = f"; {job.num_gpus} GPUs do not divide by {expert} x {tensor} x {stages} = {grid}" if job.num_gpus % grid else ""
    return (
        f"{flag_of('expert_tensor_parallel_size')} is not stated: experts are split {tensor} ways like the dense layers"
        f"{fails}; state 1 to keep them whole, {tensor} to split them"
    )


def dense_mask(config: Config, job: Job) -> str:
    """The data loader makes a mask of sequence x sequence bytes unless it is told not to."""
    if job.seq_len < LONG or config.framework != "megatron" or config.settings.get("create_attention_mask_in_dataloader") is False:
        return ""
    micro = size(config, "micro_batch_size")
    return (
        f"a mask of {job.seq_len} x {job.seq_len} bytes per sequence is made and sent, {job.seq_len**2 * micro / GIB:.1f} GiB per "
        f"micro-batch, and fused attention does not read it; add {flag_of('create_attention_mask_in_dataloader')}"
    )


def idle_recompute(config: Config, job: Job) -> str:
    """Fused attention recomputes its scores anyway."""
    modules = config.software.get("recompute_modules", ("core_attn",))
    plain = config.software.get("attention_kernel") in UNFUSED
    if config.layout.get("recompute") != "selective" or plain or "core_attn" not in modules:
        return ""
    return (
        "selective recompute of core_attn saves nothing under fused or flash attention, which keeps no scores, and runs it twice; "
        "name other modules (--recompute-modules mlp, layernorm, moe_act ...) or leave it out"
    )


def connections(config: Config, job: Job) -> str:
    """Tensor and context groups before Blackwell need one hardware queue."""
    stated = config.settings.get("CUDA_DEVICE_MAX_CONNECTIONS")
    groups = size(config, "tensor_parallel") > 1 or size(config, "context_parallel") > 1
    free = on(config.settings, "use_megatron_fsdp") or on(config.settings, "use_torch_fsdp2")
    free = free or on(config.settings, "overlap_moe_expert_parallel_comm")
    if stated is None or stated == "1" or not groups or free or not needs_one_connection(job):
        return ""
    return (
        f"CUDA_DEVICE_MAX_CONNECTIONS is {stated or 'not set'}: tensor or context groups on {job.gpu.name} need 1; export it in the script"
    )


def shared_connections(config: Config, job: Job) -> str:
    """FSDP and tensor groups want opposite numbers of hardware queues."""
    groups = size(config, "tensor_parallel") > 1 or size(config, "context_parallel") > 1
    if size(config, "zero_stage") < 2 or not groups or not needs_one_connection(job):
        return ""
    return (
        "FSDP with tensor or context groups before Blackwell: FSDP refuses CUDA_DEVICE_MAX_CONNECTIONS = 1, which those groups "
        "need to overlap; expect their transfers to be exposed, or use the distributed optimizer (zero_stage 1)"
    )


def separate_accumulation(config: Config, job: Job) -> str:
    """Gradients are added by kernels of their own where the fusion is off."""
    sharded = size(config, "zero_stage") >= 2
    if config.settings.get("gradient_accumulation_fusion") is not False or sharded:
        return ""
    cost = "every weight gradient is written, read and added separately"
    return f"{flag_of('gradient_accumulation_fusion')}: {cost}; leave it out where APEX or Transformer Engine is there"


def unpadded_experts(config: Config, job: Job) -> str:
    """Products in 8 bits want the tokens of each expert in multiples of 16 or 32."""
    padded = on(config.settings, "moe_router_padding_for_quantization") or on(config.settings, "moe_router_padding_for_fp8")
    if not job.low_precision or not job.model.num_experts or padded:
        return ""
    multiple = 16 if job.precision == "fp8" else 32
    return (
        f"{job.precision} with experts: tokens per expert come in any number, and its products need multiples of {multiple}; "
        f"add {flag_of('moe_router_padding_for_quantization')}, else each expert's tokens are padded by copies"
    )


def full_precision(config: Config, job: Job) -> str:
    """Without a 16-bit format Megatron trains in fp32."""
    words = ("bf16", "fp16")
    if config.framework != "megatron" or any(on(config.settings, word) for word in words) or not config.settings:
        return ""
    return "neither --bf16 nor --fp16 is stated: Megatron trains in fp32, with twice the memory and a fraction of the speed; add --bf16"


def too_many_layers(config: Config, job: Job) -> str:
    """Recompute of more layers than a chunk has is silently all of them."""
    layers = number(config.settings, "recompute_num_layers")
    split = split_of({**config.settings, "num_layers": job.model.num_layers})
    deepest = max(split.chunks, default=0)
    if config.layout.get("recompute") != "full" or not deepest or layers <= deepest:
        return ""
    return f"--recompute-num-layers = {layers} is above the {deepest} layers of a chunk: taken as {deepest}; legal: 1 to {deepest}"


def plain_attention(config: Config, job: Job) -> str:
    """Attention that is no flash kernel keeps the scores."""
    if config.software.get("attention_kernel") not in UNFUSED:
        return ""
    heads, tensor = job.model.num_attention_heads, size(config, "tensor_parallel")
    share = job.seq_len // size(config, "context_parallel")
    kept = 5 * heads / tensor * share * job.seq_len * size(config, "micro_batch_size") / GIB
    return (
        f"attention without a fused kernel keeps its scores: about {kept:.1f} GiB per layer and micro-batch; use --transformer-impl "
        "transformer_engine with --attention-backend auto, or --use-flash-attn"
    )


def unknown(config: Config) -> list[str]:
    """Flags that the parser does not know."""
    return [key for key in config.settings if key.startswith("--")]


def nearest_flag(name: str) -> str:
    """The parser's flag that an unknown one is a slip of, "" where none is near.

    >>> nearest_flag("--tensor-model-paralel-size"), nearest_flag("--my-own-flag")
    ('--tensor-model-parallel-size', '')
    """
    close = difflib.get_close_matches(name[:80], flags(), n=1, cutoff=CLOSE)
    return close[0] if close else ""


def misspelt(config: Config, job: Job) -> str:
    """A flag that is nearly one of the parser's."""
    if config.framework != "megatron":
        return ""
    found = [(name, nearest_flag(name)) for name in unknown(config)[:40]]
    texts = [f"{name[:60]}: did you mean {near}?" for name, near in found if near]
    return f"no flag of Megatron-LM {VERSION}: {'; '.join(texts[:5])}" if texts else ""


def foreign(config: Config, job: Job) -> str:
    """A flag that is none of the parser's: the program must add it."""
    names = [name[:60] for name in unknown(config)[:40] if not nearest_flag(name)]
    if config.framework != "megatron" or not names:
        return ""
    more = f" and {len(names) - 8} more" if len(names) > 8 else ""
    return f"no flags of Megatron-LM {VERSION}: {', '.join(names[:8])}{more}; its parser refuses them unless the program adds them"


def padded_vocabulary(config: Config, job: Job) -> str:
    """The vocabulary grows to a multiple of its padding times the tensor group."""
    multiple = number(config.settings, "make_vocab_size_divisible_by", 128) * size(config, "tensor_parallel")
    padded = -(-job.model.vocab_size // max(multiple, 1)) * max(multiple, 1)
    if multiple < 1 or padded <= job.model.vocab_size * 1.05:
        return ""
    legal = [n for n in (1, 8, 64, 128) if n < number(config.settings, "make_vocab_size_divisible_by", 128)]
    return (
        f"the vocabulary {job.model.vocab_size} is padded to {padded}, a multiple of {multiple}; "
        f"--make-vocab-size-divisible-by {listing(legal)} pads less"
    )


TRAP_RULES: tuple[SettingRule, ...] = (
    SettingRule("M33", "grouped queries need their switch beside the number of groups", "training/argument_utils.py", TRAP, lost_groups),
    SettingRule("M34", "tensor groups want sequence parallelism", ARGUMENTS, TRAP, whole_sequences),
    SettingRule("M35", "the experts' tensor split is that of the dense layers unless stated", ARGUMENTS, TRAP, inherited_split),
    SettingRule("M36", "long sequences want no mask from the data loader", "megatron/training/datasets", TRAP, dense_mask),
    SettingRule("M37", "recompute of fused attention saves nothing", CONFIG, TRAP, idle_recompute),
    SettingRule("M32", "tensor and context groups before Blackwell need CUDA_DEVICE_MAX_CONNECTIONS = 1", ARGUMENTS, ILLEGAL, connections),
    SettingRule("M38", "FSDP and tensor groups want opposite CUDA_DEVICE_MAX_CONNECTIONS", ARGUMENTS, TRAP, shared_connections),
    SettingRule("M39", "gradient accumulation is fused", "megatron/core/tensor_parallel/layers.py", TRAP, separate_accumulation),
    SettingRule("M43", "8-bit experts want padded token counts", "megatron/core/transformer/moe", TRAP, unpadded_experts),
    SettingRule("M42", "training runs in a 16-bit format", ARGUMENTS, TRAP, full_precision),
    SettingRule("M41", "recompute covers at most the layers of a chunk", "core/transformer/transformer_block.py", TRAP, too_many_layers),
    SettingRule("M49", "attention runs a fused kernel", "megatron/core/transformer/attention.py", TRAP, plain_attention),
    SettingRule("M8", "the vocabulary's padding is small", "core/tokenizers/utils/build_tokenizer.py", TRAP, padded_vocabulary),
    SettingRule("M40", "no flag is a slip of another", ARGUMENTS, ILLEGAL, misspelt),
    SettingRule("M44", "every flag is the parser's", ARGUMENTS, TRAP, foreign),
)
