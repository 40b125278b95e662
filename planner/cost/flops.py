"""The FLOPs of a training step as the field counts them, for MFU and for days of training."""

from __future__ import annotations

from planner.catalogue.schema import Model
from planner.cost import parameters
from planner.cost.arrays import Number
from planner.scenario import Job


def attention_flops_per_token(model: Model, seq_len: int) -> float:
    """Score and value products of one token, forward and backward, the whole square counted (no causal saving).

    12 L h s for ordinary heads; the windowed layers see at most their window.
    Source: Narayanan et al. 2021, appendix; the convention of Megatron-LM, NeMo and PaLM's MFU.

    >>> from planner.catalogue.load import find
    >>> attention_flops_per_token(find(Model, "70b"), 4096) == 12 * 80 * 8192 * 4096
    True
    """
    width = model.num_attention_heads * (model.qk_head_dim + model.value_head_dim) / 2
    window = min(seq_len, model.sliding_window) if model.sliding_window else seq_len
    spans = (model.num_layers - model.num_window_layers) * seq_len + model.num_window_layers * window
    return 12.0 * width * spans


def matmul_params(model: Model) -> float:
    """Active parameters that multiply each token: the input embedding is a look-up and does not count."""
    looked_up = model.vocab_size * model.hidden_size if not model.tied_embeddings else 0
    return parameters.active(model) - looked_up - model.learned_positions * model.hidden_size


def model_flops_per_token(model: Model, seq_len: int) -> float:
    """6 FLOPs per multiplying parameter and the attention's, recompute not counted."""
    return 6.0 * matmul_params(model) + attention_flops_per_token(model, seq_len)


def model_flops_per_step(job: Job) -> float:
    """Model FLOPs of one optimizer step of the whole job."""
    return model_flops_per_token(job.model, job.seq_len) * job.tokens_per_step


def mfu(job: Job, step_seconds: Number) -> Number:
    """Model FLOPs (recompute not counted, attention's full square) over the dense peak of the workload's precision."""
    return model_flops_per_step(job) / (step_seconds * job.num_gpus * job.peak_flops)
