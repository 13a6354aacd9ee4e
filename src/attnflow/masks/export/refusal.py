"""What a format cannot say is refused by a pair."""

from __future__ import annotations

import numpy as np

from attnflow._core.errors import AttnflowError
from attnflow.masks.batches import MaskGrid
from attnflow.masks.intervals import IntervalRows
from attnflow.masks.mask import Mask, not_a_mask


class NotExpressible(AttnflowError, ValueError):
    """A format cannot say this mask.

    Attributes:
        format: name of the format.
        pair: (query, key) of a pair that no mask of this format can hold together with the others of this mask.
        allowed: whether the mask allows that pair.
    """

    def __init__(self, format: str, mask: Mask, pair: tuple[int, int], reason: str) -> None:
        query, key = pair
        verb = "allows" if mask.allows(query, key) else "forbids"
        super().__init__(f"{format} cannot say {mask!r}: it {verb} query {query}, key {key}, but {reason}")
        self.format = format
        self.pair = pair
        self.allowed = verb == "allows"


def checked(mask: object) -> Mask:
    """`mask`, if it is one."""
    if not isinstance(mask, Mask):
        raise not_a_mask(mask)
    return mask


def sequences(mask: Mask | MaskGrid, format: str) -> list[Mask]:
    """The mask of each sequence, without padding, for a format whose heads share one.

    Raises:
        NotExpressible: the heads of a sequence differ.
    """
    if not isinstance(mask, MaskGrid):
        return [checked(mask)]
    for number, row in enumerate(mask.masks):
        for head in row[1:]:
            if differing := head.difference(row[0], limit=1):
                reason = f"another head of sequence {number} does not agree, and heads share one mask"
                raise NotExpressible(format, head, differing[0], reason)
    return [row[0] for row in mask.masks]


def end_to_end(masks: list[Mask]) -> Mask:
    """The sequences of a batch as one: no query sees another sequence. Cost: O(intervals)."""
    if len(masks) == 1:
        return masks[0]
    total, first = sum(mask.num_keys for mask in masks), 0
    parts: list[IntervalRows] = []
    for mask in masks:
        rows = mask.intervals()
        parts.append(IntervalRows(rows.indptr, rows.starts + np.int32(first), rows.ends + np.int32(first), total))
        first += mask.num_keys
    return Mask(IntervalRows.stack(parts, total), f"{len(masks)} sequences end to end")
