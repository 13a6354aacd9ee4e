"""Writes that are in the log and not yet in the table: rows in place of those of the table, and ids that are gone."""

from __future__ import annotations

import threading

import numpy as np

from attnflow._core.checks import IntArray
from attnflow.knowledge.store.entry import Flags, Rows, Stamped


class Recent:
    """The last state of every id that was written; each change happens as a whole."""

    def __init__(self, width: int) -> None:
        self._none = Rows.of([], width)
        self._states: dict[int, tuple[Rows, int, int] | None] = {}  # where a row is, and its checksum; None: gone
        self._lock = threading.Lock()

    def __len__(self) -> int:
        return len(self._states)

    def put(self, rows: Rows, checks: IntArray) -> None:
        """Rows that were written."""
        keys, sums = rows.id.tolist(), checks.tolist()
        states = {key: (rows, place, sums[place]) for place, key in enumerate(keys)}
        with self._lock:
            self._states.update(states)

    def drop(self, ids: IntArray) -> None:
        """Ids that were deleted."""
        states = dict.fromkeys(ids.tolist())
        with self._lock:
            self._states.update(states)

    def clear(self) -> None:
        """All is in the table."""
        with self._lock:
            self._states = {}

    def rows(self, ids: IntArray | None = None) -> tuple[Rows, IntArray, IntArray]:
        """(rows, their checksums, ids of the table that do not count): all, or as far as these ids go."""
        with self._lock:
            if ids is None:
                states = list(self._states.items())
            else:
                states = [(key, self._states[key]) for key in ids.tolist() if key in self._states]
        there = [state for _, state in states if state is not None]
        places = dict[int, tuple[Rows, list[int]]]()
        for rows, place, _ in there:
            places.setdefault(id(rows), (rows, []))[1].append(place)
        rows = Rows.joined([self._none, *(rows.take(some) for rows, some in places.values())])
        sums = {int(rows.id[place]): check for rows, place, check in there}
        checks = np.array([sums[key] for key in rows.id.tolist()], dtype=np.int64)
        return rows, checks, np.array([key for key, _ in states], dtype=np.int64)

    def over(self, table: Stamped, ids: IntArray | None = None) -> Stamped:
        """The rows of a table, or those of these ids, with the recent ones in place of theirs."""
        rows, checks, hidden = self.rows(ids)
        if not len(hidden):
            return table
        stay = others(table.ids, hidden)
        return Stamped(
            np.concatenate([table.ids[stay], rows.id]),
            np.concatenate([table.updated[stay], rows.updated]),
            np.concatenate([table.vectors[stay], rows.vector[:, : table.vectors.shape[1]]]),
            np.concatenate([table.checks[stay], checks]),
        )


def others(ids: IntArray, hidden: IntArray) -> Flags:
    """Which ids are not among the hidden ones."""
    return ~np.isin(ids, hidden)
