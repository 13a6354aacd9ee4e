"""The attention layers of a checkpoint, whose weights are read when they are asked for."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, cast

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
        complete = _with_defaults(config)
        if complete is None:
            raise
        return find(weights.shapes, complete, weights.stated)


def _with_defaults(config: Mapping[str, object]) -> Mapping[str, object] | None:
    """The config with the defaults of its family filled in, also in its parts; None if nobody knows them.

    Released configs of models with several towers often name no more than what differs from these defaults.
    """
    try:
        from transformers import CONFIG_MAPPING
    except ImportError:
        return None
    kind = config.get("model_type")
    if not isinstance(kind, str) or kind not in CONFIG_MAPPING:
        return None
    try:
        return cast(Mapping[str, object], cast(Any, CONFIG_MAPPING[kind]).from_dict(dict(config)).to_dict())
    except (TypeError, ValueError, KeyError, AttributeError):  # entries that this family has never had
        return None
