"""A penalty and initialisations that train models towards symmetric or skew-symmetric forms M = W_q^T W_k."""

from __future__ import annotations

import math
from typing import Final, Literal, get_args
from weakref import WeakKeyDictionary

import torch
from jaxtyping import Float
from torch import Tensor, nn

from attnflow._core.errors import UnsupportedArchitecture
from attnflow.geometry.score import layers_in_memory
from attnflow.geometry.scores import full_symmetry, head_symmetry
from attnflow.models.subject import Loaded, Subject
from attnflow.models.weights.attention import AttentionLayer
from attnflow.models.weights.families.rows import Selected, same

Target = Literal["symmetric", "skew"]

# The layers of a model, kept between steps of training until its parameters are replaced.
_found: Final[WeakKeyDictionary[nn.Module, tuple[int, list[AttentionLayer]]]] = WeakKeyDictionary()


def penalty(model: nn.Module | Loaded, target: Target = "symmetric", per_head: bool = False) -> Float[Tensor, ""]:
    """Measure how far a model's self-attention is from symmetric or skew-symmetric, summed over its layers.

    `sum_l (1 - S_l)` towards symmetric and `sum_l (1 + S_l)` towards skew (geometry, eq. S147 and S148), to be added to
    the loss with a factor of your choice. Differentiable in the weights of queries and keys; no d x d matrix of a head
    is formed. S does not depend on the scale of the weights, so the gradient turns them and never shrinks them.

    Args:
        model: any model that `score` reads, even if compiled or wrapped for several devices. Frozen parts add a
            constant.
        target: "symmetric" or "skew".
        per_head: make S_l the mean of the heads' symmetries, as in the paper, instead of the symmetry of their sum.

    Returns:
        A 0-d tensor in [0, 2 * layers], float32 at least, on the device of the first layer. A layer whose form is zero
        adds 1, without gradient.

    Raises:
        UnsupportedArchitecture: the model has no known self-attention.
        ValueError: the target is unknown.

    Cost: a layer takes 3 * head_dim^2 * d multiplications a head with `per_head`, otherwise at most d^2 times the rows
    of its key weights; twice that backwards; the same for every batch size.
    """
    if target not in get_args(Target):
        raise ValueError(f'target must be "symmetric" or "skew", got {target!r}')
    sign = 1 if target == "symmetric" else -1
    symmetry = head_symmetry if per_head else full_symmetry
    subject = Subject.of(model)
    subject.require_whole("penalty", "train with DistributedDataParallel instead")
    module = subject.model
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


Scale = Literal["matched", "paper"]


def init_symmetric_(
    model: nn.Module | Loaded, scale: Scale = "matched", per_head: bool = True, generator: torch.Generator | None = None
) -> None:
    """Give every self-attention of a model a symmetric bilinear form, S = +1, in place.

    It is exact up to rounding of the weights: 1 - S is below 1e-6 in float32 and 1e-5 in bfloat16.

    With as many key heads as query heads `W_k := c W_q` (geometry, sec. S2.1, with c = 1), so that every head's
    `M_h = c W_q,h^T W_q,h` is symmetric and positive semi-definite, and so is their sum.

    Query heads that share a key head (GQA) cannot keep their weights: if W_k has full rank, M_h is symmetric if and
    only if `W_q,h = B_h W_k` with B_h symmetric. (The rows of M_h lie in the row space of W_k. If M_h = M_h^T, so do
    its columns, hence M_h = W_k^T B_h W_k, where W_k cancels on the right.) So `per_head` writes the queries, with
    random positive semi-definite B_h. Without it, W_k := c sum_h W_q,h makes only the full form symmetric, and the n
    queries of a group stay independent. Each head then has a symmetry of about (1 + head_dim/d) / (n + head_dim/d).

    Biases, rotary embeddings and norms of queries and keys stay unchanged; their contribution is not symmetric.

    Args:
        model: any model that `score` reads; weights of any dtype, frozen or not, separate or fused.
        scale: "matched" keeps the present root mean square of both projections, so a new model keeps the scale of its
            initialisation. "paper" first replaces the weights by the default of `nn.Linear`, uniform in +-1/sqrt(d), as
            in the paper's runs. That is larger than BERT's scale, which confounds their comparison.
        per_head: make every head symmetric, and so the full form, instead of only the full form. They differ only under
            GQA.
        generator: source of the random numbers.

    Raises:
        UnsupportedArchitecture: the model has no self-attention whose weights can be written.
        ValueError: there is no such scale, or weights are zero, so that there is no scale to match.

    Cost: O(d * head_dim) time for each row of a projection.
    """
    _initialise(model, 1, scale, per_head, generator)


