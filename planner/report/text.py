"""The printed pages: shortlist with its books, checklist, and the ledger of one layout."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

import numpy as np
import pandas as pd
from rich import box
from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from planner import advice
from planner.answer import Answer
from planner.cost import parameters
from planner.cost.memory import VERDICTS
from planner.explain import MEMORY_FORMULAS, STEP_FORMULAS, Explanation
from planner.frameworks import NAMES
from planner.frameworks.legality import framework_of, jobs_by_framework
from planner.refine import TELLING, Proof, Shortlist
from planner.refinement import NEAR
from planner.report.operations_text import operations_lines
from planner.report.robustness_text import robustness_lines
from planner.report.words import money_cell, ranges, short_label
from planner.report.workload_text import long_phase_lines, workload_lines
from planner.scenario import Scenario
from planner.search import SearchResult, nearest_refused
from planner.simulated import step_of
from planner.split import Split
from planner.targets import TARGETS, stated
from planner.textbook import Figure
from planner.uncertainty import band
from planner.units import GIB, MIB
from solver.layout import MESH_AXES, WORDS

WIDTH = 100
STYLE = {"fits": "green", "at risk": "yellow", "out of memory": "red"}
SCHEDULE_LETTER = {"gpipe": "g", "zero_bubble_h1": "h", "zero_bubble_2p": "2", "zero_bubble_v": "z", "dualpipe": "d"}
SHORT_VERDICT = {"fits": "fits", "at risk": "risk", "out of memory": "OOM"}


def scenario_line(scenario: Scenario) -> str:
    """The question in one sentence."""
    job = scenario.job
    total = parameters.total(job.model)
    return (
        f"{job.model.name} ({total / 1e9:.1f}B) on {job.num_gpus:,} x {job.gpu.name}, {job.cluster.name} with "
        f"{job.fast_domain} per fast domain and {job.nic_bytes_per_s * 8 / 1e9:.0f} Gb/s each; "
        f"{job.global_batch_size:,} sequences of {job.seq_len:,} ({job.tokens_per_step / 1e6:.2f}M tokens) per step, "
        f"{job.precision}, {job.optimizer}"
    )


def recompute_cell(row: Mapping[Any, Any]) -> str:
    """Recompute in few letters: none, sel, full3 (three layers of each chunk)."""
    word = str(row["recompute"])
    return {"none": "none", "selective": "sel"}.get(word, f"full{row['recompute_layers']}")


def shortlist_table(frame: pd.DataFrame) -> Table:
    """The shortlist at 100 columns."""
    table = Table(box=None, pad_edge=False, padding=(0, 1, 0, 0), header_style="bold underline")
    money = "total_days" in frame
    heads = ["#", "TP", "PP", "VP", "CP", "EP", "DP", "Z", "MB", "recomp", "step s", "tok/s", "MFU%", "bub%", "com%", "GiB", ""]
    heads += ["days", "cost"] if money else []
    heads += ["in"]
    for head in heads:
        table.add_column(head, justify="left" if head in ("recomp", "", "in") else "right", no_wrap=True)
    for row in frame.to_dict("records"):
        verdict = str(row["verdict"])
        expert = str(row["expert_parallel"]) + (f"x{row['expert_tensor_parallel']}" if row["expert_tensor_parallel"] > 1 else "")
        cells = [
            str(row["rank"]),
            str(row["tensor_parallel"]),
            str(row["pipeline_parallel"]) + ("*" if row["pipeline_layout"] else ""),
            str(row["virtual_pipeline"]) + SCHEDULE_LETTER.get(str(row["schedule"]), ""),
            str(row["context_parallel"]),
            expert,
            *(str(row[a]) for a in ("data_parallel", "zero_stage", "micro_batch_size")),
            recompute_cell(row),
            f"{row['step_seconds']:.3f}" if row["step_seconds"] < 100 else f"{row['step_seconds']:.1f}",
            f"{row['tokens_per_second_per_gpu']:,.0f}",
            f"{row['mfu'] * 100:.1f}",
            f"{row['bubble_share'] * 100:.1f}",
            f"{row['exposed_communication_share'] * 100:.1f}",
            f"{row['memory_gib']:.1f}",
        ]
        styled = [Text(cell) for cell in cells] + [Text(SHORT_VERDICT[verdict], style=STYLE[verdict])]
        if money:
            styled += [Text(f"{row['total_days']:.3g}"), Text("$" + money_cell(row["cost_usd"]))]
        styled.append(Text("".join(LETTERS[name] for name in str(row["frameworks"]).split("+")) if row["frameworks"] != "none" else "-"))
        table.add_row(*styled)
    return table


LETTERS = {"megatron": "M", "torchtitan": "T", "deepspeed": "D", "megatron-bridge": "B", "accelerate": "A"}
"""Of the column that says which frameworks accept a layout."""


def legend(scenario: Scenario) -> str:
    """What the shortlist's letters mean, and the reserve behind the verdict."""
    usable = scenario.job.gpu.memory_bytes / GIB
    stack = scenario.job.software
    return (
        f"GiB: need of the fullest stage, of {usable:.1f} usable (tensors + {stack.reserve_share:.0%} reserve + context and "
        f"communicators). fits / risk / OOM: more than {scenario.job.physics.fits_sigmas:g} standard deviations below the "
        f"limit / near it / {scenario.job.physics.oom_sigmas:g} above. Z: ZeRO stage. VP: chunks per stage "
        "(g gpipe, z zero-bubble V, d DualPipeV). PP *: uneven chunks or stages "
        "(CSV: pipeline_layout). tok/s: tokens per second and GPU. com%: exposed communication. "
        f"in: accepted by {', '.join(f'{letter} {NAMES[name]}' for name, letter in LETTERS.items())}."
    )


