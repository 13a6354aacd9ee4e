"""The layers that read entries, among them feed-forward layers and experts with their neurons as entries."""

from __future__ import annotations

import inspect
import re
from abc import ABC, abstractmethod
from collections.abc import Generator, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from typing import cast

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn
from torch.nn import functional

from attnflow.knowledge.base import EntryColumns, EntryLayout, LayeredKnowledge
from attnflow.knowledge.reader import KnowledgeReader, LayerReading, Observer
from attnflow.knowledge.retrieval import Retrieval
from attnflow.knowledge.store.source import EntrySource
from attnflow.models.anatomy.feed_forward import PackedExperts, by_expert


class LayerReader(ABC):
    """A layer that reads entries: the common interface of converted models, modular models and readers of a store.

    Attributes:
        layer: the number of the layer, from 0.
        retrieval: which entries it reads; None for all. A converted layer always reads all.
        observer: a function that is called with each `LayerReading` and must not change it; or None.
        letter: of an entry's name: "N" for a neuron, "F" for a feature, "P" for a column of a per-layer embedding, "S"
            for an entry of an attached store.
        covers: modules, as paths beside it, whose own entries it takes the place of.
    """

    letter: str = "N"
    covers: tuple[str, ...] = ()
    layer: int
    retrieval: Retrieval | None
    observer: Observer | None

    @property
    @abstractmethod
    def num_entries(self) -> int:
        """The number of entries that this layer may read."""

    @property
    def span(self) -> int:
        """How many numbers the entries of a head take: between the ids of a store there may be gaps."""
        return self.num_entries

    @property
    def output_bias(self) -> Tensor | None:
        """b2, [model_dim]; None also for experts, where it depends on the router."""
        return None

    def every(self) -> Int[Tensor, " entries"]:
        return torch.arange(self.num_entries)

    @abstractmethod
    def ids(self, positions: Int[Tensor, "..."]) -> Int[Tensor, "..."]:
        """Map positions of a `LayerReading` (elements of its `ids`, or indices if all were read) to ids of entries."""

    @abstractmethod
    def values(self, positions: Int[Tensor, " entries"]) -> Float[Tensor, "heads entries model_dim"]:
        """What the entries at these positions add to the residual stream at weight 1, for each head."""

    @abstractmethod
    def keys(self, positions: Int[Tensor, " entries"]) -> Float[Tensor, "parts heads entries key_dim"]:
        """The keys of the entries at these positions, to compare queries with."""

    @abstractmethod
    def thresholds(self, positions: Int[Tensor, " entries"]) -> Float[Tensor, "parts heads entries"]:
        """The thresholds of the entries at these positions, which scores contain."""

    def added(self, output: Tensor) -> Float[Tensor, "*tokens model_dim"]:
        return output

    def received(self, gradient: Tensor) -> Float[Tensor, "*tokens model_dim"]:
        """The gradient by what the layer adds to each token, from that by its output."""
        return gradient

    def error_bound(self, reading: LayerReading) -> Float[Tensor, " tokens"]:
        """Bound the Euclidean distance of this layer's output of each token from the output of reading all entries.

        It is 0 if all were read, and infinite after an approximate search. Gated cross-attention, or an activation
        without a bound, raises `ValueError`.
        """
        return reading.weights.new_zeros(reading.weights.shape[:-2].numel())


def reads_entries(model: nn.Module) -> bool:
    """Whether a model reads entries: it is converted, modular, or has a store attached."""
    return any(isinstance(module, LayerReader) for module in model.modules())


def readers(model: nn.Module) -> list[LayerReader]:
    """Return the layers of a model that read entries, in order; a model without any raises `ValueError`."""
    hidden = covered(model)
    layers: list[LayerReader] = [
        module
        for path, module in model.named_modules()
        if isinstance(module, LayerReader) and not f"{path}.".startswith(hidden)
    ]
    if not layers:
        raise ValueError(f"{type(model).__name__} reads no knowledge base: call af.knowledge.from_ffn(model)")
    return layers


def covered(model: nn.Module) -> tuple[str, ...]:
    """Prefixes of the paths of modules whose entries others take the place of."""
    found = [(path.rpartition(".")[0], m.covers) for path, m in model.named_modules() if isinstance(m, LayerReader)]
    return tuple(f"{beside}.{place}.".lstrip(".") for beside, places in found for place in places)


