"""One search as integers: the limits that the rules read and the values that each axis may take."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

from solver.layout import AXES

UNLIMITED_KIB = 1 << 35
"""32 TiB: more memory than any GPU has, yet small enough for its product with the GPUs."""


def divisors(n: int) -> tuple[int, ...]:
    """All divisors of a positive integer, ascending.

    >>> divisors(12)
    (1, 2, 3, 4, 6, 12)
    """
    small = [d for d in range(1, math.isqrt(n) + 1) if n % d == 0]
    return tuple(small + [n // d for d in reversed(small) if d * d != n])


@dataclass(frozen=True, kw_only=True)
class Problem:
    """Integers only; 0 in a size means that the model has no such part."""

    num_gpus: int
    gpus_per_node: int
    """GPUs that share the fast link, never more than num_gpus."""
    tensor_across_nodes: bool = False
    """Lifts the limit that a tensor group stays inside a node."""
    num_layers: int
    num_attention_heads: int
    num_key_value_heads: int
    replicate_key_values: bool = True
    """Whether a tensor group larger than the KV heads may hold copies of them."""
    ffn_hidden_size: int = 0
    vocab_size: int = 1
    pad_vocabulary: bool = True
    """Whether the vocabulary may be padded up to a multiple of the tensor group."""
    num_experts: int = 0
    moe_ffn_hidden_size: int = 0
    shared_ffn_hidden_size: int = 0
    seq_len: int
    sequence_parallel: bool = True
    """Whether norms and residuals are split along the sequence inside a tensor group."""
    min_context_tokens: int = 1
    """A context rank keeps at least this many tokens of a sequence."""
    max_pipeline_parallel: int = 1 << 30
    global_batch_size: int
    usable_kib: int = UNLIMITED_KIB
    """Memory of one GPU that a layout may use at all."""
    whole_dense_kib: int = 0
    """States of the non-expert parameters of the whole model that no ZeRO stage of the search shards."""
    whole_expert_kib: int = 0
    sharded_kib: int = 0
    """States of the whole model that may be split over all GPUs."""
    kept_kib: int = 0
    """Least activation that one layer keeps of one sequence, before tensor and context divide it."""
    domains: Mapping[str, tuple[int, ...]]
    """For each axis the values of the declared space, ascending."""

    def __post_init__(self) -> None:
        if set(self.domains) != set(AXES):
            raise ValueError(f"domains must name exactly the axes, differ in {set(self.domains) ^ set(AXES)}")
        for axis, values in self.domains.items():
            if not values or list(values) != sorted(set(values)) or values[0] < 0:
                raise ValueError(f"domain of {axis} must be ascending, unique and not negative: {values}")

    @property
    def space_size(self) -> int:
        """Number of layouts of the declared space: the product of the domains."""
        return math.prod(len(values) for values in self.domains.values())
