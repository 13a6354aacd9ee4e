"""One index over all entries: which are there, and the best of them by an exact or an approximate search."""

from __future__ import annotations

import math
import threading
from typing import Final, Literal, NamedTuple

import numpy as np
import torch
from jaxtyping import Float
from torch import Tensor
from torch.nn import functional

from attnflow._core.checks import IntArray, integer, number, preview
from attnflow.knowledge.certificate import Certificate, Neighbours
from attnflow.knowledge.store import entry
from attnflow.knowledge.store.entry import Vectors
from attnflow.knowledge.store.search import Floats, InvertedLists, above, best, of_column, padded

Mode = Literal["exact", "approximate"]

MOST_EXACT: Final = 1_000_000  # entries up to which a search is exact unless it says otherwise
_MOST: Final = 1 << 20  # entries asked for where there are fewer: results have room for all k
_GROWTH: Final = 1.5


class _View(NamedTuple):
    """An immutable view of the entries: ascending ids, and [entry | thresholds] of each."""

    ids: IntArray
    rows: Floats


class EntryIndex:
    """Search of the best entries for a query, with one index for all layers (knowledge, sec. 4, corrected).

    A row is [e | B_1(e) .. B_L(e)]: an entry and its threshold in each layer or head. With [q ; onehot(l)] as the query
    of column l, the inner product is exactly score + threshold. Approximate search keeps the rows a second time, in
    inverted lists. The first such search builds them, and they are rebuilt once half of the entries have changed.
    Threads may search during a change: a search sees all of it or nothing.

    >>> index = EntryIndex(2, num_thresholds=1)
    >>> index.load(np.arange(2), np.array([[1.0, 0.0, 0.0], [0.0, 1.0, 0.5]], dtype=np.float32))
    >>> index.search(torch.tensor([1.0, 1.0]), k=2, threshold_column=0).ids
    tensor([1, 0])
    """

    def __init__(self, dim: int, num_thresholds: int = 0) -> None:
        self.dim, self.num_thresholds = dim, num_thresholds
        self._lock = threading.RLock()  # of whoever changes entries, and of the lists
        self.load(np.zeros(0, dtype=np.int64), np.zeros((0, dim + num_thresholds), dtype=np.float32))

    def __len__(self) -> int:
        return len(self._view.ids)

    @property
    def ids(self) -> IntArray:
        """Ids of all entries, ascending."""
        return self._view.ids

    @property
    def rows(self) -> Float[Tensor, "n width"]:
        """[entry | thresholds] of all entries, in the order of `ids`; not a copy."""
        return torch.from_numpy(self._view.rows)

    @property
    def mode(self) -> Mode:
        """The default search: "exact" or "approximate"."""
        return "approximate" if len(self) > MOST_EXACT else "exact"

    @property
    def reason(self) -> str:
        """Explain `mode`, with the recall measured when the lists were built."""
        said, lists = f"all entries are compared, up to {MOST_EXACT:,} of them", self._lists
        if lists is None:
            return said
        return (
            f"{said}; an approximate search reads {lists.probes:,} of {lists.num_lists:,} lists, and with stored "
            f"entries as queries it found {100 * lists.recall:.1f} % of the ten best"
        )

    def load(self, ids: IntArray, rows: Floats) -> None:
        """Replace all entries, given with ascending ids; the arrays are not copied."""
        with self._lock:
            self._lists: InvertedLists | None = None
            self._changed = 0  # entries since the lists were made
            self._show(ids, rows)

    def places(self, ids: IntArray) -> IntArray:
        """Return the row of each id, -1 if unknown."""
        return _places(self._view, ids)

    def take(self, ids: IntArray) -> Float[Tensor, "ids width"]:
        """Copy the rows of these ids; a KeyError names unknown ones."""
        view = self._view
        places = _places(view, ids)
        if len(ids) and places.min() < 0:
            raise KeyError(f"the store has no entries with ids {preview(ids[places < 0])}")
        return torch.from_numpy(view.rows[places])

    def put(self, ids: IntArray, rows: Floats) -> None:
        """Insert or replace entries. This copies all rows unless the ids are above all others."""
        with self._lock:
            view, order = self._view, np.argsort(ids)
            ids, rows = ids[order], rows[order]
            present = _places(view, ids)
            if self._lists is not None:
                self._lists.drop(ids[present >= 0])
                self._lists.put(ids, rows)
                self._changed += len(ids)
            if not len(view.ids) or (len(ids) and ids[0] > view.ids[-1]):
                self._append(ids, rows)
                return
            new = present < 0
            merged = np.concatenate([view.ids, ids[new]])
            order = np.argsort(merged)
            kept = view.rows.copy()
            kept[present[~new]] = rows[~new]
            if new.any():
                kept = np.concatenate([kept, rows[new]])[order]
            self._show(merged[order], kept)

    def drop(self, ids: IntArray) -> None:
        """Remove entries that are there. This copies all rows."""
        with self._lock:
            stays = np.ones(len(self), dtype=np.bool_)
            stays[self.places(ids)] = False
            if self._lists is not None:
                self._lists.drop(ids)
                self._changed += len(ids)
            self._show(self._view.ids[stays], self._view.rows[stays])

    def search(
        self,
        queries: Vectors,
        k: int,
        threshold_column: int | None = None,
        mode: Mode | None = None,
    ) -> Neighbours:
        """Find the k entries with the largest query . entry + threshold, on the CPU; see `Store.search`."""
        if mode not in (None, "exact", "approximate"):
            raise ValueError(f'mode must be "exact", "approximate" or None, got {mode!r}')
        flat, shape, view = *entry.queries(queries, self.dim), self._view
        column = entry.column(threshold_column, self.num_thresholds)
        total = len(view.ids)
        k = integer("k", k, minimum=1, maximum=max(total, _MOST))
        if approximate := (mode or self.mode) == "approximate":
            scores, ids = self._best_of_lists(flat, column, min(k, total))
            active = None
        else:
            scores, slots, active = best(flat, *of_column(view.rows, self.dim, column), min(k, total))
            ids, active = torch.from_numpy(view.ids[slots.numpy()]), active.view(shape)
        last = scores[:, -1] if total else torch.full((len(flat),), -math.inf)
        scores = functional.pad(scores, (0, k - scores.shape[1]), value=-math.inf).view(*shape, k)
        ids = functional.pad(ids, (0, k - ids.shape[1]), value=-1).view(*shape, k)
        return Neighbours(ids, scores, Certificate(approximate, k, total, last.view(shape), active))

    def range(self, queries: Vectors, threshold: float, threshold_column: int | None = None) -> Neighbours:
        """Find all entries with query . entry + threshold > `threshold`, padded to the longest answer."""
        flat, shape, view = *entry.queries(queries, self.dim), self._view
        bound = float(threshold) if threshold in (math.inf, -math.inf) else number("threshold", threshold)
        column = entry.column(threshold_column, self.num_thresholds)
        scores, slots, owners, active = above(flat, *of_column(view.rows, self.dim, column), bound)
        order = np.lexsort((-scores, owners))
        ordered = (torch.from_numpy(values[order]) for values in (scores, view.ids[slots], owners))
        all_scores, all_ids = (values.view(*shape, values.shape[1]) for values in padded(*ordered, count=len(flat)))
        counts, last = (all_ids >= 0).sum(dim=-1), torch.full(shape, bound)
        certificate = Certificate(False, counts, len(view.ids), last, torch.from_numpy(active).view(shape))
        return Neighbours(all_ids, all_scores, certificate)

    def _show(self, ids: IntArray, rows: Floats) -> None:
        self._room = _View(ids, rows)  # what the view is the beginning of
        self._view = self._room

    def _append(self, ids: IntArray, rows: Floats) -> None:
        """Append entries in spare room, beyond the rows that running searches see."""
        first, needed = len(self), len(self) + len(ids)
        if needed > len(self._room.ids):
            more = int(needed * _GROWTH) - first
            self._room = _View(
                np.concatenate([self._view.ids, np.zeros(more, dtype=np.int64)]),
                np.concatenate([self._view.rows, np.zeros((more, rows.shape[1]), dtype=np.float32)]),
            )
        self._room.ids[first:needed], self._room.rows[first:needed] = ids, rows
        self._view = _View(self._room.ids[:needed], self._room.rows[:needed])

    def _best_of_lists(self, queries: Floats, column: int | None, k: int) -> tuple[Tensor, Tensor]:
        with self._lock:
            if self._changed > len(self) // 2:
                self._lists, self._changed = None, 0
            if self._lists is None and len(self):
                self._lists = InvertedLists(*self._view, self.dim)
            if self._lists is None or not len(queries):
                return torch.full((len(queries), k), -math.inf), torch.full((len(queries), k), -1)
            scores, ids = self._lists.best(queries, column, k)
        return torch.from_numpy(scores), torch.from_numpy(ids)


def _places(view: _View, ids: IntArray) -> IntArray:
    if not len(view.ids):
        return np.full(len(ids), -1)
    places = np.minimum(np.searchsorted(view.ids, ids), len(view.ids) - 1)
    return np.where(view.ids[places] == ids, places, -1)
