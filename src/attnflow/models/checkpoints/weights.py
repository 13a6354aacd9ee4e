"""`Weights`: what the scores need of a model, wherever its tensors are."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping

import torch
from torch import Tensor


class Weights(ABC):
    """Names and shapes of all tensors of a model, and any of them to read.

    Attributes:
        name: what results and messages call the model.
        config: what config.json says; empty if there is none.
        shapes: name and shape of every tensor.
        packed: names of tensors that hold something else than numbers that can be read, such as quantised blocks.
    """

    name: str
    config: Mapping[str, object]
    shapes: Mapping[str, tuple[int, ...]]
    packed: frozenset[str]

    def stated(self, path: str) -> Mapping[str, object]:
        """What the attention module at a path says of its heads; nothing in files."""
        del path
        return {}

    @abstractmethod
    def read(self, tensor: str, rows: tuple[int, int] | None) -> Tensor:
        """A tensor, or a run of its rows, on the CPU in float32 (float64 stays)."""


def as_float(value: Tensor) -> Tensor:
    """The values in float32 on the CPU; float64 stays."""
    return value.to("cpu", torch.float64 if value.dtype == torch.float64 else torch.float32)
