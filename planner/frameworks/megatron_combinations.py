"""Rules about Megatron's switches: which exclude or demand each other."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from planner.catalogue.schema import RECOMPUTE_MODULES
from planner.frameworks.config import ILLEGAL, Config, SettingRule
from planner.frameworks.megatron_batches import ARGUMENTS, size
from planner.frameworks.megatron_flags import flag_of
from planner.frameworks.megatron_stages import number, split_of
from planner.scenario import Job

CONFIG = "megatron/core/transformer/transformer_config.py"
Settings = Mapping[str, Any]
METHODS = ("uniform", "block")
MODULES = (*RECOMPUTE_MODULES, "gdn_norm_out")


def on(settings: Settings, field: str) -> bool:
    """Whether a switch is on."""
    return settings.get(field) is True


def first_broken(*checks: tuple[bool, str]) -> str:
    """The text of the first check that is true."""
    return next((text for broken, text in checks if broken), "")


def overlap(config: Config, job: Job) -> str:
    """What overlaps parameter gathering needs."""
    s = config.settings
    if on(s, "overlap_param_gather"):
        sharded = size(config, "zero_stage") >= 1 or s.get("optimizer") == "dist_muon"
        broken = first_broken(
            (not sharded, f"{flag_of('overlap_param_gather')} needs {flag_of('use_distributed_optimizer')}"),
            (not on(s, "overlap_grad_reduce"), f"{flag_of('overlap_param_gather')} needs {flag_of('overlap_grad_reduce')}"),
        )
        if broken:
            return broken
    late = "overlap_param_gather_with_optimizer_step"
    needs = {
        "use_distributed_optimizer": on(s, "use_distributed_optimizer"),
        "overlap_param_gather": on(s, "overlap_param_gather"),
        "num_virtual_stages_per_pipeline_rank": size(config, "virtual_pipeline") > 1,
    }
    missing = [flag_of(field) for field, there in needs.items() if not there]
    return f"{flag_of(late)} needs {', '.join(missing)}" if on(s, late) and missing else ""


def fsdp(config: Config, job: Job) -> str:
    """What fully sharded data parallelism needs: Megatron's own, and torch's."""
    s = config.settings
    connections = s.get("CUDA_DEVICE_MAX_CONNECTIONS") == "1"
    if on(s, "use_megatron_fsdp"):
        return first_broken(
            (s.get("ckpt_format") != "fsdp_dtensor", f"{flag_of('use_megatron_fsdp')} needs --ckpt-format fsdp_dtensor"),
            (s.get("optimizer", "adam") not in ("adam", "sgd"), f"{flag_of('use_megatron_fsdp')} needs --optimizer adam or sgd"),
            (connections, "Megatron-FSDP needs CUDA_DEVICE_MAX_CONNECTIONS unset or above 1, it is 1"),
        )
    if s.get("ckpt_format") == "fsdp_dtensor":
        return f"--ckpt-format fsdp_dtensor needs {flag_of('use_megatron_fsdp')}"
    if not on(s, "use_torch_fsdp2"):
        return ""
    name = flag_of("use_torch_fsdp2")
    return first_broken(
        (
            size(config, "pipeline_parallel") > 1,
            f"{name} needs pipeline_model_parallel_size = 1, it is {size(config, 'pipeline_parallel')}",
        ),
        (size(config, "expert_parallel") > 1, f"{name} needs expert_model_parallel_size = 1, it is {size(config, 'expert_parallel')}"),
        (on(s, "use_distributed_optimizer"), f"{name} excludes {flag_of('use_distributed_optimizer')}"),
        (s.get("gradient_accumulation_fusion") is not False, f"{name} needs {flag_of('gradient_accumulation_fusion')}"),
        (not on(s, "untie_embeddings_and_output_weights"), f"{name} needs {flag_of('untie_embeddings_and_output_weights')}"),
        (on(s, "fp16"), f"{name} excludes --fp16; legal: --bf16"),
        (s.get("ckpt_format", "torch_dist") not in ("torch_dist", "torch_dcp"), f"{name} needs --ckpt-format torch_dist or torch_dcp"),
        (connections, "FSDP2 needs CUDA_DEVICE_MAX_CONNECTIONS unset or above 1, it is 1"),
    )


def recompute(config: Config, job: Job) -> str:
    """What goes with each granularity of recompute."""
    s = config.settings
    word = "selective" if on(s, "recompute_activations") else s.get("recompute_granularity")
    method, layers = s.get("recompute_method"), s.get("recompute_num_layers")
    if word == "full":
        return first_broken(
            (method not in METHODS, "--recompute-granularity full needs --recompute-method uniform or block"),
            (layers is None, "--recompute-granularity full needs --recompute-num-layers, from 1 to the layers of a chunk"),
            (
                _saved(s) and on(s, "sequence_parallel"),
                f"{flag_of('distribute_saved_activations')} excludes {flag_of('sequence_parallel')}",
            ),
            (_saved(s) and size(config, "tensor_parallel") == 1, f"{flag_of('distribute_saved_activations')} needs a tensor group"),
        )
    if word == "selective":
        return first_broken(
            (method is not None, f"--recompute-method {method} with selective recompute: leave it out"),
            (layers is not None, f"--recompute-num-layers {layers} with selective recompute: leave it out"),
        ) or _modules(config, job)
    return first_broken((_saved(s), f"{flag_of('distribute_saved_activations')} needs --recompute-granularity full"))


def _saved(settings: Settings) -> bool:
    return on(settings, "distribute_saved_activations")


def _modules(config: Config, job: Job) -> str:
    s = config.settings
    listed = s.get("recompute_modules") or []
    words = [str(word) for word in listed if not isinstance(word, (list, dict))] if isinstance(listed, list) else str(listed).split()
    strange = [word for word in words if word not in MODULES]
    delayed = job.precision == "fp8" and s.get("fp8_recipe", "delayed") == "delayed"
    unsafe = [word for word in words if word in ("moe_act", "layernorm")]
    return first_broken(
        (bool(strange), f"--recompute-modules {strange[0][:30] if strange else ''} is not known; legal: {', '.join(MODULES)}"),
        ("moe_act" in words and not on(s, "moe_grouped_gemm"), f"recompute of moe_act needs {flag_of('moe_grouped_gemm')}"),
        ("mla_up_proj" in words and not job.model.kv_lora_rank, "recompute of mla_up_proj needs --multi-latent-attention"),
        (
            "shared_experts" in words and on(s, "moe_shared_expert_overlap"),
            "recompute of shared_experts excludes --moe-shared-expert-overlap",
        ),
        ("moe" in words and on(s, "overlap_moe_expert_parallel_comm"), "recompute of moe excludes --overlap-moe-expert-parallel-comm"),
        (
            bool(unsafe) and delayed,
            f"recompute of {unsafe[0] if unsafe else ''} excludes FP8 with delayed scaling; legal: --fp8-recipe tensorwise",
        ),
    )


def offload(config: Config, job: Job) -> str:
    """What excludes moving activations or optimizer states to the host."""
    s = config.settings
    active = on(s, "cpu_offloading") or number(s, "cpu_offloading_num_layers") > 0
    layers = number(s, "cpu_offloading_num_layers")
    stages = size(config, "pipeline_parallel")
    return first_broken(
        (active and stages > 1, f"--cpu-offloading-num-layers needs pipeline_model_parallel_size = 1, it is {stages}"),
        (active and config.layout.get("recompute", "none") != "none", "--cpu-offloading-num-layers excludes recompute: choose one"),
        (active and layers >= job.model.num_layers, f"--cpu-offloading-num-layers = {layers} must be below {job.model.num_layers}"),
        (
            on(s, "optimizer_cpu_offload") and not on(s, "use_precision_aware_optimizer"),
            f"--optimizer-cpu-offload needs {flag_of('use_precision_aware_optimizer')}",
        ),
    )


def deferred(config: Config, job: Job) -> str:
    """What a deferred embedding gradient, hybrid context groups and tensor overlap need."""
    s, stages = config.settings, size(config, "pipeline_parallel")
    defer = on(s, "defer_embedding_wgrad_compute")
    return first_broken(
        (defer and stages == 1, "--defer-embedding-wgrad-compute needs pipeline_model_parallel_size > 1"),
        (defer and s.get("gradient_accumulation_fusion") is False, "--defer-embedding-wgrad-compute needs gradient accumulation fusion"),
        (on(s, "hybrid_context_parallel") and stages > 1, f"--hybrid-context-parallel needs one pipeline stage, there are {stages}"),
        (on(s, "tp_comm_overlap") and not on(s, "sequence_parallel"), f"--tp-comm-overlap needs {flag_of('sequence_parallel')}"),
    )


def formats(config: Config, job: Job) -> str:
    """Number formats exclude each other."""
    s = config.settings
    return first_broken(
        (on(s, "fp16") and on(s, "bf16"), "--fp16 and --bf16 exclude each other: keep one"),
        (bool(s.get("fp8")) and bool(s.get("fp4")), "--fp8-format and --fp4-format exclude each other: keep one"),
        (on(s, "fp8_param_gather") and not s.get("fp8"), "--fp8-param-gather needs --fp8-format"),
        (on(s, "fp4_param_gather") and not s.get("fp4"), "--fp4-param-gather needs --fp4-format"),
    )


def experts(config: Config, job: Job) -> str:
    """What experts need: a stated choice of one expert, plain biases, groups that fit, and overlap with chunks."""
    s = config.settings
    if not job.model.num_experts:
        return ""
    over = on(s, "overlap_moe_expert_parallel_comm")
    flex = s.get("moe_token_dispatcher_type", "allgather") in ("alltoall", "flex")
    stages, virtual = size(config, "pipeline_parallel"), size(config, "virtual_pipeline")
    soft = s.get("moe_router_score_function", "softmax") == "softmax"
    single = job.model.experts_per_token == 1 and soft and not on(s, "moe_router_pre_softmax")
    return first_broken(
        (single and s.get("moe_router_load_balancing_type") != "sinkhorn", "--moe-router-topk 1 needs --moe-router-pre-softmax"),
        (over and not flex, "--overlap-moe-expert-parallel-comm needs --moe-token-dispatcher-type alltoall or flex"),
        (over and stages > 1 and virtual == 1, "--overlap-moe-expert-parallel-comm with a pipeline needs virtual stages"),
        (over and config.layout.get("recompute") == "full", "--overlap-moe-expert-parallel-comm excludes full recompute"),
        (on(s, "moe_shared_expert_overlap") and not flex, "--moe-shared-expert-overlap needs --moe-token-dispatcher-type alltoall or flex"),
    )


def latent(config: Config, job: Job) -> str:
    """Latent attention has no query groups."""
    both = on(config.settings, "multi_latent_attention") and on(config.settings, "group_query_attention")
    return "--multi-latent-attention and --group-query-attention exclude each other: leave out the latter" if both else ""


OLD = {
    "batch_size": "--micro-batch-size",
    "warmup": "--lr-warmup-fraction",
    "model_parallel_size": "--tensor-model-parallel-size",
    "checkpoint_activations": "--recompute-activations",
}
"""Arguments that the parser knows and refuses -> what took their place."""


def old(config: Config, job: Job) -> str:
    """Arguments of before 2022 are refused."""
    found = [field for field in OLD if config.settings.get(field) not in (None, False)]
    return f"{flag_of(found[0])} is no longer valid: use {OLD[found[0]]}" if found else ""


def split_rule(name: str) -> Callable[[Config, Job], str]:
    """What is wrong with the split of layers over stages, where it breaks the rule of this id."""

    def finds(config: Config, job: Job) -> str:
        split = split_of({**config.settings, "num_layers": job.model.num_layers})
        return split.problem if split.rule == name else ""

    return finds


COMBINATION_RULES: tuple[SettingRule, ...] = (
    SettingRule("M11", "the stages share the layers evenly, unless an uneven split is stated", ARGUMENTS, ILLEGAL, split_rule("M11")),
    SettingRule("M12", "a stated first or last stage leaves the middle ones an equal share", CONFIG, ILLEGAL, split_rule("M12")),
    SettingRule("M13", "chunks are stated in one way, and a layout holds every layer once", ARGUMENTS, ILLEGAL, split_rule("M13")),
    SettingRule("M14", "the layers of a stage divide into its chunks", ARGUMENTS, ILLEGAL, split_rule("M14")),
    SettingRule("M19", "overlapped gathering needs sharding and overlapped reduction", ARGUMENTS, ILLEGAL, overlap),
    SettingRule("M30", "FSDP's companions: checkpoint format, optimizer, connections, no pipeline", ARGUMENTS, ILLEGAL, fsdp),
    SettingRule("M21", "recompute's granularity, method, layers and modules suit each other", CONFIG, ILLEGAL, recompute),
    SettingRule("M22", "offload needs one stage and no recompute, of the optimizer the precision-aware one", CONFIG, ILLEGAL, offload),
    SettingRule("M23", "deferred embedding gradients need a pipeline", "megatron/core/model_parallel_config.py", ILLEGAL, deferred),
    SettingRule("M24", "one 16-bit and at most one lower format", ARGUMENTS, ILLEGAL, formats),
    SettingRule("M31", "experts' routing, dispatch and overlap suit each other", CONFIG, ILLEGAL, experts),
    SettingRule("M50", "latent attention excludes query groups", ARGUMENTS, ILLEGAL, latent),
    SettingRule("M45", "arguments that the parser has retired", ARGUMENTS, ILLEGAL, old),
)
