"""Rows to a text table or an escaped HTML table.  Nothing here knows what the rows mean."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Sequence

__all__ = ["html_table", "one_line", "shown", "text_table"]

CELL_LIMIT = 300
"""Characters of an HTML table's cell, which takes several lines where it has to."""
WRAP_LIMIT = 30
"""Characters of a cell that stays on one line, however narrow the page."""


def one_line(value: object, limit: int = 100) -> str:
    """The ``repr`` of a value (a string as it is) on one line of at most ``limit`` characters.

    Large values are not rendered whole first: a 100 MB reply must not cost a second in an error.
    """
    if isinstance(value, (bytes, str)) and len(value) > 4 * limit:
        head = value[: 2 * limit]
        text = f"{head if isinstance(head, str) else repr(head)}... ({len(value):,} long)"
    elif isinstance(value, (list, tuple, dict)) and len(value) > limit:
        text = f"<{type(value).__name__} of {len(value):,}>"
    elif isinstance(value, str):
        text = value
    else:
        text = ""
        try:
            for piece in _pieces(value, limit):
                text += piece
                if len(text) > limit:
                    break
        except Exception as exc:  # a user's __repr__ must not hide the error that shows it
            text = f"<{type(value).__name__}: its repr failed with {type(exc).__name__}>"
    text = " ".join(text.split())
    return text if len(text) <= limit else f"{text[: limit - 3]}..."


def _pieces(value: object, limit: int) -> Iterator[str]:
    """The ``repr`` of a value, bit by bit: whoever has enough stops, however large the rest is."""
    if type(value) in (list, tuple):
        assert isinstance(value, (list, tuple))
        yield "[" if isinstance(value, list) else "("
        for number, item in enumerate(value):
            if number:
                yield ", "
            yield from _pieces(item, limit)
        yield "]" if isinstance(value, list) else ",)" if len(value) == 1 else ")"
    elif type(value) is dict:
        yield "{"
        for number, (key, item) in enumerate(value.items()):
            if number:
                yield ", "
            yield from _pieces(key, limit)
            yield ": "
            yield from _pieces(item, limit)
        yield "}"
    elif isinstance(value, (bytes, str)) and len(value) > 4 * limit:
        yield f"{value[: 2 * limit]!r}... ({len(value):,} long)"
    else:
        yield repr(value)


def shown(value: object, limit: int = 60) -> str:
    """The ``repr`` of a value that an error refuses, on one short line, whatever the value is."""
    if isinstance(value, int) and not -(2**64) < value < 2**64:
        return "an integer beyond 64 bits"  # which can be too long to print
    if isinstance(value, str):
        # Blanks and all: one too many may be what is wrong.
        return repr(value if len(value) <= limit else f"{value[: limit - 3]}...")
    return one_line(value, limit)


def text_table(header: Sequence[str], rows: Iterable[Sequence[object]]) -> str:
    """Columns aligned by spaces, a header row first."""
    cells = [list(header), *([one_line(c) for c in row] for row in rows)]
    widths = [max(len(row[i]) for row in cells) for i in range(len(header))]
    return "\n".join(
        "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip()
        for row in cells
    )


def html_table(
    header: Sequence[str],
    rows: Iterable[Sequence[object]],
    *,
    caption: str = "",
    strong: Collection[int] = (),
) -> str:
    """An HTML table; every cell and the caption are escaped.

    Colours are the page's, so that it is readable on a dark one too.

    Args:
        header: the columns' names.
        rows: the cells.
        caption: stands above the table.
        strong: numbers of the rows, from 0, whose first two cells stand out.
    """
    parts = ["<table>"]
    if caption:
        text = one_line(caption, CELL_LIMIT)
        # A usual one is as long as a narrow table is wide, or longer.
        wrap = "white-space:nowrap" if len(text) <= 2 * WRAP_LIMIT else "overflow-wrap:anywhere"
        style = f"{_LEFT};caption-side:top;{wrap}"
        parts.append(f'<caption style="{style}">{_escaped(text)}</caption>')
    parts.append(f"<thead>{_html_row('th', header)}</thead><tbody>")
    parts += (_html_row("td", row, strong=n in strong) for n, row in enumerate(rows))
    parts.append("</tbody></table>")
    return "".join(parts)


def _escaped(text: str) -> str:
    from html import escape  # its table of entities takes a millisecond to import

    return escape(text)


def _html_row(tag: str, cells: Iterable[object], *, strong: bool = False) -> str:
    row = "".join(
        _html_cell(tag, one_line(cell, CELL_LIMIT), strong=strong and number < 2)
        for number, cell in enumerate(cells)
    )
    return f"<tr>{row}</tr>"


def _html_cell(tag: str, text: str, *, strong: bool) -> str:
    # Jupyter aligns every cell to the right, which makes texts of several lines hard to read; and
    # only a style on the cell itself overrides that.
    style = _LEFT
    if strong:
        style += ";font-weight:bold"
    if len(text) > WRAP_LIMIT:
        style += ";overflow-wrap:anywhere"
    elif " " in text:
        style += ";white-space:nowrap"
    return f'<{tag} style="{style}">{_escaped(text)}</{tag}>'


_LEFT = "text-align:left"
