"""A record of a session: every answer that a reader without a server may look at, as one short text."""

from __future__ import annotations

import base64
import json
import zlib
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import replace
from typing import Final, cast

import numpy as np

from attnflow._core.markup import shorten
from attnflow.order.flow import Flow
from attnflow.report.live.design import MAX_LAYERS, Design, Layer
from attnflow.report.live.session import Session
from attnflow.tasks.task import Task

MAX_RECORDED: Final = 1024  # positions up to which every pair is drawn
_FOLLOWED: Final = 512  # positions up to which each one's receptive field is recorded
_MAX_BYTES: Final = 160_000  # of a record
_MAX_TOKEN: Final = 40  # characters
_NEVER: Final = 255
_COARSE: Final = 128  # cells along a side of a mask that compresses badly


def record(design: Design) -> str | None:
    """The answers about a design, deflated and in base64 for addresses; or None where they would take too much room.

    It holds the state, a picture of each distinct mask, order, diagram, leaks, cost, code, and, up to 512 positions,
    after how many layers each one reads each other. What has no room is left out whole: first the latter, then
    pairs in favour of squares of pairs.

    Cost: that of the answers, and O(n) for each position and layer.
    """
    if design.size > MAX_RECORDED:
        return None
    session = Session(design)
    distinct: list[int] = []
    for i, layer in enumerate(design.layers):
        same = (j for j in distinct if design.layers[j].mask == layer.mask)
        distinct.append(next(same, i))
    numbers = sorted(set(distinct))

    def ask(op: str, **message: object) -> dict[str, object] | None:
        reply = session.handle({"op": op, **message})
        return reply if reply["ok"] else None

    leaks = ask("leaks")
    for number, leak in enumerate([] if leaks is None else cast("list[dict[str, object]]", leaks["leaks"])):
        if "witness" not in leak:
            leak |= ask("witness", number=number) or {}
    answers: dict[str, object] = {
        "state": {**(ask("state") or {}), "design": None},
        **{op: ask(op) for op in ("flow", "diagram", "difference")},
        "leaks": leaks,
        "code": {**(ask("code") or {}), "formats": []},
        "catalogue": {"masks": [], "formats": []},
        "distinct": [numbers.index(i) for i in distinct],
        "cost": [ask("cost", layer=i) for i in numbers],
    }
    window = {"first_query": 0, "first_key": 0, "span": design.size}
    tiles, coarse = ([ask("tile", layer=i, **window, cells=cells) for i in numbers] for cells in (design.size, _COARSE))
    arrivals = {"arrivals": _arrivals(design)} if design.size <= _FOLLOWED else {}
    for content in ({"tile": tiles, **arrivals}, {"tile": tiles}, {"tile": coarse}):
        plain = json.dumps(answers | content, separators=(",", ":"))
        text = base64.urlsafe_b64encode(zlib.compress(plain.encode(), 9)).decode()
        if len(text) <= _MAX_BYTES:
            return text
    return None


def _arrivals(design: Design) -> str:
    """uint8[n, n] in base64: after how many layers each position's information is first in each; 255 is never.

    A way of more layers than a byte says is as good as never: the slider of a page ends before it.
    """
    first = np.stack([design.flow.arrivals(i, _NEVER - 1) for i in range(design.size)])
    return base64.b64encode(np.where(first < 0, _NEVER, np.minimum(first, _NEVER)).astype(np.uint8).tobytes()).decode()


def recorded_design(flow: Flow, task: Task | None, labels: Sequence[str] | None) -> Design | None:
    """What a record of an order shows: its masks, the labels of a task, a text for each position; None if too much."""
    if not 0 < flow.size <= MAX_RECORDED or len(flow.masks) > MAX_LAYERS:
        return None
    design = Design(tuple(Layer.of(mask.to_dict()) for mask in flow.masks), stacked=flow.num_layers is not None)
    if task is not None:
        with suppress(ValueError):  # a task may predict what none of its positions is; the page lists its leaks below
            design = Design.of_task(task)
    return design if labels is None else replace(design, tokens=tuple(shorten(label, _MAX_TOKEN) for label in labels))
