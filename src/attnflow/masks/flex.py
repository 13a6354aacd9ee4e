"""Compilation of a relation for torch's FlexAttention: `mask_mod` and `BlockMask` straight from row intervals.

A relation is given as the intervals of each query's row, in internal key numbers, and the internal number of each key
(None where it is its own).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Final, no_type_check

import numpy as np
import torch
from jaxtyping import Int, UInt8
from torch import Tensor

from attnflow._core import checks
from attnflow._core.checks import IntArray
from attnflow.masks.intervals import IntervalRows
from attnflow.masks.numbering import invert

if TYPE_CHECKING:
    from torch.nn.attention.flex_attention import BlockMask

# torch reads a mask_mod's signature and closure: `no_type_check` keeps run-time type checkers from wrapping it.
MaskMod = Callable[[Tensor, Tensor, Tensor, Tensor], Tensor]

MAX_UNROLLED: Final = 32  # intervals per row up to which a mask_mod compares; above, it looks up a bit
_EXPANDED: Final = 1 << 22  # keys that are held at a time while the blocks of a relabelled mask are counted


def mask_mod(rows: IntervalRows, key_rank: IntArray | None, device: torch.device) -> MaskMod:
    """`mask_mod(b, h, q, k)` that compares k with the bounds of row q's intervals, tensors on `device`."""
    width = int(np.diff(rows.indptr).max(initial=0))
    if width > MAX_UNROLLED:
        return _bit_table(rows, key_rank, device)
    rank = None if key_rank is None else torch.tensor(key_rank, dtype=torch.int32, device=device)
    # One table [queries, 2 x intervals]: only its length varies among masks of a kind, so one kernel serves them all.
    table = np.zeros((rows.num_rows, 2 * max(width, 1)), dtype=np.int32)
    row = rows.row_index()
    slot = 2 * (np.arange(len(row)) - rows.indptr[row])
    table[row, slot], table[row, slot + 1] = rows.starts, rows.ends
    bounds = torch.from_numpy(table).to(device)

    @no_type_check
    def compare(b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Tensor:
        k = k if rank is None else rank[k]
        allowed = (k >= bounds[q, 0]) & (k < bounds[q, 1])
        for t in range(2, bounds.shape[1], 2):
            allowed = allowed | ((k >= bounds[q, t]) & (k < bounds[q, t + 1]))
        return allowed

    return compare


def _bit_table(rows: IntervalRows, key_rank: IntArray | None, device: torch.device) -> MaskMod:
    """One bit a pair: for rows of many intervals, which an unrolled comparison would make slow.

    (A binary search over the intervals needs less memory, but torch's code generation is exponential in its steps.)
    """
    packed = np.empty((rows.num_rows, -(-rows.num_keys // 8)), dtype=np.uint8)
    chunk = max(1, _EXPANDED // max(1, rows.num_keys))
    for start in range(0, rows.num_rows, chunk):
        part = rows.to_bool(slice(start, start + chunk))
        part = part if key_rank is None else part[:, key_rank]
        packed[start : start + len(part)] = np.packbits(part, axis=1, bitorder="little")
    return mask_mod_of_bits(torch.from_numpy(packed).to(device)[None, None])


def mask_mod_of_bits(bits: UInt8[Tensor, "batch heads queries bytes"]) -> MaskMod:
    """`mask_mod` of one bit a pair, eight keys a byte, the first in the lowest bit: for rows of many intervals."""
    several, heads = bits.shape[0] > 1, bits.shape[1] > 1

    @no_type_check
    def look_up(b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Tensor:
        b, h = b if several else b * 0, h if heads else h * 0
        return ((bits[b, h, q, k >> 3].int() >> (k & 7)) & 1) == 1

    return look_up


def block_mask(
    rows: IntervalRows, key_rank: IntArray | None, blocks: tuple[int, int], mask_mod: MaskMod, device: torch.device
) -> BlockMask:
    """The `BlockMask` of a relation: a block is full if all its pairs are allowed, partial if some are.

    Identical to `create_block_mask`, which also leaves a block that sticks out of the sequence partial.
    """
    shape = rows.num_rows, rows.num_keys
    if 0 in shape:
        raise ValueError(f"a BlockMask needs at least one query and one key, got shape {shape}")
    counts = torch.from_numpy(block_counts(rows, key_rank, *blocks))[None, None]
    return block_mask_of_counts(counts.to(device), blocks, mask_mod, shape)


def block_mask_of_counts(
    counts: Int[Tensor, "batch heads query_blocks key_blocks"],
    blocks: tuple[int, int],
    mask_mod: MaskMod,
    shape: tuple[int, int],
) -> BlockMask:
    """The `BlockMask` of the allowed pairs in each block."""
    from torch.nn.attention.flex_attention import BlockMask  # takes 0.3 s: not paid by `import attnflow`

    full = counts == blocks[0] * blocks[1]
    tables = [table for part in ((counts > 0) & ~full, full) for table in _block_rows(part)]
    return BlockMask.from_kv_blocks(*tables, BLOCK_SIZE=blocks, mask_mod=mask_mod, seq_lengths=shape)


def block_sizes(block_size: int | tuple[int, int]) -> tuple[int, int]:
    """(queries per block, keys per block), checked."""
    pair = block_size if isinstance(block_size, tuple) else (block_size, block_size)
    if len(pair) != 2:
        raise ValueError(f"block_size must be an integer or (query block, key block), got {block_size!r}")
    return checks.integer("block_size", pair[0], 1), checks.integer("block_size", pair[1], 1)


def block_counts(rows: IntervalRows, key_rank: IntArray | None, q_block: int, k_block: int) -> IntArray:
    """Allowed pairs in each block of q_block queries by k_block keys, int64[query blocks, key blocks]."""
    limit = 4 * (rows.num_rows + len(rows.starts))
    pieces = rows.pieces(None if key_rank is None else invert(key_rank), limit)
    if pieces is None:
        assert key_rank is not None, "rows in their own order are never shattered"
        return _count_shattered(rows, key_rank, q_block, k_block)
    return _count_pieces(*pieces, (rows.num_rows, rows.num_keys), q_block, k_block)


def _count_pieces(
    query: IntArray, starts: IntArray, ends: IntArray, shape: tuple[int, int], q_block: int, k_block: int
) -> IntArray:
    """Allowed pairs per block: the ends of each interval directly, its whole blocks by a difference array."""
    grid = (-(-shape[0] // q_block), -(-shape[1] // k_block) + 1)

    def total(block: IntArray, pairs: IntArray) -> IntArray:
        sums = np.bincount(base + block, pairs.astype(np.float64), grid[0] * grid[1])  # exact below 2**53
        return sums.astype(np.int64).reshape(grid)

    first, last = starts // k_block, (ends - 1) // k_block
    base = query // q_block * grid[1]
    inside = first == last
    direct = total(first, np.where(inside, ends, (first + 1) * k_block) - starts)
    if not inside.all():
        direct += total(last, np.where(inside, 0, ends - last * k_block))
        whole = np.where(inside, 0, k_block)
        direct += np.cumsum(total(first + ~inside, whole) - total(last, whole), axis=1)
    return direct[:, :-1]


def _count_shattered(rows: IntervalRows, key_rank: IntArray, q_block: int, k_block: int) -> IntArray:
    """Allowed pairs per block where relabelling leaves no long intervals: O(keys met by each block of queries).

    The rows of a block of queries are added up while their keys still lie together; only the sum is relabelled.
    """
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
    for part in np.split(np.arange(len(start)), np.searchsorted(total, np.arange(_EXPANDED, total[-1], _EXPANDED))):
        size = length[part]
        place = np.arange(size.sum()) + np.repeat(start[part] - (np.cumsum(size) - size), size)
        block = place // stride * grid[1] + block_of_key[place % stride]
        counts += np.bincount(block, np.repeat(cover[part], size), len(counts))
    return counts.astype(np.int64).reshape(grid)


def _block_rows(present: Tensor) -> tuple[Tensor, Tensor]:
    """(number of blocks per row, block columns with the present ones first), as torch lays them out."""
    before = present.cumsum(-1, dtype=torch.int32)  # of the present ones, with each column itself
    number, column = before[..., -1], torch.arange(present.shape[-1], dtype=torch.int32, device=present.device)
    place = torch.where(present, before - 1, number[..., None] + column - before)
    order = torch.empty_like(place).scatter_(-1, place.long(), column.expand_as(place).contiguous())
    return number.contiguous(), order
