"""How many lists of a partition a query must read to find what it is to find."""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np

from attnflow.knowledge.index.exact import Floats, Ints, best
from attnflow.knowledge.index.partition import Partition


@dataclass(frozen=True, eq=False)
class Sample:
    """Queries to calibrate with.

    Attributes:
        queries: [queries, dim].
        columns: the threshold column of each, int64 [queries], or None: without thresholds.
        k: how many entries each is to find.
        what: what they are, for a message.
    """

    queries: Floats
    columns: Ints | None
    k: int
    what: str


def imitated(partition: Partition, rows: Floats, dim: int, count: int = 256, k: int = 32) -> Sample:
    """A sample of entries moved as far as entries lie from their centroids, each with its largest threshold."""
    queries, columns = partition.imitations(rows, np.random.default_rng(1), count)
    return Sample(queries, columns if rows.shape[1] > dim else None, k, "entries moved at random")


def calibrate(partition: Partition, rows: Floats, dim: int, sample: Sample, target: float) -> str:
    """Let a partition read the fewest lists that hold `target` of the best entries of a sample; returns that in words.

    Half of what the target allows to be missed is kept in reserve, since later queries are others.
    """
    ranks = np.concatenate(
        [
            partition.ranks(queries, column, rows[slots]).ravel()
            for queries, column in _by_column(sample)
            for slots in [_truth(queries, column, rows, dim, sample.k)]
        ]
    )
    wanted = 1 - (1 - target) / 2
    needed = int(np.sort(ranks)[min(math.ceil(wanted * len(ranks)), len(ranks)) - 1]) + 1
    partition.set_probes(needed)
    held = float((ranks < needed).mean())
    return (
        f"{needed:,} of {partition.num_lists:,} lists hold {held:.3f} of the {sample.k} best of {len(sample.queries)} "
        f"{sample.what}"
    )


def share(partition: Partition, sample: Sample) -> float:
    """The part of all entries that a query of a sample reads."""
    parts = [(len(queries), partition.share(queries, column)) for queries, column in _by_column(sample)]
    return sum(count * part for count, part in parts) / len(sample.queries)


def _by_column(sample: Sample) -> list[tuple[Floats, int | None]]:
    if sample.columns is None:
        return [(sample.queries, None)]
    return [(sample.queries[sample.columns == column], int(column)) for column in np.unique(sample.columns)]


def _truth(queries: Floats, column: int | None, rows: Floats, dim: int, k: int) -> Ints:
    thresholds = None if column is None else rows[:, dim + column]
    return best(queries, rows[:, :dim], thresholds, min(k, len(rows)))[1].numpy()
