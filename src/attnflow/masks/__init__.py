"""Masks: which query may attend to which key. Catalogue, algebra, batches, export, and compilation to FlexAttention."""

from typing import TYPE_CHECKING

from attnflow._core.lazy import on_demand
from attnflow.masks import export
from attnflow.masks.batches import batch, block_diagonal, per_head
from attnflow.masks.build import from_block_mask, from_dense, from_edges, from_intervals, from_mask_mod
from attnflow.masks.catalogue import *  # noqa: F403  # every mask that `@mask` registers
from attnflow.masks.mask import Mask
from attnflow.masks.registry import named_masks as _named_masks
from attnflow.masks.spec import from_json
from attnflow.masks.streams import *  # noqa: F403

if TYPE_CHECKING:
    from attnflow.masks.hf import attach, from_model

__all__ = [
    "Mask",
    "attach",
    "batch",
    "block_diagonal",
    "export",
    "from_block_mask",
    "from_dense",
    "from_edges",
    "from_intervals",
    "from_json",
    "from_mask_mod",
    "from_model",
    "per_head",
]
__all__ += list(_named_masks())  # pyright: ignore[reportUnsupportedDunderAll]


def _home(_: str) -> object:
    from attnflow.masks import hf

    return hf


__getattr__, __dir__ = on_demand(__name__, __all__, _home)
