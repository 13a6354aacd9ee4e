"""Kinds that read the content of tokens: small networks, forget gates, and inner products (daa, sec. 3.2).

The guidance network is the paper's. The network on the key alone and the product of low rank are its controls: what a
control achieves as well was not learned about pairs. A key-only bias fits three quarters of a row-centred guidance map
at random initialisation, with and without a causal mask.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import ClassVar, Literal

import torch
from jaxtyping import Float
from torch import Tensor, nn
from torch.nn import functional

from attnflow.bias.config import Init, LayerShape, VectorConfig, Vectors
from attnflow.bias.kind import BiasKind, GroupedNorm, Projection, as_last, as_linear, flatten, spread, unflatten
from attnflow.bias.terms import Additive, Guidance, Product, Term, network, wide

__all__ = ["BilinearConfig", "CumulativeConfig", "DotConfig", "GuidanceConfig", "KeyConfig", "LowRankConfig"]


class KeyNetwork(BiasKind["GuidanceConfig | KeyConfig"]):
    """B_ij = f(k_j): the guidance network without its query half; its output bias starts at zero (daa, sec. 3.4)."""

    last = ("output_weight",)
    sides: ClassVar[tuple[Literal["query", "key"], ...]] = ("key",)
    query: Projection
    key: Projection

    def __init__(self, config: GuidanceConfig | KeyConfig, shape: LayerShape) -> None:
        super().__init__(config, shape)
        networks, hidden = shape.groups(config.share_heads), config.hidden_dim
        for side in self.sides:
            self.add_module(side, Projection(config, shape, side, hidden))
        self.hidden_bias = nn.Parameter(torch.empty(networks, hidden))
        self.norm = GroupedNorm(networks, hidden)
        self.output_weight = nn.Parameter(torch.empty(networks, hidden))
        weights: list[Tensor] = [getattr(self, side).weight for side in self.sides]
        for parameter in (*weights, self.hidden_bias):
            as_linear(parameter, sum(weight.shape[-1] for weight in weights))
        as_last(self.output_weight, hidden, config.init)
        if "output_bias" in self.last:  # softmax cannot see it: kept for the paper's number of parameters
            self.output_bias = nn.Parameter(torch.empty(networks))
            as_last(self.output_bias, hidden, "zero")

    def columns(self, keys: Vectors) -> Float[Tensor, "batch tokens width"]:
        """f(k_j), [batch, tokens, maps]."""
        hidden = self.key(keys) + spread(self.hidden_bias, self.maps)[:, None]
        parameters = (self.norm.weight, self.norm.bias, self.output_weight)
        return network(hidden, *(spread(parameter, self.maps) for parameter in parameters)).transpose(1, 2)

    def term(self, queries: Vectors, columns: Float[Tensor, "batch keys width"], slots: Tensor | None) -> Term:
        return Additive(unflatten(columns, self.maps).squeeze(-1))


class GuidanceNetwork(KeyNetwork):
    """B_ij = Linear(GELU(LayerNorm(Linear([q_i; k_j])))) (daa, sec. 3.2.1); the first layer is kept in halves."""

    last = ("output_weight", "output_bias")
    sides = ("query", "key")

    def columns(self, keys: Vectors) -> Float[Tensor, "batch tokens width"]:
        """c = W_k k of each key, [batch, tokens, maps * hidden_dim]."""
        return flatten(self.key(keys))

    def term(self, queries: Vectors, columns: Float[Tensor, "batch keys width"], slots: Tensor | None) -> Guidance:
        rows = self.query(queries) + spread(self.hidden_bias, self.maps)[:, None]
        parameters = (self.norm.weight, self.norm.bias, self.output_weight, self.output_bias)
        return Guidance(rows, unflatten(columns, self.maps), *(spread(p, self.maps) for p in parameters))


@dataclass(frozen=True, kw_only=True)
class GuidanceConfig(VectorConfig):
    """The paper's bias: a network on query and key (daa, sec. 3.2, table 1).

    Attributes:
        hidden_dim: width of the network's hidden layer.

    >>> GuidanceConfig.from_dict(GuidanceConfig(layers=[0, 3]).to_dict()) == GuidanceConfig(layers=[0, 3])
    True
    """

    makes: ClassVar = GuidanceNetwork
    hidden_dim: int = 64
    init: Init = "zero"


@dataclass(frozen=True, kw_only=True)
class KeyConfig(VectorConfig):
    """The guidance network on the key alone, a control that shows what pairs add.

    Attributes:
        hidden_dim: width of the network's hidden layer.
    """

    makes: ClassVar = KeyNetwork
    hidden_dim: int = 64
    init: Init = "zero"


class Cumulative(BiasKind["CumulativeConfig"]):
    """B_ij = gain * sum of log f_l for l = j + 1 .. i, with forget gates f = sigmoid(w . k + b) (FoX; CABLE)."""

    last = ("gain",)

    def __init__(self, config: CumulativeConfig, shape: LayerShape) -> None:
        if not shape.is_causal:
            raise ValueError(
                f"CumulativeConfig sums gates from a key to a later query, but layer {shape.index} is not causal: "
                "use KeyConfig or GuidanceConfig"
            )
        super().__init__(config, shape)
        networks = shape.groups(config.share_heads)
        self.gate = Projection(config, shape, "key", 1)
        self.gate_bias = nn.Parameter(torch.full((networks,), 3.0))
        self.gain = nn.Parameter(torch.full((networks,), float(config.gain)))
        as_linear(self.gate.weight, self.gate.weight.shape[-1])

    def columns(self, keys: Vectors) -> Float[Tensor, "batch tokens width"]:
        """log f of each token, [batch, tokens, maps]; slots not written yet hold 0, an open gate."""
        return flatten(functional.logsigmoid(self.gate(keys) + spread(self.gate_bias, self.maps)[:, None, None]))

    def term(self, queries: Vectors, columns: Float[Tensor, "batch keys width"], slots: Tensor | None) -> Additive:
        """gain * (F_i - F_j) with running sums F; without `slots`, relative to the last key instead of the query."""
        gain = spread(-self.gain, self.maps)[:, None]
        total = unflatten(columns, self.maps).squeeze(-1).cumsum(dim=-1) * gain
        rows = total[..., -1:].expand(-1, -1, queries.positions.shape[-1]) if slots is None else total[..., slots]
        return Additive(columns=total, rows=rows)


@dataclass(frozen=True, kw_only=True)
class CumulativeConfig(VectorConfig):
    """Forget gates (FoX; CABLE), in causal layers only.

    Attributes:
        gain: the initial factor of the sum of log gates; 0 is the identity.
    """

    makes: ClassVar = Cumulative
    gain: float = 0.0


class LowRank(BiasKind["LowRankConfig"]):
    """B_ij = (U q_i) . (V k_j) / sqrt(rank); U starts as `nn.Linear`, V as `init` says."""

    last = ("key.weight",)

    def __init__(self, config: LowRankConfig, shape: LayerShape) -> None:
        super().__init__(config, shape)
        self.query = Projection(config, shape, "query", config.rank)
        self.key = Projection(config, shape, "key", config.rank)
        as_linear(self.query.weight, self.query.weight.shape[-1])
        as_last(self.key.weight, self.key.weight.shape[-1], config.init)

    def columns(self, keys: Vectors) -> Float[Tensor, "batch tokens width"]:
        """V k of each key, [batch, tokens, maps * rank]."""
        return flatten(self.key(keys))

    def term(self, queries: Vectors, columns: Float[Tensor, "batch keys width"], slots: Tensor | None) -> Product:
        return Product(self.query(queries) / math.sqrt(self.config.rank), unflatten(columns, self.maps))


@dataclass(frozen=True, kw_only=True)
class LowRankConfig(VectorConfig):
    """An inner product of low rank: the control with the parameters of the guidance network at rank = hidden_dim.

    Attributes:
        rank: rank of the product.
    """

    makes: ClassVar = LowRank
    rank: int = 64
    init: Init = "zero"


class _OfKeys(BiasKind["BilinearConfig | DotConfig"]):
    """B_ij = u_i . k_j with the key's vector itself."""

    def columns(self, keys: Vectors) -> Float[Tensor, "batch tokens width"]:
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

    def __init__(self, config: BilinearConfig, shape: LayerShape) -> None:
        super().__init__(config, shape)
        self.query = Projection(config, shape, "query", shape.widths(config.reference)[1])
        as_last(self.query.weight, self.query.weight.shape[-1], config.init)

    def term(self, queries: Vectors, columns: Float[Tensor, "batch keys width"], slots: Tensor | None) -> Product:
        rows = self.query(queries) / math.sqrt(math.prod(self.query.weight.shape[1:]))
        return Product(rows, self.by_map(columns))


