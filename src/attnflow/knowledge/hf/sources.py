"""Where the entries come from that the readers of a model read, and how the model gets and loses them."""

from __future__ import annotations

import os
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any, cast

import torch
from jaxtyping import Float
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from attnflow._core.checks import Indices
from attnflow.knowledge.base import LayeredKnowledge
from attnflow.knowledge.hf.modular import ModularModel, ModularReader
from attnflow.knowledge.hf.pooled_values import POOL, PooledValues, begin_before, pool_before, pooled_layers
from attnflow.knowledge.hf.saved_reader import SavedReader, check_store, encoder_of
from attnflow.knowledge.hf.store_reader import (
    CHILD,
    FollowedStore,
    StoreReader,
    checked_layers,
    measured,
    read_after,
    store_readers,
)
from attnflow.knowledge.hf.sync import layer_thresholds, load_entries
from attnflow.knowledge.index.arguments import Vectors
from attnflow.knowledge.layered import reads_entries
from attnflow.knowledge.memory_layer.source import StoredKnowledge
from attnflow.knowledge.store import Store
from attnflow.models.interception import base_implementation, check_implementation, intercept
from attnflow.models.layers import Stack, stack_of
from attnflow.models.sites import models_around


class Searched(StoredKnowledge):
    """A store that a modular model searches."""

    def __init__(self, modular: ModularModel, store: Store, write_thresholds: bool) -> None:
        width = modular.config.entry_dim
        if modular.config.threshold == "per_entry":
            raise ValueError(
                "threshold='per_entry' belongs to rows of the model's own base: entries of a store need 'mlp' or "
                "'coordinate'"
            )
        if store.dim != width:
            raise ValueError(f"the model's entries have width {width}, those of the store {store.dim}")
        layers = [module for module in modular.modules() if isinstance(module, ModularReader)]

        def thresholds(entries: Float[Tensor, "entries entry_dim"]) -> Float[Tensor, "entries columns"]:
            moved = entries.to(modular.knowledge.entries)
            return torch.cat([layer.threshold_columns(moved) for layer in layers], dim=1).cpu()

        super().__init__(store, thresholds)
        if write_thresholds:
            self.write_thresholds()
        elif len(stale := self.stale()):
            raise ValueError(
                f"the stored thresholds of {len(stale):,} of {len(store):,} entries are not this model's: "
                "attach(model, store, write_thresholds=True) computes them anew"
            )
        self._modular, self._before = modular, modular.source
        modular.source = self

    def insert(
        self,
        embeddings: Vectors,
        *,
        layers: Sequence[int] | None = None,
        experts: Sequence[int | None] | None = None,
        **columns: Any,
    ) -> Tensor:
        """`Store.insert`."""
        if layers is not None or experts is not None:
            raise ValueError("all layers of a modular model read all entries: leave layers and experts out")
        return super().insert(embeddings, **columns)

    @property
    def latest(self) -> bool:
        """Whether the model reads this one now."""
        return self._modular.source is self

    def put_back(self) -> None:
        """Let the model read what it read before."""
        self._modular.source = self._before


class Copied:
    """A store whose entries a converted model holds, as they are at each forward pass."""

    def __init__(self, model: nn.Module, store: Store) -> None:
        self.store, self._model, self._base = store, model, cast(LayeredKnowledge, model.get_submodule("knowledge"))
        base = self._base
        self._before = (base.entries, base.ids, base.counts.clone(), base.experts)
        base.entries = nn.Parameter(base.entries.detach().clone(), requires_grad=base.entries.requires_grad)
        try:
            self._load()
        except BaseException:
            base.put(*self._before)
            raise
        copies_of(base).append(self)
        self._hook = model.register_forward_pre_hook(self._follow)

    def insert(
        self,
        embeddings: Vectors,
        *,
        layers: Sequence[int] | None = None,
        experts: Sequence[int | None] | None = None,
        **columns: Any,
    ) -> Tensor:
        """`Store.insert`."""
        if layers is None:
            raise ValueError("each entry of a converted model belongs to one layer: give layers, one for each entry")
        thresholds = layer_thresholds(layers, self._base.num_layers, self._base.checked_experts(layers, experts))
        return self.store.insert(embeddings=embeddings, thresholds=thresholds, **columns)

    def upsert(self, ids: Indices, embeddings: Vectors, **columns: Any) -> None:
        """`Store.upsert`."""
        self.store.upsert(ids=ids, embeddings=embeddings, **columns)  # which keeps the layers of entries that exist

    @property
    def latest(self) -> bool:
        """Whether the model reads this one now."""
        return copies_of(self._base)[-1] is self

    def put_back(self) -> None:
        """Let the model read what it read before."""
        copies_of(self._base).pop().stop()
        self._base.put(*self._before)

    def stop(self) -> None:
        """Follow the store no longer."""
        self._hook.remove()

    def _load(self) -> None:
        self._revision = self.store.revision
        load_entries(self._model, self.store)

    def _follow(self, _: nn.Module, __: object) -> None:
        if self.latest and self._revision != self.store.revision:
            self._load()


