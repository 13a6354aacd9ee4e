"""Checks the inputs of a model call: which arguments hold a value per position, and which ids may replace others."""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, cast

import torch
from torch import Tensor, nn

from attnflow.models.arguments import special_ids
from attnflow.models.passes.processes import Processes
from attnflow.models.subject import DECODER, ENCODER, Subject

_WRITTEN = ("past", "cache", "state")  # words in the names of arguments that a forward writes into
LOSS_ARGUMENTS = ("labels", "shift_labels", "num_items_in_batch", "fused_lm_head")


@dataclass(frozen=True)
class StackEntry:
    """Where vectors enter a stack of layers and can be changed, however they were made."""

    layer: str  # the path of the layer that is called first
    width: int  # numbers per position
    scale: float  # their standard deviation
    axis: int  # the axis of the batch in the layer's first argument; that of positions follows it, or precedes it
    positions_first: bool  # whether positions come before the batch

    def arranged(self, rows: Tensor, axes: int) -> Tensor:
        """[batch, positions, width] rows in the layout of the layer's argument, broadcast over its other axes."""
        rows = rows.transpose(0, 1) if self.positions_first else rows
        return rows[(..., *[None] * (axes - self.axis - 3), slice(None))]


@dataclass(frozen=True)
class Slot:
    """A run of positions: of an input, or of what enters a stack of layers."""

    name: str | None  # the argument that holds their token ids [B, n] or vectors [B, n, d]; None of pixels, audio
    length: int  # number of positions n
    offset: int  # number of its first position when all slots are counted through (encoder, then decoder)
    entry: StackEntry | None = None  # where these positions enter a stack of layers; None of a model without one
    layers: frozenset[str] = frozenset()  # paths of the layers of the stack
    places: tuple[int, ...] = ()  # of the tokens that were passed, where virtual tokens or an image stand beside them

    @property
    def prefix(self) -> str:
        """The first word of the names of arguments that belong to these positions."""
        return "decoder_" if (self.name or "").startswith("decoder_") else ""

    @property
    def title(self) -> str:
        return self.name or f"what enters {self.entry.layer if self.entry else 'the model'}"


@dataclass(frozen=True)
class Variation:
    kwargs: Mapping[str, Any]
    noise: Mapping[int, Tensor]


