"""Masks in the forms that production kernels take: `masks.export.flashmask(mask)`, and back by `to_mask()`.

What a format cannot say is refused with a pair (query, key); nothing is rounded to the nearest mask.
"""

from collections.abc import Callable, Mapping
from typing import Final, TypeAlias, get_args

from attnflow.masks.export.bits import EngineMask, FlashInferMask, flashinfer, te
from attnflow.masks.export.columns import FlashMask, flashmask
from attnflow.masks.export.drafts import DraftTree, vllm
from attnflow.masks.export.packed import Varlen, XFormersBias, varlen, xformers
from attnflow.masks.export.ranges import MagiRanges, magi
from attnflow.masks.export.refusal import NotExpressible
from attnflow.masks.export.tpu import SplashMask, splash
from attnflow.masks.mask import Mask

Form: TypeAlias = DraftTree | EngineMask | FlashInferMask | FlashMask | MagiRanges | SplashMask | Varlen | XFormersBias
FORMS: Final[tuple[type[Form], ...]] = get_args(Form)
FORMATS: Final[Mapping[str, Callable[[Mask], Form]]] = {
    "flashinfer": flashinfer,
    "flashmask": flashmask,
    "magi": magi,
    "splash": splash,
    "te": te,
    "varlen": varlen,
    "vllm": vllm,
    "xformers": xformers,
}

__all__ = [
    "FORMATS",
    "FORMS",
    "DraftTree",
    "EngineMask",
    "FlashInferMask",
    "FlashMask",
    "Form",
    "MagiRanges",
    "NotExpressible",
    "SplashMask",
    "Varlen",
    "XFormersBias",
    "flashinfer",
    "flashmask",
    "magi",
    "splash",
    "te",
    "varlen",
    "vllm",
    "xformers",
]
