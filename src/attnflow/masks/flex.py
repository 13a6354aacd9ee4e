"""Compilation of relations for torch's FlexAttention: `mask_mod` and `BlockMask` straight from row intervals.

`rank` gives the internal number of each key, or is None. The masks of a batch are one tensor, its *row intervals*:
int32 [batch or 1, heads or 1, 2 x width, queries], as `MaskGrid.row_intervals` says; unused intervals are (0, 0). An
odd last row holds the number of each key. There are never as many rows as queries, so that a kernel that reads the
tensor as pairs fails.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final, NoReturn, no_type_check

import numpy as np
import torch
from jaxtyping import Bool, Int, Int32, UInt8
from torch import Tensor

from attnflow._core import checks
from attnflow._core.checks import IntArray
from attnflow.masks.intervals import IntervalRows, ragged
from attnflow.masks.numbering import invert, pieces_of

if TYPE_CHECKING:
    from torch.nn.attention.flex_attention import BlockMask

# torch reads a mask_mod's signature and closure: `no_type_check` keeps run-time type checkers from wrapping it.
MaskMod = Callable[[Tensor, Tensor, Tensor, Tensor], Tensor]

MAX_UNROLLED: Final = 32  # intervals per row up to which a mask_mod compares; above, it looks up a bit
_BLOCK: Final = 128  # queries and keys per block of the masks of a batch, as FlexAttention takes them by default
_BLOCKS: Final = 1 << 26  # that are counted: 2.5 GB while it runs, and a million positions in blocks of 128
_COVERED: Final = 1 << 22  # keys that are counted at a time where they are numbered anew


def no_attribute(value: object, name: str) -> NoReturn:
    """`__getattr__` of masks: tell code that takes one for a tensor, such as a model's forward, what to do instead."""
    hint = ": it is not a tensor; put it on a model with af.masks.attach(model, mask), or pass mask.dense()"
    raise AttributeError(
        f"{type(value).__name__!r} object has no attribute {name!r}{'' if name.startswith('_') else hint}"
    )


@dataclass(frozen=True)
class BlockSparsity:
    """The blocks of a mask at one block size, as FlexAttention sees them; made by `mask.block_sparsity`.

    Attributes:
        block: queries and keys per block.
        full: blocks that allow every pair; they need no mask inside.
        partial: blocks that allow some pairs.
        empty: blocks that allow none; a block-sparse kernel skips them.
        used: allowed pairs as a share of the pairs in full and partial blocks, in [0, 1].
    """

    block: int
    full: int
    partial: int
    empty: int
    used: float

    @property
    def total(self) -> int:
        """Number of blocks."""
        return self.full + self.partial + self.empty

    @property
    def computed(self) -> int:
        """Number of full and partial blocks."""
        return self.full + self.partial

    @property
    def skipped(self) -> float:
        """Share of the blocks that are empty, in [0, 1]."""
        return self.empty / self.total if self.total else 0.0


def bounds_of(rows: IntervalRows, width: int) -> Int32[np.ndarray, "queries bounds"]:
    """The intervals of each row as start, end, start, end, ...; unused ones are (0, 0)."""
    table = np.zeros((rows.num_rows, 2 * width), dtype=np.int32)
    row = rows.row_index()
    slot = 2 * (np.arange(len(row)) - rows.indptr[row])
    table[row, slot], table[row, slot + 1] = rows.starts, rows.ends
    return table


