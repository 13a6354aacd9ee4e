"""`attention`: scaled dot-product attention with a bias: its definition in plain PyTorch, and the backends."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import Final, Literal

import torch
from jaxtyping import Float
from torch import Tensor
from torch.nn import functional

from attnflow.bias import flex, tiled
from attnflow.bias.call import Call, make_call
from attnflow.bias.terms import Term, per_head, wide

Backend = Literal["auto", "reference", "tiled", "flex"]

BACKENDS: Final = ("reference", "tiled", "flex")
_FEW: Final = 1 << 14  # (query, key) pairs, for which there is nothing to gain over the reference
_log: Final = logging.getLogger("attnflow.bias")
_logged: Final[set[tuple[str, str]]] = set()


def attention(
    query: Float[Tensor, "batch heads queries head_dim"],
    key: Float[Tensor, "batch kv_heads keys head_dim"],
    value: Float[Tensor, "batch kv_heads keys value_dim"],
    terms: Sequence[Term],
    mask: object = None,
    *,
    scale: float | None = None,
    softcap: float | None = None,
    sinks: Float[Tensor, " heads"] | None = None,
    dropout: float = 0.0,
    backend: Backend = "auto",
    need_weights: bool = False,
) -> tuple[Float[Tensor, "batch heads queries value_dim"], Float[Tensor, "batch heads queries keys"] | None]:
    """softmax(scale * q k^T + B, over the keys that the mask allows) v, with B the sum of terms (daa, sec. 3.1).

    The mask always wins: B is finite. A query that may attend to nothing has the output 0, with zero gradients.

    Args:
        query: queries; head h uses key-value head h // (heads // kv_heads).
        key: keys.
        value: values.
        terms: those of `attnflow.bias.terms`, or objects with what `Term` there asks for.
        mask: a `Mask`, a boolean tensor [queries, keys] or [batch or 1, heads or 1, queries, keys], an `Allow`, or
            None for every pair.
        scale: of q k^T; default head_dim ** -0.5.
        softcap: if set, scores become softcap * tanh(score / softcap) before the bias.
        sinks: a score per head that takes weight without a value.
        dropout: probability with which a weight is dropped.
        backend: "reference" (plain PyTorch, holds every pair), "tiled" (memory-bounded), "flex" (compiled
            FlexAttention), or "auto": the fastest that can compute this call. On CUDA that is FlexAttention.
        need_weights: also return the post-softmax weights; "reference" alone has them.

    Returns:
        The output, in the type of the values, and the weights or None.

    Raises:
        ValueError: shapes that do not fit, mixed devices, or a backend that cannot compute this call, with the reason.
        TypeError: a mask or a term of another type.

    >>> from attnflow.bias.terms import Additive
    >>> q = k = v = torch.eye(2)[None, None]
    >>> bias = Additive(columns=torch.tensor([[[0.0, 20.0]]]))
    >>> attention(q, k, v, [bias])[0].round(decimals=3)
    tensor([[[[0., 1.],
              [0., 1.]]]])
    """
    return compute(make_call(query, key, value, terms, mask, scale, softcap, sinks, dropout), backend, need_weights)


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


def reference(call: Call) -> tuple[Tensor, Tensor]:
    """The definition, holding every pair: (output in the type of the values, weights in float32)."""
    weights = weights_of(call)
    dropped = functional.dropout(weights, call.dropout) if call.dropout else weights
    output = _by_key_head(dropped, call) @ wide(call.value)
    return output.view(*call.query.shape[:3], call.value.shape[3]).to(call.value.dtype), weights


def _by_key_head(heads: Tensor, call: Call) -> Tensor:
    """[batch, kv_heads, queries of all heads that share a key, n]: keys and values need not be repeated."""
    queries = call.heads_per_kv * call.query.shape[2]
    return heads.reshape(*call.key.shape[:2], queries, heads.shape[-1])


def compute(call: Call, backend: str, need_weights: bool = False) -> tuple[Tensor, Tensor | None]:
    """(output, weights if they are needed) of a checked call, by the backend that `choose` names."""
    name = choose(call, backend, need_weights)
    if name == "reference":
        output, weights = reference(call)
        return output, weights if need_weights else None
    return (tiled if name == "tiled" else flex).run(call), None


def choose(call: Call, backend: str, need_weights: bool = False) -> str:
    """The backend that computes a call: the named one, or by "auto" the fastest that can.

    Raises:
        ValueError: an unknown name, or a backend that cannot compute this call.
    """
    if backend == "auto":
        name = next(name for name in _preferred(call, need_weights) if refusal(call, name) is None)
        if (choice := (name, call.query.device.type)) not in _logged and not torch.compiler.is_compiling():
            _logged.add(choice)
            _log.info("attention with a bias runs with %r on %s", *choice)
        return name
    if backend not in BACKENDS:
        raise ValueError(f"backend must be one of 'auto', {', '.join(map(repr, BACKENDS))}, got {backend!r}")
    if need_weights and backend != "reference":
        raise ValueError(
            f"backend={backend!r} never holds the weights; ask for them with backend='reference' or 'auto'"
        )
    reason = refusal(call, backend)
    if reason is not None:
        raise ValueError(f"backend={backend!r} cannot compute this call: {reason}; use backend='auto' or 'reference'")
    return backend


def refusal(call: Call, name: str) -> str | None:
    """Why a backend cannot compute a call, or None; the reference computes every call."""
    return None if name == "reference" else (tiled if name == "tiled" else flex).refuses(call)


def _preferred(call: Call, need_weights: bool) -> tuple[str, ...]:
    if need_weights:
        return ("reference",)
    if call.query.is_cuda:
        return ("flex", "tiled", "reference")
    few = call.query.shape[0] * call.query.shape[2] * call.key.shape[2] <= _FEW
    return ("reference",) if few else ("tiled", "reference")