@dataclass(frozen=True)
class Inputs:
    subject: Subject
    kwargs: dict[str, Any]  # what forward is called with
    slots: tuple[Slot, ...]  # one for a decoder or an encoder; encoder and decoder slots for an encoder-decoder
    batch: int  # number of sequences; 1 where the inputs have no batch axis
    batched: bool  # whether the inputs have a batch axis
    pool: Tensor  # token ids that may replace others
    group: int = 1  # how many neighbouring sequences the model makes of one that it is given: images of a pair
    processes: Processes | None = None  # that run the model together, as its parameters are sharded over them
    joins: bool = False  # whether these hold different parts, or values, of one activation
    unlike: str = ""  # the first module whose values differ between them although the inputs are equal

    @property
    def size(self) -> int:
        return sum(slot.length for slot in self.slots)

    @property
    def model(self) -> nn.Module:
        return self.subject.model

    @property
    def base(self) -> Variation:
        return Variation(self.kwargs, {})

    @property
    def layers(self) -> frozenset[str]:
        return frozenset[str]().union(*(slot.layers for slot in self.slots))

    @property
    def beside(self) -> dict[str, Tensor]:
        """Other inputs of the call with rows of their own: images, sounds, ids of another tower."""
        taken = {slot.name for slot in self.slots} | {"labels", "position_ids", "token_type_ids"}
        tensors = {name: value for name, value in self.kwargs.items() if isinstance(value, Tensor) and value.ndim > 1}
        rows = {name: value for name, value in tensors.items() if value.is_floating_point() or name.endswith("_ids")}
        return {name: value for name, value in rows.items() if name not in taken and not name.endswith("mask")}

    def padding_beside(self) -> dict[str, Tensor]:
        """Masks [rows, n] of other inputs [rows, n, ...] that hide some of them, by the first word of their names."""
        masks: dict[str, Tensor] = {}
        for name, value in self.beside.items():
            for kind in ("attention_mask", "mask", "padding_mask"):
                mask = self.kwargs.get(f"{name.partition('_')[0]}_{kind}")
                if isinstance(mask, Tensor) and mask.shape == value.shape[:2] and bool((mask == 0).any()):
                    masks[name] = mask
        return masks

    def argument(self, slot: Slot, name: str) -> Tensor | None:
        """An argument [.., batch, n] of the slot, else None; what is added to tokens is known of masks alone."""
        value = self.kwargs.get(slot.prefix + name)
        if value is None and slot.name is None and name == "attention_mask":  # of pixels or sounds
            size = self.batch, slot.length
            masks = (mask for key, mask in self.kwargs.items() if key.endswith("attention_mask"))
            value = next((mask for mask in masks if isinstance(mask, Tensor) and mask.shape == size), None)
        if not isinstance(value, Tensor) or value.ndim > (3 if name == "position_ids" else 2):
            return None
        rows = value.detach().cpu()[(None,) * (value.ndim == 1)]
        if name == "attention_mask" and rows.shape[-1] == len(slot.places) != slot.length:
            rows = rows.new_ones(*rows.shape[:-1], slot.length).index_copy_(-1, torch.tensor(slot.places), rows)
        fits = rows.shape[-1] == slot.length and rows.shape[-2] in (1, self.batch)
        return rows.expand(*rows.shape[:-2], self.batch, -1) if fits else None

    def real_in(self, slot: Slot) -> Tensor:
        """Which positions of a slot are not padding, bool [batch, n]; [1, n] without padding."""
        mask = self.argument(slot, "attention_mask")
        return torch.ones(1, slot.length, dtype=torch.bool) if mask is None or mask.all() else mask != 0

    @cached_property
    def real(self) -> Tensor:
        """Which positions of all slots are not padding, bool [batch, n]."""
        return torch.cat([self.real_in(slot).expand(self.batch, -1) for slot in self.slots], -1)

    def unplaced_padding(self) -> list[str]:
        words: list[str] = []
        for slot in self.slots:
            name = f"{slot.prefix}attention_mask"
            mask = self.kwargs.get(name)
            padded = isinstance(mask, Tensor) and mask.ndim == 2 and bool((mask == 0).any())
            if padded and self.argument(slot, "attention_mask") is None:
                where = f"its place among the {slot.length} positions of the layers is not known"
                words.append(f"the padding of {name}: {where}")
            if slot.name is not None:
                same = [name for name, mask in self.padding_beside().items() if mask.shape[1] == slot.length]
                words += [f"the padding of {name}: it is as long as {slot.name}; pass another length" for name in same]
        return words

    def hidden(self, generator: torch.Generator) -> dict[str, Tensor]:
        changed: dict[str, Tensor] = {}
        for name, mask in self.padding_beside().items():
            value = self.kwargs[name]
            if mask.shape[1] in {slot.length for slot in self.slots}:
                continue
            if value.is_floating_point():
                noise = torch.randn(value.shape, generator=generator, dtype=torch.float64) * float(value.std())
                other = value + noise.to(value)
            else:
                other = value.flatten()[torch.randperm(value.numel(), generator=generator)].view_as(value)
            changed[name] = where_chosen(mask == 0, other, value)
        return changed

    def values(self, slot: Slot) -> Tensor:
        tensor = cast(Tensor, self.kwargs[cast(str, slot.name)])
        return tensor if self.batched else tensor[None]

    def draw(self, generator: torch.Generator) -> Variation:
        """Another token id, or noise of its own scale, for every position; special tokens move as vectors alone."""
        drawn: dict[str, Tensor] = {}
        noise: dict[int, Tensor] = {}
        for slot in self.slots:
            if slot.entry is not None:
                shape = self.batch, slot.length, slot.entry.width
                noise[slot.offset] = torch.randn(shape, generator=generator, dtype=torch.float64) * slot.entry.scale
            if slot.name is None:
                continue
            values = self.values(slot)
            if values.is_floating_point():
                moved = torch.randn(values.shape, generator=generator, dtype=torch.float64)
                scale = float(values.detach().double().std(correction=0)) or 1.0
                drawn[slot.name] = values + (moved * scale).to(values)
                continue
            pool = self.pool.to(values)
            index = torch.randint(len(pool), values.shape, generator=generator).to(values.device)
            other = torch.where(pool[index] == values, pool[(index + 1) % len(pool)], pool[index])
            drawn[slot.name] = other if slot.entry is None else torch.where(torch.isin(values, pool), other, values)
        return Variation(drawn, noise)

    def changed(self, selected: Tensor, draw: Variation) -> Variation:
        """The call with the `selected` positions, bool [batch, n] over all slots, and other inputs from `draw`."""
        kwargs = self.kwargs | {name: value.to(self.kwargs[name].dtype) for name, value in draw.kwargs.items()}
        noise: dict[int, Tensor] = {}
        for slot in self.slots:
            chosen = selected[:, slot.offset : slot.offset + slot.length]
            if slot.offset in draw.noise:
                noise[slot.offset] = torch.where(chosen[:, :, None], draw.noise[slot.offset], 0.0)
            if slot.name is None:
                continue
            new = where_chosen(chosen, draw.kwargs[slot.name], self.values(slot))
            kwargs[slot.name] = new if self.batched else new[0]
        return Variation(kwargs, noise)

    def in_precision(self, dtype: torch.dtype | None) -> Inputs:
        if dtype is None:
            return self
        floating = {n: v for n, v in self.kwargs.items() if isinstance(v, Tensor) and v.is_floating_point()}
        return replace(self, kwargs=self.kwargs | {name: value.to(dtype) for name, value in floating.items()})

    def without_cache(self) -> Inputs:
        if self.subject.takes_use_cache and "use_cache" not in self.kwargs:
            return replace(self, kwargs={**self.kwargs, "use_cache": False})
        return self


