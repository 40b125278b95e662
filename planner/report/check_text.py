"""The verdict on a configuration: as a page, and as plain data for JSON."""

from __future__ import annotations

import dataclasses
from typing import Any

from rich.console import Group, RenderableType
from rich.text import Text

from planner.cost.memory import VERDICTS
from planner.frameworks import NAMES
from planner.frameworks.config import ILLEGAL, Config
from planner.report.text import STYLE, band_texts, checklist, illegal_lines, memory_table, scenario_line, step_table
from planner.report.why_not_text import feasible_texts, nearest_texts, why_not_json
from planner.request import noted
from planner.units import GIB, nine_digits, three
from planner.verdict import Checked


def check_page(found: Checked) -> RenderableType:
    """The whole verdict on one page of 100 columns: the answer first, then what is wrong, where bytes and seconds go, what is better."""
    own = found.planned
    parts: list[RenderableType] = [
        Text(f"{own.config.path}: {own.config.kind}"),
        Text(scenario_line(own.scenario)),
        Text(f"layout {own.layout.label}{_split_words(found)}"),
        *verdict_texts(found),
    ]
    parts += [Text(f"{finding.rule}: {finding.text}", style="red" if finding.kind == ILLEGAL else "yellow") for finding in found.findings]
    if not found.answer.legal:
        parts += [Text(line, style="red") for line in illegal_lines(found.explanation)]
    parts += [Text(""), *_better_texts(found)]
    if found.explanation.step is not None:
        parts += _ledger_parts(found)
    return Group(*parts, Text(""), *(Text(line) for line in reading_lines(own.config)))


def _split_words(found: Checked) -> str:
    layers = found.planned.layers_per_stage
    return f" with {'-'.join(map(str, layers))} layers per stage" if layers else ""


def verdict_texts(found: Checked) -> list[RenderableType]:
    """Legal or not, fits or not with the margin of the fullest stage, and the step."""
    own, name = found.explanation, NAMES[found.planned.config.framework]
    lines: list[RenderableType] = [Text(f"legal for {name}", style="green") if found.legal else Text(f"NOT legal for {name}", style="red")]
    if own.step is None or own.need_bytes is None:
        return lines
    stage, usable, seconds = int(own.need_bytes.argmax()), own.job.gpu.memory_bytes, float(own.step.total[0])
    need, verdict = float(own.need_bytes[stage]), VERDICTS[own.verdict]
    margin = f"{(usable - need) / GIB:.1f} GiB free" if need <= usable else f"{(need - usable) / GIB:.1f} GiB too much"
    unless = "" if found.legal else ", if it were legal"
    lines.append(Text(f"{verdict}{unless}: stage {stage} needs {need / GIB:.1f} of {usable / GIB:.1f} GiB, {margin}", style=STYLE[verdict]))
    rate = own.job.tokens_per_step / seconds / own.job.num_gpus
    lines.append(Text(f"step {three(seconds)} s{unless}, MFU {own.mfu:.1%}, {rate:,.0f} tokens/s/GPU", style="bold"))
    return [*lines, *band_texts(own, seconds)]


def _better_texts(found: Checked) -> list[RenderableType]:
    """Its rank and the best change; of what is not feasible the nearest layout that is."""
    answer = found.answer
    lines: list[RenderableType] = []
    for switch in found.switches:
        saved = [f"{three(switch.seconds)} s per step"] if switch.seconds > 0 else []
        saved += [f"{switch.need_bytes / GIB:.1f} GiB"] if switch.need_bytes > 0.05 * GIB else []
        lines.append(Text(f"{switch.words}: saves {' and '.join(saved)}", style="bold"))
    if answer.feasible:
        return lines + feasible_texts(answer)
    return lines + nearest_texts(answer, "the nearest layout that fits" if answer.legal else "the nearest legal layout")


def _ledger_parts(found: Checked) -> list[RenderableType]:
    own = found.explanation
    return [Text(""), memory_table(own), Text(""), step_table(own), Text(""), checklist([dict(own.flags)])]


def reading_lines(config: Config) -> list[str]:
    """What was read, what was assumed and what was not used."""
    return [f"read: {line}" for line in config.read] + noted(config.path, config.assumed, config.ignored)


def check_json(found: Checked) -> dict[str, Any]:
    """The verdict as plain data."""
    own = found.planned
    return why_not_json(found.answer) | {
        "file": str(own.config.path),
        "kind": own.config.kind,
        "framework": own.config.framework,
        "legal": found.legal,
        "verdict": VERDICTS[found.explanation.verdict] if found.explanation.step is not None else None,
        "findings": [dataclasses.asdict(finding) for finding in found.findings],
        "layers_per_stage": list(own.layers_per_stage),
        "switches": [
            {"change": switch.words, "seconds": nine_digits(switch.seconds), "need_bytes": round(switch.need_bytes)}
            for switch in found.switches
        ],
        "read": list(own.config.read),
        "assumed": list(own.config.assumed),
        "ignored": list(own.config.ignored),
    }
