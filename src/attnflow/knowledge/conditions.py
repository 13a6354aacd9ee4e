"""When a feed-forward layer's weights can be written as generalized cross-attention of given widths."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from jaxtyping import Float
from torch import Tensor


@dataclass(frozen=True)
class Conditions:
    key_rank: int  # rank(W_1), or rank([W_gate | W_up]), which d_k must reach
    entry_rank: int  # rank([W_1^T | W_2]), or rank([W_gate^T | W_up^T | W_2]): coordinates for keys and values
    threshold_rank: int  # further coordinates for thresholds, at most one for each key
    key_dim: int  # the requested d_k
    entry_dim: int  # the requested d_E
    gated: bool  # whether the layer has a gate
    # relative Frobenius error of keys and values at the best entries that leave room for the thresholds
    residual: float

    @property
    def ok(self) -> bool:
        """Whether these weights can be written exactly; if not, other weights of the same function still may."""
        return self.key_rank <= self.key_dim and self.entry_rank + self.threshold_rank <= self.entry_dim

    def __str__(self) -> str:
        if self.ok:
            return (
                f"exact: keys need {self.key_rank} of d_k = {self.key_dim} coordinates, "
                f"entries {self.entry_rank} + {self.threshold_rank} of d_E = {self.entry_dim}"
            )
        more = ["", ", and thresholds need one more coordinate", ", and thresholds need two more"][self.threshold_rank]
        reasons: list[str] = []
        if self.key_rank > self.key_dim:
            keys = "[W_gate | W_up]" if self.gated else "W_1"
            reasons.append(f"{keys} has rank {self.key_rank}, but keys have width d_k = {self.key_dim}")
        if self.entry_rank + self.threshold_rank > self.entry_dim:
            joined = "[W_gate^T | W_up^T | W_2]" if self.gated else "[W_1^T | W_2]"
            width = f"d_E = {self.entry_dim} (residual {self.residual:.2g} at best)"
            reasons.append(f"{joined} has rank {self.entry_rank}{more}, but entries have width {width}")
        return "not exact with these weights: " + "; ".join(reasons)


def conditions(
    first: Float[Tensor, "model_dim entries"],
    second: Float[Tensor, "entries model_dim"],
    key_dim: int,
    entry_dim: int,
    *,
    thresholds: Float[Tensor, " entries"] | None = None,
    gate: Float[Tensor, "model_dim entries"] | None = None,
    gate_thresholds: Float[Tensor, " entries"] | None = None,
) -> Conditions:
    """Check whether the weights of act(h W_1 + b_1) W_2 fit cross-attention of given widths (knowledge, sec. 5).

    Entry i folds into neuron i, with the same key, threshold and value. B1 is affine in the entry, as "coordinate" and
    "mlp" thresholds can be. This is possible if and only if rank(W_1) <= d_k and rank([W_1^T | W_2]) <= d_E, less a
    coordinate if b_1 needs one. It needs none if it lies in the span of the columns of [W_1^T | W_2] and of the
    constant, as without biases. (Another B1 does not need it wherever neurons with equal rows have equal thresholds.) A
    gated layer, our extension with two keys and one query, needs the same of [W_gate | W_up], [W_gate^T | W_up^T | W_2]
    and both thresholds; then `first` and `thresholds` are W_up and b_up.

    This holds for the given weights, not for the function. Other weights may compute the same function at lower ranks:
    a ReLU neuron does not change if (w, b, v) become (c w, c b, v / c) with c > 0.

    Cost: a singular value decomposition of entries x 2 model_dim (gated: 3 model_dim), in float64.

    >>> _ = torch.manual_seed(0)
    >>> first, second = torch.randn(4, 16), torch.randn(16, 4)
    >>> print(conditions(first, second, key_dim=4, entry_dim=8))
    exact: keys need 4 of d_k = 4 coordinates, entries 8 + 0 of d_E = 8
    """
    keys = [first] if gate is None else [gate, first]
    joined = torch.cat([*(key.T for key in keys), second], dim=1)
    biases = [bias[:, None] for bias in (thresholds, gate_thresholds) if bias is not None]
    constant = torch.ones_like(joined[:, :1])
    free = torch.cat([joined, constant], dim=1)  # what an affine function of the entries can be without more room
    own = _rank(torch.cat([free, *biases], dim=1)) - _rank(free)
    values = torch.linalg.svdvals(joined.double())
    rest = values[max(entry_dim - own, 0) :]
    residual = float(rest.norm() / values.norm()) if bool(values.any()) else 0.0
    key_rank = _rank(torch.cat(keys, dim=1))
    return Conditions(key_rank, _rank(joined), own, key_dim, entry_dim, gate is not None, residual)


def _rank(matrix: Tensor) -> int:
    tolerance = max(matrix.shape) * torch.finfo(matrix.dtype).eps
    return int(torch.linalg.matrix_rank(matrix.double(), rtol=tolerance))
