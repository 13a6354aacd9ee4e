"""Whether one layer of a mask lets everything flow that ever will, decided on its intervals."""

from __future__ import annotations

from typing import Final

import numpy as np

from attnflow._core.checks import IntArray
from attnflow.masks.intervals import BoolArray, IntervalRows

_MOST: Final = 1 << 24  # (row, key) pairs or intervals that are looked at


def holds(rows: IntervalRows, row: IntArray, starts: IntArray, ends: IntArray) -> BoolArray:
    """Whether row `row[t]` holds all of [starts[t], ends[t]), for each t. Cost: O(log intervals) each."""
    base = rows.row_index() * (rows.num_keys + 1)
    low, high = rows.starts + base, rows.ends + base
    offset = row * (rows.num_keys + 1)
    slot = np.searchsorted(low, offset + starts, side="right") - 1  # the only interval that can hold it
    return (slot >= 0) & (np.append(high, -1)[slot] >= offset + ends)


def holds_diagonal(rows: IntervalRows) -> BoolArray:
    """Whether each row holds its own number."""
    own = np.arange(rows.num_rows)
    return holds(rows, own, own, own + 1)


def is_transitive(rows: IntervalRows) -> bool | None:
    """Whether a square relation, with its diagonal, is transitive; None where that takes too many steps to tell.

    It is iff the row of each key that a row holds lies in that row. Where the rows of neighbouring keys grow along an
    interval, that of its last key is enough; and of what the row before holds as well, nothing new is to be seen if
    that row lies in this one.

    Cost: O(intervals log intervals) where rows hold few stretches of growing rows, as those of streams do.
    """
    rows = rows.with_diagonal()
    n, row = rows.num_rows, rows.row_index()
    starts, ends = rows.starts.astype(np.int64), rows.ends.astype(np.int64)
    if len(starts) > _MOST:
        return None
    grows, falls = (_lies_in_neighbour(rows, row, starts, ends, step) for step in (1, -1))
    falls &= ~np.append(False, grows[:-1])  # equal rows count as growing: falls[k]: row k is a true part of row k - 1
    summit = np.flatnonzero(~grows & ~falls)
    first, last = np.searchsorted(summit, starts), np.searchsorted(summit, ends)
    if int((last - first).sum()) > _MOST:
        return None
    inner = np.repeat(np.arange(len(row)), last - first)
    within = np.arange(len(inner)) - np.repeat(np.cumsum(last - first) - (last - first), last - first)
    turns = ~grows[starts]
    query = np.concatenate([row[inner], row, row[turns]])
    key = np.concatenate([summit[first[inner] + within], ends - 1, starts[turns]])
    seen = (key == query) | (grows[query - 1] & (query > 0) & holds(rows, query - 1, key, key + 1))
    pairs = np.unique(query[~seen] * n + key[~seen])
    query, key = np.divmod(pairs, max(n, 1))
    lengths = np.diff(rows.indptr)[key]
    if int(lengths.sum()) > _MOST:
        return None
    below = rows.take(key)
    return bool(
        holds(rows, np.repeat(query, lengths), below.starts.astype(np.int64), below.ends.astype(np.int64)).all()
    )


def _lies_in_neighbour(rows: IntervalRows, row: IntArray, starts: IntArray, ends: IntArray, step: int) -> BoolArray:
    """For each row whether the next one (the one before, where `step` is -1) holds all of it."""
    n = rows.num_rows
    other = row + step
    there = (other >= 0) & (other < n)
    wrong = ~there
    wrong[there] = ~holds(rows, other[there], starts[there], ends[there])
    return np.bincount(row[wrong], minlength=n) == 0
