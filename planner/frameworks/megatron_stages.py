"""Which layers Megatron gives to each pipeline stage, from its settings; and what is wrong where it refuses to.

Source: validate_args in megatron/training/arguments.py, and TransformerConfig and get_num_layers_to_build in megatron/core/transformer.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from planner.frameworks.megatron_flags import flag_of
from solver.layout import chunk_sizes

Settings = Mapping[str, Any]

MOST_LETTERS = 100_000
LETTERS = {"E": "embedding", "t": "decoder", "m": "mtp", "L": "loss"}
REPEATS = (r"\(([^)]+)\)\*(\d+)", r"(.)\*(\d+)")
"""What a layout string repeats: a bracket, then one letter."""


@dataclass(frozen=True)
class Split:
    """The layers of each chunk, or why there is none."""

    virtual: int = 1
    chunks: tuple[int, ...] = ()
    """Decoder layers of each chunk in the model's order; empty where the settings are refused."""
    rule: str = ""
    problem: str = ""
    """The rule that the settings break, and the sentence that says how."""


def number(settings: Settings, field: str, default: int = 0) -> int:
    """A field as a whole number, the default where it is absent or only the shell knows it."""
    value = settings.get(field)
    return value if isinstance(value, int) and not isinstance(value, bool) else default


def layout_chunks(layout: Any) -> tuple[tuple[str, ...], ...]:
    """The parts of each chunk of a pipeline layout: a string of letters, or lists of words. Raises ValueError.

    >>> layout_chunks("Et*2|(t|)*2,mL")
    (('embedding', 'decoder', 'decoder'), ('decoder',), ('decoder',), ('mtp', 'loss'))
    >>> layout_chunks([["embedding", "decoder"], ["decoder", "loss"]])
    (('embedding', 'decoder'), ('decoder', 'loss'))
    """
    if isinstance(layout, list):
        words = {**LETTERS, **{word: word for word in LETTERS.values()}}
        rows = [row if isinstance(row, list) else list(row) if isinstance(row, str) else [None] for row in layout]
        named = [tuple(words.get(part, "") if isinstance(part, str) else "" for part in row) for row in rows]
        if not all(part for row in named for part in row) or sum(map(len, named)) > MOST_LETTERS:
            raise ValueError("a chunk may list embedding, decoder, mtp and loss only")
        return tuple(named)
    text = str(layout).replace(",", "").replace(" ", "")
    for pattern in REPEATS:
        longest = sum(len(found[1]) * int(found[2]) for found in re.finditer(pattern, text))
        if longest > MOST_LETTERS:
            raise ValueError("it repeats too often")
        text = re.sub(pattern, lambda found: found[1] * int(found[2]), text)
    strange = sorted(set(text) - set(LETTERS) - {"|"})
    if strange:
        raise ValueError(f"{strange[0]!a} is no part of a layout; legal: E, t, m, L, | and *N")
    return tuple(tuple(LETTERS[letter] for letter in piece) for piece in text.split("|"))


def split_of(settings: Settings) -> Split:
    """The split that the settings ask for."""
    pipeline = max(number(settings, "pipeline_model_parallel_size", 1), 1)
    ways = [field for field in VIRTUAL_WAYS if settings.get(field) is not None]
    if len(ways) > 1:
        return Split(_stated_virtual(settings), (), "M13", f"{' and '.join(map(flag_of, ways))} exclude each other: keep one")
    if settings.get("pipeline_model_parallel_layout") is not None:
        return _by_layout(settings, pipeline)
    virtual = _by_layers(settings, pipeline) if ways == ["num_layers_per_virtual_pipeline_stage"] else Split(_stated_virtual(settings))
    if virtual.problem:
        return virtual
    uneven = [field for field in ENDS if settings.get(field) is not None]
    whole = _with_ends if uneven else _evenly
    return whole(settings, pipeline, virtual.virtual)


VIRTUAL_WAYS = ("num_layers_per_virtual_pipeline_stage", "num_virtual_stages_per_pipeline_rank", "pipeline_model_parallel_layout")
ENDS = ("decoder_first_pipeline_num_layers", "decoder_last_pipeline_num_layers")
ACCOUNTS = ("account_for_embedding_in_pipeline_split", "account_for_loss_in_pipeline_split")


def _stated_virtual(settings: Settings) -> int:
    stated = number(settings, "num_virtual_stages_per_pipeline_rank") or number(settings, "virtual_pipeline_model_parallel_size", 1)
    return max(stated, 1)


def counted_layers(settings: Settings) -> int:
    """Layers that the stages share out: embedding and loss count where the settings say so."""
    return number(settings, "num_layers") + sum(settings.get(field) is True for field in ACCOUNTS)


