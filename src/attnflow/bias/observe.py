"""What one attention call does with its bias, for a few of its queries: computed in tiles, never for every pair."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Final

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from attnflow.bias.call import Call
from attnflow.bias.impl.reference import bias_of
from attnflow.bias.terms import Term, per_head, wide

_PAIRS: Final = 1 << 15  # of one bias tile; the guidance network holds its hidden layer for each of them
_SCORES: Final = 1 << 21  # scores held at once: heads x queries x keys
_MOST_ROWS: Final = 64


@dataclass(frozen=True, eq=False)
class Observed:
    """Some queries of one call; a map for each head asked for, or one, the mean over heads.

    Attributes:
        raw: B, 0 where the mask forbids the pair.
        bias: B less its mean over the keys that the query may attend to, 0 elsewhere: what softmax sees.
        allowed: which pairs exist (for the mean: in any head).
        weights: post-softmax weights with B.
        weights_without: of the same queries and keys without B.
    """

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
    _check(call, heads, sequence)
    blocks = [_block(call, terms, block, heads, sequence) for block in _blocks(call, queries)]
    if not blocks:
        empty = torch.zeros(1 if heads is None else len(heads), 0, call.key.shape[2])
        return Observed(empty, empty, empty.bool(), empty, empty)
    return Observed(*(torch.cat(parts, dim=1) for parts in zip(*blocks, strict=True)))


def _check(call: Call, heads: Sequence[int] | None, sequence: int) -> None:
    if not 0 <= sequence < call.query.shape[0]:
        raise ValueError(f"sequence must be a number of the batch, 0 to {call.query.shape[0] - 1}, got {sequence}")
    wrong = [head for head in heads or () if not 0 <= head < call.num_heads]
    if wrong:
        raise ValueError(f"heads must lie in 0 to {call.num_heads - 1}, got {wrong}")


def _blocks(call: Call, queries: Sequence[int]) -> Iterator[slice]:
    """The queries as slices of neighbours, short enough for the scores of one to fit."""
    most = max(1, min(_MOST_ROWS, _SCORES // (call.num_heads * call.key.shape[2])))
    cuts = [i for i, (a, b) in enumerate(pairwise(queries), 1) if b != a + 1]
    for start, stop in pairwise([0, *cuts, len(queries)]):
        for first in range(start, stop, most):
            last = min(first + most, stop) - 1
            yield slice(queries[first], queries[last] + 1)


def _block(
    call: Call, terms: int, block: slice, heads: Sequence[int] | None, sequence: int
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    score = _scores(call, block, sequence)
    other = _tiled(call.terms[terms:], call, block, sequence)
    if other is not None:
        score = score + per_head(other[None], call.num_heads)[0]
    allowed = _allowed(call, block, sequence)
    raw = _tiled(call.terms[:terms], call, block, sequence)
    if raw is None:
        raw = score.new_zeros(1, *score.shape[1:])
    without = _softmax(call, score, allowed)
    weights = without if terms == 0 else _softmax(call, score + per_head(raw[None], call.num_heads)[0], allowed)
    if max(raw.shape[0], allowed.shape[0]) > 1 or heads is not None:
        raw, allowed = per_head(raw[None], call.num_heads)[0], allowed.expand(call.num_heads, -1, -1)
    raw_allowed = raw.double().masked_fill(~allowed, 0.0)
    mean = raw_allowed.sum(dim=-1, keepdim=True) / allowed.sum(dim=-1, keepdim=True).clamp(min=1)
    centred = (raw_allowed - mean).masked_fill(~allowed, 0.0)
    parts = (raw_allowed, centred, allowed, weights, without)
    if heads is None:
        return tuple(_mean(part).cpu() for part in parts)  # pyright: ignore[reportReturnType]
    chosen = torch.tensor(heads, device=raw.device)
    return tuple((t if t.dtype == torch.bool else t.float())[chosen].cpu() for t in parts)  # pyright: ignore[reportReturnType]


def _mean(maps: Tensor) -> Tensor:
    """Over the first dimension, which stays."""
    if maps.dtype == torch.bool:
        return maps.any(dim=0, keepdim=True)
    return maps.mean(dim=0, keepdim=True).float()


def _scores(call: Call, block: slice, sequence: int) -> Float[Tensor, "heads queries keys"]:
    """Scaled, softcapped products of queries and keys; the heads of one key-value head are one matrix product."""
    query = wide(call.query[sequence, :, block])
    heads, rows, head_dim = query.shape
    grouped = query.reshape(call.key.shape[1], call.heads_per_kv * rows, head_dim)
    score = (grouped @ wide(call.key[sequence]).mT).view(heads, rows, -1) * call.scale
    return score if call.softcap is None else call.softcap * torch.tanh(score / call.softcap)


def _tiled(terms: tuple[Term, ...], call: Call, block: slice, sequence: int) -> Tensor | None:
    """The sum of terms for a block of queries and all keys, [groups, queries, keys]; a few columns at a time."""
    if not terms:
        return None
    keys, maps = call.key.shape[2], max(term.groups for term in terms)
    width = max(1, _PAIRS // (call.query.shape[0] * maps * (block.stop - block.start)))
    parts: list[Tensor] = []
    for start in range(0, keys, width):
        tile = bias_of(terms, call.num_heads, block, slice(start, min(start + width, keys)))
        assert tile is not None
        parts.append(tile[sequence if tile.shape[0] > 1 else 0])
    return torch.cat(parts, dim=-1)


def _allowed(call: Call, block: slice, sequence: int) -> Bool[Tensor, "heads_or_1 queries keys"]:
    rows = call.allow.rows(block)
    if rows is None:
        size = (1, block.stop - block.start, call.key.shape[2])
        return torch.ones(size, dtype=torch.bool, device=call.query.device)
    return rows[sequence if rows.shape[0] > 1 else 0].to(call.query.device)


def _softmax(call: Call, score: Tensor, allowed: Tensor) -> Float[Tensor, "heads queries keys"]:
    """The weights; all zero for a query that may attend to nothing."""
    empty = ~allowed.any(dim=-1, keepdim=True)
    score = score.masked_fill(~(allowed | empty), -torch.inf)
    if call.sinks is not None:
        sink = wide(call.sinks)[:, None, None].expand(*score.shape[:2], 1)
        score = torch.cat([score, sink], dim=-1)
    weights = score.softmax(dim=-1).masked_fill(empty, 0.0)
    return weights if call.sinks is None else weights[..., :-1]
