"""Centroids of many points, found and looked up in groups, so that neither costs points x centroids."""

from __future__ import annotations

from typing import Final

import numpy as np

from attnflow.knowledge.index.exact import Floats, Ints

_ROUNDS: Final = 6
_VISITED: Final = 8  # groups in which the nearest centroid is looked for: with 3, ten times as many lists were read


class Centroids:
    """About `count` centroids in sqrt(count) groups: k-means of all points, then of each group's points.

    `positions` are theirs, [centroids, width], group by group; there are at least `count` points [points, width].

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

    def extend(self, points: Floats, count: int, draw: np.random.Generator) -> None:
        """About `count` centroids more, of these points; the numbers of the others stay."""
        more = Centroids(points, count, draw)
        self._groups += [group + (more._origin - self._origin) for group in more._groups]
        self._number()

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
