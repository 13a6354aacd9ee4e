"""The studio's ASGI application: three files held in memory, one socket for each page, and the guard before them."""

from __future__ import annotations

import asyncio
import contextlib
import hmac
import json
import time
from collections.abc import Awaitable, Callable, Coroutine, Iterable, Mapping
from dataclasses import dataclass, replace
from importlib.resources import files
from typing import TYPE_CHECKING, Any, Final, TypeVar, cast

from attnflow.studio.process import MODEL, Heard, Limits, Worker

if TYPE_CHECKING:
    from starlette.requests import Request
    from starlette.responses import Response
    from starlette.types import ASGIApp, Message, Receive, Scope, Send
    from starlette.websockets import WebSocket

# The only codes that a page is closed with, and what it tells its reader then.
UNAUTHORISED: Final = 4401
TOO_MANY: Final = 4429
MALFORMED: Final = 4400
_FILES: Final = {
    "/": ("studio.html", "text/html; charset=utf-8"),
    "/studio.js": ("studio.js", "text/javascript; charset=utf-8"),
    "/studio.svg": ("studio.svg", "image/svg+xml"),
}
_HEADERS: Final = {
    "content-security-policy": (
        "default-src 'none'; script-src 'self'; style-src 'self'; connect-src 'self'; img-src 'self' blob:; "
        "base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
    ),
    "x-content-type-options": "nosniff",
    "x-frame-options": "DENY",
    "referrer-policy": "no-referrer",
    "cross-origin-opener-policy": "same-origin",
    "cross-origin-resource-policy": "same-origin",
    "permissions-policy": "camera=(), microphone=(), geolocation=()",
    "cache-control": "no-store",
}
_STOP: Final = "stop"
_AFTER: Final = 3.0  # seconds after which a process for the next page starts, when that of the one before is ready
T = TypeVar("T")
MODEL_OPERATIONS: Final = frozenset(
    {"model", "audit", "geometry", "bias", "trace", "entry", "passages", "without", "why"}
    | {"next", "explain", "edge", "take_out", "fired", "flow_report"}
)
_GUESTS_DESIGN: Final = {"name": "causal", "parameters": {"n": 8}}  # until its link's design is restored


