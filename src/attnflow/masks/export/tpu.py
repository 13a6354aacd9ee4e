"""JAX's splash attention for TPUs: its mask classes, or a table."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

from jaxtyping import Bool
from torch import Tensor

from attnflow._core import checks
from attnflow._core.results import Result
from attnflow.masks.batches import MaskGrid, per_head
from attnflow.masks.build import from_dense
from attnflow.masks.export.bands import Bands, bands_of
from attnflow.masks.export.refusal import NotExpressible, checked
from attnflow.masks.mask import Mask

SplashClass = Literal["FullMask", "CausalMask", "LocalMask", "ChunkedCausalMask", "NumpyMask", "MultiHeadMask"]


@dataclass(frozen=True, eq=False)
class SplashMask(Result):
    """A mask as one of the classes of `jax.experimental.pallas.ops.tpu.splash_attention` (jax 0.10).

    Attributes:
        kind: name of the class.
        shape: (queries, keys).
        offset: of `CausalMask` and `LocalMask`: query q stands at key q + offset.
        window_size: of `LocalMask`: keys (before, after) that one; None for all.
        chunk_size: of `ChunkedCausalMask`: positions per chunk.
        array: of `NumpyMask`: bool[queries, keys], True where attention is allowed.
        heads: of `MultiHeadMask`: the mask of each head.
    """

    kind: SplashClass
    shape: tuple[int, int]
    offset: int = 0
    window_size: tuple[int | None, int | None] = (None, None)
    chunk_size: int | None = None
    array: Bool[Tensor, "queries keys"] | None = None
    heads: tuple[SplashMask, ...] = ()

    def to_mask(self) -> Mask | MaskGrid:
        """The relation that splash attention computes.

        Raises:
            ValueError: a field that the class needs is missing, or an offset other than that of the last query.
        """
        return per_head([head.of_one_head() for head in self.heads]) if self._of_heads else self.of_one_head()

    @property
    def _of_heads(self) -> bool:
        return self.kind == "MultiHeadMask"

    def of_one_head(self) -> Mask:
        """The relation of a class that says nothing of heads."""
        if self._of_heads:
            raise ValueError("the heads of a MultiHeadMask are masks of one head each")
        if self.kind == "NumpyMask":
            if self.array is None:
                raise ValueError("NumpyMask needs array")
            return from_dense(self.array, "splash")
        queries, keys = self.shape
        if self.kind == "ChunkedCausalMask":
            chunk = checks.integer("chunk_size", self.chunk_size, 1)
            sizes = tuple(min(chunk, queries - first) for first in range(0, queries, chunk))
            return Bands(sizes, sizes, None, 0).to_mask("splash")
        if self.kind != "FullMask" and self.offset != keys - queries:
            raise ValueError(
                f"expected the offset {keys - queries} of the last query at the last key, got {self.offset}"
            )
        left, right = self.window_size
        return Bands((queries,), (keys,), left, 0 if self.kind == "CausalMask" else right).to_mask("splash")

    def build(self, num_heads: int = 1) -> Any:
        """The `MultiHeadMask` that `splash_attention_kernel.make_splash_mha` takes.

        Args:
            num_heads: heads that have this mask; a `MultiHeadMask` has its own number.

        Raises:
            ValueError: another number of heads than there are masks for.
            ImportError: jax is not installed; no extra of this package brings it.
        """
        if self._of_heads and num_heads not in (1, len(self.heads)):
            raise ValueError(f"these masks are for {len(self.heads)} heads, one each, got num_heads={num_heads}")
        try:
            from jax.experimental.pallas.ops.tpu.splash_attention import (  # pyright: ignore[reportMissingImports]
                splash_attention_mask as splash_masks,
            )
        except ImportError as error:
            raise ImportError("building a splash mask needs jax: pip install jax") from error
        if self._of_heads:
            return splash_masks.MultiHeadMask([head._made(splash_masks) for head in self.heads])
        return splash_masks.MultiHeadMask([self._made(splash_masks)] * checks.integer("num_heads", num_heads, 1))

    def _made(self, splash_masks: Any) -> Any:
        """An object of the class."""
        arguments: dict[str, tuple[object, ...]] = {
            "FullMask": (self.shape,),
            "CausalMask": (self.shape, self.offset),
            "LocalMask": (self.shape, self.window_size, self.offset),
            "ChunkedCausalMask": (self.shape, self.chunk_size),
            "NumpyMask": (None if self.array is None else self.array.numpy(),),
        }
        return getattr(splash_masks, self.kind)(*arguments[self.kind])

    def __str__(self) -> str:
        if self._of_heads:
            return f"SplashMask: MultiHeadMask of {', '.join(head.kind for head in self.heads)}"
        window = f", window_size {self.window_size}" if self.kind == "LocalMask" else ""
        return f"SplashMask: {self.kind}, {self.shape[0]} x {self.shape[1]}{window}"

    __repr__ = __str__


def splash(mask: Mask | MaskGrid) -> SplashMask:
    """The class of JAX's splash attention for a mask; what none describes is a `NumpyMask`.

    Masks by head are a `MultiHeadMask`. All sequences have one kernel, so a batch must have one mask.

    Raises:
        NotExpressible: the sequences of a batch differ.

    Cost: O(intervals) for a class that is computed, one byte per pair for a table.

    >>> from attnflow import masks
    >>> splash(masks.sliding_window(8, 3))
    SplashMask: LocalMask, 8 x 8, window_size (2, 0)
    """
    if isinstance(mask, MaskGrid):
        heads = [_of_one_mask(head) for head in _of_all_sequences(mask)]
        return heads[0] if len(heads) == 1 else SplashMask("MultiHeadMask", heads[0].shape, heads=tuple(heads))
    return _of_one_mask(checked(mask))


def _of_all_sequences(grid: MaskGrid) -> list[Mask]:
    """The masks of the heads, which all sequences must have."""
    first, *others = grid.padded()
    for number, row in enumerate(others, 1):
        for here, there in zip(first, row, strict=True):
            if differing := there.difference(here, limit=1):
                reason = f"sequence 0 does not agree with sequence {number}, and all have one mask: export each"
                raise NotExpressible("splash", there, differing[0], reason)
    return first


def _of_one_mask(mask: Mask) -> SplashMask:
    shape = mask.shape
    try:
        bands = bands_of(mask, "splash")
    except NotExpressible:
        bands = None
    if bands is not None and len(bands.queries) == 1:
        offset = shape[1] - shape[0]
        if bands.left is not None:
            return SplashMask("LocalMask", shape, offset, (bands.left, bands.right))
        if bands.right is None:
            return SplashMask("FullMask", shape)
        if bands.causal:
            return SplashMask("CausalMask", shape, offset)
        return SplashMask("LocalMask", shape, offset, (None, bands.right))
    if bands is not None and bands.queries and bands.causal and bands.left is None:
        *before, last = bands.queries
        if len(set(before)) == 1 and last <= before[0]:
            return SplashMask("ChunkedCausalMask", shape, chunk_size=before[0])
    return SplashMask("NumpyMask", shape, array=mask.dense())