def init_skew_(
    model: nn.Module | Loaded, scale: Scale = "matched", per_head: bool = True, generator: torch.Generator | None = None
) -> None:
    """Give every self-attention of a model a skew-symmetric bilinear form, S = -1, in place.

    `W_k,h := N_h W_q,h` with `N_h = (P - P^T) / 2`, P random, so that `M_h = W_q,h^T N_h W_q,h = -M_h^T`. The paper's
    `W_k = W_q N` (sec. S2.1) is meant for weights (in, out); taken at its word for weights stored (out, in) it gives
    W_q^T W_q N, which is not skew. Its N also mixes the heads, so that their sum is skew but no head is; ours has one
    block for each head.

    Under GQA the roles change as in `init_symmetric_`: `W_q,h := N_h W_k`, each query head with its own N_h.

    Args:
        model: as in `init_symmetric_`.
        scale: as in `init_symmetric_`. The paper does not say how large P is, and its code has no skew initialisation:
            with "paper" W_k gets the root mean square of W_q.
        per_head: as in `init_symmetric_`.
        generator: source of the random numbers.

    Raises:
        UnsupportedArchitecture: the model has no self-attention whose weights can be written, or heads of width 1,
            which have no skew form but zero.
        ValueError: there is no such scale, or weights are zero, so that there is no scale to match.

    Cost: O(d * head_dim) time for each row of a projection.
    """
    _initialise(model, -1, scale, per_head, generator)


def _initialise(
    model: nn.Module | Loaded, sign: Literal[1, -1], scale: Scale, per_head: bool, generator: torch.Generator | None
) -> None:
    if scale not in get_args(Scale):
        raise ValueError(f'scale must be "matched" or "paper", got {scale!r}')
    Subject.of(model).require_whole("initialising queries and keys", "do it before you shard the model")
    layers = layers_in_memory(model)
    for layer in layers:  # before anything is written
        if not isinstance(layer.query_rows, Selected) or not isinstance(layer.key_rows, Selected):
            raise UnsupportedArchitecture(
                f"{layer.name} has queries or keys that are products of several weights (latent attention), which "
                "cannot be written uniquely: use af.geometry.penalty for such models"
            )
        if sign < 0 and same(layer.query_rows, layer.key_rows):
            raise UnsupportedArchitecture(f"{layer.name} has one weight for queries and keys, so it is symmetric")
        if sign < 0 and layer.head_dim == 1:
            raise UnsupportedArchitecture(f"{layer.name} has heads of width 1: their only skew-symmetric form is zero")
    with torch.no_grad():
        for layer in layers:
            if scale == "paper":
                layer.write(_uniform(layer.query(), generator), _uniform(layer.key(), generator))
            query, key = (
                weight.to(torch.promote_types(weight.dtype, torch.float32)) for weight in (layer.query(), layer.key())
            )
            group = layer.num_heads // layer.num_kv_heads
            queries = query.unflatten(0, (layer.num_kv_heads, group, layer.head_dim))
            keys = key.unflatten(0, (layer.num_kv_heads, 1, layer.head_dim))
            if group == 1 or not per_head:
                source = queries if group == 1 else queries.sum(1, keepdim=True)
                form = source if sign > 0 else _forms(sign, source, 1, generator) @ source
                layer.write(key=_scaled(form.flatten(0, 2), query if scale == "paper" else key, layer.name, "key"))
            else:
                form = _forms(sign, keys, group, generator) @ keys
                layer.write(query=_scaled(form.flatten(0, 2), key if scale == "paper" else query, layer.name, "query"))


def _scaled(weight: Tensor, like: Tensor, name: str, what: str) -> Tensor:
    size, wanted = (tensor.square().mean().sqrt() for tensor in (weight, like))
    if not bool(size * wanted > 0):  # NaN is no scale either
        raise ValueError(
            f"{name}: weights are zero or NaN and give no scale for the {what} weights: "
            'initialise the model first, or pass scale="paper"'
        )
    return weight * (wanted / size)


def _forms(sign: Literal[1, -1], like: Tensor, count: int, generator: torch.Generator | None) -> Tensor:
    """Draw forms, [kv_heads, count, head_dim, head_dim]: R R^T (I would make heads equal), or (P - P^T) / 2."""
    kv_heads, _, head_dim, _ = like.shape
    random = torch.randn(kv_heads, count, head_dim, head_dim, generator=generator, device=_device(generator)).to(like)
    return random @ random.mT if sign > 0 else (random - random.mT) / 2


def _uniform(like: Tensor, generator: torch.Generator | None) -> Tensor:
    bound = 1 / math.sqrt(like.shape[1])
    return (torch.rand(like.shape, generator=generator, device=_device(generator)) * (2 * bound) - bound).to(like)


def _device(generator: torch.Generator | None) -> torch.device:
    return generator.device if generator else torch.device("cpu")  # the same numbers wherever the model is
