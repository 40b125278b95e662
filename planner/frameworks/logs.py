"""What a training log measured: the steady pace of its iterations and the peak of memory. The log is data, read in blocks.

Source of the formats: Megatron-LM training/training.py (training_log) and training/utils (report_memory), GPT-NeoX megatron/logging.py,
torchtitan components/metrics.py (log) and train.py, DeepSpeed utils/timer.py (ThroughputTimer), runtime/pipe/engine.py (train_batch),
runtime/utils.py (see_memory_usage), runtime/config.py (print), NeMo lightning/pytorch/callbacks (progress printer).
"""

from __future__ import annotations

import math
import re
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple

import numpy as np

from planner.errors import InputError
from planner.scenario import Job
from planner.units import GIB, MIB

MAX_BYTES = 64 << 20
BLOCK = 1 << 20
LONGEST_LINE = 4096
"""Bytes of a line that are looked at: what is sought stands near its beginning."""
MOST_MISSES = 20_000
"""Lines with a word of a log and no number in the right place, after which a file is none."""

SECONDS, SAMPLES, TOKENS = "seconds", "samples per second", "tokens per second and GPU"
NUMBER = r"(?P<value>\d[\d,]{0,17}(?:\.\d{1,20})?(?:[eE][-+]?\d{1,2})?)"
STEP = r"(?P<step>\d{1,12})"


@dataclass(frozen=True)
class Pace:
    """A kind of line that says how fast an iteration went."""

    framework: str
    mark: bytes
    """Stands in every such line: what lines are picked by."""
    pattern: re.Pattern[str]
    """Groups ``step`` and ``value``; what follows the value belongs to it, or a line cut short would give a smaller number."""
    quantity: str
    scale: float = 1.0


def _pace(framework: str, mark: bytes, pattern: str, quantity: str, scale: float = 1.0) -> Pace:
    return Pace(framework, mark, re.compile(pattern, re.ASCII), quantity, scale)


_ITERATION = rf"iteration\s+{STEP}\s*(?:/\s*\d+)?\s*\|.{{0,400}}?elapsed time per iteration"
PACES: tuple[Pace, ...] = (
    _pace("Megatron", b"elapsed time per iteration", rf"{_ITERATION}\s*\(ms\)\s*:\s*{NUMBER}\s*\|", SECONDS, 1e-3),
    _pace("Megatron", b"elapsed time per iteration", rf"{_ITERATION}\s*\(s\)\s*:\s*{NUMBER}\s*\|", SECONDS),
    _pace("NeMo", b"train_step_timing", rf"iteration\s+{STEP}/.{{0,2000}}?train_step_timing in s:\s*{NUMBER}\s", SECONDS),
    _pace("DeepSpeed", b"iter time", rf"steps:\s*{STEP}\s+loss:.{{0,400}}?iter time\s*\(s\)\s*:\s*{NUMBER}\s+samples", SECONDS),
    _pace("torchtitan", b"tps:", rf"(?<!validate )\bstep:\s*{STEP}\s.{{0,400}}?\btps:\s*{NUMBER}\s+(?:tflops|mfu):", TOKENS),
    _pace(
        "DeepSpeed",
        b"SamplesPerSec",
        rf"(?:global_step=|\d/){STEP},\s*(?:RunningAvgSamplesPerSec=[^,]{{1,40}},\s*Curr)?SamplesPerSec={NUMBER},",
        SAMPLES,
    ),
)
"""The better the earlier: what a log holds of several kinds is read from the first of them."""


@dataclass(frozen=True)
class Peak:
    """A kind of line that says how much memory was in use at most."""

    mark: bytes
    pattern: re.Pattern[str]
    kind: str
    """In the words of :attr:`planner.measured.Run.memory_kind`."""
    unit: float
    trained: bool = False
    """Counts only after an iteration: the line is printed while the model is built, too."""


def _peak(mark: bytes, pattern: str, kind: str, unit: float, trained: bool = False) -> Peak:
    return Peak(mark, re.compile(pattern, re.ASCII), kind, unit, trained)


PEAKS: tuple[Peak, ...] = (
    _peak(b"max allocated", rf"max allocated:\s*{NUMBER}\s*\|", "allocated", MIB),
    _peak(b"max allocated", rf"max (?:reserved|cached):\s*{NUMBER}[\s|]", "reserved", MIB),
    _peak(b"GiB(", rf"memory:\s*{NUMBER}\s*GiB\(", "reserved", GIB),
    _peak(b"MaxMemAllocated", rf"MaxMemAllocated={NUMBER}GB", "allocated", GIB),
    _peak(b"Max_MA", rf"\bMax_MA\s+{NUMBER}\s*GB", "allocated", GIB, trained=True),
)
"""What DeepSpeed prints as GB and Megatron as MB are powers of two."""

