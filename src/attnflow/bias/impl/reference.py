"""Attention with a bias in plain PyTorch, holding every pair: the definition, and the path for few queries."""

from __future__ import annotations

import torch
from jaxtyping import Float
from torch import Tensor
from torch.nn import functional

from attnflow.bias.call import Call
from attnflow.bias.terms import Term, per_head, wide


def refuses(call: Call) -> str | None:
    """Why this implementation cannot compute the call; it computes all of them."""
    del call
    return None


def bias_of(terms: tuple[Term, ...], num_heads: int, rows: slice, columns: slice) -> Tensor | None:
    """The sum of terms for a block of pairs, [batch or 1, heads or 1, queries, keys], or None without terms."""
    tiles = [term.tile(rows, columns) for term in terms]
    if not tiles:
        return None
    if all(tile.shape[1] == tiles[0].shape[1] for tile in tiles):
        total = sum(tiles[1:], start=tiles[0])
        return total if total.shape[1] == 1 else per_head(total, num_heads)
    return sum((per_head(tile, num_heads) for tile in tiles[1:]), start=per_head(tiles[0], num_heads))


def weights_of(call: Call) -> Float[Tensor, "batch heads queries keys"]:
    """Post-softmax weights before dropout, in float32 (or float64); all zero for a query that may attend to nothing."""
    score = _by_key_head(wide(call.query), call) @ wide(call.key).mT * call.scale
    score = score.view(*call.query.shape[:3], call.key.shape[2])
    if call.softcap is not None:
        score = call.softcap * torch.tanh(score / call.softcap)
    every = slice(0, call.query.shape[2]), slice(0, call.key.shape[2])
    bias = bias_of(call.terms, call.num_heads, *every)
    if bias is not None:
        score = score + bias
    allowed, empty = call.allow.dense(), None
    if allowed is not None:
        # A softmax over nothing is NaN, and so is its gradient: such a query attends everywhere here, and is zeroed.
        empty = ~allowed.any(dim=-1, keepdim=True)
        score = score.masked_fill(~(allowed | empty), -torch.inf)
    if call.sinks is not None:
        sink = wide(call.sinks)[None, :, None, None].expand(*score.shape[:3], 1)
        weights = torch.cat([score, sink], dim=-1).softmax(dim=-1)[..., :-1]
    else:
        weights = score.softmax(dim=-1)
    return weights if empty is None else weights.masked_fill(empty, 0.0)


def run(call: Call) -> tuple[Tensor, Tensor]:
    """(output [batch, heads, queries, value_dim] in the type of the values, weights in float32)."""
    weights = weights_of(call)
    dropped = functional.dropout(weights, call.dropout) if call.dropout else weights
    output = _by_key_head(dropped, call) @ wide(call.value)
    return output.view(*call.query.shape[:3], call.value.shape[3]).to(call.value.dtype), weights


def _by_key_head(heads: Tensor, call: Call) -> Tensor:
    """[batch, kv_heads, queries of all heads that share a key, n]: keys and values need not be repeated."""
    queries = call.heads_per_kv * call.query.shape[2]
    return heads.reshape(*call.key.shape[:2], queries, heads.shape[-1])
