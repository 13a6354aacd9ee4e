"""Export masks to production kernels, such as `masks.export.flashmask(mask)`, and read them back with `to_mask()`.

If a format cannot express a mask, the error names a pair (query, key); a mask is never rounded to a similar one. Every
format is written from `mask.intervals()`; the guide shows how to write another one from it or from `mask.block_counts`.
"""

from collections.abc import Callable, Mapping
from typing import Final, TypeAlias, get_args

from attnflow.masks.export.slices import FlashMask, MagiRanges, flashmask, magi
from attnflow.masks.export.varlen import NotExpressible, Varlen, varlen
from attnflow.masks.mask import Mask

Form: TypeAlias = FlashMask | MagiRanges | Varlen
FORMS: Final[tuple[type[Form], ...]] = get_args(Form)
FORMATS: Final[Mapping[str, Callable[[Mask], Form]]] = {"flashmask": flashmask, "magi": magi, "varlen": varlen}

__all__ = [
    "FORMATS",
    "FORMS",
    "FlashMask",
    "Form",
    "MagiRanges",
    "NotExpressible",
    "Varlen",
    "flashmask",
    "magi",
    "varlen",
]
