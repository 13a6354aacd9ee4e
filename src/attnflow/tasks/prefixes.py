"""Prefix trees, which a causal model runs in place of a batch's rows: equal prefixes of rows have equal states."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from attnflow._core.checks import IntArray
from attnflow.masks.intervals import BoolArray, IntervalRows, ragged
from attnflow.masks.mask import Mask
from attnflow.tasks.embedding import NO_ID


@dataclass(frozen=True, eq=False)
class Trie:
    """A prefix tree of int64 sequences, numbered depth-first, the child with most descendants first."""

    offsets: IntArray  # sequence s is the flat items `[offsets[s], offsets[s + 1])`
    node_of: IntArray  # of each item
    source: IntArray  # an item of each node, from its earliest sequence
    parent: IntArray
    depth: IntArray
    end: IntArray  # the descendants of node v are `[v + 1, end[v])`
    head: IntArray  # the first node of a node's stretch; ancestors are at most log2(nodes) + 1 stretches

    @classmethod
    def of(cls, keys: IntArray, offsets: IntArray) -> Trie:
        """The trie of `keys[offsets[s] : offsets[s + 1]]`; a key holds all of an item but the items before it."""
        first = _built(keys, offsets)
        sizes, sequence = first.end - np.arange(first.size), np.searchsorted(offsets, first.source, side="right")
        rank = (first.size - sizes) * len(offsets) + sequence  # the largest first, then the earliest
        return _built(rank[first.node_of], offsets)

    @classmethod
    def of_sequences(cls, sequences: Sequence[Sequence[int] | IntArray]) -> Trie:
        arrays = [np.asarray(sequence, np.int64) for sequence in sequences]
        offsets = np.cumsum([0, *map(len, arrays)], dtype=np.int64)
        return cls.of(np.concatenate([np.zeros(0, np.int64), *arrays]), offsets)

    @property
    def size(self) -> int:
        return len(self.parent)

    def path(self, sequence: int) -> IntArray:
        return self.node_of[self.offsets[sequence] : self.offsets[sequence + 1]]

    def with_copies(self, nodes: IntArray) -> Trie:
        """A trie with a further leaf, of the same ancestors, for each of `nodes`; only its own `end` counts it."""
        leaves = np.arange(self.size, self.size + len(nodes))
        copied = {name: np.append(vars(self)[name], vars(self)[name][nodes]) for name in ("source", "parent", "depth")}
        return replace(self, **copied, end=np.append(self.end, leaves + 1), head=np.append(self.head, leaves))

    def ancestors(self, columns: IntArray | None = None, window: int | None = None) -> IntervalRows:
        """Row v: v and its ancestors; with a `window` only those `u` with `columns[v] - columns[u] < window`."""
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


def _built(keys: IntArray, offsets: IntArray) -> Trie:
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
    items, places = np.arange(len(keys)), ragged(np.zeros(len(offsets) - 1, np.int64), np.diff(offsets))[1]
    source, parent = np.full(size, len(keys)), np.full(size, -1)
    np.minimum.at(source, node_of, items)
    parent[node_of[places > 0]] = node_of[np.flatnonzero(places > 0) - 1]
    nodes = np.arange(size)
    head = np.maximum.accumulate(np.where(parent == nodes - 1, 0, nodes)) if size else nodes
    return Trie(offsets, node_of, source, parent, places[source], end, head)


def common(a: IntArray, b: IntArray) -> int:
    length = min(len(a), len(b))
    differs = a[:length] != b[:length]
    return int(differs.argmax()) if differs.any() else length


@dataclass(frozen=True)
class PassCost:
    """The work of a pass in any unit: of a token, a query-key pair, and a token whose logits are made."""

    token: float
    pair: float
    head: float

    def rows(self, number: int, length: int) -> float:
        """The work of a batch [number, length] without its logits, every pair computed as in dense attention."""
        return number * length * (self.token + self.pair * length)


@dataclass(frozen=True, eq=False)
class Batch:
    """Sequences of a causal model as arrays [batch, length]."""

    ids: IntArray
    real: BoolArray  # False at pads
    positions: IntArray
    labels: IntArray | None = None  # as in transformers
    by_column: bool = False  # whether a token's column counts beside its position, as for sliding windows
    starts: BoolArray | None = None  # where a sequence begins, for packed rows; by default each row is one

    def columns(self) -> IntArray:
        columns = np.broadcast_to(np.arange(self.ids.shape[1]), self.ids.shape)
        if self.starts is not None:
            columns = columns - np.maximum.accumulate(np.where(self.starts, columns, 0), axis=1)
        return columns[self.real]

    def sizes(self) -> IntArray:
        if self.starts is None:
            return self.real.sum(axis=1)
        return np.add.reduceat(self.real.ravel().astype(np.int64), np.flatnonzero(self.starts))

    def keys(self) -> IntArray:
        """An int64 key for each real token: all but the tokens before it. `ValueError` if 64 bits are too few."""
        parts = [self.ids[self.real], self.positions[self.real], *([self.columns()] if self.by_column else [])]
        low = [int(part.min(initial=0)) for part in parts]
        spans = [int(part.max(initial=0)) - least + 1 for part, least in zip(parts, low, strict=True)]
        if np.prod([float(span) for span in spans]) >= 2**62:
            raise ValueError(f"token ids and positions span {' x '.join(map(str, spans))} values, more than 64 bits")
        key = np.zeros(len(parts[0]), np.int64)
        for part, least, span in zip(parts, low, spans, strict=True):
            key = key * span + (part - least)
        return key


@dataclass(frozen=True, eq=False)
class SharedPlan:
    """The prefix trees [trees, width] that run in place of a batch; slots after a tree's nodes are padding."""

    ids: IntArray
    positions: IntArray
    trees: tuple[Trie, ...]
    columns: tuple[IntArray, ...]  # the place of each node in its sequence
    place: IntArray  # the slot of each token in the flattened trees, -1 at pads
    tokens: int
    labels: IntArray | None = None  # each label once: a token that predicts c labels takes c slots
    label_place: IntArray | None = None  # the slot of each prediction in the flattened [trees, width - 1]

    @property
    def shape(self) -> tuple[int, int]:
        return self.ids.shape[0], self.ids.shape[1]

    @property
    def nodes(self) -> int:
        """The number of tokens that are run, with copies but without padding."""
        return sum(tree.size for tree in self.trees)

    def cost(self, cost: PassCost) -> float:
        """The work of the plan, with logits for every slot if it has labels, else for every token of the batch."""
        slots = self.ids.size if self.labels is not None else self.place.size
        return cost.rows(*self.shape) + cost.head * slots

    def allowed(self, window: int | None = None) -> BoolArray:
        """bool[rows, width, width], `allow[row, query, key]`; padding attends to itself alone."""
        rows, width = self.shape
        table = np.zeros((rows, width, width), np.bool_)
        table[:, np.arange(width), np.arange(width)] = True
        for row, (tree, columns) in enumerate(zip(self.trees, self.columns, strict=True)):
            table[row, : tree.size, : tree.size] = tree.ancestors(columns, window).to_bool()
        return table

    def mask(self, window: int | None = None) -> Mask:
        """The mask of a plan of one row, never dense."""
        ((tree,), (columns,)), width = (self.trees, self.columns), self.shape[1]
        pads = np.arange(tree.size, width)
        padding = IntervalRows.build(pads - tree.size, pads, pads + 1, len(pads), width)
        return Mask(IntervalRows.stack([tree.ancestors(columns, window), padding], width), "prefix_tree")


