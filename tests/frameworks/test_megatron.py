"""Megatron-core's own code against ours: exports accepted, mutations refused, parameters, ranks, schedules and imports equal."""

from __future__ import annotations

import dataclasses
import random
import shlex
from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from planner.cost.memory import pieces, stage_parameters
from planner.cost.parameters import padded_vocabulary
from planner.cost.stages import split_stages, stage_of_chunk
from planner.frameworks.files import open_source
from planner.frameworks.launch_script import launch_script
from planner.frameworks.legality import broken
from planner.frameworks.megatron import RULES
from planner.frameworks.megatron_flags import flags
from planner.frameworks.megatron_read import arguments_of, read_launch
from planner.frameworks.megatron_write import write
from planner.frameworks.shell import read_script
from planner.frameworks.writing import Target
from planner.spec import problem
from solver.check import broken_rules
from solver.layout import AXES, Layout, chunk_sizes, columns_of, fully_recomputed
from tests.frameworks import megatron_parser as megatron
from tests.frameworks.cases import targets

NUMBER = 260


def cases(number: int = NUMBER) -> tuple[Target, ...]:
    """Diverse legal layouts."""
    return targets("megatron", number)


def environment_of(target: Target) -> dict[str, str]:
    """Variables of the export, without the comments behind them."""
    return {name: value.split("#")[0].strip() for name, value in write(target).environment.items()}


def accepted(target: Target) -> megatron.Accepted:
    """What Megatron makes of an export. Raises megatron.Refused."""
    words = megatron.words_of(write(target).arguments)
    return megatron.accept(words, target.job.num_gpus, environment_of(target), target.job.generation.name)


