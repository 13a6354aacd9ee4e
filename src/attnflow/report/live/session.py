"""`Session`: one design with its history, the operations that change it, and the questions that are asked about it."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, replace
from itertools import islice
from typing import Final, cast

from attnflow._core.checks import IntArray
from attnflow._core.errors import AttnflowError
from attnflow._core.markup import plural
from attnflow._core.mask_examples import EXAMPLES
from attnflow._core.plain import as_integer
from attnflow.masks.export import FORMATS
from attnflow.masks.spec import named_masks
from attnflow.report.hasse_svg import MAX_POINTED, diagram, runs, runs_of
from attnflow.report.live.actions import ACTIONS, Message, model_names
from attnflow.report.live.code import code, exported
from attnflow.report.live.design import MAX_LAYERS, MAX_POSITIONS, Design, Layer
from attnflow.report.live.families import families, family
from attnflow.report.live.tiles import Area, tile
from attnflow.tasks.leaks import LeakReport, survey, witnesses

Reply = dict[str, object]

_HISTORY: Final = 200
_LISTED: Final = 100  # leaks, and 40 times as many positions and labels
_WALKED: Final = 1 << 14  # positions that are walked through to show the ways of leaks before they are asked for
_MAX_ARRIVALS: Final = 256  # layers that a receptive field is followed
_MAX_LINK: Final = 6000  # characters of a design that a URL holds
_LARGEST: Final = 1 << 22  # integers of a message


@dataclass(frozen=True)
class _Step:
    """What there was before an operation, and where alone that changed masks, if it did so in one place."""

    name: str
    design: Design
    area: Area | None = None


class Session:
    """What one page or widget works on.

    `handle` takes one message and gives one reply, both plain data:

    - `{"op": "pick", "layer": 0, "name": "sliding_window", "settings": {"n": "64", "window": "8"}}` and the other
      operations of `attnflow.report.live.actions` change the design; the reply tells what it is now. With a "tile"
      it holds that window of the matrix, too.
      A page that shows the picture of revision "base" gets of it only what the operation has changed.
    - `undo`, `redo`; `state`, `catalogue`, `tile`, `flow`, `diagram`, `field`, `leaks`, `witness`, `cost`,
      `difference`, `code`, `export`, `families` and `family` change nothing. A question with the "revision" of a design
      that is no more is answered `"stale": true`.

    A mistake is answered, and never raised: `{"ok": false, "error": what was expected, what came}`.

    Attributes:
        design: what there is now.
        revision: how many designs there have been.
    """

    def __init__(self, design: Design) -> None:
        self.design = design
        self.revision = 0
        self._plain: tuple[Design, str] | None = None
        self._survey: tuple[Design, tuple[LeakReport, IntArray]] | None = None
        self._past: list[_Step] = []
        self._future: list[_Step] = []
        self._questions: Mapping[str, Callable[[Message], Reply]] = {
            "state": lambda _: self._state([]),
            "catalogue": lambda _: catalogue(),
            "tile": self._tile,
            "flow": lambda _: self._flow(),
            "diagram": lambda _: diagram(self.design.flow.hasse, self._texts()),
            "field": self._field,
            "leaks": lambda _: self._leaks(),
            "witness": self._witness,
            "cost": self._cost,
            "difference": lambda _: self._difference(),
            "code": lambda _: code(self.design),
            "export": lambda message: exported(self._layer(message), str(message.get("format"))),
            "families": lambda _: families(),
            "family": family,
        }

    def handle(self, message: Mapping[str, object]) -> Reply:
        """The reply to one message, with its `id`."""
        identity = {"id": message["id"]} if isinstance(message.get("id"), int) else {}
        try:
            _require_small(message)
            return {**identity, "ok": True, **self._answer(message)}
        except (ValueError, TypeError, AttnflowError) as error:
            return {**identity, "ok": False, "error": str(error)}
        except MemoryError:
            return {**identity, "ok": False, "error": "not enough memory for a mask of this size"}
        except RecursionError:
            return {**identity, "ok": False, "error": "the message is nested too deeply"}

    def _answer(self, message: Message) -> Reply:
        name = message.get("op")
        if not isinstance(name, str) or name not in {*ACTIONS, *self._questions, "undo", "redo"}:
            raise ValueError(f"unknown operation {str(name)[:40]!r}")
        if name in self._questions:
            revision = message.get("revision")
            if revision is not None and revision != self.revision:
                return {"stale": True}
            return {**self._questions[name](message), "revision": self.revision}
        notices: list[str] = []
        before = self.design
        if name in ("undo", "redo"):
            back, ahead = (self._past, self._future) if name == "undo" else (self._future, self._past)
            if not back:
                raise ValueError(f"there is nothing to {name}")
            step = back.pop()
            ahead.append(replace(step, design=before))
            self.design = step.design
        else:
            self.design, notices = ACTIONS[name](before, message)
            step = _Step(name, before, _painted(message) if name == "paint" else None)
            self._past = [*self._past[1 - _HISTORY :], step]
            self._future = []
        self.revision += 1
        window = message.get("tile")
        reply = self._state(notices, before)
        if not isinstance(window, Mapping) or not self._is_inside(window):
            return reply
        is_shown = window.get("base") == self.revision - 1
        return reply | {"tile": self._tile(window, self._changed(window, before, step.area) if is_shown else None)}

    @property
    def plain(self) -> str:
        """The design as JSON."""
        if self._plain is None or self._plain[0] is not self.design:
            self._plain = self.design, json.dumps(self.design.to_dict(), separators=(",", ":"))
        return self._plain[1]

    def _state(self, notices: list[str], before: Design | None = None) -> Reply:
        """What there is; after an operation without those lists that are what they were `before`."""
        design = self.design
        lists: dict[str, tuple[object, Callable[[], Reply]]] = {
            "tokens": (design.tokens, lambda: {"tokens": list(design.tokens[: 40 * _LISTED])}),
            "labels": (design.labels, lambda: {"labels": [list(pair) for pair in design.labels[: 40 * _LISTED]]}),
            "sources": (design.sources, lambda: {"sources": [[i, *made] for i, made in _first(design.sources)]}),
        }
        reply: Reply = {
            "revision": self.revision,
            "size": design.size,
            "layers": [
                {"title": each.title, "pairs": each.pairs, "density": each.pairs / design.size**2, "spec": _shown(each)}
                for each in design.layers
            ],
            "stacked": design.stacked,
            "num_labels": len(design.labels),
            "against": None if design.against is None else design.against.title,
            "undo": self._past[-1].name if self._past else None,
            "redo": self._future[-1].name if self._future else None,
            "design": self.plain if len(self.plain) <= _MAX_LINK else None,
            "notices": notices,
        }
        for name, (value, listed) in lists.items():
            if before is None or getattr(before, name) is not value:
                reply |= listed()
        return reply

    def _tile(self, window: Message, changed: Area | None = None) -> Reply:
        """A window of the matrix; for a page that shows what it was before, what has `changed` of it."""
        against = self.design.against
        sizes = [as_integer(window.get(name), name) for name in ("first_query", "first_key", "span", "cells")]
        return tile(self._layer(window).mask, None if against is None else against.mask, *sizes, changed=changed)

    def _is_inside(self, window: Message) -> bool:
        """Whether a window that a page showed is still one: the layer may be gone, and the mask be shorter."""
        layer, *first = (as_integer(window.get(name, 0), name) for name in ("layer", "first_query", "first_key"))
        return layer < len(self.design.layers) and max(first) < self.design.size

    def _changed(self, window: Message, before: Design, area: Area | None) -> Area | None:
        """Where alone the picture of a layer differs from that of the design before; None if that is not known."""
        number = as_integer(window.get("layer", 0), "layer")
        if number >= len(before.layers) or before.against is not self.design.against:
            return None
        return Area(0, 0, 0, 0) if before.layers[number].mask is self._layer(window).mask else area

    def _flow(self) -> Reply:
        flow = self.design.flow
        return {
            "depth": flow.depth,
            "dense": flow.is_dense,
            "num_layers": flow.num_layers,
            "classes": len(flow.classes),
            "largest_class": max(map(len, flow.classes)),
            "covers": len(flow.hasse.edges),
            "levels": max(flow.hasse.levels) + 1,
            "closure_density": flow.closure_density,
        }

    def _field(self, message: Message) -> Reply:
        position = as_integer(message.get("position"), "position")
        first = self.design.flow.arrivals(position, _MAX_ARRIVALS)
        return {"position": position, "runs": runs_of(first.tolist()), "followed": _MAX_ARRIVALS}

    def _leaks(self) -> Reply:
        if not self.design.labels:
            return {"labels": 0, "leaks": [], "total": 0, "dead": [], "num_dead": 0, "dead_text": ""}
        report, pairs = self._surveyed()
        targets = self.design.task.targets
        leaks: list[Reply] = [
            {"position": position, "token": token, "carrier": carrier}
            for position, token, carrier in zip(
                *(targets.column(name)[pairs[:_LISTED, 0]].tolist() for name in ("position", "data_index")),
                pairs[:_LISTED, 1].tolist(),
                strict=True,
            )
        ]
        for number in range(min(len(leaks), max(1, _WALKED // self.design.size))):
            leaks[number] |= self._witness({"number": number})
        return {
            "labels": report.num_labels,
            "leaks": leaks,
            "total": len(pairs),
            "dead": list(report.dead[:MAX_POINTED]),
            "num_dead": len(report.dead),
            "dead_text": runs(report.dead[:MAX_POINTED]),
        }

    def _surveyed(self) -> tuple[LeakReport, IntArray]:
        if self._survey is None or self._survey[0] is not self.design:
            self._survey = self.design, survey(self.design.task)
        return self._survey[1]

    def _witness(self, message: Message) -> Reply:
        """The way of one leak, which takes a walk through the masks."""
        report, pairs = self._surveyed()
        number = as_integer(message.get("number"), "number")
        if not 0 <= number < len(pairs):
            raise ValueError(f"number must be below {plural(len(pairs), 'leak')}, got {number}")
        (leak,) = witnesses(self.design.task, pairs[number : number + 1], report.layers)
        return {"number": number, "witness": leak.witness, "route": leak.route}

    def _cost(self, message: Message) -> Reply:
        heads, head_dim, block = (
            as_integer(message.get(name, otherwise), name)
            for name, otherwise in (("num_heads", 1), ("head_dim", 64), ("block_size", 128))
        )
        result = self._layer(message).mask.cost(num_heads=heads, head_dim=head_dim, block_size=block)
        blocks = {**asdict(result.blocks), "total": result.blocks.total}
        return {"blocks": blocks, "skipped": result.skipped, "backends": result.rows()}

    def _difference(self) -> Reply:
        against = self.design.against
        if against is None:
            return {"against": None}
        layers: list[Reply] = []
        for layer in self.design.layers:
            extra, missing = layer.mask & ~against.mask, against.mask & ~layer.mask
            layers.append(
                {"extra": extra.nnz, "missing": missing.nnz, "first": layer.mask.difference(against.mask, 20)}
            )
        return {"against": against.title, "layers": layers}

    def _layer(self, message: Message) -> Layer:
        number = as_integer(message.get("layer", 0), "layer")
        if not 0 <= number < len(self.design.layers):
            raise ValueError(f"layer must be below {plural(len(self.design.layers), 'layer')}, got {number}")
        return self.design.layers[number]

    def _texts(self) -> list[str] | None:
        tokens = self.design.tokens
        return [*tokens, *[""] * (self.design.size - len(tokens))] if tokens else None


def catalogue() -> Reply:
    """The masks that can be picked, with their parameters and settings to begin with; and the limits."""
    masks = [
        {
            "name": entry.name,
            "relation": entry.summary,
            "parameters": [asdict(parameter) for parameter in entry.parameters],
            "example": dict(EXAMPLES[entry.name]),
        }
        for entry in named_masks().values()
    ]
    limits = {"max_positions": MAX_POSITIONS, "max_layers": MAX_LAYERS}
    return {"masks": masks, "models": model_names(), "formats": sorted(FORMATS), **limits}


def _painted(message: Message) -> Area:
    """The smallest area around the strokes of a message."""
    first_query, last_query, first_key, last_key, _ = zip(*cast("list[list[int]]", message["strokes"]), strict=True)
    return Area(min(first_query), max(last_query), min(first_key), max(last_key))


def _first(sources: Mapping[int, tuple[int, ...]]) -> list[tuple[int, tuple[int, ...]]]:
    return list(islice(sources.items(), 40 * _LISTED))


def _shown(layer: Layer) -> object:
    """The specification where it is a mask of the catalogue, so that a form can show its parameters."""
    return layer.spec if "name" in layer.spec and not layer.strokes else None


def _require_small(value: object) -> None:
    """Refuse integers beyond what any position, size or token id of a design can be."""
    waiting = [value]
    while waiting:
        here = waiting.pop()
        if isinstance(here, Mapping):
            waiting += here.values()
        elif isinstance(here, list | tuple):
            waiting += here
        elif isinstance(here, int) and abs(here) > _LARGEST:
            raise ValueError(f"integers are at most {_LARGEST:,}, got {here}")
