"""What attention under a mask costs: blocks, work and memory of each backend, and where FlexAttention begins to pay."""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Final, Literal, get_args

import numpy as np
import torch
from torch import Tensor

from attnflow._core import checks
from attnflow._core.results import Result
from attnflow.masks import flex
from attnflow.masks.batches import MaskGrid
from attnflow.masks.catalogue import causal, sliding_window
from attnflow.masks.mask import Mask, not_a_mask

Backend = Literal["eager", "sdpa", "flex"]
_BACKENDS: Final[tuple[Backend, ...]] = get_args(Backend)
_SOFTMAX_BYTES: Final = 4  # transformers' eager attention takes the softmax in float32
_RUN: Final = {"cpu": 1024, "cuda": 4096}  # positions of the short run
_REPEATS: Final = 5


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
    counts = mask.block_counts(block) if 0 not in mask.shape else np.zeros(0, np.int64)
    full = int((counts == block * block).sum())
    computed = int((counts > 0).sum())
    used = mask.nnz / (computed * block * block) if computed else 0.0
    return BlockSparsity(block, full, computed - full, counts.size - computed, used)


def mask_memory(mask: Mask, block: int = 128) -> dict[str, int]:
    """Bytes of the row intervals, of torch's BlockMask, forward and backward, and of the bounds in its `mask_mod`."""
    rows, columns = (-(-size // block) for size in mask.shape)
    intervals = sum(part.nbytes for part in (mask._rows.indptr, mask._rows.starts, mask._rows.ends))
    bounds = 8 * mask.num_queries * int(np.diff(mask._rows.indptr).max(initial=1))
    ranks = 0 if mask._key_rank is None else 4 * mask.num_keys
    bits = mask.num_queries * -(-mask.num_keys // 8)
    inside = bits if bounds > 8 * mask.num_queries * flex.MAX_UNROLLED else bounds + ranks
    return {"intervals": intervals, "blocks": 4 * (4 * rows * columns + 2 * rows + 2 * columns), "bounds": inside}


def _flex_memory(mask: Mask | MaskGrid, tables: list[Mask], block: int) -> int:
    """Bytes of the block tables, and of what the `mask_mod` captures."""
    held = [mask_memory(each, block) for each in tables]
    if isinstance(mask, Mask):
        return held[0]["blocks"] + held[0]["bounds"]
    bits = len(tables) * mask.num_queries * -(-mask.num_keys // 8)
    return sum(each["blocks"] for each in held) + (bits if mask._wide() else mask.row_intervals().nbytes)


def _added(parts: list[BlockSparsity], pairs: int) -> BlockSparsity:
    """The blocks of several masks, of which `pairs` are allowed."""
    full, partial, empty = (sum(getattr(part, name) for part in parts) for name in ("full", "partial", "empty"))
    computed = (full + partial) * parts[0].block ** 2
    return BlockSparsity(parts[0].block, full, partial, empty, pairs / computed if computed else 0.0)


@dataclass(frozen=True)
class BackendCost:
    """What one backend needs for one sequence, or for those of a batch together, forward, in one layer.

    Attributes:
        backend: "eager", "sdpa" with a table of pairs, or "flex".
        pairs: pairs (query, key) that it computes, allowed or not: per head, or of all heads where each has its mask.
        flops: 4 x head_dim per computed pair and head; a multiply-add is 2. A training step takes 3.5 times as many.
        memory: bytes at its peak beside queries, keys, values and output: the mask, and scores where they are stored.
        seconds: as the short run predicts; None without one.
    """

    backend: Backend
    pairs: int
    flops: int
    memory: int
    seconds: float | None


@dataclass(frozen=True)
class Calibration:
    """How fast this machine is, by a short run; hand it on to price other masks without another one.

    Attributes:
        device: "cpu" or "cuda".
        head_dim: channels per head of the run.
        eager: seconds per pair and head.
        sdpa: seconds per pair and head, with a mask of pairs.
        flex: seconds per pair and head of the blocks that are computed, compiled.
        flex_start: seconds of a call that computes nothing.
    """

    device: str
    head_dim: int
    eager: float
    sdpa: float
    flex: float
    flex_start: float


@dataclass(frozen=True)
class Cost(Result):
    """What attention under a mask costs, by backend.

    Attributes:
        mask: how the mask prints.
        backend: the one that `flops`, `memory` and `seconds` are of.
        num_queries: rows.
        num_keys: columns.
        allowed_pairs: number of pairs that are allowed; of all sequences and heads that have a mask of their own.
        num_heads: query heads.
        blocks: full, partial and skipped blocks, of all these.
        backends: the cost of each backend.
        calibration: how fast this machine is; None if no run was asked for.
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
    calibration: Calibration | None
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

    @property
    def seconds(self) -> float | None:
        """Of the chosen backend, forward; None without a calibration."""
        return self.chosen.seconds

    @property
    def flex_pays_below(self) -> float | None:
        """Share of computed blocks below which FlexAttention is faster than SDPA at this size; None uncalibrated."""
        if self.calibration is None or not self.num_queries * self.num_keys:
            return None
        here = self.calibration
        pairs = self.num_queries * self.num_keys * self.num_heads * self.num_sequences
        return min(1.0, max(0.0, (here.sdpa * pairs - here.flex_start) / (here.flex * pairs)))

    @property
    def flex_pays_from(self) -> float | None:
        """Positions from which FlexAttention is faster than SDPA, if the share of computed blocks stays as it is.

        None without a calibration, infinity if it never is.
        """
        if self.calibration is None or not self.blocks.total:
            return None
        gain = self.calibration.sdpa - self.calibration.flex * (1 - self.skipped)
        heads = self.num_heads * self.num_sequences
        return math.sqrt(self.calibration.flex_start / (gain * heads)) if gain > 0 else math.inf

    def rows(self) -> list[dict[str, object]]:
        """One row for each backend."""
        return [
            {"backend": e.backend, "pairs": e.pairs, "flops": e.flops, "memory": e.memory, "seconds": e.seconds}
            for e in self.backends
        ]

    def __str__(self) -> str:
        blocks = self.blocks
        lines = [f"{self.mask}: {blocks.empty:,} of {blocks.total:,} blocks of {blocks.block} skipped"]
        for e in self.backends:
            seconds = "" if e.seconds is None else f", {e.seconds * 1e3:.3g} ms"
            lines.append(f"{e.backend:<6} {e.pairs:,} pairs, {e.flops:.3g} FLOP, {e.memory / 2**20:,.1f} MiB{seconds}")
        if self.flex_pays_from is not None:
            lines.append(f"FlexAttention pays from {self.flex_pays_from:,.0f} positions")
        return "\n".join(lines)

    __repr__ = __str__


def cost(
    mask: Mask | MaskGrid,
    backend: Backend = "flex",
    *,
    num_heads: int = 1,
    head_dim: int = 64,
    bytes_per_value: int = 4,
    block_size: int = 128,
    calibrate: bool | Calibration = False,
    device: str = "cpu",
) -> Cost:
    """What attention under a mask costs: blocks that are skipped, work and memory of eager, SDPA and FlexAttention.

    Exact from row intervals, for one sequence, one layer, forward; of `batch([...])` and `per_head([...])` for all
    sequences and heads together, padding included (pads are computed). Memory is what the implementations of torch and
    transformers hold at their peak: eager, two tables of scores, one of them in float32, and an additive mask; SDPA,
    the mask as bools and as an additive table; FlexAttention, block tables and row bounds.

    Args:
        mask: any mask, or those of a batch or of heads.
        backend: the one that the result's `flops`, `memory` and `seconds` are of; `backends` has all.
        num_heads: query heads; where each has its mask, they are as many as masks.
        head_dim: channels per head.
        bytes_per_value: of scores and of an additive mask; 2 for bfloat16.
        block_size: queries and keys per block.
        calibrate: True times each backend on this machine, once (it compiles FlexAttention: some seconds, on a CPU up
            to a minute); or the `calibration` of another result, which takes no time.
        device: where to time: "cpu" or "cuda".

    Raises:
        ValueError: an unknown backend or device, a calibration for another `head_dim`, or another number of heads than
            there are masks for.

    >>> from attnflow import masks
    >>> result = cost(masks.sliding_window(4096, 256), num_heads=9)
    >>> f"{result.skipped:.2f}", result.flops, cost(masks.causal(4096), "sdpa").flops
    ('0.91', 3510632448, 4294967296)
    """
    if not isinstance(mask, Mask | MaskGrid):  # pyright: ignore[reportUnnecessaryIsInstance]
        raise not_a_mask(mask)
    if backend not in _BACKENDS:
        raise ValueError(f"backend must be one of {', '.join(_BACKENDS)}, got {backend!r}")
    size = checks.integer("block_size", block_size, 1)
    if isinstance(mask, Mask):
        sequences, heads, own, tables = 1, 1, [mask], [mask]
    else:
        sequences, heads = mask.shape[:2]
        own, tables = ([each for row in rows for each in row] for rows in (mask.masks, mask.padded()))
    if heads > 1 and num_heads not in (1, heads):
        raise ValueError(f"these masks are for {heads} heads, one each, got num_heads={num_heads}")
    alike = CostModel(1, num_heads if heads == 1 else 1, head_dim, bytes_per_value)  # heads that share each table
    if calibrate is True:
        calibrate = measured(head_dim, device)
    if calibrate and calibrate.head_dim != head_dim:
        raise ValueError(f"expected a calibration for head_dim {head_dim}, got one for {calibrate.head_dim}")
    area = tables[0].num_queries * tables[0].num_keys
    parts, every, allowed = [block_sparsity(each, size) for each in tables], area * len(tables), sum(m.nnz for m in own)
    in_blocks = sum(min(part.computed * size * size, area) for part in parts)
    memory = {
        "eager": alike.num_heads * every * (bytes_per_value + _SOFTMAX_BYTES) + every * bytes_per_value,
        "sdpa": every * (1 + bytes_per_value),
        "flex": _flex_memory(mask, tables, size),
    }
    costs: list[BackendCost] = []
    for each in _BACKENDS:
        pairs = in_blocks if each == "flex" else every
        seconds = None
        if calibrate:
            rate = {"eager": calibrate.eager, "sdpa": calibrate.sdpa, "flex": calibrate.flex}[each]
            seconds = rate * pairs * alike.num_heads + (calibrate.flex_start if each == "flex" else 0.0)
        costs.append(BackendCost(each, pairs, alike.flops(pairs), memory[each], seconds))
    sizes = (*tables[0].shape, allowed, heads * alike.num_heads)
    blocks = _added(parts, allowed)
    return Cost(repr(mask), backend, *sizes, blocks, tuple(costs), calibrate or None, sequences)


def measured(head_dim: int, device: str) -> Calibration:
    """Times each backend on one head of random queries, keys and values.

    FlexAttention runs under two masks of one compiled kernel, causal and a window: their difference is the time per
    pair.
    """
    from torch.nn.attention.flex_attention import flex_attention  # takes 0.3 s

    if device not in _RUN:
        raise ValueError(f"device must be one of {', '.join(_RUN)}, got {device!r}")
    n = _RUN[device]
    generator = torch.Generator().manual_seed(0)
    q, k, v = (torch.randn(1, 1, n, head_dim, generator=generator).to(device) for _ in range(3))
    wide, narrow = causal(n), sliding_window(n, 128)
    table = wide.dense(device)
    additive = torch.zeros(n, n, device=device).masked_fill(~table, -torch.inf)
    compiled = torch.compile(flex_attention, dynamic=False)

    def eager() -> Tensor:
        return torch.softmax(q @ k.transpose(-1, -2) * head_dim**-0.5 + additive, -1) @ v

    def sdpa() -> Tensor:
        return torch.nn.functional.scaled_dot_product_attention(q, k, v, attn_mask=table)

    def by_blocks(mask: Mask) -> tuple[float, int]:
        block_mask = mask.block_mask(device=device)
        pairs = block_sparsity(mask).computed * 128 * 128
        return _timed(lambda: compiled(q, k, v, block_mask=block_mask), device), pairs

    with torch.no_grad():
        (much, most), (little, least) = by_blocks(wide), by_blocks(narrow)
        per_pair = max((much - little) / (most - least), 1e-15)
        start = max(little - per_pair * least, 0.0)
        return Calibration(device, head_dim, _timed(eager, device) / n**2, _timed(sdpa, device) / n**2, per_pair, start)


def _timed(run: Callable[[], object], device: str) -> float:
    """The least of a few runs, in seconds, after two that are not counted."""
    times: list[float] = []
    for repeat in range(_REPEATS + 2):
        start = time.perf_counter()
        run()
        if device == "cuda":
            torch.cuda.synchronize()
        if repeat >= 2:
            times.append(time.perf_counter() - start)
    return min(times)
