"""Published measured runs as jobs and layouts: what each row says, and which training stack of which year ran it."""

from __future__ import annotations

import dataclasses
import math
import re
from collections.abc import Mapping
from dataclasses import dataclass

from planner.catalogue import load
from planner.catalogue.schema import RECOMPUTE_MODULES, Cluster, Gpu, Model, Software
from planner.errors import InputError
from planner.profile import Profile
from planner.scenario import Job, make_job, optimizer_state_bytes
from solver.layout import Layout, fully_recomputed, natural_schedule

Row = Mapping[str, str]


class Unusable(Exception):
    """A row lacks what a prediction needs; the message is the reason that is counted."""


@dataclass(frozen=True)
class Run:
    """One measured run, ready to be predicted."""

    id: str
    family: str
    job: Job
    layout: Layout
    recompute_known: bool
    offloads: bool
    """States or activations are moved to the host: the peak is not the layout's own."""
    step_seconds: float
    """Measured; nan when the source states none."""
    peak_bytes: float
    memory_kind: str
    out_of_memory: bool


def number(row: Row, key: str, default: float | None = None) -> float:
    """A numeric cell, or the default. Raises Unusable when it is empty and there is none."""
    text = row.get(key, "").strip()
    if not text:
        if default is None:
            raise Unusable(f"no {key}")
        return default
    try:
        return float(text)
    except ValueError:
        raise InputError(f"row {row.get('id')}: {key} = {text!r} is not a number") from None


def year_of(row: Row) -> int:
    """The year of a row; 2024 where it states none."""
    return int(number(row, "year", 2024))


def stack_name(row: Row) -> str:
    """The software profile of a row, from the framework that it names, the year and its flags."""
    framework, year = row["framework"].lower(), year_of(row)
    if "megatron-deepspeed" in framework or "dse" in framework:
        return "megatron-deepspeed-2022"
    if "aa-scaling" in framework:
        return "aa-scaling-2023"
    if "torchtitan" in framework or "automodel" in framework:
        return "fsdp2" if row.get("compiled") == "1" else "fsdp2-eager"
    if "foundry" in framework or "fms" in framework:
        return "fsdp1"
    if "torchtune" in framework or "litgpt" in framework:
        return "torchtune"
    if "nanotron" in framework:
        return "nanotron"
    if any(word in framework for word in ("jax", "oneflow")):
        return "jax"
    if "hf trainer" in framework:
        return "deepspeed"
    if any(word in framework for word in ("deepspeed", "lightning", "pytorch", "colossal")):
        return "hf-deepspeed-2021" if year < 2024 else "deepspeed"
    if "zero-bubble" in framework or "sail-sg" in framework or year <= 2022:
        return "megatron-lm-2021" if year <= 2021 else "megatron-lm-2022"
    if "bridge" in framework or "nemo" in framework:
        return "megatron-bridge"
    return "megatron-core"


CHUNKED_LOSS_SINCE = 2026
"""Year from which torchtitan computes the loss in chunks by default."""

OVERLAPPED_TENSOR = 0.34
"""Exposed share of tensor-parallel transfers under user buffers or async tensor parallelism (fitted, x/1.32)."""

OVERLAPPED_EXPERT = 0.34
"""Share of the exposed all-to-all that is left where the recipe overlaps it with the other half of the batch (fitted)."""

COMPILED: dict[str, object] = {
    "compiled": True,
    "fragmentation": 0.10,
    "norm_input_bytes": 8.0,
    "gated_mlp_bytes": 6.0,
    "rotary_copies_bytes": 0.0,
}
"""What a graph compiler changes in an eager stack: fused kernels keep fewer tensors, and memory is planned."""

GRAPHS = {"partial": "partial", "full_iteration": "full", "yes": "full"}


