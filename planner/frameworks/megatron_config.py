"""From Megatron's settings, whatever file stated them, to the planner's words: workload, layout, stages and stack."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from planner.catalogue import load
from planner.catalogue.schema import RECOMPUTE_MODULES, Model, Software
from planner.frameworks.config import Config
from planner.frameworks.files import Source, listed, shown
from planner.frameworks.megatron_flags import DEFAULT_DROPOUT, LAYOUT, OPTIMIZERS, flag_of, unresolved
from planner.frameworks.megatron_shape import Facts, model_of, vocabulary_multiple
from planner.frameworks.megatron_stages import differs_from_even, per_stage, split_of
from planner.request import Request
from solver.layout import chunk_sizes, natural_schedule

STACKS = {"megatron": "megatron-core", "megatron-bridge": "megatron-bridge"}
"""Framework -> the catalogue's stack, from which a file's switches differ."""
DTYPE_BYTES = {"fp32": 4, "float32": 4, "bf16": 2, "bfloat16": 2, "fp16": 2, "float16": 2, "fp8": 1, "uint8": 1}
SHARDED = {"no_shard": 0, "optim": 1, "optim_grads": 2, "optim_grads_params": 3}
"""--data-parallel-sharding-strategy -> our ZeRO stage."""
NOT_MODELLED = {
    "overlap_moe_expert_parallel_comm": "hides the expert all-to-all behind another micro-batch",
    "tp_comm_overlap": "overlaps tensor transfers with products through user buffers",
    "cpu_offloading": "activations go to the host",
    "fine_grained_activation_offloading": "activations go to the host",
    "optimizer_cpu_offload": "optimizer states go to the host",
    "fp8_param_gather": "weights are kept and gathered in 8 bits",
    "defer_embedding_wgrad_compute": "moves the embedding's weight gradient to the pipeline's end",
    "distribute_saved_activations": "saved activations are split over the tensor group",
    "delay_wgrad_compute": "moves weight gradients",
    "mtp_standalone": "multi-token prediction has a stage of its own",
    "tensor_parallel_num_weight_shards": "weights are sharded beyond the tensor group",
    "hybrid_context_parallel": "sequences of unlike length share context ranks",
}
"""Settings that change time or memory and that no formula here holds, with what they do."""


def config_of(source: Source, kind: str, settings: Mapping[str, Any], num_gpus: int | None = None, framework: str = "megatron") -> Config:
    """What Megatron's settings say, in the planner's words. Raises InputError for a value that makes no sense."""
    facts = Facts(source, settings)
    model = model_of(facts, groups_need_flag=framework != "megatron-bridge")
    layout, layers_per_stage = _layout(facts, model)
    request = _request(facts, model, layout, num_gpus, framework)
    software = _software(facts, model, framework)
    if facts.value("rampup_batch_size") is not None:
        facts.assume("the batch size ramps up: judged at its final size")
    not_modelled = [f"{flag_of(key)}: {text}; not modelled" for key, text in NOT_MODELLED.items() if _is_set(settings.get(key))]
    left = sorted(key for key in settings if key not in facts.used and key not in NOT_MODELLED and not key.isupper())
    names = listed([key if key.startswith("--") else flag_of(key) for key in left])
    return Config(
        path=source.path,
        kind=kind,
        framework=framework,
        model=model,
        request=request,
        layout=layout,
        layers_per_stage=layers_per_stage,
        software=software,
        settings=dict(settings),
        read=(*facts.read, *(f"{_name(key)} {_text(settings[key])}".strip() for key in settings if key in facts.used)),
        assumed=tuple(facts.assumed),
        ignored=(*not_modelled, *([names] if left else [])),
    )


OF_THE_LAUNCHER = {"world_size": "GPUs:", "gpus_per_node": "GPUs per node:"}


def _name(key: str) -> str:
    return OF_THE_LAUNCHER.get(key) or flag_of(key)


def _text(value: Any) -> str:
    if value is True:
        return ""
    if isinstance(value, list):
        return " ".join(" ".join(str(item) for item in value[:8] if not isinstance(item, (list, dict))).split())[:80]
    return "off" if value is False else " ".join(str(value).split())[:80]


def _is_set(value: Any) -> bool:
    return value not in (None, False, 0, [], "")


def _layout(facts: Facts, model: Model | None) -> tuple[dict[str, int | str], tuple[int, ...]]:
    """The axes, and the layers of each stage where they are not the even ones."""
    found: dict[str, int | str] = {}
    for axis, key in LAYOUT.items():
        if axis != "expert_tensor_parallel" and (axis != "micro_batch_size" or facts.settings.get(key) is not None):
            found[axis] = facts.whole(key, 1, least=1)
    if model and model.num_experts:
        found["expert_tensor_parallel"] = facts.whole(LAYOUT["expert_tensor_parallel"], int(found["tensor_parallel"]), least=1)
        if facts.settings.get(LAYOUT["expert_tensor_parallel"]) is None:
            size = found["tensor_parallel"]
            flag = flag_of("expert_tensor_parallel_size")
            facts.assume(f"{flag} is not stated: expert_tensor_parallel = {size}, that of the tensor group")
    elif model:
        facts.used.add(LAYOUT["expert_tensor_parallel"])
        found["expert_tensor_parallel"] = 1
    split = split_of({**facts.settings, **({"num_layers": model.num_layers} if model else {})})
    facts.used |= {
        *("num_layers_per_virtual_pipeline_stage", "num_virtual_stages_per_pipeline_rank", "pipeline_model_parallel_layout"),
        *("decoder_first_pipeline_num_layers", "decoder_last_pipeline_num_layers", "virtual_pipeline_model_parallel_size"),
        *("account_for_embedding_in_pipeline_split", "account_for_loss_in_pipeline_split", "microbatch_group_size_per_vp_stage"),
    }
    pipeline = int(found["pipeline_parallel"])
    layers = model.num_layers if model else 0
    if layers and pipeline * split.virtual > layers:
        raise facts.source.fail(f"{pipeline} pipeline stages of {split.virtual} chunks are more than num_layers = {layers} can fill")
    found["virtual_pipeline"] = split.virtual
    found["schedule"] = natural_schedule(split.virtual)
    found["zero_stage"] = zero_stage(facts)
    chunks = split.chunks or (chunk_sizes(model.num_layers, pipeline * split.virtual) if model else ())
    found |= _recompute(facts, max(chunks, default=0))
    uneven = split.chunks and pipeline > 1 and differs_from_even(split.chunks, pipeline)
    return found, per_stage(split.chunks, pipeline) if uneven else ()


def zero_stage(facts: Facts) -> int:
    """What the copies shard. Raises InputError."""
    if facts.on("use_torch_fsdp2"):
        return 3 if facts.on("torch_fsdp2_reshard_after_forward", True) else 2
    if facts.on("use_megatron_fsdp") or facts.on("use_custom_fsdp"):
        facts.used |= {"use_distributed_optimizer", "ckpt_format"}
        strategy = facts.word("data_parallel_sharding_strategy", "optim_grads_params")
        if strategy not in SHARDED:
            raise facts.source.fail(f"data_parallel_sharding_strategy = {shown(strategy)} must be one of {', '.join(SHARDED)}")
        return SHARDED[strategy]
    return int(facts.on("use_distributed_optimizer"))


def _recompute(facts: Facts, deepest: int) -> dict[str, int | str]:
    """The recompute axis: --recompute-activations is selective, "block" counts layers per chunk, "uniform" covers all of them."""
    word = facts.word("recompute_granularity")
    if facts.on("recompute_activations") or facts.on("moe_layer_recompute"):
        word = "selective"
    method, layers = facts.word("recompute_method"), facts.whole("recompute_num_layers")
    if word != "full":
        return {"recompute": "selective" if word == "selective" else "none"}
    if method == "block" and layers < deepest:
        return {"recompute": "full", "recompute_layers": layers}
    if method == "uniform" and layers > 1:
        facts.assume(
            f"{flag_of('recompute_num_layers')} {layers} with uniform: taken as every layer's input kept; {layers} keep one in {layers}"
        )
    return {"recompute": "full"}


def _request(facts: Facts, model: Model | None, layout: Mapping[str, int | str], num_gpus: int | None, framework: str) -> Request:
    """Model, cluster and workload as far as they are stated."""
    stated_gpus = facts.whole("world_size") or None
    gpus = num_gpus or stated_gpus
    seq_len = facts.whole("seq_length") or facts.whole("encoder_seq_length") or None
    batch = _batch(facts, layout, gpus)
    mtp = model is not None and model.num_mtp_layers > 0
    return Request(
        model=str(facts.source.path) if model else facts.word("model_name") or None,
        num_gpus=stated_gpus,
        gpus_per_node=facts.whole("gpus_per_node") or None,
        seq_len=seq_len,
        global_batch_size=batch,
        precision=_precision(facts),
        optimizer=_optimizer(facts),
        sequence_parallel=facts.on("sequence_parallel") if layout["tensor_parallel"] != 1 else None,
        dropout=_dropout(facts) if model else None,
        multi_token_prediction=True if mtp else None,
        training_tokens=_tokens(facts, seq_len, batch),
        framework=framework,
    )


def _batch(facts: Facts, layout: Mapping[str, int | str], gpus: int | None) -> int | None:
    """The global batch: stated, else one micro-batch per replica."""
    stated = facts.whole("global_batch_size") or None
    micro = layout.get("micro_batch_size")
    if stated or not isinstance(micro, int):
        return stated
    ranks = int(layout["tensor_parallel"]) * int(layout["pipeline_parallel"]) * int(layout["context_parallel"])
    if gpus and gpus % ranks == 0:
        facts.assume(f"{flag_of('global_batch_size')} is not stated: one micro-batch per replica, {micro * (gpus // ranks)}")
        return micro * (gpus // ranks)
    return None


def _precision(facts: Facts) -> str | None:
    """The workload's precision. Raises InputError."""
    half, brain = facts.on("fp16"), facts.on("bf16")
    if facts.word("fp4"):
        facts.used.add("fp4_recipe")
        return "nvfp4"
    if facts.word("fp8"):
        return "mxfp8" if facts.word("fp8_recipe", "delayed") == "mxfp8" else "fp8"
    facts.used |= {"fp8_recipe"} & set(facts.settings)
    if half or brain:
        return "fp16" if half and not brain else "bf16"
    return None


