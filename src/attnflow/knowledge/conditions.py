"""When a feed-forward layer is generalized cross-attention exactly, for given widths of keys and entries."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from jaxtyping import Float
from torch import Tensor


@dataclass(frozen=True)
class Conditions:
    """Whether a plain feed-forward layer can be written with keys of width d_k and entries of width d_E.

    Attributes:
        key_rank: rank(W_1): d_k must be at least this.
        entry_rank: rank([W_1^T | W_2]): d_E must be at least this, plus one coordinate for the threshold.
        key_dim: d_k asked for.
        entry_dim: d_E asked for.
        residual: relative Frobenius error of [W_1^T | W_2] at the best entries of width d_E - 1.
    """

    key_rank: int
    entry_rank: int
    key_dim: int
    entry_dim: int
    residual: float

    @property
    def exact(self) -> bool:
        """Whether the layer can be written exactly."""
        return self.key_rank <= self.key_dim and self.entry_rank + 1 <= self.entry_dim

    def __str__(self) -> str:
        if self.exact:
            return f"exact: rank {self.key_rank} <= d_k {self.key_dim}, {self.entry_rank} + 1 <= d_E {self.entry_dim}"
        reasons = []
        if self.key_rank > self.key_dim:
            reasons.append(f"W_1 has rank {self.key_rank}, but keys have width d_k = {self.key_dim}")
        if self.entry_rank + 1 > self.entry_dim:
            reasons.append(
                f"[W_1^T | W_2] has rank {self.entry_rank}, and the threshold needs one more coordinate, but entries "
                f"have width d_E = {self.entry_dim} (residual {self.residual:.2g} at best)"
            )
        return "not exact: " + "; ".join(reasons)


def conditions(
    first: Float[Tensor, "model_dim entries"],
    second: Float[Tensor, "entries model_dim"],
    key_dim: int,
    entry_dim: int,
) -> Conditions:
    """The exactness conditions of act(h W_1 + b_1) W_2 as cross-attention (knowledge, sec. 5, corrected).

    The paper's "functional equivalence" holds one way: cross-attention folds into a feed-forward layer always, and a
    feed-forward layer unfolds exactly if and only if rank(W_1) <= d_k, rank([W_1^T | W_2]) <= d_E and the threshold
    can be read off the entry.

    Args:
        first: W_1.
        second: W_2.
        key_dim: d_k.
        entry_dim: d_E, with the threshold's coordinate.

    Cost: a singular value decomposition of entries x 2 model_dim, in float64.

    >>> torch.manual_seed(0)  # doctest: +ELLIPSIS
    <...>
    >>> print(conditions(torch.randn(4, 16), torch.randn(16, 4), key_dim=4, entry_dim=9))
    exact: rank 4 <= d_k 4, 8 + 1 <= d_E 9
    """
    joined = torch.cat([first.T, second], dim=1)
    values = torch.linalg.svdvals(joined.double())
    rest = values[max(entry_dim - 1, 0) :]
    residual = float(rest.norm() / values.norm()) if bool(values.any()) else 0.0
    return Conditions(_rank(first), _rank(joined), key_dim, entry_dim, residual)


def _rank(matrix: Tensor) -> int:
    """The rank in the precision of the weights: directions that are rounding are not counted."""
    tolerance = max(matrix.shape) * torch.finfo(matrix.dtype).eps
    return int(torch.linalg.matrix_rank(matrix.double(), rtol=tolerance))
