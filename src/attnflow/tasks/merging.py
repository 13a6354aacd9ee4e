"""`merge`: the one sequence and mask that trains a whole family of tasks; `embedded`: whether a task holds a family."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import groupby

import numpy as np
from jaxtyping import Int
from torch import Tensor

from attnflow._core.checks import IntArray, preview
from attnflow._core.markup import plural
from attnflow.masks.intervals import IntervalRows
from attnflow.masks.mask import Mask
from attnflow.tasks import equivalence
from attnflow.tasks.equivalence import Inputs, repeats_below
from attnflow.tasks.isomorphism import Work
from attnflow.tasks.posets import Poset, amalgamate, isomorphism, typed
from attnflow.tasks.task import Task


@dataclass(frozen=True, repr=False)
class MergedTask:
    """The minimal merged task of a family (hasse, def. 3.6): one forward pass trains every subtask.

    Attributes:
        task: the merged task; its labels carry the number of their subtask.
        nodes: the merged nodes, classes of mutually reachable positions, each as a tuple of merged positions.
        node_of: `node_of[t][i]` is the index in `nodes` of the node that stands for position i of subtask t.
        position_of: `position_of[t][i]` is the merged position that computes position i of subtask t.
        lower_bound: number of nodes that any merged task of the family has at least.
        is_minimal: whether no merged task with fewer nodes exists. Proved for every family without repeated inputs
            in a down-set; with such repeats a search decides, and False says that it ended without a proof.
    """

    task: Task
    nodes: tuple[tuple[int, ...], ...]
    node_of: tuple[tuple[int, ...], ...]
    position_of: tuple[tuple[int, ...], ...]
    lower_bound: int
    is_minimal: bool

    @property
    def position_ids(self) -> Int[Tensor, " n"]:
        """The position id of each merged position, int64."""
        return self.task.position_ids

    def __repr__(self) -> str:
        return f"MergedTask({plural(len(self.position_of), 'subtask')} in {self.task!r})"

    def __str__(self) -> str:
        before = plural(sum(len(part) for part in self.position_of), "position")
        proof = "minimal" if self.is_minimal else f"not proved minimal: at least {self.lower_bound} are needed"
        return (
            f"{plural(len(self.position_of), 'task')} with {before} in {self.task.size}: "
            f"{plural(len(self.nodes), 'node')} ({proof}), {plural(self.task.mask.nnz, 'pair')}; "
            "every down-set of every task is embedded (checked)"
        )


@dataclass(frozen=True)
class MissingNode:
    """A node of a family for which a task has no equivalent: subtask `task` cannot be read off at `positions`."""

    task: int
    positions: tuple[int, ...]


@dataclass(frozen=True)
class Embedding:
    """Which nodes of a family a task holds, made by `embedded`.

    Attributes:
        num_nodes: nodes of the family, all subtasks together.
        missing: those without an equivalent node.
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


@dataclass(frozen=True, eq=False)
class _Quotient:
    """What both ways of merging give: for each task the merged position of each position, and the merged mask."""

    position: list[IntArray]
    node: IntArray  # of each merged position
    inputs: IntArray  # number of the input token of each merged position
    mask: Mask
    lower_bound: int
    is_minimal: bool


