"""`Mask`: an immutable relation between queries and keys, kept as row intervals."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from contextlib import suppress
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, Final, cast

import numpy as np
import torch
from jaxtyping import Bool, UInt8
from torch import Tensor

from attnflow._core import checks
from attnflow._core.checks import IntArray
from attnflow._core.lazy import renderer
from attnflow.masks import flex
from attnflow.masks.flex import BlockSparsity, MaskMod
from attnflow.masks.intervals import BoolArray, IntervalRows
from attnflow.masks.numbering import RENAMED, Numbered, combined, differing, invert, pieces_of, same_rank
from attnflow.masks.registry import named_masks

if TYPE_CHECKING:
    from torch.nn.attention.flex_attention import BlockMask

_MAX_TEXT: Final = 200  # characters of a printed mask


class Mask:
    """An attention mask: `allow[q, k]` is True iff query q attends to key k, so information flows k -> q.

    A mask is only a relation: two masks are equal iff they allow the same pairs, whatever their names.
    It is immutable and hashable. Make one with the catalogue (`af.masks.causal(n)`, ...) or with `from_dense`,
    `from_intervals`, `from_edges`, `from_mask_mod`, and combine masks with `&`, `|`, `~`.

    Each row is kept as intervals of *internal* key numbers. An optional relabelling maps queries and keys to these
    numbers, so that permuted masks (XLNet orders, trees, dilated windows) stay as small as the mask they permute.

    Attributes:
        name: the catalogue name, or an expression for combined masks.
        parameters: the arguments that the mask was made with, for display.
        num_queries: number of rows.
        num_keys: number of columns.
    """

    __slots__ = ("__weakref__", "_cache", "_relation", "name", "num_keys", "num_queries", "parameters")

    name: str
    parameters: Mapping[str, object]
    num_queries: int
    num_keys: int

    def __init__(
        self,
        rows: IntervalRows,
        name: str = "mask",
        parameters: Mapping[str, object] | None = None,
        query_rank: IntArray | None = None,
        key_rank: IntArray | None = None,
    ) -> None:
        for rank in (query_rank, key_rank):
            if rank is not None:
                rank.setflags(write=False)
        values: dict[str, object] = {"name": name, "parameters": MappingProxyType(dict(parameters or {}))}
        values |= {"num_queries": rows.num_rows, "num_keys": rows.num_keys}
        values |= {"_relation": Numbered(rows, query_rank, key_rank), "_cache": {}}
        for key, value in values.items():
            object.__setattr__(self, key, value)

    if not TYPE_CHECKING:
        __getattr__ = flex.no_attribute

    def __setattr__(self, key: str, value: object) -> None:
        raise AttributeError(f"Mask is immutable: cannot set {key!r}; build a new mask instead")

    def __delattr__(self, key: str) -> None:
        raise AttributeError(f"Mask is immutable: cannot delete {key!r}")

    @property
    def shape(self) -> tuple[int, int]:
        """(num_queries, num_keys)."""
        return self.num_queries, self.num_keys

    @property
    def nnz(self) -> int:
        """Number of allowed pairs."""
        return int(self.row_counts().sum())

    @property
    def density(self) -> float:
        """Share of pairs that are allowed, in [0, 1]; 0.0 if the mask has no pairs."""
        pairs = self.num_queries * self.num_keys
        return self.nnz / pairs if pairs else 0.0

    def row_counts(self) -> IntArray:
        """Number of keys that each query may attend to, int64[num_queries]. Cost: O(intervals)."""
        counts = self._relation.rows.counts()
        return counts if self._relation.query_rank is None else counts[self._relation.query_rank]

    def keys(self, query: int) -> IntArray:
        """The keys that `query` may attend to, ascending, int64."""
        query, rank = checks.integer("query", query, 0, self.num_queries - 1), self._relation.key_rank
        keys = self._relation.rows.keys_of(self._row(query))
        return keys if rank is None else np.sort(invert(rank)[keys])

    def allows(self, query: int, key: int) -> bool:
        """Whether `query` may attend to `key`."""
        query = checks.integer("query", query, 0, self.num_queries - 1)
        key = checks.integer("key", key, 0, self.num_keys - 1)
        number = key if self._relation.key_rank is None else int(self._relation.key_rank[key])
        return any(start <= number < end for start, end in self._relation.rows.row(self._row(query)))

    def dense(self, device: torch.device | str | None = None) -> Bool[Tensor, "queries keys"]:
        """The relation as a bool tensor [num_queries, num_keys] on `device` (default CPU).

        Cost: one byte per pair, filled by row chunks.
        """
        table = torch.empty(self.shape, dtype=torch.bool)
        view = table.numpy()
        for start, part in self.dense_chunks():
            view[start : start + len(part)] = part
        return table if device is None else table.to(device)

    def dense_chunks(self, chunk: int | None = None) -> Iterator[tuple[int, BoolArray]]:
        """Yield (first query, bool[rows, num_keys]) for consecutive blocks of rows, which takes little memory."""
        return self._relation.tables(None if chunk is None else checks.integer("chunk", chunk, 1))

    def intervals(self) -> IntervalRows:
        """The allowed keys of each query as sorted disjoint intervals.

        This is free for masks without a relabelling. A relabelled mask is converted once, in O(log n) per interval of
        the result or, if there are many, by row chunks of its table.

        Raises:
            ValueError: there are more intervals than fit into memory.
        """
        if "intervals" not in self._cache:
            self._cache["intervals"] = self._relation.intervals(repr(self))
        return cast(IntervalRows, self._cache["intervals"])

    def pieces(self, limit: int) -> tuple[IntArray, IntArray, IntArray] | None:
        """Disjoint intervals (query, start, end) in no given order; None where relabelling makes more than `limit`."""
        rows, rank = self.numbered_keys()
        return pieces_of(rows, None if rank is None else invert(rank), min(limit, RENAMED))

    def numbered_keys(self) -> tuple[IntervalRows, IntArray | None]:
        """(row q for query q, the number that key k goes by in the rows; None where that is k). Cost: O(intervals)."""
        return self._relation.in_query_order(), self._relation.key_rank

    def relabelled(self) -> tuple[IntervalRows, IntArray | None]:
        """(rows, rank) with `allow[q, k]` iff `rank[k]` lies in row `rank[q]`: the compact form of a square mask.

        `rank` is None for the identity. Falls back to `intervals()` when queries and keys are numbered apart.
        """
        relation = self._relation
        if same_rank(relation.query_rank, relation.key_rank):
            return relation.rows, relation.query_rank
        return self.intervals(), None

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, Mask):
            return NotImplemented
        if self is other:
            return True
        if self.shape != other.shape or not np.array_equal(self.row_counts(), other.row_counts()):
            return False
        return not self.difference(other, limit=1)

    def __hash__(self) -> int:
        return hash((self.shape, self.row_counts().tobytes()))

    def difference(self, other: Mask, limit: int = 10) -> list[tuple[int, int]]:
        """The first `limit` pairs (query, key), in row order, that only one of the two masks allows.

        Raises:
            ValueError: the shapes differ.
        """
        self._check(other, "compare")
        limit = checks.integer("limit", limit, 1)
        a, b = self._relation, other._relation
        if a.numbered_as(b) and a.rows.equals(b.rows):
            return []
        pairs: list[tuple[int, int]] = []
        for query in differing(a, b).tolist():
            either = np.setxor1d(self.keys(query), other.keys(query))
            pairs += [(query, key) for key in either[: limit - len(pairs)].tolist()]
            if len(pairs) == limit:
                break
        return pairs

    def __and__(self, other: Mask) -> Mask:
        return self._combined(other, "&")

    def __or__(self, other: Mask) -> Mask:
        return self._combined(other, "|")

    def __invert__(self) -> Mask:
        relation = self._relation
        return Mask(relation.rows.complement(), f"~{self!r}", None, relation.query_rank, relation.key_rank)

    def permute(self, order: object, keys: object = None) -> Mask:
        """Reorder the positions: new position i is old position `order[i]`.

        `new.allow[i, j] == old.allow[order[i], keys[j]]`; `keys` defaults to `order` for a square mask and to
        the identity otherwise. Cost: O(n); nothing is expanded.
        """
        queries = checks.permutation("order", order, self.num_queries)
        if keys is None and self.num_queries == self.num_keys:
            columns = queries
        else:
            columns = np.arange(self.num_keys) if keys is None else checks.permutation("keys", keys, self.num_keys)
        before, after = self._relation.query_rank, self._relation.key_rank
        query_rank = queries if before is None else before[queries]
        key_rank = columns if after is None else after[columns]
        if columns is queries and before is after:
            key_rank = query_rank
        return Mask(self._relation.rows, f"{self!r}.permute(...)", None, query_rank, key_rank)

    def __getitem__(self, index: tuple[slice, slice]) -> Mask:
        """The sub-mask of a slice of queries and a slice of keys (steps of 1), e.g. `mask[4:8, :8]`."""
        parts = cast("tuple[object, ...]", index if isinstance(index, tuple) else (index,))  # pyright: ignore[reportUnnecessaryIsInstance]
        if len(parts) != 2 or not all(isinstance(part, slice) for part in parts):
            raise TypeError(f"a mask is sliced as mask[queries, keys] with two slices, got {index!r}")
        queries, keys = index
        first, last, step = queries.indices(self.num_queries)
        left, right, key_step = keys.indices(self.num_keys)
        if step != 1 or key_step != 1:
            raise ValueError(f"a mask is sliced with step 1, got {step} and {key_step}; use permute to reorder")
        name = f"{self!r}[{first}:{last}, {left}:{right}]"
        rows, rank = self.numbered_keys()
        rows = Numbered(rows.take(np.arange(first, max(first, last))), None, rank).intervals(name)
        starts, ends = (side.astype(np.int64) - left for side in (rows.starts, rows.ends))
        return Mask(IntervalRows.build(rows.row_index(), starts, ends, rows.num_rows, max(right - left, 0)), name)

    def _combined(self, other: Mask, sign: str) -> Mask:
        self._check(other, "combine")
        name = f"({self!r} {sign} {other!r})"
        result = combined(self._relation, other._relation, sign, name)
        return Mask(result.rows, name, None, result.query_rank, result.key_rank)

    @property
    def mask_mod(self) -> MaskMod:
        """`mask_mod(b, h, q, k) -> bool` for FlexAttention, on the CPU; see `mask_mod_on` for other devices.

        It captures tensors, never Python ints: masks of the same number of intervals share one compiled kernel.
        """
        return self.mask_mod_on("cpu")

    def mask_mod_on(self, device: torch.device | str) -> MaskMod:
        """`mask_mod(b, h, q, k)` whose captured tensors live on `device`."""
        key = ("mask_mod", str(device))
        if key not in self._cache:
            rows, rank = self.numbered_keys()
            if rows.width() > flex.MAX_UNROLLED:
                self._cache[key] = flex.mask_mod_of_bits(self.bits()[None, None].to(device))
            else:
                bounds = torch.from_numpy(flex.bounds_of(rows, max(1, rows.width()))).to(device)
                numbers = None if rank is None else torch.tensor(rank, dtype=torch.int32, device=device)
                self._cache[key] = flex.mask_mod_of_bounds(bounds, numbers)
        return cast(MaskMod, self._cache[key])

    def block_mask(self, block_size: int | tuple[int, int] = 128, device: torch.device | str = "cpu") -> BlockMask:
        """The mask as torch's `BlockMask`, identical to that of `create_block_mask`.

        Args:
            block_size: queries and keys per block; an int or (query block, key block).
            device: where the block tables and the captured tensors live.

        Raises:
            ValueError: there are no queries, or no keys.

        Cost: O(rows x intervals + blocks), and a bit a pair where a row has over 32 intervals; n x n is never built.
        """
        counts = torch.from_numpy(self.block_counts(block_size))[None, None].to(device)
        return flex.block_mask_of_counts(counts, flex.block_sizes(block_size), self.mask_mod_on(device), self.shape)

    def block_counts(self, block_size: int | tuple[int, int] = 128) -> IntArray:
        """Allowed pairs in each block, int64[query blocks, key blocks]."""
        return flex.block_counts(*self.numbered_keys(), flex.block_sizes(block_size))

    def block_sparsity(self, block_size: int = 128) -> BlockSparsity:
        """Count full, partial and empty blocks; as in torch, a block that sticks out of the sequence is never full.

        >>> from attnflow import masks
        >>> masks.block_causal(8, 2).block_sparsity(2)
        BlockSparsity(block=2, full=10, partial=0, empty=6, used=1.0)
        """
        block = checks.integer("block_size", block_size, 1)
        counts = self.block_counts(block) if 0 not in self.shape else np.zeros(0, np.int64)
        full, computed = int((counts == block * block).sum()), int((counts > 0).sum())
        used = self.nnz / (computed * block * block) if computed else 0.0
        return BlockSparsity(block, full, computed - full, counts.size - computed, used)

    def bits(self) -> UInt8[Tensor, "queries bytes"]:
        """The relation with one bit per pair: eight keys per byte, the first in the lowest bit."""
        bits = np.empty((self.num_queries, -(-self.num_keys // 8)), dtype=np.uint8)
        for start, part in self.dense_chunks():
            bits[start : start + len(part)] = np.packbits(part, axis=1, bitorder="little")
        return torch.from_numpy(bits)

    def to_dict(self) -> dict[str, object]:
        """The mask as plain data, in the format of `af.masks.from_json` and of the command line's JSON files.

        It is the catalogue name if that rebuilds the mask, and otherwise the row intervals. If the mask has a
        relabelling with many fewer intervals, it is that relabelling with its intervals.
        """
        entry = named_masks().get(self.name)
        if entry is not None:
            parameters = {k: list(v) if isinstance(v, tuple) else v for k, v in self.parameters.items()}
            with suppress(TypeError, ValueError):  # a name of one's own may be one of the catalogue's
                if entry.function(**parameters) == self:
                    return {"name": self.name, "parameters": parameters}
        relation = self._relation
        numbered = self.pieces(limit=2 * (self.num_queries + len(relation.rows.starts))) is None
        rows = relation.rows if numbered else self.intervals()
        content: dict[str, object] = {
            "intervals": [[list(pair) for pair in rows.row(row)] for row in range(self.num_queries)]
        }
        if self.num_queries != self.num_keys:
            content["num_keys"] = self.num_keys
        ranks = {"query_rank": relation.query_rank, "key_rank": relation.key_rank}
        return content | {name: rank.tolist() for name, rank in ranks.items() if numbered and rank is not None}

    def to_json(self) -> str:
        """`to_dict` as JSON; `af.masks.from_json` is its inverse.

        >>> from attnflow import masks
        >>> masks.causal(3).to_json()
        '{"name": "causal", "parameters": {"n": 3}}'
        """
        return json.dumps(self.to_dict())

    def __repr__(self) -> str:
        text = self.name
        if self.parameters:
            rows = {k: cast(Any, v) for k, v in self.parameters.items() if isinstance(v, np.ndarray | list | tuple)}
            shown = {k: checks.preview(rows[k], 6) if k in rows else repr(v) for k, v in self.parameters.items()}
            text = f"{text}({', '.join(f'{k}={v}' for k, v in shown.items())})"
        return text if len(text) <= _MAX_TEXT else f"{text[: _MAX_TEXT // 2]} ... {text[-_MAX_TEXT // 3 :]}"

    def __str__(self) -> str:
        return renderer().mask_text(self, width=36)

    def _repr_html_(self) -> str:
        return renderer().notebook(self)

    def __reduce__(self) -> tuple[object, ...]:
        relation = self._relation
        return Mask, (relation.rows, self.name, dict(self.parameters), relation.query_rank, relation.key_rank)

    def _check(self, other: object, verb: str) -> None:
        if not isinstance(other, Mask):
            raise not_a_mask(other)
        if self.shape != other.shape:
            raise ValueError(f"cannot {verb} masks of different shapes: {self.shape} and {other.shape}")

    def _row(self, query: int) -> int:
        return query if self._relation.query_rank is None else int(self._relation.query_rank[query])


def not_a_mask(value: object) -> TypeError:
    return TypeError(f"expected a Mask, got {type(value).__name__}; {_how_to_make_one(value)}")


def of_values(tensor: Tensor) -> str:
    """What makes a mask's tensor bool: " == 0" if it is added to scores, ".bool()" for 0/1, "" if it may be neither."""
    if tensor.dtype == torch.bool or tensor.is_meta:
        return ""
    try:
        above, below, strange = (bool(part.any()) for part in (tensor > 0, tensor < 0, tensor.isnan()))
    except (NotImplementedError, RuntimeError):  # of complex numbers, 8-bit floats, sparse tensors
        return ""
    if strange or (above and below):
        return ""
    return " == 0" if below or (tensor.is_floating_point() and not above) else ".bool()"


def _how_to_make_one(value: object) -> str:
    make = "af.masks."
    if isinstance(value, np.ndarray):
        return f"make one with {make}from_dense(torch.from_numpy(array))"
    if isinstance(value, Tensor):
        table = "tensor" + "[0]" * (value.ndim - 2)  # of one batch element and head
        return f"make one with {make}from_dense({table}{of_values(value)})"
    if type(value).__name__ == "BlockMask":  # by name: its module takes 0.3 s to import
        return f"make one with {make}from_block_mask(block_mask)"
    name, module = (getattr(value, key, "") for key in ("__name__", "__module__"))
    if callable(value) and module.startswith("attnflow.masks.") and name in named_masks():
        return f"call {name} with its arguments first"
    if callable(value):
        return f"make one with {make}from_mask_mod(function, num_queries)"
    if isinstance(getattr(value, "mask", None), Mask):
        return "pass its .mask"
    return f"make one with the catalogue, such as {make}causal(n), or with {make}from_dense(torch.tensor(rows))"
