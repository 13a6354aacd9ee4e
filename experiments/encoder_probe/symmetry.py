"""How symmetric the attention of an encoder is on real sentences: scores, what softmax sees of them, and weights."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from functools import partial
from statistics import fmean
from typing import Any, Final, cast

import torch
from torch import Tensor, nn
from transformers import BertConfig, BertModel

READINGS: Final = ("scores", "row-centred", "double-centred", "weights")


def antisymmetric(table: Tensor) -> Tensor:
    """Share of the squared norm of square tables [..., n, n] in their antisymmetric part.

    0: symmetric; 1/2: entries on both sides of the diagonal have nothing to do with one another; 1: antisymmetric.
    """
    part = (table - table.mT) / 2
    return part.square().sum(dim=(-2, -1)) / table.square().sum(dim=(-2, -1)).clamp(min=1e-300)


def shares(scores: Tensor) -> dict[str, Tensor]:
    """`antisymmetric` of scores [..., n, n] in each reading; weights are taken less their mean, 1/n.

    Softmax does not see a number added to a row, so that scores may be symmetric up to such numbers. Centring rows and
    columns removes them all: of S - S^T = c_j - c_i nothing is left. It is the kindest reading, and an unkind one to
    keys that everybody attends to, which softmax does see.
    """
    rows = scores - scores.mean(dim=-1, keepdim=True)
    weights = scores.softmax(dim=-1)
    tables = (scores, rows, rows - rows.mean(dim=-2, keepdim=True), weights - 1 / scores.shape[-1])
    return {name: antisymmetric(table) for name, table in zip(READINGS, tables, strict=True)}


def attention_scores(model: nn.Module, inputs: Mapping[str, Tensor]) -> Tensor:
    """q.k / sqrt(head_dim) of one sequence in a BERT, with biases: [layers, heads, tokens, tokens]."""
    heads = int(cast(Any, model).config.num_attention_heads)
    vectors: dict[str, list[Tensor]] = {"query": [], "key": []}

    def keep(name: str, module: nn.Module, given: object, output: Tensor) -> None:
        del module, given
        vectors[name].append(output[0].unflatten(-1, (heads, -1)).transpose(0, 1).double())

    hooks = [
        module.register_forward_hook(partial(keep, path.rpartition(".")[2]))
        for path, module in model.named_modules()
        if path.endswith((".attention.self.query", ".attention.self.key"))
    ]
    try:
        with torch.no_grad():
            model(**inputs)
    finally:
        for hook in hooks:
            hook.remove()
    query, key = (torch.stack(vectors[name]) for name in ("query", "key"))
    return query @ key.mT / math.sqrt(query.shape[-1])


def measured(model: nn.Module, sentences: Sequence[Mapping[str, Tensor]]) -> dict[str, dict[str, list[list[float]]]]:
    """Mean shares over sentences of every head, [layers][heads], on all tokens and without the first and the last one.

    These are [CLS] and [SEP], which heads without anything else to look at attend to.
    """
    found: dict[str, dict[str, list[Tensor]]] = {}
    for inputs in sentences:
        scores = attention_scores(model, inputs)
        for tokens, part in {"all tokens": scores, "words": scores[..., 1:-1, 1:-1]}.items():
            for name, values in shares(part).items():
                found.setdefault(tokens, {}).setdefault(name, []).append(values)
    return {
        tokens: {name: torch.stack(values).mean(dim=0).tolist() for name, values in readings.items()}
        for tokens, readings in found.items()
    }


def untrained(model: nn.Module, symmetric: bool, seed: int = 0) -> BertModel:
    """A BERT of the same sizes with random weights; `symmetric` makes its keys its queries, which makes S symmetric."""
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        made = BertModel(BertConfig(**cast(Any, model).config.to_dict()))
    for path, module in list(made.named_modules()):
        if symmetric and path.endswith(".attention.self"):
            cast(Any, module).key.load_state_dict(cast(Any, module).query.state_dict())
    return made.eval()


def middle(heads: Sequence[Sequence[float]]) -> list[float]:
    """Median over all heads, with the quartiles and the least."""
    values = torch.tensor([value for layer in heads for value in layer], dtype=torch.float64)
    return [float(values.quantile(share)) for share in (0.5, 0.25, 0.75, 0.0)]


def form(model: nn.Module) -> float:
    """Mean over heads of the antisymmetric share of W_q^T W_k, from the weights alone."""
    found: list[float] = []
    heads = int(cast(Any, model).config.num_attention_heads)
    for path, module in model.named_modules():
        if path.endswith(".attention.self"):
            query, key = (
                getattr(module, name).weight.detach().double().unflatten(0, (heads, -1)) for name in ("query", "key")
            )
            found.append(float(antisymmetric(query.mT @ key).mean()))
    return fmean(found)