def where_chosen(chosen: Tensor, new: Tensor, values: Tensor) -> Tensor:
    """The `values` [batch, n, ...], new ones where `chosen`, bool [batch, n]."""
    chosen = chosen.to(values.device).reshape(chosen.shape + (1,) * (values.ndim - 2))
    return torch.where(chosen, new.to(values), values)


def fresh(kwargs: Mapping[str, Any]) -> dict[str, Any]:
    return {name: _copied(value, any(word in name for word in _WRITTEN)) for name, value in kwargs.items()}


def _copied(value: Any, written: bool) -> Any:
    """A copy, of caches and of tensors that are `written` by the model; anything else itself."""
    if isinstance(value, Tensor):
        return value.clone() if written else value
    if type(value) in (tuple, list):
        return type(value)(_copied(item, written) for item in value)
    if not hasattr(value, "update") or isinstance(value, Mapping | nn.Module):
        return value
    try:
        return copy.deepcopy(value)
    except RuntimeError as error:
        raise ValueError(
            f"the {type(value).__name__} among the inputs cannot be copied, and passes must not write into it "
            f"({error}): make it without gradients (torch.no_grad())"
        ) from error


def read(subject: Subject, inputs: object) -> Inputs:
    """`inputs` as keyword arguments, with a slot for each argument that holds a value per position."""
    if subject.without_numbers:
        raise ValueError(f"{subject.kind} has parameters on the meta device: load its weights before an audit")
    kwargs = subject.named(inputs)
    for name, value in kwargs.items():
        if isinstance(value, Tensor) and value.is_meta:
            raise ValueError(f"{name} is on the meta device, which holds no numbers: pass it on the model's device")
        if isinstance(value, Tensor) and value.layout not in (torch.strided, torch.jagged):
            raise ValueError(
                f"{name} is sparse ({value.layout}), and positions are changed in dense tensors: pass {name}.to_dense()"
            )
    tensors = {name: _checked(subject, name, kwargs[name]) for name in _slot_names(subject, kwargs)}
    batched = all(tensor.ndim - int(tensor.is_floating_point()) > 1 for tensor in list(tensors.values())[:1])
    sizes = {name: len(tensor) if batched else 1 for name, tensor in tensors.items()}
    if len(set(sizes.values())) > 1:
        raise ValueError(f"expected inputs of one batch size, got {sizes}")
    slots: list[Slot] = []
    for name, tensor in tensors.items():
        length = tensor.shape[int(batched)]
        if length == 0 or sizes[name] == 0:
            raise ValueError(f"{name} is empty, {tuple(tensor.shape)}: expected at least one sequence of one position")
        slots.append(Slot(name, length, sum(slot.length for slot in slots)))
    ids = [tensor for tensor in tensors.values() if not tensor.is_floating_point()]
    pool = _pool(subject, ids) if ids else torch.arange(0)
    return Inputs(subject, kwargs, tuple(slots), next(iter(sizes.values()), 1), batched, pool)


