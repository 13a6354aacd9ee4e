"""What tiny models run on: a batch of inputs of each kind, zeros and fixed tokens, in float64."""

from __future__ import annotations

from types import SimpleNamespace

import torch
from torch import Tensor

from tests.models.options import WIDTH


def _zeros(*shape: int) -> Tensor:
    return torch.zeros(shape, dtype=torch.float64)


def _first(batch: int) -> Tensor:
    return torch.full((batch, 1), 5)


run = SimpleNamespace(
    token=lambda batch: {"input_ids": _first(batch)},
    tokens=lambda batch: {"input_ids": torch.full((batch, 4), 5)},
    token_pair=lambda batch: {"input_ids": _first(batch), "decoder_input_ids": _first(batch)},
    pixels=lambda batch: {"pixel_values": _zeros(batch, 3, 8, 8)},
    pixels_and_tokens=lambda batch: {"input_ids": torch.full((batch, 3), 2), "pixel_values": _zeros(batch, 3, 8, 8)},
    captioned=lambda batch: {"pixel_values": _zeros(batch, 3, 8, 8), "decoder_input_ids": _first(batch)},
    image_tokens=lambda batch: {"pixel_values": _zeros(batch, 3, 8, 8), "input_ids": torch.full((batch, 4), 7)},
    # one image of as many patches as samples are asked for
    patches=lambda batch: {
        "hidden_states": _zeros(batch, 3 * 2 * 4 * 4),
        "grid_thw": torch.tensor([[1, 2, batch // 2]]),
    },
    attending=lambda batch: {"input_ids": _first(batch), "encoder_hidden_states": _zeros(batch, 3, WIDTH)},
    waveform=lambda batch: {"input_values": _zeros(batch, 64)},
    dictated=lambda batch: {"input_values": _zeros(batch, 64), "decoder_input_ids": _first(batch)},
    spectrum=lambda batch: {"input_values": _zeros(batch, 8, 8)},
    spectrogram=lambda batch: {"input_features": _zeros(batch, 8, 16), "decoder_input_ids": _first(batch)},
)
