"""Seconds of the kernels of one layer, one micro-batch and one GPU: products, attention, element-wise passes.

Symbols: S tokens of a micro-batch on a rank, h, f, a, d, V as in :mod:`planner.cost.parameters`, t tensor group.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from planner.cost import parameters
from planner.cost.arrays import Number, ceil_div, smooth_max
from planner.scenario import Job


@dataclass(frozen=True)
class Rates:
    """What a job's GPU and stack sustain together."""

    flops: float
    """16-bit products: dense peak x the generation's efficiency x the stack's quality."""
    linear_gain: float
    """Rate of the linear layers' products in the workload's precision over 16-bit ones."""
    cast_bytes: float
    """Bytes of casting per element of a product's left operand; 0 in 16 bit."""
    hbm: float
    attention_flops: float
    sms: int
    tile_rows: int
    tile_columns: int
    k_overhead: float
    wave_exponent: float


def rates_of(job: Job) -> Rates:
    """The rates of a job."""
    g, s = job.generation, job.software
    peak = job.gpu.peak_bf16_flops if job.precision != "fp16" and job.gpu.peak_bf16_flops else job.gpu.peak_fp16_flops
    peak *= job.gpu.sustained_share
    eight_bit = 2 * g.fp8_share / g.matmul_efficiency * (g.rowwise_factor if s.fp8_rowwise else 1.0)
    gains = {"bf16": 1.0, "fp16": 1.0, "nvfp4": 4 * g.fp4_share * job.gpu.fp4_boost / g.matmul_efficiency}
    kernel = s.attention_kernel if s.flash_attention else "fused"
    return Rates(
        flops=peak * g.matmul_efficiency * s.matmul_quality,
        linear_gain=gains.get(job.precision, eight_bit),
        cast_bytes=g.cast_bytes if job.low_precision else 0.0,
        hbm=job.gpu.hbm_bytes_per_s * g.hbm_efficiency,
        attention_flops=peak * getattr(g, kernel),
        sms=job.gpu.num_sms,
        tile_rows=g.tile_rows,
        tile_columns=g.tile_columns,
        k_overhead=g.k_overhead,
        wave_exponent=job.physics.wave_exponent,
    )


def wave_share(tiles: Number, sms: int) -> Number:
    """Share of the SMs that work, averaged over the waves of a kernel.

    >>> float(wave_share(132, 132)), round(float(wave_share(133, 132)), 3)
    (1.0, 0.504)
    """
    return tiles / (ceil_div(tiles, sms) * sms)


def product_seconds(r: Rates, m: Number, k: Number, n: Number, count: Number = 1, gain: float = 1.0) -> Number:
    """``count`` matrix products (m x k) (k x n) run as one kernel.

    Time at the sustained rate, lengthened by edge and wave waste of the tiles and by the k loop's fill, against the
    time of moving the operands once; the two overlap (smooth maximum, power 4).
    Source: tile quantisation as in NVIDIA's matrix multiplication guide; constants fitted on kernel tables.

    >>> r = Rates(1e12, 1.0, 0.0, 1e12, 1e12, 1, 128, 256, 0.0, 0.65)
    >>> round(float(product_seconds(r, 1280, 1000, 2560)), 4)
    0.0066
    """
    m, n = np.maximum(m, 1), np.maximum(n, 1)
    row_tiles, column_tiles = np.ceil(m / r.tile_rows), np.ceil(n / r.tile_columns)
    tiles = row_tiles * column_tiles * count
    edge = m * n / (row_tiles * column_tiles * r.tile_rows * r.tile_columns)
    rate = r.flops * gain * wave_share(tiles, r.sms) ** r.wave_exponent * edge
    compute = 2.0 * m * k * n * count / rate * (1.0 + r.k_overhead / k)
    moved = 2.0 * (m * k + k * n + m * n) * count / r.hbm
    return smooth_max(compute, moved, 4)


