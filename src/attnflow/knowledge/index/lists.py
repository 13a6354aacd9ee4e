"""Approximate search: entries in lists of near ones (faiss), of which a query reads those that promise most."""

from __future__ import annotations

from typing import Any, Final

import numpy as np

from attnflow._core.checks import IntArray
from attnflow._core.errors import MissingExtra
from attnflow.knowledge.index.exact import Floats, best, of_column

RECALL: Final = 0.99  # of the ten best, which the number of lists that are read is chosen for
_K: Final = 10
_SAMPLE: Final = 256  # entries whose neighbours are looked for to measure it
_POINTS: Final = 64  # entries per list that centroids are computed from
_LEAST: Final = 8  # lists that a query reads


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
