"""Kinds that depend on positions alone: a number for every pair, ALiBi, and T5's relative buckets."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar, Final, Literal

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn

from attnflow._core.checks import integer
from attnflow.bias.config import BiasConfig, LayerShape, Placement, ShareHeads, Vectors
from attnflow.bias.kind import BiasKind
from attnflow.bias.terms import Additive, Dense, Offset, Term, wide

__all__ = ["AlibiConfig", "DenseConfig", "RelativeConfig"]

_FAR: Final = 1 << 16  # distances up to here have a place in the table of a bidirectional ALiBi


class DenseTable(BiasKind["DenseConfig"]):
    """B_ij = values[i, j] by position."""

    last = ("values",)

    def __init__(self, config: DenseConfig, shape: LayerShape) -> None:
        super().__init__(config, shape)
        size = (config.max_length, config.max_length)
        self.values = nn.Parameter(torch.empty(1, shape.groups(config.share_heads), *size))
        nn.init.normal_(self.values, std=config.std)

    def term(self, queries: Vectors, columns: Float[Tensor, "batch keys width"], slots: Tensor | None) -> Dense:
        table, length = self.values, self.config.max_length
        keys, rows = columns.squeeze(-1).long(), queries.positions
        last = 0 if torch.compiler.is_compiling() else max(int(keys.max()), int(rows.max()))
        if last >= length:
            raise ValueError(
                f"the dense bias covers {length} positions, but the sequence reaches {last}: attach it with a larger "
                "max_length"
            )
        if rows.shape[0] == keys.shape[0] == 1:
            return Dense(table[:, :, rows[0]][..., keys[0]])
        batch = max(rows.shape[0], keys.shape[0])
        where = torch.arange(batch, device=table.device)[:, None, None, None]
        maps = torch.arange(table.shape[1], device=table.device)[None, :, None, None]
        return Dense(table.expand(batch, -1, -1, -1)[where, maps, rows[:, None, :, None], keys[:, None, None, :]])


@dataclass(frozen=True, kw_only=True)
class DenseConfig(BiasConfig):
    """A learned number for each pair of positions, as pair biases and graphs have.

    Attributes:
        max_length: number of positions of the table.
        std: standard deviation of the initial values; 0 is the identity.
    """

    makes: ClassVar = DenseTable
    share_heads: ShareHeads = True
    max_length: int = 512
    std: float = 0.0


class Alibi(BiasKind["AlibiConfig"]):
    """B_ij = -gain_h * m_h * |i - j| with the slopes m_h of Press et al. (2022)."""

    last = ("gain",)

    def __init__(self, config: AlibiConfig, shape: LayerShape) -> None:
        super().__init__(config, shape)
        self.gain = nn.Parameter(torch.full((shape.num_heads,), float(config.gain)))

    def term(self, queries: Vectors, columns: Float[Tensor, "batch keys width"], slots: Tensor | None) -> Term:
        """Linear in the key's position where keys lie before queries; else a table over distances."""
        slope = wide(self.gain) * slopes(len(self.gain), self.gain.device)
        if self.shape.is_causal:
            where = (columns.squeeze(-1)[:, None], wide(queries.positions).to(columns.dtype)[:, None])
            keys, rows = (slope[:, None] * positions for positions in where)
            return Additive(keys, rows)
        distance = torch.arange(-_FAR, _FAR + 1, device=slope.device)
        table = -slope[:, None] * distance.abs()
        return Offset(table, distance + _FAR, queries.positions, columns.squeeze(-1).long(), _FAR)


@dataclass(frozen=True, kw_only=True)
class AlibiConfig(BiasConfig):
    """ALiBi in place of rotary embedding, in every layer: the paper's baseline (daa, sec. 4.2).

    The defaults start as the published bias, and each head then learns its gain. They change the model at once;
    `AlibiConfig(layers="every_other", rope="keep", gain=0.0)` starts as the identity.

    Attributes:
        gain: the initial factor of the published slopes.
    """

    makes: ClassVar = Alibi
    layers: Placement | Sequence[int] = "every"
    rope: Literal["keep", "remove"] = "remove"
    gain: float = 1.0


class Relative(BiasKind["RelativeConfig"]):
    """B_ij = table[head, bucket(j - i)] with T5's buckets; T5 has one table per head (`share_heads=False`)."""

    last = ("table",)
    bucket_of: Tensor

    def __init__(self, config: RelativeConfig, shape: LayerShape) -> None:
        super().__init__(config, shape)
        distances = torch.arange(-config.max_distance, config.max_distance + 1)
        bucket_of = buckets(distances, config.num_buckets, config.max_distance, not shape.is_causal)
        self.register_buffer("bucket_of", bucket_of, persistent=False)
        self.table = nn.Parameter(torch.empty(shape.groups(config.share_heads), config.num_buckets))
        nn.init.normal_(self.table, std=config.std)

    def term(self, queries: Vectors, columns: Float[Tensor, "batch keys width"], slots: Tensor | None) -> Offset:
        keys = columns.squeeze(-1).long()
        return Offset(wide(self.table), self.bucket_of, queries.positions, keys, self.config.max_distance)


@dataclass(frozen=True, kw_only=True)
class RelativeConfig(BiasConfig):
    """A table over T5's buckets of the distance between query and key.

    Attributes:
        num_buckets: number of buckets of a table.
        max_distance: the distance from which on all share one bucket.
        std: standard deviation of the initial values; 0 is the identity.
    """

    makes: ClassVar = Relative
    share_heads: ShareHeads = True
    num_buckets: int = 32
    max_distance: int = 128
    std: float = 0.0

    def __post_init__(self) -> None:
        super().__post_init__()
        integer("num_buckets", self.num_buckets, minimum=4)
        if self.max_distance <= self.num_buckets // 4:
            raise ValueError(
                f"max_distance must exceed num_buckets // 4 = {self.num_buckets // 4}, got {self.max_distance}"
            )


def slopes(num_heads: int, device: torch.device | None = None) -> Float[Tensor, " heads"]:
    """ALiBi's slopes, 2^(-8 h / n) for powers of two; made where used, as a buffer would be rounded with its model."""
    power = 2 ** math.floor(math.log2(num_heads))
    first = [2.0 ** (-8.0 / power * head) for head in range(1, power + 1)]
    between = [2.0 ** (-4.0 / power * (2 * head + 1)) for head in range(num_heads - power)]
    return torch.tensor([*first, *between], dtype=torch.float32, device=device)


def buckets(
    distance: Int[Tensor, " distances"], num_buckets: int, max_distance: int, bidirectional: bool
) -> Int[Tensor, " distances"]:
    """T5's bucket of each distance j - i (Raffel et al., 2020): half of them exact, half logarithmic."""
    first = torch.zeros_like(distance)
    if bidirectional:
        num_buckets //= 2
        first = (distance > 0).long() * num_buckets
        away = distance.abs()
    else:
        away = (-distance).clamp(min=0)
    exact = num_buckets // 2
    # In float32 and in T5's order of operations, which decides on which side of a boundary a distance falls.
    ratio = torch.log(away.clamp(min=1).float() / exact) / math.log(max_distance / exact)
    far = exact + (ratio * (num_buckets - exact)).long().clamp(max=num_buckets - exact - 1)
    return first + torch.where(away < exact, away, far)
