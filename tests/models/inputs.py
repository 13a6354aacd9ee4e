"""What tiny models run on: a batch of inputs of each kind, zeros and fixed tokens, in float64."""

from __future__ import annotations

import torch
from torch import Tensor

from tests.models.options import WIDTH


def _zeros(*shape: int) -> Tensor:
    return torch.zeros(shape, dtype=torch.float64)


def _first(batch: int) -> Tensor:
    return torch.full((batch, 1), 5)


def token(batch: int) -> dict[str, Tensor]:
    return {"input_ids": _first(batch)}


def tokens(batch: int) -> dict[str, Tensor]:
    return {"input_ids": torch.full((batch, 4), 5)}


def token_pair(batch: int) -> dict[str, Tensor]:
    return {**token(batch), "decoder_input_ids": _first(batch)}


def pixels(batch: int) -> dict[str, Tensor]:
    return {"pixel_values": _zeros(batch, 3, 8, 8)}


def pixels_and_tokens(batch: int) -> dict[str, Tensor]:
    return {"input_ids": torch.full((batch, 3), 2), **pixels(batch)}


def captioned(batch: int) -> dict[str, Tensor]:
    return {**pixels(batch), "decoder_input_ids": _first(batch)}


def image_tokens(batch: int) -> dict[str, Tensor]:
    return {**pixels(batch), "input_ids": torch.full((batch, 4), 7)}


def patches(batch: int) -> dict[str, Tensor]:
    """One image of as many patches as samples are asked for."""
    return {"hidden_states": _zeros(batch, 3 * 2 * 4 * 4), "grid_thw": torch.tensor([[1, 2, batch // 2]])}


def attending(batch: int) -> dict[str, Tensor]:
    return {**token(batch), "encoder_hidden_states": _zeros(batch, 3, WIDTH)}


def waveform(batch: int) -> dict[str, Tensor]:
    return {"input_values": _zeros(batch, 64)}


def dictated(batch: int) -> dict[str, Tensor]:
    return {**waveform(batch), "decoder_input_ids": _first(batch)}


def spectrum(batch: int) -> dict[str, Tensor]:
    return {"input_values": _zeros(batch, 8, 8)}


def spectrogram(batch: int) -> dict[str, Tensor]:
    return {"input_features": _zeros(batch, 8, 16), "decoder_input_ids": _first(batch)}