def numbering(model: nn.Module) -> dict[LayerReader, tuple[int, int]]:
    """For each layer that reads entries: the number of the model's layer, and that of its first entry within it.

    Readers of one layer, such as experts and shared experts, follow one another: offset + head * span + place.
    """
    taken: dict[tuple[str, str], int] = {}
    places: dict[LayerReader, tuple[int, int]] = {}
    for path, module in model.named_modules():
        if isinstance(module, LayerReader):
            layer = re.match(r"(.*?\.(\d+))(?:\.|$)", path)
            where, number = (path, module.layer) if layer is None else (layer[1], int(layer[2]))
            key = where, module.letter
            places[module] = number, taken.get(key, 0)
            taken[key] = taken.get(key, 0) + module.span * len(module.values(module.every()[:1]))
    return places


def model_layers(model: nn.Module) -> dict[int, int]:
    """For each number of a converted layer that reads entries: the number of the model's layer."""
    return {one.layer: layer for one, (layer, _) in numbering(model).items() if isinstance(one, LayerEntries)}


@contextmanager
def observed(observers: Sequence[tuple[LayerReader, Observer | None]]) -> Generator[None]:
    before = [reader.observer for reader, _ in observers]
    try:
        for reader, observer in observers:
            reader.observer = observer
        yield
    finally:
        for (reader, _), observer in zip(observers, before, strict=True):
            reader.observer = observer


def unobserved(model: nn.Module) -> AbstractContextManager[None]:
    """Remove all observers of a model's layers inside the block: readings for our own use are counted by nobody."""
    return observed([(reader, None) for reader in readers(model)])


class SharedReader(KnowledgeReader, LayerReader):
    """A layer that reads entries that all layers share: rows of a matrix, or entries of a source."""

    @abstractmethod
    def current(self) -> Tensor | EntrySource:
        """The matrix E or the source that the layer reads now."""

    @property
    def num_entries(self) -> int:
        now = self.current()
        return len(now if isinstance(now, Tensor) else now.store)

    @property
    def span(self) -> int:
        return 1 + int(self.every().max()) if self.num_entries else 0

    @property
    def output_bias(self) -> Tensor | None:
        return self.attention.output_bias

    def every(self) -> Int[Tensor, " entries"]:
        now = self.current()
        return super().every() if isinstance(now, Tensor) else now.store.ids()

    def ids(self, positions: Int[Tensor, "..."]) -> Int[Tensor, "..."]:
        """Return the positions: rows of E are their own ids, and positions in a source are ids."""
        return positions

    def values(self, positions: Int[Tensor, " entries"]) -> Float[Tensor, "heads entries model_dim"]:
        entries = self._rows(positions)[:, : self.attention.entry_dim]
        return torch.einsum("ne,hed->hnd", entries, self.attention.value)

    def keys(self, positions: Int[Tensor, " entries"]) -> Float[Tensor, "parts heads entries key_dim"]:
        return torch.einsum("ne,phek->phnk", self._rows(positions)[:, : self.attention.entry_dim], self.attention.key)

    def thresholds(self, positions: Int[Tensor, " entries"]) -> Float[Tensor, "parts heads entries"]:
        """B1(E), or the thresholds that the source stores."""
        now = self.current()
        if isinstance(now, Tensor):
            return self.attention.thresholds(now)[..., positions]
        return self.split(self._rows(positions))[1]

    def error_bound(
        self, reading: LayerReading, source: Tensor | EntrySource | None = None
    ) -> Float[Tensor, " tokens"]:
        return super().error_bound(reading, self.current() if source is None else source)

    def _rows(self, positions: Tensor) -> Tensor:
        now = self.current()
        return now[positions] if isinstance(now, Tensor) else now.rows(positions.cpu()).to(self.attention.value)


