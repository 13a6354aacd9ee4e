"""One attention call with its bias, checked once, as every implementation receives it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import cast

import torch
from jaxtyping import Float
from torch import Tensor

from attnflow.bias.allow import Allow
from attnflow.bias.terms import TensorTerm, Term


@dataclass(frozen=True, eq=False)
class Call:
    """softmax(scale * q k^T + sum of terms, over the allowed keys) v.

    Attributes:
        query: [batch, heads, queries, head_dim].
        key: [batch, kv_heads, keys, head_dim]; query head h uses key-value head h // (heads // kv_heads).
        value: [batch, kv_heads, keys, value_dim].
        terms: summed into the scores.
        allow: which pairs exist at all.
        scale: of q k^T.
        softcap: if set, q k^T becomes softcap * tanh(q k^T / softcap) before the bias (Gemma 2).
        sinks: a score per head that takes weight without a value, [heads] (GPT-OSS).
        dropout: probability with which a weight is dropped.
    """

    query: Float[Tensor, "batch heads queries head_dim"]
    key: Float[Tensor, "batch kv_heads keys head_dim"]
    value: Float[Tensor, "batch kv_heads keys value_dim"]
    terms: tuple[Term, ...]
    allow: Allow
    scale: float
    softcap: float | None = None
    sinks: Float[Tensor, " heads"] | None = None
    dropout: float = 0.0

    @property
    def num_heads(self) -> int:
        """Query heads."""
        return self.query.shape[1]

    @property
    def heads_per_kv(self) -> int:
        """Query heads that share one key-value head."""
        return self.query.shape[1] // self.key.shape[1]

    def tensors(self) -> list[Tensor]:
        """Query, key, value, sinks if there are any, and all tensors of the terms, integers among them."""
        sinks = [] if self.sinks is None else [self.sinks]
        terms = [tensor for term in self.terms for tensor in getattr(term, "tensors", dict)().values()]
        return [self.query, self.key, self.value, *sinks, *terms]

    def with_tensors(self, tensors: Sequence[Tensor]) -> Call:
        """The same call on other tensors, in the order of `tensors()`."""
        query, key, value, *rest = tensors
        sinks = None if self.sinks is None else rest.pop(0)
        terms: list[Term] = []
        for term in cast(tuple[TensorTerm, ...], self.terms):
            count = len(term.tensors())
            terms.append(term.with_tensors(rest[:count]))
            rest = rest[count:]
        return replace(self, query=query, key=key, value=value, sinks=sinks, terms=tuple(terms))

    def needs_grad(self) -> bool:
        """Whether a gradient may be asked for."""
        return torch.is_grad_enabled() and any(tensor.requires_grad for tensor in self.tensors())


def make_call(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    terms: Sequence[Term],
    allow: object,
    scale: float | None,
    softcap: float | None,
    sinks: Tensor | None,
    dropout: float,
) -> Call:
    """The call, after checks with messages for its author."""
    if query.ndim != 4 or key.ndim != 4 or value.ndim != 4:
        shapes = ", ".join(str(tuple(t.shape)) for t in (query, key, value))
        raise ValueError(f"query, key and value are [batch, heads, tokens, channels], got {shapes}")
    batch, heads, queries, head_dim = query.shape
    kv_heads, keys = key.shape[1], key.shape[2]
    if key.shape[0] != batch or value.shape[:3] != key.shape[:3] or key.shape[3] != head_dim or heads % kv_heads:
        raise ValueError(
            f"query {tuple(query.shape)}, key {tuple(key.shape)} and value {tuple(value.shape)} do not fit: one batch "
            "size, key and value of equal heads and tokens, query heads a multiple of theirs, equal head_dim"
        )
    for term in terms:
        if heads % term.groups:
            raise ValueError(f"{type(term).__name__} has {term.groups} maps, which {heads} heads cannot share evenly")
    if not 0.0 <= dropout < 1.0:
        raise ValueError(f"dropout must be in [0, 1), got {dropout}")
    relation = Allow.of(allow, queries, keys, query.device)
    factor = head_dim**-0.5 if scale is None else float(scale)
    call = Call(query, key, value, tuple(terms), relation, factor, softcap, sinks, dropout)
    devices = sorted({str(tensor.device) for tensor in call.tensors()})
    if len(devices) > 1:
        raise ValueError(f"query, key, value, sinks and all terms must be on one device, got {', '.join(devices)}")
    return call
