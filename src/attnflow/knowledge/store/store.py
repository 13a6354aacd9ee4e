"""What users call: it checks arguments, numbers and dates rows, and hands them to a backend."""

from __future__ import annotations

import os
import time
from collections.abc import Generator, Sequence
from contextlib import contextmanager
from types import TracebackType

import numpy as np
import torch
from jaxtyping import Int64
from torch import Tensor

from attnflow._core.checks import Indices, IntArray, integer, preview
from attnflow.knowledge.store import arguments
from attnflow.knowledge.store.arguments import Vectors
from attnflow.knowledge.store.backend import Backend, SearchMode
from attnflow.knowledge.store.backends import open_backend
from attnflow.knowledge.store.errors import ReadOnly
from attnflow.knowledge.store.reader import StoreReader
from attnflow.knowledge.store.rows import Flags, Floats, Rows, written

_LARGEST_ID = 2**63 - 1


class Store(StoreReader):
    """Entries that are kept, searched and edited while a model runs; open one with `Store.open`.

    A call that writes returns when the write is durable against a crash of the process and visible to the next
    search. It happens as a whole or not at all. One `Store` writes at a time; its methods may be called from many
    threads, and other processes may read (`read_only=True`, then `refresh`).

    Attributes:
        uri: where it is.
        backend: "lancedb", "memory" or "milvus".
        read_only: whether it refuses to write.

    >>> with Store.open("memory", dim=2) as store:
    ...     ids = store.insert(embeddings=[[1.0, 0.0], [0.0, 1.0]], texts=["east", "north"])
    ...     best = store.search([0.2, 0.9], k=1)
    ...     store.get(best.ids)[0].text
    'north'
    """

    _clock = 0

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
        width = None if dim is None else integer("dim", dim, minimum=1)
        columns = None if num_thresholds is None else integer("num_thresholds", num_thresholds)
        place = os.fspath(uri)
        if search not in ("auto", "exact", "approximate"):  # before anything is made
            raise ValueError(f'search must be "auto", "exact" or "approximate", got {search!r}')
        store = cls(place, *open_backend(place, width, columns, read_only, search, target_recall), read_only)
        try:
            store._follow()
        except BaseException:
            store.close()
            raise
        return store

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
        with self._writer() as backend:
            vectors = self._joined(embeddings, thresholds)
            if ids is None:
                first = self._backend.next_id
                if first + len(vectors) - 1 > _LARGEST_ID:
                    raise ValueError("there are no integers above the largest id of this store: name the ids yourself")
                keys = np.arange(first, first + len(vectors), dtype=np.int64)
            else:
                keys = arguments.identifiers("ids", ids, len(vectors))
                taken = keys[backend.holds(keys)]
                if len(taken):
                    raise ValueError(f"ids exist already: {preview(taken)}; use upsert to change entries")
            self._write(backend, keys, vectors, texts, sources, encoder, np.zeros(len(keys), dtype=np.bool_))
        return torch.from_numpy(keys)

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
        """Replace the entries that exist, add the others.

        An entry that exists keeps its `created`, gets the next version, and keeps its text, source and thresholds
        where none is given (None; an empty text is a text). Its encoder is always that of this call.

        Args:
            ids: n of them.
            embeddings: [n, dim], finite.
            texts: one for each entry.
            sources: likewise.
            thresholds: [n, num_thresholds].
            encoder: name and version of what made the embeddings.

        Raises:
            ValueError: wrong shapes, NaN or infinity, repeated ids.
            StoreError: the write failed.
        """
        with self._writer() as backend:
            vectors = self._joined(embeddings, thresholds)
            keys = arguments.identifiers("ids", ids, len(vectors))
            present = backend.holds(keys)
            if thresholds is None and self.num_thresholds and present.any():
                vectors[present, self.dim :] = backend.vectors(keys[present])[:, self.dim :]
            self._write(backend, keys, vectors, texts, sources, encoder, present)

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

    def reindex(self) -> None:
        """Build the index anew from the stored entries, as after many edits."""
        with self._write_lock:
            self._open().reindex()

    def snapshot(self, name: str | None = None) -> str:
        """Keep the present entries under a name, "snapshot-1" and so on by default; `restore` brings them back."""
        with self._writer():
            chosen = arguments.snapshot_name(name, self._backend.snapshots())
            self._backend.snapshot(chosen)
        return chosen

    def restore(self, name: str) -> None:
        """Make the entries what they were at a snapshot, in one step; snapshots stay, and ids are not reused.

        Raises:
            KeyError: there is no such snapshot.
        """
        with self._writer() as backend:
            self._snapshot_exists(name)
            with self._following():
                backend.restore(name)

    def drop_snapshot(self, name: str) -> None:
        """Forget a snapshot, so that its space can be used.

        Raises:
            KeyError: there is no such snapshot.
        """
        with self._writer():
            self._snapshot_exists(name)
            self._backend.drop_snapshot(name)

    def __enter__(self) -> Store:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    @contextmanager
    def _writer(self) -> Generator[Backend]:
        if self.read_only:
            raise ReadOnly(f"the store {self.uri} was opened with read_only=True")
        with self._write_lock:
            yield self._open()

    @contextmanager
    def _following(self) -> Generator[None]:
        """Around a step of the backend: cut short, the next call compares what is searched with what is kept."""
        try:
            yield
        except BaseException:
            self._behind = True
            raise
        finally:
            self._revision += 1

    def _write(
        self,
        backend: Backend,
        keys: IntArray,
        vectors: Floats,
        texts: Sequence[str | None] | None,
        sources: Sequence[str | None] | None,
        encoder: str | None,
        present: Flags,
    ) -> None:
        """One commit."""
        columns = arguments.strings("texts", texts, len(keys)), arguments.strings("sources", sources, len(keys))
        name = None if encoder is None else arguments.text("encoder", encoder)
        if not len(keys):
            return
        old = self._backend.read(keys[present]) if present.any() else Rows.none(vectors.shape[1])
        rows = written(keys, vectors, *columns, name, self._now(), old)
        with self._following():
            backend.write(rows)

    def _joined(self, embeddings: Vectors, thresholds: Vectors | None) -> Floats:
        rows = arguments.matrix("embeddings", embeddings, self.dim)
        if thresholds is None:
            added = np.zeros((len(rows), self.num_thresholds), dtype=np.float32)
        else:
            added = arguments.matrix("thresholds", thresholds, self.num_thresholds, rows=len(rows))
        return np.concatenate([rows, added], axis=1)

    def _snapshot_exists(self, name: str) -> None:
        taken = self._backend.snapshots()
        if name not in taken:
            raise KeyError(f"no snapshot {name!r}; there are {taken}")

    def _now(self) -> int:
        """Microseconds since 1970, later than at any call before."""
        self._clock = max(time.time_ns() // 1000, self._clock + 1)
        return self._clock
