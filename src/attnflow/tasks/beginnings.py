"""Subtasks that are the beginning of another: of `causal_lm` on 8,192 tokens, all but one of 8,191."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np

from attnflow.masks.intervals import BoolArray
from attnflow.tasks.task import Task
from attnflow.tasks.tokens import is_beginning

_TRIED: Final = 4  # longer tasks that a task is compared with


@dataclass(frozen=True, eq=False)
class Beginnings:
    """Which tasks of a family say anything that another does not.

    A task is the beginning of another if its inputs are the first inputs of that one and its rows the first rows: what
    its positions compute is then computed there. The others are dense if that one is.
    """

    longest: list[int]  # tasks that are the beginning of no other (of equals, one)
    of: list[int]  # for each task the index in `longest` of one that begins with it

    @classmethod
    def of_family(cls, tasks: Sequence[Task]) -> Beginnings:
        """Of tasks whose inputs are views of one table; others are compared with none. Cost: O(positions) at most."""
        chosen: dict[int, int] = {}
        candidates: dict[tuple[int, int], list[int]] = {}
        begins = np.zeros(len(tasks), dtype=np.int64)
        for number in sorted(range(len(tasks)), key=lambda number: -tasks[number].size):
            task = tasks[number]
            first = int(task.sequence.index[0]) if task.size else -1
            longer = candidates.setdefault((id(task.sequence.table), first), [])
            match = next((other for other in longer[:_TRIED] if _begins(tasks[other], task)), None)
            if match is None:
                chosen[number] = number
                longer.append(number)
            begins[number] = number if match is None else match
        longest = sorted(chosen)
        return cls(longest, np.searchsorted(longest, begins).tolist())

    def labelled(self, tasks: Sequence[Task]) -> list[BoolArray]:
        """For each task of `longest`, whether each position carries a label, of its own or of a beginning."""
        flags = [np.zeros(tasks[number].size, dtype=np.bool_) for number in self.longest]
        for task, longer in zip(tasks, self.of, strict=True):
            flags[longer][task.targets.column("position")] = True
        return flags


def _begins(long: Task, short: Task) -> bool:
    """Whether a task begins with another, which is no longer."""
    (rows, rank), (beginning, other_rank) = long.mask.relabelled(), short.mask.relabelled()
    n = short.size
    if rank is not None or other_rank is not None or rows.indptr[n] != beginning.indptr[n]:
        return False
    pairs = (
        (short.sequence.index, long.sequence.index),
        (beginning.indptr, rows.indptr),
        (beginning.starts, rows.starts),
        (beginning.ends, rows.ends),
    )
    return all(is_beginning(one, other) for one, other in pairs)
