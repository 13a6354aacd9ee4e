"""`attach`: let a model read a store instead of its own entries, or the best entries alone."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, cast

import torch
from jaxtyping import Float, Int64
from torch import Tensor, nn

from attnflow._core.checks import Indices
from attnflow._core.handles import Handle
from attnflow._core.markup import plural
from attnflow.knowledge.base import LayeredKnowledge
from attnflow.knowledge.hf.modular import ModularModel, ModularReader
from attnflow.knowledge.hf.sync import layer_thresholds, load_entries
from attnflow.knowledge.index.arguments import Vectors
from attnflow.knowledge.layered import readers
from attnflow.knowledge.memory_layer.retrieval import Retrieval
from attnflow.knowledge.memory_layer.source import StoredKnowledge
from attnflow.knowledge.store import Store
from attnflow.models.loaded import Loaded, split


def attach(
    model: nn.Module | Loaded,
    store: Store | None = None,
    *,
    retrieval: Retrieval | None = None,
    write_thresholds: bool = False,
) -> Attached:
    """Let a model read a store instead of its own entries, or the best entries alone; edits act on the next token.

    A modular model searches the store itself. A model that `from_ffn` converted takes its entries from the store, and
    takes them anew before the forward pass that follows an edit. Neither the store nor `retrieval` is part of what
    `save_pretrained` writes.

    Args:
        model: modular, with "mlp" or "coordinate" thresholds, or converted by `from_ffn`; or what `af.load_model` gave.
        store: of a modular model of width entry_dim, with `config.threshold_columns` threshold columns; of a converted
            model as `save_entries` filled it. None: the model's own entries.
        retrieval: which entries each layer reads; by default as before.
        write_thresholds: of a modular model: compute and write thresholds where the stored ones are not this model's.

    Returns:
        A handle: insert entries through it, `remove()` leaves the model as it was.

    Raises:
        ValueError: a model without entries, thresholds that belong to rows and not to entries, widths that do not fit,
            or stored thresholds that are not this model's.

    Cost: of a modular model the thresholds of all entries, once; of a converted one all entries of the store, twice in
        memory, and once more for each forward pass after an edit.
    """
    module, _ = split(model)
    if store is None and retrieval is None:
        raise ValueError("give a store to read, or a retrieval of the best entries, or both")
    if store is not None and not isinstance(cast(object, store), Store):
        raise TypeError(f"store must be an open one, af.knowledge.Store.open(uri), got {type(store).__name__}")
    readers(module)  # refuses a model without entries
    source: _Searched | _Copied | None = None
    if store is not None:
        modular = _modular(module)
        source = _Copied(module, store) if modular is None else _Searched(modular, store, write_thresholds)
    return Attached(module, source, retrieval)


class Attached(Handle):
    """What `attach` changed.

    Attributes:
        store: that the model reads, or None.
        readers: the layers that read it; each has its own `retrieval`, and bounds the error of what it left out.
    """

    def __init__(self, model: nn.Module, source: _Searched | _Copied | None, retrieval: Retrieval | None) -> None:
        super().__init__(model)
        self._source, self.store = source, None if source is None else source.store
        self.readers = readers(model)
        self._before = [reader.retrieval for reader in self.readers]
        for reader in self.readers if retrieval is not None else ():
            reader.retrieval = retrieval

    def insert(
        self,
        *,
        embeddings: Vectors,
        layers: Sequence[int] | None = None,
        experts: Sequence[int | None] | None = None,
        **columns: Any,
    ) -> Int64[Tensor, " n"]:
        """`Store.insert` with the thresholds that the model's layers give the entries.

        Args:
            embeddings: [n, dim], finite.
            layers: of a converted model, the layer that each entry belongs to.
            experts: of a converted model with experts, the one in that layer, None in layers without.
            **columns: what else `Store.insert` takes: ids, texts, sources, encoder.

        Raises:
            ValueError: layers or experts missing or out of place, no store, or as `Store.insert`.
        """
        return self._stored().insert(embeddings, layers=layers, experts=experts, **columns)

    def upsert(self, *, ids: Indices, embeddings: Vectors, **columns: Any) -> None:
        """`Store.upsert`, likewise; entries of a converted model stay in their layers.

        Raises:
            ValueError: no store, or as `Store.upsert`.
        """
        self._stored().upsert(ids, embeddings, **columns)

    def stale(self) -> Int64[Tensor, " n"]:
        """Ids of entries whose stored thresholds are not those of a modular model, as after training it."""
        source = self._stored()
        return source.stale() if isinstance(source, _Searched) else torch.zeros(0, dtype=torch.int64)

    def write_thresholds(self) -> int:
        """Write a modular model's thresholds where they are stale; returns for how many entries."""
        source = self._stored()
        return source.write_thresholds() if isinstance(source, _Searched) else 0

    def _stored(self) -> _Searched | _Copied:
        if self._source is None:
            raise ValueError("the model reads its own entries: attach(model, store) lets it read a store")
        return self._source

    def _restore(self) -> None:
        if self._source is not None:
            if not self._source.latest:
                raise RuntimeError("another store was attached to this model later: remove that one first")
            self._source.put_back()
        for reader, retrieval in zip(self.readers, self._before, strict=True):
            reader.retrieval = retrieval

    def _summary(self) -> str:
        where = "its own entries" if self.store is None else f"{len(self.store):,} entries of {self.store.uri}"
        kinds = {str(reader.retrieval or "all of them") for reader in self.readers}
        return f"{plural(len(self.readers), 'layer')} of {type(self.model).__name__} read {where}: {', '.join(kinds)}"


def attached_store(model: nn.Module) -> Store | None:
    """The store that a model reads now, if any."""
    modular = _modular(model)
    if modular is not None:
        return modular.source.store if isinstance(modular.source, StoredKnowledge) else None
    base = getattr(model, "knowledge", None)
    copies = _copies(base) if isinstance(base, LayeredKnowledge) else []
    return copies[-1].store if copies else None


class _Searched(StoredKnowledge):
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
        if layers is not None or experts is not None:
            raise ValueError("all layers of a modular model read all entries: leave layers and experts out")
        return super().insert(embeddings, **columns)

    @property
    def latest(self) -> bool:
        return self._modular.source is self

    def put_back(self) -> None:
        self._modular.source = self._before


class _Copied:
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
        _copies(base).append(self)
        self._hook = model.register_forward_pre_hook(self._follow)

    def insert(
        self,
        embeddings: Vectors,
        *,
        layers: Sequence[int] | None = None,
        experts: Sequence[int | None] | None = None,
        **columns: Any,
    ) -> Tensor:
        if layers is None:
            raise ValueError("each entry of a converted model belongs to one layer: give layers, one for each entry")
        thresholds = layer_thresholds(layers, self._base.num_layers, self._base.checked_experts(layers, experts))
        return self.store.insert(embeddings=embeddings, thresholds=thresholds, **columns)

    def upsert(self, ids: Indices, embeddings: Vectors, **columns: Any) -> None:
        self.store.upsert(ids=ids, embeddings=embeddings, **columns)  # which keeps the layers of entries that exist

    @property
    def latest(self) -> bool:
        return _copies(self._base)[-1] is self

    def put_back(self) -> None:
        _copies(self._base).pop().stop()
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


def _copies(base: LayeredKnowledge) -> list[_Copied]:
    """The stores that a base was copied from, the one that it follows last."""
    return cast("list[_Copied]", base.__dict__.setdefault("copies", []))


def _modular(model: nn.Module) -> ModularModel | None:
    return next((module for module in model.modules() if isinstance(module, ModularModel)), None)
