"""Entries that a config.json leaves out because they are the defaults of its family."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, cast

from transformers import CONFIG_MAPPING


def complete_config(config: Mapping[str, object]) -> Mapping[str, object]:
    """The config with the defaults of its family filled in, also in its parts; the same one if nobody knows them.

    Released configs of models with several towers often name no more than what differs from these defaults.
    """
    kind = config.get("model_type")
    if not isinstance(kind, str) or kind not in CONFIG_MAPPING:
        return config
    try:
        return cast(Mapping[str, object], cast(Any, CONFIG_MAPPING[kind]).from_dict(dict(config)).to_dict())
    except (TypeError, ValueError, KeyError, AttributeError):  # entries that this family has never had
        return config
