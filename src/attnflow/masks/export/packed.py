"""Sequences end to end: flash-attn's variable lengths, FlashInfer's packed bits, Transformer Engine's presets."""

from __future__ import annotations

import math
from dataclasses import dataclass
from itertools import accumulate, pairwise
from typing import Final, Literal

import numpy as np
import torch
from jaxtyping import Bool, Int32, UInt8
from torch import Tensor

from attnflow._core.results import Result
from attnflow.masks.batches import MaskGrid, batch, per_head
from attnflow.masks.build import from_dense
from attnflow.masks.export.bands import Bands, NotExpressible, bands_of, bands_of_batch, sequences
from attnflow.masks.mask import Mask

_PAIRS: Final = 1 << 30  # of a table: 1 GB, and as much while it is made
_OPEN: Final = -1  # a side of the window without a limit, in flash-attn and in Transformer Engine

PresetType = Literal["no_mask", "causal", "causal_bottom_right", "padding", "padding_causal", "arbitrary"]


@dataclass(frozen=True, eq=False)
class Varlen(Result):
    """A mask in the arguments of flash-attn's `flash_attn_varlen_func`; the fields have the names of these arguments.

    In a document of Q queries and K keys, query i attends to keys i + d - window_size[0] to i + d + window_size[1],
    where d = K - Q (flash-attn 2.1 and later). `causal` sets the upper bound to i + d.

    Attributes:
        cu_seqlens_q: int32[documents + 1], the first query of each document and the end.
        cu_seqlens_k: int32[documents + 1], the same of its keys.
        max_seqlen_q: queries of the longest document.
        max_seqlen_k: keys of the longest document.
        causal: whether nothing after the diagonal is seen.
        window_size: keys (before, after) the diagonal; -1 for all of the document.
    """

    cu_seqlens_q: Int32[Tensor, "documents_and_1"]
    cu_seqlens_k: Int32[Tensor, "documents_and_1"]
    max_seqlen_q: int
    max_seqlen_k: int
    causal: bool
    window_size: tuple[int, int]

    def to_mask(self) -> Mask:
        """The relation that flash-attn computes.

        Raises:
            ValueError: the lengths do not start at 0, or decrease.
        """
        queries, keys = (_lengths(name, getattr(self, name)) for name in ("cu_seqlens_q", "cu_seqlens_k"))
        if len(queries) != len(keys):
            raise ValueError(f"expected as many documents of keys as of queries ({len(queries)}), got {len(keys)}")
        left, right = (None if side == _OPEN else side for side in self.window_size)
        return Bands(queries, keys, left, 0 if self.causal else right).to_mask("varlen")

    def __str__(self) -> str:
        kind = "causal" if self.causal else "both directions"
        count = len(self.cu_seqlens_q) - 1
        return f"Varlen: {count} document{'s' * (count != 1)}, {kind}, window_size {self.window_size}"

    __repr__ = __str__


def varlen(mask: Mask | MaskGrid) -> Varlen:
    """The arguments of flash-attn's `flash_attn_varlen_func` for packed documents and windows.

    The sequences of a batch are laid end to end, without padding.

    Raises:
        NotExpressible: the mask is not of this kind; the error names a pair.

    >>> from attnflow import masks
    >>> form = varlen(masks.document([2, 3]))
    >>> form.cu_seqlens_q.tolist(), form.causal, form.window_size
    ([0, 2, 5], True, (-1, -1))
    """
    bands = bands_of_batch(sequences(mask, "varlen"), "varlen")
    left, right = (_OPEN if side is None else side for side in (bands.left, bands.right))
    if bands.causal:
        right = _OPEN if bands.left is None else 0
    query, key = (max(lengths, default=0) for lengths in (bands.queries, bands.keys))
    return Varlen(_cumulative(bands.queries), _cumulative(bands.keys), query, key, bands.causal, (left, right))


