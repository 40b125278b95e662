"""Bytes on one GPU of one pipeline stage, in named parts, and the verdict on them.

Symbols: T = s b / c tokens of a micro-batch on a rank, t tensor group, t_s = t with sequence parallelism and 1 without,
S = data x context replicas that ZeRO shards over, n micro-batches in flight, V padded vocabulary.
Constants per stack come from the software file.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, fields

import numpy as np

from planner.cost import parameters
from planner.cost.arrays import Floats, Number
from planner.cost.communication import gathers_weights
from planner.cost.schedules import SCHEDULES as SCHEDULE_TABLE
from planner.cost.stages import Stages, covered_layers, layer_kinds
from planner.scenario import Job, optimizer_state_bytes
from solver.grouping import distinct
from solver.layout import SCHEDULES, SELECTIVE, Columns, Ints, num_micro_batches


@dataclass(frozen=True)
class Memory:
    """The parts of one stage's memory, bytes, arrays of one length; ``tensors`` is what torch calls allocated."""

    weights: Floats
    gradients: Floats
    optimizer: Floats
    activations: Floats
    logits: Floats
    """Head input, logits and loss, above what the transient needs anyway."""
    transient: Floats
    """Live gradients and, under full recompute, one whole layer."""
    buffers: Floats
    """ZeRO-3 gathers, reduction buckets, pipeline transfers, scratch."""
    context: Floats
    """CUDA context and communicators, outside the allocator."""

    @property
    def tensors(self) -> Floats:
        """All tensors at the peak."""
        parts = [getattr(self, field.name) for field in fields(self) if field.name != "context"]
        return np.asarray(sum(parts))

    def take(self, index: object) -> Memory:
        """The selected rows."""
        return Memory(*(getattr(self, field.name)[index] for field in fields(self)))


def layer_activation_bytes(job: Job, x: Columns, *, moe: bool) -> Number:
    """Kept by one layer for one micro-batch without recompute.

    With flash attention, a fused gated MLP and sequence parallelism T (8h + 4 h_q + 4 h_kv + 6f) / t.
    Source: Korthikanti et al. 2022, section 4, extended to grouped queries, gated MLPs, latent attention and experts;
    bytes per stack fitted on measured peaks.
    """
    tokens = job.rank_tokens(x)
    kept = _norm_inputs(job, tokens, x) + _attention_kept(job, tokens, x)
    return kept + (_experts_kept(job, tokens, x) if moe else _mlp_kept(job, tokens, job.model.ffn_hidden_size, x))


def _hidden_share(job: Job, x: Columns) -> Number:
    """Ranks that divide the norms and residuals."""
    return x.tensor_parallel if job.sequence_parallel else 1


def _linear_input_bytes(job: Job) -> float:
    """Bytes per element of a linear layer's kept input."""
    return 1.0 if job.precision in ("fp8", "mxfp8") else 2.0


def _norm_inputs(job: Job, tokens: Number, x: Columns) -> Number:
    s, h = job.software, job.model.hidden_size
    per_two_norms = s.norm_input_bytes * job.model.norms_per_layer / 2
    linear_inputs = 4.0
    own = per_two_norms - linear_inputs
    cast = linear_inputs * _linear_input_bytes(job) / 2
    share = _hidden_share(job, x)
    masks = 2.0 if job.dropout else 0.0
    return tokens * h * ((own + masks) / share + cast / (1 if s.gathered_inputs else share))


def _attention_kept(job: Job, tokens: Number, x: Columns) -> Number:
    model, s, t = job.model, job.software, x.tensor_parallel
    a = model.num_attention_heads
    if model.kv_lora_rank:
        qk, share = model.qk_head_dim, _hidden_share(job, x)
        latent = 4.0 * (model.q_lora_rank + model.kv_lora_rank) / share
        return tokens * (latent + (4.0 * a * qk + 4.0 * a * model.v_head_dim) / t)
    query, key = a * model.head_dim, parameters.key_value_width(model, t)
    projections = 2.0 * query + 4.0 * key + s.rotary_copies_bytes * (query + key)
    output = _linear_input_bytes(job) * query + 4.0 * a
    return tokens * (projections + output) / t + _scores_kept(job, tokens, x, False)


