"""`Session`: one design with its history, and answers about it."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from itertools import islice
from typing import Any, Final

from attnflow._core.errors import AttnflowError
from attnflow._core.plain import as_integer
from attnflow.report.live.design import Design, MaskLayer
from attnflow.report.live.families import families, family
from attnflow.report.live.operations import ACTIONS, QUESTIONS, Message, Reply, layer_of
from attnflow.report.live.tiles import tile, window_of

_HISTORY: Final = 200
_LISTED: Final = 4000  # positions and labels
_MAX_LINK: Final = 6000  # characters of a design that a URL holds
_LARGEST: Final = 1 << 22  # integers of a message


class Session:
    """The state of one page; `handle` takes a message and gives a reply, both plain data.

    `{"op": "pick", "layer": 0, "name": "sliding_window", "settings": {"n": "64", "window": "8"}}` and the other
    `ACTIONS` change the design; the reply describes it, with the window "tile" of the matrix. The rest are questions;
    one with an outdated "revision" is answered `"stale": true`.
    """

    def __init__(self, design: Design) -> None:
        self.design = design
        self.revision = 0
        self._past: list[tuple[str, Design]] = []  # what was done, and what there was before it
        self._future: list[tuple[str, Design]] = []
        self._questions: Mapping[str, Callable[[Message], Reply]] = {
            "state": lambda _: self._state([]),
            "tile": self._tile,
            "report": lambda _: self._report(),
            "families": lambda _: families(),
            "family": family,
        }

    def handle(self, message: Mapping[str, object]) -> Reply:
        return answered(message, lambda: self._answer(message))

    def _answer(self, message: Message) -> Reply:
        _require_small(message)
        name = message.get("op")
        if not isinstance(name, str) or name not in {*ACTIONS, *QUESTIONS, *self._questions, "undo", "redo"}:
            raise ValueError(f"unknown operation {str(name)[:40]!r}")
        if name in QUESTIONS or name in self._questions:
            revision = message.get("revision")
            if revision is not None and revision != self.revision:
                return {"stale": True}
            own = self._questions.get(name)
            answer = QUESTIONS[name](self.design, message) if own is None else own(message)
            return {**answer, "revision": self.revision}
        notices: list[str] = []
        before = self.design
        if name in ("undo", "redo"):
            back, ahead = (self._past, self._future) if name == "undo" else (self._future, self._past)
            if not back:
                raise ValueError(f"there is nothing to {name}")
            done, self.design = back.pop()
            ahead.append((done, before))
        else:
            self.design, notices = ACTIONS[name](before, message)
            self._past = [*self._past[1 - _HISTORY :], (name, before)]
            self._future = []
        self.revision += 1
        window = message.get("tile")
        reply = self._state(notices, before)
        if isinstance(window, Mapping) and self._is_inside(window):
            reply["tile"] = self._tile(window)
        return reply

    def _state(self, notices: list[str], before: Design | None = None) -> Reply:
        """Describes the design, omitting lists that are unchanged since `before`."""
        design = self.design
        lists: dict[str, Callable[[], list[Any]]] = {
            "tokens": lambda: list(design.tokens[:_LISTED]),
            "labels": lambda: [list(pair) for pair in design.labels[:_LISTED]],
            "sources": lambda: [[i, *made] for i, made in islice(design.sources.items(), _LISTED)],
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
            "undo": self._past[-1][0] if self._past else None,
            "redo": self._future[-1][0] if self._future else None,
            "design": design.plain if len(design.plain) <= _MAX_LINK else None,
            "notices": notices,
        }
        for name, listed in lists.items():
            if before is None or getattr(before, name) is not getattr(design, name):
                reply[name] = listed()
        return reply

    def _report(self) -> Reply:
        from attnflow.report.registry import page  # which draws every kind of result

        design = self.design
        shown = design.task if design.labels else design.flow
        return {"html": page(shown, title="A design of the studio", labels=design.texts).html}

    def _tile(self, window: Message) -> Reply:
        return tile(self.design.layers[layer_of(self.design, window)].mask, None, *window_of(window))

    def _is_inside(self, window: Message) -> bool:
        layer, *first = (as_integer(window.get(name, 0), name) for name in ("layer", "first_query", "first_key"))
        return layer < len(self.design.layers) and max(first) < self.design.size


def answered(message: Message, answer: Callable[[], Reply]) -> Reply:
    identity = {"id": message["id"]} if isinstance(message.get("id"), int) else {}
    try:
        return {**identity, "ok": True, **answer()}
    except (AttnflowError, ImportError, NotImplementedError, OSError, TypeError, ValueError) as error:
        reason = str(error)
    except MemoryError:
        reason = "not enough memory for this"
    except RecursionError:
        reason = "the message is nested too deeply"
    return {**identity, "ok": False, "error": reason}


def _shown(layer: MaskLayer) -> object:
    """Returns the specification of an unpainted catalogue mask, so that a form can show its parameters."""
    return layer.spec if "name" in layer.spec and not layer.strokes else None


def _require_small(value: object) -> None:
    waiting = [value]
    while waiting:
        here = waiting.pop()
        if isinstance(here, Mapping):
            waiting += here.values()
        elif isinstance(here, list | tuple):
            waiting += here
        elif isinstance(here, int) and abs(here) > _LARGEST:
            raise ValueError(f"integers are at most {_LARGEST:,}, got {here}")
