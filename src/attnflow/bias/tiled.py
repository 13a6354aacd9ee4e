"""Attention with a bias in memory proportional to the number of tokens, in plain PyTorch: the path for CPUs.

A block of queries holds its scores for all keys that any of them may attend to. So the backward pass needs only the
inputs: it computes the block's weights P again, and with dP = dO V^T,

    dS = P * (dP - sum_j P dP),   dB = sum of dS over the heads of a map,   dQ = dS K,   dK = dS^T Q,   dV = P^T dO.

The bias of a block is computed by blocks of pairs (`Tiles`), and gradients of its tensors are added up in place. Blocks
follow one another in a fixed order: results do not vary from run to run. Everything runs on other devices too.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Final, cast

import torch
from torch import Tensor

from attnflow.bias.call import BiasedCall
from attnflow.bias.terms import EPS, Additive, Dense, Guidance, Offset, Product, Term, wide

# Numbers in a sub-tile, 4 MB on a CPU: small enough for the caches, large enough for threads to share each pass.
_SUBTILE: Final = {"cpu": 1 << 20}
_SUBTILE_ELSEWHERE: Final = 1 << 23
_STRIP: Final = {"cpu": 16}  # queries of a sub-tile: few, so that little is computed beyond a causal diagonal
_STRIP_ELSEWHERE: Final = 128

_gelu: Final = torch.ops.aten.gelu.out
_gelu_backward: Final = torch.ops.aten.gelu_backward.grad_input


class Tiles:
    """Computes blocks of pairs of one term, and gathers gradients of its tensors from them if it `learns`."""

    def __init__(self, term: Term, learns: bool) -> None:
        self.term, self.groups = term, term.groups
        self.sums = [torch.zeros_like(wide(t)) for t in term.tensors().values()] if learns else []

    def tile(self, rows: slice, columns: slice, allowed: Tensor | None) -> Tensor:
        """B for a block of pairs, [batch or 1, groups, queries, keys]; anything finite where no pair is allowed."""
        return self.term.tile(rows, columns)

    def gather(self, rows: slice, columns: slice, allowed: Tensor | None, gradient: Tensor) -> None:
        """Add what the upstream gradient of a block, [batch, groups, queries, keys], gives to each tensor."""
        term, sums = self.term, self.sums
        if type(term) is Product:
            gradient = gradient.to(sums[0].dtype)
            _add(sums[0][:, :, rows], gradient @ wide(term.columns[:, :, columns]))
            _add(sums[1][:, :, columns], gradient.mT @ wide(term.rows[:, :, rows]))
        elif type(term) is Additive:
            _add(sums[0][:, :, columns], gradient.sum(dim=2))
            if term.rows is not None:
                _add(sums[1][:, :, rows], -gradient.sum(dim=3))
        elif type(term) is Dense:
            _add(sums[0][:, :, rows, columns], gradient)
        elif type(term) is Offset:
            sums[0].add_(term.to_table(rows, columns, gradient.to(sums[0].dtype)))
        else:  # its tile is computed again
            tensors = [t.detach().requires_grad_(t.is_floating_point()) for t in term.tensors().values()]
            places = [place for place, tensor in enumerate(tensors) if tensor.requires_grad]
            with torch.enable_grad():
                tile = term.with_tensors(tensors).tile(rows, columns)
                upstream = gradient.sum_to_size(tile.shape).to(tile.dtype)
                parts = torch.autograd.grad(tile, [tensors[i] for i in places], upstream, materialize_grads=True)
            for place, part in zip(places, parts, strict=True):
                sums[place].add_(part)

    def gradients(self) -> list[Tensor | None]:
        """The gradient of each of the term's tensors from all blocks gathered, None for integers."""
        tensors = self.term.tensors().values()
        return [total if t.is_floating_point() else None for total, t in zip(self.sums, tensors, strict=True)]


def _add(total: Tensor, part: Tensor) -> None:
    """In place; one tensor may serve all batch elements."""
    total.add_(part.sum_to_size(total.shape))


