"""Forget gates that add up over the tokens between key and query (FoX; CABLE)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from jaxtyping import Float
from torch import Tensor, nn
from torch.nn import functional

from attnflow.bias.config import BiasConfig
from attnflow.bias.kinds.base import Projection, as_linear, flatten, num_maps, spread, unflatten
from attnflow.bias.shape import LayerShape, Reference, ShareHeads, Vectors
from attnflow.bias.terms import Additive, wide


@dataclass(frozen=True, kw_only=True)
class CumulativeConfig(BiasConfig):
    """Forget gates (FoX; CABLE), in causal layers only.

    Attributes:
        gain: of the sum of log gates, to start from; 0 is the identity.

    The other fields are those of `BiasConfig`.
    """

    kind: ClassVar[str] = "cumulative"
    reference: Reference = "unrotated"
    share_heads: ShareHeads = True
    gain: float = 0.0

    def module(self, shape: LayerShape) -> nn.Module:
        """The gates of one layer.

        Raises:
            ValueError: a layer that also sees later keys.
        """
        return Cumulative(self, shape)


class Cumulative(nn.Module):
    """B_ij = gain * sum of log f_l for l = j + 1 .. i, with forget gates f = sigmoid(w . k + b) (FoX; CABLE).

    As a sum over tokens it is a difference of running sums, so that softmax sees a key-only bias. The gain starts at 0,
    which makes it the identity, and the gates nearly open (b = 3); the gates get no gradient in the first step.

    Raises:
        ValueError: a layer that also sees later keys, for which "between j and i" has no direction.
    """

    def __init__(self, config: CumulativeConfig, shape: LayerShape) -> None:
        super().__init__()
        if not shape.is_causal:
            raise ValueError(
                f"CumulativeConfig sums gates from a key to a later query, but layer {shape.index} is not causal; "
                "use KeyConfig or GuidanceConfig"
            )
        networks = shape.groups(config.share_heads)
        self.config, self.fan_in, self.maps = config, shape.widths(config.reference)[1], num_maps(config, shape)
        self.gate = Projection(config, shape, "key", 1)
        self.gate_bias = nn.Parameter(torch.empty(networks))
        self.gain = nn.Parameter(torch.empty(networks))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Gates nearly open, and the gain of the config."""
        as_linear(self.gate.weight, self.fan_in)
        nn.init.constant_(self.gate_bias, 3.0)
        nn.init.constant_(self.gain, self.config.gain)

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
