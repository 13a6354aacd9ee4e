"""The terms of a bias, as attention computes them: tensors per query, key and map, and a function of pairs.

Only the kind `Dense` holds one number per pair. `tile` computes a block of pairs in plain PyTorch with gradients; it
is the definition against which every fused implementation is tested.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, fields, replace
from functools import cached_property
from typing import Final, Protocol, TypeVar, runtime_checkable

import torch
from jaxtyping import Float, Int
from torch import Tensor
from torch.nn import functional

T = TypeVar("T", bound="_Tensors")

EPS: Final = 1e-5  # of the guidance network's layer norm, PyTorch's default


def wide(tensor: Tensor) -> Tensor:
    """The tensor in the precision that scores are summed in: float64 stays, everything else becomes float32."""
    return tensor if tensor.dtype == torch.float64 else tensor.float()


def network(hidden: Tensor, scale: Tensor, shift: Tensor, weight: Tensor, offset: Tensor | None = None) -> Tensor:
    """w . GELU(LayerNorm(h)) + b of [batch, groups, ..., hidden] with parameters per group: [batch, groups, ...]."""
    if len(weight) == 1:  # in three operators, which is what decoding waits for
        normal = functional.layer_norm(hidden, hidden.shape[-1:], scale[0], shift[0], EPS)
        return functional.linear(functional.gelu(normal), weight, offset).squeeze(-1)
    normal = functional.layer_norm(hidden, hidden.shape[-1:], eps=EPS)
    shape = (len(weight), *[1] * (hidden.ndim - 3))
    scale, shift, weight = (parameter.view(*shape, -1) for parameter in (scale, shift, weight))
    result = (functional.gelu(scale * normal + shift) * weight).sum(dim=-1)
    return result if offset is None else result + offset.view(shape)


@runtime_checkable
class Term(Protocol):
    """One summand B of the pre-softmax score, as a function of (query, key).

    `groups` maps are shared by the heads: one for all, one per key-value head, or one per query head; map g serves
    heads `g * num_heads / groups` and the ones after it. A term that is a short inner product may also have a method
    `factors()`, which returns its `Factors`: fused attention computes it, and any other is computed by blocks of pairs.
    """

    @property
    def groups(self) -> int: ...

    def tile(self, rows: slice, columns: slice) -> Float[Tensor, "batch groups queries keys"]:
        """B for a block of pairs, in float32 (or float64); the batch dimension may be 1."""
        ...

    def tensors(self) -> dict[str, Tensor]:
        """The tensors that it is made of, by name, in a fixed order; their gradients are computed by blocks."""
        ...

    def with_tensors(self, tensors: list[Tensor]) -> Term: ...


@dataclass(frozen=True, eq=False)
class Factors:
    """A bias as a short inner product, which fused attention computes as further columns of queries and keys.

    B = left_i . right_j - rows_i.

    Attributes:
        left: [batch or 1, groups, queries, rank]; None for ones, and then `right` stays exact in 16 bits, too.
        right: [batch or 1, groups, keys, rank].
        rows: [batch or 1, groups, queries], which softmax sees beside a sink only, or None for 0.
    """

    left: Float[Tensor, "batch groups queries rank"] | None
    right: Float[Tensor, "batch groups keys rank"]
    rows: Float[Tensor, "batch groups queries"] | None = None


@dataclass(frozen=True, eq=False)
class _Tensors:
    """The common base of terms: a handful of tensors, the first [batch, groups, ...], and a few numbers."""

    @property
    def groups(self) -> int:
        return next(iter(self.tensors().values())).shape[1]

    def tensors(self) -> dict[str, Tensor]:
        """Its tensors by field name, in a fixed order; fields that are None are left out."""
        return {f.name: v for f in fields(self) if isinstance(v := getattr(self, f.name), Tensor)}

    def with_tensors(self: T, tensors: Iterable[Tensor]) -> T:
        return replace(self, **dict(zip(self.tensors(), tensors, strict=True)))


@dataclass(frozen=True, eq=False)
class Guidance(_Tensors):
    """The guidance network of Dynamic Asymmetric Attention on pairs: B = w . GELU(LayerNorm(a_i + c_j)) + b.

    The first linear layer acts on a concatenation, so it separates: `a = W_q q + b_1` per query and `c = W_k k` per
    key (daa, sec. 3.2.1; the paper concatenates, which needs n * n vectors of width 2d).

    Attributes:
        rows: a, [batch, groups, queries, hidden].
        columns: c, [batch, groups, keys, hidden].
        scale: gain of the layer norm, [groups, hidden].
        shift: its bias, [groups, hidden].
        weight: w, [groups, hidden].
        offset: b, [groups]. Softmax cannot see it: its gradient is zero.
    """

    rows: Float[Tensor, "batch groups queries hidden"]
    columns: Float[Tensor, "batch groups keys hidden"]
    scale: Float[Tensor, "groups hidden"]
    shift: Float[Tensor, "groups hidden"]
    weight: Float[Tensor, "groups hidden"]
    offset: Float[Tensor, " groups"]

    def tile(self, rows: slice, columns: slice) -> Float[Tensor, "batch groups queries keys"]:
        """B for a block of pairs. Memory: queries * keys * hidden."""
        hidden = wide(self.rows)[:, :, rows, None, :] + wide(self.columns)[:, :, None, columns, :]
        return network(hidden, *map(wide, (self.scale, self.shift, self.weight, self.offset)))


@dataclass(frozen=True, eq=False)
class Product(_Tensors):
    """An inner product of a vector per query and a vector per key: B = u_i . v_j (bilinear, dot, low rank).

    Attributes:
        rows: u, [batch, groups, queries, rank].
        columns: v, [batch, groups, keys, rank].
    """

    rows: Float[Tensor, "batch groups queries rank"]
    columns: Float[Tensor, "batch groups keys rank"]

    def tile(self, rows: slice, columns: slice) -> Float[Tensor, "batch groups queries keys"]:
        return wide(self.rows)[:, :, rows] @ wide(self.columns)[:, :, columns].mT

    def factors(self) -> Factors:
        return Factors(self.rows, self.columns)


@dataclass(frozen=True, eq=False)
class Additive(_Tensors):
    """A number per key, and one per query that softmax cannot see: B = s_j - r_i (key, cumulative gates).

    Attributes:
        columns: s, [batch, groups, keys], float32: in bfloat16 a column of -153 is off by 13 % after the softmax.
        rows: r, [batch or 1, groups, queries], or None for 0. Its gradient is zero; it keeps the map readable.
    """

    columns: Float[Tensor, "batch groups keys"]
    rows: Float[Tensor, "batch_or_1 groups queries"] | None = None

    def tile(self, rows: slice, columns: slice) -> Float[Tensor, "batch groups queries keys"]:
        keys = wide(self.columns)[:, :, None, columns]
        if self.rows is None:
            count = (rows.stop or 0) - (rows.start or 0)
            return keys.expand(-1, -1, count, -1)
        return keys - wide(self.rows)[:, :, rows, None]

    def factors(self) -> Factors:
        return Factors(None, self.columns.unsqueeze(-1), self.rows)


@dataclass(frozen=True, eq=False)
class Offset(_Tensors):
    """A table over the distance between key and query: B = table[bucket(position_j - position_i)] (T5, ALiBi).

    Attributes:
        table: one number per bucket, [groups, buckets].
        bucket_of: the bucket of each distance from -origin to distances - 1 - origin, [distances]; distances beyond
            either end take the bucket there.
        row_positions: position of each query, [batch or 1, queries].
        column_positions: position of each key, [batch or 1, keys].
        origin: index of distance 0 in `bucket_of`.
    """

    table: Float[Tensor, "groups buckets"]
    bucket_of: Int[Tensor, " distances"]
    row_positions: Int[Tensor, "batch queries"]
    column_positions: Int[Tensor, "batch_or_1 keys"]
    origin: int

    @property
    def groups(self) -> int:
        return self.table.shape[0]

    def buckets(self, rows: slice, columns: slice) -> Int[Tensor, "batch queries keys"]:
        distance = self.column_positions[:, None, columns] - self.row_positions[:, rows, None] + self.origin
        return self._bucket_at(distance)

    def diagonals(self, rows: slice, columns: slice) -> Int[Tensor, " diagonals"] | None:
        """The bucket of each diagonal of a block of R x C pairs, by column - row from 1 - R to C - 1.

        None where positions do not go up by one, as in padded and packed batches: then diagonals mix distances.
        """
        (first, last), (left, right) = ((block.start or 0, block.stop) for block in (rows, columns))
        # A compiler does not know positions, and one row of a decoded token has nothing to share.
        if torch.compiler.is_compiling() or last - first == 1 or self._step is None:
            return None
        return self._bucket_at(torch.arange(left - last + 1, right - first, device=self.table.device) + self._step)

    def tile(self, rows: slice, columns: slice) -> Float[Tensor, "batch groups queries keys"]:
        """B for a block of pairs; along a diagonal it is one number where positions go up by one."""
        along = self.diagonals(rows, columns)
        if along is None:
            return wide(self.table)[:, self.buckets(rows, columns)].movedim(0, 1)
        return wide(self.table)[:, along].unfold(-1, columns.stop - (columns.start or 0), 1).flip(-2)[None]

    def to_table(self, rows: slice, columns: slice, gradient: Tensor) -> Float[Tensor, "groups buckets"]:
        """The gradient of the table from that of a block of pairs, summed in a fixed order on every device."""
        along, total = self.diagonals(rows, columns), torch.zeros_like(self.table, dtype=gradient.dtype)
        if along is None:
            along = self.buckets(rows, columns)
            gradient = gradient.sum_to_size((len(along), *gradient.shape[1:])).transpose(0, 1)
        else:
            gradient = diagonal_sums(gradient.sum(dim=0))
        for to_map, part in zip(total, gradient, strict=True):
            if to_map.is_cuda:  # each device has one of these that adds in a fixed order
                to_map.index_put_((along,), part, accumulate=True)
            else:
                to_map.index_add_(0, along.flatten(), part.flatten())
        return total

    def _bucket_at(self, distance: Tensor) -> Tensor:
        return self.bucket_of[distance.clamp(0, self.bucket_of.shape[0] - 1)]

    @cached_property
    def _step(self) -> int | None:
        """Index of the distance from query 0 to key 0, if all positions go up by one and batch elements agree."""
        starts = self.column_positions[:, :1] - self.row_positions[:, :1]
        if not starts.numel():
            return None
        same = (starts == starts[0]).all()
        for side in (self.row_positions, self.column_positions):
            same = same & (side.diff() == 1).all()
        step, regular = torch.stack([starts[0, 0] + self.origin, same.to(starts.dtype)]).tolist()  # looks once
        return step if regular else None


def diagonal_sums(block: Float[Tensor, "*batch rows columns"]) -> Float[Tensor, "*batch diagonals"]:
    """The sum of each diagonal, by column - row from 1 - rows to columns - 1: no scatter, in a fixed order.

    >>> diagonal_sums(torch.tensor([[1.0, 2.0], [3.0, 4.0]])).tolist()
    [3.0, 5.0, 2.0]
    """
    rows, columns = block.shape[-2:]
    count = rows + columns - 1
    # Laid out in lines of rows + columns - 1 numbers, every row begins one place to the right of the row below it.
    padded = functional.pad(block.flip(-2), (0, rows)).flatten(-2)[..., : rows * count]
    return padded.unflatten(-1, (rows, count)).sum(dim=-2)


@dataclass(frozen=True, eq=False)
class Dense(_Tensors):
    """A given number for every pair, such as a pair representation or a graph's distances: B = values.

    Attributes:
        values: [batch or 1, groups, queries, keys].
    """

    values: Float[Tensor, "batch groups queries keys"]

    def tile(self, rows: slice, columns: slice) -> Float[Tensor, "batch groups queries keys"]:
        """B for a block of pairs: a view where the type allows it."""
        return wide(self.values[:, :, rows, columns])


def per_head(tile: Float[Tensor, "batch groups queries keys"], num_heads: int) -> Tensor:
    """A tile of `groups` maps as one per head: [batch, num_heads, queries, keys], without a copy if it is shared."""
    groups = tile.shape[1]
    if groups == 1:
        return tile.expand(-1, num_heads, -1, -1)
    return tile if groups == num_heads else tile.repeat_interleave(num_heads // groups, dim=1)


def bias_of(terms: tuple[Term, ...], num_heads: int, rows: slice, columns: slice) -> Tensor | None:
    """The sum of terms for a block of pairs, [batch or 1, heads or 1, queries, keys], or None without terms."""
    tiles = [term.tile(rows, columns) for term in terms]
    if not tiles:
        return None
    if all(tile.shape[1] == tiles[0].shape[1] for tile in tiles):
        total = sum(tiles[1:], start=tiles[0])
        return total if total.shape[1] == 1 else per_head(total, num_heads)
    return sum((per_head(tile, num_heads) for tile in tiles[1:]), start=per_head(tiles[0], num_heads))
