"""Where a layer's entries come from when they are not a tensor: an index in memory, or a store."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any, Final, cast

import torch
from jaxtyping import Float, Int64
from torch import Tensor

from attnflow._core.checks import Indices
from attnflow.knowledge.index import EntryIndex, Neighbours, SearchMode
from attnflow.knowledge.index.arguments import Vectors, matrix
from attnflow.knowledge.memory_layer.retrieval import Retrieval
from attnflow.knowledge.store import Store, StoreError

_BLOCK: Final = 1 << 15  # entries whose thresholds are computed at once
_TRIES: Final = 100


class IndexedEntries:
    """A matrix of entries with one index for all layers: rows [E | thresholds of every layer, part and head].

    It holds a copy: after a change of E or of what computes thresholds, make it anew (or use a store, which follows
    single edits). Thresholds have a column for each use; `search` is that of `EntryIndex`.
    """

    def __init__(
        self,
        entries: Float[Tensor, "entries entry_dim"],
        thresholds: Float[Tensor, "entries columns"],
        search: SearchMode = "auto",
    ) -> None:
        self.index = EntryIndex(entries.shape[1], thresholds.shape[1], search=search)
        self.index.build(torch.cat([entries.detach(), thresholds.detach()], dim=1).float())

    @property
    def num_entries(self) -> int:
        """Rows."""
        return len(self.index.rows)

    def rows(self) -> Float[Tensor, "entries width"]:
        """[E | columns], a view."""
        return self.index.rows

    def read(self, queries: Float[Tensor, "queries entry_dim"], retrieval: Retrieval, column: int | None) -> Neighbours:
        """The entries that a retrieval asks for by score + threshold, with their rows."""
        neighbours = _searched(self.index, queries, retrieval, column)
        rows = self.index.rows[neighbours.ids.clamp(min=0)]
        absent = neighbours.ids < 0
        return replace(neighbours, rows=rows.masked_fill(absent[..., None], 0) if bool(absent.any()) else rows)


class StoredKnowledge:
    """A `Source` whose entries are in a store, with the thresholds that a model's layers give them.

    Thresholds B1(E) are a function of the entry and of the model. They are stored beside the entry, so that one index
    serves all layers; `stale` says where they are not the model's, `write_thresholds` computes them anew. Entries are
    deleted, found and counted by the store itself.

    Args:
        store: with as many threshold columns as `thresholds` gives.
        thresholds: of entries [n, d_E], all columns of all layers: [n, columns]; None where the layers' thresholds
            belong to no entry, and the store's columns to somebody else.

    Raises:
        ValueError: the store has another number of columns.
    """

    def __init__(self, store: Store, thresholds: Callable[[Tensor], Tensor] | None = None) -> None:
        columns = store.num_thresholds if thresholds is None else thresholds(torch.zeros(1, store.dim)).shape[1]
        if columns != store.num_thresholds:
            raise ValueError(
                f"the model's layers have {columns} columns of thresholds, the store has {store.num_thresholds}: make "
                f"it with Store.open(uri, dim={store.dim}, num_thresholds={columns})"
            )
        self.store = store
        self._thresholds = thresholds

    @property
    def num_entries(self) -> int:
        """How many there are now."""
        return len(self.store)

    def insert(self, embeddings: Vectors, **columns: Any) -> Int64[Tensor, " n"]:
        """`Store.insert` with the model's thresholds; `columns` are its other arguments."""
        rows, thresholds = self._with_thresholds(embeddings)
        return self.store.insert(embeddings=rows, thresholds=thresholds, **columns)

    def upsert(self, ids: Indices, embeddings: Vectors, **columns: Any) -> None:
        """`Store.upsert` with the model's thresholds; `columns` are its other arguments."""
        rows, thresholds = self._with_thresholds(embeddings)
        self.store.upsert(ids=ids, embeddings=rows, thresholds=thresholds, **columns)

    def stale(self, tolerance: float = 1e-4) -> Int64[Tensor, " n"]:
        """Ids of entries whose stored thresholds differ from the model's by more than a tolerance.

        Cost: the thresholds of all entries, in blocks.
        """
        stale = [torch.zeros(0, dtype=torch.int64)]
        if self._thresholds is None:
            return stale[0]
        for ids in self.store.ids().split(_BLOCK):
            rows = self.store.rows(ids)
            wrong = (self._computed(rows[:, : self.store.dim]) - rows[:, self.store.dim :]).abs() > tolerance
            stale.append(ids[wrong.any(dim=1)])
        return torch.cat(stale)

    def write_thresholds(self) -> int:
        """Write the model's thresholds where they are stale; returns for how many entries. Their versions go up."""
        ids = self.stale()
        for block in ids.split(_BLOCK):
            entries = self.store.get(block)
            for encoder in {entry.encoder for entry in entries}:
                some = [entry for entry in entries if entry.encoder == encoder]
                vectors = torch.stack([entry.embedding for entry in some])
                self.upsert(ids=[entry.id for entry in some], embeddings=vectors, encoder=encoder)
        return len(ids)

    def rows(self) -> Float[Tensor, "entries width"]:
        """[E | columns] of all entries, in the order of `store.ids()`; a copy."""
        return self.store.rows()

    def read(self, queries: Float[Tensor, "queries entry_dim"], retrieval: Retrieval, column: int | None) -> Neighbours:
        """As that of `IndexedEntries`; made again where another thread deletes an entry before its row is read."""
        for _ in range(_TRIES):
            neighbours = _searched(self.store, queries, retrieval, column)
            ids, places = neighbours.ids.unique(return_inverse=True)
            held = ids[ids >= 0]
            try:
                rows = self.store.rows(held)
            except KeyError:
                continue
            if len(held) < len(ids):  # -1 sorts first: where there is no entry, a row of zeros
                rows = torch.cat([rows.new_zeros(1, rows.shape[1]), rows])
            return replace(neighbours, rows=rows[places])
        raise StoreError(f"entries were deleted faster than {_TRIES} searches could read them")

    def _with_thresholds(self, embeddings: Vectors) -> tuple[Tensor, Tensor | None]:
        rows = torch.from_numpy(matrix("embeddings", embeddings, self.store.dim))
        return rows, None if self._thresholds is None else self._computed(rows)

    @torch.no_grad()
    def _computed(self, rows: Tensor) -> Tensor:
        assert self._thresholds is not None
        return self._thresholds(rows).float()


def _searched(searched: EntryIndex | Store, queries: Tensor, retrieval: Retrieval, column: int | None) -> Neighbours:
    mode = None if retrieval.search in ("auto", "dense") else retrieval.search
    if retrieval.k is not None:
        return searched.search(queries, retrieval.k, threshold_column=column, mode=mode)
    return searched.range(queries, cast(float, retrieval.threshold), threshold_column=column, mode=mode)


# Entries that a `KnowledgeReader` can search: rows of width d_E, with a column of thresholds for each use.
Source = IndexedEntries | StoredKnowledge
