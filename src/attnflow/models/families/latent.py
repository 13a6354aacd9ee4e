"""Multi-head latent attention (DeepSeek): queries and keys that are products of two stored weights."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from attnflow.models.families.rows import Read


@dataclass(frozen=True, slots=True)
class LatentQuery:
    """`q = W_up W_down x`, with the norm between the two, which is no linear map, left out.

    Attributes:
        down: name of the weight [rank, in].
        up: name of the weight [num_heads * head_dim, rank].
        head_dim: width of a head: its part without and its part with rotation.
    """

    down: str
    up: str
    head_dim: int

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

    Attributes:
        down: name of the weight [rank + rope, in].
        up: name of the weight [num_heads * (nope + value), rank].
        num_heads: heads.
        nope: width of the part of a head that is not rotated.
        rope: width of the rotated part.
    """

    down: str
    up: str
    num_heads: int
    nope: int
    rope: int

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