def with_decoder_inputs(model: nn.Module, call: Mapping[str, Any]) -> dict[str, Any]:
    """The call with the decoder's inputs that an encoder-decoder makes of its labels, if it is given no others."""
    shifted = getattr(model, "prepare_decoder_input_ids_from_labels", None)
    if not callable(shifted) or call.get("labels") is None or any(call.get(name) is not None for name in DECODER):
        return dict(call)
    return {**call, "decoder_input_ids": shifted(labels=call["labels"])}


def _slot_names(subject: Subject, kwargs: Mapping[str, Any]) -> list[str]:
    encoder, decoder = ([name for name in names if kwargs.get(name) is not None] for names in (ENCODER, DECODER))
    halves = subject.encodes_and_decodes and any(hasattr(subject.model, name) for name in ("decoder", "get_decoder"))
    if halves and not decoder and DECODER[0] in subject.parameters:
        raise ValueError("an encoder-decoder needs decoder_input_ids beside input_ids: the audit covers both")
    if len(encoder) > 1 or len(decoder) > 1:
        raise ValueError(f"pass either ids or embeddings, got {encoder + decoder}")
    if encoder or decoder:
        return encoder + decoder
    tensors = [name for name in (*subject.parameters, *kwargs) if isinstance(kwargs.get(name), Tensor)]
    if not tensors:
        raise ValueError(f"expected a tensor of token ids or embeddings among the inputs, got {sorted(kwargs)}")
    return [] if subject.config is not None else tensors[:1]  # pixels or audio: positions are those of the layers


def _checked(subject: Subject, name: str, value: object) -> Tensor:
    """The value, if it holds ids in the vocabulary or vectors as wide as the embeddings."""
    if not isinstance(value, Tensor):
        raise TypeError(f"{name} must be a tensor, got {type(value).__name__}; use torch.tensor(...)")
    if value.dtype == torch.bool or value.is_complex():
        raise TypeError(f"{name} must hold token ids or floating-point vectors, got {value.dtype}")
    if value.is_floating_point() and name.endswith("_ids"):
        raise TypeError(f"{name} must hold integers, got {value.dtype}; pass {name}.long()")
    lowest = 2 if value.is_floating_point() else 1
    if not lowest <= value.ndim <= lowest + 1:
        what = "[batch, n, width]" if value.is_floating_point() else "[batch, n]"
        raise ValueError(f"{name} must have shape {what}, got {tuple(value.shape)}")
    table = subject.embedding
    if table is None or value.numel() == 0 or name not in (*ENCODER, *DECODER):
        return value
    if not value.is_floating_point():
        low, high = int(value.min()), int(value.max())
        if low < 0 or high >= table.num_embeddings:
            raise ValueError(f"{name} must lie in [0, {table.num_embeddings}), the vocabulary; got {low} to {high}")
    elif value.shape[-1] != table.embedding_dim:
        raise ValueError(
            f"{name} must hold vectors of width {table.embedding_dim}, got shape {tuple(value.shape)} of "
            f"{value.dtype}; token ids must be integers: pass tensor.long()"
        )
    return value


def _pool(subject: Subject, ids: Sequence[Tensor]) -> Tensor:
    """The ids that may replace others: no special tokens, which could change the mask."""
    table, config = subject.embedding, subject.text_config
    sizes = [None if table is None else table.num_embeddings, getattr(config, "vocab_size", None)]
    known = [size for size in sizes if isinstance(size, int) and size]
    size = min(known) if known else max(int(tensor.max()) for tensor in ids) + 1
    special = special_ids((subject.config, config), ("_token_id", "_token_index"))
    pool = torch.tensor([token for token in range(size) if token not in special], dtype=torch.int64)
    if len(pool) < 2:
        raise ValueError(f"expected two ordinary token ids to swap, got a vocabulary of {size}; pass embeddings")
    return pool
