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
        return [getattr(self, field.name) for field in fields(self)]

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


def pack(call: Call, blocks: list[Tensor]) -> tuple[Inputs, list[Tensor]]:
    """(the inputs of a call, tensors that cannot change its output and have a gradient of zero)."""
    batch, heads, queries, _ = call.query.shape
    keys = call.key.shape[2]
    additive, guidance, products, offsets = (_of(call, kind) for kind in (Additive, Guidance, Product, Offset))
    # A second table by distance, and terms of the user's own, are materialised: PyTorch has their gradients.
    dense = [term.values for term in _of(call, Dense)]
    known = (Additive, Guidance, Product, Dense)
    others = [term for term in call.terms if not isinstance(term, (*known, Offset))] + list(offsets[1:])
    dense += [term.tile(slice(0, queries), slice(0, keys)) for term in others]
    network = guidance[0] if guidance else None
    maps = [t.groups for t in (*guidance, *products, *offsets[:1])] + [values.shape[1] for values in dense]
    groups = reduce(math.lcm, maps, 1)
    fields_: dict[str, Any] = dict.fromkeys(f.name for f in fields(Inputs))
    fields_ |= {"query": _inner(call.query), "key": _inner(call.key), "value": _inner(call.value)}
    fields_ |= {"origin": 0, "blocks": blocks, "scale": call.scale, "softcap": call.softcap or 0.0}
    if additive:
        shared = reduce(math.lcm, (term.groups for term in additive))
        fields_["columns"] = _inner(_sum([_spread(t.columns.float(), shared) for t in additive]).expand(batch, -1, -1))
    if dense:
        fields_["dense"] = _inner(_sum([_spread(values, groups) for values in dense]))
    if network is not None:
        fields_ |= {"rows": network.rows, "cols": network.columns}
        fields_ |= {"gain": network.scale.float(), "shift": network.shift.float(), "weight": network.weight.float()}
        for name in ("rows", "cols"):
            fields_[name] = _inner(_spread(fields_[name], groups).expand(batch, -1, -1, -1))
        for name in ("gain", "shift", "weight"):
            fields_[name] = _spread(fields_[name], groups, dim=0).contiguous()
    if products:
        for name, field in (("left", "rows"), ("right", "columns")):
            sides = [_spread(getattr(t, field), groups).expand(batch, -1, -1, -1) for t in products]
            fields_[name] = _inner(sides[0] if len(sides) == 1 else torch.cat(sides, dim=-1))
        if fields_["left"].dtype != fields_["right"].dtype:
            fields_ |= {"left": fields_["left"].float(), "right": fields_["right"].float()}
    if offsets:
        fields_["table"] = _spread(offsets[0].table.float(), groups, dim=0).contiguous()
        fields_["origin"] = offsets[0].origin
        for name in ("bucket_of", "row_positions", "column_positions"):
            fields_[name] = getattr(offsets[0], name).int().contiguous()
    # A constant of a row: softmax cannot see it, unless a sink takes part.
    rows = [term.rows for term in additive if term.rows is not None]
    unseen = rows + [term.offset for term in guidance]
    if call.sinks is not None:
        sinks = call.sinks.float()[None, :, None].expand(batch, -1, queries)
        for constant in [-r for r in rows] + [term.offset[None, :, None] for term in guidance]:
            sinks = sinks - _spread(constant.float(), heads)
        fields_["sinks"], unseen = sinks.contiguous(), []
    return Inputs(**fields_), unseen


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
