"""`BiasMap`: a model's bias for some queries of one text, layer by layer, and its effect on the weights."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Final, Literal, cast

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from attnflow._core import checks
from attnflow._core.markup import part_name, percent, plural, token_label, visible
from attnflow._core.results import Result
from attnflow.bias.graph import BiasEdge, BiasGraph

Quantity = Literal["bias", "raw", "weights", "weights_without", "weights_base"]

_ROUNDS: Final = 1000  # of the search for a low rank under a mask
_SETTLED: Final = 1e-6  # change of the residual, as a share of the energy
_STRONGEST: Final = 2  # keys of each query in a graph, unless something else is asked for
_SHOWN: Final = 3  # keys of each side in a line of text
_DIGITS: Final = 9  # of a float32, enough to read back the same number
_COLUMNS: Final = (
    "layer", "head", "query", "query_token", "key", "key_token",
    "bias", "raw", "weight", "weight_without", "weight_base",
)  # fmt: skip


@dataclass(frozen=True, eq=False)
class LayerMap(Result):
    """The maps of one layer: one for each captured head, or the mean over heads.

    Attributes:
        layer: the number of the layer in the model.
        name: path of its attention module.
        bias: B less its mean over the keys that the query may attend to, 0 elsewhere. Only this affects softmax.
        raw: B itself, 0 where the mask forbids the pair.
        allowed: which pairs the mask allows; for the mean over heads, in any head.
        weights: post-softmax weights.
        weights_without: the weights of the same queries and keys without B, which shows the effect of this layer's
            bias.
        weights_base: the weights of the base model, without a bias in any layer; None if not captured.
    """

    layer: int
    name: str
    bias: Float[Tensor, "maps queries keys"]
    raw: Float[Tensor, "maps queries keys"]
    allowed: Bool[Tensor, "maps queries keys"]
    weights: Float[Tensor, "maps queries keys"]
    weights_without: Float[Tensor, "maps queries keys"]
    weights_base: Float[Tensor, "maps queries keys"] | None = None

    @property
    def strength(self) -> float:
        """Root mean square of the row-centred bias over the allowed pairs."""
        return float((self.bias.double().square().sum() / self.allowed.sum().clamp(min=1)).sqrt())

    @property
    def moved(self) -> float:
        """Share of the weight that the bias moves between keys, mean over queries: half the L1 distance, in [0, 1]."""
        return float((self.weights - self.weights_without).double().abs().sum(dim=-1).mean() / 2)


@dataclass(frozen=True)
class LayerQuery(Result):
    """The bias of one query in one layer."""

    layer: int
    name: str  # path of its attention module
    strength: float  # root mean square of the row-centred bias over all captured queries
    moved: float  # share of the weight that the bias moves between keys, mean over the captured queries
    energy: dict[int, float]  # for each rank, the share of the row-centred bias that a bias of it can explain
    bias: tuple[float | None, ...]  # row-centred bias of each key; None where the mask forbids the pair


@dataclass(frozen=True)
class QueryBias(Result):
    """The keys that a bias makes one query attend to more (+) or less (-); it prints a line for each layer.

    Attributes:
        model: name of the model.
        tokens: the text of each key.
        query: position of the query.
        head: the head, or None for the mean.
        produced: the token that was generated at the query; None outside generation.
        layers: the captured layers.
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
        lines = [f"query {name} ({self.query}){head}", ""]
        lines.append(f"{'layer':<6}{'strength':>9}{'moved':>8}  attends more to / less to")
        for one in self.layers:
            keys = {key: bias for key, bias in enumerate(one.bias) if bias}
            order = sorted(keys, key=lambda key: -keys[key])
            labels = [f"{token_label(self.tokens[key])} {keys[key]:+.2f}" for key in order]
            drawn = sum(bias > 0 for bias in keys.values())
            toward, away = labels[:drawn][:_SHOWN], labels[drawn:][::-1][:_SHOWN]
            words = f"{', '.join(toward) or 'nothing'} / {', '.join(away) or 'nothing'}"
            lines.append(f"{one.layer:<6}{one.strength:>9.3g}{100 * one.moved:>7.1f}%  {words}")
        return "\n".join(lines)