BATCH = re.compile(r"\bglobal[ _]batch[ _]size:\s*(\d{1,9})\b", re.ASCII)
"""On the line of an iteration."""
FLOPS = re.compile(
    rf"(?:throughput per GPU \(TFLOP/s/GPU\)\s*:|\btflops:|approx flops per GPU:|\bTFLOPs:)\s*{NUMBER}(?=[\sT|])",
    re.ASCII,
)
STATED: tuple[tuple[bytes, str, re.Pattern[str]], ...] = (
    (b"sequence length", "batch", re.compile(r"global batch size (\d{1,9}),", re.ASCII)),
    (b"sequence length", "seq_len", re.compile(r"sequence length (\d{1,9}),", re.ASCII)),
    (b"batch_size", "batch", re.compile(r"(?<!\w)(?:train|global)_batch_size \.{2,}\s*(\d{1,9})\s", re.ASCII)),
)
"""Once per log: mark, what it says, and where the number stands."""
MARKS = tuple(dict.fromkeys([*(p.mark for p in PACES), *(p.mark for p in PEAKS), *(mark for mark, _, _ in STATED)]))
COLOUR = re.compile(rb"\x1b\[[0-9;]*[A-Za-z]")


class Reading(NamedTuple):
    """One line of an iteration; 0 where it does not say."""

    value: float
    batch: int
    flops: float


@dataclass(frozen=True, kw_only=True)
class Measured:
    """What a log measured."""

    path: Path
    framework: str
    quantity: str
    """SECONDS, SAMPLES or TOKENS: what the log prints of an iteration."""
    value: float
    """Its median over the steady iterations."""
    spread: float
    """Half the distance between the quartiles over the median."""
    iterations: int
    """Logged iterations that count."""
    logged: int
    """Logged iterations in all."""
    global_batch_size: int = 0
    """0 where the log does not print it, as for the next two."""
    seq_len: int = 0
    flops_per_gpu: float = 0.0
    """Operations per second that the log itself works out."""
    peak_bytes: float = math.nan
    memory_kind: str = ""

    def step_seconds(self, job: Job) -> float:
        """Seconds of one optimizer step of a job."""
        batch = self.global_batch_size or job.global_batch_size
        if self.quantity == SECONDS:
            return self.value
        if self.quantity == SAMPLES:
            return batch / self.value
        return batch * (self.seq_len or job.seq_len) / (self.value * job.num_gpus)


@dataclass
class _Found:
    """What was seen so far."""

    paces: defaultdict[int, dict[int, list[Reading]]] = field(default_factory=lambda: defaultdict(dict))
    """Index in PACES -> iteration -> its lines: of several ranks, or of several starts."""
    peaks: dict[str, float] = field(default_factory=dict)
    stated: dict[str, int] = field(default_factory=dict)
    misses: int = 0

    def line(self, raw: bytes) -> None:
        """Takes what one line says."""
        text = raw.decode("utf-8", errors="replace")
        self.misses += not (self._pace(raw, text) | self._peak(raw, text) | self._stated(raw, text))

    def _pace(self, raw: bytes, text: str) -> bool:
        for index, pace in enumerate(PACES):
            match = pace.pattern.search(text) if pace.mark in raw else None
            value = _number(match["value"]) * pace.scale if match else 0.0
            if match and value > 0:
                batch, flops = BATCH.search(text, match.start()), FLOPS.search(text)
                reading = Reading(value, int(batch[1]) if batch else 0, _number(flops["value"]) * 1e12 if flops else 0.0)
                self.paces[index].setdefault(int(match["step"]), []).append(reading)
                return True
        return False

    def _peak(self, raw: bytes, text: str) -> bool:
        matched = False
        for peak in PEAKS:
            if peak.mark in raw and (self.paces or not peak.trained):
                for match in peak.pattern.finditer(text):  # ranks may share a line
                    self.peaks[peak.kind] = max(self.peaks.get(peak.kind, 0.0), _number(match["value"]) * peak.unit)
                    matched = True
        return matched

    def _stated(self, raw: bytes, text: str) -> bool:
        matched = False
        for mark, name, pattern in STATED:
            match = pattern.search(text) if mark in raw else None
            if match:
                self.stated[name] = int(match[1])
                matched = True
        return matched


def _number(text: str) -> float:
    return float(text.replace(",", ""))


