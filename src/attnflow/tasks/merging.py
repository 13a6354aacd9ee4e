"""`merge`: builds the one sequence and mask that trains a whole family of tasks; `embeds` checks such a task."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np
from jaxtyping import Int
from torch import Tensor

from attnflow._core.checks import IntArray, preview
from attnflow._core.markup import plural
from attnflow.masks.intervals import IntervalRows
from attnflow.masks.mask import Mask
from attnflow.tasks import equivalence
from attnflow.tasks.layout import TasksLayout
from attnflow.tasks.posets import Poset, Work, amalgamate, isomorphism, typed
from attnflow.tasks.task import LabelTable, Task
from attnflow.tasks.tokens import TokenSequence, numbered


@dataclass(frozen=True, repr=False, eq=False)
class MergedTask:
    """The minimal merged task of a family (hasse, def. 3.6): one forward pass trains every subtask.

    Attributes:
        task: the merged task; its labels carry the number of their subtask.
        positions: for each subtask, an int64 array with the merged position that computes each of its positions.
        node: the merged node (class of mutually reachable positions) of each merged position, int64.
        lower_bound: the least number of nodes that any merged task of the family can have.
        is_minimal: whether no merged task with fewer nodes exists. Always True without repeated inputs in a down-set;
            with them a search decides, and False means that it ended without a proof.
    """

    task: Task
    positions: tuple[IntArray, ...]
    node: IntArray
    lower_bound: int
    is_minimal: bool

    @property
    def position_ids(self) -> Int[Tensor, " n"]:
        """The position id of each merged position, int64."""
        return self.task.position_ids

    @property
    def num_nodes(self) -> int:
        return int(self.node.max(initial=-1)) + 1

    @cached_property
    def nodes(self) -> tuple[tuple[int, ...], ...]:
        order = np.argsort(self.node, kind="stable")
        cuts = np.flatnonzero(np.diff(self.node[order])) + 1
        return tuple(tuple(members.tolist()) for members in np.split(order, cuts)) if len(order) else ()

    def __repr__(self) -> str:
        return f"MergedTask({plural(len(self.positions), 'subtask')} in {self.task!r})"

    def __str__(self) -> str:
        before = sum(map(len, self.positions))
        alone = before == self.task.size and len(self.positions) > 1
        proof = "the fewest possible" if self.is_minimal else f"at least {self.lower_bound} are needed"
        return (
            f"{plural(len(self.positions), 'task')} with {plural(before, 'position')} merged into {self.task.size}: "
            f"{plural(self.num_nodes, 'node')} ({proof}), "
            f"{plural(self.task.mask.nnz, 'allowed pair')}; checked: every task is embedded"
            + "; no position is shared: two tokens are one input only if ids, position and provenance agree"
            * alone
        )

    def embeds(self, family: Sequence[Task], mask: Mask | None = None) -> Embedding:
        """Find which nodes of a family the merged task holds, optionally under your own mask (def. 3.6).

        A sparse mask counts by its closure. An empty family, or a task that is not dense, raises `ValueError`.
        Cost: it visits every task's down-sets node by node, which takes seconds for 40,000 positions in all.

        >>> import attnflow as af
        >>> family = af.tasks.butterfly([5, 6, 7])
        >>> merged = af.tasks.merge(family)
        >>> printed = merged.embeds(family, af.tasks.families.butterfly_as_printed(3))
        >>> merged.embeds(family).ok, [node.task for node in printed.missing]
        (True, [0, 1])
        """
        own = self.task if mask is None else Task(self.task.sequence, self.task.targets, mask)
        return embedding(own, family)


@dataclass(frozen=True)
class MissingNode:
    """A node of a family without an equivalent in a task: subtask `task` cannot be read off at `positions`."""

    task: int
    positions: tuple[int, ...]


@dataclass(frozen=True)
class Embedding:
    """Which nodes of a family a task holds, made by `MergedTask.embeds`.

    Attributes:
        num_nodes: nodes of the family, all subtasks together.
        missing: the nodes that the task has no equivalent for.
    """

    num_nodes: int
    missing: tuple[MissingNode, ...]

    @property
    def ok(self) -> bool:
        """Whether every node of the family is embedded: the task is a common supergraph."""
        return not self.missing

    def __str__(self) -> str:
        if self.ok:
            return f"all {self.num_nodes} nodes of the family are embedded"
        lines = [f"{len(self.missing)} of {self.num_nodes} nodes of the family are not embedded:"]
        lines += [f"  task {node.task}: positions {preview(node.positions)}" for node in self.missing[:12]]
        return "\n".join(lines + [f"  ... and {len(self.missing) - 12} more"] * (len(self.missing) > 12))


_Quotient = tuple[list[IntArray], IntArray, IntArray, Mask, int, bool]
"""The merged position of each task's positions; node and input number of each; mask, lower bound, is it minimal."""