def mask_mod_of_bounds(bounds: Int32[Tensor, "queries bounds"], rank: Int32[Tensor, " keys"] | None) -> MaskMod:
    """`mask_mod(b, h, q, k)` that compares k with the intervals of row q; ignores b and h."""
    columns = bounds.t().contiguous()  # torch 2.10 cannot index by a tensor and a number at once

    @no_type_check
    def compare(b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Tensor:
        k = k if rank is None else rank[k]
        allowed = (k >= columns[0][q]) & (k < columns[1][q])
        for t in range(2, columns.shape[0], 2):
            allowed = allowed | ((k >= columns[t][q]) & (k < columns[t + 1][q]))
        return allowed

    return compare


def mask_mod_of_bits(bits: UInt8[Tensor, "batch heads queries bytes"]) -> MaskMod:
    """`mask_mod` from a bit per pair, lowest first: torch's code for a binary search grows exponentially."""
    several, heads = bits.shape[0] > 1, bits.shape[1] > 1

    @no_type_check
    def look_up(b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Tensor:
        b, h = b if several else b * 0, h if heads else h * 0
        return ((bits[b, h, q, k >> 3].int() >> (k & 7)) & 1) == 1

    return look_up


def packed(allowed: Bool[Tensor, "batch heads queries keys"]) -> UInt8[Tensor, "batch heads queries bytes"]:
    """Packs eight keys per byte for `mask_mod_of_bits`; the number of keys must be a multiple of eight."""
    weight = 1 << torch.arange(8, device=allowed.device, dtype=torch.uint8)
    return (allowed.unflatten(-1, (-1, 8)) * weight).sum(-1, dtype=torch.uint8)


def block_mask_of_counts(
    counts: Int[Tensor, "batch heads query_blocks key_blocks"],
    blocks: tuple[int, int],
    mask_mod: MaskMod,
    shape: tuple[int, int],
) -> BlockMask:
    """Builds the `BlockMask` of `create_block_mask`: a block that sticks out of the sequence is partial."""
    from torch.nn.attention.flex_attention import BlockMask  # takes 0.3 s: not paid by `import attnflow`

    if 0 in shape:
        raise ValueError(f"a BlockMask needs at least one query and one key, got shape {shape}")
    full = counts == blocks[0] * blocks[1]
    tables = [table for part in ((counts > 0) & ~full, full) for table in _block_rows(part)]
    return BlockMask.from_kv_blocks(*tables, BLOCK_SIZE=blocks, mask_mod=mask_mod, seq_lengths=shape)


def block_sizes(block_size: int | tuple[int, int]) -> tuple[int, int]:
    pair = block_size if isinstance(block_size, tuple) else (block_size, block_size)
    if len(pair) != 2:
        raise ValueError(f"block_size must be an integer or (query block, key block), got {block_size!r}")
    return checks.integer("block_size", pair[0], 1), checks.integer("block_size", pair[1], 1)


def block_counts(rows: IntervalRows, key_rank: IntArray | None, blocks: tuple[int, int]) -> IntArray:
    """Allowed pairs in each block, int64[query blocks, key blocks]; raises ValueError if they are too many to count."""
    grid = -(-rows.num_rows // blocks[0]), -(-rows.num_keys // blocks[1])
    if grid[0] * grid[1] > _BLOCKS:
        raise ValueError(
            f"blocks of {blocks[0]} x {blocks[1]} are {grid[0] * grid[1]:,} in a mask of {rows.num_rows:,} x "
            f"{rows.num_keys:,}, more than the {_BLOCKS:,} that are counted: take larger blocks, or a slice"
        )
    limit = 4 * (rows.num_rows + len(rows.starts))
    pieces = pieces_of(rows, None if key_rank is None else invert(key_rank), limit)
    if pieces is None:
        assert key_rank is not None, "rows in their own order are never scattered"
        return _counts_of_scattered(rows, key_rank, *blocks)
    query, starts, ends = pieces
    block, start, end = map(torch.from_numpy, (query // blocks[0], starts, ends))
    return pairs_in_blocks(block, start, end, grid, blocks[1]).numpy()


def _counts_of_scattered(rows: IntervalRows, key_rank: IntArray, q_block: int, k_block: int) -> IntArray:
    """Allowed pairs per block, O(keys met by each block of queries): only sums of rows are relabelled."""
    stride, grid = rows.num_keys + 1, (-(-rows.num_rows // q_block), -(-rows.num_keys // k_block))
    block_of_key = np.empty(rows.num_keys, dtype=np.int64)
    block_of_key[key_rank] = np.arange(rows.num_keys) // k_block
    offset = rows.row_index() // q_block * stride
    edges = np.concatenate([offset + rows.starts, offset + rows.ends])
    order = np.argsort(edges, kind="stable")
    edges, cover = edges[order], np.cumsum(np.where(order < len(offset), 1, -1))
    length = np.diff(edges, append=edges[-1:])
    covered = (cover > 0) & (length > 0)
    start, length, cover = edges[covered], length[covered], cover[covered]
    total, counts = np.cumsum(length), np.zeros(grid[0] * grid[1])  # float sums are exact below 2**53
    for part in np.split(np.arange(len(start)), np.searchsorted(total, np.arange(_COVERED, total[-1], _COVERED))):
        which, place = ragged(start[part], length[part])
        block = place // stride * grid[1] + block_of_key[place % stride]
        counts += np.bincount(block, cover[part][which], len(counts))
    return counts.astype(np.int64).reshape(grid)


def pairs_in_blocks(
    row: Int[Tensor, "*intervals"],
    starts: Int[Tensor, "*intervals"],
    ends: Int[Tensor, "*intervals"],
    grid: tuple[int, int],
    width: int,
) -> Int[Tensor, "rows columns"]:
    """Counts allowed pairs in each cell of a grid with `width` keys per column; `row` is of each interval."""
    columns = grid[1] + 1
    first, last = starts // width, (ends - 1).clamp(min=0) // width
    inside = first == last
    base = row * columns

    def total(*groups: tuple[Tensor, Tensor]) -> Tensor:
        sums = torch.zeros(grid[0] * columns, dtype=torch.int64, device=row.device)
        for block, pairs in groups:
            sums.scatter_add_(0, (base + block).flatten(), pairs.to(torch.int64).expand_as(base).flatten())
        return sums.view(grid[0], columns)

    # The ends of an interval are counted directly, its whole blocks by a difference array.
    whole = torch.where(inside, 0, width)
    direct = total(
        (first, torch.where(inside, ends, (first + 1) * width) - starts),
        (last, torch.where(inside, 0, ends - last * width)),
    )
    between = total((first + ~inside, whole), (last, -whole)).cumsum(-1)
    return (direct + between)[:, :-1]


def _pairs_of_renumbered(row: Tensor, starts: Tensor, ends: Tensor, rank: Tensor, grid: tuple[int, int]) -> Tensor:
    """`pairs_in_blocks` of numbered keys: sums rows while keys lie together, then renumbers the sum."""
    num_keys = len(rank)
    cover = torch.zeros(grid[0], num_keys + 1, dtype=torch.int32, device=rank.device)
    for at, change in ((starts, 1), (ends, -1)):
        index = row * (num_keys + 1) + at
        cover.view(-1).scatter_add_(0, index.flatten(), torch.full_like(index, change, dtype=torch.int32).flatten())
    cover = torch.nn.functional.pad(cover.cumsum(-1, dtype=torch.int32)[:, rank.long()], (0, -num_keys % _BLOCK))
    return cover.unflatten(1, (grid[1], _BLOCK)).sum(-1, dtype=torch.int64)


def _block_rows(present: Tensor) -> tuple[Tensor, Tensor]:
    before = present.cumsum(-1, dtype=torch.int32)  # of the present ones, with each column itself
    number, column = before[..., -1], torch.arange(present.shape[-1], dtype=torch.int32, device=present.device)
    place = torch.where(present, before - 1, number[..., None] + column - before)
    order = torch.empty_like(place).scatter_(-1, place.long(), column.expand_as(place).contiguous())
    return number.contiguous(), order


def is_row_intervals(value: object) -> bool:
    return isinstance(value, Tensor) and value.ndim == 4 and value.dtype == torch.int32


def split_rows(
    rows: Int32[Tensor, "batch heads rows queries"],
) -> tuple[Int32[Tensor, "batch heads bounds queries"], Int32[Tensor, "batch heads queries"] | None]:
    """Views: (interval bounds, number of each key or None)."""
    even = rows.shape[2] // 2 * 2
    return rows[:, :, :even], rows[:, :, -1] if rows.shape[2] > even else None


def allowed_of_rows(
    rows: Int32[Tensor, "batch heads rows queries"], num_keys: int
) -> Bool[Tensor, "batch heads queries keys"]:
    """The relation as bool; takes two bytes per pair while it is made."""
    bounds, rank = split_rows(rows)
    batch, heads, _, queries = rows.shape
    step = torch.zeros(batch, heads, queries, num_keys + 1, dtype=torch.int8, device=rows.device)
    for first, change in ((0, 1), (1, -1)):  # an unused interval starts and ends at 0
        at = bounds[:, :, first::2].transpose(-1, -2)
        step.scatter_add_(-1, at.long(), torch.full_like(at, change, dtype=step.dtype))
    allowed = step.cumsum(-1, dtype=torch.int8)[..., :num_keys].bool()
    return allowed if rank is None else allowed.gather(-1, rank[:, :, None].long().expand_as(allowed))


def mask_mod_of_rows(rows: Int32[Tensor, "batch heads rows queries"], num_keys: int) -> MaskMod:
    """`mask_mod(b, h, q, k)` that captures one tensor, so masks of one shape share one kernel."""
    if rows.shape[2] > 2 * MAX_UNROLLED + 1:
        allowed = torch.nn.functional.pad(allowed_of_rows(rows, num_keys), (0, -num_keys % 8))
        return mask_mod_of_bits(packed(allowed))
    several, heads, renumbered = rows.shape[0] > 1, rows.shape[1] > 1, rows.shape[2] % 2 == 1
    intervals = rows.shape[2] // 2

    @no_type_check
    def compare(b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Tensor:
        b, h = b if several else b * 0, h if heads else h * 0
        k = rows[:, :, 2 * intervals][b, h, k] if renumbered else k
        allowed = (k >= rows[:, :, 0][b, h, q]) & (k < rows[:, :, 1][b, h, q])
        for t in range(1, intervals):
            allowed = allowed | ((k >= rows[:, :, 2 * t][b, h, q]) & (k < rows[:, :, 2 * t + 1][b, h, q]))
        return allowed

    return compare


def block_mask_of_rows(rows: Int32[Tensor, "batch heads rows queries"], num_keys: int) -> BlockMask:
    counts = block_counts_of_rows(rows, num_keys)
    return block_mask_of_counts(counts, (_BLOCK, _BLOCK), mask_mod_of_rows(rows, num_keys), (rows.shape[-1], num_keys))


def block_counts_of_rows(
    rows: Int32[Tensor, "batch heads rows queries"], num_keys: int
) -> Int[Tensor, "batch heads query_blocks key_blocks"]:
    (bounds, rank), (batch, heads, _, queries) = split_rows(rows), rows.shape
    starts, ends = bounds[:, :, ::2].long(), bounds[:, :, 1::2].long()
    height, width = -(-queries // _BLOCK), -(-num_keys // _BLOCK)
    row = torch.arange(queries, device=rows.device) // _BLOCK
    if rank is None:
        place = torch.arange(batch * heads, device=rows.device).view(batch, heads, 1, 1) * height
        grid = batch * heads * height, width
        counts = pairs_in_blocks((place + row).expand_as(starts), starts, ends, grid, _BLOCK)
        return counts.unflatten(0, (batch, heads, height))
    parts = [
        _pairs_of_renumbered(row.expand_as(starts[b, h]), starts[b, h], ends[b, h], rank[b, h], (height, width))
        for b in range(batch)
        for h in range(heads)
    ]
    return torch.stack(parts).unflatten(0, (batch, heads))
