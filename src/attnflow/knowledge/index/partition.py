"""Approximate search: rows in lists around centroids, of which a query reads those that promise most.

The lists are faiss's inverted lists (IVF, flat), which take single rows in and out. Which list a row belongs to and
which lists a query reads is decided here, because faiss would let one column of large thresholds decide both.
"""

from __future__ import annotations

import math
from typing import Any, Final, NamedTuple

import numpy as np

from attnflow._core.errors import MissingExtra
from attnflow.knowledge.index.exact import Floats, Ints, best, of_column

_ROUNDS: Final = 6
_VISITED: Final = 8  # groups in which the nearest centroid is looked for: with 3, ten times as many lists were read
_LISTS: Final = 6.0  # lists for sqrt(rows): with 4, clusters that share a list made queries read twenty times as much
_SAMPLE: Final = 32  # rows a list to learn the centroids from
_CUT: Final = 4.0  # lengths of an entry
_DEVIATIONS: Final = 3.0  # about the largest of a few hundred draws of a normal distribution
_PROMISES: Final = 1 << 21  # held at once
_ROWS: Final = 1 << 16  # whose lists are looked for at once


class Sample(NamedTuple):
    """To calibrate with: queries [n, dim] by threshold column, how many entries each is to find, and what they are."""

    parts: list[tuple[Floats, int | None]]
    k: int
    what: str


