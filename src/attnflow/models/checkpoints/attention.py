"""The attention layers of a checkpoint, whose weights are read when they are asked for."""

from __future__ import annotations

from collections.abc import Mapping

from attnflow._core.checks import preview
from attnflow._core.errors import UnsupportedArchitecture
from attnflow.models.attention import AttentionLayer
from attnflow.models.checkpoints.weights import Weights
from attnflow.models.families.find import Place, find
from attnflow.models.families.heads import UnknownHeads
from attnflow.models.families.table import is_query_or_key


def stored_layers(weights: Weights, config: Mapping[str, object] | None = None) -> list[AttentionLayer]:
    """Every attention module of a checkpoint, or of what else `open_weights` opened, in the order of its layers.

    Args:
        weights: the checkpoint.
        config: entries that replace those of its config.json.

    Raises:
        UnsupportedArchitecture: no queries and keys are known, they do not fit the config, or they are quantised in a
            format that is not read.
    """
    packed = sorted(name for name in weights.packed if is_query_or_key(name))
    if packed:
        raise UnsupportedArchitecture(
            f"{weights.name}: the weights are quantised in a format that is not read ({preview(packed, 2)}); GGUF and "
            "8-bit floats are"
        )
    try:
        places = _places(weights, {**weights.config, **(config or {})})
    except UnsupportedArchitecture as error:
        raise UnsupportedArchitecture(f"{weights.name}: {error}") from error
    return [AttentionLayer.at(place, weights.read) for place in places]


def _places(weights: Weights, config: Mapping[str, object]) -> tuple[Place, ...]:
    try:
        return find(weights.shapes, config, weights.stated)
    except UnknownHeads:
        try:
            from attnflow.models.config_defaults import complete_config
        except ImportError:  # without transformers nobody knows them
            pass
        else:
            return find(weights.shapes, complete_config(config), weights.stated)
        raise
