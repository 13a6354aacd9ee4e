"""The index of a store on this machine: all vectors in memory, which rows they are, and which content they show."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Generator
from contextlib import contextmanager
from dataclasses import replace

import numpy as np
import torch
from torch import Tensor

from attnflow._core.checks import IntArray
from attnflow.knowledge.index import EntryIndex, Neighbours
from attnflow.knowledge.index.readers_writer import ReadersWriter
from attnflow.knowledge.store.backend import Mode, SearchMode
from attnflow.knowledge.store.errors import StoreError
from attnflow.knowledge.store.rows import Flags, Floats, Rows, Stamped


class CachedIndex(ABC):
    """The searching half of a `Backend` on this machine; a subclass keeps the rows.

    A batch becomes visible to searches as a whole, or not at all. Slot i of the index holds row `_ids[i]`; `_slots` is
    the way back.
    """

    def __init__(self, dim: int, num_thresholds: int, search: SearchMode, target_recall: float) -> None:
        self.dim, self.num_thresholds = dim, num_thresholds
        self._index = EntryIndex(dim, num_thresholds, search=search, target_recall=target_recall)
        self._ids = np.zeros(0, dtype=np.int64)  # as many as there are rows, with room for more
        self._updated = np.zeros(0, dtype=np.int64)
        self._slots: dict[int, int] = {}
        self._lock = ReadersWriter()
        self._whole = True  # not in the middle of a change

    @abstractmethod
    def stamps(self) -> tuple[IntArray, IntArray]:
        """Ids of all kept rows, and when each was updated."""

    @abstractmethod
    def load(self, ids: IntArray | None = None) -> Stamped:
        """What a search needs of all kept rows, or of those of these that exist."""

    @abstractmethod
    def _write(self, rows: Rows) -> None:
        """Keep rows."""

    @abstractmethod
    def _delete(self, ids: IntArray) -> None:
        """Keep rows no longer."""

    @abstractmethod
    def _restore(self, name: str) -> None:
        """Keep the rows of a snapshot in place of all others."""

    @abstractmethod
    def _refresh(self) -> None:
        """See what others have kept."""

    @property
    def mode(self) -> Mode:
        """What the index does now."""
        return self._index.mode

    @property
    def reason(self) -> str:
        """Why, as the index says."""
        return self._index.reason

    def __len__(self) -> int:
        return len(self._slots)

    def ids(self) -> IntArray:
        """In the order of slots."""
        with self._reading():
            return self._ids[: len(self._slots)].copy()

    def holds(self, ids: IntArray) -> Flags:
        """By the dictionary."""
        return np.fromiter((key in self._slots for key in ids.tolist()), dtype=np.bool_, count=len(ids))

    def vectors(self, ids: IntArray | None = None) -> Floats:
        """A copy of rows."""
        with self._reading():
            slots = self._ids[: len(self)].argsort() if ids is None else self._slots_of(ids)
            return self._index.rows.numpy()[slots]

    def write(self, rows: Rows) -> None:
        """Keep rows, then show them: new ones get slots at the end, the others have theirs."""
        self._write(rows)
        self._show(Stamped(rows.ids, rows.updated, rows.vectors))

    def delete(self, ids: IntArray) -> None:
        """Keep rows no longer, then hide them: the last rows move into the holes."""
        self._delete(ids)
        self._show(None, ids)

    def restore(self, name: str) -> None:
        """The rows of a snapshot, then the index of them."""
        self._restore(name)
        self._synchronise()

    def refresh(self) -> None:
        """What others have kept, then the index of it."""
        self._refresh()
        self._synchronise()

    def search(self, queries: Tensor, k: int, threshold_column: int | None, mode: Mode | None) -> Neighbours:
        """By the index; slots become ids while nothing moves."""
        with self._reading():
            return self._named(self._index.search(queries, k, threshold_column=threshold_column, mode=mode))

    def range(self, queries: Tensor, threshold: float, threshold_column: int | None, mode: Mode | None) -> Neighbours:
        """Likewise."""
        with self._reading():
            return self._named(self._index.range(queries, threshold, threshold_column=threshold_column, mode=mode))

    def recall(self, queries: Tensor, k: int, threshold_column: int | None) -> float:
        """Of the index."""
        with self._reading():
            return self._index.recall(queries, k, threshold_column)

    def calibrate(self, queries: Tensor, k: int, threshold_column: int | None) -> None:
        """Of the index."""
        with self._lock.writing():
            self._index.calibrate(queries, k, threshold_column)

    def reindex(self) -> None:
        """From the kept rows."""
        loaded = self.load()
        with self._changing():
            self._index.build(torch.from_numpy(loaded.vectors))
            self._ids, self._updated = loaded.ids.copy(), loaded.updated.copy()
            self._slots = dict(zip(loaded.ids.tolist(), range(len(loaded.ids)), strict=True))

    def _synchronise(self) -> None:
        """Fetch what differs: an id with another time of update is another content."""
        if not len(self) or not self._whole:
            return self.reindex()
        ids, updated = self.stamps()
        held, shown = self._ids[: len(self)], self._updated[: len(self)]
        common, here, there = np.intersect1d(held, ids, assume_unique=True, return_indices=True)
        changed = np.setdiff1d(ids, common[shown[here] == updated[there]], assume_unique=True)
        if len(changed) > len(ids) // 2:
            return self.reindex()
        return self._show(self.load(changed), np.setdiff1d(held, common, assume_unique=True))

    def _show(self, rows: Stamped | None, gone: IntArray | None = None) -> None:
        """One change of the index: rows that are gone, and rows that are new or different."""
        with self._changing():
            if gone is not None and len(gone):
                self._drop(gone)
            if rows is not None:
                self._put(rows)

    @contextmanager
    def _reading(self) -> Generator[None]:
        with self._lock.reading():
            if not self._whole:
                raise StoreError("a change of the index was interrupted a moment ago: call again")
            yield

    @contextmanager
    def _changing(self) -> Generator[None]:
        """Alone; a change that was cut short, as by an interrupt, is known by `_whole`: only a new build repairs it."""
        with self._lock.writing():
            self._whole = False
            yield
            self._whole = True

    def _put(self, rows: Stamped) -> None:
        present = self.holds(rows.ids)
        vectors = torch.from_numpy(rows.vectors)
        if present.any():
            slots = self._slots_of(rows.ids[present])
            self._index.replace(torch.from_numpy(slots), vectors[torch.from_numpy(present)])
            self._updated[slots] = rows.updated[present]
        if not present.all():
            ids = rows.ids[~present]
            slots = np.arange(len(self), len(self) + len(ids))
            self._index.add(vectors[torch.from_numpy(~present)])
            self._reserve(len(self) + len(ids))
            self._ids[slots], self._updated[slots] = ids, rows.updated[~present]
            self._slots.update(zip(ids.tolist(), slots.tolist(), strict=True))

    def _drop(self, ids: IntArray) -> None:
        sources, targets = self._index.remove(torch.from_numpy(self._slots_of(ids))).numpy().T
        for key in ids.tolist():
            del self._slots[key]
        self._ids[targets], self._updated[targets] = self._ids[sources], self._updated[sources]
        self._slots.update(zip(self._ids[targets].tolist(), targets.tolist(), strict=True))

    def _reserve(self, rows: int) -> None:
        if rows > len(self._ids):
            more = np.zeros(max(rows, len(self._ids) * 3 // 2) - len(self._ids), dtype=np.int64)
            self._ids, self._updated = np.concatenate([self._ids, more]), np.concatenate([self._updated, more])

    def _slots_of(self, ids: IntArray) -> IntArray:
        return np.fromiter((self._slots[key] for key in ids.tolist()), dtype=np.int64, count=len(ids))

    def _named(self, neighbours: Neighbours) -> Neighbours:
        """With ids in place of slots."""
        slots = neighbours.ids
        ids = torch.from_numpy(self._ids)[slots.clamp(min=0)] if len(self) else torch.full_like(slots, -1)
        return replace(neighbours, ids=ids.masked_fill(slots < 0, -1))
