"""One layer that reads a shared base, all of it or the best entries, and reports its readings to observers."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Final, cast

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn

from attnflow._core.checks import integer
from attnflow.knowledge.attention import ACTIVATIONS, CONSTANT, GeneralizedCrossAttention, weigh
from attnflow.knowledge.retrieval import BOUNDED, Certificate, Retrieval, best, certify, sum_of_rows
from attnflow.knowledge.store.source import EntrySource

_BLOCK: Final = 1 << 15  # entries whose values are held at once


@dataclass(frozen=True, eq=False)
class LayerReading:
    """The entries that one layer read in one call.

    Attributes:
        layer: the number of the layer.
        ids: the entries that each token and head read (rows of a tensor or ids of a store, padded with -1),
            int64[*tokens, heads, read]; None if all were read, in order. With experts, these are all entries of the
            experts that the router chose.
        scores: scores with thresholds, for each part ("up", or "gate" and "up").
        weights: weights after the activation; 0 for padding.
        certificate: that of the search, with one element for each token and head, flattened; None if all were read.
        beside: vectors [*tokens, model_dim] that the layer wrote beside its entries and a bias, by name.
    """

    layer: int
    ids: Int[Tensor, "*tokens heads read"] | None
    scores: Float[Tensor, "parts *tokens heads read"]
    weights: Float[Tensor, "*tokens heads read"]
    certificate: Certificate | None = None
    beside: Mapping[str, Tensor] = field(default_factory=dict[str, Tensor])


def distinct(ids: Tensor) -> tuple[Tensor, Tensor]:
    """Return the distinct ids without -1, and each id's index among them (arbitrary for -1)."""
    distinct = ids[ids >= 0].unique()
    return distinct, torch.searchsorted(distinct, ids).clamp(max=max(len(distinct) - 1, 0))


Observer = Callable[[LayerReading], None]