def band_line(frame: pd.DataFrame) -> str:
    """The 80 % band of the first layout's step, and which ranks extrapolate."""
    first = frame.iloc[0]
    line = f"80 % band of #1: {first['step_seconds_low']:.3g} to {first['step_seconds_high']:.3g} s per step, by the nearest measured runs"
    unlike = [int(rank) for rank in frame.loc[frame["extrapolates"], "rank"]]
    return line + (f"; #{ranges(unlike)} extrapolate: no measured run is of their kind" if unlike else "")


def books(result: SearchResult) -> list[str]:
    """How many layouts existed, how many each rule dropped, how many were scored."""
    funnel = result.funnel
    lines = [f"{funnel.space:,} layouts in the declared space; {funnel.survivors:,} ranked"]
    dropped = [f"{name} {number:,}" for name, number in funnel.dropped.items() if number]
    lines.append("dropped: " + ", ".join(dropped) if dropped else "dropped: none")
    scored = funnel.survivors + funnel.dropped.get("memory", 0)
    lines.append(f"scored: {scored:,} (memory), of them {funnel.survivors:,} also for step time; the counts close")
    return lines


def split_lines(shortlist: Shortlist) -> list[str]:
    """Which layouts of the shortlist have uneven stages, and what that gains, equal splits on one line; what executing them showed."""
    ranks: dict[str, list[int]] = {}
    for rank, split in enumerate(shortlist.splits, start=1):
        if split is not None:
            ranks.setdefault(split_words(split), []).append(rank)
    uneven = [f"#{ranges(own)} uneven: {words}" for words, own in ranks.items()]
    return uneven + ([executed_line(shortlist)] if shortlist.executed else [])


def executed_line(shortlist: Shortlist) -> str:
    """How many pipelines were executed event by event, which moved by that, and of what the proofs are."""
    found = shortlist.executed
    assert found is not None
    pairs = zip(shortlist.rows.step_seconds.tolist(), shortlist.formula_seconds, strict=True)
    moved = [rank for rank, (step, formula) in enumerate(pairs, start=1) if formula and abs(step / formula - 1.0) > TELLING]
    words = f"{found.number} pipelines that no formula knows (interleaved, zero-bubble, V) executed event by event: "
    words += f"{found.moved} moved by over {TELLING:.0%}" if found.moved else f"none moved by over {TELLING:.0%}"
    words += f", up to {found.farthest:+.1%}" if found.moved else ""
    words += f"; of those shown #{ranges(moved)}" if moved else ""
    words += f"; by the formulas {short_label(found.leader)} would lead" if found.leader else ""
    words += "" if found.complete else f"; others that come within {NEAR - 1:.0%} by the formula were not"
    return f"{words}; splits and proofs are the formulas'"


