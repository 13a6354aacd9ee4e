"""Attention with a bias in memory proportional to the number of tokens, in plain PyTorch: the path for CPUs.

A block of queries holds its scores for all keys that any of them may attend to. So the backward pass needs only the
inputs: it computes the block's weights P again, and with dP = dO V^T,

    dS = P * (dP - sum_j P dP),   dB = sum of dS over the heads of a map,   dQ = dS K,   dK = dS^T Q,   dV = P^T dO.

The bias of a block is computed by blocks of pairs (`Tiles`), and gradients of its tensors are added up in place. A map
of the guidance network is kept for the backward pass while it is small. Blocks follow one another in a fixed order:
results do not vary from run to run. Everything runs on other devices too.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any, Final, cast

import torch
from torch import Tensor
from torch.nn import functional

from attnflow.bias.call import BiasedCall
from attnflow.bias.term_tiles import GuidanceTiles, Tiles, extent, strip_of
from attnflow.bias.terms import Guidance, wide

_bmm: Final = torch.bmm
_SCORES: Final = {"cpu": 1 << 22}  # scores held at a time, of all heads and batch elements: 16 MB on a CPU
_SCORES_ELSEWHERE: Final = 1 << 25
_KEPT: Final = 1 << 24  # numbers of a call's bias that are kept for its backward pass: 64 MB
_NARROW: Final = ("cuda",)  # devices whose products of 16-bit numbers are summed in float32
_LEAST_ROWS: Final = 16
_MOST_ROWS: Final = 128


def run(call: BiasedCall) -> Tensor:
    """The output, [batch, heads, queries, value_dim] in the type of the values. Time: that of the allowed pairs."""
    seed = int(torch.randint(1 << 31, ())) if call.dropout else None
    return cast(Tensor, _Tiled.apply(call, seed, *call.tensors()))


class _Tiled(torch.autograd.Function):
    """Keeps all its tensors as saved ones, so that checkpointing and offloading work."""

    @staticmethod
    def forward(ctx: Any, call: BiasedCall, seed: int | None, *tensors: Tensor) -> Tensor:
        ctx.seed = seed
        ctx.empty_call = call.with_tensors([torch.empty_like(tensor, device="meta") for tensor in tensors])
        with torch.autocast(call.query.device.type, enabled=False):
            keep = _KEPT if any(ctx.needs_input_grad) else 0
            output, kept = RowTiles(call.with_tensors(tensors), seed).forward(keep)
        ctx.save_for_backward(*tensors, *kept)
        return output

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(  # pyright: ignore[reportIncompatibleMethodOverride]
        ctx: Any, *grad_outputs: Tensor
    ) -> tuple[Tensor | None, ...]:
        needs = ctx.needs_input_grad[2:]
        saved = ctx.saved_tensors  # once: checkpointing computes them when they are read
        tensors, kept = saved[: len(needs)], saved[len(needs) :]
        call = ctx.empty_call.with_tensors(tensors)
        learns = any(needs[3 if call.sinks is None else 4 :])
        with torch.autocast(call.query.device.type, enabled=False):
            gradients = RowTiles(call, ctx.seed, learns, kept).backward(grad_outputs[0])
        gradients += [None] * (len(needs) - len(gradients))  # those of terms that nobody needs
        triples = zip(gradients, needs, call.tensors(), strict=True)
        return None, None, *(part.to(t.dtype) if need and part is not None else None for part, need, t in triples)


@dataclass(frozen=True)
class Block:
    rows: slice
    columns: slice  # from the first key to the last that one of the queries may attend to
    allowed: Tensor | None  # which pairs of these exist, [batch or 1, heads or 1, rows, columns], or None for all
    seen: Tensor | None = None  # on the host: the keys that each strip of queries may attend to, or None for all
    empty: bool = False  # whether a query may attend to nothing


def blocks_of(call: BiasedCall) -> Iterator[Block]:
    """The blocks of a call, except those whose queries may not attend to anything."""
    device, (batch, heads, queries, _), keys = call.query.device.type, call.query.shape, call.key.shape[2]
    fit = _SCORES.get(device, _SCORES_ELSEWHERE) // max(1, batch * heads * keys)
    most = _MOST_ROWS if device == "cpu" else queries
    step = max(_LEAST_ROWS, min(fit // _LEAST_ROWS * _LEAST_ROWS, most))
    rows = [slice(start, min(start + step, queries)) for start in range(0, queries if keys else 0, step)]
    # A device is asked once, not for every block of every layer, forward and backward.
    made = call.allow.derived(("blocks", step, device), lambda: [_shape(call, block) for block in rows])
    for block in cast("list[Block | None]", made):
        if block is None or block.seen is None:
            yield from () if block is None else (block,)
            continue
        allowed = call.allow.rows(block.rows)
        yield replace(block, allowed=None if allowed is None else allowed[..., block.columns])


def _shape(call: BiasedCall, rows: slice) -> Block | None:
    """A block without the pairs themselves; None where no query may attend to anything."""
    allowed = call.allow.rows(rows)
    if allowed is None:
        return Block(rows, slice(0, call.key.shape[2]), None)
    strip, together = strip_of(call.query.device.type), allowed.flatten(0, 1)
    padded = functional.pad(together.any(dim=0), (0, 0, 0, -together.shape[1] % strip))
    seen = padded.unflatten(0, (-1, strip)).any(dim=1).cpu()
    columns = slice(*extent(seen.any(dim=0)))
    if columns.stop == 0:
        return None
    if bool(together[..., columns].all()):
        return Block(rows, columns, None)
    return Block(rows, columns, None, seen[:, columns], not bool(together.any(dim=-1).all()))


def _product(one: Tensor, other: Tensor) -> Tensor:
    """A batched matrix product, in float32 (or float64); the first factor is rounded to a narrow type of the second."""
    if other.dtype in (torch.float16, torch.bfloat16):
        return _bmm(one.to(other.dtype), other, out_dtype=torch.float32)
    return _bmm(one, other)


class RowTiles:
    """Blocks of queries of one call; `kept` holds tiles of `GuidanceTiles`, in the order of blocks and terms."""

    def __init__(self, call: BiasedCall, seed: int | None, learns: bool = False, kept: Sequence[Tensor] = ()) -> None:
        """`seed` decides which weights dropout drops, None for none; `learns`: gradients of the terms are needed."""
        self.call, self.seed, self.learns, self.kept = call, seed, learns, list(kept)
        self.key, self.value = (self._operand(t).flatten(0, 1) for t in (call.key, call.value))
        self.terms = [
            GuidanceTiles(term, learns) if type(term) is Guidance else Tiles(term, learns) for term in call.terms
        ]

    def forward(self, keep: int = 0) -> tuple[Tensor, list[Tensor]]:
        """(the output, tiles of the guidance network for the backward pass, of `keep` numbers at most)."""
        call, kept = self.call, list[Tensor]()
        output = call.value.new_zeros((*call.query.shape[:3], call.value.shape[3]))
        for block in blocks_of(call):
            biases = self._biases(block)
            weights = self._dropped(self._weights(block, biases)[0], block)
            product = _product(self._by_key_head(weights), self.value[:, block.columns])
            output[:, :, block.rows] = product.view(*weights.shape[:3], -1)
            for tiles, bias in zip(self.terms, biases, strict=True):
                if type(tiles) is GuidanceTiles and (keep := keep - bias.numel()) >= 0:
                    kept.append(bias)
        return output, kept

    def backward(self, gradient: Tensor) -> list[Tensor | None]:
        """Gradients of query, key, value, sinks (if there are any) and, if needed, all tensors of the terms."""
        call = self.call
        learned = self.terms if self.learns else []
        to_query = torch.zeros_like(wide(call.query))
        to_key, to_value = (torch.zeros_like(wide(t)).flatten(0, 1) for t in (call.key, call.value))
        to_sinks = None if call.sinks is None else torch.zeros_like(wide(call.sinks))
        for block in blocks_of(call):
            weights, cap_slope, on_sink = self._weights(block, self._biases(block))
            upstream = self._by_key_head(self._operand(gradient[:, :, block.rows]))
            dropped = self._by_key_head(self._dropped(weights, block))
            to_value[:, block.columns] += _product(dropped.mT, upstream)
            to_weights = _product(upstream, self.value[:, block.columns].mT).view_as(weights)
            to_scores = self._dropped(to_weights, block)
            along = (weights * to_scores).sum(dim=-1, keepdim=True)
            to_scores = to_scores.sub_(along).mul_(weights)
            if to_sinks is not None and on_sink is not None:
                to_sinks -= (on_sink * along).sum(dim=(0, 2, 3))
            for tiles in learned:
                to_bias = to_scores.unflatten(1, (tiles.groups, -1)).sum(dim=2)
                tiles.gather(block.rows, block.columns, block.seen, to_bias)
            if cap_slope is not None:
                to_scores *= cap_slope
            to_products = self._by_key_head(to_scores.mul_(call.scale))
            product = _product(to_products, self.key[:, block.columns])
            to_query[:, :, block.rows] = product.view(*to_scores.shape[:3], -1)
            query = self._by_key_head(self._operand(call.query[:, :, block.rows]))
            to_key[:, block.columns] += _product(to_products.mT, query)
        parts: list[Tensor | None] = [to_query, to_key.view(call.key.shape), to_value.view(call.value.shape)]
        parts += [] if to_sinks is None else [to_sinks]
        return parts + [part for tiles in learned for part in tiles.gradients()]

    def _biases(self, block: Block) -> list[Tensor]:
        """The bias of each term for a block: a kept one, or computed."""
        return [
            self.kept.pop(0)
            if self.kept and type(tiles) is GuidanceTiles
            else tiles.tile(block.rows, block.columns, block.seen)
            for tiles in self.terms
        ]

    def _operand(self, tensor: Tensor) -> Tensor:
        """A tensor as products take it: a GPU multiplies narrow numbers and sums them in float32."""
        return tensor if tensor.device.type in _NARROW else wide(tensor)

    def _weights(self, block: Block, biases: Sequence[Tensor]) -> tuple[Tensor, Tensor | None, Tensor | None]:
        """(weights before dropout, derivative of the soft cap, weight on the sinks) of a block."""
        call = self.call
        query = self._by_key_head(self._operand(call.query[:, :, block.rows]))
        products = _product(query, self.key[:, block.columns].mT).mul_(call.scale)
        score = products.view(call.query.shape[0], call.num_heads, -1, products.shape[-1])
        cap_slope = None
        if call.softcap is not None:
            bent = score.div_(call.softcap).tanh_()
            cap_slope, score = 1 - bent.square(), bent * call.softcap
        shared, allowed = None, block.allowed
        for tile in biases:
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
        if block.empty and allowed is not None:  # a softmax over nothing is NaN
            nothing = ~allowed.any(dim=-1, keepdim=True)
            weights = weights.masked_fill_(nothing, 0.0)
            on_sink = None if on_sink is None else on_sink.masked_fill(nothing, 0.0)
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
