"""The ledger of one layout as plain data, for JSON."""

from __future__ import annotations

import dataclasses
from typing import Any

from planner.cost.memory import VERDICTS
from planner.explain import MEMORY_FORMULAS, STEP_FORMULAS, Explanation
from planner.report.operations_text import operations_json
from planner.report.workload_text import workload_json
from planner.uncertainty import band
from planner.units import nine_digits


def ledger_json(found: Explanation) -> dict[str, Any]:
    """Bytes per stage and part, seconds per part, flags and napkin figures; of an illegal layout the broken rules."""
    content: dict[str, Any] = {
        "layout": found.layout.label,
        "legal": found.legal,
        "accepted_by": found.accepted_by,
        "broken_rules": dict(found.broken_rules),
        "legal_values": dict(found.legal_values),
        "refused_by": dict(found.refused_by),
        "software": found.job.software.name,
    }
    if found.memory is None or found.step is None or found.need_bytes is None or found.stages is None:
        return content
    memory = found.memory
    if found.split:
        content["even_step_seconds"] = nine_digits(found.split.even_step_seconds)
    content["verdict"] = VERDICTS[found.verdict]
    content["usable_bytes"] = round(found.job.gpu.memory_bytes)
    content["stages"] = [
        {
            "stage": stage,
            "layers": int(found.stages.layers[stage]),
            "need_bytes": round(float(found.need_bytes[stage])),
            "parts": {part: round(float(getattr(memory, part)[stage])) for part in MEMORY_FORMULAS},
        }
        for stage in range(len(found.need_bytes))
    ]
    content["step_seconds"] = nine_digits(float(found.step.total[0]))
    content["step_parts"] = {part: nine_digits(float(getattr(found.step, part)[0])) for part in STEP_FORMULAS}
    own = band(found.job, found.layout)
    if own is not None:
        seconds = content["step_seconds"]
        content["step_band"] = {"low": seconds * own.low, "high": seconds * own.high, "extrapolates": own.extrapolates}
    content["mfu"] = nine_digits(found.mfu)
    content["flags"] = dict(found.flags)
    content["workload"] = workload_json(found.scenario, found.layout)
    content["operations"] = operations_json(found.scenario, found.job, float(found.step.total[0]))
    content["napkin"] = [dataclasses.asdict(figure) for figure in found.figures]
    return content
