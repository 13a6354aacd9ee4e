"""Where the heads of a projection are stored: rows of one tensor, or of a product (latent attention)."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from jaxtyping import Float, Int
from torch import Tensor

# Reads a stored tensor by name, or the rows from the first to the last but one of it.
Read = Callable[[str, tuple[int, int] | None], Tensor]


def run_of(index: Int[Tensor, " rows"]) -> slice | None:
    """Return rows as a slice, if they are contiguous."""
    run = slice(int(index[0]), int(index[0]) + len(index))
    return run if torch.equal(index, torch.arange(run.start, run.stop, device="cpu")) else None


@dataclass(frozen=True, eq=False, slots=True)
class Selected:
    tensor: str
    head_dim: int
    index: Int[Tensor, " out"]  # the rows, those of the first head first
    transposed: bool = False  # stored (in, out), as by `Conv1D`, or (in, heads, head_dim)

    @property
    def tensors(self) -> tuple[str, ...]:
        return (self.tensor,)

    @property
    def span(self) -> slice | None:
        """The rows as a slice, if they are contiguous."""
        return run_of(self.index)

    def load(self, read: Read) -> Tensor:
        """Read the heads as a weight [heads * head_dim, in]; contiguous rows are read alone."""
        span = None if self.transposed else self.span
        return self.take(read(self.tensor, None)) if span is None else read(self.tensor, (span.start, span.stop))

    def take(self, weight: Tensor) -> Tensor:
        """Select the heads, [heads * head_dim, in]: a view if contiguous, otherwise a copy."""
        stored, span = self._stored(weight), self.span
        return stored[self.index.to(stored.device)] if span is None else stored[span]

    def put(self, weight: Tensor, heads: Tensor) -> None:
        """Write `heads`, [heads * head_dim, in], into `weight`."""
        stored = self._stored(weight)
        stored[self.index.to(stored.device)] = heads.to(stored)

    def _stored(self, weight: Tensor) -> Tensor:
        """View as [out, in], also for a convolution of width 1."""
        return weight.flatten(1).T if self.transposed else weight.flatten(1)


def blocks(
    tensor: str, head_dim: int, count: int, start: int, stop: int, groups: int = 1, transposed: bool = False
) -> Selected:
    """Select blocks of `head_dim` rows, `start` to `stop`, of every group of `count` blocks.

    Covers separate linears and [query | key | value] (one group), head-interleaved (H, 3, head_dim) (a group for each
    head), and GQA-grouped (num_kv_heads, group + 2, head_dim) (a group for each KV head).
    """
    rows = torch.arange(groups * count * head_dim, device="cpu").view(groups, count, head_dim)  # under "meta", too
    return Selected(tensor, head_dim, rows[:, start:stop].flatten(), transposed)


@dataclass(frozen=True, eq=False, slots=True)
class Piece:
    rows: Selected
    place: Int[Tensor, " out"]  # of each row in the whole
    factors: Float[Tensor, " out"] | None  # None: all 1
    input: Composed | None  # None: the token itself


@dataclass(frozen=True, eq=False, slots=True)
class Composed:
    """Rows of a chain of linear maps, without the norms in between, which are not linear."""

    head_dim: int
    pieces: tuple[Piece, ...]

    @property
    def tensors(self) -> tuple[str, ...]:
        inner = (name for piece in self.pieces if piece.input for name in piece.input.tensors)
        return tuple(dict.fromkeys([*(piece.rows.tensor for piece in self.pieces), *inner]))

    def load(self, read: Read) -> Tensor:
        """Read the effective weight, [heads * head_dim, in]."""
        parts: list[Tensor] = []
        for piece in self.pieces:
            weight = piece.rows.load(read)
            if piece.input is not None:
                weight = weight @ piece.input.load(read)
            parts.append(weight if piece.factors is None else weight * piece.factors.to(weight)[:, None])
        order = torch.cat([piece.place for piece in self.pieces]).argsort()
        return torch.cat(parts)[order.to(parts[0].device)]


def same(first: Selected | Composed | None, second: Selected | Composed | None) -> bool:
    """Whether two maps take the same rows of the same weights; None is the token itself."""
    if isinstance(first, Selected) and isinstance(second, Selected):
        return first.tensor == second.tensor and torch.equal(first.index, second.index)
    if isinstance(first, Composed) and isinstance(second, Composed) and len(first.pieces) == len(second.pieces):
        pairs = zip(first.pieces, second.pieces, strict=True)
        return all(same(a.rows, b.rows) and torch.equal(a.place, b.place) and same(a.input, b.input) for a, b in pairs)
    return first is second


def latent(
    up: str, down: str, head_dim: int, index: Tensor, rank: int, shared: Tensor | None = None, heads: int = 1
) -> Composed:
    """Compose the heads of latent attention (DeepSeek), `W_up W_down x`, without the norm in between.

    `index` selects rows of `up`, [rows, rank], which reads the first rows of `down`, [rank + others, in]; `shared` rows
    of `down`, the rotated part of a key, end every head.
    """
    inner = torch.arange(rank, device="cpu")
    source = Composed(1, (Piece(Selected(down, 1, inner), inner, None, None),))
    places = torch.arange(heads * head_dim, device="cpu").view(heads, head_dim)
    width = len(index) // heads
    pieces = [Piece(Selected(up, head_dim, index), places[:, :width].flatten(), None, source)]
    if shared is not None:
        rows = Selected(down, head_dim, shared.repeat(heads))
        pieces.append(Piece(rows, places[:, width:].flatten(), None, None))
    return Composed(head_dim, tuple(pieces))
