"""Which positions reach which after some layers: row intervals while they stay few, else a bit matrix."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np

from attnflow._core.checks import IntArray
from attnflow.masks.intervals import BoolArray, IntervalRows, offsets
from attnflow.masks.mask import Mask
from attnflow.masks.numbering import RENAMED, Numbered, same_rank, too_many
from attnflow.order import dense
from attnflow.order import products as interval_products
from attnflow.order.products import compose, room

_LARGEST: Final = 1 << 23  # intervals of a product, where bits would take as much memory


@dataclass(frozen=True, eq=False)
class Reach:
    """Row i holds the positions whose information can be in i."""

    content: IntervalRows | dense.Words
    size: int

    @classmethod
    def of(cls, rows: IntervalRows) -> Reach:
        """Reach after one layer; bits for a short mask."""
        return cls(rows if rows.num_rows > interval_products.LONG else dense.from_rows(rows), rows.num_keys)

    @classmethod
    def nothing_moved(cls, size: int) -> Reach:
        """Reach before the first layer."""
        node = np.arange(size)
        return cls.of(IntervalRows.build(node, node, node + 1, size, size))

    def through(self, layer: IntervalRows, what: str, matrices: int = 2, limit: int | None = None) -> Reach:
        """Reach after one more layer (with its diagonal); above `limit` intervals, bit matrices take over.

        Raises ValueError, naming `what`, if `matrices` bit matrices do not fit memory.
        """
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
        """Whether a row holds a position."""
        if isinstance(self.content, IntervalRows):
            return self.content.holds(np.array([row]), np.array([position])).item()
        return bool(int(self.content[row, position // 64]) >> position % 64 & 1)

    def table(self, rows: IntArray) -> BoolArray:
        """bool[rows, n] of the chosen rows."""
        if isinstance(self.content, IntervalRows):
            return self.content.to_bool(rows)
        return dense.unpack(self.content[rows], self.size)

    def intervals(self) -> IntervalRows:
        """As row intervals."""
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
    """(relation of each mask with its diagonal, rank): all in one numbering that keeps them small.

    `rank[i]` is the number of position i, or None for the identity, which short masks keep. Raises ValueError if some
    mask has too many intervals in each numbering.
    """
    distinct = {id(mask): mask for mask in masks}
    if masks[0].num_queries <= interval_products.LONG:
        plain = {key: mask.intervals().with_diagonal() for key, mask in distinct.items()}
        return [plain[id(mask)] for mask in masks], None
    if len(distinct) == 1:
        rows, rank = masks[0].relabelled()
        return [rows.with_diagonal()] * len(masks), rank
    relations = {key: Numbered(*_relabelled(mask)) for key, mask in distinct.items()}
    ranks: list[IntArray | None] = [None]
    for relation in relations.values():
        if not any(same_rank(relation.query_rank, rank) for rank in ranks):
            ranks.append(relation.query_rank)
    some_rows = next(iter(relations.values())).rows
    numberings = [Numbered(some_rows, rank, rank) for rank in ranks]
    costs = [sum(each.expected(numbers) for each in relations.values()) for numbers in numberings]
    for index in np.argsort(costs, kind="stable").tolist():
        if costs[index] > 4 * RENAMED:  # the cost is a guess; the limit is kept exactly
            break
        numbered = {key: each.renumbered(numberings[index], RENAMED) for key, each in relations.items()}
        rows_of = {key: rows.with_diagonal() for key, rows in numbered.items() if rows is not None}
        if len(rows_of) == len(numbered):
            return [rows_of[id(mask)] for mask in masks], ranks[index]
    raise too_many("a stack of masks, in the numbering that suits them best,", min(costs))


def _relabelled(mask: Mask) -> tuple[IntervalRows, IntArray | None, IntArray | None]:
    rows, rank = mask.relabelled()
    return rows, rank, rank
