"""Blocks of pairs of one term in plain PyTorch, and the gradients that its tensors gather from them."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final

import torch
from torch import Tensor

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

    def tile(self, rows: slice, columns: slice, seen: Tensor | None) -> Tensor:
        """B for a block of pairs, [batch or 1, groups, queries, keys]; anything finite where `Block.seen` says no."""
        return self.term.tile(rows, columns)

    def gather(self, rows: slice, columns: slice, seen: Tensor | None, gradient: Tensor) -> None:
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
        self.strip = strip_of(device)
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

    def tile(self, rows: slice, columns: slice, seen: Tensor | None) -> Tensor:
        """B for a block of pairs; 0 + offset where it knows that no pair exists."""
        inverse = self._inverse_deviation(rows, columns)
        bias = torch.zeros_like(inverse)
        for i, j in self._subtiles(inverse, seen):
            for index in range(len(bias)):
                x = self._sum(index, rows, columns, i, j)
                z = torch.addcmul(self.shift[index, :, None, None], x, inverse[index, i, j], out=x)
                activated = _gelu(z, out=z)
                bias[index, i, j] = (self.weight[index] @ activated.flatten(1)).view(z.shape[1:])
        bias = bias.unflatten(0, (self.batch, self.groups))
        return bias.add_(wide(self.offset)[:, None, None])

    def gather(self, rows: slice, columns: slice, seen: Tensor | None, gradient: Tensor) -> None:
        """Add what the upstream gradient of a block, 0 where no pair exists, gives to each tensor."""
        upstream = gradient.sum_to_size((self.batch, *gradient.shape[1:])).flatten(0, 1).to(self.rows.dtype)
        inverse = self._inverse_deviation(rows, columns)
        moment = torch.zeros_like(inverse)
        for i, j in self._subtiles(inverse, seen):
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

    def _subtiles(self, tile: Tensor, seen: Tensor | None) -> Iterator[tuple[slice, slice]]:
        """Blocks of a tile that cover every pair that may exist: strips of queries, cut to the keys that they see."""
        _, queries, keys = tile.shape
        for index, start in enumerate(range(0, queries, self.strip)):
            strip = slice(start, min(start + self.strip, queries))
            first, last = (0, keys) if seen is None else extent(seen[index])
            for left in range(first, last, self.width):
                part = slice(left, min(left + self.width, last))
                if seen is None or bool(seen[index, part].any()):
                    yield strip, part


def strip_of(device: str) -> int:
    return _STRIP.get(device, _STRIP_ELSEWHERE)


def extent(seen: Tensor) -> tuple[int, int]:
    """(first, last + 1) of what is True, (0, 0) where nothing is."""
    where = seen.nonzero()
    return (int(where[0]), int(where[-1]) + 1) if len(where) else (0, 0)


def _within(outer: slice, inner: slice) -> slice:
    return slice(outer.start + inner.start, outer.start + inner.stop)
