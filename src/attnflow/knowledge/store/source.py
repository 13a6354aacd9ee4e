"""`EntrySource`: gives layers the entries of a store, current after each edit, in place of a parameter."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Final, cast

import torch
from jaxtyping import Float, Int64
from torch import Tensor

from attnflow._core.checks import Indices
from attnflow._core.per_thread import untraced
from attnflow.knowledge.retrieval import Neighbours, Retrieval
from attnflow.knowledge.store import Store
from attnflow.knowledge.store.rows import EntryRows

_BLOCK: Final = 1 << 15  # entries whose thresholds are computed at once


class EntrySource:
    """The entries of a store that layers read: rows [E | thresholds of each layer, part and head], with one index.

    An edit acts on the next read. Thresholds B1(E) depend on the entry and the model, with a column for each layer,
    part and head. The store holds them beside its entries, and `stale` finds those that differ from the model's.

    Args:
        store: an open store, which stays open.
        thresholds: maps entries [n, d_E] to the columns of all layers, [n, columns]; None if thresholds do not depend
            on entries.

    Raises:
        ValueError: the store has another number of threshold columns.
    """

    def __init__(self, store: Store, thresholds: Callable[[Tensor], Tensor] | None = None) -> None:
        columns = store.num_thresholds if thresholds is None else thresholds(torch.zeros(1, store.dim)).shape[1]
        if columns != store.num_thresholds:
            raise ValueError(
                f"the model's layers need {columns} threshold columns, but the store has {store.num_thresholds}: "
                f"create it with Store.open(uri, dim={store.dim}, num_thresholds={columns})"
            )
        self.store, self._thresholds = store, thresholds
        # The rows that were last read, and their entries as models have them.
        self._read: tuple[EntryRows, dict[tuple[torch.device, torch.dtype], Tensor]] = (store.now(), {})

    def rows(self, ids: Indices | None = None) -> Float[Tensor, "entries width"]:
        """[E | columns] of these ids, by default of all as in `store.ids()`; an unknown id raises `KeyError`."""
        return self.store.now().tensor if ids is None else self.store.rows(ids)

    @untraced  # entries may be edited between two tokens
    def entries(self, like: Tensor) -> Float[Tensor, "entries entry_dim"]:
        """Return E in the device and precision of `like`, copied there once after each edit."""
        rows, read = self.store.now(), self._read
        if read[0] is not rows:
            self._read = read = (rows, {})
        key = like.device, like.dtype
        if key not in read[1]:
            read[1][key] = rows.tensor[:, : rows.dim].to(like)
        return read[1][key]

    def read(self, queries: Float[Tensor, "queries entry_dim"], retrieval: Retrieval, column: int | None) -> Neighbours:
        rows = self.store.now()  # of one moment: another thread may delete entries that are found
        if retrieval.k is not None:
            mode = None if retrieval.search in ("auto", "dense") else retrieval.search
            near = self.store.nearest(rows, queries, retrieval.k, column, mode)
        else:
            near = rows.range(queries, cast(float, retrieval.threshold), column)
        places = torch.from_numpy(rows.places(near.ids.numpy().ravel())).view(near.ids.shape)
        read = rows.tensor[places.clamp(min=0)] if len(rows) else rows.tensor.new_zeros(*places.shape, rows.width)
        return replace(near, rows=read.masked_fill_((places < 0)[..., None], 0))

    @torch.no_grad()
    def thresholds(self, rows: Float[Tensor, "entries entry_dim"]) -> Float[Tensor, "entries columns"] | None:
        """Compute the model's thresholds of these entries; None if thresholds do not depend on entries."""
        return None if self._thresholds is None else self._thresholds(rows).float()

    def stale(self, tolerance: float = 1e-4) -> Int64[Tensor, " n"]:
        stale, dim = [torch.zeros(0, dtype=torch.int64)], self.store.dim
        for ids in self.store.ids().split(_BLOCK):
            rows = self.rows(ids)
            computed = self.thresholds(rows[:, :dim])
            if computed is not None:
                stale.append(ids[((computed - rows[:, dim:]).abs() > tolerance).any(dim=1)])
        return torch.cat(stale)

    def write_thresholds(self) -> None:
        """Overwrite stale thresholds with the model's; the versions of these entries go up."""
        for block in self.stale().split(_BLOCK):
            entries = self.store.get(block)
            for encoder in {entry.encoder for entry in entries}:
                some = [entry for entry in entries if entry.encoder == encoder]
                rows = torch.stack([entry.embedding for entry in some])
                ids = [entry.id for entry in some]
                self.store.upsert(ids=ids, embeddings=rows, thresholds=self.thresholds(rows), encoder=encoder)
