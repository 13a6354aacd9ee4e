"""Where the heads of a projection lie in what is stored: rows of a tensor, or a product of several (latent ones)."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from jaxtyping import Float, Int
from torch import Tensor

# Reads a stored tensor by name, or the rows from the first to the last but one of it.
Read = Callable[[str, tuple[int, int] | None], Tensor]


@dataclass(frozen=True, slots=True)
class Rows:
    """The rows of a stored weight that make up the query heads, or the key heads, of one attention module.

    The output rows of the weight are read as [groups, blocks, head_dim]; the heads are the blocks from `start` to
    `stop` of every group, in that order. This one pattern covers every layout in use:

    - separate linears: one group, all blocks;
    - [query | key | value]: one group, with the query heads first;
    - head-interleaved (H, 3, head_dim): a group for each head, of blocks query, key, value;
    - GQA-grouped (num_kv_heads, group + 2, head_dim): a group for each KV head.

    """

    tensor: str
    head_dim: int  # rows of a block
    blocks: int  # in a group
    start: int  # the first block taken from each group
    stop: int  # the block after the last one taken
    groups: int = 1
    transposed: bool = False  # stored (in, out), as by `Conv1D`, or (in, heads, head_dim)

    @property
    def tensors(self) -> tuple[str, ...]:
        """Names of the stored tensors that are read."""
        return (self.tensor,)

    def load(self, read: Read) -> Tensor:
        """The heads as a weight [heads * head_dim, in], reading no other rows where they lie in one run."""
        if self.transposed or self.groups > 1:
            return self.take(read(self.tensor, None))
        whole = self.start == 0 and self.stop == self.blocks
        return read(self.tensor, None if whole else (self.start * self.head_dim, self.stop * self.head_dim))

    def take(self, weight: Tensor) -> Tensor:
        """The heads as a weight [heads * head_dim, in]: a view where they lie in one run, otherwise a copy."""
        return self._blocks(weight).flatten(0, 2)

    def put(self, weight: Tensor, heads: Tensor) -> None:
        """Write `heads`, [heads * head_dim, in], to their place in `weight`."""
        place = self._blocks(weight)
        place.copy_(heads.reshape(place.shape))

    def _blocks(self, weight: Tensor) -> Tensor:
        stored = weight.flatten(1).T if self.transposed else weight
        return stored.unflatten(0, (self.groups, self.blocks, self.head_dim))[:, self.start : self.stop]


@dataclass(frozen=True, eq=False, slots=True)
class Selected:
    """Rows of a stored weight in whatever order a probe has seen them: what `Rows` is for layouts with a pattern."""

    tensor: str
    head_dim: int
    index: Int[Tensor, " out"]
    transposed: bool = False  # stored (in, out), as by `Conv1D`

    @property
    def tensors(self) -> tuple[str, ...]:
        """Names of the stored tensors that are read."""
        return (self.tensor,)

    def load(self, read: Read) -> Tensor:
        """The heads as a weight [heads * head_dim, in]."""
        return self.take(read(self.tensor, None))

    def take(self, weight: Tensor) -> Tensor:
        """The heads as a weight [heads * head_dim, in]: a view where they lie in one run, otherwise a copy."""
        stored = self._stored(weight)
        first = int(self.index[0])
        if torch.equal(self.index, torch.arange(first, first + len(self.index), device="cpu")):
            return stored[first : first + len(self.index)]
        return stored[self.index.to(stored.device)]

    def put(self, weight: Tensor, heads: Tensor) -> None:
        """Write `heads`, [heads * head_dim, in], to their place in `weight`."""
        stored = self._stored(weight)
        stored[self.index.to(stored.device)] = heads.to(stored)

    def _stored(self, weight: Tensor) -> Tensor:
        """[out, in], of a convolution over one position, too."""
        return weight.T if self.transposed else weight.flatten(1)


@dataclass(frozen=True, eq=False, slots=True)
class Piece:
    """Rows of one stored weight, times what it reads, times a factor for each row."""

    rows: Selected
    place: Int[Tensor, " out"]  # of each row in the whole
    factors: Float[Tensor, " out"] | None  # None: all 1
    input: Composed | None  # None: the token itself


@dataclass(frozen=True, eq=False, slots=True)
class Composed:
    """Components of a chain of linear maps, as a probe has seen it, without the norms in between (latent attention)."""

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


@dataclass(frozen=True, slots=True)
class LatentQuery:
    """Of latent attention (DeepSeek): `q = W_up W_down x`, without the norm between the two, which is no linear map."""

    down: str  # [rank, in]
    up: str  # [num_heads * head_dim, rank]
    head_dim: int  # with the part that is rotated

    @property
    def tensors(self) -> tuple[str, ...]:
        """Names of the stored tensors that are read."""
        return self.down, self.up

    def load(self, read: Read) -> Tensor:
        """The product, [num_heads * head_dim, in]."""
        return read(self.up, None) @ read(self.down, None)


@dataclass(frozen=True, slots=True)
class LatentKey:
    """Head h has `k_h = [W_up,h W_down x ; W_rope x]`: a part of its own from the latent, and one shared by all heads.

    The norm of the latent, which is no linear map, is left out.
    """

    down: str  # [rank + rope, in]
    up: str  # [num_heads * (nope + value), rank]
    num_heads: int
    nope: int  # width of the part of a head that is not rotated
    rope: int  # width of the rotated part

    @property
    def head_dim(self) -> int:
        """Width of a head."""
        return self.nope + self.rope

    @property
    def tensors(self) -> tuple[str, ...]:
        """Names of the stored tensors that are read."""
        return self.down, self.up

    def load(self, read: Read) -> Tensor:
        """The effective weight, [num_heads * head_dim, in]."""
        down, up = read(self.down, None), read(self.up, None)
        own = up.unflatten(0, (self.num_heads, -1))[:, : self.nope] @ down[: -self.rope]
        shared = down[-self.rope :].expand(self.num_heads, -1, -1)
        return torch.cat([own, shared], dim=1).flatten(0, 1)
