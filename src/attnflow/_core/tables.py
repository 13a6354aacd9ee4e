"""Tables for the terminal, as plain text."""

from __future__ import annotations

from collections.abc import Collection, Sequence

from attnflow._core.markup import columns


def aligned(rows: Sequence[Sequence[str]], left: Collection[int] = ()) -> str:
    """Rows of cells in columns two spaces apart: numbers to the right, the columns in `left` to the left.

    >>> print(aligned([["id", "text"], ["7", "a cat"], ["12", "a mat"]], left=[1]))
    id  text
     7  a cat
    12  a mat
    """
    widths = [max(map(_width, column)) for column in zip(*rows, strict=True)]
    return "\n".join(
        "  ".join(map(_padded, row, widths, (i in left for i in range(len(row))))).rstrip() for row in rows
    )


def _padded(cell: str, width: int, left: bool) -> str:
    room = " " * (width - _width(cell))
    return cell + room if left else room + cell


def _width(cell: str) -> int:
    return round(columns(cell))
