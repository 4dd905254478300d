"""Rows to a text table or an escaped HTML table.  Nothing here knows what the rows mean."""

from __future__ import annotations

import html
from collections.abc import Iterable, Sequence

__all__ = ["html_table", "one_line", "text_table"]


def one_line(value: object, limit: int = 100) -> str:
    """The ``repr`` of a value (a string as it is) on one line of at most ``limit`` characters.

    Large values are not rendered whole first: a 100 MB reply must not cost a second in an error.
    """
    if isinstance(value, (bytes, str)) and len(value) > 4 * limit:
        head = value[: 2 * limit]
        text = f"{head if isinstance(head, str) else repr(head)}... ({len(value):,} long)"
    elif isinstance(value, (list, tuple, dict)) and len(value) > limit:
        text = f"<{type(value).__name__} of {len(value):,}>"
    else:
        try:
            text = value if isinstance(value, str) else repr(value)
        except Exception as exc:  # a user's __repr__ must not hide the error that shows it
            text = f"<{type(value).__name__}: its repr failed with {type(exc).__name__}>"
    text = " ".join(text.split())
    return text if len(text) <= limit else f"{text[: limit - 3]}..."


def text_table(header: Sequence[str], rows: Iterable[Sequence[object]]) -> str:
    """Columns aligned by spaces, a header row first."""
    cells = [list(header), *([one_line(c) for c in row] for row in rows)]
    widths = [max(len(row[i]) for row in cells) for i in range(len(header))]
    return "\n".join(
        "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip()
        for row in cells
    )


def html_table(
    header: Sequence[str], rows: Iterable[Sequence[object]], *, caption: str = ""
) -> str:
    """An HTML table; every cell and the caption are escaped."""
    parts = ["<table>"]
    if caption:
        parts.append(f"<caption>{html.escape(caption)}</caption>")
    head = "".join(f"<th>{html.escape(h)}</th>" for h in header)
    parts.append(f"<thead><tr>{head}</tr></thead><tbody>")
    for row in rows:
        cells = "".join(f"<td>{html.escape(one_line(c))}</td>" for c in row)
        parts.append(f"<tr>{cells}</tr>")
    parts.append("</tbody></table>")
    return "".join(parts)