@dataclass(frozen=True, eq=False)
class FlashInferMask(Result):
    """A mask for FlashInfer's prefill wrappers; the first field has the name of an argument of `plan`.

    Attributes:
        packed_custom_mask: uint8[bytes], rows end to end, the lowest bit first; each request begins a byte of its own.
        qo_lengths: queries of each request.
        kv_lengths: keys of each request.
    """

    packed_custom_mask: UInt8[Tensor, "bytes"]
    qo_lengths: tuple[int, ...]
    kv_lengths: tuple[int, ...]

    def rows(self) -> list[dict[str, object]]:
        """One row a request."""
        return [{"queries": q, "keys": k} for q, k in zip(self.qo_lengths, self.kv_lengths, strict=True)]

    def to_mask(self) -> Mask | MaskGrid:
        """The relation of the request; of several, the batch of them.

        Raises:
            ValueError: the bytes are not as many as the requests need, or there is none.
        """
        masks: list[Mask] = []
        place = 0
        for queries, keys in zip(self.qo_lengths, self.kv_lengths, strict=True):
            size = -(-queries * keys // 8)
            part = self.packed_custom_mask[place : place + size].numpy()
            if len(part) != size:
                raise ValueError(f"expected {size} bytes for {queries} x {keys} pairs, got {len(part)}")
            bits = np.unpackbits(part, count=queries * keys, bitorder="little")
            masks.append(from_dense(torch.from_numpy(bits.astype(np.bool_).reshape(queries, keys)), "flashinfer"))
            place += size
        return masks[0] if len(masks) == 1 else batch(masks)

    def __str__(self) -> str:
        return f"FlashInferMask: {len(self.qo_lengths)} requests, {len(self.packed_custom_mask):,} bytes"

    __repr__ = __str__


def flashinfer(mask: Mask | MaskGrid) -> FlashInferMask:
    """The `packed_custom_mask` of FlashInfer's prefill wrappers, for any mask; each sequence of a batch is a request.

    Raises:
        NotExpressible: the heads of a sequence differ.

    Cost: one byte per pair while it is packed, one bit per pair after that.

    >>> from attnflow import masks
    >>> flashinfer(masks.causal(3)).packed_custom_mask.tolist()
    [217, 1]
    """
    masks = sequences(mask, "flashinfer")
    bits = [np.packbits(_table(each, "flashinfer").numpy(), axis=None, bitorder="little") for each in masks]
    lengths = (tuple(each.shape[axis] for each in masks) for axis in (0, 1))
    return FlashInferMask(torch.from_numpy(np.concatenate(bits)), *lengths)


@dataclass(frozen=True, eq=False)
class EngineMask(Result):
    """A mask for Transformer Engine's `DotProductAttention`, which passes presets on to cuDNN.

    Attributes:
        attn_mask_type: a preset, or "arbitrary" with a table. "padding..." is for packed documents in format "thd".
        window_size: keys (before, after) the diagonal; -1 for all.
        attention_mask: bool[batch or 1, heads or 1, queries, keys], **True where attention is forbidden**; None with a
            preset.
        cu_seqlens_q: int32[documents + 1], the first query of each document and the end; only for "padding...".
        cu_seqlens_kv: int32[documents + 1], the same of its keys.
        num_queries: rows of the mask.
        num_keys: columns of the mask.
    """

    attn_mask_type: PresetType
    window_size: tuple[int, int]
    attention_mask: Bool[Tensor, "batch heads queries keys"] | None
    cu_seqlens_q: Int32[Tensor, "documents_and_1"] | None
    cu_seqlens_kv: Int32[Tensor, "documents_and_1"] | None
    num_queries: int
    num_keys: int

    def to_mask(self) -> Mask | MaskGrid:
        """The relation that the engine computes."""
        if self.attention_mask is not None:
            rows = [[from_dense(~table, "te") for table in row] for row in self.attention_mask]
            return rows[0][0] if self.attention_mask.shape[:2] == (1, 1) else batch(map(per_head, rows))
        queries, keys = (self.num_queries,), (self.num_keys,)
        if self.cu_seqlens_q is not None and self.cu_seqlens_kv is not None:
            queries, keys = _lengths("cu_seqlens_q", self.cu_seqlens_q), _lengths("cu_seqlens_kv", self.cu_seqlens_kv)
        left, right = (None if side == _OPEN else side for side in self.window_size)
        return Bands(queries, keys, left, 0 if "causal" in self.attn_mask_type else right).to_mask("te")

    def __str__(self) -> str:
        return f"EngineMask: {self.attn_mask_type}, window_size {self.window_size}"

    __repr__ = __str__


def te(mask: Mask | MaskGrid) -> EngineMask:
    """The arguments of Transformer Engine's `DotProductAttention`: a preset, or else a table where True forbids.

    Masks by sequence and by head are tables, with the padding of `MaskGrid.dense()`.

    Cost: O(intervals) for a preset, one byte per pair for a table.

    >>> from attnflow import masks
    >>> te(masks.causal(3)).attn_mask_type
    'causal'
    >>> te(masks.butterfly(2)).attention_mask[0, 0].int().tolist()[0]
    [0, 1, 1, 1]
    """
    if isinstance(mask, MaskGrid):
        if mask.shape[:2] != (1, 1):
            return EngineMask("arbitrary", (_OPEN, _OPEN), ~_table(mask, "te"), None, None, *mask.shape[2:])
        mask = mask[0, 0]
    [mask] = sequences(mask, "te")
    try:
        bands = bands_of(mask, "te")
    except NotExpressible:
        bands = None
    kind = None if bands is None else _preset(bands)
    if bands is None or kind is None:
        table = ~_table(mask, "te")[None, None]
        return EngineMask("arbitrary", (_OPEN, _OPEN), table, None, None, *mask.shape)
    left, right = (_OPEN if side is None else side for side in (bands.left, bands.right))
    packed = kind.startswith("padding")
    lengths = (_cumulative(bands.queries), _cumulative(bands.keys)) if packed else (None, None)
    return EngineMask(kind, (left, right), None, *lengths, *mask.shape)


def _table(mask: Mask | MaskGrid, name: str) -> Tensor:
    """The dense mask; raises ValueError if it is too large to be intended."""
    pairs = math.prod(mask.shape)
    if pairs > _PAIRS:
        raise ValueError(f"{name} takes a table of {pairs / 1e9:,.1f} GB for {mask!r}: export a slice of it")
    return mask.dense()


def _preset(bands: Bands) -> PresetType | None:
    if len(bands.queries) != 1:
        return "padding_causal" if bands.causal else "padding"
    if bands.square:
        return "causal" if bands.causal else "no_mask"
    if bands.causal:
        return "causal_bottom_right"
    return "no_mask" if bands.left is bands.right is None else None  # a window's diagonal is another one there


def _cumulative(lengths: tuple[int, ...]) -> Tensor:
    return torch.tensor([0, *accumulate(lengths)], dtype=torch.int32)


def _lengths(name: str, cumulative: Tensor) -> tuple[int, ...]:
    values = cumulative.tolist()
    steps = tuple(after - before for before, after in pairwise(values))
    if not values or values[0] != 0 or min(steps, default=0) < 0:
        raise ValueError(f"{name} must start at 0 and not decrease, got {values[:8]}")
    return steps
