"""The reading half of a store: entries, searches, numbers; `store.py` adds what changes them."""

from __future__ import annotations

import os
import threading
from collections import Counter

import numpy as np
import torch
from jaxtyping import Float32, Int64
from torch import Tensor

from attnflow._core.checks import Indices, IntArray, integer
from attnflow.knowledge.index import Mode, Neighbours
from attnflow.knowledge.index.arguments import Vectors, column, queries, score
from attnflow.knowledge.store import arguments
from attnflow.knowledge.store.backends import Backend
from attnflow.knowledge.store.check import StoreCheck
from attnflow.knowledge.store.entry import Entry, StoreStats
from attnflow.knowledge.store.errors import StoreError


class StoredEntries:
    """The entries of a store as they are read and searched; `Store` says the rest."""

    def __init__(self, uri: str, name: str, backend: Backend, read_only: bool) -> None:
        self.uri = uri
        self.backend = name
        self.read_only = read_only
        self._backend = backend
        self._write_lock = threading.RLock()
        self._process = os.getpid()
        self._closed = False
        self.dim, self.num_thresholds = backend.dim, backend.num_thresholds
        self.revision = 0
        self._behind = True  # what is searched may differ from what is kept

    def __len__(self) -> int:
        return len(self._open())

    def __contains__(self, key: object) -> bool:
        try:
            number = integer("id", key)
        except ValueError:  # negative, or beyond what an id may be
            return False
        return bool(self._open().holds(np.array([number]))[0])

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
        """Hold `target_recall` on sample queries [n, dim] and for this k, too, until the store is closed.

        By these queries it is judged whether an approximate search pays. Milvus: until the next write.
        """
        with self._write_lock:
            backend, asked, chosen = self._asked(sample, threshold_column)
            backend.calibrate(asked, integer("k", k, minimum=1), chosen)

    def reindex(self) -> None:
        """Build the index anew from the stored entries; it follows edits without."""
        with self._write_lock:
            self._open().reindex()

    def stats(self) -> StoreStats:
        """The store in numbers.

        Cost: where searches are approximate and entries have changed since the last call, an exact search for some 300
            queries: about 2 s for 1,000,000 entries of width 128.
        """
        backend = self._open()
        reason = backend.reason  # which measures, and may find that an exact search is needed
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
            reason=reason,
            versions=dict(summary.versions),
            encoders=dict(encoders),
            snapshots=tuple(backend.snapshots()),
        )

    def snapshots(self) -> list[str]:
        """Names of snapshots, oldest first."""
        return self._open().snapshots()

    def verify(self) -> StoreCheck:
        """Compare every byte of every entry, and of snapshots, with the checksums that were written with them.

        `open` compares ids and vectors, `get` all of the entries that it gives; both raise where they differ. This
        raises nothing, and names all at once.

        Returns:
            The ids of damaged entries and what else is wrong; `Store.rescue` copies the others into a new store.

        Raises:
            StoreError: a store of format 1 that was never opened to be written has no checksums.

        Cost: a pass over all files: about 6 s for 1,000,000 entries of width 128; writes wait meanwhile.
        """
        with self._write_lock:
            return self._open().verify(self.uri)

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

    def _known(self, backend: Backend, ids: Indices) -> IntArray:
        keys = arguments.identifiers("ids", ids)
        arguments.refuse_unknown(keys[~backend.holds(keys)].tolist())
        return keys