def _channel_bytes(job: Job) -> float:
    """Bytes per token and MLP channel that the stack keeps."""
    return job.software.gated_mlp_bytes if job.model.gated_mlp else job.software.plain_mlp_bytes


def _mlp_kept(job: Job, tokens: Number, width: int, x: Columns) -> Number:
    return tokens * width * (_channel_bytes(job) - (2.0 - _linear_input_bytes(job))) / x.tensor_parallel


def _experts_kept(job: Job, tokens: Number, x: Columns) -> Number:
    """Router probabilities, dispatched and combined tokens, expert MLPs; expert parallelism divides none of it."""
    model = job.model
    per_visit = 4.0 * model.hidden_size + _channel_bytes(job) * model.moe_ffn_hidden_size
    routed = tokens * model.experts_per_token * per_visit / _hidden_share(job, x)
    return 8.0 * tokens * model.num_experts + routed + _mlp_kept(job, tokens, model.shared_ffn_hidden_size, x)


MODULE_SAVING = 0.78
"""Measured share of a module's kept bytes that recomputing it saves (0.75 to 0.8 on a latent-attention model)."""


def selective_activation_bytes(job: Job, x: Columns, *, moe: bool) -> Number:
    """Kept by one layer under selective recompute: without its modules' tensors, or every second product ("ops")."""
    whole = layer_activation_bytes(job, x, moe=moe)
    tokens = job.rank_tokens(x)
    if job.software.selective_recompute == "ops":
        return np.minimum(whole, _every_second_product(job, tokens, x, moe=moe))
    saved = 0.0 * tokens
    for module in job.software.recompute_modules:
        share = 1.0 if module == "core_attn" else MODULE_SAVING  # the score matrix is not kept at all
        saved = saved + share * SAVED_BY[module](job, tokens, x, moe)
    return np.maximum(whole - saved, checkpoint_bytes(job, x))


def _scores_kept(job: Job, tokens: Number, x: Columns, moe: bool) -> Number:
    s = job.software
    scores = 0.0 if s.flash_attention else s.score_bytes * job.model.num_attention_heads * job.seq_len / x.context_parallel
    return tokens * scores / x.tensor_parallel


def _mlp_saved(job: Job, tokens: Number, x: Columns, moe: bool) -> Number:
    return 0.0 * tokens if moe else _mlp_kept(job, tokens, job.model.ffn_hidden_size, x)


def _norms_saved(job: Job, tokens: Number, x: Columns, moe: bool) -> Number:
    return 4.0 * tokens * job.model.hidden_size / _hidden_share(job, x)


def _moe_act_saved(job: Job, tokens: Number, x: Columns, moe: bool) -> Number:
    kept = 2.0 * job.model.experts_per_token * job.model.moe_ffn_hidden_size / _hidden_share(job, x)
    return tokens * kept * moe


def _moe_saved(job: Job, tokens: Number, x: Columns, moe: bool) -> Number:
    return _experts_kept(job, tokens, x) if moe else 0.0 * tokens


def _up_projections_saved(job: Job, tokens: Number, x: Columns, moe: bool) -> Number:
    model = job.model
    return tokens * model.num_attention_heads * (4.0 * model.qk_head_dim + 2.0 * model.v_head_dim) / x.tensor_parallel


def _shared_experts_saved(job: Job, tokens: Number, x: Columns, moe: bool) -> Number:
    return _mlp_kept(job, tokens, job.model.shared_ffn_hidden_size, x) * moe