class Exchanged(FollowedStore):
    """A store that the readers of a model read instead of another one."""

    def __init__(self, model: nn.Module, store: Store) -> None:
        self._readers = store_readers(model)
        self._before = self._readers[0].source
        check_store(store, self._readers[0].attention.entry_dim, self._before.encoder)
        super().__init__(store, self._before.encoder)
        self._put(self)

    @property
    def latest(self) -> bool:
        """Whether the model reads this one now."""
        return self._readers[0].source is self

    def put_back(self) -> None:
        """Let the model read what it read before."""
        self._put(self._before)

    def _put(self, source: FollowedStore) -> None:
        for reader in self._readers:
            reader.source = source


class Added(FollowedStore):
    """A store, and the readers of it that a model has got."""

    def __init__(
        self,
        model: nn.Module,
        store: Store,
        folder: str | os.PathLike[str] | None,
        layers: Sequence[int] | None,
        key_dim: int,
        num_heads: int,
    ) -> None:
        super().__init__(store, encoder_of(store))
        if reads_entries(model):
            raise ValueError(
                f"{type(model).__name__} reads entries already: leave reader and layers out, or remove what it has"
            )
        stack = stack_of(model)
        saved = None if folder is None else SavedReader.read(Path(folder))
        if saved is not None:
            if layers is not None:
                raise ValueError("a saved reader has its own layers: give reader or layers, one of them")
            saved.check(stack, store)
            layers, key_dim, num_heads = saved.layers, saved.key_dim, saved.num_heads
        chosen = checked_layers(layers, stack)
        pooled = pooled_layers(list(stack.attention), chosen[0])
        around = models_around(list(stack.attention.values()))
        name = base_implementation(around[0].config)
        check_implementation(around[0], name, "the model's attention implementation", "reader")
        widths = measured(stack, sorted({*pooled, *chosen}))
        pool = PooledValues(pooled, sum(widths[number].value_dim for number in pooled), chosen[-1])
        self._readers = [
            self._made(stack, number, widths[number].model_dim, pool, key_dim, num_heads) for number in chosen
        ]
        if saved is not None:
            saved.fill(self._readers)
        modules = {number: stack.attention[number].module for number in {*pooled, *chosen}}
        pooling = {modules[number]: partial(pool_before, number) for number in pooled}
        self._interception = intercept(around, pooling, role="pool")
        self._children = [(modules[number], POOL) for number in pooled] + [
            (modules[number], CHILD) for number in chosen
        ]
        for (module, child), one in zip(self._children, [*[pool] * len(pooled), *self._readers], strict=True):
            module.add_module(child, one)
        self._hooks: list[RemovableHandle] = [
            stack.layers[pooled[0]].register_forward_pre_hook(partial(begin_before, _path(stack, pooled[0])))
        ]
        for number in chosen:
            self._hooks.append(stack.layers[number].register_forward_hook(partial(read_after, _path(stack, number))))

    @property
    def latest(self) -> bool:
        """Whether the model reads this one now."""
        return self._readers[0].source is self

    def put_back(self) -> None:
        """Let the model read what it read before."""
        self._interception.remove(keep_changes=True)
        for hook in self._hooks:
            hook.remove()
        for module, child in self._children:
            delattr(module, child)

    def _made(
        self, stack: Stack, number: int, model_dim: int, pool: PooledValues, key_dim: int, num_heads: int
    ) -> StoreReader:
        module = stack.attention[number].module
        reader = StoreReader(number, model_dim, pool, key_dim, num_heads, self)
        parameter = next((one for one in module.parameters() if one.is_floating_point()), None)
        if parameter is not None:  # half precision is too coarse to learn in
            reader.to(parameter.device, torch.promote_types(parameter.dtype, torch.float32))
        return reader.train(module.training)


Source = Searched | Copied | Exchanged | Added


def _path(stack: Stack, number: int) -> str:
    """Of the attention module of a layer, below the layer."""
    return stack.attention[number].name.removeprefix(f"{stack.path}.{number}").strip(".")


def copies_of(base: LayeredKnowledge) -> list[Copied]:
    """The stores that a base was copied from, the one that it follows last."""
    return cast("list[Copied]", base.__dict__.setdefault("copies", []))


def modular_of(model: nn.Module) -> ModularModel | None:
    """The modular model in a model, if there is one."""
    return next((module for module in model.modules() if isinstance(module, ModularModel)), None)
