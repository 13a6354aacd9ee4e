"""Masks as matplotlib figures and PNG files (extra `report`)."""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING

from attnflow._core import checks
from attnflow._core.errors import MissingExtra
from attnflow._core.files import write_atomically
from attnflow._core.markup import percent, shorten
from attnflow.masks.mask import Mask
from attnflow.report.grid import square_grid

if TYPE_CHECKING:
    from matplotlib.figure import Figure


def mask_figure(mask: Mask, *, size: float = 5.0, title: str | None = None) -> Figure:
    """A mask as a matplotlib figure, queries downwards, keys to the right; to edit, or to save in any format.

    Up to 512 queries and keys every pair is a pixel; above, a pixel is the allowed share of a block.

    Args:
        mask: any mask.
        size: width and height in inches.
        title: by default the mask's repr.

    Raises:
        MissingExtra: matplotlib is not installed.
    """
    try:
        from matplotlib.figure import Figure
    except ImportError as error:
        raise MissingExtra("matplotlib", "report", "a mask as a figure") from error
    cells = square_grid(mask, 512)
    queries, keys = mask.shape
    figure = Figure(figsize=(size, size), layout="constrained")  # no pyplot: nothing global is touched
    axes = figure.add_subplot()
    if queries and keys:
        extent = (
            -0.5,
            cells.counts.shape[1] * cells.key_step - 0.5,
            cells.counts.shape[0] * cells.query_step - 0.5,
            -0.5,
        )
        axes.imshow(cells.share, cmap="Blues", vmin=0, vmax=1, interpolation="nearest", extent=extent)
        axes.set_xlim(-0.5, keys - 0.5)
        axes.set_ylim(queries - 0.5, -0.5)
    axes.set_xlabel("key")
    axes.set_ylabel("query")
    axes.set_title(f"{shorten(title or repr(mask), 60)}\n{percent(mask.density)} allowed", fontsize=10)
    return figure


def mask_png(mask: Mask, path: str | os.PathLike[str], *, size: float = 5.0, dpi: int = 200) -> Path:
    """Writes `mask_figure(mask)` as a PNG file, all of it or nothing; returns its path."""
    return save_figure(mask_figure(mask, size=size), path, dpi=dpi)


def save_figure(figure: Figure, path: str | os.PathLike[str], *, dpi: int = 200) -> Path:
    """Writes a figure in the format of the suffix, all of it or nothing; equal figures make equal files.

    Raises:
        ValueError: a suffix that matplotlib does not write.
    """
    from matplotlib import rc_context

    checks.integer("dpi", dpi, 1)
    suffix = Path(path).suffix.lower().removeprefix(".")
    known = figure.canvas.get_supported_filetypes()
    if suffix not in known:
        raise ValueError(f"expected a file name that ends in .svg, .png or .pdf, got {Path(path).name!r}")
    undated = {"svg": {"Date": None}, "pdf": {"CreationDate": None}}.get(suffix)
    with rc_context({"svg.hashsalt": "attnflow"}), write_atomically(path) as file:
        figure.savefig(file, format=suffix, dpi=dpi, metadata=undated)
    return Path(path)
