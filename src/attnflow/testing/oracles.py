"""The theory of a relation by brute force, straight from the definitions. For n up to a few dozen.

Everywhere `allow[q, k]` is True iff query q attends to key k, and `A = allow | I` (the residual connection).
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import pairwise

import numpy as np
import numpy.typing as npt
import torch

from attnflow._core.checks import integer

BoolArray = npt.NDArray[np.bool_]
Relation = torch.Tensor | npt.NDArray[np.generic] | Sequence[Sequence[bool | int]]
Class = tuple[int, ...]


def power(allow: Relation, layers: int) -> BoolArray:
    """`A^layers`: row q marks the receptive field of q after that many layers; 0 layers is the identity.

    >>> power([[0, 0, 0], [1, 0, 0], [0, 1, 0]], 1).astype(int).tolist()
    [[1, 0, 0], [1, 1, 0], [0, 1, 1]]
    """
    one = _with_residual(allow)
    return product([np.eye(len(one)), *[one] * integer("layers", layers)])


def product(layers: Iterable[Relation]) -> BoolArray:
    """`A_L ... A_2 A_1` for one relation per layer, the first layer first in the list.

    >>> first, second = [[0, 0, 0], [1, 0, 0], [0, 0, 0]], [[0, 0, 0], [0, 0, 0], [0, 1, 0]]
    >>> product([first, second])[2].astype(int).tolist(), product([second, first])[2].astype(int).tolist()
    ([1, 1, 1], [0, 1, 1])
    """
    relations = [_with_residual(allow) for allow in layers]
    if not relations:
        raise ValueError("layers must hold at least one relation, got an empty list")
    result = np.eye(len(relations[0]), dtype=np.bool_)
    for relation in relations:
        if relation.shape != result.shape:
            raise ValueError(f"all layers must have one size, got {result.shape} and {relation.shape}")
        result = (relation.astype(np.int64) @ result.astype(np.int64)) > 0
    return result


def closure(allow: Relation) -> BoolArray:
    """`R`, the reflexive transitive closure of the relation: `R[q, k]` iff k <= q.

    >>> closure([[0, 0, 0], [1, 0, 0], [0, 1, 0]]).astype(int).tolist()
    [[1, 0, 0], [1, 1, 0], [1, 1, 1]]
    """
    return power(allow, len(_with_residual(allow)))  # no shortest path is longer than n - 1


def depth(allow: Relation) -> int:
    """The smallest L >= 1 with `A^L = R`.

    >>> depth([[0, 0, 0], [1, 0, 0], [0, 1, 0]])
    2
    """
    whole = closure(allow)
    return next(layers for layers in range(1, len(whole) + 2) if np.array_equal(power(allow, layers), whole))


def product_depth(layers: Sequence[Relation]) -> int:
    """The smallest L >= 1 such that the first L layers have the product of all layers.

    >>> step = [[0, 0], [1, 0]]
    >>> product_depth([step, step, step])
    1
    """
    whole = product(layers)
    return next(count for count in range(1, len(layers) + 1) if np.array_equal(product(layers[:count]), whole))


def classes(allow: Relation) -> list[Class]:
    """The sets of positions that reach one another, each sorted, in the order of their first positions.

    >>> classes([[0, 0, 1], [0, 0, 0], [1, 0, 0]])
    [(0, 2), (1,)]
    """
    reach = closure(allow)
    mutual = reach & reach.T
    return sorted({tuple(np.flatnonzero(row).tolist()) for row in mutual})


def covers(allow: Relation) -> set[tuple[Class, Class]]:
    """The edges of the Hasse diagram, (lower class, upper class): nothing lies strictly between the two.

    Information flows from the lower class up to the upper one.

    >>> sorted(covers([[0, 0, 0], [1, 0, 0], [1, 1, 0]]))
    [((0,), (1,)), ((1,), (2,))]
    """
    reach, nodes = closure(allow), classes(allow)

    def below(lower: Class, upper: Class) -> bool:
        return lower != upper and bool(reach[upper[0], lower[0]])

    return {
        (lower, upper)
        for lower in nodes
        for upper in nodes
        if below(lower, upper) and not any(below(lower, between) and below(between, upper) for between in nodes)
    }


def path_exists(allow: Relation, path: Sequence[int]) -> bool:
    """Whether information can go along `path` (from the first position to the last), one layer a step.

    >>> path_exists([[0, 0, 0], [1, 0, 0], [0, 1, 0]], [0, 1, 2]), path_exists([[0, 0], [1, 0]], [1, 0])
    (True, False)
    """
    one = _with_residual(allow)
    return all(bool(one[target, source]) for source, target in pairwise(path))


def _with_residual(allow: Relation) -> BoolArray:
    table = np.asarray(allow.detach().cpu().numpy() if isinstance(allow, torch.Tensor) else allow)
    table = table.reshape(0, 0) if table.size == 0 else table
    if table.ndim != 2 or table.shape[0] != table.shape[1]:
        raise ValueError(f"a relation of an order must be square, got shape {table.shape}")
    return table.astype(np.bool_) | np.eye(len(table), dtype=np.bool_)
