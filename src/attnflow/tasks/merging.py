"""`merge`: builds the one sequence and mask that trains a whole family of tasks; `embeds` checks such a task."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property

import numpy as np
import torch
from jaxtyping import Float, Int
from torch import Tensor

from attnflow._core.checks import IntArray, boolean, preview
from attnflow._core.markup import plural
from attnflow.masks.intervals import IntervalRows
from attnflow.masks.mask import Mask
from attnflow.tasks import equivalence
from attnflow.tasks.layout import TasksLayout
from attnflow.tasks.posets import Poset, Work, amalgamate, isomorphism, typed
from attnflow.tasks.task import LabelTable, Task
from attnflow.tasks.tokens import TokenSequence, numbered


def _no_keys() -> IntArray:
    return np.zeros((0, 3), np.int64)


@dataclass(frozen=True, repr=False, eq=False)
class MergedTask:
    """The minimal merged task of a family (hasse, def. 3.6): one forward pass trains every subtask.

    Attributes:
        task: the merged task; its labels carry the number of their subtask.
        positions: for each subtask, an int64 array with the merged position that computes each of its positions.
        node: the merged node (class of mutually reachable positions) of each merged position, int64.
        lower_bound: the least number of nodes that any merged task of the family can have.
        is_minimal: whether it is proved that no merged task with fewer nodes serves every model. It is (docs/maths.md),
            unless copies had to be searched for: then False means that the search ended without a proof.
        multiplicity: keys that stand for several positions of a row, int64[keys, 3]: (query, key, how many). Empty
            unless `merge` was called with `key_bias`.
    """

    task: Task
    positions: tuple[IntArray, ...]
    node: IntArray
    lower_bound: int
    is_minimal: bool
    multiplicity: IntArray = field(default_factory=_no_keys)

    def log_multiplicity(self) -> Float[Tensor, "n n"]:
        """What to add to each score [query, key], float64: the logarithm of how many positions the key stands for."""
        query, key, many = torch.from_numpy(self.multiplicity).T
        return torch.zeros(self.task.size, self.task.size, dtype=torch.float64).index_put(
            (query, key), many.double().log()
        )

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
            f"{plural(self.task.masks[0].nnz, 'allowed pair')}; checked: every task is embedded"
            + f"; {plural(len(self.multiplicity), 'pair')} need log_multiplicity" * (len(self.multiplicity) > 0)
            + "; no position is shared: two tokens are one input only if ids, position and provenance agree" * alone
        )

    def embeds(self, family: Sequence[Task], mask: Mask | None = None) -> Embedding:
        """Find which nodes of a family the merged task holds, optionally under your own mask (def. 3.6).

        For dense tasks a sparse mask counts by its closure. If a task is not dense, its positions count one by one, and
        the mask as it is: a position is held if one of the merged task computes the same (64-bit hashes agree). An
        empty family raises `ValueError`. Cost: dense tasks are visited node by node, which takes seconds for 40,000
        positions in all.

        >>> import attnflow as af
        >>> family = af.tasks.butterfly([5, 6, 7])
        >>> merged = af.tasks.merge(family)
        >>> printed = merged.embeds(family, af.tasks.families.butterfly_as_printed(3))
        >>> merged.embeds(family).ok, [node.task for node in printed.missing]
        (True, [0, 1])
        """
        if mask is None:
            return embedding(one_mask(self.task), family, self.multiplicity)
        return embedding(Task(self.task.sequence, self.task.targets, mask), family)


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


_Quotient = tuple[list[IntArray], IntArray, IntArray, Mask]
"""The merged position of each task's positions; the node and the input number of each merged position; the mask."""


