"""`analyze`: where information flows under a mask, or under one mask per layer, and after how many layers."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise

import numpy as np
import torch
from jaxtyping import Bool, Int
from torch import Tensor

from attnflow._core import checks
from attnflow._core.checks import Indices, IntArray
from attnflow._core.markup import plural
from attnflow._core.plain import as_integer, as_list
from attnflow._core.results import Result
from attnflow.masks.batches import MaskGrid
from attnflow.masks.build import from_edges
from attnflow.masks.intervals import IntervalRows
from attnflow.masks.mask import Mask, not_a_mask
from attnflow.masks.spec import mask_from_dict
from attnflow.order import reach
from attnflow.order.closure import Order, close, depth_of, is_closed, renumbered
from attnflow.order.cuts import FlowCut, Paths, What, fewest, only_channel
from attnflow.order.hasse import Hasse, OrderDifference, Sparse, difference_of, label
from attnflow.order.reach import Reach
from attnflow.order.stack import require_square, square_masks


def analyze(masks: Mask | MaskGrid | Sequence[Mask | MaskGrid], before: Mask | MaskGrid | None = None) -> Flow:
    """Compute where information flows in a Transformer under a mask (hasse, sec. 2).

    With the residual connection, position i reads row i of A = allow | I in one layer, and row i of A^L in L layers.
    With enough layers it reads row i of R = A*, the reflexive transitive closure. `R[i, j]` means j <= i: information
    of j can reach i. (The paper's eq. 4 has the transpose, with which its eq. 10 and 17 are wrong; see docs/maths.md.)

    Args:
        masks: one mask for every layer, or a sequence with the mask of each layer, first layer first. The flow of a
            sequence is the *product* A_L x ... x A_1, not a closure: it has exactly that many layers. Masks of
            `masks.per_head`, or a batch of one sequence, are united: information flows if one head lets it.
            With n queries and k > n keys, the last n keys are the queries', and the first k - n were there before, as
            a prefix or a cache: they are the positions 0 .. k - n - 1, below the queries, and query q is k - n + q.
        before: what keys that were there before read of each other, such as `masks.causal(k - n)` for a cache.
            By default each reads only itself.

    Raises:
        ValueError: a mask has more queries than keys, the sequence is empty, the sizes differ, a batch has several
            sequences, or `before` is of another size.

    Everything is computed on first use. Cost of closure, classes and Hasse diagram: see `attnflow.order.closure`.

    >>> import attnflow as af
    >>> flow = af.order.analyze(af.masks.sliding_window(6, window=3))
    >>> flow.depth, flow.is_dense, flow.path(0, 5)
    (3, False, [0, 1, 3, 5])
    >>> print(af.order.analyze(af.masks.causal(6)[4:, :]))
    6 positions (0-3 were there before), depth 1 (one layer suffices), 6 classes, Hasse diagram of 5 edges
    """
    if not isinstance(masks, Mask | MaskGrid | Sequence):  # pyright: ignore[reportUnnecessaryIsInstance]
        raise not_a_mask(masks)
    layered = not isinstance(masks, Mask | MaskGrid)
    chosen, num_before = square_masks(masks if layered else (masks,), before, layered)
    return Flow(chosen, len(chosen) if layered else None, num_before)


@dataclass(frozen=True, eq=False, repr=False)
class Flow(Result):
    """The information flow of one mask, or of a stack with one mask per layer; made by `analyze`.

    Attributes:
        masks: the masks, one per layer, or a single one for all layers.
        num_layers: number of layers of a stack; None for a single mask.
        num_before: the positions 0 .. num_before - 1 are keys that were there before the queries (a prefix, a cache).
    """

    masks: tuple[Mask, ...]
    num_layers: int | None
    num_before: int = 0

    @property
    def size(self) -> int:
        """Number of positions n."""
        return self.masks[0].num_queries

    def difference(self, other: Flow) -> OrderDifference:
        """Compare with another flow, layer by layer: pairs only in this one are extra, pairs only in `other` missing.

        Use it for two versions, backends or engines of a model: `af.audit.measure(new, ids).difference(old)`.

        Raises:
            ValueError: `other` has another number of positions or layers.

        >>> import attnflow as af
        >>> print(af.order.analyze(af.masks.causal(3)).difference(af.order.analyze(af.masks.document([2, 1]))))
        DIFFERENT in 1 of 1 layer: 2 extra, 0 missing
        2 extra pairs (query, key): (2, 0), (2, 1)
        """
        if not isinstance(other, Flow):  # pyright: ignore[reportUnnecessaryIsInstance]
            raise TypeError(f"expected a Flow to compare with, got {type(other).__name__}; see af.order.analyze")
        if (self.size, self.num_layers) != (other.size, other.num_layers):
            raise ValueError(
                f"expected a flow of {self.size} positions in {self.num_layers or 'any number of'} layers, got "
                f"{other.size} positions in {other.num_layers or 'any number of'} layers"
            )
        return difference_of(self.masks, other.masks, self.num_layers is not None)

    def __repr__(self) -> str:
        return f"Flow({list(self.masks) if self.num_layers else self.masks[0]!r})"

    def __str__(self) -> str:
        hasse = f"Hasse diagram of {plural(len(self.hasse.edges), 'edge')}"
        enough = " (one layer suffices)" if self.is_dense else ""
        before = f" ({label(tuple(range(self.num_before)))} were there before)" if self.num_before else ""
        return (
            f"{plural(self.size, 'position')}{before}, depth {self.depth}{enough}, "
            f"{plural(len(self.classes), 'class', 'classes')}, {hasse}"
        )

    def to_dict(self) -> dict[str, object]:
        """The masks in the format of `attnflow.masks.spec`, with the numbers of their order."""
        return {
            "attnflow": "Flow",
            "version": self.version,
            "num_layers": self.num_layers,
            "size": self.size,
            "num_before": self.num_before,
            "depth": self.depth,
            "is_dense": self.is_dense,
            "num_classes": len(self.classes),
            "num_edges": len(self.hasse.edges),
            "masks": [mask.to_dict() for mask in self.masks],
        }

    @classmethod
    def from_dict(cls, values: Mapping[str, object]) -> Flow:
        """Rebuild the flow from the masks that `to_dict` wrote; its numbers are computed again."""
        content = cls._content(values)
        masks = [mask_from_dict(mask) for mask in as_list(content.get("masks"), "masks")]
        layers = None if content.get("num_layers") is None else len(masks)
        require_square(masks, before := as_integer(content.get("num_before", 0), "num_before"))
        return cls(tuple(masks), layers, before)

    def rows(self) -> list[dict[str, object]]:
        """One row per position: its class, the class's level in the Hasse diagram, and how many positions it reads."""
        levels = self.hasse.levels
        sizes = [len(self.receptive_field(position)) for position in range(self.size)]
        numbers = [self.class_of(position) for position in range(self.size)]
        return [
            {"position": position, "class": number, "level": levels[number], "receptive_field": size}
            for position, (number, size) in enumerate(zip(numbers, sizes, strict=True))
        ]

    @cached_property
    def _step(self) -> tuple[IntervalRows, IntArray | None]:
        """(relation whose closure is the order; rank of each position in it, or None)."""
        if self.num_layers is None:
            return self.masks[0].relabelled()
        return self._products[-1].intervals(), self._rank

    @cached_property
    def _numbered(self) -> tuple[list[IntervalRows], IntArray | None]:
        return reach.common_numbering(self.masks)

    @property
    def _layers(self) -> list[IntervalRows]:
        """A = allow | I of each layer (one for a single mask), in the numbering of `_rank`."""
        return self._numbered[0]

    @property
    def _rank(self) -> IntArray | None:
        """The number of each position in `_layers`: long masks keep their compact numbering."""
        return self._numbered[1]

    @property
    def _paths(self) -> Paths:
        return Paths(self._layers, self.num_layers is not None, self._rank)

    @cached_property
    def _products(self) -> list[Reach]:
        """The products A_l x ... x A_1 of a stack, for l = 0..num_layers."""
        return reach.products(self._layers)

    @cached_property
    def _order(self) -> Order:
        return close(self._step[0])

    @cached_property
    def _class_of(self) -> IntArray:
        rank = self._step[1]
        return self._order.class_of if rank is None else self._order.class_of[rank]

    @cached_property
    def depth(self) -> int:
        """How many layers it takes until nothing new arrives: for one mask, the smallest L >= 1 with A^L = R.

        Cost: O(log depth) Boolean products, on intervals for long masks (`attnflow.order.products`) while these stay
        few, otherwise on bit matrices (`attnflow.order.dense`).

        Raises:
            ValueError: the mask has too many intervals, and its bit matrices do not fit into memory.
        """
        if self.num_layers is not None:
            counts = [int(reached.counts().sum()) for reached in self._products]
            return max(1, counts.index(counts[-1]))
        return depth_of(self._step[0].with_diagonal())

    @cached_property
    def is_dense(self) -> bool:
        """Whether one layer suffices: everything that can flow does so in the first, A = R (hasse, def. 3.2)."""
        return is_closed(self._step[0].with_diagonal()) if self.num_layers is None else self.depth == 1

    @property
    def closure_density(self) -> float:
        """Share of all pairs (i, j) where j can reach i, in [0, 1]."""
        pairs = self._order.nnz if self.num_layers is None else int(self._products[-1].counts().sum())
        return pairs / self.size**2 if self.size else 0.0

    def reaches(self, source: int, target: int, layers: int | None = None) -> bool:
        """Whether information of position `source` can reach `target` within `layers` layers (default: all)."""
        source, target = self._position("source", source), self._position("target", target)
        if layers is None and self.num_layers is None:
            lower, upper = int(self._class_of[source]), int(self._class_of[target])
            return self._order.reaches(lower, upper)
        return source in self.receptive_field(target, layers).tolist()

    def receptive_field(self, query: int, layers: int | None = None) -> Int[Tensor, " field"]:
        """The positions whose information can reach `query` within `layers` layers (default: all), ascending int64."""
        query = self._position("query", query)
        layers = self._layer_count(layers)
        if layers is None:
            row = self._order.table(self._class_of[[query]])[0]
            return torch.from_numpy(np.flatnonzero(row[self._class_of]))
        if not layers:
            return torch.tensor([query])
        # After as many layers as there are positions, nothing new flows.
        used = self._layers * min(layers, self.size) if self.num_layers is None else self._layers[:layers]
        inside = reach.field(used, self._number(query))
        return torch.from_numpy(np.flatnonzero(inside if self._rank is None else inside[self._rank]))

    def arrivals(self, query: int, most: int) -> IntArray:
        """For each position, how many layers its information takes to reach `query`, int64[n]; -1 if above `most`."""
        number = self._number(self._position("query", query))
        first = reach.arrivals(self._layers, number, most if self.num_layers is None else None)
        return first if self._rank is None else first[self._rank]

    def path(self, source: int, target: int) -> list[int]:
        """A shortest path of information from `source` to `target`, layer by layer.

        Returns:
            `[p_0 = source, p_1, ..., p_L = target]`: the information is at p_l after layer l. The list is empty if no
            path exists, and `[source]` if source is target. For a stack it has an entry for every layer, with as few
            moves as possible; in the other layers the residual connection keeps the information where it is.

        Cost: O(intervals + n x positions visited).
        """
        source, target = self._position("source", source), self._position("target", target)
        if source == target or (self.num_layers is None and not self.reaches(source, target)):
            return [source] if source == target else []
        return self._paths.first([source], [target])

    def cut(self, sources: Indices, targets: Indices, what: What = "positions") -> FlowCut:
        """Find the fewest positions, or pairs (query, key), that all information of the sources to the targets passes.

        They are removed from every layer; sources and targets stay. Where a source and a target are a pair, no
        positions separate them (`ok` is False). Of several smallest cuts of one mask, it is that nearest the targets.

        Raises:
            ValueError: there are no sources or no targets, they share a position, or there are too many pairs.

        Cost: for one mask, a largest flow over its pairs. For a stack, an integer program over the pairs of all layers,
        since the question is NP-hard there.

        >>> import attnflow as af
        >>> gist = af.masks.causal(7) & ~af.masks.from_edges([(q, k) for q in (5, 6) for k in range(4)], 7)
        >>> print(af.order.analyze(gist).cut(range(4), [5, 6]))
        all information from 0-3 to 5, 6 passes position 4: 0 -> 4 -> 5
        """
        return fewest(self._paths, sources, targets, what)

    def only_channel(self, channel: Indices, sources: Indices, targets: Indices) -> FlowCut:
        """Tell whether all information of the sources to the targets passes given positions, such as a gist.

        The result is `ok` if it does, and if there is any. It prints as a sentence with a path as its witness.

        Raises:
            ValueError: sources, targets or channel are empty, or share a position. Cost: O(pairs).

        >>> import attnflow as af
        >>> print(af.order.analyze(af.masks.sliding_window(6, 3)).only_channel([2], [0, 1], [4, 5]))
        position 2 is not the only channel from 0, 1 to 4, 5: 1 -> 3 -> 4 goes around
        """
        return only_channel(self._paths, channel, sources, targets)

    @cached_property
    def _members(self) -> tuple[list[tuple[int, ...]], IntArray]:
        first = np.full(self._order.num_classes, self.size)
        np.minimum.at(first, self._class_of, np.arange(self.size))
        number = renumbered(self._order, first)
        class_of = number[self._class_of]
        positions = np.argsort(class_of, kind="stable").tolist()
        if self._order.num_classes == self.size:
            return list(zip(positions)), number
        cuts = np.concatenate([[0], np.cumsum(np.bincount(class_of))]).tolist()
        return [tuple(positions[first:last]) for first, last in pairwise(cuts)], number

    @property
    def classes(self) -> list[tuple[int, ...]]:
        """The classes of mutually reachable positions, each sorted, in topological order (lower first).

        Where the order leaves a choice, the class with the smallest first position comes first, so equal masks have
        equal lists. For a stack, they are the classes of the transitive closure of its product.
        """
        return self._members[0]

    def class_of(self, position: int) -> int:
        """The index in `classes` of a position's class."""
        return int(self._members[1][self._class_of[self._position("position", position)]])

    @cached_property
    def hasse(self) -> Hasse:
        """The Hasse diagram of the classes; equal orders have equal diagrams."""
        nodes, number = self._members
        lower, upper = number[self._order.covers.T]
        order = np.lexsort((lower, upper))
        return Hasse(nodes, list(zip(lower[order].tolist(), upper[order].tolist(), strict=True)))

    def reachability(self, layers: int | None = None) -> Bool[Tensor, "n n"]:
        """R (or A^layers) as a bool table: entry [i, j] tells whether information of j can reach i."""
        result = torch.empty(self.size, self.size, dtype=torch.bool)
        for start, part in self.reachability_by_rows(max(1, (1 << 23) // max(1, self.size)), layers):
            result[start : start + len(part)] = part
        return result

    def reachability_by_rows(
        self, rows: int, layers: int | None = None
    ) -> Iterator[tuple[int, Bool[Tensor, "rows n"]]]:
        """`reachability` as (first row, bool [rows, n]) with so many rows each, instead of n x n."""
        layers, step = self._layer_count(layers), checks.integer("rows", rows, 1)
        if layers is None:
            table, number = self._order.table, self._class_of
        else:
            table = deque(self._powers(layers), maxlen=1).pop().table
            number = np.arange(self.size) if self._rank is None else self._rank
        for start in range(0, self.size, step):
            yield start, torch.from_numpy(table(number[start : start + step])[:, number])

    def growth(self, max_layers: int | None = None) -> Int[Tensor, "layers n"]:
        """The size of every receptive field after l = 0, 1, ... layers, up to the depth or `max_layers`."""
        last = self.depth if max_layers is None else min(self.depth, checks.integer("max_layers", max_layers))
        sizes = np.stack([reached.counts() for reached in self._powers(last)])
        return torch.from_numpy(sizes if self._rank is None else sizes[:, self._rank])

    def sparsify(self, window: int | None = None, anchors: int | Sequence[int] | None = None) -> Sparse:
        """Make a sparser mask with the same Hasse diagram, and give its depth (hasse, def. 3.8).

        The same diagram does not mean the same values at finite depth (order.md): the depth says how many layers the
        result needs until everything has flowed. Without arguments the result is the sparsest: a pair for each cover, a
        cycle through each class, and the diagonal. These pairs belong to the closure, not always to the original mask.
        The arguments lower the depth by keeping pairs of the original mask.

        Args:
            window: also keep the original pairs with |q - k| < window.
            anchors: also keep the original pairs whose key is an anchor: a list of positions, or how many of them to
                spread evenly.
        """
        edges: list[tuple[int, int]] = [(i, i) for i in range(self.size)]
        edges += [(self.classes[upper][0], self.classes[lower][-1]) for lower, upper in self.hasse.edges]
        for members in self.classes:
            edges += [(q, k) for k, q in zip(members, (*members[1:], members[0]), strict=True) if q != k]
        mask = from_edges(edges, self.size, name="sparse")
        keep = reach.budget(self.size, window, anchors)
        if keep is not None:
            rows, rank = self._step
            original = Mask(rows, query_rank=rank, key_rank=rank).intervals()
            mask = Mask(mask.intervals().union(original.intersection(keep)), "sparse")
        return Sparse(mask, analyze(mask).depth)

    def _powers(self, layers: int) -> Iterator[Reach]:
        """Reach after 0, 1, ... layers, up to `layers` or until nothing new flows."""
        if self.num_layers is not None:
            yield from self._products[: layers + 1]
            return
        yield (reached := Reach.nothing_moved(self.size))
        for _ in range(min(layers, self.depth)):
            yield (reached := reached.through(self._layers[0], "the flow of a mask"))

    def _number(self, position: int) -> int:
        return position if self._rank is None else int(self._rank[position])

    def _layer_count(self, layers: int | None) -> int | None:
        return self.num_layers if layers is None else checks.integer("layers", layers, 0, self.num_layers)

    def _position(self, name: str, value: int) -> int:
        if self.size == 0:
            raise ValueError(f"{name}: the mask has no positions")
        return checks.integer(name, value, 0, self.size - 1)
