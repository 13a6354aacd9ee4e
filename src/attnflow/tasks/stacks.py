"""Merging tasks that have a mask per layer: positions are one where they compute the same after every layer."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Final

import numpy as np

from attnflow._core.checks import IntArray
from attnflow.masks.intervals import IntervalRows
from attnflow.masks.mask import Mask
from attnflow.tasks.task import Task

_LARGEST: Final = 1 << 26  # pairs of all tasks and layers that are looked at one by one: about a minute


@dataclass(frozen=True, eq=False)
class MergedStack:
    """What merging gives: for each task the merged position of each of its positions, and the merged masks."""

    position: list[IntArray]
    inputs: IntArray  # number of the input token of each merged position
    masks: list[Mask]
    lower_bound: int


def merge_stacks(tasks: Sequence[Task], inputs: Sequence[IntArray]) -> MergedStack:
    """One position for all positions of different tasks with the same values after every layer.

    The value of a position after layer l is a function of its value before and of the multiset of values, before layer
    l, of the positions that it attends to there. So key 0 is the input, and key l is (key l - 1, multiset of keys l - 1
    in row l of the mask): positions with equal keys after the last layer compute the same in any model. The merged
    position takes, in each layer, the row of the first task that has it: what another task reads in its place has the
    same values there, whatever becomes of them later. Positions of one task stay apart, so that no multiset
    shrinks. Nothing has to be dense, and no position has to attend to itself.

    Args:
        tasks: all with a mask for each of the same number of layers.
        inputs: number of the input token of each position, by task.

    Raises:
        ValueError: the tasks differ in their number of layers, or have too many pairs to look at.

    Cost: O(P log P) for P pairs of all tasks and layers.
    """
    layers = _common_layers(tasks)
    pairs = sum(mask.nnz for task in tasks for mask in task.masks)
    if pairs > _LARGEST:
        raise ValueError(
            f"merging tasks with a mask per layer looks at each of their {pairs:,} pairs, of at most {_LARGEST:,}: "
            "take shorter or fewer tasks, or one mask for all layers"
        )
    keys = list(inputs)
    rows = [[mask.intervals().expand() for mask in task.masks] for task in tasks]
    for layer in range(layers):
        keys = _refined(keys, [task_rows[layer] for task_rows in rows])
    position, owner = _places(keys)
    numbers = np.array([inputs[task][place] for task, place in owner], dtype=np.int64)
    masks = [_mask([task_rows[layer] for task_rows in rows], position, owner) for layer in range(layers)]
    asked = [keys[number][np.unique(task.targets.column("position"))] for number, task in enumerate(tasks)]
    return MergedStack(position, numbers, masks, len(np.unique(np.concatenate(asked))))


def _common_layers(tasks: Sequence[Task]) -> int:
    layers = {task.num_layers for task in tasks}
    if len(layers) > 1 or None in layers:
        counts = ", ".join(
            "one mask for all layers" if each is None else f"{each} layers"
            for each in sorted(layers, key=lambda each: each or 0)
        )
        raise ValueError(
            f"tasks with a mask per layer merge only with tasks for as many layers, got {counts}: give every task a "
            "list of masks, such as [mask] * layers"
        )
    return len(tasks[0].masks)


def _refined(keys: Sequence[IntArray], pairs: Sequence[tuple[IntArray, IntArray]]) -> list[IntArray]:
    """The key of each position after one more layer, numbered anew over all tasks; exact, nothing is hashed down."""
    number: dict[tuple[int, bytes], int] = {}
    refined: list[IntArray] = []
    for own, (query, key) in zip(keys, pairs, strict=True):
        read = own[key]
        read = read[np.lexsort((read, query))]  # queries ascend: each row sorted by itself
        cuts = np.searchsorted(query, np.arange(len(own) + 1)).tolist()
        rows = (read[first:last].tobytes() for first, last in pairwise(cuts))
        refined.append(
            np.array([number.setdefault(each, len(number)) for each in zip(own.tolist(), rows, strict=True)], np.int64)
        )
    return refined


def _places(keys: Sequence[IntArray]) -> tuple[list[IntArray], list[tuple[int, int]]]:
    """(merged position of each position, by task; first (task, position) of each merged position).

    The n-th position of a task with some key is the n-th merged position of that key.
    """
    merged: dict[tuple[int, int], int] = {}
    owner: list[tuple[int, int]] = []
    position: list[IntArray] = []
    for task, own in enumerate(keys):
        times: dict[int, int] = {}
        places: list[int] = []
        for place, key in enumerate(own.tolist()):
            nth = times.get(key, 0)
            times[key] = nth + 1
            if (key, nth) not in merged:
                merged[key, nth] = len(owner)
                owner.append((task, place))
            places.append(merged[key, nth])
        position.append(np.array(places, dtype=np.int64))
    return position, owner


def _mask(
    pairs: Sequence[tuple[IntArray, IntArray]], position: Sequence[IntArray], owner: Sequence[tuple[int, int]]
) -> Mask:
    """Each merged position reads what its first owner reads."""
    size = len(owner)
    first = np.array(owner, dtype=np.int64).reshape(-1, 2)
    queries, keys = [np.zeros(0, np.int64)], [np.zeros(0, np.int64)]
    for task, (query, key) in enumerate(pairs):
        place = position[task]
        owns = np.zeros(len(place), dtype=np.bool_)
        owns[first[first[:, 0] == task, 1]] = True
        mine = owns[query]
        queries.append(place[query[mine]])
        keys.append(place[key[mine]])
    query, key = np.concatenate(queries), np.concatenate(keys)
    return Mask(IntervalRows.build(query, key, key + 1, size, size), "merged", {"n": size})
