"""The catalogue as tables."""

from __future__ import annotations

from rich import box
from rich.table import Table

from planner.catalogue.load import records
from planner.catalogue.schema import Cluster, Gpu, Model, Operations, Software
from planner.cost import parameters
from planner.units import GIB, three


def _models() -> tuple[list[str], list[list[str]]]:
    rows = []
    for m in records(Model):
        experts = f"{m.experts_per_token}/{m.num_experts}" if m.num_experts else ""
        shape = f"{m.num_layers} x {m.hidden_size}"
        rows.append(
            [
                m.name,
                f"{parameters.total(m) / 1e9:.1f}B",
                shape,
                f"{m.num_attention_heads}/{m.num_key_value_heads}",
                experts,
                ", ".join(m.aliases),
            ]
        )
    return ["model", "params", "layers x hidden", "heads/KV", "experts", "aliases"], rows


def _gpus() -> tuple[list[str], list[list[str]]]:
    rows = [
        [
            g.name,
            f"{g.memory_bytes / GIB:.1f}",
            f"{max(g.peak_bf16_flops, g.peak_fp16_flops) / 1e12:.0f}",
            f"{g.peak_fp8_flops / 1e12:.0f}" if g.peak_fp8_flops else "",
            f"{g.link_bytes_per_s / 1e9:.0f}",
            f"{g.nic_bytes_per_s * 8 / 1e9:.0f}",
            f"{g.price_usd_per_hour:.2f}",
            ", ".join(g.aliases),
        ]
        for g in records(Gpu)
    ]
    return ["gpu", "GiB", "16-bit TF/s", "8-bit", "link GB/s", "NIC Gb/s", "$/h", "aliases"], rows


def _clusters() -> tuple[list[str], list[list[str]]]:
    rows = [
        [
            c.name,
            str(c.gpus_per_node),
            f"{c.nic_bytes_per_s * 8 / 1e9:.0f}" if c.nic_bytes_per_s else "the GPU's",
            f"{c.oversubscription:g}",
            ", ".join(c.aliases),
        ]
        for c in records(Cluster)
    ]
    return ["cluster", "GPUs per domain", "NIC Gb/s per GPU", "oversubscription", "aliases"], rows


def _software() -> tuple[list[str], list[list[str]]]:
    rows = [
        [
            s.name,
            s.framework,
            s.attention_kernel,
            f"{s.weight_bytes:g}+{s.gradient_bytes:g}+{s.optimizer_bytes:g}",
            ", ".join(s.aliases),
        ]
        for s in records(Software)
    ]
    return ["software", "runs layouts of", "attention", "B per parameter", "aliases"], rows


def _operations() -> tuple[list[str], list[list[str]]]:
    rows = [
        [
            o.name,
            three(o.interruptions_per_1000_gpu_days),
            f"{o.restart_seconds / 60:g}",
            three(o.storage_bytes_per_s / 1e9),
            "yes" if o.asynchronous else "no",
            f"{o.evaluation_share:.1%}",
            f"{o.power_usage_effectiveness:g}",
            ", ".join(o.aliases),
        ]
        for o in records(Operations)
    ]
    return ["operations", "failures per 1,000 GPU-days", "restart min", "GB/s per node", "async", "evaluation", "PUE", "aliases"], rows


LISTINGS = {"models": _models, "gpus": _gpus, "clusters": _clusters, "software": _software, "operations": _operations}


def listing(kind: str) -> Table:
    """One kind of the catalogue."""
    heads, rows = LISTINGS[kind]()
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False, padding=(0, 1, 0, 0))
    for number, head in enumerate(heads):
        table.add_column(head, overflow="fold", no_wrap=number == 0)
    for row in rows:
        table.add_row(*row)
    return table
