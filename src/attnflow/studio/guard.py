"""`Guard`: checks host, method and origin before any route."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from starlette.types import ASGIApp, Message, Receive, Scope, Send

_HEADERS: Final = {
    "content-security-policy": (
        "default-src 'none'; script-src 'self'; style-src 'self'; connect-src 'self'; img-src 'self'; "
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


class Guard:
    """Refuses requests that are not from this server's own page, and sets its policy on every answer.

    The `Host` must be ours, against DNS rebinding; the `Origin` of a socket must be exactly that host's, because pages
    of other sites can open sockets to the loopback.
    """

    def __init__(self, app: ASGIApp, port: int) -> None:
        self._app = app
        self._hosts = {f"127.0.0.1:{port}".encode(), f"localhost:{port}".encode()}

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Handles one request or socket."""
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
