"""Dynamic Asymmetric Attention: a small network on (query, key) (daa, sec. 3.2)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from jaxtyping import Float
from torch import Tensor, nn

from attnflow.bias.config import BiasConfig, Init
from attnflow.bias.kinds.base import GroupedNorm, Projection, as_last, as_linear, flatten, num_maps, spread, unflatten
from attnflow.bias.shape import LayerShape, Reference, ShareHeads, Vectors
from attnflow.bias.terms import Guidance, wide


@dataclass(frozen=True, kw_only=True)
class GuidanceConfig(BiasConfig):
    """The paper's bias: a network on query and key (daa, sec. 3.2, table 1).

    Attributes:
        hidden_dim: width of the network's hidden layer.

    The other fields are those of `BiasConfig`.

    >>> GuidanceConfig.from_dict(GuidanceConfig(layers=[0, 3]).to_dict()) == GuidanceConfig(layers=[0, 3])
    True
    """

    kind: ClassVar[str] = "guidance"
    hidden_dim: int = 64
    reference: Reference = "unrotated"
    share_heads: ShareHeads = True
    init: Init = "zero"

    def module(self, shape: LayerShape) -> nn.Module:
        """The network of one layer."""
        return GuidanceNetwork(self, shape)


class GuidanceNetwork(nn.Module):
    """B_ij = Linear(GELU(LayerNorm(Linear([q_i; k_j])))) with one hidden layer (daa, sec. 3.2.1).

    The first layer is kept as its two halves, `query` and `key` (terms.Guidance says why). With the paper's settings on
    LLaMA-2-7B a layer has 2 * 4096 * 64 + 64 + 2 * 64 + 64 + 1 = 524,545 parameters. The output layer starts at zero,
    so that the hidden layer gets no gradient in the first step: normal. Its bias never gets one, because softmax
    cannot see it; it is kept for the parameter count.
    """

    def __init__(self, config: GuidanceConfig, shape: LayerShape) -> None:
        super().__init__()
        networks, hidden = shape.groups(config.share_heads), config.hidden_dim
        self.config, self.fan_in = config, sum(shape.widths(config.reference))
        self.maps = num_maps(config, shape)
        self.query = Projection(config, shape, "query", hidden)
        self.key = Projection(config, shape, "key", hidden)
        self.hidden_bias = nn.Parameter(torch.empty(networks, hidden))
        self.norm = GroupedNorm(networks, hidden)
        self.output_weight = nn.Parameter(torch.empty(networks, hidden))
        self.output_bias = nn.Parameter(torch.empty(networks))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """The hidden layer as `nn.Linear`; the output layer as `init` says, its bias at zero (daa, sec. 3.4)."""
        for parameter in (self.query.weight, self.key.weight, self.hidden_bias):
            as_linear(parameter, self.fan_in)
        nn.init.ones_(self.norm.weight)
        nn.init.zeros_(self.norm.bias)
        as_last(self.output_weight, self.config.hidden_dim, self.config.init)
        as_last(self.output_bias, self.config.hidden_dim, "zero")

    def columns(self, keys: Vectors) -> Float[Tensor, "batch tokens width"]:
        """c = W_k k of each key, [batch, tokens, maps * hidden_dim]."""
        return flatten(wide(self.key(keys.reference(self.config.reference))))

    def term(self, queries: Vectors, columns: Float[Tensor, "batch keys width"], slots: Tensor | None) -> Guidance:
        """The network on every (query, key)."""
        rows = wide(self.query(queries.reference(self.config.reference)))
        rows = rows + wide(spread(self.hidden_bias, self.maps))[:, None]
        parameters = (self.norm.weight, self.norm.bias, self.output_weight, self.output_bias)
        return Guidance(rows, unflatten(columns, self.maps), *(wide(spread(p, self.maps)) for p in parameters))

    def is_zero(self) -> bool:
        """Whether the output layer is zero."""
        return not bool(self.output_weight.any()) and not bool(self.output_bias.any())
