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
from attnflow.knowledge.hf.modular.model import ModularModel
from attnflow.knowledge.hf.readers import LayerReader, readers
from attnflow.knowledge.hf.sync import layer_thresholds, load_entries
from attnflow.knowledge.index.arguments import Vectors
from attnflow.knowledge.layered import LayeredKnowledge
from attnflow.knowledge.memory_layer.reader import KnowledgeReader
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
    modular = next((m for m in module.modules() if isinstance(m, ModularModel)), None)
    if store is not None:
        source = _Copied(module, store) if modular is None else _Searched(modular, store, write_thresholds)
    return Attached(module, store, source, retrieval)


class Attached(Handle):
    """What `attach` changed.

    Attributes:
        store: that the model reads, or None.
        readers: the layers that read it; each has its own `retrieval`, and bounds the error of what it left out.
    """

    def __init__(
        self, model: nn.Module, store: Store | None, source: _Searched | _Copied | None, retrieval: Retrieval | None
    ) -> None:
        super().__init__(model)
        self.store, self._source = store, source
        self.readers: list[LayerReader] = readers(model)
        self._before = [reader.retrieval for reader in self.readers]
        for reader in self.readers if retrieval is not None else ():
            reader.retrieval = retrieval

    def insert(
        self,
        *,
        embeddings: Vectors,
        layers: Sequence[int] | None = None,
        ids: Indices | None = None,
        texts: Sequence[str | None] | None = None,
        sources: Sequence[str | None] | None = None,
        encoder: str | None = None,
    ) -> Int64[Tensor, " n"]:
        """`Store.insert` with the thresholds that the model's layers give the entries.

        Args:
            embeddings: [n, dim], finite.
            layers: of a converted model, the layer that each entry belongs to.
            ids: new ones; by default the next integers above all that the store has held.
            texts: one for each entry.
            sources: likewise.
            encoder: name and version of what made the embeddings.

        Raises:
            ValueError: layers missing or out of place, no store, or as `Store.insert`.
        """
        source = self._stored()
        columns: dict[str, Any] = {"ids": ids, "texts": texts, "sources": sources, "encoder": encoder}
        return source.insert(embeddings, layers, columns)

    def upsert(
        self,
        *,
        ids: Indices,
        embeddings: Vectors,
        texts: Sequence[str | None] | None = None,
        sources: Sequence[str | None] | None = None,
        encoder: str | None = None,
    ) -> None:
        """`Store.upsert` with the thresholds that the model's layers give the entries.

        Raises:
            ValueError: no store, or as `Store.upsert`.
        """
        columns: dict[str, Any] = {"ids": ids, "texts": texts, "sources": sources, "encoder": encoder}
        self._stored().upsert(embeddings, columns)

    def stale(self) -> Int64[Tensor, " n"]:
        """Ids of entries whose stored thresholds are not those of a modular model, as after training it."""
        return self._stored().stale()

    def write_thresholds(self) -> int:
        """Write a modular model's thresholds where they are stale; returns for how many entries."""
        return self._stored().write_thresholds()

    def _stored(self) -> _Searched | _Copied:
        if self._source is None:
            raise ValueError("the model reads its own entries: attach(model, store) lets it read a store")
        return self._source

    def _restore(self) -> None:
        if self._source is not None:
            self._source.put_back()
        for reader, retrieval in zip(self.readers, self._before, strict=True):
            reader.retrieval = retrieval

    def _summary(self) -> str:
        where = "its own entries" if self.store is None else f"{len(self.store):,} entries of {self.store.uri}"
        kinds = {str(reader.retrieval or "all of them") for reader in self.readers}
        return f"{plural(len(self.readers), 'layer')} of {type(self.model).__name__} read {where}: {', '.join(kinds)}"


def attached_store(model: nn.Module) -> Store | None:
    """The store that a model reads now, if any."""
    modular = next((m for m in model.modules() if isinstance(m, ModularModel)), None)
    if modular is not None:
        return modular.source.store if isinstance(modular.source, StoredKnowledge) else None
    base = getattr(model, "knowledge", None)
    copies = cast("list[_Copied]", base.__dict__.get("copies", [])) if isinstance(base, LayeredKnowledge) else []
    return copies[-1].store if copies else None


