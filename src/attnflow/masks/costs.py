"""What attention under a mask costs: blocks, work and memory of eager attention, SDPA and FlexAttention."""

from __future__ import annotations

from abc import abstractmethod
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final, Literal, get_args

import numpy as np

from attnflow._core import checks
from attnflow._core.results import Result
from attnflow.masks.flex import Blocked

if TYPE_CHECKING:
    from attnflow.masks import Mask

Backend = Literal["eager", "sdpa", "flex"]
_BACKENDS: Final[tuple[Backend, ...]] = get_args(Backend)
_SOFTMAX_BYTES: Final = 4  # transformers' eager attention takes the softmax in float32


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
    """Counts full, partial and empty blocks; as in torch, a block that sticks out of the sequence is never full."""
    counts = mask.block_counts(block) if 0 not in mask.shape else np.zeros(0, np.int64)
    full, computed = int((counts == block * block).sum()), int((counts > 0).sum())
    used = mask.nnz / (computed * block * block) if computed else 0.0
    return BlockSparsity(block, full, computed - full, counts.size - computed, used)


def block_bytes(mask: Mask, block: int = 128) -> int:
    """Bytes of the tables of torch's `BlockMask`, forward and backward."""
    rows, columns = (-(-size // block) for size in mask.shape)
    return 4 * (4 * rows * columns + 2 * rows + 2 * columns)


@dataclass(frozen=True)
class BackendCost:
    """What one backend needs for one sequence, or for those of a batch together, forward, in one layer.

    Attributes:
        backend: "eager", "sdpa" with a table of pairs, or "flex".
        pairs: pairs (query, key) that it computes, allowed or not: per head, or of all heads where each has its mask.
        flops: 4 x head_dim per computed pair and head; a multiply-add is 2. A training step takes 3.5 times as many.
        memory: bytes at its peak beside queries, keys, values and output: the mask, and scores where they are stored.
    """

    backend: Backend
    pairs: int
    flops: int
    memory: int


@dataclass(frozen=True)
class Cost(Result):
    """What attention under a mask costs, by backend.

    Attributes:
        mask: how the mask prints.
        backend: the one that `flops` and `memory` are of.
        num_queries: rows.
        num_keys: columns.
        allowed_pairs: number of pairs that are allowed; of all sequences and heads that have a mask of their own.
        num_heads: query heads.
        blocks: full, partial and skipped blocks, of all these.
        backends: the cost of each backend.
        num_sequences: of the batch.
    """

    mask: str
    backend: Backend
    num_queries: int
    num_keys: int
    allowed_pairs: int
    num_heads: int
    blocks: BlockSparsity
    backends: tuple[BackendCost, ...]
    num_sequences: int = 1

    @property
    def chosen(self) -> BackendCost:
        """The cost of `backend`."""
        return next(each for each in self.backends if each.backend == self.backend)

    @property
    def skipped(self) -> float:
        """Share of the blocks that FlexAttention skips, in [0, 1]."""
        return self.blocks.empty / self.blocks.total if self.blocks.total else 0.0

    @property
    def flops(self) -> int:
        """Of the chosen backend, forward."""
        return self.chosen.flops

    @property
    def memory(self) -> int:
        """Bytes of the chosen backend at its peak."""
        return self.chosen.memory

    def rows(self) -> list[dict[str, object]]:
        """One row for each backend."""
        return [dict(vars(each)) for each in self.backends]

    def __str__(self) -> str:
        blocks = self.blocks
        lines = [f"{self.mask}: {blocks.empty:,} of {blocks.total:,} blocks of {blocks.block} skipped"]
        for each in self.backends:
            memory = f"{each.memory / 2**20:,.1f} MiB"
            lines.append(f"{each.backend:<6} {each.pairs:,} pairs, {each.flops:.3g} FLOP, {memory}")
        return "\n".join(lines)

    __repr__ = __str__


class Priced(Blocked):
    """Adds `cost` to a mask and to the masks of a batch."""

    __slots__ = ()

    @abstractmethod
    def _captured(self) -> int:
        """Bytes that the `mask_mod` captures."""

    @property
    @abstractmethod
    def nnz(self) -> int:
        """Number of allowed pairs."""

    def cost(
        self,
        backend: Backend = "flex",
        *,
        num_heads: int = 1,
        head_dim: int = 64,
        bytes_per_value: int = 4,
        block_size: int = 128,
    ) -> Cost:
        """What attention under the mask costs: blocks that are skipped, work and memory of eager, SDPA, FlexAttention.

        Exact from row intervals, for one sequence, one layer, forward; of `batch([...])` and `per_head([...])` for all
        sequences and heads together, padding included (pads are computed). Memory is what the implementations of torch
        and transformers hold at their peak: eager, two tables of scores, one of them in float32, and an additive mask;
        SDPA, the mask as bools and as an additive table; FlexAttention, block tables and row bounds.

        Args:
            backend: the one that the result's `flops` and `memory` are of; `backends` has all.
            num_heads: query heads; where each has its mask, they are as many as masks.
            head_dim: channels per head.
            bytes_per_value: of scores and of an additive mask; 2 for bfloat16.
            block_size: queries and keys per block.

        Raises:
            ValueError: an unknown backend, or another number of heads than there are masks for.

        >>> from attnflow import masks
        >>> result = masks.sliding_window(4096, 256).cost(num_heads=9)
        >>> f"{result.skipped:.2f}", result.flops, masks.causal(4096).cost("sdpa").flops
        ('0.91', 3510632448, 4294967296)
        """
        if backend not in _BACKENDS:
            raise ValueError(f"backend must be one of {', '.join(_BACKENDS)}, got {backend!r}")
        block, num_heads = checks.integer("block_size", block_size, 1), checks.integer("num_heads", num_heads, 1)
        head_dim, bytes_per_value = (
            checks.integer(name, value, 1)
            for name, value in (("head_dim", head_dim), ("bytes_per_value", bytes_per_value))
        )
        table = self.padded()
        tables, heads = [each for row in table for each in row], len(table[0])
        if heads > 1 and num_heads not in (1, heads):
            raise ValueError(f"these masks are for {heads} heads, one each, got num_heads={num_heads}")
        alike = num_heads if heads == 1 else 1  # heads that share each table
        (queries, keys), area = tables[0].shape, tables[0].shape[0] * tables[0].shape[1]
        every = area * len(tables)
        parts = [block_sparsity(each, block) for each in tables]
        memory = {
            "eager": alike * every * (bytes_per_value + _SOFTMAX_BYTES) + every * bytes_per_value,
            "sdpa": every * (1 + bytes_per_value),
            "flex": sum(block_bytes(each, block) for each in tables) + self._captured(),
        }
        in_blocks = sum(min(part.computed * block * block, area) for part in parts)
        pairs = {"eager": every, "sdpa": every, "flex": in_blocks}
        full, partial, empty = (sum(getattr(part, name) for part in parts) for name in ("full", "partial", "empty"))
        used = self.nnz / ((full + partial) * block * block) if full + partial else 0.0
        blocks = BlockSparsity(block, full, partial, empty, used)
        costs = tuple(BackendCost(b, pairs[b], 4 * head_dim * alike * pairs[b], memory[b]) for b in _BACKENDS)
        return Cost(repr(self), backend, queries, keys, self.nnz, heads * alike, blocks, costs, len(table))
