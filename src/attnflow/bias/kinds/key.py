"""A bias of the key alone: the control for what pairs add."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from jaxtyping import Float
from torch import Tensor, nn
from torch.nn import functional

from attnflow.bias.config import BiasConfig, Init
from attnflow.bias.kinds.base import GroupedNorm, Projection, as_last, as_linear, flatten, num_maps, spread, unflatten
from attnflow.bias.shape import LayerShape, Reference, ShareHeads, Vectors
from attnflow.bias.terms import EPS, Additive, wide


@dataclass(frozen=True, kw_only=True)
class KeyConfig(BiasConfig):
    """The guidance network on the key alone.

    Attributes:
        hidden_dim: width of the network's hidden layer.

    The other fields are those of `BiasConfig`.
    """

    kind: ClassVar[str] = "key"
    hidden_dim: int = 64
    reference: Reference = "unrotated"
    share_heads: ShareHeads = True
    init: Init = "zero"

    def module(self, shape: LayerShape) -> nn.Module:
        """The network of one layer."""
        return KeyNetwork(self, shape)


class KeyNetwork(nn.Module):
    """B_ij = f(k_j): the guidance network without its query half, the honest control for what pairs add.

    A guidance map at random initialisation has three quarters of its row-centred energy in rank 1: whatever a key-only
    bias reaches as well was not learned about pairs.
    """

    def __init__(self, config: KeyConfig, shape: LayerShape) -> None:
        super().__init__()
        networks, hidden = shape.groups(config.share_heads), config.hidden_dim
        self.config, self.fan_in, self.maps = config, shape.widths(config.reference)[1], num_maps(config, shape)
        self.key = Projection(config, shape, "key", hidden)
        self.hidden_bias = nn.Parameter(torch.empty(networks, hidden))
        self.norm = GroupedNorm(networks, hidden)
        self.output_weight = nn.Parameter(torch.empty(networks, hidden))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """The hidden layer as `nn.Linear`; the output as `init` says."""
        as_linear(self.key.weight, self.fan_in)
        as_linear(self.hidden_bias, self.fan_in)
        nn.init.ones_(self.norm.weight)
        nn.init.zeros_(self.norm.bias)
        as_last(self.output_weight, self.config.hidden_dim, self.config.init)

    def columns(self, keys: Vectors) -> Float[Tensor, "batch tokens width"]:
        """f(k_j), [batch, tokens, maps]."""
        hidden = wide(self.key(keys.reference(self.config.reference)))
        parameters = (self.hidden_bias, self.norm.weight, self.norm.bias, self.output_weight)
        bias, scale, shift, weight = (wide(spread(p, self.maps))[:, None] for p in parameters)
        normal = functional.layer_norm(hidden + bias, hidden.shape[-1:], eps=EPS)
        return flatten((functional.gelu(scale * normal + shift) * weight).sum(dim=-1, keepdim=True))

    def term(self, queries: Vectors, columns: Float[Tensor, "batch keys width"], slots: Tensor | None) -> Additive:
        """The same number for every query."""
        return Additive(unflatten(columns, self.maps).squeeze(-1))

    def is_zero(self) -> bool:
        """Whether the output layer is zero."""
        return not bool(self.output_weight.any())