class Studio:
    """The open pages and their limits; `token` stands in the address's fragment, which no server ever sees.

    A page without the token may enter as a guest, to open the design that its link brings: a link from an earlier run.
    A guest sees nothing of this run, neither its design nor its model.
    """

    def __init__(
        self, token: str, design: Mapping[str, object], limits: Limits, model: Mapping[str, object] | None = None
    ) -> None:
        self.token, self.model, self.limits = token, model, limits
        self._last_message = time.monotonic()
        self._design = design
        self._open = {False: 0, True: 0}  # pages, of which guests are counted apart
        self._answering = 0
        self._spare: Worker | None = None
        self._kept: dict[str, Worker] = {}  # by the page that has gone, and may come back
        self._of_model: Worker | None = None  # one for all pages
        self._tasks: set[asyncio.Task[Any]] = set()
        self._is_closed = False

    def app(self, port: int) -> ASGIApp:
        from starlette.applications import Starlette
        from starlette.routing import Route, WebSocketRoute

        assets = files("attnflow") / "report" / "assets"
        routes = [
            *(Route(path, _file((assets / name).read_bytes(), kind)) for path, (name, kind) in _FILES.items()),
            WebSocketRoute("/session", self._session),
        ]
        return OriginGuard(Starlette(routes=routes), port)

    @property
    def idle(self) -> float:
        """Returns the seconds since the last message or answer; zero while one is being answered."""
        return 0.0 if self._answering else time.monotonic() - self._last_message

    async def prepare(self) -> None:
        """Starts a process in advance for the next page, unless there is one or the studio is closed."""
        if self._is_closed or self._spare is not None:
            return
        self._spare = Worker(self._design, self.limits)
        await self._spare.start()

    async def close(self) -> None:
        self._is_closed = True
        for task in self._tasks:
            task.cancel()
        workers = [self._spare, self._of_model, *self._kept.values()]
        self._spare, self._of_model = None, None
        self._kept.clear()
        for worker in workers:
            if worker is not None:
                await worker.stop()

    def _later(self, seconds: float, call: Callable[[], Awaitable[None]]) -> None:
        async def wait() -> None:
            await asyncio.sleep(seconds)
            await call()

        self._task(wait())

    def _task(self, work: Coroutine[Any, Any, T]) -> asyncio.Task[T]:
        task = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return task

    async def _session(self, socket: WebSocket) -> None:
        await socket.accept()
        first = await self._first_message(socket)
        is_guest = not is_token(first.get("token"), self.token)
        if is_guest and first.get("guest") is not True:
            await _close(socket, UNAUTHORISED, "the address lacks the token")
            return
        most = self.limits.guests if is_guest else self.limits.sessions
        if self._open[is_guest] >= most:
            await _close(socket, TOO_MANY, f"{most} pages are open already")
            return
        self._open[is_guest] += 1
        self._last_message = time.monotonic()
        page = "" if is_guest else str(first.get("page") or "")[:64]
        worker = Worker(_GUESTS_DESIGN, self.limits) if is_guest else self._worker(page)
        try:
            if is_guest:
                await socket.send_text('{"guest":true}')
            await self._converse(socket, worker, None if is_guest else self._model_worker())
        finally:
            self._open[is_guest] -= 1
            await self._leave(worker, page)

    def _worker(self, page: str) -> Worker:
        """The process that a page had before it was loaded again; else the one that waits, or a new one."""
        if page in self._kept:
            return self._kept.pop(page)
        worker, self._spare = self._spare or Worker(self._design, self.limits), None
        self._later(_AFTER, self.prepare)
        return worker

    def _model_worker(self) -> Worker | None:
        if self._of_model is None and self.model is not None:
            limits = replace(self.limits, seconds=self.limits.model_seconds, memory=self.limits.model_memory)
            self._of_model = Worker(self.model, limits, MODEL)
        return self._of_model

    async def _leave(self, worker: Worker, page: str) -> None:
        """Keeps the processes of a page for a while, so that loading it again loses nothing."""
        if self._is_closed or not page:
            await worker.stop()
        else:
            before = self._kept.pop(page, None)
            too_many = [self._kept.pop(next(iter(self._kept)))] if len(self._kept) >= self.limits.sessions else []
            for other in [before, *too_many]:
                if other is not None:
                    await other.stop()
            self._kept[page] = worker

            async def end() -> None:
                if self._kept.get(page) is worker:
                    await self._kept.pop(page).stop()

            self._later(self.limits.kept, end)
        if not self._open[False]:
            self._later(self.limits.kept, self._end_model)
            await self.prepare()

    async def _end_model(self) -> None:
        if not self._open[False] and self._of_model is not None:
            worker, self._of_model = self._of_model, None
            await worker.stop()

    async def _first_message(self, socket: WebSocket) -> Mapping[str, object]:
        try:
            async with asyncio.timeout(self.limits.first_message):
                text = await _received(socket)
        except TimeoutError:
            return {}
        return _parsed(text or "", self.limits.message_bytes) or {}

    async def _converse(self, socket: WebSocket, worker: Worker, model: Worker | None) -> None:
        """Handles messages one at a time for masks and for the model; "stop" ends the work of one at once."""
        workers = [worker] if model is None else [worker, model]
        lines = [_Line(each, asyncio.Queue(self.limits.queued)) for each in workers]
        answering = [asyncio.create_task(self._answer(socket, line)) for line in lines]
        try:
            while True:
                text = await _received(socket)
                if text is None:
                    return
                self._last_message = time.monotonic()
                message = _parsed(text, self.limits.message_bytes)
                if message is None:
                    await _close(socket, MALFORMED, "expected a JSON object")
                    return
                operation = message.get("op")  # anything that JSON can say
                named = isinstance(operation, str) and operation in MODEL_OPERATIONS
                about_model = named or message.get("what") == "model"
                if operation == "about":
                    await socket.send_text(_about(message, None if model is None else self.model))
                elif about_model and model is None:
                    await socket.send_text(_without_model(message))
                elif operation == _STOP:
                    await lines[about_model].stop()
                elif lines[about_model].waiting.full():
                    await _close(socket, TOO_MANY, f"{self.limits.queued} messages wait already")
                    return
                else:
                    lines[about_model].waiting.put_nowait(message)
        finally:
            for task in answering:
                task.cancel()
                with contextlib.suppress(asyncio.CancelledError):
                    await task

    async def _answer(self, socket: WebSocket, line: _Line) -> None:
        from starlette.websockets import WebSocketDisconnect

        async def heard(progress: str) -> None:
            self._last_message = time.monotonic()
            with contextlib.suppress(WebSocketDisconnect, RuntimeError):
                await socket.send_text(progress)

        async def asked(message: Mapping[str, object]) -> str:
            self._answering += 1
            try:
                return await line.ask(message, heard)
            finally:
                self._answering -= 1
                self._last_message = time.monotonic()

        with contextlib.suppress(WebSocketDisconnect, RuntimeError):  # the page has gone while it was computed
            while True:
                message = await line.waiting.get()
                # A page that goes leaves its question to the process, which is asked by the next one when it is done.
                reply = await asyncio.shield(self._task(asked(message)))
                await socket.send_text(reply)


