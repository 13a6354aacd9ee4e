"""A model with its tokenizer, as `load_model` returns it and every verb accepts it."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING, NamedTuple, cast

from torch import nn

if TYPE_CHECKING:
    from transformers import PreTrainedModel
    from transformers.tokenization_utils_base import PreTrainedTokenizerBase


class Loaded(NamedTuple):
    """A model and its tokenizer, which is None if it was not asked for."""

    model: PreTrainedModel
    tokenizer: PreTrainedTokenizerBase | None


def split(model: nn.Module | Loaded) -> tuple[nn.Module, PreTrainedTokenizerBase | None]:
    """Split a module or a `Loaded` into model and tokenizer (None for a module); else `TypeError`."""
    if isinstance(model, Loaded):
        return model
    if not isinstance(cast(object, model), nn.Module):
        raise TypeError(
            f"expected a torch module or what af.load_model returns, got {type(model).__name__}; "
            "load a model by its name or folder with af.load_model(...)"
        )
    return model, None


def tokenized(inputs: object, tokenizer: PreTrainedTokenizerBase | None) -> object:
    """Tokenize a text, and return other inputs unchanged; `ValueError` for a text without a tokenizer."""
    if not isinstance(inputs, str):
        return inputs
    if tokenizer is None:
        raise ValueError(
            "a text needs a tokenizer: pass what af.load_model returned in place of the model, or token ids in place "
            "of the text; a function that takes tokenizer=... takes one there, too"
        )
    return dict(tokenizer(inputs, return_tensors="pt"))


def special_ids(configs: Iterable[object], suffixes: tuple[str, ...]) -> set[int]:
    """Collect the ids that configurations hold under names with these endings."""
    ids: set[int] = set()
    for config in configs:
        for name, value in vars(config).items() if config is not None else ():
            if name.endswith(suffixes):
                values = cast("list[object]", value) if isinstance(value, list | tuple) else [value]
                ids.update(one for one in values if isinstance(one, int))
    return ids