def test_every_exported_layout_is_accepted_with_the_chunks_that_we_meant() -> None:
    refused: dict[str, str] = {}
    for target in cases():
        try:
            found = accepted(target)
        except megatron.Refused as reason:
            refused[f"{target.job.model.name} {target.layout.label}"] = str(reason)
            continue
        stages = target.layout.pipeline_parallel
        assert tuple(found.chunks[i % stages][i // stages] for i in range(len(target.chunks))) == target.chunks
        assert found.args.data_parallel_size == target.layout.data_parallel
        assert (found.args.virtual_pipeline_model_parallel_size or 1) == target.layout.virtual_pipeline
    assert refused == {}
    assert len(cases()) >= 200


def test_the_cases_are_of_many_kinds() -> None:
    layouts = [target.layout for target in cases()]
    kinds = Counter(
        kind
        for target in cases()
        for kind, holds in {
            "dense": not target.job.model.num_experts,
            "experts": target.layout.expert_parallel > 1,
            "tied": target.job.model.tied_embeddings,
            "latent": target.job.model.kv_lora_rank > 0,
            "uneven": not target.even,
            "interleaved": target.layout.virtual_pipeline > 1,
            "context": target.layout.context_parallel > 1,
            "fsdp": target.layout.zero_stage >= 2,
        }.items()
        if holds
    )
    assert min(kinds.values()) >= 10 and len(kinds) == 8, kinds
    assert {layout.recompute for layout in layouts} == {"none", "selective", "full"}


# What our rules forbid, Megatron refuses too, or it is a known hole

HOLES: Mapping[str, str] = {
    "M20": "Megatron-FSDP with stages passes the checks; its gradients would be gathered and reduced for every micro-batch",
    "tensor_group_in_node": "ours: slow, not illegal",
    "layers": "an empty chunk is legal in a layout string",
    "expert_tensor": "a split of the experts between 1 and the dense one is legal there; widths divide when matrices are made",
    "M4": "the layer refuses in its first forward pass, which no parser sees",
    "M17": "no schedule is named: the flags ask for 1F1B whatever our layout says",
    "M25": "Transformer Engine refuses the shapes in the first product",
    "M27": "OptimizerConfig refuses, when the optimizer is made",
}
"""Rule of ours -> why Megatron's parser, groups, stages and schedule let it through."""

CHANGES: Mapping[str, tuple[Any, ...]] = {
    "tensor_parallel": (3, 5, 6, 7, 16, 24),
    "pipeline_parallel": (3, 5, 7, 48, 128),
    "virtual_pipeline": (2, 3, 5, 64),
    "context_parallel": (3, 5, 6, 7),
    "expert_parallel": (3, 5, 6, 7, 512),
    "expert_tensor_parallel": (3, 8),
    "micro_batch_size": (3, 5, 7, 1024),
    "zero_stage": (2, 3),
}


def mutated(target: Target, axis: str, value: int) -> Target | None:
    """The target with one axis changed, and the replicas that the GPUs leave; None where the axis has the value already."""
    layout = target.layout
    if getattr(layout, axis) == value or (axis.startswith("expert") and not target.job.model.num_experts):
        return None  # a dense model's export states no expert sizes
    layout = dataclasses.replace(layout, **{axis: value})
    ranks = layout.tensor_parallel * layout.pipeline_parallel * layout.context_parallel
    schedule = "interleaved_1f1b" if layout.virtual_pipeline > 1 else "1f1b"
    layout = dataclasses.replace(layout, data_parallel=max(target.job.num_gpus // ranks, 1), schedule=schedule)
    if layout.recompute == "full":
        layout = fully_recomputed(layout, target.job.model.num_layers)
    sizes = chunk_sizes(target.job.model.num_layers, layout.pipeline_parallel * layout.virtual_pipeline)
    return dataclasses.replace(target, layout=layout, chunks=sizes)


def our_objections(target: Target) -> set[str]:
    """Every rule of ours that a layout breaks, physical and Megatron's."""
    rules = set(broken_rules(target.layout, problem(target.scenario)))
    return rules | {rule.id for rule in broken(target.job, target.layout, "megatron")}


def mutations() -> list[tuple[str, int, Target]]:
    """Legal layouts with one change each, a few of every kind."""
    shuffled = list(cases())
    random.Random(7).shuffle(shuffled)
    found = []
    for axis, values in CHANGES.items():
        for value in values:
            changed = [new for target in shuffled if (new := mutated(target, axis, value)) is not None]
            found += [(axis, value, new) for new in changed[:6]]
    return found


def test_what_we_accept_megatron_accepts_and_what_we_forbid_it_refuses_or_is_a_known_hole() -> None:
    laxer, unknown, used = {}, {}, set()
    counts: Counter[str] = Counter()
    for axis, value, target in mutations():
        ours = our_objections(target)
        name = f"{axis} = {value}: {target.job.model.name} {target.layout.label}"
        try:
            accepted(target)
            refusal = ""
        except megatron.Refused as reason:
            refusal = str(reason)
        counts[f"ours {'forbids' if ours else 'allows'}, Megatron {'refuses' if refusal else 'accepts'}"] += 1
        if refusal and not ours:
            laxer[name] = refusal
        if ours and not refusal:
            used |= ours & set(HOLES)
            if not ours <= set(HOLES):
                unknown[name] = sorted(ours - set(HOLES))
    assert laxer == {}, counts
    assert unknown == {}, counts
    assert used == {hole for hole in HOLES if hole not in OF_THE_JOB}
    assert counts["ours forbids, Megatron refuses"] >= 100, counts


DENSE, EXPERTS, LATENT = "llama-3.1-8b", "mixtral-8x7b", "deepseek-v3"
OF_THE_JOB: Mapping[str, tuple[str, dict[str, Any], dict[str, Any]]] = {
    "M4": (EXPERTS, {"tensor_parallel": 2}, {"sequence_parallel": False}),
    "M17": (DENSE, {"pipeline_parallel": 2, "schedule": "gpipe"}, {}),
    "M25": (DENSE, {}, {"precision": "fp8", "seq_len": 4104}),
    "M26": (DENSE, {"zero_stage": 3}, {"optimizer": "muon"}),
    "M27": (DENSE, {"zero_stage": 0}, {"optimizer": "adam-8bit"}),
    "M28": (EXPERTS, {"tensor_parallel": 2, "expert_tensor_parallel": 2}, {"linear_bias": True, "qkv_bias": True}),
    "M29": (DENSE, {"recompute": "selective"}, {"recompute_modules": ("moe_act",)}),
    "M47": (LATENT, {"expert_parallel": 8}, {"learned_positions": 8192}),
}
"""Rule of Megatron's -> model, layout, and what of the job, its model or its stack is changed so that the rule is broken."""


def changed(target: Target, layout: Layout, wishes: Mapping[str, Any]) -> Target:
    """The target with another layout, and fields of its job, model or stack changed."""
    job = target.job
    for name, value in wishes.items():
        for part in ("model", "software"):
            record = getattr(job, part)
            if name in {field.name for field in dataclasses.fields(record)}:
                job = dataclasses.replace(job, **{part: dataclasses.replace(record, **{name: value})})
        if name in {field.name for field in dataclasses.fields(job)}:
            job = dataclasses.replace(job, **{name: value})
    chunks = chunk_sizes(job.model.num_layers, layout.pipeline_parallel)
    return dataclasses.replace(target, job=job, layout=layout, chunks=chunks)


@pytest.mark.parametrize("rule", OF_THE_JOB)
def test_a_rule_about_the_job_is_megatrons_too_or_a_known_hole(rule: str) -> None:
    model, axes, wishes = OF_THE_JOB[rule]
    base = next(case for case in cases() if case.job.model.name == model and not case.job.low_precision)
    ranks = axes.get("tensor_parallel", 1) * axes.get("pipeline_parallel", 1)
    layout = Layout(**{"zero_stage": 1, "data_parallel": base.job.num_gpus // ranks, **axes})
    accepted(changed(base, dataclasses.replace(layout, schedule="1f1b", recompute="none", expert_tensor_parallel=1, zero_stage=1), {}))
    target = changed(base, layout, wishes)
    assert rule in our_objections(target)
    if rule in HOLES:
        accepted(target)
    else:
        with pytest.raises(megatron.Refused):
            accepted(target)


def test_every_rule_of_megatrons_is_broken_once() -> None:
    assert {rule.id for rule in RULES} == {*OF_THE_JOB, "M20"}


FLAGS_BROKEN = {
    "experts": "--expert-model-parallel-size 2",
    "M6": "--num-attention-heads 32 --group-query-attention --num-query-groups 6 --tensor-model-parallel-size 4 --sequence-parallel",
    "M10": "--context-parallel-size 4 --seq-length 4100",
    "M11": "--pipeline-model-parallel-size 6 --micro-batch-size 1",
    "M12": "--pipeline-model-parallel-size 4 --decoder-first-pipeline-num-layers 7",
    "M13": "--pipeline-model-parallel-size 4 --pipeline-model-parallel-layout Et*8|t*8|t*8|t*7L",
    "M14": "--pipeline-model-parallel-size 4 --num-layers-per-virtual-pipeline-stage 3",
    "M14 by stages": "--pipeline-model-parallel-size 4 --num-virtual-stages-per-pipeline-rank 3",
    "M15": "--num-virtual-stages-per-pipeline-rank 2",
    "M16": "--pipeline-model-parallel-size 4 --num-virtual-stages-per-pipeline-rank 2 --global-batch-size 168",
    "M19": "--overlap-param-gather",
    "M21": "--recompute-granularity full",
    "M22": "--optimizer-cpu-offload",
    "M23": "--tp-comm-overlap",
    "M24": "--fp16",
    "M30": "--use-megatron-fsdp",
    "M31": "--num-experts 8 --moe-router-topk 1 --disable-bias-linear",
    "M40": "--tensor-model-paralel-size 2",
    "M45": "--batch-size 4",
    "M50": "--multi-latent-attention --group-query-attention",
}
"""Setting rule -> flags that break it."""
PLAIN = (
    "--num-layers 32 --hidden-size 4096 --num-attention-heads 32 --seq-length 4096 --max-position-embeddings 4100 --bf16 "
    "--micro-batch-size 1 --global-batch-size 96 --tokenizer-type NullTokenizer --vocab-size 32000 --mock-data"
)


@pytest.mark.parametrize("rule", FLAGS_BROKEN)
def test_what_a_setting_rule_forbids_is_refused(rule: str) -> None:
    with pytest.raises(megatron.Refused):
        megatron.accept(shlex.split(f"{PLAIN} {FLAGS_BROKEN[rule]}"), 48, {"CUDA_DEVICE_MAX_CONNECTIONS": "1"})


def test_the_plain_flags_are_accepted() -> None:
    megatron.accept(shlex.split(PLAIN), 48, {})


@pytest.mark.parametrize("batches", range(1, 26))
def test_the_group_size_that_we_write_is_legal_for_any_number_of_micro_batches(batches: int) -> None:
    base = next(t for t in cases() if t.layout.pipeline_parallel == 4 and t.layout.virtual_pipeline > 1 and t.job.precision == "bf16")
    job = dataclasses.replace(base.job, global_batch_size=batches * base.layout.data_parallel * base.layout.micro_batch_size)
    target = dataclasses.replace(base, job=job)
    if batches >= 4:
        accepted(target)
    else:
        with pytest.raises(megatron.Refused, match="micro-batches"):
            accepted(target)


# Oracles


def our_parameters(target: Target, stage: int) -> float:
    """Our count of one stage's rank."""
    x, job, layout = columns_of([target.layout]), target.job, target.layout
    owners = stage_of_chunk(layout.pipeline_parallel, layout.virtual_pipeline, False)
    stages = split_stages(job.model, np.array(target.chunks), owners, job.num_mtp_layers)
    held = stage_parameters(job, x, stages.take(np.array([stage])), pieces(job, x))
    return float(np.ravel(held.whole)[0])


def countable(target: Target) -> bool:
    """Whether Megatron's local layers hold what Transformer Engine's would: latent attention's down-projections are split there."""
    return not target.job.low_precision and not target.job.model.kv_lora_rank


def test_parameters_of_every_kind_of_stage_equal_megatrons_own_model() -> None:
    compared: Counter[str] = Counter()
    for target in [case for case in cases() if countable(case)][:: NUMBER // 60]:
        layout, model = target.layout, target.job.model
        words = megatron.words_of(write(target).arguments)
        found = megatron.parsed(words, target.job.num_gpus, environment_of(target), target.job.generation.name)
        vocabulary = int(padded_vocabulary(model, layout.tensor_parallel, target.job.software.vocab_multiple))
        for stage in sorted({0, layout.pipeline_parallel // 2, layout.pipeline_parallel - 1}):
            assert megatron.parameters(found, stage, vocabulary) == our_parameters(target, stage), (model.name, layout.label, stage)
        compared[model.name] += 1
    assert sum(compared.values()) >= 20 and len(compared) >= 6, compared
    assert any(name.startswith("llama-3.2-1b") for name in compared) and any(name.startswith("mixtral") for name in compared)


@pytest.mark.parametrize("prediction", [False, True])
def test_latent_attention_and_multi_token_prediction_on_one_tensor_rank_are_counted_alike(prediction: bool) -> None:
    base = next(case for case in cases() if case.job.model.name == "deepseek-v3")
    job = dataclasses.replace(base.job, multi_token_prediction=prediction)
    layout = Layout(pipeline_parallel=8, expert_parallel=64, data_parallel=128, zero_stage=1)
    target = dataclasses.replace(base, job=job, layout=layout, chunks=chunk_sizes(61, 8))
    found = megatron.parsed(megatron.words_of(write(target).arguments), 1024, environment_of(target))
    vocabulary = int(padded_vocabulary(job.model, 1, job.software.vocab_multiple))
    for stage in (0, 3, 7):
        assert megatron.parameters(found, stage, vocabulary) == our_parameters(target, stage)


def our_groups(layout: Layout, num_gpus: int, rank: int) -> dict[str, list[int]]:
    """The ranks that share each group with a rank, innermost first: tensor, context, data, pipeline; experts inside their own grid."""
    t, c, d = layout.tensor_parallel, layout.context_parallel, layout.data_parallel
    sizes = {"tensor": (t, 1), "context": (c, t), "data": (d, t * c), "pipeline": (layout.pipeline_parallel, t * c * d)}
    sizes["expert"] = (layout.expert_parallel, layout.expert_tensor_parallel)
    first = {name: rank - rank // stride % size * stride for name, (size, stride) in sizes.items()}
    return {name: [first[name] + place * stride for place in range(size)] for name, (size, stride) in sizes.items()}


def test_ranks_of_every_group_are_where_we_take_them_to_be() -> None:
    checked: Counter[str] = Counter()
    for target in cases()[:: NUMBER // 40]:
        found = megatron.parsed(
            megatron.words_of(write(target).arguments), target.job.num_gpus, environment_of(target), target.job.generation.name
        )
        for rank in {0, target.job.num_gpus // 3, target.job.num_gpus - 1}:
            ours = our_groups(target.layout, target.job.num_gpus, rank)
            with megatron.groups(found.args, rank):
                for kind, ranks in ours.items():
                    if kind != "expert" or target.job.model.num_experts:
                        assert megatron.group_ranks(kind) == [ranks], (kind, rank, target.layout.label)
                        checked[kind] += len(ranks) > 1
    assert min(checked.values()) > 5 and len(checked) == 5, checked


@pytest.mark.parametrize(("stages", "chunks", "batches", "group"), [(4, 2, 8, 4), (4, 2, 6, 6), (2, 3, 7, 2), (4, 2, 11, 6)])
def test_the_schedule_takes_a_group_through_each_chunk_in_turn(stages: int, chunks: int, batches: int, group: int) -> None:
    from megatron.core.pipeline_parallel.schedules import get_schedule_table

    starts = range(0, batches, group)
    ours = [(batch, chunk) for start in starts for chunk in range(chunks) for batch in range(start, min(start + group, batches))]
    assert [tuple(entry) for entry in get_schedule_table(batches, chunks, group)] == ours


SAME_FIELDS = {
    "tensor_parallel": "tensor_model_parallel_size",
    "pipeline_parallel": "pipeline_model_parallel_size",
    "context_parallel": "context_parallel_size",
    "expert_parallel": "expert_model_parallel_size",
    "micro_batch_size": "micro_batch_size",
}
MODEL_FIELDS = {
    "num_layers": "num_layers",
    "hidden_size": "hidden_size",
    "num_attention_heads": "num_attention_heads",
    "vocab_size": "vocab_size",
    "gated_mlp": "swiglu",
    "linear_bias": "add_bias_linear",
    "qkv_bias": "add_qkv_bias",
}


def test_what_we_import_is_what_megatrons_parser_reads(tmp_path: Path) -> None:
    for target in cases()[:: NUMBER // 60]:
        path = tmp_path / "launch.sh"
        path.write_text(launch_script(target, write(target)))
        source = open_source(path)
        script = read_script(source)
        words = [megatron.GIVEN.get(word[1:], word) for word in arguments_of(script.words)]
        args = megatron.parsed(words, target.job.num_gpus, environment_of(target), target.job.generation.name).args
        ours = read_launch(source, target.job.num_gpus)
        for axis, field in SAME_FIELDS.items():
            assert ours.layout[axis] == getattr(args, field), axis
        assert ours.layout["virtual_pipeline"] == (args.virtual_pipeline_model_parallel_size or 1)
        assert ours.model is not None
        for field, theirs in MODEL_FIELDS.items():
            assert getattr(ours.model, field) == getattr(args, theirs), field
        assert ours.request.global_batch_size == args.global_batch_size and ours.request.seq_len == args.seq_length


def test_the_committed_flags_are_those_of_the_parser() -> None:
    import argparse

    from megatron.training.arguments import add_megatron_arguments

    parser = argparse.ArgumentParser(allow_abbrev=False)
    add_megatron_arguments(parser)
    theirs = {name: action for action in parser._actions for name in action.option_strings if name.startswith("--") and name != "--help"}
    ours = flags()
    assert ours.keys() == theirs.keys()
    assert {name: flag.field for name, flag in ours.items()} == {name: action.dest for name, action in theirs.items()}
    assert {name for name, flag in ours.items() if flag.is_switch} == {name for name, action in theirs.items() if action.nargs == 0}


def test_every_axis_is_mutated_or_a_switch() -> None:
    assert set(CHANGES) | {"data_parallel", "schedule", "recompute", "recompute_layers"} == set(AXES)
