"""The kinds of bias: for each a config, and the `nn.Module` of one attention layer that turns vectors into a `Term`."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

from attnflow.bias.config import BiasConfig
from attnflow.bias.kinds.networks import CumulativeConfig, GuidanceConfig, KeyConfig
from attnflow.bias.kinds.positions import AlibiConfig, DenseConfig, RelativeConfig
from attnflow.bias.kinds.products import BilinearConfig, DotConfig, LowRankConfig

KINDS: Final[Mapping[str, type[BiasConfig]]] = {
    config.kind: config
    for config in (
        GuidanceConfig,
        BilinearConfig,
        DotConfig,
        KeyConfig,
        CumulativeConfig,
        LowRankConfig,
        DenseConfig,
        AlibiConfig,
        RelativeConfig,
    )
}


def config_from_dict(values: Mapping[str, object]) -> BiasConfig:
    """The config that `to_dict` described, of whatever kind; a custom one holds code, and cannot be read.

    Raises:
        ValueError: no such kind, unknown fields, or values out of range.
    """
    kind = str(values.get("kind"))
    if kind not in KINDS:
        raise ValueError(f"kind must be one of {', '.join(map(repr, KINDS))}, got {kind!r}")
    return KINDS[kind].from_dict(values)
