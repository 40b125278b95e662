"""Layout planner: every parallel layout of a model on a cluster, pruned, scored, ranked and explained.

The public API: :func:`load_scenario` and :func:`make_scenario` state a question, :func:`search` answers it,
:func:`explain` takes one layout apart.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from planner.explain import complete_layout, explain
    from planner.request import Request, load_scenario, make_scenario
    from planner.search import search

__all__ = ["Request", "complete_layout", "explain", "load_scenario", "make_scenario", "search"]

_HOMES = {
    "Request": "planner.request",
    "complete_layout": "planner.explain",
    "explain": "planner.explain",
    "load_scenario": "planner.request",
    "make_scenario": "planner.request",
    "search": "planner.search",
}


def __getattr__(name: str) -> Any:
    """Imports a public name when it is first used: the command line starts without loading what it does not need."""
    if name not in _HOMES:
        raise AttributeError(f"module 'planner' has no attribute '{name}'")
    from importlib import import_module

    return getattr(import_module(_HOMES[name]), name)
