"""What of two layouts makes a part of the step longer in one of them: a table of part -> what it grows with, in words."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from planner.cost import communication, parameters
from planner.cost.collectives import group_bandwidth, members_per_node, network_of
from planner.cost.schedules import SCHEDULES
from planner.cost.stages import all_stages
from planner.costed import Costed, costed
from planner.explain import STEP_FORMULAS
from planner.units import three
from solver.layout import V_SHAPED, Layout, natural_schedule


@dataclass(frozen=True)
class Driver:
    """Something that a part grows with, as the faster and the slower layout have it, and the slower one's case in words."""

    fast: float
    slow: float
    words: str


MOST_REASONS = 2
LEAST_CHANGE = 0.02
"""A driver that changes by a smaller share is not worth a word."""


def reason(part: str, fast: Costed, slow: Costed) -> str:
    """Why the slower layout's part of the step differs: the first drivers that push it the way it went; empty if none does."""
    grew = slow.step[part] - fast.step[part]
    drivers = [*_stack(part, fast, slow), *DRIVERS[part](fast, slow)]
    told = [d.words for d in drivers if (d.slow - d.fast) * grew > 0 and abs(d.slow - d.fast) > LEAST_CHANGE * max(d.slow, d.fast)]
    return "; ".join(told[:MOST_REASONS])


def _stack(part: str, fast: Costed, slow: Costed) -> list[Driver]:
    """What another training stack alone does to the part: the slower layout costed under the faster one's."""
    if fast.job.software == slow.job.software:
        return []
    alike = costed(slow.job.under(fast.job.software), slow.layout).step[part]
    effect = slow.step[part] - alike
    if abs(effect) < 0.25 * abs(slow.step[part] - fast.step[part]):
        return []
    words = f"it runs under {slow.job.software.name} instead of {fast.job.software.name} ({effect:+.3g} s)"
    return [Driver(alike, slow.step[part], words)]


def _compute(fast: Costed, slow: Costed) -> list[Driver]:
    t, t2 = fast.layout.tensor_parallel, slow.layout.tensor_parallel
    efficient = "less efficient" if t2 > t else "more efficient"
    drivers = [
        Driver(t, t2, f"a tensor group of {t2} instead of {t}: products of 1/{t2} instead of 1/{t} of the width are {efficient}"),
        Driver(1 / fast.tokens, 1 / slow.tokens, f"products of {slow.tokens:,.0f} rows instead of {fast.tokens:,.0f}"),
    ]
    if fast.job.model.num_experts:
        rows, rows2 = _expert_rows(fast), _expert_rows(slow)
        drivers.insert(0, Driver(1 / rows, 1 / rows2, f"{rows2:,.0f} instead of {rows:,.0f} tokens for each expert on a GPU"))
    return drivers


def _expert_rows(c: Costed) -> float:
    """Tokens that one expert of a rank sees of a micro-batch, when routing is even."""
    x, model = c.layout, c.job.model
    return c.tokens * model.experts_per_token * x.expert_parallel * x.expert_tensor_parallel / (x.tensor_parallel * model.num_experts)


def _imbalance(fast: Costed, slow: Costed) -> list[Driver]:
    (most, mean), (most2, mean2) = _fullest(fast), _fullest(slow)
    if slow.layout.pipeline_parallel == 1:
        return [Driver(1.0, 0.0, "without a pipeline no stage waits for another")]
    uneven = f"the fullest stage has {most2} layers, the average {mean2:.3g}, instead of {most} and {mean:.3g}"
    weigh = "more" if slow.layers < fast.layers else "less"
    ends = f"embedding, head and loss weigh {weigh} beside {slow.layers:.3g} layers per stage than beside {fast.layers:.3g}"
    longer = "longer" if _busy(slow) > _busy(fast) else "less time"
    return [
        Driver(most / mean, most2 / mean2, uneven),
        Driver(1 / fast.layers, 1 / slow.layers, ends),
        Driver(_busy(fast), _busy(slow), f"all that the slowest stage does takes {longer}"),
    ]


