"""A call as the kernels take it: terms of one kind merged, all maps of pairs brought to one number of groups."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, fields, replace
from functools import reduce
from typing import Any, Final, TypeVar

import torch
from torch import Tensor

from attnflow.bias.call import Call
from attnflow.bias.impl.triton import tuning
from attnflow.bias.impl.triton.blocks import Blocks
from attnflow.bias.terms import Additive, Dense, Guidance, Offset, Product, Term

AnyTerm = TypeVar("AnyTerm", bound=Term)
_BY_BATCH_AND_MAP: Final = ("query", "key", "value", "columns", "sinks", "dense", "rows", "cols", "left", "right")


@dataclass(frozen=True, eq=False)
class Inputs:
    """Arguments of the operators, in their order. The last dimension of query, key, value, and vectors is contiguous.

    Attributes:
        query, key, value: as in the call.
        columns: what depends on the key alone, float32 [batch, its own groups, keys].
        sinks: float32 [batch, heads, queries].
        dense: [batch or 1, groups, queries, keys].
        rows, cols: vectors of the guidance network, [batch, groups, tokens, hidden].
        gain, shift, weight: its float32 parameters [groups, hidden].
        left, right: [batch, groups, tokens, rank].
        table: float32 [groups, buckets].
        bucket_of, row_positions, column_positions, origin: as in `Offset`, int32.
        blocks: `Blocks.flat()`.
        scale: of q k^T.
        softcap: of scale * q k^T, or 0 for none.
    """

    query: Tensor
    key: Tensor
    value: Tensor
    columns: Tensor | None
    sinks: Tensor | None
    dense: Tensor | None
    rows: Tensor | None
    cols: Tensor | None
    gain: Tensor | None
    shift: Tensor | None
    weight: Tensor | None
    left: Tensor | None
    right: Tensor | None
    table: Tensor | None
    bucket_of: Tensor | None
    row_positions: Tensor | None
    column_positions: Tensor | None
    origin: int
    blocks: list[Tensor]
    scale: float
    softcap: float

    def arguments(self) -> list[Any]:
        """The values of all fields."""
        return [getattr(self, name) for name in NAMES]

    @property
    def relation(self) -> Blocks:
        """The mask."""
        return Blocks.unflat(self.blocks)

    @property
    def groups(self) -> int:
        """Number of maps of pairs, 0 if there are none."""
        for tensor in (self.rows, self.left, self.dense):
            if tensor is not None:
                return tensor.shape[1]
        return 0 if self.table is None else self.table.shape[0]

    @property
    def only_dense(self) -> bool:
        """Whether the bias of pairs is already there, as a tensor."""
        return self.dense is not None and self.rows is None and self.left is None and self.table is None

    @property
    def must_build(self) -> bool:
        """Whether a bias of pairs has to be materialised."""
        return self.groups > 0 and not self.only_dense

    @property
    def tiles(self) -> tuning.Tiles:
        """Sizes of the kernels' tiles."""
        width = max(self.query.shape[3], self.value.shape[3])
        return tuning.tiles(width, self.query.dtype, self.query.shape[2])

    @property
    def pair_type(self) -> torch.dtype:
        """Type of the materialised bias.

        float16 where the model is in 16 bits and the bias is a network or a product of learned vectors: such values are
        of the order of the scores, and it has three bits more than bfloat16. Given numbers and tables by distance can
        be large, and stay in float32.
        """
        learned = self.table is None and self.dense is None
        return torch.float16 if learned and self.query.dtype != torch.float32 else torch.float32

    def pair_bytes(self) -> int:
        """Of the materialised bias of one map of one batch element."""
        words = self.blocks[0]
        return words.shape[2] * words.shape[3] * 64 * self.pair_type.itemsize

    def part(self, batch: slice, maps: slice) -> Inputs:
        """The same call for some batch elements and maps, and the heads that they serve."""
        groups, num_heads = max(1, self.groups), self.query.shape[1]
        if batch == slice(0, self.query.shape[0]) and maps == slice(0, groups):
            return self

        def cut(tensor: Tensor | None, batched: bool = True, grouped: bool = True) -> Tensor | None:
            if tensor is None:
                return None
            if batched and tensor.shape[0] > 1:
                tensor = tensor[batch]
            dim = 1 if batched else 0
            if grouped and (count := tensor.shape[dim]) > 1:
                tensor = tensor.narrow(dim, maps.start * count // groups, (maps.stop - maps.start) * count // groups)
            return tensor

        changed: dict[str, Any] = {"blocks": [cut(t, grouped=t.shape[1] == num_heads) for t in self.blocks]}
        for name in _BY_BATCH_AND_MAP:
            changed[name] = cut(getattr(self, name))
        for name in ("gain", "shift", "weight", "table"):
            changed[name] = cut(getattr(self, name), batched=False)
        for name in ("row_positions", "column_positions"):
            changed[name] = cut(getattr(self, name), grouped=False)
        return replace(self, **changed)

    def parts(self, limit: int, each: int) -> Iterator[tuple[slice, slice]]:
        """(batch elements, maps) in pieces of at most `limit` bytes where one map takes `each`, if that can be.

        A piece holds whole key-value heads, so that no gradient is spread over two of them.
        """
        batch, heads, kv, groups = self.query.shape[0], self.query.shape[1], self.key.shape[1], max(1, self.groups)
        shared = 1 if self.columns is None or self.columns.shape[1] == 1 else heads // self.columns.shape[1]
        unit = math.lcm(heads // groups, heads // kv, shared) // (heads // groups)
        maps = max(unit, min(groups, limit // max(1, each)) // unit * unit)
        elements = max(1, min(batch, limit // max(1, each * maps))) if maps >= groups else 1
        for start in range(0, batch, elements):
            for first in range(0, groups, maps):
                yield slice(start, min(start + elements, batch)), slice(first, min(first + maps, groups))


NAMES: Final = tuple(field.name for field in fields(Inputs))


def pack(call: Call, blocks: list[Tensor]) -> tuple[Inputs, list[Tensor]]:
    """(the inputs of a call, tensors that cannot change its output and have a gradient of zero)."""
    batch, heads, queries, _ = call.query.shape
    additive, guidance, offsets = _of(call, Additive), _of(call, Guidance), _of(call, Offset)
    products, dense = _of(call, Product), _dense_values(call)
    maps = [term.groups for term in (*guidance, *products, *offsets[:1])] + [values.shape[1] for values in dense]
    groups = reduce(math.lcm, maps, 1)
    packed: dict[str, Any] = dict.fromkeys(NAMES)
    packed |= {"query": _inner(call.query), "key": _inner(call.key), "value": _inner(call.value)}
    packed |= {"origin": 0, "blocks": blocks, "scale": call.scale, "softcap": call.softcap or 0.0}
    if additive:
        shared = reduce(math.lcm, (term.groups for term in additive))
        columns = _sum([_spread(term.columns.float(), shared) for term in additive])
        packed["columns"] = _inner(columns.expand(batch, -1, -1))
    if dense:
        packed["dense"] = _inner(_sum([_spread(values, groups) for values in dense]))
    if guidance:
        packed |= _network(guidance[0], batch, groups)
    if products:
        left, right = (
            _inner(torch.cat([_spread(side, groups).expand(batch, -1, -1, -1) for side in sides], dim=-1))
            for sides in ([term.rows for term in products], [term.columns for term in products])
        )
        same = left.dtype == right.dtype
        packed |= {"left": left if same else left.float(), "right": right if same else right.float()}
    if offsets:
        packed |= _by_distance(offsets[0], groups)
    # A constant of a row: softmax cannot see it, unless a sink takes part.
    rows = [term.rows for term in additive if term.rows is not None]
    unseen = rows + [term.offset for term in guidance]
    if call.sinks is not None:
        sinks = call.sinks.float()[None, :, None].expand(batch, -1, queries)
        for constant in [-row for row in rows] + [term.offset[None, :, None] for term in guidance]:
            sinks = sinks - _spread(constant.float(), heads)
        packed["sinks"], unseen = sinks.contiguous(), []
    return Inputs(**packed), unseen


def _dense_values(call: Call) -> list[Tensor]:
    """Given numbers for all pairs; a second table by distance and the user's own terms, differentiated by PyTorch."""
    native = (Additive, Guidance, Product, Dense, Offset)
    others = [term for term in call.terms if not isinstance(term, native)] + [*_of(call, Offset)[1:]]
    every = slice(0, call.query.shape[2]), slice(0, call.key.shape[2])
    return [term.values for term in _of(call, Dense)] + [term.tile(*every) for term in others]


def _network(term: Guidance, batch: int, groups: int) -> dict[str, Tensor]:
    vectors = {"rows": term.rows, "cols": term.columns}
    parameters = {"gain": term.scale, "shift": term.shift, "weight": term.weight}
    packed = {name: _inner(_spread(side, groups).expand(batch, -1, -1, -1)) for name, side in vectors.items()}
    return packed | {name: _spread(side.float(), groups, dim=0).contiguous() for name, side in parameters.items()}


def _by_distance(term: Offset, groups: int) -> dict[str, Any]:
    names = ("bucket_of", "row_positions", "column_positions")
    packed = {name: getattr(term, name).int().contiguous() for name in names}
    return {**packed, "table": _spread(term.table.float(), groups, dim=0).contiguous(), "origin": term.origin}


def _of(call: Call, kind: type[AnyTerm]) -> list[AnyTerm]:
    return [term for term in call.terms if isinstance(term, kind)]


def _spread(tensor: Tensor, groups: int, dim: int = 1) -> Tensor:
    """One of each map for every group that it serves."""
    count = tensor.shape[dim]
    if count == 1:
        return tensor.expand([groups if d == dim else -1 for d in range(tensor.ndim)])
    return tensor if count == groups else tensor.repeat_interleave(groups // count, dim=dim)


def _sum(tensors: Sequence[Tensor]) -> Tensor:
    return tensors[0] if len(tensors) == 1 else reduce(torch.add, [tensor.float() for tensor in tensors])


def _inner(tensor: Tensor) -> Tensor:
    return tensor if tensor.stride(-1) == 1 else tensor.contiguous()