@dataclass(frozen=True, eq=False)
class BiasMap(Result):
    """The bias of a model for some queries of one sequence, as `af.bias.capture` returns it.

    A row is a query, a column a key. Figures, graphs and exports use the row-centred bias: softmax ignores what is
    added to all keys of a query, so the sign of the raw B means nothing.

    Attributes:
        model: name of the model.
        tokens: the text of each key, in order.
        queries: positions of the rows.
        layers: the maps of each captured layer.
        heads: numbers of the heads with separate maps; empty for one map, the mean over heads.
        causal: whether no query attends to a later key; then the reasoning graph is acyclic.
        produced: the token that was generated at each query ("" if unknown); empty outside generation.
    """

    model: str
    tokens: tuple[str, ...]
    queries: tuple[int, ...]
    layers: tuple[LayerMap, ...]
    heads: tuple[int, ...] = ()
    causal: bool = True
    produced: tuple[str, ...] = ()

    def __iter__(self) -> Iterator[LayerMap]:
        return iter(self.layers)

    def layer(self, number: int) -> LayerMap:
        """Return the map of one layer.

        Raises:
            ValueError: the layer has no bias or was not captured; the message lists the captured layers.
        """
        match = next((one for one in self.layers if one.layer == number), None)
        if match is None:
            raise ValueError(f"layer must be one of {[one.layer for one in self.layers]}, got {number!r}")
        return match

    def row(self, query: int) -> int:
        """Return the row of a position; -1 is the last row, -2 the one before it.

        Raises:
            ValueError: the position was not captured.
        """
        if -len(self.queries) <= query < 0:
            return len(self.queries) + query
        if query not in self.queries:
            some = f"{self.queries[0]} to {self.queries[-1]}" if len(self.queries) > 12 else list(self.queries)
            raise ValueError(f"query must be one of the captured positions, {some}, or -1 for the last; got {query}")
        return self.queries.index(query)

    def values(
        self, quantity: Quantity = "bias", layer: int | None = None, head: int | None = None
    ) -> Float[Tensor, "queries keys"]:
        """Return one table of numbers.

        Args:
            quantity: "bias" (row-centred), "raw", "weights", "weights_without" or "weights_base".
            layer: its number; None for the mean over the captured layers.
            head: one of `heads`; None for the mean over the maps.

        Raises:
            ValueError: the layer, head or weights were not captured.
        """
        if quantity not in {field.name for field in fields(LayerMap)} - {"layer", "name", "allowed"}:
            raise ValueError(f"quantity must be 'bias', 'raw' or one of the weights, got {quantity!r}")
        tables = [getattr(one, quantity) for one in (self.layers if layer is None else (self.layer(layer),))]
        if any(table is None for table in tables):
            raise ValueError("weights_base were not captured: use capture(..., base=True)")
        maps = torch.stack(cast(list[Tensor], tables))
        if head is None:
            return maps.mean(dim=(0, 1))
        if head not in self.heads:
            captured = (
                f"choose among {list(self.heads)}" if self.heads else "use capture(..., heads=...) for separate heads"
            )
            raise ValueError(f"head {head} was not captured: {captured}")
        return maps[:, self.heads.index(head)].mean(dim=0)

    def allowed(self, layer: int | None = None) -> Bool[Tensor, "queries keys"]:
        """Which pairs exist in a layer, or in any captured layer."""
        chosen = self.layers if layer is None else (self.layer(layer),)
        return torch.stack([one.allowed.any(dim=0) for one in chosen]).any(dim=0)

    def energy(self, rank: int, head: int | None = None) -> dict[int, float]:
        """Return for each layer the share of the row-centred bias that a bias of that rank explains; NaN if it is zero.

        It is fitted over the allowed pairs: see `energy`. A bias per key has at most rank 1, which under a causal mask
        is not the rank of its row-centred matrix. For comparison, a guidance network at random initialisation, on
        Gaussian queries and keys, has 75 % of its energy in rank 1. In rank 8 it has 90 % (64 channels) to 83 % (many).
        With no more queries than the rank, the share is always 100 %.

        Args:
            rank: at least 1.
            head: one of `heads`; None for the mean over the maps.

        Cost: a singular value decomposition per layer; under a mask, up to a second for 128 queries and keys.
        """
        checks.integer("rank", rank, 1)
        tables = ((one, self.values("bias", one.layer, head)) for one in self.layers)
        return {one.layer: energy(table, one.allowed.any(dim=0), rank) for one, table in tables}

    def at(self, query: int = -1, head: int | None = None) -> QueryBias:
        """Return the keys that one query attends to more or less because of the bias, layer by layer.

        Args:
            query: its position; -1 is the last row.
            head: one of `heads`; None for the mean over the maps.

        Raises:
            ValueError: the query or the head was not captured.
        """
        row = self.row(query)
        energies = {rank: self.energy(rank, head) for rank in (1, 8)}
        layers: list[LayerQuery] = []
        for one in self.layers:
            table, allowed = self.values("bias", one.layer, head)[row].tolist(), one.allowed.any(dim=0)[row].tolist()
            bias = tuple(value if exists else None for value, exists in zip(table, allowed, strict=True))
            shares = {rank: of_layer[one.layer] for rank, of_layer in energies.items()}
            layers.append(LayerQuery(one.layer, one.name, one.strength, one.moved, shares, bias))
        produced = self.produced[row] if self.produced else None
        weights = self.values("weights", None, head)[row].tolist()
        base = None
        if all(one.weights_base is not None for one in self.layers):
            base = tuple(self.values("weights_base", None, head)[row].tolist())
        about = (self.model, self.tokens, self.queries[row], head, produced)
        return QueryBias(*about, tuple(layers), tuple(weights), base)

    def graph(
        self,
        *,
        threshold: float | None = None,
        top_k: int | None = None,
        layer: int | None = None,
        head: int | None = None,
    ) -> BiasGraph:
        """Return the reasoning graph: an edge for each positive row-centred bias that is strong enough.

        Loops are left out, since a token always has its own information.

        Args:
            threshold: the least bias of an edge.
            top_k: the most keys of each query, the strongest first; 2 if neither is given. Both may be given.
            layer: as in `values`.
            head: as in `values`.

        Raises:
            ValueError: the threshold is not positive, or the layer or head was not captured.
        """
        if threshold is not None and not threshold > 0:
            raise ValueError(f"threshold must be positive, since a negative bias reduces attention, got {threshold}")
        if top_k is None and threshold is None:
            top_k = _STRONGEST
        if top_k is not None:
            checks.integer("top_k", top_k, 1)
        table = self.values("bias", layer, head).masked_fill(~self.allowed(layer), 0.0)
        table[list(range(len(self.queries))), list(self.queries)] = 0.0
        keep = table > 0 if threshold is None else table >= threshold
        if top_k is not None and top_k < table.shape[1]:
            best = table.topk(top_k, dim=1).indices
            keep &= torch.zeros_like(keep).scatter_(1, best, True)
        edges = tuple(BiasEdge(key, self.queries[row], float(table[row, key])) for row, key in keep.nonzero().tolist())
        many = "strongest key" if top_k == 1 else f"{top_k} strongest keys"
        which = [] if top_k is None else [f"the {many} of each query"]
        which += [] if threshold is None else [f"a bias of at least {threshold:g}"]
        where = "mean over layers" if layer is None else f"layer {layer}"
        if head is not None:
            where = f"{where}, head {head}" if layer is None else part_name(layer, "head", head)
        return BiasGraph(self.tokens, edges, f"{where}; {', '.join(which)}")

    def rows(self) -> Sequence[Mapping[str, object]]:
        """A row for each allowed pair of each layer and map.

        `bias` is row-centred. `head` is "mean" without separate heads. `weight_base` is None if the base model was not
        run.
        """
        names = [visible(token) for token in self.tokens]
        rows: list[Mapping[str, object]] = []
        for one in self.layers:
            values = [one.bias, one.raw, one.weights, one.weights_without, one.weights_base]
            for number, row, key in one.allowed.nonzero().tolist():
                cells = [None if v is None else float(f"{float(v[number, row, key]):.{_DIGITS}g}") for v in values]
                query, head = self.queries[row], self.heads[number] if self.heads else "mean"
                columns = (one.layer, head, query, names[query], key, names[key], *cells)
                rows.append(dict(zip(_COLUMNS, columns, strict=True)))
        return rows

    def __repr__(self) -> str:
        about = f"{plural(len(self.queries), 'query', 'queries')} of {plural(len(self.tokens), 'token')}"
        lines = [f"BiasMap({self.model!r}: {about}, {plural(len(self.layers), 'layer')})"]
        lines += [
            f"  layer {o.layer}: strength {o.strength:.3g}, moves {percent(o.moved)} of the attention weight"
            for o in self
        ]
        return "\n".join(lines)


