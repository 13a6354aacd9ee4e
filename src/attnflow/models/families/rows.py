"""Where the heads of a projection lie in what is stored: rows of a tensor, or of a product of several (latent ones)."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from jaxtyping import Float, Int
from torch import Tensor

# Reads a stored tensor by name, or the rows from the first to the last but one of it.
Read = Callable[[str, tuple[int, int] | None], Tensor]


@dataclass(frozen=True, eq=False, slots=True)
class Selected:
    """The rows of a stored weight that make up the query heads, or the key heads, of one attention module."""

    tensor: str
    head_dim: int
    index: Int[Tensor, " out"]  # the rows, those of the first head first
    transposed: bool = False  # stored (in, out), as by `Conv1D`, or (in, heads, head_dim)

    @property
    def tensors(self) -> tuple[str, ...]:
        """Names of the stored tensors that are read."""
        return (self.tensor,)

    @property
    def span(self) -> slice | None:
        """The rows, if they lie in one run."""
        first = int(self.index[0])
        run = torch.equal(self.index, torch.arange(first, first + len(self.index), device="cpu"))
        return slice(first, first + len(self.index)) if run else None

    def load(self, read: Read) -> Tensor:
        """The heads as a weight [heads * head_dim, in], reading no other rows where they lie in one run."""
        span = None if self.transposed else self.span
        return self.take(read(self.tensor, None)) if span is None else read(self.tensor, (span.start, span.stop))

    def take(self, weight: Tensor) -> Tensor:
        """The heads as a weight [heads * head_dim, in]: a view where they lie in one run, otherwise a copy."""
        stored, span = self._stored(weight), self.span
        return stored[self.index.to(stored.device)] if span is None else stored[span]

    def put(self, weight: Tensor, heads: Tensor) -> None:
        """Write `heads`, [heads * head_dim, in], to their place in `weight`."""
        stored = self._stored(weight)
        stored[self.index.to(stored.device)] = heads.to(stored)

    def same(self, other: object) -> bool:
        """Whether these are the same rows of the same weight."""
        return isinstance(other, Selected) and self.tensor == other.tensor and torch.equal(self.index, other.index)

    def _stored(self, weight: Tensor) -> Tensor:
        """[out, in], of a convolution over one position, too."""
        return weight.flatten(1).T if self.transposed else weight.flatten(1)


def blocks(
    tensor: str, head_dim: int, count: int, start: int, stop: int, groups: int = 1, transposed: bool = False
) -> Selected:
    """The blocks of `head_dim` rows from `start` to `stop` of every group of `count` blocks, in that order.

    This one pattern covers every layout in use:

    - separate linears: one group, all blocks;
    - [query | key | value]: one group, with the query heads first;
    - head-interleaved (H, 3, head_dim): a group for each head, of blocks query, key, value;
    - GQA-grouped (num_kv_heads, group + 2, head_dim): a group for each KV head.
    """
    rows = torch.arange(groups * count * head_dim, device="cpu").view(groups, count, head_dim)  # under "meta", too
    return Selected(tensor, head_dim, rows[:, start:stop].flatten(), transposed)


@dataclass(frozen=True, eq=False, slots=True)
class Piece:
    """Rows of one stored weight, times what it reads, times a factor for each row."""

    rows: Selected
    place: Int[Tensor, " out"]  # of each row in the whole
    factors: Float[Tensor, " out"] | None  # None: all 1
    input: Composed | None  # None: the token itself


@dataclass(frozen=True, eq=False, slots=True)
class Composed:
    """Components of a chain of linear maps, without the norms in between, which are no linear maps."""

    head_dim: int
    pieces: tuple[Piece, ...]

    @property
    def tensors(self) -> tuple[str, ...]:
        """Names of the stored tensors that are read."""
        inner = (name for piece in self.pieces if piece.input for name in piece.input.tensors)
        return tuple(dict.fromkeys([*(piece.rows.tensor for piece in self.pieces), *inner]))

    def load(self, read: Read) -> Tensor:
        """The effective weight, [heads * head_dim, in]."""
        parts: list[Tensor] = []
        for piece in self.pieces:
            weight = piece.rows.load(read)
            if piece.input is not None:
                weight = weight @ piece.input.load(read)
            parts.append(weight if piece.factors is None else weight * piece.factors.to(weight)[:, None])
        order = torch.cat([piece.place for piece in self.pieces]).argsort()
        return torch.cat(parts)[order.to(parts[0].device)]

    def same(self, other: object) -> bool:
        """Whether these are the same rows of the same weights."""
        if not isinstance(other, Composed) or len(self.pieces) != len(other.pieces):
            return False
        pairs = zip(self.pieces, other.pieces, strict=True)
        return all(
            a.rows.same(b.rows)
            and torch.equal(a.place, b.place)
            and (a.input is b.input if a.input is None else a.input.same(b.input))
            for a, b in pairs
        )


def latent(
    up: str, down: str, head_dim: int, index: Tensor, ranks: slice, shared: Tensor | None = None, heads: int = 1
) -> Composed:
    """The heads of latent attention (DeepSeek): `W_up W_down x`, without the norm between the two.

    Args:
        up: the tensor [rows, rank].
        down: the tensor [rank + others, in].
        head_dim: width of a head, with what all heads share.
        index: the rows of `up` that make the heads.
        ranks: the rows of `down` that `up` reads.
        shared: rows of `down` at the end of every head: the part of a key that is rotated.
        heads: how many.
    """
    inner = torch.arange(ranks.stop, device="cpu")[ranks]
    source = Composed(1, (Piece(Selected(down, 1, inner), torch.arange(len(inner), device="cpu"), None, None),))
    places = torch.arange(heads * head_dim, device="cpu").view(heads, head_dim)
    own = len(index) // heads
    pieces = [Piece(Selected(up, head_dim, index), places[:, :own].flatten(), None, source)]
    if shared is not None:
        rows = Selected(down, head_dim, shared.repeat(heads))
        pieces.append(Piece(rows, places[:, own:].flatten(), None, None))
    return Composed(head_dim, tuple(pieces))
