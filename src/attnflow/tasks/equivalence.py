"""Finds the positions of tasks that compute the same in every layer: the coarsest stable colours, checked exactly.

A position starts with the colour of its input (ids, position, provenance). Each round hashes its colour with the sum of
the hashes of the colours that its row reads, a prefix sum over interval rows, O(n), until no colour splits any more:
two rounds and a last one to see it where masks are dense, more where differences travel through windows. docs/maths.md
proves that no merged task can have fewer positions. A collision costs a second try, never a wrong merge.
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

Classes = tuple[list[IntArray], IntArray, IntArray, IntervalRows, IntArray]
"""The class of each position by task; for each class its node, place and merged row; and the keys that stand for
several positions of a row, int64[keys, 3]: (query, key, how many). Positions of a node have equal rows."""


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


def classify(layout: TasksLayout) -> Classes:
    """Classes of positions that compute the same, numbered for few intervals."""
    for seed in range(8):
        position, nodes = (renumber(keys) for keys in refined(layout.tasks, layout.inputs, seed))
        node = scattered(position, nodes)
        place, number = layout.arrange(position, node)
        position = [number[part] for part in position]
        rows = [image(task, part, len(node)) for task, part in zip(layout.tasks, position, strict=True)]
        _, first = np.unique(np.concatenate([*position, np.zeros(0, np.int64)]), return_index=True)
        merged = IntervalRows.stack(rows, len(node)).take(first)
        several = repeated(layout, position, rows, merged)
        if several is not None:
            back = np.argsort(number)
            return position, node[back], place[back], merged, several
    raise AssertionError("eight 64-bit hashes collided: the check of the classes must be wrong")


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


def repeated(
    layout: TasksLayout, classes: Sequence[IntArray], images: Sequence[IntervalRows], merged: IntervalRows
) -> IntArray | None:
    """The keys (query, key, how many) that stand for several positions of a row; None unless the classes are stable.

    They are if all positions of a class have its input and read equally many positions of each class: then they compute
    the same in every layer (docs/maths.md). Cost: O(intervals), and O(pairs) of the rows and keys that repeat.
    """
    token, several = np.full(merged.num_rows, -1), [np.zeros((0, 3), np.int64)]
    for task, numbers, position, rows in zip(layout.tasks, layout.inputs, classes, images, strict=True):
        fresh = token[position] < 0
        token[position[fresh]] = numbers[fresh]
        if not (np.array_equal(token[position], numbers) and rows.equals(merged.take(position))):
            return None
        twice = np.flatnonzero(rows.counts() < task.mask.row_counts())
        if len(twice):
            again = np.bincount(position)[position] > 1
            rows = IntervalRows.from_bool(again[None]).take(np.zeros_like(twice))
            owner, key = task.mask.intervals().take(twice).intersection(rows).expand()
            pairs, many = np.unique(owner * len(token) + position[key], return_counts=True)
            query, key = np.divmod(pairs[many > 1], len(token))
            several.append(np.stack([position[twice[query]], key, many[many > 1]], axis=1))
    table, times = np.unique(np.concatenate(several), axis=0, return_counts=True)
    members = np.bincount(np.concatenate([*classes, np.zeros(0, np.int64)]), minlength=len(token))
    return table if np.array_equal(times, members[table[:, 0]]) else None


def renumber(numbers: Sequence[npt.NDArray[Any]]) -> list[IntArray]:
    _, number = as_they_appear(np.concatenate([*numbers, np.zeros(0, np.uint64)]))
    return np.split(number, np.cumsum([len(part) for part in numbers])[:-1])


def scattered(position: Sequence[IntArray], values: Sequence[IntArray]) -> IntArray:
    every, result = np.concatenate([*position, np.zeros(0, np.int64)]), np.zeros(0, np.int64)
    if len(every):
        result = np.full(int(every.max()) + 1, -1)
        result[every] = np.concatenate(values)
    return result


def refined(
    tasks: Sequence[Task], inputs: Sequence[IntArray], seed: int, weights: IntArray | None = None
) -> tuple[list[Hashes], list[Hashes]]:
    """(colours of the positions, hashes of what each reads) by task: the coarsest stable refinement of the inputs.

    A colour hashes the own colour before and the multiset of colours read; both almost surely differ where these do.
    Keys (query, key, how many) of the last task count `weights` times.
    """
    salt = np.uint64((seed + 1) * GOLDEN & _ALL_BITS)
    colours = [mix(numbers.astype(np.uint64) + salt) for numbers in inputs]
    groups: dict[int, list[int]] = {}
    for number, task in enumerate(tasks):
        groups.setdefault(id(task.mask), []).append(number)
    before, now = -1, np.count_nonzero(np.bincount(np.concatenate([*inputs, np.zeros(0, np.int64)])))
    reads = colours
    while before < now:
        reads, old = list(colours), colours
        for same in groups.values():  # under one mask, about `_TOGETHER` intervals and positions at a time
            mask = tasks[same[0]].mask
            step = max(1, _TOGETHER // (1 + mask.num_queries + len(mask.relabelled()[0].starts)))
            for members in (same[first : first + step] for first in range(0, len(same), step)):
                for task, sums in zip(members, _row_sums(mask, np.stack([old[task] for task in members])), strict=True):
                    reads[task] = sums
        if weights is not None:
            query, key, many = weights.T
            np.add.at(reads[-1], query, (many - 1).astype(np.uint64) * old[-1][key])
        reads = [mix(sums) for sums in reads]
        colours = [mix(sums ^ colour) for sums, colour in zip(reads, old, strict=True)]
        before, now = now, len(np.unique(np.concatenate([*colours, np.zeros(0, np.uint64)])))
    return colours, reads


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
