"""Masks of several sequences or heads: apart (`batch`, `per_head`) or packed into one (`block_diagonal`)."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final, TypeVar, cast

import numpy as np
import torch
from jaxtyping import Bool, Int32
from torch import Tensor

from attnflow._core import checks
from attnflow._core.checks import IntArray
from attnflow._core.markup import plural
from attnflow.masks import flex
from attnflow.masks.flex import MaskMod
from attnflow.masks.intervals import IntervalRows, offsets
from attnflow.masks.mask import Mask, not_a_mask

if TYPE_CHECKING:
    from torch.nn.attention.flex_attention import BlockMask

_NARROW: Final = 8  # intervals of a row up to which keys are not numbered anew
_SHOWN: Final = 4
_AnyMask = TypeVar("_AnyMask", bound="Mask | MaskGrid")


@dataclass(frozen=True, slots=True, repr=False)
class MaskGrid:
    """A mask for each sequence of a batch, each head, or both; made by `af.masks.batch` and `af.masks.per_head`.

    Sequences may differ in length. A shorter one is padded at its end. In `dense()` and for attention kernels a pad
    attends only to itself (to nothing if queries and keys are different sequences), and nothing attends to it.

    Attributes:
        masks: the mask of each sequence and head, `masks[b][h]`; a single row or column stands for all.
        num_queries: number of rows, padding included.
        num_keys: number of columns, padding included.
    """

    masks: tuple[tuple[Mask, ...], ...]
    num_queries: int
    num_keys: int

    if not TYPE_CHECKING:
        __getattr__ = flex.no_attribute

    @property
    def shape(self) -> tuple[int, int, int, int]:
        """(sequences, heads, num_queries, num_keys), as of a `BlockMask`; a 1 stands for any number."""
        return len(self.masks), len(self.masks[0]), self.num_queries, self.num_keys

    def dense(self, device: torch.device | str | None = None) -> Bool[Tensor, "batch heads queries keys"]:
        """The relation as a bool tensor with its padding, on `device` (default CPU). Cost: one byte per pair.

        >>> import attnflow as af
        >>> af.masks.batch([af.masks.causal(2), af.masks.full(1)]).dense().int().tolist()
        [[[[1, 0], [1, 1]]], [[[1, 0], [0, 1]]]]
        """
        table = torch.empty(self.shape, dtype=torch.bool)
        for b, row in enumerate(self.padded()):
            for h, mask in enumerate(row):
                table[b, h] = mask.dense()
        return table if device is None else table.to(device)

    def row_intervals(
        self, min_width: int = 1, device: torch.device | str | None = None
    ) -> Int32[Tensor, "batch heads rows queries"]:
        """The relation as one tensor: the `attention_mask` for a model under `af.masks.attach(model, "batch")`.

        Args:
            min_width: least room for intervals per query. The room is rounded up to a power of two, so that similar
                batches have one shape and share one compiled model.
            device: device of the tensor (default: CPU).

        Returns:
            int32 [sequences or 1, heads or 1, 2 x room, num_queries]: query q attends to the keys in
            `[rows[..., 2 t, q], rows[..., 2 t + 1, q])`. If keys would be too scattered, they are renumbered, and one
            more row at the end holds the number of each key.

        Cost: O(queries x room).
        """
        relations, ranks = self._relations()
        width = max(rows.width() for rows in relations)
        room = 1 << (max(width, checks.integer("min_width", min_width, 1)) - 1).bit_length()
        if 2 * room + (ranks is not None) == self.num_queries:
            room *= 2  # no kernel can take it for a mask of pairs
        batch, heads = self.shape[:2]
        parts = [flex.bounds_of(rows, room).T for rows in relations]
        if ranks is not None:
            parts = [np.vstack([part, rank.astype(np.int32)]) for part, rank in zip(parts, ranks, strict=True)]
        table = np.ascontiguousarray(np.stack(parts))  # processes send it to one another as it lies in memory
        tensor = torch.from_numpy(table.reshape(batch, heads, *table.shape[1:]))
        return tensor if device is None else tensor.to(device)

    @property
    def mask_mod(self) -> MaskMod:
        """`mask_mod(b, h, q, k) -> bool` for FlexAttention, on the CPU; see `mask_mod_on` for other devices."""
        return self.mask_mod_on("cpu")

    def mask_mod_on(self, device: torch.device | str) -> MaskMod:
        """`mask_mod(b, h, q, k)` on `device`: by the intervals of each query or, where one has over 32, by bits."""
        if max(rows.width() for rows in self._relations()[0]) <= flex.MAX_UNROLLED:
            return flex.mask_mod_of_rows(self.row_intervals(device=device), self.num_keys)
        bits = torch.stack([torch.stack([mask.bits() for mask in row]) for row in self.padded()])
        return flex.mask_mod_of_bits(bits.to(device))

    def block_mask(self, block_size: int | tuple[int, int] = 128, device: torch.device | str = "cpu") -> BlockMask:
        """The masks as torch's `BlockMask`; arguments, errors and cost are those of `Mask.block_mask`."""
        blocks, table = flex.block_sizes(block_size), self.padded()
        counts = {id(mask): mask.block_counts(blocks) for row in table for mask in row}
        stacked = torch.from_numpy(np.stack([[counts[id(mask)] for mask in row] for row in table])).to(device)
        return flex.block_mask_of_counts(stacked, blocks, self.mask_mod_on(device), table[0][0].shape)

    def __getitem__(self, place: tuple[int, int]) -> Mask:
        """The mask of a sequence and a head, without padding: `grid[b, h]`."""
        places = zip(("b", "h"), place, self.shape, strict=False)
        b, h = (0 if size == 1 else checks.integer(name, index, 0, size - 1) for name, index, size in places)
        return self.masks[b][h]

    def __repr__(self) -> str:
        batch, heads, queries, keys = self.shape
        shown = [repr(mask) for row in self.masks for mask in row]
        names = list(dict.fromkeys(shown))
        text = ", ".join(names[:_SHOWN]) + (f" and {len(names) - _SHOWN} more" if len(names) > _SHOWN else "")
        size = f"{queries} positions" if queries == keys else f"{queries} queries x {keys} keys"
        return f"<masks of {plural(batch, 'sequence')} x {plural(heads, 'head')}, {size}: {text}>"

    def padded(self) -> list[list[Mask]]:
        """The masks of each sequence, by head, with the padding of `dense()`."""
        size = self.num_queries, self.num_keys
        every = {id(mask): mask for row in self.masks for mask in row}
        once = {key: mask if mask.shape == size else _padded(mask, *size) for key, mask in every.items()}
        return [[once[id(mask)] for mask in row] for row in self.masks]

    def _relations(self) -> tuple[list[IntervalRows], list[IntArray] | None]:
        """(rows of each sequence and head; number of each key in these rows, None for its own position)."""
        masks = [mask for row in self.padded() for mask in row]
        plain = [_narrow(mask) for mask in masks]
        if all(rows is not None for rows in plain):
            return cast(list[IntervalRows], plain), None
        if self.num_queries != self.num_keys:
            return [mask.intervals() for mask in masks], None
        numbered = [mask.numbered_keys() for mask in masks]
        identity = np.arange(self.num_keys, dtype=np.int64)
        return [rows for rows, _ in numbered], [identity if rank is None else rank for _, rank in numbered]