def merge(family: Sequence[Task]) -> MergedTask:
    """Merge a family of dense tasks into one task: their minimal common supergraph (hasse, def. 3.5-3.6, theorem 3.7).

    Equivalent nodes (same inputs, isomorphic down-sets) of different tasks become one. The theorem as printed also
    joins equivalent nodes *within* a down-set, which breaks the nodes above them; here a down-set keeps them all
    (order.md). An exact check at the end shows that every down-set of every task is embedded. For the paper's families
    the result is `af.masks.causal(n - 1)`, `af.masks.block_two_stream(N, block)` and `af.masks.butterfly(n)` (eq. 58
    corrected).

    Args:
        family: tasks on one sample. All their labels are kept, with `task` set to the place in the family.

    Returns:
        The merged task, dense, its positions in the order of `attnflow.tasks.layout`.

    Raises:
        ValueError: the family is empty; a task is not dense, or a position does not attend to itself
            (`task.densified()` makes both true); a task has a mask per layer; inputs repeat in so symmetric a pattern
            that distinguishing nodes takes more than a fixed amount of work.

    Cost: O(positions + intervals) where inputs do not repeat within a down-set; prefixes of other subtasks cost
    nothing. A tree of 65,000 positions takes two seconds. Repeated inputs need a search, for a few hundred nodes.

    >>> import attnflow as af
    >>> merged = af.tasks.merge(af.tasks.butterfly([5, 6, 7]))
    >>> merged.task.mask == af.masks.butterfly(3), merged.position_ids.tolist()
    (True, [0, 1, 1, 2, 0, 1, 2])
    """
    tasks = _family(family)
    numbers, within = equivalence.prefixes(tasks)
    by_mask = {id(tasks[number].mask): number for number in reversed(numbers)}
    for number in sorted(by_mask.values()):
        _require_dense(number, tasks[number])
    longest = [tasks[number] for number in numbers]
    labelled = [np.zeros(task.size, dtype=np.bool_) for task in longest]
    for task, of in zip(tasks, within, strict=True):
        labelled[of][task.targets.table["position"]] = True
    tokens, inputs = numbered([task.sequence for task in longest])
    repeats = any(equivalence.repeats_below(task, own) for task, own in zip(longest, inputs, strict=True))
    layout = TasksLayout(longest, inputs, labelled, tokens)
    place, node, token, mask, lower_bound, is_minimal = _by_search(layout) if repeats else _by_hash(layout)
    positions = [place[of][: task.size] for task, of in zip(tasks, within, strict=True)]
    [node] = equivalence.renumber([node])
    merged = Task(TokenSequence(tokens, token), _labels(tasks, positions), mask)
    return MergedTask(merged, tuple(positions), node, lower_bound, is_minimal)


def _labels(tasks: Sequence[Task], positions: Sequence[IntArray]) -> LabelTable:
    table = np.concatenate([task.targets.table for task in tasks])
    counts = [len(task.targets) for task in tasks]
    table["task"] = np.repeat(np.arange(len(tasks)), counts)
    table["position"] = np.concatenate(
        [part[task.targets.table["position"]] for task, part in zip(tasks, positions, strict=True)]
    )
    return LabelTable(table[np.argsort(table["position"], kind="stable")])


def embedding(task: Task, family: Sequence[Task]) -> Embedding:
    tasks = _family(family)
    for number, each in enumerate(tasks):
        _require_dense(number, each)
    every = [*tasks, task.densified()]
    _, inputs = numbered([each.sequence for each in every])
    (*posets, whole), _ = typed(every, inputs)
    held = set(whole.types)
    missing = [
        MissingNode(number, members)
        for number, poset in enumerate(posets)
        for members, kind in zip(poset.members, poset.types, strict=True)
        if kind not in held
    ]
    return Embedding(sum(len(poset.members) for poset in posets), tuple(missing))


