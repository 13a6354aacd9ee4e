"""MagiAttention's slices: rectangles, triangles and parallelograms of queries and keys that do not overlap."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

import numpy as np
import torch
from jaxtyping import Int32
from torch import Tensor

from attnflow._core import checks
from attnflow._core.results import Result
from attnflow.masks.batches import MaskGrid
from attnflow.masks.export.refusal import end_to_end, sequences
from attnflow.masks.intervals import IntervalRows
from attnflow.masks.mask import Mask

# How the (first key, last key) of a query differ from those of the query before, by the type of the slice.
_STEPS: Final = ((0, 0), (0, 1), (1, 0), (1, 1))


@dataclass(frozen=True, eq=False)
class MagiRanges(Result):
    """A mask as MagiAttention's `flex_flash_attn_func` takes it; the fields have the names of its arguments.

    With i counted from the first query of a slice of Q queries and K keys, and j from its first key, the types are:
    0, full; 1, causal from the bottom right, j <= i + K - Q; 2, its inverse from the top left, j >= i; 3, both.

    Attributes:
        q_ranges: int32[slices, 2], queries from (inclusive) and to (exclusive).
        k_ranges: int32[slices, 2], the same of keys.
        attn_type_map: int32[slices], the type of each.
        num_queries: rows of the mask.
        num_keys: columns of the mask.
    """

    q_ranges: Int32[Tensor, "slices 2"]
    k_ranges: Int32[Tensor, "slices 2"]
    attn_type_map: Int32[Tensor, "slices"]
    num_queries: int
    num_keys: int

    def to_mask(self) -> Mask:
        """The relation that MagiAttention computes.

        Raises:
            ValueError: an unknown type, or two slices overlap: it would count their pairs twice.
        """
        q, k = (ranges.numpy().astype(np.int64).reshape(-1, 2) for ranges in (self.q_ranges, self.k_ranges))
        kind = self.attn_type_map.numpy().astype(np.int64)
        if len(kind) and (kind.min() < 0 or kind.max() > 3):
            raise ValueError(f"attn_type_map must hold 0, 1, 2 or 3, got {sorted(set(kind.tolist()))}")
        size = q[:, 1] - q[:, 0]
        checks.size("the number of queries of all slices", int(size.sum()))
        part = np.repeat(np.arange(len(size)), size)
        i = np.arange(len(part)) - np.repeat(np.cumsum(size) - size, size)
        low = k[part, 0] + np.where(kind[part] >= 2, i, 0)
        high = k[part, 1] - np.where(kind[part] % 2 == 1, size[part] - 1 - i, 0)
        high = np.maximum(np.maximum(high, low), k[part, 0])
        rows = IntervalRows.build(q[part, 0] + i, low, high, self.num_queries, self.num_keys)
        if int(rows.counts().sum()) != int((high - low).sum()):
            raise ValueError("slices overlap or leave the mask: MagiAttention counts the pairs of each of them")
        return Mask(rows, "magi")

    def __str__(self) -> str:
        return f"MagiRanges: {len(self.attn_type_map)} slices of {self.num_queries} x {self.num_keys}"

    __repr__ = __str__


def magi(mask: Mask | MaskGrid) -> MagiRanges:
    """The slices of MagiAttention's `flex_flash_attn_func`: any mask can be said, the regular ones with few slices.

    The sequences of a batch are laid end to end, without padding; heads share one mask.

    Each interval of keys continues the slice of the query before whose next row it is, or begins one.

    Cost: O(intervals), in Python.

    >>> from attnflow import masks
    >>> form = magi(masks.prefix_lm(4, 2))
    >>> form.q_ranges.tolist(), form.k_ranges.tolist(), form.attn_type_map.tolist()
    ([[0, 2], [2, 4]], [[0, 2], [0, 4]], [0, 1])
    """
    mask = end_to_end(sequences(mask, "magi"))
    rows = mask.intervals()
    slices: list[_Slice] = []
    running: dict[tuple[int, int], list[_Slice]] = {}  # by the keys of the next query that would continue them
    starts, ends, indptr = rows.starts.tolist(), rows.ends.tolist(), rows.indptr.tolist()
    for query in range(mask.num_queries):
        coming: dict[tuple[int, int], list[_Slice]] = {}
        for t in range(indptr[query], indptr[query + 1]):
            keys = (starts[t], ends[t])
            match = next((piece for piece in running.get(keys, []) if piece.last != query), None)
            if match is None:
                match = _Slice(query, *keys)
                slices.append(match)
            else:
                match.extend(query, *keys)
            for after in match.continuations():
                coming.setdefault(after, []).append(match)
        running = coming
    table = np.array([piece.row() for piece in slices], np.int32).reshape(-1, 5)
    q, k, kind = (torch.from_numpy(part.copy()) for part in (table[:, :2], table[:, 2:4], table[:, 4]))
    return MagiRanges(q, k, kind, *mask.shape)


class _Slice:
    """A slice that grows by one query at a time; its type is open until it has two."""

    __slots__ = ("end", "first", "key", "kind", "last", "start")

    def __init__(self, query: int, start: int, end: int) -> None:
        self.first = self.last = query
        self.key = self.start = start
        self.end = end
        self.kind: int | None = None

    def extend(self, query: int, start: int, end: int) -> None:
        if self.kind is None:
            self.kind = _STEPS.index((start - self.start, end - self.end))
        self.last, self.start, self.end = query, start, end

    def continuations(self) -> list[tuple[int, int]]:
        kinds = range(4) if self.kind is None else (self.kind,)
        return [(self.start + _STEPS[kind][0], self.end + _STEPS[kind][1]) for kind in kinds]

    def row(self) -> tuple[int, int, int, int, int]:
        return self.first, self.last + 1, self.key, self.end, self.kind or 0
