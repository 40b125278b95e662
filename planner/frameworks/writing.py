"""What an export is made of, and which writer makes it for which framework."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from planner.scenario import Job, Scenario
from solver.layout import Layout


@dataclass(frozen=True, kw_only=True)
class Target:
    """A layout to be written for a framework that accepts it."""

    scenario: Scenario
    job: Job
    """Under the framework's stack."""
    layout: Layout
    chunks: tuple[int, ...]
    """Decoder layers of each chunk of the pipeline in the model's order (pipeline x virtual of them): chunk i runs on stage
    i % pipeline, under a V-shaped schedule on stage i and then 2 pipeline - 1 - i."""
    head: tuple[str, ...] = ()
    """Lines for the head of every file, without comment marks: the scenario, the version, what is expected."""

    @property
    def even(self) -> bool:
        """Whether all chunks hold the same number of layers."""
        return len(set(self.chunks)) == 1


@dataclass(frozen=True, kw_only=True)
class Launch:
    """What starts a run: the framework's own files, and the words of its command."""

    files: Mapping[str, str] = field(default_factory=dict)
    """File name -> its text, head included; the launch script is made from the rest."""
    environment: Mapping[str, str] = field(default_factory=dict)
    """Environment variables that must be set: name -> value, with the reason behind it as a comment of bash: "1 # why"."""
    arguments: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    """Name of a bash array, such as MODEL_ARGS -> lines of flags and values, one flag with its values per line."""
    program: str
    """What is run on every rank, such as pretrain_gpt.py."""
    launcher: str = "torchrun"
    """"torchrun", or "accelerate" whose own launcher reads a file."""
    launcher_arguments: tuple[str, ...] = ()


Writer = Callable[[Target], Launch]


def writers() -> Mapping[str, Writer]:
    """Framework -> its writer."""
    from planner.frameworks import accelerate_write, bridge_write, deepspeed_write, megatron_write, torchtitan_write

    return {
        "megatron": megatron_write.write,
        "megatron-bridge": bridge_write.write,
        "torchtitan": torchtitan_write.write,
        "deepspeed": deepspeed_write.write,
        "accelerate": accelerate_write.write,
    }
