"""A window of a mask as one picture: a cell for each pair, or where there are too many, for a square of pairs."""

from __future__ import annotations

import base64
from typing import Final

import numpy as np
import numpy.typing as npt

from attnflow._core.checks import integer
from attnflow.masks.mask import Mask

MAX_CELLS: Final = 1024  # along one side


def tile(mask: Mask, other: Mask | None, first_query: int, first_key: int, span: int, cells: int) -> dict[str, object]:
    """The pairs of queries [first_query, first_query + span) and keys [first_key, first_key + span).

    Args:
        mask: the mask to show.
        other: the one to compare it with.
        first_query: of the window.
        first_key: of the window.
        span: positions along each side; what lies beyond the mask is left out.
        cells: at most so many along each side.

    Returns:
        `step`, positions along the side of a cell; `rows` and `columns`; and base64 `planes`: "allowed", and beside
        another mask "extra" (which only this one allows) and "missing". With step 1 a plane holds bits, most
        significant first, each row in bytes of its own; otherwise a byte for each cell: 0 where no pair is allowed,
        255 where all are, their share between.

    Cost: O(intervals + cells).
    """
    n = mask.num_queries
    first_query, first_key = (integer("first of a window", x, 0, n - 1) for x in (first_query, first_key))
    span, cells = integer("span", span, 1), integer("cells", cells, 1, MAX_CELLS)
    last_query, last_key = (min(n, first + span) for first in (first_query, first_key))
    step = -(-min(span, n) // cells)
    masks = {"allowed": mask}
    if other is not None:
        masks |= {"extra": mask & ~other, "missing": other & ~mask}
    planes: dict[str, str] = {}
    for name, each in masks.items():
        whole = (last_query - first_query, last_key - first_key) == each.shape
        part = each if whole else each[first_query:last_query, first_key:last_key]
        planes[name] = base64.b64encode(_cells(part, step).tobytes()).decode()
    return {
        "first_query": first_query,
        "first_key": first_key,
        "step": step,
        "rows": -(-(last_query - first_query) // step),
        "columns": -(-(last_key - first_key) // step),
        "num_queries": last_query - first_query,
        "num_keys": last_key - first_key,
        "planes": planes,
    }


def _cells(mask: Mask, step: int) -> npt.NDArray[np.uint8]:
    if step == 1:
        return np.packbits(mask.dense().numpy(), axis=1)
    counts = mask.block_counts(step)
    heights, widths = (np.minimum(step, size - step * np.arange(-(-size // step))) for size in mask.shape)
    share = counts / np.outer(heights, widths)
    partly = np.clip(np.ceil(254 * share), 1, 254)
    return np.where(share == 1, 255, np.where(counts > 0, partly, 0)).astype(np.uint8)
