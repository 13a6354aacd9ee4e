"""A term for the loss that pulls the attention of a model towards symmetric, or skew-symmetric, forms."""

from __future__ import annotations

from typing import Final, Literal, get_args
from weakref import WeakKeyDictionary

import torch
from jaxtyping import Float
from torch import Tensor, nn

from attnflow.geometry.score import layers_in_memory
from attnflow.geometry.scores import full_symmetry, head_symmetry
from attnflow.models.attention import AttentionLayer
from attnflow.models.loaded import Loaded, split

Target = Literal["symmetric", "skew"]

# The layers of a model, kept between steps of training until its parameters are replaced.
_found: Final[WeakKeyDictionary[nn.Module, tuple[int, list[AttentionLayer]]]] = WeakKeyDictionary()


def penalty(model: nn.Module | Loaded, target: Target = "symmetric", per_head: bool = False) -> Float[Tensor, ""]:
    """How far the self-attention of a model is from symmetric, or skew-symmetric, summed over its layers.

    `sum_l (1 - S_l)` towards symmetric and `sum_l (1 + S_l)` towards skew (geometry, eq. S147 and S148), to be added to
    the loss with a factor of your choice. Differentiable in the weights of queries and keys; no d x d matrix of a head
    is formed. S does not depend on the scale of the weights, so the gradient turns them and never shrinks them.

    Args:
        model: any model that `score` reads, compiled or wrapped for several devices too. Frozen parts add a constant.
        target: where to.
        per_head: S_l is the mean over the heads' own symmetries rather than the symmetry of their sum, as in the paper.

    Returns:
        A 0-d tensor in [0, 2 * layers], float32 at least, on the device of the first layer. A layer whose form is zero
        adds 1, without gradient.

    Raises:
        UnsupportedArchitecture: the model has no self-attention that is known.
        ValueError: there is no such target.

    Cost: a layer takes 3 * head_dim^2 * d multiplications a head with `per_head`, otherwise at most d^2 times the rows
    of its key weights; twice that backwards; the same for every batch size.
    """
    if target not in get_args(Target):
        raise ValueError(f'target must be "symmetric" or "skew", got {target!r}')
    sign = 1 if target == "symmetric" else -1
    symmetry = head_symmetry if per_head else full_symmetry
    module, _ = split(model)
    parameters = {id(parameter) for parameter in module.parameters()}
    count, layers = _found.get(module, (-1, []))
    if count != len(parameters) or any(id(p) not in parameters for layer in layers for p in layer.parameters.values()):
        layers = layers_in_memory(module)
        _found[module] = len(parameters), layers
    terms: list[Tensor] = []
    for layer in layers:
        query, key = layer.query(), layer.key()
        # A Trainer takes the loss under autocast, whose half precision is not enough for the squares of products.
        with torch.autocast(query.device.type, enabled=False):
            terms.append(1 - sign * symmetry(query, key, layer.num_heads, layer.num_kv_heads).mean())
    return torch.stack([term.to(terms[0].device) for term in terms]).sum()