def _by_layers(settings: Settings, pipeline: int) -> Split:
    """Chunks from the layers of a virtual stage. 80 layers on 16 stages with 2 each once trained 64 layers, silently."""
    each, layers = number(settings, "num_layers_per_virtual_pipeline_stage", 1), counted_layers(settings)
    if any(settings.get(field) is not None for field in ENDS):
        text = f"{flag_of(VIRTUAL_WAYS[0])} with a stated first or last stage: use {flag_of(VIRTUAL_WAYS[1])}"
        return Split(1, (), "M13", text)
    if layers % pipeline:
        return Split(1, (), "M11", _uneven(settings, pipeline))
    per_stage = layers // pipeline
    if each < 1 or per_stage % each:
        legal = [count for count in range(1, per_stage + 1) if per_stage % count == 0]
        trained = per_stage // each * each * pipeline if each > 0 else 0
        text = (
            f"{layers} layers / {pipeline} stages = {per_stage} per stage does not divide by {flag_of(VIRTUAL_WAYS[0])} = {each}; "
            f"legal: {listing(legal)}; nearest: {nearest_number(each, legal)}. Versions without this check train {trained} layers silently"
        )
        return Split(1, (), "M14", text)
    return Split(per_stage // each)


def _by_layout(settings: Settings, pipeline: int) -> Split:
    layout, layers = settings["pipeline_model_parallel_layout"], number(settings, "num_layers")
    name = flag_of("pipeline_model_parallel_layout")
    others = [field for field in (*ENDS, *ACCOUNTS) if settings.get(field) not in (None, False)]
    if others:
        return Split(1, (), "M13", f"{name} excludes {', '.join(map(flag_of, others))}: keep the layout alone")
    try:
        rows = layout_chunks(layout)
    except ValueError as error:
        return Split(1, (), "M13", f"{name}: {error}")
    chunks = tuple(row.count("decoder") for row in rows)
    if len(rows) % pipeline:
        return Split(
            1, (), "M13", f"{name} has {len(rows)} chunks, no multiple of {pipeline} stages; nearest: {_multiples(len(rows), pipeline)}"
        )
    flat, mtp = [part for row in rows for part in row], number(settings, "mtp_num_layers")
    problem = ""
    if flat[:1] != ["embedding"] or flat[-1:] != ["loss"] or flat.count("embedding") != 1 or flat.count("loss") != 1:
        problem = f"{name} must begin with its only E and end with its only L"
    elif layers and sum(chunks) != layers:
        problem = f"{name} holds {sum(chunks)} layers (t), {flag_of('num_layers')} = {layers}"
    elif flat.count("mtp") != mtp:
        problem = f"{name} holds {flat.count('mtp')} multi-token-prediction layers (m), {flag_of('mtp_num_layers')} = {mtp}"
    virtual = len(rows) // pipeline
    return Split(virtual, (), "M13", problem) if problem else Split(virtual, chunks)


def _evenly(settings: Settings, pipeline: int, virtual: int) -> Split:
    layers = counted_layers(settings)
    if not layers:
        return Split(virtual)
    if layers % pipeline:
        return Split(virtual, (), "M11", _uneven(settings, pipeline))
    if layers // pipeline % virtual:
        return Split(
            virtual,
            (),
            "M14",
            _unfit_chunks(f"{layers} layers / {pipeline} stages = {layers // pipeline} per stage", layers // pipeline, virtual),
        )
    chunks = [layers // pipeline // virtual] * (pipeline * virtual)
    chunks[0] -= settings.get(ACCOUNTS[0]) is True
    chunks[-1] -= settings.get(ACCOUNTS[1]) is True
    return Split(virtual, tuple(chunks))


def _with_ends(settings: Settings, pipeline: int, virtual: int) -> Split:
    """The first or last stage has a stated number of layers, the middle ones share the rest."""
    layers = number(settings, "num_layers")
    first, last = (settings.get(field) for field in ENDS)
    ends = (count if count is not None else "as the others" for count in (first, last))
    text = "num_layers = {}, first stage {}, last {}".format(layers, *ends)
    if any(settings.get(field) is True for field in ACCOUNTS):
        return Split(
            virtual, (), "M12", f"{flag_of(ENDS[0])} and {flag_of(ENDS[1])} exclude {flag_of(ACCOUNTS[0])} and {flag_of(ACCOUNTS[1])}"
        )
    stated = [count for count in (first, last) if isinstance(count, int)]
    if any(count < 1 for count in stated) or len(stated) > pipeline:
        return Split(virtual, (), "M12", f"{text}: a stated stage needs a layer, and {pipeline} stages")
    middle, stages = layers - sum(stated), pipeline - len(stated)
    if bool(middle) != bool(stages) or middle < 0 or (stages and middle % stages):
        near = ", ".join(map(str, _multiples(middle, stages))) if stages and middle > 0 else f"{stages} middle stages need layers"
        return Split(
            virtual, (), "M12", f"{text}: {middle} layers remain for {stages} middle stages of {pipeline}; they divide for: {near}"
        )
    each = middle // stages if stages else 0
    per_stage = [first if isinstance(first, int) else each, *[each] * (pipeline - 2), last if isinstance(last, int) else each][:pipeline]
    unfit = [count for count in per_stage if count % virtual]
    if unfit:
        return Split(virtual, (), "M12", _unfit_chunks(f"{text}: a stage of {unfit[0]} layers", unfit[0], virtual))
    return Split(virtual, tuple(count // virtual for _ in range(virtual) for count in per_stage))


def _unfit_chunks(what: str, per_stage: int, virtual: int) -> str:
    legal = [count for count in range(1, per_stage + 1) if per_stage % count == 0]
    return f"{what} does not divide into {virtual} virtual stages; legal: {listing(legal)}; nearest: {nearest_number(virtual, legal)}"


def _uneven(settings: Settings, pipeline: int) -> str:
    """What to say of layers that the stages do not share evenly, with three ways out."""
    layers, counted = number(settings, "num_layers"), counted_layers(settings)
    also = f" (with embedding or loss: {counted})" if counted != layers else ""
    legal = [size for size in range(1, counted + 1) if counted % size == 0]
    sizes = chunk_sizes(layers, pipeline) if layers >= pipeline else ()
    ways = [f"pipeline sizes {listing(legal)} (nearest: {nearest_number(pipeline, legal)})"]
    ends = _stated_ends(layers, pipeline)
    if ends:
        ways.append(f"{flag_of(ENDS[0])} {ends[0]} {flag_of(ENDS[1])} {ends[1]}")
    account = [field for extra, field in ((1, ACCOUNTS[0]), (2, "")) if (layers + extra) % pipeline == 0]
    if account and counted == layers:
        ways.append(flag_of(account[0]) if account[0] else f"{flag_of(ACCOUNTS[0])} {flag_of(ACCOUNTS[1])}")
    if sizes:
        ways.append(f"{flag_of('pipeline_model_parallel_layout')} of {'+'.join(map(str, sizes)) if len(sizes) <= 16 else 'any sizes'}")
    silent = f". Forks without this check train {counted // pipeline * pipeline} layers silently"
    return f"num_layers = {layers}{also} does not divide by pipeline_model_parallel_size = {pipeline}; legal: {'; or '.join(ways)}{silent}"


def _stated_ends(layers: int, pipeline: int) -> tuple[int, int] | None:
    """Sizes of the first and last stage that leave the middle ones an equal share, the ends nearest to it from below."""
    if pipeline < 3 or layers < pipeline:
        return (-(-layers // 2), layers // 2) if pipeline == 2 and layers > 1 else None
    for each in range(-(-layers // pipeline), 0, -1):
        ends = layers - each * (pipeline - 2)
        if 2 <= ends <= 2 * each:
            return -(-ends // 2), ends // 2
    return None


def listing(values: Sequence[int], most: int = 12) -> str:
    """Some numbers in words, the surplus counted.

    >>> listing([1, 2, 4]), listing(range(20), 3)
    ('1, 2, 4', '0, 1, 2 and 17 more')
    """
    more = f" and {len(values) - most} more" if len(values) > most else ""
    return ", ".join(map(str, values[:most])) + more


def nearest_number(wanted: int, legal: Sequence[int]) -> str:
    """The legal numbers on both sides of a wanted one.

    >>> nearest_number(4, [1, 2, 3, 5, 6])
    '3, 5'
    """
    below, above = [n for n in legal if n < wanted], [n for n in legal if n > wanted]
    return ", ".join(str(n) for n in (*below[-1:], *above[:1])) or "none"


def _multiples(wanted: int, of: int) -> tuple[int, ...]:
    low = wanted // of * of
    return tuple(n for n in (low, low + of) if n > 0)


def per_stage(chunks: Sequence[int], pipeline: int) -> tuple[int, ...]:
    """Layers of each stage from those of the chunks, which go round the stages.

    >>> per_stage((2, 3, 2, 1), 2)
    (4, 4)
    """
    return tuple(sum(chunks[stage::pipeline]) for stage in range(pipeline))


def differs_from_even(chunks: Sequence[int], pipeline: int) -> bool:
    """Whether the stages hold other numbers of layers than under the planner's even split."""
    return per_stage(chunks, pipeline) != per_stage(chunk_sizes(sum(chunks), len(chunks)), pipeline)


SplitRule = Callable[[Settings], Split]
