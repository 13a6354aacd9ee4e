"""A learned or given number for every pair of positions."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from jaxtyping import Float
from torch import Tensor, nn

from attnflow.bias.config import BiasConfig
from attnflow.bias.shape import LayerShape, ShareHeads, Vectors
from attnflow.bias.terms import Dense


@dataclass(frozen=True, kw_only=True)
class DenseConfig(BiasConfig):
    """A learned number for each pair of positions, as pair biases and graphs have.

    Attributes:
        max_length: positions of the table.
        std: of the normal numbers to start from; 0 is the identity.

    The other fields are those of `BiasConfig`.
    """

    kind: ClassVar[str] = "dense"
    share_heads: ShareHeads = True
    max_length: int = 512
    std: float = 0.0

    def module(self, shape: LayerShape) -> nn.Module:
        """The table of one layer."""
        return DenseTable(self, shape)


class DenseTable(nn.Module):
    """B_ij = values[i, j] by position: a parameter, or a tensor set for a batch (pair representations, graphs).

    Assign `module.override = tensor` of shape [batch or 1, maps, length, length] to use it in place of the parameter;
    gradients flow into it. None goes back.
    """

    def __init__(self, config: DenseConfig, shape: LayerShape) -> None:
        super().__init__()
        self.config = config
        self.values = nn.Parameter(
            torch.empty(1, shape.groups(config.share_heads), config.max_length, config.max_length)
        )
        self.override: Tensor | None = None
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Normal, with the std of the config."""
        nn.init.normal_(self.values, std=self.config.std)

    def columns(self, keys: Vectors) -> Float[Tensor, "batch tokens width"]:
        """The position of each key."""
        return keys.positions.to(self.values.dtype if self.values.dtype == torch.float64 else torch.float32)[..., None]

    def term(self, queries: Vectors, columns: Float[Tensor, "batch keys width"], slots: Tensor | None) -> Dense:
        """The table at the positions of queries and keys.

        Raises:
            ValueError: a position beyond the table.
        """
        table = self.values if self.override is None else self.override
        keys, rows = columns.squeeze(-1).long(), queries.positions
        length = min(table.shape[2:])
        last = 0 if torch.compiler.is_compiling() else max(int(keys.max()), int(rows.max()))
        if last >= length:
            raise ValueError(
                f"the dense bias covers {length} positions, the sequence reaches {last}; attach it with a larger "
                "max_length"
            )
        if rows.shape[0] == keys.shape[0] == 1:
            return Dense(table[:, :, rows[0]][..., keys[0]])
        batch = max(rows.shape[0], keys.shape[0])
        where = torch.arange(batch, device=table.device)[:, None, None, None]
        whole = table.expand(batch, -1, -1, -1)
        maps = torch.arange(table.shape[1], device=table.device)[None, :, None, None]
        return Dense(whole[where, maps, rows[:, None, :, None], keys[:, None, None, :]])

    def is_zero(self) -> bool:
        """Whether every number of the table is zero."""
        return self.override is None and not bool(self.values.any())
