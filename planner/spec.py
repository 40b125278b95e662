"""A scenario as the solver's integers: sizes, limits, and the values that each axis may take."""

from __future__ import annotations

from collections.abc import Mapping

from planner.frameworks.legality import jobs_by_framework
from planner.limits import memory_floor
from planner.scenario import Scenario
from solver.layout import AXES, RECOMPUTE, SCHEDULES
from solver.problem import Problem, divisors


def declared_space(scenario: Scenario) -> Mapping[str, tuple[int, ...]]:
    """The values of each axis: what the cluster, the model and the batch allow one by one, or what the user pinned."""
    job = scenario.job
    of_gpus, layers, experts = divisors(job.num_gpus), job.model.num_layers, job.model.num_experts
    natural: dict[str, tuple[int, ...]] = {
        "tensor_parallel": of_gpus,
        "pipeline_parallel": of_gpus,
        "context_parallel": of_gpus,
        "data_parallel": of_gpus,
        "expert_parallel": divisors(experts) if experts else (1,),
        "expert_tensor_parallel": of_gpus if experts else (1,),
        "micro_batch_size": divisors(job.global_batch_size),
        "virtual_pipeline": tuple(range(1, layers + 1)),
        "schedule": tuple(range(len(SCHEDULES))),
        "zero_stage": (0, 1, 2, 3),
        "recompute": tuple(range(len(RECOMPUTE))),
        "recompute_layers": tuple(range(layers + 1)),
    }
    return {axis: tuple(sorted(set(scenario.choices.pins.get(axis, natural[axis])))) for axis in AXES}


def problem(scenario: Scenario) -> Problem:
    """The scenario in integers."""
    job, model, choices = scenario.job, scenario.job.model, scenario.choices
    domains = declared_space(scenario)
    stacks = [in_framework.software for in_framework in jobs_by_framework(scenario).values()]
    floor = memory_floor(job, stacks, domains["zero_stage"])
    return Problem(
        num_gpus=job.num_gpus,
        gpus_per_node=job.fast_domain,
        tensor_across_nodes=choices.tensor_across_nodes,
        num_layers=model.num_layers,
        num_attention_heads=model.num_attention_heads,
        num_key_value_heads=model.split_key_value_heads,
        ffn_hidden_size=model.ffn_hidden_size,
        vocab_size=model.vocab_size,
        pad_vocabulary=choices.pad_vocabulary,
        num_experts=model.num_experts,
        moe_ffn_hidden_size=model.moe_ffn_hidden_size,
        shared_ffn_hidden_size=model.shared_ffn_hidden_size,
        seq_len=job.seq_len,
        sequence_parallel=job.sequence_parallel,
        min_context_tokens=choices.min_context_tokens,
        max_pipeline_parallel=choices.max_pipeline_parallel,
        global_batch_size=job.global_batch_size,
        domains=domains,
        **vars(floor),
    )
