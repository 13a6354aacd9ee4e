"""The feed-forward layers of a whole model as entries of one base: each entry belongs to a layer, and can be edited."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final, cast

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn
from torch.nn import functional

from attnflow._core.checks import index_array, integer, preview
from attnflow.knowledge.activations import Activation
from attnflow.knowledge.attention import GeneralizedCrossAttention
from attnflow.knowledge.base import KnowledgeBase
from attnflow.knowledge.certificate import Certificate
from attnflow.knowledge.memory_layer.retrieval import Retrieval, best, certify, chosen, straight_through, sum_of_rows

PARTS: Final = {False: ("up",), True: ("gate", "up")}


@dataclass(frozen=True)
class EntryLayout:
    """Where the parts of a feed-forward neuron lie in its entry.

    Plain layers: [w_up | w_down | b_up], d_E = 2d + 1. Gated: [w_gate | w_up | w_down | b_gate | b_up], d_E = 3d + 2.
    The threshold is a coordinate of the entry (a network that had to memorise it misses by most of it).

    Attributes:
        model_dim: d.
        gated: whether there are two keys.
    """

    model_dim: int
    gated: bool

    @property
    def parts(self) -> tuple[str, ...]:
        """The keys: "up", or "gate" and "up"."""
        return PARTS[self.gated]

    @property
    def entry_dim(self) -> int:
        """d_E."""
        return len(self.parts) * (self.model_dim + 1) + self.model_dim

    def key(self, part: str) -> slice:
        """Columns of a key ("up" or "gate")."""
        return self._block(self.parts.index(part))

    @property
    def value(self) -> slice:
        """Columns of the value, what the entry writes into the residual stream."""
        return self._block(len(self.parts))

    def threshold(self, part: str) -> int:
        """Column of a key's threshold."""
        return (len(self.parts) + 1) * self.model_dim + self.parts.index(part)

    def _block(self, index: int) -> slice:
        return slice(index * self.model_dim, (index + 1) * self.model_dim)


