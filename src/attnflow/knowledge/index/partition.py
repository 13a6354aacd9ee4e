"""Approximate search: rows in lists around centroids, of which a query reads those that may hold what it looks for.

Which list a row belongs to and which lists a query reads is decided here, because faiss would let one column of large
thresholds decide both, and reads as many lists for every query.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any, Final

import numpy as np
import numpy.typing as npt
import torch

from attnflow.knowledge.index.centroids import Centroids, products
from attnflow.knowledge.index.exact import Floats, GrowingMatrix, Ints, above, best, of_column
from attnflow.knowledge.index.lists import InvertedLists

_LISTS: Final = 6.0  # lists for sqrt(rows): with 4, clusters that share a list made queries read twenty times as much
_SPARE: Final = 2  # times as many can be added later
_SAMPLE: Final = 32  # rows a list to learn the centroids from
_CUT: Final = 4.0  # lengths of an entry
_ORDER: Final = 2.5  # deviations: of a few hundred draws of a normal distribution about the largest has 3
_ROUNDING: Final = 1e-5  # of the length of a centroid: where all rows of a list are equal, rounding decides
_STRAYS: Final = 1.2  # times the largest distance of a row from its centroid: rows beyond it get lists of their own
_PROMISES: Final = 1 << 21  # held at once
_ROWS: Final = 1 << 16  # whose lists are looked for at once
# The part of all rows from which on a query reads all of them: one alone takes as long for a row of a list as for one
# of all; many at once read all in the time in which lists give a sixth to a tenth.
MOST: Final = (0.3, 0.1)
_FEW: Final = 8  # queries
_NEXT: Final = (
    32,
    4,
)  # lists that are read at once after the first ones, or times as many as these: a round is 0.03 ms
_LOWEST: Final = np.float32(np.finfo(np.float32).min)


class Partition:
    """Rows [entry | thresholds] in lists of rows that lie near to each other, and the latest ones beside them.

    Lists are k-means clusters of [entry | thresholds / sqrt(their number)]: a query sees one of the thresholds, so
    that together they are to weigh as much as one. They are cut at four times the typical length of an entry: uncut, a
    penalty of 1e4 in one column leaves the distances between entries below rounding. The promise of a list to a query
    of a threshold column is

        q . centroid + deviations x ||q|| x spread / sqrt(dim) + (largest threshold of the list in that column),

    where spread is the largest distance of a row from the centroid: about the largest score in the list, so that one
    entry with a large threshold is not hidden by its neighbours, wide lists are not taken for their centroids, and
    lists of entries with a large penalty are read last.

    A query reads the `probes` lists that promise most, and after them every list whose promise is not below the k-th
    score so far: the fewer near rows there are, as for queries unlike them and after deletes, the more it reads. Where
    that comes to too many rows, it reads them all: its answer is exact. Which number of deviations holds the promised
    recall depends on k and is measured (calibration.py).

    Rows that are added are not in lists: each query reads all of them, until `absorb` puts them into lists. Rows are
    [n, dim + num_thresholds], n > 0, and their numbers 0 to n - 1. Without faiss, raises `MissingExtra`.

    Attributes:
        probes: lists that every query reads.
        deviations: by k; a search of another k takes those of the next ones below and above, and one of more than all
            is exact.

    Cost: about 6 sqrt(n) lists, O(n^1.25 x width) time, and a copy of the rows.
    """

    def __init__(self, rows: Floats, dim: int) -> None:
        self.dim, width = dim, rows.shape[1]
        self._draw = np.random.default_rng(0)
        lists = min(len(rows), max(1, round(_LISTS * len(rows) ** 0.5)))
        sample = rows[some(self._draw, len(rows), _SAMPLE * lists)]
        self._cut = _CUT * float(np.sqrt(np.square(sample[:, :dim]).sum(axis=1).mean()))
        self._centroids = Centroids(self._points(sample), lists, self._draw)
        self._room = _SPARE * len(self._centroids)
        self._lists = InvertedLists(width, self._room)
        self._recent, self._recent_slots = GrowingMatrix(width), GrowingMatrix(1, torch.int64)
        self._homes, self._ages = np.zeros((2, 0), dtype=np.int64)
        self._age, self._count = 0, len(rows)
        self.probes, self.deviations = 1, {1: math.inf}
        self.centroids, self.sizes = np.zeros((0, dim), dtype=np.float32), np.zeros(0, dtype=np.int64)
        self._widen(len(rows))
        self._file(rows, np.arange(len(rows)), self.nearest(rows))
        self._age = 1

    def __len__(self) -> int:
        return self._count

    @property
    def num_lists(self) -> int:
        """How many there are now."""
        return len(self.centroids)

    @property
    def num_recent(self) -> int:
        """Rows that are in no list."""
        return len(self._recent)

    def homes(self, slots: Ints) -> Ints:
        """The list of each row, below 0 of one that is in none."""
        return self._homes[slots]

    def ages(self, count: int) -> Ints:
        """Of each of `count` rows: 0 if lists were made with it, else 1 and one more for each `absorb` before it."""
        return self._ages[:count]

    def add(self, rows: Floats, slots: Ints) -> None:
        """Rows with new numbers, which each query reads."""
        self._widen(int(slots.max(initial=-1)) + 1)
        self._count += len(slots)
        places = self._recent.add(torch.from_numpy(rows))
        self._recent_slots.add(torch.from_numpy(slots)[:, None])
        self._homes[slots], self._ages[slots] = -1 - places.numpy(), self._age

    def remove(self, slots: Ints) -> None:
        """Take rows away. What was measured of a list is not lowered."""
        homes = self._homes[slots]
        self._count -= len(slots)
        filed, places = slots[homes >= 0], torch.from_numpy(-1 - homes[homes < 0])
        self._lists.remove(filed)
        self.sizes -= np.bincount(homes[homes >= 0], minlength=self.num_lists)
        moved = self._recent.remove(places)[:, 1]
        self._recent_slots.remove(places)
        self._homes[self._recent_slots.used[moved, 0].numpy()] = -1 - moved.numpy()

    def move(self, rows: Floats, sources: Ints, targets: Ints) -> None:
        """Rows get other numbers, which no row has."""
        homes = self._homes[sources]
        self._homes[targets], self._ages[targets] = homes, self._ages[sources]
        filed = homes >= 0
        self._lists.remove(sources[filed])
        self._lists.add(rows[filed], targets[filed], homes[filed])
        self._recent_slots.used[-1 - homes[~filed], 0] = torch.from_numpy(targets[~filed])

    def absorb(self) -> bool:
        """Put the rows that are in no list into lists, those far from all centroids into new ones.

        Returns whether there was room for these.
        """
        rows, slots = self._recent.used.numpy().copy(), self._recent_slots.used[:, 0].numpy().copy()
        self._recent.set(self._recent.used[:0])
        self._recent_slots.set(self._recent_slots.used[:0])
        if not len(slots):
            return True
        homes = self.nearest(rows)
        strays = self._distances(rows, homes) > _STRAYS * self.spread[homes]
        each = max(self.sizes.sum() / self.num_lists, 1)
        wanted = round(strays.sum() / each)
        fits = self.num_lists + wanted <= self._room
        if wanted and fits:
            self._centroids.extend(self._points(rows[strays]), wanted, self._draw)
            homes = self.nearest(rows)
        self._file(rows, slots, homes)
        self._extend(rows, homes)
        self._age += 1
        return fits

    def measure(self, rows: Floats) -> None:
        """The spread and the largest thresholds of each list, of the rows that are in it now."""
        self.spread = np.zeros(0, dtype=np.float32)
        self._ceilings = np.zeros((rows.shape[1] - self.dim, 0), dtype=np.float32)
        for start in range(0, len(rows), _ROWS):
            block = rows[start : start + _ROWS]
            homes = self._homes[start : start + len(block)]
            self._extend(block[homes >= 0], homes[homes >= 0])

    def nearest(self, rows: Floats) -> Ints:
        """The list that each row is for."""
        blocks = [rows[start : start + _ROWS] for start in range(0, len(rows), _ROWS)]
        return np.concatenate([self._centroids.nearest(self._points(block)) for block in blocks])

    def from_centroids(self, rows: Floats) -> Floats:
        """Entries less their centroids."""
        return rows[:, : self.dim] - self.centroids[self.nearest(rows)]

    def deviations_of(self, k: int) -> float:
        """How many hold the recall of the k best; infinite where that was not measured."""
        below = max((size for size in self.deviations if size <= k), default=None)
        above = min((size for size in self.deviations if size >= k), default=None)
        return math.inf if below is None or above is None else max(self.deviations[below], self.deviations[above])

    @property
    def most(self) -> int:
        """The largest k up to which the recall is held by less than reading everything; 0: there is none."""
        return max((k for k in self.deviations if math.isfinite(self._deviations_up_to(k))), default=0)

    def best(self, rows: Floats, queries: Floats, column: int | None, k: int) -> tuple[Floats, Ints]:
        """The k best of all `rows`, n >= k, that are found: scores in falling order and slots."""
        deviations = self.deviations_of(k)
        if math.isinf(deviations):
            return _exact(queries, rows, self.dim, column, k)
        parts = [self._best(rows, part, column, k, deviations) for part in self._parts(queries)]
        scores, slots = (np.concatenate(values) for values in zip(*parts, strict=True))
        return scores, slots

    def above(self, rows: Floats, queries: Floats, column: int | None, bound: float) -> tuple[Floats, Ints, Ints]:
        """All of `rows` above a score that are found: scores, slots and their queries, in no order."""
        scores, slots, owners, first = [], [], [], 0
        for part in self._parts(queries):
            for some, others, whose in self._above(rows, part, column, bound):
                scores.append(some)
                slots.append(others)
                owners.append(whose + first)
            first += len(part)
        return np.concatenate(scores), np.concatenate(slots), np.concatenate(owners)

    def terms(self, queries: Floats, columns: Ints) -> tuple[Floats, Floats]:
        """What lists promise [queries, lists] without deviations, and how much each deviation is; column -1: none."""
        promise = products(queries, self.centroids)
        if (columns >= 0).any():
            promise += np.where(columns[:, None] < 0, np.float32(0), self._ceilings[columns])
        if not self.sizes.all():
            promise[:, self.sizes == 0] = -np.inf
        lengths = np.sqrt(np.square(queries).sum(axis=1, keepdims=True) / np.float32(self.dim))
        return promise, lengths * self.spread

    def ranks(self, promise: Floats, deviation: Floats) -> Ints:
        """The place of each list in the order in which a query reads them, [queries, lists]."""
        order = np.argsort(-(promise + _ORDER * deviation), axis=1)
        ranks = np.empty_like(order)
        np.put_along_axis(ranks, order, np.arange(order.shape[1])[None], axis=1)
        return ranks

    def augmented(self, queries: Floats, columns: Ints) -> Floats:
        """[query | onehot(column)]; column -1: none."""
        if not len(self._ceilings):
            return np.ascontiguousarray(queries)
        tail = np.zeros((len(queries), len(self._ceilings)), dtype=np.float32)
        some = np.flatnonzero(columns >= 0)
        tail[some, columns[some]] = 1
        return np.concatenate([queries, tail], axis=1)

    def _deviations_up_to(self, k: int) -> float:
        """How many hold the recall of any number up to k."""
        return max(each for size, each in self.deviations.items() if size <= k)

    def _best(self, rows: Floats, queries: Floats, column: int | None, k: int, each: float) -> tuple[Floats, Ints]:
        columns = np.full(len(queries), -1 if column is None else column)
        asked = self.augmented(queries, columns)
        promise, deviation = self.terms(queries, columns)
        lists = largest(promise + _ORDER * deviation, self.probes)
        promise += np.float32(each) * deviation
        promise[np.arange(len(queries))[:, None], lists] = -np.inf
        scores, slots = _merged(self._lists.best(asked, lists, k), self._recent_best(queries, column, k))
        read, todo, most = self.sizes[lists].sum(axis=1), np.arange(len(queries)), self._bound(len(queries), len(rows))
        count, costly = max(_NEXT[0], _NEXT[1] * self.probes), np.zeros(len(queries), dtype=np.bool_)
        while True:  # each round reads the lists that may hold more, up to a number that doubles
            may = promise >= np.maximum(scores[todo, -1:], _LOWEST)
            more = may.any(axis=1)
            costly[todo] = more & (read > most)
            go = np.flatnonzero(more & (read <= most))
            if not len(go):
                break
            todo, promise, read, may = todo[go], promise[go], read[go], may[go]
            lists = largest(promise, min(count, int(may.sum(axis=1).max())))
            lists = np.where(np.take_along_axis(may, lists, axis=1), lists, -1)
            which, place = np.nonzero(lists >= 0)
            promise[which, lists[which, place]] = -np.inf
            read = read + np.where(lists < 0, 0, self.sizes[lists]).sum(axis=1)
            found = self._lists.best(asked[todo], lists, k)
            scores[todo], slots[todo] = _merged((scores[todo], slots[todo]), found)
            count *= 2
        if costly.any():
            scores[costly], slots[costly] = _exact(queries[costly], rows, self.dim, column, k)
        return scores, slots

    def _above(
        self, rows: Floats, queries: Floats, column: int | None, bound: float
    ) -> Iterator[tuple[Floats, Ints, Ints]]:
        """(scores, slots, queries), some at a time."""
        columns = np.full(len(queries), -1 if column is None else column)
        promise, deviation = self.terms(queries, columns)
        first = largest(promise + _ORDER * deviation, self.probes)
        most = self.most
        each = self._deviations_up_to(most) if most else 0.0
        may = promise + np.float32(each) * deviation > np.float32(bound)
        np.put_along_axis(may, first, True, axis=1)
        cheap = np.flatnonzero((may @ self.sizes <= self._bound(len(queries), len(rows))) & (most > 0))
        counts = np.full(len(queries), most + 1)
        if len(cheap):
            asked = self.augmented(queries[cheap], columns[cheap])
            recent = above(queries[cheap], *of_column(self._recent.used.numpy(), self.dim, column), bound)
            parts = [self._lists.above(asked, may[cheap], bound), recent[:3]]
            scores, slots, owners = (np.concatenate(values) for values in zip(*parts, strict=True))
            slots[len(parts[0][0]) :] = self._recent_slots.used[:, 0].numpy()[recent[1]]
            counts[cheap] = np.bincount(owners, minlength=len(cheap))
            few = counts[cheap[owners]] <= most
            yield scores[few], slots[few], cheap[owners[few]]
        dear = np.flatnonzero(counts > most)
        scores, slots, owners, _ = above(queries[dear], *of_column(rows, self.dim, column), bound)
        yield scores, slots, dear[owners]

    def _recent_best(self, queries: Floats, column: int | None, k: int) -> tuple[Floats, Ints] | None:
        if not len(self._recent):
            return None
        entries, thresholds = of_column(self._recent.used.numpy(), self.dim, column)
        scores = products(queries, entries)
        if thresholds is not None:
            scores += thresholds
        places = largest(scores, k)
        return np.take_along_axis(scores, places, axis=1), self._recent_slots.used[:, 0].numpy()[places]

    def _bound(self, queries: int, rows: int) -> float:
        """Rows in lists from which on a query reads all rows."""
        return MOST[queries > _FEW] * rows

    def _file(self, rows: Floats, slots: Ints, homes: Ints) -> None:
        """Rows with new numbers into lists."""
        self.centroids = np.ascontiguousarray(self._centroids.positions[:, : self.dim])
        self.sizes = np.pad(self.sizes, (0, self.num_lists - len(self.sizes)))
        self.sizes += np.bincount(homes, minlength=self.num_lists)
        self._homes[slots] = homes
        self._lists.add(rows, slots, homes)

    def _extend(self, rows: Floats, homes: Ints) -> None:
        """Lists hold these rows, too."""
        more = self.num_lists - len(self.spread)
        self.spread = np.pad(self.spread, (0, more))
        self._ceilings = np.pad(self._ceilings, ((0, 0), (0, more)), constant_values=-np.inf)
        np.maximum.at(self.spread, homes, self._distances(rows, homes))
        np.maximum.at(self._ceilings.T, homes, rows[:, self.dim :])

    def _distances(self, rows: Floats, homes: Ints) -> Floats:
        """From the centroids, and what rounding may add."""
        centroids = self.centroids[homes]
        lengths = np.sqrt(np.square(centroids).sum(axis=1))
        return np.sqrt(np.square(rows[:, : self.dim] - centroids).sum(axis=1)) + _ROUNDING * lengths

    def _widen(self, count: int) -> None:
        if count > len(self._homes):
            more = (0, max(count, len(self._homes) * 3 // 2) - len(self._homes))
            self._homes, self._ages = np.pad(self._homes, more), np.pad(self._ages, more)

    def _parts(self, queries: Floats) -> list[Floats]:
        step = max(1, _PROMISES // self.num_lists)
        return [queries[start : start + step] for start in range(0, len(queries), step)]

    def _points(self, rows: Floats) -> Floats:
        if rows.shape[1] == self.dim:
            return rows
        thresholds = np.clip(rows[:, self.dim :], -self._cut, self._cut)
        return np.concatenate([rows[:, : self.dim], thresholds / np.float32(thresholds.shape[1] ** 0.5)], axis=1)


def some(draw: np.random.Generator, total: int, count: int) -> Ints:
    """Up to `count` of `total`, in rising order."""
    return np.sort(draw.choice(total, size=min(count, total), replace=False))


def largest(values: npt.NDArray[np.floating[Any]], count: int) -> Ints:
    """Where the `count` largest of each row are, in no order; all where there are fewer."""
    total = values.shape[1]
    if count >= total:
        return np.tile(np.arange(total), (len(values), 1))
    return np.argpartition(values, total - count, axis=1)[:, total - count :]


def _exact(queries: Floats, rows: Floats, dim: int, column: int | None, k: int) -> tuple[Floats, Ints]:
    scores, slots, _ = best(queries, *of_column(rows, dim, column), k)
    return scores.numpy(), slots.numpy()


def _merged(first: tuple[Floats, Ints], second: tuple[Floats, Ints] | None) -> tuple[Floats, Ints]:
    """As many of the best of two lots as the first has."""
    if second is None:
        return first
    scores, slots = np.concatenate([first[0], second[0]], axis=1), np.concatenate([first[1], second[1]], axis=1)
    order = np.argsort(-scores, axis=1, kind="stable")[:, : first[0].shape[1]]
    return np.take_along_axis(scores, order, axis=1), np.take_along_axis(slots, order, axis=1)