def _optimizer(facts: Facts) -> str | None:
    """Our name of the optimizer, None where it is not stated."""
    word = facts.word("optimizer")
    facts.used |= {"exp_avg_dtype", "exp_avg_sq_dtype", "use_precision_aware_optimizer"} & set(facts.settings)
    ours = {theirs: name for name, theirs in OPTIMIZERS.items()} | {"dist_muon": "muon", "adaptive_muon": "muon"}
    if word and word not in ours:
        facts.assume(f"optimizer {word}: its states are taken as Adam's")
    if ours.get(word, "adam") == "adam" and _moment_bytes(facts) == (1, 1):
        return "adam-8bit"
    return ours.get(word, "adam") if word else None


def _moment_bytes(facts: Facts) -> tuple[int, int]:
    if not facts.on("use_precision_aware_optimizer"):
        return 4, 4
    words = [facts.word(key, "fp32").removeprefix("torch.") for key in ("exp_avg_dtype", "exp_avg_sq_dtype")]
    return DTYPE_BYTES.get(words[0], 4), DTYPE_BYTES.get(words[1], 4)


def _dropout(facts: Facts) -> bool:
    hidden, attention = (facts.share(key, DEFAULT_DROPOUT) for key in ("hidden_dropout", "attention_dropout"))
    return hidden > 0 or attention > 0