@dataclass
class _Line:
    """What a page asks of one process; that of a model answers other pages, too."""

    worker: Worker
    waiting: asyncio.Queue[dict[str, object]]
    is_answering: bool = False

    async def ask(self, message: Mapping[str, object], heard: Heard) -> str:
        async with self.worker.lock:
            self.is_answering = True
            try:
                return await self.worker.ask(message, heard)
            finally:
                self.is_answering = False

    async def stop(self) -> None:
        if self.is_answering:
            await self.worker.stop()


def _about(message: Mapping[str, object], model: Mapping[str, object] | None) -> str:
    identity = {"id": message["id"]} if isinstance(message.get("id"), int) else {}
    return json.dumps({**identity, "ok": True, "model": None if model is None else model["model"]})


def _without_model(message: Mapping[str, object]) -> str:
    identity = {"id": message["id"]} if isinstance(message.get("id"), int) else {}
    error = {"ok": False, "error": "the studio was started without a model: attnflow studio MODEL"}
    return json.dumps(identity | ({"ok": True, "model": None} if message.get("op") == "model" else error))


def is_token(shown: object, token: str) -> bool:
    return isinstance(shown, str) and hmac.compare_digest(shown.encode("utf-8", "replace"), token.encode())


async def _received(socket: WebSocket) -> str | None:
    """Returns the next text; "" for bytes, which no page sends; None once the page has gone."""
    message = await socket.receive()
    return None if message["type"] == "websocket.disconnect" else message.get("text") or ""


def _parsed(text: str, limit: int) -> dict[str, object] | None:
    if len(text.encode()) > limit:
        return None
    try:
        message = json.loads(text)
    except (ValueError, RecursionError):
        return None
    return cast("dict[str, object]", message) if isinstance(message, dict) else None


def _file(content: bytes, kind: str) -> Callable[[Request], Awaitable[Response]]:
    from starlette.responses import Response

    async def endpoint(_: Request) -> Response:
        return Response(content, media_type=kind)

    return endpoint


async def _close(socket: WebSocket, code: int, reason: str) -> None:
    from starlette.websockets import WebSocketDisconnect

    with contextlib.suppress(RuntimeError, WebSocketDisconnect):  # it was closed from there
        await socket.close(code, reason)


class OriginGuard:
    """Refuses requests that are not from this server's own page, and sets its policy on every answer.

    The `Host` must be ours, against DNS rebinding; the `Origin` of a socket must be exactly that host's, because pages
    of other sites can open sockets to the loopback.
    """

    def __init__(self, app: ASGIApp, port: int) -> None:
        self._app = app
        self._hosts = {f"127.0.0.1:{port}".encode(), f"localhost:{port}".encode()}

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "websocket":
            if self._host(scope) is None or not self._own_origin(scope):
                await send({"type": "websocket.close", "code": 1008})
                return
            await self._app(scope, receive, send)
        elif scope["type"] == "http":
            await self._http(scope, receive, send)
        else:
            raise ValueError(f"expected http or websocket, got {scope['type']!r}")

    async def _http(self, scope: Scope, receive: Receive, send: Send) -> None:
        async def with_policy(message: Message) -> None:
            if message["type"] == "http.response.start":
                policy = [(name.encode(), value.encode()) for name, value in _HEADERS.items()]
                message = {**message, "headers": [*message.get("headers", []), *policy]}
            await send(message)

        if self._host(scope) is None:
            await _refuse(with_policy, 421, b"this server answers to 127.0.0.1 and localhost only\n")
        elif scope["method"] not in ("GET", "HEAD"):
            await _refuse(with_policy, 405, b"only GET\n")
        else:
            await self._app(scope, receive, with_policy)

    def _host(self, scope: Scope) -> bytes | None:
        hosts = _values(scope["headers"], b"host")
        return hosts[0] if len(hosts) == 1 and hosts[0] in self._hosts else None

    def _own_origin(self, scope: Scope) -> bool:
        origins, host = _values(scope["headers"], b"origin"), self._host(scope)
        return host is not None and origins == [b"http://" + host]


def _values(headers: Iterable[tuple[bytes, bytes]], name: bytes) -> list[bytes]:
    return [value for key, value in headers if key == name]


async def _refuse(send: Send, status: int, body: bytes) -> None:
    headers = [(b"content-type", b"text/plain; charset=utf-8"), (b"content-length", str(len(body)).encode())]
    await send({"type": "http.response.start", "status": status, "headers": headers})
    await send({"type": "http.response.body", "body": body})
