"""One mask in the forms that attention kernels take: dense crops and block masks, built once and kept."""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass, field
from functools import cached_property
from typing import Final

import numpy as np
import torch
from torch import Tensor
from torch.nn.attention.flex_attention import BlockMask

from attnflow._core.checks import IntArray
from attnflow._core.per_thread import untraced
from attnflow.masks.batches import MaskGrid
from attnflow.masks.intervals import IntervalRows
from attnflow.masks.mask import Mask

_WHOLE: Final = 4096  # a mask of at most this many queries is made dense at once; a larger one grows by doubling
_MAX_BLOCK_MASKS: Final = 8  # held per mask: as many as the sequence lengths of a bucketed training run


@dataclass(frozen=True, slots=True)
class Span:
    """Where one call's queries and keys lie, in slots: left padding is not subtracted."""

    first_query: int
    num_queries: int
    first_key: int
    num_keys: int
    end: int  # keys from here on are slots that nothing has been written to

    @property
    def last_query(self) -> int:
        return self.first_query + self.num_queries


class MaskForms:
    """A mask with its cached forms; copies and pickles carry the mask alone."""

    def __init__(self, mask: Mask) -> None:
        self.mask = mask
        self.has_empty_rows = bool((self.mask.row_counts() == 0).any())
        self.looks_ahead = True  # whether a leading crop can lose keys; True until known to be False
        self._dense: dict[str, Tensor] = {}

    def __reduce__(self) -> tuple[object, ...]:
        return MaskForms, (self.mask,)

    @cached_property
    def pieces(self) -> tuple[IntArray, IntArray, IntArray]:
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

    @untraced
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

    def placed(self, span: Span, query_shift: int = 0, key_shift: int = 0) -> Mask:
        """The mask of one call: rows and keys moved up by the shifts, then cut to the span."""
        whole = (span.first_query, span.first_key, query_shift, key_shift) == (0, 0, 0, 0)
        if whole and self.mask.shape == (span.num_queries, span.num_keys) and span.num_keys <= span.end:
            return self.mask
        query, starts, ends = self.pieces
        query = query + query_shift - span.first_query
        keep = (query >= 0) & (query < span.num_queries)
        starts, ends = starts[keep] + key_shift, np.minimum(ends[keep] + key_shift, span.end)
        starts, ends = starts - span.first_key, ends - span.first_key
        return Mask(IntervalRows.build(query[keep], starts, ends, span.num_queries, span.num_keys))


@dataclass(frozen=True, eq=False)
class GridForms:
    mask: Mask | MaskGrid
    parts: tuple[tuple[MaskForms, ...], ...]  # of each sequence and head; one row, or one column, stands for all
    _blocks: OrderedDict[tuple[Span, str], BlockMask] = field(default_factory=OrderedDict)

    @classmethod
    def of(cls, mask: Mask | MaskGrid) -> GridForms:
        """The forms of a mask or grid; equal masks share theirs."""
        rows = ((mask,),) if isinstance(mask, Mask) else mask.masks
        forms = {head: MaskForms(head) for row in rows for head in row}
        return cls(mask, tuple(tuple(forms[head] for head in row) for row in rows))

    def __reduce__(self) -> tuple[object, ...]:
        return GridForms, (self.mask, self.parts)

    @property
    def shape(self) -> tuple[int, int]:
        """(sequences, heads); a 1 stands for any number."""
        return len(self.parts), len(self.parts[0])

    def prepare(self, devices: set[torch.device]) -> None:
        for form in {id(form): form for row in self.parts for form in row}.values():
            form.prepare(devices)

    @untraced
    def block_mask(self, span: Span, device: torch.device) -> BlockMask:
        key = (span, str(device))
        made = self._blocks.pop(key, None)  # other threads may make and drop the same
        if made is None:
            rows = tuple(tuple(form.placed(span) for form in row) for row in self.parts)
            placed = rows[0][0] if self.shape == (1, 1) else MaskGrid(rows, span.num_queries, span.num_keys)
            made = placed.block_mask(device=device)
        self._blocks[key] = made
        while len(self._blocks) > _MAX_BLOCK_MASKS:
            self._blocks.popitem(last=False)
        return made

    @untraced
    def padded_block_mask(
        self, span: Span, padding: Tensor, left: tuple[int, ...], key_only: bool, device: torch.device
    ) -> BlockMask:
        """The BlockMask of a padded batch; `left` pads shift a mask's positions (of keys, if `key_only`)."""
        padding = padding & (torch.arange(padding.shape[1], device=padding.device) < span.end)
        keys = padding[:, span.first_key : span.first_key + span.num_keys].cpu().numpy()
        forms = self.parts * (1 if len(self.parts) > 1 else len(left))
        rows: list[tuple[Mask, ...]] = []
        for row, real, shift in zip(forms, keys, left, strict=True):
            columns = IntervalRows.from_bool(real[None]).take(np.zeros(span.num_queries, np.int64))
            placed = (form.placed(span, 0 if key_only else shift, shift).intervals() for form in row)
            rows.append(tuple(Mask(head.intersection(columns)) for head in placed))
        return MaskGrid(tuple(rows), span.num_queries, span.num_keys).block_mask(device=device)
