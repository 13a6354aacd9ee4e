"""Parameters to begin with for each mask of the catalogue, as a person types them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

# Where a mask has a length that is not here, it takes the one that its reader has at hand.
EXAMPLES: Final[Mapping[str, Mapping[str, str]]] = {
    "attention_sink": {"sinks": "2", "window": "4"},
    "big_bird": {"n": "32", "block": "2"},
    "block_causal": {"block": "4"},
    "block_diffusion": {"num_blocks": "4", "block": "2"},
    "block_two_stream": {"num_blocks": "4", "block": "2"},
    "butterfly": {"n": "6"},
    "causal": {"n": "8"},
    "dilated_window": {"window": "3", "dilation": "2"},
    "document": {"lengths": "5,3,4"},
    "full": {"n": "8"},
    "global_tokens": {"indices": "0,8"},
    "longformer": {"window": "3", "indices": "0"},
    "multi_token_prediction": {"n": "6", "horizon": "3"},
    "permutation_lm": {"permutation": "2,0,3,1"},
    "prefix_lm": {"prefix": "6"},
    "sliding_window": {"window": "4"},
    "tree": {"parents": "-1,0,0,1,1,2"},
}
