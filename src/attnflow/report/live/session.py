"""`Session`: one design with its history, the operations that change it, and the questions that are asked about it."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from typing import Final

from attnflow._core.errors import AttnflowError
from attnflow._core.markup import plural
from attnflow._core.mask_examples import EXAMPLES
from attnflow._core.plain import as_integer
from attnflow.masks.costs import cost
from attnflow.masks.export import FORMATS
from attnflow.masks.spec import named_masks
from attnflow.report.hasse_svg import runs
from attnflow.report.live.actions import ACTIONS, Message
from attnflow.report.live.code import code, exported
from attnflow.report.live.design import MAX_LAYERS, MAX_POSITIONS, Design, Layer
from attnflow.report.live.diagram import MAX_POINTED, diagram, runs_of
from attnflow.report.live.families import families, family
from attnflow.report.live.tiles import tile
from attnflow.tasks.leaks import check

Reply = dict[str, object]

_HISTORY: Final = 200
_LISTED: Final = 100  # leaks, and 40 times as many positions and labels
_MAX_ARRIVALS: Final = 256  # layers that a receptive field is followed
_MAX_LINK: Final = 6000  # characters of a design that a URL holds
_LARGEST: Final = 1 << 22  # integers of a message


@dataclass(frozen=True)
class _Step:
    """What there was before an operation."""

    name: str
    design: Design


class Session:
    """What one page or widget works on.

    `handle` takes one message and gives one reply, both plain data:

    - `{"op": "pick", "layer": 0, "name": "sliding_window", "settings": {"n": "64", "window": "8"}}` and the other
      operations of `attnflow.report.live.actions` change the design; the reply tells what it is now. With a "tile"
      it holds that window of the matrix, too.
    - `undo`, `redo`; `state`, `catalogue`, `tile`, `flow`, `diagram`, `field`, `leaks`, `cost`, `difference`, `code`,
      `export`, `families` and `family` change nothing. A question with the "revision" of a design that is no more is
      answered `"stale": true`.

    A mistake is answered, and never raised: `{"ok": false, "error": what was expected, what came}`.

    Attributes:
        design: what there is now.
        revision: how many designs there have been.
    """

    def __init__(self, design: Design) -> None:
        self.design = design
        self.revision = 0
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
        if name in ("undo", "redo"):
            back, ahead = (self._past, self._future) if name == "undo" else (self._future, self._past)
            if not back:
                raise ValueError(f"there is nothing to {name}")
            step = back.pop()
            ahead.append(_Step(step.name, self.design))
            self.design = step.design
        else:
            design, notices = ACTIONS[name](self.design, message)
            self._past = [*self._past[1 - _HISTORY :], _Step(name, self.design)]
            self._future = []
            self.design = design
        self.revision += 1
        reply = self._state(notices)
        return reply | ({"tile": self._tile(message["tile"])} if isinstance(message.get("tile"), Mapping) else {})

    def _state(self, notices: list[str]) -> Reply:
        design = self.design
        plain = json.dumps(design.to_dict(), separators=(",", ":"))
        layers = [
            {"title": layer.title, "pairs": layer.mask.nnz, "density": layer.mask.density, "spec": _shown(layer)}
            for layer in design.layers
        ]
        return {
            "revision": self.revision,
            "size": design.size,
            "layers": layers,
            "stacked": design.stacked,
            "tokens": list(design.tokens[: 40 * _LISTED]),
            "labels": [list(pair) for pair in design.labels[: 40 * _LISTED]],
            "num_labels": len(design.labels),
            "sources": [[i, *made] for i, made in list(design.sources.items())[: 40 * _LISTED]],
            "against": None if design.against is None else design.against.title,
            "undo": self._past[-1].name if self._past else None,
            "redo": self._future[-1].name if self._future else None,
            "design": plain if len(plain) <= _MAX_LINK else None,
            "notices": notices,
        }

    def _tile(self, message: object) -> Reply:
        assert isinstance(message, Mapping)
        window: Message = message
        against = self.design.against
        sizes = [as_integer(window.get(name), name) for name in ("first_query", "first_key", "span", "cells")]
        return tile(self._layer(window).mask, None if against is None else against.mask, *sizes)

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
        report = check(self.design.task)
        leaks = [
            {"position": each.position, "token": each.label.data_index, "witness": each.witness, "route": each.route}
            for each in report.leaks[:_LISTED]
        ]
        return {
            "labels": report.num_labels,
            "leaks": leaks,
            "total": len(report.leaks),
            "dead": list(report.dead[:MAX_POINTED]),
            "num_dead": len(report.dead),
            "dead_text": runs(report.dead[:MAX_POINTED]),
        }

    def _cost(self, message: Message) -> Reply:
        heads, head_dim, block = (
            as_integer(message.get(name, otherwise), name)
            for name, otherwise in (("num_heads", 1), ("head_dim", 64), ("block_size", 128))
        )
        result = cost(self._layer(message).mask, num_heads=heads, head_dim=head_dim, block_size=block)
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
    return {"masks": masks, "formats": sorted(FORMATS), "max_positions": MAX_POSITIONS, "max_layers": MAX_LAYERS}


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
