"""Models that ask transformers for other masks than their configuration says, each beside its clean twin."""

import functools
import sys

import pytest
import torch
from transformers.masking_utils import create_causal_mask

from tests.models import tiny

IDS = torch.arange(3, 27).view(2, 12) % 40
PADS = (torch.arange(12) > torch.tensor([[2], [-1]])).long()
ROW = {"input_ids": IDS[:1], "use_cache": False}
PADDED = {"input_ids": IDS, "attention_mask": PADS, "use_cache": False}
PACKED = {**ROW, "position_ids": torch.cat([torch.arange(5), torch.arange(7)])[None]}
SLIDING, CAUSAL = "create_sliding_window_causal_mask", "create_causal_mask"


def asking(model, maker, change, file=None):
    """The model, whose maker of masks is called as `change(maker, **arguments)` in its own or another file."""
    file, own = file or sys.modules[type(model).__module__], model.forward

    @functools.wraps(own)
    def forward(*args, **kwargs):
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(file, maker, functools.partial(change, getattr(file, maker)))
            return own(*args, **kwargs)

    model.forward = forward
    return model


def window(more):
    def change(maker, *args, config, **kwargs):
        config.sliding_window += more
        try:
            return maker(*args, config=config, **kwargs)
        finally:
            config.sliding_window -= more

    return change


def without(name):
    """As if the argument had been forgotten."""
    return lambda maker, *args, **kwargs: maker(*args, **{**kwargs, name: None})


def plain(maker, *args, **kwargs):
    return create_causal_mask(*args, **kwargs)


def pair(name, inputs, maker, change):
    leaky, clean = (tiny(name, torch.float32) for _ in range(2))
    return (asking(leaky, maker, change), inputs), (clean, inputs)


# cause: ((leaky model, its inputs), (clean model, its inputs))
CASES = {
    "a window that never binds": pair("Gemma2", ROW, SLIDING, plain),
    "a window that is one wider": pair("Gemma2", ROW, SLIDING, window(1)),
    "a window that is one narrower": pair("Gemma2", ROW, SLIDING, window(-1)),
    "a request that forgets padding": pair("Llama", PADDED, CAUSAL, without("attention_mask")),
    "a window that forgets padding": pair("Gemma2", PADDED, SLIDING, without("attention_mask")),
    "a request that forgets documents": pair("Llama", PACKED, CAUSAL, without("position_ids")),
}