class LayerEntries(nn.Module, LayerReader):
    base: LayeredKnowledge

    def __init__(self, base: LayeredKnowledge, layer: int) -> None:
        super().__init__()
        # Not a child: the base is registered once, at the model, and its parameter must not appear once a layer.
        object.__setattr__(self, "base", base)
        self.layer = layer
        self.observer = None

    @property
    def retrieval(self) -> Retrieval | None:
        """Always None: a converted layer reads all its entries, since reading only the best saved nothing."""
        return None

    @retrieval.setter
    def retrieval(self, wanted: Retrieval | None) -> None:  # pyright: ignore[reportIncompatibleVariableOverride]
        if wanted is not None:
            raise ValueError("a converted layer reads all its entries: a retrieval is for modular models and readers")

    @property
    def entries(self) -> Float[Tensor, "entries entry_dim"]:
        return self.base.block(self.layer)

    @property
    def weight(self) -> Float[Tensor, "model_dim entries"]:
        return self.base.columns(self.layer).values.T

    @property
    def layout(self) -> EntryLayout:
        return self.base.layouts[self.layer]

    @property
    def num_entries(self) -> int:
        return len(self.entries)

    def ids(self, positions: Int[Tensor, "..."]) -> Int[Tensor, "..."]:
        places = positions.cpu()  # as the ids are, wherever the model is
        ids = self.base.ids[self.base.rows(self.layer)][places.clamp(min=0)]
        return ids.masked_fill(places < 0, -1).to(positions.device)

    def values(self, positions: Int[Tensor, " entries"]) -> Float[Tensor, "1 entries model_dim"]:
        return self.weight.T[positions].unsqueeze(0)

    def keys(self, positions: Int[Tensor, " entries"]) -> Float[Tensor, "parts 1 entries model_dim"]:
        rows = self.entries[positions]
        return torch.stack([rows[:, self.layout.key(part)] for part in self.layout.parts]).unsqueeze(1)

    def thresholds(self, positions: Int[Tensor, " entries"]) -> Float[Tensor, "parts 1 entries"]:
        layout = self.layout
        return torch.stack([self.entries[positions, layout.threshold(part)] for part in layout.parts]).unsqueeze(1)

    def observe(self, ids: Tensor | None, scores: Tensor, weights: Tensor) -> None:
        """Give the observer the `LayerReading` of tables [*tokens, entries]."""
        ids = None if ids is None else ids.unsqueeze(-2)
        cast(Observer, self.observer)(LayerReading(self.layer, ids, scores.unsqueeze(-2), weights.unsqueeze(-2)))


class EntryValues(LayerEntries):
    """Replaces the last linear map: sum of weight x value, plus b2."""

    def __init__(self, base: LayeredKnowledge, layer: int, bias: Float[Tensor, " model_dim"] | None) -> None:
        super().__init__(base, layer)
        self.bias = None if bias is None else nn.Parameter(bias)
        self.scored: dict[str, Tensor] = {}  # scores of each part in this forward pass, if there is an observer

    @property
    def output_bias(self) -> Tensor | None:
        return self.bias

    def forward(self, weights: Float[Tensor, "*tokens entries"]) -> Float[Tensor, "*tokens model_dim"]:
        if self.observer is not None:
            scores = torch.stack([self.scored.pop(part) for part in self.layout.parts])
            self.observe(None, scores, weights.detach())
        return functional.linear(weights, self.weight, self.bias)


def scores_of(
    hidden: Float[Tensor, "*tokens model_dim"],
    columns: EntryColumns,
    part: str,
    biased: bool,  # without a bias in the plain model, training leaves thresholds at 0, so that it can be saved as such
) -> Float[Tensor, "*tokens entries"]:
    threshold = columns.thresholds[part]
    return functional.linear(hidden, columns.keys[part], threshold if biased else threshold.detach())


class EntryScores(nn.Module):
    """Replaces the first linear map: scores h . key + threshold, with several parts side by side."""

    values: EntryValues

    def __init__(self, values: EntryValues, parts: Sequence[str], *, biased: bool) -> None:
        super().__init__()
        object.__setattr__(self, "values", values)  # not a child: it is a module of the layer
        self.layer, self.parts, self.biased = values.layer, tuple(parts), biased

    @property  # some model code asks for its dtype
    def weight(self) -> Float[Tensor, "out model_dim"]:
        keys = self.values.base.columns(self.layer).keys
        return torch.cat([keys[part] for part in self.parts])

    def forward(self, hidden: Float[Tensor, "*tokens model_dim"]) -> Float[Tensor, "*tokens entries"]:
        columns = self.values.base.columns(self.layer)
        scores = [scores_of(hidden, columns, part, self.biased) for part in self.parts]
        if self.values.observer is not None:
            self.values.scored.update(zip(self.parts, (score.detach() for score in scores), strict=True))
        return scores[0] if len(scores) == 1 else torch.cat(scores, dim=-1)


@dataclass(frozen=True, eq=False)
class _Routed:
    expert: int
    tokens: Tensor  # which, [n]
    places: Tensor  # at which of their choices, [n]
    routing: Tensor  # weights of the router, [n, 1]
    scores: list[Tensor]  # of each part, [n, entries]
    weights: Tensor  # [n, entries], not yet multiplied by the router's


