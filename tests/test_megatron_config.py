"""Megatron-LM's and Megatron-Bridge's files: what is read and said of them, and that an export reads back as the same layout."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import pytest

from planner.errors import InputError
from planner.frameworks import bridge_read, bridge_write, megatron_read, megatron_write
from planner.frameworks.config import ILLEGAL, Config
from planner.frameworks.files import open_source
from planner.frameworks.launch_script import launch_script
from planner.frameworks.megatron_flags import flags
from planner.frameworks.megatron_settings import SETTING_RULES
from planner.frameworks.writing import Target
from planner.request import Request, make_scenario
from planner.scenario import Job
from solver.layout import Layout, chunk_sizes, deepest_chunk

CONFIGS = Path(__file__).parent / "data" / "configs"
SMALL = "--num-layers 32 --hidden-size 4096 --num-attention-heads 32 --seq-length 4096 --max-position-embeddings 4096"
BATCH = "--micro-batch-size 1 --global-batch-size 64 --bf16"


def read(path: Path, num_gpus: int | None = None) -> Config:
    """A file through the first reader that recognises it."""
    source = open_source(path)
    reader = next(reader for reader in (*bridge_read.READERS, *megatron_read.READERS) if reader.recognises(source))
    return reader.read(source, num_gpus)


def script(folder: Path, flags: str, before: str = "export CUDA_DEVICE_MAX_CONNECTIONS=1") -> Config:
    """A launch script of some flags, read."""
    path = folder / "run.sh"
    path.write_text(f"{before}\ntorchrun --nproc-per-node 8 --nnodes 4 pretrain_gpt.py {SMALL} {BATCH} {flags}\n")
    return read(path)


def job_of(config: Config, **wishes: Any) -> Job:
    """The job of a configuration, on 32 GPUs unless said otherwise."""
    own = dataclasses.replace(config.request, model=None, model_shape=None, framework=None)
    wanted = {"num_gpus": 32, **{key: value for key, value in dataclasses.asdict(own).items() if value is not None}, **wishes}
    job = make_scenario(Request(**{"model": "8b", **wanted})).job
    return dataclasses.replace(job, model=config.model) if config.model else job


def findings(config: Config, **wishes: Any) -> dict[str, str]:
    """Rule -> what it finds."""
    job = job_of(config, **wishes)
    return {rule.id: text for rule in SETTING_RULES if (text := rule.finds(config, job))}


def test_a_script_of_flags_is_read_in_our_words(tmp_path: Path) -> None:
    found = script(
        tmp_path, "--tensor-model-parallel-size 4 --sequence-parallel --use-distributed-optimizer --swiglu --overlap-grad-reduce"
    )
    assert found.layout["tensor_parallel"] == 4 and found.layout["zero_stage"] == 1
    assert found.model is not None and found.model.gated_mlp and found.model.ffn_hidden_size == 10880
    assert (found.request.num_gpus, found.request.gpus_per_node, found.request.precision) == (32, 8, "bf16")
    assert found.request.sequence_parallel and "data_overlap" not in found.software


def test_kv_groups_without_their_switch_are_full_heads_and_said_so(tmp_path: Path) -> None:
    found = script(tmp_path, "--num-query-groups 8")
    assert found.model is not None and found.model.num_key_value_heads == 32
    assert "8 without --group-query-attention is ignored" in findings(found)["M33"]
    assert "M33" not in findings(script(tmp_path, "--num-query-groups 8 --group-query-attention"))


def test_experts_latent_attention_and_prediction_layers_are_read(tmp_path: Path) -> None:
    found = script(
        tmp_path,
        "--num-experts 16 --moe-router-topk 4 --moe-ffn-hidden-size 1024 --moe-shared-expert-intermediate-size 2048 --mtp-num-layers 1 "
        "--moe-layer-freq '([0]*2+[1]*30)' --multi-latent-attention --kv-lora-rank 256 --q-lora-rank 512 --position-embedding-type rope "
        "--disable-bias-linear --swiglu --normalization RMSNorm --untie-embeddings-and-output-weights --ffn-hidden-size 8192 "
        "--expert-model-parallel-size 4 --tensor-model-parallel-size 2 --sequence-parallel",
    )
    model = found.model
    assert model is not None
    assert (model.num_experts, model.experts_per_token, model.num_shared_experts, model.num_dense_layers) == (16, 4, 2, 2)
    assert (model.kv_lora_rank, model.q_lora_rank, model.qk_nope_head_dim, model.qk_rope_head_dim) == (256, 512, 128, 64)
    assert model.num_mtp_layers == 1 and not model.tied_embeddings and not model.linear_bias and model.learned_positions == 0
    assert found.layout["expert_tensor_parallel"] == 2  # inherited
    assert "experts are split 2 ways" in findings(found)["M35"]


RECOMPUTES = {
    "--recompute-activations": {"recompute": "selective"},
    "--recompute-granularity selective --recompute-modules mlp layernorm": {"recompute": "selective"},
    "--recompute-granularity full --recompute-method uniform --recompute-num-layers 1": {"recompute": "full"},
    "--recompute-granularity full --recompute-method block --recompute-num-layers 3": {"recompute": "full", "recompute_layers": 3},
    "--recompute-granularity full --recompute-method block --recompute-num-layers 32": {"recompute": "full"},
    "": {"recompute": "none"},
}


@pytest.mark.parametrize("flags", RECOMPUTES)
def test_recompute_is_read(tmp_path: Path, flags: str) -> None:
    found = script(tmp_path, flags)
    assert {key: found.layout[key] for key in found.layout if key.startswith("recompute")} == RECOMPUTES[flags]


PIPELINES = {
    "--num-layers-per-virtual-pipeline-stage 4": (2, ()),
    "--num-virtual-stages-per-pipeline-rank 2": (2, ()),
    "--decoder-first-pipeline-num-layers 7 --decoder-last-pipeline-num-layers 5": (1, (7, 10, 10, 5)),
    "--pipeline-model-parallel-layout 'Et*7|t*9|t*9|t*7L'": (1, (7, 9, 9, 7)),
    "--pipeline-model-parallel-layout 'Et*3|(t*4|)*6,t*5L'": (2, (7, 8, 8, 9)),
}


@pytest.mark.parametrize("flags", PIPELINES)
def test_every_way_to_state_stages_is_read(tmp_path: Path, flags: str) -> None:
    found = script(tmp_path, f"--pipeline-model-parallel-size 4 {flags}")
    assert (found.layout["virtual_pipeline"], found.layers_per_stage) == PIPELINES[flags]
    assert not {"M11", "M12", "M13", "M14"} & findings(found).keys()


def test_embedding_and_loss_count_as_layers_where_stated(tmp_path: Path) -> None:
    path = tmp_path / "run.sh"
    shape = SMALL.replace("--num-layers 32", "--num-layers 30")
    both = "--account-for-embedding-in-pipeline-split --account-for-loss-in-pipeline-split"
    path.write_text(f"torchrun pretrain_gpt.py {shape} {BATCH} --pipeline-model-parallel-size 4 {both}\n")
    assert read(path).layers_per_stage == ()  # 7 8 8 7 is the planner's own even split
    path.write_text(f"torchrun pretrain_gpt.py {shape} {BATCH} --pipeline-model-parallel-size 2 {both}\n")
    assert read(path).layers_per_stage == ()


FSDP = "--use-megatron-fsdp --ckpt-format fsdp_dtensor --use-distributed-optimizer"


@pytest.mark.parametrize(("strategy", "stage"), [("optim", 1), ("optim_grads", 2), ("optim_grads_params", 3), ("no_shard", 0)])
def test_sharding_strategies_are_zero_stages(tmp_path: Path, strategy: str, stage: int) -> None:
    found = script(tmp_path, f"{FSDP} --data-parallel-sharding-strategy {strategy}", before="")
    assert found.layout["zero_stage"] == stage and "M30" not in findings(found)


def test_states_and_switches_reach_the_stack(tmp_path: Path) -> None:
    lean = "--use-precision-aware-optimizer --exp-avg-dtype bf16 --exp-avg-sq-dtype bf16 --use-distributed-optimizer --grad-reduce-in-bf16"
    software = script(tmp_path, f"{lean} --attention-backend unfused --make-vocab-size-divisible-by 64").software
    expected = {"gradient_bytes": 2.0, "optimizer_bytes": 8.0, "attention_kernel": "fused_softmax", "vocab_multiple": 64}
    assert expected.items() <= software.items() and software["data_overlap"] is False
    eight = lean.replace("bf16 --exp-avg-sq-dtype bf16", "fp8 --exp-avg-sq-dtype fp8")
    assert script(tmp_path, eight + " --optimizer adam").request.optimizer == "adam-8bit"


MOE = "--num-experts 8 --moe-router-topk 2 --disable-bias-linear"
WRONG: dict[str, tuple[str, str]] = {
    "M5": ("--eval-global-batch-size 60", "nearest: 32, 64"),
    "M6": ("--rampup-batch-size 16 16 1000", "nearest: 32"),
    "M9": ("--max-position-embeddings 2048", "legal: 4096 or more"),
    "M10": ("--context-parallel-size 4 --cp-comm-type a2a+p2p", "whose product is 4"),
    "M11": ("--pipeline-model-parallel-size 6", "(nearest: 4, 8)"),
    "M12": ("--pipeline-model-parallel-size 4 --decoder-first-pipeline-num-layers 7", "they divide for: 24, 27"),
    "M13": ("--pipeline-model-parallel-size 4 --pipeline-model-parallel-layout 'Et*8|t*8|t*8|t*7L'", "holds 31 layers"),
    "M14": ("--pipeline-model-parallel-size 4 --num-layers-per-virtual-pipeline-stage 3", "nearest: 2, 4"),
    "M15": ("--num-virtual-stages-per-pipeline-rank 2", "needs at least 2"),
    "M16": ("--pipeline-model-parallel-size 4 --num-virtual-stages-per-pipeline-rank 2 --global-batch-size 80", "smallest: 5"),
    "M18": ("--num-distributed-optimizer-instances 3 --use-distributed-optimizer", "nearest: 2, 4"),
    "M19": ("--overlap-param-gather", "needs --use-distributed-optimizer"),
    "M30": ("--use-megatron-fsdp", "--ckpt-format fsdp_dtensor"),
    "M21": ("--recompute-granularity full", "--recompute-method uniform or block"),
    "M22": ("--optimizer-cpu-offload", "--use-precision-aware-optimizer"),
    "M23": ("--tp-comm-overlap", "--sequence-parallel"),
    "M24": ("--fp16", "keep one"),
    "M31": (f"{MOE} --moe-router-topk 1", "--moe-router-pre-softmax"),
    "M50": ("--multi-latent-attention --group-query-attention", "exclude each other"),
    "M45": ("--batch-size 4", "--micro-batch-size"),
    "M33": ("--num-query-groups 8", "--group-query-attention"),
    "M34": ("--tensor-model-parallel-size 8", "3.1 times as many"),
    "M35": (f"{MOE} --tensor-model-parallel-size 2 --sequence-parallel", "state 1 to keep them whole"),
    "M36": ("--seq-length 131072 --max-position-embeddings 131072", "16.0 GiB"),
    "M37": ("--recompute-activations", "saves nothing"),
    "M38": (f"{FSDP} --tensor-model-parallel-size 2 --sequence-parallel", "refuses CUDA_DEVICE_MAX_CONNECTIONS"),
    "M39": ("--no-gradient-accumulation-fusion", "separately"),
    "M43": (f"{MOE} --fp8-format hybrid --fp8-recipe tensorwise", "multiples of 16"),
    "M41": ("--recompute-granularity full --recompute-method block --recompute-num-layers 100", "legal: 1 to 32"),
    "M49": ("--transformer-impl local", "keeps its scores"),
    "M8": ("--vocab-size 32000 --make-vocab-size-divisible-by 20000", "is padded to 40000"),
    "M40": ("--tensor-model-paralel-size 2", "did you mean --tensor-model-parallel-size?"),
    "M44": ("--our-own-secret-thing 2", "unless the program adds them"),
}


@pytest.mark.parametrize("rule", WRONG)
def test_a_rule_finds_what_breaks_it_and_names_the_way_out(tmp_path: Path, rule: str) -> None:
    flags, way_out = WRONG[rule]
    found = findings(script(tmp_path, flags))
    assert way_out in found.get(rule, ""), found


def test_the_environment_is_asked_for_before_blackwell(tmp_path: Path) -> None:
    found = script(tmp_path, "--tensor-model-parallel-size 2 --sequence-parallel", before="")
    assert "need 1; export it" in findings(found)["M32"]
    assert "M32" not in findings(found, gpu="b200")


def test_without_a_16_bit_format_it_is_fp32(tmp_path: Path) -> None:
    path = tmp_path / "run.sh"
    path.write_text(f"torchrun pretrain_gpt.py {SMALL} --micro-batch-size 1 --global-batch-size 64\n")
    assert "trains in fp32" in findings(read(path))["M42"]


def test_every_setting_rule_is_tried_and_named_once() -> None:
    ids = [rule.id for rule in SETTING_RULES]
    assert len(set(ids)) == len(ids) and set(ids) == {*WRONG, "M32", "M42"}
    assert all(rule.sentence and rule.source for rule in SETTING_RULES)


def test_a_sound_script_breaks_nothing(tmp_path: Path) -> None:
    sound = (
        "--tensor-model-parallel-size 4 --sequence-parallel --pipeline-model-parallel-size 2 --num-virtual-stages-per-pipeline-rank 4 "
        "--use-distributed-optimizer --overlap-grad-reduce --overlap-param-gather --group-query-attention --num-query-groups 8 --swiglu"
    )
    assert findings(script(tmp_path, sound)) == {}


def test_eighty_layers_in_chunks_of_two_on_sixteen_stages_say_what_was_once_trained(tmp_path: Path) -> None:
    path = tmp_path / "run.sh"
    shape = SMALL.replace("--num-layers 32", "--num-layers 80")
    path.write_text(
        f"torchrun pretrain_gpt.py {shape} {BATCH} --pipeline-model-parallel-size 16 --num-layers-per-virtual-pipeline-stage 2\n"
    )
    text = findings(read(path))["M14"]
    assert "train 64 layers silently" in text and "legal: 1, 5" in text


def test_thirty_layers_on_four_stages_name_three_ways_out(tmp_path: Path) -> None:
    path = tmp_path / "run.sh"
    path.write_text(f"torchrun pretrain_gpt.py {SMALL.replace('layers 32', 'layers 30')} {BATCH} --pipeline-model-parallel-size 4\n")
    text = findings(read(path))["M11"]
    assert "train 28 layers silently" in text and "--decoder-first-pipeline-num-layers 7 --decoder-last-pipeline-num-layers 7" in text
    assert "7+8+8+7" in text and "--account-for-embedding-in-pipeline-split --account-for-loss-in-pipeline-split" in text


LOG = """\
using world size: 32, data-parallel size: 4
[default0]:------------------------ arguments ------------------------
[default0]:  add_bias_linear ................................. False
  bf16 ............................................ True
  attention_backend ............................... AttnBackend.auto
  ffn_hidden_size ................................. 11008
  fp8 ............................................. None
  global_batch_size ............................... 64
  hidden_size ..................................... 4096
  micro_batch_size ................................ 1
  num_attention_heads ............................. 32
  num_layers ...................................... 32
  num_query_groups ................................ 1
  group_query_attention ........................... False
  overlap_grad_reduce ............................. True
  pipeline_model_parallel_size .................... 2
  position_embedding_type ......................... rope
  recompute_modules ............................... ['core_attn']
  seq_length ...................................... 4096
  sequence_parallel ............................... True
  swiglu .......................................... True
  tensor_model_parallel_size ...................... 4
  use_distributed_optimizer ....................... True
  virtual_pipeline_model_parallel_size ............ 4
  world_size ...................................... 32
