"""vLLM's draft trees: the paths from the root, breadth first."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

import numpy as np

from attnflow._core.results import Result
from attnflow.masks.catalogue import tree
from attnflow.masks.export.refusal import NotExpressible, checked
from attnflow.masks.mask import Mask

_LARGEST: Final = 4096  # paths are listed one by one


@dataclass(frozen=True)
class DraftTree(Result):
    """A mask as vLLM's `speculative_token_tree`: each node by the numbers of the children that lead to it.

    The root is the last accepted token and has no path; vLLM lays the nodes out breadth first after it.

    Attributes:
        paths: of all nodes but the root, sorted by length, then by the numbers.
        order: the position of the mask that lies at each place of vLLM's layout; the root's first.
    """

    paths: tuple[tuple[int, ...], ...]
    order: tuple[int, ...]

    @property
    def speculative_token_tree(self) -> str:
        """The text that vLLM's `speculative_config` takes."""
        return f"[{', '.join(map(str, self.paths))}]"

    def to_mask(self) -> Mask:
        """The relation that vLLM computes, in the positions of the mask that was exported.

        Raises:
            ValueError: a path whose parent is missing, or paths that are not in vLLM's order.
        """
        place = {(): 0} | {path: number for number, path in enumerate(self.paths, 1)}
        if list(self.paths) != sorted(place, key=lambda path: (len(path), path))[1:]:
            raise ValueError("paths must be sorted by length, then by numbers, each once")
        for path in self.paths:
            if path[:-1] not in place:
                raise ValueError(f"the path {path} has no parent {path[:-1]}")
        return tree([-1, *(place[path[:-1]] for path in self.paths)]).permute(np.argsort(self.order))

    def rows(self) -> list[dict[str, object]]:
        """One row a node, in vLLM's order."""
        return [{"position": at, "path": str(path)} for at, path in zip(self.order, ((), *self.paths), strict=True)]

    def __str__(self) -> str:
        depth = max(map(len, self.paths), default=0)
        return f"DraftTree: {len(self.paths)} drafts, {depth} tokens deep"

    __repr__ = __str__


def vllm(mask: Mask) -> DraftTree:
    """The draft tree of a mask in which a node attends to itself, its ancestors and one root.

    Raises:
        NotExpressible: it is something else; the error names a pair.

    Cost: O(allowed pairs).

    >>> from attnflow import masks
    >>> vllm(masks.tree([-1, 0, 0, 1])).speculative_token_tree
    '[(0,), (1,), (0, 0)]'
    """
    queries, keys = checked(mask).shape
    if queries != keys:
        pair = (0, keys - 1) if keys > queries else (queries - 1, 0)
        if queries and keys:
            raise NotExpressible("vllm", mask, pair, f"a tree has as many queries as keys, got {queries} and {keys}")
        raise ValueError(f"a draft tree has as many queries as keys, got {queries} and {keys}")
    if not 0 < queries <= _LARGEST:
        raise ValueError(f"a draft tree has a root and at most {_LARGEST:,} nodes, got a mask of {queries:,} positions")
    sets = [set(mask.keys(query).tolist()) for query in range(queries)]
    parents = [_parent(mask, sets, query) for query in range(queries)]
    roots = [query for query, parent in enumerate(parents) if parent < 0]
    if len(roots) > 1:
        reason = f"a draft tree has one root that every query attends to, and {roots[0]} is one, too"
        raise NotExpressible("vllm", mask, (roots[1], roots[0]), reason)
    children: list[list[int]] = [[] for _ in range(queries)]
    for query, parent in enumerate(parents):
        if parent >= 0:
            children[parent].append(query)
    level: list[tuple[tuple[int, ...], int]] = [((), roots[0])]
    nodes = list(level)
    while level:
        level = [((*path, number), node) for path, above in level for number, node in enumerate(children[above])]
        nodes += level
    return DraftTree(tuple(path for path, _ in nodes[1:]), tuple(node for _, node in nodes))


def _parent(mask: Mask, sets: list[set[int]], query: int) -> int:
    """The nearest ancestor of a query, -1 for a root."""
    if query not in sets[query]:
        raise NotExpressible("vllm", mask, (query, query), "every node of a tree attends to itself")
    above = sets[query] - {query}
    if not above:
        return -1
    parent = max(above, key=lambda key: (len(sets[key]), -key))
    if query in sets[parent]:
        raise NotExpressible("vllm", mask, (query, parent), f"query {parent} allows key {query}: no tree has a cycle")
    wrong = sorted(above ^ sets[parent])
    if wrong:
        reason = f"its nearest ancestor {parent} does not agree, and they share their ancestors"
        raise NotExpressible("vllm", mask, (query, wrong[0]), reason)
    return parent
