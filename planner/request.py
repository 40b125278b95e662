"""What a person asked for, from a scenario file, from flags, or both: flags win. Turns it into a checked scenario."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from planner.catalogue import load
from planner.catalogue.schema import Cluster, Gpu, Model, Operations, Software
from planner.errors import InputError, nearest
from planner.profile import read_profile
from planner.scenario import DEFAULT_OPERATIONS, Choices, Scenario, make_job
from planner.units import base_unit
from solver.layout import LABEL_ORDER, WORDS

DEFAULT_GPU = "h100-sxm-80gb"
DEFAULT_SEQ_LEN = 4096
DEFAULT_TOKENS_PER_STEP = 1 << 22
"""About 4 million: 1,024 sequences of 4,096."""

SCENARIO_FOLDER = Path("scenarios")

SWEEP_TABLE = "sweep"
"""The table of a scenario file that says what `planner sweep` varies; one search does not read it."""


@dataclass(frozen=True, kw_only=True)
class Request:
    """Raw wishes; None = not stated. Field names are the keys of a scenario file, grouped by its tables."""

    # [model]
    config: str | None = None
    """A training configuration whose model, cluster and workload hold where nothing else is stated."""
    model: str | None = None
    """Catalogue name or alias, a Hugging Face config.json, a training configuration, or a model TOML file."""
    model_shape: str | None = None
    """key=value pairs of a shape, comma-separated."""
    # [cluster]
    num_gpus: int | None = None
    gpu: str | None = None
    cluster: str | None = None
    gpus_per_node: int | None = None
    nic_gbit_per_s: float | None = None
    gpu_memory_gib: float | None = None
    price_usd_per_hour: float | None = None
    # [workload]
    seq_len: int | None = None
    global_batch_size: int | None = None
    global_batch_tokens: int | None = None
    precision: str | None = None
    optimizer: str | None = None
    training_tokens: float | None = None
    sequence_parallel: bool | None = None
    dropout: bool | None = None
    multi_token_prediction: bool | None = None
    # [operations]
    operations: str | None = None
    """Catalogue name of what is assumed of failures and checkpoints, or a TOML file."""
    interruptions_per_1000_gpu_days: float | None = None
    restart_minutes: float | None = None
    storage_gb_per_s: float | None = None
    """Written per node."""
    asynchronous_checkpoints: bool | None = None
    checkpoint_minutes: float | None = None
    """Between two checkpoints; not stated: the best interval."""
    evaluation_share: float | None = None
    repair_hours: float | None = None
    power_usage_effectiveness: float | None = None
    # [choices]
    max_days: float | None = None
    max_cost_usd: float | None = None
    max_step_seconds: float | None = None
    min_tokens_per_second: float | None = None
    framework: str | None = None
    software: str | None = None
    profile: str | None = None
    """Profile file that `planner calibrate` wrote."""
    tensor_across_nodes: bool | None = None
    uneven_stages: bool | None = None
    max_pipeline_parallel: int | None = None
    min_context_tokens: int | None = None
    pad_vocabulary: bool | None = None
    tensor_parallel: tuple[int, ...] | None = None
    pipeline_parallel: tuple[int, ...] | None = None
    virtual_pipeline: tuple[int, ...] | None = None
    context_parallel: tuple[int, ...] | None = None
    expert_parallel: tuple[int, ...] | None = None
    expert_tensor_parallel: tuple[int, ...] | None = None
    data_parallel: tuple[int, ...] | None = None
    zero_stage: tuple[int, ...] | None = None
    micro_batch_size: tuple[int, ...] | None = None
    recompute: tuple[str, ...] | None = None
    recompute_layers: tuple[int, ...] | None = None
    schedule: tuple[str, ...] | None = None

    def over(self, other: Request) -> Request:
        """This request, with the other's wishes where it states none."""
        chosen = {f.name: getattr(self, f.name) for f in dataclasses.fields(self)}
        for one, twin in (("model", "model_shape"), ("global_batch_size", "global_batch_tokens")):  # two ways to say one thing
            if chosen[one] is not None or chosen[twin] is not None:
                other = dataclasses.replace(other, **{one: None, twin: None})
        return dataclasses.replace(other, **{key: value for key, value in chosen.items() if value is not None})


