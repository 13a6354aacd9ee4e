"""What a model is called with: which inputs can be perturbed, and the same call with some of them changed."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import Tensor, nn

from attnflow._core.errors import UnsupportedArchitecture
from attnflow.models.loaded import tokenized

_ENCODER = ("input_ids", "inputs_embeds")
_DECODER = ("decoder_input_ids", "decoder_inputs_embeds")


@dataclass(frozen=True)
class Slot:
    """One input that holds a value per position: token ids [B, n] or vectors [B, n, d].

    Attributes:
        name: keyword of the model's forward.
        length: number of positions n.
        offset: number of its first position when all slots are counted through (encoder, then decoder).
    """

    name: str
    length: int
    offset: int


@dataclass(frozen=True)
class Inputs:
    """A call of the model: keyword arguments, and the slots among them.

    Attributes:
        kwargs: what forward is called with.
        slots: one for a decoder or an encoder; encoder and decoder slots for an encoder-decoder.
        batch: number of sequences; 1 where the inputs have no batch axis.
        batched: whether the inputs have a batch axis.
        pool: token ids that may replace others.
    """

    kwargs: dict[str, Any]
    slots: tuple[Slot, ...]
    batch: int
    batched: bool
    pool: Tensor

    @property
    def size(self) -> int:
        """Number of positions of all slots together."""
        return sum(slot.length for slot in self.slots)

    def values(self, slot: Slot) -> Tensor:
        """The slot's tensor with a batch axis."""
        tensor = cast(Tensor, self.kwargs[slot.name])
        return tensor if self.batched else tensor[None]

    def draw(self, generator: torch.Generator) -> dict[str, Tensor]:
        """Other values for every position: another token id, or a vector moved by noise of the input's own scale."""
        drawn: dict[str, Tensor] = {}
        for slot in self.slots:
            values = self.values(slot)
            if values.is_floating_point():
                noise = torch.randn(values.shape, generator=generator, dtype=torch.float64)
                scale = float(values.detach().double().std(correction=0)) or 1.0
                drawn[slot.name] = values + (noise * scale).to(values)
                continue
            index = torch.randint(len(self.pool), values.shape, generator=generator)
            pool = self.pool.to(values)
            fresh, following = pool[index.to(values.device)], pool[(index.to(values.device) + 1) % len(pool)]
            drawn[slot.name] = torch.where(fresh == values, following, fresh)
        return drawn

    def changed(self, selected: Tensor, drawn: Mapping[str, Tensor]) -> dict[str, Any]:
        """The keyword arguments with the `selected` positions (bool [B, n] over all slots) replaced by `drawn` ones."""
        kwargs = dict(self.kwargs)
        for slot in self.slots:
            values = self.values(slot)
            choose = selected[:, slot.offset : slot.offset + slot.length].to(values.device)
            choose = choose.reshape(choose.shape + (1,) * (values.ndim - 2))
            new = torch.where(choose, drawn[slot.name].to(values), values)
            kwargs[slot.name] = new if self.batched else new[0]
        return kwargs

    def in_precision(self, dtype: torch.dtype | None) -> Inputs:
        """The same call with floating-point tensors in `dtype`."""
        if dtype is None:
            return self
        cast_kwargs = {
            name: value.to(dtype) if isinstance(value, Tensor) and value.is_floating_point() else value
            for name, value in self.kwargs.items()
        }
        return Inputs(cast_kwargs, self.slots, self.batch, self.batched, self.pool)


def read(
    model: nn.Module, inputs: str | Sequence[int] | Tensor | Mapping[str, Any], tokenizer: Any | None = None
) -> Inputs:
    """`inputs` as keyword arguments with their slots.

    Raises:
        TypeError: neither a mapping, nor token ids, nor a text; or a slot is no tensor.
        ValueError: a text without a tokenizer, no slot, an empty sequence, an empty batch, or sequences of different
            batch sizes.
    """
    inputs = cast("Sequence[int] | Tensor | Mapping[str, Any]", tokenized(inputs, tokenizer))
    if isinstance(inputs, Sequence):
        inputs = torch.atleast_2d(torch.as_tensor(inputs))
    if isinstance(inputs, Tensor):
        kwargs: dict[str, Any] = {_first_name(model, inputs): inputs}
    elif isinstance(inputs, Mapping):  # pyright: ignore[reportUnnecessaryIsInstance]
        kwargs = dict(inputs)
    else:
        raise TypeError(
            "expected a text, token ids or a dict of keyword arguments for the model's forward, got "
            f"{type(inputs).__name__}"
        )
    names = _slot_names(model, kwargs)
    tensors = [_checked(name, kwargs[name]) for name in names]
    batched = tensors[0].ndim - int(tensors[0].is_floating_point()) > 1
    sizes = {name: len(tensor) if batched else 1 for name, tensor in zip(names, tensors, strict=True)}
    if len(set(sizes.values())) > 1:
        raise ValueError(f"expected inputs of one batch size, got {sizes}")
    slots: list[Slot] = []
    for name, tensor in zip(names, tensors, strict=True):
        length = tensor.shape[int(batched)]
        if length == 0 or sizes[name] == 0:
            raise ValueError(
                f"{name} is empty: expected at least one sequence of one position, got {tuple(tensor.shape)}"
            )
        slots.append(Slot(name, length, sum(slot.length for slot in slots)))
    if len({slot.length for slot in slots}) < len(slots):
        raise ValueError(
            f"encoder and decoder sequences both have length {slots[0].length}; pass different lengths, so that the "
            "audit can tell which of them an output of the model belongs to"
        )
    pool = torch.arange(0) if all(t.is_floating_point() for t in tensors) else _pool(model, tensors)
    return Inputs(kwargs, tuple(slots), sizes[names[0]], batched, pool)


