"""Biases that are inner products: bilinear, dot (daa, sec. 3.2.2, alternatives) and low rank (a control)."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import ClassVar

import torch
from jaxtyping import Float
from torch import Tensor, nn

from attnflow.bias.config import Init, VectorConfig
from attnflow.bias.kinds.base import Kind, Projection, as_last, as_linear, flatten, spread, unflatten
from attnflow.bias.shape import LayerShape, Vectors
from attnflow.bias.terms import Product, wide


@dataclass(frozen=True, kw_only=True)
class LowRankConfig(VectorConfig):
    """An inner product of low rank: the control with the parameters of the guidance network at rank = hidden_dim.

    Attributes:
        rank: of the product.
    """

    kind: ClassVar[str] = "lowrank"
    rank: int = 64
    init: Init = "zero"

    def module(self, shape: LayerShape) -> nn.Module:
        """The two projections of one layer."""
        return LowRank(self, shape)


@dataclass(frozen=True, kw_only=True)
class BilinearConfig(VectorConfig):
    """A bilinear form of query and key (daa, sec. 3.2.2, an alternative)."""

    kind: ClassVar[str] = "bilinear"
    init: Init = "zero"

    def module(self, shape: LayerShape) -> nn.Module:
        """The form of one layer."""
        return Bilinear(self, shape)


@dataclass(frozen=True, kw_only=True)
class DotConfig(VectorConfig):
    """The product of query and key (daa, sec. 3.2.2, an alternative).

    Attributes:
        gain: of the product, to start from; 0 is the identity.
    """

    kind: ClassVar[str] = "dot"
    gain: float = 0.0

    def module(self, shape: LayerShape) -> nn.Module:
        """The gain of one layer."""
        return Dot(self, shape)


class LowRank(Kind[LowRankConfig]):
    """B_ij = (U q_i) . (V k_j) / sqrt(rank): what a low rank can do with the parameters of the guidance network."""

    last = ("key.weight",)

    def __init__(self, config: LowRankConfig, shape: LayerShape) -> None:
        super().__init__(config, shape)
        self.query = Projection(config, shape, "query", config.rank)
        self.key = Projection(config, shape, "key", config.rank)
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """U as `nn.Linear`, V as `init` says."""
        as_linear(self.query.weight, self.query.weight.shape[-1])
        as_last(self.key.weight, self.key.weight.shape[-1], self.config.init)

    def columns(self, keys: Vectors) -> Float[Tensor, "batch tokens width"]:
        """V k of each key, [batch, tokens, maps * rank]."""
        return flatten(self.key(keys))

    def term(self, queries: Vectors, columns: Float[Tensor, "batch keys width"], slots: Tensor | None) -> Product:
        """The inner products."""
        return Product(self.query(queries) / math.sqrt(self.config.rank), unflatten(columns, self.maps))


class _OfKeys(Kind[BilinearConfig | DotConfig]):
    """B_ij = u_i . k_j with the key's vector itself."""

    def columns(self, keys: Vectors) -> Float[Tensor, "batch tokens width"]:
        """The key's vector."""
        return wide(keys.reference(self.config.reference))

    def by_map(self, columns: Tensor) -> Tensor:
        """Key vectors as [batch, maps, keys, width]: each head's own, or the same full-width ones for all."""
        if self.config.reference == "per_head":
            kv_heads = self.shape.num_kv_heads
            return unflatten(columns, kv_heads).repeat_interleave(self.maps // kv_heads, dim=1)
        return columns[:, None].expand(-1, self.maps, -1, -1)


class Bilinear(_OfKeys):
    """B_ij = q_i^T W k_j / sqrt(width_q * width_k) (daa, sec. 3.2.2); the scale keeps W's learning rate sane."""

    last = ("query.weight",)
    config: BilinearConfig

    def __init__(self, config: BilinearConfig, shape: LayerShape) -> None:
        super().__init__(config, shape)
        self.query = Projection(config, shape, "query", shape.widths(config.reference)[1])
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """W as `init` says."""
        as_last(self.query.weight, self.query.weight.shape[-1], self.config.init)

    def term(self, queries: Vectors, columns: Float[Tensor, "batch keys width"], slots: Tensor | None) -> Product:
        """(W^T q_i) . k_j."""
        rows = self.query(queries) / math.sqrt(math.prod(self.query.weight.shape[1:]))
        return Product(rows, self.by_map(columns))


class Dot(_OfKeys):
    """B_ij = gain * q_i . k_j / sqrt(width): what attention itself computes, but before rotary embedding.

    With fewer key-value heads than query heads, each key head meets the sum of its query heads, so that full-width
    vectors give the sum of all heads' products. The paper (daa, sec. 3.2.2) names it as the redundant alternative.
    """

    last = ("gain",)
    config: DotConfig

    def __init__(self, config: DotConfig, shape: LayerShape) -> None:
        super().__init__(config, shape)
        self.gain = nn.Parameter(torch.empty(shape.groups(config.share_heads)))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """The gain of the config."""
        nn.init.constant_(self.gain, self.config.gain)

    def term(self, queries: Vectors, columns: Float[Tensor, "batch keys width"], slots: Tensor | None) -> Product:
        """gain * q_i . k_j."""
        shape, reference = self.shape, self.config.reference
        rows = wide(queries.reference(reference))
        if reference == "per_head":
            rows = unflatten(rows, shape.num_heads)
        else:
            if reference != "hidden":
                rows = rows.unflatten(-1, (shape.num_kv_heads, -1, shape.head_dim)).sum(dim=3).flatten(2)
            rows = rows[:, None].expand(-1, self.maps, -1, -1)
        gain = spread(self.gain, self.maps)[:, None, None] / math.sqrt(rows.shape[-1])
        return Product(rows * gain, self.by_map(columns))
