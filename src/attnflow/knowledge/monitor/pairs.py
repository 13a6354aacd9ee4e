"""Pairs of rows with a high cosine: all of them, block by block, or those that an approximate index gives."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final, Literal

import torch
from jaxtyping import Float
from torch import Tensor

from attnflow.knowledge.index import EntryIndex

Search = Literal["auto", "exact", "approximate"]
Pairs = tuple[int, Tensor, Tensor]  # (rows compared so far, first, second)

_ROWS: Final = 512  # that are compared at once
_COLUMNS: Final = 1 << 13  # with so many others
_MOST_WORK: Final = 5e12  # multiplications of an exact comparison: above, "auto" asks an index (minutes on 2 cores)


def is_approximate(search: Search, rows: int, width: int) -> bool:
    """Whether a search of all pairs asks an index; a ValueError for one that does not exist."""
    if search not in ("auto", "exact", "approximate"):
        raise ValueError(f"search must be 'auto', 'exact' or 'approximate', got {search!r}")
    return search == "approximate" or (search == "auto" and float(rows) ** 2 * width > _MOST_WORK)


def near_pairs(unit: Float[Tensor, "rows dim"], threshold: float, approximate: bool) -> Iterator[Pairs]:
    """Pairs first < second of rows of length 1 with a cosine of at least `threshold`, rounding allowed for.

    Cost: rows^2 * dim / 2 multiplications, memory of one block; by an index, its own.
    """
    least = threshold - torch.finfo(unit.dtype).eps * unit.shape[1] ** 0.5  # rounding must not part equals
    return (_by_index if approximate else _by_blocks)(unit, least)


def _by_blocks(unit: Tensor, least: float) -> Iterator[Pairs]:
    for start in range(0, len(unit), _ROWS):
        block = unit[start : start + _ROWS]
        for other in range(start, len(unit), _COLUMNS):
            near = block @ unit[other : other + _COLUMNS].T >= least
            first, second = near.triu(diagonal=1 + start - other).nonzero().unbind(dim=1)
            yield start + len(block), first + start, second + other


def _by_index(unit: Tensor, least: float) -> Iterator[Pairs]:
    index = EntryIndex(unit.shape[1], search="approximate")
    index.build(unit)
    for start in range(0, len(unit), _ROWS):
        block = unit[start : start + _ROWS]
        neighbours = index.range(block, least, mode="approximate")
        first = torch.arange(len(block)).repeat_interleave(torch.tensor([len(one.ids) for one in neighbours])) + start
        second = torch.cat([one.ids for one in neighbours])
        once = second > first  # an index finds most pairs from both sides
        yield start + len(block), first[once], second[once]