TABLES: dict[str, tuple[str, ...]] = {
    "model": ("config", "model", "model_shape"),
    "cluster": ("num_gpus", "gpu", "cluster", "gpus_per_node", "nic_gbit_per_s", "gpu_memory_gib", "price_usd_per_hour"),
    "workload": (
        "seq_len",
        "global_batch_size",
        "global_batch_tokens",
        "precision",
        "optimizer",
        "training_tokens",
        "sequence_parallel",
        "dropout",
        "multi_token_prediction",
    ),
    "operations": (
        "operations",
        "interruptions_per_1000_gpu_days",
        "restart_minutes",
        "storage_gb_per_s",
        "asynchronous_checkpoints",
        "checkpoint_minutes",
        "evaluation_share",
        "repair_hours",
        "power_usage_effectiveness",
    ),
    "choices": (
        "max_days",
        "max_cost_usd",
        "max_step_seconds",
        "min_tokens_per_second",
        "framework",
        "software",
        "profile",
        "tensor_across_nodes",
        "uneven_stages",
        "max_pipeline_parallel",
        "min_context_tokens",
        "pad_vocabulary",
        *LABEL_ORDER,
    ),
}
RENAMED = {"model": {"name": "model", "shape": "model_shape"}, "cluster": {"name": "cluster"}, "operations": {"name": "operations"}}
"""Keys that read better inside their table than by their flat name."""

COUNT = re.compile(r"((?:[0-9]{1,3}(?:,[0-9]{3})+|[0-9]+(?:_[0-9]+)*)(?:\.[0-9]+)?(?:e[0-9]{1,2})?)([kmbgt]?)", re.IGNORECASE | re.ASCII)
SCALES = {"": 1, "k": 1e3, "m": 1e6, "b": 1e9, "g": 1e9, "t": 1e12}


def parse_count(text: str, what: str) -> float:
    """A count with an optional K, M, B or T behind it. Raises InputError.

    >>> parse_count("1.4T", "tokens"), parse_count("2,048", "gpus")
    (1400000000000.0, 2048.0)
    """
    match = COUNT.fullmatch(text)
    if not match:
        raise InputError(f"{what} = '{text}' must be a positive number such as 4096, 1.4T or 4M")
    return float(match[1].replace(",", "").replace("_", "")) * SCALES[match[2].lower()]


def read_request(path: Path) -> Request:
    """The request of a scenario file. Raises InputError naming file, table, key and the nearest legal key."""
    tables = load.read_toml(path)
    hints = {f.name: f.type for f in dataclasses.fields(Request)}
    values: dict[str, Any] = {}
    for table, content in tables.items():
        if (table in ("name", "description") and isinstance(content, str)) or table == SWEEP_TABLE:
            continue
        if table not in TABLES:
            raise InputError(f"{path}: unknown table '{table}'{nearest(table, TABLES)}")
        if not isinstance(content, dict):
            raise InputError(f"{path}: '{table}' must be a table of keys")
        for key, value in content.items():
            name = RENAMED.get(table, {}).get(key, key)
            if name not in TABLES[table]:
                known = [*TABLES[table], *RENAMED.get(table, {})]
                raise InputError(f"{path}: {table} has no key '{key}'{nearest(key, known)}")
            values[name] = _typed(value, str(hints[name]), f"{path}: {table}.{key}")
    return Request(**values)


def _typed(value: Any, hint: str, where: str) -> Any:
    kind = hint.removesuffix(" | None")
    kinds: dict[str, Any] = {"int": int, "float": float, "str": str, "bool": bool}
    if kind.startswith("tuple"):
        inner: Any = kinds[kind.removeprefix("tuple[").split(",")[0]]
        listed = value if isinstance(value, list) else [value]
        return tuple(load.checked(inner, item, where) for item in listed)
    if kind == "str" and isinstance(value, dict) and where.endswith(("shape", "model_shape")):
        return ",".join(f"{key}={_plain(item)}" for key, item in value.items())
    if kind in ("int", "float") and isinstance(value, str):
        value = parse_count(value, where)
    return load.checked(kinds[kind], value, where)


def _plain(value: Any) -> str:
    return str(value).lower() if isinstance(value, bool) else str(value)


