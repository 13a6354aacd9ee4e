"""Stretches of rows and rectangles of pairs: FlashMask's bounds for each key, and MagiAttention's slices."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

import numpy as np
import torch
from jaxtyping import Int32
from torch import Tensor

from attnflow._core import checks
from attnflow._core.checks import IntArray
from attnflow._core.results import Result
from attnflow.masks.batches import MaskGrid, block_diagonal
from attnflow.masks.export.varlen import NotExpressible, sequences
from attnflow.masks.intervals import IntervalRows, offsets, ragged
from attnflow.masks.mask import Mask

# How the (first key, last key) of a query differ from those of the query before, by the type of MagiAttention's slice.
_STEPS: Final = ((0, 0), (0, 1), (1, 0), (1, 1))


@dataclass(frozen=True, eq=False)
class FlashMask(Result):
    """A mask for PaddlePaddle's `flashmask_attention` (arXiv:2410.01359): for each key, the forbidden queries.

    If causal, all queries before the key are forbidden, and those from LTS on [LTS] or from LTS to LTE [LTS, LTE]. If
    not causal, the forbidden ones are from LTS on and before UTE [LTS, UTE], or two ranges [LTS, LTE, UTS, UTE].

    Attributes:
        startend_row_indices: int32[sequences, heads, keys, 1 or 2 or 4].
        causal: the argument `causal`.
        num_queries: rows of the mask.
    """

    startend_row_indices: Int32[Tensor, "batch heads keys bounds"]
    causal: bool
    num_queries: int

    def to_mask(self) -> Mask | MaskGrid:
        """The relation that FlashMask computes (its own `flashmask_to_densemask`); of several, the grid of them.

        Raises:
            ValueError: a number of bounds that does not go with `causal`, or no sequence.
        """
        batch, heads, num_keys, _ = self.startend_row_indices.shape
        if not batch * heads:
            raise ValueError(f"expected a sequence and a head, got {tuple(self.startend_row_indices.shape)}")
        rows = [tuple(self._mask(self.startend_row_indices[b, h]) for h in range(heads)) for b in range(batch)]
        return rows[0][0] if batch * heads == 1 else MaskGrid(tuple(rows), self.num_queries, num_keys)

    def _mask(self, table: Tensor) -> Mask:
        num_keys, width = table.shape
        if width not in ((1, 2) if self.causal else (2, 4)):
            raise ValueError(f"causal={self.causal} takes {'1 or 2' if self.causal else '2 or 4'} bounds, got {width}")
        bounds = table.numpy().astype(np.int64)
        key, n = np.arange(num_keys), checks.size("num_queries", self.num_queries)
        if self.causal:
            stretches = [(key, bounds[:, 0], bounds[:, 1] if width == 2 else n), (key, 0, key)]
        elif width == 2:
            stretches = [(key, bounds[:, 0], n), (key, 0, bounds[:, 1])]
        else:
            stretches = [(key, bounds[:, 0], bounds[:, 1]), (key, bounds[:, 2], bounds[:, 3])]
        allowed = IntervalRows.of(num_keys, n, *stretches).complement()
        return Mask(transposed(allowed), "flashmask")

    def __str__(self) -> str:
        *_, keys, width = self.startend_row_indices.shape
        return f"FlashMask: {width} bound{'s' * (width != 1)} for each of {keys} keys, causal={self.causal}"

    __repr__ = __str__


def flashmask(mask: Mask | MaskGrid) -> FlashMask:
    """The `startend_row_indices` of FlashMask, in the form with the fewest bounds.

    Masks by sequence and by head are padded as in `MaskGrid.dense()`.

    Raises:
        NotExpressible: for some key, the forbidden queries form more than two stretches.

    Cost: O(intervals + keys).

    >>> from attnflow import masks
    >>> form = flashmask(masks.document([2, 1]))
    >>> form.startend_row_indices.squeeze().tolist(), form.causal
    ([2, 2, 3], True)
    """
    rows = list(mask.padded()) if isinstance(mask, MaskGrid) else [sequences(mask, "flashmask")]
    stretches = [[_forbidden(head) for head in row] for row in rows]
    lower, upper = (np.array([[head[side] for head in row] for row in stretches]) for side in (0, 1))
    causal = all(head[2] for row in stretches for head in row)
    whole = bool((lower[..., 1] == mask.num_queries).all())  # the lower stretches go on to the last query
    if causal:
        bounds = lower[..., :1] if whole else lower
    elif whole and bool((upper[..., 0] == 0).all()):
        bounds = np.stack([lower[..., 0], upper[..., 1]], axis=-1)
    else:
        bounds = np.concatenate([lower, upper], axis=-1)
    return FlashMask(torch.from_numpy(bounds.astype(np.int32)), causal, mask.num_queries)


def _forbidden(mask: Mask) -> tuple[IntArray, IntArray, bool]:
    """(lower and upper stretch of forbidden queries of each key, int64[keys, 2]; whether the form is causal)."""
    rows, (n, num_keys) = mask.intervals(), mask.shape
    forbidden, key = rows.complement(), np.arange(num_keys)
    lower, upper = np.full((num_keys, 2), n), np.zeros((num_keys, 2), np.int64)
    if n == num_keys and bool((rows.ends <= rows.row_index() + 1).all()):
        below = forbidden.intersection(IntervalRows.build(key, 0, key + 1, n, n))
        if _changes(below)[0].cover().max(initial=0) <= 1:  # runs of each key
            runs = transposed(below)
            lower[runs.row_index()] = np.stack([runs.starts, runs.ends], 1)
            upper[:, 1] = key
            return lower, upper, True
    count = _changes(forbidden)[0].cover()
    if count.max(initial=0) > 2:
        at = int(np.argmax(count > 2))
        stretches = IntervalRows.from_bool(~rows.holds(np.arange(n), np.full(n, at))[None]).row(0)
        shown = ", ".join(f"[{start}, {end})" for start, end in stretches[:4])
        reason = f"the queries that may not attend to a key are two stretches, here {len(stretches)}: {shown}"
        raise NotExpressible("flashmask", mask, (stretches[2][0], at), reason)
    runs = transposed(forbidden)
    row = runs.row_index()
    second = np.arange(len(row)) > runs.indptr[row]
    above = np.where(count[row] == 1, (runs.ends <= row) | ((runs.starts == 0) & (runs.ends < n)), ~second)
    for table, part in ((upper, above), (lower, ~above)):
        table[row[part]] = np.stack([runs.starts, runs.ends], 1)[part]
    return lower, upper, False


def transposed(rows: IntervalRows) -> IntervalRows:
    (row, key), (last_row, last_key) = (part.expand() for part in _changes(rows))
    first, last = row[np.argsort(key, kind="stable")], last_row[np.argsort(last_key, kind="stable")]
    indptr = offsets(np.bincount(key, minlength=rows.num_keys))
    return IntervalRows(indptr, first.astype(np.int32), last.astype(np.int32), rows.num_rows)


def _changes(rows: IntervalRows) -> tuple[IntervalRows, IntervalRows]:
    """(keys added, keys removed) against the row before, each with one row more than `rows`."""
    empty = IntervalRows(np.zeros(2, np.int64), np.zeros(0, np.int32), np.zeros(0, np.int32), rows.num_keys)
    here, before = (IntervalRows.stack(parts, rows.num_keys) for parts in ([rows, empty], [empty, rows]))
    return here.intersection(before.complement()), before.intersection(here.complement())


@dataclass(frozen=True, eq=False)
class MagiRanges(Result):
    """A mask in the arguments of MagiAttention's `flex_flash_attn_func`; the fields have the names of these arguments.

    A slice has Q queries and K keys; i counts from its first query and j from its first key. Type 0 is full. Type 1 is
    causal from the bottom right, j <= i + K - Q. Type 2 is its inverse from the top left, j >= i. Type 3 is both.

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
        part, query = ragged(q[:, 0], size)
        i = query - q[part, 0]
        low = k[part, 0] + np.where(kind[part] >= 2, i, 0)
        high = k[part, 1] - np.where(kind[part] % 2 == 1, size[part] - 1 - i, 0)
        high = np.maximum(np.maximum(high, low), k[part, 0])
        rows = IntervalRows.build(query, low, high, self.num_queries, self.num_keys)
        if int(rows.counts().sum()) != int((high - low).sum()):
            raise ValueError("slices overlap or leave the mask: MagiAttention counts the pairs of each of them")
        return Mask(rows, "magi")

    def __str__(self) -> str:
        return f"MagiRanges: {len(self.attn_type_map)} slices of {self.num_queries} x {self.num_keys}"

    __repr__ = __str__


def magi(mask: Mask | MaskGrid) -> MagiRanges:
    """The slices of MagiAttention's `flex_flash_attn_func`, for any mask; regular masks need few slices.

    The sequences of a batch are laid end to end, without padding; heads share one mask. An interval of keys continues
    a slice of the previous query if it is that slice's next row; otherwise it starts a new slice.
    Cost: O(intervals), in Python.

    >>> from attnflow import masks
    >>> form = magi(masks.prefix_lm(4, 2))
    >>> form.q_ranges.tolist(), form.k_ranges.tolist(), form.attn_type_map.tolist()
    ([[0, 2], [2, 4]], [[0, 2], [0, 4]], [0, 1])
    """
    mask = block_diagonal(sequences(mask, "magi"))
    slices: list[_Slice] = []
    running: dict[tuple[int, int], list[_Slice]] = {}  # by the keys of the next query that would continue them
    for query in range(mask.num_queries):
        coming: dict[tuple[int, int], list[_Slice]] = {}
        for keys in mask.intervals().row(query):
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
