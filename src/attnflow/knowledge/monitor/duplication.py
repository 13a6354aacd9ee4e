"""Entries that say the same: pairs with a high cosine, as groups."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Final, Literal

import numpy as np
import torch
from jaxtyping import Float
from scipy.sparse import coo_array
from scipy.sparse.csgraph import connected_components
from torch import Tensor
from torch.nn import functional

from attnflow._core.checks import IntArray, index_array, preview
from attnflow._core.markup import aligned
from attnflow._core.progress import Progress
from attnflow._core.results import Result
from attnflow.knowledge.base import KnowledgeBase, LayeredKnowledge
from attnflow.knowledge.index import EntryIndex
from attnflow.knowledge.store import Store

Search = Literal["auto", "exact", "approximate"]

_BLOCK: Final = 512  # entries that are compared with all later ones at once
_MOST_WORK: Final = 5e12  # multiplications of an exact comparison: above, "auto" asks an index (minutes on 2 cores)


@dataclass(frozen=True)
class Duplicates(Result):
    """Groups of entries that say the same."""

    threshold: float  # cosine from which two entries are a pair
    total: int  # entries that were compared
    pairs: int  # how many pairs there are (of an approximate search: were found)
    # ids that pairs connect, the largest group first; within a group, two may be less alike than a pair
    groups: tuple[tuple[int, ...], ...]
    zeros: int  # entries of length 0, which have no direction and are in no group
    approximate: bool  # whether an approximate index looked for the pairs, which may miss some

    @property
    def surplus(self) -> int:
        """Entries that could go if one of each group stayed."""
        return sum(len(group) - 1 for group in self.groups)

    @property
    def ok(self) -> bool:
        """Whether no two entries say the same."""
        return not self.groups

    def rows(self) -> Sequence[Mapping[str, object]]:
        """A row for each entry of a group."""
        return [{"group": number, "id": key} for number, group in enumerate(self.groups) for key in group]

    @property
    def summary(self) -> str:
        """The numbers in one line."""
        how = "found by an approximate search, which may miss some" if self.approximate else "all pairs compared"
        return (
            f"{len(self.groups):,} groups of {self.total:,} entries, {self.surplus:,} of which say nothing new "
            f"({self.pairs:,} pairs with a cosine of {self.threshold:g} or more; {how})"
        )

    def __str__(self) -> str:
        rows = [[f"{len(group):,}", preview(group)] for group in self.groups[:20]]
        said = [self.summary, *([aligned([["entries", "ids"], *rows], left=[1])] if rows else [])]
        if len(self.groups) > len(rows):
            said.append(f"and {len(self.groups) - len(rows):,} more groups")
        return "\n".join(said)


def duplicates(
    entries: Float[Tensor, "entries entry_dim"] | KnowledgeBase | Store,
    threshold: float = 0.95,
    *,
    search: Search = "auto",
    progress: Progress | None = None,
) -> Duplicates:
    """Pairs of entries with a cosine of at least `threshold`, as groups.

    Args:
        entries: a matrix, whose ids are its rows; a base; or a store.
        threshold: in (0, 1].
        search: "exact" compares all pairs; "approximate" asks an index; "auto" does so where it would take minutes.
        progress: called as progress(done, total, what) after each block of entries.

    Raises:
        ValueError: a threshold or a search that does not exist, no matrix, or NaN or infinity in it.

    Cost: entries^2 * entry_dim / 2 multiplications in blocks, memory of a copy of the entries; by an index, its own.

    >>> duplicates(torch.tensor([[1.0, 0.0], [0.0, 2.0], [3.0, 0.1]])).groups
    ((0, 2),)
    """
    if not 0 < threshold <= 1:
        raise ValueError(f"threshold must be a cosine in (0, 1], got {threshold}")
    if search not in ("auto", "exact", "approximate"):
        raise ValueError(f"search must be 'auto', 'exact' or 'approximate', got {search!r}")
    rows, ids = _read(entries)
    if rows.ndim != 2 or not bool(torch.isfinite(rows).all()):
        raise ValueError(f"entries must be a finite matrix, got shape {tuple(rows.shape)} or NaN or infinity")
    length = rows.norm(dim=1)
    ids, zeros = ids[(length > 0).numpy()], int((length == 0).sum())
    unit, place = functional.normalize(rows[length > 0], dim=1).unique(dim=0, return_inverse=True)
    copies = torch.bincount(place, minlength=len(unit))
    work = float(len(unit)) ** 2 * unit.shape[1]
    approximate = search == "approximate" or (search == "auto" and work > _MOST_WORK)
    least = threshold - torch.finfo(unit.dtype).eps * unit.shape[1] ** 0.5  # rounding must not part equals
    batches = (_by_index if approximate else _by_blocks)(unit, least)
    labels, pairs = np.arange(len(unit)), int((copies * (copies - 1) // 2).sum())
    for done, first, second in batches:
        once = second > first  # an index finds most pairs from both sides
        pairs += int((copies[first[once]] * copies[second[once]]).sum())
        if len(first):
            ends = labels[first.numpy()], labels[second.numpy()]
            edges = coo_array((np.ones(len(first)), ends), shape=(len(unit), len(unit)))
            labels = connected_components(edges, directed=False)[1].astype(np.int64)[labels]
        if progress is not None:
            progress(done, len(unit), "entries")
    groups = _groups(labels[place.numpy()], ids)
    return Duplicates(float(threshold), len(rows), pairs, groups, zeros, approximate)


def _read(entries: Tensor | KnowledgeBase | Store) -> tuple[Tensor, IntArray]:
    """(float32 rows on the CPU, their ids)."""
    if isinstance(entries, Tensor | KnowledgeBase):
        rows = (entries if isinstance(entries, Tensor) else entries.entries).detach().float().cpu()
        ids = entries.ids.cpu().numpy() if isinstance(entries, LayeredKnowledge) else np.arange(len(rows))
        return rows, ids
    ids = index_array("ids", entries.ids())
    return torch.as_tensor(entries.vectors(ids)), ids


def _by_blocks(unit: Tensor, least: float) -> Iterator[tuple[int, Tensor, Tensor]]:
    """(rows compared so far, first, second) of the pairs of each block with all later rows."""
    for start in range(0, len(unit), _BLOCK):
        block = unit[start : start + _BLOCK]
        places = (block @ unit[start:].T >= least).triu(diagonal=1).nonzero() + start
        yield start + len(block), places[:, 0], places[:, 1]


def _by_index(unit: Tensor, least: float) -> Iterator[tuple[int, Tensor, Tensor]]:
    """Likewise, by an approximate index."""
    index = EntryIndex(unit.shape[1], search="approximate")
    index.build(unit)
    for start in range(0, len(unit), _BLOCK):
        block = unit[start : start + _BLOCK]
        neighbours = index.range(block, least, mode="approximate")
        first = torch.arange(len(block)).repeat_interleave(torch.tensor([len(one.ids) for one in neighbours])) + start
        second = torch.cat([one.ids for one in neighbours])
        other = second != first
        yield start + len(block), first[other], second[other]


def _groups(labels: IntArray, ids: IntArray) -> tuple[tuple[int, ...], ...]:
    order = np.lexsort((ids, labels))
    ends = np.flatnonzero(np.diff(labels[order])) + 1
    groups = [tuple(group.tolist()) for group in np.split(ids[order], ends) if len(group) > 1]
    return tuple(sorted(groups, key=lambda group: (-len(group), group)))
