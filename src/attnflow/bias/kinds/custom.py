"""A user's own module as a bias."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import ClassVar, cast

from jaxtyping import Float
from torch import Tensor, nn

from attnflow.bias.config import BiasConfig
from attnflow.bias.kinds.base import ScoreTerm
from attnflow.bias.shape import LayerShape, Reference, Vectors
from attnflow.bias.terms import Dense, wide


@dataclass(frozen=True, kw_only=True)
class CustomConfig(BiasConfig):
    """A bias of the user's making.

    Attributes:
        build: makes the module of one layer from its `LayerShape`. The module either has the methods of `ScoreTerm`, or
            is called with (query, key), [batch, queries, width] and [batch, keys, width] as `reference` says, and
            returns B as [batch or 1, maps, queries, keys]: simple, and every pair is held.
        name: written into saved files; loading asks for the config again, and never imports code by name.

    The other fields are those of `BiasConfig`.
    """

    kind: ClassVar[str] = "custom"
    build: Callable[[LayerShape], nn.Module] = field(kw_only=False)
    reference: Reference = "unrotated"
    name: str = "custom"

    def module(self, shape: LayerShape) -> nn.Module:
        """The module of one layer.

        Raises:
            TypeError: `build` made something else.
        """
        module = cast(object, self.build(shape))
        if not isinstance(module, nn.Module):
            raise TypeError(f"{self.name}: build must return an nn.Module, got {type(module).__name__}")
        return module if isinstance(module, ScoreTerm) else Pairwise(module, self.reference)

    def to_dict(self) -> dict[str, object]:
        """What can be compared with the config that is given on loading: all but the code."""
        return {name: value for name, value in super().to_dict().items() if name != "build"}


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
        bias = self.network(rows, columns.to(rows.dtype))
        expected = (rows.shape[1], columns.shape[1])
        if not isinstance(bias, Tensor) or bias.ndim != 4 or tuple(bias.shape[2:]) != expected:
            got = tuple(bias.shape) if isinstance(bias, Tensor) else type(bias).__name__
            raise ValueError(
                f"{type(self.network).__name__} must return [batch or 1, maps, {expected[0]}, {expected[1]}], got {got}"
            )
        return Dense(bias)

    def is_zero(self) -> bool:
        """Unknown, so no."""
        return False