def _tokens(facts: Facts, seq_len: int | None, batch: int | None) -> float | None:
    """Tokens of the whole run, where samples or iterations are stated."""
    for key in ("train_samples", "train_iters"):
        if unresolved(facts.settings.get(key)):
            return None
    samples = facts.whole("train_samples") or facts.whole("train_iters") * (batch or 0)
    return float(samples * seq_len) if samples and seq_len else None


def _software(facts: Facts, model: Model | None, framework: str) -> dict[str, Any]:
    """Fields of the stack that the switches set otherwise than the catalogue's stack of this framework."""
    found: dict[str, Any] = {"data_overlap": facts.on("overlap_grad_reduce")}
    facts.used |= {"overlap_param_gather"} & set(facts.settings)
    found["vocab_multiple"] = vocabulary_multiple(facts)
    kernel = _attention_kernel(facts)
    if kernel:
        found["attention_kernel"] = kernel
    found |= _states(facts, bool(model and model.num_experts))
    modules = _modules(facts)
    if modules:
        found["recompute_modules"] = modules
    graphs = facts.word("cuda_graph_impl", "none")
    found["cuda_graphs"] = {"none": "none", "full_iteration": "full"}.get(graphs, "partial")
    if facts.on("enable_cuda_graph") or facts.on("external_cuda_graph"):
        found["cuda_graphs"] = "partial"
    if model and model.num_experts:
        found["token_drop"] = facts.share("moe_expert_capacity_factor", 0.0) > 0
    stack = load.find(Software, STACKS[framework])
    return {key: value for key, value in found.items() if getattr(stack, key) != value}