@dataclass(frozen=True, kw_only=True)
class BilinearConfig(VectorConfig):
    """A bilinear form of query and key (daa, sec. 3.2.2, an alternative)."""

    makes: ClassVar = Bilinear
    init: Init = "zero"


class Dot(_OfKeys):
    """B_ij = gain * q_i . k_j / sqrt(width): attention's own product, before rotary embedding (daa, sec. 3.2.2)."""

    last = ("gain",)

    def __init__(self, config: DotConfig, shape: LayerShape) -> None:
        super().__init__(config, shape)
        self.gain = nn.Parameter(torch.full((shape.groups(config.share_heads),), float(config.gain)))

    def term(self, queries: Vectors, columns: Float[Tensor, "batch keys width"], slots: Tensor | None) -> Product:
        """gain * q_i . k_j."""
        shape, reference = self.shape, self.config.reference
        rows = wide(queries.reference(reference))
        if reference == "per_head":
            rows = unflatten(rows, shape.num_heads)
        else:
            if reference != "hidden":  # each key head meets the sum of its query heads
                rows = rows.unflatten(-1, (shape.num_kv_heads, -1, shape.head_dim)).sum(dim=3).flatten(2)
            rows = rows[:, None].expand(-1, self.maps, -1, -1)
        gain = spread(self.gain, self.maps)[:, None, None] / math.sqrt(rows.shape[-1])
        return Product(rows * gain, self.by_map(columns))


@dataclass(frozen=True, kw_only=True)
class DotConfig(VectorConfig):
    """The product of query and key (daa, sec. 3.2.2, an alternative).

    Attributes:
        gain: the initial factor of the product; 0 is the identity.
    """

    makes: ClassVar = Dot
    gain: float = 0.0