MOST_OTHERS = 3


def other_meshes(result: SearchResult, shortlist: Shortlist) -> list[str]:
    """The best layouts of other parallel sizes, evenly split, where the shortlist has hardly any: what else there is to choose."""
    x, first = result.ranked.layouts, float(shortlist.rows.step_seconds[0])
    meshes = np.stack([getattr(x, axis) for axis in MESH_AXES], axis=1)
    shown = {tuple(row) for row in np.stack([getattr(shortlist.rows.layouts, axis) for axis in MESH_AXES], axis=1).tolist()}
    _, rows = np.unique(meshes, axis=0, return_index=True)
    others = [int(row) for row in np.sort(rows) if tuple(meshes[row].tolist()) not in shown][:MOST_OTHERS]
    if not others or len(shown) > MOST_OTHERS:
        return []
    jobs, stack = jobs_by_framework(result.scenario), result.ranked.stack
    steps = [float(step_of(jobs[int(stack[row])], x.layout(row)).total[0]) for row in others]
    words = [f"{short_label(x.layout(row))} ({step / first - 1:+.1%})" for row, step in zip(others, steps, strict=True)]
    return [f"best of other sizes: {', '.join(words)}"]


def split_words(split: Split) -> str:
    """Layers per stage, what they gain, how far that is proven."""
    counts = "-".join(map(str, split.layers_per_stage))
    more = f", of them {'-'.join(map(str, split.recomputed_per_stage))} recomputed" if split.recomputed_per_stage else ""
    proven = "shortest pipeline, proven" if split.status == "optimal" else f"at most {split.gap:.1%} from the best"
    return f"{counts} layers per stage{more}: {split.gain:.1%} faster than the even split, {proven}"


def proof_line(proof: Proof) -> str:
    """What is proven of the first layout, in one sentence."""
    words = [f"best of {proof.ranked:,} layouts by the model"]
    if proof.runner_up == proof.runner_up:
        words.append(f"next best {proof.runner_up:.2%} slower")
    if proof.split:
        words.append(f"shortest pipeline proven for {proof.proven:,} of {proof.split:,} splits sought")
    if proof.open:
        words.append(
            f"not proven: {proof.open:,} others were not split, and a split of theirs could overtake by at most {proof.open_gain:.1%} "
            "(bound; --prove splits them)"
        )
    else:
        words.append("no split of the others can overtake (bound)")
    return "; ".join(words)


def shortlist_page(found: Answer, frame: pd.DataFrame) -> RenderableType:
    """The whole answer to a search."""
    result, shortlist, scenario = found.result, found.shortlist, found.scenario
    first_step = float(shortlist.rows.step_seconds[0])
    known = [proof_line(shortlist.proof)] if shortlist.proof else []
    known += [*other_meshes(result, shortlist), *(robustness_lines(found.robust) if found.robust else [])]
    known += [band_line(frame)] if "step_seconds_low" in frame else []
    parts: list[RenderableType] = [Text(scenario_line(scenario)), Text(""), shortlist_table(frame)]
    parts += [Text(line) for line in [*split_lines(shortlist), *known]]
    parts += [Text(legend(scenario), style="dim"), Text(""), checklist(found.findings)]
    parts += [Text(f"- {note}") for note in workload_lines(scenario, shortlist.rows.layouts.layout(0))]
    around = operations_lines(scenario, shortlist.job(scenario, 0), first_step)
    for paragraph in (around, *map(long_phase_lines, found.phases), books(result)):
        parts += [Text(line) for line in ["", *paragraph]]
    return Group(*parts)


def checklist(findings: list[dict[str, str]]) -> RenderableType:
    """Red flags of the shortlist, each once with the ranks that raise it."""
    raised: dict[str, list[tuple[int, str]]] = {}
    for rank, found in enumerate(findings, start=1):
        for name, finding in found.items():
            raised.setdefault(name, []).append((rank, finding))
    if not raised:
        return Text("checklist: no red flag on the shortlist", style="green")
    thresholds = {check.name: check.threshold for check in advice.CHECKS}
    lines = ["checklist:"]
    for name, items in raised.items():
        ranks = ranges([rank for rank, _ in items])
        lines.append(f"! {name} (#{ranks}; {thresholds[name]}): {items[0][1]}")
    return Text("\n".join(lines))


