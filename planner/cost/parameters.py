"""How many parameters a model has, and how many of them a rank of a tensor or expert group holds.

Notation: h hidden, a heads, d head size, f MLP width, V vocabulary, E experts, t tensor group, e expert group,
e_t tensor split inside an expert. Counts are for one layer unless said otherwise.
"""

from __future__ import annotations

import numpy as np

from planner.catalogue.schema import Model
from planner.cost.arrays import Number, ceil_div


def key_value_width(model: Model, tensor: Number) -> Number:
    """Width of K (or V) over a whole tensor group: KV heads are copied where the group is larger than their number.

    The copies are activations: the weights of a head are split over the ranks that share it, and its output is gathered.
    Source: Megatron-Core, transformer/attention.py.

    >>> from planner.catalogue.load import find
    >>> int(key_value_width(find(Model, "70b"), 8)), int(key_value_width(find(Model, "70b"), 16))
    (1024, 2048)
    """
    return np.maximum(model.num_key_value_heads, tensor) * model.head_dim


def attention_linear(model: Model, tensor: Number = 1) -> Number:
    """Weights of the attention projections on one tensor rank.

    Source: matrix shapes of grouped-query attention, and of multi-head latent attention (DeepSeek-AI 2024, section 2.1).
    """
    h, a = model.hidden_size, model.num_attention_heads
    if model.kv_lora_rank:
        qk, nope, v = model.qk_head_dim, model.qk_nope_head_dim, model.v_head_dim
        query = h * model.q_lora_rank + model.q_lora_rank * a * qk / tensor if model.q_lora_rank else h * a * qk / tensor
        latent = h * (model.kv_lora_rank + model.qk_rope_head_dim)
        return query + latent + model.kv_lora_rank * a * (nope + v) / tensor + a * v * h / tensor
    return 2 * h * (a + model.num_key_value_heads) * model.head_dim / tensor


def attention_small(model: Model, tensor: Number = 1) -> Number:
    """Biases and norms inside attention on one tensor rank."""
    width = model.num_attention_heads * model.head_dim
    if model.kv_lora_rank:
        return model.q_lora_rank + model.kv_lora_rank
    bias = model.qkv_bias * (width + 2 * model.num_key_value_heads * model.head_dim) / tensor + model.linear_bias * model.hidden_size
    return bias + model.qk_norm * 2 * model.head_dim


def norm_weights(model: Model) -> int:
    """Weights of one norm."""
    return model.hidden_size * (2 if model.norm == "layernorm" else 1)


def mlp(model: Model, width: int, tensor: Number = 1, *, bias: bool = False) -> Number:
    """Weights of one MLP (or expert) of the given width on one rank of the group that splits it."""
    matrices = 3 if model.gated_mlp else 2
    biases = (width * (matrices - 1) / tensor + model.hidden_size) if bias else 0
    return matrices * model.hidden_size * width / tensor + biases


def attention_and_norms(model: Model, tensor: Number = 1) -> Number:
    """What a layer of either kind holds beside its MLP or experts, on one tensor rank."""
    return attention_linear(model, tensor) + attention_small(model, tensor) + model.norms_per_layer * norm_weights(model)


def dense_layer(model: Model, tensor: Number = 1) -> Number:
    """A layer with a dense MLP, on one tensor rank."""
    return attention_and_norms(model, tensor) + mlp(model, model.ffn_hidden_size, tensor, bias=model.linear_bias)


def moe_layer(model: Model, tensor: Number = 1) -> Number:
    """A mixture-of-experts layer without its routed experts, on one tensor rank."""
    router = model.hidden_size * model.num_experts + model.router_bias * model.num_experts
    return attention_and_norms(model, tensor) + router + mlp(model, model.shared_ffn_hidden_size, tensor)


def experts(model: Model, expert: Number = 1, expert_tensor: Number = 1) -> Number:
    """The routed experts of one layer that one rank holds: E/e of them, each split e_t ways."""
    one = mlp(model, model.moe_ffn_hidden_size, expert_tensor, bias=model.expert_bias)
    return model.num_experts / expert * one


def routed(model: Model) -> float:
    """The routed experts of all layers; 0 in a dense model."""
    return model.num_moe_layers * float(experts(model)) if model.num_moe_layers else 0.0


def padded_vocabulary(model: Model, tensor: Number, multiple: int) -> Number:
    """The vocabulary rounded up to ``multiple`` x tensor group (a multiple of 1 pads to the group alone).

    >>> from planner.catalogue.load import find
    >>> int(padded_vocabulary(find(Model, "gpt-3-175b"), 8, 128))
    51200
    """
    step = multiple * tensor
    return ceil_div(model.vocab_size, step) * step


def embedding(model: Model, tensor: Number = 1, multiple: int = 1) -> Number:
    """The input embedding on one tensor rank, learned positions and embedding norm included."""
    words = padded_vocabulary(model, tensor, multiple) * model.hidden_size / tensor
    return words + model.learned_positions * model.hidden_size + model.embedding_norm * norm_weights(model)


def head(model: Model, tensor: Number = 1, multiple: int = 1) -> Number:
    """The output projection on one tensor rank, with the final norm."""
    return padded_vocabulary(model, tensor, multiple) * model.hidden_size / tensor + norm_weights(model)


def total(model: Model) -> int:
    """All parameters, without multi-token-prediction layers.

    >>> from planner.catalogue.load import find
    >>> total(find(Model, "llama-3.1-70b"))
    70553706496
    """
    layers = (model.num_layers - model.num_moe_layers) * dense_layer(model) if model.ffn_hidden_size else 0
    if model.num_moe_layers:
        layers += model.num_moe_layers * moe_layer(model) + routed(model)
    ends = embedding(model) + (norm_weights(model) if model.tied_embeddings else head(model))
    return round(float(layers + ends))


def active(model: Model) -> int:
    """Parameters that one token meets: as :func:`total`, with only the routed experts that it visits."""
    if not model.num_moe_layers:
        return total(model)
    idle = 1 - model.experts_per_token / model.num_experts
    return round(total(model) - routed(model) * idle)
