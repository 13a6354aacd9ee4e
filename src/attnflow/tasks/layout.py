"""The order of the positions of a merged sequence. Any order is right; this one keeps streams together.

1. If one task has every class, its own order (causal and multi-token training, families of one task).
2. Otherwise the unlabelled classes first, as streams: again and again the task that brings the most classes not yet
   placed (the later task of equals), in its own order. Then the labelled nodes, by their first position id, each node
   in one piece, in the order of the first task that has it.

For the paper's families this is its layout: contents then mask blocks (eq. 45), forward stream, backward stream,
centres (eq. 57). Few streams also mean few intervals per row, hence few blocks for block-sparse kernels.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from attnflow._core.checks import IntArray
from attnflow.masks.intervals import BoolArray


@dataclass(frozen=True, eq=False)
class Items:
    """What is to be ordered: classes of positions, numbered from 0.

    Attributes:
        node: the node of each class.
        labelled: whether that node carries a label.
        position_id: the position id of each class's input.
    """

    node: IntArray
    labelled: BoolArray
    position_id: IntArray


def arrange(members: Sequence[IntArray], items: Items) -> IntArray:
    """The place of each class in the merged sequence, int64[classes], a permutation.

    Args:
        members: for each task its classes, in the order that the task gives them.
        items: what is known of the classes.
    """
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
