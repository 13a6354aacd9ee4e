"""What users call: it checks arguments, numbers and dates rows, and hands them to a backend."""

from __future__ import annotations

import os
import threading
import time
from collections import Counter
from collections.abc import Generator, Sequence
from contextlib import contextmanager

import numpy as np
import torch
from jaxtyping import Float32, Int64
from torch import Tensor

from attnflow._core.checks import Indices, IntArray, integer, preview
from attnflow.knowledge.index import Mode, Neighbours, SearchMode
from attnflow.knowledge.index.arguments import Vectors, column, matrix, queries, score
from attnflow.knowledge.store import arguments
from attnflow.knowledge.store.backends import Backend, open_backend
from attnflow.knowledge.store.entry import Entry, StoreStats
from attnflow.knowledge.store.errors import ReadOnly, StoreError
from attnflow.knowledge.store.metadata import Wanted


class Store:
    """Entries that are kept, searched and edited while a model runs; open one with `Store.open`.

    A call that writes returns when the write is durable against a crash of the process and visible to the next
    search. It happens as a whole or not at all. One `Store` writes at a time; its methods may be called from many
    threads, and other processes may read (`read_only=True`, then `refresh`).

    Attributes:
        uri: where it is.
        backend: "lancedb", "memory" or "milvus".
        read_only: whether it refuses to write.
        dim: width of an embedding.
        num_thresholds: threshold columns of an entry.
        revision: counts the changes that were made or seen through this object.

    >>> with Store.open("memory", dim=2) as store:
    ...     ids = store.insert(embeddings=[[1.0, 0.0], [0.0, 1.0]], texts=["east", "north"])
    ...     best = store.search([0.2, 0.9], k=1)
    ...     store.get(best.ids)[0].text
    'north'
    """

    def __init__(self, uri: str, name: str, backend: Backend, read_only: bool) -> None:
        self.uri = uri
        self.backend = name
        self.read_only = read_only
        self._backend = backend
        self._write_lock = threading.RLock()
        self._process = os.getpid()
        self._closed = False
        self.dim, self.num_thresholds = backend.dim, backend.num_thresholds
        self.revision = self._clock = 0
        self._behind = True  # what is searched may differ from what is kept

    @classmethod
    def open(
        cls,
        uri: str | os.PathLike[str],
        dim: int | None = None,
        *,
        num_thresholds: int | None = None,
        read_only: bool = False,
        search: SearchMode = "auto",
        target_recall: float = 0.99,
    ) -> Store:
        """Open a store, or make one where there is none.

        Args:
            uri: a directory (LanceDB), "memory", "milvus:FILE.db" or "milvus:http://HOST:19530".
            dim: width of an embedding; needed for a new store, compared with an existing one.
            num_thresholds: threshold columns; 0 for a new store by default, compared with an existing one.
            read_only: do not write; the directory may be written by another process meanwhile.
            search: how searches are made unless they say otherwise: "exact", "approximate", or what pays ("auto").
            target_recall: that an approximate search is calibrated to.

        Raises:
            NotAStore: the place holds something else, or nothing and the store cannot be made.
            StoreLocked: another `Store` writes there.
            ReadOnly: the place cannot be written.
            NewerFormat: a later version of this package wrote it.
            ValueError: dim or num_thresholds are not the store's.
            MissingExtra: the backend's package is not installed.

        Cost: all vectors are read into memory (not for Milvus): about 1 s for 1,000,000 entries of width 128, and the
            building of the index where the search is approximate.
        """
        place, wanted = os.fspath(uri), Wanted(dim, num_thresholds, read_only, search, target_recall)
        store = cls(place, *open_backend(place, wanted), read_only)
        try:
            store._open()
        except BaseException:
            store.close()
            raise
        return store

    def __len__(self) -> int:
        return len(self._open())

    def __contains__(self, key: object) -> bool:
        try:
            number = integer("id", key)
        except ValueError:  # negative, or beyond what an id may be
            return False
        return bool(self._open().holds(np.array([number]))[0])

    def insert(
        self,
        *,
        embeddings: Vectors,
        ids: Indices | None = None,
        texts: Sequence[str | None] | None = None,
        sources: Sequence[str | None] | None = None,
        thresholds: Vectors | None = None,
        encoder: str | None = None,
    ) -> Int64[Tensor, " n"]:
        """Add entries.

        Args:
            embeddings: [n, dim], finite.
            ids: new ones; by default the next integers above all that the store has held.
            texts: one for each entry.
            sources: likewise.
            thresholds: [n, num_thresholds]; zero by default.
            encoder: name and version of what made the embeddings.

        Returns:
            The ids.

        Raises:
            ValueError: wrong shapes, NaN or infinity, repeated ids, ids that exist.
            StoreError: the write failed.

        Cost: a commit for each call, some milliseconds: give many entries at a time.
        """
        return torch.from_numpy(self._put(ids, embeddings, thresholds, texts, sources, encoder, replaces=False))

    def upsert(
        self,
        *,
        ids: Indices,
        embeddings: Vectors,
        texts: Sequence[str | None] | None = None,
        sources: Sequence[str | None] | None = None,
        thresholds: Vectors | None = None,
        encoder: str | None = None,
    ) -> None:
        """Replace the entries that exist, add the others; arguments and errors are those of `insert`.

        An entry that exists keeps its `created`, gets the next version, and keeps its text, source and thresholds
        where none is given (None; an empty text is a text). Its encoder is always that of this call.
        """
        self._put(ids, embeddings, thresholds, texts, sources, encoder, replaces=True)

    def delete(self, ids: Indices) -> None:
        """Drop entries; their ids are not given out again.

        Raises:
            KeyError: an id is unknown; nothing is deleted.
        """
        with self._writer() as backend:
            keys = self._known(backend, ids)
            if len(keys):
                with self._following():
                    backend.delete(keys)

    def get(self, ids: Indices) -> list[Entry]:
        """Entries in the order of `ids`.

        Raises:
            KeyError: an id is unknown.
        """
        backend, keys = self._open(), arguments.identifiers("ids", ids)
        held = {entry.id: entry for entry in backend.read(keys).entries(self.dim)}
        arguments.refuse_unknown([key for key in keys.tolist() if key not in held])
        return [held[key] for key in keys.tolist()]

    def ids(self) -> Int64[Tensor, " n"]:
        """The ids of all entries, ascending."""
        return torch.from_numpy(np.sort(self._open().ids()))

    def vectors(self, ids: Indices | None = None) -> Float32[Tensor, "n dim"]:
        """The embeddings of `rows`."""
        return self.rows(ids)[:, : self.dim]

    def thresholds(self, ids: Indices | None = None) -> Float32[Tensor, "n num_thresholds"]:
        """The thresholds of `rows`."""
        return self.rows(ids)[:, self.dim :]

    def rows(self, ids: Indices | None = None) -> Float32[Tensor, "n width"]:
        """[embedding | thresholds] of one moment, in the order of `ids`; by default of all entries, as in `ids()`.

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
            Ids and scores, [n, k] or [k], on the CPU.
        """
        backend, asked, chosen = self._asked(query, threshold_column)
        return backend.search(asked, integer("k", k, minimum=1), chosen, mode)

    def range(
        self, query: Vectors, threshold: float, *, threshold_column: int | None = None, mode: Mode | None = None
    ) -> Neighbours:
        """All entries that score above a threshold, as `search` gives them; the answer is as wide as the longest."""
        backend, asked, chosen = self._asked(query, threshold_column)
        return backend.range(asked, score("threshold", threshold), chosen, mode)

    def recall(self, sample: Vectors, k: int = 32, *, threshold_column: int | None = None) -> float:
        """Measured share of the true best k entries that searches of sample queries [n, dim] find."""
        backend, asked, chosen = self._asked(sample, threshold_column)
        if not asked.numel():
            raise ValueError("recall is measured on at least one query, got none")
        return backend.recall(asked, integer("k", k, minimum=1), chosen)

    def calibrate(self, sample: Vectors, k: int = 32, *, threshold_column: int | None = None) -> None:
        """Tune approximate searches to reach `target_recall` on sample queries [n, dim], until the store is closed."""
        with self._write_lock:
            backend, asked, chosen = self._asked(sample, threshold_column)
            backend.calibrate(asked, integer("k", k, minimum=1), chosen)

    def reindex(self) -> None:
        """Build the index anew from the stored entries, as after many edits."""
        with self._write_lock:
            self._open().reindex()

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
            versions=dict(summary.versions),
            encoders=dict(encoders),
            snapshots=tuple(backend.snapshots()),
        )

    def snapshots(self) -> list[str]:
        """Names of snapshots, oldest first."""
        return self._open().snapshots()

    def snapshot(self, name: str | None = None) -> str:
        """Keep the present entries under a name, "snapshot-1" and so on by default; `restore` brings them back."""
        with self._writer() as backend:
            chosen = arguments.snapshot_name(name, backend.snapshots())
            backend.snapshot(chosen)
        return chosen

    def restore(self, name: str) -> None:
        """Make the entries what they were at a snapshot, in one step; snapshots stay, and ids are not reused.

        Raises:
            KeyError: there is no such snapshot.
        """
        with self._writer(name) as backend, self._following():
            backend.restore(name)

    def drop_snapshot(self, name: str) -> None:
        """Forget a snapshot, so that its space can be used.

        Raises:
            KeyError: there is no such snapshot.
        """
        with self._writer(name) as backend:
            backend.drop_snapshot(name)

    def refresh(self) -> None:
        """See what another process has written since this store was opened or refreshed."""
        self._open()
        with self._write_lock:
            self._behind = True
            self.revision += 1
            self._open()

    def close(self) -> None:
        """Let go of files and of the right to write; nothing is lost without it."""
        if not self._closed:
            self._closed = True
            if os.getpid() == self._process:
                self._backend.close()

    def __enter__(self) -> Store:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def __deepcopy__(self, memo: object) -> Store:
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
                if self._behind:
                    self._backend.refresh()  # a write that was cut short may have been committed all the same
                    self._behind = False
        return self._backend

    def _asked(self, query: Vectors, threshold_column: int | None) -> tuple[Backend, Tensor, int | None]:
        chosen = column(threshold_column, self.num_thresholds)
        return self._open(), queries(query, self.dim), chosen

    @contextmanager
    def _writer(self, snapshot: str | None = None) -> Generator[Backend]:
        """The backend, which nobody else writes meanwhile, and has this snapshot."""
        if self.read_only:
            raise ReadOnly(f"the store {self.uri} was opened with read_only=True")
        with self._write_lock:
            backend = self._open()
            if snapshot is not None and snapshot not in (taken := backend.snapshots()):
                raise KeyError(f"no snapshot {snapshot!r}; there are {taken}")
            yield backend

    @contextmanager
    def _following(self) -> Generator[None]:
        """Around a step of the backend: cut short, the next call compares what is searched with what is kept."""
        try:
            yield
        except BaseException:
            self._behind = True
            raise
        finally:
            self.revision += 1

    def _put(
        self,
        ids: Indices | None,
        embeddings: Vectors,
        thresholds: Vectors | None,
        texts: Sequence[str | None] | None,
        sources: Sequence[str | None] | None,
        encoder: str | None,
        replaces: bool,
    ) -> IntArray:
        """One commit; returns the ids."""
        with self._writer() as backend:
            vectors = matrix("embeddings", embeddings, self.dim)
            count, columns = len(vectors), self.num_thresholds
            added = np.zeros((count, columns), dtype=np.float32)
            if thresholds is not None:
                added = matrix("thresholds", thresholds, columns, count)
            if ids is None:
                keys, present = arguments.next_ids(backend.next_id, count), np.zeros(count, dtype=np.bool_)
            else:
                keys = arguments.identifiers("ids", ids, count)
                present = backend.holds(keys)
            if present.any() and not replaces:
                raise ValueError(f"ids exist already: {preview(keys[present])}; use upsert to change entries")
            if present.any() and thresholds is None:
                added[present] = backend.vectors(keys[present])[:, self.dim :]
            self._clock = max(time.time_ns() // 1000, self._clock + 1)  # later than at any call before
            rows = arguments.rows(keys, texts, sources, encoder, self._clock, np.concatenate([vectors, added], axis=1))
            if not count:
                return keys
            if present.any():
                rows = rows.after(backend.read(keys[present]))
            with self._following():
                backend.write(rows)
        return keys

    def _known(self, backend: Backend, ids: Indices) -> IntArray:
        keys = arguments.identifiers("ids", ids)
        arguments.refuse_unknown(keys[~backend.holds(keys)].tolist())
        return keys
