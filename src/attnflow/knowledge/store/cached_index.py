"""The index of a store on this machine: all vectors in memory, which rows they are, and which content they show."""

from __future__ import annotations

from collections.abc import Generator
from contextlib import contextmanager

import numpy as np
import torch
from torch import Tensor

from attnflow._core.checks import IntArray
from attnflow.knowledge.index import EntryIndex, Hits
from attnflow.knowledge.index.readers_writer import ReadersWriter
from attnflow.knowledge.store.engine import Engine, Mode, SearchMode
from attnflow.knowledge.store.entry import Found
from attnflow.knowledge.store.errors import StoreError
from attnflow.knowledge.store.rows import Flags, Floats, Rows, Stamped


class HotIndex:
    """A `Searcher` that holds all vectors. A batch becomes visible to searches as a whole, or not at all.

    Slot i of the index holds row `_ids[i]`; `_slots` is the way back.
    """

    def __init__(self, engine: Engine, search: SearchMode, target_recall: float) -> None:
        self._engine = engine
        self._index = EntryIndex(engine.dim, engine.num_thresholds, search=search, target_recall=target_recall)
        self._ids = np.zeros(0, dtype=np.int64)  # as many as there are rows, with room for more
        self._updated = np.zeros(0, dtype=np.int64)
        self._slots: dict[int, int] = {}
        self._lock = ReadersWriter()
        self._whole = True  # not in the middle of a change

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

    def put(self, rows: Rows) -> None:
        """Rows that are new get slots at the end, the others keep theirs."""
        with self._changing():
            self._put(Stamped(rows.ids, rows.updated, rows.vectors))

    def drop(self, ids: IntArray) -> None:
        """The last rows move into the holes."""
        with self._changing():
            self._drop(ids)

    def synchronise(self) -> None:
        """Fetch what differs: an id with another time of update is another content."""
        if not len(self) or not self._whole:
            return self._build(self._engine.load())
        ids, updated = self._engine.stamps()
        held, shown = self._ids[: len(self)], self._updated[: len(self)]
        common, here, there = np.intersect1d(held, ids, assume_unique=True, return_indices=True)
        changed = np.setdiff1d(ids, common[shown[here] == updated[there]], assume_unique=True)
        if len(changed) > len(ids) // 2:
            return self._build(self._engine.load())
        fresh = self._engine.load(changed)
        with self._changing():
            self._drop(np.setdiff1d(held, common, assume_unique=True))
            self._put(fresh)
        return None

    def search(self, queries: Tensor, k: int, threshold_column: int | None, mode: Mode | None) -> Found:
        """By the index; slots become ids while nothing moves."""
        with self._reading():
            return self._found(self._index.search(queries, k, threshold_column=threshold_column, mode=mode))

    def range(self, queries: Tensor, threshold: float, threshold_column: int | None, mode: Mode | None) -> Found:
        """Likewise."""
        with self._reading():
            return self._found(self._index.range(queries, threshold, threshold_column=threshold_column, mode=mode))

    def recall(self, queries: Tensor, k: int, threshold_column: int | None) -> float:
        """Of the index."""
        with self._reading():
            return self._index.recall(queries, k, threshold_column)

    def calibrate(self, queries: Tensor, k: int, threshold_column: int | None) -> None:
        """Of the index."""
        with self._lock.writing():
            self._index.calibrate(queries, k, threshold_column)

    def reindex(self) -> None:
        """From the engine's rows."""
        self._build(self._engine.load())

    @contextmanager
    def _changing(self) -> Generator[None]:
        """Alone; a change that was cut short, as by an interrupt, is known by `_whole`: only a new build repairs it."""
        with self._lock.writing():
            self._whole = False
            yield
            self._whole = True

    def _build(self, loaded: Stamped) -> None:
        with self._changing():
            self._index.build(torch.from_numpy(loaded.vectors))
            self._ids, self._updated = loaded.ids.copy(), loaded.updated.copy()
            self._slots = dict(zip(loaded.ids.tolist(), range(len(loaded.ids)), strict=True))

    def _put(self, rows: Stamped) -> None:
        known = self.holds(rows.ids)
        vectors = torch.from_numpy(rows.vectors)
        if known.any():
            slots = self._slots_of(rows.ids[known])
            self._index.replace(torch.from_numpy(slots), vectors[torch.from_numpy(known)])
            self._updated[slots] = rows.updated[known]
        if not known.all():
            ids = rows.ids[~known]
            slots = np.arange(len(self), len(self) + len(ids))
            self._index.add(vectors[torch.from_numpy(~known)])
            self._reserve(len(self) + len(ids))
            self._ids[slots], self._updated[slots] = ids, rows.updated[~known]
            self._slots.update(zip(ids.tolist(), slots.tolist(), strict=True))

    @contextmanager
    def _reading(self) -> Generator[None]:
        with self._lock.reading():
            if not self._whole:
                raise StoreError("a change of the index was interrupted a moment ago: call again")
            yield

    def _drop(self, ids: IntArray) -> None:
        if not len(ids):
            return
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

    def _found(self, hits: Hits) -> Found:
        slots = hits.slots
        ids = torch.from_numpy(self._ids)[slots.clamp(min=0)] if len(self) else torch.full_like(slots, -1)
        return Found(ids.masked_fill(slots < 0, -1), hits.scores, hits.certificate)
