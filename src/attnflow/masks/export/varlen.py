"""Packed documents with one window: flash-attn's variable lengths, and what all formats share."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import accumulate, pairwise
from typing import Final

import numpy as np
import torch
from jaxtyping import Int32
from torch import Tensor

from attnflow._core import checks
from attnflow._core.checks import IntArray
from attnflow._core.errors import AttnflowError
from attnflow._core.results import Result
from attnflow.masks.batches import MaskGrid, block_diagonal
from attnflow.masks.intervals import IntervalRows, ragged
from attnflow.masks.mask import Mask, not_a_mask

_OPEN: Final = -1  # a side of the window without a limit


class NotExpressible(AttnflowError, ValueError):
    """A format cannot express this mask.

    Attributes:
        format: name of the format.
        pair: a pair (query, key) that does not fit the format together with the rest of this mask.
        allowed: whether the mask allows that pair.
    """

    def __init__(self, format: str, mask: Mask, pair: tuple[int, int], reason: str) -> None:
        query, key = pair
        self.format, self.pair, self.allowed = format, pair, mask.allows(query, key)
        verb = "allows" if self.allowed else "forbids"
        super().__init__(f"{format} cannot express {mask!r}: it {verb} query {query}, key {key}, but {reason}")


def sequences(mask: Mask | MaskGrid, format: str) -> list[Mask]:
    """The unpadded mask of each sequence; raises NotExpressible if the heads of a sequence differ."""
    if isinstance(mask, Mask):
        return [mask]
    if not isinstance(mask, MaskGrid):  # pyright: ignore[reportUnnecessaryIsInstance]
        raise not_a_mask(mask)
    for number, row in enumerate(mask.masks):
        for head in row[1:]:
            if differing := head.difference(row[0], limit=1):
                reason = f"another head of sequence {number} does not agree, and heads share one mask"
                raise NotExpressible(format, head, differing[0], reason)
    return [row[0] for row in mask.masks]


@dataclass(frozen=True, eq=False)
class Varlen(Result):
    """A mask in the arguments of flash-attn's `flash_attn_varlen_func`; the fields have the names of these arguments.

    In a document of Q queries and K keys, query i attends to keys i + d - window_size[0] to i + d + window_size[1],
    where d = K - Q (flash-attn 2.1 and later). `causal` sets the upper bound to i + d.

    Attributes:
        cu_seqlens_q: int32[documents + 1], the first query of each document and the end.
        cu_seqlens_k: int32[documents + 1], the same of its keys.
        max_seqlen_q: queries of the longest document.
        max_seqlen_k: keys of the longest document.
        causal: whether nothing after the diagonal is seen.
        window_size: keys (before, after) the diagonal; -1 for all of the document.
    """

    cu_seqlens_q: Int32[Tensor, "documents_and_1"]
    cu_seqlens_k: Int32[Tensor, "documents_and_1"]
    max_seqlen_q: int
    max_seqlen_k: int
    causal: bool
    window_size: tuple[int, int]

    def to_mask(self) -> Mask:
        """The relation that flash-attn computes.

        Raises:
            ValueError: the lengths do not start at 0, or decrease.
        """
        queries, keys = (_lengths(name, getattr(self, name)) for name in ("cu_seqlens_q", "cu_seqlens_k"))
        if len(queries) != len(keys):
            raise ValueError(f"expected as many documents of keys as of queries ({len(queries)}), got {len(keys)}")
        left, right = (None if side == _OPEN else side for side in self.window_size)
        return Bands(queries, keys, left, 0 if self.causal else right).to_mask("varlen")

    def __str__(self) -> str:
        kind = "causal" if self.causal else "both directions"
        count = len(self.cu_seqlens_q) - 1
        return f"Varlen: {count} document{'s' * (count != 1)}, {kind}, window_size {self.window_size}"

    __repr__ = __str__


def varlen(mask: Mask | MaskGrid) -> Varlen:
    """The arguments of flash-attn's `flash_attn_varlen_func` for packed documents and windows.

    The sequences of a batch are laid end to end, without padding.

    Raises:
        NotExpressible: the mask is not of this kind; the error names a pair.

    >>> from attnflow import masks
    >>> form = varlen(masks.document([2, 3]))
    >>> form.cu_seqlens_q.tolist(), form.causal, form.window_size
    ([0, 2, 5], True, (-1, -1))
    """
    bands = bands_of_batch(sequences(mask, "varlen"), "varlen")
    left, right = (_OPEN if side is None else side for side in (bands.left, bands.right))
    if bands.causal:
        right = _OPEN if bands.left is None else 0
    query, key = (max(lengths, default=0) for lengths in (bands.queries, bands.keys))
    return Varlen(_cumulative(bands.queries), _cumulative(bands.keys), query, key, bands.causal, (left, right))


@dataclass(frozen=True)
class Bands:
    """Documents end to end; query i of one sees its keys i + K - Q - left to i + K - Q + right (None: no limit)."""

    queries: tuple[int, ...]
    keys: tuple[int, ...]
    left: int | None
    right: int | None

    @property
    def causal(self) -> bool:
        return self.right == 0

    @property
    def square(self) -> bool:
        return self.queries == self.keys

    def bounds(self) -> tuple[IntArray, IntArray]:
        """(first key, last key + 1) of each query."""
        queries, keys = np.array(self.queries, np.int64), np.array(self.keys, np.int64)
        ends = np.cumsum(keys)
        low, high = np.repeat(ends - keys, queries), np.repeat(ends, queries)
        place = ragged(ends - queries, queries)[1]
        first = low if self.left is None else np.maximum(low, place - self.left)
        last = high if self.right is None else np.minimum(high, place + self.right + 1)
        return first, np.maximum(first, last)

    def to_mask(self, name: str) -> Mask:
        for side, lengths in (("queries", self.queries), ("keys", self.keys)):
            checks.size(f"the number of {side}", sum(lengths))
        first, last = self.bounds()
        return Mask(IntervalRows.build(np.arange(len(first)), first, last, len(first), sum(self.keys)), name)


def bands_of(mask: Mask, format: str) -> Bands:
    """Finds the fewest documents and the window of a mask: it is cut at every place that no pair crosses."""
    first, last = _one_interval(mask, format)
    if mask.num_queries != mask.num_keys:
        return _same(mask, _with_window((mask.num_queries,), (mask.num_keys,), first, last), first, last, format)
    n = mask.num_queries
    outside = np.flatnonzero((first > np.arange(n)) | (last <= np.arange(n)))
    if len(outside):
        query = int(outside[0])
        raise NotExpressible(format, mask, (query, query), "every query of a packed document attends to its own key")
    whole = _with_window((n,) if n else (), (n,) if n else (), first, last)
    if _differing(whole, first, last) is None:
        return whole
    free = (np.maximum.accumulate(last)[:-1] <= np.arange(1, n)) & (
        np.minimum.accumulate(first[::-1])[::-1][1:] >= np.arange(1, n)
    )
    cuts = np.concatenate([[0], 1 + np.flatnonzero(free), [n]])
    lengths = tuple(np.diff(cuts).tolist())
    return _same(mask, _with_window(lengths, lengths, first, last), first, last, format)


def bands_of_batch(masks: list[Mask], format: str) -> Bands:
    """`bands_of` for sequences end to end; one that is not square is one document."""
    whole = block_diagonal(masks)
    if len(masks) == 1 or all(mask.num_queries == mask.num_keys for mask in masks):
        return bands_of(whole, format)
    parts = [bands_of(mask, format) for mask in masks]
    queries, keys = (tuple(size for part in parts for size in getattr(part, side)) for side in ("queries", "keys"))
    left, right = (
        max((getattr(part, side) for part in parts if getattr(part, side) is not None), default=None)
        for side in ("left", "right")
    )
    return _same(whole, Bands(queries, keys, left, right), *_one_interval(whole, format), format)


def _one_interval(mask: Mask, format: str) -> tuple[IntArray, IntArray]:
    rows = mask.intervals()
    count = np.diff(rows.indptr)
    torn = np.flatnonzero(count > 1)
    if len(torn):
        query = int(torn[0])
        key = rows.row(query)[0][1]
        raise NotExpressible(
            format, mask, (query, key), "the keys of a query are one stretch, and it allows both sides"
        )
    first, last = np.zeros(mask.num_queries, np.int64), np.zeros(mask.num_queries, np.int64)
    first[count == 1], last[count == 1] = rows.starts, rows.ends
    return first, last


def _with_window(queries: tuple[int, ...], keys: tuple[int, ...], first: IntArray, last: IntArray) -> Bands:
    """Takes the farthest reach of any query as the window; a side that cuts no query stays open."""
    low, high = Bands(queries, keys, None, None).bounds()
    sizes = np.array(queries, np.int64)
    place = ragged(np.cumsum(np.array(keys, np.int64)) - sizes, sizes)[1]
    some = first < last
    left = right = None
    if (some & (first > low)).any():
        left = max(0, int((place - first)[some].max(initial=0)))
    reach = max(0, int((last - 1 - place)[some].max(initial=0)))
    if reach == 0 or (last < high).any():
        right = reach
    if left is None and right is None and not some.all() and len(some):
        right = reach
    return Bands(queries, keys, left, right)


def _differing(bands: Bands, first: IntArray, last: IntArray) -> int | None:
    low, high = bands.bounds()
    same = ((low == first) & (high == last)) | ((low >= high) & (first >= last))
    return None if same.all() else int(np.argmin(same))


def _same(mask: Mask, bands: Bands, first: IntArray, last: IntArray, format: str) -> Bands:
    query = _differing(bands, first, last)
    if query is None:
        return bands
    low, high = (int(bound[query]) for bound in bands.bounds())
    have = (int(first[query]), int(last[query]))
    window = "without a window" if bands.left is bands.right is None else f"of one window {bands.left, bands.right}"
    if have[0] >= have[1]:
        key = low
    elif low >= high:
        key = have[0]
    else:
        key = min(low, have[0]) if low != have[0] else min(high, have[1])
    documents = f"{len(bands.queries)} documents" if len(bands.queries) != 1 else "one document"
    raise NotExpressible(
        format, mask, (query, key), f"the pairs of the other queries make it {documents} {window}, which says otherwise"
    )


def _cumulative(lengths: tuple[int, ...]) -> Tensor:
    return torch.tensor([0, *accumulate(lengths)], dtype=torch.int32)


def _lengths(name: str, cumulative: Tensor) -> tuple[int, ...]:
    values = cumulative.tolist()
    steps = tuple(after - before for before, after in pairwise(values))
    if not values or values[0] != 0 or min(steps, default=0) < 0:
        raise ValueError(f"{name} must start at 0 and not decrease, got {values[:8]}")
    return steps