def _fullest(c: Costed) -> tuple[int, float]:
    """Layers of the largest and of the average stage."""
    x = c.layout
    layers = all_stages(c.job, x.pipeline_parallel, x.virtual_pipeline, x.schedule in V_SHAPED).layers
    return int(layers.max()), float(layers.mean())


def _busy(c: Costed) -> float:
    """Seconds in which the slowest stage works or communicates on micro-batches."""
    return sum(c.step[part] for part in STEP_FORMULAS if part not in ("pipeline", "bubble", "data", "optimizer", "overhead"))


def _recompute(fast: Costed, slow: Costed) -> list[Driver]:
    was, now = recompute_words(fast.layout), recompute_words(slow.layout)
    words = f"recompute is {now} instead of {was}"
    if fast.layout.recompute == slow.layout.recompute:
        covered, covered2 = _full_share(fast), _full_share(slow)
        words = f"full recompute covers {covered2:.0%} instead of {covered:.0%} of the layers"
        if abs(covered2 - covered) <= LEAST_CHANGE:
            return _compute(fast, slow)
    return [Driver(fast.step["recompute"], slow.step["recompute"], words)]


def recompute_words(layout: Layout) -> str:
    """The recompute of a layout.

    >>> recompute_words(Layout(recompute="full", recompute_layers=3))
    'full (3 layers of each chunk)'
    """
    layers = layout.recompute_layers
    return f"full ({layers} layer{'s' * (layers != 1)} of each chunk)" if layout.recompute == "full" else layout.recompute


def _full_share(c: Costed) -> float:
    """Share of a chunk's layers that full recompute covers: their forward transfers run twice."""
    chunk = c.layers / c.layout.virtual_pipeline
    return min(c.layout.recompute_layers / chunk, 1.0) if c.layout.recompute == "full" else 0.0


def _again(fast: Costed, slow: Costed) -> Driver:
    twice = _full_share(slow) > 0
    words = "full recompute sends the forward's transfers once more" if twice else "without full recompute nothing is sent twice"
    return Driver(_full_share(fast), _full_share(slow), words)


def _calls(fast: Costed, slow: Costed) -> Driver:
    words = f"{slow.passes:,.0f} instead of {fast.passes:,.0f} passes through a layer, each with its latency"
    return Driver(fast.passes, slow.passes, words)


def _launch(fast: Costed, slow: Costed) -> list[Driver]:
    share, share2 = (c.tokens / c.layout.tensor_parallel for c in (fast, slow))
    t, t2 = fast.layout.tensor_parallel, slow.layout.tensor_parallel
    hides = "hide less of their launches" if share2 < share else "hide more of their launches"
    transfers = f"a tensor group of {t2} launches its transfers too" if t2 > t else "a smaller tensor group launches fewer kernels"
    return [
        Driver(1 / share, 1 / share2, f"the kernels of {share2:,.0f} instead of {share:,.0f} tokens per GPU {hides}"),
        Driver(fast.passes, slow.passes, f"{slow.passes:,.0f} instead of {fast.passes:,.0f} passes through a layer, launched one by one"),
        Driver(t, t2, transfers),
    ]


def _tensor(fast: Costed, slow: Costed) -> list[Driver]:
    t, t2 = fast.layout.tensor_parallel, slow.layout.tensor_parallel

    def sent(c: Costed) -> float:
        return c.passes * c.tokens * (1 - 1 / c.layout.tensor_parallel)

    if t == 1:
        group = f"a tensor group of {t2} gathers and scatters every activation; without one nothing is"
    elif t2 == 1:
        group = f"without a tensor group nothing is gathered; one of {t} gathers and scatters every activation"
    else:
        gathers = slow.passes * slow.tokens / (fast.passes * fast.tokens)
        group = (
            f"a tensor group of {t2} instead of {t}: {gathers:.3g} times the activations to gather and scatter on a GPU, "
            f"{t2 - 1}/{t2} instead of {t - 1}/{t} of each over the links"
        )
    return [Driver(sent(fast), sent(slow), group), _crossing("tensor", fast, slow), _again(fast, slow), _calls(fast, slow)]


