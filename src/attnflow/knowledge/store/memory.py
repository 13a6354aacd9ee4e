"""Rows in the memory of this process: for experiments and tests. Same semantics as on disk, gone at the end."""

from __future__ import annotations

import threading
from collections import Counter
from typing import NamedTuple

import numpy as np

from attnflow._core.checks import IntArray
from attnflow.knowledge.store.backend import SearchMode, Summary
from attnflow.knowledge.store.cached_index import CachedIndex
from attnflow.knowledge.store.rows import Floats, Rows, Stamped


class _Row(NamedTuple):
    vector: Floats
    text: str | None
    source: str | None
    encoder: str | None
    version: int
    created: int
    updated: int


class MemoryBackend(CachedIndex):
    """A dictionary of rows; a snapshot is a copy of the dictionary, and rows are never changed in place."""

    def __init__(self, dim: int, num_thresholds: int, search: SearchMode, target_recall: float) -> None:
        super().__init__(dim, num_thresholds, search, target_recall)
        self.next_id = 0
        self._rows: dict[int, _Row] = {}
        self._snapshots: dict[str, dict[int, _Row]] = {}
        self._rows_lock = threading.Lock()

    def _write(self, rows: Rows) -> None:
        """Insert or replace."""
        columns = (rows.texts, rows.sources, rows.encoders, rows.versions, rows.created, rows.updated)
        vectors = rows.vectors.copy()
        fresh = map(_Row, vectors, *(column.tolist() for column in columns))
        prepared = dict(zip(rows.ids.tolist(), fresh, strict=True))
        with self._rows_lock:
            self._rows.update(prepared)
            self.next_id = max(self.next_id, int(rows.ids.max(initial=-1)) + 1)

    def _delete(self, ids: IntArray) -> None:
        """Drop rows."""
        with self._rows_lock:
            for key in ids.tolist():
                del self._rows[key]

    def read(self, ids: IntArray) -> Rows:
        """Whole rows."""
        with self._rows_lock:
            held = {key: self._rows[key] for key in ids.tolist() if key in self._rows}
        rows = list(held.values())
        return Rows(
            ids=np.array(list(held), dtype=np.int64),
            vectors=self._matrix(rows),
            texts=np.array([row.text for row in rows], dtype=object),
            sources=np.array([row.source for row in rows], dtype=object),
            encoders=np.array([row.encoder for row in rows], dtype=object),
            versions=np.array([row.version for row in rows], dtype=np.int64),
            created=np.array([row.created for row in rows], dtype=np.int64),
            updated=np.array([row.updated for row in rows], dtype=np.int64),
        )

    def stamps(self) -> tuple[IntArray, IntArray]:
        """Ids and times of update."""
        with self._rows_lock:
            held = dict(self._rows)
        return np.array(list(held), dtype=np.int64), np.array([row.updated for row in held.values()], dtype=np.int64)

    def load(self, ids: IntArray | None = None) -> Stamped:
        """Ids, times and vectors."""
        with self._rows_lock:
            held = dict(self._rows) if ids is None else {k: self._rows[k] for k in ids.tolist() if k in self._rows}
        updated = np.array([row.updated for row in held.values()], dtype=np.int64)
        return Stamped(np.array(list(held), dtype=np.int64), updated, self._matrix(list(held.values())))

    def snapshot(self, name: str) -> None:
        """A copy of the dictionary."""
        with self._rows_lock:
            self._snapshots[name] = dict(self._rows)

    def snapshots(self) -> list[str]:
        """In the order in which they were made."""
        return list(self._snapshots)

    def _restore(self, name: str) -> None:
        """Rows as they were."""
        with self._rows_lock:
            self._rows = dict(self._snapshots[name])

    def drop_snapshot(self, name: str) -> None:
        """Forget one."""
        del self._snapshots[name]

    def _refresh(self) -> None:
        """Nobody else writes here."""

    def summary(self) -> Summary:
        """Counts by version and encoder."""
        with self._rows_lock:
            held = list(self._rows.values())
        return Summary(dict(Counter(row.version for row in held)), dict(Counter(row.encoder for row in held)), 0)

    def close(self) -> None:
        """Forget all."""
        self._rows, self._snapshots = {}, {}

    def _matrix(self, rows: list[_Row]) -> Floats:
        width = self.dim + self.num_thresholds
        return np.stack([row.vector for row in rows]) if rows else np.zeros((0, width), dtype=np.float32)