def merge(family: Sequence[Task], key_bias: bool = False) -> MergedTask:
    """Merge a family of tasks into one task: the shortest sequence and mask that compute every position of every task.

    Any masks will do: complete below each position ("dense"; hasse, def. 3.5-3.6, theorem 3.7), windowed, with sinks,
    compressed, sparse. Positions become one if they compute the same in every layer of every model, that is if their
    inputs (ids, position, provenance) agree and they read equal multisets of such positions. For the paper's families
    the result is `af.masks.causal(n - 1)`, `af.masks.block_two_stream(N, block)`, `af.masks.butterfly(n)` (eq. 58
    corrected).

    Where a row reads several positions that compute the same, one key under a mask cannot stand for them (theorem 3.7
    as printed joins them, which changes the row). Dense families then keep as many copies as one down-set needs.

    Args:
        family: tasks on one sample. All their labels are kept, with `task` set to the place in the family. Tasks with a
            mask per layer merge if all these masks are equal, and the tasks are for equally many layers.
        key_bias: let one key stand for several positions of a row. Its score needs the logarithm of their number,
            `MergedTask.log_multiplicity`: exact for softmax attention with a float mask (eager, SDPA), and added by
            `verify`, `score` and `Collator`. The merged mask without it is another task.

    Returns:
        The merged task, its positions in the order of `attnflow.tasks.layout`.

    Raises:
        ValueError: the family is empty; masks differ between layers; without `key_bias`, a row of a family that is not
            dense reads several positions that compute the same, or the search for copies takes too much work.

    Cost: O(positions + intervals) for each layer that differences take to spread: three where inputs differ and masks
    are dense, more where differences travel through windows. Prefixes of other subtasks cost nothing. A tree of 65,000
    positions takes a second. The search for copies is for a few hundred nodes.

    >>> import attnflow as af
    >>> merged = af.tasks.merge(af.tasks.butterfly([5, 6, 7]))
    >>> merged.task.mask == af.masks.butterfly(3), merged.position_ids.tolist()
    (True, [0, 1, 1, 2, 0, 1, 2])
    >>> family = af.tasks.causal_lm(range(9))
    >>> windows = [af.tasks.Task(task.inputs, task.labels, af.masks.sliding_window(task.size, 3)) for task in family]
    >>> af.tasks.merge(windows).task.mask == af.masks.sliding_window(8, 3)
    True
    """
    key_bias = boolean("key_bias", key_bias)
    return merge_with(family, key_bias, key_bias)


def merge_with(family: Sequence[Task], sparse_bias: bool, dense_bias: bool) -> MergedTask:
    """`merge` with a choice of `key_bias` for families that are not dense, and for those that are."""
    tasks, layers = _family(family)
    numbers, within = equivalence.prefixes(tasks)
    longest = [tasks[number] for number in numbers]
    labelled = [np.zeros(task.size, dtype=np.bool_) for task in longest]
    for task, of in zip(tasks, within, strict=True):
        labelled[of][task.targets.table["position"]] = True
    tokens, inputs = numbered([task.sequence for task in longest])
    layout = TasksLayout(longest, inputs, labelled, tokens, _dense(longest))
    classes = equivalence.classify(layout)
    several, proof = classes[-1], None
    dense = all(layout.dense)
    if not len(several) or (dense_bias if dense else sparse_bias):
        (place, node, token, mask), several = _by_colour(layout, classes)
    elif dense:
        (place, node, token, mask), proof = _by_search(layout)
        several = _no_keys()
    else:
        raise _repeats(numbers, layout, classes[0], several[0])
    positions = [place[of][: task.size] for task, of in zip(tasks, within, strict=True)]
    merged = Task(TokenSequence(tokens, token), _labels(tasks, positions), mask)
    if not dense:
        for number, members in enumerate(merged.flow.classes):
            node[[*members]] = number
    [node] = equivalence.renumber([node])
    lower_bound, is_minimal = proof or (len(np.unique(node)), True)
    if layers is not None:
        merged = Task(merged.sequence, merged.targets, [mask] * layers)
    return MergedTask(merged, tuple(positions), node, lower_bound, is_minimal, several)


def _labels(tasks: Sequence[Task], positions: Sequence[IntArray]) -> LabelTable:
    table = np.concatenate([task.targets.table for task in tasks])
    counts = [len(task.targets) for task in tasks]
    table["task"] = np.repeat(np.arange(len(tasks)), counts)
    table["position"] = np.concatenate(
        [part[task.targets.table["position"]] for task, part in zip(tasks, positions, strict=True)]
    )
    return LabelTable(table[np.argsort(table["position"], kind="stable")])


