"""The masks of models that packages ship, to compare a design with: by their names alone, never by a path."""

from __future__ import annotations

from typing import Final

from attnflow.masks.catalogue import causal, full
from attnflow.models.packages import MODELS
from attnflow.report.live.design import Layer

_MOST: Final = 512  # positions: a forward pass of so many tokens takes seconds
_CHARACTERS: Final = 12  # of text for each token that is wanted


def model_names() -> list[str]:
    """The models whose packages are installed."""
    return [name for name, package in MODELS.items() if package.find() is not None]


def own_mask(name: str, size: int, layer: int) -> Layer:
    """What a layer of a model may read, as the model declares it for a text of so many tokens.

    Raises:
        ValueError: no such model is installed, or it does not read so many tokens, or has no such layer.

    Cost: reading the model, and one forward pass.
    """
    if name not in model_names():
        raise ValueError(
            f"expected one of the installed models ({', '.join(model_names()) or 'none'}), got {name!r}; for the masks "
            "of another one run `attnflow studio MODEL`"
        )
    from attnflow.audit.declared import declared_order
    from attnflow.audit.inputs import config_of, text_inputs
    from attnflow.models import load_model, sample_text

    loaded = load_model(name)
    most = min(_MOST, getattr(config_of(loaded.model), "max_position_embeddings", _MOST))
    if not 2 <= size <= most:
        raise ValueError(f"{name} is asked for its mask of 2 to {most} positions, got {size}")
    text = " ".join(sample_text(characters=_CHARACTERS * size).split())
    flow = declared_order(loaded, text_inputs(loaded, text, size))
    if flow.num_layers is not None and layer >= flow.num_layers:
        raise ValueError(f"{name} has {flow.num_layers} layers, got layer {layer + 1}")
    mask = flow.masks[layer if flow.num_layers is not None else 0]
    named = next((each for each in (causal(size), full(size)) if each == mask), mask)  # short enough for a link
    where = f", layer {layer + 1}" if flow.num_layers is not None else ""
    return Layer(named.to_dict(), (), mask, f"{name}, its own mask{where}")
