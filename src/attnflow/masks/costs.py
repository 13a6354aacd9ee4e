"""The cost of attention under a mask, on one device and on several that share the sequence."""

from __future__ import annotations

import heapq
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final, Literal, cast, get_args

import numpy as np

from attnflow._core import checks
from attnflow._core.checks import IntArray
from attnflow._core.results import Result
from attnflow.masks import flex
from attnflow.masks.intervals import IntervalRows, offsets

if TYPE_CHECKING:
    from attnflow.masks import Mask

Backend = Literal["eager", "sdpa", "flex"]
Sharding = Literal["contiguous", "head-tail", "document", "greedy"]
_BACKENDS: Final[tuple[Backend, ...]] = get_args(Backend)
_SHARDINGS: Final[tuple[Sharding, ...]] = get_args(Sharding)
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
        return self.full + self.partial + self.empty

    @property
    def computed(self) -> int:
        return self.full + self.partial


def block_sparsity(mask: Mask, block: int = 128) -> BlockSparsity:
    """Counts full, partial and empty blocks; as in torch, a block that sticks out of the sequence is never full."""
    counts = mask.block_counts(block) if 0 not in mask.shape else np.zeros(0, np.int64)
    full, computed = int((counts == block * block).sum()), int((counts > 0).sum())
    used = mask.nnz / (computed * block * block) if computed else 0.0
    return BlockSparsity(block, full, computed - full, counts.size - computed, used)


@dataclass(frozen=True)
class BackendCost:
    """The cost of one backend for the forward pass of one sequence in one layer.

    Attributes:
        backend: "eager", "sdpa" with a table of pairs, or "flex".
        pairs: pairs (query, key) that it computes in each head, allowed or not.
        flops: 4 x head_dim per computed pair and head; a multiply-add is 2. A training step takes 3.5 times as many.
        memory: peak bytes beyond queries, keys, values and output: the mask, and the scores if they are stored.
    """

    backend: Backend
    pairs: int
    flops: int
    memory: int


@dataclass(frozen=True)
class Cost(Result):
    """The cost of attention under a mask, by backend; made by `mask.cost`.

    Attributes:
        mask: the mask as text.
        backend: the backend that `flops` and `memory` refer to.
        num_queries: rows.
        num_keys: columns.
        allowed_pairs: number of pairs that are allowed.
        num_heads: query heads.
        blocks: full, partial and skipped blocks.
        backends: the cost of each backend.
    """

    mask: str
    backend: Backend
    num_queries: int
    num_keys: int
    allowed_pairs: int
    num_heads: int
    blocks: BlockSparsity
    backends: tuple[BackendCost, ...]

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
        """Floating-point operations of the forward pass of the chosen backend."""
        return self.chosen.flops

    @property
    def memory(self) -> int:
        """Peak memory of the chosen backend, in bytes."""
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


@dataclass(frozen=True)
class RankWork:
    """The work of one rank in each layer.

    Attributes:
        rank: number of the rank.
        queries: number of positions whose queries, keys and values it holds.
        pairs: number of allowed pairs that it computes.
        keys: number of positions whose keys and values its queries read.
        received: how many of these other ranks hold and must send.
        sent: number of positions that it sends, counted once for each receiving rank.
    """

    rank: int
    queries: int
    pairs: int
    keys: int
    received: int
    sent: int


