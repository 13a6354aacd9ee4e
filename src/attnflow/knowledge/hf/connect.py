"""A modular model that reads a store instead of its own entries."""

from __future__ import annotations

from typing import cast

import torch
from jaxtyping import Float
from torch import Tensor, nn

from attnflow.knowledge.hf.modular.model import ModularModel
from attnflow.knowledge.memory_layer.reader import KnowledgeReader
from attnflow.knowledge.memory_layer.stored import StoredKnowledge
from attnflow.knowledge.store import Store


def connect(model: nn.Module, store: Store, *, write_thresholds: bool = False) -> StoredKnowledge:
    """Let a modular model read a store from now on, in place of its own E; an edit is visible to the next token.

    Insert through what is returned, which computes the thresholds B1(E) that the model's layers give an entry; get,
    delete, search, snapshot and restore with the store itself. `disconnect` undoes it. The store is not part of what
    `save_pretrained` writes.

    Args:
        model: a `ModularForCausalLM` or `ModularModel` whose thresholds are "mlp" or "coordinate". Set `.retrieval` of
            `readers(model)` to read the best entries alone; by default all are read.
        store: of width entry_dim, with a threshold column for each layer, part and head: `threshold_columns(model)`.
        write_thresholds: compute and write thresholds where the stored ones are not this model's.

    Raises:
        ValueError: no modular model, thresholds that belong to rows and not to entries, widths that do not fit, or
            stored thresholds that are not this model's.

    Cost: the thresholds of all entries, once.
    """
    modular = _modular(model)
    if not isinstance(cast(object, store), Store):
        raise TypeError(f"store must be an open one, af.knowledge.Store.open(uri), got {type(store).__name__}")
    per_entry = modular.config.threshold == "per_entry"
    if per_entry or store.dim != modular.config.entry_dim:
        raise ValueError(
            "threshold='per_entry' belongs to rows of the model's own base: entries of a store need 'mlp' or "
            "'coordinate'"
            if per_entry
            else f"the model's entries have width {modular.config.entry_dim}, those of the store {store.dim}"
        )
    layers = [module for module in modular.modules() if isinstance(module, KnowledgeReader)]
    device = modular.knowledge.entries.device

    def thresholds(entries: Float[Tensor, "entries entry_dim"]) -> Float[Tensor, "entries columns"]:
        moved = entries.to(device, modular.knowledge.entries.dtype)
        return torch.cat([layer.threshold_columns(moved) for layer in layers], dim=1).cpu()

    source = StoredKnowledge(store, thresholds)
    if write_thresholds:
        source.write_thresholds()
    elif len(stale := source.stale()):
        raise ValueError(
            f"the stored thresholds of {len(stale):,} of {len(store):,} entries are not this model's: "
            "connect(model, store, write_thresholds=True) computes them anew"
        )
    modular.source = source
    return source


def disconnect(model: nn.Module) -> None:
    """Let a modular model read its own E again.

    Raises:
        ValueError: no modular model.
    """
    _modular(model).source = None


def threshold_columns(model: nn.Module) -> int:
    """How many threshold columns a store for this modular model has: layers x parts x heads.

    Raises:
        ValueError: no modular model.
    """
    return sum(module.columns for module in _modular(model).modules() if isinstance(module, KnowledgeReader))


def _modular(model: nn.Module) -> ModularModel:
    found = next((module for module in model.modules() if isinstance(module, ModularModel)), None)
    if found is None:
        raise ValueError(
            f"{type(model).__name__} is no modular model; entries of a converted one are in its .knowledge"
        )
    return found
