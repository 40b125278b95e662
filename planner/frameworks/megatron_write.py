"""Writes a layout as Megatron-LM's arguments: model, parallel sizes, training, and the environment that they need."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping

from planner.catalogue.schema import Model
from planner.frameworks.launch_script import quoted
from planner.frameworks.megatron import known_modules, moment_bytes, needs_one_connection, needs_precision_aware, pipeline_layout
from planner.frameworks.megatron_flags import EXPERTS, LATENT, LAYOUT, LOW_PRECISION, OPTIMIZERS, SHAPE, flag_of, flags_of_fields
from planner.frameworks.writing import Launch, Target
from planner.scenario import Job
from solver.layout import deepest_chunk, micro_batch_group, num_micro_batches

PROGRAM = "pretrain_gpt.py"
Setting = tuple[str, object]
"""A field of Megatron with its value: True and False for switches, a tuple for several words."""

STRATEGIES = {2: "optim_grads", 3: "optim_grads_params"}
"""ZeRO stage -> --data-parallel-sharding-strategy."""
MOMENTS = {1: "fp8", 2: "bf16", 4: "fp32"}
"""Bytes of a moment -> its type."""
KERNELS = {"flash1": "flash", "flash2": "flash", "fused": "auto", "fused_softmax": "unfused", "torch": "unfused"}
"""Our attention kernel -> --attention-backend; "auto" goes without saying."""
FREE_CONNECTIONS = "8"
"""CUDA's own number of hardware queues."""

VARIABLES: Mapping[str, tuple[str, str]] = {
    "DATA_ARGS": ("data_path", "DATA_PATH:?prefix of the training data"),
    "TOKENIZER_TYPE": ("tokenizer_type", "TOKENIZER_TYPE:?such as HuggingFaceTokenizer"),
    "TOKENIZER_MODEL": ("tokenizer_model", "TOKENIZER_MODEL:?folder or file of the tokenizer"),
    "SAVE": ("save", "CHECKPOINT_DIR:?folder for checkpoints"),
    "LOAD": ("load", "CHECKPOINT_DIR:?folder for checkpoints"),
    "SAVE_INTERVAL": ("save_interval", "SAVE_INTERVAL:?iterations between checkpoints"),
    "LR": ("lr", "LEARNING_RATE:?peak learning rate"),
}
"""What only the person who launches knows: field, and the bash variable that holds it."""


def write(target: Target) -> Launch:
    """The launch of a layout."""
    arguments = {name: lines(settings(target)) for name, settings in ARRAYS.items()}
    notes = unstated(target.job.model)
    files = {"NOTES.txt": "".join(f"{line}\n" for line in (*target.head, *notes))} if notes else {}
    return Launch(
        files=files,
        environment=environment(target),
        arguments={name: rows for name, rows in arguments.items() if rows} | {"RUN_ARGS": (*run_arguments(target), *rotary(target))},
        program=PROGRAM,
    )


def rotary(target: Target) -> tuple[str, ...]:
    """The base of the rotary embedding, which changes no size and so is not known here: Megatron's own 10000 is wrong for many models."""
    base = '--rotary-base "${ROTARY_BASE:?base of the rotary embedding, such as 500000 for Llama 3; its scaling is another flag}"'
    return () if target.job.model.learned_positions else (base,)


def lines(settings: Iterator[Setting]) -> tuple[str, ...]:
    """Flags with their values; a switch in the state that it has without its flag is left out.

    >>> lines(iter([("num_layers", 4), ("swiglu", True), ("add_bias_linear", True), ("overlap_p2p_comm", False)]))
    ('--num-layers 4', '--swiglu', '--no-overlap-p2p-communication')
    """
    found = []
    for field, value in settings:
        flag = flags_of_fields()[field]
        if flag.is_switch:
            if (flag.kind == "on") == bool(value):
                found.append(flag.name)
        else:
            words = value if isinstance(value, tuple) else (value,)
            found.append(" ".join([flag.name, *map(quoted, words)]))
    return tuple(found)


def model_settings(target: Target) -> Iterator[Setting]:
    """The shape of the model."""
    model, job = target.job.model, target.job
    for ours, theirs in SHAPE.items():
        yield theirs, getattr(model, ours) or model.moe_ffn_hidden_size
    yield from latent_settings(model) if model.kv_lora_rank else head_settings(model)
    yield from position_settings(job)
    yield "normalization", "RMSNorm" if model.norm == "rmsnorm" else "LayerNorm"
    yield "swiglu", model.gated_mlp
    biased = model.linear_bias or model.expert_bias
    yield "add_bias_linear", biased
    yield "add_qkv_bias", model.qkv_bias and not biased
    yield "untie_embeddings_and_output_weights", not model.tied_embeddings
    yield "hidden_dropout", 0.1 if job.dropout else 0.0
    yield "attention_dropout", 0.1 if job.dropout else 0.0
    yield "vocab_size", model.vocab_size
    yield "make_vocab_size_divisible_by", job.software.vocab_multiple
    if model.num_experts:
        yield from expert_settings(model)
    if job.num_mtp_layers:
        yield "mtp_num_layers", job.num_mtp_layers