@dataclass(frozen=True, eq=False)
class ShardPlan:
    """Which rank computes which queries under a mask, and what that costs; made by `mask.plan`.

    Attributes:
        mask: the mask of the whole sequence.
        sharding: how the sequence was divided.
        positions: the positions of each rank, ascending.
        ranks: the work of each rank.
    """

    mask: Mask
    sharding: Sharding
    positions: tuple[tuple[int, ...], ...]
    ranks: tuple[RankWork, ...]

    @property
    def imbalance(self) -> float:
        """Work of the busiest rank divided by the mean, since all ranks wait for it; 1.0 is balanced (or no work)."""
        total = sum(each.pairs for each in self.ranks)
        return max(each.pairs for each in self.ranks) * len(self.ranks) / total if total else 1.0

    @property
    def received(self) -> int:
        """Positions that all ranks together receive; an all-gather would send (ranks - 1) x positions."""
        return sum(each.received for each in self.ranks)

    def keys(self, rank: int) -> IntArray:
        """The positions whose keys and values a rank needs, ascending, int64: the columns of `local`."""
        return np.flatnonzero(self._rows(rank).cover())

    def local(self, rank: int) -> Mask:
        """The mask of one rank: a row for each of its positions, a column for each of `keys(rank)`. O(intervals)."""
        rows = self._rows(rank)
        new_key = offsets(rows.cover() > 0)
        starts = new_key[rows.starts]
        ends = starts + (rows.ends - rows.starts)  # all keys of an interval are needed, so they stay together
        rows = IntervalRows.build(rows.row_index(), starts, ends, rows.num_rows, int(new_key[-1]))
        return type(self.mask)(rows, f"rank {rank} of {self.mask!r}")

    def __str__(self) -> str:
        lines = [
            f"{self.sharding} sharding of {self.mask!r}: imbalance {self.imbalance:.3f}, {self.received:,} received"
        ]
        lines += [
            f"rank {e.rank}: {e.queries:,} queries, {e.pairs:,} pairs, {e.received:,} of {e.keys:,} keys received"
            for e in self.ranks[:16]
        ]
        return "\n".join(lines + (["..."] if len(self.ranks) > 16 else []))

    __repr__ = __str__

    def _rows(self, rank: int) -> IntervalRows:
        rank = checks.integer("rank", rank, 0, len(self.positions) - 1)
        return self.mask.intervals().take(np.array(self.positions[rank], np.int64))