def batch(masks: Iterable[Mask | MaskGrid], size: int | None = None) -> MaskGrid:
    """Give each sequence of a batch its own mask; shorter ones are padded at their end.

    Args:
        masks: a `Mask` for each sequence, or `per_head([...])` where the heads of a sequence differ.
        size: number of positions after padding (default: those of the longest). Only for square masks.

    Raises:
        TypeError: an element is not a mask.
        ValueError: the list is empty, a mask is longer than `size`, numbers of heads differ, or a mask is a batch.

    Cost: O(sequences). The masks are not copied; sequences with the same mask share its memory.

    >>> import attnflow as af
    >>> packed = af.masks.batch([af.masks.document([3, 2]), af.masks.causal(4)])
    >>> packed.shape
    (2, 1, 5, 5)
    """
    rows = [_row(mask, number) for number, mask in enumerate(_several(masks, "sequence"))]
    if not rows:
        raise ValueError("a batch needs at least one mask, got none")
    heads = max(len(row) for row in rows)
    for number, row in enumerate(rows):
        if len(row) not in (1, heads):
            raise ValueError(f"sequence {number} has masks for {len(row)} heads, another has them for {heads}")
    shapes = [row[0].shape for row in rows]
    queries, keys = (max(shape[axis] for shape in shapes) for axis in (0, 1))
    if size is not None:
        size = checks.size("size", size)
        if any(shape[0] != shape[1] for shape in shapes):
            raise ValueError("size is for square masks; those of a batch with other ones are padded to the largest")
        for number, (length, _) in enumerate(shapes):
            if length > size:
                raise ValueError(f"sequence {number} has {length} positions, more than size={size}")
        queries = keys = size
    return MaskGrid(tuple(row * (heads // len(row)) for row in rows), queries, keys)


def per_head(masks: Iterable[Mask]) -> MaskGrid:
    """Give each attention head its own mask, the same in every sequence; heads are query heads if keys have fewer.

    Raises:
        TypeError: an element is not a `Mask`.
        ValueError: the list is empty, or the masks have different shapes.

    >>> import attnflow as af
    >>> heads = af.masks.per_head([af.masks.causal(4), af.masks.sliding_window(4, 2)])
    >>> heads.shape, heads.dense()[0, :, 3].int().tolist()
    ((1, 2, 4, 4), [[1, 1, 1, 1], [0, 0, 1, 1]])
    """
    row = _several(masks, "head")
    if not row:
        raise ValueError("per_head needs at least one mask, got none")
    for number, mask in enumerate(row):
        if not isinstance(mask, Mask):  # pyright: ignore[reportUnnecessaryIsInstance]
            raise not_a_mask(mask)
        if mask.shape != row[0].shape:
            raise ValueError(f"heads see one sequence: mask {number} has shape {mask.shape}, mask 0 {row[0].shape}")
    return MaskGrid((tuple(row),), *row[0].shape)


def block_diagonal(masks: Iterable[Mask]) -> Mask:
    """Pack masks side by side into one: each keeps its pairs, and no query sees a key of another mask.

    Packed rows of any kind stay apart under it; of causal masks it is `document(lengths)`. Masks need not be square.

    Raises:
        TypeError: an element is not a `Mask`.
        ValueError: the rows or columns together are more than fit into memory.

    Cost: O(intervals); permuted masks keep their numbering, and n x n is never built.

    >>> import attnflow as af
    >>> packed = af.masks.block_diagonal([af.masks.butterfly(3), af.masks.sliding_window(4, 2)])
    >>> packed.shape, packed.keys(10).tolist()
    ((11, 11), [9, 10])
    """
    masks = _several(masks, "block")
    for mask in masks:
        if not isinstance(mask, Mask):  # pyright: ignore[reportUnnecessaryIsInstance]
            raise not_a_mask(mask)
    if len(masks) == 1:
        return masks[0]
    parts = [mask.relabelled() if mask.num_queries == mask.num_keys else (mask.intervals(), None) for mask in masks]
    queries, keys = (offsets(np.array([mask.shape[axis] for mask in masks], np.int64)) for axis in (0, 1))
    num_keys = checks.size("the number of keys", int(keys[-1]))
    checks.size("the number of queries", int(queries[-1]))
    rows: list[IntervalRows] = []
    for (part, _), first in zip(parts, keys.astype(np.int32), strict=False):
        rows.append(IntervalRows(part.indptr, part.starts + first, part.ends + first, num_keys))
    ranks: list[IntArray] = []  # of queries and keys, where a mask has one
    for axis, firsts in enumerate((queries, keys) if any(rank is not None for _, rank in parts) else ()):
        own = (np.arange(m.shape[axis]) if rank is None else rank for m, (_, rank) in zip(masks, parts, strict=True))
        ranks.append(np.concatenate([rank + first for rank, first in zip(own, firsts, strict=False)]))
    return Mask(IntervalRows.stack(rows, num_keys), f"block_diagonal({checks.preview(masks, 4)})", None, *ranks)


def _several(masks: Iterable[_AnyMask], of: str) -> list[_AnyMask]:
    if isinstance(masks, Mask | MaskGrid):  # pyright: ignore[reportUnnecessaryIsInstance]
        raise TypeError(f"expected a list with one mask for each {of}, got {masks!r}: pass [mask] for one {of}")
    return list(masks)


def _row(mask: object, number: int) -> tuple[Mask, ...]:
    if isinstance(mask, MaskGrid):
        if mask.shape[0] > 1:
            raise ValueError(f"expected the mask of one sequence, got those of {mask.shape[0]} as number {number}")
        return mask.masks[0]
    if not isinstance(mask, Mask):
        raise not_a_mask(mask)
    return (mask,)


def _padded(mask: Mask, num_queries: int, num_keys: int) -> Mask:
    rows, rank = mask.numbered_keys()
    extra = np.arange(mask.num_queries, num_queries, dtype=np.int64)
    pads = np.arange(len(extra)), extra, extra + (mask.num_queries == mask.num_keys)
    below = IntervalRows.of(len(extra), num_keys, pads)
    if rank is not None:
        rank = np.concatenate([rank, np.arange(mask.num_keys, num_keys)])
    return Mask(IntervalRows.stack([rows, below], num_keys), f"{mask!r} padded", key_rank=rank)


def _narrow(mask: Mask) -> IntervalRows | None:
    """The rows of a mask by its own keys; None if they have many intervals for their number of keys."""
    rows, rank = mask.numbered_keys()
    if rank is None:
        return rows
    pieces = mask.pieces(limit=_NARROW * max(1, mask.num_queries))
    if pieces is None:
        return None
    rows = IntervalRows.build(*pieces, *mask.shape)
    return rows if rows.width() <= _NARROW else None
