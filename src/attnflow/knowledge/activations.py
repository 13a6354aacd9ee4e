"""What turns the scores of entries into weights; unlike softmax, most of them leave most entries at zero."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Final

import torch
from jaxtyping import Float
from torch import Tensor
from torch.nn import functional

Activation = Callable[[Tensor], Tensor]


def sparsemax(scores: Float[Tensor, "*tokens entries"]) -> Float[Tensor, "*tokens entries"]:
    """The point of the probability simplex that is nearest to the scores (Martins and Astudillo, 2016).

    weights = max(score - tau, 0) with tau such that they sum to 1; exact zeros for all but the highest scores.

    Args:
        scores: of all entries; the last dimension is normalised.

    Returns:
        Weights of the same shape. Gradients flow to the entries with weight.

    Cost: a sort, O(entries log entries) for each token.

    >>> sparsemax(torch.tensor([1.0, 0.8, -1.0]))
    tensor([0.6000, 0.4000, 0.0000])
    """
    if not scores.shape[-1]:
        return scores
    # Differences to the highest score, in float32 at least: large scores and half precision would swallow the 1.
    kind = torch.promote_types(scores.dtype, torch.float32)
    shifted = scores.to(kind) - scores.detach().amax(dim=-1, keepdim=True).to(kind)
    ordered = shifted.sort(dim=-1, descending=True).values
    count = torch.arange(1, scores.shape[-1] + 1, device=scores.device, dtype=kind)
    total = ordered.cumsum(dim=-1)
    support = (1 + count * ordered > total).sum(dim=-1, keepdim=True)
    tau = (total.gather(-1, support - 1) - 1) / support
    return (shifted - tau).clamp(min=0).to(scores.dtype)


ACTIVATIONS: Final[Mapping[str, Activation]] = MappingProxyType(
    {"relu": functional.relu, "gelu": functional.gelu, "silu": functional.silu, "sparsemax": sparsemax}
)


def named(name: str | Activation) -> Activation:
    """The function of a name, or the function itself.

    Raises:
        ValueError: an unknown name.
    """
    if callable(name):
        return name
    if name not in ACTIVATIONS:
        raise ValueError(f"activation must be one of {', '.join(map(repr, ACTIVATIONS))} or a function, got {name!r}")
    return ACTIVATIONS[name]