class _Searched:
    """A store that a modular model searches."""

    def __init__(self, modular: ModularModel, store: Store, write_thresholds: bool) -> None:
        if modular.config.threshold == "per_entry":
            raise ValueError(
                "threshold='per_entry' belongs to rows of the model's own base: entries of a store need 'mlp' or "
                "'coordinate'"
            )
        if store.dim != modular.config.entry_dim:
            width = modular.config.entry_dim
            raise ValueError(f"the model's entries have width {width}, those of the store {store.dim}")
        layers = [module for module in modular.modules() if isinstance(module, KnowledgeReader)]

        def thresholds(entries: Float[Tensor, "entries entry_dim"]) -> Float[Tensor, "entries columns"]:
            moved = entries.to(modular.knowledge.entries)
            return torch.cat([layer.threshold_columns(moved) for layer in layers], dim=1).cpu()

        source = StoredKnowledge(store, thresholds)
        if write_thresholds:
            source.write_thresholds()
        elif len(stale := source.stale()):
            raise ValueError(
                f"the stored thresholds of {len(stale):,} of {len(store):,} entries are not this model's: "
                "attach(model, store, write_thresholds=True) computes them anew"
            )
        self.store, self._modular, self._source, self._before = store, modular, source, modular.source
        modular.source = source

    def insert(self, embeddings: Vectors, layers: Sequence[int] | None, columns: dict[str, Any]) -> Tensor:
        if layers is not None:
            raise ValueError("all layers of a modular model read all entries: leave layers out")
        return self._source.insert(embeddings=embeddings, **columns)

    def upsert(self, embeddings: Vectors, columns: dict[str, Any]) -> None:
        self._source.upsert(embeddings=embeddings, **columns)

    def stale(self) -> Tensor:
        return self._source.stale()

    def write_thresholds(self) -> int:
        return self._source.write_thresholds()

    def put_back(self) -> None:
        if self._modular.source is not self._source:
            raise RuntimeError("another store was attached to this model later: remove that one first")
        self._modular.source = self._before


class _Copied:
    """A store whose entries a converted model holds, as they are at each forward pass."""

    def __init__(self, model: nn.Module, store: Store) -> None:
        self.store, self._model, self._base = store, model, cast(LayeredKnowledge, model.get_submodule("knowledge"))
        base = self._base
        self._before = (base.entries, base.ids, base.counts.clone())
        base.entries = nn.Parameter(base.entries.detach().clone(), requires_grad=base.entries.requires_grad)
        try:
            self._load()
        except BaseException:
            base.put(*self._before)
            raise
        self._copies.append(self)
        self._hook = model.register_forward_pre_hook(self._follow)

    @property
    def _copies(self) -> list[_Copied]:
        return cast("list[_Copied]", self._base.__dict__.setdefault("copies", []))

    def insert(self, embeddings: Vectors, layers: Sequence[int] | None, columns: dict[str, Any]) -> Tensor:
        if layers is None:
            raise ValueError("each entry of a converted model belongs to one layer: give layers, one for each entry")
        thresholds = layer_thresholds(layers, self._base.num_layers)
        return self.store.insert(embeddings=embeddings, thresholds=thresholds, **columns)

    def upsert(self, embeddings: Vectors, columns: dict[str, Any]) -> None:
        self.store.upsert(embeddings=embeddings, **columns)  # which keeps the layers of entries that exist

    def stale(self) -> Tensor:
        return torch.zeros(0, dtype=torch.int64)

    def write_thresholds(self) -> int:
        return 0

    def put_back(self) -> None:
        if self._copies[-1] is not self:
            raise RuntimeError("another store was attached to this model later: remove that one first")
        self._copies.pop()
        self.stop()
        self._base.put(*self._before)

    def stop(self) -> None:
        """Follow the store no longer."""
        self._hook.remove()

    def _load(self) -> None:
        self._revision = self.store.revision
        load_entries(self._model, self.store)

    def _follow(self, _: nn.Module, __: object) -> None:
        if self._copies[-1] is self and self._revision != self.store.revision:
            self._load()
