"""What a model, an accelerator and a cluster are: frozen, in base units, checked when made."""

from __future__ import annotations

from dataclasses import dataclass

from planner.errors import InputError

RECOMPUTE_MODULES = ("core_attn", "mlp", "layernorm", "moe_act", "moe", "mla_up_proj", "shared_experts")
PRECISIONS = ("bf16", "fp16", "fp8", "mxfp8", "nvfp4")


MOST = {"num_layers": 1_000, "hidden_size": 1_000_000, "num_attention_heads": 100_000, "vocab_size": 100_000_000}
"""Sizes beyond these are slips of the keyboard."""


def require(condition: bool, message: str) -> None:
    """Raise :class:`InputError` with ``message`` unless the condition holds."""
    if not condition:
        raise InputError(message)


def within(where: str, record: object, key: str, least: float, most: float) -> None:
    """Raise :class:`InputError` unless a figure of a record lies in a plausible range (base units)."""
    value = getattr(record, key)
    require(least <= value <= most, f"{where}: {key} = {value:g} must lie between {least:g} and {most:g}")


@dataclass(frozen=True, kw_only=True)
class Model:
    """The shape of a decoder-only transformer: everything that its size, FLOPs and layouts depend on."""

    name: str
    num_layers: int
    hidden_size: int
    num_attention_heads: int
    vocab_size: int
    num_key_value_heads: int = 0
    """0 in a file means one per attention head (no grouped-query attention)."""
    head_dim: int = 0
    """Width of one head; 0 in a file means hidden_size / num_attention_heads."""
    ffn_hidden_size: int = 0
    """Width of the dense MLP (also of the dense layers of a mixture of experts)."""
    gated_mlp: bool = True
    """True: gate, up and down matrices (SwiGLU, GeGLU); False: up and down."""
    tied_embeddings: bool = False
    norm: str = "rmsnorm"
    """"rmsnorm" (one weight per channel) or "layernorm" (weight and bias)."""
    norms_per_layer: int = 2
    qkv_bias: bool = False
    linear_bias: bool = False
    """Biases on the output projection and the MLP (and, in GPT-2 style, see qkv_bias for the rest)."""
    qk_norm: bool = False
    """A norm on queries and keys; its weights have head_dim entries each."""
    learned_positions: int = 0
    """Rows of a learned position embedding; 0 for rotary or ALiBi."""
    embedding_norm: bool = False
    dropout: bool = False
    """Hidden and attention dropout are on in the published recipe (GPT until about 2023)."""
    sliding_window: int = 0
    """Attention span in tokens of the windowed layers; 0 means full attention everywhere."""
    num_window_layers: int = 0
    num_experts: int = 0
    experts_per_token: int = 0
    moe_ffn_hidden_size: int = 0
    num_shared_experts: int = 0
    shared_ffn_hidden_size: int = 0
    """Summed width of the shared experts; 0 in a file means num_shared_experts x moe_ffn_hidden_size."""
    num_dense_layers: int = 0
    """In a mixture of experts: the leading layers that keep a dense MLP of ffn_hidden_size."""
    expert_bias: bool = False
    """Biases inside the experts (gpt-oss)."""
    router_bias: bool = False
    q_lora_rank: int = 0
    """Multi-head latent attention: rank of the query compression, 0 = queries are not compressed."""
    kv_lora_rank: int = 0
    """Multi-head latent attention is on when this is positive."""
    qk_nope_head_dim: int = 0
    qk_rope_head_dim: int = 0
    v_head_dim: int = 0
    num_mtp_layers: int = 0
    """Multi-token-prediction layers behind the last layer, each as costly as one layer and a head."""
    published_params: int = 0
    """The count that the publisher states, as the test's oracle; 0 when unknown."""
    published_active_params: int = 0
    published_includes_mtp: bool = False
    max_seq_len: int = 0
    aliases: tuple[str, ...] = ()
    source: str = ""

    def __post_init__(self) -> None:
        where = f"model '{self.name}'"
        for key in ("num_layers", "hidden_size", "num_attention_heads", "vocab_size"):
            value = getattr(self, key)
            require(0 < value <= MOST[key], f"{where}: {key} = {value} must lie between 1 and {MOST[key]:,}")
        if not self.num_key_value_heads:
            object.__setattr__(self, "num_key_value_heads", self.num_attention_heads)
        if not self.head_dim:
            require(
                self.hidden_size % self.num_attention_heads == 0,
                f"{where}: hidden_size = {self.hidden_size} does not divide by num_attention_heads = "
                f"{self.num_attention_heads}; state head_dim",
            )
            object.__setattr__(self, "head_dim", self.hidden_size // self.num_attention_heads)
        require(
            self.num_attention_heads % self.num_key_value_heads == 0,
            f"{where}: num_key_value_heads = {self.num_key_value_heads} must divide num_attention_heads = {self.num_attention_heads}",
        )
        if self.num_experts:
            require(
                0 < self.experts_per_token <= self.num_experts,
                f"{where}: experts_per_token = {self.experts_per_token} must lie in 1..num_experts = {self.num_experts}",
            )
            require(self.moe_ffn_hidden_size > 0, f"{where}: moe_ffn_hidden_size is missing")
            require(
                0 <= self.num_dense_layers < self.num_layers,
                f"{where}: num_dense_layers = {self.num_dense_layers} must be below num_layers = {self.num_layers}",
            )
            if self.num_shared_experts and not self.shared_ffn_hidden_size:
                width = self.num_shared_experts * self.moe_ffn_hidden_size
                object.__setattr__(self, "shared_ffn_hidden_size", width)
        has_dense = not self.num_experts or self.num_dense_layers > 0
        require(not has_dense or self.ffn_hidden_size > 0, f"{where}: ffn_hidden_size is missing")
        for key in ("ffn_hidden_size", "moe_ffn_hidden_size", "shared_ffn_hidden_size", "head_dim", "num_experts"):
            require(getattr(self, key) <= 10_000_000, f"{where}: {key} = {getattr(self, key)} must be at most 10,000,000")
        require(
            self.num_mtp_layers <= self.num_layers,
            f"{where}: num_mtp_layers = {self.num_mtp_layers} must be at most num_layers = {self.num_layers}",
        )
        require(
            self.num_window_layers <= self.num_layers,
            f"{where}: num_window_layers = {self.num_window_layers} must be at most num_layers = {self.num_layers}",
        )
        require(
            self.norm in ("rmsnorm", "layernorm"),
            f"{where}: norm = '{self.norm}' is not one of 'rmsnorm', 'layernorm'",
        )
        if self.kv_lora_rank:
            for key in ("qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim"):
                require(getattr(self, key) > 0, f"{where}: {key} is missing although kv_lora_rank is given")

    @property
    def qk_head_dim(self) -> int:
        """Width of one query or key head: with latent attention its plain and its rotary part."""
        return self.qk_nope_head_dim + self.qk_rope_head_dim if self.kv_lora_rank else self.head_dim

    @property
    def value_head_dim(self) -> int:
        """Width of one value head."""
        return self.v_head_dim if self.kv_lora_rank else self.head_dim

    @property
    def split_key_value_heads(self) -> int:
        """KV heads that a tensor group shares out; latent attention has one per query head."""
        return self.num_attention_heads if self.kv_lora_rank else self.num_key_value_heads

    @property
    def num_moe_layers(self) -> int:
        """Layers whose MLP is a mixture of experts."""
        return self.num_layers - self.num_dense_layers if self.num_experts else 0


@dataclass(frozen=True, kw_only=True)
class Gpu:
    """One accelerator as its data sheet states it: dense peaks, per-direction links."""

    name: str
    generation: str
    """File in generations/ that holds the measured efficiencies of this silicon."""
    memory_bytes: float
    """Usable by a process, as out-of-memory messages print it: an "80 GB" card has 79.2 GiB."""
    peak_bf16_flops: float
    """Dense, not sparse. A card without bf16 (V100) states 0 here and only peak_fp16_flops."""
    peak_fp16_flops: float
    peak_fp8_flops: float = 0.0
    peak_fp4_flops: float = 0.0
    hbm_bytes_per_s: float
    link_bytes_per_s: float
    """To all peers of the fast domain together, one direction."""
    nic_bytes_per_s: float
    """Network per GPU of the usual server, one direction."""
    num_sms: int
    power_watts: float
    price_usd_per_hour: float
    price_date: str
    default_cluster: str
    fast_domain: int = 8
    fp4_boost: float = 1.0
    """Rate of 4-bit products over the generation's first card."""
    sustained_share: float = 1.0
    """Share of the generation's compute efficiency that this card's power limit sustains."""
    aliases: tuple[str, ...] = ()
    source: str = ""

    def __post_init__(self) -> None:
        where = f"gpu '{self.name}'"
        within(where, self, "memory_bytes", 1e5, 1e14)
        within(where, self, "peak_fp16_flops", 1e9, 1e19)
        for key in ("peak_bf16_flops", "peak_fp8_flops", "peak_fp4_flops"):
            if getattr(self, key):
                within(where, self, key, 1e9, 1e19)
        for key in ("hbm_bytes_per_s", "link_bytes_per_s", "nic_bytes_per_s"):
            within(where, self, key, 1e5, 1e17)
        within(where, self, "num_sms", 1, 1e6)
        require(0 < self.sustained_share <= 1, f"{where}: sustained_share must lie in (0, 1]")


@dataclass(frozen=True, kw_only=True)
class Cluster:
    """How the GPUs are wired: a fast domain of ``gpus_per_node`` and a network between the domains."""

    name: str
    gpus_per_node: int
    """GPUs that reach each other over the fast link (8 in an HGX box, 72 in an NVL72 rack)."""
    link_bytes_per_s: float = 0.0
    """Fast link per GPU and direction; 0 in a file means the GPU's own."""
    nic_bytes_per_s: float = 0.0
    """Network per GPU and direction; 0 in a file means the GPU's usual server."""
    oversubscription: float = 1.0
    """Network bandwidth at the node over that across the fabric's core: 1 = non-blocking."""
    default_gpu: str = ""
    aliases: tuple[str, ...] = ()
    source: str = ""

    def __post_init__(self) -> None:
        where = f"cluster '{self.name}'"
        within(where, self, "gpus_per_node", 1, 1e6)
        for key in ("link_bytes_per_s", "nic_bytes_per_s"):
            if getattr(self, key):
                within(where, self, key, 1e5, 1e17)
        require(self.oversubscription >= 1, f"{where}: oversubscription = {self.oversubscription} must be at least 1")


@dataclass(frozen=True, kw_only=True)
class Generation:
    """Measured efficiencies of one generation of silicon; they hold for all software."""

    name: str
    matmul_efficiency: float
    """Largest share of the dense 16-bit peak that a big matrix product reaches, before tile and wave waste."""
    tile_rows: int
    tile_columns: int
    k_overhead: float
    """Extra inner-dimension steps that fill and drain a tile's pipeline."""
    hbm_efficiency: float
    flash1: float
    flash2: float
    fused: float
    """Shares of the 16-bit peak that the forward attention kernels reach: FlashAttention 1 and 2, cuDNN/TE/FA3."""
    backward_ratio: float
    """Rate of the backward attention kernel over the forward's."""
    fp8_share: float
    """Share of twice the 16-bit peak that an 8-bit product reaches before its casts; 0 = no 8-bit products."""
    fp4_share: float
    """The same for 4 bits, over four times the 16-bit peak."""
    cast_bytes: float
    """HBM traffic of casting, per element of a product's left operand."""
    rowwise_factor: float
    """Rate of row-wise scaled 8-bit products over tensor-wise ones."""
    link_efficiency: float
    nic_efficiency: float
    link_latency_seconds: float
    nic_latency_seconds: float
    node_latency_seconds: float
    link_all_to_all_efficiency: float
    nic_all_to_all_efficiency: float
    source: str = ""


@dataclass(frozen=True, kw_only=True)
class Software:
    """What one training stack of one era does with compute, communication and memory. Never tied to a model."""

    name: str
    framework: str
    """Whose layouts this stack runs: "megatron", "torchtitan", "deepspeed" or "other"."""
    matmul_quality: float
    """Rate of this stack's matrix products over the generation's."""
    elementwise_passes: float
    """HBM traffic of the element-wise kernels over that of the fused minimum."""
    eager_norm: bool = False
    """Norms run as separate framework kernels with fp32 temporaries instead of one fused kernel."""
    compiled: bool = False
    """A graph compiler fuses the element-wise kernels and norms."""
    launch_floor_seconds: float
    """CPU time to launch one dense layer's forward kernels."""
    fixed_step_seconds: float
    """Per step: optimizer launches, logging, data loading that does not overlap."""
    cuda_graphs: str = "none"
    """"none", "partial" or "full" (whole iteration)."""
    attention_kernel: str = "fused"
    """"flash1", "flash2", "fused" (cuDNN, TE, FA3), or not flash: "fused_softmax", "torch"."""
    fp8_rowwise: bool = False
    """8-bit products are scaled per row instead of per tensor."""
    selective_recompute: str = "modules"
    """What "selective" means: "modules" (those named next) or "ops" (every second matrix product is kept)."""
    recompute_modules: tuple[str, ...] = ("core_attn",)
    """Modules that a selective recompute runs again: core_attn, mlp, layernorm, moe_act, moe, mla_up_proj, shared_experts."""
    tensor_exposed_forward: float
    tensor_exposed_backward: float
    """Shares of the tensor-parallel transfers that compute does not hide."""
    data_overlap: bool
    """Whether gradient reduction and parameter gathering overlap with compute at all."""
    p2p_scattered: bool
    """Whether a stage boundary sends 1/tensor of the activations per GPU."""
    post_validation: bool = False
    """The optimizer steps before the global gradient norm is known and takes back what was wrong: no stage waits for the others."""
    expert_exposed: float = 0.75
    """Share of the expert all-to-all that compute does not hide."""
    token_drop: bool = False
    """Experts have fixed capacity: no host synchronisation per layer."""
    single_nic_share: float = 0.0
    """Sharded-weight transfers over nodes use this share of one NIC; 0 = all NICs, hierarchically."""
    vocab_multiple: int = 1
    """The vocabulary is padded to a multiple of this x tensor_parallel; 1 = to the tensor group alone."""
    weight_bytes: float
    gradient_bytes: float
    """Bytes per parameter that gradients occupy (2 or 4; 8 = fp32 and half)."""
    reduce_bytes: float = 0.0
    """Bytes per parameter in gradient reduction; 0 in a file means gradient_bytes."""
    optimizer_bytes: float
    """Master weights and moments per parameter."""
    moe_optimizer_bytes: float = 0.0
    """The same for mixtures of experts, whose recipes may keep moments in half precision; 0 in a file means the same."""
    optimizer_step_bytes: float = 0.0
    """Temporary copies per parameter while the optimizer steps (unsharded by ZeRO-1 where states are)."""
    sharded_weights_bytes: float = 0.0
    """Bytes per parameter of ZeRO-3's sharded weights; 0 in a file means weight_bytes. FSDP keeps fp32 shards."""
    sharded_gradients: bool = True
    """Whether ZeRO-2 and 3 shard gradients."""
    surplus_first: bool = False
    """Layers that do not divide go to the first stages, not to the middle ones: the stack cuts its pipelines itself."""
    pipeline_whole_gradients: bool = False
    """With pipeline stages gradients accumulate unsharded whatever the ZeRO stage, and are reduced once per step."""
    lazy_gradients: bool = False
    """Gradients live from the backward to the step only: without accumulation they never meet the activations' peak."""
    logit_bytes: float
    """Bytes per logit at the loss: copies in half and fp32 together."""
    tensor_logit_bytes: float = 0.0
    """The same inside a tensor group, where a framework computes a parallel loss; 0 in a file means the same."""
    tensor_transient_bytes: float = 0.0
    """Gathered activations live in a tensor-parallel backward, bytes per token and hidden channel."""
    logits_whole: bool = False
    """Every tensor rank holds all logits."""
    logits_kept_bytes: float = 0.0
    """Bytes per logit that stay while the last stage's layers run backward."""
    norm_input_bytes: float = 8.0
    """Bytes per token and channel kept for norms and the inputs of the linear layers."""
    gathered_inputs: bool = False
    """The gathered inputs of the linear layers are kept: sequence parallelism does not divide them."""
    gated_mlp_bytes: float = 6.0
    plain_mlp_bytes: float = 4.0
    """Bytes per token and MLP channel kept, gated and not."""
    rotary_copies_bytes: float = 0.0
    """Extra copies of queries and keys that an eager rotary embedding keeps, bytes per element."""
    score_bytes: float = 5.0
    """Bytes per attention score kept where attention is not a flash kernel."""
    dummy_gradient: float = 0.0
    """Weight-sized gradient scratch, in layers."""
    workspace_bytes: float = 0.0
    bucket_bytes: float = 0.0
    """Gradient reduction buckets, held whatever the ZeRO stage."""
    keeps_stage_outputs: bool = False
    """The pipeline engine keeps the output of every micro-batch in flight."""
    fragmentation: float = 0.05
    """Share of the free room that the allocator reserves beyond the tensors, at most this share of them."""
    context_bytes: float
    communicator_bytes: float
    """CUDA context, and buffers per communicator group; only their sum is well identified."""
    reserve_share: float = 0.03
    """Part of the tensors added to the need before a verdict (unusable fragments)."""
    memory_uncertainty: float = 0.03
    """Standard deviation of the log error of predicted tensors where this stack was measured; more where it was not."""
    aliases: tuple[str, ...] = ()
    source: str = ""

    def __post_init__(self) -> None:
        where = f"software '{self.name}'"
        for key, legal in (
            ("framework", ("megatron", "torchtitan", "deepspeed", "other")),
            ("cuda_graphs", ("none", "partial", "full")),
            ("attention_kernel", ("flash1", "flash2", "fused", "fused_softmax", "torch")),
            ("selective_recompute", ("modules", "ops")),
        ):
            value = getattr(self, key)
            require(value in legal, f"{where}: {key} = '{value}' is not one of {', '.join(legal)}")
        within(where, self, "matmul_quality", 0.01, 10)
        within(where, self, "vocab_multiple", 1, 1e6)
        within(where, self, "memory_uncertainty", 0, 1)
        for module in self.recompute_modules:
            require(
                module in RECOMPUTE_MODULES,
                f"{where}: recompute_modules has '{module}', not one of {', '.join(RECOMPUTE_MODULES)}",
            )
        if not self.reduce_bytes:
            object.__setattr__(self, "reduce_bytes", self.gradient_bytes)
        if not self.tensor_logit_bytes:
            object.__setattr__(self, "tensor_logit_bytes", self.logit_bytes)
        if not self.moe_optimizer_bytes:
            object.__setattr__(self, "moe_optimizer_bytes", self.optimizer_bytes)
        if not self.sharded_weights_bytes:
            object.__setattr__(self, "sharded_weights_bytes", self.weight_bytes)

    @property
    def flash_attention(self) -> bool:
        """Whether attention never materialises its score matrix."""
        return self.attention_kernel in ("flash1", "flash2", "fused")


@dataclass(frozen=True, kw_only=True)
class Physics:
    """Constants that hold for all hardware and software: exponents, shares, passes over memory."""

    name: str
    wave_exponent: float
    """Rate of a product falls with this power of the share of tiles in its last wave."""
    attention_head_exponent: float
    attention_sequence_half: float
    """Attention reaches half of its rate at this sequence length."""
    score_traffic_bytes: float
    """HBM bytes per score and forward pass of attention that is not a flash kernel, softmax fused."""
    torch_softmax_factor: float
    score_backward_factor: float
    misaligned_head_slowdown: float
    """Batched products whose head size is not a multiple of 8."""
    norm_bytes: float
    """HBM bytes per element and pass-share of a fused norm."""
    eager_norm_bytes: float
    compile_factor: float
    """Element-wise traffic left by a graph compiler."""
    accumulate_share: float
    """Share of the weight-gradient accumulation traffic that is not hidden inside the product."""
    floor_backward: float
    """Launch time of a backward layer over a forward one."""
    floor_tensor: float
    floor_tensor_wide: float
    """Added launch time with tensor parallelism, and from 8 GPUs on."""
    floor_low_precision: float
    floor_graphs: float
    """Share of the launch time left under CUDA graphs."""
    moe_floor_seconds: float
    moe_floor_per_expert_seconds: float
    moe_floor_partial_graphs: float
    moe_floor_full_graphs: float
    moe_floor_token_drop: float
    context_exposed: float
    """Share of the K/V exchange that stays exposed, forward; twice that backward."""
    data_window: float
    """Share of one micro-batch's compute that hides gradient reduction or parameter gathering."""
    fill_window: float
    """Share of the pipeline's fill that does."""
    data_residue: float
    """Share of data-parallel traffic exposed however long the window."""
    fsdp_disturbance: float
    """Compute slowed by ZeRO-3 transfers: share of their bytes over the fast link's bandwidth."""
    fsdp_first_layer: float
    """Transfers per step that nothing hides, in layers."""
    optimizer_traffic_bytes: float
    """HBM bytes per sharded parameter and step."""
    half_optimizer_traffic_bytes: float
    """The same for an optimizer whose weights and moments are all in half precision."""
    gradient_passes: float
    """Passes over the gradients per step, in units of their bytes."""
    fixed_step_graphs: float
    p2p_exposed: float
    p2p_latency_seconds: float
    micro_batch_seconds: float
    micro_batch_no_pipeline_seconds: float
    straggler: float
    """Step time added per doubling of the nodes."""
    zero_bubble_residue: float
    loss_traffic_bytes: float
    """HBM bytes per logit and micro-batch."""
    embedding_traffic_bytes: float
    grouped_factor: float
    """Rate of the experts' grouped products over one dense product of their size."""
    expert_imbalance: float
    permutation_passes: float
    loss_uncertainty: float
    """Standard deviation of the need per share of logits and transients in it."""
    room_uncertainty_bytes: float
    fits_sigmas: float
    oom_sigmas: float
    """A layout fits below usable - fits_sigmas, is out of memory above usable + oom_sigmas, at risk between."""
    source: str = ""


@dataclass(frozen=True, kw_only=True)
class Operations:
    """What surrounds a training run, as one published run reported it: failures, restarts, checkpoints, evaluation, power."""

    name: str
    interruptions_per_1000_gpu_days: float
    """Unexpected ends of the job, whatever their cause."""
    restart_seconds: float
    """From a failure to the first new step: detecting it, replacing the node, starting, warming up; loading the checkpoint apart."""
    storage_bytes_per_s: float
    """Written to shared storage per node, all nodes writing at once."""
    storage_read_bytes_per_s: float
    """The same, read."""
    checkpoint_fixed_seconds: float
    """Training waits so long for every checkpoint, whatever its size: planning, barriers, metadata."""
    copy_bytes_per_s: float
    """From a GPU to its host; while an asynchronous checkpoint is copied, training waits."""
    asynchronous: bool
    """Checkpoints are written behind the training, once they are copied to the hosts."""
    checkpoint_interval_seconds: float = 0.0
    """Between two checkpoints; 0 = the best one."""
    evaluation_share: float
    """Evaluation's seconds over training's."""
    node_share: float
    """Share of the interruptions that take a node out of service."""
    repair_seconds: float
    """Until a node that was taken out is back."""
    spare_probability: float
    """With which a spare node shall be at hand."""
    power_usage_effectiveness: float
    """Power of the site over that of the machines."""
    aliases: tuple[str, ...] = ()
    source: str = ""

    def __post_init__(self) -> None:
        where = f"operations '{self.name}'"
        within(where, self, "interruptions_per_1000_gpu_days", 0, 1e6)
        for key in ("restart_seconds", "checkpoint_fixed_seconds", "checkpoint_interval_seconds", "repair_seconds"):
            within(where, self, key, 0, 1e9)
        for key in ("storage_bytes_per_s", "storage_read_bytes_per_s", "copy_bytes_per_s"):
            within(where, self, key, 1e3, 1e15)
        within(where, self, "evaluation_share", 0, 10)
        within(where, self, "node_share", 0, 1)
        within(where, self, "power_usage_effectiveness", 1, 10)
        require(0 <= self.spare_probability < 1, f"{where}: spare_probability = {self.spare_probability:g} must lie in [0, 1)")
