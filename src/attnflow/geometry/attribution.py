"""Why a query attended to a key: a score before the softmax as a sum over pairs of what each sublayer wrote."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Final, Literal, NamedTuple

import torch
from jaxtyping import Float64
from torch import Tensor

from attnflow._core import checks
from attnflow._core.results import Result

_NO_MODEL: Final = "this attribution was copied or read from a file, and has no model: call af.geometry.attribute again"


class Term(NamedTuple):
    """One term of a score: how much the pair of components moves log a_ij (`centred`), and its size (`raw`)."""

    head: int
    key: int  # position
    query_component: str
    key_component: str
    value: float  # centred
    raw: float


@dataclass(frozen=True, eq=False)
class ScoreAblation(Result):
    """How the scores of one query change without one component; 0 where it plays no part.

    `terms` and `held` answer what the component wrote for this head; `total` answers what the model does without it.

    Attributes:
        before: the scores q.k of the model, times the scaling.
        terms: less the terms of all pairs that hold the component.
        held: with the component out of the stream before this layer and norms at their scale. This is `terms`, but for
            what the biases of projections make of the component.
        direct: likewise, with the norm of this layer, and norms after sublayers, moving.
        total: with the component at zero and all that follows it computed anew.
    """

    model: str
    layer: int
    head: int | None
    component: str
    query: int
    keys: tuple[int, ...]
    tokens: tuple[str, ...]
    before: Float64[Tensor, "*heads keys"]
    terms: Float64[Tensor, "*heads keys"]
    held: Float64[Tensor, "*heads keys"]
    direct: Float64[Tensor, "*heads keys"]
    total: Float64[Tensor, "*heads keys"]

    def rows(self) -> Sequence[Mapping[str, object]]:
        """One row for each key, in each head."""
        tables = {name: getattr(self, name) for name in ("before", "terms", "held", "direct", "total")}
        flat = {name: table.reshape(-1).tolist() for name, table in tables.items()}
        count = len(flat["before"]) // max(len(self.keys), 1)
        heads = [self.head] if self.head is not None else range(count)
        places = [(head, key, token) for head in heads for key, token in zip(self.keys, self.tokens, strict=True)]
        return [
            {"component": self.component, "head": head, "key": key, "token": token}
            | {name: values[n] for name, values in flat.items()}
            for n, (head, key, token) in enumerate(places)
        ]


@dataclass(frozen=True)
class Part:
    """What one head brought from one source token, or what one entry of a feed-forward layer wrote.

    The fields of the other kind are None, and `token` is empty.
    """

    head: int | None
    source: int | None  # position of the token that the head read
    token: str
    expert: int | None  # None in layers without experts, too
    entry: int | None  # its number in the layer, or in the expert
    weight: float  # the head's attention weight on the token, or the factor of the entry's value
    value: float  # centred for the query's side
    raw: float


@dataclass(frozen=True)
class Share:
    """A part of a score: centred (`value`) and as it enters the score (`raw`)."""

    value: float
    raw: float


@dataclass(frozen=True, eq=False)
class ComponentZoom(Result):
    """What one component contributes to the score of a query and a key, by its sources: `parts` + `others` + `rest`.

    Attention is split by head and source token, a feed-forward layer by its entries. Norms, the attention weights of
    the component and a router's weights are held as they were in this pass.

    Attributes:
        layer: the layer of the score; `head`, `query` and `key` are of that score, too.
        component_layer: the layer of the component.
        position: where the component wrote: the query, or the key.
        parts: the largest by magnitude.
        num_others: how many parts are not listed.
        others: their sum.
        rest: what biases inside the component write.
        total: the sum of everything.
    """

    model: str
    layer: int
    head: int
    attention: Literal["self", "cross"]
    query: int
    key: int
    component: str
    component_layer: int
    side: Literal["query", "key"]
    position: int
    kind: Literal["attention", "feed-forward"]
    parts: tuple[Part, ...]
    num_others: int
    others: Share
    rest: Share
    total: Share

    def top(self, k: int = 3) -> list[Part]:
        """List the first k parts."""
        return list(self.parts[: checks.integer("k", k, 1)])

    def __repr__(self) -> str:
        return (
            f"ComponentZoom({self.component} at the {self.side}, position {self.position}: "
            f"{self.total.value:+.3g} of the score in layer {self.layer}, head {self.head}, query {self.query}, key "
            f"{self.key}; "
            f"{len(self.parts)} of {len(self.parts) + self.num_others} parts)"
        )

    def rows(self) -> Sequence[Mapping[str, object]]:
        """One row for each listed part."""
        return [{"component": self.component, "position": self.position} | asdict(part) for part in self.parts]


@dataclass(frozen=True, eq=False)
class ScoreAttribution(Result):
    """The scores of one query, in one head or in all, as sums of terms t(c, c') of pairs of components.

    With one head the tensors have the axes below; with `head=None` each has a leading axis of `heads`.
    """

    model: str
    layer: int
    head: int | None
    heads: tuple[int, ...]  # those that the tensors hold
    attention: Literal["self", "cross"]
    query: int
    query_token: str
    keys: tuple[int, ...]  # positions
    tokens: tuple[str, ...]  # texts of the keys
    components: tuple[str, ...]  # of the query's stream
    key_components: tuple[str, ...]  # of the keys' stream: the same, except in cross-attention
    raw: Float64[Tensor, "*heads keys query_components key_components"]
    constants: Mapping[str, Float64[Tensor, "*heads keys"]]  # "biases", and where present "positions", "attached bias"
    scores: Float64[Tensor, "*heads keys"]  # what the model computed, before a softcap and the softmax
    weights: Float64[Tensor, "*heads keys"]
    slope: Float64[Tensor, "*heads keys"]  # d cap(score) / d score; 1 without a softcap
    expected: Float64[Tensor, "*heads query_components key_components"]  # sum_k a_ik slope_k t_ik over all keys
    expected_constants: Mapping[str, Float64[Tensor, "*heads"]]  # the same of each constant
    error: float  # largest difference between sum and score, relative to the range of the row
    take_out: Callable[[ScoreAttribution, str], ScoreAblation] | None = field(
        init=False, default=None, repr=False, compare=False
    )
    look_into: Callable[..., ComponentZoom] | None = field(init=False, default=None, repr=False, compare=False)

    def __getstate__(self) -> dict[str, object]:
        return {**vars(self), "take_out": None, "look_into": None}

    @property
    def constant(self) -> Tensor:
        """The part of each score that no pair of components makes: biases of projections, positions, added biases."""
        return torch.stack(list(self.constants.values())).sum(0)

    @property
    def centred(self) -> Tensor:
        """t_ij - sum_k a_ik t_ik: the derivative of log a_ij by the size of the term, like `raw`.

        With a softcap each term is first multiplied by the slope of the cap at its score.
        """
        return self.raw * self.slope[..., None, None] - self.expected[..., None, :, :]

    @property
    def centred_constants(self) -> dict[str, Tensor]:
        """Each part of the constant, centred like the terms; only the biases are under a softcap."""
        return {
            name: values * (self.slope if name == "biases" else 1.0) - self.expected_constants[name][..., None]
            for name, values in self.constants.items()
        }

    def top(self, k: int = 10, key: int | None = None, *, raw: bool = False) -> list[Term]:
        """List the k terms of largest magnitude, centred (or `raw`), of all keys or of the key at one position."""
        count = checks.integer("k", k, 1)
        chosen = range(len(self.keys)) if key is None else [self._column(key)]
        raws, centred = self._with_heads(self.raw)[:, chosen], self._with_heads(self.centred)[:, chosen]
        order = (raws if raw else centred).abs().flatten().topk(min(count, raws.numel())).indices
        places = zip(*(axis.tolist() for axis in torch.unravel_index(order, raws.shape)), strict=True)
        return [
            Term(
                self.heads[h],
                self.keys[chosen[j]],
                self.components[c],
                self.key_components[d],
                float(centred[h, j, c, d]),
                float(raws[h, j, c, d]),
            )
            for h, j, c, d in places
        ]

    def ablate(self, component: str) -> ScoreAblation:
        """Run the model again without a component, one of `components` or `key_components`, and compare the scores.

        `ValueError` for an unknown component, a model that has changed, and a result without its model: one that was
        copied, pickled, or read from a file.
        """
        if self.take_out is None:
            raise ValueError(_NO_MODEL)
        return self.take_out(self, component)

    def zoom(
        self,
        component: str,
        *,
        side: Literal["query", "key"] = "query",
        key: int | None = None,
        head: int | None = None,
        count: int | None = 10,
    ) -> ComponentZoom:
        """Split what a component contributes to one score: attention by head and source token, or by entries.

        The share of component c at the query is scaling * q_i^c . k_j, and at the key scaling * q_i . k_j^c. This is
        `by_query_component(raw=True)` or `by_key_component(raw=True)` and what c makes with the bias of the other
        side's projection, which those tables leave to the constant. For each token t that it read, a head adds
        a_pt (g . v_t), with the gradient g of the score by the head's output. An entry with weight w and value v adds
        w (g . v), with the gradient g by what the layer writes.

        To follow who told whom: a part names a head of an earlier layer and the token it read, so
        `attribute(model, inputs, zoom.component_layer, head=part.head, query=zoom.position)` explains why.

        Args:
            component: one of `components`, or of `key_components` for the key's side.
            side: "query" splits what it wrote at the query. "key" splits what it wrote at the key; there, values are
                raw, since the mean over the row is one of other positions.
            key: position of the key (default: that of the largest weight).
            head: needed if the attribution is of all heads.
            count: how many parts to list, the largest by magnitude; None for all.

        Returns:
            The parts, in float64. Entries are numbered within the layer, or within the expert. The id that
            `af.knowledge.trace` prints after `from_ffn` is this number, plus the entries of all earlier feed-forward
            layers and of the layer's earlier experts.

        Raises:
            ValueError: an unknown component, key or head, a model that has changed, or a result without its model.
            UnsupportedArchitecture: the embedding and recurrent layers have no parts; or the parts do not add up to the
                component's share to 1e-5 of their size.

        Cost: three passes up to the layer, and four backward passes.

        >>> from transformers import LlamaConfig, LlamaForCausalLM
        >>> from attnflow.geometry import attribute
        >>> model = LlamaForCausalLM(LlamaConfig(
        ...     vocab_size=32, hidden_size=16, intermediate_size=32, num_hidden_layers=2, num_attention_heads=2))
        >>> zoom = attribute(model, [5, 6, 7, 8], layer=1, head=0).zoom("layer 0 attention", count=None)
        >>> sorted((part.head, part.source) for part in zoom.parts)
        [(0, 0), (0, 1), (0, 2), (0, 3), (1, 0), (1, 1), (1, 2), (1, 3)]
        >>> abs(sum(part.raw for part in zoom.parts) + zoom.rest.raw - zoom.total.raw) < 1e-6
        True
        """
        if side not in ("query", "key"):
            raise ValueError(f'side must be "query" or "key", got {side!r}')
        if head is None and self.head is None:
            raise ValueError(f"this attribution is of {len(self.heads)} heads: name the one to zoom into, as in head=0")
        chosen = self.head if head is None else checks.integer("head", head)
        if chosen not in self.heads:
            raise ValueError(f"head must be one of the attributed {checks.preview(self.heads)}, got {head!r}")
        weights = self._with_heads(self.weights)[self.heads.index(chosen)]
        position = self.keys[int(weights.argmax())] if key is None else self.keys[self._column(key)]
        if self.look_into is None:
            raise ValueError(_NO_MODEL)
        return self.look_into(self, component, side, position, chosen, count)

    def by_query_component(self, *, raw: bool = False) -> Tensor:
        """Sum the terms over the key's components: [keys, query components], centred unless `raw`."""
        return (self.raw if raw else self.centred).sum(-1)

    def by_key_component(self, *, raw: bool = False) -> Tensor:
        """Sum the terms over the query's components: [keys, key components], centred unless `raw`."""
        return (self.raw if raw else self.centred).sum(-2)

    def rows(self) -> Sequence[Mapping[str, object]]:
        """One row for each head, key and pair of components."""
        raw, centred = self._with_heads(self.raw), self._with_heads(self.centred)
        return [
            {
                "head": head,
                "query": self.query,
                "key": key,
                "token": token,
                "query_component": first,
                "key_component": second,
                "raw": raw_value,
                "centred": centred_value,
            }
            for h, head in enumerate(self.heads)
            for key, token, raws, values in zip(
                self.keys, self.tokens, raw[h].tolist(), centred[h].tolist(), strict=True
            )
            for first, raw_row, row in zip(self.components, raws, values, strict=True)
            for second, raw_value, centred_value in zip(self.key_components, raw_row, row, strict=True)
        ]

    def _column(self, key: object) -> int:
        position = checks.integer("key", key)
        if position not in self.keys:
            raise ValueError(f"key must be one of the positions {checks.preview(self.keys)}, got {position}")
        return self.keys.index(position)

    def _with_heads(self, tensor: Tensor) -> Tensor:
        return tensor if self.head is None else tensor[None]

    def __repr__(self) -> str:
        what = "all heads" if self.head is None else f"head {self.head}"
        return (
            f"ScoreAttribution({self.model}, layer {self.layer}, {what}, query {self.query} {self.query_token!r}, "
            f"{len(self.keys)} keys, {len(self.components)} x {len(self.key_components)} components, "
            f"error {self.error:.1g})"
        )


def telling(result: ScoreAttribution) -> list[int]:
    """Return the numbers of the keys by whose weight a head is chosen: not the first one and the query itself."""
    usual = {result.query, min(result.keys)} if result.attention == "self" else set[int]()
    return [index for index, position in enumerate(result.keys) if position not in usual]
