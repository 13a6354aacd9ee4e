"""Proposition 2.1 on a real model: whether weights are convex, how they are ordered, and which hulls hold the outputs.

The proposition leaves out norms, biases, positions, values, output projections and (in eq. 5) heads. Each is put back
in turn, so that it is seen which of them the statement can do without.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final, cast

import numpy as np
import numpy.typing as npt
import torch
from scipy.optimize import nnls
from torch import Tensor, nn

from attnflow._core.errors import UnsupportedArchitecture
from attnflow.models.anatomy.sites import Site, find_sites, models_around
from attnflow.models.passes.interception import AttentionCall, Output, Proceed, intercept
from attnflow.models.weights.attention import AttentionLayer, attention_layers

FIRST: Final = 8  # queries before this one have few keys to put in order
EVERY: Final = 8  # of the queries after it one in so many is placed against hulls, which takes a solver
# Linear maps behind the heads, by the names that families give them: in the attention module, or beside it (BERT).
_OUTPUTS: Final = ("o_proj", "c_proj", "out_proj", "dense", "Wo", "output.dense")


@dataclass(frozen=True, eq=False)
class Recorded:
    """What one attention layer computed of one text, in float64."""

    residual: Tensor  # what enters the block, [positions, d]: the token as the proposition has it
    tokens: Tensor  # what is projected, [positions, d]: the same behind a norm, where there is one
    query: Tensor  # of every head, with bias and position, [heads, positions, head_dim]
    key: Tensor  # likewise, repeated for the heads that share it
    value: Tensor  # likewise
    weights: Tensor  # after the softmax, [heads, queries, keys]
    heads: Tensor  # outputs of the heads, [positions, heads, head_dim]
    output: Tensor  # of the layer, behind its last projection without its bias, [positions, d]
    values: Tensor  # what the layer would give for a token that all heads attend to alone, [positions, d]


def record(model: Any, ids: Tensor) -> list[tuple[AttentionLayer, Recorded]]:
    """Every self-attention layer and what it computes of a row of tokens.

    Args:
        model: of transformers, in evaluation mode; runs with its eager attention meanwhile.
        ids: int64[1, positions].
    """
    sites = [site for site in find_sites(model) if site.kind == "self"]
    layers = {layer.name: layer for layer in attention_layers(model)}
    held: dict[str, dict[str, Tensor]] = {site.name: {} for site in sites}
    hooks = [_remember(model.get_submodule(site.name), held[site.name], "tokens") for site in sites]
    hooks += [_remember(_around(model, site), held[site.name], "residual") for site in sites]

    def interceptor(name: str) -> Any:
        def around(call: AttentionCall, proceed: Proceed) -> Output:
            output, weights = proceed(call)
            assert weights is not None, "eager attention returns its weights"
            held[name] |= {"query": call.query[0], "key": call.key[0], "value": call.value[0]}
            held[name] |= {"weights": weights[0], "heads": output[0]}
            return output, weights

        return around

    around = {site.module: interceptor(site.name) for site in sites}
    interception = intercept(models_around(sites), around, role="pool", implementation="eager")
    try:
        with torch.no_grad():
            model(input_ids=ids.to(next(model.parameters()).device))
    finally:
        interception.remove()
        for hook in hooks:
            hook.remove()
    return [(layers[site.name], _recorded(held[site.name], _weight(model, site))) for site in sites]


def measure(layer: AttentionLayer, seen: Recorded) -> dict[str, float]:
    """The statements of the proposition on one layer and text; shares, and distances as shares of the output's norm."""
    heads = len(seen.weights)
    allowed = seen.weights.gt(0).any(dim=0)
    sums = (seen.weights.sum(-1) - 1).abs().max()
    combined = (seen.weights @ seen.value).transpose(0, 1)
    query, key = (side.detach().double().unflatten(0, (-1, layer.head_dim)) for side in (layer.query(), layer.key()))
    key = key.repeat_interleave(heads // len(key), dim=0)

    def form(tokens: Tensor) -> Tensor:
        return (query @ tokens.mT).mT @ (key @ tokens.mT)

    own = seen.query @ seen.key.mT
    by_form, every = form(seen.tokens), form(seen.tokens).sum(0, keepdim=True)
    found = {
        "negative weights": float(seen.weights.lt(0).double().mean()),
        "largest error of a sum": float(sums),
        "largest error of a head": float((combined - seen.heads).norm(dim=-1).max() / seen.heads.norm(dim=-1).mean()),
        "order, the model's own scores": concordance(own, seen.weights, allowed),
        "order, form of a head": concordance(by_form, seen.weights, allowed),
        "order, form of a head without the norm": concordance(form(seen.residual), seen.weights, allowed),
        "order, full form": concordance(every, seen.weights.mean(0, keepdim=True), allowed),
    }
    queries = range(FIRST, len(seen.tokens), EVERY)
    for name, points in (("values", seen.values), ("tokens", seen.tokens)):
        distances = [distance(seen.output[i], points[allowed[i]]) for i in queries]
        found[f"distance to the hull of {name}"] = float(np.median(distances))
        found[f"within the hull of {name}"] = float(np.mean(np.array(distances) < 1e-3))
    return found


def concordance(scores: Tensor, weights: Tensor, allowed: Tensor) -> float:
    """Of all pairs of keys whose weights differ, the share that scores put in the same order; queries from `FIRST` on.

    Args:
        scores: [heads, queries, keys].
        weights: likewise.
        allowed: bool[queries, keys].

    Cost: heads * queries * keys^2 comparisons.

    >>> concordance(torch.tensor([[[1.0, 2.0, 3.0]]] * 1).expand(1, 9, 3), torch.tensor([[[0.1, 0.7, 0.2]]]).expand(1,
    ...     9, 3), torch.ones(9, 3, dtype=torch.bool))
    0.6666666666666666
    """
    same = total = 0
    for query in range(FIRST, scores.shape[1]):
        keys = allowed[query]
        up = [(one := side[:, query, keys])[:, :, None] - one[:, None, :] for side in (scores, weights)]
        differ = up[1] > 0
        same += int((differ & (up[0] > 0)).sum())
        total += int(differ.sum())
    return same / total if total else 1.0


def distance(point: Tensor, corners: Tensor) -> float:
    """From a point to the convex hull of others, as a share of the point's norm.

    The nearest point of a hull to 0 minimises |P w|^2 + (1 - sum w)^2 over w >= 0, up to a factor of w.
    """
    size = float(point.norm())
    if size == 0:
        return float(corners.norm(dim=1).min() > 0)
    shifted = ((corners - point) / size).numpy()
    system = np.vstack([shifted.T, np.ones(len(shifted))])
    target = np.zeros(len(system))
    target[-1] = 1.0
    weights, _ = cast("tuple[npt.NDArray[np.float64], float]", nnls(system, target, maxiter=50 * len(shifted)))
    return float(np.linalg.norm(shifted.T @ (weights / weights.sum())))


def averaged(rows: Sequence[Mapping[str, float]]) -> dict[str, float]:
    """Of a text, over layers: the mean; of errors the largest."""
    return {
        name: float(np.max([row[name] for row in rows]) if "error" in name else np.mean([row[name] for row in rows]))
        for name in rows[0]
    }


def _recorded(held: Mapping[str, Tensor], weight: Tensor) -> Recorded:
    one = {name: value.detach().double().cpu() for name, value in held.items()}
    one["residual"], one["tokens"] = one["residual"][0], one["tokens"][0]
    heads = len(one["query"])
    for side in ("key", "value"):
        one[side] = one[side].repeat_interleave(heads // len(one[side]), dim=0)
    weight = weight.detach().double().cpu()
    output = one["heads"].flatten(1) @ weight.T
    return Recorded(**one, output=output, values=one["value"].transpose(0, 1).flatten(1) @ weight.T)


def _remember(module: nn.Module, held: dict[str, Tensor], name: str) -> Any:
    def hook(_: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        held[name] = args[0] if args else kwargs["hidden_states"]

    return module.register_forward_pre_hook(hook, with_kwargs=True)


def _around(model: nn.Module, site: Site) -> nn.Module:
    return model.get_submodule(site.name.rpartition(".")[0])


def _weight(model: nn.Module, site: Site) -> Tensor:
    """Of the output projection, (out, in) as `nn.Linear` stores it."""
    for module in (site.module, _around(model, site)):
        for name in _OUTPUTS:
            try:
                found = module.get_submodule(name)
            except AttributeError:
                continue
            if isinstance(found.weight, Tensor):
                return found.weight if isinstance(found, nn.Linear) else found.weight.T  # GPT-2's Conv1D is (in, out)
    raise UnsupportedArchitecture(f"{site.name}: no output projection by the names {', '.join(_OUTPUTS)}")