def software(row: Row) -> Software:
    """The row's software profile with the settings that it states itself."""
    base = load.find(Software, stack_name(row))
    changes: dict[str, object] = {**_kernels(row, base), **_overlap(row, base), **_states(row, base)}
    if row.get("compiled") == "1":
        changes.update(COMPILED)
    if row.get("cuda_graphs") in GRAPHS:
        changes["cuda_graphs"] = GRAPHS[row["cuda_graphs"]]
    changes["token_drop"] = bool(re.search(r"token-?drop", f"{row.get('model', '')} {row.get('notes', '')}"))
    modules = tuple(name for name in RECOMPUTE_MODULES if re.search(rf"(?<!\w){name}(?!\w)", row.get("recompute", "")))
    if modules:
        changes["recompute_modules"] = modules
    if "synchronized optimizer" in row.get("schedule", ""):
        changes["post_validation"] = False
    changes["fp8_rowwise"] = row.get("fp8_recipe") == "rowwise"
    return dataclasses.replace(base, **changes)  # type: ignore[arg-type]


def _kernels(row: Row, base: Software) -> dict[str, object]:
    """Attention and norm kernels, as stated or as the year suggests."""
    changes: dict[str, object] = {}
    flash, year = row.get("flash_attention"), year_of(row)
    if row.get("attention_kernel"):
        changes["attention_kernel"] = row["attention_kernel"]
    elif flash == "0" and base.flash_attention:
        changes["attention_kernel"] = "fused_softmax"
    elif flash == "1" and not base.flash_attention:
        changes["attention_kernel"] = "flash2"
    elif not flash and not base.flash_attention and year >= 2023 and base.name != "megatron-lm-2022":
        changes["attention_kernel"] = "flash1"
    if row.get("norm_kernel"):
        changes["eager_norm"] = row["norm_kernel"] == "eager"
        if base.norm_input_bytes > FUSED_NORM_BYTES and row["norm_kernel"] == "fused":
            changes["norm_input_bytes"] = FUSED_NORM_BYTES
    elif base.name == "fsdp1":
        changes["eager_norm"] = row.get("gated_mlp") == "1"
    return changes


FUSED_NORM_BYTES = 10.0
"""Kept per token and channel where a fused kernel replaced the eager norm of a stack."""


def _overlap(row: Row, base: Software) -> dict[str, object]:
    """What the row says of overlap."""
    told = row.get("overlap", "").lower()
    changes: dict[str, object] = {}
    if "tp comm overlap" in told or "async tp" in told or "of tp/ep comm" in told:
        changes.update(tensor_exposed_forward=OVERLAPPED_TENSOR, tensor_exposed_backward=OVERLAPPED_TENSOR)
    if re.match(r"ep .*overlap", told) or "of tp/ep comm" in told:
        changes["expert_exposed"] = OVERLAPPED_EXPERT * base.expert_exposed
    if told.startswith("none"):
        changes["data_overlap"] = False
    elif told.startswith("dp grad"):
        changes["data_overlap"] = True
    if told == "none":
        changes["tensor_exposed_backward"] = base.tensor_exposed_forward
    return changes


def _states(row: Row, base: Software) -> dict[str, object]:
    """Bytes of gradients and optimizer that the row's precision or words imply."""
    changes: dict[str, object] = {}
    if row.get("gradient_bytes"):
        changes["gradient_bytes"] = changes["reduce_bytes"] = number(row, "gradient_bytes")
    notes = row.get("notes", "")
    chunked = "torchtitan" in row["framework"].lower() and year_of(row) >= CHUNKED_LOSS_SINCE
    if "chunked cross entropy" in notes or chunked:
        changes["logit_bytes"] = changes["tensor_logit_bytes"] = 2.0
    if "optimizer in backward" in notes:
        changes["gradient_bytes"] = 0.0
    if "8-bit AdamW" in notes:
        changes["optimizer_bytes"] = optimizer_state_bytes(base.optimizer_bytes, "adam-8bit")
    if base.name == "megatron-deepspeed-2022":
        if row.get("precision") == "bf16":
            changes.update(gradient_bytes=8.0, reduce_bytes=4.0, optimizer_bytes=12.0, moe_optimizer_bytes=12.0)
        if year_of(row) >= 2023:
            changes["tensor_exposed_backward"] = 0.67
    return changes


