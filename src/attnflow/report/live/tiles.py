"""A window of a mask as one picture: a cell for each pair, or where there are too many, for a square of pairs."""

from __future__ import annotations

import base64
from typing import Final, NamedTuple

import numpy as np
import numpy.typing as npt

from attnflow._core.checks import integer
from attnflow.masks.mask import Mask

MAX_CELLS: Final = 1024  # along one side


class Area(NamedTuple):
    """A rectangle of pairs: queries [first_query, last_query), keys [first_key, last_key)."""

    first_query: int
    last_query: int
    first_key: int
    last_key: int


def tile(
    mask: Mask,
    other: Mask | None,
    first_query: int,
    first_key: int,
    span: int,
    cells: int,
    changed: Area | None = None,
) -> dict[str, object]:
    """The pairs of queries [first_query, first_query + span) and keys [first_key, first_key + span).

    Args:
        mask: the mask to show.
        other: the one to compare it with.
        first_query: of the window.
        first_key: of the window.
        span: positions along each side; what lies beyond the mask is left out.
        cells: at most so many along each side.
        changed: where alone it is not what it was; then only the cells that meet this area are given, as a tile of its
            own that has "patch" (it may have no rows).

    Returns:
        `step`, positions along the side of a cell; `rows` and `columns`; and base64 `planes`: "allowed", and beside
        another mask "extra" (which only this one allows) and "missing". With step 1 a plane holds bits, most
        significant first, each row in bytes of its own; otherwise a byte for each cell: 0 where no pair is allowed,
        255 where all are, their share between.

    Cost: O(intervals + cells); of a patch, O(positions + its intervals and cells).
    """
    n = mask.num_queries
    first_query, first_key = (integer("first of a window", x, 0, n - 1) for x in (first_query, first_key))
    span, cells = integer("span", span, 1), integer("cells", cells, 1, MAX_CELLS)
    last_query, last_key = (min(n, first + span) for first in (first_query, first_key))
    step = -(-min(span, n) // cells)
    if changed is not None:
        first_query, last_query = _within(changed.first_query, changed.last_query, first_query, last_query, step)
        first_key, last_key = _within(changed.first_key, changed.last_key, first_key, last_key, step)
    window = (slice(first_query, last_query), slice(first_key, last_key))
    whole = (last_query - first_query, last_key - first_key) == mask.shape
    here, beside = (each if each is None or whole else each[window] for each in (mask, other))
    assert here is not None
    masks = {"allowed": here}
    if beside is not None:
        masks |= {"extra": here & ~beside, "missing": beside & ~here}
    planes = {name: base64.b64encode(_cells(each, step).tobytes()).decode() for name, each in masks.items()}
    return {
        **({} if changed is None else {"patch": True}),
        "first_query": first_query,
        "first_key": first_key,
        "step": step,
        "rows": -(-(last_query - first_query) // step),
        "columns": -(-(last_key - first_key) // step),
        "num_queries": last_query - first_query,
        "num_keys": last_key - first_key,
        "planes": planes,
    }


def _within(first: int, last: int, window: int, end: int, step: int) -> tuple[int, int]:
    """The cells of a window [window, end) that meet [first, last), as positions; (window, window) if none does."""
    first, last = max(first, window), min(last, end)
    if first >= last:
        return window, window
    return window + (first - window) // step * step, min(end, window - (window - last) // step * step)


def _cells(mask: Mask, step: int) -> npt.NDArray[np.uint8]:
    if not mask.num_queries or not mask.num_keys:
        return np.zeros((0, 0), dtype=np.uint8)
    if step == 1:
        return np.packbits(mask.dense().numpy(), axis=1)
    counts = mask.block_counts(step)
    heights, widths = (np.minimum(step, size - step * np.arange(-(-size // step))) for size in mask.shape)
    share = counts / np.outer(heights, widths)
    partly = np.clip(np.ceil(254 * share), 1, 254)
    return np.where(share == 1, 255, np.where(counts > 0, partly, 0)).astype(np.uint8)