def energy(bias: Float[Tensor, "queries keys"], allowed: Bool[Tensor, "queries keys"], rank: int) -> float:
    """Share of a row-centred bias that u_i . v_j of a given rank can explain; NaN for a bias of zero.

    It is 1 - min |bias - X - r 1^T|^2 / |row-centred bias|^2 over the allowed pairs, for X of that rank and one free
    number per query, which softmax cannot see. If every pair is allowed, the largest singular values of the row-centred
    bias give it. Under a mask, forbidden pairs are repeatedly filled in from X (Srebro and Jaakkola, ICML 2003), which
    gives a lower bound, close to the optimum if most pairs are allowed.
    """
    mask = allowed.double()
    count = mask.sum(dim=1, keepdim=True).clamp(min=1)

    def centred(values: Tensor) -> Tensor:
        return (values - (values * mask).sum(dim=1, keepdim=True) / count) * mask

    target = centred(bias.double())
    total = float(target.square().sum())
    if total == 0.0:
        return math.nan
    if bool(allowed.all()):
        return float(torch.linalg.svdvals(target)[:rank].square().sum()) / total
    right = torch.linalg.svd(target, full_matrices=False).Vh[:rank].mT
    low, offset, before = torch.zeros_like(target), torch.zeros_like(count), 1.0
    for _ in range(_ROUNDS):
        filled = torch.where(allowed, target - offset, low)
        left = torch.linalg.qr(filled @ right).Q  # a step of subspace iteration in place of a decomposition
        sides = filled.mT @ left
        right = torch.linalg.qr(sides).Q
        low = left @ sides.mT
        offset = ((target - low) * mask).sum(dim=1, keepdim=True) / count
        residual = float(centred(target - low).square().sum()) / total
        if abs(before - residual) < _SETTLED:
            return 1.0 - residual
        before = residual
    return 1.0 - before
