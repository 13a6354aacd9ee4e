"""`Explanation`: the flow of one answer, as data: sources, edges between tokens, and how much each carries."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from math import isnan
from typing import Literal, cast

import torch
from jaxtyping import Float
from torch import Tensor

from attnflow._core.markup import KINDS, part_name, percent, plural, shorten, token_label, token_place
from attnflow._core.results import Result

SourceKind = Literal["token", "entry", "other entries", "error", "skip", "projection", "sublayer", "constant"]
_SHOWN = 5  # edges and entries that are printed
_COMPARED = 100  # the strongest, whose amounts are compared


@dataclass(frozen=True)
class Edge:
    """What one head carries from one token to another.

    Attributes:
        layer: number of the layer.
        head: number of the query head.
        query: position of the token that receives.
        key: position of the token that sends.
        half: "" for the self-attention of the answer's own stream, "encoder" for that of an encoder, "cross" for a
            decoder's attention to its encoder, where `key` is a position of the encoder.
        weight: the attention weight.
        carried: the exact amount of the value that passes here (not a causal claim).
        effect: first-order estimate of what the value would lose without the edge.
        removed: what the value lost when the model ran without the edge; None if that was not measured.
        bias: what an attached bias adds to the score; None without one.
    """

    layer: int
    head: int
    query: int
    key: int
    half: str
    weight: float
    carried: float
    effect: float
    removed: float | None = None
    bias: float | None = None

    @property
    def name(self) -> str:
        """The head as the field writes it, such as "L23H4"."""
        return part_name(self.layer, "head", self.head, self.half, brief=True)


@dataclass(frozen=True)
class Source:
    """One summand of the value: a token, an entry at a token, the other entries of a layer, a sublayer, a constant.

    Attributes:
        kind: what it is.
        layer: number of the layer that wrote it; None for tokens and for all constants together.
        position: of the token at which it was written; None for sums over tokens.
        half: "encoder" for what an encoder wrote, else "".
        neuron: number of the entry within its layer, as in `name`; None for the others.
        carried: its exact share of the value; those of all sources sum to it.
        effect: first-order estimate of what the value would lose without it.
        activation: the entry's weight in this pass.
        text: the token, or the text of an entry of a store.
        promotes: tokens whose logits the entry raises most, as it fired here.
        removed: what the value lost when the model ran without it; None if that was not measured.
        letter: of the name: "N" for a neuron, "S" for an entry of an attached store, "F" for a feature of a transcoder
            or autoencoder, "T" for a row of a table of per-layer embeddings, whose number is the token's id ("P" for a
            column, in a converted model).
    """

    kind: SourceKind
    layer: int | None
    position: int | None
    half: str
    neuron: int | None
    carried: float
    effect: float
    activation: float | None = None
    text: str = ""
    promotes: tuple[str, ...] = ()
    removed: float | None = None
    letter: str = "N"

    @property
    def name(self) -> str:
        """An entry as the field writes it, such as "L24N1005"; else what the source is."""
        if self.neuron is not None:
            return part_name(cast(int, self.layer), KINDS[self.letter], self.neuron, self.half, brief=True)
        return (
            f"{self.half} {self.kind}".strip()
            if self.layer is None
            else part_name(self.layer, self.kind, half=self.half)
        )


@dataclass(frozen=True, eq=False)
class Explanation(Result):
    """Who told a model its answer, how much, and from which entries; `af.explain.answer` returns it.

    The value is the logit of the answer less that of `against` (without it: less the mean of all logits). With norms,
    attention weights, activations and gates held at their values, it is exactly the sum of `sources`.

    Attributes:
        model: its name.
        texts: the tokens of the stream that answers.
        encoder_texts: the tokens of an encoder; empty without one.
        position: of the token that answers; None for the logits of a whole sequence.
        answer: the token, or class, that is explained.
        answer_id: its number among the logits.
        against: the tokens with which it is compared; empty for the mean of all logits; "0" for a single number.
        value: what is explained.
        probability: of the answer.
        sources: every source, entries by the size of their effect; weak entries are summed by layer.
        edges: the strongest edges between different tokens, by the size of what they carry.
        arrived: the amount at each token as it enters each layer of the answering stream, and after the last.
        heads: what each head of that stream's self-attention carries between different tokens.
        moved: sum of the absolute amounts of all edges between different tokens.
        written: sum of the absolute amounts of all entries.
        reach: for each token, in how many layers the declared order lets it reach the answer; -1 for never. Empty if
            the model declares no order.
        leaks: edges through pairs that the declared order forbids, which carry something nevertheless.
        error: the difference between the value and the sum of sources, relative to the range of the logits.
    """

    model: str
    texts: tuple[str, ...]
    encoder_texts: tuple[str, ...]
    position: int | None
    answer: str
    answer_id: int
    against: tuple[str, ...]
    value: float
    probability: float
    sources: tuple[Source, ...]
    edges: tuple[Edge, ...]
    arrived: Float[Tensor, "states tokens"]
    heads: Float[Tensor, "layers heads"]
    moved: float
    written: float
    reach: tuple[int, ...]
    leaks: tuple[Edge, ...]
    error: float

    @property
    def ok(self) -> bool:
        """Whether no pair that the declared order forbids carries anything. (What does not add up raises instead.)"""
        return not self.leaks

    @property
    def entries(self) -> tuple[Source, ...]:
        """The sources that are single entries, the strongest effect first."""
        return tuple(source for source in self.sources if source.kind == "entry")

    @property
    def causes(self) -> tuple[Edge, ...]:
        """The edges by the size of their effect, which ranks them as removal does; what is carried does not."""
        return tuple(sorted(self.edges, key=lambda edge: -abs(edge.effect)))

    @property
    def tokens(self) -> tuple[Source, ...]:
        """The sources that are tokens, those of an encoder after those of the answering stream."""
        return tuple(source for source in self.sources if source.kind == "token")

    @property
    def layers(self) -> dict[int, float]:
        """What the entries, errors, skips and whole sublayers of each layer of the answering stream carry."""
        amounts: dict[int, float] = {}
        for source in self.sources:
            if source.layer is not None and not source.half and source.kind != "constant":
                amounts[source.layer] = amounts.get(source.layer, 0.0) + source.carried
        return dict(sorted(amounts.items()))

    @property
    def beside(self) -> dict[str, float]:
        """What all layers carry beside entries: "error" and "skip" of features, "projection" of tables."""
        amounts: dict[str, float] = {}
        for source in self.sources:
            if source.kind in ("error", "skip", "projection"):
                amounts[source.kind] = amounts.get(source.kind, 0.0) + source.carried
        return amounts

    @property
    def agreement(self) -> dict[str, float]:
        """How far the readings agree: rank correlation of carried and effect over the strongest 100 edges and entries.

        Where removals were measured, also the share of them whose sign carried and effect have, too.
        """
        agreement: dict[str, float] = {}
        for name, found in (("edges", self.edges), ("entries", self.entries)):
            strongest = sorted(found, key=lambda item: -abs(item.carried))[:_COMPARED]
            if len(strongest) > 2:
                agreement[name] = _ranked(strongest)
        measured = [item for item in (*self.edges, *self.entries) if item.removed is not None]
        for reading in ("carried", "effect"):
            if measured:
                same = sum(getattr(item, reading) * item.removed > 0 for item in measured)
                agreement[f"{reading} and removed"] = same / len(measured)
        return agreement

    def covered(self, count: int = _SHOWN) -> float:
        """The share of all that moves between tokens which the strongest edges carry (sums of absolute amounts)."""
        return sum(abs(edge.carried) for edge in self.edges[:count]) / self.moved if self.moved else 1.0

    def token(self, position: int, half: str = "") -> str:
        """The text of a token, of the encoder if `half` is "encoder"."""
        return (self.encoder_texts if half == "encoder" else self.texts)[position]

    def ends(self, edge: Edge) -> tuple[str, str]:
        """The texts of the sending and the receiving token of an edge."""
        query, key = {"encoder": ("encoder", "encoder"), "cross": ("", "encoder")}.get(edge.half, ("", ""))
        return self.token(edge.key, key), self.token(edge.query, query)

    def above(self, shown: Callable[[str], str] = repr) -> str:
        """What the value is compared with, in words; "" for the score of an entry, which is compared with nothing."""
        if not self.against and isnan(self.probability):
            return ""
        every = f"the mean of all {'classes' if self.position is None else 'tokens'}"
        return f" above {' and '.join(map(shown, self.against)) or every}"

    def rows(self) -> Sequence[Mapping[str, object]]:
        """A row for each source and each edge."""

        def text(source: Source) -> str:
            return "" if source.position is None else self.token(source.position, source.half)

        sources = [
            {
                "name": source.name, "layer": source.layer, "head": None, "neuron": source.neuron,
                "token": text(source), "position": source.position, "key": None,
                "weight": source.activation, "carried": source.carried, "effect": source.effect,
                "removed": source.removed, "promotes": " | ".join(source.promotes),
            }
            for source in self.sources
        ]  # fmt: skip
        edges = [
            {
                "name": edge.name, "layer": edge.layer, "head": edge.head, "neuron": None,
                "token": self.ends(edge)[1], "position": edge.query, "key": edge.key,
                "weight": edge.weight, "carried": edge.carried, "effect": edge.effect, "removed": edge.removed,
                "promotes": "",
            }
            for edge in self.edges
        ]  # fmt: skip
        return [*sources, *edges]

    def __repr__(self) -> str:
        return "\n".join(shorten(line, 80) for line in self._lines())

    def _lines(self) -> Iterator[str]:
        end, where = self.position, "after"
        if end is None or any(layers >= 0 for layers in self.reach[end + 1 :]):  # as in BERT, what follows is read, too
            end, where = None, "for" if end is None else f"at {token_label(self.texts[end])} in"
        prompt = "".join(self.texts if end is None else self.texts[: end + 1])
        prompt = prompt if len(prompt) <= 44 else f"…{prompt[-43:]}"
        chance = "" if isnan(self.probability) else f" ({percent(self.probability)})"
        yield f"{self.answer!r}{chance} {where} {prompt!r}"
        removed, agreement = ", removed", self.agreement
        if signs := [agreement[f"{name} and removed"] for name in ("carried", "effect") if self._measured]:
            removed += f" (same sign: {', '.join(percent(share) for share in signs)})"
        yield (
            f"{'logit' if self.above() else 'score'} {self.value:+.3g}{self.above()}: carried, effect"
            + removed * self._measured
        )
        for edge in self.causes[:_SHOWN]:
            sender, receiver = self.ends(edge)
            path = f"{token_place(sender, edge.key)} -> {token_place(receiver, edge.query)}"
            yield f"  {edge.name:9} {shorten(path, 32):32} {_numbers(edge)}  weight {edge.weight:.2f}"
        for entry in self.entries[:_SHOWN]:
            place = (
                ""
                if entry.position is None
                else f"at {token_place(self.token(entry.position, entry.half), entry.position)}"
            )
            words = " ".join(map(token_label, entry.promotes)) or shorten(entry.text, 20)
            yield f"  {entry.name:9} {shorten(place, 32):32} {_numbers(entry)}  {words}"
        ranks = ", ".join(f"{kind} {value:.2f}" for kind, value in agreement.items() if kind in ("edges", "entries"))
        for kind, amount in self.beside.items():
            yield f"  {kind:9} {'of all layers together':32} {amount:+6.2f}"
        share = percent(self.covered(20))
        yield f"20 edges: {share} of what moves; rank correlation: {ranks or 'too few'}"
        named = [part_name(edge.layer, "head", edge.head, edge.half) for edge in self.causes[:1]]
        named += [part_name(cast(int, e.layer), KINDS[e.letter], e.neuron, e.half) for e in self.entries[:1]]
        items = zip([*self.causes[:1], *self.entries[:1]], named, strict=True)
        if named:
            yield "names: " + ", ".join(f"{item.name} is {name}" for item, name in items)
        yield f"{self._order()}; sources sum to the value within {self.error:.0e}"

    @property
    def _measured(self) -> bool:
        return any(item.removed is not None for item in (*self.edges, *self.entries))

    def _order(self) -> str:
        if self.leaks:
            edge = self.leaks[0]
            pairs = plural(len(self.leaks), "forbidden pair")
            return f"LEAK: {pairs} carry, {edge.name} from {edge.key} to {edge.query} first"
        if not self.reach:
            return "no declared order to check"
        return f"{sum(r >= 0 for r in self.reach)} of {plural(len(self.reach), 'token')} may reach the answer"


@dataclass(frozen=True)
class Removal(Result):
    """What a value loses when the model runs without edges or entries; `reading.remove` returns it.

    Attributes:
        names: what was taken out.
        alone: what the value lost without each of them alone.
        together: what it lost without all of them.
        value: the value with all of them.
    """

    names: tuple[str, ...]
    alone: tuple[float, ...]
    together: float
    value: float

    def rows(self) -> Sequence[Mapping[str, object]]:
        """A row for each of them, and one for all together."""
        removed = zip((*self.names, "all together"), (*self.alone, self.together), strict=True)
        return [{"without": name, "removed": amount} for name, amount in removed]

    def __repr__(self) -> str:
        alone = ", ".join(f"{name} {amount:+.3g}" for name, amount in zip(self.names[:5], self.alone[:5], strict=True))
        return f"of {self.value:+.3g}, lost without all {len(self.names)}: {self.together:+.3g}; alone: {alone}"


@dataclass(frozen=True)
class Link:
    """How much one source of a `SourceGraph` gives to another: its share of the other's own input, in score units."""

    source: int
    target: int
    carried: float


