"""`attach`: lets a model read a store, in addition to its weights or in place of its own base."""

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
    """Let a model read a store of entries; edits of the store act from the next token on.

    How it reads depends on the model:

    - A modular model reads the store instead of its own entries.
    - Any other decoder gets readers after some of its layers: cross-attention from the layer's tokens to the entries,
      added behind a gate. The gate starts at 0, which leaves outputs unchanged bit for bit. The readers must be
      trained; `handle.save` saves them, and `reader=` loads them for any store of the same encoder.

    `save_pretrained` writes the weights of readers, but not the store and `retrieval`.

    Args:
        model: a transformers model, one of its stacks (`model.get_decoder()`), or what `af.load_model` returned.
        store: for readers, a store of texts; for a modular model, a store of width entry_dim with
            `config.threshold_columns` threshold columns.
        retrieval: which entries each layer reads, found by the store's search; by default all, or the reader's own.
        write: overwrite stored thresholds that differ from those of a modular model.
        reader: the folder of a saved reader; by default a new, untrained one.
        layers: after which layers a new reader reads; by default every second one of the last third.
        key_dim: the width of a new reader's queries and keys.
        num_heads: the heads of a new reader; they are summed.

    Returns:
        A handle: insert entries through it; `remove()` restores the model.

    Raises:
        FileNotFoundError: the folder has no saved reader.
        ValueError: the store is empty, or its encoder or width is not the reader's; the reader was saved for another
            model; there are several stacks of layers; stored thresholds are not this model's; or the model already
            reads a store or was converted by `from_ffn` (edit the entries in its base).
        UnsupportedArchitecture: the model has no known layers. The model stays unchanged.

    Cost: a second copy of the entries in memory, read again after an edit. Each token, layer and head reads all of
        them or makes a search. A modular model computes the thresholds of all entries once.

    >>> from transformers import LlamaConfig, LlamaForCausalLM
    >>> model = LlamaForCausalLM(LlamaConfig(
    ...     vocab_size=32, hidden_size=16, intermediate_size=24, num_hidden_layers=4, num_attention_heads=2))
    >>> store = Store.open("memory", dim=8)
    >>> _ = store.insert(embeddings=torch.eye(8))
    >>> with attach(model, store) as handle:
    ...     print(handle)
    1 layer of LlamaForCausalLM reads all of the 8 entries of memory
    """
    module, _ = split(model)
    if not isinstance(cast(object, store), Store):
        raise TypeError(f"store must be an open store, af.knowledge.Store.open(uri), got {type(store).__name__}")
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
        raise ValueError(f"{type(modular).__name__} reads a store already: remove that handle first")
    if store.dim != width:
        raise ValueError(f"the model reads entries of width {width}, but the store has width {store.dim}")
    layers = [module for module in modular.modules() if isinstance(module, ModularReader)]

    def thresholds(entries: Float[Tensor, "entries entry_dim"]) -> Float[Tensor, "entries columns"]:
        moved = entries.to(modular.knowledge.entries)
        return torch.cat([layer.threshold_columns(moved) for layer in layers], dim=1).cpu()

    source = EntrySource(store, thresholds)
    if write:
        source.write_thresholds()
    elif len(stale := source.stale()):
        raise ValueError(
            f"the stored thresholds of {len(stale):,} of {len(store):,} entries differ from this model's: pass "
            "write=True to overwrite them"
        )
    modular.source, undo = source, ExitStack()
    undo.callback(setattr, modular, "source", None)
    return Attached(model, store, retrieval, source, undo)
