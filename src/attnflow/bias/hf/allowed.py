"""Which pairs exist in one attention call of a transformers model, as an `Allow` that layers share."""

from __future__ import annotations

from typing import Final
from weakref import WeakValueDictionary

import torch
from torch import Tensor
from torch.nn.attention.flex_attention import BlockMask

from attnflow.bias.allow import Allow
from attnflow.bias.terms import Dense
from attnflow.models.interception import AttentionCall

_causal: Final[WeakValueDictionary[tuple[int, int, str], Allow]] = WeakValueDictionary()


def relation_of(call: AttentionCall) -> tuple[Allow, Dense | None]:
    """(the pairs that attention may use, an additive mask's finite part if it has one)."""
    if call.mask is None:
        return _unmasked(call), None
    if call.request is None:  # of the caller's making, who may change it in place
        return _masked(call)
    # Layers of one kind get one mask, which lives as long as the request.
    key = "relation", id(call.mask), str(call.query.device)
    if key not in call.request.derived:
        call.request.derived[key] = _masked(call)
    return call.request.derived[key]


def _unmasked(call: AttentionCall) -> Allow:
    """Without a mask transformers' sdpa goes by the flag `is_causal`; the other implementations see everything."""
    queries, keys, device = call.query.shape[2], call.key.shape[2], call.query.device
    causal = call.kwargs.get("is_causal")
    causal = getattr(call.module, "is_causal", True) if causal is None else causal
    if not causal or queries == 1 or call.implementation != "sdpa":
        return Allow(None, queries, keys)

    def rows(block: slice) -> Tensor:
        last = torch.arange(block.start, block.stop, device=device)[:, None]
        return (torch.arange(keys, device=device) <= last)[None, None]

    if torch.compiler.is_compiling():
        return Allow(rows, queries, keys)
    return _causal.setdefault((queries, keys, str(device)), Allow(rows, queries, keys))


def _masked(call: AttentionCall) -> tuple[Allow, Dense | None]:
    if isinstance(call.mask, BlockMask):
        return _by_rows(call.mask, call.query.shape[2], call.key.shape[2], call.query.device), None
    assert call.mask is not None
    # Detached, since the mask holds its request: a cycle would keep tables of all pairs until they are collected.
    mask = call.mask.detach()[:, :, :, : call.key.shape[2]] if call.request else call.mask[..., : call.key.shape[2]]
    added = None
    if mask.dtype != torch.bool:  # the smallest number of its type where nothing passes
        allowed = mask > torch.finfo(mask.dtype).min / 2
        added = None if call.request is not None else Dense(mask.masked_fill(~allowed, 0.0))
        mask = allowed
    if call.empty is not None:
        mask = mask & ~call.empty[:, None, :, None]
    return Allow.from_dense(mask), added


def _by_rows(mask: BlockMask, queries: int, keys: int, device: torch.device) -> Allow:
    """A block mask's relation: rows are made when they are asked for, and no table of all pairs is held."""
    batch, heads, mask_mod = mask.shape[0], mask.shape[1], mask.mask_mod
    element = torch.arange(batch, device=device)[:, None, None, None]
    head = torch.arange(heads, device=device)[None, :, None, None]
    key = torch.arange(keys, device=device)[None, None, None]

    def rows(block: slice) -> Tensor:
        query = torch.arange(block.start, block.stop, device=device)[None, None, :, None]
        return mask_mod(element, head, query, key).expand(batch, heads, block.stop - block.start, keys)

    return Allow(rows, queries, keys, batch=batch)
