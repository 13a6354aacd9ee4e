"""Which positions reach which after some layers, by row intervals or bits; for one position, walks and paths."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np

from attnflow._core import checks
from attnflow._core.checks import IntArray
from attnflow.masks.intervals import BoolArray, IntervalRows, offsets
from attnflow.masks.mask import Mask
from attnflow.masks.numbering import RENAMED, Numbered, same_rank, too_many
from attnflow.order import dense
from attnflow.order import products as interval_products
from attnflow.order.products import compose, room, stays_few

_LARGEST: Final = 1 << 23  # intervals of a product, where bits would take as much memory


@dataclass(frozen=True, eq=False)
class Reach:
    content: IntervalRows | dense.Words
    size: int

    @classmethod
    def of(cls, rows: IntervalRows) -> Reach:
        return cls(rows if stays_few(rows) else dense.from_rows(rows), rows.num_keys)

    @classmethod
    def nothing_moved(cls, size: int) -> Reach:
        node = np.arange(size)
        return cls.of(IntervalRows.build(node, node, node + 1, size, size))

    def through(self, layer: IntervalRows, what: str, matrices: int = 2, limit: int | None = None) -> Reach:
        """Reach after one more layer with its diagonal; above `limit` intervals, `matrices` bit matrices take over."""
        content = self.content
        if isinstance(content, IntervalRows):
            most = max(room(layer), min(self.size**2 // 64, _LARGEST)) if limit is None else limit
            product = compose(layer, content, most)
            if product is not None:
                return Reach(product, self.size)
            dense.require_room(matrices, self.size, what)
            content = dense.from_rows(content)
        return Reach(dense.product(layer, content), self.size)

    def counts(self, weight: IntArray | None = None) -> IntArray:
        """Number of positions in each row, or the sum of their weights, int64[rows]."""
        if isinstance(self.content, IntervalRows):
            return self.content.counts() if weight is None else self.content.sums(offsets(weight))
        if weight is None or (weight == 1).all():
            return np.bitwise_count(self.content).sum(axis=1, dtype=np.int64)
        rows = np.arange(len(self.content))
        parts = [self.table(rows[part]) @ weight for part in dense.chunks(len(rows), self.size)]
        return np.concatenate([rows[:0], *parts])

    def holds(self, row: int, position: int) -> bool:
        if isinstance(self.content, IntervalRows):
            return self.content.holds(np.array([row]), np.array([position])).item()
        return bool(int(self.content[row, position // 64]) >> position % 64 & 1)

    def table(self, rows: IntArray) -> BoolArray:
        if isinstance(self.content, IntervalRows):
            return self.content.to_bool(rows)
        return dense.unpack(self.content[rows], self.size)

    def intervals(self) -> IntervalRows:
        return self.content if isinstance(self.content, IntervalRows) else dense.to_rows(self.content, self.size)


def products(layers: Sequence[IntervalRows]) -> list[Reach]:
    """Reach after 0..L layers; raises ValueError if neither intervals nor bits fit memory."""
    size, what = layers[0].num_rows, f"the flow through {len(layers)} layers"
    if size <= interval_products.LONG:
        dense.require_room(len(layers) + 1, size, what)
    reached = [Reach.nothing_moved(size)]
    for layer in layers:
        reached.append(reached[-1].through(layer, what, len(layers) + 1))
    return reached


def common_numbering(masks: Sequence[Mask]) -> tuple[list[IntervalRows], IntArray | None]:
    """(relation of each mask with its diagonal, rank or None) in one numbering that keeps all small."""
    distinct = {id(mask): mask for mask in masks}
    if masks[0].num_queries <= interval_products.LONG:
        plain = {key: mask.intervals().with_diagonal() for key, mask in distinct.items()}
        return [plain[id(mask)] for mask in masks], None
    compact = {key: mask.relabelled() for key, mask in distinct.items()}
    if len(distinct) == 1:
        [(rows, rank)] = compact.values()
        return [rows.with_diagonal()] * len(masks), rank
    relations = {key: Numbered(rows, rank, rank) for key, (rows, rank) in compact.items()}
    ranks: list[IntArray | None] = [None]
    for relation in relations.values():
        if not any(same_rank(relation.query_rank, rank) for rank in ranks):
            ranks.append(relation.query_rank)
    some_rows = next(iter(relations.values())).rows
    numberings = [Numbered(some_rows, rank, rank) for rank in ranks]
    costs = [sum(relation.expected(numbers) for relation in relations.values()) for numbers in numberings]
    for index in np.argsort(costs, kind="stable").tolist():
        if costs[index] > 4 * RENAMED:  # the cost is a guess; the limit is kept exactly
            break
        numbered = {key: some.renumbered(numberings[index], RENAMED) for key, some in relations.items()}
        rows_of = {key: rows.with_diagonal() for key, rows in numbered.items() if rows is not None}
        if len(rows_of) == len(numbered):
            return [rows_of[id(mask)] for mask in masks], ranks[index]
    raise too_many("a stack of masks, in the numbering that suits them best,", min(costs))


def field(layers: Sequence[IntervalRows], query: int) -> BoolArray:
    """bool[n]: positions whose information can be in `query` after these layers."""
    n = len(layers[0].indptr) - 1 if layers else 0
    inside = np.zeros(max(n, query + 1), dtype=np.bool_)
    inside[query] = True
    for rows in reversed(layers):
        inside = inside | _read_by(rows, np.flatnonzero(inside))
    return inside


def arrivals(layers: Sequence[IntervalRows], query: int, most: int | None) -> IntArray:
    """Layers until each position's information first reaches `query`, int64[n], -1 if never; `most`: of one relation"""
    first = np.full(layers[0].num_rows, -1)
    first[query] = 0
    if most is None:
        for count in range(1, len(layers) + 1):
            first[(first < 0) & field(layers[:count], query)] = count
        return first
    fresh = np.array([query])
    for count in range(1, most + 1):
        fresh = np.flatnonzero(_read_by(layers[0], fresh) & (first < 0))
        if not len(fresh):
            break
        first[fresh] = count
    return first


