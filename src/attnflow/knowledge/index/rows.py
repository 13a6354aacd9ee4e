"""A contiguous matrix with room to grow, without holes: the rows of an index."""

from __future__ import annotations

from typing import Final

import torch
from jaxtyping import Int, Shaped
from torch import Tensor

_GROWTH: Final = 1.5


class GrowingMatrix:
    """Rows 0 to n - 1 of one width; adding one costs O(width) on average."""

    def __init__(self, width: int, kind: torch.dtype = torch.float32) -> None:
        self._room = torch.empty(0, width, dtype=kind)
        self._count = 0

    def __len__(self) -> int:
        return self._count

    @property
    def used(self) -> Shaped[Tensor, "n width"]:
        """The rows that are there, a view."""
        return self._room[: self._count]

    def set(self, rows: Shaped[Tensor, "n width"]) -> None:
        """These rows instead, a copy without spare room."""
        self._room = rows.clone(memory_format=torch.contiguous_format)
        self._count = len(rows)

    def add(self, rows: Shaped[Tensor, "new width"]) -> Int[Tensor, " new"]:
        """Append; returns their numbers."""
        first, needed = self._count, self._count + len(rows)
        if needed > len(self._room):
            grown = self._room.new_empty(max(needed, int(needed * _GROWTH)), self._room.shape[1])
            grown[:first] = self.used
            self._room = grown
        self._room[first:needed] = rows
        self._count = needed
        return torch.arange(first, needed)

    def remove(self, slots: Int[Tensor, " slots"]) -> Int[Tensor, "moves 2"]:
        """Drop rows; the last ones move into the holes. Returns (from, to) of each that moved."""
        left = self._count - len(slots)
        stays = torch.ones(self._count - left, dtype=torch.bool)
        stays[slots[slots >= left] - left] = False
        moves = torch.stack([stays.nonzero()[:, 0] + left, slots[slots < left]], dim=1)
        self._room[moves[:, 1]] = self._room[moves[:, 0]]
        self._count = left
        return moves
