"""`attach`: let a model read a store, beside what it knows or instead of its own entries, or the best entries alone."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any, cast

import torch
from jaxtyping import Int64
from torch import Tensor, nn

from attnflow._core.checks import Indices
from attnflow._core.handles import Handle
from attnflow._core.markup import plural
from attnflow.knowledge.base import LayeredKnowledge
from attnflow.knowledge.hf.saved_reader import save_reader
from attnflow.knowledge.hf.sources import Added, Copied, Exchanged, Searched, Source, copies_of, modular_of
from attnflow.knowledge.hf.store_reader import store_readers
from attnflow.knowledge.index.arguments import Vectors
from attnflow.knowledge.layered import readers, reads_entries
from attnflow.knowledge.memory_layer.retrieval import Retrieval
from attnflow.knowledge.memory_layer.source import StoredKnowledge
from attnflow.knowledge.store import Store
from attnflow.models.loaded import Loaded, split


def attach(
    model: nn.Module | Loaded,
    store: Store | None = None,
    *,
    reader: str | os.PathLike[str] | None = None,
    layers: Sequence[int] | None = None,
    key_dim: int = 256,
    num_heads: int = 1,
    retrieval: Retrieval | None = None,
    write_thresholds: bool = False,
) -> Attached:
    """Let a model read a store; edits act on the next token.

    Any decoder gets a reader after some of its layers: cross-attention from the layer's tokens to the entries, added
    behind a gate that is 0 at first, with which the model is as it was, bit for bit. Readers are parameters that you
    train; `handle.save` keeps them, and `reader=` brings them back, for any store of the same encoder. A model that has
    readers reads another store from now on.

    A modular model reads the store instead of its own entries, and searches it itself. So does one that `from_ffn`
    converted: it takes its entries from the store, anew before the forward pass that follows an edit.

    The store and `retrieval` are no part of what `save_pretrained` writes; the weights of readers are.

    Args:
        model: a transformers model, one stack of it (`model.get_decoder()`), or what `af.load_model` gave.
        store: of texts. Of a modular model ("mlp" or "coordinate" thresholds) of width entry_dim, with
            `config.threshold_columns` threshold columns; of a converted model as `save_entries` filled it. None: the
            model's own entries.
        reader: the folder of a saved reader; by default a new one, which has learned nothing yet.
        layers: after which layers a new reader reads; by default every second one of the last third.
        key_dim: of a new reader, the width of queries and keys.
        num_heads: of a new reader; heads are summed.
        retrieval: which entries each layer reads, found by the store's own search; by default all, or as before.
        write_thresholds: of a modular model: compute and write thresholds where the stored ones are not this model's.

    Returns:
        A handle: insert entries through it, `remove()` leaves the model as it was.

    Raises:
        FileNotFoundError: no saved reader there.
        ValueError: an empty store, one of another encoder or width than the reader's; a reader for another model;
            several stacks of layers. Thresholds that belong to rows and not to entries, or that are not this model's.
        UnsupportedArchitecture: no layers that are known. The model is as it was.

    Cost: the entries once in memory, read anew after an edit, and for each token, layer and head all of them, or a
        search. Of a modular model the thresholds of all entries, once; of a converted one all entries, twice in memory.

    >>> from transformers import LlamaConfig, LlamaForCausalLM
    >>> model = LlamaForCausalLM(LlamaConfig(
    ...     vocab_size=32, hidden_size=16, intermediate_size=24, num_hidden_layers=4, num_attention_heads=2))
    >>> store = Store.open("memory", dim=8)
    >>> _ = store.insert(embeddings=torch.eye(8))
    >>> with attach(model, store) as handle:
    ...     print(handle)
    1 layer of LlamaForCausalLM reads 8 entries of memory: all of them
    """
    module, _ = split(model)
    if store is None and retrieval is None:
        raise ValueError("give a store to read, or a retrieval of the best entries, or both")
    if store is not None and not isinstance(cast(object, store), Store):
        raise TypeError(f"store must be an open one, af.knowledge.Store.open(uri), got {type(store).__name__}")
    if reader is not None or layers is not None or (store is not None and not reads_entries(module)):
        return Attached(module, Added(module, _text_store(store), reader, layers, key_dim, num_heads), retrieval)
    readers(module)  # refuses a model without entries
    source: Source | None = None
    if store is not None:
        modular = modular_of(module)
        if store_readers(module):
            source = Exchanged(module, _text_store(store))
        elif modular is None:
            source = Copied(module, store)
        else:
            source = Searched(modular, store, write_thresholds)
    return Attached(module, source, retrieval)


def _text_store(store: Store | None) -> Store:
    if store is None:
        raise ValueError("a reader reads a store: attach(model, store, ...)")
    if not len(store):
        raise ValueError(f"{store.uri} is empty: there is nothing to read; insert entries first")
    return store


class Attached(Handle):
    """What `attach` changed.

    Attributes:
        store: that the model reads, or None.
        readers: the layers that read it; each has its own `retrieval`, and bounds the error of what it left out.
    """

    def __init__(self, model: nn.Module, source: Source | None, retrieval: Retrieval | None) -> None:
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
        return source.stale() if isinstance(source, Searched) else torch.zeros(0, dtype=torch.int64)

    def write_thresholds(self) -> int:
        """Write a modular model's thresholds where they are stale; returns for how many entries."""
        source = self._stored()
        return source.write_thresholds() if isinstance(source, Searched) else 0

    def save(self, folder: str | os.PathLike[str]) -> Path:
        """Write the readers of a decoder to a folder, safetensors and JSON: our tensors alone, neither model nor store.

        The folder is replaced in one step: after a kill it holds the old readers or the new ones.

        Raises:
            ValueError: a model whose own layers read the store, or NaN or infinity in a reader. Nothing is written.
            FileNotFoundError: the folder around it does not exist.
        """
        return save_reader(self.model, Path(folder))

    def _stored(self) -> Source:
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
        number = len(self.readers)
        reads = "reads" if number == 1 else "read"
        return f"{plural(number, 'layer')} of {type(self.model).__name__} {reads} {where}: {', '.join(kinds)}"


def attached_store(model: nn.Module) -> Store | None:
    """The store that a model reads now, if any."""
    added = store_readers(model)
    if added:
        return added[0].source.store
    modular = modular_of(model)
    if modular is not None:
        return modular.source.store if isinstance(modular.source, StoredKnowledge) else None
    base = getattr(model, "knowledge", None)
    copies = copies_of(base) if isinstance(base, LayeredKnowledge) else []
    return copies[-1].store if copies else None
