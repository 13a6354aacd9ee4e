"""The knowledge base: one matrix of entries that all layers read."""

from __future__ import annotations

import torch
from jaxtyping import Float
from torch import Tensor, nn

from attnflow._core.checks import integer


class KnowledgeBase(nn.Module):
    """E, a trainable matrix of entries shared by all layers (knowledge, sec. 3.2).

    Attributes:
        entries: E, [num_entries, entry_dim].

    Args:
        num_entries: rows.
        entry_dim: columns.
        std: of the normal initialisation; default entry_dim ** -0.5, which gives rows of length about 1.

    >>> KnowledgeBase(4, 8)
    KnowledgeBase(num_entries=4, entry_dim=8)
    """

    def __init__(self, num_entries: int, entry_dim: int, std: float | None = None) -> None:
        super().__init__()
        rows, columns = integer("num_entries", num_entries, minimum=1), integer("entry_dim", entry_dim, minimum=1)
        self.entries = nn.Parameter(torch.empty(rows, columns))
        self.std = columns**-0.5 if std is None else float(std)
        self.reset_parameters()

    @classmethod
    def from_entries(cls, entries: Float[Tensor, "entries entry_dim"]) -> KnowledgeBase:
        """A base with given rows.

        Raises:
            ValueError: not a matrix, or NaN or infinity in it.
        """
        if entries.ndim != 2 or not entries.is_floating_point():
            got = f"{entries.dtype} of shape {tuple(entries.shape)}"
            raise ValueError(f"entries must be floating-point numbers [num_entries, entry_dim], got {got}")
        if not bool(torch.isfinite(entries).all()):
            row = int((~torch.isfinite(entries).all(dim=1)).nonzero()[0])
            raise ValueError(f"entry {row} holds NaN or infinity")
        base = cls.__new__(cls)
        nn.Module.__init__(base)
        base.entries = nn.Parameter(entries)
        base.std = entries.shape[1] ** -0.5
        return base

    @property
    def num_entries(self) -> int:
        """Number of entries."""
        return self.entries.shape[0]

    @property
    def entry_dim(self) -> int:
        """Width of an entry."""
        return self.entries.shape[1]

    def reset_parameters(self) -> None:
        """Rows drawn from a normal distribution."""
        nn.init.normal_(self.entries, std=self.std)

    def forward(self) -> Float[Tensor, "entries entry_dim"]:
        """E."""
        return self.entries

    def extra_repr(self) -> str:
        """Its sizes, for printing."""
        return f"num_entries={self.num_entries}, entry_dim={self.entry_dim}"
