"""flash-attn's variable lengths and xFormers' biases: packed documents with one window."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import accumulate, pairwise
from typing import Any, Final, Literal

import numpy as np
import torch
from jaxtyping import Int32
from torch import Tensor

from attnflow._core.results import Result
from attnflow.masks.batches import MaskGrid
from attnflow.masks.export.bands import Bands, bands_of_batch
from attnflow.masks.export.refusal import NotExpressible, end_to_end, sequences
from attnflow.masks.mask import Mask

_OPEN: Final = -1  # flash-attn's word for a side of the window without a limit

XFormersClass = Literal[
    "BlockDiagonalMask",
    "BlockDiagonalCausalMask",
    "BlockDiagonalCausalFromBottomRightMask",
    "BlockDiagonalCausalLocalAttentionFromBottomRightMask",
    "LowerTriangularMask",
    "LowerTriangularFromBottomRightMask",
    "LowerTriangularFromBottomRightLocalAttentionMask",
    "LocalAttentionFromBottomRightMask",
]


@dataclass(frozen=True, eq=False)
class Varlen(Result):
    """A mask as flash-attn's `flash_attn_varlen_func` takes it; the fields have the names of its arguments.

    Query i of a document of Q queries and K keys attends to the keys from i + K - Q - window_size[0] to
    i + K - Q + window_size[1] (flash-attn 2.1 and later); `causal` sets the latter to 0.

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
        return f"Varlen: {len(self.cu_seqlens_q) - 1} documents, {kind}, window_size {self.window_size}"

    __repr__ = __str__


def varlen(mask: Mask | MaskGrid) -> Varlen:
    """The arguments of flash-attn's `flash_attn_varlen_func` for packed documents and windows.

    The sequences of a batch are laid end to end, without padding.

    Raises:
        NotExpressible: it is something else; the error names a pair.

    >>> from attnflow import masks
    >>> form = varlen(masks.document([2, 3]))
    >>> form.cu_seqlens_q.tolist(), form.causal, form.window_size
    ([0, 2, 5], True, (-1, -1))
    """
    bands = bands_of_batch(sequences(mask, "varlen"), "varlen")
    left, right = (_OPEN if side is None else side for side in (bands.left, bands.right))
    if bands.causal:
        right = _OPEN if bands.left is None else 0
    return Varlen(
        _cumulative(bands.queries),
        _cumulative(bands.keys),
        max(bands.queries, default=0),
        max(bands.keys, default=0),
        bands.causal,
        (left, right),
    )


@dataclass(frozen=True)
class XFormersBias(Result):
    """A mask as one of the classes of `xformers.ops.fmha.attn_bias` (0.0.35).

    Attributes:
        kind: name of the class.
        q_seqlen: queries of each document.
        kv_seqlen: keys of each document.
        window_left: keys before the diagonal; None where the class takes none. Its `window_size` is one more.
        window_right: keys after it; None where the class takes none.
    """

    kind: XFormersClass
    q_seqlen: tuple[int, ...]
    kv_seqlen: tuple[int, ...]
    window_left: int | None = None
    window_right: int | None = None

    def to_mask(self) -> Mask:
        """The relation that xFormers computes, by `materialize` of the class.

        Raises:
            ValueError: the class aligns its documents at their top left corners, and they are not square.
        """
        top_left = self.kind in ("BlockDiagonalCausalMask", "LowerTriangularMask")
        if top_left and self.q_seqlen != self.kv_seqlen:
            raise ValueError(f"{self.kind} is read for documents of as many queries as keys")
        right = 0 if "Causal" in self.kind or "Triangular" in self.kind else self.window_right
        return Bands(self.q_seqlen, self.kv_seqlen, self.window_left, right).to_mask("xformers")

    def build(self) -> Any:
        """The bias that `xformers.ops.memory_efficient_attention(..., attn_bias=)` takes.

        Raises:
            ImportError: xFormers is not installed; no extra of this package brings it.
        """
        try:
            from xformers.ops.fmha import attn_bias  # pyright: ignore[reportMissingImports]
        except ImportError as error:
            raise ImportError("building an attention bias needs xformers: pip install xformers") from error
        make = getattr(attn_bias, self.kind)
        if self.kind == "LocalAttentionFromBottomRightMask":
            return make(window_left=self.window_left, window_right=self.window_right)
        if not self.kind.startswith("BlockDiagonal"):
            return make() if self.window_left is None else make(self.window_left + 1)
        bias = attn_bias.BlockDiagonalMask.from_seqlens(list(self.q_seqlen), list(self.kv_seqlen))
        if self.kind == "BlockDiagonalMask":
            return bias
        if self.kind == "BlockDiagonalCausalMask":
            return bias.make_causal()
        if self.window_left is None:
            return bias.make_causal_from_bottomright()
        return bias.make_local_attention_from_bottomright(self.window_left + 1)

    def __str__(self) -> str:
        window = "" if self.window_left is None else f", window {self.window_left, self.window_right or 0}"
        return f"XFormersBias: {self.kind}, {len(self.q_seqlen)} documents{window}"

    __repr__ = __str__


def xformers(mask: Mask | MaskGrid) -> XFormersBias:
    """The class of `xformers.ops.fmha.attn_bias` for packed documents and windows.

    The sequences of a batch are laid end to end, without padding.

    Raises:
        NotExpressible: it is something else, or several documents with a window that looks ahead.

    >>> from attnflow import masks
    >>> xformers(masks.causal(4)).kind
    'LowerTriangularMask'
    """
    masks = sequences(mask, "xformers")
    bands = bands_of_batch(masks, "xformers")
    several, square, local = len(bands.queries) != 1, bands.square, bands.left is not None
    if bands.causal and local:
        start = "BlockDiagonalCausal" if several else "LowerTriangularFromBottomRight"
        kind = f"{start}LocalAttentionFromBottomRightMask" if several else f"{start}LocalAttentionMask"
    elif bands.causal:
        start = "BlockDiagonalCausal" if several else "LowerTriangular"
        kind = f"{start}Mask" if square else f"{start}FromBottomRightMask"
    elif local or bands.right is not None:
        if several:
            pair = _beyond(bands)
            raise NotExpressible(
                "xformers", end_to_end(masks), pair, "its documents have windows only where they are causal"
            )
        kind = "LocalAttentionFromBottomRightMask"
        left, right = (bands.keys[0] if side is None else side for side in (bands.left, bands.right))
        return XFormersBias(kind, bands.queries, bands.keys, left, right)
    else:
        kind = "BlockDiagonalMask"
    return XFormersBias(kind, bands.queries, bands.keys, bands.left)  # pyright: ignore[reportArgumentType]


def _beyond(bands: Bands) -> tuple[int, int]:
    """A pair of one document that the window forbids."""
    low, high = Bands(bands.queries, bands.keys, None, None).bounds()
    first, last = bands.bounds()
    query = int(np.argmax((first > low) | (last < high)))
    return query, int(low[query] if first[query] > low[query] else last[query])


def _cumulative(lengths: tuple[int, ...]) -> Tensor:
    return torch.tensor([0, *accumulate(lengths)], dtype=torch.int32)


def _lengths(name: str, cumulative: Tensor) -> tuple[int, ...]:
    values = cumulative.tolist()
    steps = tuple(after - before for before, after in pairwise(values))
    if not values or values[0] != 0 or min(steps, default=0) < 0:
        raise ValueError(f"{name} must start at 0 and not decrease, got {values[:8]}")
    return steps