def scenario_path(word: str) -> Path:
    """The file that a scenario's name or path stands for. Raises InputError with the nearest names."""
    path = Path(word)
    if not word:
        raise InputError("scenario is empty: name one or leave it out")
    if path.suffix == ".toml" or load.exists(path):
        return path
    named = SCENARIO_FOLDER / f"{word}.toml"
    if load.exists(named):
        return named
    known = [p.stem for p in SCENARIO_FOLDER.glob("*.toml")] if SCENARIO_FOLDER.is_dir() else []
    raise InputError(f"no scenario called '{word}' in {SCENARIO_FOLDER}/{nearest(word, known)}")


def shape_model(text: str) -> Model:
    """A model from key=value pairs; short names are allowed. Raises InputError.

    >>> shape_model("layers=2,hidden=512,heads=8,ffn=2048,vocab=32000").hidden_size
    512
    """
    short = {
        "layers": "num_layers",
        "hidden": "hidden_size",
        "heads": "num_attention_heads",
        "kv_heads": "num_key_value_heads",
        "ffn": "ffn_hidden_size",
        "vocab": "vocab_size",
        "experts": "num_experts",
        "top_k": "experts_per_token",
        "moe_ffn": "moe_ffn_hidden_size",
        "gated": "gated_mlp",
        "tied": "tied_embeddings",
    }
    known = {f.name for f in dataclasses.fields(Model)} - {"aliases", "source"}
    flat: dict[str, Any] = {}
    for pair in filter(None, (piece.strip() for piece in text.split(","))):
        key, equals, value = pair.partition("=")
        name = short.get(key.strip(), key.strip())
        if not equals or name not in known:
            raise InputError(f"model_shape: '{pair}' is not key=value with a known key{nearest(key, [*short, *known])}")
        if name in flat:
            raise InputError(f"model_shape: {name} is stated twice")
        flat[name] = _shape_value(name, value.strip())
    hidden, heads = flat.get("hidden_size"), flat.get("num_attention_heads")
    if isinstance(hidden, int):
        if heads is None and hidden % 128 == 0:
            flat["num_attention_heads"] = hidden // 128
        if "ffn_hidden_size" not in flat:
            flat["ffn_hidden_size"] = 4 * hidden if flat.get("gated_mlp") is False else -(-8 * hidden // 3 // 256) * 256
        flat.setdefault("vocab_size", 128256)
    return load.build(Model, load.plain({"name": "custom", **flat}), "model_shape")


def _shape_value(name: str, text: str) -> int | bool | str:
    if text.lower() in ("true", "false"):
        return text.lower() == "true"
    if name in ("name", "norm"):
        return text
    if isinstance(next(f.default for f in dataclasses.fields(Model) if f.name == name), bool):
        raise InputError(f"model_shape: {name} = {text} must be true or false")
    number = parse_count(text, f"model_shape: {name}")
    if not number.is_integer():
        raise InputError(f"model_shape: {name} = '{text}' must be a whole number")
    return int(number)


def is_config(path: Path) -> bool:
    """Whether a model's word names a Hugging Face config.json, or a folder that holds one."""
    return path.suffix == ".json" or (load.exists(path) and path.is_dir())


TRAINING_ENDINGS = (".sh", ".bash", ".slurm", ".sbatch", ".yaml", ".yml", ".log", ".out", ".txt")
"""Of training configurations; those in TOML and JSON are told from other files by what they hold."""


def find_model(word: str) -> Model:
    """The model that a catalogue name, a config.json, a training configuration or a TOML file stands for. Raises InputError."""
    path = Path(word)
    if is_config(path):
        from planner.catalogue.huggingface import read_config

        return read_config(path)
    if path.suffix in TRAINING_ENDINGS:
        return _trained_model(path)
    if "/" in word and path.suffix != ".toml":
        raise InputError(f"no model file '{word}'; give a catalogue name, a config.json or a .toml file")
    return load.find(Model, word)


def _trained_model(path: Path) -> Model:
    """The model of a training configuration: the shape that it states, or the catalogue's of the name that it gives."""
    from planner.frameworks.reading import read_config

    found = read_config(path)
    if found.model is not None:
        return found.model
    if found.request.model is None:
        raise InputError(f"{path}: states no model; name one with --model (see 'planner list models')")
    return find_model(found.request.model)


def import_notes(request: Request) -> list[str]:
    """What was assumed and what was ignored in reading the request's files, one line each; nothing for catalogue models."""
    lines: list[str] = []
    path = Path(request.model or "")
    if request.model is not None and is_config(path):
        from planner.catalogue.huggingface import read

        found = read(path)
        lines = noted(path, found.assumed, found.ignored)
    if request.config is not None or path.suffix in TRAINING_ENDINGS:
        from planner.frameworks.reading import read_config

        config = read_config(Path(request.config or path), request.num_gpus)
        lines += noted(config.path, config.assumed, config.ignored)
    return lines


def noted(path: Path, assumed: Iterable[str], ignored: Sequence[str]) -> list[str]:
    """What was assumed, a line each, and what was not used."""
    return [f"{path}: assumed {line}" for line in assumed] + ([f"{path}: not used: {', '.join(ignored)}"] if ignored else [])


def make_scenario(request: Request, name: str = "flags") -> Scenario:
    """The scenario of a request, the field's defaults filled in. Raises InputError."""
    if request.config is not None:
        from planner.frameworks.reading import read_config

        request = request.over(read_config(Path(request.config), request.num_gpus).request)
    _check_amounts(request)
    if request.model is None and request.model_shape is None:
        raise InputError("model is missing: name one with --model (see 'planner list models') or give --model-shape")
    if request.num_gpus is None:
        raise InputError("cluster.num_gpus is missing: give --gpus")
    model = shape_model(request.model_shape) if request.model_shape else find_model(str(request.model))
    gpu = load.find(Gpu, request.gpu or _default_gpu(request))
    if request.gpu_memory_gib is not None:
        gpu = dataclasses.replace(gpu, memory_bytes=request.gpu_memory_gib * 2.0**30)
    seq_len = request.seq_len if request.seq_len is not None else _default_seq_len(model)
    profile = read_profile(Path(request.profile)) if request.profile else {}
    job = make_job(
        profile=profile,
        model=model,
        gpu=gpu,
        num_gpus=request.num_gpus,
        cluster=_cluster(request, gpu),
        seq_len=seq_len,
        global_batch_size=_global_batch(request, seq_len),
        precision=request.precision or "",
        optimizer=request.optimizer or "adam",
        sequence_parallel=request.sequence_parallel is not False,
        dropout=request.dropout,
        multi_token_prediction=request.multi_token_prediction is not False,
    )
    if request.software:
        load.find(Software, request.software)
    price = gpu.price_usd_per_hour if request.price_usd_per_hour is None else request.price_usd_per_hour
    return Scenario(
        name=name,
        job=job,
        choices=_choices(request),
        training_tokens=request.training_tokens or 0.0,
        price_usd_per_hour=price,
        profile=profile,
        operations=_operations(request),
    )


LEAST_AND_MOST = {
    "training_tokens": (1.0, 1e18),
    "gpu_memory_gib": (0.01, 65_536.0),
    "price_usd_per_hour": (0.0, 1e6),
    "nic_gbit_per_s": (1e-3, 1e6),
    "gpus_per_node": (1, 1_000_000),
    "seq_len": (1, 1 << 26),
    "global_batch_tokens": (1, 1 << 50),
    "max_pipeline_parallel": (1, 1_000_000),
    "min_context_tokens": (1, 1 << 26),
    "interruptions_per_1000_gpu_days": (0.0, 1e5),
    "restart_minutes": (0.0, 1e5),
    "storage_gb_per_s": (1e-4, 1e6),
    "checkpoint_minutes": (0.01, 1e6),
    "evaluation_share": (0.0, 10.0),
    "repair_hours": (0.0, 1e5),
    "power_usage_effectiveness": (1.0, 10.0),
    "max_days": (1e-6, 1e6),
    "max_cost_usd": (1e-6, 1e15),
    "max_step_seconds": (1e-6, 1e9),
    "min_tokens_per_second": (1e-6, 1e15),
}
"""Beyond these an amount is a slip of the keyboard."""


def table_of(key: str) -> str:
    """The table of a scenario file that holds a key."""
    return next(table for table, keys in TABLES.items() if key in keys)


def _check_amounts(request: Request) -> None:
    """Raise InputError for empty words and for amounts that make no sense, before anything divides by them."""
    for field in dataclasses.fields(request):
        value = getattr(request, field.name)
        where = f"{table_of(field.name)}.{field.name}"
        if value == "":
            raise InputError(f"{where} is empty: leave it out or name one")
        least, most = LEAST_AND_MOST.get(field.name, (None, None))
        if value is None or least is None or most is None or (field.name == "training_tokens" and value == 0):
            continue
        if not least <= value <= most:
            shown = f"{value:g}" if isinstance(value, float) else value
            raise InputError(f"{where} = {shown} must lie between {least:,} and {most:,}")
    if request.model is not None and request.model_shape is not None:
        raise InputError("state model.name or model_shape (--model or --model-shape), not both")


def _default_gpu(request: Request) -> str:
    if request.cluster:
        return load.find(Cluster, request.cluster).default_gpu or DEFAULT_GPU
    return DEFAULT_GPU


def _default_seq_len(model: Model) -> int:
    return min(DEFAULT_SEQ_LEN, model.learned_positions or DEFAULT_SEQ_LEN)


def _cluster(request: Request, gpu: Gpu) -> Cluster:
    cluster = load.find(Cluster, request.cluster or gpu.default_cluster)
    if request.gpus_per_node is not None:
        cluster = dataclasses.replace(cluster, gpus_per_node=request.gpus_per_node)
    if request.nic_gbit_per_s is not None:
        if request.nic_gbit_per_s <= 0:
            raise InputError(f"cluster.nic_gbit_per_s = {request.nic_gbit_per_s} must be positive")
        cluster = dataclasses.replace(cluster, nic_bytes_per_s=request.nic_gbit_per_s * 1e9 / 8)
    return cluster


def _global_batch(request: Request, seq_len: int) -> int:
    if request.global_batch_tokens is not None:
        if request.global_batch_size is not None:
            raise InputError("state workload.global_batch_size or workload.global_batch_tokens, not both")
        if request.global_batch_tokens % seq_len:
            low = request.global_batch_tokens // seq_len * seq_len
            options = ", ".join(str(n) for n in (low, low + seq_len) if n)
            raise InputError(
                f"workload.global_batch_tokens = {request.global_batch_tokens} is no multiple of seq_len = {seq_len}; nearest: {options}"
            )
        return request.global_batch_tokens // seq_len
    if request.global_batch_size is not None:
        return request.global_batch_size
    return max(DEFAULT_TOKENS_PER_STEP // seq_len, 1)


OVERRIDES = {
    "interruptions_per_1000_gpu_days": "interruptions_per_1000_gpu_days",
    "restart_minutes": "restart_seconds",
    "storage_gb_per_s": "storage_bytes_per_s",
    "asynchronous_checkpoints": "asynchronous",
    "checkpoint_minutes": "checkpoint_interval_seconds",
    "evaluation_share": "evaluation_share",
    "repair_hours": "repair_seconds",
    "power_usage_effectiveness": "power_usage_effectiveness",
}
"""Key of a request -> field of the operations that it replaces."""


def _operations(request: Request) -> Operations:
    """What is assumed of failures and checkpoints, with the user's own figures."""
    changed = {field: value * base_unit(key)[1] for key, field in OVERRIDES.items() if (value := getattr(request, key)) is not None}
    return dataclasses.replace(load.find(Operations, request.operations or DEFAULT_OPERATIONS), **changed)


def _choices(request: Request) -> Choices:
    pins: dict[str, tuple[int, ...]] = {}
    for axis in LABEL_ORDER:
        values = getattr(request, axis)
        if values is None:
            continue
        if axis in WORDS:
            pins[axis] = tuple(_code(axis, word) for word in values)
        else:
            least = 0 if axis in ("zero_stage", "recompute_layers") else 1
            most = 3 if axis == "zero_stage" else 10_000_000
            for value in values:
                if not least <= value <= most:
                    raise InputError(f"choices.{axis} = {value} must lie between {least} and {most}")
            pins[axis] = tuple(values)
        if not pins[axis]:
            raise InputError(f"choices.{axis} is an empty list: leave it out to search every value")
    keys = [field.name for field in dataclasses.fields(Choices) if field.name != "pins"]
    settings = {key: getattr(request, key) for key in keys if getattr(request, key) is not None}
    return Choices(pins=pins, **settings)


def _code(axis: str, word: str) -> int:
    if word not in WORDS[axis]:
        raise InputError(f"choices.{axis} = '{word}'{nearest(word, WORDS[axis])}")
    return WORDS[axis].index(word)


def load_scenario(word: str, overrides: Mapping[str, Any] | None = None) -> Scenario:
    """The scenario of a file or name, with overriding keys of :class:`Request`. Raises InputError."""
    path = scenario_path(word)
    return make_scenario(Request(**dict(overrides or {})).over(read_request(path)), name=path.stem)