def merge(family: Sequence[Task]) -> MergedTask:
    """The minimal common supergraph of a family of dense tasks, as a task (hasse, def. 3.5-3.6, theorem 3.7).

    Equivalent nodes (same inputs, isomorphic down-sets) of different tasks become one. The theorem, as printed, also
    joins equivalent nodes *within* a down-set, which breaks the nodes above them; here a down-set keeps them all, and
    a class has as many nodes as the largest number that one down-set needs (order.md). Afterwards it is checked,
    exactly, that every down-set of every task is embedded. For the paper's families the result is, in this layout,
    `af.masks.causal(n - 1)`, `af.masks.block_two_stream(N, block)` and `af.masks.butterfly(n)` (eq. 58 corrected).

    Args:
        family: tasks on one sample. Their labels are all kept, with `task` set to the place in the family.

    Returns:
        The merged task. Its positions are ordered as `attnflow.tasks.equivalence` says, its mask is dense.

    Raises:
        ValueError: the family is empty; a task is not dense, or a position does not attend to itself
            (`task.densified()` makes both true); inputs repeat in so symmetric a pattern that telling nodes apart takes
            more than a fixed amount of work.

    Cost: O(positions + intervals) of all subtasks where inputs do not repeat within a down-set: 1,000 subtasks of
    1,000 tokens take a few seconds. Otherwise isomorphism and a search, bounded, for families of a few hundred nodes.

    >>> import attnflow as af
    >>> merged = af.tasks.merge(af.tasks.butterfly([5, 6, 7]))
    >>> merged.task.mask == af.masks.butterfly(3), merged.position_ids.tolist()
    (True, [0, 1, 1, 2, 0, 1, 2])
    """
    tasks = _family(family)
    inputs = Inputs(tasks)
    repeats = any(repeats_below(task, numbers) for task, numbers in zip(tasks, inputs.of_task, strict=True))
    quotient = _by_search(tasks, inputs) if repeats else _by_hash(tasks, inputs)
    size = len(quotient.node)
    labels = [
        replace(label, position=int(positions[label.position]), task=number)
        for number, (task, positions) in enumerate(zip(tasks, quotient.position, strict=True))
        for label in task.labels
    ]
    labels.sort(key=lambda label: label.position)
    [node] = equivalence.renumber([quotient.node])
    order = sorted(range(size), key=node.tolist().__getitem__)
    return MergedTask(
        Task([inputs.tokens[number] for number in quotient.inputs.tolist()], labels, quotient.mask),
        tuple(tuple(members) for _, members in groupby(order, key=node.tolist().__getitem__)),
        tuple(tuple(node[positions].tolist()) for positions in quotient.position),
        tuple(tuple(positions.tolist()) for positions in quotient.position),
        quotient.lower_bound,
        quotient.is_minimal,
    )


def embedded(task: Task, family: Sequence[Task]) -> Embedding:
    """Which nodes of a family have an equivalent in a task: whether the task can stand for the family (def. 3.6).

    `task` may be any task over the same tokens: the result of `merge`, a layout of your own, or a published mask.
    Of a sparse task the closure counts, which is what its Hasse diagram shows. Nothing is assumed about where the
    nodes of the family stand in it.

    Raises:
        ValueError: the family is empty, or one of its tasks is not dense.

    >>> import attnflow as af
    >>> family = af.tasks.butterfly([5, 6, 7])
    >>> merged = af.tasks.merge(family).task
    >>> printed = Task(merged.inputs, merged.labels, af.tasks.families.butterfly_as_printed(3))
    >>> [node.task for node in af.tasks.embedded(printed, family).missing]
    [0, 1]
    """
    tasks = _family(family)
    every = [*tasks, task.densified()]
    inputs = Inputs(every)
    if any(repeats_below(each, numbers) for each, numbers in zip(every, inputs.of_task, strict=True)):
        posets, _ = typed(every, inputs.of_task)
        held = set(posets[-1].types)
        missing = [
            MissingNode(number, members)
            for number, poset in enumerate(posets[:-1])
            for members, kind in zip(poset.members, poset.types, strict=True)
            if kind not in held
        ]
        return Embedding(sum(len(poset.members) for poset in posets[:-1]), tuple(missing))
    classes = equivalence.classify(every, inputs)
    nodes = [classes.node[position] for position in classes.position]
    held_nodes = set(nodes[-1].tolist())
    own = [_own_nodes(task, node) for task, node in zip(tasks, nodes[:-1], strict=True)]
    missing = [
        MissingNode(number, tuple(positions.tolist()))
        for number, (parts, node) in enumerate(zip(own, nodes[:-1], strict=True))
        for positions in parts
        if int(node[positions[0]]) not in held_nodes
    ]
    return Embedding(sum(map(len, own)), tuple(missing))


def _own_nodes(task: Task, node: IntArray) -> list[IntArray]:
    """The positions of each node of a task, from the class of each position's node.

    Equivalent nodes of one task share a class; they are told apart only where tokens repeat, which takes longer.
    """
    if len(set(task.inputs)) < task.size:
        return [np.array(members) for members in task.flow.classes]
    order = np.argsort(node, kind="stable")
    return np.split(order, np.flatnonzero(np.diff(node[order])) + 1) if task.size else []


