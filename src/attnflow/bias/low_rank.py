"""How much of a bias a product of fewer numbers could give: the control for what a network per pair buys."""

from __future__ import annotations

import math
from typing import Final

import torch
from jaxtyping import Bool, Float
from torch import Tensor

_ROUNDS: Final = 1000
_SETTLED: Final = 1e-6  # change of the residual, as a share of the energy


def energy(bias: Float[Tensor, "queries keys"], allowed: Bool[Tensor, "queries keys"], rank: int) -> float:
    """Share of a bias, as softmax sees it, that u_i . v_j of a given rank can give; NaN for a bias of zero.

    That is 1 - min |bias - X - r 1^T|^2 / |row-centred bias|^2 over the allowed pairs, for X of that rank and one free
    number per query, which softmax cannot see. Where every pair is allowed these are the largest singular values of
    the row-centred bias. Under a mask the pairs that do not exist are filled in with what X says of them, again and
    again (Srebro and Jaakkola, ICML 2003): a lower bound, and close to the optimum where most pairs exist.

    Args:
        bias: B; its rows may have any mean.
        allowed: pairs that exist.
        rank: of X, at least 1; 1 is what a bias per key can give.

    Cost: one singular value decomposition, and under a mask up to 1,000 rounds of a few matrix products.
    """
    mask = allowed.double()
    count = mask.sum(dim=1, keepdim=True).clamp(min=1)

    def centred(values: Tensor) -> Tensor:
        return (values - (values * mask).sum(dim=1, keepdim=True) / count) * mask

    target = centred(bias.double())
    total = float(target.square().sum())
    if total == 0.0:
        return math.nan
    if bool(allowed.all()):
        return float(torch.linalg.svdvals(target)[:rank].square().sum()) / total
    right = torch.linalg.svd(target, full_matrices=False).Vh[:rank].mT
    low, offset, before = torch.zeros_like(target), torch.zeros_like(count), 1.0
    for _ in range(_ROUNDS):
        filled = torch.where(allowed, target - offset, low)
        left = torch.linalg.qr(filled @ right).Q  # a step of subspace iteration in place of a decomposition
        sides = filled.mT @ left
        right = torch.linalg.qr(sides).Q
        low = left @ sides.mT
        offset = ((target - low) * mask).sum(dim=1, keepdim=True) / count
        residual = float(centred(target - low).square().sum()) / total
        if abs(before - residual) < _SETTLED:
            return 1.0 - residual
        before = residual
    return 1.0 - before
