"""Biases that depend on the key alone, up to what softmax cannot see: the control `key`, and cumulative gates."""

from __future__ import annotations

import math

import torch
from jaxtyping import Float
from torch import Tensor, nn
from torch.nn import functional

from attnflow.bias.config import BiasConfig
from attnflow.bias.kinds.base import GroupedNorm, Projection, flatten, num_maps, spread, unflatten
from attnflow.bias.shape import LayerShape, Vectors
from attnflow.bias.terms import EPS, Additive, wide


class Key(nn.Module):
    """B_ij = f(k_j): the guidance network without its query half, the honest control for what pairs add.

    A guidance map at random initialisation has three quarters of its row-centred energy in rank 1: whatever a key-only
    bias reaches as well was not learned about pairs.
    """

    def __init__(self, config: BiasConfig, shape: LayerShape) -> None:
        super().__init__()
        networks, hidden = shape.groups(config), config.hidden_dim
        self.config, self.fan_in, self.maps = config, shape.widths(config)[1], num_maps(config, shape)
        self.key = Projection(config, shape, "key", hidden)
        self.hidden_bias = nn.Parameter(torch.empty(networks, hidden))
        self.norm = GroupedNorm(networks, hidden)
        self.output_weight = nn.Parameter(torch.empty(networks, hidden))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """The hidden layer as `nn.Linear`; the output at zero, or likewise with init="kaiming"."""
        self.key.reset_parameters(self.fan_in)
        nn.init.uniform_(self.hidden_bias, -1 / math.sqrt(self.fan_in), 1 / math.sqrt(self.fan_in))
        nn.init.ones_(self.norm.weight)
        nn.init.zeros_(self.norm.bias)
        bound = 0.0 if self.config.init == "zero" else 1 / math.sqrt(self.config.hidden_dim)
        nn.init.uniform_(self.output_weight, -bound, bound)

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


class Cumulative(nn.Module):
    """B_ij = gain * sum of log f_l for l = j + 1 .. i, with forget gates f = sigmoid(w . k + b) (FoX; CABLE).

    As a sum over tokens it is a difference of running sums, so that softmax sees a key-only bias. The gain starts at 0,
    which makes it the identity, and the gates nearly open (b = 3); the gates get no gradient in the first step.

    Raises:
        ValueError: a layer that also sees later keys, for which "between j and i" has no direction.
    """

    def __init__(self, config: BiasConfig, shape: LayerShape) -> None:
        super().__init__()
        if not shape.is_causal:
            raise ValueError(
                f"kind='cumulative' sums gates from a key to a later query, but layer {shape.index} is not causal; "
                "use kind='key' or 'guidance'"
            )
        networks = shape.groups(config)
        self.config, self.fan_in, self.maps = config, shape.widths(config)[1], num_maps(config, shape)
        self.gate = Projection(config, shape, "key", 1)
        self.gate_bias = nn.Parameter(torch.empty(networks))
        self.gain = nn.Parameter(torch.empty(networks))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Gates nearly open; gain 0, or 1 with init="kaiming"."""
        self.gate.reset_parameters(self.fan_in)
        nn.init.constant_(self.gate_bias, 3.0)
        nn.init.constant_(self.gain, 0.0 if self.config.init == "zero" else 1.0)

    def columns(self, keys: Vectors) -> Float[Tensor, "batch tokens width"]:
        """log f of each token, [batch, tokens, maps]; slots not written yet hold 0, an open gate."""
        gate = wide(self.gate(keys.reference(self.config.reference)))
        return flatten(functional.logsigmoid(gate + wide(spread(self.gate_bias, self.maps))[:, None, None]))

    def term(self, queries: Vectors, columns: Float[Tensor, "batch keys width"], slots: Tensor | None) -> Additive:
        """gain * (F_i - F_j) with running sums F; without `slots`, relative to the last key instead of the query."""
        gain = wide(spread(self.gain, self.maps))[:, None]
        total = unflatten(columns, self.maps).squeeze(-1).cumsum(dim=-1) * gain
        rows = total[..., -1:].expand(-1, -1, queries.positions.shape[-1]) if slots is None else total[..., slots]
        return Additive(columns=-total, rows=-rows)

    def is_zero(self) -> bool:
        """Whether the gain is zero."""
        return not bool(self.gain.any())
