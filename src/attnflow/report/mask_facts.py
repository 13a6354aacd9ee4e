"""The numbers of a report that no other concept computes: growth by layer, block sparsity, cost."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

import numpy as np
import numpy.typing as npt

from attnflow._core import checks
from attnflow._core.checks import IntArray
from attnflow.masks.intervals import IntervalRows
from attnflow.masks.mask import Mask
from attnflow.order.flow import Flow
from attnflow.report.grid import grid

_FEW: Final = 256  # positions up to which every one is followed
_SAMPLE: Final = 64


@dataclass(frozen=True, eq=False)
class Growth:
    """How the receptive fields of some positions grow, layer by layer, up to the depth.

    Attributes:
        sizes: keys whose information can be in each position after l layers, int64[layers + 1, positions]; row 0
            is the position alone.
        positions: the positions that were followed; all of them up to 256, else 64 evenly spaced ones.
        complete: whether these are all positions.
    """

    sizes: IntArray
    positions: IntArray
    complete: bool

    @property
    def shares(self) -> npt.NDArray[np.float64]:
        """The sizes as a share of what the position can ever read (row of the closure)."""
        return self.sizes / self.sizes[-1]


def growth(flow: Flow) -> Growth:
    """Follows receptive fields through the layers.

    Cost: a breadth-first walk from each followed position, all at once: O(followed x (intervals + n)) in total.
    """
    n = flow.size
    complete = n <= _FEW
    positions = np.arange(n) if complete else np.linspace(0, n - 1, _SAMPLE).astype(np.int64)
    if flow.num_layers is not None:
        sizes = flow.growth().numpy()[:, positions]
    else:
        rows, rank = flow.masks[0].relabelled()
        sizes = _walk(rows, positions if rank is None else rank[positions])
    return Growth(sizes, positions, complete)


def _walk(rows: IntervalRows, starts: IntArray) -> IntArray:
    count, n = len(starts), rows.num_keys
    seen = np.zeros((count, n), dtype=bool)
    walker, node = np.arange(count), starts
    seen[walker, node] = True
    sizes = [np.ones(count, dtype=np.int64)]
    while True:
        # Only what is new can bring something new; the intervals of a walker are merged before they are spelled out.
        ahead = rows.take(node)
        owner = walker[ahead.row_index()]
        walker, node = IntervalRows.build(owner, ahead.starts, ahead.ends, count, n).expand()
        fresh = ~seen[walker, node]
        walker, node = walker[fresh], node[fresh]
        if len(node) == 0:
            return np.stack(sizes)
        seen[walker, node] = True
        sizes.append(sizes[-1] + np.bincount(walker, minlength=count))


@dataclass(frozen=True)
class BlockSparsity:
    """The blocks of a mask at one block size, as FlexAttention sees them.

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
        """All blocks."""
        return self.full + self.partial + self.empty

    @property
    def computed(self) -> int:
        """Blocks that a kernel computes."""
        return self.full + self.partial


def block_sparsity(mask: Mask, block: int = 128) -> BlockSparsity:
    """Counts full, partial and empty blocks; like torch, a block that sticks out of the sequence is never full."""
    cells = grid(mask, block, block)
    full = int((cells.counts == block * block).sum())
    computed = int((cells.counts > 0).sum())
    used = mask.nnz / (computed * block * block) if computed else 0.0
    return BlockSparsity(block, full, computed - full, cells.counts.size - computed, used)


def block_sizes(mask: Mask) -> list[int]:
    """128, FlexAttention's block, and up to two smaller ones that cut a short sequence into 2 to 32 blocks."""
    n = max(mask.shape)
    return [128, *[size for size in (64, 32, 16, 8, 4) if 2 * size <= n <= 32 * size][:2]]


@dataclass(frozen=True)
class CostModel:
    """The model whose attention is priced.

    Attributes:
        num_layers: layers with this mask.
        num_heads: query heads per layer.
        head_dim: channels per head.
        bytes_per_score: bytes of a stored score; 2 for bfloat16.
    """

    num_layers: int = 1
    num_heads: int = 1
    head_dim: int = 64
    bytes_per_score: int = 2

    def __post_init__(self) -> None:
        for name in ("num_layers", "num_heads", "head_dim", "bytes_per_score"):
            checks.integer(name, getattr(self, name), 1)

    def flops(self, pairs: int) -> int:
        """Forward pass of attention: 2 x head_dim for a score, 2 x head_dim for its value, per pair, head and layer."""
        return 4 * self.head_dim * self.num_heads * self.num_layers * pairs

    def score_bytes(self, pairs: int) -> int:
        """One layer's scores if they are stored (a fused kernel keeps none)."""
        return self.bytes_per_score * self.num_heads * pairs


@dataclass(frozen=True)
class Price:
    """What attention over some pairs costs: `relative` is to all pairs."""

    name: str
    pairs: int
    relative: float
    flops: int
    score_bytes: int


def prices(mask: Mask, model: CostModel, block: int = 128) -> list[Price]:
    """All pairs, the causal half (square masks), this mask pair by pair, and this mask in whole blocks."""
    queries, keys = mask.shape
    dense = queries * keys
    blocks = block_sparsity(mask, block)
    rows = [("every pair", dense)]
    if queries == keys:
        rows.append(("causal pairs", queries * (queries + 1) // 2))
    rows.append(("this mask's pairs", mask.nnz))
    rows.append((f"its blocks of {block}", min(blocks.computed * block * block, dense)))
    return [
        Price(name, pairs, pairs / dense if dense else 0.0, model.flops(pairs), model.score_bytes(pairs))
        for name, pairs in rows
    ]


@dataclass(frozen=True)
class MaskMemory:
    """Bytes that a mask takes: as a bool table, as an additive bfloat16 table, as row intervals, as block tables."""

    table: int
    additive: int
    intervals: int
    blocks: int


def mask_memory(mask: Mask, block: int = 128) -> MaskMemory:
    """The four sizes; block tables are those of torch's BlockMask, forward and backward, 4 bytes an entry."""
    queries, keys = mask.shape
    rows = mask._rows
    intervals = rows.indptr.nbytes + rows.starts.nbytes + rows.ends.nbytes
    grid_rows, grid_columns = -(-queries // block), -(-keys // block)
    tables = 4 * (4 * grid_rows * grid_columns + 2 * grid_rows + 2 * grid_columns)
    return MaskMemory(queries * keys, 2 * queries * keys, intervals, tables)
