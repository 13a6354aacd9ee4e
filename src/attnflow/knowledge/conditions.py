"""When a feed-forward layer is generalized cross-attention exactly, for given widths of keys and entries."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from jaxtyping import Float
from torch import Tensor


@dataclass(frozen=True)
class Conditions:
    """Whether a feed-forward layer can be written with keys of width d_k and entries of width d_E.

    Attributes:
        key_ranks: rank(W_1), or rank(W_gate) and rank(W_up) of a gated layer: d_k must be at least each of them.
        entry_rank: rank([W_1^T | W_2]), or rank([W_gate^T | W_up^T | W_2]): d_E must be at least this, plus one
            coordinate for the threshold of each key.
        key_dim: d_k asked for.
        entry_dim: d_E asked for.
        residual: relative Frobenius error of the matrix of which `entry_rank` is the rank, at the best entries that
            leave room for the thresholds.
    """

    key_ranks: tuple[int, ...]
    entry_rank: int
    key_dim: int
    entry_dim: int
    residual: float

    @property
    def gated(self) -> bool:
        """Whether the layer has a gate."""
        return len(self.key_ranks) > 1

    @property
    def exact(self) -> bool:
        """Whether the layer can be written exactly."""
        return max(self.key_ranks) <= self.key_dim and self.entry_rank + len(self.key_ranks) <= self.entry_dim

    def __str__(self) -> str:
        thresholds = len(self.key_ranks)
        if self.exact:
            ranks = " and ".join(map(str, self.key_ranks))
            return (
                f"exact: rank {ranks} <= d_k {self.key_dim}, {self.entry_rank} + {thresholds} <= d_E {self.entry_dim}"
            )
        names = ("W_gate", "W_up") if self.gated else ("W_1",)
        reasons = [
            f"{name} has rank {rank}, but keys have width d_k = {self.key_dim}"
            for name, rank in zip(names, self.key_ranks, strict=True)
            if rank > self.key_dim
        ]
        if self.entry_rank + thresholds > self.entry_dim:
            room = "thresholds need two more coordinates" if self.gated else "threshold needs one more coordinate"
            reasons.append(
                f"[{' | '.join(f'{name}^T' for name in names)} | W_2] has rank {self.entry_rank}, and the {room}, but "
                f"entries have width d_E = {self.entry_dim} (residual {self.residual:.2g} at best)"
            )
        return "not exact: " + "; ".join(reasons)


def conditions(
    first: Float[Tensor, "model_dim entries"],
    second: Float[Tensor, "entries model_dim"],
    key_dim: int,
    entry_dim: int,
    gate: Float[Tensor, "model_dim entries"] | None = None,
) -> Conditions:
    """The exactness conditions of act(h W_1 + b_1) W_2 as cross-attention (knowledge, sec. 5, corrected).

    The paper's "functional equivalence" holds one way: cross-attention folds into a feed-forward layer always, and a
    feed-forward layer unfolds exactly if and only if rank(W_1) <= d_k, rank([W_1^T | W_2]) <= d_E and the threshold
    can be read off the entry. A gated layer, (act(h W_gate + b_gate) * (h W_up + b_up)) W_2, is not cross-attention of
    the paper's form at any number of entries; with two keys for each entry, our extension, it is exactly if and only
    if rank(W_gate), rank(W_up) <= d_k, rank([W_gate^T | W_up^T | W_2]) <= d_E and both thresholds can be read off.

    Args:
        first: W_1; W_up of a gated layer.
        second: W_2.
        key_dim: d_k.
        entry_dim: d_E, with a coordinate for each threshold.
        gate: W_gate, of a gated layer.

    Cost: a singular value decomposition of entries x 2 model_dim (gated: 3 model_dim), in float64.

    >>> torch.manual_seed(0)  # doctest: +ELLIPSIS
    <...>
    >>> print(conditions(torch.randn(4, 16), torch.randn(16, 4), key_dim=4, entry_dim=9))
    exact: rank 4 <= d_k 4, 8 + 1 <= d_E 9
    """
    keys = (first,) if gate is None else (gate, first)
    joined = torch.cat([*(key.T for key in keys), second], dim=1)
    values = torch.linalg.svdvals(joined.double())
    rest = values[max(entry_dim - len(keys), 0) :]
    residual = float(rest.norm() / values.norm()) if bool(values.any()) else 0.0
    return Conditions(tuple(_rank(key) for key in keys), _rank(joined), key_dim, entry_dim, residual)


def _rank(matrix: Tensor) -> int:
    """The rank in the precision of the weights: directions that are rounding are not counted."""
    tolerance = max(matrix.shape) * torch.finfo(matrix.dtype).eps
    return int(torch.linalg.matrix_rank(matrix.double(), rtol=tolerance))
