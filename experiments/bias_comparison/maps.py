"""What a trained bias does: on sums in words (daa, Fig. 1, 6), and how tuning changes it (sec. 6)."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import nullcontext
from typing import Final

import torch
from torch import Tensor, nn

from attnflow.bias import DotConfig, attach, capture
from attnflow.bias.kind import layer_biases
from experiments.bias_comparison.probes import sums

WORDS: Final = (
    "start", "Q", ":", "John", "has", "5", "apples", ".", "He", "buys", "6", "more", ".", "A", ":", "5", "+", "6", "=",
)  # fmt: skip
OPERANDS: Final = (5, 10, 15, 17)  # places of the numbers
_PROBLEMS: Final = 32
_ROWS: Final = 8


def look_at_sums(model: nn.Module, generator: torch.Generator) -> dict[str, object]:
    """Bias and attention at "=", means over problems.

    Returns:
        "bias": [layer][place], row-centred, of the query "="; "map": [layer][query][place] of all queries; "weights":
        [layer][place], mean over heads; "contrast": [layer], mean bias of the four numbers less that of all else;
        "mass": [layer], weight on the four numbers.
    """
    problems = sums(_PROBLEMS, generator).tokens[:, : len(WORDS)]
    bare = next(layer_biases(model), None) is None
    bias, weights = list[Tensor](), list[Tensor]()
    # A bias of zero changes nothing, and lets `capture` see the weights of the model as it is.
    with attach(model, DotConfig(layers="every")) if bare else nullcontext():
        for problem in problems:
            seen = capture(model, problem, base=False)
            bias.append(torch.stack([one.bias.mean(dim=0) for one in seen]))
            weights.append(torch.stack([one.weights.mean(dim=0) for one in seen]))
    whole = torch.stack(bias).mean(dim=0)
    last, weight = whole[:, -1], torch.stack(weights).mean(dim=0)[:, -1]
    numbers = torch.zeros(len(WORDS), dtype=torch.bool)
    numbers[list(OPERANDS)] = True
    return {
        "bias": last.tolist(),
        "map": whole.tolist(),
        "weights": weight.tolist(),
        "contrast": (last[:, numbers].mean(dim=1) - last[:, ~numbers].mean(dim=1)).tolist(),
        "mass": weight[:, numbers].sum(dim=1).tolist(),
    }


def map_of(model: nn.Module, rows: Tensor) -> list[Tensor]:
    """The row-centred bias of each layer on some rows, [rows, queries, keys]."""
    maps = [[one.bias.mean(dim=0) for one in capture(model, row, base=False)] for row in rows[:_ROWS]]
    return [torch.stack(layer) for layer in zip(*maps, strict=True)]


def strength(model: nn.Module, rows: Tensor) -> dict[int, float]:
    """|B| of each layer: root mean square of the row-centred bias over all pairs of some rows."""
    seen = [capture(model, row, heads="all", queries="all", base=False) for row in rows]
    squares = {one.layer: sum(float(m.layer(one.layer).bias.double().square().sum()) for m in seen) for one in seen[0]}
    pairs = {one.layer: sum(int(m.layer(one.layer).allowed.sum()) for m in seen) for one in seen[0]}
    return {layer: (squares[layer] / pairs[layer]) ** 0.5 for layer in squares}


def similarity(one: Sequence[Tensor], other: Sequence[Tensor]) -> dict[str, list[float]]:
    """By layer: correlation of two biases on the same rows, and size of the second over that of the first."""
    correlation, size = list[float](), list[float]()
    for a, b in zip(one, other, strict=True):
        # Both have mean 0 in every row already.
        norms = float(a.norm()), float(b.norm())
        correlation.append(float((a * b).sum()) / max(norms[0] * norms[1], 1e-30))
        size.append(norms[1] / max(norms[0], 1e-30))
    return {"correlation": correlation, "size": size}
