"""`pairs`: how a head scores two tokens both ways, and how much of the difference comes from direction."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any, cast

import torch
from jaxtyping import Bool, Float
from torch import Tensor, nn

from attnflow._core.checks import integer
from attnflow._core.results import Result
from attnflow.geometry.in_use import LayerTokens, observe
from attnflow.models.subject import Loaded, Subject, Text
from attnflow.models.weights.attention import AttentionLayer, attention_layers


@dataclass(frozen=True, eq=False)
class PairScores(Result):
    """The scores of one head between all tokens of a text, both ways, and what M alone gives.

    Rows are queries and columns keys. Each row has mean 0 over the tokens that meet its query, since softmax ignores
    constants of a row. `scores[j, i]` of a causal model, i > j, is what its queries and keys give, and never computed.

    Attributes:
        model: name of the model.
        layer: number of the layer in its tower.
        head: number of the query head; None for the sum over the heads.
        tokens: their texts.
        scores: float64, before the softmax, with biases, positions and norms.
        form: float64, x_i^T M x_j.
        meet: bool, whether a query of the one may attend to the other, in either direction.
    """

    model: str
    layer: int
    head: int | None
    tokens: tuple[str, ...]
    scores: Float[Tensor, "queries keys"]
    form: Float[Tensor, "queries keys"]
    meet: Bool[Tensor, "queries keys"]

    @cached_property
    def symmetric(self) -> Float[Tensor, "queries keys"]:
        """The part (s_ij + s_ji) / 2 that both ways share; 0 where two tokens do not meet."""
        return ((self.scores + self.scores.T) / 2) * self.meet

    @cached_property
    def skew(self) -> Float[Tensor, "queries keys"]:
        """The part (s_ij - s_ji) / 2 that changes its sign; 0 where two tokens do not meet."""
        return ((self.scores - self.scores.T) / 2) * self.meet

    @cached_property
    def skew_of_form(self) -> Float[Tensor, "queries keys"]:
        """What the skew part of M explains of `skew`: x_i^T M_n x_j, times the factor that fits best.

        The factor is 1/sqrt(head_dim) but for norms of queries and keys. The rest is orthogonal to it, and comes from
        biases, positions and norms.
        """
        form = ((self.form - self.form.T) / 2) * self.meet
        squares = form.square().sum()
        return form * torch.where(squares > 0, (self.skew * form).sum() / squares, 0.0)

    def rows(self) -> list[Mapping[str, object]]:
        """A row for each pair that meets, the later token as the query."""
        i, j = (self.meet & self.meet.new_ones(self.meet.shape).tril(-1)).nonzero(as_tuple=True)
        numbers = (i, j, self.scores[i, j], self.scores[j, i], 2 * self.skew[i, j], 2 * self.skew_of_form[i, j])
        return [
            {
                "query": query, "key": key, "query_token": self.tokens[query], "key_token": self.tokens[key],
                "score": score, "reversed": back, "difference": difference, "from_form": form,
            }
            for query, key, score, back, difference, form in zip(*(each.tolist() for each in numbers), strict=True)
        ]  # fmt: skip


def pairs(
    model: nn.Module | Loaded,
    inputs: Text,
    layer: int,
    head: int | None = None,
    *,
    tower: str = "",
) -> PairScores:
    """Split a head's scores between the tokens of a text into what both ways share and what comes from direction.

    `s_ij = q_i . k_j`, row-centred, is the sum of (s_ij + s_ji) / 2 and (s_ij - s_ji) / 2. Without biases, positions
    and norms of queries and keys these are x_i^T M_s x_j and x_i^T M_n x_j with the symmetric and the skew part of M
    (geometry, prop. S1.17), but for what row-centring takes away. `docs/maths.md` has the rest.

    Args:
        model: in memory, or what `af.load_model` returned.
        inputs: a text, token ids, or the model's named inputs of one sequence.
        layer: number of the layer.
        head: number of the query head; None adds the scores of all.
        tower: such as "encoder" or "decoder", in models that have several.

    Returns:
        All pairs, on the CPU in float64.

    Raises:
        ValueError: no such layer or head, several sequences, or fewer than 2 tokens.
        UnsupportedArchitecture: the queries and keys of this layer are unknown.

    Cost: a forward pass, and memory for some tables of tokens x tokens.

    >>> from transformers import BertConfig, BertModel
    >>> model = BertModel(BertConfig(vocab_size=32, hidden_size=16, intermediate_size=32, num_hidden_layers=1,
    ...     num_attention_heads=2))
    >>> found = pairs(model, [5, 6, 7, 8], layer=0, head=1)
    >>> torch.allclose(found.symmetric + found.skew, found.scores * found.meet)
    True
    """
    subject = Subject.of(model).inside
    subject.require_whole("pairs")
    layer = integer("layer", layer)
    layers = [place for place in attention_layers(subject) if place.kind == "self" and tower in ("", place.tower)]
    chosen = [place for place in layers if place.layer == layer]
    if len(chosen) != 1:
        towers = ", ".join(dict.fromkeys(repr(place.tower) for place in layers))
        have = f"layers {sorted({place.layer for place in layers})} in towers {towers}"
        raise ValueError(f"expected a layer that is there once, got layer {layer} and tower {tower!r}: it has {have}")
    head = None if head is None else integer("head", head, 0, chosen[0].num_heads - 1)
    tensors = subject.read(inputs)
    results: list[PairScores] = []

    def see(place: AttentionLayer, tokens: LayerTokens) -> None:
        size = len(tokens.positions)
        if size < 2:
            raise ValueError("a pair needs two tokens, got one: pass at least 2 tokens")
        meet = torch.ones(size, size, dtype=torch.bool) if tokens.meet is None else tokens.meet.cpu()
        tables: list[Tensor] = []
        for query, key in tokens.sides if head is not None else tokens.summed:
            score = (query[head or 0].double() @ key[head or 0].double().T).cpu()
            tables.append(score - (score * meet).sum(-1, keepdim=True) / meet.sum(-1, keepdim=True))
        name = "decoder_input_ids" if place.tower == "decoder" and "decoder_input_ids" in tensors else "input_ids"
        positions = cast("list[int]", tokens.positions.tolist())
        ids = tensors[name][0].tolist() if name in tensors else None
        texts = map(str, positions) if ids is None else subject.texts(ids[position] for position in positions)
        meet = meet & ~torch.eye(size, dtype=torch.bool)
        results.append(PairScores(subject.name, layer, head, tuple(texts), *cast(Any, tables), meet=meet))

    observe(subject, chosen, tensors, see)
    if len(results) != 1:
        raise ValueError(f"expected one sequence and one call of the layer, got {len(results)}: pass one sequence")
    return results[0]