def config_of(model: nn.Module) -> Any:
    """The configuration that describes the text model; None if there is none."""
    config = getattr(model, "config", None)
    return getattr(config, "text_config", None) or config


def _first_name(model: nn.Module, tensor: Tensor) -> str:
    parameters = _parameters(model)
    usual = "inputs_embeds" if tensor.is_floating_point() else "input_ids"
    if usual in parameters or not parameters:
        return usual
    return parameters[0]


def _parameters(model: nn.Module) -> list[str]:
    kinds = (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)
    return [name for name, p in inspect.signature(model.forward).parameters.items() if p.kind in kinds]


def accepts(function: Callable[..., object], name: str) -> bool:
    """Whether `function` has a parameter of that name."""
    return name in inspect.signature(function).parameters


def _slot_names(model: nn.Module, kwargs: Mapping[str, Any]) -> list[str]:
    encoder = [name for name in _ENCODER if kwargs.get(name) is not None]
    decoder = [name for name in _DECODER if kwargs.get(name) is not None]
    config = getattr(model, "config", None)
    if getattr(config, "is_encoder_decoder", False) and hasattr(model, "decoder") | hasattr(model, "get_decoder"):
        needs = accepts(model.forward, "decoder_input_ids")
        if needs and not decoder:
            raise ValueError("an encoder-decoder needs decoder_input_ids beside input_ids: the audit covers both")
    if len(encoder) > 1 or len(decoder) > 1:
        raise ValueError(f"pass either ids or embeddings, got {encoder + decoder}")
    if encoder or decoder:
        return encoder + decoder
    for name in (*_parameters(model), *kwargs):
        if isinstance(kwargs.get(name), Tensor):
            return [name]
    raise ValueError(f"expected a tensor of token ids or embeddings among the inputs, got {sorted(kwargs)}")


def _checked(name: str, value: object) -> Tensor:
    if not isinstance(value, Tensor):
        raise TypeError(f"{name} must be a tensor, got {type(value).__name__}; use torch.tensor(...)")
    if value.dtype == torch.bool or value.is_complex():
        raise TypeError(f"{name} must hold token ids or floating-point vectors, got {value.dtype}")
    lowest = 2 if value.is_floating_point() else 1
    if not lowest <= value.ndim <= lowest + 1:
        what = "[batch, n, width]" if value.is_floating_point() else "[batch, n]"
        raise ValueError(f"{name} must have shape {what}, got {tuple(value.shape)}")
    return value


def _pool(model: nn.Module, tensors: Sequence[Tensor]) -> Tensor:
    """Ids that may replace others: the vocabulary without special tokens, whose meaning could change the mask."""
    ids = [tensor for tensor in tensors if not tensor.is_floating_point()]
    size = min([module.num_embeddings for module in (_embedding(model),) if module is not None] or [0])
    config = config_of(model)
    named = getattr(config, "vocab_size", None)
    size = min(size, named) if isinstance(named, int) and size else size or named or 0
    if size == 0:
        size = max(int(tensor.max()) for tensor in ids if tensor.numel()) + 1
    special: set[int] = set()
    for source in (getattr(model, "config", None), config):
        for name, value in vars(source).items() if source is not None else ():
            if name.endswith(("_token_id", "_token_index")):
                values = cast(list[object], value) if isinstance(value, list | tuple) else [value]
                special.update(v for v in values if isinstance(v, int))
    pool = torch.tensor([token for token in range(size) if token not in special], dtype=torch.int64)
    if len(pool) < 2:
        raise ValueError(
            f"expected at least two ordinary token ids to swap, got a vocabulary of {size}; pass embeddings"
        )
    return pool


def _embedding(model: nn.Module) -> nn.Embedding | None:
    """The table of token embeddings."""
    getter = getattr(model, "get_input_embeddings", None)
    if callable(getter):
        try:
            module = getter()
        except NotImplementedError:
            module = None
        if isinstance(module, nn.Embedding):
            return module
    return next((module for module in model.modules() if isinstance(module, nn.Embedding)), None)


def embedding_modules(model: nn.Module) -> list[nn.Module]:
    """The modules that turn token ids into vectors: several where encoder and decoder share one table.

    Raises:
        UnsupportedArchitecture: there is none.
    """
    getter = getattr(model, "get_input_embeddings", None)
    module = getter() if callable(getter) else _embedding(model)
    if not isinstance(module, nn.Module):
        raise UnsupportedArchitecture(
            f"{type(model).__name__} has no embedding table to start from: pass inputs_embeds, or use mode='perturb'"
        )
    table = getattr(module, "weight", None)
    tied = [m for m in model.modules() if isinstance(m, nn.Embedding) and m is not module and m.weight is table]
    return [module, *tied]
