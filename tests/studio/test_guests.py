"""A link of an earlier run: who opens it may design, and gets nothing of the run that answers."""

import asyncio
import json
import socket
from contextlib import ExitStack, suppress

import pytest

pytest.importorskip("starlette")
pytest.importorskip("websockets")

from starlette.websockets import WebSocketDisconnect

from attnflow.report.live.design import Design
from attnflow.report.live.model import ModelSession
from attnflow.report.live.operations import ACTIONS, QUESTIONS
from attnflow.report.live.session import Session
from attnflow.studio import serving as serving_module
from attnflow.studio.app import MODEL_OPERATIONS, Studio
from attnflow.studio.process import Limits
from tests.studio.server import Page, serving
from tests.studio.test_security import children, closed

WITHOUT_MODEL = "the studio was started without a model: attnflow studio MODEL"
OWN = {"layers": [{"mask": {"name": "full", "parameters": {"n": 3}}}], "tokens": ["my", "own", "zebra"]}
DESIGNED = {*ACTIONS, *QUESTIONS, *Session(Design.from_dict(OWN))._questions, "undo", "redo"}


def enter(connection):
    """Enters with the token of an earlier run."""
    connection.send(json.dumps({"token": "of an earlier run", "guest": True}))
    assert json.loads(connection.recv(timeout=120)) == {"guest": True}
    return Page(connection)


def test_the_server_knows_every_operation_about_the_model():
    """What it does not know would be asked of the design, also for a guest."""
    assert set(ModelSession("none")._questions) == MODEL_OPERATIONS
    assert not MODEL_OPERATIONS & DESIGNED


def test_a_guest_may_design_and_gets_nothing_of_the_model_of_files_or_of_this_run(tmp_path):
    """Every operation that there is, asked by a guest: without anything, and with names of files and of the model."""
    assert Limits().guests == 2
    secret = tmp_path / "secret.json"
    secret.write_text(json.dumps(OWN))
    subject = {"model": str(tmp_path / "of-this-run"), "bias": None}
    file = {name: str(secret) for name in ("text", "name", "path", "model", "design", "token", "settings")}
    with serving(design=OWN, model=subject, sessions=1, guests=1) as running, ExitStack() as stack:
        connection, second = (stack.enter_context(running.connect()) for _ in range(2))
        guest = enter(connection)
        second.send(json.dumps({"token": "", "guest": True}))
        assert closed(second) == (4429, "1 pages are open already")
        heard = [guest.ask("model", **file)]
        assert heard == [{"id": 1, "ok": True, "model": None}]
        for op in MODEL_OPERATIONS - {"model"}:
            for message in ({}, file, {"text": "5 6", "entry": 3, "layer": 0, "head": 0, "ablate": 8}):
                assert guest.ask(op, **message) == {"id": 1, "ok": False, "error": WITHOUT_MODEL}
        assert guest.ask("state", what="model")["error"] == WITHOUT_MODEL
        for op in sorted(DESIGNED):
            heard += [guest.ask(op), guest.ask(op, **{**file, "name": "causal"}), guest.ask(op, **file)]
        connection.send(json.dumps({"op": "stop", "what": "model"}))
        heard.append(json.loads(connection.recv(timeout=60)))
        assert heard[-1]["error"] == WITHOUT_MODEL
        for word in (running.token, "of-this-run", "zebra"):
            assert word not in json.dumps(heard)
        assert len(children(running)) == 2, "the guest's own process, and the one that waits for the reader"
        assert guest.ask("restore", design=OWN)["tokens"] == OWN["tokens"], "what its own link brings is its own"
        guest.ask("pick", name="full", settings={"n": "5"})
        own = stack.enter_context(running.page())  # no guest takes it from its reader
        assert own.ask("state")["size"] == 3
        assert guest.ask("state")["size"] == 5


def test_guests_who_leave_at_once_keep_no_place():
    """The page can be gone before it is told that it is a guest."""
    said: list[dict] = []

    async def guest(app, is_there):
        headers = [(b"host", b"127.0.0.1:1"), (b"origin", b"http://127.0.0.1:1")]
        scope = {"type": "websocket", "path": "/session", "headers": headers, "query_string": b"", "subprotocols": []}
        coming = [{"type": "websocket.connect"}, {"type": "websocket.receive", "text": '{"guest": true}'}]

        async def receive():
            return coming.pop(0) if coming else {"type": "websocket.disconnect", "code": 1001}

        async def send(message):
            said.append(message)
            if message["type"] == "websocket.send" and not is_there:
                raise OSError

        with suppress(WebSocketDisconnect):
            await app(scope, receive, send)

    async def visits():
        studio = Studio("token", OWN, Limits(guests=1))
        app = studio.app(1)
        for is_there in (False, False, True):
            await guest(app, is_there)
        await studio.close()

    asyncio.run(visits())
    assert said[-1] == {"type": "websocket.send", "text": '{"guest":true}'}


def test_the_usual_port_is_taken_if_it_is_free(monkeypatch):
    """So that a link of an earlier run leads to the studio that runs now, and to one studio only."""
    assert serving_module._USUAL == 48417
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        usual = free.getsockname()[1]
    monkeypatch.setattr(serving_module, "_USUAL", usual)
    with serving_module._listener(0) as first, serving_module._listener(0) as second:
        assert first.getsockname()[1] == usual != second.getsockname()[1]
        with pytest.raises(OSError, match=f"port {usual} cannot be opened .*choose another, or 0 for a free one"):
            serving_module._listener(usual)
