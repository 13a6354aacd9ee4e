"""The order of the positions of a merged sequence: any order computes the same; this one gives rows few intervals.

1. If one task has every class, its own order (causal and multi-token training, families of one task).
2. Otherwise streams, depth first: repeatedly the task with most unplaced classes (the later of equals) places them as a
   stream in its own order. A stream follows the one that it branches off from, the last to branch off first.
3. Nodes that only predict go last, by first position id: labelled, read by no other node, and not made of data tokens
   at their own places.

This is the paper's layout for its families (eq. 45, 57) and the order of `af.masks.tree` for trees of prefixes.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from attnflow._core.checks import IntArray
from attnflow.masks.intervals import BoolArray, ragged
from attnflow.masks.numbering import invert
from attnflow.tasks.task import Task
from attnflow.tasks.tokens import TokenTable, as_they_appear


@dataclass(frozen=True, eq=False)
class TasksLayout:
    tasks: Sequence[Task]
    inputs: Sequence[IntArray]
    labelled: Sequence[BoolArray]
    tokens: TokenTable
    dense: Sequence[bool]

    def arrange(self, position: Sequence[IntArray], node: IntArray) -> tuple[IntArray, IntArray]:
        """(place in the sequence, number that gives rows few intervals) of each class; XLNet's differ."""
        size = len(node)
        ranks = [task.mask.relabelled()[1] for task in self.tasks]  # the order in which a mask has few intervals
        compact = [part if rank is None else part[np.argsort(rank)] for part, rank in zip(position, ranks, strict=True)]
        distinct = [_firsts(part) for part in position]
        whole = next((task for task, part in enumerate(distinct) if len(part) == size), None)
        if whole is not None:
            return invert(_firsts(position[whole])), invert(_firsts(compact[whole]))
        last = self._last(position, node)
        streams = _streams([part[~last[part]] for part in distinct], size)
        sequence = self._depth_first(streams, position, size)

        def places(members: Sequence[IntArray]) -> IntArray:
            own = [(members[task], classes) for task, classes in (streams[number] for number in sequence)]
            parts = [part[np.isin(part, classes)] for part, classes in own]
            ends = self._predictors(position, members, last, node)
            return invert(_firsts(np.concatenate([*parts, ends, np.arange(size)])))  # what no task stands for goes last

        return places(position), places(compact)

    def _last(self, position: Sequence[IntArray], node: IntArray) -> BoolArray:
        size = len(node)
        labelled, home, ends = np.zeros(size, np.bool_), np.zeros(size, np.bool_), np.ones(size, np.bool_)
        at_home = _at_home(self.tokens)
        for task, part, numbers, has_label in zip(self.tasks, position, self.inputs, self.labelled, strict=True):
            labelled[part[has_label]] = True
            home[part] = at_home[numbers]
            ends[part[_is_read(task, node[part])]] = False
        some_labelled, some_away = (np.zeros(int(node.max(initial=-1)) + 1, np.bool_) for _ in range(2))
        some_labelled[node[labelled]] = True
        some_away[node[~home]] = True
        return ends & some_labelled[node] & some_away[node]

    def _predictors(
        self, position: Sequence[IntArray], members: Sequence[IntArray], last: BoolArray, node: IntArray
    ) -> IntArray:
        flat = np.concatenate([*members, np.zeros(0, np.int64)])
        classes = _firsts(flat[last[flat]])
        if not len(classes):
            return classes
        position_id = np.zeros(len(node), dtype=np.int64)
        for part, numbers in zip(position, self.inputs, strict=True):
            position_id[part] = self.tokens.position[numbers]
        _, first, inverse = np.unique(node[classes], return_index=True, return_inverse=True)
        lowest = np.full(len(first), np.iinfo(np.int64).max)
        np.minimum.at(lowest, inverse, position_id[classes])
        return classes[np.lexsort((np.arange(len(classes)), first[inverse], lowest[inverse]))]

    def _depth_first(self, streams: list[tuple[int, IntArray]], position: Sequence[IntArray], size: int) -> list[int]:
        stream_of, height = np.full(size, -1), np.zeros(size, dtype=np.int64)
        counts = [  # how high each position stands in its task
            task.mask.row_counts() if dense else np.arange(task.size)
            for task, dense in zip(self.tasks, self.dense, strict=True)
        ]
        for number, (_, classes) in enumerate(streams):
            stream_of[classes] = number
        for part, count in zip(position, counts, strict=True):
            height[part] = count
        branches: list[list[tuple[int, int, int]]] = [[] for _ in streams]
        roots: list[int] = []
        for number, (task, _) in enumerate(streams):
            part = position[task]
            own = np.flatnonzero(stream_of[part] == number)
            lowest = int(own[np.argmin(counts[task][own])])
            below = part[self.tasks[task].mask.keys(lowest)]
            below = below[(stream_of[below] != number) & (stream_of[below] >= 0)]
            if not len(below):
                roots.append(number)
                continue
            fork = int(below[np.argmax(height[below])])  # the highest class below: where the branch leaves
            branches[int(stream_of[fork])].append((-int(height[fork]), task, number))
        sequence: list[int] = []
        stack = roots[::-1]
        while stack:
            number = stack.pop()
            sequence.append(number)
            stack += [branch for *_, branch in sorted(branches[number], reverse=True)]
        return sequence


def _at_home(tokens: TokenTable) -> BoolArray:
    alone = np.flatnonzero(tokens.provenance.lengths == 1)
    home = np.zeros(len(tokens), dtype=np.bool_)
    _, data = np.unique(tokens.provenance.values[tokens.provenance.indptr[alone]], return_inverse=True)
    place = tokens.position[alone]
    low, high = np.full(len(alone), np.iinfo(np.int64).max), np.full(len(alone), -1)
    np.minimum.at(low, data, place)
    np.maximum.at(high, data, place)
    home[alone] = (low == high)[data]
    return home


def _is_read(task: Task, node: IntArray) -> BoolArray:
    """Whether another node reads each position: sum (w_row - w_own)^2 > 0 over the rows that hold it."""
    rows, rank = task.mask.relabelled()
    own = (node if rank is None else node[np.argsort(rank)]) % (1 << 16)  # so that the sums stay exact
    weight = own[rows.row_index()]
    read = rows.cover(weight**2) - 2 * own * rows.cover(weight) + own**2 * rows.cover() > 0
    return read if rank is None else read[rank]


def _firsts(values: IntArray) -> IntArray:
    return values[as_they_appear(values)[0]]


def _streams(members: Sequence[IntArray], size: int) -> list[tuple[int, IntArray]]:
    """Cover all members greedily by (task, classes not yet covered), largest first, in O(total log)."""
    flat = np.concatenate([*members, np.zeros(0, np.int64)])
    owner = np.repeat(np.arange(len(members)), [len(part) for part in members])[np.argsort(flat, kind="stable")]
    first_owner = np.concatenate([[0], np.cumsum(np.bincount(flat, minlength=size))])
    missing = np.array([len(part) for part in members], dtype=np.int64)
    placed = np.zeros(size, dtype=np.bool_)
    streams: list[tuple[int, IntArray]] = []
    while missing.any():
        task = len(missing) - 1 - int(np.argmax(missing[::-1]))
        fresh = members[task][~placed[members[task]]]
        placed[fresh] = True
        streams.append((task, fresh))
        owners = first_owner[fresh + 1] - first_owner[fresh]
        slots = ragged(first_owner[fresh], owners)[1]
        missing -= np.bincount(owner[slots], minlength=len(missing))  # a task lists a class once
    return streams
