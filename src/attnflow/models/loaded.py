"""A model with its tokenizer, as `load_model` returns it and every verb accepts it, and what it is called with."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, NamedTuple, cast

import torch
from torch import Tensor, nn

from attnflow.models.names import MODELS
from attnflow.models.offload import device_of

if TYPE_CHECKING:
    from transformers import PreTrainedModel
    from transformers.tokenization_utils_base import PreTrainedTokenizerBase

_WRAPPERS: Final = ("_orig_mod", "_checkpoint_wrapped_module", "_fsdp_wrapped_module")
Text = str | Sequence[int] | Tensor | Mapping[str, Tensor]
CACHES: Final = ("past_key_values", "cache_params", "cache")  # what forward and its outputs call a cache of past states


class Loaded(NamedTuple):
    """A model and its tokenizer, as `af.load_model` returns them; the tokenizer is None if not requested."""

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


def unwrapped(model: nn.Module) -> nn.Module:
    parallel = isinstance(model, nn.DataParallel | nn.parallel.DistributedDataParallel)
    names = [name for name in (*_WRAPPERS, *(["module"] if parallel else [])) if name in model._modules]
    return unwrapped(model.get_submodule(names[0])) if names else model


def own_name(path: str) -> str:
    """A module's path as it is without wrappers."""
    return ".".join(part for part in path.split(".") if part not in _WRAPPERS)


def tokenized(inputs: object, tokenizer: PreTrainedTokenizerBase | None) -> object:
    """Tokenize a text, and return other inputs unchanged; `ValueError` for a text without a tokenizer."""
    if not isinstance(inputs, str):
        return inputs
    if tokenizer is None:
        raise ValueError(
            "a text needs a tokenizer: pass what af.load_model returned in place of the model, token ids in place "
            "of the text, or tokenizer=... where a function has it"
        )
    named = dict(tokenizer(inputs, return_tensors="pt"))
    if not named["input_ids"].numel():
        raise ValueError(f"the text {inputs!r} has no tokens: pass a longer one")
    return named


def special_ids(configs: Iterable[object], suffixes: tuple[str, ...]) -> set[int]:
    ids: set[int] = set()
    pending = list(configs)
    for config in pending:
        for name, value in vars(config).items() if config is not None else ():
            if hasattr(value, "get_text_config"):
                pending.append(value)
            elif name.endswith(suffixes):
                values = cast("list[object]", value) if isinstance(value, list | tuple) else [value]
                ids.update(one for one in values if isinstance(one, int))
    return ids


def model_inputs(
    model: nn.Module, inputs: object, tokenizer: PreTrainedTokenizerBase | None, sequence: int
) -> dict[str, Tensor]:
    inputs = tokenized(inputs, tokenizer)
    if isinstance(inputs, Mapping):
        named = _named_tensors(cast("Mapping[str, object]", inputs))
        if "input_ids" not in named:
            raise ValueError(f"the inputs must hold input_ids, got {', '.join(named) or 'nothing'}")
        named["input_ids"] = _batched(named["input_ids"])
    else:
        named = {"input_ids": _batched(_tensor("inputs", inputs))}
        if len(named["input_ids"]) > 1:
            raise ValueError("token ids must be of one sequence: pass a batch as a mapping, with its attention_mask")
    table = embedding_table(model)
    size = None if table is None else table.num_embeddings
    largest = int(named["input_ids"].max())
    if size is not None and (largest >= size or int(named["input_ids"].min()) < 0):
        raise ValueError(f"token ids must lie in 0 to {size - 1}, the model's vocabulary, got up to {largest}")
    tokens = named["input_ids"].shape[1]
    limit = _positions(model, tokens)
    if limit is not None and tokens > limit:
        raise ValueError(f"the inputs have {tokens} tokens, and the model has positions for {limit}: shorten them")
    if not 0 <= sequence < len(named["input_ids"]):
        raise ValueError(f"sequence must be a number of the batch of {len(named['input_ids'])}, got {sequence}")
    device = device_of(model)
    return {name: value.to(device) for name, value in named.items()}


def any_inputs(model: nn.Module, inputs: object, tokenizer: PreTrainedTokenizerBase | None) -> dict[str, Tensor]:
    """Make the model's arguments like `model_inputs`, also from named inputs without token ids: sounds and images.

    A model of two halves needs the inputs of both, as its own guess would not be known to whoever names tokens.
    """
    if isinstance(inputs, Mapping) and "input_ids" not in inputs:
        device = device_of(model)
        named = {name: value.to(device) for name, value in _named_tensors(cast("Mapping[str, object]", inputs)).items()}
        if not named:
            raise ValueError("the inputs are empty: expected a text, token ids, or the model's named inputs")
    else:
        named = model_inputs(model, inputs, tokenizer, 0)
    halves = ("decoder_input_ids", "decoder_inputs_embeds")
    two = getattr(getattr(model, "config", None), "is_encoder_decoder", False) is True and accepts(model, halves[0])
    if two and not any(name in named for name in halves):
        raise ValueError("expected inputs for both halves of the model: pass a mapping with decoder_input_ids")
    return named


