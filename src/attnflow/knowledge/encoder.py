"""What makes embeddings of texts, as stores, drift and re-embedding see it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol, runtime_checkable

from jaxtyping import Float
from torch import Tensor


@runtime_checkable
class Encoder(Protocol):
    """Texts to embeddings: a pretrained sentence encoder, or a model that is trained jointly with the reader.

    The version is stored with each entry, so that a base knows which of its embeddings another encoder made.
    """

    @property
    def dim(self) -> int:
        """Width of an embedding."""
        ...

    @property
    def version(self) -> str:
        """Names the encoder and its weights: two that embed differently have different versions."""
        ...

    def __call__(self, texts: Sequence[str]) -> Float[Tensor, "texts dim"]:
        """One embedding for each text."""
        ...
