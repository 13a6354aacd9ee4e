"""`QueryBias`: what the bias of each layer does for one query."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Final

from attnflow._core.markup import token_label
from attnflow._core.results import Result

_SHOWN: Final = 3  # keys of each side in a line of text


@dataclass(frozen=True)
class LayerQuery(Result):
    """One layer, for one query.

    Attributes:
        layer: its number in the model.
        name: path of its attention module.
        strength: root mean square of the row-centred bias over all captured queries.
        moved: weight that the bias moves from one key to another, mean over the captured queries.
        energy: rank -> share of the row-centred bias that a bias of that rank could give.
        bias: row-centred bias of each key; None where the mask forbids the pair.
    """

    layer: int
    name: str
    strength: float
    moved: float
    energy: dict[int, float]
    bias: tuple[float | None, ...]


@dataclass(frozen=True)
class QueryBias(Result):
    """What one query is drawn to (+) and turned away from (-); printed, a line for each layer.

    Attributes:
        model: its name.
        tokens: the text of each key.
        query: position of the query.
        head: the head, or None for the mean.
        produced: the token that was generated at the query; None outside generation.
        layers: what was captured.
        weights: post-softmax weights of the keys, mean over layers.
        weights_base: those of the base model; None if it was not run.
    """

    model: str
    tokens: tuple[str, ...]
    query: int
    head: int | None
    produced: str | None
    layers: tuple[LayerQuery, ...]
    weights: tuple[float, ...]
    weights_base: tuple[float, ...] | None

    def rows(self) -> Sequence[Mapping[str, object]]:
        """A row for each allowed key of each layer."""
        return [
            {"layer": one.layer, "query": self.query, "key": key, "key_token": self.tokens[key], "bias": bias}
            for one in self.layers
            for key, bias in enumerate(one.bias)
            if bias is not None
        ]

    def __str__(self) -> str:
        name = token_label(self.tokens[self.query]) + (f" → {token_label(self.produced)}" if self.produced else "")
        head = "" if self.head is None else f", head {self.head}"
        lines = [f"query {name} at position {self.query}{head}", ""]
        lines.append(f"{'layer':<6}{'strength':>9}{'moved':>8}  drawn to / turned away from")
        for one in self.layers:
            keys = {key: bias for key, bias in enumerate(one.bias) if bias}
            order = sorted(keys, key=lambda key: -keys[key])
            labels = [f"{token_label(self.tokens[key])} {keys[key]:+.2f}" for key in order]
            drawn = sum(bias > 0 for bias in keys.values())
            toward, away = labels[:drawn][:_SHOWN], labels[drawn:][::-1][:_SHOWN]
            words = f"{', '.join(toward) or 'nothing'} / {', '.join(away) or 'nothing'}"
            lines.append(f"{one.layer:<6}{one.strength:>9.3g}{100 * one.moved:>7.1f}%  {words}")
        return "\n".join(lines)