def _named_tensors(inputs: Mapping[str, object]) -> dict[str, Tensor]:
    """Make tensors of named inputs, without those that are None and an empty cache; `ValueError` for a filled one."""
    named = {str(name): value for name, value in inputs.items() if value is not None}
    for name in CACHES:
        cache = cast(Any, named.pop(name, ()))
        if cache.get_seq_length() if hasattr(cache, "get_seq_length") else len(cache):
            raise ValueError(
                f"{name} holds states of earlier positions, which are not read here: pass the whole sequence, without "
                "a cache"
            )
    tensors = {name: _tensor(name, value) for name, value in named.items()}
    for part in ("", "decoder_"):
        ids, mask = tensors.get(f"{part}input_ids"), tensors.get(f"{part}attention_mask")
        if ids is not None and mask is not None and ids.ndim == mask.ndim == 2 and ids.shape != mask.shape:
            raise ValueError(
                f"{part}input_ids are {list(ids.shape)}, their {part}attention_mask is {list(mask.shape)}: it needs "
                "one entry for each token"
            )
    return tensors


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


def token_texts(ids: Iterable[int], tokenizer: PreTrainedTokenizerBase | None) -> list[str]:
    """Decode every token by itself; without a tokenizer its id is its text."""
    return [str(token) if tokenizer is None else str(tokenizer.decode([token])) for token in ids]


def sequence_texts(ids: Iterable[int], tokenizer: PreTrainedTokenizerBase | None) -> list[str]:
    """Decode every token of a sequence with the space before it, so that joined they are the text.

    >>> "".join(sequence_texts([5, 6, 7], None))
    '5 6 7'
    """
    texts: list[str] = []
    before: list[int] = []
    for token in ids:
        (text,) = token_texts([token], tokenizer)
        if before and tokenizer is None:
            text = f" {text}"
        elif before and tokenizer is not None:  # many tokenizers put the space only between two tokens
            start, both = (str(tokenizer.decode(listed)) for listed in (before, [*before, token]))
            text = both.removeprefix(start) if both.startswith(start) else text
        texts.append(text)
        before = [token]
    return texts


def sparing(model: nn.Module) -> dict[str, object]:
    return {name: value for name, value in (("use_cache", False), ("logits_to_keep", 1)) if accepts(model, name)}


def accepts(model: nn.Module, name: str) -> bool:
    return takes(_unwrapped(model).forward, name)


def accepted(model: nn.Module, *names: str) -> str | None:
    modules = [model]
    for module in modules:
        parameters = inspect.signature(module.forward).parameters
        if (name := next((name for name in names if name in parameters), None)) is not None:
            return name
        if any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters.values()):
            modules += module.children()
    return None


def takes(function: Callable[..., object], name: str) -> bool:
    return name in inspect.signature(function).parameters


def embedding_table(model: nn.Module) -> nn.Embedding | None:
    """Return the table of token embeddings, if there is one."""
    getter = getattr(model, "get_input_embeddings", None)
    if not callable(getter):
        return next((module for module in model.modules() if isinstance(module, nn.Embedding)), None)
    with suppress(NotImplementedError, AttributeError):  # what getters of classes without a table raise
        module = getter()
        return module if isinstance(module, nn.Embedding) else None
    return None


def _positions(model: nn.Module, tokens: int) -> int | None:
    """How many positions the model has vectors for; None where it computes them, or its config allows the tokens."""
    config = getattr(_unwrapped(model), "config", None)
    stated = getattr(config.get_text_config(), "max_position_embeddings", None) if config is not None else None
    if not isinstance(stated, int) or tokens <= stated:
        return None
    sizes = (
        module.num_embeddings
        for name, module in model.named_modules()
        if type(module) is nn.Embedding and name.rpartition(".")[2] in ("position_embeddings", "wpe")
    )
    return min((size for size in sizes if size >= stated), default=None)  # a smaller one is that of an image's patches


def ordinary_tokens(model: PreTrainedModel, count: int) -> list[int]:
    """Return ids that are not special, since models replace, mask or count those."""
    special = special_ids((model.config, model.config.get_text_config()), ("_id", "_index"))
    tokens = [index for index in range(3, 1000 + count) if index not in special][:count]
    table = embedding_table(model)
    return tokens if table is None else [min(token, table.num_embeddings - 1 - at) for at, token in enumerate(tokens)]


def model_name(model: nn.Module) -> str:
    """Return the name that a model was loaded by, without local folders, or its class."""
    inner = _unwrapped(model)
    name = str(getattr(getattr(inner, "config", None), "_name_or_path", "") or type(inner).__name__)
    if not Path(name).is_absolute():
        return name
    for short, packaged in MODELS.items():
        found = packaged.find()
        if found is not None and Path(name) in (found, found.parent):  # a GGUF file is known by its folder
            return short
    return Path(name).name


def _unwrapped(model: nn.Module) -> nn.Module:
    from transformers import PreTrainedModel

    return next((module for module in model.modules() if isinstance(module, PreTrainedModel)), model)


def _tensor(name: str, value: object) -> Tensor:
    try:
        device = None if isinstance(value, Tensor) else "cpu"  # whatever the default device is
        return torch.as_tensor(value, device=device).clone()  # the caller may write to it before results read it again
    except (TypeError, ValueError, RuntimeError):  # RuntimeError: of no type that torch infers
        shown = " ".join(f"{value!r:.60}".split())
        raise TypeError(f"{name} must be a tensor or a list of numbers, got {shown}") from None


def _batched(ids: Tensor) -> Tensor:
    if ids.ndim not in (1, 2) or ids.numel() == 0:
        raise ValueError(f"token ids must be [tokens] or [batch, tokens] with at least one token, got {ids.shape}")
    if ids.is_floating_point() or ids.dtype == torch.bool:
        raise TypeError(f"expected a text or token ids, got a tensor of {ids.dtype}")
    return ids if ids.ndim == 2 else ids[None]
