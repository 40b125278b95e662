"""The arithmetic of the field on a napkin: even shares, GPT activations, ideal bubbles. Shown beside the model's figures."""

from __future__ import annotations

from dataclasses import dataclass

from planner.cost import flops, parameters
from planner.scenario import Scenario
from planner.units import SECONDS_PER_DAY
from solver.layout import Layout, num_micro_batches

ASSUMED_MFU = 0.4


def activation_factor(scenario: Scenario) -> float:
    """Bytes per token and hidden channel that one layer keeps: 8 + 4 h_q/h + 4 h_kv/h + 6 f/h (fused gated MLP: 33.5 for 70B).

    GPT's is 34 (Korthikanti et al. 2022, eq. 2, with flash attention).
    """
    model = scenario.job.model
    h = model.hidden_size
    mlp = (6.0 if model.gated_mlp else 4.0) * max(model.ffn_hidden_size, model.experts_per_token * model.moe_ffn_hidden_size)
    heads = 4.0 * (model.num_attention_heads + model.num_key_value_heads) * model.head_dim
    return 8.0 + (heads + mlp) / h


@dataclass(frozen=True)
class Figure:
    """One napkin figure: its name, value in base units, unit and formula."""

    name: str
    value: float
    unit: str
    formula: str


def bubble_share(stages: int, micro_batches: int, chunks: int) -> float:
    """(p - 1) / v over (m + (p - 1) / v): the idle share of an ideal pipeline.

    >>> round(bubble_share(4, 16, 1), 3), round(bubble_share(4, 16, 2), 3)
    (0.158, 0.086)
    """
    idle = (stages - 1) / chunks
    return idle / (micro_batches + idle)


def figures(scenario: Scenario, layout: Layout) -> list[Figure]:
    """The worked example of the field for any layout: even shares of the parameters over tensor x pipeline GPUs."""
    job, model = scenario.job, scenario.job.model
    t, p, v, c, dp = (
        layout.tensor_parallel,
        layout.pipeline_parallel,
        layout.virtual_pipeline,
        layout.context_parallel,
        layout.data_parallel,
    )
    b, s, h = layout.micro_batch_size, job.seq_len, model.hidden_size
    total = parameters.total(model)
    routed = parameters.routed(model)
    own = (total - routed) / (t * p) + routed / (layout.expert_parallel * layout.expert_tensor_parallel * p)
    m = num_micro_batches(layout, job.global_batch_size)
    layers = model.num_layers / p
    gpt = 34.0 * s * b * h / (t * c) * layers
    exact = activation_factor(scenario) * s * b * h / (t * c) * layers
    in_flight = min(m, p)
    found = [
        Figure("parameters per GPU", own, "", "P / (t p)"),
        Figure("weights and gradients, 2 B each", 4.0 * own, "B", "4 P / (t p)"),
        Figure("the same with fp32 gradients", 6.0 * own, "B", "6 P / (t p)"),
        Figure("optimizer shard (ZeRO-1)", 12.0 * own / dp, "B", "12 P / (t p d)"),
        Figure("activations per micro-batch and stage, GPT", gpt, "B", "34 s b h / t x layers"),
        Figure(f"the same, this model ({activation_factor(scenario):.1f} s b h / t)", exact, "B", "8 + 4 h_q/h + 4 h_kv/h + 6 f/h"),
        Figure(f"activations of {in_flight} in flight, GPT", in_flight * gpt, "B", "min(m, p) x the above"),
        Figure("micro-batches", m, "", "G / (d b)"),
        Figure(f"ideal bubble, {v} chunk{'s' * (v > 1)}", bubble_share(p, m, v), "%", "(p - 1)/v / (m + (p - 1)/v)"),
        Figure("ideal bubble, 2 chunks", bubble_share(p, m, 2), "%", "(p - 1)/2 / (m + (p - 1)/2)"),
        Figure("tensor-parallel all-reduce", 2.0 * s * b * h / c, "MiB", "2 s b h"),
        Figure("stage boundary per GPU", 2.0 * s * b * h / (t * c), "MiB", "2 s b h / t"),
        Figure("bf16 gradients per GPU", 2.0 * own, "B", "2 P / (t p)"),
        Figure(
            "attention on top of 6 P",
            flops.attention_flops_per_token(model, s) / (6.0 * parameters.active(model)),
            "%",
            "12 L h s / 6 P",
        ),
    ]
    if scenario.training_tokens:
        run = 6.0 * parameters.active(model) * scenario.training_tokens
        rate = job.num_gpus * job.peak_flops * ASSUMED_MFU
        found += [
            Figure("training FLOPs", run, "FLOP", "6 P D"),
            Figure("steps", scenario.training_tokens / job.tokens_per_step, "", "D / (G s)"),
            Figure(f"days at {ASSUMED_MFU:.0%} MFU", run / rate / SECONDS_PER_DAY, "days", "6 P D / (N peak MFU)"),
        ]
    return found
