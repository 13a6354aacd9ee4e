"""FlashMask: for each key, the queries that may not attend to it, as at most two stretches."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from jaxtyping import Int32
from torch import Tensor

from attnflow._core import checks
from attnflow._core.checks import IntArray
from attnflow._core.results import Result
from attnflow.masks.batches import MaskGrid
from attnflow.masks.export.refusal import NotExpressible, checked
from attnflow.masks.intervals import IntervalRows
from attnflow.masks.mask import Mask


@dataclass(frozen=True, eq=False)
class FlashMask(Result):
    """A mask as PaddlePaddle's `flashmask_attention` takes it (arXiv:2410.01359).

    Rows are queries. For each key, the bounds of the *forbidden* queries: causal [LTS], from LTS on, or [LTS, LTE],
    and all before the key; not causal [LTS, UTE], from LTS on and before UTE, or [LTS, LTE, UTS, UTE].

    Attributes:
        startend_row_indices: int32[sequences, heads, keys, 1 or 2 or 4].
        causal: the argument of that name.
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
        rows = [tuple(self._mask(self.startend_row_indices[b, h]) for h in range(heads)) for b in range(batch)]
        if not batch * heads:
            raise ValueError(f"expected a sequence and a head, got {tuple(self.startend_row_indices.shape)}")
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
        return f"FlashMask: {width} bounds for each of {keys} keys, causal={self.causal}"

    __repr__ = __str__


def flashmask(mask: Mask | MaskGrid) -> FlashMask:
    """The `startend_row_indices` of FlashMask, in the form with the fewest bounds.

    Masks by sequence and by head are said with the padding of `MaskGrid.dense()`.

    Raises:
        NotExpressible: the queries that may not attend to some key are more than two stretches.

    Cost: O(intervals + keys).

    >>> from attnflow import masks
    >>> form = flashmask(masks.document([2, 1]))
    >>> form.startend_row_indices.squeeze().tolist(), form.causal
    ([2, 2, 3], True)
    """
    if not isinstance(mask, MaskGrid):
        return _one(checked(mask))
    forms = [[_one(each) for each in row] for row in mask.padded()]
    every = [form for row in forms for form in row]
    causal = all(form.causal for form in every)
    width = max(1 if causal else 2, *(_width(form, causal) for form in every))
    tables = [torch.cat([_widened(form, causal, width) for form in row], 1) for row in forms]
    return FlashMask(torch.cat(tables), causal, mask.num_queries)


def _width(form: FlashMask, causal: bool) -> int:
    """How many bounds a form takes where it stands beside others."""
    width = form.startend_row_indices.shape[-1]
    return width if causal or not form.causal else 2 * width


def _widened(form: FlashMask, causal: bool, width: int) -> Tensor:
    """The bounds of a form, said with `width` of them, causal or not."""
    bounds, n = form.startend_row_indices, form.num_queries
    if bounds.shape[-1] == width and form.causal == causal:
        return bounds
    end, zero = torch.full_like(bounds[..., :1], n), torch.zeros_like(bounds[..., :1])
    key = torch.arange(bounds.shape[2], dtype=bounds.dtype)[:, None].expand_as(end)  # a causal form forbids rows before
    last = bounds.shape[-1] == (2 if form.causal else 4)
    lower = bounds[..., :2] if last else torch.cat([bounds[..., :1], end], -1)
    if causal:
        return lower
    upper = torch.cat([zero, key], -1) if form.causal else torch.cat([zero, bounds[..., 1:]], -1)
    return torch.cat([lower, upper] if width == 4 else [lower[..., :1], upper[..., 1:]], -1)