def _nodes(kind: str, c: Costed) -> float:
    """Fast domains that a group of one kind spans."""
    x, domain = c.layout, c.job.fast_domain
    size, stride = {
        "tensor": (x.tensor_parallel, 1),
        "context": (x.context_parallel, x.tensor_parallel),
        "expert": (x.expert_parallel, x.expert_tensor_parallel),
    }[kind]
    return size / float(members_per_node(size, stride, domain))


def _crossing(kind: str, fast: Costed, slow: Costed) -> Driver:
    nodes, nodes2 = _nodes(kind, fast), _nodes(kind, slow)
    spans = f"its {kind} groups span {nodes2:g} fast domains instead of {nodes:g}"
    words = spans if nodes2 > 1 else f"its {kind} groups stay in a fast domain"
    return Driver(nodes, nodes2, words)


def _context(fast: Costed, slow: Costed) -> list[Driver]:
    c, c2 = fast.layout.context_parallel, slow.layout.context_parallel
    sends = f"a context group of {c2} instead of {c} exchanges keys and values"
    words = sends if c2 > 1 else "without a context group no keys and values are sent"
    return [Driver(c - 1, c2 - 1, words), _crossing("context", fast, slow), _again(fast, slow), _calls(fast, slow)]


def _expert(fast: Costed, slow: Costed) -> list[Driver]:
    e, e2 = fast.layout.expert_parallel, slow.layout.expert_parallel
    split, split2 = fast.layout.expert_tensor_parallel, slow.layout.expert_tensor_parallel
    leave = f"{e2 - 1}/{e2} instead of {e - 1}/{e} of the routed tokens leave their GPU"
    return [
        _crossing("expert", fast, slow),
        Driver(1 - 1 / e, 1 - 1 / e2, leave if e2 > 1 else "without expert groups no token leaves its GPU"),
        Driver(split, split2, f"each expert is split {split2} instead of {split} ways and gathers its tokens"),
        _again(fast, slow),
        _calls(fast, slow),
    ]


def _gathers_weights(c: Costed) -> bool:
    return bool(communication.gathers_weights(c.layout.zero_stage, _replicas(c)))


def _replicas(c: Costed) -> int:
    return c.layout.data_parallel * c.layout.context_parallel


def _sharding(fast: Costed, slow: Costed) -> list[Driver]:
    gathers, gathers2 = _gathers_weights(fast), _gathers_weights(slow)
    each = "ZeRO-3 gathers and scatters every layer's weights for every micro-batch"
    m, m2 = fast.micro_batches, slow.micro_batches
    work, work2 = (c.tokens / c.layout.tensor_parallel for c in (fast, slow))
    own, own2 = own_parameters(fast), own_parameters(slow)
    return [
        Driver(gathers, gathers2, each if gathers2 else "no weights are gathered layer by layer"),
        Driver(m, m2, f"the weights are gathered for {m2:,} instead of {m:,} micro-batches"),
        Driver(1 / work, 1 / work2, f"a layer's pass has {work2:,.0f} instead of {work:,.0f} tokens of work to hide the transfers"),
        Driver(own, own2, f"a GPU gathers {_billions(own2)} instead of {_billions(own)} parameters"),
    ]


def _pipeline(fast: Costed, slow: Costed) -> list[Driver]:
    def crossings(c: Costed) -> int:
        return 2 * c.layout.virtual_pipeline * c.micro_batches * (c.layout.pipeline_parallel > 1)

    count, count2 = crossings(fast), crossings(slow)
    words = f"{count2:,} instead of {count:,} transfers over each stage's boundaries (2 x chunks x micro-batches)"
    size = f"micro-batches of {slow.tokens:,.0f} instead of {fast.tokens:,.0f} tokens"
    if count2 == 0:
        words = "without a pipeline there are no boundaries"
    return [Driver(count, count2, words), Driver(fast.tokens, slow.tokens, size)]