def head_settings(model: Model) -> Iterator[Setting]:
    """Attention heads, and how many share keys and values."""
    if model.head_dim * model.num_attention_heads != model.hidden_size:
        yield "kv_channels", model.head_dim
    if model.num_key_value_heads != model.num_attention_heads:
        yield "group_query_attention", True
        yield "num_query_groups", model.num_key_value_heads
    yield "qk_layernorm", model.qk_norm


def latent_settings(model: Model) -> Iterator[Setting]:
    """Multi-head latent attention; its norms on the compressed queries and keys are Megatron's query and key norms."""
    yield "multi_latent_attention", True
    for ours, theirs in LATENT.items():
        if getattr(model, ours):
            yield theirs, getattr(model, ours)
    if model.hidden_size % model.num_attention_heads:
        yield "kv_channels", model.v_head_dim
    yield "qk_layernorm", True


def position_settings(job: Job) -> Iterator[Setting]:
    """Positions, and the window of attention."""
    model = job.model
    yield "max_position_embeddings", model.learned_positions or max(job.seq_len, model.max_seq_len)
    yield "position_embedding_type", "learned_absolute" if model.learned_positions else "rope"
    if model.sliding_window and model.num_window_layers:
        yield "window_size", f"{model.sliding_window},0"
        if model.num_window_layers < model.num_layers:
            yield "window_attn_skip_freq", window_pattern(model)


def window_pattern(model: Model) -> str:
    """Which layers have windows: every so many where that gives the model's number of them, else the first ones."""
    full = model.num_layers - model.num_window_layers
    every = model.num_layers // full
    if model.num_layers // every == full:
        return str(every)
    return f"([1]*{model.num_window_layers}+[0]*{full})"


def expert_settings(model: Model) -> Iterator[Setting]:
    """Experts; leading layers without them as a pattern."""
    for ours, theirs in EXPERTS.items():
        if getattr(model, ours):
            yield theirs, getattr(model, ours)
    if model.num_dense_layers:
        yield "moe_layer_freq", f"([0]*{model.num_dense_layers}+[1]*{model.num_moe_layers})"
    if model.experts_per_token == 1:
        yield "moe_router_pre_softmax", True
    yield "moe_grouped_gemm", True
    yield "moe_token_dispatcher_type", "alltoall"


def parallel_settings(target: Target) -> Iterator[Setting]:
    """Sizes of the groups, stages, sharding."""
    layout, job = target.layout, target.job
    for axis, field in LAYOUT.items():
        if axis.startswith("expert") and not job.model.num_experts:
            continue
        if axis != "micro_batch_size":
            yield field, getattr(layout, axis)
    yield "sequence_parallel", job.sequence_parallel and layout.tensor_parallel > 1
    yield from stage_settings(target)
    yield from sharding_settings(target)


def stage_settings(target: Target) -> Iterator[Setting]:
    """Chunks of layers: a number of them where all are alike, else the layout string; and the group of micro-batches."""
    layout, job = target.layout, target.job
    if not target.even:
        yield "pipeline_model_parallel_layout", pipeline_layout(target.chunks, job.num_mtp_layers)
    elif layout.virtual_pipeline > 1:
        yield "num_virtual_stages_per_pipeline_rank", layout.virtual_pipeline
    if layout.virtual_pipeline > 1:
        batches = num_micro_batches(layout, job.global_batch_size)
        group = micro_batch_group(batches, layout.pipeline_parallel)
        if group != layout.pipeline_parallel:
            yield "microbatch_group_size_per_vp_stage", group


def sharding_settings(target: Target) -> Iterator[Setting]:
    """What the replicas shard, and whether its transfers overlap with compute."""
    stage, overlap = target.layout.zero_stage, target.job.software.data_overlap
    yield "use_distributed_optimizer", stage >= 1
    if stage >= 2:
        yield "use_megatron_fsdp", True
        yield "data_parallel_sharding_strategy", STRATEGIES[stage]
        yield "ckpt_format", "fsdp_dtensor"
        yield "gradient_accumulation_fusion", False
    yield "overlap_grad_reduce", overlap
    yield "overlap_param_gather", overlap and stage >= 1


