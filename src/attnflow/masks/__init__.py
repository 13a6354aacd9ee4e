"""Who may send: masks as relations, their catalogue, their algebra, their compilation to FlexAttention."""

from attnflow.masks.build import from_dense, from_edges, from_intervals, from_mask_mod
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
from attnflow.masks.intervals import IntervalRows
from attnflow.masks.mask import Mask
from attnflow.masks.streams import (
    block_diffusion,
    block_two_stream,
    butterfly,
    multi_token_prediction,
    xlnet_two_stream,
)

__all__ = [
    "IntervalRows",
    "Mask",
    "attention_sink",
    "big_bird",
    "block_causal",
    "block_diffusion",
    "block_two_stream",
    "butterfly",
    "causal",
    "dilated_window",
    "document",
    "from_dense",
    "from_edges",
    "from_intervals",
    "from_mask_mod",
    "full",
    "global_tokens",
    "longformer",
    "multi_token_prediction",
    "prefix_lm",
    "sliding_window",
    "tree",
    "xlnet_two_stream",
]
