"""Keys of Megatron-Bridge and NeMo files -> Megatron's own fields: the table that reader and writer share.

Source: Megatron-Bridge (training/config.py, models/gpt_provider.py) and NeMo (examples of its language models, versions 1 and 2).
"""

from __future__ import annotations

from collections.abc import Mapping

SAME = (
    *("tensor_model_parallel_size", "pipeline_model_parallel_size", "virtual_pipeline_model_parallel_size", "context_parallel_size"),
    *("expert_model_parallel_size", "expert_tensor_parallel_size", "sequence_parallel", "pipeline_model_parallel_layout"),
    *("account_for_embedding_in_pipeline_split", "account_for_loss_in_pipeline_split", "microbatch_group_size_per_vp_stage"),
    *("num_layers", "hidden_size", "ffn_hidden_size", "num_attention_heads", "num_query_groups", "kv_channels", "normalization"),
    *("add_bias_linear", "add_qkv_bias", "qk_layernorm", "position_embedding_type", "hidden_dropout", "attention_dropout", "seq_length"),
    *("vocab_size", "make_vocab_size_divisible_by", "max_position_embeddings", "window_size", "window_attn_skip_freq"),
    *("moe_ffn_hidden_size", "moe_router_topk", "moe_shared_expert_intermediate_size", "moe_layer_freq", "moe_grouped_gemm"),
    *("moe_token_dispatcher_type", "moe_router_pre_softmax", "moe_router_score_function", "moe_router_padding_for_quantization"),
    *("moe_shared_expert_overlap", "moe_expert_capacity_factor", "moe_router_load_balancing_type"),
    *("multi_latent_attention", "q_lora_rank", "kv_lora_rank", "qk_head_dim", "qk_pos_emb_head_dim", "v_head_dim", "mtp_num_layers"),
    *("recompute_granularity", "recompute_method", "recompute_num_layers", "recompute_modules", "distribute_saved_activations"),
    *("attention_backend", "transformer_impl", "masked_softmax_fusion", "gradient_accumulation_fusion", "tp_comm_overlap", "cp_comm_type"),
    *("hierarchical_context_parallel_sizes", "overlap_p2p_comm", "overlap_moe_expert_parallel_comm", "cpu_offloading"),
    *("cpu_offloading_num_layers", "cuda_graph_impl", "fp8", "fp8_recipe", "fp4", "fp4_recipe", "fp16", "bf16"),
    *("defer_embedding_wgrad_compute", "delay_wgrad_compute", "fine_grained_activation_offloading"),
)
"""Fields of the model that are called alike in both."""

MODEL: Mapping[str, str] = {
    **{name: name for name in SAME},
    "num_layers_in_first_pipeline_stage": "decoder_first_pipeline_num_layers",
    "num_layers_in_last_pipeline_stage": "decoder_last_pipeline_num_layers",
    "num_moe_experts": "num_experts",
    "gated_linear_unit": "swiglu",
    # NeMo 1
    "encoder_seq_length": "seq_length",
    "micro_batch_size": "micro_batch_size",
    "global_batch_size": "global_batch_size",
    "rampup_batch_size": "rampup_batch_size",
    "activations_checkpoint_granularity": "recompute_granularity",
    "activations_checkpoint_method": "recompute_method",
    "activations_checkpoint_num_layers": "recompute_num_layers",
    "bias": "add_bias_linear",
    "use_flash_attention": "use_flash_attn",
    "ub_tp_comm_overlap": "tp_comm_overlap",
}
"""Key of the model's table -> Megatron's field."""

