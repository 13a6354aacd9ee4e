"""`Store`: writes entries to LanceDB, and searches them with an index of all vectors in memory."""

from __future__ import annotations

import os
import threading
from collections.abc import Generator, Mapping, Sequence
from contextlib import contextmanager
from typing import NoReturn

import numpy as np
import torch
from jaxtyping import Float32, Int64
from torch import Tensor

from attnflow._core.checks import Indices, IntArray, integer, preview
from attnflow.knowledge.retrieval import Neighbours
from attnflow.knowledge.store import entry
from attnflow.knowledge.store.entry import Entry, StoreStats, Vectors
from attnflow.knowledge.store.index import EntryIndex, Mode
from attnflow.knowledge.store.table import MEMORY, EntryTable, StoreError, check_uri


class Store:
    """A store of entries that can be searched and edited while a model runs; open one with `Store.open`.

    Every write is one commit of LanceDB: it happens as a whole or not at all, and a write that has returned survives
    a crash of the process. Only one `Store` may write to a place at a time, but any number may read it
    (`read_only=True`, then `refresh`). All methods are thread-safe.

    Attributes:
        uri: where the store is.
        backend: "lancedb" or "memory".
        read_only: whether it refuses to write.
        dim: the width of an embedding.
        num_thresholds: the number of threshold columns.
        revision: counts the changes made or seen through this object.

    >>> with Store.open("memory", dim=2) as store:
    ...     ids = store.insert(embeddings=[[1.0, 0.0], [0.0, 1.0]], texts=["east", "north"])
    ...     best = store.search([0.2, 0.9], k=1)
    ...     store.get(best.ids)[0].text
    'north'
    """

    def __init__(self, table: EntryTable, read_only: bool) -> None:
        self.uri, self.backend = table.uri, MEMORY if table.uri == MEMORY else "lancedb"
        self.dim, self.num_thresholds = table.dim, table.num_thresholds
        self.read_only, self.revision = read_only, 0
        self._table, self._index = table, EntryIndex(table.dim, table.num_thresholds)
        self._lock = threading.RLock()  # of the table
        self._process, self._closed = os.getpid(), False
        self._behind = True  # whether the index may lag behind the table
        self._current()

    @classmethod
    def open(
        cls,
        uri: str | os.PathLike[str],
        dim: int | None = None,
        *,
        num_thresholds: int | None = None,
        read_only: bool = False,
        storage_options: Mapping[str, str] | None = None,
    ) -> Store:
        """Open a store, or create it if it does not exist.

        Args:
            uri: a directory, "memory", or object storage: "s3://bucket/path".
            dim: the width of an embedding; required for a new store, and must match an existing one.
            num_thresholds: the number of threshold columns; 0 by default, and must match an existing store.
            read_only: do not write; another process may write to the store meanwhile.
            storage_options: LanceDB's options for object storage: "endpoint", "region", "aws_access_key_id", ...

        Raises:
            StoreError: the place is not a store, cannot be written, is being written by another `Store`, or holds no
                store and one cannot be created.
            ValueError: dim or num_thresholds differ from the store's, or the uri cannot name a store.
            MissingExtra: LanceDB is not installed.

        Cost: it reads all vectors into memory.
        """
        place = os.fspath(uri)
        check_uri(place)
        dim = None if dim is None else integer("dim", dim, minimum=1)
        num_thresholds = None if num_thresholds is None else integer("num_thresholds", num_thresholds)
        table = EntryTable(place, dim, num_thresholds, read_only, storage_options)
        try:
            return cls(table, read_only)
        except BaseException:
            table.close()
            raise

    def __len__(self) -> int:
        return len(self._current())

    def __contains__(self, key: object) -> bool:
        try:
            number = integer("id", key)
        except ValueError:  # not a valid id
            return False
        return number < 2**63 and bool(self._current().places(np.array([number]))[0] >= 0)

    def get(self, ids: Indices) -> list[Entry]:
        """Return the entries in the order of `ids`.

        Raises:
            KeyError: an id is unknown.
        """
        with self._lock:
            keys, vectors = entry.identifiers("ids", ids), self.rows(ids)
            held = self._table.records(keys)
        dim = self.dim
        return [
            Entry(**held[key], embedding=vector[:dim].clone(), thresholds=vector[dim:].clone())
            for key, vector in zip(keys.tolist(), vectors, strict=True)
        ]

    def ids(self) -> Int64[Tensor, " n"]:
        """The ids of all entries, ascending."""
        return torch.from_numpy(self._current().ids.copy())

    def vectors(self, ids: Indices | None = None) -> Float32[Tensor, "n dim"]:
        """The embeddings, in the order of `ids`; by default of all entries."""
        return self.rows(ids)[:, : self.dim]

    def thresholds(self, ids: Indices | None = None) -> Float32[Tensor, "n num_thresholds"]:
        """The thresholds, in the order of `ids`; by default of all entries."""
        return self.rows(ids)[:, self.dim :]

    def rows(self, ids: Indices | None = None) -> Float32[Tensor, "n width"]:
        """[embedding | thresholds], read at one moment, in the order of `ids`; by default of all entries.

        Raises:
            KeyError: an id is unknown.
        """
        index = self._current()
        return index.rows.clone() if ids is None else index.take(entry.identifiers("ids", ids))

    def search(
        self, query: Vectors, k: int, *, threshold_column: int | None = None, mode: Mode | None = None
    ) -> Neighbours:
        """Find the k entries with the highest scores, q . e + threshold (knowledge, eq. 8 with the projections folded).

        Args:
            query: [n, dim], or [dim] for a single query.
            k: how many entries to find.
            threshold_column: which threshold to add; none by default.
            mode: "exact", or "approximate" with the inverted lists of faiss; by default exact up to 1,000,000 entries.

        Returns:
            Ids and scores, [n, k] or [k], on the CPU.

        Raises:
            ValueError: the query has another width, NaN or infinity.
            MissingExtra: an approximate search needs faiss.
        """
        return self._current().search(query, k, threshold_column, mode)

    def range(self, query: Vectors, threshold: float, *, threshold_column: int | None = None) -> Neighbours:
        """Find all entries with a score above a threshold, as an exact `search` would; padded to the longest result."""
        return self._current().range(query, threshold, threshold_column)

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
            ids: new ids; by default the next integers above all that the store has ever held.
            texts: a text for each entry.
            sources: where each entry comes from.
            thresholds: [n, num_thresholds]; zero by default.
            encoder: name and version of the model that computed the embeddings.

        Returns:
            The ids.

        Raises:
            ValueError: wrong shapes, NaN or infinity, repeated ids, or ids that already exist.
            StoreError: the write failed.

        Cost: one commit of some ten milliseconds, or 0.1 s with 1,000,000 entries: insert many entries in one call.
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
        """Replace entries that exist and add the others; arguments and errors are those of `insert`.

        An existing entry keeps its `created` and gets the next version. It keeps its text, source and thresholds where
        these are None (an empty text replaces the old one). Its encoder is always replaced by this call's.
        """
        self._put(ids, embeddings, thresholds, texts, sources, encoder, replaces=True)

    def delete(self, ids: Indices) -> None:
        """Delete entries; their ids are never reused.

        Raises:
            KeyError: an id is unknown; nothing is deleted.
        """
        with self._writing() as index:
            keys = entry.identifiers("ids", ids)
            index.take(keys)  # checks that all exist
            if not len(keys):
                return
            with self._following():
                alone = self._table.delete(keys)
                index.drop(keys)
                self._behind = not alone

    def snapshot(self, name: str | None = None) -> str:
        """Save the present entries under a name, by default "snapshot-1" and so on; `restore` brings them back."""
        with self._writing():
            chosen = entry.snapshot_name(name, self._table.snapshots())
            self._table.snapshot(chosen)
        return chosen

    def restore(self, name: str) -> None:
        """Restore the entries of a snapshot in one step; all snapshots stay, and ids are not reused.

        Raises:
            KeyError: the snapshot does not exist.
        """
        with self._writing():
            self._behind = True
            self._table.restore(name)
            self._current()

    def drop_snapshot(self, name: str) -> None:
        """Delete a snapshot, so that its space can be reused.

        Raises:
            KeyError: the snapshot does not exist.
        """
        with self._writing():
            self._table.drop_snapshot(name)

    def snapshots(self) -> list[str]:
        """Names of snapshots, oldest first."""
        with self._lock:
            self._current()
            return self._table.snapshots()

    def compact(self) -> None:
        """Merge the files into as few as possible, and delete those of old versions that no snapshot needs.

        This also happens automatically after every 100 writes, but then keeps old versions for ten minutes. A call
        deletes them at once, so that other processes that read the store have to `refresh`.
        """
        with self._writing():
            self._table.compact()

    def stats(self) -> StoreStats:
        """The store's size, search mode, encoders and snapshots."""
        with self._lock:
            index, table = self._current(), self._table
            return StoreStats(
                uri=self.uri,
                backend=self.backend,
                count=len(index),
                dim=self.dim,
                num_thresholds=self.num_thresholds,
                bytes_on_disk=table.bytes_on_disk(),
                mode=index.mode,
                reason=index.reason,
                versions=table.counts("version"),
                encoders={name or "": count for name, count in table.counts("encoder").items()},
                snapshots=tuple(table.snapshots()),
            )

    def refresh(self) -> None:
        """Read what another process has written since this store was opened or refreshed."""
        with self._lock:
            self._current()
            self._behind = self._table.refresh()
            self._current()

    def close(self) -> None:
        """Release the files and the right to write; a store that is not closed loses no data."""
        if not self._closed:
            self._closed = True
            if os.getpid() == self._process:
                self._table.close()

    def __enter__(self) -> Store:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def __reduce__(self) -> NoReturn:
        raise TypeError(
            f"the store {self.uri}, and a model that reads it, cannot be pickled: save the readers (handle.save), "
            "remove the handle, and attach the readers again where the model is loaded"
        )

    def __deepcopy__(self, memo: object) -> Store:
        """Return the store itself, so that a copied model reads the same store."""
        return self

    def __repr__(self) -> str:
        return f"Store({self.uri!r}, backend={self.backend!r}, dim={self.dim}, num_thresholds={self.num_thresholds})"

    def _current(self) -> EntryIndex:
        if self._closed:
            raise StoreError(f"the store {self.uri} is closed: open it again")
        if os.getpid() != self._process:
            raise StoreError(f"the store {self.uri} was opened by another process before a fork: open it here again")
        if self._behind:
            with self._lock:
                if self._behind:
                    self._table.refresh()
                    self._index.load(*self._table.load())
                    self._behind = False
                    self.revision += 1
        return self._index

    @contextmanager
    def _writing(self) -> Generator[EntryIndex]:
        if self.read_only:
            raise StoreError(f"the store {self.uri} was opened with read_only=True")
        with self._lock:
            yield self._current()

    @contextmanager
    def _following(self) -> Generator[None]:
        """Surround a commit. An interrupted commit may have happened, so the next call reads the table again."""
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
        with self._writing() as index:
            vectors = entry.matrix("embeddings", embeddings, self.dim)
            count, columns = len(vectors), self.num_thresholds
            added = np.zeros((count, columns), dtype=np.float32)
            if thresholds is not None:
                added = entry.matrix("thresholds", thresholds, columns, count)
            first = self._table.highest + 1
            if ids is None and first + count > 2**63:
                raise ValueError("the largest id of this store is the largest integer, so pass ids yourself")
            keys = np.arange(first, first + count) if ids is None else entry.identifiers("ids", ids, count)
            held = np.flatnonzero(index.places(keys) >= 0)
            if len(held) and not replaces:
                raise ValueError(
                    f"new ids must not exist yet, got existing ones: {preview(keys[held])}. Use upsert to replace "
                    "entries"
                )
            if len(held) and thresholds is None:
                added[held] = index.take(keys[held])[:, self.dim :].numpy()
            said = (entry.strings("texts", texts, count), entry.strings("sources", sources, count))
            maker = entry.string("encoder", encoder)
            if not count:
                return keys
            rows = np.concatenate([vectors, added], axis=1)
            values = entry.columns(keys, *said, maker, self._table.records(keys[held]))
            with self._following():
                alone = self._table.put(values, rows)
                index.put(keys, rows)
                self._behind = not alone
        return keys
