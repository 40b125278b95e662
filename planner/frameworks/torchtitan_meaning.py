"""What torchtitan's settings mean in the planner's words: layout, workload, stack, and the split of layers."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from planner.catalogue.schema import Model
from planner.frameworks.config import Config
from planner.frameworks.files import Source, shown
from planner.frameworks.torchtitan_keys import MODULE_LISTS, NEW_KIND, has_key, setting
from planner.frameworks.torchtitan_stages import MULTI, SCHEDULE_NAMES, SINGLE, stage_layers
from planner.request import Request
from solver.layout import chunk_sizes

P = "parallelism."
USED = {
    "parallelism.data_parallel_replicate_degree": "data_parallel",
    "parallelism.data_parallel_shard_degree": "data_parallel",
    "parallelism.fsdp_reshard_after_forward": "zero_stage",
    "parallelism.tensor_parallel_degree": "tensor_parallel",
    "parallelism.enable_sequence_parallel": "sequence_parallel",
    "parallelism.context_parallel_degree": "context_parallel",
    "parallelism.expert_parallel_degree": "expert_parallel",
    "parallelism.expert_tensor_parallel_degree": "expert_tensor_parallel",
    "parallelism.pipeline_parallel_degree": "pipeline_parallel",
    "parallelism.pipeline_parallel_schedule": "schedule",
    "parallelism.pipeline_parallel_microbatch_size": "micro_batch_size",
    "parallelism.pipeline_parallel_layers_per_stage": "virtual_pipeline",
    "parallelism.pipeline_parallel_first_stage_less_layers": "layers_per_stage",
    "parallelism.pipeline_parallel_last_stage_less_layers": "layers_per_stage",
    MODULE_LISTS: "layers_per_stage",
    "training.local_batch_size": "micro_batch_size",
    "training.global_batch_size": "global_batch_size",
    "training.seq_len": "seq_len",
    "training.dtype": "bytes of weights and moments",
    "training.mixed_precision_param": "precision",
    "activation_checkpoint.mode": "recompute",
    "activation_checkpoint.selective_ac_option": "recompute",
    "compile.enable": "software",
    "compile.components": "software",
    "model.name": "model",
    "model.flavor": "model",
    "model.converters": "precision",
    "quantize.linear.float8.recipe_name": "scaling of fp8",
    "module": "model",
    "config": "model and what it sets",
}
"""Key -> what of ours it becomes."""

OURS = {name.lower(): ours for ours, name in SCHEDULE_NAMES.items()}
PRECISIONS = {"quantize.linear.float8": "fp8", "float8": "fp8", "quantize.linear.mx": "mxfp8", "mx": "mxfp8"}
OPTIMIZERS = {"adamw": "adam", "adam": "adam"}
HALF_STATES = {"sharded_weights_bytes": 2.0, "optimizer_bytes": 4.0, "gradient_bytes": 2.0}
"""Fields of the stack when training.dtype is bfloat16: weights, gradients and both moments in two bytes."""


def schedule_name(settings: Mapping[str, Any]) -> str:
    """PyTorch's own spelling of the schedule, which it takes in any case; as written where it has none such."""
    written = str(setting(settings, P + "pipeline_parallel_schedule"))
    return next((name for name in (*SINGLE, *MULTI) if name.lower() == written.lower()), written)


def degree(settings: Mapping[str, Any], axis: str) -> int:
    """A degree of parallelism, at least 1: what is wrong with a lower one, a rule says.

    >>> degree({"parallelism.tensor_parallel_degree": 0}, "tensor_parallel")
    1
    """
    return max(1, int(setting(settings, f"{P}{axis}_degree")))


