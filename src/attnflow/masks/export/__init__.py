"""Export masks to production kernels, such as `masks.export.flashmask(mask)`, and read them back with `to_mask()`.

If a format cannot express a mask, the error names a pair (query, key); a mask is never rounded to a similar one.
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
