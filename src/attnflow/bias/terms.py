"""The terms of a bias, as attention computes them: tensors per query, key and map, and a function of pairs.

Only the kind `Dense` holds one number per pair. `tile` computes a block of pairs in plain PyTorch with gradients; it
is the definition against which every fused implementation is tested.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, fields, replace
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
    heads `g * num_heads / groups` and the ones after it.
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
        return self.bucket_of[distance.clamp(0, self.bucket_of.shape[0] - 1)]

    def tile(self, rows: slice, columns: slice) -> Float[Tensor, "batch groups queries keys"]:
        return wide(self.table)[:, self.buckets(rows, columns)].movedim(0, 1)


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