def no_layout_lines(result: SearchResult) -> list[str]:
    """Why nothing fits: the books, and the layout that came nearest with what it lacked."""
    lines = [scenario_line(result.scenario), "no layout fits."]
    if result.too_late or len(result.ranked):
        scenario = result.scenario
        number = sum(result.too_late.values()) + len(result.ranked)
        words = ", ".join(TARGETS[name].words(scenario) for name in stated(scenario.choices))
        lines[-1] = f"no layout meets the target ({words}): {number:,} fit and are launchable, none of them meets it"
    elif result.nearest:
        usable = result.scenario.job.gpu.memory_bytes
        need = result.nearest.need_bytes
        lines.append(
            f"nearest: {result.nearest.layout.label}, {need / GIB:.1f} of {usable / GIB:.1f} GiB: {(need - usable) / GIB:.1f} GiB too much"
        )
    else:
        refused = nearest_refused(result.problem)
        if refused:
            lines.append(f"nearest: {refused[0].label} is refused: {refused[1]}")
    lines.append("dropped: " + ", ".join(f"{name} {number:,}" for name, number in result.funnel.dropped.items() if number))
    return lines


def illegal_lines(found: Explanation) -> list[str]:
    """Why a layout is not allowed, with the legal values."""
    lines = [f"{rule}: {sentence}" for rule, sentence in found.broken_rules.items()]
    for axis, values in found.legal_values.items():
        if values and len(values) <= 64:
            words = [WORDS[axis][value] if axis in WORDS else str(value) for value in values]
            lines.append(f"  legal {axis}, all else kept: {', '.join(words)}")
    return lines if found.legal else lines + refusal_lines(found)


def refusal_lines(found: Explanation) -> list[str]:
    """The rules by which the frameworks that the search may use refuse a layout, and which others would accept it."""
    in_play = [framework_of(number) for number in jobs_by_framework(found.scenario)]
    lines = [f"{name} refuses it by {rule}" for name in in_play for rule in found.refused_by.get(name, [])]
    others = [name for name in found.accepted_by if name not in in_play and not found.broken_rules]
    return lines + ([f"  {', '.join(others)} would accept it"] if others else [])


def ledger_page(found: Explanation) -> RenderableType:
    """The ledger of one layout."""
    assert found.memory is not None and found.step is not None and found.stages is not None and found.need_bytes is not None
    scenario, job = found.scenario, found.job
    total = float(found.step.total[0])
    head = [
        Text(scenario_line(scenario)),
        Text(f"layout {found.layout.label}, software {job.software.name}"),
        Text(f"accepted by: {', '.join(found.accepted_by) or 'no framework'}"),
    ]
    if found.split:
        head.append(Text(f"uneven stages: {split_words(found.split)} (--even keeps the even one)"))
    if not found.legal:
        head += [Text("not legal; its figures if it were:", style="red")]
        head += [Text(line, style="red") for line in illegal_lines(found)]
    verdict = VERDICTS[found.verdict]
    need = float(found.need_bytes.max())
    word = "verdict" if found.legal else "memory"
    summary = Text(
        f"{word}: {verdict}; {need / GIB:.1f} of {job.gpu.memory_bytes / GIB:.1f} GiB; step {total:.3f} s, "
        f"MFU {found.mfu:.1%}, {job.tokens_per_step / total / job.num_gpus:,.0f} tokens/s/GPU",
        style=STYLE[verdict],
    )
    parts: list[RenderableType] = [*head, summary, *band_texts(found, total), Text(""), memory_table(found), Text(""), step_table(found)]
    parts += [Text(line) for line in operations_lines(scenario, job, total)]
    parts += [Text(""), figures_table(found.figures), Text(""), checklist([dict(found.flags)])]
    parts += [Text(f"- {note}") for note in workload_lines(scenario, found.layout)]
    return Group(*parts)


def band_texts(found: Explanation, seconds: float) -> list[RenderableType]:
    """The 80 % band of a step time, if the table of residuals is there."""
    own = band(found.job, found.layout)
    if own is None:
        return []
    like = "no measured run is like it: extrapolated" if own.extrapolates else f"{own.nearest} measured runs of its kind"
    return [Text(f"80 % band: {seconds * own.low:.3g} to {seconds * own.high:.3g} s ({like})")]


