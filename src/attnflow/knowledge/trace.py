"""`Trace`: which entries fired for each token of a text, layer by layer, and what they did to the logits."""

from __future__ import annotations

import csv
import io
import json
import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any, Final, Literal, cast

import torch
from jaxtyping import Float, Int
from torch import Tensor

from attnflow._core import checks
from attnflow._core.markup import percent, plural, shorten, token_label, visible
from attnflow._core.tables import aligned

By = Literal["norm", "effect"]

SCHEMA: Final = "attnflow.knowledge.trace/1"
_DIGITS: Final = {torch.float32: 9, torch.float64: 17}  # enough to read back the same number
_COLUMNS: Final = (
    "layer", "position", "token", "target", "entry", "head", "score", "threshold", "up_score", "up_threshold",
    "weight", "norm", "effect", "text", "promotes",
)  # fmt: skip


@dataclass(frozen=True)
class Fired:
    """One entry that fired for one token in one layer: a row of a `Trace`.

    Attributes:
        layer: number of the layer.
        position: of the token.
        token: its text.
        target: text of the token whose logit the effect is about; "" without effects.
        entry: id of the entry.
        head: of the cross-attention that read it.
        score: with the threshold, before the activation; of gated layers, that of the gate.
        threshold: what the score contains of the entry alone; NaN where it is not known.
        up_score: of gated layers, what the activated score is multiplied by; None of others.
        up_threshold: likewise.
        weight: with which its value is added.
        norm: Euclidean norm of its contribution, |weight| * |value|.
        effect: direct effect on the logit of the target, or None.
        text: of the entry, "" if none is known.
        promotes: the tokens whose logits its value raises most, where they were asked for; with a negative weight, it
            lowers them.
    """

    layer: int
    position: int
    token: str
    target: str
    entry: int
    head: int
    score: float
    threshold: float
    up_score: float | None
    up_threshold: float | None
    weight: float
    norm: float
    effect: float | None
    text: str = ""
    promotes: tuple[str, ...] = ()


@dataclass(frozen=True, eq=False)
class LayerTrace:
    """One layer. Of all entries the kept ones, those with the largest contributions first; ids are -1 after the last.

    Attributes:
        layer: its number.
        name: path of the module that reads the entries.
        num_entries: entries that it could read, counted once for each head.
        ids: of the kept entries.
        heads: that read them.
        scores: with thresholds; of each part, "up", or "gate" and "up".
        thresholds: likewise; NaN where they are not known.
        weights: with which values are added.
        norms: of contributions, |weight| * |value|.
        effects: direct effects on the logits of the targets, or None.
        active: entries with a positive score (of gated layers: gate score), kept or not; of those read.
        output_norm: of what all entries together write, without b2.
        explained: 1 - |rest| / |all|, with what all entries write and what is left of it without the kept ones.
        effect: direct effect of the layer's whole output, b2 too; or None.
        attention_effect: that of the attention of the same block, or None.
    """

    layer: int
    name: str
    num_entries: int
    ids: Int[Tensor, "positions kept"]
    heads: Int[Tensor, "positions kept"]
    scores: Float[Tensor, "parts positions kept"]
    thresholds: Float[Tensor, "parts positions kept"]
    weights: Float[Tensor, "positions kept"]
    norms: Float[Tensor, "positions kept"]
    effects: Float[Tensor, "positions kept"] | None
    active: Int[Tensor, " positions"]
    output_norm: Float[Tensor, " positions"]
    explained: Float[Tensor, " positions"]
    effect: Float[Tensor, " positions"] | None = None
    attention_effect: Float[Tensor, " positions"] | None = None