LATENT = ("q_lora_rank", "kv_lora_rank", "qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim")


def model(row: Row) -> Model:
    """The row's model shape. Raises Unusable when a size is missing."""
    layers, hidden = int(number(row, "num_layers")), int(number(row, "hidden_size"))
    heads = int(number(row, "num_attention_heads"))
    latent = bool(row.get("num_experts")) and not row.get("num_key_value_heads")
    known = _catalogue_twin(layers, hidden, heads, latent)
    gated = row.get("gated_mlp") == "1"
    experts = int(number(row, "num_experts", 0))
    moe_layers = int(number(row, "num_moe_layers", layers)) if experts else 0
    shared = {name: getattr(known, name) for name in (LATENT if known and known.kv_lora_rank else ())}
    if known and known.num_layers == layers and known.gated_mlp == gated:
        shared |= {name: getattr(known, name) for name in ("qk_norm", "norms_per_layer", "sliding_window", "num_window_layers")}
    try:
        return Model(
            name=row.get("model", "") or row["id"],
            num_layers=layers,
            hidden_size=hidden,
            num_attention_heads=heads,
            num_key_value_heads=int(number(row, "num_key_value_heads", 0)),
            head_dim=int(number(row, "head_dim", known.head_dim if known and not known.kv_lora_rank else hidden // heads)),
            ffn_hidden_size=int(number(row, "ffn_hidden_size", 0 if moe_layers == layers else None)),
            gated_mlp=gated,
            vocab_size=int(number(row, "vocab_size", 51200)),
            tied_embeddings=row.get("tied_embeddings") == "1",
            norm="rmsnorm" if gated else "layernorm",
            linear_bias=not gated,
            qkv_bias=not gated,
            dropout=not gated and year_of(row) <= 2023,
            num_experts=experts,
            experts_per_token=int(number(row, "experts_per_token", 0)),
            moe_ffn_hidden_size=int(number(row, "moe_ffn_hidden_size", 0)),
            num_shared_experts=int(number(row, "num_shared_experts", 0)),
            num_dense_layers=layers - moe_layers if experts else 0,
            **shared,
        )
    except InputError as error:
        raise Unusable(f"shape: {error}") from None


def _catalogue_twin(layers: int, hidden: int, heads: int, latent: bool) -> Model | None:
    """A catalogue model of the same depth, width and heads: its head sizes hold for a row that states none.

    A mixture of experts without KV heads (``latent``) has latent attention; there the depth may differ (cut models).
    """
    for known in load.records(Model):
        same = known.hidden_size == hidden and known.num_attention_heads == heads
        if same and bool(known.kv_lora_rank) == latent and (latent or known.num_layers == layers):
            return known
    return None


def gpu(row: Row) -> Gpu:
    """The row's accelerator. Raises Unusable when it names none, or one that is not in the catalogue."""
    text = row.get("gpu", "").lower()
    name = {"a100": "a100-sxm-80gb", "a100-40gb": "a100-sxm-40gb", "h200": "h200-sxm-141gb"}.get(text, text)
    sized = re.fullmatch(r"([a-z0-9]+)-(\d+gb)-sxm", name)
    if sized:
        name = f"{sized[1]}-sxm-{sized[2]}"
    for ending in ("-16gb", "-32gb", "-24gb", "-48gb"):
        if name.endswith(ending) and "sxm" not in name:
            name = name.removesuffix(ending) if "v100" not in name else name.replace(ending, f"-sxm{ending}")
    try:
        return load.find(Gpu, name.replace("rtx4090", "rtx-4090"))
    except InputError:
        raise Unusable(f"gpu '{row.get('gpu')}' is not in the catalogue") from None


def precision(row: Row, card: Gpu) -> str:
    """The stated precision; an MLPerf entry of 2025 that states none runs in the lowest that its card offers."""
    stated = row.get("precision", "")
    if not stated and "mlperf" in row["framework"].lower() and year_of(row) >= 2025:
        return "nvfp4" if card.peak_fp4_flops else "fp8" if card.peak_fp8_flops else ""
    return "fp16" if stated == "bf16" and not card.peak_bf16_flops else stated


def cluster(row: Row, card: Gpu) -> Cluster:
    """The row's wiring: stated values before the card's usual cluster."""
    usual = load.find(Cluster, card.default_cluster)
    domain = usual.gpus_per_node if usual.gpus_per_node > 8 else int(number(row, "gpus_per_node", usual.gpus_per_node))
    nic = number(row, "inter_node_gbit_per_s_per_gpu", 0) * 1e9 / 8
    return dataclasses.replace(usual, name=f"{domain} x {card.name}", gpus_per_node=domain, nic_bytes_per_s=nic or usual.nic_bytes_per_s)


SCHEDULE_NAMES = {
    "zb-1p": "zero_bubble_h1",
    "zb-h1": "zero_bubble_h1",
    "zb": "zero_bubble_h1",
    "zero-bubble": "zero_bubble_h1",
    "zb-2p": "zero_bubble_2p",
    "zb-v": "zero_bubble_v",
    "gpipe": "gpipe",
    "afab": "gpipe",
}


def layout(row: Row, num_layers: int) -> Layout:
    """The row's layout. Raises Unusable for what this vocabulary cannot say."""
    tensor, pipeline = int(number(row, "tensor_parallel")), int(number(row, "pipeline_parallel"))
    gpus, context = int(number(row, "num_gpus")), int(number(row, "context_parallel", 1))
    data = int(number(row, "data_parallel", gpus // max(tensor * pipeline * context, 1)))
    told = row.get("schedule", "").split(" ")[0]
    if told in ("v-half", "v-min"):
        raise Unusable(f"schedule '{told}'")
    virtual = int(number(row, "virtual_pipeline", 1))
    schedule = SCHEDULE_NAMES.get(told, natural_schedule(virtual))
    if schedule == "zero_bubble_v":
        virtual = 2
    plain = Layout(
        tensor_parallel=tensor,
        pipeline_parallel=pipeline,
        virtual_pipeline=virtual,
        context_parallel=context,
        expert_parallel=int(number(row, "expert_parallel", 1)),
        expert_tensor_parallel=int(number(row, "expert_tensor_parallel", 1)),
        data_parallel=data,
        zero_stage=int(number(row, "zero_stage", 1)),
        micro_batch_size=int(number(row, "micro_batch_size")),
        schedule=schedule,
    )
    return recomputed(plain, row.get("recompute", "").lower(), num_layers)


def recomputed(plain: Layout, mode: str, num_layers: int) -> Layout:
    """A layout without recompute under the mode that a row names."""
    whole = fully_recomputed(plain, num_layers)
    if mode.startswith("full"):
        return whole
    if "every" in mode:  # every other block
        return dataclasses.replace(whole, recompute_layers=max(whole.recompute_layers // 2, 1))
    if mode not in ("", "none", "default memory policy"):
        return dataclasses.replace(plain, recompute="selective")
    return plain


NO_OFFLOAD = re.compile(r"offload\w* (false|0 ?%|not used)|offload fraction 0 ?%|offload passes disabled", re.IGNORECASE)


def offloads(row: Row) -> bool:
    """Whether the run moves states or activations to the host."""
    mentioned = bool(row.get("offload")) or "offload" in row.get("recompute", "")
    return mentioned and not NO_OFFLOAD.search(row.get("notes", ""))


UNITS = {"GiB": 2.0**30, "GB (1e9)": 1e9, "GB": 2.0**30, "": 2.0**30}
"""Bytes behind a printed unit: most tools that print GB divide by 2^30."""


def peak_bytes(row: Row) -> float:
    """The printed peak in bytes; Megatron-Bridge's recipes print decimal GB."""
    unit = row.get("memory_unit", "")
    decimal = unit == "GB" and "bridge" in row["framework"].lower()
    return number(row, "peak_memory_gb", math.nan) * (1e9 if decimal else UNITS.get(unit, 2.0**30))


def memory_kind(row: Row) -> str:
    """What the peak counts; Hugging Face users who say nothing print nvidia-smi's figure of a run near its tensors."""
    stated = row.get("memory_kind", "")
    return "need" if stated in ("", "unstated") and "hf trainer" in row["framework"].lower() else stated


def cost_balanced_split(shape: Model, pipeline: int) -> tuple[int, ...]:
    """nanotron's split: on to the next stage when the running cost passes its share, the head counted as V h.

    >>> shape = Model(name="x", num_layers=28, hidden_size=3072, num_attention_heads=24, ffn_hidden_size=8192, vocab_size=131072)
    >>> cost_balanced_split(shape, 2)
    (16, 12)
    """
    h = shape.hidden_size
    layer = 4 * h * shape.num_attention_heads * shape.head_dim + 3 * h * shape.ffn_hidden_size
    share = (shape.num_layers * layer + shape.vocab_size * h) / pipeline
    counts, done = [0] * pipeline, 0.0
    for _ in range(shape.num_layers):
        done += layer
        stage = min(int((done - layer) // share), pipeline - 1)
        counts[stage] += 1
    return tuple(counts)


HYBRID = re.compile(r"mamba|hybrid(?!ep)|nemotron[-_ ]?(h\b|3|v3)", re.IGNORECASE)
"""Models with state-space layers, which this vocabulary of layers cannot say."""


def run_of(row: Row, profile: Profile | None = None) -> Run:
    """A row ready to be predicted, under a profile's constants if one is given. Raises Unusable with the reason."""
    told = f"{row.get('model', '')} {row.get('notes', '')}"
    if HYBRID.search(told):
        raise Unusable("hybrid (state-space) layers")
    if "unpacked" in told:
        raise Unusable("tokens unknown: samples are not packed")
    if row.get("num_experts") and not row.get("expert_parallel"):
        raise Unusable("no expert_parallel")
    shape, card = model(row), gpu(row)
    chosen = layout(row, shape.num_layers)
    stated = row.get("layers_per_stage", "")
    job = make_job(
        profile=profile,
        model=shape,
        gpu=card,
        cluster=cluster(row, card),
        software=software(row),
        num_gpus=int(number(row, "num_gpus")),
        seq_len=int(number(row, "seq_len")),
        global_batch_size=int(number(row, "global_batch_size")),
        precision=precision(row, card),
        sequence_parallel=row.get("sequence_parallel") != "0",
    )
    split = tuple(int(count) for count in stated.split(",")) if stated else ()
    if not split and job.software.name == "nanotron":
        split = cost_balanced_split(shape, chosen.pipeline_parallel)
    job = dataclasses.replace(job, layers_per_stage=split)
    each = chosen.data_parallel * chosen.micro_batch_size
    grid = chosen.tensor_parallel * chosen.context_parallel * chosen.data_parallel
    if job.global_batch_size % each or grid * chosen.pipeline_parallel != job.num_gpus:
        raise Unusable("sizes do not multiply")
    if shape.num_experts and grid % (chosen.expert_parallel * chosen.expert_tensor_parallel):
        raise Unusable("expert grid")
    return Run(
        id=row["id"],
        family=row["family"],
        job=job,
        layout=chosen,
        recompute_known=bool(row.get("recompute")),
        offloads=offloads(row),
        step_seconds=number(row, "step_seconds", math.nan),
        peak_bytes=peak_bytes(row),
        memory_kind=memory_kind(row),
        out_of_memory=row.get("outcome") == "oom",
    )
