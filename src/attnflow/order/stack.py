"""One square mask for each layer: heads united, and keys that were there before as positions of their own."""

from __future__ import annotations

from collections.abc import Sequence
from functools import reduce
from operator import or_

import numpy as np

from attnflow._core.markup import plural
from attnflow.masks.batches import MaskGrid
from attnflow.masks.intervals import IntervalRows
from attnflow.masks.mask import Mask, not_a_mask


def square_masks(masks: Sequence[object], before: object, layered: bool) -> tuple[tuple[Mask, ...], int]:
    """(square masks, number of keys that were there before); raises TypeError and ValueError as `analyze` says."""
    if not masks:
        raise ValueError("expected a mask or at least one mask per layer, got an empty sequence")
    united = [_united(mask) for mask in masks]
    queries, keys = united[0].shape
    for layer, mask in enumerate(united):
        where = f" (layer {layer + 1})" if layered else ""
        if mask.num_queries > mask.num_keys:
            raise ValueError(
                f"expected at least as many keys as queries, got shape {mask.shape}{where}: the last keys are those of "
                "the queries, and keys before them were there before; the mask between two sequences has no order"
            )
        if mask.shape != (queries, keys):
            raise ValueError(f"expected masks of one size, got {united[0].shape} and {mask.shape}{where}")
    count = keys - queries
    earlier = None if before is None else _united(before)
    if earlier is not None and earlier.shape != (count, count):
        raise ValueError(f"before is the mask of {plural(count, 'key')} among themselves, got shape {earlier.shape}")
    if not count:
        return tuple(united), 0
    node = np.arange(count)
    below = IntervalRows.build(node, node, node + 1, count, keys)
    if earlier is not None:
        rows = earlier.intervals()
        below = IntervalRows(rows.indptr, rows.starts, rows.ends, keys)
    after = {id(mask): Mask(IntervalRows.stack([below, mask.intervals()], keys), f"{mask!r}") for mask in united}
    return tuple(after[id(mask)] for mask in united), count


def require_square(masks: Sequence[Mask], before: int) -> None:
    """Raises ValueError unless these, read from a file, may be the masks of one order."""
    if len(sizes := {size for mask in masks for size in mask.shape}) != 1 or not 0 <= before <= max(sizes):
        shapes = [mask.shape for mask in masks]
        raise ValueError(f"expected square masks of one size n and 0 <= num_before <= n, got {shapes}, {before}")


def _united(mask: object) -> Mask:
    """A mask, or the union of the heads of one sequence."""
    if isinstance(mask, Mask):
        return mask
    if not isinstance(mask, MaskGrid):
        raise not_a_mask(mask)
    if mask.shape[0] > 1:
        raise ValueError(
            f"expected the masks of one sequence, got those of {mask.shape[0]}: each has an order of its own, as in "
            "analyze(masks.per_head(grid.masks[0]))"
        )
    return reduce(or_, dict.fromkeys(mask.padded()[0]))
