"""`Store`: writes entries to LanceDB, and searches all vectors in memory, or LanceDB's index of them."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Generator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Final, Literal, NoReturn, get_args

import numpy as np
import torch
from jaxtyping import Float32, Int64
from torch import Tensor

from attnflow._core.checks import Indices, IntArray, integer, number, preview
from attnflow.knowledge.retrieval import Neighbours
from attnflow.knowledge.store import entry
from attnflow.knowledge.store.approximate import ApproximateSearch
from attnflow.knowledge.store.entry import StoredEntry, StoreStats, Vectors
from attnflow.knowledge.store.export import export, to_pandas
from attnflow.knowledge.store.rows import EntryRows
from attnflow.knowledge.store.table import MEMORY, EntryTable, StoreError, check_uri

Mode = Literal["exact", "approximate"]

MOST_EXACT: Final = 1_000_000  # up to so many entries a search is exact by default


class Store:
    """A store of entries that can be searched and edited while a model runs; open one with `Store.open`.

    Every write is one commit of LanceDB: it happens as a whole or not at all, and a write that has returned survives
    a crash of the process. Only one `Store` may write to a place at a time (on object storage the last that opened it),
    but any number may read it (`read_only=True`, then `refresh`). All methods are thread-safe.

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
        self._table, self._lock = table, threading.RLock()
        self._process, self._closed, self._behind = os.getpid(), False, True  # rows in memory are behind the table
        self.now()

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
            StoreError: the place is not a store, holds none that could be created, or is written by another `Store`.
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
        return len(self.now())

    def __contains__(self, key: object) -> bool:
        try:
            number = integer("id", key)
            return number < 2**63 and bool(self.now().places(np.array([number]))[0] >= 0)
        except ValueError:  # not a valid id
            return False

    def get(self, ids: Indices) -> list[StoredEntry]:
        """Return the entries in the order of `ids`.

        Raises:
            KeyError: an id is unknown.
        """
        with self._lock:
            keys, rows = entry.identifiers("ids", ids), self.rows(ids)
            records = self._table.records(keys)
        columns = zip(keys.tolist(), rows[:, : self.dim], rows[:, self.dim :], strict=True)
        return [StoredEntry(**records[key], embedding=e.clone(), thresholds=b.clone()) for key, e, b in columns]

    def ids(self) -> Int64[Tensor, " n"]:
        """The ids of all entries, ascending."""
        return torch.from_numpy(self.now().ids.copy())

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
        rows = self.now()
        return rows.tensor.clone() if ids is None else rows.take(entry.identifiers("ids", ids))

    def search(
        self, query: Vectors, k: int, *, threshold_column: int | None = None, mode: Mode | None = None
    ) -> Neighbours:
        """Find the k entries with the highest scores, q . e + threshold (knowledge, eq. 8 with the projections folded).

        Args:
            query: [n, dim], or [dim] for a single query.
            k: how many entries to find.
            threshold_column: which threshold to add; none by default.
            mode: "exact", or "approximate" by LanceDB's index, which the first such search of a writer makes; by
                default exact up to 1,000,000 entries.

        Returns:
            Ids and scores, [n, k] or [k], on the CPU.

        Raises:
            ValueError: the query has another width, NaN or infinity.
        """
        if mode not in (None, *get_args(Mode)):
            raise ValueError(f'mode must be "exact", "approximate" or None, got {mode!r}')
        return self.nearest(self.now(), query, k, threshold_column, mode)

    def nearest(
        self, rows: EntryRows, query: Vectors, k: int, threshold_column: int | None, mode: Mode | None
    ) -> Neighbours:
        """`search` among the rows of one moment."""
        if (mode or self._mode()) == "exact":
            return rows.search(query, k, threshold_column)
        with self._lock:
            searched = self._approximate
            if searched is None or not (searched.probes or self.read_only):
                if not self.read_only and len(self.now()):
                    self._behind = not self._table.make_index()
                self._approximate = searched = ApproximateSearch(self._table, self.now())
            return rows.search(query, k, threshold_column, searched.best)

    def range(self, query: Vectors, threshold: float, *, threshold_column: int | None = None) -> Neighbours:
        """Find all entries with a score above a threshold, as an exact `search` would; padded to the longest result."""
        return self.now().range(query, threshold, threshold_column)

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
            ids: new ids; by default the next integers above all that the store has ever known.
            texts: a text for each entry.
            sources: where each entry comes from.
            thresholds: [n, num_thresholds]; zero by default.
            encoder: name and version of the model that computed the embeddings.

        Returns:
            The ids.

        Raises:
            ValueError: wrong shapes, NaN or infinity, repeated ids, or ids that already exist.
            StoreError: the write failed.

        Cost: a commit (10 ms; 0.1 s with 1,000,000 entries) and a copy of all vectors: insert many entries in one call.
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
        with self._writing() as rows:
            keys = entry.identifiers("ids", ids)
            rows.take(keys)  # checks that all exist
            if len(keys):
                self._commit(lambda: self._table.delete(keys), lambda: rows.drop(keys))

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
            self.now()

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
            self.now()
            return self._table.snapshots()

    def compact(self, *, keep_minutes: float = 0.0) -> None:
        """Merge the files into as few as possible, and delete those of old versions that no snapshot needs.

        This also happens automatically after every 100 writes, with `keep_minutes=10`. By default old versions go at
        once, and a process that reads one raises `StoreError` until it calls `refresh`.
        """
        keep = number("keep_minutes", keep_minutes, minimum=0.0)
        with self._writing():
            self._table.compact(keep)

    def stats(self) -> StoreStats:
        """The store's size, search mode, encoders and snapshots."""
        with self._lock:
            rows, searched = self.now(), self._approximate
            later = "" if searched is None else f"; an approximate search {searched}"
            reason = f"up to {MOST_EXACT:,} entries, all are compared{later}"
            return StoreStats(count=len(rows), mode=self._mode(), reason=reason, **self._table.about())

    def to_pandas(self) -> Any:
        """All entries as a `pandas.DataFrame`, with vectors; `ImportError` without pandas."""
        with self._lock:
            self.now()
            return to_pandas(self._table)

    def export(self, path: str | os.PathLike[str]) -> Path:
        """Write all entries, in batches, to a `.parquet` file, or to a `.csv` file without vectors and thresholds."""
        with self._lock:
            self.now()
            return export(self._table, path)

    def refresh(self) -> None:
        """Read what another process has written since this store was opened or refreshed."""
        with self._lock:
            self.now()
            self._behind = self._table.refresh()
            self.now()

    def close(self) -> None:
        """Release the files and the right to write; a store that is not closed loses no data."""
        if not self._closed and os.getpid() == self._process:
            self._table.close()
        self._closed = True

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

    def now(self) -> EntryRows:
        """All rows as this store knows them, of one moment."""
        if self._closed:
            raise StoreError(f"the store {self.uri} is closed: open it again")
        if os.getpid() != self._process:
            raise StoreError(f"the store {self.uri} was opened by another process before a fork: open it here again")
        if self._behind:
            with self._lock:
                if self._behind:
                    self._rows, self._approximate = self._table.newest(), None
                    self._behind = False
                    self.revision += 1
        return self._rows

    def _mode(self) -> Mode:
        large = len(self.now()) > MOST_EXACT and not (self.read_only and not self._table.indexed)
        return "approximate" if large else "exact"

    @contextmanager
    def _writing(self) -> Generator[EntryRows]:
        if self.read_only:
            raise StoreError(f"the store {self.uri} was opened with read_only=True")
        with self._lock:
            self._table.require_writer()
            yield self.now()

    def _commit(self, write: Callable[[], bool], after: Callable[[], EntryRows]) -> None:
        # A commit that was interrupted may have happened: then the table is read again.
        try:
            alone = write()
            self._rows, self._behind = after(), not alone
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
        with self._writing() as rows:
            vectors = entry.matrix("embeddings", embeddings, self.dim)
            shape = count, columns = len(vectors), self.num_thresholds
            added = entry.matrix("thresholds", np.zeros(shape) if thresholds is None else thresholds, columns, count)
            keys = self._table.next_ids(count) if ids is None else entry.identifiers("ids", ids, count)
            known = np.flatnonzero(rows.places(keys) >= 0)
            if len(known) and not replaces:
                listed = preview(keys[known])
                raise ValueError(f"new ids must not exist yet, got existing ones: {listed}. Upsert replaces entries")
            if len(known) and thresholds is None:
                added[known] = rows.take(keys[known])[:, self.dim :].numpy()
            strings = (entry.strings("texts", texts, count), entry.strings("sources", sources, count))
            encoder = entry.string("encoder", encoder)
            if count:
                new = np.concatenate([vectors, added], axis=1)
                values = entry.columns(keys, *strings, encoder, self._table.records(keys[known]))
                self._commit(lambda: self._table.put(values, new, replaces), lambda: rows.put(keys, new))
        return keys
