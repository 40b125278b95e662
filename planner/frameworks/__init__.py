"""What each training framework accepts: rules with an id, a sentence, a source and a plain predicate."""

from __future__ import annotations

from planner.frameworks import deepspeed, megatron, torchtitan
from planner.frameworks.rule import FrameworkRule

FRAMEWORKS: dict[str, tuple[FrameworkRule, ...]] = {
    "megatron": megatron.RULES,
    "torchtitan": torchtitan.RULES,
    "deepspeed": deepspeed.RULES,
}
"""In order of preference: a layout that several accept is costed under the first one's stack."""

UNEVEN = ("megatron", "torchtitan")
"""Frameworks that take any number of layers per stage: Megatron's pipeline layout, torchtitan's module lists. DeepSpeed's
pipeline module cuts by a rule of its own."""