def plan(batch: Batch, cost: PassCost, one_row: bool = False) -> SharedPlan | None:
    """The prefix trees of a batch, with its labels if it has some; with `one_row` all sequences join one tree."""
    numbers = batch.sizes()
    if not numbers.any():
        return None
    offsets = np.concatenate([[0], np.cumsum(numbers)])
    keys, rows = batch.keys(), np.flatnonzero(numbers)
    whole = Trie.of(keys, offsets)
    groups = [rows] if one_row else _groups(whole, rows, cost)
    trees: list[Trie] = []
    sources: list[IntArray] = []  # of each tree, the flat token of the batch that lies on each node
    slot, prediction = np.empty(len(keys), np.int64), np.full(len(keys), -1)
    predicts = None  # the label that each real token predicts, -100 for none
    if batch.labels is not None:
        predicts = np.pad(batch.labels[:, 1:], ((0, 0), (0, 1)), constant_values=NO_ID)[batch.real]
    for group in groups:
        items = np.concatenate([np.arange(offsets[row], offsets[row + 1]) for row in group.tolist()])
        tree = whole if len(groups) == 1 else Trie.of(keys[items], np.concatenate([[0], np.cumsum(numbers[group])]))
        slot[items] = tree.node_of
        if predicts is not None:
            tree = _with_labels(tree, items, predicts, prediction)
        trees.append(tree)
        sources.append(items[tree.source])
    width = max(tree.size for tree in trees) + (predicts is not None)  # as a slot's label stands in the next
    starts, row_of = np.arange(len(groups)) * width, np.empty(len(numbers), np.int64)
    for number, group in enumerate(groups):
        row_of[group] = number
    token_row = np.repeat(row_of, numbers)
    place = np.full(batch.ids.shape, -1)
    place[batch.real] = slot + starts[token_row]
    flat_ids, flat_positions = batch.ids[batch.real], batch.positions[batch.real]
    column = batch.columns()
    ids, positions = np.full((len(groups), width), flat_ids[0]), np.zeros((len(groups), width), np.int64)
    for row, source in enumerate(sources):
        ids[row, : len(source)], positions[row, : len(source)] = flat_ids[source], flat_positions[source]
    columns = tuple(column[source] for source in sources)
    if predicts is None:
        return SharedPlan(ids, positions, tuple(trees), columns, place, len(keys))
    labels, label_place = np.full(ids.shape, NO_ID), np.full((len(batch.ids), batch.ids.shape[1] - 1), -1)
    at = np.flatnonzero(prediction >= 0)
    labels[token_row[at], prediction[at] + 1] = predicts[at]
    row, source_column = np.nonzero(batch.real)
    label_place[row[at], source_column[at]] = prediction[at] + token_row[at] * (width - 1)
    return SharedPlan(ids, positions, tuple(trees), columns, place, len(keys), labels, label_place)


