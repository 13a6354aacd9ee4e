"""Digests of tensors, by which weights and data are recognised."""

from __future__ import annotations

from typing import Any, Protocol, cast, runtime_checkable

import torch
from torch import Tensor


@runtime_checkable
class Digest(Protocol):
    """What `hashlib` makes."""

    def update(self, data: Any, /) -> None:
        """Take more bytes."""


def add_tensor(digest: Digest, label: str, tensor: Tensor) -> None:
    """The label, then the numbers of a tensor as they lie in memory, row by row."""
    digest.update(label.encode())
    digest.update(cast(Any, tensor.detach().cpu().contiguous().flatten().view(torch.uint8).numpy()).data)