def _attention_kernel(facts: Facts) -> str:
    """The attention kernel that the settings choose, "" where the stack's own runs."""
    backend = facts.word("attention_backend", "auto").rsplit(".", 1)[-1]
    local = facts.word("transformer_impl", "transformer_engine") == "local"
    flash = facts.on("use_flash_attn")
    if backend in ("unfused", "local") or (local and not flash and backend != "flash"):
        return "fused_softmax" if facts.on("masked_softmax_fusion", True) else "torch"
    return "flash2" if backend == "flash" or (local and flash) else ""


def _states(facts: Facts, experts: bool) -> dict[str, float]:
    """Bytes of gradients and optimizer states. bf16 accumulates and reduces gradients in fp32 unless --grad-reduce-in-bf16."""
    half = facts.on("fp16") and not facts.on("accumulate_allreduce_grads_in_fp32")
    lean = half or facts.on("grad_reduce_in_bf16") or DTYPE_BYTES.get(facts.word("main_grads_dtype", "fp32").removeprefix("torch."), 4) == 2
    gradient = 2.0 if lean else 4.0
    found: dict[str, float] = {"gradient_bytes": gradient, "reduce_bytes": gradient}
    first, second = _moment_bytes(facts)
    if (first, second) != (1, 1):  # 8-bit moments are an optimizer of their own
        master = DTYPE_BYTES.get(facts.word("main_params_dtype", "fp32").removeprefix("torch."), 4)
        found["moe_optimizer_bytes" if experts else "optimizer_bytes"] = float(master + first + second)
    return found


def _modules(facts: Facts) -> tuple[str, ...]:
    """Modules of a selective recompute that the planner knows."""
    listed = facts.value("recompute_modules")
    words = listed if isinstance(listed, list) else str(listed or "").replace(",", " ").split()
    if not words:
        return ()
    strange = [word for word in words if word not in RECOMPUTE_MODULES]
    if strange:
        facts.assume(f"recompute module {shown(strange[0])} is not known here: left out")
    return tuple(word for word in words if word in RECOMPUTE_MODULES)
