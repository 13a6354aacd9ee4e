"""Every choice of size in one place: tiles, warps, stages, how much memory may be held. Measured nowhere else.

The kernels' blocks are 64 keys wide, the bits of a word; queries come 64 or 128 at a time. A tile of 64 rows
takes 4 warps: on Hopper, 8 of them would compute products and what follows from them twice.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Final

import torch

MAX_WIDTH: Final = 256  # of a head: larger accumulators do not fit the registers
MAX_WIDE_WIDTH: Final = 128  # likewise in float32, whose tiles would need 384 KiB of shared memory beyond
MAX_HIDDEN: Final = 256  # of a guidance network
DECODE_ROWS: Final = 128  # query rows times heads per key-value head, up to which keys are split instead of queries
DECODE_QUERIES: Final = 16
PROGRAMS: Final = 264  # programs that decoding aims at: two for each multiprocessor of an H100 or H200
PAIR_BYTES: Final = 1 << 29  # of materialised bias at a time; larger calls go in pieces of batch and maps
KEPT_BYTES: Final = 1 << 26  # of materialised bias that a call keeps for its backward pass; above, it is made again
PART_BYTES: Final = 1 << 28  # of partial gradients at a time
GATHER: Final = 1024  # numbers that one program of a reduction adds up
RANKS: Final = 32  # channels of a product at a time


@dataclass(frozen=True)
class Tiles:
    """Sizes for one width of head and type of input.

    Attributes:
        rows: queries of a tile in the forward pass and for the gradient of queries.
        warps: of those kernels.
        stages: of their pipeline.
        key_warps: of the kernel for the gradients of keys and values (64 keys, 64 queries).
        key_stages: of its pipeline.
        pair_warps: of the kernel for the gradient of the bias (64 keys, 64 queries).
    """

    rows: int
    warps: int
    stages: int
    key_warps: int
    key_stages: int
    pair_warps: int


_HALF: Final = {
    32: Tiles(128, 8, 3, 4, 3, 4),
    64: Tiles(128, 8, 3, 4, 3, 4),
    128: Tiles(128, 8, 2, 4, 2, 4),
    256: Tiles(64, 8, 2, 8, 1, 4),
}
_SINGLE: Final = {
    32: Tiles(64, 4, 2, 4, 2, 4),
    64: Tiles(64, 4, 2, 4, 2, 4),
    128: Tiles(64, 8, 1, 8, 1, 8),
}


def tiles(width: int, dtype: torch.dtype, queries: int) -> Tiles:
    """The sizes for heads of `width` (the larger of keys' and values') and that many queries."""
    sizes = (_SINGLE if dtype == torch.float32 else _HALF)[padded(width, 32)]
    return replace(sizes, rows=64) if queries <= 64 else sizes


def padded(width: int, least: int = 16) -> int:
    """The power of two that a tile of `width` takes."""
    return max(least, 1 << (width - 1).bit_length())