def shard_degree(settings: Mapping[str, Any], num_gpus: int | None) -> int | None:
    """Ranks that share the weights; -1 is what the GPUs leave, None where nobody says how many there are."""
    stated = int(setting(settings, P + "data_parallel_shard_degree"))
    if stated >= 1:
        return stated
    axes = ("data_parallel_replicate", "tensor_parallel", "context_parallel", "pipeline_parallel")
    others = 1
    for axis in axes:
        others *= degree(settings, axis)
    return max(1, num_gpus // others) if num_gpus else None


def zero_stage(settings: Mapping[str, Any], shard: int | None) -> int:
    """0 where the weights are not sharded, 2 where they stay gathered between forward and backward, else 3.

    Source: distributed/fsdp.py, get_fsdp_reshard_after_forward_policy: by default they stay gathered in a pipeline.
    """
    policy = str(setting(settings, P + "fsdp_reshard_after_forward"))
    if shard == 1 and degree(settings, "context_parallel") == 1:
        replicated = degree(settings, "data_parallel_replicate") > 1
        return 0 if replicated else {"always": 3, "never": 2}.get(policy, 0)
    gathered = policy == "never" or (policy == "default" and degree(settings, "pipeline_parallel") > 1)
    return 2 if gathered else 3


def chunk_layers(settings: Mapping[str, Any], num_layers: int) -> tuple[int, ...]:
    """Layers of each chunk of the pipeline in the model's order: as listed, or as torchtitan cuts. Empty where it refuses to.

    Source: distributed/pipeline_parallel.py, _get_pipeline_metadata and _generate_llm_fqn_per_model_part.
    """
    stages = degree(settings, "pipeline_parallel")
    listed = setting(settings, MODULE_LISTS)
    if listed:
        return tuple(sum(name.startswith("layers.") for name in part) for part in listed)
    first, last = (int(setting(settings, f"{P}pipeline_parallel_{end}_stage_less_layers")) for end in ("first", "last"))
    share = int(setting(settings, P + "pipeline_parallel_layers_per_stage"))
    multi = schedule_name(settings) in MULTI
    chunks = -(-(num_layers + first + last) // share) if share > 0 else stages * (2 if multi else 1)
    whole = chunks % stages == 0 and (chunks // stages >= 2 if multi and share > 0 else multi or chunks == stages)
    return stage_layers(num_layers, chunks, max(0, first), max(0, last)) if whole else ()


def per_stage(chunks: tuple[int, ...], stages: int, v_shaped: bool) -> tuple[int, ...]:
    """Layers of each stage: chunk i runs on stage i % stages, under a V shape the second half comes back.

    >>> per_stage((4, 5, 4, 3), 2, False), per_stage((4, 5, 4, 3), 2, True)
    ((8, 8), (7, 9))
    """
    totals = [0] * stages
    for place, layers in enumerate(chunks):
        back = v_shaped and place >= stages
        totals[2 * stages - 1 - place if back else place % stages] += layers
    return tuple(totals)


def meaning(
    source: Source,
    kind: str,
    settings: dict[str, Any],
    num_gpus: int | None,
    model: Model | None,
    *,
    precision: str = "",
    stated: tuple[str, ...] = (),
    unknown: tuple[str, ...] = (),
) -> Config:
    """The settings in the planner's words. ``stated``: the keys that the command itself gives, where a recipe gives the rest."""
    assumed: list[str] = []
    layout = _layout(settings, kind, num_gpus, model, assumed)
    chunks = chunk_layers(settings, model.num_layers) if model and layout["pipeline_parallel"] != 1 else ()
    if chunks and len(chunks) % int(layout["pipeline_parallel"]) == 0:
        layout["virtual_pipeline"] = len(chunks) // int(layout["pipeline_parallel"])
    keys = [key for key in settings if not stated or key in stated]
    return Config(
        path=Path(source.path),
        kind=kind,
        framework="torchtitan",
        request=_request(settings, kind, num_gpus, model, precision, layout, assumed),
        layout=layout,
        layers_per_stage=_uneven(chunks, layout, model),
        software=_software(settings, assumed),
        settings=settings,
        read=tuple(f"{key} {_told(settings[key])}: {USED[key]}" for key in keys if key in USED),
        assumed=(*assumed, *(f"{word} is known only to the shell" for word in unknown)),
        ignored=tuple(shown(key).strip("'") for key in keys if key not in USED and has_key(key, kind)),
    )


def _told(value: Any) -> str:
    return f"({len(value)} lists)" if isinstance(value, list) and value and isinstance(value[0], list) else shown(value).strip("'")


def _uneven(chunks: tuple[int, ...], layout: Mapping[str, int | str], model: Model | None) -> tuple[int, ...]:
    """The split over stages where it is not the even one."""
    stages = int(layout["pipeline_parallel"])
    if not model or not chunks or len(chunks) % stages or sum(chunks) != model.num_layers:
        return ()
    v_shaped = layout.get("schedule") in ("zero_bubble_v", "dualpipe")
    split = per_stage(chunks, stages, v_shaped)
    return split if split != per_stage(chunk_sizes(model.num_layers, len(chunks)), stages, v_shaped) else ()


def _layout(settings: Mapping[str, Any], kind: str, num_gpus: int | None, model: Model | None, assumed: list[str]) -> dict[str, int | str]:
    shard, replicate = shard_degree(settings, num_gpus), degree(settings, "data_parallel_replicate")
    stages = degree(settings, "pipeline_parallel")
    local = "pipeline_parallel_microbatch_size" if stages > 1 else ""
    layout: dict[str, int | str] = {
        "tensor_parallel": degree(settings, "tensor_parallel"),
        "pipeline_parallel": stages,
        "virtual_pipeline": 1,
        "context_parallel": degree(settings, "context_parallel"),
        "zero_stage": zero_stage(settings, shard),
        "micro_batch_size": max(1, int(setting(settings, P + local if local else "training.local_batch_size"))),
        "recompute": _recompute(settings, kind, assumed),
        **_experts(settings, kind, model),
    }
    if shard is not None:
        layout["data_parallel"] = shard * replicate
        if shard > 1 and replicate > 1:
            assumed.append(
                f"weights are sharded over {shard} and replicated over {replicate} ranks: counted as sharded over all {shard * replicate}"
            )
    return layout | _schedule(settings, stages, assumed)


def _schedule(settings: Mapping[str, Any], stages: int, assumed: list[str]) -> dict[str, str]:
    if stages == 1:
        return {"schedule": "1f1b"}
    name = schedule_name(settings)
    if setting(settings, P + "pipeline_parallel_schedule_csv"):
        assumed.append(f"pipeline_parallel_schedule_csv: the order in that file is not read; counted as {shown(name)}")
    chunked = len(setting(settings, MODULE_LISTS) or ()) != stages
    if name == "LoopedBFS" or (name == "InterleavedZeroBubble" and chunked):
        assumed.append(f"{name} is not among the planner's schedules: counted as Interleaved1F1B")
        return {"schedule": "interleaved_1f1b"}
    return {"schedule": OURS[name.lower()]} if name.lower() in OURS else {}


def _experts(settings: Mapping[str, Any], kind: str, model: Model | None) -> dict[str, int]:
    """Expert groups, which only a mixture of experts has; without them the tensor group splits every expert."""
    if model is None or not model.num_experts:
        return {"expert_parallel": 1, "expert_tensor_parallel": 1}
    expert, tensor = degree(settings, "expert_parallel"), degree(settings, "tensor_parallel")
    split = 1 if kind == NEW_KIND else degree(settings, "expert_tensor_parallel")
    return {"expert_parallel": expert, "expert_tensor_parallel": tensor if expert == 1 else split}


def _recompute(settings: Mapping[str, Any], kind: str, assumed: list[str]) -> str:
    mode = str(setting(settings, "activation_checkpoint.mode"))
    option = str(setting(settings, "activation_checkpoint.selective_ac_option"))
    if mode == "memory_budget":
        assumed.append("activation_checkpoint.mode memory_budget: the compiler chooses what to recompute; counted as selective")
    if mode == "selective" and kind != NEW_KIND and option != "op":
        if option == "1":
            return "full"
        assumed.append(f"selective_ac_option {shown(option)} recomputes every so many layers whole; counted as selective by operation")
    return mode if mode in ("none", "full") else "selective"


def _request(
    settings: Mapping[str, Any],
    kind: str,
    num_gpus: int | None,
    model: Model | None,
    precision: str,
    layout: Mapping[str, int | str],
    assumed: list[str],
) -> Request:
    compiled = bool(setting(settings, "compile.enable")) and "model" in setting(settings, "compile.components")
    batch, local = int(setting(settings, "training.global_batch_size")), int(setting(settings, "training.local_batch_size"))
    if batch < 1 and "data_parallel" in layout:
        batch = max(1, local) * int(layout["data_parallel"])
        assumed.append(f"global_batch_size is not stated: local_batch_size x data_parallel = {batch}")
    elif batch < 1:
        assumed.append("global_batch_size is not stated: local_batch_size x data_parallel, once the number of GPUs is known")
    if model is None:
        assumed.append("the catalogue has no such model: name one with --model")
    elif model.num_mtp_layers:
        assumed.append("multi-token-prediction layers are not trained: torchtitan's configurations leave them out")
    optimizer = "adam" if kind == NEW_KIND else OPTIMIZERS.get(str(setting(settings, "optimizer.name")).lower())
    return Request(
        model=model.name if model else None,
        num_gpus=num_gpus,
        seq_len=max(1, int(setting(settings, "training.seq_len"))),
        global_batch_size=batch if batch >= 1 else None,
        precision=precision or _precision(settings, assumed),
        optimizer=optimizer,
        framework="torchtitan",
        software="fsdp2" if compiled else "fsdp2-eager",
        sequence_parallel=None if setting(settings, P + "enable_sequence_parallel") else False,
        multi_token_prediction=False if model and model.num_mtp_layers else None,
    )


def _precision(settings: Mapping[str, Any], assumed: list[str]) -> str:
    found = [PRECISIONS[name] for name in setting(settings, "model.converters") if name in PRECISIONS]
    if not found and setting(settings, "training.mixed_precision_param") == "float32":
        assumed.append("training.mixed_precision_param float32: counted as bf16, the planner knows no training in float32")
    return found[0] if found else "bf16"


def _software(settings: Mapping[str, Any], assumed: list[str]) -> dict[str, Any]:
    changed: dict[str, Any] = {}
    if setting(settings, "training.dtype") == "bfloat16":
        changed |= HALF_STATES
    if str(setting(settings, "quantize.linear.float8.recipe_name")).startswith("rowwise"):
        changed["fp8_rowwise"] = True
    if setting(settings, "compile.enable_async_tensor_parallel") or setting(settings, P + "enable_async_tensor_parallel"):
        assumed.append("async tensor parallelism is on: what it hides of the transfers is not counted")
    if setting(settings, "training.enable_cpu_offload"):
        assumed.append("training.enable_cpu_offload: weights, gradients and moments are counted as if they stayed on the GPU")
    return changed