def _family(family: Sequence[Task]) -> list[Task]:
    """The tasks of a family, each dense and with every position attending to itself."""
    if isinstance(family, Task):  # pyright: ignore[reportUnnecessaryIsInstance]
        raise TypeError("a family is a sequence of Task, got one Task; pass [task]")
    tasks = list(family)
    if not tasks:
        raise ValueError("a family needs at least one task, got none")
    for number, task in enumerate(tasks):
        if not isinstance(task, Task):  # pyright: ignore[reportUnnecessaryIsInstance]
            raise TypeError(f"a family is a sequence of Task, got {type(task).__name__}")
        if not task.is_dense:
            raise ValueError(
                f"task {number} is not dense: information needs more than one layer (A != R; hasse, def. 3.2), so its "
                "mask alone does not fix what a node computes. Merge [task.densified() for task in family] and make "
                "the merged mask sparser afterwards with merged.task.flow.sparsify(...)"
            )
        if not task.attends_itself:
            raise ValueError(
                f"in task {number} some position does not attend to itself; the residual connection is not attention, "
                "and a merged position must compute the same. Use task.densified(), or allow the diagonal in its mask"
            )
    return tasks


def _by_hash(tasks: Sequence[Task], inputs: Inputs) -> _Quotient:
    classes = equivalence.classify(tasks, inputs)
    rank = np.argsort(classes.place)
    rows = equivalence.union_of_rows(classes)
    mask = Mask(rows, "merged", {"n": classes.size}, query_rank=rank, key_rank=rank)
    if np.array_equal(rank, np.arange(classes.size)):
        mask = Mask(rows, "merged", {"n": classes.size})
    position = [classes.place[part] for part in classes.position]
    tokens = np.full(classes.size, -1)
    for part, numbers in zip(position, inputs.of_task, strict=True):
        tokens[part] = numbers
    return _Quotient(position, classes.node[rank], tokens, mask, len(np.unique(classes.node)), True)


def _by_search(tasks: Sequence[Task], inputs: Inputs) -> _Quotient:
    posets, types = typed(tasks, inputs.of_task)
    amalgam = amalgamate(types)
    kinds = [types.examples[kind] for kind in amalgam.types]
    numbers = [poset.inputs[node] for poset, node in kinds]
    starts = np.cumsum([0, *map(len, numbers)])
    covers = [sorted(under.difference(*(amalgam.below[lower] for lower in under))) for under in amalgam.below]
    whole = Poset([], numbers, covers, amalgam.below, amalgam.types)
    position: list[IntArray] = []
    for task, poset, own in zip(tasks, posets, inputs.of_task, strict=True):
        image = _node_images(poset, whole)
        place = np.full(task.size, -1)
        for node, members in enumerate(poset.members):
            ordered = sorted(members, key=lambda i, own=own: int(own[i]))  # equal inputs of a node compute the same
            place[ordered] = starts[image[node]] + np.arange(len(members))
        position.append(place)
    node_of = np.repeat(np.arange(len(numbers)), [len(each) for each in numbers])
    items = equivalence.describe(tasks, position, [node_of[place] for place in position], len(node_of))
    order = equivalence.arrange(position, replace(items, node=node_of))
    allow = np.zeros((len(node_of), len(node_of)), dtype=np.bool_)
    for node, below in enumerate(amalgam.below):
        allow[np.ix_(node_of == node, np.isin(node_of, [*below, node]))] = True
    back = np.argsort(order)
    mask = Mask(IntervalRows.from_bool(allow[np.ix_(back, back)]), "merged", {"n": len(node_of)})
    tokens = np.array([number for each in numbers for number in each], dtype=np.int64)[back]
    position = [order[place] for place in position]
    return _Quotient(position, node_of[back], tokens, mask, amalgam.lower_bound, amalgam.is_minimal)


def _node_images(poset: Poset, whole: Poset) -> dict[int, int]:
    """For each node of a task one equivalent merged node; within a maximal down-set together an isomorphism."""
    image: dict[int, int] = {}
    work = Work()
    for top in poset.maximal:
        stand_in = whole.types.index(poset.types[top])
        mapping = isomorphism(poset, top, whole, stand_in, work)
        assert mapping is not None, "the merged poset lost a down-set"
        image = mapping | image
    return image
