"""A call as the kernels take it: terms of one kind merged, all maps of pairs brought to one number of groups."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import reduce
from typing import Any, Final, NamedTuple, TypeVar

import torch
from torch import Tensor

from attnflow.bias.call import Call
from attnflow.bias.impl.blocks import Blocks
from attnflow.bias.impl.triton import tuning
from attnflow.bias.terms import Additive, Dense, Guidance, Offset, Product, Term

AnyTerm = TypeVar("AnyTerm", bound=Term)


class Operand(NamedTuple):
    """One tensor that a call may have.

    Attributes:
        axes: its first dimensions, of those along which a call is cut; each may be 1, for all.
        gradient: what its gradient comes with, or "" for integers.
    """

    axes: tuple[str, ...]
    gradient: str


_EACH: Final = ("batch", "maps")
# In the order of the operators' arguments. The last dimension of query, key, value and vectors is contiguous.
OPERANDS: Final = {
    "query": Operand(_EACH, "attention"),
    "key": Operand(_EACH, "attention"),
    "value": Operand(_EACH, "attention"),
    "columns": Operand(_EACH, "attention"),  # what depends on the key alone, float32 [batch, its own groups, keys]
    "sinks": Operand(_EACH, "sinks"),  # float32 [batch, heads, queries]
    "dense": Operand(_EACH, "dense"),  # [batch or 1, groups, queries, keys]
    "rows": Operand(_EACH, "guidance"),  # vectors of the guidance network, [batch, groups, tokens, hidden]
    "cols": Operand(_EACH, "guidance"),
    "gain": Operand(("maps",), "guidance"),  # its parameters, float32 [groups, hidden]
    "shift": Operand(("maps",), "guidance"),
    "weight": Operand(("maps",), "guidance"),
    "left": Operand(_EACH, "product"),  # [batch, groups, tokens, rank]
    "right": Operand(_EACH, "product"),
    "table": Operand(("maps",), "offset"),  # float32 [groups, buckets]
    "bucket_of": Operand((), ""),  # these as in `Offset`, int32
    "row_positions": Operand(("batch",), ""),
    "column_positions": Operand(("batch",), ""),
}
NAMES: Final = tuple(OPERANDS)


class Piece(NamedTuple):
    """Some batch elements and maps of a call, and the heads that they serve."""

    batch: slice
    maps: slice
    of: int  # maps in all

    def cut(self, tensor: Tensor, axes: tuple[str, ...] = _EACH) -> Tensor:
        """Its part of a tensor, a view."""
        for dim, axis in enumerate(axes):
            count = tensor.shape[dim]
            if count > 1 and axis == "batch":
                tensor = tensor[self.batch]
            elif count > 1:
                start, stop = (place * count // self.of for place in (self.maps.start, self.maps.stop))
                tensor = tensor.narrow(dim, start, stop - start)
        return tensor


@dataclass(frozen=True, eq=False)
class Inputs:
    """Arguments of the operators.

    Attributes:
        tensors: by the names of `OPERANDS`, those that there are, in that order.
        blocks: `Blocks.flat()`, or nothing where keys are split.
        origin: as in `Offset`.
        scale: of q k^T.
        softcap: of scale * q k^T, or 0 for none.
    """

    tensors: dict[str, Tensor]
    blocks: list[Tensor]
    origin: int
    scale: float
    softcap: float

    @classmethod
    def of(cls, operands: list[Tensor], present: Sequence[int], *rest: Any) -> Inputs:
        """From the arguments of an operator."""
        return cls(dict(zip((NAMES[place] for place in present), operands, strict=True)), *rest)

    def arguments(self) -> list[Any]:
        """The inverse of `of`."""
        present = [NAMES.index(name) for name in self.tensors]
        return [list(self.tensors.values()), present, self.blocks, self.origin, self.scale, self.softcap]

    def __getitem__(self, name: str) -> Tensor:
        return self.tensors[name]

    def get(self, name: str) -> Tensor | None:
        """An operand, or None where the call has none."""
        return self.tensors.get(name)

    @property
    def relation(self) -> Blocks:
        """The mask."""
        return Blocks.unflat(self.blocks)

    @property
    def groups(self) -> int:
        """Number of maps of pairs, 0 if there are none."""
        sizes = (self[name].shape[OPERANDS[name].axes.index("maps")] for name in _PAIRS if name in self.tensors)
        return next(sizes, 0)

    @property
    def hidden(self) -> int:
        """Width of the guidance network, 1 without one."""
        return self["rows"].shape[3] if "rows" in self.tensors else 1

    @property
    def must_build(self) -> bool:
        """Whether a bias of pairs has to be materialised: one that is not already there, as a tensor."""
        return any(name in self.tensors for name in _PAIRS[:-1])

    @property
    def tiles(self) -> tuning.Tiles:
        """Sizes of the kernels' tiles."""
        query = self["query"]
        return tuning.tiles(max(query.shape[3], self["value"].shape[3]), query.dtype, query.shape[2])

    @property
    def pair_type(self) -> torch.dtype:
        """Type of the materialised bias.

        float16 where the model is in 16 bits and the bias is a network or a product of learned vectors: such values are
        of the order of the scores, and it has three bits more than bfloat16. Given numbers and tables by distance can
        be large, and stay in float32.
        """
        learned = "table" not in self.tensors and "dense" not in self.tensors
        return torch.float16 if learned and self["query"].dtype != torch.float32 else torch.float32

    def pair_bytes(self) -> int:
        """Of the materialised bias of one map of one batch element."""
        words = self.blocks[0]
        return words.shape[2] * words.shape[3] * 64 * self.pair_type.itemsize

    def part(self, piece: Piece) -> Inputs:
        """The same call for some batch elements and maps, and the heads that they serve."""
        tensors = {name: piece.cut(tensor, OPERANDS[name].axes) for name, tensor in self.tensors.items()}
        return replace(self, tensors=tensors, blocks=[piece.cut(tensor) for tensor in self.blocks])

    def pieces(self, limit: int, each: int) -> Iterator[Piece]:
        """Pieces of at most `limit` bytes where one map takes `each`, if that can be.

        A piece holds whole key-value heads, so that no gradient is spread over two of them.
        """
        (batch, heads), kv, groups = self["query"].shape[:2], self["key"].shape[1], max(1, self.groups)
        shared = heads // self["columns"].shape[1] if "columns" in self.tensors else 1
        shared = 1 if shared == heads else shared
        unit = math.lcm(heads // groups, heads // kv, shared) // (heads // groups)
        maps = max(unit, min(groups, limit // max(1, each)) // unit * unit)
        elements = max(1, min(batch, limit // max(1, each * maps))) if maps >= groups else 1
        for start in range(0, batch, elements):
            for first in range(0, groups, maps):
                stops = min(start + elements, batch), min(first + maps, groups)
                yield Piece(slice(start, stops[0]), slice(first, stops[1]), groups)


_PAIRS: Final = ("rows", "left", "table", "dense")  # what a bias of pairs may be made of


def pack(call: Call, blocks: list[Tensor]) -> tuple[Inputs, list[Tensor]]:
    """(the inputs of a call, tensors that cannot change its output and have a gradient of zero)."""
    batch, heads, queries, _ = call.query.shape
    additive, guidance, offsets = _of(call, Additive), _of(call, Guidance), _of(call, Offset)
    products, dense = _of(call, Product), _dense_values(call)
    maps = [term.groups for term in (*guidance, *products, *offsets[:1])] + [values.shape[1] for values in dense]
    groups = reduce(math.lcm, maps, 1)
    packed = {"query": _inner(call.query), "key": _inner(call.key), "value": _inner(call.value)}
    if additive:
        shared = reduce(math.lcm, (term.groups for term in additive))
        columns = _sum([_spread(term.columns.float(), shared) for term in additive])
        packed["columns"] = _inner(columns.expand(batch, -1, -1))
    if dense:
        packed["dense"] = _inner(_sum([_spread(values, groups) for values in dense]))
    for term in guidance:
        vectors = {"rows": term.rows, "cols": term.columns}
        packed |= {name: _inner(_spread(side, groups).expand(batch, -1, -1, -1)) for name, side in vectors.items()}
        parameters = {"gain": term.scale, "shift": term.shift, "weight": term.weight}
        packed |= {name: _spread(side.float(), groups, dim=0).contiguous() for name, side in parameters.items()}
    if products:
        left, right = (
            _inner(torch.cat([_spread(side, groups).expand(batch, -1, -1, -1) for side in sides], dim=-1))
            for sides in ([term.rows for term in products], [term.columns for term in products])
        )
        same = left.dtype == right.dtype
        packed |= {"left": left if same else left.float(), "right": right if same else right.float()}
    for term in offsets[:1]:
        packed["table"] = _spread(term.table.float(), groups, dim=0).contiguous()
        integers = ("bucket_of", "row_positions", "column_positions")
        packed |= {name: getattr(term, name).int().contiguous() for name in integers}
    # A constant of a row: softmax cannot see it, unless a sink takes part.
    rows = [term.rows for term in additive if term.rows is not None]
    unseen = rows + [term.offset for term in guidance]
    if call.sinks is not None:
        sinks = call.sinks.float()[None, :, None].expand(batch, -1, queries)
        for constant in [-row for row in rows] + [term.offset[None, :, None] for term in guidance]:
            sinks = sinks - _spread(constant.float(), heads)
        packed["sinks"], unseen = sinks.contiguous(), []
    tensors = {name: packed[name] for name in NAMES if name in packed}
    origin = offsets[0].origin if offsets else 0
    return Inputs(tensors, blocks, origin, call.scale, call.softcap or 0.0), unseen


def _dense_values(call: Call) -> list[Tensor]:
    """Given numbers for all pairs; a second table by distance and the user's own terms, differentiated by PyTorch."""
    native = (Additive, Guidance, Product, Dense, Offset)
    others = [term for term in call.terms if not isinstance(term, native)] + [*_of(call, Offset)[1:]]
    every = slice(0, call.query.shape[2]), slice(0, call.key.shape[2])
    return [term.values for term in _of(call, Dense)] + [term.tile(*every) for term in others]


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