class Partition:
    """Rows [entry | thresholds] in lists of rows that lie near to each other.

    Lists are k-means clusters of [entry | thresholds / sqrt(their number)]: a query sees one of the thresholds, so
    that together they are to weigh as much as one. They are cut at four times the typical length of an entry: uncut, a
    penalty of 1e4 in one column leaves the distances between entries below rounding. A query of a threshold column
    reads the lists with the largest promise,

        q . centroid + 3 ||q|| spread / sqrt(dim) + (largest threshold of the list in that column),

    about the largest score in the list: one entry with a large threshold is not hidden by its neighbours, wide lists
    are not taken for their centroids, and lists of entries with a large penalty are read last.

    There are `num_lists` of them, of which a query reads `probes`. Rows are [n, dim + num_thresholds], n > 0, and their
    numbers 0 to n - 1. Without faiss, raises `MissingExtra`.

    Cost: about 6 sqrt(n) lists, O(n^1.25 x width) time, and a copy of the rows.
    """

    def __init__(self, rows: Floats, dim: int) -> None:
        self._faiss = faiss()
        self._dim, width = dim, rows.shape[1]
        draw = np.random.default_rng(0)
        lists = min(len(rows), max(1, round(_LISTS * len(rows) ** 0.5)))
        sample = rows[_some(draw, len(rows), _SAMPLE * lists)]
        self._cut = _CUT * float(np.sqrt(np.square(sample[:, :dim]).sum(axis=1).mean()))
        self._centroids = Centroids(self._points(sample), lists, draw)
        self._entries = self._centroids.positions[:, :dim].copy()
        self.num_lists = len(self._centroids)
        self._ceilings = np.full((self.num_lists, width - dim), -np.inf, dtype=np.float32)
        self.probes = self.num_lists
        self._quantizer = self._faiss.IndexFlatIP(width)  # never asked; faiss wants one
        product = self._faiss.METRIC_INNER_PRODUCT
        self._lists: Any = self._faiss.IndexIVFFlat(self._quantizer, width, self.num_lists, product)
        self._lists.is_trained = True
        self._lists.set_direct_map_type(self._faiss.DirectMap.Hashtable)
        self.add(rows, np.arange(len(rows)))

    def add(self, rows: Floats, slots: Ints) -> None:
        """Put rows with new numbers into their lists."""
        if not len(slots):
            return
        lists = self.lists_of(rows)
        np.maximum.at(self._ceilings, lists, rows[:, self._dim :])
        rows, slots = np.ascontiguousarray(rows), np.ascontiguousarray(slots)
        pointer = self._faiss.swig_ptr
        self._lists.add_core(len(rows), pointer(rows), pointer(slots), pointer(lists))

    def remove(self, slots: Ints) -> None:
        """Take rows out of their lists. The largest thresholds of a list are not lowered."""
        if len(slots):
            self._lists.remove_ids(slots)

    def lists_of(self, rows: Floats) -> Ints:
        """The list of each row."""
        blocks = [rows[start : start + _ROWS] for start in range(0, len(rows), _ROWS)]
        return np.concatenate([self._centroids.nearest(self._points(block)) for block in blocks])

    def best(self, queries: Floats, column: int | None, k: int) -> tuple[Floats, Ints]:
        """The k best rows of the lists that are read: scores in falling order and slots, -inf and -1 where fewer."""
        parts = [
            self._lists.search_preassigned(self._augmented(part, column), k, self._read(part, column), None)
            for part in self._parts(queries)
        ]
        scores, slots = (np.concatenate(values) for values in zip(*parts, strict=True))
        return np.where(slots < 0, np.float32(-np.inf), scores), slots

    def above(self, queries: Floats, column: int | None, bound: float) -> tuple[Floats, Ints, Ints]:
        """All rows above a score of the lists that are read: scores, slots and their queries, in no order."""
        parts = [
            self._lists.range_search_preassigned(self._augmented(part, column), bound, self._read(part, column), None)
            for part in self._parts(queries)
        ]
        counts = np.concatenate([np.diff(ends) for ends, _, _ in parts]).astype(np.int64)
        _, scores, slots = (np.concatenate(values) for values in zip(*parts, strict=True))
        return scores, slots, np.repeat(np.arange(len(queries)), counts)

    def calibrate(self, rows: Floats, sample: Sample, target: float) -> tuple[str, float]:
        """From now on, read the fewest lists that hold `target` of the best rows of a sample of queries.

        Half of what the target allows to be missed is kept in reserve, since later queries are others. Returns that in
        words, and the part of all rows that is in those lists, on average.
        """
        ranks = np.concatenate([self._ranks(*part, rows, min(sample.k, len(rows))).ravel() for part in sample.parts])
        wanted = 1 - (1 - target) / 2
        needed = int(np.sort(ranks)[min(math.ceil(wanted * len(ranks)), len(ranks)) - 1]) + 1
        self.set_probes(needed)
        count = sum(len(queries) for queries, _ in sample.parts)
        read = sum(len(queries) * self.share(queries, column) for queries, column in sample.parts) / count
        held = f"hold {(ranks < needed).mean():.3f} of the {sample.k} best of {count} {sample.what}"
        return f"{needed:,} of {self.num_lists:,} lists {held}, {read:.1%} of the entries", read

    def set_probes(self, probes: int) -> None:
        """Read this many lists from now on."""
        self.probes = self._lists.nprobe = probes

    def share(self, queries: Floats, column: int | None) -> float:
        """The part of all rows that is in the lists that are read, on average."""
        sizes = np.array([self._lists.get_list_size(number) for number in range(self.num_lists)])
        return float(sizes[self._read(queries, column)].sum(axis=1).mean() / max(sizes.sum(), 1))

    def imitated(self, rows: Floats, count: int = 256) -> Sample:
        """Queries like rows: moved as far as other rows lie from their centroids, each with its largest threshold."""
        draw = np.random.default_rng(1)
        chosen, others = (rows[_some(draw, len(rows), count)] for _ in range(2))
        moved = chosen[:, : self._dim] + (others[:, : self._dim] - self._entries[self.lists_of(others)])
        parts: list[tuple[Floats, int | None]] = [(moved, None)]
        if rows.shape[1] > self._dim:
            columns = chosen[:, self._dim :].argmax(axis=1)
            parts = [(moved[columns == column], int(column)) for column in np.unique(columns)]
        return Sample(parts, 32, "entries moved at random")

    def _ranks(self, queries: Floats, column: int | None, rows: Floats, k: int) -> Ints:
        """How many lists a query would read before that of each of its k best rows, [queries, k]."""
        truth = best(queries, *of_column(rows, self._dim, column), k)[1].numpy()
        order = np.argsort(-self._promise(queries, column), axis=1)
        ranks = np.empty_like(order)
        np.put_along_axis(ranks, order, np.arange(self.num_lists)[None], axis=1)
        return np.take_along_axis(ranks, self.lists_of(rows[truth.ravel()]).reshape(truth.shape), axis=1)

    def _parts(self, queries: Floats) -> list[Floats]:
        step = max(1, _PROMISES // self.num_lists)
        return [queries[start : start + step] for start in range(0, len(queries), step)]

    def _points(self, rows: Floats) -> Floats:
        if rows.shape[1] == self._dim:
            return rows
        thresholds = np.clip(rows[:, self._dim :], -self._cut, self._cut)
        return np.concatenate([rows[:, : self._dim], thresholds / np.float32(thresholds.shape[1] ** 0.5)], axis=1)

    def _promise(self, queries: Floats, column: int | None) -> Floats:
        promise = products(queries, self._entries)
        lengths = np.sqrt(np.square(queries).sum(axis=1, keepdims=True) / self._dim)
        promise += (_DEVIATIONS * lengths) * self._centroids.spread
        return promise if column is None else promise + self._ceilings[:, column]

    def _read(self, queries: Floats, column: int | None) -> Ints:
        """The lists that queries read."""
        if self.probes == self.num_lists:
            return np.broadcast_to(np.arange(self.num_lists), (len(queries), self.num_lists))
        promise = self._promise(queries, column)
        return np.argpartition(promise, self.num_lists - self.probes, axis=1)[:, self.num_lists - self.probes :]

    def _augmented(self, queries: Floats, column: int | None) -> Floats:
        tail = np.zeros((len(queries), self._ceilings.shape[1]), dtype=np.float32)
        if column is not None:
            tail[:, column] = 1
        return np.concatenate([queries, tail], axis=1)


def faiss() -> Any:
    """The module, imported on first use."""
    try:
        import faiss
    except ImportError as error:
        raise MissingExtra("faiss", "knowledge", "an approximate search") from error
    return faiss


def _some(draw: np.random.Generator, total: int, count: int) -> Ints:
    """Up to `count` of `total`, in rising order."""
    return np.sort(draw.choice(total, size=min(count, total), replace=False))


class Centroids:
    """About `count` centroids in sqrt(count) groups: k-means of all points, then of each group's points.

    `positions` are theirs, [centroids, width], group by group; `spread` is, for each, the root mean square distance of
    its points [points, width], of which there are at least `count`.

    Cost: points x sqrt(count) x width, a few times.
    """

    def __init__(self, points: Floats, count: int, draw: np.random.Generator) -> None:
        self._origin = points.mean(axis=0)  # distances keep their digits when all points share a large offset
        points = points - self._origin
        top = _k_means(points, points[draw.choice(len(points), max(1, round(count**0.5)), replace=False)], draw)
        member = _nearest(points, top)[0]
        self._groups: list[Floats] = []
        for group in range(len(top)):
            own = points[member == group]
            wanted = min(len(own), max(1, round(count * len(own) / len(points))))
            if wanted:
                self._groups.append(_k_means(own, _spaced(own, wanted, draw), draw))
        self._number()
        # A centroid that no point is nearest to would be read for nothing; equal points leave many such.
        filled = np.split(np.bincount(self._find(points)[0], minlength=len(self)) > 0, self._starts[1:-1])
        groups = [group[own] for group, own in zip(self._groups, filled, strict=True)]
        self._groups = [group for group in groups if len(group)]
        self._number()
        lists, nearness = self._find(points)
        squares = np.maximum(np.square(points).sum(axis=1) - 2 * nearness, 0)
        sizes = np.maximum(np.bincount(lists, minlength=len(self)), 1)
        self.spread = np.sqrt(np.bincount(lists, squares, minlength=len(self)) / sizes).astype(np.float32)

    def _number(self) -> None:
        self._top = np.stack([group.mean(axis=0) for group in self._groups])
        self._starts = np.cumsum([0, *(len(group) for group in self._groups)])
        self.positions = np.concatenate(self._groups) + self._origin

    def __len__(self) -> int:
        return len(self.positions)

    def nearest(self, points: Floats) -> Ints:
        """The nearest centroid of each point, of those in the eight groups that are nearest to it."""
        return self._find(points - self._origin)[0]

    def _find(self, points: Floats) -> tuple[Ints, Floats]:
        """The nearest centroid of each point, and how near."""
        groups, visited = len(self._groups), min(_VISITED, len(self._groups))
        visits = np.argpartition(_nearness(points, self._top), groups - visited, axis=1)[:, groups - visited :].ravel()
        order, ends = visits.argsort(kind="stable"), np.bincount(visits, minlength=groups).cumsum()
        lists = np.zeros(len(points), dtype=np.int64)
        nearest = np.full(len(points), -np.inf, dtype=np.float32)
        for group, which in enumerate(np.split(order // visited, ends[:-1])):
            places, near = _nearest(points[which], self._groups[group])
            better = near > nearest[which]
            which = which[better]
            lists[which], nearest[which] = places[better] + self._starts[group], near[better]
        return lists, nearest


def products(points: Floats, others: Floats) -> Floats:
    """points @ others.T; of one point by one thread: a second one saves 0.03 ms, and on a busy machine costs 20."""
    return np.vecdot(others, points[0])[None] if len(points) == 1 else points @ others.T


def _nearness(points: Floats, centroids: Floats) -> Floats:
    """Half of (|point|^2 - distance^2), for each point and centroid."""
    return products(points, centroids) - np.square(centroids).sum(axis=1) / 2


def _nearest(points: Floats, centroids: Floats) -> tuple[Ints, Floats]:
    near = _nearness(points, centroids)
    places = near.argmax(axis=1)
    return places, np.take_along_axis(near, places[:, None], axis=1)[:, 0]


def _spaced(points: Floats, count: int, draw: np.random.Generator) -> Floats:
    """Points drawn with probability proportional to the squared distance to those drawn before (k-means++)."""
    squares, chosen = np.square(points).sum(axis=1), [int(draw.integers(len(points)))]
    distance = np.full(len(points), np.inf)
    while len(chosen) < count:
        last = points[chosen[-1]]
        distance = np.minimum(distance, np.maximum(squares - 2 * np.vecdot(points, last) + last @ last, 0))
        sums = distance.cumsum()
        chosen.append(min(int(np.searchsorted(sums, draw.random() * sums[-1], side="right")), len(points) - 1))
    return points[chosen]


def _k_means(points: Floats, centroids: Floats, draw: np.random.Generator) -> Floats:
    """Lloyd's iterations; a centroid without points starts anew at a random one."""
    centroids = centroids.copy()
    for _ in range(_ROUNDS):
        lists = _nearest(points, centroids)[0]
        sizes = np.bincount(lists, minlength=len(centroids))
        filled, starts = sizes > 0, np.cumsum(sizes) - sizes
        sums = np.add.reduceat(points[lists.argsort(kind="stable")], starts[filled], axis=0)
        centroids[filled] = sums / sizes[filled, None]
        centroids[~filled] = points[draw.integers(len(points), size=int((~filled).sum()))]
    return centroids
