"""What a store answers: entries by id, searches, statistics. Nothing here writes."""

from __future__ import annotations

import os
import sys
import threading
from collections import Counter
from collections.abc import Sequence

import numpy as np
import torch
from jaxtyping import Float32, Int64
from torch import Tensor

from attnflow._core.checks import Indices, IntArray, integer, preview
from attnflow.knowledge.index import Neighbours
from attnflow.knowledge.store import arguments
from attnflow.knowledge.store.arguments import Vectors
from attnflow.knowledge.store.backend import Backend, Mode
from attnflow.knowledge.store.entry import Entry, StoreStats
from attnflow.knowledge.store.errors import StoreError
from attnflow.knowledge.store.rows import entries


class StoreReader:
    """The reading half of a `Store`; `Store` documents the attributes."""

    def __init__(self, uri: str, name: str, backend: Backend, read_only: bool) -> None:
        self.uri = uri
        self.backend = name
        self.read_only = read_only
        self._backend = backend
        self._write_lock = threading.RLock()
        self._process = os.getpid()
        self._closed = False
        self._revision = 0
        self._behind = True  # what is searched may differ from what is kept

    @property
    def dim(self) -> int:
        """Width of an embedding."""
        return self._backend.dim

    @property
    def num_thresholds(self) -> int:
        """Threshold columns of an entry."""
        return self._backend.num_thresholds

    @property
    def revision(self) -> int:
        """Counts the changes that were made or seen through this object."""
        return self._revision

    def __len__(self) -> int:
        return len(self._open())

    def __contains__(self, key: object) -> bool:
        number = integer("id", key, minimum=-sys.maxsize)
        return 0 <= number < 2**63 and bool(self._open().holds(np.array([number]))[0])

    def get(self, ids: Indices) -> list[Entry]:
        """Entries in the order of `ids`.

        Raises:
            KeyError: an id is unknown.
        """
        backend, keys = self._open(), arguments.identifiers("ids", ids)
        held = {entry.id: entry for entry in entries(backend.read(keys), self.dim)}
        _refuse_unknown([key for key in keys.tolist() if key not in held])
        return [held[key] for key in keys.tolist()]

    def ids(self) -> Int64[Tensor, " n"]:
        """The ids of all entries, ascending."""
        return torch.from_numpy(np.sort(self._open().ids()))

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
        backend = self._open()
        return torch.from_numpy(backend.vectors(None if ids is None else self._known(backend, ids)))

    def search(
        self, query: Vectors, k: int, *, threshold_column: int | None = None, mode: Mode | None = None
    ) -> Neighbours:
        """The k entries with the highest scores, q . e + threshold (knowledge, eq. 8 with the projections folded).

        Args:
            query: [n, dim], or [dim] for a single one.
            k: how many.
            threshold_column: which threshold is added; none by default.
            mode: "exact" or "approximate" for this search alone.

        Returns:
            Ids and scores, [n, k] or [k].
        """
        backend = self._open()
        queries = arguments.queries(query, self.dim)
        column = arguments.column(threshold_column, self.num_thresholds)
        return backend.search(queries, integer("k", k, minimum=1), column, mode)

    def range(
        self, query: Vectors, threshold: float, *, threshold_column: int | None = None, mode: Mode | None = None
    ) -> Neighbours:
        """All entries with q . e + threshold > a score; the answer is as wide as the longest.

        Args:
            query: see `search`.
            threshold: the score.
            threshold_column: see `search`.
            mode: see `search`.
        """
        backend = self._open()
        queries = arguments.queries(query, self.dim)
        column = arguments.column(threshold_column, self.num_thresholds)
        return backend.range(queries, arguments.score("threshold", threshold), column, mode)

    def recall(self, sample: Vectors, k: int = 32, *, threshold_column: int | None = None) -> float:
        """Measured share of the true best k entries that searches of sample queries [n, dim] find."""
        backend = self._open()
        column = arguments.column(threshold_column, self.num_thresholds)
        queries = arguments.queries(sample, self.dim)
        if not queries.numel():
            raise ValueError("recall is measured on at least one query, got none")
        return backend.recall(queries, integer("k", k, minimum=1), column)

    def calibrate(self, sample: Vectors, k: int = 32, *, threshold_column: int | None = None) -> None:
        """Tune approximate searches to reach `target_recall` on sample queries [n, dim], until the store is closed."""
        column = arguments.column(threshold_column, self.num_thresholds)
        with self._write_lock:
            self._open().calibrate(arguments.queries(sample, self.dim), integer("k", k, minimum=1), column)

    def snapshots(self) -> list[str]:
        """Names of snapshots, oldest first."""
        return self._open().snapshots()

    def stats(self) -> StoreStats:
        """The store in numbers."""
        backend = self._open()
        summary, encoders = backend.summary(), Counter[str]()
        for encoder, count in summary.encoders.items():
            encoders[encoder or ""] += count
        return StoreStats(
            uri=self.uri,
            backend=self.backend,
            count=len(backend),
            dim=self.dim,
            num_thresholds=self.num_thresholds,
            bytes_on_disk=summary.bytes_on_disk,
            mode=backend.mode,
            reason=backend.reason,
            versions=summary.versions,
            encoders=dict(encoders),
            snapshots=tuple(backend.snapshots()),
        )

    def refresh(self) -> None:
        """See what another process has written since this store was opened or refreshed."""
        self._open()
        with self._write_lock:
            self._behind = True
            self._revision += 1
            self._follow()

    def close(self) -> None:
        """Let go of files and of the right to write; nothing is lost without it."""
        if not self._closed:
            self._closed = True
            if os.getpid() == self._process:
                self._backend.close()

    def __deepcopy__(self, memo: object) -> StoreReader:
        """The same store: a copy of a model that reads it reads it, too."""
        return self

    def __repr__(self) -> str:
        return f"Store({self.uri!r}, backend={self.backend!r}, dim={self.dim}, num_thresholds={self.num_thresholds})"

    def _open(self) -> Backend:
        """The backend, which searches what it keeps."""
        if self._closed:
            raise StoreError(f"the store {self.uri} is closed: open it again")
        if os.getpid() != self._process:
            raise StoreError(f"the store {self.uri} was opened by another process before a fork: open it here again")
        if self._behind:
            with self._write_lock:
                self._follow()
        return self._backend

    def _follow(self) -> None:
        if self._behind:
            self._backend.refresh()  # a write that was cut short may have been committed all the same
            self._behind = False

    def _known(self, backend: Backend, ids: Indices) -> IntArray:
        keys = arguments.identifiers("ids", ids)
        _refuse_unknown(keys[~backend.holds(keys)].tolist())
        return keys


def _refuse_unknown(keys: Sequence[int]) -> None:
    if keys:
        raise KeyError(f"the store has no entries with ids {preview(keys)}")
