"""What matplotlib figures of tables share: a size for their rows and columns, and names beside them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Final

from attnflow._core.errors import MissingExtra
from attnflow._core.markup import columns as display_width

if TYPE_CHECKING:
    from matplotlib.figure import Figure

_CELL: Final = 0.26  # inches of a row or column whose name is written
_NAMED: Final = 64  # rows or columns up to which each has its name
_WIDEST: Final = 12.0


def new_figure(columns: int, rows: int, height: float | None = None, purpose: str = "a figure") -> Figure:
    """A figure for a table of so many columns and rows.

    Raises:
        MissingExtra: matplotlib is not installed.
    """
    try:
        from matplotlib.figure import Figure
    except ImportError as error:
        raise MissingExtra("matplotlib", "report", purpose) from error
    cell = _CELL if columns <= _NAMED else _WIDEST / columns
    width = min(_WIDEST, max(4.6, 1.9 + cell * columns))
    tall = 1.5 + (_CELL * rows if rows <= _NAMED else 8.0)
    return Figure(figsize=(width, height or tall), layout="constrained")  # no pyplot: nothing global is touched


def name_axis(axis: Any, names: list[str], positions: Sequence[int], *, turned: bool) -> None:
    """Names beside rows or columns, or their positions at a few of them where they are many."""
    if len(names) > _NAMED:
        step = -(-len(names) // 16)
        axis.set_ticks(range(0, len(names), step), [str(p) for p in positions[::step]], fontsize=8)
        return
    axis.set_ticks(range(len(names)), [literal(name) for name in names], fontsize=8)
    for name, text in zip(names, axis.get_ticklabels(), strict=True):
        text.set_rotation(90 if turned and display_width(name) > 2 else 0)


def literal(text: str) -> str:
    """Text in which matplotlib finds no formula: tokens may be dollar signs."""
    return text.replace("$", r"\$")
