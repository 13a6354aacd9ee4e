"""The entries that fired in a model, layer by layer, and their effects on the logits."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from operator import attrgetter
from typing import Any, Literal, cast

from jaxtyping import Float, Int
from torch import Tensor

from attnflow._core import checks
from attnflow._core.markup import (
    KINDS,
    aligned,
    kinds_of,
    part_name,
    percent,
    plural,
    shorten,
    token_label,
    token_place,
    visible,
)
from attnflow._core.results import Result

By = Literal["effect", "direct", "norm"]


@dataclass(frozen=True)
class Fired:
    """One entry that fired for one token in one layer: a row of a `Trace`."""

    layer: int  # number of the model's layer
    position: int  # of the token
    token: str  # its text
    answer: str  # text of the token whose logit the effect is about; "" without effects
    entry: int  # id of the entry
    head: int  # the head of cross-attention that read it
    score: float  # with the threshold, before the activation; in gated layers, the gate's score
    threshold: float  # the part of the score that depends on the entry alone; NaN if unknown
    weight: float  # the factor of its value
    norm: float  # Euclidean norm of its contribution, |weight| * |value|
    effect: float | None  # first-order estimate of what the answers' logits lose without it, or None
    direct_effect: float | None  # on the logit of its own token's answer, past later layers, or None
    ablated_effect: float | None = (
        None  # what that logit loses once the entry is taken out of the model; None: not tried
    )
    probability_effect: float | None = None  # what the answer's probability loses then
    text: str = ""  # the entry's text, "" if unknown
    neuron: int = 0  # number of the entry within its layer, as in `name`
    reader: int = 0  # number of the layer of entries that read it: a layer of the model may have several
    letter: str = "N"  # of the name: "F" for a feature of a transcoder or autoencoder
    promotes: tuple[str, ...] = ()  # the tokens whose logits weight times value raises most
    suppresses: tuple[str, ...] = ()  # those that it lowers most

    @property
    def name(self) -> str:
        """The entry as the field writes it, such as "L24N1005"."""
        return part_name(self.layer, KINDS[self.letter], self.neuron, brief=True)


@dataclass(frozen=True, eq=False)
class Beside:
    """What a layer with features writes beside them: "error", "bias", "skip"; with the entries its whole output.

    Norms and effects are as in `Fired`.
    """

    name: str
    norms: Float[Tensor, " positions"]
    effects: Float[Tensor, " positions"] | None
    direct_effects: Float[Tensor, " positions"] | None


@dataclass(frozen=True, eq=False)
class LayerTrace:
    """One layer of a `Trace`: the entries kept for each position, strongest first; ids are -1 after the last.

    Scores, thresholds, weights, norms and effects are as in `Fired`.
    """

    reader: int  # its number among those that read entries
    name: str  # path of the module that reads the entries
    num_entries: int  # entries that it can read, counted once for each head
    ids: Int[Tensor, "positions kept"]
    heads: Int[Tensor, "positions kept"]
    scores: Float[Tensor, "positions kept"]
    thresholds: Float[Tensor, "positions kept"]
    weights: Float[Tensor, "positions kept"]
    norms: Float[Tensor, "positions kept"]
    effects: Float[Tensor, "positions kept"] | None
    direct_effects: Float[Tensor, "positions kept"] | None
    neurons: Int[Tensor, "positions kept"]  # numbers of the entries within the model's layer
    layer: int  # number of the model's layer
    # how many of the entries read, kept or not, have a positive score (in gated layers, gate score) and a weight
    active: Int[Tensor, " positions"]
    output_norm: Float[Tensor, " positions"]  # of the sum of all entries' contributions, without b2
    # 1 - |rest| / |all|, where "all" is the sum of all contributions and "rest" that of the entries not kept
    explained: Float[Tensor, " positions"]
    direct_effect: Float[Tensor, " positions"] | None = None  # that of the layer's whole output with b2; or None
    attention_effect: Float[Tensor, " positions"] | None = None  # direct effect of the same block's attention, or None
    ablated_effects: Float[Tensor, "positions kept"] | None = None  # as in `Fired`; NaN for entries not taken out
    probability_effects: Float[Tensor, "positions kept"] | None = None
    letter: str = "N"  # of the names of its entries
    beside: tuple[Beside, ...] = ()  # only of features


@dataclass(frozen=True)
class Promoted:
    """The tokens whose logits an entry's value moves most at a positive weight; a negative one exchanges the two."""

    reader: int  # as in `Fired`
    entry: int
    head: int
    raised: tuple[str, ...]  # the most raised first
    lowered: tuple[str, ...]  # the most lowered first


