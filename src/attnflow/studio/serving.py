"""`serve`: the studio on a port of the loopback, until it is idle or interrupted."""

from __future__ import annotations

import asyncio
import contextlib
import os
import secrets
import signal
import socket
import threading
from collections.abc import Callable, Generator, Mapping
from importlib.util import find_spec
from typing import TYPE_CHECKING, Final

from attnflow._core.errors import MissingExtra
from attnflow.studio.process import Limits

if TYPE_CHECKING:
    import uvicorn

    from attnflow.studio.app import Studio

_NEEDED: Final = ("starlette", "uvicorn", "websockets")
_LOOPBACK: Final = "127.0.0.1"
_USUAL: Final = 48417  # so that links of earlier runs still lead to a studio


def serve(
    design: Mapping[str, object],
    port: int = 0,
    opened: Callable[[str], object] | None = None,
    limits: Limits | None = None,
    model: Mapping[str, object] | None = None,
) -> None:
    """Serve the studio on 127.0.0.1 until it is interrupted or has been idle for long.

    Only this machine can reach it. `design` and `model` are shown only with the secret token in the fragment of the
    address; `opened` gets this address once the server listens.

    Args:
        design: the initial content of pages: the plain data of a mask, a task or a design.
        port: local port; 0 takes 48417, or a free one while that is in use.
        opened: called with the address, such as `webbrowser.open`.
        limits: the limits (default: `Limits()`).
        model: {"model": its name, "bias": the folder of its bias or None}, or None. Pages cannot name another model.

    Raises:
        MissingExtra: starlette, uvicorn or websockets are not installed.
        ValueError: `port` is not a port number.
        OSError: the port is in use.
        KeyboardInterrupt: the server was interrupted.
    """
    for module in _NEEDED:
        if find_spec(module) is None:
            raise MissingExtra(module, "studio", "the studio")
    if not 0 <= port <= 65535:
        raise ValueError(f"port must lie in [0, 65535], got {port}")
    from attnflow.studio.app import Studio

    listener = _listener(port)
    try:
        studio = Studio(secrets.token_urlsafe(32), design, limits or Limits(), model)
        with _terminated_in_order():
            if not asyncio.run(_run(studio, listener, opened)):
                raise KeyboardInterrupt  # asyncio does so only where the interrupt meets a task that still waits
    finally:
        listener.close()


def _listener(port: int) -> socket.socket:
    if port == 0:
        with contextlib.suppress(OSError):
            return socket.create_server((_LOOPBACK, _USUAL))
    try:
        return socket.create_server((_LOOPBACK, port))  # it listens at once, so that no second studio takes the port
    except OSError as error:
        why = f"port {port} cannot be opened ({os.strerror(error.errno or 0)}): choose another, or 0 for a free one"
        raise OSError(error.errno, why) from None


@contextlib.contextmanager
def _terminated_in_order() -> Generator[None]:
    """Delays SIGTERM, which uvicorn raises again, until the processes of pages have ended, which it would orphan."""
    if threading.current_thread() is not threading.main_thread():  # where signals do not come
        yield
        return
    terminated = False

    def unwind(*_: object) -> None:
        nonlocal terminated
        terminated = True
        raise SystemExit

    before = signal.signal(signal.SIGTERM, unwind)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)
        if terminated:
            signal.raise_signal(signal.SIGTERM)


async def _run(studio: Studio, listener: socket.socket, opened: Callable[[str], object] | None) -> bool:
    import uvicorn

    port = int(listener.getsockname()[1])
    config = uvicorn.Config(
        studio.app(port),
        ws="websockets-sansio",
        ws_max_size=studio.limits.message_bytes,
        ws_per_message_deflate=False,  # takes longer than the loopback
        lifespan="off",
        log_level="critical",
        access_log=False,
        server_header=False,
        limit_concurrency=64,
        timeout_graceful_shutdown=2,
    )
    server = uvicorn.Server(config)
    address = f"http://{_LOOPBACK}:{port}/#token={studio.token}"
    watching = asyncio.create_task(_watch(server, studio, address, opened))
    try:
        await server.serve(sockets=[listener])
        return watching.done()
    finally:
        watching.cancel()
        ending = asyncio.ensure_future(studio.close())
        while not ending.done():  # an interrupt cancels this task where it waits next, and its process would live on
            with contextlib.suppress(asyncio.CancelledError):
                await asyncio.shield(ending)


async def _watch(server: uvicorn.Server, studio: Studio, address: str, opened: Callable[[str], object] | None) -> None:
    """Reports the address once the server listens, and ends the server when idle."""
    while not server.started:
        await asyncio.sleep(0.01)
    await studio.prepare()
    if opened is not None:
        opened(address)
    while studio.idle < studio.limits.idle:
        await asyncio.sleep(min(1.0, studio.limits.idle / 4))
    server.should_exit = True