def shortest_path(rows: IntervalRows, sources: IntArray, targets: IntArray, blocked: IntArray) -> list[int]:
    """A path of fewest steps from a source up to a target, through none of `blocked`; [] if there is none."""
    towards = np.full(rows.num_rows, -1)  # the next position on the way up
    towards[blocked] = -2
    towards[targets] = targets
    frontier = targets.tolist()
    while frontier and (towards[sources] < 0).all():
        reached: list[int] = []
        for query in frontier:
            keys = rows.keys_of(query)
            fresh = keys[towards[keys] == -1]
            towards[fresh] = query
            reached += fresh.tolist()
        frontier = reached
    path = sources[towards[sources] >= 0][:1].tolist()
    while path and path[-1] != towards[path[-1]]:
        path.append(int(towards[path[-1]]))
    return path


def layered_path(layers: Sequence[IntervalRows], sources: IntArray, targets: IntArray, blocked: IntArray) -> list[int]:
    """Positions after 0..L layers from a source to a target, none blocked, with the fewest moves; [] if unreachable."""
    unreachable = len(layers) + 1
    moves = np.full(layers[0].num_rows, unreachable)  # fewest, from each position at this layer boundary to a target
    moves[targets] = 0
    history: list[IntArray] = [moves]
    for rows in reversed(layers):
        before = moves.copy()
        for value in range(int(moves[moves < unreachable].max()) + 1):
            keys = _read_by(rows, np.flatnonzero(moves == value))
            before[keys] = np.minimum(before[keys], value + 1)
        before[blocked] = unreachable
        moves = before
        history.append(moves)
    source = int(sources[np.argmin(moves[sources])])
    if moves[source] == unreachable:
        return []
    path = [source]
    for rows, after in zip(layers, reversed(history[:-1]), strict=True):
        here = path[-1]
        readers = rows.row_index()[(rows.starts <= here) & (here < rows.ends)]  # with `here` itself: the residual
        nearest = int(readers[np.argmin(after[readers])])
        path.append(nearest if after[nearest] + 1 < after[here] else here)
    return path


def budget(n: int, window: int | None, anchors: int | Sequence[int] | None) -> IntervalRows | None:
    """The pairs with |q - k| < window or k an anchor; None if neither is given."""
    node = np.arange(n)
    keep: IntervalRows | None = None
    if window is not None:
        reach = min(checks.integer("window", window, 1), n)
        keep = IntervalRows.build(node, node - reach + 1, node + reach, n, n)
    if anchors is not None:
        if getattr(anchors, "ndim", 0 if isinstance(anchors, int) else 1) == 0:  # of numpy and torch, too
            count = checks.integer("anchors", anchors, 1, n)
            chosen = np.linspace(0, n - 1, count).round().astype(np.int64)
        else:
            chosen = checks.index_array("anchors", anchors, n)
        row, key = np.repeat(node, len(chosen)), np.tile(chosen, n)
        anchored = IntervalRows.build(row, key, key + 1, n, n)
        keep = anchored if keep is None else keep.union(anchored)
    return keep


def _read_by(rows: IntervalRows, queries: IntArray) -> BoolArray:
    """bool[n]: the keys that any of the queries may attend to."""
    return rows.take(queries).cover() > 0
