"""`Weights`: what the scores need of a model, wherever its tensors are."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Protocol, runtime_checkable

import torch
from torch import Tensor


@runtime_checkable
class Weights(Protocol):
    """Names and shapes of all tensors of a model, and any of them to read."""

    @property
    def name(self) -> str:
        """What results and messages call the model."""
        ...

    @property
    def config(self) -> Mapping[str, object]:
        """What config.json says; empty if there is none."""
        ...

    @property
    def shapes(self) -> Mapping[str, tuple[int, ...]]:
        """Name and shape of every tensor."""
        ...

    @property
    def packed(self) -> frozenset[str]:
        """Names of tensors that hold something else than numbers that can be read, such as quantised blocks."""
        ...

    def stated(self, path: str) -> Mapping[str, object]:
        """What the attention module at a path says of its heads; empty for files."""
        ...

    def read(self, tensor: str, rows: tuple[int, int] | None) -> Tensor:
        """A tensor, or a run of its rows, on the CPU in float32 (float64 stays)."""
        ...


def as_float(value: Tensor) -> Tensor:
    """The values in float32 on the CPU; float64 stays."""
    return value.to("cpu", torch.float64 if value.dtype == torch.float64 else torch.float32)
