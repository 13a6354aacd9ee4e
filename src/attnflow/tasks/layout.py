"""In which order the positions of a merged sequence stand.

Any order computes the same. This one keeps together what is read together, so that rows have few intervals and
block-sparse kernels few blocks:

1. If one task has every class, its own order (causal and multi-token training, families of one task).
2. Otherwise streams, depth first: again and again the task that brings the most classes not yet placed (the later
   task of equals) makes them a stream, in its own order. A stream stands behind the one that it branches off from;
   of the branches of a stream the one that leaves it last comes first, as in the preorder of a tree.
3. Last the nodes that are there only to predict: labelled, read by no other node, and not made of data tokens at their
   own places (mask tokens, averages). They stand by their first position id, each in one piece.

For the paper's families this is its layout: contents then mask blocks (eq. 45), forward stream, backward stream,
centres (eq. 57); for rollouts and other trees of prefixes it is the depth-first order of `af.masks.tree`.
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
class Layout:
    """What the order depends on besides the classes: the tasks, which are dense, and for each position of each task

    whether it is labelled; `inputs` are the numbers of the inputs in `tokens`.
    """

    tasks: Sequence[Task]
    inputs: Sequence[IntArray]
    labelled: Sequence[BoolArray]
    tokens: TokenTable

    def arrange(self, position: Sequence[IntArray], node: IntArray) -> tuple[IntArray, IntArray]:
        """(place in the sequence, number by which rows have few intervals) of each class.

        The two differ where a task's own order shatters its mask (permutation language modelling). `position` is for
        each task the class of each position, `node` the node of each class.
        """
        size = len(node)
        compact = [_compact(task, part) for task, part in zip(self.tasks, position, strict=True)]
        distinct = [_firsts(part) for part in position]
        whole = next((task for task, part in enumerate(distinct) if len(part) == size), None)
        if whole is not None:
            return invert(_firsts(position[whole])), invert(_firsts(compact[whole]))
        last = self._last(position, node)
        streams = _streams([part[~last[part]] for part in distinct], size)
        sequence = self._depth_first(streams, position, size)

        def places(members: Sequence[IntArray]) -> IntArray:
            parts = [_only(members[streams[s][0]], streams[s][1], size) for s in sequence]
            ends = self._predictors(position, members, last, node)
            return invert(_firsts(np.concatenate([*parts, ends, np.arange(size)])))  # what no task stands for goes last

        return places(position), places(compact)

    def _last(self, position: Sequence[IntArray], node: IntArray) -> BoolArray:
        """Whether each class belongs to a node that is there only to predict."""
        size = len(node)
        labelled, home, ends = np.zeros(size, np.bool_), np.zeros(size, np.bool_), np.ones(size, np.bool_)
        at_home = _at_home(self.tokens)
        for task, part, numbers, has_label in zip(self.tasks, position, self.inputs, self.labelled, strict=True):
            labelled[part[has_label]] = True
            home[part] = at_home[numbers]
            ends[part[_is_read(task)]] = False
        some_labelled, some_away = (np.zeros(int(node.max(initial=-1)) + 1, np.bool_) for _ in range(2))
        some_labelled[node[labelled]] = True
        some_away[node[~home]] = True
        return ends & some_labelled[node] & some_away[node]

    def _predictors(
        self, position: Sequence[IntArray], members: Sequence[IntArray], last: BoolArray, node: IntArray
    ) -> IntArray:
        """The classes that go last: nodes by their first position id, then as they appear; classes as they appear."""
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
        """The streams in preorder of the forest that they make."""
        stream_of, height = np.full(size, -1), np.zeros(size, dtype=np.int64)
        counts = [task.mask.row_counts() for task in self.tasks]
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
    """Whether each token is one data token, of which no other token at another position is made alone."""
    alone = np.flatnonzero(tokens.provenance.lengths == 1)
    home = np.zeros(len(tokens), dtype=np.bool_)
    _, data = np.unique(tokens.provenance.values[tokens.provenance.indptr[alone]], return_inverse=True)
    place = tokens.position[alone]
    low, high = np.full(len(alone), np.iinfo(np.int64).max), np.full(len(alone), -1)
    np.minimum.at(low, data, place)
    np.maximum.at(high, data, place)
    home[alone] = (low == high)[data]
    return home


def _is_read(task: Task) -> BoolArray:
    """Whether a position of another node reads each position of a dense task.

    It does iff some row that holds the position is longer than the position's own. None is shorter, so that is so iff
    the lengths of these rows add up to more than that.
    """
    rows, rank = task.mask.relabelled()
    counts = rows.counts()
    owner = counts[rows.row_index()]

    read = rows.cover(owner) > rows.cover() * counts
    return read if rank is None else read[rank]


def _compact(task: Task, values: IntArray) -> IntArray:
    """Values of the positions of a task in the order in which its mask is compact."""
    _, rank = task.mask.relabelled()
    return values if rank is None else values[np.argsort(rank)]


def _firsts(values: IntArray) -> IntArray:
    """The distinct values in order of first appearance."""
    return values[as_they_appear(values)[0]]


def _only(members: IntArray, classes: IntArray, size: int) -> IntArray:
    """Of the members, in their order, those that are among the classes."""
    chosen = np.zeros(size, dtype=np.bool_)
    chosen[classes] = True
    return members[chosen[members]]


def _streams(members: Sequence[IntArray], size: int) -> list[tuple[int, IntArray]]:
    """Greedy cover of all members as (task, its classes not covered yet), largest first. Cost: O(total log)."""
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