@dataclass(frozen=True, eq=False)
class Trace:
    """The entries that fired for a text, as `af.knowledge.trace` returns it.

    The direct effect of a contribution c on the logit of a target is (w_target - mean of w) . N c, with the rows w of
    the unembedding and the final norm N with its scale as it was in this forward pass: what c adds to that logit, less
    what it adds to all logits alike, without the detours through later layers. Effects of the embedding, of all
    attentions, of all layers' entries and of constants sum to the centred logit exactly.

    Attributes:
        model: name of the model.
        tokens: the text of each token.
        positions: of the tokens that were traced.
        layers: what was found in each layer that was traced.
        targets: text of the token, for each position, whose logit the effects are about; empty without effects.
        target_ids: their ids.
        logits: of the targets, less the mean over the vocabulary; or None.
        embedding_effect: direct effect of what enters the first block, or None.
        constant_effect: what the biases of the final norm and of the unembedding add, or None.
        rest_effect: direct effect of all layers' entries and attentions that were not traced; or None.
        without: why there are no effects; "" if there are.
        texts: id -> text, of kept entries that have one.
        promoted: (layer, id, head) -> tokens whose logits the value raises most, for the entries asked for.
    """

    model: str
    tokens: tuple[str, ...]
    positions: tuple[int, ...]
    layers: tuple[LayerTrace, ...]
    targets: tuple[str, ...] = ()
    target_ids: tuple[int, ...] = ()
    logits: Float[Tensor, " positions"] | None = None
    embedding_effect: Float[Tensor, " positions"] | None = None
    constant_effect: Float[Tensor, " positions"] | None = None
    rest_effect: Float[Tensor, " positions"] | None = None
    without: str = ""
    texts: Mapping[int, str] = field(default_factory=dict[int, str])
    promoted: Mapping[tuple[int, int, int], tuple[str, ...]] = field(
        default_factory=dict[tuple[int, int, int], tuple[str, ...]]
    )

    def __iter__(self) -> Iterator[LayerTrace]:
        return iter(self.layers)

    def layer(self, number: int) -> LayerTrace:
        """What was found in one layer.

        Raises:
            ValueError: that layer was not traced; the message lists those that were.
        """
        found = next((one for one in self.layers if one.layer == number), None)
        if found is None:
            raise ValueError(f"layer must be one of {[one.layer for one in self.layers]}, got {number!r}")
        return found

    def row(self, position: int) -> int:
        """The row of a position; -1 is the last row, -2 the one before it.

        Raises:
            ValueError: that position was not traced.
        """
        if -len(self.positions) <= position < 0:
            return len(self.positions) + position
        if position not in self.positions:
            raise ValueError(f"position must be one of the traced {list(self.positions)}, got {position}")
        return self.positions.index(position)

    def token(self, row: int) -> str:
        """The token of a row as a label, and the target beside it."""
        name = token_label(self.tokens[self.positions[row]])
        return f"{name} → {token_label(self.targets[row])}" if self.targets else name

    def fired(
        self, position: int | None = None, layer: int | None = None, count: int | None = None, by: By | None = None
    ) -> list[Fired]:
        """Kept entries, the strongest first.

        Args:
            position: of a token, -1 for the last traced one; None for all.
            layer: number of a layer; None for all.
            count: how many; None for all that were kept.
            by: "norm" of the contribution, or "effect" (its size); by default the effect where there is one.

        Raises:
            ValueError: a position or layer that was not traced, or effects that do not exist.
        """
        order = by or ("norm" if self.without else "effect")
        if order not in ("norm", "effect"):
            raise ValueError(f"by must be 'norm' or 'effect', got {by!r}")
        if count is not None:
            checks.integer("count", count, 1)
        if order == "effect" and self.without:
            raise ValueError(f"this trace has no direct effects: {self.without}")
        rows = range(len(self.positions)) if position is None else [self.row(position)]
        chosen = self.layers if layer is None else (self.layer(layer),)
        found: list[tuple[float, int, int, int]] = []
        for index, one in enumerate(chosen):
            size = cast(Tensor, one.effects).abs() if order == "effect" else one.norms
            for row in rows:
                kept = int((one.ids[row] >= 0).sum())
                found += [(-value, row, index, place) for place, value in enumerate(size[row, :kept].tolist())]
        found.sort()
        return [self._fired(chosen[index], row, place) for _, row, index, place in found[:count]]

    def table(self, position: int | None = -1, layer: int | None = None, count: int = 12, by: By | None = None) -> str:
        """The strongest entries as lines for a terminal; see `fired`."""
        found = self.fired(position, layer, count, by)
        head = [
            "layer",
            "token",
            "entry",
            "score",
            "threshold",
            "weight",
            "norm",
            "effect",
            "text, or + promoted, − suppressed tokens",
        ]
        lines = [head] + [
            [
                str(one.layer),
                f"{token_label(one.token)} ({one.position})",
                str(one.entry) if one.head == 0 else f"{one.entry} (head {one.head})",
                f"{one.score:+.3g}",
                f"{one.threshold:+.3g}",
                f"{one.weight:+.3g}",
                f"{one.norm:.3g}",
                "" if one.effect is None else f"{one.effect:+.3g}",
                shorten(one.text, 40) if one.text else _words(one),
            ]
            for one in found
        ]
        return aligned(lines, left=[1, 8])

    def to_csv(self, path: str | os.PathLike[str] | None = None) -> str:
        """A line for each kept entry of each token and layer, as CSV text, written to `path` if it is given."""
        buffer = io.StringIO(newline="")
        writer = csv.writer(buffer, lineterminator="\n")
        writer.writerow(_COLUMNS)
        for one in self.layers:
            for row in range(len(self.positions)):
                for place in range(int((one.ids[row] >= 0).sum())):
                    cells = [getattr(self._fired(one, row, place), name) for name in _COLUMNS]
                    writer.writerow([_cell(cell) for cell in cells])
        if path is not None:
            Path(path).write_text(buffer.getvalue(), encoding="utf-8")
        return buffer.getvalue()

    def to_json(self, path: str | os.PathLike[str] | None = None) -> str:
        """Everything as JSON text, written to `path` if it is given; `from_json` reads it back, number for number."""
        own = {each.name: _plain(getattr(self, each.name)) for each in fields(self)}
        own["layers"] = [{each.name: _plain(getattr(one, each.name)) for each in fields(one)} for one in self.layers]
        own["texts"] = {str(entry): text for entry, text in self.texts.items()}
        own["promoted"] = [[*key, list(words)] for key, words in self.promoted.items()]
        double = any(one.weights.dtype == torch.float64 for one in self.layers)
        text = json.dumps({"schema": SCHEMA, "dtype": "float64" if double else "float32", **own}, allow_nan=False)
        if path is not None:
            Path(path).write_text(text + "\n", encoding="utf-8")
        return text + "\n"

    @classmethod
    def from_json(cls, text: str) -> Trace:
        """The trace that `to_json` wrote.

        Raises:
            ValueError: the text is of another kind.
        """
        found = json.loads(text)
        if not isinstance(found, dict) or cast(dict[str, Any], found).get("schema") != SCHEMA:
            raise ValueError(f'expected the JSON text of a Trace, with "schema": "{SCHEMA}"')
        known = cast(dict[str, Any], found)
        dtype = torch.float64 if known["dtype"] == "float64" else torch.float32
        layers = [
            LayerTrace(**{name: _read(name, value, dtype) for name, value in one.items()})
            for one in cast(list[dict[str, Any]], known["layers"])
        ]
        own = {each.name: _read(each.name, known[each.name], dtype) for each in fields(cls)}
        own["layers"] = tuple(layers)
        for name in ("tokens", "positions", "targets", "target_ids"):
            own[name] = tuple(known[name])
        own["texts"] = {int(entry): words for entry, words in known["texts"].items()}
        own["promoted"] = {(key[0], key[1], key[2]): tuple(key[3]) for key in known["promoted"]}
        return cls(**own)

    def _fired(self, one: LayerTrace, row: int, place: int) -> Fired:
        entry, head = int(one.ids[row, place]), int(one.heads[row, place])
        gated = len(one.scores) == 2
        position = self.positions[row]
        return Fired(
            one.layer,
            position,
            self.tokens[position],
            self.targets[row] if self.targets else "",
            entry,
            head,
            float(one.scores[0, row, place]),
            float(one.thresholds[0, row, place]),
            float(one.scores[1, row, place]) if gated else None,
            float(one.thresholds[1, row, place]) if gated else None,
            float(one.weights[row, place]),
            float(one.norms[row, place]),
            None if one.effects is None else float(one.effects[row, place]),
            self.texts.get(entry, ""),
            self.promoted.get((one.layer, entry, head), ()),
        )

    def __repr__(self) -> str:
        about = f"{plural(len(self.positions), 'position')} of {plural(len(self.tokens), 'token')}"
        lines = [f"Trace({self.model!r}: {about}, {plural(len(self.layers), 'layer')})"]
        for one in self.layers:
            active = percent(float(one.active.double().mean()) / max(one.num_entries, 1))
            kept = percent(max(0.0, float(one.explained.double().mean())))
            lines.append(f"  layer {one.layer}: {active} of the entries active, {one.ids.shape[1]} kept explain {kept}")
        return "\n".join(lines + ([f"  no direct effects: {self.without}"] if self.without else []))


