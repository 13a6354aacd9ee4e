"""What is read off the entries of a model: which are active, and one of them, with the model's answer without it.

Apart from the code that looks at models, so that a report opens where no transformers is installed.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from attnflow._core.checks import preview
from attnflow._core.markup import KINDS, aligned, part_name, percent, shorten, token_label
from attnflow._core.results import Result


@dataclass(frozen=True)
class Pushed:
    """A token whose logit an entry's value raises or lowers."""

    token: str
    token_id: int
    strength: float  # of the change at weight 1: standard deviations from the mean change over the vocabulary


@dataclass(frozen=True)
class Example:
    text: int  # index of the text
    position: int  # of that token in the text
    weight: float  # there
    first: int  # position of the first of `tokens`
    tokens: tuple[str, ...]  # the tokens around it
    weights: tuple[float, ...]  # the entry's weight at each of them


@dataclass(frozen=True)
class Near:
    name: str  # such as "L24N1005"
    layer: int  # of the model
    neuron: int  # its number within that layer
    reader: int  # number of the layer of entries that reads it
    entry: int  # its id
    cosine: float
    raised: tuple[str, ...]  # the tokens that its value raises most


@dataclass(frozen=True)
class Chance:
    """A next token's probability with an entry and without it."""

    token: str
    token_id: int
    before: float
    after: float


@dataclass(frozen=True)
class EntryRemoval(Result):
    """What a model says next with an entry and without it: the entry's value is zero at all tokens."""

    model: str
    name: str  # of the entry, such as "L24N1005"
    layer: int  # of the model
    neuron: int  # its number within that layer
    entry: int  # its id
    head: int
    tokens: tuple[str, ...]  # of the text
    position: int  # of the token after which the model speaks
    kl: float  # Kullback-Leibler divergence of the answer without the entry from that with it, in nats
    chances: tuple[Chance, ...]  # the most likely tokens of both answers, the most likely with the entry first

    @property
    def changed(self) -> bool:
        """Whether the most likely token changed."""
        return max(self.chances, key=lambda chance: chance.after) is not self.chances[0]

    def rows(self) -> Sequence[Mapping[str, object]]:
        """A row for each token."""
        return [{**vars(chance), "change": chance.after - chance.before} for chance in self.chances]

    def __str__(self) -> str:
        likeliest = max(self.chances, key=lambda chance: chance.after).token
        answer = f"{'now' if self.changed else 'still'} {token_label(likeliest)}"
        lines = [["token", "with", "without"]]
        lines += [[token_label(chance.token), percent(chance.before), percent(chance.after)] for chance in self.chances]
        head = f"after {shorten(''.join(self.tokens[: self.position + 1]), 60)!r} without {self.name}: {answer}"
        return f"{head} (KL {self.kl:.3g} nats)\n{aligned(lines, left=[0])}"


