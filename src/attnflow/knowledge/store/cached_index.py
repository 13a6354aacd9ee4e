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
from attnflow.knowledge.index import EntryIndex, Mode, Neighbours
from attnflow.knowledge.index.exact import GrowingMatrix
from attnflow.knowledge.index.readers_writer import ReadersWriter
from attnflow.knowledge.store.entry import Flags, Floats, Rows, Stamped
from attnflow.knowledge.store.errors import StoreError
from attnflow.knowledge.store.metadata import Metadata, Wanted


class CachedIndex(ABC):
    """The searching half of a backend on this machine; a subclass keeps the rows.

    A batch becomes visible to searches as a whole, or not at all. Slot i of the index holds the row whose id and time
    of update are `_labels.used[i]`, with its checksum; `_slots` is the way back.
    """

    def __init__(self, stored: Metadata, wanted: Wanted) -> None:
        self.dim, self.num_thresholds = stored.dim, stored.num_thresholds
        self._index = EntryIndex(self.dim, self.num_thresholds, wanted.search, wanted.target_recall)
        self._labels = GrowingMatrix(3, torch.int64)
        self._slots: dict[int, int] = {}
        self._lock = ReadersWriter()
        self._whole = True  # not in the middle of a change

    @abstractmethod
    def stamps(self) -> tuple[IntArray, IntArray, IntArray]:
        """Ids of all kept rows, when each was updated, and its checksum (0 where none is kept)."""

    @abstractmethod
    def load(self, ids: IntArray | None = None) -> Stamped:
        """What a search needs of all kept rows, or of those of these that exist."""

    @abstractmethod
    def _write(self, rows: Rows) -> IntArray:
        """Keep rows; returns their checksums."""

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
            return self._labels.used[:, 0].numpy().copy()

    def holds(self, ids: IntArray) -> Flags:
        """Which of these ids there are."""
        return np.fromiter((key in self._slots for key in ids.tolist()), dtype=np.bool_, count=len(ids))

    def vectors(self, ids: IntArray | None = None) -> Floats:
        """[embedding | thresholds] of rows in the order of `ids`; of all at one moment, by ascending id; a copy."""
        with self._reading():
            slots = self._labels.used[:, 0].argsort() if ids is None else self._slots_of(ids)
            return self._index.rows[slots].numpy()

    def write(self, rows: Rows) -> None:
        """Keep rows, then show them: new ones get slots at the end, the others have theirs."""
        checks = self._write(rows)
        self._show(Stamped(rows.id, rows.updated, rows.vector, checks))

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
            return self._named(self._index.search(queries, k, threshold_column, mode))

    def range(self, queries: Tensor, threshold: float, threshold_column: int | None, mode: Mode | None) -> Neighbours:
        """Likewise."""
        with self._reading():
            return self._named(self._index.range(queries, threshold, threshold_column, mode))

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
            self._labels.set(_labels(loaded))
            self._slots = dict(zip(loaded.ids.tolist(), range(len(loaded.ids)), strict=True))

    def _synchronise(self) -> None:
        """Fetch what differs: an id with another time of update, or another checksum, is another content."""
        if not len(self) or not self._whole:
            return self.reindex()
        ids, updated, checks = self.stamps()
        held, *shown = self._labels.used.numpy().T
        common, here, there = np.intersect1d(held, ids, assume_unique=True, return_indices=True)
        same = (shown[0][here] == updated[there]) & (shown[1][here] == checks[there])
        changed = np.setdiff1d(ids, common[same], assume_unique=True)
        if len(changed) > len(ids) // 2:
            return self.reindex()
        return self._show(self.load(changed), np.setdiff1d(held, common, assume_unique=True))

    def _show(self, rows: Stamped | None, gone: IntArray | None = None) -> None:
        """One change of the index: rows that are gone, and rows that are new or different."""
        with self._changing():
            if gone is not None and len(gone):
                slots = self._slots_of(gone)
                moved = self._index.remove(slots)[:, 1]
                self._labels.remove(slots)
                for key in gone.tolist():
                    del self._slots[key]
                self._slots.update(zip(self._labels.used[moved, 0].tolist(), moved.tolist(), strict=True))
            if rows is None:
                return
            present = torch.from_numpy(self.holds(rows.ids))
            vectors, labels = torch.from_numpy(rows.vectors), _labels(rows)
            if bool(present.any()):
                slots = self._slots_of(labels[present, 0].numpy())
                self._index.replace(slots, vectors[present])
                self._labels.used[slots] = labels[present]
            if not bool(present.all()):
                slots, new = self._index.add(vectors[~present]), labels[~present]
                self._labels.add(new)
                self._slots.update(zip(new[:, 0].tolist(), slots.tolist(), strict=True))

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

    def _slots_of(self, ids: IntArray) -> Tensor:
        slots = (self._slots[key] for key in ids.tolist())
        return torch.from_numpy(np.fromiter(slots, dtype=np.int64, count=len(ids)))

    def _named(self, neighbours: Neighbours) -> Neighbours:
        """With ids in place of slots."""
        slots = neighbours.ids
        ids = self._labels.used[:, 0][slots.clamp(min=0)] if len(self) else slots
        return replace(neighbours, ids=ids.masked_fill(slots < 0, -1))


def _labels(rows: Stamped) -> Tensor:
    """Id, time of update and checksum of each row, [n, 3]."""
    return torch.from_numpy(np.stack([rows.ids, rows.updated, rows.checks], axis=1))
