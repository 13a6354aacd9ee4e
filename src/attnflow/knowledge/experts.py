"""Layers of experts whose neurons are entries of one base: a token reads those of the experts that the router chose."""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from dataclasses import dataclass, replace

import torch
from jaxtyping import Float
from torch import Tensor, nn
from torch.nn import functional

from attnflow.knowledge.base import LayeredKnowledge
from attnflow.knowledge.layered import LayerEntries
from attnflow.knowledge.retrieval import chosen, straight_through
from attnflow.models.feed_forward import PackedExperts, by_expert


@dataclass(frozen=True, eq=False)
class _Routed:
    """The tokens routed to one expert, with the scores and weights of its entries."""

    expert: int
    tokens: Tensor  # which, [n]
    places: Tensor  # at which of their choices, [n]
    routing: Tensor  # weights of the router, [n, 1]
    scores: list[Tensor]  # of each part, [n, entries]
    weights: Tensor  # [n, entries], not yet multiplied by the router's


class ExpertEntries(LayerEntries):
    """Replaces the module that held a layer's experts: y = sum_x r_x (sum_e weight_e value_e + b2_x).

    x runs over the chosen experts, e over the entries of x; r is the router's weight. The activation and b2 remain
    those of the model's own module, `own`. Llama 4 multiplies the tokens by r before the experts, so r is in the scores
    there.
    """

    def __init__(self, base: LayeredKnowledge, layer: int, form: PackedExperts, own: nn.Module) -> None:
        super().__init__(base, layer)
        self.form, self.own = form, own

    @property
    def output_bias(self) -> Tensor | None:
        """None, because the bias of an expert's output depends on the router."""
        return None

    def added(self, output: Tensor) -> Float[Tensor, "*tokens model_dim"]:
        """Sum over the experts, for models that do this after the module."""
        return output.unflatten(0, (self.form.num_experts, -1)).sum(dim=0) if self.form.sorted else output

    def forward(self, *args: Tensor, **kwargs: Tensor) -> Float[Tensor, "*tokens model_dim"]:
        """Compute the replaced module's output from the entries; retrieval saves nothing here."""
        given = self._bound(*args, **kwargs) if kwargs else args
        hidden = given[0]
        routed = list(self._sorted(hidden) if self.form.sorted else self._chosen(hidden, given[1], given[2]))
        if self.observer is not None or self.retrieval is not None:
            places = self.form.num_experts if self.form.sorted else given[1].shape[-1]
            routed = self._watched(routed, hidden.shape[:-1].numel() // (places if self.form.sorted else 1), places)
        if self.form.sorted:
            return torch.cat([self._written(one) for one in routed]).view(hidden.shape)
        written = torch.zeros_like(hidden).flatten(0, -2)
        for one in routed:
            written.index_add_(0, one.tokens, (self._written(one) * one.routing).to(written.dtype))
        return written.view(hidden.shape)

    def _bound(self, *args: Tensor, **kwargs: Tensor) -> tuple[Tensor, ...]:
        return tuple(inspect.signature(self.own.forward).bind(*args, **kwargs).arguments.values())

    def _chosen(self, hidden: Tensor, index: Tensor, routing: Tensor) -> Iterator[_Routed]:
        tokens, index, routing = (one.flatten(0, -2) for one in (hidden, index, routing))
        for expert, rows, places in by_expert(index, self.form.num_experts):
            yield self._weighed(expert, rows, places, routing[rows, places, None], tokens[rows])

    def _sorted(self, hidden: Tensor) -> Iterator[_Routed]:
        """Yield every expert with all tokens, which are already multiplied by the router's weight."""
        for expert, inputs in enumerate(hidden.flatten(0, -2).unflatten(0, (self.form.num_experts, -1))):
            rows = torch.arange(len(inputs), device=hidden.device)
            yield self._weighed(expert, rows, torch.full_like(rows, expert), inputs.new_ones(1, 1), inputs)

    def _weighed(self, expert: int, tokens: Tensor, places: Tensor, routing: Tensor, inputs: Tensor) -> _Routed:
        entries, layout = self.base.entries[self.base.rows(self.layer, expert)], self.layout
        scores = [
            functional.linear(inputs, entries[:, layout.key(part)], entries[:, layout.threshold(part)])
            for part in layout.parts
        ]
        return _Routed(expert, tokens, places, routing, scores, self.form.weigh(self.own, scores))

    def _written(self, one: _Routed) -> Tensor:
        """Compute an expert's output before the router's weight."""
        values = self.base.entries[self.base.rows(self.layer, one.expert), self.layout.value]
        bias = self.form.output_bias(self.own)
        return functional.linear(one.weights, values.T, None if bias is None else bias[one.expert])

    def _watched(self, routed: list[_Routed], tokens: int, places: int) -> list[_Routed]:
        """Report the reading to the observer, and keep only the weights that `retrieval` selects."""
        counts = [one.weights.shape[1] for one in routed]
        like = routed[0].weights if routed else self.base.entries
        parts, width = len(self.layout.parts), max(counts, default=0)
        shape = (tokens, places, width)
        rows = torch.full(shape, -1, device=like.device)
        weights, scores = like.new_zeros(shape), like.new_zeros(parts, *shape)
        for one, count in zip(routed, counts, strict=True):
            mine = self.base.rows(self.layer, one.expert)
            first = mine.start - self.base.rows(self.layer).start
            rows[one.tokens, one.places, :count] = torch.arange(first, first + count, device=like.device)
            weights[one.tokens, one.places, :count] = (one.weights * one.routing).detach().to(like)
            scores[:, one.tokens, one.places, :count] = torch.stack(one.scores).detach().to(like)
        flat = weights.flatten(1)
        reads_all = self.reads_all(flat)
        if self.observer is not None:
            self.observer(self.reading(rows.flatten(1), scores.flatten(2), flat, reads_all))
        if reads_all or self.retrieval is None:
            return routed
        left = chosen(flat.abs(), self.retrieval).view(shape)
        training = self.training and torch.is_grad_enabled()
        read: list[_Routed] = []
        for one, count in zip(routed, counts, strict=True):
            sparse = one.weights.masked_fill(~left[one.tokens, one.places, :count], 0)
            read.append(replace(one, weights=straight_through(sparse, one.weights) if training else sparse))
        return read
