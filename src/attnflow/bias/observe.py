"""What one attention call does with its bias, for a few of its queries: computed in tiles, never for every pair."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import pairwise
from typing import Final, NamedTuple

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from attnflow.bias.attention import bias_of, weights_of
from attnflow.bias.call import Allow, Call
from attnflow.bias.terms import Dense, Term, wide

_PAIRS: Final = 1 << 15  # of one bias tile; the guidance network holds its hidden layer for each of them
_SCORES: Final = 1 << 21  # scores held at once: heads x queries x keys
_MOST_ROWS: Final = 64


class Observed(NamedTuple):
    """Some queries of one call; a map for each head asked for, or one, the mean over heads. As in `LayerMap`."""

    raw: Float[Tensor, "maps queries keys"]
    bias: Float[Tensor, "maps queries keys"]
    allowed: Bool[Tensor, "maps queries keys"]
    weights: Float[Tensor, "maps queries keys"]
    weights_without: Float[Tensor, "maps queries keys"]


@torch.no_grad()
def observe(
    call: Call, terms: int, queries: Sequence[int], heads: Sequence[int] | None = None, sequence: int = 0
) -> Observed:
    """B and the weights for some queries of one sequence of a call, on the CPU in float32.

    Args:
        call: an attention call.
        terms: how many of its terms, from the first, are the bias; the rest belongs to the scores without it.
        queries: rows of the call, ascending.
        heads: query heads to tell apart; None for the mean over all of them.
        sequence: number in the batch.

    Raises:
        ValueError: a sequence or a head that the call does not have.

    Cost: memory O(queries x keys) for the result, and a few MB beside it; time O(queries x keys x head_dim x heads).
    """
    if not 0 <= sequence < call.query.shape[0]:
        raise ValueError(f"sequence must be a number of the batch, 0 to {call.query.shape[0] - 1}, got {sequence}")
    wrong = [head for head in heads or () if not 0 <= head < call.num_heads]
    if wrong:
        raise ValueError(f"heads must lie in 0 to {call.num_heads - 1}, got {wrong}")
    blocks = [_block(call, terms, block, heads, sequence) for block in _blocks(call, queries)]
    if not blocks:
        empty = torch.zeros(1 if heads is None else len(heads), 0, call.key.shape[2])
        return Observed(empty, empty, empty.bool(), empty, empty)
    return Observed(*(torch.cat(parts, dim=1) for parts in zip(*blocks, strict=True)))


def _blocks(call: Call, queries: Sequence[int]) -> Iterator[slice]:
    """The queries as slices of neighbours, short enough for the scores of one to fit."""
    most = max(1, min(_MOST_ROWS, _SCORES // (call.num_heads * call.key.shape[2])))
    cuts = [i for i, (a, b) in enumerate(pairwise(queries), 1) if b != a + 1]
    for start, stop in pairwise([0, *cuts, len(queries)]):
        for first in range(start, stop, most):
            last = min(first + most, stop) - 1
            yield slice(queries[first], queries[last] + 1)


def _block(call: Call, terms: int, block: slice, heads: Sequence[int] | None, sequence: int) -> tuple[Tensor, ...]:
    """The parts of `Observed` for neighbouring queries."""
    one = slice(sequence, sequence + 1)
    raw, centred, allowed = _centred(call, terms, block, one)
    rest = _tiled(call, call.terms[terms:], block, one)
    other = () if rest is None else (Dense(rest),)
    part = replace(call, query=call.query[one, :, block], key=call.key[one], value=call.value[one], terms=other)
    part = replace(part, allow=Allow.from_dense(allowed))
    without = weights_of(part)
    added = Dense(raw.to(without.dtype))
    weights = without if terms == 0 else weights_of(replace(part, terms=(*other, added)))
    parts = (tensor[0] for tensor in (raw, centred, allowed, weights, without))
    if heads is None:
        maps = (t.any(dim=0, keepdim=True) if t.dtype == torch.bool else t.mean(dim=0, keepdim=True) for t in parts)
    else:
        chosen = torch.tensor(heads, device=raw.device)
        maps = (t.expand(call.num_heads, -1, -1)[chosen] for t in parts)
    return tuple((t if t.dtype == torch.bool else t.float()).cpu() for t in maps)


def _centred(call: Call, terms: int, block: slice, sequences: slice) -> tuple[Tensor, Tensor, Tensor]:
    """(B in float64, 0 where there is no pair; the same less its mean over the keys of each query; which pairs exist).

    Each is [batch, maps, queries, keys], one map if one serves all heads.
    """
    rows, size = call.allow.rows(block), (1, 1, block.stop - block.start, call.key.shape[2])
    if rows is None:
        rows = torch.ones(size, dtype=torch.bool)
    allowed = rows if len(rows) == 1 else rows[sequences]
    bias = _tiled(call, call.terms[:terms], block, sequences)
    bias = torch.zeros(size, device=call.query.device) if bias is None else bias
    bias, allowed = torch.broadcast_tensors(bias.double(), allowed.to(call.query.device))
    raw = bias.masked_fill(~allowed, 0.0)
    mean = raw.sum(dim=-1, keepdim=True) / allowed.sum(dim=-1, keepdim=True).clamp(min=1)
    return raw, (raw - mean).masked_fill(~allowed, 0.0), allowed


def _tiled(call: Call, terms: tuple[Term, ...], block: slice, sequences: slice) -> Tensor | None:
    """The sum of terms for neighbouring queries and all keys, [batch or 1, 1 or heads, queries, keys], in tiles."""
    if not terms:
        return None
    keys, maps = call.key.shape[2], max(term.groups for term in terms)
    width = max(1, _PAIRS // (call.query.shape[0] * maps * (block.stop - block.start)))
    parts: list[Tensor] = []
    for start in range(0, keys, width):
        tile = bias_of(terms, call.num_heads, block, slice(start, min(start + width, keys)))
        assert tile is not None
        parts.append(wide(tile if len(tile) == 1 else tile[sequences]))
    return torch.cat(parts, dim=-1)
