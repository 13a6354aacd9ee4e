"""Approximate search: rows in lists around centroids, of which a query reads those that promise most.

The lists are faiss's inverted lists (IVF, flat), which take single rows in and out. Which list a row belongs to and
which lists a query reads is decided here, because faiss would let one column of large thresholds decide both.
"""

from __future__ import annotations

from typing import Any, Final

import numpy as np

from attnflow._core.errors import MissingExtra
from attnflow.knowledge.index.centroids import Centroids, products
from attnflow.knowledge.index.exact import Floats, Ints

_LISTS: Final = 6.0  # lists for sqrt(rows): with 4, clusters that share a list made queries read twenty times as much
_SAMPLE: Final = 32  # rows a list to learn the centroids from
_CUT: Final = 4.0  # lengths of an entry
_DEVIATIONS: Final = 3.0  # about the largest of a few hundred draws of a normal distribution
_PROMISES: Final = 1 << 21  # held at once
_ROWS: Final = 1 << 16  # whose lists are looked for at once


class Partition:
    """Rows [entry | thresholds] in lists of rows that lie near to each other.

    Lists are k-means clusters of [entry | thresholds / sqrt(their number)]: a query sees one of the thresholds, so
    that together they are to weigh as much as one. They are cut at four times the typical length of an entry: uncut, a
    penalty of 1e4 in one column leaves the distances between entries below rounding. A query of a threshold column
    reads the lists with the largest promise,

        q . centroid + 3 ||q|| spread / sqrt(dim) + (largest threshold of the list in that column),

    about the largest score in the list: one entry with a large threshold is not hidden by its neighbours, wide lists
    are not taken for their centroids, and lists of entries with a large penalty are read last.

    Attributes:
        num_lists: how many.
        probes: lists that a query reads.

    Args:
        rows: [n, dim + num_thresholds], n > 0; the numbers of the rows are 0 to n - 1.
        dim: width of an entry.

    Raises:
        MissingExtra: faiss is not installed.

    Cost: about 6 sqrt(n) lists, O(n^1.25 x width) time, and a copy of the rows.
    """

    def __init__(self, rows: Floats, dim: int) -> None:
        self._faiss = faiss()
        self._dim, width = dim, rows.shape[1]
        draw = np.random.default_rng(0)
        lists = min(len(rows), max(1, round(_LISTS * len(rows) ** 0.5)))
        sample = rows[_some(draw, len(rows), _SAMPLE * lists)]
        self._cut = _CUT * float(np.sqrt(np.square(sample[:, :dim]).sum(axis=1).mean()))
        self._centroids = Centroids(self._points(sample), lists, draw)
        self._entries = self._centroids.positions[:, :dim].copy()
        self.num_lists = len(self._centroids)
        self._ceilings = np.full((self.num_lists, width - dim), -np.inf, dtype=np.float32)
        self.probes = self.num_lists
        self._quantizer = self._faiss.IndexFlatIP(width)  # never asked; faiss wants one
        self._lists: Any = self._faiss.IndexIVFFlat(
            self._quantizer, width, self.num_lists, self._faiss.METRIC_INNER_PRODUCT
        )
        self._lists.is_trained = True
        self._lists.set_direct_map_type(self._faiss.DirectMap.Hashtable)
        self.add(rows, np.arange(len(rows)))

    def add(self, rows: Floats, slots: Ints) -> None:
        """Put rows with new numbers into their lists."""
        if not len(slots):
            return
        lists = self.lists_of(rows)
        np.maximum.at(self._ceilings, lists, rows[:, self._dim :])
        rows, slots = np.ascontiguousarray(rows), np.ascontiguousarray(slots)
        pointer = self._faiss.swig_ptr
        self._lists.add_core(len(rows), pointer(rows), pointer(slots), pointer(lists))

    def remove(self, slots: Ints) -> None:
        """Take rows out of their lists. The largest thresholds of a list are not lowered."""
        if len(slots):
            self._lists.remove_ids(slots)

    def lists_of(self, rows: Floats) -> Ints:
        """The list of each row."""
        blocks = [rows[start : start + _ROWS] for start in range(0, len(rows), _ROWS)]
        return np.concatenate([self._centroids.nearest(self._points(block)) for block in blocks])

    def search(self, queries: Floats, column: int | None, k: int) -> tuple[Floats, Ints]:
        """The k best rows of the lists that are read: scores in falling order and slots, -inf and -1 where fewer."""
        scores, slots = zip(
            *(
                self._lists.search_preassigned(
                    self._augmented(queries[part], column), k, self._read(queries[part], column), None
                )
                for part in _parts(len(queries), self.num_lists)
            ),
            strict=True,
        )
        numbers = np.concatenate(slots)
        return np.where(numbers < 0, np.float32(-np.inf), np.concatenate(scores)), numbers

    def range(self, queries: Floats, column: int | None, bound: float) -> tuple[Ints, Floats, Ints]:
        """All rows above a score of the lists that are read: how many for each query, scores and slots, in no order."""
        parts = [
            self._lists.range_search_preassigned(
                self._augmented(queries[part], column), bound, self._read(queries[part], column), None
            )
            for part in _parts(len(queries), self.num_lists)
        ]
        counts, scores, slots = zip(*((np.diff(ends), scores, slots) for ends, scores, slots in parts), strict=True)
        return np.concatenate(counts).astype(np.int64), np.concatenate(scores), np.concatenate(slots)

    def ranks(self, queries: Floats, column: int | None, rows: Floats) -> Ints:
        """How many lists a query would read before that of each of its rows [queries, k, width]: [queries, k]."""
        promise = self._promise(queries, column)
        lists = self.lists_of(rows.reshape(-1, rows.shape[-1])).reshape(rows.shape[:2])
        order = np.argsort(-promise, axis=1)
        ranks = np.empty_like(order)
        np.put_along_axis(ranks, order, np.arange(self.num_lists)[None], axis=1)
        return np.take_along_axis(ranks, lists, axis=1)

    def set_probes(self, probes: int) -> None:
        """Read this many lists from now on."""
        self.probes = self._lists.nprobe = probes

    def share(self, queries: Floats, column: int | None) -> float:
        """The part of all rows that is in the lists that are read, on average."""
        sizes = np.array([self._lists.get_list_size(number) for number in range(self.num_lists)])
        return float(sizes[self._read(queries, column)].sum(axis=1).mean() / max(sizes.sum(), 1))

    def imitations(self, rows: Floats, draw: np.random.Generator, count: int) -> tuple[Floats, Ints]:
        """Queries like the rows: rows moved as other rows lie away from their centroids; and which rows."""
        chosen, others = (rows[_some(draw, len(rows), count)] for _ in range(2))
        others = others[: len(chosen)]
        away = others[:, : self._dim] - self._entries[self.lists_of(others)]
        moved = chosen[:, : self._dim] + away
        best = chosen[:, self._dim :].argmax(axis=1) if rows.shape[1] > self._dim else np.zeros(len(chosen), np.int64)
        return moved, best

    def _points(self, rows: Floats) -> Floats:
        if rows.shape[1] == self._dim:
            return rows
        thresholds = np.clip(rows[:, self._dim :], -self._cut, self._cut)
        return np.concatenate([rows[:, : self._dim], thresholds / np.float32(thresholds.shape[1] ** 0.5)], axis=1)

    def _promise(self, queries: Floats, column: int | None) -> Floats:
        promise = products(queries, self._entries)
        lengths = np.sqrt(np.square(queries).sum(axis=1, keepdims=True) / self._dim)
        promise += (_DEVIATIONS * lengths) * self._centroids.spread
        return promise if column is None else promise + self._ceilings[:, column]

    def _read(self, queries: Floats, column: int | None) -> Ints:
        """The lists that queries read."""
        if self.probes == self.num_lists:
            return np.broadcast_to(np.arange(self.num_lists), (len(queries), self.num_lists))
        promise = self._promise(queries, column)
        return np.argpartition(promise, self.num_lists - self.probes, axis=1)[:, self.num_lists - self.probes :]

    def _augmented(self, queries: Floats, column: int | None) -> Floats:
        tail = np.zeros((len(queries), self._ceilings.shape[1]), dtype=np.float32)
        if column is not None:
            tail[:, column] = 1
        return np.concatenate([queries, tail], axis=1)


def faiss() -> Any:
    """The module, imported on first use."""
    try:
        import faiss
    except ImportError as error:
        raise MissingExtra("faiss", "knowledge", "an approximate search") from error
    return faiss


def _some(draw: np.random.Generator, total: int, count: int) -> Ints:
    """Up to `count` of `total`, in rising order."""
    return np.sort(draw.choice(total, size=min(count, total), replace=False))


def _parts(total: int, lists: int) -> list[slice]:
    step = max(1, _PROMISES // lists)
    return [slice(start, start + step) for start in range(0, max(total, 1), step)]
