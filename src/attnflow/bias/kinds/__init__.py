"""The kinds of bias: each an `nn.Module` of one attention layer that turns vectors into a `Term`."""

from __future__ import annotations

from typing import Final

from attnflow.bias.config import BiasConfig
from attnflow.bias.kinds.base import ScoreTerm
from attnflow.bias.kinds.columns import Cumulative, Key
from attnflow.bias.kinds.dense import DenseTable
from attnflow.bias.kinds.guidance import GuidanceNetwork
from attnflow.bias.kinds.positions import Alibi, Relative
from attnflow.bias.kinds.products import Bilinear, Dot, LowRank
from attnflow.bias.shape import LayerShape

KINDS: Final = {
    "guidance": GuidanceNetwork,
    "bilinear": Bilinear,
    "dot": Dot,
    "key": Key,
    "cumulative": Cumulative,
    "lowrank": LowRank,
    "dense": DenseTable,
    "alibi": Alibi,
    "relative": Relative,
}


def build(config: BiasConfig, shape: LayerShape) -> ScoreTerm:
    """The module of a config for one layer, freshly initialised.

    Raises:
        ValueError: the kind does not exist for such a layer.
    """
    return KINDS[config.kind](config, shape)


__all__ = ["KINDS", "ScoreTerm", "build"]