SAVED_BY: dict[str, Callable[[Job, Number, Columns, bool], Number]] = {
    "core_attn": _scores_kept,
    "mlp": _mlp_saved,
    "layernorm": _norms_saved,
    "moe_act": _moe_act_saved,
    "moe": _moe_saved,
    "mla_up_proj": _up_projections_saved,
    "shared_experts": _shared_experts_saved,
}
"""Bytes that each module keeps."""


def _every_second_product(job: Job, tokens: Number, x: Columns, *, moe: bool) -> Number:
    """torchtitan's op-level recompute: block input, attention output, every second product, unreduced partial sums."""
    model, t = job.model, x.tensor_parallel
    h, width = model.hidden_size, model.num_attention_heads * model.head_dim
    routed = model.experts_per_token * model.moe_ffn_hidden_size + model.shared_ffn_hidden_size
    channels = routed if moe else model.ffn_hidden_size
    products = 2.0 * width + 2.0 * parameters.key_value_width(model, t) + 2.0 * channels + 2.0 * h
    partial_sums = 2.0 * h * (1.0 - 1.0 / t)
    return tokens * (2.0 * h / _hidden_share(job, x) + (2.0 * width + products) / t + partial_sums)


def checkpoint_bytes(job: Job, x: Columns) -> Number:
    """Kept by one layer under full recompute: its input, 2 T h / t_s."""
    return 2.0 * job.rank_tokens(x) * job.model.hidden_size / _hidden_share(job, x)


def in_flight(x: Columns, stage_rank: Ints, num_micro_batches: Ints) -> Floats:
    """Micro-batches held at once on a stage, by schedule."""
    held = np.zeros(len(x))
    for code in np.unique(x.schedule):
        schedule = SCHEDULE_TABLE[SCHEDULES[code]]
        count = schedule.in_flight(num_micro_batches, x.pipeline_parallel, x.virtual_pipeline, stage_rank)
        held = np.where(x.schedule == code, count, held)
    return np.asarray(np.maximum(held, 1.0))


@dataclass(frozen=True)
class Params:
    """Parameters of one stage on one GPU, and the replicas over which ZeRO shards them."""

    dense: Floats
    expert: Floats
    dense_replicas: Number
    expert_replicas: Number

    @property
    def whole(self) -> Floats:
        """All parameters that the stage's GPU holds before sharding."""
        return self.dense + self.expert

    @property
    def sharded(self) -> Floats:
        """What is left of them when every replica keeps its share."""
        return np.asarray(self.dense / self.dense_replicas + self.expert / self.expert_replicas)


@dataclass(frozen=True)
class Pieces:
    """Parameters of a layer and of the ends on one GPU: arrays, one entry per row."""

    dense_layer: Number
    moe_layer: Number
    experts: Number
    embedding: Number
    head: Number
    words: Number
    """Embedding matrix alone, unpadded."""


def pieces(job: Job, x: Columns) -> Pieces:
    """The parameter pieces of every row's mesh, computed once per distinct mesh."""
    first, key = distinct([x.tensor_parallel, x.expert_parallel, x.expert_tensor_parallel])
    y, model, multiple = x.take(first), job.model, job.software.vocab_multiple
    t, zeros = y.tensor_parallel, np.zeros(len(first))
    found = Pieces(
        dense_layer=parameters.dense_layer(model, t) if model.ffn_hidden_size else zeros,
        moe_layer=parameters.moe_layer(model, t) if model.num_moe_layers else zeros,
        experts=parameters.experts(model, y.expert_parallel, y.expert_tensor_parallel) if model.num_moe_layers else zeros,
        embedding=parameters.embedding(model, t, multiple),
        head=parameters.head(model, t, multiple),
        words=parameters.padded_vocabulary(model, t, 1) * model.hidden_size / t,
    )
    return Pieces(*(np.asarray(getattr(found, field.name))[key] for field in fields(Pieces)))