def linear_seconds(r: Rates, m: Number, k: Number, n: Number, count: Number = 1) -> tuple[Number, Number]:
    """Forward and backward of linear layers in the workload's precision, casts of the left operands included.

    The backward is the input gradient (m x n)(n x k) and the weight gradient (k x m)(m x n).
    """
    cast = r.cast_bytes / r.hbm * count
    forward = product_seconds(r, m, k, n, count, r.linear_gain) + cast * m * k
    to_input = product_seconds(r, m, n, k, count, r.linear_gain) + cast * m * n
    to_weight = product_seconds(r, k, m, n, count, r.linear_gain) + cast * m * k
    return forward, to_input + to_weight


def attention_linears(job: Job, r: Rates, tokens: Number, tensor: Number) -> tuple[Number, Number]:
    """Forward and backward of the attention projections."""
    model = job.model
    h, a = model.hidden_size, model.num_attention_heads
    if model.kv_lora_rank:
        qk = model.qk_head_dim
        products: list[tuple[Number, Number]] = [
            (h, model.kv_lora_rank + model.qk_rope_head_dim),
            (model.kv_lora_rank, a * (model.qk_nope_head_dim + model.v_head_dim) / tensor),
            (a * model.v_head_dim / tensor, h),
        ]
        products += [(h, model.q_lora_rank), (model.q_lora_rank, a * qk / tensor)] if model.q_lora_rank else [(h, a * qk / tensor)]
    else:
        width = a * model.head_dim
        products = [(h, (width + 2 * parameters.key_value_width(model, tensor)) / tensor), (width / tensor, h)]
    pairs = [linear_seconds(r, tokens, k, n) for k, n in products]
    return sum(f for f, _ in pairs), sum(b for _, b in pairs)


def mlp_linears(job: Job, r: Rates, tokens: Number, width: int, split: Number, count: Number = 1) -> tuple[Number, Number]:
    """Forward and backward of an MLP of one width, split over a group; ``count`` of them as one grouped product."""
    h, up = job.model.hidden_size, 2 if job.model.gated_mlp else 1
    first = linear_seconds(r, tokens, h, up * width / split, count)
    second = linear_seconds(r, tokens, width / split, h, count)
    return first[0] + second[0], first[1] + second[1]


def attention_core(job: Job, r: Rates, batch: Number, tensor: Number, context: Number) -> tuple[Number, Number]:
    """Forward and backward of scores, softmax and weighted values.

    A flash kernel does half of the square (causal) at its own rate, which suffers from short sequences, small heads and
    few blocks. Without one, both batched products are full, and the score matrix passes through HBM.
    Source: Dao 2023 for the causal half and the backward's 2.5; constants fitted.
    """
    model, physics, s = job.model, job.physics, job.seq_len
    a = model.num_attention_heads / tensor
    qk, value = model.qk_head_dim, model.value_head_dim
    rows = s / context
    windowed = model.num_window_layers / model.num_layers
    window = min(s, model.sliding_window) if model.sliding_window else s
    span = (1 - windowed) * s + windowed * window * (2 - window / s)  # a window loses its causal half as it shrinks
    if job.software.flash_attention:
        blocks = batch * a * np.ceil(s / (128 * context))
        narrow = min(1.0, (value / 128) ** physics.attention_head_exponent)
        short = s / (s + physics.attention_sequence_half)
        rate = r.attention_flops * narrow * short * wave_share(blocks, r.sms) ** r.wave_exponent
        forward = 0.5 * 2.0 * (qk + value) * batch * rows * span * a / rate
        return forward, 2.5 * forward / job.generation.backward_ratio
    slow = physics.misaligned_head_slowdown if value % 8 else 1.0
    count = batch * a
    scores = product_seconds(r, rows, qk, s, count) * slow
    values = product_seconds(r, rows, s, value, count) * slow
    back = product_seconds(r, rows, value, s, count) + product_seconds(r, s, rows, value, count)
    back += product_seconds(r, rows, s, qk, count) + product_seconds(r, s, rows, qk, count)
    traffic = physics.score_traffic_bytes * batch * rows * s * a / r.hbm
    if job.software.attention_kernel == "torch":
        traffic = traffic * physics.torch_softmax_factor
    return scores + values + traffic, back * slow + physics.score_backward_factor * traffic


