"""Small pieces of prose that several pages share."""

from __future__ import annotations

from solver.layout import Layout


def ranges(numbers: list[int]) -> str:
    """Consecutive numbers as ranges.

    >>> ranges([1, 2, 3, 7])
    '1-3, 7'
    """
    runs: list[list[int]] = []
    for number in numbers:
        if runs and number == runs[-1][-1] + 1:
            runs[-1].append(number)
        else:
            runs.append([number])
    return ", ".join(f"{run[0]}-{run[-1]}" if len(run) > 1 else str(run[0]) for run in runs)


def short_label(layout: Layout) -> str:
    """The label without groups of one, which `planner explain` fills in.

    >>> short_label(Layout(tensor_parallel=8, pipeline_parallel=11, zero_stage=2, recompute="full", recompute_layers=12))
    'tp8-pp11-dp1-zero2-mb1-full12'
    """
    return "-".join(piece for piece in layout.label.split("-") if piece not in ("vp1", "cp1", "ep1"))
