"""One mask in the forms that attention kernels take: dense crops and block masks, built once and kept."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from typing import Final, TypeVar, cast

import numpy as np
import torch
from torch import Tensor
from torch.nn.attention.flex_attention import BlockMask

from attnflow._core.checks import IntArray
from attnflow.masks.intervals import IntervalRows
from attnflow.masks.mask import Mask

_WHOLE: Final = 4096  # a mask of at most this many queries is made dense at once; a larger one grows by doubling
_MAX_BLOCK_MASKS: Final = 8  # held per mask: as many as the sequence lengths of a bucketed training run

_F = TypeVar("_F", bound=Callable[..., object])


def _untraced(function: _F) -> _F:
    """Run outside of a compiled model: what it does is numpy."""
    return cast(_F, torch.compiler.disable(function))


@dataclass(frozen=True, slots=True)
class Span:
    """Where the queries and keys of one attention call lie, in positions of the sequence before any left padding."""

    first_query: int
    num_queries: int
    first_key: int
    num_keys: int
    end: int  # keys from here on are slots that nothing has been written to

    @property
    def last_query(self) -> int:
        """One past the last query."""
        return self.first_query + self.num_queries


class MaskForms:
    """A mask with what has been derived from it; copies and pickles carry the mask alone."""

    def __init__(self, mask: Mask) -> None:
        self.mask = mask
        self.__setstate__({"mask": mask})

    def __getstate__(self) -> dict[str, object]:
        return {"mask": self.mask}

    def __setstate__(self, state: dict[str, object]) -> None:
        self.mask = cast(Mask, state["mask"])
        self.has_empty_rows = bool((self.mask.row_counts() == 0).any())
        self.looks_ahead = True  # whether a leading crop can lose keys; True until known to be False
        self._dense: dict[str, Tensor] = {}
        self._blocks: OrderedDict[tuple[Span, str], BlockMask] = OrderedDict()

    @cached_property
    def pieces(self) -> tuple[IntArray, IntArray, IntArray]:
        """(query, first key, last key + 1) of disjoint intervals that make up the mask, in no given order."""
        pieces = self.mask.pieces()
        if pieces is not None:
            return pieces
        rows = self.mask.intervals()
        return rows.row_index(), rows.starts.astype(np.int64), rows.ends.astype(np.int64)

    @cached_property
    def bounds(self) -> tuple[IntArray, IntArray]:
        """(first key, last key + 1) of each query; (number of keys, 0) where nothing is allowed."""
        query, starts, ends = self.pieces
        first, last = np.full(self.mask.num_queries, self.mask.num_keys), np.zeros(self.mask.num_queries, np.int64)
        np.minimum.at(first, query, starts)
        np.maximum.at(last, query, ends)
        return first, last

    def prepare(self, devices: set[torch.device]) -> None:
        """Build what a compiled model cannot build on its way, where that is cheap."""
        if max(self.mask.shape) <= _WHOLE:
            self.looks_ahead = bool((self.bounds[1] > np.arange(1, self.mask.num_queries + 1)).any())
            for device in devices:
                self.dense(*self.mask.shape, device)

    def dense(self, queries: int, keys: int, device: torch.device) -> Tensor:
        """The leading part of the mask as bool[>= queries, >= keys] on `device`."""
        table = self._dense.get(str(device))
        if table is None or table.shape[0] < queries or table.shape[1] < keys:
            table = self._grow(max(queries, keys), device)
        return table

    @_untraced
    def _grow(self, size: int, device: torch.device) -> Tensor:
        size = max(_WHOLE, 2 * size)  # generation asks for one more key at a time
        rows, columns = min(size, self.mask.num_queries), min(size, self.mask.num_keys)
        table = torch.empty((rows, columns), dtype=torch.bool)
        view = table.numpy()
        for start, part in self.mask.dense_chunks():
            if start >= rows:
                break
            view[start : start + len(part)] = part[: rows - start, :columns]
        self._dense[str(device)] = table = table.to(device)
        return table

    @_untraced
    def block_mask(self, span: Span, device: torch.device) -> BlockMask:
        """The BlockMask of one call without padding."""
        key = (span, str(device))
        if key not in self._blocks:
            self._blocks[key] = self.placed(span).block_mask(device=device)
            while len(self._blocks) > _MAX_BLOCK_MASKS:
                self._blocks.popitem(last=False)
        self._blocks.move_to_end(key)
        return self._blocks[key]

    @_untraced
    def padded_block_mask(
        self, span: Span, padding: Tensor, left: tuple[int, ...], key_only: bool, device: torch.device
    ) -> BlockMask:
        """The BlockMask of one call on a padded batch, exact per batch element: O(batch x rows x intervals).

        `padding` is bool[batch, >= span keys], False at slots to skip; `left` counts the leading pads per element, by
        which positions of the mask are shifted, those of keys alone if `key_only` (cross-attention).
        """
        padding = padding & (torch.arange(padding.shape[1], device=padding.device) < span.end)
        real = padding.cpu().numpy()
        parts: list[BlockMask] = []
        for shift, keep in zip(left, real, strict=True):
            placed = self.placed(span, 0 if key_only else shift, shift)
            columns = IntervalRows.from_bool(keep[None, span.first_key : span.first_key + span.num_keys])
            rows = placed.intervals().intersection(columns.take(np.zeros(span.num_queries, np.int64)))
            parts.append(Mask(rows).block_mask(device=device))
        tables = [
            torch.cat([cast(Tensor, getattr(part, name)) for part in parts])
            for name in ("kv_num_blocks", "kv_indices", "full_kv_num_blocks", "full_kv_indices")
        ]
        inside = self.mask.mask_mod_on(device)
        keys, queries = self.mask.num_keys, self.mask.num_queries
        shifts = torch.tensor(left, device=device)
        first_query, first_key = (torch.tensor(value, device=device) for value in (span.first_query, span.first_key))
        keep = padding.to(device)
        query_shifts = torch.zeros_like(shifts) if key_only else shifts

        def mask_mod(b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Tensor:
            query, key = q + first_query - query_shifts[b], k + first_key - shifts[b]
            valid = keep[b, k + first_key] & (query >= 0) & (query < queries) & (key >= 0) & (key < keys)
            return inside(b, h, query.clamp(0, queries - 1), key.clamp(0, keys - 1)) & valid

        return BlockMask.from_kv_blocks(
            *tables, BLOCK_SIZE=parts[0].BLOCK_SIZE, mask_mod=mask_mod, seq_lengths=(span.num_queries, span.num_keys)
        )

    def placed(self, span: Span, query_shift: int = 0, key_shift: int = 0) -> Mask:
        """The mask as seen by one call: rows and keys moved up by the shifts, then cut to the span."""
        whole = (span.first_query, span.first_key, query_shift, key_shift) == (0, 0, 0, 0)
        if whole and self.mask.shape == (span.num_queries, span.num_keys) and span.num_keys <= span.end:
            return self.mask
        query, starts, ends = self.pieces
        query = query + query_shift - span.first_query
        keep = (query >= 0) & (query < span.num_queries)
        starts, ends = starts[keep] + key_shift, np.minimum(ends[keep] + key_shift, span.end)
        starts, ends = starts - span.first_key, ends - span.first_key
        return Mask(IntervalRows.build(query[keep], starts, ends, span.num_queries, span.num_keys))