def elementwise_passes(job: Job) -> tuple[float, float]:
    """Traffic factors of the stack: of element-wise kernels, and bytes per element of a norm."""
    software, physics = job.software, job.physics
    passes = software.elementwise_passes * (physics.compile_factor if software.compiled else 1.0)
    eager = software.eager_norm and not software.compiled and job.model.norm == "rmsnorm"
    return passes, physics.eager_norm_bytes if eager else physics.norm_bytes * min(passes, 1.5)


def elementwise_seconds(job: Job, r: Rates, tokens: Number, tensor: Number, mlp_elements: Number) -> Number:
    """Forward seconds of residuals, dropout, rotary, activation and norms; the backward takes twice that.

    ``mlp_elements``: channels of the MLP on this rank summed over the tokens' visits, per token.
    Source: bytes counted per kernel: 12 per hidden element, 4 per query and key element, 2 (2 + gated) per MLP channel.
    """
    model = job.model
    shared = tensor if job.sequence_parallel else 1
    passes, norm = elementwise_passes(job)
    hidden = tokens * model.hidden_size / shared
    rotary = 4.0 * tokens * (model.num_attention_heads + model.num_key_value_heads) * model.head_dim / tensor
    activation = 2.0 * (2 + model.gated_mlp) * tokens * mlp_elements
    return (passes * (12.0 * hidden + rotary + activation) + norm * model.norms_per_layer * hidden) / r.hbm


def accumulate_seconds(job: Job, r: Rates, layer_params: Number) -> Number:
    """Adding a layer's weight gradients of one micro-batch onto the running sum: read and write."""
    bytes_each = 8.0 if job.software.reduce_bytes >= 4 else 4.0
    return job.physics.accumulate_share * bytes_each * layer_params / r.hbm


def embedding_seconds(job: Job, r: Rates, tokens: Number) -> Number:
    """Embedding look-up and its gradient, forward and backward together."""
    return job.physics.embedding_traffic_bytes * tokens * job.model.hidden_size / r.hbm


def head_seconds(job: Job, r: Rates, tokens: Number, tensor: Number) -> tuple[Number, Number]:
    """Forward and backward of the output projection (16 bit) and the loss on one tensor rank."""
    vocabulary = parameters.padded_vocabulary(job.model, tensor, job.software.vocab_multiple) / tensor
    h = job.model.hidden_size
    loss = job.physics.loss_traffic_bytes * tokens * vocabulary / r.hbm
    forward = product_seconds(r, tokens, h, vocabulary) + loss / 2
    backward = product_seconds(r, tokens, vocabulary, h) + product_seconds(r, h, tokens, vocabulary) + loss / 2
    return forward, backward


def launch_floor(job: Job, tensor: Number) -> Number:
    """CPU seconds to launch a dense layer's forward: more calls with tensor parallelism and low precision, few in graphs."""
    physics, software = job.physics, job.software
    calls = 1.0 + physics.floor_tensor * (tensor > 1) + physics.floor_tensor_wide * (tensor >= 8)
    low = physics.floor_low_precision if job.low_precision else 1.0
    graphs = physics.floor_graphs if software.cuda_graphs != "none" else 1.0
    return software.launch_floor_seconds * calls * low * graphs


def moe_launch_floor(job: Job, local_experts: Number) -> Number:
    """CPU seconds to launch a mixture-of-experts layer's forward, host synchronisation of the routing included."""
    physics, software = job.physics, job.software
    share = {"none": 1.0, "partial": physics.moe_floor_partial_graphs, "full": physics.moe_floor_full_graphs}
    factor = physics.moe_floor_token_drop if software.token_drop else 1.0
    return (physics.moe_floor_seconds + physics.moe_floor_per_expert_seconds * local_experts) * min(share[software.cuda_graphs], factor)