def stage_parameters(job: Job, x: Columns, stage: Stages, piece: Pieces) -> Params:
    """Parameters of the stage on one GPU, embedding and head where it holds them; tied ends on one GPU count once.

    Multi-token prediction: a projection of 2 h to h that the tensor group splits and three norms per layer, and a copy of the
    embedding where the stage lacks it. Source: DeepSeek-AI 2024, section 2.2; counted on Megatron-Core's own model.
    """
    model = job.model
    dense = stage.dense_layers * piece.dense_layer + stage.moe_layers * piece.moe_layer
    both_ends = (stage.has_embedding & stage.has_head).astype(bool) & model.tied_embeddings
    dense = dense + stage.has_embedding * piece.embedding
    dense = dense + stage.has_head * np.where(both_ends, parameters.norm_weights(model), piece.head)
    if job.num_mtp_layers:
        h = model.hidden_size
        dense = dense + stage.has_head * job.num_mtp_layers * (2 * h**2 / x.tensor_parallel + 3 * h)
        dense = dense + (stage.has_head & ~stage.has_embedding) * piece.embedding
    grid = x.tensor_parallel * x.context_parallel * x.data_parallel
    expert_replicas = np.maximum(grid // (x.expert_parallel * x.expert_tensor_parallel), 1)
    return Params(dense, stage.moe_layers * piece.experts, x.data_parallel * x.context_parallel, expert_replicas)


def state_bytes(job: Job, x: Columns, params: Params) -> tuple[Floats, Floats, Floats, Floats]:
    """Weights, gradients, optimizer states, and temporary copies of the optimizer's step.

    ZeRO-1 shards the optimizer, ZeRO-2 gradients as well, ZeRO-3 weights too, each over the replicas: one replica
    saves nothing. Source: Rajbhandari et al. 2020, figure 1; bytes per stack.
    """
    s = job.software
    zero, gathered = x.zero_stage, gathers_weights(x.zero_stage, params.dense_replicas)
    sharded, whole = params.sharded, params.whole
    after_zero1 = np.where(zero >= 1, sharded, whole)
    weights = np.where(gathered, s.sharded_weights_bytes * sharded, s.weight_bytes * whole)
    split_gradients = (zero >= 2) & s.sharded_gradients & ((x.pipeline_parallel == 1) | (not s.pipeline_whole_gradients))
    gradients = s.gradient_bytes * np.where(split_gradients, sharded, whole)
    states = s.moe_optimizer_bytes if job.model.num_experts else s.optimizer_bytes
    optimizer = optimizer_state_bytes(states, job.optimizer) * after_zero1
    if s.sharded_weights_bytes > s.weight_bytes:
        # the master weights are the shards themselves: below ZeRO-3 they sit beside the working copy
        optimizer = optimizer + s.sharded_weights_bytes * np.where(gathered, 0.0, after_zero1)
    step_copies = s.optimizer_step_bytes * np.where(gathered, 0.0, after_zero1)
    return weights, gradients, optimizer, step_copies


@dataclass(frozen=True)
class Loads:
    """Bytes of one layer and one micro-batch under each row's mesh: arrays, one entry per row."""

    dense: Floats
    dense_selective: Floats
    moe: Floats
    moe_selective: Floats
    checkpoint: Floats
    mlp_gradient: Floats
    hidden: Floats
    """T h: one activation, not divided."""
    hidden_share: Floats
    """T h / t_s."""
    logits: Floats
    """Number of logits on a rank."""
    piece: Pieces
    num_micro_batches: Ints
    communicators: Floats

    @property
    def largest(self) -> Floats:
        """The heavier kind of layer."""
        return np.maximum(self.dense, self.moe)


LOAD_KEYS = ("tensor_parallel", "context_parallel", "expert_parallel", "expert_tensor_parallel", "micro_batch_size")


def loads(job: Job, x: Columns) -> Loads:
    """The loads of every row, computed once per distinct mesh and micro-batch."""
    first, key = distinct(getattr(x, axis) for axis in LOAD_KEYS)
    y, model, s = x.take(first), job.model, job.software
    tokens = job.rank_tokens(y)
    zeros = np.zeros(len(first))
    kinds = layer_kinds(model)
    whole = {moe: layer_activation_bytes(job, y, moe=moe) if here else zeros for moe, here in kinds.items()}
    some = {moe: selective_activation_bytes(job, y, moe=moe) if here else zeros for moe, here in kinds.items()}
    vocabulary = parameters.padded_vocabulary(model, y.tensor_parallel, s.vocab_multiple)
    split_axes = ("tensor_parallel", "pipeline_parallel", "context_parallel", "data_parallel", "expert_parallel")
    return Loads(
        dense=whole[False][key],
        dense_selective=some[False][key],
        moe=whole[True][key],
        moe_selective=some[True][key],
        checkpoint=checkpoint_bytes(job, y)[key],
        mlp_gradient=_mlp_gradient_bytes(job, y)[key],
        hidden=(tokens * model.hidden_size)[key],
        hidden_share=(tokens * model.hidden_size / _hidden_share(job, y))[key],
        logits=(tokens * vocabulary / (1 if s.logits_whole else y.tensor_parallel))[key],
        piece=pieces(job, x),
        num_micro_batches=num_micro_batches(x, job.global_batch_size),
        communicators=1.0 + sum((getattr(x, axis) > 1).astype(float) for axis in split_axes),
    )


def buffer_bytes(job: Job, x: Columns, params: Params, held: Floats, stage: Stages, load: Loads) -> Floats:
    """Gathered blocks of ZeRO-3, reduction buckets, stage boundaries, weight-gradient scratch, workspace."""
    model, s, piece = job.model, job.software, load.piece
    block = piece.moe_layer if model.num_moe_layers else piece.dense_layer
    scratch = s.dummy_gradient * 2.0 * block
    if model.num_moe_layers:
        one_expert = piece.experts * x.expert_parallel / model.num_experts
        scratch = scratch + s.dummy_gradient * 2.0 * one_expert
        block = block + np.where(params.expert_replicas > 1, piece.experts, 0.0)
    ends = np.maximum(stage.has_embedding, stage.has_head) * piece.words
    gathered = 2.0 * (2.0 * block + ends) * 2.0 + 6.0 * np.maximum(block, ends)
    total = np.where(gathers_weights(x.zero_stage, params.dense_replicas), gathered, 0.0) + scratch + s.workspace_bytes + s.bucket_bytes
    boundary = 4.0 * load.hidden_share + (2.0 * held * load.hidden if s.keeps_stage_outputs else 0.0)
    ids = stage.has_embedding * held * load.hidden * (8.0 / model.hidden_size + (1.0 if job.dropout else 0.0))
    return np.asarray(total + np.where(x.pipeline_parallel > 1, boundary, 0.0) + ids)


def activation_bytes(x: Columns, stage: Stages, covered: Ints, held: Floats, load: Loads) -> Floats:
    """Kept activations of the stage: micro-batches in flight x layers, under each layer's recompute."""
    selective = x.recompute == SELECTIVE
    uncovered = 1.0 - covered / np.maximum(stage.layers, 1)
    kept = stage.dense_layers * np.where(selective, load.dense_selective, load.dense)
    kept = kept + stage.moe_layers * np.where(selective, load.moe_selective, load.moe)
    return held * (uncovered * kept + covered * load.checkpoint)


def stage_memory(job: Job, x: Columns, stage: Stages, load: Loads) -> Memory:
    """The memory of one stage of every layout: rows of ``stage`` and ``load`` belong to rows of ``x``.

    At the peak either the loss or the backward's transient is live beside what was kept; gradients that a stack frees
    early join only after the activations are gone; the optimizer's copies come when both are.
    """
    s = job.software
    params = stage_parameters(job, x, stage, load.piece)
    weights, gradients, optimizer, step_copies = state_bytes(job, x, params)
    held = in_flight(x, stage.rank, load.num_micro_batches)
    covered = covered_layers(x, stage)
    activations = activation_bytes(x, stage, covered, held, load)
    live_layer = load.largest + 2.0 * load.hidden + 0.35 * load.mlp_gradient
    gathered = np.where(x.tensor_parallel > 1, s.tensor_transient_bytes * load.hidden, 0.0)
    transient = np.where(covered > 0, live_layer, load.mlp_gradient) + gathered
    heads = stage.has_head * (1 + job.num_mtp_layers)
    per_logit = np.where(x.tensor_parallel > 1, s.tensor_logit_bytes, s.logit_bytes)
    peak_logits, kept_logits = heads * per_logit * load.logits, heads * s.logits_kept_bytes * load.logits
    loss = heads * 4.0 * load.hidden_share + np.maximum(peak_logits - transient, kept_logits)
    if s.lazy_gradients:
        after_forward = activations + loss + transient
        late = np.maximum(gradients + load.largest - after_forward, 0.0)
        gradients = np.where(load.num_micro_batches == 1, late, gradients)
    return Memory(
        weights=weights,
        gradients=gradients,
        optimizer=optimizer,
        activations=activations,
        logits=loss,
        transient=np.maximum(transient, step_copies - activations - loss),
        buffers=buffer_bytes(job, x, params, held, stage, load),
        context=s.context_bytes + s.communicator_bytes * load.communicators,
    )


def _mlp_gradient_bytes(job: Job, x: Columns) -> Number:
    """Gradients of one MLP's intermediate tensors, live while its backward runs."""
    model = job.model
    tokens = job.rank_tokens(x)
    per_channel = 6.0 if model.gated_mlp else 4.0
    dense = per_channel * model.ffn_hidden_size * tokens / x.tensor_parallel
    if not model.num_moe_layers:
        return dense
    routed = 4.0 * model.moe_ffn_hidden_size * tokens * model.experts_per_token / x.tensor_parallel
    return np.maximum(dense, routed)


def need_bytes(job: Job, memory: Memory) -> Floats:
    """What the card must offer: tensors with their unusable fragments, CUDA context and communicators."""
    return np.asarray(memory.tensors * (1.0 + job.software.reserve_share) + memory.context)


def reserved_bytes(job: Job, memory: Memory) -> Floats:
    """What the allocator reserves: it takes a share of the room that is left, and gives it back under pressure."""
    room = np.maximum(job.gpu.memory_bytes - memory.context - memory.tensors, 0.0)
    return np.asarray(memory.tensors + job.software.fragmentation * np.minimum(memory.tensors, room))


VERDICTS = ("fits", "at risk", "out of memory")
FITS, AT_RISK, OUT_OF_MEMORY = range(len(VERDICTS))

MOST_ROOM_SHARE = 0.25
"""The fixed part of the uncertainty is at most this share of a need: no card of a few GiB is evidence-backed."""


def log_error(job: Job, need: Floats, loose: Floats) -> Floats:
    """Standard deviation of the need's log error; ``loose`` are the bytes of logits and transients in it.

    Source: fitted on 1,881 verdicts of the measured runs.
    """
    physics = job.physics
    share = physics.loss_uncertainty * loose / need
    return np.asarray(
        np.sqrt(job.software.memory_uncertainty**2 + share**2 + np.minimum(physics.room_uncertainty_bytes / need, MOST_ROOM_SHARE) ** 2)
    )


def verdicts(job: Job, need: Floats, loose: Floats) -> Ints:
    """Indices into :data:`VERDICTS`: fits and out of memory are stated only some standard deviations from the limit."""
    sigmas = np.log(need / job.gpu.memory_bytes) / log_error(job, need, loose)
    short = np.where(sigmas > job.physics.oom_sigmas, OUT_OF_MEMORY, AT_RISK)
    return np.where(sigmas < -job.physics.fits_sigmas, FITS, short).astype(np.int64)
