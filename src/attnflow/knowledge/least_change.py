"""The smallest change of values that writes what is wanted where it is wanted, and as little as can be elsewhere."""

from __future__ import annotations

from typing import Final

import torch
from jaxtyping import Float
from torch import Tensor

_RANK: Final = 1e-10  # of the largest singular value: smaller ones of what must not change are rounding
_FREE: Final = 1e-8  # of the squared length of whitened weights: less cannot be told from rounding


def least_change(
    weights: Float[Tensor, "places entries"],
    wanted: Float[Tensor, "places model_dim"],
    moment: Float[Tensor, "entries entries"],
    *,
    untouched: Float[Tensor, "others entries"] | None = None,
    ridge: float = 0.0,
) -> Float[Tensor, "entries model_dim"]:
    """The change X of values that minimises tr(X^T M X) + |K X - W|^2 / ridge, subject to U X = 0.

    K has the weights of the entries at the places to be changed, W what is to be added there, M = E[k k^T] the second
    moment of weights on other text: tr(X^T M X) is the mean square of what the change adds there (ROME, Meng et al.,
    2022, eq. 2; MEMIT, 2023, eq. 14, for several places at once; U as AlphaEdit has it, 2025). With ridge 0 the first
    term is minimised subject to K X = W.

    Solved by whitening, M = L L^T, and an orthonormal basis of L^-1 U^T: a system of the size of the places.

    K, W and U are `weights`, `wanted` and `untouched`; M, `moment`, is symmetric and positive definite.

    Returns:
        X, in the precision of `moment`.

    Raises:
        ValueError: NaN or infinity; a moment that is not positive definite; places of which next to nothing is left
            beside those that must not change; ridge 0 and places that depend on each other.

    Cost: entries^3 / 3 for the factor, entries^2 * (places + others).

    >>> K, W = torch.tensor([[1.0, 1.0]]), torch.tensor([[2.0]])
    >>> least_change(K, W, torch.diag(torch.tensor([1.0, 3.0])))  # the entry that fires less elsewhere changes more
    tensor([[1.5000],
            [0.5000]])
    """
    if not all(bool(torch.isfinite(one).all()) for one in (weights, wanted, moment)) or not ridge >= 0:
        raise ValueError(f"weights, what is wanted and the moment must be finite, and ridge 0 or more, got {ridge}")
    factor, failed = torch.linalg.cholesky_ex(moment)
    if int(failed):
        raise ValueError("the moment of weights is not positive definite: add a little of the identity, or more text")
    white = torch.linalg.solve_triangular(factor, weights.to(moment).T, upper=False)
    size = white.square().sum(dim=0)
    if untouched is not None and len(untouched):
        others = torch.linalg.solve_triangular(factor, untouched.to(moment).T, upper=False)
        basis, lengths, _ = torch.linalg.svd(others, full_matrices=False)
        basis = basis[:, lengths > _RANK * lengths[0]]
        for _ in range(2):  # once leaves rounding
            white = white - basis @ (basis.T @ white)
    gram = white.T @ white
    if bool((gram.diagonal() <= _FREE * size).any()):
        raise ValueError("where something must change, the weights are those of places where nothing may change")
    if not ridge and not bool(torch.linalg.eigvalsh(gram)[0] > _RANK * size.max()):
        raise ValueError("the weights at several places depend on each other: a ridge above 0 meets them as it can")
    system = gram + ridge * torch.eye(len(gram)).to(gram)
    return torch.linalg.solve_triangular(factor.T, white @ torch.linalg.solve(system, wanted.to(moment)), upper=True)
