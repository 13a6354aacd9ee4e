"""Where a layer's entries come from when they are not a tensor: an index in memory, or a store."""

from __future__ import annotations

from dataclasses import replace
from typing import Literal, Protocol, runtime_checkable

import torch
from jaxtyping import Float
from torch import Tensor

from attnflow.knowledge.index import EntryIndex, Neighbours

Mode = Literal["exact", "approximate"] | None


@runtime_checkable
class Source(Protocol):
    """Entries that a `KnowledgeReader` can search: rows of width d_E, with a column of thresholds for each use."""

    @property
    def num_entries(self) -> int:
        """How many there are now."""
        ...

    def rows(self) -> Float[Tensor, "entries width"]:
        """All of them with all their thresholds, [E | columns], for dense evaluation."""
        ...

    def search(self, queries: Float[Tensor, "queries entry_dim"], k: int, column: int, mode: Mode = None) -> Neighbours:
        """The k entries with the highest score + threshold, with their rows."""
        ...

    def range(
        self, queries: Float[Tensor, "queries entry_dim"], threshold: float, column: int, mode: Mode = None
    ) -> Neighbours:
        """All entries whose score + threshold is above a value, padded to the longest answer."""
        ...


class IndexedEntries:
    """A matrix of entries with one index for all layers: rows [E | thresholds of every layer, part and head].

    It holds a copy: after a change of E or of what computes thresholds, make it anew (or use a store, which follows
    single edits).

    Args:
        entries: E.
        thresholds: a column for each use.
        search: "auto", "exact" or "approximate", the index's default.
        target_recall: that an approximate search is calibrated to.
    """

    def __init__(
        self,
        entries: Float[Tensor, "entries entry_dim"],
        thresholds: Float[Tensor, "entries columns"],
        search: Literal["auto", "exact", "approximate"] = "auto",
        target_recall: float = 0.99,
    ) -> None:
        self.index = EntryIndex(entries.shape[1], thresholds.shape[1], search=search, target_recall=target_recall)
        self.index.build(torch.cat([entries.detach(), thresholds.detach()], dim=1).float())

    @property
    def num_entries(self) -> int:
        """Rows."""
        return len(self.index.rows)

    def rows(self) -> Float[Tensor, "entries width"]:
        """[E | columns], a view."""
        return self.index.rows

    def search(self, queries: Float[Tensor, "queries entry_dim"], k: int, column: int, mode: Mode = None) -> Neighbours:
        """The k entries with the highest score + threshold."""
        return self._with_rows(self.index.search(queries, k, column, mode=mode))

    def range(
        self, queries: Float[Tensor, "queries entry_dim"], threshold: float, column: int, mode: Mode = None
    ) -> Neighbours:
        """All entries above a score."""
        return self._with_rows(self.index.range(queries, threshold, column, mode=mode))

    def _with_rows(self, neighbours: Neighbours) -> Neighbours:
        rows = self.index.rows[neighbours.ids.clamp(min=0)]
        absent = neighbours.ids < 0
        return replace(neighbours, rows=rows.masked_fill(absent[..., None], 0) if bool(absent.any()) else rows)
