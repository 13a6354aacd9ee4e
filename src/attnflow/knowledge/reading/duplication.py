"""Finds near-duplicate entries: groups of entries that pairs with a high cosine connect."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np
import torch
from jaxtyping import Float
from scipy.sparse import coo_array
from scipy.sparse.csgraph import connected_components
from torch import Tensor
from torch.nn import functional

from attnflow._core.checks import index_array, preview
from attnflow._core.markup import aligned, plural, shorten
from attnflow._core.progress import Progress
from attnflow._core.results import Result
from attnflow.knowledge.base import KnowledgeBase, LayeredKnowledge
from attnflow.knowledge.store import Store

_SHOWN: Final = 20  # groups that are listed
_ROWS: Final = 512  # that are compared at once
_COLUMNS: Final = 1 << 13  # with so many others


@dataclass(frozen=True)
class Duplicates(Result):
    """Groups of near-duplicate entries."""

    threshold: float  # the least cosine of a pair
    total: int  # the number of entries compared
    pairs: int  # the number of pairs
    # ids connected by pairs, the largest group first; two entries of a group need not be a pair themselves
    groups: tuple[tuple[int, ...], ...]
    zeros: int  # entries of length 0, which have no direction and are in no group

    @property
    def surplus(self) -> int:
        """The number of entries that could be deleted if each group kept one."""
        return sum(len(group) - 1 for group in self.groups)

    @property
    def ok(self) -> bool:
        """Whether no two entries are near-duplicates."""
        return not self.groups

    def rows(self) -> Sequence[Mapping[str, object]]:
        """A row for each entry of a group."""
        return [{"group": number, "id": key} for number, group in enumerate(self.groups) for key in group]

    def listed(self, texts: Sequence[str | None] = ()) -> str:
        """The numbers and the largest groups, optionally with the text of each group's first entry."""
        lines = [
            f"{plural(len(self.groups), 'group')} of near-duplicates: {self.surplus:,} of {self.total:,} "
            f"entries could go ({plural(self.pairs, 'pair')} with a cosine of {self.threshold:g} or more)"
        ]
        rows = [[f"{len(group):,}", preview(group, 6)] for group in self.groups[:_SHOWN]]
        head = ["entries", "ids"]
        if texts:
            head += ["text of the first"]
            rows = [[*row, shorten(text or "(no text)", 60)] for row, text in zip(rows, texts, strict=True)]
        lines += [aligned([head, *rows], left=[1, 2][: len(head) - 1])] if rows else []
        more = len(self.groups) - len(rows)
        return "\n".join(lines + [f"and {plural(more, 'more group')}"] * bool(more))

    def __str__(self) -> str:
        return self.listed()


def duplicates(
    entries: Float[Tensor, "entries entry_dim"] | KnowledgeBase | Store,
    threshold: float = 0.95,
    *,
    progress: Progress | None = None,
) -> Duplicates:
    """Find near-duplicate entries: pairs with a cosine of at least `threshold`, joined into groups.

    Args:
        entries: a matrix, whose row numbers are the ids; a base; or a store.
        threshold: in (0, 1].
        progress: called as progress(done, total, what) after each block of entries.

    Raises:
        ValueError: a threshold outside (0, 1], or entries that are not a finite matrix.

    Cost: entries^2 * entry_dim / 2 multiplications in blocks, memory of a copy of the entries.

    >>> duplicates(torch.tensor([[1.0, 0.0], [0.0, 2.0], [3.0, 0.1]])).groups
    ((0, 2),)
    """
    if not 0 < threshold <= 1:
        raise ValueError(f"threshold must be a cosine in (0, 1], got {threshold}")
    if isinstance(entries, Tensor | KnowledgeBase):
        rows = (entries if isinstance(entries, Tensor) else entries.entries).detach().float().cpu()
        ids = entries.ids.cpu().numpy() if isinstance(entries, LayeredKnowledge) else np.arange(len(rows))
    else:
        ids = index_array("ids", entries.ids())
        rows = entries.vectors(ids)
    if rows.ndim != 2 or not bool(torch.isfinite(rows).all()):
        raise ValueError(f"entries must be a matrix of finite numbers, got shape {tuple(rows.shape)} or NaN or Inf")
    length = rows.norm(dim=1)
    ids, zeros = ids[(length > 0).numpy()], int((length == 0).sum())
    unit, place = functional.normalize(rows[length > 0], dim=1).unique(dim=0, return_inverse=True)
    copies = torch.bincount(place, minlength=len(unit))
    labels, pairs = np.arange(len(unit)), int((copies * (copies - 1) // 2).sum())
    for done, first, second in _near_pairs(unit, threshold):
        pairs += int((copies[first] * copies[second]).sum())
        if len(first):
            ends = labels[first.numpy()], labels[second.numpy()]
            edges = coo_array((np.ones(len(first)), ends), shape=(len(unit), len(unit)))
            labels = connected_components(edges, directed=False)[1].astype(np.int64)[labels]
        if progress is not None:
            progress(done, len(unit), "entries")
    labels = labels[place.numpy()]
    order = np.lexsort((ids, labels))
    ends = np.flatnonzero(np.diff(labels[order])) + 1
    groups = [tuple(group.tolist()) for group in np.split(ids[order], ends) if len(group) > 1]
    groups.sort(key=lambda group: (-len(group), group))
    return Duplicates(float(threshold), len(rows), pairs, tuple(groups), zeros)


def _near_pairs(unit: Float[Tensor, "rows dim"], threshold: float) -> Iterator[tuple[int, Tensor, Tensor]]:
    """Yield, block by block, the number of rows done and the pairs first < second of unit rows above the cosine."""
    least = threshold - torch.finfo(unit.dtype).eps * unit.shape[1] ** 0.5  # rounding must not part equals
    for start in range(0, len(unit), _ROWS):
        block = unit[start : start + _ROWS]
        for other in range(start, len(unit), _COLUMNS):
            near = block @ unit[other : other + _COLUMNS].T >= least
            first, second = near.triu(diagonal=1 + start - other).nonzero().unbind(dim=1)
            yield start + len(block), first + start, second + other
