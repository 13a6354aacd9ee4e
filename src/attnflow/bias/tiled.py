"""Attention with a bias in memory proportional to the number of tokens, in plain PyTorch: the path for CPUs.

A block of queries holds its scores for all keys that any of them may attend to, so that the backward pass needs nothing
but the inputs: it computes the block's weights P again, and with dP = dO V^T,

    dS = P * (dP - sum_j P dP),   dB = sum of dS over the heads of a map,   dQ = dS K,   dK = dS^T Q,   dV = P^T dO.

The bias of a block is computed by blocks of pairs (`term_tiles`). Blocks follow one another in a fixed order: results
do not vary from run to run. Everything runs on other devices too.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Final, cast

import torch
from torch import Tensor

from attnflow.bias.call import Call
from attnflow.bias.term_tiles import GuidanceTiles, Tiles
from attnflow.bias.terms import Guidance, wide

_SCORES: Final = {"cpu": 1 << 22}  # scores held at a time, of all heads and batch elements: 16 MB on a CPU
_SCORES_ELSEWHERE: Final = 1 << 25
_LEAST_ROWS: Final = 16
_MOST_ROWS: Final = 128


def refuses(call: Call) -> str | None:
    """Why this implementation cannot compute the call, or None."""
    if torch.compiler.is_compiling():
        return "its blocks follow the values of the mask, which torch.compile cannot trace"
    return None


def run(call: Call) -> Tensor:
    """The output, [batch, heads, queries, value_dim] in the type of the values. Time: that of the allowed pairs."""
    seed = int(torch.randint(1 << 31, ())) if call.dropout else None
    return cast(Tensor, _Tiled.apply(call, seed, *call.tensors()))


class _Tiled(torch.autograd.Function):
    """Keeps its inputs only, and those as saved tensors, so that checkpointing and offloading work."""

    @staticmethod
    def forward(ctx: Any, call: Call, seed: int | None, *tensors: Tensor) -> Tensor:
        ctx.save_for_backward(*tensors)
        ctx.seed = seed
        ctx.empty_call = call.with_tensors([torch.empty_like(tensor, device="meta") for tensor in tensors])
        with torch.autocast(call.query.device.type, enabled=False):
            return RowTiles(call.with_tensors(tensors), seed).forward()

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(  # pyright: ignore[reportIncompatibleMethodOverride]
        ctx: Any, *grad_outputs: Tensor
    ) -> tuple[Tensor | None, ...]:
        call, needs = ctx.empty_call.with_tensors(ctx.saved_tensors), ctx.needs_input_grad[2:]
        learns = any(needs[3 if call.sinks is None else 4 :])
        with torch.autocast(call.query.device.type, enabled=False):
            gradients = RowTiles(call, ctx.seed, learns).backward(grad_outputs[0])
        gradients += [None] * (len(needs) - len(gradients))  # those of terms that nobody needs
        triples = zip(gradients, needs, call.tensors(), strict=True)
        return None, None, *(part.to(t.dtype) if need and part is not None else None for part, need, t in triples)


@dataclass(frozen=True)
class Block:
    """Some consecutive queries and the range of keys that they may attend to."""

    rows: slice
    columns: slice  # from the first key to the last that one of the queries may attend to
    allowed: Tensor | None  # which pairs of these exist, [batch or 1, heads or 1, rows, columns], or None for all
    empty: Tensor | None  # queries that may attend to nothing, [batch or 1, heads or 1, rows, 1], or None without any


def blocks_of(call: Call) -> Iterator[Block]:
    """The blocks of a call, but those in which no query may attend to anything."""
    device, (batch, heads, queries, _), keys = call.query.device.type, call.query.shape, call.key.shape[2]
    fit = _SCORES.get(device, _SCORES_ELSEWHERE) // max(1, batch * heads * keys)
    most = _MOST_ROWS if device == "cpu" else queries
    step = max(_LEAST_ROWS, min(fit // _LEAST_ROWS * _LEAST_ROWS, most))
    for start in range(0, queries if keys else 0, step):
        rows = slice(start, min(start + step, queries))
        allowed = call.allow.rows(rows)
        if allowed is None:
            yield Block(rows, slice(0, keys), None, None)
            continue
        seen = allowed.flatten(0, 2).any(dim=0).nonzero()
        if not len(seen):
            continue
        columns = slice(int(seen[0]), int(seen[-1]) + 1)
        allowed = allowed[..., columns]
        if bool(allowed.all()):
            yield Block(rows, columns, None, None)
            continue
        empty = ~allowed.any(dim=-1, keepdim=True)
        yield Block(rows, columns, allowed, empty if bool(empty.any()) else None)


class RowTiles:
    """One call, ready to be computed block by block."""

    def __init__(self, call: Call, seed: int | None, learns: bool = False) -> None:
        """`seed` decides which weights dropout drops, None for none; `learns`: gradients of the terms are needed."""
        self.call, self.seed, self.learns = call, seed, learns
        self.key, self.value = (wide(t).flatten(0, 1) for t in (call.key, call.value))
        self.terms = [
            GuidanceTiles(term, learns) if type(term) is Guidance else Tiles(term, learns) for term in call.terms
        ]

    def forward(self) -> Tensor:
        """The output, in the type of the values."""
        call = self.call
        output = call.value.new_zeros((*call.query.shape[:3], call.value.shape[3]))
        for block in blocks_of(call):
            weights = self._dropped(self._weights(block)[0], block)
            product = self._by_key_head(weights) @ self.value[:, block.columns]
            output[:, :, block.rows] = product.view(*weights.shape[:3], -1)
        return output

    def backward(self, gradient: Tensor) -> list[Tensor | None]:
        """Gradients of query, key, value, sinks (if there are any) and, if needed, all tensors of the terms."""
        call = self.call
        learned = self.terms if self.learns else []
        to_query = torch.zeros_like(wide(call.query))
        to_key, to_value = torch.zeros_like(self.key), torch.zeros_like(self.value)
        to_sinks = None if call.sinks is None else torch.zeros_like(wide(call.sinks))
        for block in blocks_of(call):
            weights, cap_slope, on_sink = self._weights(block)
            upstream = self._by_key_head(wide(gradient[:, :, block.rows]))
            dropped = self._by_key_head(self._dropped(weights, block))
            to_value[:, block.columns].baddbmm_(dropped.mT, upstream)
            to_weights = torch.bmm(upstream, self.value[:, block.columns].mT).view_as(weights)
            to_scores = self._dropped(to_weights, block)
            along = (weights * to_scores).sum(dim=-1, keepdim=True)
            to_scores = to_scores.sub_(along).mul_(weights)
            if to_sinks is not None and on_sink is not None:
                to_sinks -= (on_sink * along).sum(dim=(0, 2, 3))
            for tiles in learned:
                to_bias = to_scores.unflatten(1, (tiles.groups, -1)).sum(dim=2)
                tiles.gather(block.rows, block.columns, block.allowed, to_bias)
            if cap_slope is not None:
                to_scores *= cap_slope
            to_products = self._by_key_head(to_scores.mul_(call.scale))
            to_query[:, :, block.rows] = (to_products @ self.key[:, block.columns]).view(*to_scores.shape[:3], -1)
            query = self._by_key_head(wide(call.query[:, :, block.rows]))
            to_key[:, block.columns].baddbmm_(to_products.mT, query)
        parts: list[Tensor | None] = [to_query, to_key.view(call.key.shape), to_value.view(call.value.shape)]
        parts += [] if to_sinks is None else [to_sinks]
        return parts + [part for tiles in learned for part in tiles.gradients()]

    def _weights(self, block: Block) -> tuple[Tensor, Tensor | None, Tensor | None]:
        """(weights before dropout, derivative of the soft cap, weight on the sinks) of a block."""
        call = self.call
        query = self._by_key_head(wide(call.query[:, :, block.rows]) * call.scale)
        products = torch.bmm(query, self.key[:, block.columns].mT)
        score = products.view(call.query.shape[0], call.num_heads, -1, products.shape[-1])
        cap_slope = None
        if call.softcap is not None:
            bent = score.div_(call.softcap).tanh_()
            cap_slope, score = 1 - bent.square(), bent * call.softcap
        shared, allowed = None, block.allowed
        for tiles in self.terms:
            tile = tiles.tile(block.rows, block.columns, allowed)
            if tile.shape[1] == 1:
                shared = tile if shared is None else shared + tile
            else:
                score.unflatten(1, (tile.shape[1], -1)).add_(tile[:, :, None])
        if allowed is not None and (shared is None or allowed.shape[1] > 1):
            score.masked_fill_(~allowed, -torch.inf)
        elif allowed is not None and shared is not None:
            shared = shared.masked_fill(~allowed, -torch.inf)  # in one map rather than in every head
        score = score if shared is None else score.add_(shared)
        weights, on_sink = torch.softmax(score, dim=-1), None
        if call.sinks is not None:
            # exp(s_j) / (sum_k exp(s_k) + exp(sink)) = softmax_j * sigmoid(log-sum-exp - sink).
            beyond = score.logsumexp(dim=-1, keepdim=True) - wide(call.sinks)[:, None, None]
            weights, on_sink = weights.mul_(beyond.sigmoid()), (-beyond).sigmoid()
        if block.empty is not None:  # a softmax over nothing is NaN
            weights = weights.masked_fill_(block.empty, 0.0)
            on_sink = None if on_sink is None else on_sink.masked_fill(block.empty, 0.0)
        return weights, cap_slope, on_sink

    def _dropped(self, weights: Tensor, block: Block) -> Tensor:
        """The weights after dropout: the same ones are dropped whenever the block is computed."""
        if self.seed is None:
            return weights
        generator = torch.Generator(weights.device).manual_seed(self.seed + block.rows.start)
        keep_share = 1 - self.call.dropout
        return torch.empty_like(weights).bernoulli_(keep_share, generator=generator).mul_(weights).div_(keep_share)

    def _by_key_head(self, heads: Tensor) -> Tensor:
        """[batch, heads, rows, n] as [batch * kv_heads, rows of all heads that share a key, n]."""
        return heads.reshape(self.key.shape[0], -1, heads.shape[-1])
