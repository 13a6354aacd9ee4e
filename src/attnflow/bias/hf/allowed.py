"""Which pairs exist in one attention call of a transformers model, as an `Allow` that layers share."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from attnflow.bias.allow import Allow
from attnflow.bias.terms import Dense
from attnflow.masks.hf.placement import Placement
from attnflow.masks.hf.tables import MaskTables


def relation_of(
    module: nn.Module,
    mask: object,
    tables: MaskTables | None,
    crop: bool,
    query: Tensor,
    num_keys: int,
    kwargs: Mapping[str, Any],
) -> tuple[Allow, Dense | None]:
    """(the pairs that attention may use, an additive mask's finite part if it has one).

    Args:
        module: the attention module.
        mask: what transformers handed to it.
        tables: the mask of `masks.attach` for it, or None for the model's own.
        crop: as in `masks.attach`.
        query: [batch, heads, queries, head_dim].
        num_keys: keys of the call.
        kwargs: of the attention function.
    """
    num_queries = query.shape[2]
    if isinstance(mask, Placement):
        if tables is not None:
            return mask.allow(tables, crop, query.device), None
        return mask.own(query.device), None
    if isinstance(mask, Tensor):
        return _given(mask, num_queries, num_keys)
    causal = kwargs.get("is_causal")
    causal = getattr(module, "is_causal", True) if causal is None else causal
    if not causal or num_queries == 1:  # as transformers' own sdpa understands a missing mask
        return Allow(None, num_queries, num_keys), None

    def rows(block: slice) -> Tensor:
        last = torch.arange(block.start, block.stop, device=query.device)[:, None] + (num_keys - num_queries)
        return (torch.arange(num_keys, device=query.device) <= last)[None, None]

    return Allow(rows, num_queries, num_keys), None


def _given(mask: Tensor, num_queries: int, num_keys: int) -> tuple[Allow, Dense | None]:
    """A 4D mask of the caller's: boolean, or additive with the smallest number of its type where nothing passes."""
    mask = mask[:, :, :, :num_keys]
    if mask.dtype == torch.bool:
        return Allow.from_dense(mask), None
    allowed = mask > torch.finfo(mask.dtype).min / 2
    finite = mask.masked_fill(~allowed, 0.0)
    return Allow.from_dense(allowed), Dense(finite)
