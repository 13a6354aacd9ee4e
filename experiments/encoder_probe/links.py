"""Where a bias, and attention's own scores, point: from a word to the one that it depends on, and back."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from contextlib import nullcontext
from typing import Final, Literal

import torch
from torch import Tensor, nn

from attnflow.bias import BiasMap, DotConfig, attach, capture
from attnflow.bias.kind import layer_biases
from experiments.encoder_probe.grammar import MASK, NUMBER, Sentence

Reading = Literal["masked", "visible"]
READINGS: Final[tuple[Reading, ...]] = ("masked", "visible")
_SMALLEST: Final = 1e-37  # of a weight whose logarithm is taken


def links(model: nn.Module, sentences: Sequence[Sentence]) -> dict[str, dict[str, list[float]]]:
    """What "bias" (row-centred B) and "scores" (row-centred q.k, mean over heads) say, reading by reading.

    "masked": the word that asks is shown as [MASK], so that the link is needed; "visible": the whole sentence is shown.

    Returns:
        "masked bias", "visible scores" and so on -> lists with a number for each layer: "points", the share of
        sentences with more from the dependent to its head than to the mean of the distractors, and "by", how much more;
        "one way", the share with more from the dependent to its head than from the head to it, and "one way by".
    """
    found: dict[str, dict[str, list[float]]] = {}
    bare = next(layer_biases(model), None) is None
    # A bias of zero changes nothing, and lets `capture` see the weights of the model as it is.
    with attach(model, DotConfig(layers="every")) if bare else nullcontext():
        for reading in READINGS:
            sums: dict[str, list[Tensor]] = {}
            for one in sentences:
                forth = _seen(model, one, one.dependent if reading == "masked" else None)
                back = _seen(model, one, one.head) if reading == "masked" else forth
                for what in ("scores",) if bare else ("bias", "scores"):
                    there, here = (torch.stack(list(tables(seen, what))) for seen in (forth, back))
                    to_head = there[:, one.dependent, one.head]
                    rest = there[:, one.dependent, list(one.distractors)].mean(dim=-1)
                    values = torch.stack([to_head - rest, to_head - here[:, one.head, one.dependent]])
                    sums.setdefault(f"{reading} {what}", []).append(values)
            found |= {name: _summed(torch.stack(values)) for name, values in sums.items()}
    return found


def tables(seen: BiasMap, what: str) -> Iterable[Tensor]:
    """One table [queries, keys] for each layer, row-centred: B, or the model's own scores without it.

    The logarithm of a weight is its score up to a number for each row, which centring takes away.
    """
    for one in seen:
        scores = one.weights_without.double().clamp(min=_SMALLEST).log()
        table = one.bias.double() if what == "bias" else scores - scores.mean(dim=-1, keepdim=True)
        yield table.mean(dim=0)


def _seen(model: nn.Module, sentence: Sentence, masked: int | None) -> BiasMap:
    tokens = torch.tensor(sentence.tokens)
    if masked is not None:
        tokens[masked] = NUMBER[MASK]
    return capture(model, tokens, heads="all", queries="all", base=False)


def _summed(values: Tensor) -> dict[str, list[float]]:
    """Of [sentences, (to the head less distractors, forth less back), layers]; a tie counts half."""
    shares = ((values > 0).double() + 0.5 * (values == 0)).mean(dim=0).tolist()
    means = values.mean(dim=0).tolist()
    return {"points": shares[0], "by": means[0], "one way": shares[1], "one way by": means[1]}
