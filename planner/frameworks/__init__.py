"""What each training framework accepts: rules with an id, a sentence, a source and a plain predicate."""

from __future__ import annotations

from planner.frameworks import accelerate, deepspeed, megatron, torchtitan
from planner.frameworks.rule import FrameworkRule

FRAMEWORKS: dict[str, tuple[FrameworkRule, ...]] = {
    "megatron": megatron.RULES,
    "torchtitan": torchtitan.RULES,
    "deepspeed": deepspeed.RULES,
    "megatron-bridge": megatron.RULES,
    "accelerate": accelerate.RULES,
}
"""In order of preference: a layout that several accept is costed under the first one's stack."""

USUAL = ("megatron", "torchtitan", "deepspeed")
"""Whose layouts a search ranks that names no framework: the others run what one of these runs, under a stack of their own."""

UNEVEN = ("megatron", "torchtitan", "megatron-bridge")
"""Frameworks that take any number of layers per stage: Megatron's pipeline layout, torchtitan's module lists. DeepSpeed's
pipeline module cuts by a rule of its own."""

NAMES: dict[str, str] = {
    "megatron": "Megatron-LM",
    "torchtitan": "torchtitan",
    "deepspeed": "DeepSpeed",
    "megatron-bridge": "Megatron-Bridge",
    "accelerate": "accelerate",
}
"""What people call them."""