def training_settings(target: Target) -> Iterator[Setting]:
    """Batch, precision, optimizer, recompute, attention kernel."""
    job, layout = target.job, target.layout
    yield "seq_length", job.seq_len
    yield "micro_batch_size", layout.micro_batch_size
    yield "global_batch_size", job.global_batch_size
    yield from precision_settings(job)
    yield from optimizer_settings(job)
    yield from recompute_settings(target)
    kernel = KERNELS[job.software.attention_kernel]
    if kernel != "auto":
        yield "attention_backend", kernel
    yield "masked_softmax_fusion", job.software.attention_kernel != "torch"
    yield "create_attention_mask_in_dataloader", kernel == "unfused"
    graphs = {"partial": "transformer_engine", "full": "full_iteration"}.get(job.software.cuda_graphs)
    if graphs:
        yield "cuda_graph_impl", graphs
        if graphs == "full_iteration":
            yield "check_for_nan_in_loss_and_grad", False


def precision_settings(job: Job) -> Iterator[Setting]:
    """The formats of products, weights and gradients; bf16 accumulates its gradients in fp32 unless it is told not to."""
    half = job.precision == "fp16"
    yield ("fp16" if half else "bf16"), True
    yield from LOW_PRECISION.get(job.precision, ())
    lean = job.software.gradient_bytes < 4
    yield "accumulate_allreduce_grads_in_fp32", half and not lean
    yield "grad_reduce_in_bf16", lean and not half
    if job.low_precision and job.model.num_experts:
        yield "moe_router_padding_for_quantization", True


def optimizer_settings(job: Job) -> Iterator[Setting]:
    """The optimizer, and its moments where they have fewer than four bytes."""
    yield "optimizer", OPTIMIZERS.get(job.optimizer, "adam")
    if needs_precision_aware(job) and OPTIMIZERS.get(job.optimizer, "adam") == "adam":
        size = 1 if job.optimizer == "adam-8bit" else round(moment_bytes(job))
        yield "use_precision_aware_optimizer", True
        yield "exp_avg_dtype", MOMENTS.get(size, "bf16")
        yield "exp_avg_sq_dtype", MOMENTS.get(size, "bf16")


def recompute_settings(target: Target) -> Iterator[Setting]:
    """Recompute: modules by name, or layers, all of them or the first ones of each chunk."""
    layout, job = target.layout, target.job
    if layout.recompute == "none":
        return
    yield "recompute_granularity", layout.recompute
    if layout.recompute == "selective":
        yield "recompute_modules", known_modules(job)
        return
    whole = layout.recompute_layers >= max(max(target.chunks), deepest_chunk(layout, job.model.num_layers))
    yield "recompute_method", "uniform" if whole else "block"
    yield "recompute_num_layers", 1 if whole else layout.recompute_layers


ARRAYS: Mapping[str, Callable[[Target], Iterator[Setting]]] = {
    "MODEL_ARGS": model_settings,
    "PARALLEL_ARGS": parallel_settings,
    "TRAINING_ARGS": training_settings,
}


def run_arguments(target: Target) -> Iterator[str]:
    """Data, tokenizer, checkpoints, learning rate and length of the run: variables that the script demands."""
    for field, variable in VARIABLES.values():
        yield f'{flag_of(field)} "${{{variable}}}"'
    tokens = target.scenario.training_tokens
    if tokens:
        yield f"{flag_of('train_samples')} {round(tokens / target.job.seq_len)}"
    else:
        yield f'{flag_of("train_iters")} "${{TRAIN_ITERS:?steps of the run}}"'


def environment(target: Target) -> dict[str, str]:
    """Variables that must be set. Source: megatron/training/arguments.py, checks of CUDA_DEVICE_MAX_CONNECTIONS."""
    layout = target.layout
    if layout.zero_stage >= 2:
        return {"CUDA_DEVICE_MAX_CONNECTIONS": f"{FREE_CONNECTIONS} # Megatron-FSDP overlaps its transfers: it refuses 1"}
    if needs_one_connection(target.job) and (layout.tensor_parallel > 1 or layout.context_parallel > 1):
        return {"CUDA_DEVICE_MAX_CONNECTIONS": "1 # tensor and context groups before Blackwell order their kernels by it"}
    return {}


def unstated(model: Model) -> list[str]:
    """What the model has and no flag of Megatron's says, one line each."""
    gate = "the gate's activation is SiLU under --swiglu"
    found = {
        f"{model.norms_per_layer} norms per layer: Megatron's layer has 2": model.norms_per_layer != 2,
        "a norm behind the embedding": model.embedding_norm,
        "biases of the output projections without those of queries, keys and values": model.linear_bias and not model.qkv_bias,
        "biases of experts and router apart from each other": model.expert_bias != model.router_bias,
        f"gemma's GeLU gate: {gate}": model.gated_mlp and model.name.startswith("gemma"),
    }
    return [f"Not stated by any flag: {text}." for text, holds in found.items() if holds]