class LayeredKnowledge(KnowledgeBase):
    """The neurons of all feed-forward layers as rows of one matrix, ordered by layer; each row has an id that stays.

    Attributes:
        layout: columns of an entry.
        ids: id of each row, int64[num_entries].
        counts: rows of each layer, int64[layers].
    """

    ids: Tensor
    counts: Tensor

    def __init__(self, entries: Float[Tensor, "entries entry_dim"], counts: Sequence[int], layout: EntryLayout) -> None:
        nn.Module.__init__(self)
        self.entries = nn.Parameter(entries)
        self.std = layout.entry_dim**-0.5
        self.layout = layout
        self.register_buffer("ids", torch.arange(entries.shape[0]))
        self.register_buffer("counts", torch.tensor(list(counts), dtype=torch.int64))
        self._find_rows()

    @property
    def num_layers(self) -> int:
        """Layers that read this base."""
        return len(self._rows)

    def rows(self, layer: int) -> slice:
        """Rows of a layer."""
        return self._rows[layer]

    def layer_of(self, ids: Int[Tensor, " ids"] | Sequence[int]) -> list[int]:
        """The layer that each id belongs to.

        Raises:
            KeyError: an id that is not there.
        """
        ends = self.counts.cumsum(0)
        return cast("list[int]", torch.searchsorted(ends, self._find(ids), right=True).tolist())

    def get(self, ids: Int[Tensor, " ids"] | Sequence[int]) -> Float[Tensor, "ids entry_dim"]:
        """The entries of ids, a copy.

        Raises:
            KeyError: an id that is not there.
        """
        return self.entries.detach()[self._find(ids)]

    def insert(self, layer: int, entries: Float[Tensor, "new entry_dim"]) -> Int[Tensor, " new"]:
        """Append entries to a layer; returns their new ids. The parameter is a new one: make optimisers anew.

        Raises:
            ValueError: a layer that does not exist, another width, NaN or infinity. The base is as it was.
        """
        integer("layer", layer, 0, self.num_layers - 1)
        self._check(entries)
        where = self._rows[layer].stop
        old = self.entries.detach()
        new = torch.cat([old[:where], entries.to(old), old[where:]])
        ids = torch.arange(len(entries), device=self.ids.device) + self._next_id
        self._next_id += len(entries)
        counts = self.counts.clone()
        counts[layer] += len(entries)
        parameter = nn.Parameter(new, requires_grad=self.entries.requires_grad)
        self.put(parameter, torch.cat([self.ids[:where], ids, self.ids[where:]]), counts)
        return ids

    def update(self, ids: Int[Tensor, " ids"] | Sequence[int], entries: Float[Tensor, "ids entry_dim"]) -> None:
        """Overwrite entries in place.

        Raises:
            KeyError: an id that is not there.
            ValueError: another shape, NaN or infinity. The base is as it was.
        """
        rows = self._find(ids)
        self._check(entries)
        if len(entries) != len(rows):
            raise ValueError(f"{len(rows)} ids were given {len(entries)} entries")
        with torch.no_grad():
            self.entries[rows] = entries.to(self.entries)

    def delete(self, ids: Int[Tensor, " ids"] | Sequence[int]) -> None:
        """Remove entries; each layer keeps at least one. The parameter is a new one: make optimisers anew.

        Raises:
            KeyError: an id that is not there.
            ValueError: a layer would be left empty. The base is as it was.
        """
        rows = self._find(ids)
        keep = torch.ones(len(self.ids), dtype=torch.bool, device=self.ids.device)
        keep[rows] = False
        counts = torch.stack([keep[self.rows(layer)].sum() for layer in range(self.num_layers)])
        if bool((counts == 0).any()):
            raise ValueError(f"layer {int((counts == 0).nonzero()[0])} would be left without entries")
        parameter = nn.Parameter(self.entries.detach()[keep], requires_grad=self.entries.requires_grad)
        self.put(parameter, self.ids[keep], counts)

    def put(self, entries: nn.Parameter, ids: Tensor, counts: Tensor) -> None:
        """These entries in place of all others."""
        self.entries, self.ids, self.counts = entries, ids, counts
        self._find_rows()

    def attention(
        self, layer: int, activation: str | Activation, output_bias: Float[Tensor, " model_dim"] | None = None
    ) -> GeneralizedCrossAttention:
        """A layer as the paper's cross-attention (eq. 1-9): `attention(hidden, base.entries[base.rows(layer)])`.

        W_Q is sqrt(d_k) times the identity, W_K and W_V are the zeros and ones that select the keys and the value of an
        entry, and B1 reads its last coordinates. The same function as the model's own code on the same rows, which
        slices them instead of multiplying by these matrices; equal to rounding.

        Args:
            layer: number of the layer.
            activation: of the layer: "relu", "gelu", "silu", or a function of scores [..., entries].
            output_bias: b2, if the layer has one (`EntryValues.bias`).
        """
        integer("layer", layer, 0, self.num_layers - 1)
        layout, width = self.layout, self.layout.model_dim
        attention = GeneralizedCrossAttention(
            width,
            width,
            layout.entry_dim,
            activation=activation,
            gated=layout.gated,
            threshold="coordinate",
            bias=output_bias is not None,
        ).to(self.entries)
        one = torch.eye(width, dtype=self.entries.dtype, device=self.entries.device)
        with torch.no_grad():
            for parameter in attention.parameters():
                parameter.zero_()
            attention.query[0] = one * width**0.5
            for index, part in enumerate(layout.parts):
                attention.key[index, 0, layout.key(part)] = one
            attention.value[0, layout.value] = one
            if attention.output_bias is not None:
                attention.output_bias.copy_(cast(Tensor, output_bias))
        return attention

    def _find_rows(self) -> None:
        ends = cast("list[int]", self.counts.cumsum(0).tolist())
        self._rows = [slice(first, last) for first, last in zip([0, *ends[:-1]], ends, strict=True)]
        self._next_id = max(getattr(self, "_next_id", 0), int(self.ids.max()) + 1)

    def _find(self, ids: object) -> Tensor:
        wanted = torch.from_numpy(index_array("ids", ids)).to(self.ids.device)
        order = self.ids.argsort()
        place = torch.searchsorted(self.ids[order], wanted).clamp(max=len(self.ids) - 1)
        rows = order[place]
        unknown = wanted[self.ids[rows] != wanted]
        if len(unknown):
            raise KeyError(f"no entries with ids {preview(unknown.tolist())}")
        return rows

    def _check(self, entries: Tensor) -> None:
        if entries.ndim != 2 or entries.shape[1] != self.entry_dim:
            raise ValueError(f"entries must be [entries, {self.entry_dim}], got shape {tuple(entries.shape)}")
        if not bool(torch.isfinite(entries).all()):
            raise ValueError("entries hold NaN or infinity")


