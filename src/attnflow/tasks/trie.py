"""The trie of many sequences as arrays: equal beginnings are stored once, without an object for a token.

Nodes are numbered depth-first: a node comes right before its first child, and its descendants are the stretch
`[node + 1, end[node])`. Of the children of a node the one with most descendants comes first (of equals the one that
the earliest sequence goes through), so that a node's ancestors are at most log2(nodes) + 1 stretches.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from attnflow._core.checks import IntArray
from attnflow.masks.intervals import IntervalRows
from attnflow.masks.mask import Mask


@dataclass(frozen=True, eq=False)
class Trie:
    """Sequences of int64 keys, merged where they begin alike.

    Attributes:
        offsets: int64[sequences + 1]; sequence s is `[offsets[s], offsets[s + 1])` of the flat arrays.
        node_of: int64[all items], the node of each item of the flat sequences.
        source: int64[nodes], an item of the flat sequences that lies on each node, of the earliest such sequence.
        parent: int64[nodes], -1 for a first item.
        depth: int64[nodes], the number of ancestors: the item's place in its sequence.
        end: int64[nodes], one past the last descendant.
        head: int64[nodes], the first node of the stretch of first children that the node lies on.
    """

    offsets: IntArray
    node_of: IntArray
    source: IntArray
    parent: IntArray
    depth: IntArray
    end: IntArray
    head: IntArray

    @classmethod
    def of(cls, keys: IntArray, offsets: IntArray) -> Trie:
        """The trie of the sequences `keys[offsets[s] : offsets[s + 1]]`; some may be empty, or equal.

        Two items are one node if their sequences agree up to and with them: a key must say all that makes an item what
        it is (its token, and its position where that is not its place).

        Cost: O(items) memory; O(items) and a sort of the sequences, which compares them byte by byte; no Python object
        for an item, a few for a sequence.

        >>> trie = Trie.of(np.array([7, 8, 1, 7, 8, 2, 9]), np.array([0, 3, 6, 7]))
        >>> trie.node_of.tolist(), trie.parent.tolist(), trie.end.tolist()
        ([0, 1, 2, 0, 1, 3, 4], [-1, 0, 1, 1, -1], [4, 4, 3, 4, 5])
        """
        if len(offsets) == 0 or offsets[0] != 0 or offsets[-1] != len(keys) or (np.diff(offsets) < 0).any():
            raise ValueError(f"offsets must rise from 0 to the number of keys, {len(keys)}, got {offsets!r:.80}")
        first = _built(keys, offsets)
        sizes, sequence = first.end - np.arange(first.size), np.searchsorted(offsets, first.source, side="right")
        rank = (first.size - sizes) * len(offsets) + sequence  # the largest first, then the earliest
        return _built(rank[first.node_of], offsets)

    @classmethod
    def of_sequences(cls, sequences: Sequence[Sequence[int] | IntArray]) -> Trie:
        """The trie of sequences of integers."""
        arrays = [np.asarray(sequence, np.int64) for sequence in sequences]
        offsets = np.cumsum([0, *map(len, arrays)], dtype=np.int64)
        return cls.of(np.concatenate([np.zeros(0, np.int64), *arrays]), offsets)

    @property
    def size(self) -> int:
        """Number of nodes."""
        return len(self.parent)

    def with_copies(self, nodes: IntArray) -> Trie:
        """With a further leaf for each of `nodes`, repeats allowed: the same ancestors and itself, not the node.

        Nothing else changes: descendants stay those of the node, and `end` does not count copies.
        """
        leaves = np.arange(self.size, self.size + len(nodes))
        return replace(
            self,
            source=np.concatenate([self.source, self.source[nodes]]),
            parent=np.concatenate([self.parent, self.parent[nodes]]),
            depth=np.concatenate([self.depth, self.depth[nodes]]),
            end=np.concatenate([self.end, leaves + 1]),
            head=np.concatenate([self.head, leaves]),
        )

    def ancestors(self, columns: IntArray | None = None, window: int | None = None) -> IntervalRows:
        """Row v: node v and its ancestors; with a `window`, only those `u` with `columns[v] - columns[u] < window`.

        Args:
            columns: int64[nodes] that rises along each path, such as a position; by default the depth.
            window: how far back a node reads.

        Cost: O(intervals), which are at most log2(nodes) + 1 for a row.
        """
        nodes = np.arange(self.size)
        columns = self.depth if columns is None else columns
        stretch = np.cumsum(self.head == nodes) - 1
        stride = int(columns.max(initial=0)) + 1
        line = stretch * stride + columns  # rises with the node: columns rise along a stretch
        node, last = nodes, nodes
        pieces: list[tuple[object, object, object]] = [(nodes[:0], nodes[:0], nodes[:0])]
        while len(node):
            start = self.head[last]
            if window is not None:
                oldest = np.clip(columns[node] - window + 1, 0, stride)
                start = np.maximum(start, np.searchsorted(line, stretch[last] * stride + oldest))
            pieces.append((node, start, last + 1))
            above = self.parent[self.head[last]]
            node, last = node[above >= 0], above[above >= 0]
        return IntervalRows.of(self.size, self.size, *pieces)

    def mask(self, columns: IntArray | None = None, window: int | None = None) -> Mask:
        """`ancestors` as a mask: each sequence is causal, and sees nothing of what is not its own beginning."""
        parameters: dict[str, object] = {"sequences": len(self.offsets) - 1, "nodes": self.size}
        if window is not None:
            parameters["window"] = window
        return Mask(self.ancestors(columns, window), "prefix_tree", parameters)


def _built(keys: IntArray, offsets: IntArray) -> Trie:
    """The trie with children in the order of their keys, the smallest first."""
    signed = (keys ^ np.int64(-(1 << 63))).astype(">i8")  # bytes that compare as the numbers do, negative ones too
    bounds = list(zip(offsets[:-1].tolist(), offsets[1:].tolist(), strict=True))
    bounds.sort(key=lambda pair: signed[slice(*pair)].tobytes())  # in the order of their leaves
    node_of = np.empty(len(keys), np.int64)
    own: list[tuple[int, int, int]] = []  # of each sequence: its items on nodes of the one before, first own node, end
    size, before, last = 0, 0, 0
    for begin, stop in bounds:
        shared = common(keys[before:last], keys[begin:stop])
        node_of[begin : begin + shared] = node_of[before : before + shared]
        first, size = size, size + stop - begin - shared
        node_of[begin + shared : stop] = np.arange(first, size)
        own.append((shared, first, size))
        before, last = begin, stop
    end = np.empty(size, np.int64)
    closing = np.full(int(np.diff(offsets).max(initial=0)), size)  # for each depth, where the next node of it begins
    ordered = list(zip(bounds, own, strict=True))
    for place in range(len(ordered) - 1, -1, -1):
        (begin, stop), (shared, first, last) = ordered[place]
        end[first:last] = closing[shared : stop - begin]
        before, length = bounds[place - 1] if place else (0, 0)
        closing[shared : length - before] = first
    items, places = np.arange(len(keys)), np.arange(len(keys)) - np.repeat(offsets[:-1], np.diff(offsets))
    source, parent = np.full(size, len(keys)), np.full(size, -1)
    np.minimum.at(source, node_of, items)
    parent[node_of[places > 0]] = node_of[np.flatnonzero(places > 0) - 1]
    nodes = np.arange(size)
    head = np.maximum.accumulate(np.where(parent == nodes - 1, 0, nodes)) if size else nodes
    return Trie(offsets, node_of, source, parent, places[source], end, head)


def common(a: IntArray, b: IntArray) -> int:
    """How many items two sequences begin with alike."""
    length = min(len(a), len(b))
    differs = a[:length] != b[:length]
    return int(differs.argmax()) if differs.any() else length
