"""Biases that are inner products: bilinear, dot (daa, sec. 3.2.2, alternatives) and low rank (a control)."""

from __future__ import annotations

import math

import torch
from jaxtyping import Float
from torch import Tensor, nn

from attnflow.bias.config import BiasConfig
from attnflow.bias.kinds.base import Projection, flatten, num_maps, spread, unflatten
from attnflow.bias.shape import LayerShape, Vectors
from attnflow.bias.terms import Product, wide


class LowRank(nn.Module):
    """B_ij = (U q_i) . (V k_j) / sqrt(rank): what a bias of rank r can do with the parameters of the guidance network.

    V starts at zero, U as `nn.Linear`.
    """

    def __init__(self, config: BiasConfig, shape: LayerShape) -> None:
        super().__init__()
        self.rank = config.hidden_dim if config.rank is None else config.rank
        self.config, self.maps = config, num_maps(config, shape)
        self.fan_in = shape.widths(config)
        self.query = Projection(config, shape, "query", self.rank)
        self.key = Projection(config, shape, "key", self.rank)
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """U as `nn.Linear`; V at zero, or likewise with init="kaiming"."""
        self.query.reset_parameters(self.fan_in[0])
        self.key.reset_parameters(self.fan_in[1])
        if self.config.init == "zero":
            nn.init.zeros_(self.key.weight)

    def columns(self, keys: Vectors) -> Float[Tensor, "batch tokens width"]:
        """V k of each key, [batch, tokens, maps * rank]."""
        return flatten(wide(self.key(keys.reference(self.config.reference))))

    def term(self, queries: Vectors, columns: Float[Tensor, "batch keys width"], slots: Tensor | None) -> Product:
        """The inner products."""
        rows = wide(self.query(queries.reference(self.config.reference))) / math.sqrt(self.rank)
        return Product(rows, unflatten(columns, self.maps))

    def is_zero(self) -> bool:
        """Whether V is zero."""
        return not bool(self.key.weight.any())


class Bilinear(nn.Module):
    """B_ij = q_i^T W k_j / sqrt(width_q * width_k) (daa, sec. 3.2.2); the scale keeps W's learning rate sane."""

    def __init__(self, config: BiasConfig, shape: LayerShape) -> None:
        super().__init__()
        self.config, self.widths = config, shape.widths(config)
        self.maps, self.shape = num_maps(config, shape), shape
        self.query = Projection(config, shape, "query", self.widths[1])
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """W at zero, or as `nn.Linear` with init="kaiming"."""
        self.query.reset_parameters(self.widths[0])
        if self.config.init == "zero":
            nn.init.zeros_(self.query.weight)

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

    def __init__(self, config: BiasConfig, shape: LayerShape) -> None:
        super().__init__()
        self.config, self.shape, self.maps = config, shape, num_maps(config, shape)
        self.gain = nn.Parameter(torch.empty(shape.groups(config)))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Gain 0, or 1 with init="kaiming"."""
        nn.init.constant_(self.gain, 0.0 if self.config.init == "zero" else 1.0)

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


def _by_map(columns: Tensor, config: BiasConfig, shape: LayerShape, maps: int) -> Tensor:
    """Key vectors as [batch, maps, keys, width]: each head's own, or the same full-width ones for all."""
    if config.reference == "per_head":
        return unflatten(columns, shape.num_kv_heads).repeat_interleave(maps // shape.num_kv_heads, dim=1)
    return columns[:, None].expand(-1, maps, -1, -1)
