"""The bias of one attention layer: the sum of its kinds, and what the cache must keep for it."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any, cast

import torch
from jaxtyping import Float
from torch import Tensor, nn

from attnflow.bias.call import Call
from attnflow.bias.kinds.base import ScoreTerm
from attnflow.bias.shape import LayerShape, Vectors
from attnflow.bias.terms import Term


class LayerBias(nn.Module):
    """Lives as a child of an attention module, so that optimisers, checkpoints and parallel wrappers find it.

    Attributes:
        kinds: the summands.
        shape: the layer's sizes.
        references: names of the vectors that the summands read.
        backend: what computes attention with it; see `attention`.
        enabled: whether attention uses it.
        observer: called with every attention call, before it runs, while something wants to look; without terms while
            the bias is disabled.
        hooks: what reads the vectors of the layer.
    """

    def __init__(
        self, kinds: Sequence[nn.Module], shape: LayerShape, references: Sequence[str], backend: str = "auto"
    ) -> None:
        super().__init__()
        self.kinds = nn.ModuleList(kinds)
        self.shape = shape
        self.references = frozenset("unrotated" if name == "per_head" else name for name in references)
        self.backend = backend
        self.enabled = True
        self.observer: Callable[[Call], None] | None = None
        self.hooks: Any = None
        self._trained = False
        self._widths: list[int] = []

    def columns(self, keys: Vectors) -> Float[Tensor, "batch tokens width"]:
        """What all summands must know of each new key, side by side."""
        parts = [cast(ScoreTerm, kind).columns(keys) for kind in self.kinds]
        batch = max(part.shape[0] for part in parts)
        self._widths = [part.shape[-1] for part in parts]
        return torch.cat([part.expand(batch, -1, -1) for part in parts], dim=-1)

    def terms(
        self, queries: Vectors, columns: Float[Tensor, "batch keys width"], slots: Tensor | None = None
    ) -> tuple[Term, ...]:
        """The terms of one call, from the columns of all keys in the order of `columns`."""
        parts = columns.split(self._widths, dim=-1)
        return tuple(
            cast(ScoreTerm, kind).term(queries, part, slots) for kind, part in zip(self.kinds, parts, strict=True)
        )

    def is_zero(self) -> bool:
        """Whether B is known to be exactly 0, as at zero initialisation: then attention need not know of it.

        Looked up until the first time it is not; under a compiler the answer is no, because it depends on values.
        """
        if self._trained or torch.compiler.is_compiling():
            return False
        self._trained = not all(cast(ScoreTerm, kind).is_zero() for kind in self.kinds)
        return not self._trained


def layer_biases(model: nn.Module) -> Iterator[tuple[str, LayerBias]]:
    """(path, bias) of every attention layer of a model that has one."""
    for name, module in model.named_modules():
        if isinstance(module, LayerBias):
            yield name, module