def embedding(task: Task, family: Sequence[Task], multiplicity: IntArray | None = None) -> Embedding:
    tasks, _ = _family(family)
    dense = all(_dense(tasks)) and (multiplicity is None or not len(multiplicity))
    every = [*tasks, task.densified() if dense else task]
    _, inputs = numbered([each.sequence for each in every])
    if dense:
        (*posets, whole), _ = typed(every, inputs)
        nodes = [list(zip(poset.members, poset.types, strict=True)) for poset in posets]
        held = set(whole.types)
    else:
        (*parts, whole), _ = equivalence.refined(every, inputs, 0, multiplicity)
        nodes = [[((i,), colour) for i, colour in enumerate(part.tolist())] for part in parts]
        held = set(whole.tolist())
    missing = [
        MissingNode(number, members)
        for number, kinds in enumerate(nodes)
        for members, kind in kinds
        if kind not in held
    ]
    return Embedding(sum(map(len, nodes)), tuple(missing))


def _family(family: Sequence[Task]) -> tuple[list[Task], int | None]:
    """(the tasks with one mask each, for how many layers they are)."""
    if isinstance(family, Task):  # pyright: ignore[reportUnnecessaryIsInstance]
        raise TypeError("a family is a sequence of Task, got one Task: pass [task]")
    tasks = list(family)
    if not tasks:
        raise ValueError("a family needs at least one task, got none")
    for number, task in enumerate(tasks):
        if not isinstance(task, Task):  # pyright: ignore[reportUnnecessaryIsInstance]
            raise TypeError(f"a family is a sequence of Task, got {type(task).__name__}")
        if task.num_layers != tasks[0].num_layers:
            raise ValueError(
                f"task {number} is for {task.num_layers or 'any number of'} layers, but task 0 for "
                f"{tasks[0].num_layers or 'any number of'}: one model cannot train both"
            )
        if any(mask != task.masks[0] for mask in task.masks):
            raise ValueError(
                f"task {number} has a mask per layer ({task.num_layers}), and they differ: merge tasks with one mask "
                "for all layers"
            )
    return list(map(one_mask, tasks)), tasks[0].num_layers


def one_mask(task: Task) -> Task:
    """The task with the first layer's mask for all layers."""
    return task if task.num_layers is None else Task(task.sequence, task.targets, task.masks[0])


def _dense(tasks: Sequence[Task]) -> list[bool]:
    by_mask = {id(task.mask): task for task in tasks}
    dense = {name: task.is_dense and task.attends_itself for name, task in by_mask.items()}
    return [dense[id(task.mask)] for task in tasks]


def _repeats(numbers: Sequence[int], layout: TasksLayout, classes: Sequence[IntArray], example: IntArray) -> ValueError:
    query, key, _ = example.tolist()
    task = next(task for task, part in enumerate(classes) if query in part)
    position = int(np.flatnonzero(classes[task] == query)[0])
    keys = [place for place in layout.tasks[task].mask.keys(position).tolist() if classes[task][place] == key]
    return ValueError(
        f"the family is not dense, and position {position} of task {numbers[task]} reads positions that compute the "
        f"same, {preview(keys)}: one key under a mask counts once. Call merge(family, key_bias=True), which adds the "
        "logarithm of their number to the score (a Collator's dense masks do), or keep them apart by a provenance"
    )


def _by_colour(layout: TasksLayout, classes: equivalence.Classes) -> tuple[_Quotient, IntArray]:
    position, node, place, rows, several = classes
    rank = np.argsort(place)
    n = len(rank)
    moved = None if np.array_equal(rank, np.arange(n)) else rank
    mask = Mask(rows, "merged", {"n": n}, query_rank=moved, key_rank=moved)
    position = [place[part] for part in position]
    numbers = equivalence.scattered(position, layout.inputs)
    several = np.concatenate([place[several[:, :2]], several[:, 2:]], axis=1)
    return (position, node[rank], numbers, mask), several


def _by_search(layout: TasksLayout) -> tuple[_Quotient, tuple[int, bool]]:
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
    return (position, node_of[back], tokens, mask), (lower_bound, is_minimal)


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
