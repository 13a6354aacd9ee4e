"""Readers of a store that a decoder gets: after which layers, of which widths, saved in a folder, taken out again."""

from __future__ import annotations

import os
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Final

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from attnflow._core.checks import integer, preview
from attnflow._core.errors import UnsupportedArchitecture
from attnflow.knowledge.hf.attached import Attached
from attnflow.knowledge.hf.store_reader import (
    CHILD,
    POOL,
    PooledValues,
    StoreReader,
    begin_before,
    pool_before,
    pooled_layers,
    read_after,
    store_readers,
)
from attnflow.knowledge.layered import reads_entries
from attnflow.knowledge.retrieval import Retrieval
from attnflow.knowledge.source import EntrySource
from attnflow.knowledge.store import Store
from attnflow.models.addons import Addon, read_addon, save_addon
from attnflow.models.interception import (
    AttentionCall,
    Output,
    Proceed,
    base_implementation,
    check_implementation,
    intercept,
)
from attnflow.models.loaded import ordinary_tokens
from attnflow.models.sites import Stack, models_around, stack_of
from attnflow.models.trial import DoesNotRun, read, trial
from attnflow.models.watching import calls_of

_SHARE: Final = 2 / 3  # of the layers, above which readers stand by default
_KIND: Final = "reader"  # of a saved add-on


def encoder_of(store: Store) -> str:
    """Return the encoder that made a store's entries, "" if unknown; a ValueError for several."""
    encoders = store.stats().encoders
    if len(encoders) > 1:
        raise ValueError(
            f"the entries of {store.uri} were made by {len(encoders)} encoders ({preview(encoders)}), and their scores "
            f"do not compare: build a store of their texts by one encoder"
        )
    return next(iter(encoders), "")


class AddedReaders(Attached):
    """A model to which readers of a store were added."""

    def __init__(
        self,
        model: nn.Module,
        store: Store,
        retrieval: Retrieval | None,
        folder: str | os.PathLike[str] | None,
        layers: Sequence[int] | None,
        key_dim: int,
        num_heads: int,
    ) -> None:
        if not len(store):
            raise ValueError(f"{store.uri} is empty: there is nothing to read; insert entries first")
        source, self.encoder = EntrySource(store), encoder_of(store)
        if reads_entries(model):
            raise ValueError(
                f"{type(model).__name__} reads entries: remove what was attached, or leave out reader and layers"
            )
        stack = stack_of(model)
        saved = None if folder is None else _saved(folder, stack, store)
        if saved is not None:
            if layers is not None:
                raise ValueError("a saved reader has its own layers: give reader or layers, one of them")
            layers, key_dim, num_heads = (saved.config[name] for name in ("layers", "key_dim", "num_heads"))
        chosen = checked_layers(layers, stack)
        pooled = pooled_layers(list(stack.attention), chosen[0])
        around = models_around(list(stack.attention.values()))
        name = base_implementation(around[0].config)
        check_implementation(around[0], name, "the model's attention implementation", "reader")
        widths = measured(stack, sorted({*pooled, *chosen}))
        pool = PooledValues(pooled, sum(widths[number][1] for number in pooled), chosen[-1])
        added = [
            _like(
                stack.attention[number].module, StoreReader(number, widths[number][0], pool, key_dim, num_heads, source)
            )
            for number in chosen
        ]
        if saved is not None:
            saved.fill(_tensors_of(added))
        modules = {number: stack.attention[number].module for number in {*pooled, *chosen}}
        pooling = {modules[number]: partial(pool_before, number) for number in pooled}
        self._interception = intercept(around, pooling, role="pool")
        self._children = [(modules[number], POOL) for number in pooled] + [
            (modules[number], CHILD) for number in chosen
        ]
        for (module, child), one in zip(self._children, [*[pool] * len(pooled), *added], strict=True):
            module.add_module(child, one)
        self._hooks: list[RemovableHandle] = [
            stack.layers[pooled[0]].register_forward_pre_hook(partial(begin_before, _path(stack, pooled[0])))
        ]
        for number in chosen:
            self._hooks.append(stack.layers[number].register_forward_hook(partial(read_after, _path(stack, number))))

        self.source = source
        super().__init__(model, store, retrieval)

    def save(self, folder: str | os.PathLike[str]) -> Path:
        """Write the readers to a folder, replacing earlier ones, and return it."""
        saved = store_readers(self.model)
        first = saved[0].attention
        config = {
            "encoder": self.encoder,
            "entry_dim": first.entry_dim,
            "layers": [reader.layer for reader in saved],
            "key_dim": first.key_dim,
            "num_heads": first.num_heads,
        }
        return save_addon(folder, _KIND, _tensors_of(saved), config, stack_of(self.model).identity(CHILD))

    def _restore(self) -> None:
        self._interception.remove(keep_changes=True)
        for hook in self._hooks:
            hook.remove()
        for module, child in self._children:
            delattr(module, child)
        super()._restore()