class Priced:
    """Adds `cost` and `plan` to a mask."""

    __slots__ = ()

    def cost(
        self,
        backend: Backend = "flex",
        *,
        num_heads: int = 1,
        head_dim: int = 64,
        bytes_per_value: int = 4,
        block_size: int = 128,
    ) -> Cost:
        """Count the cost of attention under the mask: skipped blocks, work and memory of eager, SDPA, FlexAttention.

        The counts are exact, for the forward pass of one sequence in one layer. Memory is the peak in the
        implementations of torch and transformers. Eager holds two tables of scores, one in float32, and an additive
        mask. SDPA holds the mask as bools and as an additive table. FlexAttention holds block tables and row bounds.

        Args:
            backend: the backend that the result's `flops` and `memory` refer to; `backends` has all.
            num_heads: number of query heads.
            head_dim: channels per head.
            bytes_per_value: bytes of a score and of an additive mask value; 2 for bfloat16.
            block_size: queries and keys per block.

        Raises:
            ValueError: an unknown backend.

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
        mask = cast("Mask", self)
        every = mask.num_queries * mask.num_keys
        blocks = block_sparsity(mask, block)
        needed = {
            "eager": (every, num_heads * every * (bytes_per_value + _SOFTMAX_BYTES) + every * bytes_per_value),
            "sdpa": (every, every * (1 + bytes_per_value)),
            "flex": (min(blocks.computed * block * block, every), flex.bytes_of(*mask.numbered_keys(), block)),
        }
        costs = tuple(
            BackendCost(name, needed[name][0], 4 * head_dim * num_heads * needed[name][0], needed[name][1])
            for name in _BACKENDS
        )
        return Cost(repr(mask), backend, *mask.shape, mask.nnz, num_heads, blocks, costs)

    def plan(self, ranks: int, sharding: Sharding = "head-tail", block_size: int = 128) -> ShardPlan:
        """Plan which rank computes which queries of one sequence, with the work and communication of each rank.

        Every rank holds queries, keys and values of its positions; in each layer it receives the other keys and values
        that its queries read. Work is the exact number of allowed pairs. Nothing is distributed here: use the plan to
        choose a sharding, and its local masks to check a sharded run.

        Args:
            ranks: number of devices.
            sharding: "contiguous" gives equal stretches. "head-tail" gives each rank a stretch of the first half and
                its mirror image in the second, which balances causal masks. "document" gives whole documents
                (stretches that no pair leaves), the largest first, each to the rank with the least work; nothing is
                sent. "greedy" gives blocks of `block_size` positions, the one with the most work first, each to the
                least busy rank with room; the ranks' numbers of blocks differ by at most one.
            block_size: positions per block of "greedy"; torch's own context parallelism needs ranks x 128 to divide
                the sequence.

        Raises:
            ValueError: the mask is not square, or the sharding is unknown.

        Cost: O(intervals x ranks).

        >>> from attnflow import masks
        >>> [round(masks.causal(1024).plan(4, how).imbalance, 2) for how in ("contiguous", "head-tail")]
        [1.75, 1.0]
        """
        mask = cast("Mask", self)
        if mask.num_queries != mask.num_keys:
            raise ValueError(f"a sequence is cut by its positions: expected a square mask, got {mask.shape}")
        ranks, block_size = checks.integer("ranks", ranks, 1), checks.integer("block_size", block_size, 1)
        if sharding not in _SHARDINGS:
            raise ValueError(f"sharding must be one of {', '.join(_SHARDINGS)}, got {sharding!r}")
        every = np.arange(mask.num_queries)
        if sharding == "contiguous":
            return _counted(mask, sharding, np.array_split(every, ranks))
        if sharding == "head-tail":
            parts = np.array_split(every, 2 * ranks)
            return _counted(mask, sharding, [np.concatenate([parts[rank], parts[-1 - rank]]) for rank in range(ranks)])
        alone = sharding == "document"
        parts = np.split(every, _borders(mask.intervals()) if alone else every[block_size::block_size])
        room = mask.num_queries if alone else -(-len(parts) // ranks)
        return _counted(mask, sharding, _dealt(parts, mask.row_counts(), ranks, room))


def _counted(mask: Mask, sharding: Sharding, positions: Sequence[IntArray]) -> ShardPlan:
    count, holder = len(positions), np.empty(mask.num_queries, np.int64)
    for rank, held in enumerate(positions):
        holder[held] = rank
    rows, counts = mask.intervals(), mask.row_counts()
    needed = [np.flatnonzero(rows.take(held).cover()) for held in positions]
    sizes = np.stack([np.bincount(holder[keys], minlength=count) for keys in needed])  # [reader, holder]
    np.fill_diagonal(sizes, 0)
    work = tuple(
        RankWork(rank, len(held), int(counts[held].sum()), len(keys), int(sizes[rank].sum()), int(sizes[:, rank].sum()))
        for rank, (held, keys) in enumerate(zip(positions, needed, strict=True))
    )
    return ShardPlan(mask, sharding, tuple(tuple(held.tolist()) for held in positions), work)


def _borders(rows: IntervalRows) -> IntArray:
    """Returns the positions that no pair crosses: where each document after the first starts."""
    row, n = rows.row_index(), rows.num_rows
    first, last = np.minimum(rows.starts, row), np.maximum(rows.ends - 1, row)  # a pair covers what lies between
    step = np.bincount(first + 1, minlength=n + 1) - np.bincount(last + 1, minlength=n + 1)
    return np.flatnonzero(np.cumsum(step)[1:n] == 0) + 1


def _dealt(parts: Sequence[IntArray], counts: IntArray, ranks: int, room: int) -> list[IntArray]:
    work = np.array([counts[part].sum() for part in parts], np.int64)
    queue = [(0, rank) for rank in range(ranks)]
    held: list[list[IntArray]] = [[] for _ in range(ranks)]
    for number in np.argsort(-work, kind="stable").tolist():
        load, rank = heapq.heappop(queue)
        held[rank].append(parts[number])
        if len(held[rank]) < room:
            heapq.heappush(queue, (load + int(work[number]), rank))
    empty = np.zeros(0, np.int64)
    return [np.sort(np.concatenate([empty, *own])) for own in held]