@dataclass(frozen=True)
class SourceGraph(Result):
    """The strongest sources of an answer, and what each gave to the entries among them.

    Attributes:
        nodes: the sources, in the order of their layers.
        links: from the number of one node to that of another; never against the mask's order.
    """

    nodes: tuple[Source, ...]
    links: tuple[Link, ...]

    def rows(self) -> Sequence[Mapping[str, object]]:
        """A row for each link."""
        names = [
            f"{n.name} at {n.position}" if n.neuron is not None else f"{n.text} ({n.position})" for n in self.nodes
        ]
        return [{"from": names[x.source], "to": names[x.target], "carried": x.carried} for x in self.links]

    def __repr__(self) -> str:
        return f"{plural(len(self.nodes), 'source')}, {plural(len(self.links), 'link')} between them"


def _numbers(item: Edge | Source) -> str:
    removed = "" if item.removed is None else f" {item.removed:+6.2f}"
    return f"{item.carried:+6.2f} {item.effect:+6.2f}{removed}"


def _ranked(items: Iterable[Edge | Source]) -> float:
    """Spearman's rank correlation of carried and effect."""
    pairs = [(item.carried, item.effect) for item in items]
    ranks = torch.tensor(pairs, dtype=torch.float64).argsort(0).argsort(0).double()
    return float(torch.corrcoef(ranks.T)[0, 1])
