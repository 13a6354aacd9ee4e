"""Make a mask from a dense tensor, a `mask_mod`, torch's `BlockMask`, intervals or edges."""

from __future__ import annotations

import math
import sys
from collections.abc import Iterable, Sequence
from contextlib import suppress
from typing import TYPE_CHECKING, Final

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from attnflow._core import checks
from attnflow.masks.batches import MaskGrid
from attnflow.masks.flex import MaskMod
from attnflow.masks.intervals import IntervalRows
from attnflow.masks.mask import Mask, not_a_mask, of_values

if TYPE_CHECKING:
    from torch.nn.attention.flex_attention import BlockMask

_SKIPPED, _PARTIAL, _FULL, _TWICE = range(4)
_SAID: Final = {_SKIPPED: "skipped", _FULL: "full", _TWICE: "listed twice"}


def from_dense(allow: Tensor, name: str = "from_dense") -> Mask:
    """Make a mask from a bool tensor [queries, keys], where True lets the query attend to the key.

    A tensor [batch, heads, queries, keys] is accepted if all its tables are equal.

    Raises:
        TypeError: the tensor is not bool. At 0, additive masks (0 / -inf) and 0/1 masks mean opposite things, so the
            caller must choose: `additive == 0` or `zero_one.bool()`.
        ValueError: the axes are others, sequences or heads differ, or the tensor has no data (meta device).

    >>> from_dense(torch.tensor([[True, False], [True, True]])) == from_edges([(0, 0), (1, 0), (1, 1)], 2)
    True
    """
    if isinstance(allow, Mask):
        raise TypeError("expected a bool tensor [queries, keys], got a Mask, which needs no wrapping")
    if isinstance(allow, list | tuple):
        raise TypeError(f"expected a bool tensor [queries, keys], got {type(allow).__name__}; pass torch.tensor(rows)")
    if not isinstance(allow, Tensor):  # pyright: ignore[reportUnnecessaryIsInstance]
        raise not_a_mask(allow)
    if allow.dtype != torch.bool:
        nan = " It holds NaN." if allow.is_floating_point() and not allow.is_meta and bool(allow.isnan().any()) else ""
        looks = of_values(allow)
        kind = f" These values look like those of `mask{looks}`." if looks else " These values are of neither kind."
        raise TypeError(
            f"expected a bool tensor, got {allow.dtype}.{nan} For an additive mask (0 = allowed) pass `mask == 0`, "
            f"for a 0/1 mask (1 = allowed) pass `mask.bool()`.{'' if allow.is_meta else kind}"
        )
    if not 2 <= allow.ndim <= 4 or 0 in allow.shape[:-2]:
        raise ValueError(f"expected shape [queries, keys] or [batch, heads, queries, keys], got {tuple(allow.shape)}")
    if allow.is_meta:
        raise ValueError("expected a tensor with data, got one on the meta device")
    every = allow.detach().reshape(math.prod(allow.shape[:-2]), *allow.shape[-2:]).cpu()
    for number in range(1, len(every)):
        if not torch.equal(every[0], every[number]):
            *place, query, key = (allow.cpu() != every[0]).nonzero()[0].tolist()
            raise ValueError(
                f"a mask is one relation, but tensor[{', '.join(map(str, place))}] differs from the first at query "
                f"{query}, key {key}; make one of each, as in masks.batch([masks.from_dense(t) for t in tensor])"
            )
    table = every[0].numpy()
    chunk = max(1, (1 << 23) // max(1, table.shape[1]))
    parts = [IntervalRows.from_bool(table[i : i + chunk]) for i in range(0, len(table), chunk)]
    return Mask(IntervalRows.stack(parts, table.shape[1]), name)


def from_mask_mod(mask_mod: MaskMod, num_queries: int, num_keys: int | None = None) -> Mask:
    """Make a mask from a FlexAttention `mask_mod(b, h, q, k)`, evaluated by row chunks.

    Args:
        mask_mod: a function vectorised over its arguments, as FlexAttention requires.
        num_queries: number of queries.
        num_keys: number of keys (default: `num_queries`).

    Raises:
        TypeError: `mask_mod` is not a function, or does not return a bool tensor.
        ValueError: it allows other pairs for sequence 1 or head 1.

    >>> from_mask_mod(lambda b, h, q, k: q >= k, 4).density
    0.625
    """
    num_queries = checks.size("num_queries", num_queries)
    num_keys = num_queries if num_keys is None else checks.size("num_keys", num_keys)
    if not callable(mask_mod):
        raise TypeError(f"mask_mod must be a function of (b, h, q, k); {not_a_mask(mask_mod)}")
    zero = torch.tensor(0)
    key = torch.arange(num_keys)[None, :]
    chunk = max(1, (1 << 22) // max(1, num_keys))
    parts: list[IntervalRows] = []
    for start in range(0, num_queries, chunk):
        query = torch.arange(start, min(start + chunk, num_queries))[:, None]
        allowed = mask_mod(zero, zero, query, key)
        if not isinstance(allowed, Tensor) or allowed.dtype != torch.bool:  # pyright: ignore[reportUnnecessaryIsInstance]
            got = getattr(allowed, "dtype", type(allowed).__name__)
            raise TypeError(f"mask_mod must return a bool tensor, got {got}")
        for name, at in (("b", (zero + 1, zero)), ("h", (zero, zero + 1))):
            with suppress(IndexError):  # it looks up a table of one sequence, or of one head
                if not torch.equal(*torch.broadcast_tensors(allowed, mask_mod(*at, query, key))):
                    many = "batch" if name == "b" else "per_head"
                    raise ValueError(
                        f"mask_mod depends on {name}: a mask is one relation, for all sequences and heads; make one of "
                        f"each, with {name} bound, and put them together by masks.{many}([...])"
                    )
        parts.append(IntervalRows.from_bool(allowed.cpu().expand(len(query), num_keys).numpy()))
    return Mask(IntervalRows.stack(parts, num_keys), "from_mask_mod")


def from_intervals(
    rows: Sequence[Iterable[tuple[int, int]]], num_keys: int | None = None, name: str = "from_intervals"
) -> Mask:
    """Make a mask that lets query q attend to the half-open key intervals `rows[q]`, which may overlap.

    >>> from_intervals([[(0, 1)], [(0, 2)], [(0, 1), (2, 3)]]).keys(2).tolist()
    [0, 2]
    """
    num_keys = len(rows) if num_keys is None else checks.size("num_keys", num_keys)
    flat = [(q, *_pair("interval", item)) for q, row in enumerate(rows) for item in row]
    for q, start, end in flat:
        if not 0 <= start <= end <= num_keys:
            raise ValueError(f"row {q}: expected 0 <= start <= end <= {num_keys}, got the interval ({start}, {end})")
    table = np.array(flat, dtype=np.int64).reshape(-1, 3)
    return Mask(IntervalRows.build(table[:, 0], table[:, 1], table[:, 2], len(rows), num_keys), name)


def from_edges(
    edges: Iterable[tuple[int, int]], num_queries: int, num_keys: int | None = None, name: str = "from_edges"
) -> Mask:
    """Make a mask that allows exactly the listed pairs (query, key).

    >>> from_edges([(1, 0)], 2).dense().tolist()
    [[False, False], [True, False]]
    """
    num_queries = checks.size("num_queries", num_queries)
    num_keys = num_queries if num_keys is None else checks.size("num_keys", num_keys)
    table = np.array([_pair("edge", edge) for edge in edges], dtype=np.int64).reshape(-1, 2)
    query = checks.index_array("queries of edges", table[:, 0], num_queries)
    key = checks.index_array("keys of edges", table[:, 1], num_keys)
    return Mask(IntervalRows.build(query, key, key + 1, num_queries, num_keys), name)


def _pair(name: str, item: Iterable[int]) -> tuple[int, int]:
    pair = tuple(item)
    if len(pair) != 2:
        raise ValueError(f"expected an {name} of two integers, got {pair}")
    return checks.integer(f"the first of an {name}", pair[0], -sys.maxsize), checks.integer(
        f"the second of an {name}", pair[1], -sys.maxsize
    )


def from_block_mask(block_mask: BlockMask) -> Mask | MaskGrid:
    """Make a mask of the pairs that FlexAttention computes under a `BlockMask`.

    These are all pairs of full blocks, and the pairs that `mask_mod` allows in partial blocks.

    Args:
        block_mask: a `BlockMask` with any block size and any numbers of sequences and heads.

    Returns:
        A `Mask`, or a `MaskGrid` as of `masks.batch` if sequences or heads differ.

    Raises:
        TypeError: the argument is not a `BlockMask`.
        ValueError: a block contradicts `mask_mod`: it is skipped although pairs in it are allowed, full although pairs
            in it are forbidden, or listed twice. The error names the first block and a pair. (This happens when the
            tables were made for other lengths, offsets or documents; FlexAttention does not notice.)

    Cost: `mask_mod` is evaluated for every pair of each sequence and head, by rows of blocks.

    >>> from attnflow import masks
    >>> from_block_mask(masks.sliding_window(300, 40).block_mask()) == masks.sliding_window(300, 40)
    True
    """
    from torch.nn.attention.flex_attention import BlockMask, noop_mask  # takes 0.3 s

    if not isinstance(block_mask, BlockMask):  # pyright: ignore[reportUnnecessaryIsInstance]
        raise not_a_mask(block_mask)
    if getattr(block_mask.mask_mod, "__name__", "") == "_sliced_mask_mod_error":
        raise ValueError("expected a whole BlockMask, got a slice, whose mask_mod torch takes away")
    states = _states(block_mask)
    free = block_mask.mask_mod is noop_mask  # the tables alone are the mask
    masks = [
        Mask(_relation(block_mask, states[place], place, free), "from_block_mask")
        for place in np.ndindex(*states.shape[:2])
    ]
    if all(mask == masks[0] for mask in masks):
        return masks[0]
    heads = states.shape[1]
    rows = [tuple(masks[first : first + heads]) for first in range(0, len(masks), heads)]
    return MaskGrid(tuple(rows), *masks[0].shape)


def computed_pairs(block_mask: BlockMask) -> Tensor:
    """bool [batch, heads, queries, keys] that FlexAttention computes; a block that is listed twice is partial."""
    from torch.nn.attention.flex_attention import create_mask

    (queries, keys), (tall, wide) = block_mask.seq_lengths, block_mask.BLOCK_SIZE
    blocks = torch.from_numpy(_states(block_mask)).byte()
    states = blocks.repeat_interleave(tall, 2).repeat_interleave(wide, 3)[..., :queries, :keys]
    batch, heads, *_ = block_mask.shape
    allow = create_mask(block_mask.mask_mod, batch, heads, queries, keys, str(block_mask.kv_indices.device)).cpu()
    return (allow & (states != _SKIPPED)) | (states == _FULL)


def _states(block_mask: BlockMask) -> npt.NDArray[np.int64]:
    """Whether each block is skipped, partial or full, int64[sequences, heads, query blocks, key blocks]."""
    columns = block_mask.kv_indices.shape[-1]
    partial = _listed(block_mask.kv_num_blocks, block_mask.kv_indices, columns)
    if block_mask.full_kv_num_blocks is None or block_mask.full_kv_indices is None:
        return np.where(partial > 1, _TWICE, partial)
    full = _listed(block_mask.full_kv_num_blocks, block_mask.full_kv_indices, columns)
    return np.where(partial + full > 1, _TWICE, np.where(full > 0, _FULL, partial))


def _listed(counts: Tensor, indices: Tensor, columns: int) -> npt.NDArray[np.int64]:
    valid = torch.arange(indices.shape[-1], device=indices.device) < counts[..., None]
    table = torch.zeros((*counts.shape, columns), dtype=torch.int64, device=indices.device)
    return table.scatter_add_(-1, indices.long(), valid.long()).cpu().numpy()


def _relation(block_mask: BlockMask, states: npt.NDArray[np.int64], place: tuple[int, int], free: bool) -> IntervalRows:
    num_queries, num_keys = block_mask.seq_lengths
    q_block, k_block = block_mask.BLOCK_SIZE
    device = block_mask.kv_indices.device
    b, h = (torch.tensor(index, device=device) for index in place)
    key = torch.arange(num_keys, device=device)[None, :]
    parts: list[IntervalRows] = []
    for row, start in enumerate(range(0, num_queries, q_block)):
        query = torch.arange(start, min(start + q_block, num_queries), device=device)[:, None]
        allowed = block_mask.mask_mod(b, h, query, key).expand(len(query), num_keys).cpu().numpy()
        here = np.repeat(states[row], k_block)[:num_keys]
        table = (here == _FULL) | (allowed & (here == _PARTIAL))
        wrong = ((allowed != table) & (not free)) | (here == _TWICE)
        if wrong.any():
            i, j = (int(at) for at in np.argwhere(wrong)[0])
            raise ValueError(
                f"block ({row}, {j // k_block}) of sequence {place[0]}, head {place[1]} is {_SAID[int(here[j])]}, but "
                f"mask_mod {'allows' if allowed[i, j] else 'forbids'} query {start + i}, key {j}"
            )
        parts.append(IntervalRows.from_bool(table))
    return IntervalRows.stack(parts, num_keys)
