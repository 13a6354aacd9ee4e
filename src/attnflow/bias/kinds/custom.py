"""A user's own module as a bias."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import cast

from jaxtyping import Float
from torch import Tensor, nn

from attnflow.bias.config import BiasConfig, Placement, Reference
from attnflow.bias.kinds.base import ScoreTerm
from attnflow.bias.shape import LayerShape, Vectors
from attnflow.bias.terms import Dense, wide


@dataclass(frozen=True)
class Custom:
    """A bias of the user's making.

    Attributes:
        build: makes the module of one layer from its `LayerShape`. The module either has the methods of `ScoreTerm`, or
            is called with (query, key), [batch, queries, width] and [batch, keys, width] as `reference` says, and
            returns B as [batch or 1, maps, queries, keys]: simple, and every pair is held.
        layers: as in `BiasConfig`.
        reference: the vectors it reads, as in `BiasConfig`.
        name: written into saved files; loading asks for the module again, and never imports code by name.
    """

    build: Callable[[LayerShape], nn.Module]
    layers: Placement | Sequence[int] = "every_other"
    reference: Reference = "unrotated"
    name: str = "custom"

    def layer_indices(self, num_layers: int) -> list[int]:
        """The layers that get this bias."""
        return BiasConfig(layers=self.layers).layer_indices(num_layers)

    def module(self, shape: LayerShape) -> nn.Module:
        """The module of one layer.

        Raises:
            TypeError: `build` made something else.
        """
        made = cast(object, self.build(shape))
        if not isinstance(made, nn.Module):
            raise TypeError(f"{self.name}: build must return an nn.Module, got {type(made).__name__}")
        return made if isinstance(made, ScoreTerm) else Pairwise(made, self.reference)


class Pairwise(nn.Module):
    """A module on (all query vectors, all key vectors) as a bias; the key's vector is what the cache keeps."""

    def __init__(self, network: nn.Module, reference: Reference) -> None:
        super().__init__()
        self.network, self.name = network, reference

    def columns(self, keys: Vectors) -> Float[Tensor, "batch tokens width"]:
        """The key's vector."""
        return wide(keys.reference(self.name))

    def term(self, queries: Vectors, columns: Float[Tensor, "batch keys width"], slots: Tensor | None) -> Dense:
        """What the module returns.

        Raises:
            ValueError: a result of another shape.
        """
        rows = queries.reference(self.name)
        found = self.network(rows, columns.to(rows.dtype))
        expected = (rows.shape[1], columns.shape[1])
        if not isinstance(found, Tensor) or found.ndim != 4 or tuple(found.shape[2:]) != expected:
            got = tuple(found.shape) if isinstance(found, Tensor) else type(found).__name__
            raise ValueError(
                f"{type(self.network).__name__} must return [batch or 1, maps, {expected[0]}, {expected[1]}], got {got}"
            )
        return Dense(found)

    def is_zero(self) -> bool:
        """Unknown, so no."""
        return False
