"""One index over all entries, with exact and approximate search of the best.

It multiplies with NumPy, whose matrix-vector product ran at 15 to 22 GB/s on one core where PyTorch's ran at 8.
"""

from __future__ import annotations

import math
import threading
from collections.abc import Iterator
from typing import Any, Final, Literal, NamedTuple

import numpy as np
import torch
from jaxtyping import Float
from torch import Tensor
from torch.nn import functional

from attnflow._core.checks import IntArray, integer, number, preview
from attnflow._core.errors import MissingExtra
from attnflow.knowledge.retrieval import Certificate, Neighbours
from attnflow.knowledge.store import entry
from attnflow.knowledge.store.entry import Floats, Vectors

_SCORES: Final = 1 << 21  # scores held at once: 8 MB
_QUERIES: Final = 256
_ROWS: Final = 1 << 16
RECALL: Final = 0.99  # share of the ten best to find, from which the number of lists to read follows
_K: Final = 10
_SAMPLE: Final = 256  # entries used as queries to measure it
_POINTS: Final = 64  # entries per list for computing centroids
_LEAST: Final = 8  # the fewest lists that a query reads


def best(queries: Floats, rows: Floats, thresholds: Floats | None, k: int) -> tuple[Tensor, Tensor, Tensor]:
    """Return the scores (falling), rows and active counts (score > 0) of each query's k best; k rows must exist."""
    found: list[tuple[Tensor, Tensor, Tensor]] = []
    for part in _chunks(queries):
        active = torch.zeros(len(part), dtype=torch.int64)
        best = torch.full((len(part), k), -torch.inf)
        slots = torch.full((len(part), k), -1)
        for start, block in _blocks(part, rows, thresholds):
            scores = torch.from_numpy(block)
            active += torch.count_nonzero(scores > 0, dim=1)
            if start == 0:
                values, where = scores.topk(min(k, scores.shape[1]), dim=1)
            else:  # only scores above the k-th best so far: cheaper than a top-k of the block
                query, column = (scores > best[:, -1:]).nonzero(as_tuple=True)
                values, where = padded(scores[query, column], column + start, query, len(scores))
            merged, order = torch.cat([best, values], dim=1).topk(k, dim=1)
            best, slots = merged, torch.cat([slots, where], dim=1).gather(1, order)
        found.append((best, slots, active))
    scores, slots, active = (torch.cat(parts) for parts in zip(*found, strict=True))
    return scores, slots, active


def above(
    queries: Floats, rows: Floats, thresholds: Floats | None, bound: float
) -> tuple[Floats, IntArray, IntArray, IntArray]:
    blocks = [(np.zeros(0, np.float32), np.zeros(0, np.int64), np.zeros(0, np.int64))]
    active = np.zeros(len(queries), dtype=np.int64)
    for chunk, part in enumerate(_chunks(queries)):
        first = chunk * _QUERIES
        for start, scores in _blocks(part, rows, thresholds):
            active[first : first + len(part)] += np.count_nonzero(scores > 0, axis=1)
            query, column = np.nonzero(scores > np.float32(bound))
            blocks.append((scores[query, column], column + start, query + first))
    scores, slots, owners = (np.concatenate(values) for values in zip(*blocks, strict=True))
    return scores, slots, owners, active


def padded(scores: Tensor, slots: Tensor, queries: Tensor, count: int) -> tuple[Tensor, Tensor]:
    """Group scores and slots by query, padded with -inf and -1; `queries` must be ascending."""
    counts = queries.bincount(minlength=count)
    place = torch.arange(len(queries)) - (counts.cumsum(0) - counts)[queries]
    shape = (count, int(counts.max()) if count else 0)
    wide, where = scores.new_full(shape, -torch.inf), slots.new_full(shape, -1)
    wide[queries, place], where[queries, place] = scores, slots
    return wide, where


def of_column(rows: Floats, dim: int, column: int | None) -> tuple[Floats, Floats | None]:
    """Split rows [entry | thresholds] into the entries and one column of thresholds."""
    return rows[:, :dim], None if column is None else rows[:, dim + column]


def _chunks(queries: Floats) -> Iterator[Floats]:
    return (queries[start : start + _QUERIES] for start in range(0, max(len(queries), 1), _QUERIES))