@dataclass(frozen=True, repr=False)
class EntryReport(Result):
    """One entry of a model, as `af.knowledge.entry` returns it."""

    model: str  # its name
    name: str  # of the entry: its layer and number there, such as "L24N1005"
    layer: int  # of the model
    neuron: int  # its number within that layer
    reader: int  # number of the layer of entries that reads it
    entry: int  # its id
    head: int  # the head of cross-attention that reads it
    expert: int | None  # the expert that it belongs to, or None
    path: str  # of the module that reads it
    norm: float  # Euclidean norm of its value
    threshold: float  # of its key (of a gated layer, of its gate)
    raised: tuple[Pushed, ...]  # the tokens whose logits its value raises most, at a positive weight; strongest first
    lowered: tuple[Pushed, ...]  # those that it lowers most
    without: str  # why no tokens are named; "" if they are
    examples: tuple[Example, ...]  # the texts in which it fires most, one place each, by absolute weight
    tokens_read: int  # tokens of the texts that were read
    active: int  # at how many of them its score is positive (in gated layers, its gate's score)
    near_by_value: tuple[Near, ...]  # the entries with the most similar values, which say the same
    near_by_key: tuple[Near, ...]  # those with the most similar keys (in gated layers, gates), which fire for the same
    removal: EntryRemoval | None = (
        None  # what the model says next with the entry and without it; None: no text was given
    )

    @property
    def place(self) -> str:
        """Its layer and number in words, such as "layer 24 neuron 1005"."""
        return part_name(self.layer, KINDS[self.name.lstrip("L0123456789")[0]], self.neuron)

    def rows(self) -> Sequence[Mapping[str, object]]:
        """A row for each token, example and near entry; "kind" distinguishes them."""
        table = [("raises", token.token, token.token_id, token.strength) for token in self.raised]
        table += [("lowers", token.token, token.token_id, token.strength) for token in self.lowered]
        table += [("fires", f"position {example.position}", example.text, example.weight) for example in self.examples]
        for kind, near in (("near by value", self.near_by_value), ("near by key", self.near_by_key)):
            table += [(kind, other.name, other.entry, other.cosine) for other in near]
        return [dict(zip(("kind", "name", "number", "value"), row, strict=True)) for row in table]

    def __repr__(self) -> str:
        return f"<EntryReport {self.model}, {self.name}>"

    def __str__(self) -> str:
        lines = [f"{self.name} of {self.model}: {self.place}, entry {self.entry}"]
        for name, pushed in (("raises", self.raised), ("lowers", self.lowered)):
            if pushed:
                lines.append(f"{name}  {' '.join(token_label(token.token) for token in pushed)}")
        if self.without:
            lines.append(f"its tokens are unknown: {self.without}")
        if self.tokens_read:
            lines.append(f"active at {percent(self.active / self.tokens_read)} of {self.tokens_read:,} tokens read")
        for example in self.examples:
            words = "".join(example.tokens[: example.position - example.first + 1])
            lines.append(f"  {example.weight:+.3g}  …{words[-60:]}".replace("\n", "↵"))
        for name, near in (("value", self.near_by_value), ("key", self.near_by_key)):
            lines.append(f"near by {name}: {', '.join(f'{other.name} ({other.cosine:.2f})' for other in near)}")
        return "\n".join([*lines, *([str(self.removal)] if self.removal else [])])


@dataclass(frozen=True)
class LayerActivity:
    """The active entries of one module that reads them, counted over tokens; for each token, the sum over heads."""

    layer: int  # of the model; it may have several such modules
    reader: int  # its number among those that read entries
    name: str  # its path
    tokens: int  # how many tokens were counted
    entries: int  # how many entries the layer may read
    read_all: bool  # whether all of them were read; if not, the counts cover the entries that were
    mean: float  # active entries per token
    maximum: int  # the most active entries of any token
    dead: int  # entries that were never active in this module


@dataclass(frozen=True)
class ActivityReport(Result):
    """Active and dead entries of all layers."""

    layers: tuple[LayerActivity, ...]  # in their order
    entries: int  # how many entries the layers may read
    dead: tuple[int, ...]  # ids of the entries that were never active in any layer

    def rows(self) -> Sequence[Mapping[str, object]]:
        """A row for each module that reads entries."""
        return [asdict(layer) for layer in self.layers]

    def __str__(self) -> str:
        rows = [["layer", "tokens", "entries", "mean active", "share", "max active", "never active"]]
        for label, layer in zip(layer_labels(self.layers), self.layers, strict=True):
            mean = f"{layer.mean:,.1f}{'' if layer.read_all else '*'}"
            share = f"{100 * layer.mean / max(layer.entries, 1):.1f}%"
            sizes = f"{layer.tokens:,}", f"{layer.entries:,}"
            rows.append([label, *sizes, mean, share, f"{layer.maximum:,}", f"{layer.dead:,}"])
        lines = [aligned(rows), f"never active in any layer: {len(self.dead):,} of {self.entries:,} entries"]
        if self.dead:
            lines[-1] += f": {preview(self.dead)}"
        if not all(layer.read_all for layer in self.layers):
            lines.append("* counted among the entries that were read")
        return "\n".join(lines)


def layer_labels(modules: Sequence[Any]) -> list[str]:
    """The `layer` of each module; of several in one layer, with where the path, `name`, leaves those of the others."""
    labels: list[str] = []
    for one in modules:
        paths = [other.name.split(".") for other in modules if other.layer == one.layer]
        columns = enumerate(zip(*paths, strict=False))
        first = next((at for at, parts in columns if len({*parts}) > 1), min(map(len, paths)) - 1)
        ends = range(first + 1, max(map(len, paths)))
        end = next((end for end in ends if len({tuple(path[:end]) for path in paths}) == len(paths)), None)
        where = ".".join(one.name.split(".")[first:end])
        labels.append(f"{one.layer} {where}" if len(paths) > 1 else str(one.layer))
    return labels
