"""Saves the entries of a converted model in a store, to search and compare them."""

from __future__ import annotations

from typing import Any, Final, cast

import torch
from torch import nn

from attnflow._core.progress import Progress
from attnflow.knowledge.base import LayeredKnowledge
from attnflow.knowledge.store import Store

_OTHER_LAYER: Final = -1e9  # finite, since GELU and SiLU of an infinite score are NaN
_BATCH: Final = 4096


def save_entries(model: nn.Module, store: Store, *, name: str, progress: Progress | None = None) -> None:
    """Insert the entries of a converted model, in float32, under their ids into a store with a column for each layer.

    An embedding is a whole row, and its thresholds are 0 in the column of its layer and -1e9 in all others. To find the
    entries of a layer that a hidden state h activates, search for [h | 0 | ... | 1 | 0], with 1 at the threshold of the
    first part, and `threshold_column=layer`. Each batch is written atomically.
    """
    base = cast(LayeredKnowledge, cast(Any, model).knowledge)
    for batch in base.ids.cpu().split(_BATCH):
        layers = base.layer_of(batch)
        thresholds = torch.full((len(batch), base.num_layers), _OTHER_LAYER)
        thresholds[torch.arange(len(batch)), layers] = 0.0
        sources = [
            f"layer {layer}" if expert is None else f"layer {layer}, expert {expert}"
            for layer, expert in zip(layers, base.expert_of(batch), strict=True)
        ]
        rows = base.get(batch).float()
        store.insert(ids=batch, embeddings=rows, sources=sources, thresholds=thresholds, encoder=f"from_ffn:{name}")
        if progress is not None:
            progress(len(store), base.num_entries, "entries")
