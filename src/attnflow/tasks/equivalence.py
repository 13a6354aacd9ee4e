"""Which positions of different tasks compute the same thing, decided by hashing and checked exactly; and their order.

Where no down-set holds the same input twice, an equivalence of nodes (hasse, def. 3.5) has only one candidate: the
bijection that keeps the inputs. A position's key is then its input with the set of (input, inputs below it) over its
down-set. For dense tasks the rows of the mask *are* the down-sets, so two sums over rows make all keys of a task; over
interval rows these are prefix sums, O(n). Sums of 64-bit hashes can collide; `is_embedding` looks at the relations
themselves, and a collision costs a second try with another seed, never a wrong answer.

Positions of a merged sequence may stand in any order; this one keeps streams together:

1. If one task has every class, its own order (causal and multi-token training, families of one task).
2. Otherwise the unlabelled classes first, as streams: again and again the task that brings the most classes not yet
   placed (the later task of equals), in its own order. Then the labelled nodes, by their first position id, each node
   in one piece, in the order of the first task that has it.

For the paper's families this is its layout: contents then mask blocks (eq. 45), forward stream, backward stream,
centres (eq. 57). Few streams also mean few intervals per row, hence few blocks for block-sparse kernels.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from attnflow._core.checks import IntArray
from attnflow.masks.intervals import BoolArray, IntervalRows
from attnflow.tasks.task import Task, Token

_Hashes = npt.NDArray[np.uint64]
_GOLDEN: Final = 0x9E3779B97F4A7C15


class Inputs:
    """Numbers for the distinct input tokens of several tasks, in order of first appearance."""

    def __init__(self, tasks: Sequence[Task]) -> None:
        self.tokens: list[Token] = []
        number: dict[Token, int] = {}
        by_identity: dict[int, int] = {}  # families share token objects: most look-ups need no hash of a token
        self.of_task: list[IntArray] = []
        for task in tasks:
            for token in task.inputs:
                if id(token) not in by_identity:
                    index = number.setdefault(token, len(self.tokens))
                    if index == len(self.tokens):
                        self.tokens.append(token)
                    by_identity[id(token)] = index
            numbers = map(by_identity.__getitem__, map(id, task.inputs))
            self.of_task.append(np.fromiter(numbers, np.int64, task.size))


@dataclass(frozen=True, eq=False)
class Classes:
    """Equivalence classes of positions over several tasks.

    Classes are numbered so that the rows of the merged relation have few intervals, also where a task's own order
    shatters them (permutation language modelling).
    """

    position: list[IntArray]  # for each task the class of each position
    node: IntArray  # the node (class of mutually reachable positions) of each class of positions
    place: IntArray  # of each class in the merged sequence
    rows: list[IntervalRows]  # for each task its mask with keys replaced by their classes: row i is i's down-set

    @property
    def size(self) -> int:
        """Number of classes of positions."""
        return len(self.node)


def repeats_below(task: Task, inputs: IntArray) -> bool:
    """Whether some position of a dense task has the same input twice in its down-set."""
    order = np.argsort(inputs, kind="stable")
    same = np.flatnonzero(np.diff(inputs[order]) == 0)
    if not len(same):
        return False
    twice = np.unique(np.concatenate([same, same + 1]))
    places, groups = order[twice], inputs[order[twice]]
    cuts = np.flatnonzero(np.diff(groups, prepend=-1))
    for _, table in task.mask.dense_chunks():
        if np.add.reduceat(table[:, places], cuts, axis=1, dtype=np.int64).max(initial=0) > 1:
            return True
    return False


def classify(tasks: Sequence[Task], inputs: Inputs) -> Classes:
    """The classes of equivalent positions of dense tasks without repeated inputs in a down-set, checked exactly.

    Cost: O(positions + intervals) of all tasks, and one sort.
    """
    for seed in range(8):
        position, nodes = _hashed(tasks, inputs, seed)
        size = 1 + max((int(part.max(initial=-1)) for part in position), default=-1)
        items = describe(tasks, position, nodes, size)
        place = arrange(position, items)
        number = arrange([_internal_order(task, part) for task, part in zip(tasks, position, strict=True)], items)
        position = [number[part] for part in position]
        back = np.argsort(number)
        rows = [image(task, part, size) for task, part in zip(tasks, position, strict=True)]
        result = Classes(position, items.node[back], place[back], rows)
        if is_embedding(tasks, result, union_of_rows(result), inputs):
            return result
    raise AssertionError("eight 64-bit hashes collided: the check of embeddings must be wrong")


def describe(tasks: Sequence[Task], position: Sequence[IntArray], nodes: Sequence[IntArray], size: int) -> Items:
    """What `arrange` needs to know of `size` classes, from the class and the node of each position of each task."""
    node, position_id = np.full(size, -1), np.zeros(size, dtype=np.int64)
    for task, part, own in zip(tasks, position, nodes, strict=True):
        node[part] = own
        position_id[part] = [token.position for token in task.inputs]
    labelled = [
        part[[label.position for label in task.labels]]
        for task, part in zip(tasks, position, strict=True)
        if task.labels
    ]
    with_label = node[np.concatenate([*labelled, np.zeros(0, np.int64)])]
    return Items(node, np.isin(node, with_label), position_id)


def _internal_order(task: Task, values: IntArray) -> IntArray:
    """Values of the positions of a task in the order in which its mask is compact."""
    _, rank = task.mask.relabelled()
    return values if rank is None else values[np.argsort(rank)]


def image(task: Task, names: IntArray, size: int) -> IntervalRows:
    """The rows of a task's mask with key k called `names[k]`, which is below `size`."""
    rows, rank = task.mask.relabelled()
    if rank is not None:
        internal = np.empty_like(names)
        internal[rank] = names
        names = internal
    pieces = rows.pieces(names, limit=sys.maxsize)
    assert pieces is not None
    built = IntervalRows.build(*pieces, rows.num_rows, size)
    return built if rank is None else built.take(rank)