def _with_labels(tree: Trie, items: IntArray, predicts: IntArray, prediction: IntArray) -> Trie:
    """Copy nodes for all but their first label; write the slot of each label into `prediction`."""
    at = np.flatnonzero(predicts[items] != NO_ID)
    node = tree.node_of[at]
    order = np.argsort(node, kind="stable")
    first = np.ones(len(order), np.bool_)
    first[1:] = node[order][1:] != node[order][:-1]
    copied = node[order][~first]
    slot = np.empty(len(at), np.int64)
    slot[order[first]] = node[order][first]
    slot[order[~first]] = tree.size + np.arange(len(copied))
    prediction[items[at]] = slot
    return tree.with_copies(copied)


def _groups(tree: Trie, rows: IntArray, cost: PassCost) -> list[IntArray]:
    """The sequences of each tree, in leaf order; one joins if that is less work than its own tree."""
    offsets, node_of = tree.offsets, tree.node_of
    order = rows[np.argsort(node_of[offsets[rows + 1] - 1], kind="stable")].tolist()
    groups: list[list[int]] = []
    size = 0
    for before, row in zip([-1, *order], order, strict=False):
        length = int(offsets[row + 1] - offsets[row])
        own = length if before < 0 else length - common(tree.path(before), tree.path(row))
        if groups and cost.rows(1, size + own) - cost.rows(1, size) <= cost.rows(1, length):
            groups[-1].append(row)
            size += own
        else:
            groups.append([row])
            size = length
    return [np.array(sorted(group)) for group in groups]
