"""Masks in the forms that production kernels take: `masks.export.flashmask(mask)`, and back by `to_mask()`.

What a format cannot say is refused with a pair (query, key); nothing is rounded to the nearest mask.
"""

from collections.abc import Callable, Mapping
from typing import Final, TypeAlias, get_args

from attnflow.masks.export.bands import NotExpressible
from attnflow.masks.export.packed import EngineMask, FlashInferMask, Varlen, flashinfer, te, varlen
from attnflow.masks.export.slices import FlashMask, MagiRanges, flashmask, magi
from attnflow.masks.mask import Mask

Form: TypeAlias = EngineMask | FlashInferMask | FlashMask | MagiRanges | Varlen
FORMS: Final[tuple[type[Form], ...]] = get_args(Form)
FORMATS: Final[Mapping[str, Callable[[Mask], Form]]] = {
    "flashinfer": flashinfer,
    "flashmask": flashmask,
    "magi": magi,
    "te": te,
    "varlen": varlen,
}

__all__ = [
    "FORMATS",
    "FORMS",
    "EngineMask",
    "FlashInferMask",
    "FlashMask",
    "Form",
    "MagiRanges",
    "NotExpressible",
    "Varlen",
    "flashinfer",
    "flashmask",
    "magi",
    "te",
    "varlen",
]
