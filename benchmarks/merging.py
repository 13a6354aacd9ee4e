"""Merging at scale: from sequences to a proved mask for kernels, and the mask of the same tree written by hand."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
from torch.nn.attention.flex_attention import BlockMask  # on top: its import takes longer than what is measured

import attnflow as af
from attnflow.tasks import Task
from attnflow.tasks.families import Family


class _Noted:
    """A call to time, with what is known of it."""

    def __init__(self, call: Callable[[], object], note: str) -> None:
        self._call, self.note = call, note

    def __call__(self) -> object:
        return self._call()


def tree_of_rollouts(levels: int, length: int) -> list[list[int]]:
    """The leaves' sequences of a binary tree: each node is a stretch of `length` tokens."""
    stretches = np.random.default_rng(0).integers(1, 30_000, ((1 << levels) - 1, length))
    paths: list[list[int]] = []
    for leaf in range(len(stretches) // 2, len(stretches)):
        path = [leaf]
        while path[-1]:
            path.append((path[-1] - 1) // 2)
        paths.append(stretches[path[::-1]].ravel().tolist())
    return paths


def merged_and_proved(family: Callable[[], Family]) -> Callable[[], object]:
    """From sequences to a mask for kernels: merge, leak proof, `BlockMask`."""

    def run() -> BlockMask:
        merged = af.tasks.merge(family())
        af.tasks.check(merged).raise_if_leaks()
        return merged.task.mask.block_mask()

    merged = af.tasks.merge(family())
    share = (merged.task.mask.block_counts() > 0).mean()
    intervals = int(np.diff(merged.task.mask.intervals().indptr).max())
    return _Noted(run, f"{merged.task.size} positions, {share:.2%} of the blocks, up to {intervals} intervals a row")


def merge_tree(levels: int, length: int, as_objects: bool) -> Callable[[], object]:
    """Rollouts with common beginnings at every level; as objects: a `Token` and a `Label` for each position."""
    paths = tree_of_rollouts(levels, length)

    def family() -> Family:
        return af.tasks.rollouts(paths[0][:length], [path[length:] for path in paths])

    if as_objects:
        parts = [(list(task.inputs), list(task.labels), task.mask) for task in family()]
        return merged_and_proved(lambda: tuple(Task(*part) for part in parts))
    return merged_and_proved(family)


def merge_causal(n: int) -> Callable[[], object]:
    """n - 1 subtasks with about n^2 / 2 positions."""
    ids = np.random.default_rng(0).integers(1, 30_000, n)
    return merged_and_proved(lambda: af.tasks.causal_lm(ids))


def tree_alone(levels: int, length: int) -> Callable[[], object]:
    """The mask of the same tree written down by hand, in depth-first order: the blocks that there have to be."""
    nodes = np.arange(((1 << levels) - 1) * length)
    parents, first = nodes - 1, nodes[::length]
    parents[first[1:]] = (np.arange(len(first) - 1) // 2) * length + length - 1

    def run() -> object:
        mask = af.masks.tree(parents)
        _, rank = mask.relabelled()
        assert rank is not None
        return mask.permute(np.argsort(rank)).block_mask()

    mask = af.masks.tree(parents)
    _, rank = mask.relabelled()
    assert rank is not None
    share = (mask.permute(np.argsort(rank)).block_counts() > 0).mean()
    return _Noted(run, f"{len(nodes)} positions, {share:.2%} of the blocks; nothing merged or proved")