def read_log(path: Path) -> Measured:
    """What a training log measured. Raises InputError, one line, for a file that is none."""
    found = _Found()
    for line in marked_lines(_blocks(path)):
        found.line(line)
        if found.misses > MOST_MISSES and not found.paces:
            break
    if not found.paces:
        known = ", ".join(dict.fromkeys(pace.framework for pace in PACES))
        raise InputError(f"{path}: no line with the time or speed of an iteration, as {known} print them")
    index = min(found.paces)
    return _measured(path, PACES[index], found.paces[index], found)


def _blocks(path: Path) -> Iterator[bytes]:
    """The bytes of a log. Raises InputError."""
    try:
        if path.is_dir():
            raise InputError(f"{path}: is a folder; name a log")
        if path.exists() and not path.is_file():
            raise InputError(f"{path}: is a pipe or device, not a file")
        if path.stat().st_size > MAX_BYTES:
            raise InputError(f"{path}: larger than {MAX_BYTES >> 20} MiB; cut out some hundred iterations: the first lines and the last")
        with path.open("rb") as file:
            left = MAX_BYTES
            while left > 0 and (block := file.read(BLOCK)):
                if b"\0" in block:
                    raise InputError(f"{path}: not a text file: it holds zero bytes")
                left -= len(block)
                yield block
    except (OSError, ValueError) as error:
        raise InputError(f"{path}: cannot be read ({getattr(error, 'strerror', None) or error})") from None


def marked_lines(blocks: Iterable[bytes]) -> Iterator[bytes]:
    """The lines that hold a mark, in their order and without colours; the work on all others is one search per mark and block.

    >>> list(marked_lines([b"a\\nstep: 1 tp", b"s: 5 \\rb\\n"]))
    [b'step: 1 tps: 5 \\n']
    """
    rest = b""
    for block in blocks:
        text = rest + block.replace(b"\r", b"\n")
        cut = text.rfind(b"\n") + 1
        if not cut and len(text) > LONGEST_LINE:
            cut = len(text)  # what follows so long a line's beginning is not looked at
        yield from _marked(text[:cut])
        rest = text[cut:]
    yield from _marked(rest)


def _marked(text: bytes) -> Iterator[bytes]:
    if b"\x1b" in text:  # a colour may stand between the words of a mark
        text = COLOUR.sub(b"", text)
    spans: dict[int, int] = {}
    for mark in MARKS:
        at = text.find(mark)
        while at >= 0:
            start = text.rfind(b"\n", 0, at) + 1
            end = text.find(b"\n", at) + 1 or len(text)
            spans[start] = end
            at = text.find(mark, end)
    for start, end in sorted(spans.items()):
        yield text[start:end] if end - start <= LONGEST_LINE else text[start : start + LONGEST_LINE]


def _measured(path: Path, pace: Pace, steps: Mapping[int, list[Reading]], found: _Found) -> Measured:
    batch, used = steady(steps)
    values = np.array([np.median([reading.value for reading in readings]) for readings in used])
    low, middle, high = (float(value) for value in np.quantile(values, (0.25, 0.5, 0.75)))
    flops = [reading.flops for readings in used for reading in readings if reading.flops > 0]
    kind = next((kind for kind in ("allocated", "reserved") if found.peaks.get(kind, 0.0) > 0), "")
    return Measured(
        path=path,
        framework=pace.framework,
        quantity=pace.quantity,
        value=middle,
        spread=(high - low) / 2 / middle,
        iterations=len(used),
        logged=len(steps),
        global_batch_size=batch or found.stated.get("batch", 0),
        seq_len=found.stated.get("seq_len", 0),
        flops_per_gpu=float(np.median(flops)) if flops else 0.0,
        peak_bytes=found.peaks.get(kind, math.nan),
        memory_kind=kind,
    )


def steady(steps: Mapping[int, list[Reading]]) -> tuple[int, list[list[Reading]]]:
    """The batch size of most iterations, and the iterations with it without the first fifth of them, at least one.

    The first ones compile, allocate and warm up. What disturbs some later ones (a checkpoint, an evaluation, a restart)
    does not matter to a median. An only iteration counts.

    >>> steady({step: [Reading(value, 8, 0.0)] for step, value in ((3, 1.0), (1, 9.0), (2, 1.1))})[1]
    [[Reading(value=1.1, batch=8, flops=0.0)], [Reading(value=1.0, batch=8, flops=0.0)]]
    """
    sizes = Counter(readings[0].batch for readings in steps.values())
    batch = max(sizes, key=lambda size: (sizes[size], size))
    kept = [steps[step] for step in sorted(steps) if steps[step][0].batch == batch]
    return batch, kept[max(len(kept) // 5, 1) :] or kept
