"""Finds the positions of tasks that compute the same thing, by hashing, and checks the result exactly.

Where no down-set holds an input twice, only the inputs can match equivalent nodes (hasse, def. 3.5). A position's key
hashes its input and the pairs (input, inputs below it) of its down-set: two sums over the rows of a dense mask, which
are prefix sums over interval rows, O(n). A collision costs a second try, never a wrong answer.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from attnflow._core.checks import IntArray
from attnflow.masks.intervals import IntervalRows
from attnflow.masks.mask import Mask
from attnflow.masks.numbering import pieces_of
from attnflow.tasks.layout import TasksLayout
from attnflow.tasks.task import Task
from attnflow.tasks.tokens import as_they_appear

Hashes = npt.NDArray[np.uint64]
GOLDEN: Final = 0x9E3779B97F4A7C15
_ALL_BITS: Final = 0xFFFFFFFFFFFFFFFF
_TOGETHER: Final = 1 << 20  # intervals and positions that are hashed at a time
_TRIED: Final = 4  # longer tasks that a task is compared with


def prefixes(tasks: Sequence[Task]) -> tuple[list[int], list[int]]:
    """(the tasks that are a prefix of no other, for each task the place there of one that it is a prefix of)."""
    longest: list[int] = []
    candidates: dict[tuple[int, int], list[int]] = {}
    within = np.zeros(len(tasks), dtype=np.int64)
    for number in sorted(range(len(tasks)), key=lambda number: -tasks[number].size):
        task = tasks[number]
        first = int(task.sequence.index[0]) if task.size else -1
        longer = candidates.setdefault((id(task.sequence.table), first), [])
        match = next((other for other in longer[:_TRIED] if _is_prefix(tasks[other], task)), None)
        if match is None:
            longest.append(number)
            longer.append(number)
        within[number] = number if match is None else match
    longest.sort()
    return longest, np.searchsorted(longest, within).tolist()


def _is_prefix(long: Task, short: Task) -> bool:
    (rows, rank), (prefix, other_rank) = long.mask.relabelled(), short.mask.relabelled()
    n = short.size
    if rank is not None or other_rank is not None or rows.indptr[n] != prefix.indptr[n]:
        return False
    columns = ((getattr(prefix, name), getattr(rows, name)) for name in ("indptr", "starts", "ends"))
    for one, other in ((short.sequence.index, long.sequence.index), *columns):
        view = one.ctypes.data == other.ctypes.data and one.strides == other.strides
        if not view and not np.array_equal(one, other[: len(one)]):
            return False
    return True


def repeats_below(task: Task, inputs: IntArray) -> bool:
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


def classify(layout: TasksLayout) -> tuple[list[IntArray], IntArray, IntArray, IntervalRows]:
    """Classes of equivalent positions, numbered for few intervals; node, place and merged row of each class."""
    for seed in range(8):
        position, nodes = (renumber(keys) for keys in hashed(layout.tasks, layout.inputs, seed))
        node = scattered(position, nodes)
        place, number = layout.arrange(position, node)
        position = [number[part] for part in position]
        rows = [image(task, part, len(node)) for task, part in zip(layout.tasks, position, strict=True)]
        _, first = np.unique(np.concatenate([*position, np.zeros(0, np.int64)]), return_index=True)
        merged = IntervalRows.stack(rows, len(node)).take(first)
        if is_embedding(layout, position, rows, merged):
            back = np.argsort(number)
            return position, node[back], place[back], merged
    raise AssertionError("eight 64-bit hashes collided: the check of embeddings must be wrong")


def image(task: Task, names: IntArray, size: int) -> IntervalRows:
    """The rows of a task's mask with key k called `names[k]`, which is below `size`."""
    rows, rank = task.mask.relabelled()
    if rank is not None:
        internal = np.empty_like(names)
        internal[rank] = names
        names = internal
    pieces = pieces_of(rows, names, sys.maxsize)
    assert pieces is not None
    built = IntervalRows.build(*pieces, rows.num_rows, size)
    return built if rank is None else built.take(rank)


def is_embedding(
    layout: TasksLayout, classes: Sequence[IntArray], images: Sequence[IntervalRows], merged: IntervalRows
) -> bool:
    """Whether each position's down-set maps one to one onto that of its class, keeping inputs and order (def. 3.5)."""
    token = np.full(merged.num_rows, -1)
    for task, numbers, position, rows in zip(layout.tasks, layout.inputs, classes, images, strict=True):
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
    _, number = as_they_appear(np.concatenate([*numbers, np.zeros(0, np.uint64)]))
    return np.split(number, np.cumsum([len(part) for part in numbers])[:-1])


def scattered(position: Sequence[IntArray], values: Sequence[IntArray]) -> IntArray:
    every, result = np.concatenate([*position, np.zeros(0, np.int64)]), np.zeros(0, np.int64)
    if len(every):
        result = np.full(int(every.max()) + 1, -1)
        result[every] = np.concatenate(values)
    return result


def hashed(tasks: Sequence[Task], inputs: Sequence[IntArray], seed: int) -> tuple[list[Hashes], list[Hashes]]:
    """(position hashes, node hashes) by task: equal where equivalent, otherwise almost surely different."""
    position_keys, node_keys = ([np.zeros(0, np.uint64)] * len(tasks) for _ in range(2))
    salt = np.uint64((seed + 1) * GOLDEN & _ALL_BITS)
    groups: dict[int, list[int]] = {}
    for number, task in enumerate(tasks):
        groups.setdefault(id(task.mask), []).append(number)
    for same in groups.values():  # under one mask, about `_TOGETHER` intervals and positions at a time
        mask = tasks[same[0]].mask
        step = max(1, _TOGETHER // (1 + mask.num_queries + len(mask.relabelled()[0].starts)))
        for members in (same[first : first + step] for first in range(0, len(same), step)):
            label = mix(np.stack([inputs[task] for task in members]).astype(np.uint64) + salt)
            below = _row_sums(mask, label)  # the set of inputs below each position
            # equal within a class of mutually reachable positions:
            node = mix(_row_sums(mask, mix(below ^ mix(label))))
            for row, task in enumerate(members):
                node_keys[task], position_keys[task] = node[row], mix(node[row] ^ label[row])
    return position_keys, node_keys


def _row_sums(mask: Mask, values: Hashes) -> Hashes:
    """For each query the sum, modulo 2^64, of the values [tasks, keys] of the keys that it reads."""
    rows, rank = mask.relabelled()
    if rank is not None:
        internal = np.empty_like(values)
        internal[:, rank] = values
        values = internal
    prefix = _from_zero(values)
    total = _from_zero(prefix[:, rows.ends] - prefix[:, rows.starts])
    sums = total[:, rows.indptr[1:]] - total[:, rows.indptr[:-1]]
    return sums if rank is None else sums[:, rank]


def _from_zero(values: Hashes) -> Hashes:
    sums = np.zeros((len(values), values.shape[1] + 1), np.uint64)
    np.cumsum(values, axis=1, dtype=np.uint64, out=sums[:, 1:])
    return sums


def mix(values: Hashes) -> Hashes:
    """The finaliser of splitmix64 (Steele et al., OOPSLA 2014), a bijection of 64-bit words that spreads every bit."""
    values = (values ^ (values >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    values = (values ^ (values >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return values ^ (values >> np.uint64(31))