class GuidanceTiles(Tiles):
    """Tiles of one `Guidance` term, and the gradients that its tensors gather from them.

    Its network on blocks of pairs goes in sub-tiles that stay in the processor's cache. The layer norm of a sum
    separates (a_i and c_j centred over the d hidden units): var_ij = (|a_i|^2 + |c_j|^2 + 2 a_i . c_j) / d is one small
    matrix product, and the hidden layer z = r_ij (gain a_i + gain c_j) + shift with r = 1 / sqrt(var + eps) takes two
    passes.
    Backward, with the upstream gradient G and P = r G GELU'(z):

        d weight = sum_ij GELU(z) G              d shift = weight * sum_ij P / r
        R_i = sum_j P_ij,  C_j = sum_i P_ij      d gain = weight * (sum_i a_i R_i + sum_j c_j C_j)
        m_ij = r^2 / d * sum_h weight P x,       x = gain (a_i + c_j)
        d a_i = centred(gain weight R_i) - a_i sum_j m_ij - sum_j m_ij c_j, and likewise d c_j

    so that nothing of width d but three sub-tiles is ever held, and each is read a handful of times. The hidden unit is
    the first dimension: then every pass runs along the keys, and hidden units share every factor of a pair.
    """

    def __init__(self, term: Guidance, learns: bool) -> None:
        self.offset = term.offset
        self.batch, self.groups, _, self.hidden = term.rows.shape
        # One map for each batch element and group from here on: [maps, ...].
        self.gain, self.shift, self.weight = (
            wide(t).repeat(self.batch, 1) for t in (term.scale, term.shift, term.weight)
        )
        self.rows, self.row_squares, self.scaled_rows = self._prepare(term.rows)
        self.columns, self.column_squares, self.scaled_columns = self._prepare(term.columns)
        device = term.rows.device.type
        self.strip = _STRIP.get(device, _STRIP_ELSEWHERE)
        fit = _SUBTILE.get(device, _SUBTILE_ELSEWHERE) // (self.hidden * self.strip)
        self.width = max(1, min(fit, self.columns.shape[1]))
        self._buffers = self.rows.new_empty((3, self.hidden * self.strip * self.width))
        if learns:
            self.by_row, self.by_column = torch.zeros_like(self.scaled_rows), torch.zeros_like(self.scaled_columns)
            self.from_rows, self.from_columns = torch.zeros_like(self.rows), torch.zeros_like(self.columns)
            self.to_weight, self.to_shift = torch.zeros_like(self.weight), torch.zeros_like(self.weight)
            self.to_offset = self.weight.new_zeros(len(self.weight))

    def _prepare(self, features: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Centred features [maps, tokens, hidden], their mean squares, and gain * centred, [maps, hidden, tokens]."""
        centred = wide(features).flatten(0, 1)
        centred = centred - centred.mean(dim=-1, keepdim=True)
        return centred, centred.double().square().mean(dim=-1), (centred.mT * self.gain[:, :, None]).contiguous()

    def tile(self, rows: slice, columns: slice, allowed: Tensor | None) -> Tensor:
        """B for a block of pairs; 0 + offset where it knows that no pair exists."""
        inverse = self._inverse_deviation(rows, columns)
        bias = torch.zeros_like(inverse)
        for i, j in self._subtiles(inverse, allowed):
            for index in range(len(bias)):
                x = self._sum(index, rows, columns, i, j)
                z = torch.addcmul(self.shift[index, :, None, None], x, inverse[index, i, j], out=x)
                activated = _gelu(z, out=z)
                bias[index, i, j] = (self.weight[index] @ activated.flatten(1)).view(z.shape[1:])
        bias = bias.unflatten(0, (self.batch, self.groups))
        return bias.add_(wide(self.offset)[:, None, None])

    def gather(self, rows: slice, columns: slice, allowed: Tensor | None, gradient: Tensor) -> None:
        """Add what the upstream gradient of a block, 0 where no pair exists, gives to each tensor."""
        upstream = gradient.sum_to_size((self.batch, *gradient.shape[1:])).flatten(0, 1).to(self.rows.dtype)
        inverse = self._inverse_deviation(rows, columns)
        moment = torch.zeros_like(inverse)
        for i, j in self._subtiles(inverse, allowed):
            for index in range(len(moment)):
                x = self._sum(index, rows, columns, i, j)
                pair = (index, i, j)
                slope = self._slope(index, x, upstream[pair], inverse[pair])
                self.by_row[index, :, _within(rows, i)] += slope.sum(dim=2)
                self.by_column[index, :, _within(columns, j)] += slope.sum(dim=1)
                moment[pair] = (self.weight[index] @ x.mul_(slope).flatten(1)).view(x.shape[1:])
        moment *= inverse.square_().div_(self.hidden)
        a, c = self.rows[:, rows], self.columns[:, columns]
        self.from_rows[:, rows].baddbmm_(moment, c, alpha=-1).sub_(a * moment.sum(dim=2)[..., None])
        self.from_columns[:, columns].baddbmm_(moment.mT, a, alpha=-1).sub_(c * moment.sum(dim=1)[..., None])
        self.to_offset += upstream.sum(dim=(1, 2))

    def gradients(self) -> list[Tensor | None]:
        factor = (self.gain * self.weight)[:, None]
        sides: list[Tensor | None] = []
        to_gain = torch.zeros_like(self.gain)
        for features, gathered, rest in (
            (self.rows, self.by_row.mT, self.from_rows),
            (self.columns, self.by_column.mT, self.from_columns),
        ):
            direct = gathered * factor
            side = rest.add_(direct).sub_(direct.mean(dim=-1, keepdim=True))
            sides.append(side.unflatten(0, (self.batch, self.groups)))
            to_gain += (features * gathered).sum(dim=1)
        parameters = to_gain * self.weight, self.to_shift * self.weight, self.to_weight, self.to_offset
        return sides + [p.unflatten(0, (self.batch, self.groups)).sum(dim=0) for p in parameters]

    def _inverse_deviation(self, rows: slice, columns: slice) -> Tensor:
        """r, [maps, queries, keys]; summed in float64, because the squares cancel where a_i is close to -c_j."""
        squares = self.row_squares[:, rows, None] + self.column_squares[:, None, columns]
        a, c = self.rows[:, rows].double(), self.columns[:, columns].double()
        variance = squares.baddbmm_(a, c.mT, alpha=2 / self.hidden)
        return variance.clamp_(min=0).add_(EPS).rsqrt_().to(self.rows.dtype)

    def _sum(self, index: int, rows: slice, columns: slice, i: slice, j: slice) -> Tensor:
        """x = gain (a_i + c_j) in the first buffer, [hidden, queries, keys]."""
        a = self.scaled_rows[index, :, _within(rows, i), None]
        c = self.scaled_columns[index, :, None, _within(columns, j)]
        shape = (self.hidden, a.shape[1], c.shape[2])
        return torch.add(a, c, out=self._buffers[0, : shape[0] * shape[1] * shape[2]].view(shape))

    def _slope(self, index: int, x: Tensor, upstream: Tensor, inverse: Tensor) -> Tensor:
        """P, from x, in the second buffer; the gradients of weight and shift are added up on the way."""
        z, activated = (buffer[: x.numel()].view_as(x) for buffer in self._buffers[1:])
        torch.addcmul(self.shift[index, :, None, None], x, inverse, out=z)
        _gelu(z, out=activated)
        self.to_weight[index] += activated.flatten(1) @ upstream.flatten()
        slope = _gelu_backward((upstream * inverse).expand_as(z), z, grad_input=z)
        self.to_shift[index] += slope.flatten(1) @ inverse.reciprocal().flatten()
        return slope

    def _subtiles(self, tile: Tensor, allowed: Tensor | None) -> Iterator[tuple[slice, slice]]:
        """Blocks of a tile that cover every pair that may exist: strips of queries, cut to the keys that they see."""
        _, queries, keys = tile.shape
        for start in range(0, queries, self.strip):
            strip = slice(start, min(start + self.strip, queries))
            first, last, seen = 0, keys, None
            if allowed is not None:
                seen = allowed[:, :, strip].flatten(0, 2).any(dim=0)
                where = seen.nonzero()
                first, last = (int(where[0]), int(where[-1]) + 1) if len(where) else (0, 0)
            for left in range(first, last, self.width):
                part = slice(left, min(left + self.width, last))
                if seen is None or bool(seen[part].any()):
                    yield strip, part


def _within(outer: slice, inner: slice) -> slice:
    return slice(outer.start + inner.start, outer.start + inner.stop)


_SCORES: Final = {"cpu": 1 << 22}  # scores held at a time, of all heads and batch elements: 16 MB on a CPU
_SCORES_ELSEWHERE: Final = 1 << 25
_LEAST_ROWS: Final = 16
_MOST_ROWS: Final = 128


def run(call: BiasedCall) -> Tensor:
    """The output, [batch, heads, queries, value_dim] in the type of the values. Time: that of the allowed pairs."""
    seed = int(torch.randint(1 << 31, ())) if call.dropout else None
    return cast(Tensor, _Tiled.apply(call, seed, *call.tensors()))


class _Tiled(torch.autograd.Function):
    """Keeps its inputs only, and those as saved tensors, so that checkpointing and offloading work."""

    @staticmethod
    def forward(ctx: Any, call: BiasedCall, seed: int | None, *tensors: Tensor) -> Tensor:
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
    rows: slice
    columns: slice  # from the first key to the last that one of the queries may attend to
    allowed: Tensor | None  # which pairs of these exist, [batch or 1, heads or 1, rows, columns], or None for all
    empty: Tensor | None  # queries that may attend to nothing, [batch or 1, heads or 1, rows, 1], or None without any


def blocks_of(call: BiasedCall) -> Iterator[Block]:
    """The blocks of a call, except those whose queries may not attend to anything."""
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
    def __init__(self, call: BiasedCall, seed: int | None, learns: bool = False) -> None:
        """`seed` decides which weights dropout drops, None for none; `learns`: gradients of the terms are needed."""
        self.call, self.seed, self.learns = call, seed, learns
        self.key, self.value = (wide(t).flatten(0, 1) for t in (call.key, call.value))
        self.terms = [
            GuidanceTiles(term, learns) if type(term) is Guidance else Tiles(term, learns) for term in call.terms
        ]

    def forward(self) -> Tensor:
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
