"""Two layouts compared: seconds and bytes part by part, and the main cause in one sentence."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from planner.costed import Costed, costed
from planner.drivers import reason
from planner.explain import STEP_FORMULAS, Explanation, check_pins, complete_layout, explain
from planner.refine import costing_job
from planner.scenario import Scenario
from planner.units import four, three
from solver.layout import Layout

OTHER_PARTS = 0.1
"""Parts whose change is at least this share of the largest change have their reason told beside the main one."""


@dataclass(frozen=True)
class Part:
    """One part of the step (seconds) or of the memory (bytes) of both layouts."""

    name: str
    a: float
    b: float

    @property
    def difference(self) -> float:
        """What b has beyond a."""
        return self.b - self.a


@dataclass(frozen=True)
class Difference:
    """Two layouts and what b has beyond a; the parts sum to the difference of the totals."""

    a: Costed
    b: Costed
    step: tuple[Part, ...]
    """Seconds, largest difference first."""
    memory: tuple[Part, ...]
    """Bytes of the fullest stages, largest difference first."""

    @property
    def seconds(self) -> float:
        """How much longer the step of b is."""
        return self.b.step_seconds - self.a.step_seconds

    @property
    def bytes(self) -> float:
        """How much more memory b needs."""
        return self.b.need_bytes - self.a.need_bytes

    @property
    def faster_slower(self) -> tuple[Costed, Costed]:
        """The layouts in the order of their steps; a first where they agree."""
        return (self.b, self.a) if self.seconds < 0 else (self.a, self.b)


@dataclass(frozen=True)
class Comparison:
    """The answer to a question about two labels: their difference, or those that are not legal."""

    difference: Difference | None
    illegal: tuple[Explanation, ...] = ()


def compare(scenario: Scenario, label_a: str, label_b: str) -> Comparison:
    """The difference of two labels, what they leave out filled in. Raises InputError for a label that cannot be read or a pin broken."""
    layouts = [complete_layout(scenario, label) for label in (label_a, label_b)]
    for layout in layouts:
        check_pins(scenario, layout)
    illegal = tuple(found for found in (explain(scenario, layout) for layout in dict.fromkeys(layouts)) if not found.legal)
    return Comparison(None, illegal) if illegal else Comparison(difference(scenario, *layouts))


def difference(scenario: Scenario, a: Layout, b: Layout) -> Difference:
    """What b has beyond a, each under the stack of the first framework that accepts it and its best split of layers.

    The groups must multiply to the GPUs and divide the batch; no other rule is asked.
    """
    return between(*(costed(costing_job(scenario, layout)[0], layout) for layout in (a, b)))


def between(a: Costed, b: Costed) -> Difference:
    """The difference of two costed layouts, of one job or of two."""

    def parts(of_a: Mapping[str, float], of_b: Mapping[str, float]) -> tuple[Part, ...]:
        found = [Part(name, of_a[name], of_b[name]) for name in of_a]
        return tuple(sorted(found, key=lambda part: -abs(part.difference)))

    return Difference(a, b, parts(a.step, b.step), parts(a.memory, b.memory))


def names(a: Costed, b: Costed) -> tuple[str, str]:
    """Two layouts by what distinguishes their labels; by their stacks, where the labels agree."""
    pieces_a, pieces_b = a.layout.label.split("-"), b.layout.label.split("-")
    own_a = "-".join(piece for piece in pieces_a if piece not in pieces_b)
    own_b = "-".join(piece for piece in pieces_b if piece not in pieces_a)
    if own_a and own_b:
        return own_a, own_b
    if a.layout == b.layout and a.job.software.name != b.job.software.name:
        return a.job.software.name, b.job.software.name
    return a.layout.label, b.layout.label


def main_cause(found: Difference) -> str:
    """One sentence: how much the slower layout loses, in which part most of it, and why."""
    fast, slow = found.faster_slower
    if found.a == found.b:
        return f"both are {fast.layout.label}: no difference."
    fast_name, slow_name = names(fast, slow)
    lost = abs(found.seconds)
    if lost <= 1e-12 * slow.step_seconds:
        return f"{slow_name} and {fast_name} take the same time, {four(fast.step_seconds)} s per step."
    main, *_ = sorted(STEP_FORMULAS, key=lambda part: fast.step[part] - slow.step[part])
    more = slow.step[main] - fast.step[main]
    part = f"{main} ({STEP_FORMULAS[main][1]}; {three(fast.step[main])} s -> {three(slow.step[main])} s)"
    head = (
        f"{slow_name} loses {three(lost)} s per step against {fast_name} ({four(slow.step_seconds)} s against "
        f"{four(fast.step_seconds)} s, {slow.step_seconds / fast.step_seconds - 1:.1%} longer)"
    )
    why = reason(main, fast, slow)
    tail = f"{part}: {why}" if why else part
    if more <= lost:
        return f"{head}, of which {three(more)} s in {tail}."
    back = min(STEP_FORMULAS, key=lambda part: slow.step[part] - fast.step[part])
    gained = fast.step[back] - slow.step[back]
    return f"{head}: it saves {three(gained)} s in {back} ({STEP_FORMULAS[back][1]}) but loses {three(more)} s in {tail}."


def reasons(found: Difference) -> dict[str, str]:
    """For each part that matters, largest first, what of the layouts makes the slower one's part longer or shorter."""
    fast, slow = found.faster_slower
    least = OTHER_PARTS * max(abs(part.difference) for part in found.step)
    told = {p.name: reason(p.name, fast, slow) for p in found.step if p.difference and abs(p.difference) >= least}
    return {name: why for name, why in told.items() if why}