def _words(one: Fired) -> str:
    """The tokens that an entry promotes, or with a negative weight suppresses."""
    sign = "+" if one.weight > 0 else "−"
    return " ".join([sign, *map(token_label, one.promotes)]) if one.promotes else ""


def _cell(value: object) -> object:
    if isinstance(value, float):
        return "" if value != value else f"{value:.9g}"
    if isinstance(value, tuple):
        return " | ".join(visible(part) for part in cast(Sequence[object], value))
    return "" if value is None else visible(value) if isinstance(value, str) else value


def _plain(value: object) -> object:
    """Tensors as nested lists with as many digits as they have; NaN as null."""
    if not isinstance(value, Tensor):
        return value
    if not value.is_floating_point():
        return value.tolist()
    return _rounded(value.tolist(), _DIGITS[value.dtype])


def _rounded(value: object, digits: int) -> object:
    if isinstance(value, list):
        return [_rounded(one, digits) for one in cast(list[object], value)]
    number = float(cast(float, value))
    return None if number != number else float(f"{number:.{digits}g}")


_COUNTS: Final = ("ids", "heads", "active")
_LISTS: Final = ("tokens", "positions", "targets", "target_ids", "layers", "promoted")


def _read(name: str, value: object, dtype: torch.dtype) -> Any:
    """Lists of numbers as tensors again."""
    if not isinstance(value, list) or name in _LISTS:
        return value
    if name in _COUNTS:
        return torch.tensor(value, dtype=torch.int64)
    return torch.tensor(_known(cast(list[object], value)), dtype=dtype)


def _known(value: list[object]) -> list[object]:
    return [_known(cast(list[object], v)) if isinstance(v, list) else float("nan") if v is None else v for v in value]
