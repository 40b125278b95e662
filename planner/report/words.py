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


def money_cell(dollars: float) -> str:
    """Dollars in four digits.

    >>> money_cell(1_234_567), money_cell(8_900), money_cell(999_990)
    ('1.235M', '8.900k', '1.000M')
    """
    if dollars >= 1e15:  # no run: what failures beyond reason come to
        return f"{dollars:.3g}"
    for scale, letter in ((1e9, "B"), (1e6, "M"), (1e3, "k")):
        if dollars >= 0.99995 * scale:
            value = dollars / scale
            return f"{value:.{max(3 - len(str(int(value + 5e-4))) + 1, 0)}f}{letter}"
    return f"{dollars:.0f}"


def duration(seconds: float) -> str:
    """A span of time in the unit that suits it.

    >>> duration(18.0), duration(1992.3), duration(89_078.0), duration(600_000.0)
    ('18 s', '33.2 min', '24.7 h', '6.94 days')
    """
    for scale, least, unit in ((86400.0, 172_800.0, "days"), (3600.0, 7200.0, "h"), (60.0, 120.0, "min")):
        if seconds >= least:
            return f"{seconds / scale:.3g} {unit}"
    return f"{seconds:.3g} s"