-------------------- end of arguments ---------------------
 > padded vocab (size: 32000) with 256 dummy tokens (new size: 32256)
"""


def test_the_block_of_a_log_is_read_as_megatron_resolved_it(tmp_path: Path) -> None:
    path = tmp_path / "train.log"
    path.write_text(LOG)
    found = read(path)
    assert found.kind == megatron_read.LOG and found.request.num_gpus == 32
    assert {"tensor_parallel": 4, "pipeline_parallel": 2, "virtual_pipeline": 4, "zero_stage": 1}.items() <= found.layout.items()
    assert found.model is not None and found.model.vocab_size == 32000 and found.model.num_key_value_heads == 32
    assert "M33" not in findings(found) and "M40" not in findings(found)


def test_a_yaml_of_arguments_is_read_with_underscores_hyphens_or_tables(tmp_path: Path) -> None:
    flat = {
        "num_layers": 32,
        "hidden-size": 4096,
        "num_attention_heads": 32,
        "seq_length": 4096,
        "micro_batch_size": 1,
        "tensor-model-parallel-size": 2,
        "disable_bias_linear": "true",
        "bf16": "true",
    }
    path = tmp_path / "args.yaml"
    path.write_text("".join(f"{key}: {value}\n" for key, value in flat.items()))
    found = read(path)
    assert found.kind == megatron_read.ARGUMENTS and found.layout["tensor_parallel"] == 2
    assert found.model is not None and not found.model.linear_bias
    inner = "".join(f"  {key.replace('-', '_')}: {value}\n" for key, value in flat.items())
    path.write_text(f"model_parallel:\n  tensor_model_parallel_size: 2\nlanguage_model:\n{inner}")
    assert read(path).layout == found.layout


BROKEN = {
    "--num-layers x": "--num-layers = 'x' must be a whole number",
    "--num-layers": "--num-layers takes a value",
    "--optimizer adamm": "did you mean 'adam'",
    "--num-layers 99999999999999999999": "whole number",
    "--moe-layer-freq '([0]*99999+[1])' --num-experts 8 --disable-bias-linear": "longer than any model",
    "--num-attention-heads 7": "does not divide by num_attention_heads = 7",
}


@pytest.mark.parametrize("flags", BROKEN)
def test_a_broken_value_is_one_line_with_the_key(tmp_path: Path, flags: str) -> None:
    with pytest.raises(InputError) as error:
        script(tmp_path, flags)
    assert BROKEN[flags] in str(error.value) and "\n" not in str(error.value) and "run.sh" in str(error.value)


def test_a_layout_string_that_explodes_is_refused_at_once(tmp_path: Path) -> None:
    found = script(tmp_path, "--pipeline-model-parallel-size 2 --pipeline-model-parallel-layout 'E(t*99999)*99999|L'")
    assert "repeats too often" in findings(found)["M13"]


def test_a_value_that_only_the_shell_knows_is_an_error_where_it_counts_alone(tmp_path: Path) -> None:
    script(tmp_path, "--lr $LR --save $1")
    with pytest.raises(InputError, match="tensor_model_parallel_size = '\\$TP' must be a whole number"):
        script(tmp_path, "--tensor-model-parallel-size $TP")


# What is written reads back as the same layout

QUESTIONS: dict[str, dict[str, Any]] = {
    "8b": {"model": "8b", "num_gpus": 64, "global_batch_size": 960},
    "gpt": {"model": "gpt-3-175b", "num_gpus": 64, "global_batch_size": 960, "seq_len": 2048},
    "tied": {"model": "llama-3.2-1b", "num_gpus": 64, "global_batch_size": 960, "precision": "fp16"},
    "moe": {"model": "qwen3-30b-a3b", "num_gpus": 64, "global_batch_size": 960, "precision": "fp8"},
    "latent": {"model": "deepseek-v3", "num_gpus": 64, "global_batch_size": 960},
    "window": {"model": "gemma-3-27b", "num_gpus": 64, "global_batch_size": 960},
    "muon": {"model": "mixtral-8x7b", "num_gpus": 64, "global_batch_size": 960, "optimizer": "adam-8bit"},
}
MESHES: tuple[dict[str, Any], ...] = (
    {"data_parallel": 64, "zero_stage": 1, "micro_batch_size": 1},
    {"data_parallel": 64, "zero_stage": 3, "recompute": "selective"},
    {"data_parallel": 32, "zero_stage": 2, "context_parallel": 2, "recompute": "full"},
    {"tensor_parallel": 4, "pipeline_parallel": 4, "data_parallel": 4, "zero_stage": 1, "recompute": "full"},
    {"tensor_parallel": 4, "pipeline_parallel": 2, "virtual_pipeline": 2, "data_parallel": 8, "zero_stage": 1, "recompute": "full"},
    {"pipeline_parallel": 4, "virtual_pipeline": 3, "data_parallel": 8, "context_parallel": 2, "zero_stage": 1},
)


def target(question: str, mesh: dict[str, Any], framework: str, chunks: tuple[int, ...] = ()) -> Target:
    """A layout of a question."""
    scenario = make_scenario(Request(framework=framework, **QUESTIONS[question]))
    job = scenario.job_in(framework)
    experts = {"expert_parallel": 4} if job.model.num_experts else {}
    layout = Layout(schedule="interleaved_1f1b" if mesh.get("virtual_pipeline") else "1f1b", **mesh, **experts)
    if layout.recompute == "full":
        depth = deepest_chunk(layout, job.model.num_layers)
        layout = dataclasses.replace(layout, recompute_layers=depth if layout.zero_stage > 1 else max(depth - 1, 1))
    size = layout.pipeline_parallel * layout.virtual_pipeline
    return Target(scenario=scenario, job=job, layout=layout, chunks=chunks or chunk_sizes(job.model.num_layers, size))


def exported(folder: Path, wanted: Target, framework: str) -> Config:
    """What is read of what is written."""
    launch = (megatron_write if framework == "megatron" else bridge_write).write(wanted)
    if framework == "megatron":
        path = folder / "launch.sh"
        path.write_text(launch_script(wanted, launch))
    else:
        path = folder / bridge_write.FILE
        path.write_text(launch.files[bridge_write.FILE])
    return read(path)


SHAPE_FREE = (
    "name",
    "source",
    "aliases",
    "published_params",
    "published_active_params",
    "published_includes_mtp",
    "max_seq_len",
    "dropout",
)


@pytest.mark.parametrize("framework", ["megatron", "megatron-bridge"])
@pytest.mark.parametrize("mesh", MESHES, ids=lambda mesh: Layout(**mesh).label)
@pytest.mark.parametrize("question", QUESTIONS)
def test_an_export_reads_back_as_the_same_layout_model_and_workload(
    tmp_path: Path, question: str, mesh: dict[str, Any], framework: str
) -> None:
    wanted = target(question, mesh, framework)
    found = exported(tmp_path, wanted, framework)
    layout, job = wanted.layout, wanted.job
    own = {key: value for key, value in dataclasses.asdict(layout).items() if key not in ("data_parallel", "recompute_layers")}
    assert {key: found.layout[key] for key in own} == own
    if layout.recompute == "full":
        depth = deepest_chunk(layout, job.model.num_layers)
        assert found.layout.get("recompute_layers", depth) == layout.recompute_layers
    assert found.layers_per_stage == ()
    own_request = (job.seq_len, job.global_batch_size, job.precision, job.optimizer)
    request = found.request
    assert (request.seq_len, request.global_batch_size, request.precision, request.optimizer) == own_request
    assert found.model is not None
    unstated = {"norms_per_layer"} if question == "window" else set()
    unlike = {f.name for f in dataclasses.fields(job.model) if getattr(job.model, f.name) != getattr(found.model, f.name)}
    assert unlike - set(SHAPE_FREE) == unstated
    assert found.software == {key: getattr(job.software, key) for key in found.software}
    broken = [rule.id for rule in SETTING_RULES if rule.kind == ILLEGAL and rule.finds(found, job)]
    assert broken == []


@pytest.mark.parametrize("framework", ["megatron", "megatron-bridge"])
def test_an_uneven_split_reads_back(tmp_path: Path, framework: str) -> None:
    mesh = {"tensor_parallel": 4, "pipeline_parallel": 4, "data_parallel": 4, "zero_stage": 1}
    assert exported(tmp_path, target("8b", mesh, framework, (9, 8, 8, 7)), framework).layers_per_stage == (9, 8, 8, 7)
    chunks = exported(tmp_path, target("8b", {**mesh, "virtual_pipeline": 2}, framework, (3, 4, 4, 5, 4, 4, 4, 4)), framework)
    assert chunks.layers_per_stage == (7, 8, 8, 9) and chunks.layout["virtual_pipeline"] == 2


def test_a_group_of_micro_batches_is_written_where_the_stages_do_not_divide_them() -> None:
    mesh = {"tensor_parallel": 4, "pipeline_parallel": 4, "virtual_pipeline": 2, "data_parallel": 4}
    wanted = target("8b", mesh, "megatron")
    odd = dataclasses.replace(wanted, job=dataclasses.replace(wanted.job, global_batch_size=120))
    group = "--microbatch-group-size-per-virtual-pipeline-stage"
    assert f"{group} 5" in megatron_write.write(odd).arguments["PARALLEL_ARGS"]
    assert not any(group in line for line in megatron_write.write(wanted).arguments["PARALLEL_ARGS"])


def test_what_only_the_person_knows_is_a_demanded_variable() -> None:
    launch = megatron_write.write(target("8b", MESHES[0], "megatron"))
    assert any('"${DATA_PATH:?' in line for line in launch.arguments["RUN_ARGS"])
    written = {line.split()[0] for lines in launch.arguments.values() for line in lines}
    assert written <= flags().keys()


def test_the_environment_follows_sharding_groups_and_silicon() -> None:
    sharded, grouped = target("8b", MESHES[1], "megatron"), target("8b", MESHES[3], "megatron")
    assert megatron_write.environment(sharded)["CUDA_DEVICE_MAX_CONNECTIONS"].startswith("8 #")
    assert megatron_write.environment(grouped)["CUDA_DEVICE_MAX_CONNECTIONS"].startswith("1 #")
    newer = dataclasses.replace(grouped, job=make_scenario(Request(gpu="b200", **QUESTIONS["8b"])).job)
    assert megatron_write.environment(newer) == {}


def test_what_no_flag_states_is_noted() -> None:
    assert "4 norms per layer" in megatron_write.write(target("window", MESHES[0], "megatron")).files["NOTES.txt"]


# Megatron-Bridge and NeMo

BRIDGE = """\
model:
  tensor_model_parallel_size: 2
  pipeline_model_parallel_size: 4
  num_layers_in_first_pipeline_stage: {first}
  num_layers_in_last_pipeline_stage: 11
  num_layers: 46
  hidden_size: 4096
  num_attention_heads: 96
  kv_channels: 128
  vocab_size: 151552
  sequence_parallel: true