def _blocks(queries: Floats, rows: Floats, thresholds: Floats | None) -> Iterator[tuple[int, Floats]]:
    """Yield (first row, scores [queries, rows of the block])."""
    step = max(1, min(_ROWS, _SCORES // max(len(queries), 1)))
    for start in range(0, len(rows), step):
        scores = queries @ rows[start : start + step].T
        if thresholds is not None:
            scores += thresholds[start : start + step]
        yield start, scores


class InvertedLists:
    """Inverted lists of rows [entry | thresholds], about 2 sqrt(n) of them around centroids.

    Rows are assigned by Euclidean distance, with thresholds clipped to an entry's mean length: a penalty of -1e9 must
    not hide where the entry lies. Queries rank lists by inner product. `recall` is the share of the ten best found when
    the lists were built; `probes` is the number of lists read, doubled until recall reaches `RECALL`.
    """

    def __init__(self, ids: IntArray, rows: Floats, dim: int) -> None:
        self._faiss, self._dim = faiss(), dim
        draw = np.random.default_rng(0)
        norms = np.linalg.norm(rows[draw.integers(len(rows), size=min(len(rows), 4096)), :dim], axis=1)
        self._cut = np.float32(norms.mean())
        count = max(1, min(round(2 * len(rows) ** 0.5), len(rows) // 32))
        sample = np.sort(draw.choice(len(rows), size=min(len(rows), count * _POINTS), replace=False))
        width = rows.shape[1]
        means = self._faiss.Kmeans(width, count, niter=10, seed=0, min_points_per_centroid=1)
        means.train(self._points(rows[sample]))
        self._centroids: Floats = means.centroids
        self._nearest = self._faiss.IndexFlatL2(width)
        self._nearest.add(self._centroids)
        quantizer = self._faiss.IndexFlatIP(width)
        quantizer.add(self._centroids)
        self._index = self._faiss.IndexIVFFlat(quantizer, width, count, self._faiss.METRIC_INNER_PRODUCT)
        self._index.set_direct_map_type(self._faiss.DirectMap.Hashtable)
        self.put(ids, rows)
        self.probes, self.recall = self._calibrated(rows, draw)

    @property
    def num_lists(self) -> int:
        return len(self._centroids)

    def put(self, ids: IntArray, rows: Floats) -> None:
        for start in range(0, len(ids), 1 << 16):
            block, keys = np.ascontiguousarray(rows[start : start + (1 << 16)]), ids[start : start + (1 << 16)].copy()
            homes = self._nearest.search(self._points(block), 1)[1][:, 0].copy()
            pointers = (self._faiss.swig_ptr(values) for values in (block, keys, homes))
            self._index.add_core(len(keys), *pointers)

    def drop(self, ids: IntArray) -> None:
        self._index.remove_ids(self._faiss.IDSelectorArray(np.ascontiguousarray(ids)))

    def best(self, queries: Floats, column: int | None, k: int) -> tuple[Floats, IntArray]:
        """Return scores in falling order and ids of each query's k best found, padded with -inf and -1."""
        asked = np.zeros((len(queries), self._centroids.shape[1]), dtype=np.float32)  # [query | onehot(column)]
        asked[:, : self._dim] = queries
        if column is not None:
            asked[:, self._dim + column] = 1
        self._index.nprobe = self.probes
        scores, lists = self._index.quantizer.search(asked, self.probes)
        scores, ids = self._index.search_preassigned(asked, k, lists, scores)
        return np.where(ids < 0, np.float32(-np.inf), scores), ids

    def _calibrated(self, rows: Floats, draw: np.random.Generator) -> tuple[int, float]:
        places = draw.choice(len(rows), size=min(len(rows), _SAMPLE), replace=False)
        columns = rows.shape[1] - self._dim
        column, k = (int(draw.integers(columns)) if columns else None), min(_K, len(rows))
        queries = np.ascontiguousarray(rows[places, : self._dim])
        truth = best(queries, *of_column(rows, self._dim, column), k)[0].numpy()
        self.probes = min(_LEAST, self.num_lists)
        while True:
            recall = recall_of(self.best(queries, column, k)[0], truth)
            if recall >= RECALL or self.probes == self.num_lists:
                return self.probes, recall
            self.probes = min(2 * self.probes, self.num_lists)

    def _points(self, rows: Floats) -> Floats:
        points = np.array(rows, order="C")
        np.clip(points[:, self._dim :], -self._cut, self._cut, out=points[:, self._dim :])
        return points


def recall_of(found: Floats, truth: Floats) -> float:
    """Return the share of the true best scores [queries, k] that were found; ties count as found."""
    tolerance = 1e-5 * np.maximum(np.abs(truth[:, -1:]), 1e-3)
    reached = (found >= truth[:, -1:] - tolerance).sum(axis=1)
    return float((reached / max(truth.shape[1], 1)).mean()) if len(truth) else 1.0


def faiss() -> Any:
    try:
        import faiss as package
    except ImportError as error:
        raise MissingExtra("faiss", "knowledge", "approximate search") from error
    return package


Mode = Literal["exact", "approximate"]

MOST_EXACT: Final = 1_000_000  # up to so many entries a search is exact by default
_MOST: Final = 1 << 20  # the largest k beyond the number of entries: results have room for all k
_GROWTH: Final = 1.5


class _View(NamedTuple):
    """An immutable view of the entries: ascending ids, and [entry | thresholds] of each."""

    ids: IntArray
    rows: Floats


class EntryIndex:
    """Searches the best entries for a query, with one index for all layers (knowledge, sec. 4, corrected).

    A row is [e | B_1(e) .. B_L(e)]: an entry and its threshold in each layer or head. With [q ; onehot(l)] as the query
    of column l, the inner product is exactly score + threshold. Approximate search keeps a second copy of the rows in
    inverted lists. The first such search builds them, and they are rebuilt once half of the entries have changed.
    Threads may search during a change: a search sees either all of it or none.

    >>> index = EntryIndex(2, num_thresholds=1)
    >>> index.load(np.arange(2), np.array([[1.0, 0.0, 0.0], [0.0, 1.0, 0.5]], dtype=np.float32))
    >>> index.search(torch.tensor([1.0, 1.0]), k=2, threshold_column=0).ids
    tensor([1, 0])
    """

    def __init__(self, dim: int, num_thresholds: int = 0) -> None:
        self.dim, self.num_thresholds = dim, num_thresholds
        self._lock = threading.RLock()  # held while entries or the lists change
        self.load(np.zeros(0, dtype=np.int64), np.zeros((0, dim + num_thresholds), dtype=np.float32))

    def __len__(self) -> int:
        return len(self._view.ids)

    @property
    def ids(self) -> IntArray:
        return self._view.ids

    @property
    def rows(self) -> Float[Tensor, "n width"]:
        """[entry | thresholds] of all entries, in the order of `ids`; not a copy."""
        return torch.from_numpy(self._view.rows)

    @property
    def mode(self) -> Mode:
        """The default search: "exact" or "approximate"."""
        return "approximate" if len(self) > MOST_EXACT else "exact"

    @property
    def reason(self) -> str:
        exact, lists = f"up to {MOST_EXACT:,} entries, all are compared", self._lists
        if lists is None:
            return exact
        return (
            f"{exact}; an approximate search reads {lists.probes:,} of {lists.num_lists:,} lists and, with stored "
            f"entries as queries, found {100 * lists.recall:.1f} % of the ten best"
        )

    def load(self, ids: IntArray, rows: Floats) -> None:
        """Replace all entries, given with ascending ids; the arrays are not copied."""
        with self._lock:
            self._lists: InvertedLists | None = None
            self._changed = 0  # entries since the lists were made
            self._show(ids, rows)

    def places(self, ids: IntArray) -> IntArray:
        """Return the row of each id, -1 if unknown."""
        return _places(self._view, ids)

    def take(self, ids: IntArray) -> Float[Tensor, "ids width"]:
        """Copy the rows of these ids; unknown ids raise `KeyError`."""
        view = self._view
        places = _places(view, ids)
        if len(ids) and places.min() < 0:
            raise KeyError(f"the store has no entries with ids {preview(ids[places < 0])}")
        return torch.from_numpy(view.rows[places])

    def put(self, ids: IntArray, rows: Floats) -> None:
        """Insert or replace entries. This copies all rows unless the ids are above all others."""
        with self._lock:
            view, order = self._view, np.argsort(ids)
            ids, rows = ids[order], rows[order]
            present = _places(view, ids)
            if self._lists is not None:
                self._lists.drop(ids[present >= 0])
                self._lists.put(ids, rows)
                self._changed += len(ids)
            if not len(view.ids) or (len(ids) and ids[0] > view.ids[-1]):
                # Append entries in spare room, beyond the rows that running searches see.
                first, needed = len(self), len(self) + len(ids)
                if needed > len(self._room.ids):
                    more = int(needed * _GROWTH) - first
                    self._room = _View(
                        np.concatenate([self._view.ids, np.zeros(more, dtype=np.int64)]),
                        np.concatenate([self._view.rows, np.zeros((more, rows.shape[1]), dtype=np.float32)]),
                    )
                self._room.ids[first:needed], self._room.rows[first:needed] = ids, rows
                self._view = _View(self._room.ids[:needed], self._room.rows[:needed])
                return
            new = present < 0
            merged = np.concatenate([view.ids, ids[new]])
            order = np.argsort(merged)
            kept = view.rows.copy()
            kept[present[~new]] = rows[~new]
            if new.any():
                kept = np.concatenate([kept, rows[new]])[order]
            self._show(merged[order], kept)

    def drop(self, ids: IntArray) -> None:
        with self._lock:
            stays = np.ones(len(self), dtype=np.bool_)
            stays[self.places(ids)] = False
            if self._lists is not None:
                self._lists.drop(ids)
                self._changed += len(ids)
            self._show(self._view.ids[stays], self._view.rows[stays])

    def search(
        self,
        queries: Vectors,
        k: int,
        threshold_column: int | None = None,
        mode: Mode | None = None,
    ) -> Neighbours:
        """Find the k entries with the largest query . entry + threshold, on the CPU; see `Store.search`."""
        if mode not in (None, "exact", "approximate"):
            raise ValueError(f'mode must be "exact", "approximate" or None, got {mode!r}')
        flat, shape, view = *entry.queries(queries, self.dim), self._view
        column = entry.column(threshold_column, self.num_thresholds)
        total = len(view.ids)
        k = integer("k", k, minimum=1, maximum=max(total, _MOST))
        if approximate := (mode or self.mode) == "approximate":
            scores, ids = self._best_of_lists(flat, column, min(k, total))
            active = None
        else:
            scores, slots, active = best(flat, *of_column(view.rows, self.dim, column), min(k, total))
            ids, active = torch.from_numpy(view.ids[slots.numpy()]), active.view(shape)
        last = scores[:, -1] if total else torch.full((len(flat),), -math.inf)
        scores = functional.pad(scores, (0, k - scores.shape[1]), value=-math.inf).view(*shape, k)
        ids = functional.pad(ids, (0, k - ids.shape[1]), value=-1).view(*shape, k)
        return Neighbours(ids, scores, Certificate(approximate, k, total, last.view(shape), active))

    def range(self, queries: Vectors, threshold: float, threshold_column: int | None = None) -> Neighbours:
        """Find all entries with query . entry + threshold > `threshold`, padded to the longest answer."""
        flat, shape, view = *entry.queries(queries, self.dim), self._view
        bound = float(threshold) if threshold in (math.inf, -math.inf) else number("threshold", threshold)
        column = entry.column(threshold_column, self.num_thresholds)
        scores, slots, owners, active = above(flat, *of_column(view.rows, self.dim, column), bound)
        order = np.lexsort((-scores, owners))
        ordered = (torch.from_numpy(values[order]) for values in (scores, view.ids[slots], owners))
        all_scores, all_ids = (values.view(*shape, values.shape[1]) for values in padded(*ordered, count=len(flat)))
        counts, last = (all_ids >= 0).sum(dim=-1), torch.full(shape, bound)
        certificate = Certificate(False, counts, len(view.ids), last, torch.from_numpy(active).view(shape))
        return Neighbours(all_ids, all_scores, certificate)

    def _show(self, ids: IntArray, rows: Floats) -> None:
        self._room = _View(ids, rows)  # the view is a prefix of it
        self._view = self._room

    def _best_of_lists(self, queries: Floats, column: int | None, k: int) -> tuple[Tensor, Tensor]:
        with self._lock:
            if self._changed > len(self) // 2:
                self._lists, self._changed = None, 0
            if self._lists is None and len(self):
                self._lists = InvertedLists(*self._view, self.dim)
            if self._lists is None or not len(queries):
                return torch.full((len(queries), k), -math.inf), torch.full((len(queries), k), -1)
            scores, ids = self._lists.best(queries, column, k)
        return torch.from_numpy(scores), torch.from_numpy(ids)


def _places(view: _View, ids: IntArray) -> IntArray:
    if not len(view.ids):
        return np.full(len(ids), -1)
    places = np.minimum(np.searchsorted(view.ids, ids), len(view.ids) - 1)
    return np.where(view.ids[places] == ids, places, -1)