@dataclass(frozen=True, eq=False)
class Trace(Result):
    """The entries that fired for a text, as `af.knowledge.trace` returns it.

    The effect of an entry is its weight times value, times the derivative of the answers' logits by what its layer
    adds: the first-order estimate of what they lose without it, over all paths. If several positions are traced, it is
    the effect on the sum of their answers' logits.

    The direct effect of a contribution c on the logit of an answer is (w_answer - mean of w) . N c. Here w are the rows
    of the unembedding, and N is the final norm with its scale fixed at this forward pass. It is what c adds to that
    logit, less what it adds to all logits on average, not counting paths through later layers. The effects of the
    embedding, all attention layers, all entries and the constants sum exactly to the centred logit.

    The effect of an ablation answers another question: by how much does that logit fall, and the answer's probability,
    when the model runs again without the entry's value at any token? Later layers then react, and all paths count.

    Attributes:
        model: name of the model.
        tokens: the text of each token of the prompt.
        positions: the positions of the traced tokens.
        layers: the traced layers.
        answers: for each position, the text of the token whose logit the effects refer to; empty if there are none.
        answer_ids: their ids.
        logits: the logits of the answers, less the mean over the vocabulary; or None.
        probabilities: the probabilities of the answers, or None.
        embedding_effect: direct effect of the input of the first block, or None.
        constant_effect: what the biases of the final norm and of the unembedding add, or None.
        without: why the model has no direct effects; "" if it has.
        texts: for each kept entry with a text, its id and text.
        promoted: the tokens that the values of the strongest entries raise and lower.
        against: the tokens, if any, whose mean logit is subtracted in place of that of all tokens.
        by: the measure ("effect", "direct" or "norm") by which the kept entries are the largest of all.
    """

    model: str
    tokens: tuple[str, ...]
    positions: tuple[int, ...]
    layers: tuple[LayerTrace, ...]
    answers: tuple[str, ...] = ()
    answer_ids: tuple[int, ...] = ()
    logits: Float[Tensor, " positions"] | None = None
    probabilities: Float[Tensor, " positions"] | None = None
    embedding_effect: Float[Tensor, " positions"] | None = None
    constant_effect: Float[Tensor, " positions"] | None = None
    without: str = ""
    texts: Mapping[int, str] = field(default_factory=dict[int, str])
    promoted: tuple[Promoted, ...] = ()
    against: tuple[str, ...] = ()
    by: By = "effect"

    def __iter__(self) -> Iterator[LayerTrace]:
        return iter(self.layers)

    @property
    def prompt(self) -> str:
        """The text, token by token."""
        return "".join(self.tokens)

    @property
    def top(self) -> int:
        """The number of entries kept for each token and layer; only the first `top` of `fired` are surely the
        strongest.
        """
        return min(one.ids.shape[1] for one in self.layers)

    def layer(self, number: int) -> LayerTrace:
        """Return what one layer of the model reads; a layer that was not traced raises `ValueError`."""
        found = self._of(number)
        if len(found) > 1:
            names = ", ".join(one.name for one in found)
            raise ValueError(f"layer {number} reads entries in {len(found)} modules, {names}: take one from .layers")
        return found[0]

    def _of(self, number: int | None) -> Sequence[LayerTrace]:
        found = [one for one in self.layers if number in (None, one.layer)]
        if not found:
            raise ValueError(
                f"layer must be one of the traced {list(dict.fromkeys(one.layer for one in self))}, got {number!r}"
            )
        return found

    def row(self, position: int) -> int:
        """Return the row of a position, -1 for the last; one that was not traced raises `ValueError`."""
        if -len(self.positions) <= position < 0:
            return len(self.positions) + position
        if position not in self.positions:
            raise ValueError(f"position must be one of the traced {list(self.positions)}, got {position}")
        return self.positions.index(position)

    def token(self, row: int) -> str:
        """The token of a row as a label, and the answer beside it."""
        name = token_label(self.tokens[self.positions[row]])
        return f"{name} → {token_label(self.answers[row])}" if self.answers else name

    def fired(self, position: int | None = None, layer: int | None = None, count: int | None = None) -> list[Fired]:
        """List kept entries, the strongest first; the first `top` are the strongest of all entries.

        Args:
            position: of a token, -1 for the last traced one; None for all.
            layer: number of a layer of the model; None for all.
            count: how many; None for all that were kept.

        Raises:
            ValueError: a position or layer that was not traced.
        """
        if count is not None:
            checks.integer("count", count, 1)
        rows = range(len(self.positions)) if position is None else [self.row(position)]
        fired = [entry for row in rows for one in self._of(layer) for entry in self._fired(one, row)]
        size = attrgetter({"direct": "direct_effect"}.get(self.by, self.by))
        return sorted(fired, key=lambda entry: -abs(size(entry)))[:count]

    def summary(self, position: int = -1) -> str:
        """Describe the prompt, a token and its answer in a few lines."""
        row = self.row(position)
        said = [f"prompt {shorten(self.prompt, 100)}"]
        said += [f"token {token_place(self.tokens[self.positions[row]], self.positions[row])}"]
        if self.answers and self.logits is not None:
            said[1] += f", answer {self.answers[row]!r}: logit {float(self.logits[row]):.3g} above {self._compared}"
            said[1] += "" if self.probabilities is None else f", probability {percent(float(self.probabilities[row]))}"
        if self.without:
            said.append(f"no direct effects: {self.without}")
        active = sum(int(one.active[row]) for one in self.layers)
        every = sum(one.num_entries for one in self.layers)
        return "\n".join([*said, f"{active:,} of {every:,} entries are active"])

    def table(self, position: int | None = -1, layer: int | None = None, count: int = 12) -> str:
        """The strongest entries as lines for a terminal; see `fired`."""
        fired = self.fired(position, layer, count)
        columns: dict[str, Callable[[Fired], str]] = {
            "token": lambda one: token_place(one.token, one.position),
            "entry": lambda one: one.name if one.head == 0 else f"{one.name} (head {one.head})",
            "layer": lambda one: str(one.layer),
            kinds_of(one.letter for one in fired): lambda one: str(one.neuron),
            "id": lambda one: str(one.entry) if one.letter == "S" else "",
            "score": lambda one: f"{one.score:+.3g}",
            "threshold": lambda one: f"{one.threshold:+.3g}",
            "weight": lambda one: f"{one.weight:+.3g}",
            "norm": lambda one: f"{one.norm:.3g}",
            "effect": lambda one: _signed(one.effect),
            "direct": lambda one: _signed(one.direct_effect),
            "ablated": lambda one: _signed(one.ablated_effect),
            "p lost": lambda one: _signed(one.probability_effect),
            "text, or + promoted, − suppressed tokens": lambda one: shorten(one.text, 40) if one.text else _words(one),
        }
        if not any(one.threshold for one in fired):  # as in models without biases
            del columns["threshold"]
        if position is not None:  # the summary names the token
            del columns["token"]
        cells = [[name, *map(show, fired)] for name, show in columns.items()]
        cells = [column for column in cells if any(column[1:]) or not fired]  # some models have no effects, or no words
        left = [at for at, column in enumerate(cells) if column[0] == "token" or column[0].startswith("text")]
        return "\n".join([aligned([*zip(*cells, strict=True)], left), *self._besides(position, layer)])

    def _besides(self, position: int | None, layer: int | None) -> Iterator[str]:
        """A line for each layer with features: what is written beside them, at one position or on average."""
        rows = slice(None) if position is None else slice(row := self.row(position), row + 1)
        for one in self._of(layer):
            parts = [f"{part.name} {float(part.norms[rows].mean()):.3g}" for part in one.beside]
            if parts:
                effects = [part.effects for part in one.beside if part.name == "error" and part.effects is not None]
                effect = "".join(f", effect of the error {float(some[rows].sum()):+.3g}" for some in effects)
                yield f"layer {one.layer} beside features, in norm: {', '.join(parts)}{effect}"

    def rows(self) -> Sequence[Mapping[str, object]]:
        """A row for each kept entry of each token and layer."""
        return [
            {"name": entry.name, **{name: _cell(value) for name, value in vars(entry).items()}}
            for one in self.layers
            for row in range(len(self.positions))
            for entry in self._fired(one, row)
        ]

    @cached_property
    def _words(self) -> dict[tuple[int, int, int], Promoted]:
        return {(one.reader, one.entry, one.head): one for one in self.promoted}

    def _fired(self, one: LayerTrace, row: int) -> list[Fired]:
        position, answer = self.positions[row], self.answers[row] if self.answers else ""
        count = int((one.ids[row] >= 0).sum())

        def column(table: Tensor | None) -> list[Any]:
            return [None] * count if table is None else table[row, :count].tolist()

        numbers = (one.scores, one.thresholds, one.weights, one.norms, one.effects, one.direct_effects)
        ablated = (one.ablated_effects, one.probability_effects)
        fired: list[Fired] = []
        tables = (one.ids, one.heads, one.neurons, *numbers, *ablated)
        for entry, head, neuron, *rest in zip(*map(column, tables), strict=True):
            rest[6:] = [None if value is None or value != value else value for value in rest[6:]]
            words = self._words.get((one.reader, entry, head))
            sides = ((), ()) if words is None else (words.raised, words.lowered)
            up, down = sides if rest[2] > 0 else sides[::-1]  # by the sign of its weight here
            place = (one.layer, position, self.tokens[position], answer, entry, head)
            about: dict[str, Any] = {"text": self.texts.get(entry, ""), "neuron": neuron, "reader": one.reader}
            about["letter"] = one.letter
            fired.append(Fired(*place, *cast(Any, rest), **about, promotes=up, suppresses=down))
        return fired

    @property
    def _compared(self) -> str:
        return " and ".join(map(repr, self.against)) or "the mean of all tokens"

    def __repr__(self) -> str:
        about = f"{plural(len(self.positions), 'position')} of {plural(len(self.tokens), 'token')}"
        lines = [f"Trace({self.model!r}: {about}, {plural(len(self.layers), 'layer')})"]
        if self.answers and self.logits is not None:
            lines.append(f"answer {self.answers[-1]!r}: logit {float(self.logits[-1]):.3g} above {self._compared}")
        return "\n".join([*lines, self.table(None, count=8)])


def _signed(value: float | None) -> str:
    return "" if value is None else f"{value:+.3g}"


def _words(one: Fired) -> str:
    sides = (("+", one.promotes), ("−", one.suppresses))
    return "  ".join(" ".join([sign, *map(token_label, words[:3])]) for sign, words in sides if words)


def _cell(value: object) -> object:
    if isinstance(value, float):
        return None if value != value else float(f"{value:.9g}")
    if isinstance(value, tuple):
        return " | ".join(visible(part) for part in cast(Sequence[object], value))
    return visible(value) if isinstance(value, str) else value