def _bubble(fast: Costed, slow: Costed) -> list[Driver]:
    p, p2 = fast.layout.pipeline_parallel, slow.layout.pipeline_parallel
    if p2 == 1:
        return [Driver(1.0, 0.0, "without a pipeline nothing fills and drains")]

    def share(c: Costed) -> float:
        return (c.layout.pipeline_parallel - 1) / (c.layout.virtual_pipeline * c.micro_batches)

    def sizes(c: Costed) -> str:
        x = c.layout
        chunks = f" of {x.virtual_pipeline} chunks" if x.virtual_pipeline > 1 else ""
        return f"{x.pipeline_parallel} stages{chunks}, {c.micro_batches:,} micro-batch{'es' * (c.micro_batches != 1)}"

    before = sizes(fast) if p > 1 else "no pipeline"
    ratio = f"(stages - 1) / (chunks x micro-batches) is {share(slow):.3g} ({sizes(slow)}) instead of {share(fast):.3g} ({before})"
    longer = _busy(slow) / _busy(fast)
    drivers = [
        Driver(share(fast), share(slow), ratio),
        Driver(1.0, longer, f"a pass through a stage takes {longer:.3g} times as long for the same work"),
    ]
    if p > 1 and fast.layout.schedule != slow.layout.schedule:
        other = f"schedule {slow.layout.schedule} instead of {fast.layout.schedule}"
        drivers.insert(0, Driver(_ideal_fill(fast) / share(fast), _ideal_fill(slow) / share(slow), other))
    return drivers


def _ideal_fill(c: Costed) -> float:
    """Fill and drain over the busy time for equal stages and a backward of twice the forward."""
    x, m = c.layout, c.micro_batches
    return float(SCHEDULES[x.schedule].fill(1.0, 2.0, 3.0 * x.pipeline_parallel, m, x.pipeline_parallel, x.virtual_pipeline)) / (3.0 * m)


def own_parameters(c: Costed) -> float:
    """Parameters that an average stage's GPU holds before ZeRO shards them."""
    x, routed = c.layout, parameters.routed(c.job.model)
    dense = (parameters.total(c.job.model) - routed) / (x.tensor_parallel * x.pipeline_parallel)
    return dense + routed / (x.expert_parallel * x.expert_tensor_parallel * x.pipeline_parallel)


def _updated_parameters(c: Costed) -> float:
    """Parameters whose optimizer states an average stage's GPU keeps."""
    x = c.layout
    shards = c.job.num_gpus // x.pipeline_parallel
    return own_parameters(c) if x.zero_stage == 0 else parameters.total(c.job.model) / (x.pipeline_parallel * shards)


def _billions(count: float) -> str:
    return f"{count / 1e9:.3g}B"


def _data(fast: Costed, slow: Costed) -> list[Driver]:
    if _gathers_weights(slow):
        return [Driver(1.0, 0.0, "ZeRO-3 moves weights and gradients layer by layer (part sharding)")]
    if _replicas(slow) == 1:
        return [Driver(1.0, 0.0, "a lone replica has nothing to reduce")]
    own, own2 = own_parameters(fast), own_parameters(slow)
    speed, speed2 = _replica_bandwidth(fast), _replica_bandwidth(slow)
    hide, hide2 = _hiding_seconds(fast), _hiding_seconds(slow)
    none = _replicas(fast) == 1 or _gathers_weights(fast)
    often, often2 = (c.layout.zero_stage == 2 and c.layout.pipeline_parallel == 1 for c in (fast, slow))
    scatters = f"ZeRO-2 scatters the gradients of each of {slow.micro_batches:,} micro-batches"
    return [
        Driver(not none, 1, f"{_replicas(slow):,} replicas reduce gradients and gather parameters once per step"),
        Driver(often, often2, scatters if often2 else "gradients are reduced once per step, not for every micro-batch"),
        Driver(1 / speed, 1 / speed2, f"the replicas' transfers get {speed2 / 1e9:.3g} instead of {speed / 1e9:.3g} GB/s per GPU"),
        Driver(own, own2, f"each GPU reduces the gradients of {_billions(own2)} instead of {_billions(own)} parameters"),
        Driver(1 / hide, 1 / hide2, f"{three(hide2)} instead of {three(hide)} s of the last backward and the drain to hide behind"),
    ]


