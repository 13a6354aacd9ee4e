"""One attention call with its bias, checked once; `Allow` is asked for a block of queries at a time."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch
from jaxtyping import Bool, Float
from torch import Tensor

from attnflow.bias.terms import Term
from attnflow.masks.mask import Mask

Rows = Callable[[slice], Tensor]


class Allow:
    """`allow[q, k]`: query q attends to key k; a boolean relation for each batch element, and head if they differ."""

    def __init__(
        self,
        rows: Rows | None,
        num_queries: int,
        num_keys: int,
        *,
        dense: Tensor | None = None,
        causal: bool = False,
    ) -> None:
        """`causal` says that query i is known to attend to keys 0 .. i."""
        self.num_queries, self.num_keys, self.causal = num_queries, num_keys, causal
        self._rows = rows
        self._dense = dense
        self._made: dict[Hashable, object] = {}

    @classmethod
    def of(cls, allow: object, num_queries: int, num_keys: int, device: torch.device) -> Allow:
        """Make the relation from any mask that `attention` takes, for a call of this size on this device.

        Raises:
            TypeError: not a mask, or a tensor that is not boolean.
            ValueError: the mask has another size than the call.
        """
        if isinstance(allow, Allow):
            relation = allow
        elif allow is None:
            relation = cls(None, num_queries, num_keys)
        elif isinstance(allow, Mask):

            def rows(block: slice) -> Tensor:
                return allow[block.start : block.stop, :].dense().to(device)[None, None]

            relation = cls(rows, allow.num_queries, allow.num_keys, causal=_is_causal(allow))
        elif isinstance(allow, Tensor):
            relation = cls.from_dense(allow)
        else:
            raise TypeError(f"the mask must be a Mask, a boolean tensor or None, got {type(allow).__name__}")
        if (relation.num_queries, relation.num_keys) != (num_queries, num_keys):
            raise ValueError(
                f"the mask has {relation.num_queries} queries and {relation.num_keys} keys, but the call has "
                f"{num_queries} and {num_keys}: slice it to the rows and columns of this call"
            )
        return relation

    @classmethod
    def from_dense(cls, allow: Tensor) -> Allow:
        """A given boolean tensor, [queries, keys] or [batch or 1, heads or 1, queries, keys]."""
        if allow.dtype != torch.bool:
            raise TypeError(
                f"a mask must be boolean, True where a query attends, got {allow.dtype}. Pass mask.bool() if it holds "
                "ones and zeros, or mask == 0 if it holds zeros and -inf. A bias on scores is a term: "
                "attnflow.bias.terms.Dense([batch or 1, maps, queries, keys])"
            )
        if allow.ndim not in (2, 4):
            raise ValueError(
                f"masks must be [queries, keys] or [batch, heads, queries, keys], got {tuple(allow.shape)}"
            )
        whole = allow if allow.ndim == 4 else allow[None, None]
        return cls(None, whole.shape[2], whole.shape[3], dense=whole)

    def rows(self, block: slice) -> Bool[Tensor, "batch heads queries keys"] | None:
        """Rows `block.start .. block.stop - 1` as booleans (batch and heads may be 1), or None where all are True."""
        if self._dense is not None:
            return self._dense[:, :, block]
        return None if self._rows is None else self._rows(block)

    def dense(self) -> Bool[Tensor, "batch heads queries keys"] | None:
        """All rows, or None where every pair is allowed. Memory: every pair."""
        self._dense = self.rows(slice(0, self.num_queries))
        return self._dense

    def derived(self, key: Hashable, make: Callable[[], object]) -> object:
        """`make()`, kept under `key` for as long as this relation lives: layers share one relation, and its forms."""
        if key not in self._made:
            self._made[key] = make()
        return self._made[key]


def _is_causal(mask: Mask) -> bool:
    """Whether row i is 0 .. i and nothing else, by its intervals."""
    rows, renamed = mask.numbered_keys()
    return (
        renamed is None
        and len(rows.ends) == mask.num_queries == mask.num_keys
        and not rows.starts.any()
        and bool((np.diff(rows.ends, prepend=0) == 1).all())
    )


@dataclass(frozen=True, eq=False)
class BiasedCall:
    """softmax(scale * q k^T + sum of terms, over the allowed keys) v; what each field is, `attention` says."""

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
        return self.query.shape[1]

    @property
    def heads_per_kv(self) -> int:
        return self.query.shape[1] // self.key.shape[1]

    def tensors(self) -> list[Tensor]:
        """Query, key, value, sinks if there are any, and all tensors of the terms, integers among them."""
        sinks = [] if self.sinks is None else [self.sinks]
        terms = [tensor for term in self.terms for tensor in term.tensors().values()]
        return [self.query, self.key, self.value, *sinks, *terms]

    def with_tensors(self, tensors: Sequence[Tensor]) -> BiasedCall:
        query, key, value, *rest = tensors
        sinks = None if self.sinks is None else rest.pop(0)
        terms: list[Term] = []
        for term in self.terms:
            count = len(term.tensors())
            terms.append(term.with_tensors(rest[:count]))
            rest = rest[count:]
        return replace(self, query=query, key=key, value=value, sinks=sinks, terms=tuple(terms))


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
) -> BiasedCall:
    if query.ndim != 4 or key.ndim != 4 or value.ndim != 4:
        shapes = ", ".join(str(tuple(t.shape)) for t in (query, key, value))
        raise ValueError(f"query, key and value must be [batch, heads, tokens, channels], got {shapes}")
    batch, heads, queries, head_dim = query.shape
    kv_heads, keys = key.shape[1], key.shape[2]
    if key.shape[0] != batch or value.shape[:3] != key.shape[:3] or key.shape[3] != head_dim or heads % kv_heads:
        raise ValueError(
            f"query {tuple(query.shape)}, key {tuple(key.shape)} and value {tuple(value.shape)} do not fit: they need "
            "one batch size and head_dim, as many keys as values, and a multiple of the key heads as query heads"
        )
    for term in terms:
        if not hasattr(term, "with_tensors"):
            raise TypeError(f"a term must have groups, tile, tensors and with_tensors, got {type(term).__name__}")
        if heads % term.groups:
            raise ValueError(
                f"{type(term).__name__} has {term.groups} maps, which must divide the number of heads, {heads}"
            )
    if not 0.0 <= dropout < 1.0:
        raise ValueError(f"dropout must be in [0, 1), got {dropout}")
    relation = Allow.of(allow, queries, keys, query.device)
    factor = head_dim**-0.5 if scale is None else float(scale)
    call = BiasedCall(query, key, value, tuple(terms), relation, factor, softcap, sinks, dropout)
    devices = sorted({str(tensor.device) for tensor in call.tensors()})
    if len(devices) > 1:
        raise ValueError(f"query, key, value, sinks and all terms must be on one device, got {', '.join(devices)}")
    return call