def _one(mask: Mask) -> FlashMask:
    rows = mask.intervals()
    n, num_keys = mask.shape
    forbidden = rows.complement()
    key = np.arange(num_keys)
    if n == num_keys and bool((_last(rows) <= np.arange(1, n + 1)).all()):
        below = forbidden.intersection(IntervalRows.build(np.arange(n), 0, np.arange(1, n + 1), n, n))
        if _runs_per_key(below).max(initial=0) <= 1:
            runs = transposed(below)
            start, end = np.full(n, n), np.full(n, n)
            start[runs.row_index()], end[runs.row_index()] = runs.starts, runs.ends
            bounds = (start,) if bool((end == n).all()) else (start, end)
            return _form(bounds, True, n)
    count = _runs_per_key(forbidden)
    if count.max(initial=0) > 2:
        at = int(np.argmax(count > 2))
        stretches = _forbidden(rows, at)
        shown = ", ".join(f"[{start}, {end})" for start, end in stretches[:4])
        reason = f"the queries that may not attend to a key are two stretches, here {len(stretches)}: {shown}"
        raise NotExpressible("flashmask", mask, (stretches[2][0], at), reason)
    runs = transposed(forbidden)
    lower, upper = np.full((num_keys, 2), n), np.zeros((num_keys, 2), np.int64)
    row = runs.row_index()
    second = np.arange(len(row)) > runs.indptr[row]
    only = count[row] == 1
    above = np.where(only, (runs.ends <= row) | ((runs.starts == 0) & (runs.ends < n)), ~second)
    upper[row[above]] = np.stack([runs.starts, runs.ends], 1)[above]
    lower[row[~above]] = np.stack([runs.starts, runs.ends], 1)[~above]
    outer = bool((lower[key, 1] == n).all() and (upper[:, 0] == 0).all())
    bounds = (lower[:, 0], upper[:, 1]) if outer else (lower[:, 0], lower[:, 1], upper[:, 0], upper[:, 1])
    return _form(bounds, False, n)


def transposed(rows: IntervalRows) -> IntervalRows:
    """Row k of the result holds the rows that hold k. Cost: O(intervals of both)."""
    begin, end = _changes(rows)
    row, key = begin.expand()
    order = np.argsort(key, kind="stable")
    last_row, last_key = end.expand()
    last = last_row[np.argsort(last_key, kind="stable")]
    indptr = np.concatenate([[0], np.cumsum(np.bincount(key, minlength=rows.num_keys))]).astype(np.int64)
    return IntervalRows(indptr, row[order].astype(np.int32), last.astype(np.int32), rows.num_rows)


def _changes(rows: IntervalRows) -> tuple[IntervalRows, IntervalRows]:
    """(keys that a row holds and the row before does not, the reverse), each with a row more than `rows`."""
    empty = IntervalRows(np.zeros(2, np.int64), np.zeros(0, np.int32), np.zeros(0, np.int32), rows.num_keys)
    here, before = (IntervalRows.stack(parts, rows.num_keys) for parts in ([rows, empty], [empty, rows]))
    return here.intersection(before.complement()), before.intersection(here.complement())


def _runs_per_key(rows: IntervalRows) -> IntArray:
    """How many stretches of rows hold each key, int64[keys]. Cost: O(intervals)."""
    begin, _ = _changes(rows)
    step = np.bincount(begin.starts, minlength=rows.num_keys + 1) - np.bincount(begin.ends, minlength=rows.num_keys + 1)
    return np.cumsum(step)[: rows.num_keys]


def _forbidden(rows: IntervalRows, key: int) -> list[tuple[int, int]]:
    """The stretches of rows that do not hold a key."""
    holding = rows.row_index()[(rows.starts <= key) & (key < rows.ends)]
    table = np.ones((1, rows.num_rows), np.bool_)
    table[0, holding] = False
    return IntervalRows.from_bool(table).row(0)


def _last(rows: IntervalRows) -> IntArray:
    """One past the last key of each row; 0 for a row without keys."""
    last = np.zeros(rows.num_rows, np.int64)
    last[rows.row_index()] = rows.ends  # the last write, of the last interval, stays
    return last


def _form(bounds: tuple[IntArray, ...], causal: bool, num_queries: int) -> FlashMask:
    table = np.stack(bounds, axis=-1).astype(np.int32)
    return FlashMask(torch.from_numpy(table)[None, None], causal, num_queries)
