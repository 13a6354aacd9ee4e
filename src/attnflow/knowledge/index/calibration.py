"""How much of an index a query must read for the promised recall: measured on queries like its rows and unlike them."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Final, NamedTuple

import numpy as np

from attnflow.knowledge.index.exact import Floats, Ints, best
from attnflow.knowledge.index.partition import MOST, Partition, some

USUAL: Final = 32  # entries that a query is asked for where nothing else is known
FEW: Final = 8
_SIZES: Final = (1, FEW, USUAL, 128, 512)
_QUERIES: Final = 64  # of each kind
_UNLIKE: Final = 0.02  # what reads of queries unlike the entries weigh against those of queries like them
_ROUND: Final = 1000  # rows that are read in the time in which a query looks for more lists and reads them
_ROUNDING: Final = 1e-5  # of the best score


class Questions(NamedTuple):
    """Queries [n, dim] of one kind, the threshold column of each (-1: none), and whether they are like the entries."""

    what: str
    queries: Floats
    columns: Ints
    like: bool = True


class Kind(NamedTuple):
    """What was measured of one kind of queries."""

    what: str
    number: int
    recall: float


class Measured(NamedTuple):
    """What searches do now: recall@k by kind of query, and the part of the entries that queries like them read."""

    k: int
    kinds: Sequence[Kind]
    read: float

    @property
    def recall(self) -> float:
        """The lowest."""
        return min(kind.recall for kind in self.kinds)

    def __str__(self) -> str:
        said = ", ".join(f"{kind.recall:.3f} of {kind.number} {kind.what}" for kind in self.kinds)
        return f"recall@{self.k} {said}; {self.read:.1%} of the entries are read"


def like(partition: Partition, rows: Floats, slots: Ints, what: str, seed: int) -> Questions:
    """Queries like these rows: half are rows, half moved as far as others lie from their centroids.

    Half of them ask for the column of the row's largest threshold, and half for none.
    """
    draw, dim = np.random.default_rng(seed), partition.dim
    chosen, others = rows[slots], rows[slots[draw.permutation(len(slots))]]
    queries = chosen[:, :dim].copy()
    moved = np.arange(len(slots)) % 2 == 1
    if moved.any():
        queries[moved] += partition.from_centroids(others[moved])
    columns = np.full(len(slots), -1)
    if rows.shape[1] > dim:
        asks = np.arange(len(slots)) % 4 < 2
        columns[asks] = chosen[asks, dim:].argmax(axis=1)
    return Questions(what, queries, columns)


def unlike(partition: Partition, rows: Floats, seed: int, count: int = _QUERIES) -> list[Questions]:
    """Queries unlike the rows, as long as they are: random directions, and sums, differences and negatives of rows."""
    draw, dim = np.random.default_rng(seed), partition.dim
    first, second = (rows[draw.choice(len(rows), count)] for _ in range(2))
    signs = np.array([[1, 1], [1, -1], [-1, 0], [1, 1]], dtype=np.float32)[np.arange(count) % 4]
    blends = (signs[:, :1] * first[:, :dim] + signs[:, 1:] * second[:, :dim]).astype(np.float32)
    length = np.sqrt(np.square(first[:, :dim]).sum(axis=1).mean() / dim)
    random = (length * draw.standard_normal((count, dim))).astype(np.float32)
    columns = np.full(count, -1)
    if rows.shape[1] > dim:
        columns[::2] = draw.integers(rows.shape[1] - dim, size=len(columns[::2]))
    return [
        Questions("in random directions", random, columns, like=False),
        Questions("that blend entries", blends, columns, like=False),
    ]


def everything(partition: Partition, rows: Floats, seed: int) -> list[Questions]:
    """Queries of each kind: like any row, like rows of small lists, like the latest, and unlike all."""
    draw, total = np.random.default_rng(seed), len(rows)
    asked = [like(partition, rows, some(draw, total, 2 * _QUERIES), "like the entries", seed)]
    homes = partition.homes(np.arange(total))
    _, firsts = np.unique(homes, return_index=True)  # a list is as likely as another, however few rows it has
    asked.append(like(partition, rows, firsts[some(draw, len(firsts), _QUERIES)], "like rare entries", seed))
    asked += latest(partition, rows, seed)
    return asked + unlike(partition, rows, seed)


def latest(partition: Partition, rows: Floats, seed: int) -> list[Questions]:
    """Queries like rows that came after the lists were made, half of them like the last of these."""
    draw, ages = np.random.default_rng(seed), partition.ages(len(rows))
    later, last = np.flatnonzero(ages > 0), np.flatnonzero(ages >= max(ages.max(), 1))
    half = _QUERIES // 2
    slots = np.concatenate([later[some(draw, len(later), half)], last[some(draw, len(last), half)]])
    return [like(partition, rows, slots, "like the latest", seed)] if len(slots) else []


def calibrate(
    partition: Partition, rows: Floats, asked: Sequence[Questions], k: int, target: float, most: float
) -> dict[int, float]:
    """Let a partition read as little as holds the target recall for each kind of question, for small and large k.

    Half of what the target allows to be missed is kept in reserve, since later queries are others. Of the numbers of
    lists that every query reads, and the deviations that each then needs, those are taken with which queries like the
    entries read least for k and for a few; those unlike them count little. For a k for which that is more than `most`
    of the rows, searches read them all. Returns what part of the rows is read in lists, by k.
    """
    sizes = sorted({min(size, len(rows)) for size in (*_SIZES, k)})
    pairs = [_Pairs(partition, rows, one, sizes) for one in asked]
    wanted, few, k = 1 - (1 - target) / 2, min(FEW, k, len(rows)), min(k, len(rows))
    least, probes, deviations = math.inf, 1, dict.fromkeys(sizes, math.inf)
    for count in (2**i for i in range(partition.num_lists.bit_length())):
        needed = {size: max(one.needed(size, count, wanted) for one in pairs) for size in sizes}
        cost = np.mean([_cost(pairs, size, count, needed[size]) for size in {few, k}])
        if cost < least:
            least, probes, deviations = cost, count, needed
        if count * 3 > partition.num_lists:
            break
    read = {size: _like(pairs, size, probes, deviations[size]) for size in sizes}
    partition.probes = probes
    partition.deviations = {size: math.inf if read[size] > most else deviations[size] for size in sizes}
    return read


def adapt(partition: Partition, rows: Floats, asked: Sequence[Questions], k: int, target: float) -> float:
    """Let a partition read as much more as these questions need; returns the part of the rows that they read for k."""
    sizes = sorted({min(size, len(rows)) for size in partition.deviations})
    pairs = [_Pairs(partition, rows, one, sizes) for one in asked]
    wanted = 1 - (1 - target) / 2
    for size, now in partition.deviations.items():
        more = [one.needed(min(size, len(rows)), partition.probes, wanted) for one in pairs]
        partition.deviations[size] = max(now, *more)
    return _like(pairs, min(k, sizes[-1]), partition.probes, partition.deviations_of(k))


def _cost(pairs: Sequence[_Pairs], k: int, probes: int, deviations: float) -> float:
    reads = [one.read(k, probes, deviations, rounds=True) for one in pairs]
    own = [read for read, one in zip(reads, pairs, strict=True) if one.like]
    return float(np.mean(own) + _UNLIKE * np.mean(reads))


def _like(pairs: Sequence[_Pairs], k: int, probes: int, deviations: float) -> float:
    """What queries like the entries read."""
    return float(np.mean([one.read(k, probes, deviations) for one in pairs if one.like]))


def measured(partition: Partition, rows: Floats, asked: Sequence[Questions], k: int) -> Measured:
    """The recall of searches for the k best as they are now, and what they read."""
    kinds: list[Kind] = []
    reads: list[float] = []
    for one in asked:
        pairs = _Pairs(partition, rows, one, [k])
        asks = zip(one.queries[:, None], one.columns.tolist(), strict=True)
        scores = [partition.best(rows, query, None if column < 0 else column, k)[0] for query, column in asks]
        kinds.append(Kind(one.what, len(scores), recall_of(np.concatenate(scores), pairs.truth)))
        if one.like:
            reads.append(pairs.read(k, partition.probes, partition.deviations_of(k)))
    return Measured(k, tuple(kinds), float(np.mean(reads)))


def recall_of(scores: Floats, truth: Floats) -> float:
    """The share of the best scores [queries, k] that were found; equal ones count as equal."""
    rounding = _ROUNDING * np.abs(truth).max(axis=1, keepdims=True)  # the two searches add in another order
    return float((scores >= truth[:, -1:] - rounding).mean())


class _Pairs:
    """Questions and the best rows of each: where these are, and what their lists promise."""

    def __init__(self, partition: Partition, rows: Floats, asked: Questions, sizes: Sequence[int]) -> None:
        self._partition, self.like = partition, asked.like
        truth, slots, _ = best(partition.augmented(asked.queries, asked.columns), rows, None, max(sizes))
        self.truth = truth.numpy()
        self._homes = partition.homes(slots.numpy())
        self._promise, self._deviation = partition.terms(asked.queries, asked.columns)
        self._ranks = partition.ranks(self._promise, self._deviation)

    def needed(self, size: int, probes: int, wanted: float) -> float:
        """The deviations with which that share of the best `size` rows is in lists that are read."""
        homes = np.maximum(self._homes[:, :size], 0)
        lacking = self.truth[:, size - 1, None] - np.take_along_axis(self._promise, homes, axis=1)
        each = np.take_along_axis(self._deviation, homes, axis=1)
        deviations = np.maximum(lacking, 0) / np.maximum(each, np.finfo(np.float32).tiny)
        free = (self._homes[:, :size] < 0) | (np.take_along_axis(self._ranks, homes, axis=1) < probes)
        ordered = np.sort(np.where(free, 0, deviations), axis=None)
        return float(ordered[min(math.ceil(wanted * ordered.size), ordered.size) - 1])

    def read(self, k: int, probes: int, deviations: float, rounds: bool = False) -> float:
        """The part of the rows that are read for the k best, on average; with `rounds` what going back takes, too."""
        if math.isinf(deviations):
            return 1.0
        first = self._ranks < probes
        may = self._promise + np.float32(deviations) * self._deviation >= self.truth[:, k - 1, None]
        read = (may | first) @ self._partition.sizes + self._partition.num_recent
        total = len(self._partition)
        again = _ROUND / total * (may & ~first).any(axis=1) if rounds else 0
        return float((np.where(read > MOST[0] * total, 1, read / total) + again).mean())