def _replica_bandwidth(c: Costed) -> float:
    """Bytes per second and GPU between the replicas of the dense parameters."""
    net, x = network_of(c.job), c.layout
    group = communication.data_group(net, x.tensor_parallel, x.context_parallel, x.data_parallel)
    return float(group_bandwidth(net, group.size, group.per_node))


def _hiding_seconds(c: Costed) -> float:
    """About what the gradients' reduction hides behind: the last micro-batch's backward and a share of the drain."""
    return _busy(c) * 2 / 3 / c.micro_batches + c.job.physics.fill_window * c.step["bubble"]


def _optimizer(fast: Costed, slow: Costed) -> list[Driver]:
    own, own2 = own_parameters(fast), own_parameters(slow)
    updated, updated2 = _updated_parameters(fast), _updated_parameters(slow)
    shard = "under ZeRO-3 a GPU clears and scales only its shard of the gradients"
    whole = "a GPU clears and scales all gradients of its parameters, not a shard"
    return [
        Driver(updated, updated2, f"each GPU updates {_billions(updated2)} instead of {_billions(updated)} parameters"),
        Driver(own, own2, f"each GPU clears and scales the gradients of {_billions(own2)} instead of {_billions(own)} parameters"),
        Driver(not _gathers_weights(fast), not _gathers_weights(slow), shard if _gathers_weights(slow) else whole),
    ]


def _overhead(fast: Costed, slow: Costed) -> list[Driver]:
    m, m2 = fast.micro_batches, slow.micro_batches
    rest, rest2 = (c.step_seconds - c.step["overhead"] for c in (fast, slow))
    return [
        Driver(m, m2, f"{m2:,} instead of {m:,} micro-batches, each with a fixed time"),
        Driver(rest, rest2, "stragglers lengthen a longer step by more" if rest2 > rest else "stragglers lengthen a shorter step by less"),
    ]


DRIVERS: Mapping[str, Callable[[Costed, Costed], list[Driver]]] = {
    "compute": _compute,
    "imbalance": _imbalance,
    "recompute": _recompute,
    "launch": _launch,
    "tensor": _tensor,
    "context": _context,
    "expert": _expert,
    "sharding": _sharding,
    "pipeline": _pipeline,
    "bubble": _bubble,
    "data": _data,
    "optimizer": _optimizer,
    "overhead": _overhead,
}
"""Part of the step -> what it grows with, the weightier first: (faster layout, slower layout) -> drivers."""


def changes(was: Layout, now: Layout) -> list[str]:
    """What another layout changes, axis by axis in the order of a label; the schedule that goes without saying is not said.

    >>> changes(Layout(tensor_parallel=16, data_parallel=64), Layout(tensor_parallel=8, data_parallel=128))
    ['tensor_parallel 16 -> 8', 'data_parallel 64 -> 128']
    """
    said = []
    for axis in (field.name for field in dataclasses.fields(Layout)):
        old, new = getattr(was, axis), getattr(now, axis)
        if axis == "recompute":
            old, new = recompute_words(was), recompute_words(now)
        natural = axis == "schedule" and all(layout.schedule == natural_schedule(layout.virtual_pipeline) for layout in (was, now))
        if old != new and not natural and axis != "recompute_layers":
            said.append(f"{axis} {old} -> {new}")
    return said