def memory_table(found: Explanation) -> Table:
    """GiB per part and stage; of a long pipeline the distinct stages."""
    memory, stages, need = found.memory, found.stages, found.need_bytes
    assert memory is not None and stages is not None and need is not None
    shown = _distinct_stages(found)
    table = Table(title="memory, GiB per stage", box=box.SIMPLE_HEAD, title_justify="left", pad_edge=False, padding=(0, 1, 0, 0))
    table.add_column("part")
    for rows in shown:
        table.add_column(f"stage {ranges(rows)}", justify="right")
    table.add_column("formula (planner/cost/memory.py)", style="dim")
    for field in dataclasses.fields(memory):
        values = getattr(memory, field.name)
        function, meaning = MEMORY_FORMULAS[field.name]
        table.add_row(field.name, *(f"{float(values[rows[0]]) / GIB:.2f}" for rows in shown), f"{function}: {meaning}")
    reserve = memory.tensors * found.job.software.reserve_share
    table.add_row("reserve", *(f"{float(reserve[r[0]]) / GIB:.2f}" for r in shown), "need_bytes: unusable fragments")
    table.add_row("need", *(f"{float(need[r[0]]) / GIB:.2f}" for r in shown), "need_bytes: compared with the usable memory", style="bold")
    table.add_row("layers", *(str(int(stages.layers[r[0]])) for r in shown), "stages.all_stages")
    return table


def _distinct_stages(found: Explanation, most: int = 5) -> list[list[int]]:
    """Stages grouped where all parts agree; of many groups the first, the fullest and the last ones."""
    assert found.memory is not None and found.need_bytes is not None
    groups: dict[tuple[float, ...], list[int]] = {}
    for stage in range(len(found.need_bytes)):
        parts = tuple(round(float(getattr(found.memory, f.name)[stage])) for f in dataclasses.fields(found.memory))
        groups.setdefault(parts, []).append(stage)
    listed = sorted(groups.values())
    if len(listed) <= most:
        return listed
    fullest = max(listed, key=lambda rows: float(found.need_bytes[rows[0]]))  # type: ignore[index]
    keep = [listed[0], listed[1], fullest, listed[-2], listed[-1]]
    return [rows for number, rows in enumerate(keep) if rows not in keep[:number]]


def step_table(found: Explanation) -> Table:
    """Seconds per part of the step, with shares that sum to one."""
    assert found.step is not None
    total = float(found.step.total[0])
    table = Table(title="step, seconds", box=box.SIMPLE_HEAD, title_justify="left", pad_edge=False, padding=(0, 1, 0, 0))
    table.add_column("part")
    table.add_column("s", justify="right")
    table.add_column("%", justify="right")
    table.add_column("formula (planner/cost/)", style="dim")
    for field in dataclasses.fields(found.step):
        seconds = float(getattr(found.step, field.name)[0])
        function, meaning = STEP_FORMULAS[field.name]
        table.add_row(field.name, f"{seconds:.4f}", f"{seconds / total * 100:.1f}", f"{function}: {meaning}")
    table.add_row("total", f"{total:.4f}", "100.0", "step.step_seconds", style="bold")
    return table


def figure_text(figure: Figure) -> str:
    """A napkin figure with its unit, as people write it."""
    if figure.unit == "B":
        return f"{figure.value / 1e9:.2f} GB"
    if figure.unit == "MiB":
        return f"{figure.value / MIB:.1f} MiB"
    if figure.unit == "%":
        return f"{figure.value * 100:.1f} %"
    if figure.value >= 1e9:
        return f"{figure.value:.2e} {figure.unit}".strip()
    digits = 0 if float(figure.value).is_integer() or figure.value >= 1000 else 2
    return f"{figure.value:,.{digits}f} {figure.unit}".strip()


def figures_table(figures: list[Figure]) -> Table:
    """The napkin arithmetic beside the model's figures."""
    table = Table(title="the same on a napkin", box=box.SIMPLE_HEAD, title_justify="left", pad_edge=False, padding=(0, 1, 0, 0))
    table.add_column("figure")
    table.add_column("value", justify="right")
    table.add_column("formula", style="dim")
    for figure in figures:
        table.add_row(figure.name, figure_text(figure), figure.formula)
    return table
