"""Search of the best rows: exact, by all scores block by block; or approximate, by the inverted lists of faiss.

Products are NumPy's: its matrix-vector product ran at 15 to 22 GB/s on one core where PyTorch's ran at 8.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, Final

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from attnflow._core.checks import IntArray
from attnflow._core.errors import MissingExtra

Floats = npt.NDArray[np.float32]

_SCORES: Final = 1 << 21  # scores held at once: 8 MB
_QUERIES: Final = 256
_ROWS: Final = 1 << 16
RECALL: Final = 0.99  # of the ten best, which the number of lists that are read is chosen for
_K: Final = 10
_SAMPLE: Final = 256  # entries whose neighbours are looked for to measure it
_POINTS: Final = 64  # entries per list that centroids are computed from
_LEAST: Final = 8  # lists that a query reads


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
    """Return the scores above a bound with their rows and queries, unordered, and the active count of each query."""
    blocks = [(np.zeros(0, np.float32), np.zeros(0, np.int64), np.zeros(0, np.int64))]
    active = np.zeros(len(queries), dtype=np.int64)
    for number, part in enumerate(_chunks(queries)):
        first = number * _QUERIES
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
        """Number of lists."""
        return len(self._centroids)

    def put(self, ids: IntArray, rows: Floats) -> None:
        """Add rows with new ids."""
        for start in range(0, len(ids), 1 << 16):
            block, keys = np.ascontiguousarray(rows[start : start + (1 << 16)]), ids[start : start + (1 << 16)].copy()
            homes = self._nearest.search(self._points(block), 1)[1][:, 0].copy()
            pointers = (self._faiss.swig_ptr(values) for values in (block, keys, homes))
            self._index.add_core(len(keys), *pointers)

    def drop(self, ids: IntArray) -> None:
        """Remove rows that are there."""
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
    """Import faiss on first use."""
    try:
        import faiss as package
    except ImportError as error:
        raise MissingExtra("faiss", "knowledge", "approximate search") from error
    return package
