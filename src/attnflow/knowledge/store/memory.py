"""Rows in the memory of this process: for experiments and tests. Same semantics as on disk, gone at the end."""

from __future__ import annotations

import threading
from collections import Counter
from dataclasses import replace
from typing import Any

import numpy as np

from attnflow._core.checks import IntArray
from attnflow.knowledge.store.cached_index import CachedIndex
from attnflow.knowledge.store.check import StoreCheck
from attnflow.knowledge.store.entry import Rows, Stamped, Summary, column
from attnflow.knowledge.store.metadata import Metadata, Wanted

_Record = dict[str, Any]


class MemoryBackend(CachedIndex):
    """A dictionary of rows; a snapshot is a copy of the dictionary, and rows are never changed in place."""

    def __init__(self, stored: Metadata, wanted: Wanted) -> None:
        super().__init__(stored, wanted)
        self.next_id = self.clock = 0
        self._rows: dict[int, _Record] = {}
        self._snapshots: dict[str, dict[int, _Record]] = {}
        self._rows_lock = threading.Lock()

    def read(self, ids: IntArray) -> Rows:
        """Whole rows."""
        return Rows.of(self._held(ids), self.dim + self.num_thresholds)

    def stamps(self) -> tuple[IntArray, IntArray, IntArray]:
        """Ids and times of update; memory needs no checksums."""
        held = self._held()
        return column(held, "id"), column(held, "updated"), np.zeros(len(held), dtype=np.int64)

    def load(self, ids: IntArray | None = None) -> Stamped:
        """Ids, times and vectors."""
        rows = Rows.of(self._held(ids), self.dim + self.num_thresholds)
        return Stamped(rows.id, rows.updated, rows.vector, np.zeros(len(rows), dtype=np.int64))

    def snapshot(self, name: str) -> None:
        """A copy of the dictionary."""
        with self._rows_lock:
            self._snapshots[name] = dict(self._rows)

    def snapshots(self) -> list[str]:
        """In the order in which they were made."""
        return list(self._snapshots)

    def drop_snapshot(self, name: str) -> None:
        """Forget one."""
        del self._snapshots[name]

    def summary(self) -> Summary:
        """Counts by version and encoder."""
        held = self._held()
        return Summary(Counter(row["version"] for row in held), Counter(row["encoder"] for row in held), 0)

    def verify(self, uri: str) -> StoreCheck:
        """Nothing is on a disk."""
        return StoreCheck(uri, len(self))

    def compact(self) -> None:
        """There are no files."""

    def close(self) -> None:
        """Forget all."""
        self._rows, self._snapshots = {}, {}

    def _write(self, rows: Rows) -> IntArray:
        fresh = {record["id"]: record for record in replace(rows, vector=rows.vector.copy()).records()}
        with self._rows_lock:
            self._rows.update(fresh)
            self.next_id = max(self.next_id, max(fresh, default=-1) + 1)
            self.clock = int(rows.updated.max())
        return np.zeros(len(rows), dtype=np.int64)

    def _delete(self, ids: IntArray) -> None:
        with self._rows_lock:
            for key in ids.tolist():
                del self._rows[key]

    def _restore(self, name: str) -> None:
        with self._rows_lock:
            self._rows = dict(self._snapshots[name])

    def _refresh(self) -> None:
        """Nobody else writes here."""

    def _held(self, ids: IntArray | None = None) -> list[_Record]:
        with self._rows_lock:
            if ids is None:
                return list(self._rows.values())
            return [self._rows[key] for key in ids.tolist() if key in self._rows]
