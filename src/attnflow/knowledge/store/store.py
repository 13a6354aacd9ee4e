"""What users call: it checks arguments, numbers and dates rows, and hands them to a backend; `stored.py` reads."""

from __future__ import annotations

import os
import time
from collections.abc import Generator, Sequence
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import torch
from jaxtyping import Int64
from torch import Tensor

from attnflow._core.checks import Indices, IntArray, preview
from attnflow.knowledge.index import SearchMode
from attnflow.knowledge.index.arguments import Vectors, matrix
from attnflow.knowledge.store import arguments
from attnflow.knowledge.store.backends import Backend, open_backend
from attnflow.knowledge.store.check import StoreCheck
from attnflow.knowledge.store.errors import ReadOnly
from attnflow.knowledge.store.metadata import Wanted
from attnflow.knowledge.store.rescue import rescue
from attnflow.knowledge.store.stored import StoredEntries


class Store(StoredEntries):
    """Entries that are kept, searched and edited while a model runs; open one with `Store.open`.

    A call that writes returns when the write is on the disk (`fsync`), so that neither a crash of the process nor one
    of the machine undoes it, and visible to the next search. It happens as a whole or not at all. One `Store` writes
    at a time; its methods may be called from many threads, and other processes may read (`read_only=True`, then
    `refresh`).

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
            Damaged: entries are not as they were written; `rescue` copies the others into a new store.
            ValueError: dim or num_thresholds are not the store's.
            MissingExtra: the backend's package is not installed.

        Cost: all vectors are read into memory (not for Milvus) and compared with their checksums: about 1.5 s for
            1,000,000 entries of width 128, a third of it for the checksums, and the building of the index where the
            search is approximate.
        """
        place, wanted = os.fspath(uri), Wanted(dim, num_thresholds, read_only, search, target_recall)
        store = cls(place, *open_backend(place, wanted), read_only)
        try:
            store._open()
        except BaseException:
            store.close()
            raise
        return store

    @staticmethod
    def rescue(uri: str | os.PathLike[str], to: str | os.PathLike[str]) -> StoreCheck:
        """Make a new store of what is whole of a damaged one, in a directory: entries with their versions and times.

        The damaged store is only read. Its snapshots are not copied.

        Args:
            uri: the damaged store.
            to: a folder that is not there yet, or is empty.

        Returns:
            How many entries were copied, ids of those that are damaged, and what else was lost.

        Raises:
            NotAStore: there is no table of entries in the directory.
            StoreLocked: somebody writes to it: close it there first.
            StoreError: `to` holds something, or nothing can be rescued.
        """
        return rescue(Path(uri).absolute(), Path(to).absolute())

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

        Cost: less than a millisecond and one `fsync` for a call of few entries; one commit, some ten milliseconds, for
            one of more than 1 MB.
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

    def snapshot(self, name: str | None = None) -> str:
        """Keep the present entries under a name, "snapshot-1" and so on by default; `restore` brings them back."""
        with self._writer() as backend:
            chosen = arguments.snapshot_name(name, backend.snapshots())
            with self._following(edits=False):
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
        with self._writer(name) as backend, self._following(edits=False):
            backend.drop_snapshot(name)

    def compact(self) -> None:
        """Write the files of a store in a directory anew, as few and as small as they can be.

        That happens by itself, too, while writing and at `close`, as far as it pays, and then leaves the files that
        other processes may have been reading for ten minutes; this leaves none, so that those have to `refresh`.

        Cost: all entries are written once.
        """
        with self._writer() as backend, self._following(edits=False):
            backend.compact()

    def __enter__(self) -> Store:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def __deepcopy__(self, memo: object) -> Store:
        """The same store: a copy of a model that reads it reads it, too."""
        return self

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
    def _following(self, edits: bool = True) -> Generator[None]:
        """Around a step of the backend: cut short, the next call compares what is searched with what is kept."""
        try:
            yield
        except BaseException:
            self._behind = True
            raise
        finally:
            self.revision += edits

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
            now = max(time.time_ns() // 1000, backend.clock + 1)  # later than any before, whatever the clock says
            rows = arguments.rows(keys, texts, sources, encoder, now, np.concatenate([vectors, added], axis=1))
            if not count:
                return keys
            if present.any():
                rows = rows.after(backend.read(keys[present]))
            with self._following():
                backend.write(rows)
        return keys
