"""`Design`: what a page shows and may change, as an immutable value with plain data in and out."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property, lru_cache
from itertools import groupby
from typing import Final, NamedTuple, cast

import numpy as np

from attnflow._core.checks import IntArray
from attnflow._core.parameters import find
from attnflow._core.plain import as_integer, as_list, as_object, only_keys
from attnflow.masks.intervals import IntervalRows
from attnflow.masks.mask import Mask
from attnflow.masks.spec import mask_from_dict
from attnflow.order.flow import Flow, analyze
from attnflow.tasks.leaks import LeakReport, survey
from attnflow.tasks.task import LabelTable, Task
from attnflow.tasks.tokens import Ragged, TokenSequence, TokenTable

MAX_POSITIONS: Final = 131_072
MAX_LAYERS: Final = 64
_MAX_STROKES: Final = 4096
_MAX_TEXT: Final = 400  # characters of one token
_VERSION: Final = 1

Spec = Mapping[str, object]

# Two packed documents of six tokens, of which the first reads one token of the second, which it must predict.
WELCOME: Final = {
    "version": _VERSION,
    "layers": [
        {
            "mask": {
                "and": [
                    {"name": "document", "parameters": {"lengths": [6, 6]}},
                    {"name": "sliding_window", "parameters": {"n": 12, "window": 3}},
                ]
            },
            "strokes": [[5, 6, 6, 7, 1]],
        }
    ],
    "tokens": ["The", "cat", "sat", "down", "here", ".", "We", "like", "hot", "black", "tea", "!"],
    "labels": "next",
}


class Stroke(NamedTuple):
    """A painted rectangle of pairs: queries [first_query, last_query), keys [first_key, last_key)."""

    first_query: int
    last_query: int
    first_key: int
    last_key: int
    allow: bool


@dataclass(frozen=True)
class MaskLayer:
    """The mask of one layer, or of all: `spec` with `strokes` painted on it in order; `base` describes `spec`."""

    spec: Spec
    strokes: tuple[Stroke, ...]
    mask: Mask = field(compare=False, repr=False)
    base: str = field(compare=False, repr=False)

    @classmethod
    def of(cls, spec: object, strokes: Iterable[Stroke] = (), where: str = "mask") -> MaskLayer:
        """Builds a layer from plain data; raises ValueError unless it is a square mask of allowed length."""
        mask = mask_from_dict(spec, where)
        if mask.num_queries != mask.num_keys:
            raise ValueError(f"{where}: expected as many queries as keys, got a mask of shape {mask.shape}")
        if not 0 < mask.num_queries <= MAX_POSITIONS:
            raise ValueError(f"{where}: expected 1 to {MAX_POSITIONS:,} positions, got {mask.num_queries:,}")
        return cls(dict(cast(Spec, spec)), (), mask, repr(mask)).painted(strokes)

    def painted(self, strokes: Iterable[Stroke]) -> MaskLayer:
        """Allows or forbids these rectangles on top of the mask. Cost: O(intervals)."""
        added = tuple(strokes)
        if len(self.strokes) + len(added) > _MAX_STROKES:
            raise ValueError(f"at most {_MAX_STROKES:,} strokes, got {len(self.strokes) + len(added):,}")
        mask = self.mask
        for allow, group in groupby(added, key=lambda stroke: stroke.allow):
            boxes = list(group)
            rows = np.concatenate([np.arange(s.first_query, s.last_query) for s in boxes])
            heights = [s.last_query - s.first_query for s in boxes]
            starts = np.repeat([s.first_key for s in boxes], heights)
            ends = np.repeat([s.last_key for s in boxes], heights)
            drawn = Mask(IntervalRows.build(rows, starts, ends, mask.num_queries, mask.num_queries), "painted")
            mask = mask | drawn if allow else mask & ~drawn
        return replace(self, strokes=self.strokes + added, mask=mask)

    @property
    def title(self) -> str:
        return self.base if not self.strokes else f"{self.base}, painted"

    @cached_property
    def pairs(self) -> int:
        return self.mask.nnz

    def baked(self) -> Spec:
        """Returns one specification of the result: `spec`, or row intervals if it was painted."""
        return self.spec if not self.strokes else self.mask.to_dict()

    def to_dict(self) -> dict[str, object]:
        strokes = [[*map(int, stroke)] for stroke in self.strokes]
        return {"mask": dict(self.spec), **({"strokes": strokes} if strokes else {})}

    @classmethod
    def from_dict(cls, values: object, where: str) -> MaskLayer:
        content = as_object(values, where)
        only_keys(content, where, ("mask",), ("strokes",))
        plain = MaskLayer.of(content["mask"], where=f"{where}.mask")
        strokes = as_list(content.get("strokes", []), f"{where}.strokes")
        return plain.painted(
            stroke_of(each, plain.mask.num_queries, f"{where}.strokes[{i}]") for i, each in enumerate(strokes)
        )


@dataclass(frozen=True)
class Design:
    """`layers` holds one mask for all, or if `stacked` one for each; `labels` are (position, data token).

    `sources` gives the data tokens of an input unless it is its own alone, `tokens` texts for the first positions.
    """

    layers: tuple[MaskLayer, ...]
    stacked: bool = False
    tokens: tuple[str, ...] = ()
    sources: Mapping[int, tuple[int, ...]] = field(default_factory=dict[int, tuple[int, ...]])
    labels: tuple[tuple[int, int], ...] = ()

    @property
    def size(self) -> int:
        return self.layers[0].mask.num_queries

    @cached_property
    def flow(self) -> Flow:
        masks = [layer.mask for layer in self.layers]
        return analyze(masks if self.stacked else masks[0])

    @cached_property
    def task(self) -> Task:
        """Returns the design as a task; position i is data token i unless `sources` differs."""
        own = np.arange(self.size)
        made = Ragged.single(own)
        if self.sources:
            made = Ragged.of([self.sources.get(i, (i,)) for i in range(self.size)])
        inputs = TokenSequence(TokenTable(Ragged.single(own), own, made), own)
        position, token = np.array(self.labels, dtype=np.int64).reshape(-1, 2).T
        masks = [layer.mask for layer in self.layers]
        task = Task(
            inputs, LabelTable.columns(position, token, token, token, 0, 1.0), masks if self.stacked else masks[0]
        )
        vars(task)["flow"] = self.flow  # what the masks let flow is analysed once
        return task

    @cached_property
    def survey(self) -> tuple[LeakReport, IntArray]:
        """Finds which labels leak, and where, without the witness paths."""
        return survey(self.task)

    @cached_property
    def plain(self) -> str:
        return json.dumps(self.to_dict(), separators=(",", ":"))

    @property
    def texts(self) -> list[str] | None:
        return [*self.tokens, *[""] * (self.size - len(self.tokens))] if self.tokens else None

    @property
    def kind_of_labels(self) -> str | None:
        """Names the labels if they are the "next" token or their "own" at all positions, to keep links short."""
        kinds = [kind for kind in ("next", "own") if len(self.labels) == self.size - (kind == "next")]
        return next((kind for kind in kinds if labels_of(kind, self.size) == self.labels), None)

    def with_layer(self, number: int, layer: MaskLayer) -> tuple[Design, list[str]]:
        if layer.mask.num_queries == self.size:
            layers = tuple(layer if i == number else each for i, each in enumerate(self.layers))
            return replace(self, layers=layers), []
        size = layer.mask.num_queries
        if len(self.layers) > 1:
            mistake = f"expected {self.size}, got {size}; remove the other layers first"
            raise ValueError(f"the layers of a stack have as many positions each: {mistake}")
        labels = tuple(pair for pair in self.labels if max(pair) < size)
        sources = {i: made for i, made in self.sources.items() if i < size and max(made, default=0) < size}
        gone = len(self.labels) - len(labels) + len(self.sources) - len(sources)
        notices = [f"{gone} labels and inputs beyond position {size - 1} are gone"] if gone else []
        return Design((layer,), self.stacked, self.tokens[:size], sources, labels), notices

    def to_dict(self) -> dict[str, object]:
        return {
            "version": _VERSION,
            "layers": [layer.to_dict() for layer in self.layers],
            **({"stacked": True} if self.stacked else {}),
            **({"tokens": list(self.tokens)} if self.tokens else {}),
            **({"sources": [[i, *made] for i, made in self.sources.items()]} if self.sources else {}),
            **({"labels": self.kind_of_labels or [list(pair) for pair in self.labels]} if self.labels else {}),
        }

    @classmethod
    def from_dict(cls, values: object, where: str = "design") -> Design:
        """Reads plain data; raises ValueError, naming the place, for bad or too large parts."""
        content = as_object(values, where)
        only_keys(content, where, ("layers",), ("version", "stacked", "tokens", "sources", "labels"))
        if content.get("version", _VERSION) != _VERSION:
            raise ValueError(f"{where}: this release reads version {_VERSION}, got version {content['version']!r}")
        specs = as_list(content["layers"], f"{where}.layers")
        stacked = content.get("stacked", False)
        if not 1 <= len(specs) <= (MAX_LAYERS if stacked is True else 1):
            raise ValueError(f"{where}.layers: expected one, or of a stack 1 to {MAX_LAYERS}, got {len(specs)}")
        layers = tuple(MaskLayer.from_dict(spec, f"{where}.layers[{i}]") for i, spec in enumerate(specs))
        size = layers[0].mask.num_queries
        if any(layer.mask.num_queries != size for layer in layers):
            raise ValueError(f"{where}.layers: expected masks of one size, got {[x.mask.num_queries for x in layers]}")
        sources: dict[int, tuple[int, ...]] = {}
        for i, row in enumerate(as_list(content.get("sources", []), f"{where}.sources")):
            position, *made = _positions(row, size, f"{where}.sources[{i}]", 1)
            sources[position] = tuple(sorted(set(made)))
        labels = _labels(content.get("labels", []), size, f"{where}.labels")
        tokens = tokens_of(content.get("tokens", []), size, f"{where}.tokens")
        return cls(layers, stacked is True, tokens, sources, labels)

    @classmethod
    def of_task(cls, task: Task) -> Design:
        if task.size > MAX_POSITIONS or len(task.masks) > MAX_LAYERS:
            limits = f"{MAX_POSITIONS:,} positions and {MAX_LAYERS} layers"
            raise ValueError(f"expected at most {limits}, got {task.size:,} and {len(task.masks)}")
        layers = [{"mask": mask.to_dict()} for mask in task.masks]
        sources = [
            [i, *sorted(token.provenance)] for i, token in enumerate(task.inputs) if token.provenance != frozenset({i})
        ]
        labels = [[label.position, label.data_index] for label in task.labels if label.data_index is not None]
        stacked = task.num_layers is not None
        return cls.from_dict({"layers": layers, "stacked": stacked, "sources": sources, "labels": labels}, "task")


def design_for(flow: Flow, tokens: Sequence[str]) -> Design:
    if len(tokens) != flow.size:
        raise ValueError(f"expected a label for each of {flow.size} positions, got {len(tokens)}")
    layers = [{"mask": mask.to_dict()} for mask in flow.masks]
    content = {"layers": layers, "stacked": flow.num_layers is not None, "tokens": list(tokens)}
    return Design.from_dict(content, "the masks")


@lru_cache(8)
def labels_of(kind: str, size: int) -> tuple[tuple[int, int], ...]:
    """Returns (position, data token) labels of all positions: the "next" token, their "own", or "none"."""
    shifts = {"next": 1, "own": 0, "none": size}
    shift = find(kind, shifts, "kind of labels")
    return tuple((i, i + shift) for i in range(size - shift))


def _labels(values: object, size: int, where: str) -> tuple[tuple[int, int], ...]:
    if isinstance(values, str):
        return labels_of(values, size)
    rows = [_positions(row, size, f"{where}[{i}]", 2, 2) for i, row in enumerate(as_list(values, where))]
    return tuple(dict.fromkeys((position, token) for position, token in rows))


def stroke_of(values: object, size: int, where: str) -> Stroke:
    """Reads [first query, last query, first key, last key, allow]; the last ones are excluded."""
    numbers = [as_integer(each, where) for each in as_list(values, where)]
    if len(numbers) != 5 or numbers[4] not in (0, 1):
        raise ValueError(f"{where}: expected [first query, last query, first key, last key, 0 or 1], got {numbers}")
    first_query, last_query, first_key, last_key, allow = numbers
    if not (0 <= first_query < last_query <= size and 0 <= first_key < last_key <= size):
        raise ValueError(f"{where}: expected a rectangle within {size} positions, got {numbers[:4]}")
    return Stroke(first_query, last_query, first_key, last_key, bool(allow))


def tokens_of(values: object, size: int, where: str) -> tuple[str, ...]:
    texts = as_list(values, where)
    for text in texts:
        if not isinstance(text, str) or len(text) > _MAX_TEXT:
            raise ValueError(f"{where}: expected texts of at most {_MAX_TEXT} characters, got {str(text)[:40]!r}")
    return tuple(cast(Sequence[str], texts[:size]))


def _positions(values: object, size: int, where: str, least: int, most: int | None = None) -> list[int]:
    numbers = [as_integer(each, where) for each in as_list(values, where)]
    if len(numbers) < least or (most is not None and len(numbers) > most):
        wanted = least if most == least else f"at least {least}"
        raise ValueError(f"{where}: expected {wanted} positions, got {numbers}")
    for number in numbers:
        if not 0 <= number < size:
            raise ValueError(f"{where}: expected positions in [0, {size}), got {number}")
    return numbers
