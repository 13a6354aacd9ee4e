"""Masks from what a user has: a dense tensor, a `mask_mod`, intervals, edges."""

from __future__ import annotations

import sys
from collections.abc import Iterable, Sequence
from contextlib import suppress

import numpy as np
import torch
from torch import Tensor

from attnflow._core import checks
from attnflow.masks.flex import MaskMod
from attnflow.masks.intervals import IntervalRows
from attnflow.masks.mask import Mask, not_a_mask


def from_dense(allow: Tensor, name: str = "from_dense") -> Mask:
    """The mask of a bool tensor [queries, keys]; True lets the query attend to the key.

    Raises:
        TypeError: not bool. Additive masks (0 / -inf) and 0/1 masks mean opposite things at 0, so the caller
            must say which it is: `additive == 0` or `zero_one.bool()`.
        ValueError: not two-dimensional, or without data (a meta tensor).

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
        raise TypeError(
            f"expected a bool tensor, got {allow.dtype}.{nan} For an additive mask (0 = allowed) pass `mask == 0`, "
            "for a 0/1 mask (1 = allowed) pass `mask.bool()`."
        )
    if allow.ndim != 2:
        index = ", ".join("0" * (allow.ndim - 2))
        advice = f"; index one batch element and head: tensor[{index}]" if index else ""
        raise ValueError(f"expected shape [queries, keys], got {tuple(allow.shape)}{advice}")
    if allow.is_meta:
        raise ValueError("expected a tensor with data, got one on the meta device")
    table = allow.detach().cpu().numpy()
    chunk = max(1, (1 << 23) // max(1, table.shape[1]))
    parts = [IntervalRows.from_bool(table[i : i + chunk]) for i in range(0, len(table), chunk)]
    return Mask(IntervalRows.stack(parts, table.shape[1]), name)


def from_mask_mod(mask_mod: MaskMod, num_queries: int, num_keys: int | None = None) -> Mask:
    """The mask of a FlexAttention `mask_mod(b, h, q, k)`, the same for all sequences and heads, in row chunks.

    Args:
        mask_mod: vectorised over its arguments, as FlexAttention requires.
        num_queries: number of queries.
        num_keys: number of keys, by default as many as queries.

    Raises:
        TypeError: not a function, or one that returns no bool tensor.
        ValueError: its pairs are others for sequence 1 or head 1: a mask is one relation.

    >>> from_mask_mod(lambda b, h, q, k: q >= k, 4).density
    0.625
    """
    num_queries = checks.size("num_queries", num_queries)
    num_keys = num_queries if num_keys is None else checks.size("num_keys", num_keys)
    if not callable(mask_mod):
        raise TypeError(f"mask_mod must be a function of (b, h, q, k); {not_a_mask(mask_mod)}")
    zero, one = torch.zeros((), dtype=torch.int64), torch.ones((), dtype=torch.int64)
    key = torch.arange(num_keys)[None, :]
    chunk = max(1, (1 << 22) // max(1, num_keys))
    parts: list[IntervalRows] = []
    for start in range(0, num_queries, chunk):
        query = torch.arange(start, min(start + chunk, num_queries))[:, None]
        allowed = mask_mod(zero, zero, query, key)
        if not isinstance(allowed, Tensor) or allowed.dtype != torch.bool:  # pyright: ignore[reportUnnecessaryIsInstance]
            got = getattr(allowed, "dtype", type(allowed).__name__)
            raise TypeError(f"mask_mod must return a bool tensor, got {got}")
        for name, at in (("b", (one, zero)), ("h", (zero, one))):
            with suppress(IndexError):  # it looks up a table of one sequence, or of one head
                if not torch.equal(*torch.broadcast_tensors(allowed, mask_mod(*at, query, key))):
                    bound = "torch.tensor(0), h" if name == "b" else "b, torch.tensor(0)"
                    raise ValueError(
                        f"mask_mod depends on {name}: a mask is one relation, for all sequences and heads; bind "
                        f"{name}, as in lambda b, h, q, k: mask_mod({bound}, q, k), and make one mask for each"
                    )
        parts.append(IntervalRows.from_bool(allowed.cpu().expand(len(query), num_keys).numpy()))
    return Mask(IntervalRows.stack(parts, num_keys), "from_mask_mod")


def from_intervals(
    rows: Sequence[Iterable[tuple[int, int]]], num_keys: int | None = None, name: str = "from_intervals"
) -> Mask:
    """The mask whose query q attends to the half-open key intervals `rows[q]`; they may overlap.

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
    """The mask that allows exactly the pairs (query, key) listed.

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
