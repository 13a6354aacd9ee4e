"""`tile`: a window of a mask's matrix as bytes, alone or beside another mask."""

from __future__ import annotations

import base64
from collections.abc import Mapping
from typing import Final

import numpy as np
import numpy.typing as npt

from attnflow._core.checks import integer
from attnflow._core.plain import as_integer
from attnflow.masks.mask import Mask

MAX_CELLS: Final = 1024  # along one side


def tile(mask: Mask, other: Mask | None, first_query: int, first_key: int, span: int, cells: int) -> dict[str, object]:
    """Encodes a window as base64 `planes`: "allowed", and with another mask "extra" (allowed only here) and "missing".

    At `step` 1 a plane holds bits, most significant first, rows padded to bytes; otherwise a byte per cell, from 0 (no
    pair is allowed) to 255 (all). Cost: O(intervals + cells).
    """
    n = mask.num_queries
    first_query, first_key = (integer("first of a window", x, 0, n - 1) for x in (first_query, first_key))
    span, cells = integer("span", span, 1), integer("cells", cells, 1, MAX_CELLS)
    last_query, last_key = (min(n, first + span) for first in (first_query, first_key))
    step = -(-min(span, n) // cells)
    window = (slice(first_query, last_query), slice(first_key, last_key))
    whole = (last_query - first_query, last_key - first_key) == mask.shape
    here = mask if whole else mask[window]
    masks = {"allowed": here}
    if other is not None:
        beside = other if whole else other[window]
        masks |= {"extra": here & ~beside, "missing": beside & ~here}
    planes = {name: base64.b64encode(_cells(part, step).tobytes()).decode() for name, part in masks.items()}
    queries, keys = last_query - first_query, last_key - first_key
    return {
        "first_query": first_query,
        "first_key": first_key,
        "step": step,
        "rows": -(-queries // step),
        "columns": -(-keys // step),
        "num_queries": queries,
        "num_keys": keys,
        "planes": planes,
    }


def window_of(message: Mapping[str, object]) -> list[int]:
    return [as_integer(message.get(name), name) for name in ("first_query", "first_key", "span", "cells")]


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
