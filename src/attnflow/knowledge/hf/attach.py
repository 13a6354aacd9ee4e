"""`attach`: let a model read a store, beside what it knows or instead of its own base."""

from __future__ import annotations

import os
from collections.abc import Sequence
from contextlib import ExitStack
from typing import cast

import torch
from jaxtyping import Float
from torch import Tensor, nn

from attnflow.knowledge.hf.attached import Attached
from attnflow.knowledge.hf.modular import ModularModel, ModularReader
from attnflow.knowledge.hf.store_reader import AddedReaders
from attnflow.knowledge.retrieval import Retrieval
from attnflow.knowledge.source import EntrySource
from attnflow.knowledge.store import Store
from attnflow.models.loaded import Loaded, split


def attach(
    model: nn.Module | Loaded,
    store: Store,
    *,
    retrieval: Retrieval | None = None,
    write: bool = False,
    reader: str | os.PathLike[str] | None = None,
    layers: Sequence[int] | None = None,
    key_dim: int = 256,
    num_heads: int = 1,
) -> Attached:
    """Let a model read a store; edits act on the next token.

    What reads it depends on the model:

    - A modular model reads the store instead of its own entries.
    - Any other decoder gets readers after some of its layers: cross-attention from the layer's tokens to the entries,
      added behind a gate. The gate is 0 at first, and the model is as it was, bit for bit. The readers are parameters
      to train; `handle.save` keeps them, and `reader=` brings them back, for any store of the same encoder.

    The store and `retrieval` are no part of what `save_pretrained` writes; the weights of readers are.

    Args:
        model: a transformers model, one stack of it (`model.get_decoder()`), or what `af.load_model` gave.
        store: for readers, one of texts. For a modular model, one of width entry_dim with
            `config.threshold_columns` threshold columns.
        retrieval: which entries each layer reads, found by the store's own search; by default all, or as before.
        write: write to the store the thresholds of a modular model that are not its own.
        reader: the folder of a saved reader; by default a new one, which has learned nothing yet.
        layers: after which layers a new reader reads; by default every second one of the last third.
        key_dim: of a new reader, the width of queries and keys.
        num_heads: of a new reader; heads are summed.

    Returns:
        A handle: insert entries through it, `remove()` leaves the model as it was.

    Raises:
        FileNotFoundError: no saved reader there.
        ValueError: an empty store, one of another encoder or width than the reader's; a reader for another model;
            several stacks of layers; thresholds that are not this model's; a model that reads a store already, or
            that `from_ffn` converted, whose entries are edited in its own base.
        UnsupportedArchitecture: no layers that are known. The model is as it was.

    Cost: the entries once more in memory, read anew after an edit, and for each token, layer and head all of them, or a
        search. Of a modular model the thresholds of all entries, once.

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
    if not isinstance(cast(object, store), Store):
        raise TypeError(f"store must be an open one, af.knowledge.Store.open(uri), got {type(store).__name__}")
    modular = next((one for one in module.modules() if isinstance(one, ModularModel)), None)
    if modular is None or reader is not None or layers is not None:
        return AddedReaders(module, store, retrieval, reader, layers, key_dim, num_heads)
    return _modular(module, modular, store, retrieval, write)


def _modular(
    model: nn.Module, modular: ModularModel, store: Store, retrieval: Retrieval | None, write: bool
) -> Attached:
    """Let a modular model read a store in place of its own entries."""
    width = modular.config.entry_dim
    if modular.source is not None:
        raise ValueError(f"{type(modular).__name__} reads a store already: remove that one first")
    if store.dim != width:
        raise ValueError(f"the model's entries have width {width}, those of the store {store.dim}")
    layers = [module for module in modular.modules() if isinstance(module, ModularReader)]

    def thresholds(entries: Float[Tensor, "entries entry_dim"]) -> Float[Tensor, "entries columns"]:
        moved = entries.to(modular.knowledge.entries)
        return torch.cat([layer.threshold_columns(moved) for layer in layers], dim=1).cpu()

    source = EntrySource(store, thresholds)
    if write:
        source.write_thresholds()
    elif len(stale := source.stale()):
        raise ValueError(
            f"the stored thresholds of {len(stale):,} of {len(store):,} entries are not this model's: "
            "attach(model, store, write=True) computes them anew"
        )
    modular.source, undo = source, ExitStack()
    undo.callback(setattr, modular, "source", None)
    return Attached(model, store, retrieval, source, undo)
