"""A relation as kernels read it: one word of bits for each query and block of 64 keys, and lists of blocks.

Made once for each relation, some queries at a time, without waiting for the device. Memory: a bit for each pair, and
16 bytes for each block of 64 x 64.
"""

from __future__ import annotations

from typing import Final, NamedTuple

import torch
from jaxtyping import Int, UInt8
from torch import Tensor
from torch.nn import functional

from attnflow.bias.allow import Allow

BLOCK: Final = 64
_PAIRS: Final = 1 << 22  # looked at together


class Lists(NamedTuple):
    """For each block of one side, the blocks of the other that it meets: the full ones first, then the partial ones.

    Attributes:
        full: how many are full, [batch or 1, heads or 1, blocks].
        total: how many there are.
        others: which ones, [batch or 1, heads or 1, blocks, other blocks].
    """

    full: Int[Tensor, "batch heads blocks"]
    total: Int[Tensor, "batch heads blocks"]
    others: Int[Tensor, "batch heads blocks others"]


class Blocks(NamedTuple):
    """A relation in blocks of 64 keys by 64 queries, the queries padded to a multiple of 128.

    Attributes:
        words: bit t of word [k, q] says whether query q may attend to key 64 k + t; [batch or 1, heads or 1, key
            blocks, padded queries].
        rows: key blocks of each block of 64 or 128 queries.
        columns: blocks of 64 queries of each key block.
        pair_rows: key blocks of each block of 64 queries, that any head needs.
        pair_columns: the same from the other side.
    """

    words: Int[Tensor, "batch heads key_blocks padded"]
    rows: Lists
    columns: Lists
    pair_rows: Lists
    pair_columns: Lists

    def flat(self) -> list[Tensor]:
        """As operators take it."""
        return [self.words, *self.rows, *self.columns, *self.pair_rows, *self.pair_columns]

    @classmethod
    def unflat(cls, tensors: list[Tensor]) -> Blocks:
        """The inverse of `flat`."""
        words, *rest = tensors
        return cls(words, *(Lists(*rest[start : start + 3]) for start in range(0, 12, 3)))


def blocks_of(allow: Allow, device: torch.device, rows: int) -> Blocks:
    """The blocks of a relation, for tiles of 64 or 128 queries; kept with the relation for the layers to come."""

    def make() -> Blocks:
        words, counts = count_pairs(allow, device)
        per_head = counts.unflatten(2, (-1, rows // BLOCK)).sum(dim=3)
        any_head = counts if counts.shape[1] == 1 else counts.sum(dim=1, keepdim=True)
        whole, union = BLOCK * BLOCK, BLOCK * BLOCK * counts.shape[1]
        return Blocks(
            words,
            _lists(per_head, rows * BLOCK),
            _lists(counts.mT, whole),
            _lists(any_head, union),
            _lists(any_head.mT, union),
        )

    result = allow.derived(("triton", rows, str(device)), make)
    assert isinstance(result, Blocks)
    return result


def bytes_of(allow: Allow, device: torch.device) -> UInt8[Tensor, "batch heads queries keys"] | None:
    """A byte for each pair, for a few queries; None where every pair is allowed."""

    def make() -> Tensor | None:
        result = allow.dense()
        return None if result is None else result.to(device).contiguous().view(torch.uint8)

    result = allow.derived(("triton bytes", str(device)), make)
    assert result is None or isinstance(result, Tensor)
    return result


def count_pairs(allow: Allow, device: torch.device) -> tuple[Tensor, Tensor]:
    """(words as in `Blocks`, allowed pairs of each block of 64 x 64 [batch, heads, query blocks, key blocks])."""
    num_blocks = -(-allow.num_keys // BLOCK)
    step = max(1, _PAIRS // (allow.batch * num_blocks * BLOCK * BLOCK)) * BLOCK
    bit = torch.ones((), dtype=torch.int64, device=device) << torch.arange(BLOCK, device=device)
    words: list[Tensor] = []
    counts: list[Tensor] = []
    for start in range(0, allow.num_queries, step):
        stop = min(start + step, allow.num_queries)
        part = allow.rows(slice(start, stop))
        if part is None:
            part = torch.ones(1, 1, stop - start, allow.num_keys, dtype=torch.bool, device=device)
        part = functional.pad(part.to(device), (0, -allow.num_keys % BLOCK, 0, (start - stop) % BLOCK))
        part = part.unflatten(3, (num_blocks, BLOCK))
        words.append((part * bit).sum(dim=-1).mT)
        counts.append(part.unflatten(2, (-1, BLOCK)).sum(dim=(3, 5)))
    every_word, every_count = torch.cat(words, dim=3), torch.cat(counts, dim=2)
    missing = -every_word.shape[3] % (2 * BLOCK)
    every_word = functional.pad(every_word, (0, missing)).contiguous()
    return every_word, functional.pad(every_count, (0, 0, 0, missing // BLOCK))


def _lists(counts: Tensor, whole: int) -> Lists:
    rank = torch.where(counts == whole, 0, torch.where(counts > 0, 1, 2))
    index = rank.argsort(dim=-1, stable=True).int()
    full, count = ((rank <= limit).sum(dim=-1, dtype=torch.int32) for limit in (0, 1))
    return Lists(full, count, index.contiguous())
