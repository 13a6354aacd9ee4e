"""A bias as further columns of queries and keys, so that attention without a bias computes attention with it.

    scale * [q_i, left_i / scale] . [k_j, right_j] = scale * q_i . k_j + left_i . right_j

(FlashBias, arXiv:2505.12044). Values get columns of zeros, since fused operators want one width for all three. Columns
come last: then sums of q . k are complete before a large bias is added.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, Final, cast

import torch
from torch import Tensor
from torch.nn import functional

from attnflow.bias.call import BiasedCall
from attnflow.bias.terms import Factors, Term, per_head, wide

_MULTIPLE: Final = 8  # of which fused operators want the width of a head
_PARTS: Final = 3  # numbers of 16 bits that hold a float32 number


@dataclass(frozen=True, eq=False)
class Widened:
    """Attention without a bias that computes that of a call.

    Attributes:
        query, key, value: [batch, heads or kv_heads, tokens, width], of one width.
        sinks: what takes weight beside the keys, [batch or 1, heads, queries or 1], or None.
        unseen: tensors that softmax cannot see here; their gradient is zero.
    """

    query: Tensor
    key: Tensor
    value: Tensor
    sinks: Tensor | None
    unseen: tuple[Tensor, ...]


def count(call: BiasedCall) -> int | str:
    """How many columns the terms of a call take, or why columns cannot hold them."""
    total = 0
    for term in call.terms:
        if not hasattr(term, "factors"):
            return f"{type(term).__name__} is no short inner product, which columns of queries and keys could hold"
        kv_heads = call.key.shape[1]
        if kv_heads % term.groups and term.groups % kv_heads:
            return f"{term.groups} maps do not fit {kv_heads} key heads"
        factors = _factors(term)
        parts = _parts_of(call.query.dtype) if factors.left is None else 1
        total += factors.right.shape[-1] * parts * max(1, term.groups // kv_heads)
    return total


def _factors(term: Term) -> Factors:
    return cast(Any, term).factors()


def width_with(columns: int, call: BiasedCall) -> int:
    width = max(call.query.shape[3] + columns, call.value.shape[3])
    return width + -width % _MULTIPLE


def widen(call: BiasedCall) -> Widened:
    """Memory: copies of queries, keys and values with their columns."""
    sides, sinks = ([call.query], [call.key]), None
    if call.sinks is not None:
        sinks = wide(call.sinks)[None, :, None]
    unseen: list[Tensor] = []
    for term in call.terms:
        factors = _factors(term)
        for side, columns in zip(sides, _columns(factors, call), strict=True):
            side.append(columns.expand(*side[0].shape[:3], -1))
        if factors.rows is not None and sinks is not None:  # softmax over (s - r, sink) is that over (s, sink + r)
            sinks = sinks + per_head(wide(factors.rows)[..., None], call.num_heads).squeeze(-1)
        elif factors.rows is not None:
            unseen.append(factors.rows)
    width = width_with(sum(part.shape[3] for part in sides[0][1:]), call)
    query, key = (_filled(torch.cat(side, dim=-1), width) for side in sides)
    return Widened(query, key, _filled(call.value, width), sinks, tuple(unseen))


def _filled(tensor: Tensor, width: int) -> Tensor:
    return functional.pad(tensor, (0, width - tensor.shape[3])) if tensor.shape[3] < width else tensor


def _columns(factors: Factors, call: BiasedCall) -> tuple[Tensor, Tensor]:
    """(columns of every query head, columns of every key head), in the type of the query.

    Key heads that serve several maps hold the columns of all, and each query head reads those of its own.
    """
    dtype, (heads, kv_heads, groups) = call.query.dtype, (call.num_heads, call.key.shape[1], factors.right.shape[1])
    if factors.left is None:
        left, right = _exactly(_wide(factors.right, dtype), call.scale, dtype)
    else:
        left, right = (_wide(factors.left, dtype) / call.scale).to(dtype), factors.right.to(dtype)
    if groups <= kv_heads:
        return per_head(left, heads), per_head(right, kv_heads)
    slots = groups // kv_heads
    right = right.unflatten(1, (kv_heads, slots)).transpose(2, 3).flatten(3)
    slot = torch.arange(heads, device=left.device) * groups // heads % slots
    chosen = functional.one_hot(slot, slots).to(dtype)[:, None, :, None]
    return (chosen * per_head(left, heads)[:, :, :, None]).flatten(3), right


def _wide(tensor: Tensor, dtype: torch.dtype) -> Tensor:
    return wide(tensor).to(torch.promote_types(wide(tensor).dtype, dtype))


def _exactly(numbers: Tensor, scale: float, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Columns [1, 1, 1, parts * rank] of queries and [..., parts * rank] of keys, with scale * left . right = numbers.

    In 16 bits a number is the sum of three, each with a power of two in the query's column that makes it as large as a
    score. Since float16 ends at 65,504, its first part counts 2,048-fold; the gradient comes by the second.
    """
    exponents, carrier = [-round(math.log2(abs(scale)))] * _parts_of(dtype), _parts_of(dtype) // 2
    if dtype == torch.float16:
        exponents = [min(exponent, 15) for exponent in (exponents[0] + 11, *exponents[1:])]
    largest, rest = torch.finfo(dtype).max, numbers
    right: list[Tensor] = []
    for place, exponent in enumerate(exponents):
        factor = scale * 2.0**exponent
        part = (rest if place == carrier else rest.detach()) / factor
        right.append(part.clamp(-largest, largest).to(dtype))
        rest = rest - right[-1].detach().to(rest.dtype) * factor
    left = [right[0].new_full((1, 1, 1, numbers.shape[-1]), 2.0**exponent) for exponent in exponents]
    return torch.cat(left, dim=-1), torch.cat(right, dim=-1)


def _parts_of(dtype: torch.dtype) -> int:
    return 1 if dtype in (torch.float32, torch.float64) else _PARTS