class ExpertEntries(LayerEntries):
    """A layer's experts: y = sum over chosen x of r_x (sum_e weight_e value_e + b2_x), with the router's weights r.

    The activation and b2 are those of the model's module, `own`. In Llama 4 scores contain r.
    """

    def __init__(
        self, base: LayeredKnowledge, layer: int, form: PackedExperts, own: nn.Module, *, biased: bool
    ) -> None:
        super().__init__(base, layer)
        self.form, self.own, self.biased = form, own, biased

    def added(self, output: Tensor) -> Float[Tensor, "*tokens model_dim"]:
        """Sum over the experts, for models that do this after the module."""
        return output.unflatten(0, (self.form.num_experts, -1)).sum(dim=0) if self.form.sorted else output

    def received(self, gradient: Tensor) -> Float[Tensor, "*tokens model_dim"]:
        """The gradient of one expert's rows: they are summed, so that all are the same."""
        return gradient.unflatten(0, (self.form.num_experts, -1))[0] if self.form.sorted else gradient

    def forward(self, *args: Tensor, **kwargs: Tensor) -> Float[Tensor, "*tokens model_dim"]:
        given = inspect.signature(self.own.forward).bind(*args, **kwargs).arguments.values() if kwargs else args
        hidden, *routing = given
        routed = list(self._routed(hidden, *routing[:2]))
        if self.observer is not None:
            places = self.form.num_experts if self.form.sorted else routing[0].shape[-1]
            self._observe(routed, hidden.shape[:-1].numel() // (places if self.form.sorted else 1), places)
        if self.form.sorted:
            return torch.cat([self._written(share) for share in routed]).view(hidden.shape)
        written = torch.zeros_like(hidden).flatten(0, -2)
        for share in routed:
            written.index_add_(0, share.tokens, (self._written(share) * share.routing).to(written.dtype))
        return written.view(hidden.shape)

    def _routed(self, hidden: Tensor, index: Tensor | None = None, routing: Tensor | None = None) -> Iterator[_Routed]:
        """Yield each expert with the tokens that chose it; without an `index` every expert has all tokens, times r."""
        number, tokens = self.form.num_experts, hidden.flatten(0, -2)
        if self.form.sorted or index is None or routing is None:
            blocks = tokens.unflatten(0, (number, -1))
            rows = torch.arange(blocks.shape[1], device=hidden.device)
            parts = ((i, rows, torch.full_like(rows, i), block.new_ones(1, 1), block) for i, block in enumerate(blocks))
        else:
            index, shares = index.flatten(0, -2), routing.flatten(0, -2)
            parts = ((i, rows, at, shares[rows, at, None], tokens[rows]) for i, rows, at in by_expert(index, number))
        for expert, rows, places, share, inputs in parts:
            columns = self.base.columns(self.layer, expert)
            scores = [scores_of(inputs, columns, part, self.biased) for part in self.layout.parts]
            yield _Routed(expert, rows, places, share, scores, self.form.weigh(self.own, scores))

    def _written(self, share: _Routed) -> Tensor:
        """Compute an expert's output before the router's weight."""
        values = self.base.columns(self.layer, share.expert).values
        bias = self.form.output_bias(self.own)
        return functional.linear(share.weights, values.T, None if bias is None else bias[share.expert])

    def _observe(self, routed: list[_Routed], tokens: int, places: int) -> None:
        """Give the observer a table [tokens, places * entries of an expert], with -1 where an expert has fewer."""
        like = routed[0].weights if routed else self.base.entries
        shape = (tokens, places, max((share.weights.shape[1] for share in routed), default=0))
        rows = torch.full(shape, -1, device=like.device)
        weights, scores = like.new_zeros(shape), like.new_zeros(len(self.layout.parts), *shape)
        for share in routed:
            count = share.weights.shape[1]
            first = self.base.rows(self.layer, share.expert).start - self.base.rows(self.layer).start
            at = share.tokens, share.places, slice(count)
            rows[at] = torch.arange(first, first + count, device=like.device)
            weights[at] = (share.weights * share.routing).detach().to(like)
            scores[:, *at] = torch.stack(share.scores).detach().to(like)
        self.observe(rows.flatten(1), scores.flatten(2), weights.flatten(1))