def _like(module: nn.Module, reader: StoreReader) -> StoreReader:
    """Match a reader to an attention module: device, training mode, and at least float32."""
    parameter = next((one for one in module.parameters() if one.is_floating_point()), None)
    if parameter is not None:  # half precision is too coarse to learn in
        reader.to(parameter.device, torch.promote_types(parameter.dtype, torch.float32))
    return reader.train(module.training)


def _path(stack: Stack, number: int) -> str:
    return stack.attention[number].name.removeprefix(f"{stack.path}.{number}").strip(".")


def checked_layers(layers: Sequence[int] | None, stack: Stack) -> list[int]:
    """Return the layers that get a reader, by default every second one of the last third, without the last."""
    number, able = len(stack.layers), sorted(stack.attention)
    if layers is None:
        few = [layer for layer in able if layer >= int(number * _SHARE)] or able[-1:]
        return few[:-1:2] or few
    if isinstance(layers, str) or not layers:
        raise ValueError(f"layers must list numbers of layers, 0 to {number - 1}, got {layers!r}")
    chosen = [integer("layer", one, 0, number - 1) for one in layers]
    if len(set(chosen)) != len(chosen):
        raise ValueError(f"layers must name each layer once, got {chosen}")
    without = [layer for layer in chosen if layer not in stack.attention]
    if without:
        raise UnsupportedArchitecture(f"layers {without} have no self-attention that a reader could ask by: {able} do")
    return sorted(chosen)


def measured(stack: Stack, chosen: Sequence[int]) -> dict[int, tuple[int, int]]:
    """Run two tokens to measure the token width and the value width (without repeated heads) of each layer."""
    sites = {stack.attention[number]: number for number in chosen}
    names = {site.module: number for site, number in sites.items()}
    model = models_around(list(stack.attention.values()))[0]
    values: dict[int, int] = {}

    def look(call: AttentionCall, proceed: Proceed) -> Output:
        output, weights = proceed(call)
        values[names[call.module]] = call.key.shape[1] * output.shape[-1]
        return output, weights

    try:
        # FlexAttention warns where it is not compiled, and a trial compiles nothing
        other = "sdpa" if base_implementation(model.config) == "flex_attention" else None
        with trial(model, dict.fromkeys(sites, look), implementation=other):
            layers = {number: stack.layers[number] for number in chosen}
            calls = calls_of(layers, lambda: read(model, [ordinary_tokens(model, 2)]))
    except DoesNotRun as error:
        raise UnsupportedArchitecture(
            f"{type(model).__name__} does not run on two token ids, by which a reader sees its layers: {error.why}"
        ) from error
    returned = {call.name: call.output[0] if isinstance(call.output, tuple) else call.output for call in calls}
    result: dict[int, tuple[int, int]] = {}
    for number in chosen:
        hidden = returned.get(number)
        if number not in values or not isinstance(hidden, Tensor) or hidden.shape[:2] != (1, 2) or hidden.ndim != 3:
            raise UnsupportedArchitecture(
                f"layer {number} ({type(stack.layers[number]).__name__}) does not return tokens [batch, tokens, width] "
                "to which a reader could add"
            )
        result[number] = hidden.shape[-1], values[number]
    return result


def _tensors_of(readers: Sequence[StoreReader]) -> dict[str, Tensor]:
    return {f"layers.{one.layer}.{name}": tensor for one in readers for name, tensor in one.state_dict().items()}


def _saved(folder: str | os.PathLike[str], stack: Stack, store: Store) -> Addon:
    """Load saved readers; a WrongBase for another model, a ValueError for a store of another width or encoder."""
    saved = read_addon(folder, _KIND)
    saved.check_base(stack.identity(CHILD))
    width, encoder, here = saved.config["entry_dim"], saved.config["encoder"], encoder_of(store)
    if store.dim != width:
        raise ValueError(f"the reader reads entries of width {width}, those of {store.uri} have {store.dim}")
    if here != encoder:
        raise ValueError(
            f"the reader was made for entries by {encoder or 'an encoder without a name'}, those of {store.uri} are by "
            f"{here or 'an encoder without a name'}: build a store of the same texts by the first"
        )
    return saved
