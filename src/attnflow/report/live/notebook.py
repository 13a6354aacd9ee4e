"""`Widget`: a session behind the comm channel of a notebook, which the studio's page queries. Needs anywidget."""

from __future__ import annotations

import json
from collections.abc import Mapping
from importlib.resources import files
from typing import Any, Final, cast

import anywidget
import traitlets

from attnflow.masks.mask import Mask
from attnflow.report.live.design import Design, Layer
from attnflow.report.live.session import Session
from attnflow.tasks.task import Task

MESSAGE_BYTES: Final = 2 << 20  # of a message, as of a page of the studio
_MAX_VIEW: Final = 40  # characters of the name of a view


class Widget(anywidget.AnyWidget):
    """The studio in a notebook; made by `af.report.widget`.

    Attributes:
        revision: the number of changes of what it shows; `widget.observe(function, "revision")` follows them.
    """

    _esm = (files("attnflow") / "report" / "assets" / "studio.js").read_text(encoding="utf-8")
    revision = traitlets.Int(0, read_only=True).tag(sync=True)

    def __init__(self, design: Design) -> None:
        super().__init__()
        self._session = Session(design)
        self.on_msg(self._receive)

    @property
    def mask(self) -> Mask:
        """The mask that is drawn now; assigning one shows it in its place, which can be undone.

        Raises:
            ValueError: there is a mask for each layer: see `masks`.
        """
        if self._session.design.stacked:
            raise ValueError(f"expected one mask for all layers, got a stack of {len(self.masks)}: see .masks")
        return self.masks[0]

    @mask.setter
    def mask(self, mask: Mask) -> None:
        if not isinstance(mask, Mask):  # pyright: ignore[reportUnnecessaryIsInstance]
            raise TypeError(f"expected a mask, got {type(mask).__name__}")
        plain = Design((Layer.of(mask.to_dict()),)).to_dict()
        reply = self._session.handle({"op": "restore", "design": plain})
        assert reply["ok"], reply["error"]
        self._tell()

    @property
    def masks(self) -> tuple[Mask, ...]:
        """The masks of the layers, first layer first; a single one of all layers."""
        return tuple(layer.mask for layer in self._session.design.layers)

    @property
    def task(self) -> Task:
        """The masks with the labels that were set, and what inputs are made of: position i is data token i."""
        return self._session.design.task

    def _receive(self, _: object, content: object, __: object) -> None:
        """Answers one message of a view, to that view alone."""
        if not isinstance(content, dict):
            return
        said = cast("dict[str, Any]", content)
        view, message = said.get("view"), said.get("message")
        if not isinstance(view, str) or len(view) > _MAX_VIEW or not isinstance(message, Mapping):
            return
        self.send({"view": view, "reply": self._reply(cast("Mapping[str, object]", message))})
        self._tell()

    def _reply(self, message: Mapping[str, object]) -> Mapping[str, object]:
        identity = {"id": message["id"]} if isinstance(message.get("id"), int) else {}
        if len(json.dumps(message)) > MESSAGE_BYTES:
            return {**identity, "ok": False, "error": f"a message has at most {MESSAGE_BYTES:,} bytes"}
        try:
            return self._session.handle(message)
        except KeyboardInterrupt:  # of the kernel, by a reader who waits no longer
            return {**identity, "ok": False, "error": "interrupted"}

    def _tell(self) -> None:
        """Notifies views and observers of a change by its number."""
        if self.revision != self._session.revision:
            self.set_trait("revision", self._session.revision)

    def __repr__(self) -> str:
        return f"Widget({self.mask if not self._session.design.stacked else list(self.masks)!r})"