class EntryScores(nn.Module):
    """Scores of a layer's entries, h . key + threshold: stands where the first linear map of a feed-forward layer was.

    With several parts their scores lie side by side, as a fused gate and up projection has them.
    """

    def __init__(self, base: LayeredKnowledge, layer: int, parts: Sequence[str]) -> None:
        super().__init__()
        # Not a child: the base is registered once, at the model, and its parameter must not appear once a layer.
        self.__dict__["base"] = base
        self.layer, self.parts = layer, tuple(parts)

    @property
    def weight(self) -> Float[Tensor, "out model_dim"]:
        """The keys as the weight of a linear map, for model code that asks for its type."""
        base = cast(LayeredKnowledge, self.__dict__["base"])
        entries = base.entries[base.rows(self.layer)]
        return torch.cat([entries[:, base.layout.key(part)] for part in self.parts])

    def forward(self, hidden: Float[Tensor, "*tokens model_dim"]) -> Float[Tensor, "*tokens entries"]:
        """One score for each entry of the layer. Cost: as the linear map; no copy of the entries."""
        base = cast(LayeredKnowledge, self.__dict__["base"])
        entries = base.entries[base.rows(self.layer)]
        layout = base.layout
        scores = [
            functional.linear(hidden, entries[:, layout.key(p)], entries[:, layout.threshold(p)]) for p in self.parts
        ]
        return scores[0] if len(scores) == 1 else torch.cat(scores, dim=-1)


class EntryValues(nn.Module):
    """The values of a layer's entries, weighted and summed: stands where the last linear map was.

    Attributes:
        bias: b2 of the layer, [model_dim], or None.
        retrieval: which entries are read: those of the largest weights in size (their scores are computed by then, so
            that only the product with the values is saved); None: all.
    """

    def __init__(self, base: LayeredKnowledge, layer: int, bias: Float[Tensor, " model_dim"] | None) -> None:
        super().__init__()
        self.__dict__["base"] = base
        self.layer = layer
        self.bias = None if bias is None else nn.Parameter(bias)
        self.retrieval: Retrieval | None = None

    @property
    def weight(self) -> Float[Tensor, "model_dim entries"]:
        """The values as the weight of a linear map, a view."""
        base = cast(LayeredKnowledge, self.__dict__["base"])
        return base.entries[base.rows(self.layer), base.layout.value].T

    def forward(self, weights: Float[Tensor, "*tokens entries"]) -> Float[Tensor, "*tokens model_dim"]:
        """sum of weight_e value_e + b2. Cost: as the linear map; no copy of the entries.

        Raises:
            ValueError: a retrieval by an approximate search, which has nothing to search here.
        """
        retrieval = self.retrieval
        if retrieval is None or self.reads_all(weights):
            return functional.linear(weights, self.weight, self.bias)
        if self._training():
            sparse = weights.masked_fill(~chosen(weights.detach().abs(), retrieval), 0)
            return functional.linear(straight_through(sparse, weights), self.weight, self.bias)
        if retrieval.threshold is not None:
            sparse = weights.masked_fill(~chosen(weights.detach().abs(), retrieval), 0)
            return functional.linear(sparse, self.weight, self.bias)
        rows = best(weights.detach().abs(), retrieval)
        base = cast(LayeredKnowledge, self.__dict__["base"])
        # Whole entries, of which the value is taken: rows of a part alone would have to be copied together first.
        whole = sum_of_rows(weights.gather(-1, rows), rows + base.rows(self.layer).start, base.entries)
        written = whole[..., base.layout.value]
        return written if self.bias is None else written + self.bias

    def reads_all(self, weights: Float[Tensor, "*tokens entries"]) -> bool:
        """Whether these weights are of all entries that are read."""
        if self.retrieval is None:
            return True
        count = weights.shape[-1]
        if self.retrieval.reads_all(count, weights.shape[:-1].numel(), self._training()):
            return True
        if self.retrieval.search == "approximate":
            raise ValueError(
                'a converted layer has computed all scores when it retrieves: search must be "exact" or "auto", got '
                '"approximate"'
            )
        return False

    def keep(self, weights: Float[Tensor, "*tokens entries"]) -> tuple[Int[Tensor, "*tokens read"], Certificate]:
        """Which entries of the layer `retrieval` keeps, those of the largest weights (-1: none), and the certificate.

        The certificate is on the sizes of weights, so that `error_bound` with the largest norm of any value bounds
        the output's error whatever the activation.
        """
        if self.retrieval is None:
            raise ValueError("this layer reads all of its entries: set .retrieval first")
        sizes = weights.detach().abs()
        rows = best(sizes, self.retrieval)
        return rows, certify(sizes, rows, self.retrieval)

    def _training(self) -> bool:
        return self.training and torch.is_grad_enabled()