def _family(family: Sequence[Task]) -> list[Task]:
    if isinstance(family, Task):  # pyright: ignore[reportUnnecessaryIsInstance]
        raise TypeError("a family is a sequence of Task, got one Task: pass [task]")
    tasks = list(family)
    if not tasks:
        raise ValueError("a family needs at least one task, got none")
    for number, task in enumerate(tasks):
        if not isinstance(task, Task):  # pyright: ignore[reportUnnecessaryIsInstance]
            raise TypeError(f"a family is a sequence of Task, got {type(task).__name__}")
        if task.num_layers is not None:
            raise ValueError(
                f"task {number} has a mask per layer ({task.num_layers}), but merging compares the down-sets of dense "
                "tasks: merge tasks with one mask for all layers"
            )
    return tasks


def _require_dense(number: int, task: Task) -> None:
    if not task.is_dense:
        raise ValueError(
            f"task {number} is not dense: information needs more than one layer (A != R; hasse, def. 3.2), so its "
            "mask alone does not fix what a node computes. Merge [task.densified() for task in family] and make "
            "the merged mask sparser afterwards with merged.task.sparsified(...)"
        )
    if not task.attends_itself:
        raise ValueError(
            f"in task {number} some position does not attend to itself; the residual connection is not attention, "
            "and a merged position must compute the same. Use task.densified(), or allow the diagonal in its mask"
        )


def _by_hash(layout: TasksLayout) -> _Quotient:
    position, node, place, rows = equivalence.classify(layout)
    rank = np.argsort(place)
    n = len(rank)
    moved = None if np.array_equal(rank, np.arange(n)) else rank
    mask = Mask(rows, "merged", {"n": n}, query_rank=moved, key_rank=moved)
    position = [place[part] for part in position]
    numbers = equivalence.scattered(position, layout.inputs)
    return position, node[rank], numbers, mask, len(np.unique(node)), True


def _by_search(layout: TasksLayout) -> _Quotient:
    posets, examples = typed(layout.tasks, layout.inputs)
    types, strictly_below, lower_bound, is_minimal = amalgamate(examples)
    numbers = [poset.inputs[node] for poset, node in (examples[kind] for kind in types)]
    starts = np.cumsum([0, *map(len, numbers)])
    covers = [sorted(under.difference(*(strictly_below[lower] for lower in under))) for under in strictly_below]
    whole = Poset([], numbers, covers, strictly_below, types)
    position: list[IntArray] = []
    for task, poset, own in zip(layout.tasks, posets, layout.inputs, strict=True):
        image = _node_images(poset, whole)
        place = np.full(task.size, -1)
        for node, members in enumerate(poset.members):
            ordered = sorted(members, key=lambda i, own=own: int(own[i]))  # equal inputs of a node compute the same
            place[ordered] = starts[image[node]] + np.arange(len(members))
        position.append(place)
    node_of = np.repeat(np.arange(len(numbers)), [len(each) for each in numbers])
    order, _ = layout.arrange(position, node_of)
    allow = np.zeros((len(node_of), len(node_of)), dtype=np.bool_)
    for node, below in enumerate(strictly_below):
        allow[np.ix_(node_of == node, np.isin(node_of, [*below, node]))] = True
    back = np.argsort(order)
    mask = Mask(IntervalRows.from_bool(allow[np.ix_(back, back)]), "merged", {"n": len(node_of)})
    tokens = np.array([number for each in numbers for number in each], dtype=np.int64)[back]
    position = [order[place] for place in position]
    return position, node_of[back], tokens, mask, lower_bound, is_minimal


def _node_images(poset: Poset, whole: Poset) -> dict[int, int]:
    """An equivalent merged node for each node; within a maximal down-set they form an isomorphism."""
    image: dict[int, int] = {}
    work = Work()
    for top in poset.maximal:
        stand_in = whole.types.index(poset.types[top])
        mapping = isomorphism(poset, top, whole, stand_in, work)
        assert mapping is not None, "the merged poset lost a down-set"
        image = mapping | image
    return image
