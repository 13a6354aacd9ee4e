"""Turns a text, token ids or named inputs into arguments of a model."""

from __future__ import annotations

import inspect
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, cast

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.tokenization_utils_base import PreTrainedTokenizerBase

from attnflow.models.loaded import Loaded, special_ids, tokenized

Text = str | Sequence[int] | Tensor | Mapping[str, Tensor]


def model_inputs(
    model: nn.Module, inputs: object, tokenizer: PreTrainedTokenizerBase | None, sequence: int
) -> dict[str, Tensor]:
    """Make the model's keyword arguments, batched, on the device of its embeddings."""
    inputs = tokenized(inputs, tokenizer)
    if isinstance(inputs, Mapping):
        named = {str(name): torch.as_tensor(value) for name, value in cast(Mapping[str, Any], inputs).items()}
        if "input_ids" not in named:
            raise ValueError(f"the inputs must hold input_ids, got {', '.join(named) or 'nothing'}")
        named["input_ids"] = _batched(named["input_ids"])
    else:
        named = {"input_ids": _batched(torch.as_tensor(inputs))}
        if len(named["input_ids"]) > 1:
            raise ValueError("token ids must be of one sequence; pass a batch as a mapping, with its attention_mask")
    table = getattr(model, "get_input_embeddings", None)
    size = getattr(table() if callable(table) else None, "num_embeddings", None)
    largest = int(named["input_ids"].max())
    if size is not None and (largest >= size or int(named["input_ids"].min()) < 0):
        raise ValueError(f"token ids must lie in 0 to {size - 1}, the model's vocabulary; got up to {largest}")
    if not 0 <= sequence < len(named["input_ids"]):
        raise ValueError(f"sequence must be a number of the batch of {len(named['input_ids'])}, got {sequence}")
    device = next(model.parameters()).device
    return {name: value.to(device) for name, value in named.items()}


def text_inputs(loaded: Loaded, inputs: str | Sequence[int], limit: int | None = None) -> dict[str, Tensor]:
    """Make the model's arguments from the tokens and, as a second sequence, the tokens reversed.

    With two sequences an audit also sees what crosses a batch; both sides of an encoder-decoder read them. At most
    `limit` tokens are used, and fewer than two raise `ValueError`.
    """
    if isinstance(inputs, str):
        inputs = cast(Any, loaded.tokenizer)(inputs, truncation=limit is not None, max_length=limit)["input_ids"]
    ids = [int(token) for token in inputs][:limit]
    if len(ids) < 2:
        raise ValueError(f"expected at least 2 tokens, got {len(ids)}: nothing can flow")
    tokens = torch.tensor([ids, ids[::-1]])
    if getattr(loaded.model.config, "is_encoder_decoder", False):
        return {"input_ids": tokens, "decoder_input_ids": tokens[:, :-1]}  # an audit tells them by their lengths
    return {"input_ids": tokens}


def sparing(model: nn.Module) -> dict[str, object]:
    """Return options that avoid a cache and the logits of every token."""
    return {name: value for name, value in (("use_cache", False), ("logits_to_keep", 1)) if accepts(model, name)}


def accepts(model: nn.Module, name: str) -> bool:
    """Return whether the forward of a model, or of the one in a wrapper, names an argument."""
    return name in inspect.signature(_unwrapped(model).forward).parameters


def ordinary_tokens(model: PreTrainedModel, count: int) -> list[int]:
    """Return ids that are not special, since models replace, mask or count those."""
    special = special_ids((model.config, model.config.get_text_config()), ("_id", "_index"))
    tokens = [index for index in range(3, 1000 + count) if index not in special][:count]
    with suppress(NotImplementedError, AttributeError):
        last = int(cast(Any, model.get_input_embeddings()).num_embeddings) - 1
        tokens = [min(token, last - place) for place, token in enumerate(tokens)]
    return tokens


def model_name(model: nn.Module) -> str:
    """Return the name that a model was loaded by, without local folders, or its class."""
    inner = _unwrapped(model)
    name = str(getattr(getattr(inner, "config", None), "_name_or_path", "") or type(inner).__name__)
    return Path(name).name if Path(name).is_absolute() else name


def _unwrapped(model: nn.Module) -> nn.Module:
    return next((module for module in model.modules() if isinstance(module, PreTrainedModel)), model)


def _batched(ids: Tensor) -> Tensor:
    if ids.is_floating_point() or ids.dtype == torch.bool:
        raise TypeError(f"expected a text or token ids, got a tensor of {ids.dtype}")
    if ids.ndim not in (1, 2) or ids.numel() == 0:
        raise ValueError(f"token ids must be [tokens] or [batch, tokens] with at least one token, got {ids.shape}")
    return ids if ids.ndim == 2 else ids[None]
