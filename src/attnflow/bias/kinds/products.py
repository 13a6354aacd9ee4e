"""Biases that are inner products: bilinear, dot (daa, sec. 3.2.2, alternatives) and low rank (a control)."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import ClassVar

import torch
from jaxtyping import Float
from torch import Tensor, nn

from attnflow.bias.config import BiasConfig, Init, VectorConfig
from attnflow.bias.kinds.base import Projection, as_last, as_linear, flatten, num_maps, spread, unflatten
from attnflow.bias.shape import LayerShape, Reference, ShareHeads, Vectors
from attnflow.bias.terms import Product, wide


@dataclass(frozen=True, kw_only=True)
class LowRankConfig(BiasConfig):
    """An inner product of low rank: the control with the parameters of the guidance network at rank = hidden_dim.

    Attributes:
        rank: of the product.

    The other fields are those of `BiasConfig`.
    """

    kind: ClassVar[str] = "lowrank"
    rank: int = 64
    reference: Reference = "unrotated"
    share_heads: ShareHeads = True
    init: Init = "zero"

    def module(self, shape: LayerShape) -> nn.Module:
        """The two projections of one layer."""
        return LowRank(self, shape)


@dataclass(frozen=True, kw_only=True)
class BilinearConfig(BiasConfig):
    """A bilinear form of query and key (daa, sec. 3.2.2, an alternative). The fields are those of `BiasConfig`."""

    kind: ClassVar[str] = "bilinear"
    reference: Reference = "unrotated"
    share_heads: ShareHeads = True
    init: Init = "zero"

    def module(self, shape: LayerShape) -> nn.Module:
        """The form of one layer."""
        return Bilinear(self, shape)


@dataclass(frozen=True, kw_only=True)
class DotConfig(BiasConfig):
    """The product of query and key (daa, sec. 3.2.2, an alternative).

    Attributes:
        gain: of the product, to start from; 0 is the identity.

    The other fields are those of `BiasConfig`.
    """

    kind: ClassVar[str] = "dot"
    reference: Reference = "unrotated"
    share_heads: ShareHeads = True
    gain: float = 0.0

    def module(self, shape: LayerShape) -> nn.Module:
        """The gain of one layer."""
        return Dot(self, shape)


class LowRank(nn.Module):
    """B_ij = (U q_i) . (V k_j) / sqrt(rank): what a low rank can do with the parameters of the guidance network."""

    def __init__(self, config: LowRankConfig, shape: LayerShape) -> None:
        super().__init__()
        self.config, self.maps = config, num_maps(config, shape)
        self.fan_in = shape.widths(config.reference)
        self.query = Projection(config, shape, "query", config.rank)
        self.key = Projection(config, shape, "key", config.rank)
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """U as `nn.Linear`, V as `init` says."""
        as_linear(self.query.weight, self.fan_in[0])
        as_last(self.key.weight, self.fan_in[1], self.config.init)

    def columns(self, keys: Vectors) -> Float[Tensor, "batch tokens width"]:
        """V k of each key, [batch, tokens, maps * rank]."""
        return flatten(wide(self.key(keys.reference(self.config.reference))))

    def term(self, queries: Vectors, columns: Float[Tensor, "batch keys width"], slots: Tensor | None) -> Product:
        """The inner products."""
        rows = wide(self.query(queries.reference(self.config.reference))) / math.sqrt(self.config.rank)
        return Product(rows, unflatten(columns, self.maps))

    def is_zero(self) -> bool:
        """Whether V is zero."""
        return not bool(self.key.weight.any())


class Bilinear(nn.Module):
    """B_ij = q_i^T W k_j / sqrt(width_q * width_k) (daa, sec. 3.2.2); the scale keeps W's learning rate sane."""

    def __init__(self, config: BilinearConfig, shape: LayerShape) -> None:
        super().__init__()
        self.config, self.widths = config, shape.widths(config.reference)
        self.maps, self.shape = num_maps(config, shape), shape
        self.query = Projection(config, shape, "query", self.widths[1])
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """W as `init` says."""
        as_last(self.query.weight, self.widths[0], self.config.init)

    def columns(self, keys: Vectors) -> Float[Tensor, "batch tokens width"]:
        """The key's vector itself."""
        return wide(keys.reference(self.config.reference))

    def term(self, queries: Vectors, columns: Float[Tensor, "batch keys width"], slots: Tensor | None) -> Product:
        """(W^T q_i) . k_j."""
        rows = wide(self.query(queries.reference(self.config.reference))) / math.sqrt(math.prod(self.widths))
        return Product(rows, _by_map(columns, self.config, self.shape, self.maps))

    def is_zero(self) -> bool:
        """Whether W is zero."""
        return not bool(self.query.weight.any())


class Dot(nn.Module):
    """B_ij = gain * q_i . k_j / sqrt(width): what attention itself computes, but before rotary embedding.

    With fewer key-value heads than query heads, each key head meets the sum of its query heads, so that full-width
    vectors give the sum of all heads' products. The paper (daa, sec. 3.2.2) names it as the redundant alternative.
    """

    def __init__(self, config: DotConfig, shape: LayerShape) -> None:
        super().__init__()
        self.config, self.shape, self.maps = config, shape, num_maps(config, shape)
        self.gain = nn.Parameter(torch.empty(shape.groups(config.share_heads)))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """The gain of the config."""
        nn.init.constant_(self.gain, self.config.gain)

    def columns(self, keys: Vectors) -> Float[Tensor, "batch tokens width"]:
        """The key's vector itself."""
        return wide(keys.reference(self.config.reference))

    def term(self, queries: Vectors, columns: Float[Tensor, "batch keys width"], slots: Tensor | None) -> Product:
        """gain * q_i . k_j."""
        shape = self.shape
        rows = wide(queries.reference(self.config.reference))
        batch, tokens, _ = rows.shape
        if self.config.reference == "per_head":
            rows = rows.view(batch, tokens, shape.num_heads, -1).transpose(1, 2)
        else:
            if self.config.reference != "hidden":
                rows = rows.view(batch, tokens, shape.num_kv_heads, -1, shape.head_dim).sum(dim=3).flatten(2)
            rows = rows[:, None].expand(-1, self.maps, -1, -1)
        gain = wide(spread(self.gain, self.maps))[:, None, None] / math.sqrt(rows.shape[-1])
        return Product(rows * gain, _by_map(columns, self.config, shape, self.maps))

    def is_zero(self) -> bool:
        """Whether the gain is zero."""
        return not bool(self.gain.any())


def _by_map(columns: Tensor, config: VectorConfig, shape: LayerShape, maps: int) -> Tensor:
    """Key vectors as [batch, maps, keys, width]: each head's own, or the same full-width ones for all."""
    if config.reference == "per_head":
        return unflatten(columns, shape.num_kv_heads).repeat_interleave(maps // shape.num_kv_heads, dim=1)
    return columns[:, None].expand(-1, maps, -1, -1)
