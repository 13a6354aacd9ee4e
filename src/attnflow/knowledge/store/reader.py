"""What a store answers: entries by id, searches, statistics. Nothing here writes."""

from __future__ import annotations

import os
import sys
import threading
from collections.abc import Sequence

import numpy as np
import torch
from jaxtyping import Float32, Int64
from torch import Tensor

from attnflow._core.checks import Indices, IntArray, integer, preview
from attnflow.knowledge.store import arguments
from attnflow.knowledge.store.arguments import Vectors
from attnflow.knowledge.store.engine import Engine, Mode, Searcher
from attnflow.knowledge.store.entry import Entry, Found, StoreStats
from attnflow.knowledge.store.errors import StoreError
from attnflow.knowledge.store.rows import entries


class StoreReader:
    """The reading half of a `Store`; `Store` documents the attributes."""

    def __init__(self, uri: str, backend: str, engine: Engine, searcher: Searcher, read_only: bool) -> None:
        self.uri = uri
        self.backend = backend
        self.read_only = read_only
        self._engine = engine
        self._searcher = searcher
        self._write_lock = threading.RLock()
        self._process = os.getpid()
        self._closed = False
        self._behind = True  # the index has to follow the engine before it is read

    @property
    def dim(self) -> int:
        """Width of an embedding."""
        return self._engine.dim

    @property
    def num_thresholds(self) -> int:
        """Threshold columns of an entry."""
        return self._engine.num_thresholds

    def __len__(self) -> int:
        return len(self._reader())

    def __contains__(self, key: object) -> bool:
        number = integer("id", key, minimum=-sys.maxsize)
        return 0 <= number < 2**63 and bool(self._reader().holds(np.array([number]))[0])

    def get(self, ids: Indices) -> list[Entry]:
        """Entries in the order of `ids`.

        Raises:
            KeyError: an id is unknown.
        """
        self._reader()
        keys = arguments.identifiers("ids", ids)
        found = {entry.id: entry for entry in entries(self._engine.read(keys), self.dim)}
        _refuse_unknown([key for key in keys.tolist() if key not in found])
        return [found[key] for key in keys.tolist()]

    def ids(self) -> Int64[Tensor, " n"]:
        """The ids of all entries, ascending."""
        return torch.from_numpy(np.sort(self._reader().ids()))

    def vectors(self, ids: Indices | None = None) -> Float32[Tensor, "n dim"]:
        """Embeddings, in the order of `ids`; of all entries by default, in the order of `ids()`.

        Raises:
            KeyError: an id is unknown.
        """
        return self.rows(ids)[:, : self.dim]

    def thresholds(self, ids: Indices | None = None) -> Float32[Tensor, "n num_thresholds"]:
        """Thresholds, in the order of `ids`; of all entries by default, in the order of `ids()`.

        Raises:
            KeyError: an id is unknown.
        """
        return self.rows(ids)[:, self.dim :]

    def rows(self, ids: Indices | None = None) -> Float32[Tensor, "n width"]:
        """[embedding | thresholds] of the same moment, in the order of `ids`; of all entries by default.

        Raises:
            KeyError: an id is unknown.
        """
        searcher = self._reader()
        return torch.from_numpy(searcher.vectors(None if ids is None else self._known(searcher, ids)))

    def search(self, query: Vectors, k: int, *, threshold_column: int | None = None, mode: Mode | None = None) -> Found:
        """The k entries with the highest scores, q . e + threshold (knowledge, eq. 8 with the projections folded).

        Args:
            query: [n, dim], or [dim] for a single one.
            k: how many.
            threshold_column: which threshold is added; none by default.
            mode: "exact" or "approximate" for this search alone.

        Returns:
            Ids and scores, [n, k] or [k].
        """
        searcher = self._reader()
        queries = arguments.queries(query, self.dim)
        column = arguments.column(threshold_column, self.num_thresholds)
        return searcher.search(queries, integer("k", k, minimum=1), column, mode)

    def range(
        self, query: Vectors, threshold: float, *, threshold_column: int | None = None, mode: Mode | None = None
    ) -> Found:
        """All entries with q . e + threshold > a score; the answer is as wide as the longest.

        Args:
            query: see `search`.
            threshold: the score.
            threshold_column: see `search`.
            mode: see `search`.
        """
        searcher = self._reader()
        queries = arguments.queries(query, self.dim)
        column = arguments.column(threshold_column, self.num_thresholds)
        return searcher.range(queries, arguments.score("threshold", threshold), column, mode)

    def recall(self, sample: Vectors, k: int = 32, *, threshold_column: int | None = None) -> float:
        """Measured share of the true best k entries that searches of sample queries [n, dim] find."""
        searcher = self._reader()
        column = arguments.column(threshold_column, self.num_thresholds)
        queries = arguments.queries(sample, self.dim)
        if not queries.numel():
            raise ValueError("recall is measured on at least one query, got none")
        return searcher.recall(queries, integer("k", k, minimum=1), column)

    def calibrate(self, sample: Vectors, k: int = 32, *, threshold_column: int | None = None) -> None:
        """Tune approximate searches to reach `target_recall` on sample queries [n, dim], until the store is closed."""
        column = arguments.column(threshold_column, self.num_thresholds)
        with self._write_lock:
            self._reader().calibrate(arguments.queries(sample, self.dim), integer("k", k, minimum=1), column)

    def snapshots(self) -> list[str]:
        """Names of snapshots, oldest first."""
        self._reader()
        return self._engine.snapshots()

    def stats(self) -> StoreStats:
        """The store in numbers."""
        searcher = self._reader()
        summary = self._engine.summary()
        return StoreStats(
            uri=self.uri,
            backend=self.backend,
            count=len(searcher),
            dim=self.dim,
            num_thresholds=self.num_thresholds,
            bytes_on_disk=summary.bytes_on_disk,
            mode=searcher.mode,
            reason=searcher.reason,
            versions=summary.versions,
            encoders=summary.encoders,
            snapshots=self._engine.snapshots(),
        )

    def refresh(self) -> None:
        """See what another process has written since this store was opened or refreshed."""
        self._reader()
        with self._write_lock:
            self._behind = True
            self._follow()

    def close(self) -> None:
        """Let go of files and of the right to write; nothing is lost without it."""
        if not self._closed:
            self._closed = True
            if os.getpid() == self._process:
                self._engine.close()

    def __repr__(self) -> str:
        return f"Store({self.uri!r}, backend={self.backend!r}, dim={self.dim}, num_thresholds={self.num_thresholds})"

    def _reader(self) -> Searcher:
        """The index, equal to the engine."""
        if self._closed:
            raise StoreError(f"the store {self.uri} is closed: open it again")
        if os.getpid() != self._process:
            raise StoreError(f"the store {self.uri} was opened by another process before a fork: open it here again")
        if self._behind:
            with self._write_lock:
                self._follow()
        return self._searcher

    def _follow(self) -> None:
        if self._behind:
            self._engine.refresh()  # a write that was cut short may have been committed all the same
            self._searcher.synchronise()
            self._behind = False

    def _known(self, searcher: Searcher, ids: Indices) -> IntArray:
        keys = arguments.identifiers("ids", ids)
        _refuse_unknown(keys[~searcher.holds(keys)].tolist())
        return keys


def _refuse_unknown(keys: Sequence[int]) -> None:
    if keys:
        raise KeyError(f"the store has no entries with ids {preview(keys)}")