def union_of_rows(classes: Classes) -> IntervalRows:
    """The row of each class, taken from the position that appears first."""
    first = first_of_each(classes.position, classes.size)
    return IntervalRows.stack(classes.rows, classes.size).take(first)


def first_of_each(numbers: Sequence[IntArray], size: int) -> IntArray:
    """For each of `size` numbers, all of which occur, the place of the first in the concatenation of the arrays."""
    _, first = np.unique(np.concatenate([*numbers, np.zeros(0, np.int64)]), return_index=True)
    assert len(first) == size
    return first.astype(np.int64)


def is_embedding(tasks: Sequence[Task], classes: Classes, merged: IntervalRows, inputs: Inputs) -> bool:
    """Whether every position's down-set maps one to one, inputs and order kept, onto the down-set of its class.

    True proves that every node of every task is equivalent (hasse, def. 3.5) to the node of its class in the
    relation `merged` over the classes.
    """
    token = np.full(classes.size, -1)
    for task, position, rows, numbers in zip(tasks, classes.position, classes.rows, inputs.of_task, strict=True):
        fresh = token[position] < 0
        token[position[fresh]] = numbers[fresh]
        target = merged.take(position)
        if not (
            np.array_equal(token[position], numbers)
            and np.array_equal(rows.counts(), task.mask.row_counts())  # no two keys of a row became one
            and np.array_equal(rows.indptr, target.indptr)
            and np.array_equal(rows.starts, target.starts)
            and np.array_equal(rows.ends, target.ends)
        ):
            return False
    return True


def renumber(numbers: Sequence[npt.NDArray[Any]]) -> list[IntArray]:
    """The same partition with numbers 0, 1, ... in order of first appearance."""
    flat = np.concatenate([*numbers, np.zeros(0, np.uint64)])
    _, first, inverse = np.unique(flat, return_index=True, return_inverse=True)
    rank = np.empty(len(first), dtype=np.int64)
    rank[np.argsort(first)] = np.arange(len(first))
    cuts = np.cumsum([len(part) for part in numbers])[:-1]
    return np.split(rank[inverse], cuts)


