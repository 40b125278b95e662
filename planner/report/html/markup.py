"""HTML in small pieces: everything that is text is escaped here, and data in script elements cannot end them."""

from __future__ import annotations

import html
import json
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Html:
    """Text that is markup already."""

    text: str


Content = Html | str
"""Strings are text and get escaped."""


def raw(content: Content) -> str:
    """Markup of some content.

    >>> raw("a < b"), raw(Html("<b>x</b>"))
    ('a &lt; b', '<b>x</b>')
    """
    return content.text if isinstance(content, Html) else html.escape(content, quote=True)


def tag(name: str, *contents: Content, **attributes: str | bool | None) -> Html:
    """An element. ``class_`` is class, an underscore a hyphen; True gives a bare attribute, None and False none.

    >>> tag("p", "1 < 2", class_="note", data_key='"').text
    '<p class="note" data-key="&quot;">1 &lt; 2</p>'
    """
    words = [name]
    for key, value in attributes.items():
        label = key.rstrip("_").replace("_", "-")
        if value is True:
            words.append(label)
        elif value is not None and value is not False:
            words.append(f'{label}="{html.escape(value, quote=True)}"')
    return Html(f"<{' '.join(words)}>{''.join(map(raw, contents))}</{name}>")


def joined(contents: Iterable[Content], between: str = "\n") -> Html:
    """Pieces one after another."""
    return Html(between.join(map(raw, contents)))


def data_script(identity: str, content: Any) -> Html:
    """Data for the page's own script. No character in it can end the element.

    >>> data_script("x", "</script><!--").text
    '<script type="application/json" id="x">"\\\\u003c/script\\\\u003e\\\\u003c!--"</script>'
    """
    text = json.dumps(content, separators=(",", ":"), ensure_ascii=True, allow_nan=False)
    for character in "<>&":
        text = text.replace(character, f"\\u{ord(character):04x}")
    return Html(f'<script type="application/json" id="{html.escape(identity)}">{text}</script>')


def items(lines: Iterable[Content]) -> Html:
    """A bulleted list; nothing for no lines."""
    own = [tag("li", line) for line in lines]
    return tag("ul", *own) if own else Html("")


@dataclass(frozen=True)
class Cell:
    """One cell of a table: what is shown, and what it is sorted by if that differs."""

    content: Content
    value: str = ""
    number: bool = True
    class_: str = ""


def table(heads: Sequence[str], rows: Iterable[Sequence[Any]], caption: str, **attributes: str | bool | None) -> Html:
    """A table with a caption, in a box that scrolls sideways by itself. Strings are words, Cells as they say."""
    own_rows = [list(row) for row in rows]
    first = own_rows[0] if own_rows else [""] * len(heads)
    right = [isinstance(cell, Cell) and cell.number for cell in first]
    head = tag("tr", *(tag("th", title, scope="col", class_="num" if number else None) for title, number in zip(heads, right, strict=True)))
    body = [tag("tr", *(_cell(cell) for cell in row)) for row in own_rows]
    own = tag("table", tag("caption", caption), tag("thead", head), tag("tbody", *body), **attributes)
    return tag("div", own, class_="scroll", tabindex="0", role="region", aria_label=caption)


def _cell(cell: Cell | str) -> Html:
    if isinstance(cell, str):
        return tag("td", cell)
    return tag("td", cell.content, class_=f"{'num ' if cell.number else ''}{cell.class_}".strip() or None, data_v=cell.value or None)


def details(summary: Content, *contents: Content, **attributes: str | bool | None) -> Html:
    """A part that opens on demand."""
    return tag("details", tag("summary", summary), *contents, **attributes)


def section(identity: str, title: str, *contents: Content) -> Html:
    """A part of the page with its heading."""
    return tag("section", tag("h2", title, id=f"{identity}-title"), *contents, id=identity, aria_labelledby=f"{identity}-title")