class KnowledgeReader(nn.Module):
    """Generalized cross-attention of one layer to entries that all layers share."""

    def __init__(self, layer: int, attention: GeneralizedCrossAttention, retrieval: Retrieval | None = None) -> None:
        super().__init__()
        self.layer = integer("layer", layer)
        self.attention = attention
        self.retrieval = retrieval
        self.observer: Observer | None = None
        # Threshold columns that this layer needs in a source, and the first of them.
        self.columns = 0 if attention.threshold == CONSTANT else attention.parts * attention.num_heads
        self._first_column = layer * self.columns

    def threshold_columns(self, entries: Float[Tensor, "entries entry_dim"]) -> Float[Tensor, "entries columns"]:
        if not self.columns:
            return entries.new_zeros(len(entries), 0)
        return self.attention.thresholds(entries).flatten(0, 1).T

    def forward(
        self, hidden: Float[Tensor, "*tokens model_dim"], source: Float[Tensor, "entries entry_dim"] | EntrySource
    ) -> Float[Tensor, "*tokens model_dim"]:
        """Return what E, or a source with this layer's thresholds from column layer * columns on, adds to each token.

        Gradients reach E and the threshold network only if `source` is a tensor.
        """
        if isinstance(source, Tensor):
            return self._from_tensor(hidden, source)
        self.attention.check(hidden)
        queries = hidden.shape[:-1].numel() * self.attention.num_heads
        if self.retrieval is not None and not self.retrieval.reads_all(len(source.store), queries, copied=True):
            return self._from_source(hidden, source, self.retrieval)
        return self._read_all(hidden, *self.split(source.rows().to(self.attention.query)))

    def error_bound(
        self, reading: LayerReading, source: Float[Tensor, "entries entry_dim"] | EntrySource
    ) -> Float[Tensor, " tokens"]:
        """Bound the Euclidean error of each token (flattened) against reading all entries, up to float32 rounding.

        It is the sum over heads of certificate bound x largest value norm. Gated layers, and activations without such a
        bound, raise `ValueError`. Cost: it computes the values of all entries, in blocks.
        """
        attention = self.attention
        if reading.certificate is None:
            return reading.weights.new_zeros(reading.weights.shape[:-2].numel())
        name = next((name for name, function in ACTIVATIONS.items() if function is attention.activation), "")
        if attention.gated or name not in BOUNDED:
            raise ValueError(f"an error bound needs the activation {', '.join(BOUNDED)} and no gate, unlike this layer")
        entries = source if isinstance(source, Tensor) else self.split(source.rows().to(attention.query))[0]
        blocks, values = entries.detach().split(_BLOCK), attention.value.detach()
        norms = [torch.einsum("ne,hed->hnd", block, values).norm(dim=-1).amax(-1) for block in blocks]
        size = torch.stack(norms).amax(dim=0)
        bound = reading.certificate.error_bound(1.0, name).to(size.device).view(-1, attention.num_heads)
        # Infinity times 0 is 0 here: entries with values of norm 0 add nothing.
        return torch.where(size > 0, bound * size, 0).sum(dim=-1)

    def split(self, rows: Tensor) -> tuple[Tensor, Tensor]:
        """Split rows of a source into entries and this layer's thresholds [parts, heads, entries]."""
        self._check_width(rows.shape[1])
        attention = self.attention
        entries, columns = rows[:, : attention.entry_dim], rows[:, attention.entry_dim :]
        if not self.columns:
            return entries, attention.thresholds(entries)
        columns = columns[:, self._first_column :][:, : self.columns]
        return entries, columns.T.reshape(attention.parts, attention.num_heads, len(rows))

    def _check_width(self, width: int) -> None:
        needed = self._first_column + self.columns
        if width < self.attention.entry_dim + needed:
            raise ValueError(
                f"layer {self.layer} needs entries of width {self.attention.entry_dim} with {needed} threshold "
                f"columns ({self.columns} for each layer up to this one), but the source has rows of width {width}"
            )

    def _from_tensor(self, hidden: Tensor, entries: Tensor) -> Tensor:
        retrieval, attention = self.retrieval, self.attention
        if retrieval is None and self.observer is None:
            return attention(hidden, entries)
        attention.check(hidden, entries)
        training = self.training and torch.is_grad_enabled()
        thresholds = attention.thresholds(entries)
        queries = hidden.shape[:-1].numel() * attention.num_heads
        if retrieval is None or retrieval.reads_all(len(entries), queries, training):
            return self._read_all(hidden, entries, thresholds)
        if retrieval.search == "approximate":
            raise ValueError("an approximate search needs the index of a store: attach a store")
        scores = attention.score(hidden, entries, thresholds)
        ranked = scores[0].detach()
        rows = best(ranked, retrieval)
        if self.observer is not None:
            certificate = certify(ranked, rows, retrieval)
            self.observer(LayerReading(self.layer, rows, *self._retrieved(scores, rows), certificate))
        if retrieval.k is not None and not training:
            return attention.write(sum_of_rows(self._retrieved(scores, rows)[1], rows, entries))
        if retrieval.threshold is not None:
            chosen = ranked > retrieval.threshold
        else:
            chosen = torch.zeros_like(ranked, dtype=torch.bool).scatter(-1, rows, True)
        weights = self._weigh(scores, chosen)
        if training:  # these weights bit for bit, with the gradient of those of all entries
            of_all = weigh(scores, attention.activation)
            weights = weights.detach() + (of_all - of_all.detach())
        return attention.write(weights @ entries)

    def _from_source(self, hidden: Tensor, source: EntrySource, retrieval: Retrieval) -> Tensor:
        attention, heads = self.attention, self.attention.num_heads
        shape = (*hidden.shape[:-1], heads)
        queries = attention.project_query(hidden).reshape(attention.parts, -1, heads, attention.entry_dim)
        ranking, first = queries[0].detach(), self._first_column
        answers = [
            source.read(ranking[:, head], *((retrieval, first + head) if self.columns else (self._without(head), None)))
            for head in range(heads)
        ]
        self._check_width(cast(Tensor, answers[0].rows).shape[-1])
        most = max(answer.ids.shape[1] for answer in answers)
        ids = torch.stack([_padded(answer.ids, most, -1) for answer in answers], dim=1).to(hidden.device)
        rows = torch.stack([_padded(cast(Tensor, answer.rows), most, 0) for answer in answers], dim=1).to(hidden)
        vectors, columns = rows[..., : attention.entry_dim], rows[..., attention.entry_dim :]
        if self.columns:
            columns = columns[..., first:][..., : self.columns].unflatten(-1, (attention.parts, heads))
            thresholds = columns.diagonal(dim1=1, dim2=-1).permute(2, 0, 3, 1)  # [parts, tokens, heads, k]
        else:
            thresholds = attention.constant[:, None, :, None]
        scores = torch.einsum("pthe,thke->pthk", queries, vectors) + thresholds
        weights = self._weigh(scores, ids >= 0)
        if self.observer is not None:
            read = LayerReading(
                self.layer,
                ids.view(*shape, most),
                scores.view(len(scores), *shape, most),
                weights.view(*shape, most),
                Certificate.joined([answer.certificate for answer in answers]),
            )
            self.observer(read)
        return attention.write((weights.unsqueeze(-2) @ vectors).squeeze(-2)).view(hidden.shape)

    def _without(self, head: int) -> Retrieval:
        """Return the head's retrieval less its constant threshold, which the source's scores do not contain."""
        retrieval = cast(Retrieval, self.retrieval)
        if retrieval.threshold is None:
            return retrieval
        return replace(retrieval, threshold=retrieval.threshold - float(self.attention.constant[0, head].detach()))

    def _read_all(self, hidden: Tensor, entries: Tensor, thresholds: Tensor) -> Tensor:
        if self.observer is None:
            return self.attention.read_all(hidden, entries, thresholds)
        scores = self.attention.score(hidden, entries, thresholds)
        weights = weigh(scores, self.attention.activation)
        self.observer(LayerReading(self.layer, None, scores, weights))
        return self.attention.write(weights @ entries)

    def _retrieved(self, scores: Tensor, rows: Tensor) -> tuple[Tensor, Tensor]:
        """Compute scores and weights at rows, where -1 means no entry."""
        best = scores.gather(-1, rows.clamp(min=0).expand(len(scores), *rows.shape))
        return best, self._weigh(best, rows >= 0)

    def _weigh(self, scores: Tensor, present: Tensor) -> Tensor:
        lowest = torch.finfo(scores.dtype).min / 4  # finite: GELU of minus infinity is not a number
        return weigh(scores.masked_fill(~present, lowest), self.attention.activation).masked_fill(~present, 0)


def _padded(values: Tensor, width: int, fill: int) -> Tensor:
    missing = width - values.shape[1]
    return torch.cat([values, values.new_full((len(values), missing, *values.shape[2:]), fill)], dim=1)
