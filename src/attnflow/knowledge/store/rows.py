"""All rows of a store at one moment, in memory, and the exact search over them by blocks.

It multiplies with NumPy, whose matrix-vector product ran at 15 to 22 GB/s on one core where PyTorch's ran at 8.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Final

import numpy as np
import torch
from jaxtyping import Float
from torch import Tensor
from torch.nn import functional

from attnflow._core.checks import IntArray, integer, number, preview
from attnflow.knowledge.retrieval import Certificate, Neighbours
from attnflow.knowledge.store import entry
from attnflow.knowledge.store.entry import Floats, Vectors

_MOST: Final = 1 << 20  # the largest k beyond the number of entries: results have room for all k
_SCORES: Final = 1 << 21  # scores held at once: 8 MB
QUERIES: Final = 256  # searched at once
_ROWS: Final = 1 << 16


@dataclass(frozen=True, eq=False)
class EntryRows:
    """Rows [e | B_1(e) .. B_L(e)]: an entry and its threshold in each layer or head (knowledge, sec. 4, corrected).

    With [q ; onehot(l)] as the query of column l, the inner product is exactly score + threshold, so one matrix serves
    all layers. A change makes other `EntryRows`: a search in another thread sees all of it or none.
    """

    ids: IntArray  # ascending
    values: Floats  # [n, dim + thresholds]
    dim: int

    def __len__(self) -> int:
        return len(self.ids)

    @property
    def width(self) -> int:
        return self.values.shape[1]

    @property
    def tensor(self) -> Float[Tensor, "n width"]:
        """All rows in the order of `ids`; not a copy, so it must not be changed."""
        return torch.from_numpy(self.values)

    def places(self, ids: IntArray) -> IntArray:
        """Return the row of each id, -1 if unknown."""
        if not len(self.ids):
            return np.full(len(ids), -1)
        places = np.minimum(np.searchsorted(self.ids, ids), len(self.ids) - 1)
        return np.where(self.ids[places] == ids, places, -1)

    def take(self, ids: IntArray) -> Float[Tensor, "ids width"]:
        places = self.places(ids)
        if len(ids) and places.min() < 0:
            raise KeyError(f"the store has no entries with ids {preview(ids[places < 0])}")
        return torch.from_numpy(self.values[places])

    def put(self, ids: IntArray, values: Floats) -> EntryRows:
        places = self.places(ids)
        new = places < 0
        merged, kept = np.concatenate([self.ids, ids[new]]), np.concatenate([self.values, values[new]])
        kept[places[~new]] = values[~new]
        return EntryRows.sorted(merged, kept, self.dim)

    def drop(self, ids: IntArray) -> EntryRows:
        stays = np.ones(len(self), dtype=np.bool_)
        stays[self.places(ids)] = False
        return EntryRows(self.ids[stays], self.values[stays], self.dim)

    @classmethod
    def sorted(cls, ids: IntArray, values: Floats, dim: int) -> EntryRows:
        if (np.diff(ids) > 0).all():
            return cls(ids, values, dim)
        order = np.argsort(ids)
        return cls(ids[order], values[order], dim)

    def search(
        self, query: Vectors, k: int, threshold_column: int | None = None, approximate: Finder | None = None
    ) -> Neighbours:
        flat, shape = entry.queries(query, self.dim)
        column, total = self._column(threshold_column), len(self)
        k = integer("k", k, minimum=1, maximum=max(total, _MOST))
        if approximate is None:
            scores, ids, active = self.best(flat, column, min(k, total))
            active = active.view(shape)
        else:
            (scores, ids), active = approximate(self, flat, column, min(k, total)), None
        last = scores[:, -1] if total else torch.full((len(flat),), -math.inf)
        scores = functional.pad(scores, (0, k - scores.shape[1]), value=-math.inf).view(*shape, k)
        ids = functional.pad(ids, (0, k - ids.shape[1]), value=-1).view(*shape, k)
        return Neighbours(ids, scores, Certificate(approximate is not None, k, total, last.view(shape), active))

    def range(self, query: Vectors, threshold: float, threshold_column: int | None = None) -> Neighbours:
        flat, shape = entry.queries(query, self.dim)
        bound = float(threshold) if threshold in (math.inf, -math.inf) else number("threshold", threshold)
        *tables, active = self.above(flat, self._column(threshold_column), bound)
        scores, ids = (table.view(*shape, table.shape[1]) for table in tables)
        counts, last = (ids >= 0).sum(dim=-1), torch.full(shape, bound)
        return Neighbours(ids, scores, Certificate(False, counts, len(self), last, active.view(shape)))

    def best(self, queries: Floats, column: int | None, k: int) -> tuple[Tensor, Tensor, Tensor]:
        """Return the scores (falling), ids and active counts (score > 0) of each query's k best; k rows must exist."""
        results: list[tuple[Tensor, Tensor, Tensor]] = []
        for part in _chunks(queries):
            active = torch.zeros(len(part), dtype=torch.int64)
            best = torch.full((len(part), k), -torch.inf)
            slots = torch.full((len(part), k), -1)
            for start, block in self._blocks(part, column):
                scores = torch.from_numpy(block)
                active += torch.count_nonzero(scores > 0, dim=1)
                if start == 0:
                    values, where = scores.topk(min(k, scores.shape[1]), dim=1)
                else:  # only scores above the k-th best so far: cheaper than a top-k of the block
                    query, place = (scores > best[:, -1:]).nonzero(as_tuple=True)
                    values, where = padded(scores[query, place], place + start, query, len(scores))
                merged, order = torch.cat([best, values], dim=1).topk(k, dim=1)
                best, slots = merged, torch.cat([slots, where], dim=1).gather(1, order)
            results.append((best, slots, active))
        scores, slots, active = (torch.cat(parts) for parts in zip(*results, strict=True))
        return scores, torch.from_numpy(self.ids[slots.numpy()]), active

    def above(self, queries: Floats, column: int | None, bound: float) -> tuple[Tensor, Tensor, Tensor]:
        """Return the scores (falling) and ids above a bound, padded with -inf and -1, and active counts."""
        blocks = [(np.zeros(0, np.float32), np.zeros(0, np.int64), np.zeros(0, np.int64))]
        active = np.zeros(len(queries), dtype=np.int64)
        for chunk, part in enumerate(_chunks(queries)):
            first = chunk * QUERIES
            for start, scores in self._blocks(part, column):
                active[first : first + len(part)] += np.count_nonzero(scores > 0, axis=1)
                query, place = np.nonzero(scores > np.float32(bound))
                blocks.append((scores[query, place], place + start, query + first))
        scores, slots, owners = (np.concatenate(values) for values in zip(*blocks, strict=True))
        order = np.lexsort((-scores, owners))
        ordered = (torch.from_numpy(values[order]) for values in (scores, self.ids[slots], owners))
        return *padded(*ordered, count=len(queries)), torch.from_numpy(active)

    def _column(self, column: int | None) -> int | None:
        if column is None:
            return None
        if self.width == self.dim:
            raise ValueError(f"the store has no threshold columns, got threshold_column={column}: leave it out")
        return integer("threshold_column", column, maximum=self.width - self.dim - 1)

    def _blocks(self, queries: Floats, column: int | None) -> Iterator[tuple[int, Floats]]:
        """Yield (first row, scores [queries, rows of the block])."""
        step = max(1, min(_ROWS, _SCORES // max(len(queries), 1)))
        for start in range(0, len(self), step):
            block = self.values[start : start + step]
            scores = queries @ block[:, : self.dim].T
            if column is not None:
                scores += block[:, self.dim + column]
            yield start, scores


# The scores (falling) and ids of the k best for each query, padded with -inf and -1.
Finder = Callable[[EntryRows, Floats, int | None, int], tuple[Tensor, Tensor]]


def padded(scores: Tensor, slots: Tensor, queries: Tensor, count: int) -> tuple[Tensor, Tensor]:
    """Group scores and slots by query, padded with -inf and -1; `queries` must be ascending."""
    counts = queries.bincount(minlength=count)
    place = torch.arange(len(queries)) - (counts.cumsum(0) - counts)[queries]
    shape = (count, int(counts.max()) if count else 0)
    wide, where = scores.new_full(shape, -torch.inf), slots.new_full(shape, -1)
    wide[queries, place], where[queries, place] = scores, slots
    return wide, where


def _chunks(queries: Floats) -> Iterator[Floats]:
    return (queries[start : start + QUERIES] for start in range(0, max(len(queries), 1), QUERIES))