OTHERS: Mapping[str, Mapping[str, str]] = {
    "train": {
        "global_batch_size": "global_batch_size",
        "micro_batch_size": "micro_batch_size",
        "train_iters": "train_iters",
        "train_samples": "train_samples",
        "rampup_batch_size": "rampup_batch_size",
        "eval_global_batch_size": "eval_global_batch_size",
    },
    "data": {"global_batch_size": "global_batch_size", "micro_batch_size": "micro_batch_size", "seq_length": "seq_length"},
    "dataset": {"sequence_length": "seq_length", "seq_length": "seq_length"},
    "ddp": {
        "use_distributed_optimizer": "use_distributed_optimizer",
        "overlap_grad_reduce": "overlap_grad_reduce",
        "overlap_param_gather": "overlap_param_gather",
        "use_megatron_fsdp": "use_megatron_fsdp",
        "data_parallel_sharding_strategy": "data_parallel_sharding_strategy",
        "num_distributed_optimizer_instances": "num_distributed_optimizer_instances",
    },
    "optimizer": {
        "optimizer": "optimizer",
        "use_distributed_optimizer": "use_distributed_optimizer",
        "use_precision_aware_optimizer": "use_precision_aware_optimizer",
        "exp_avg_dtype": "exp_avg_dtype",
        "exp_avg_sq_dtype": "exp_avg_sq_dtype",
        "main_params_dtype": "main_params_dtype",
        "optimizer_cpu_offload": "optimizer_cpu_offload",
    },
    "dist": {"use_megatron_fsdp": "use_megatron_fsdp", "use_torch_fsdp2": "use_torch_fsdp2"},
    "checkpoint": {"ckpt_format": "ckpt_format", "save": "save", "load": "load"},
    "tokenizer": {"vocab_size": "vocab_size", "tokenizer_type": "tokenizer_type", "tokenizer_model": "tokenizer_model"},
    "trainer": {"max_steps": "train_iters"},
}
"""Table -> its keys -> Megatron's field."""

STRATEGY = {
    **MODEL,
    **OTHERS["ddp"],
}
"""Keys of trainer.strategy, where NeMo 2 keeps the parallel sizes."""

MIXED: Mapping[str, tuple[tuple[str, object], ...]] = {
    "bf16_mixed": (("bf16", True),),
    "fp16_mixed": (("fp16", True),),
    "bf16_with_fp8_current_scaling_mixed": (("bf16", True), ("fp8", "hybrid"), ("fp8_recipe", "tensorwise")),
    "bf16_with_fp8_delayed_scaling_mixed": (("bf16", True), ("fp8", "hybrid"), ("fp8_recipe", "delayed")),
    "bf16_with_fp8_subchannel_scaling_mixed": (("bf16", True), ("fp8", "hybrid"), ("fp8_recipe", "blockwise")),
    "bf16_with_mxfp8_mixed": (("bf16", True), ("fp8", "e4m3"), ("fp8_recipe", "mxfp8")),
    "bf16_with_nvfp4_mixed": (("bf16", True), ("fp4", "e2m1"), ("fp4_recipe", "nvfp4")),
}
"""Name of a precision recipe -> Megatron's fields."""

PRECISIONS = {
    "bf16": "bf16_mixed",
    "fp16": "fp16_mixed",
    "fp8": "bf16_with_fp8_current_scaling_mixed",
    "mxfp8": "bf16_with_mxfp8_mixed",
    "nvfp4": "bf16_with_nvfp4_mixed",
}
"""Our precision -> the recipe's name."""

TRAINER_PRECISIONS = {"bf16": "bf16", "bf16-mixed": "bf16", "16": "fp16", "16-mixed": "fp16", "fp16": "fp16"}
"""trainer.precision of NeMo -> the field that it turns on."""

ZERO_ONE = ("distributed_fused_adam", "mcore_distributed_optim")
"""NeMo's optimizers that shard their states."""


def key_of(field: str) -> str:
    """The dotted key of a Megatron field in a Bridge file.

    >>> key_of("num_experts"), key_of("global_batch_size"), key_of("overlap_grad_reduce")
    ('model.num_moe_experts', 'train.global_batch_size', 'ddp.overlap_grad_reduce')
    """
    for table in ("train", "ddp", "optimizer", "checkpoint"):
        for key, theirs in OTHERS[table].items():
            if theirs == field:
                return f"{table}.{key}"
    usual = next((key for key, theirs in MODEL.items() if theirs == field), field)
    return f"model.{usual}"
