"""The two ways in which a request ends without an answer, both worded for the person who asked."""

from __future__ import annotations

import difflib
from collections.abc import Iterable
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from planner.search import SearchResult


MOST_NAMED = 24
"""Known names that an error message lists where none is close."""


class InputError(Exception):
    """What was typed or read cannot be used. One line; the command exits with 2."""


class NoLayoutFits(Exception):
    """The request is well formed, yet no layout satisfies it. The command exits with 1.

    ``result`` is the search's result: its books say which rule dropped what, and which layout came nearest.
    """

    def __init__(self, result: SearchResult) -> None:
        super().__init__("no layout fits")
        self.result = result


def nearest(word: str, known: Iterable[str], most: int = MOST_NAMED) -> str:
    """The known names closest to ``word``, as the end of an error message; where none is close, at most so many of all.

    >>> nearest("h10", ["h100-sxm-80gb", "a100-sxm-80gb", "v100"])
    "; did you mean 'h100-sxm-80gb' or 'v100'?"
    """
    names = sorted(set(known))
    needle = word.lower()
    close = [name for name in names if name.startswith(needle)]
    close += [n for n in difflib.get_close_matches(needle, names, n=3, cutoff=0.4) if n not in close]
    if not close:
        names.sort(key=lambda name: not name[:1].isalpha())  # names before short aliases such as 70b
        more = f" and {len(names) - most} more" if len(names) > most else ""
        return f"; known: {', '.join(names[:most])}{more}" if names else ""
    quoted = [f"'{name}'" for name in close[:3]]
    listing = quoted[0] if len(quoted) == 1 else f"{', '.join(quoted[:-1])} or {quoted[-1]}"
    return f"; did you mean {listing}?"