train:
  global_batch_size: 64
  micro_batch_size: 1
dataset:
  sequence_length: 4096
mixed_precision: bf16_mixed
"""


def test_bridge_keys_are_read_and_rules_speak_in_them(tmp_path: Path) -> None:
    path = tmp_path / "recipe.yaml"
    path.write_text(BRIDGE.format(first=11))
    found = read(path)
    assert found.framework == "megatron-bridge" and found.layers_per_stage == (11, 12, 12, 11)[:0]  # the planner's even split
    assert found.layout["zero_stage"] == 1 and any("ddp.use_distributed_optimizer is not stated" in line for line in found.assumed)
    path.write_text(BRIDGE.format(first=10))
    assert "--" not in findings(read(path))["M12"]


def test_overrides_with_dots_and_layouts_of_lists_are_read(tmp_path: Path) -> None:
    path = tmp_path / "overrides.yaml"
    path.write_text(
        "model.tensor_model_parallel_size: 2\nmodel.pipeline_model_parallel_size: 2\ntrain.global_batch_size: 64\n"
        "model.pipeline_model_parallel_layout: [[embedding, decoder, decoder, decoder], [decoder, loss]]\n"
    )
    found = read(path)
    assert found.model is None and found.layout["tensor_parallel"] == 2 and found.layers_per_stage == (3, 1)


def test_keys_that_contradict_each_other_are_one_line(tmp_path: Path) -> None:
    path = tmp_path / "recipe.yaml"
    path.write_text(BRIDGE.format(first=11) + "data:\n  global_batch_size: 32\n")
    with pytest.raises(InputError, match=r"data\.global_batch_size = 32 contradicts train\.global_batch_size = 64"):
        read(path)


def test_old_nemo_names_are_read(tmp_path: Path) -> None:
    path = tmp_path / "nemo.yaml"
    path.write_text(
        "trainer:\n  num_nodes: 2\n  devices: 8\n  precision: bf16\nmodel:\n  micro_batch_size: 2\n  global_batch_size: 64\n"
        "  tensor_model_parallel_size: 2\n  encoder_seq_length: 2048\n  num_layers: 24\n  hidden_size: 2048\n  num_attention_heads: 16\n"
        "  activation: fast-swiglu\n  normalization: rmsnorm\n  bias: false\n  activations_checkpoint_granularity: full\n"
        "  activations_checkpoint_method: block\n  activations_checkpoint_num_layers: 6\n  optim:\n    name: distributed_fused_adam\n"
    )
    found = read(path)
    assert found.request.num_gpus == 16 and found.request.seq_len == 2048 and found.layout["zero_stage"] == 1
    assert found.layout["recompute_layers"] == 6 and found.model is not None and found.model.norm == "rmsnorm" and found.model.gated_mlp


# Two published recipes


def test_the_gpt3_recipe_is_read_judged_and_written_again(tmp_path: Path) -> None:
    found = read(CONFIGS / "megatron_gpt3_175b.sh")
    assert found.model is not None and (found.model.num_layers, found.model.vocab_size) == (96, 50257)
    assert {"tensor_parallel": 8, "pipeline_parallel": 16, "zero_stage": 0}.items() <= found.layout.items()
    assert (found.request.num_gpus, found.request.global_batch_size, found.request.precision) == (1024, 1536, "fp16")
    assert set(findings(found)) == {"M34"}
    again(tmp_path, found, "megatron")


def test_the_llama3_recipe_is_read_judged_and_written_again(tmp_path: Path) -> None:
    found = read(CONFIGS / "nemo_llama3_70b.yaml")
    assert found.model is not None and found.model.num_key_value_heads == 8
    assert {"virtual_pipeline": 5, "context_parallel": 2, "zero_stage": 1}.items() <= found.layout.items()
    assert findings(found) == {}
    again(tmp_path, found, "megatron-bridge")


def again(folder: Path, found: Config, framework: str) -> None:
    """What was read, written for a framework and read once more, is the same layout of the same model."""
    job = job_of(found)
    layout = Layout(**found.layout)  # type: ignore[arg-type]
    ranks = layout.tensor_parallel * layout.pipeline_parallel * layout.context_parallel
    layout = dataclasses.replace(layout, data_parallel=job.num_gpus // ranks)
    scenario = dataclasses.replace(make_scenario(Request(model="8b", num_gpus=job.num_gpus)), job=job)
    chunks = chunk_sizes(job.model.num_layers, layout.pipeline_parallel * layout.virtual_pipeline)
    second = exported(folder, Target(scenario=scenario, job=job, layout=layout, chunks=chunks), framework)
    assert second.layout == found.layout and second.model is not None and found.model is not None
    assert dataclasses.replace(second.model, name="", source="") == dataclasses.replace(found.model, name="", source="")