def _hashed(tasks: Sequence[Task], inputs: Inputs, seed: int) -> tuple[list[IntArray], list[IntArray]]:
    position_keys: list[_Hashes] = []
    node_keys: list[_Hashes] = []
    for task, numbers in zip(tasks, inputs.of_task, strict=True):
        label = _mix(numbers.astype(np.uint64) + np.uint64((seed + 1) * _GOLDEN & 0xFFFFFFFFFFFFFFFF))
        below = _row_sums(task, label)  # the set of inputs below each position
        node = _mix(_row_sums(task, _mix(below ^ _mix(label))))  # equal within a class of mutually reachable positions
        node_keys.append(node)
        position_keys.append(_mix(node ^ label))
    return renumber(position_keys), renumber(node_keys)


def _row_sums(task: Task, values: _Hashes) -> _Hashes:
    """For each query the sum, modulo 2^64, of the values of the keys that it may attend to."""
    rows, rank = task.mask.relabelled()
    if rank is not None:
        internal = np.empty_like(values)
        internal[rank] = values
        values = internal
    zero = np.zeros(1, np.uint64)
    prefix = np.concatenate([zero, np.cumsum(values, dtype=np.uint64)])
    total = np.concatenate([zero, np.cumsum(prefix[rows.ends] - prefix[rows.starts], dtype=np.uint64)])
    sums = total[rows.indptr[1:]] - total[rows.indptr[:-1]]
    return sums if rank is None else sums[rank]


def _mix(values: _Hashes) -> _Hashes:
    """The finaliser of splitmix64: a fixed bijection of 64-bit words that spreads every bit."""
    values = (values ^ (values >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    values = (values ^ (values >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return values ^ (values >> np.uint64(31))


@dataclass(frozen=True, eq=False)
class Items:
    """What is to be ordered: classes of positions, numbered from 0."""

    node: IntArray  # of each class
    labelled: BoolArray  # whether that node carries a label
    position_id: IntArray  # of each class's input


def arrange(members: Sequence[IntArray], items: Items) -> IntArray:
    """The place of each class in the merged sequence, int64[classes]; `members` are each task's, in its own order."""
    size = len(items.node)
    distinct = [_firsts(part) for part in members]
    whole = [part for part in distinct if len(part) == size][:1]
    flat = np.concatenate([*members, np.zeros(0, np.int64)])
    order = whole or [*_streams([part[~items.labelled[part]] for part in distinct], size), _labelled(flat, items)]
    placed = _firsts(np.concatenate([*order, np.arange(size)]))  # what no task's position stands for goes last
    place = np.empty(size, dtype=np.int64)
    place[placed] = np.arange(size)
    return place


def _firsts(values: IntArray) -> IntArray:
    """The distinct values in order of first appearance."""
    unique, first = np.unique(values, return_index=True)
    return unique[np.argsort(first)]


def _streams(members: Sequence[IntArray], size: int) -> list[IntArray]:
    """Greedy cover of all members, largest share first. Cost: O(total members log)."""
    flat = np.concatenate([*members, np.zeros(0, np.int64)])
    owner = np.repeat(np.arange(len(members)), [len(part) for part in members])[np.argsort(flat, kind="stable")]
    first_owner = np.concatenate([[0], np.cumsum(np.bincount(flat, minlength=size))])
    missing = np.array([len(part) for part in members], dtype=np.int64)
    placed = np.zeros(size, dtype=np.bool_)
    streams: list[IntArray] = []
    while missing.any():
        task = len(missing) - 1 - int(np.argmax(missing[::-1]))
        fresh = members[task][~placed[members[task]]]
        placed[fresh] = True
        streams.append(fresh)
        for c in fresh.tolist():
            missing[owner[first_owner[c] : first_owner[c + 1]]] -= 1  # a task lists a class once
    return streams


def _labelled(flat: IntArray, items: Items) -> IntArray:
    """The classes of labelled nodes: nodes by their first position id, then as they appear; classes as they appear."""
    classes = _firsts(flat[items.labelled[flat]])
    if not len(classes):
        return classes
    _, first, inverse = np.unique(items.node[classes], return_index=True, return_inverse=True)
    lowest = np.full(len(first), np.iinfo(np.int64).max)
    np.minimum.at(lowest, inverse, items.position_id[classes])
    return classes[np.lexsort((np.arange(len(classes)), first[inverse], lowest[inverse]))]
