"""Masks: which query may attend to which key. Catalogue, algebra, batches, export, and compilation to FlexAttention."""

from typing import TYPE_CHECKING

from attnflow._core.lazy import on_demand
from attnflow.masks import export
from attnflow.masks import spec as spec  # gives `Mask.from_json` its reader
from attnflow.masks.batches import batch, per_head
from attnflow.masks.build import from_block_mask, from_dense, from_edges, from_intervals, from_mask_mod
from attnflow.masks.catalogue import (
    attention_sink,
    big_bird,
    block_causal,
    causal,
    dilated_window,
    document,
    full,
    global_tokens,
    longformer,
    prefix_lm,
    sliding_window,
    tree,
)
from attnflow.masks.mask import Mask
from attnflow.masks.streams import (
    block_diffusion,
    block_two_stream,
    butterfly,
    multi_token_prediction,
    permutation_lm,
)

if TYPE_CHECKING:
    from attnflow.masks.hf import attach

__all__ = [
    "Mask",
    "attach",
    "attention_sink",
    "batch",
    "big_bird",
    "block_causal",
    "block_diffusion",
    "block_two_stream",
    "butterfly",
    "causal",
    "dilated_window",
    "document",
    "export",
    "from_block_mask",
    "from_dense",
    "from_edges",
    "from_intervals",
    "from_mask_mod",
    "full",
    "global_tokens",
    "longformer",
    "multi_token_prediction",
    "per_head",
    "permutation_lm",
    "prefix_lm",
    "sliding_window",
    "tree",
]


def _home(_: str) -> object:
    from attnflow.masks import hf

    return hf


__getattr__, __dir__ = on_demand(__name__, __all__, _home)
