"""`Worker`: the process of one page, which the server asks, stops and restarts where it was; and its `Limits`."""

from __future__ import annotations

import asyncio
import contextlib
import json
import sys
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Final

Heard = Callable[[str], Awaitable[None]]

MASKS: Final = ("attnflow.studio.worker", "masks")
MODEL: Final = ("attnflow.studio.worker", "model")
_PROGRESS: Final = b'{"progress":'


@dataclass(frozen=True)
class Limits:
    """Limits of the studio for each page; sizes in bytes, times in seconds."""

    message_bytes: int = 2 << 20  # of a message from a page, including a file that it opens
    reply_bytes: int = 64 << 20
    seconds: float = 20.0  # of an operation; then its process is ended, and a new one continues from the last design
    model_seconds: float = 1800.0  # of an answer about a model
    model_memory: int = 0  # address space of a model's process; 0 for no limit, since the server chose the model
    starting: float = 120.0  # until a new process must be ready
    sessions: int = 4  # pages that can be open at once
    guests: int = 2  # pages without the token that can be open at once, each with the design of its link
    first_message: float = 5.0  # until a page must have shown the token
    idle: float = 1800.0  # without a message from any page, after which the server ends
    memory: int = 8 << 30  # address space of a page's process
    kept: float = 60.0  # that the processes of a page outlive it, so that it can be loaded again
    queued: int = 64  # messages of a page that may wait, for masks and for the model separately


class Worker:
    """The process of one page, started when first asked; a new process continues from `design`, as JSON."""

    def __init__(self, design: Mapping[str, object], limits: Limits, command: Sequence[str] = MASKS) -> None:
        self.design = json.dumps(dict(design), separators=(",", ":"))
        self._limits, self._command = limits, command
        self._process: asyncio.subprocess.Process | None = None
        self._is_ready = False
        self.lock = asyncio.Lock()  # of who asks

    async def start(self) -> None:
        """Starts the process unless it runs already, without waiting until it is ready."""
        if self._process is None:
            command = (sys.executable, "-m", *self._command, str(self._limits.memory))
            pipe = asyncio.subprocess.PIPE
            process = await asyncio.create_subprocess_exec(
                *command, stdin=pipe, stdout=pipe, limit=self._limits.reply_bytes
            )
            self._process, self._is_ready = process, False
            with contextlib.suppress(BrokenPipeError, ConnectionResetError):  # `ask` sees that it has ended
                await self._send(process, self.design)

    async def ask(self, message: Mapping[str, object], heard: Heard | None = None) -> str:
        """Returns the JSON reply, or an error after `limits.seconds`, which ends the process; `heard` gets progress."""
        await self.start()
        process, limit = self._process, self._limits.starting
        assert process is not None
        assert process.stdout is not None
        try:
            if not self._is_ready:
                async with asyncio.timeout(limit):
                    self._is_ready = bool(await process.stdout.readline())
            limit = self._limits.seconds
            async with asyncio.timeout(limit):
                await self._send(process, json.dumps(message, separators=(",", ":")))
                line = await _reply(process.stdout, heard)
                design = await process.stdout.readline()
        except TimeoutError:
            await self.stop()
            return _failed(message, f"stopped after {limit:g} seconds: this is too much work for the page")
        except (BrokenPipeError, ConnectionResetError, ValueError):  # ValueError: a reply beyond its limit
            line = design = b""
        if not design.endswith(b"\n"):
            was_stopped = self._process is not process
            await self.stop()
            return _failed(message, "stopped" if was_stopped else "its process ended; your design is kept")
        self.design = design.decode().strip() or self.design
        return line.decode().rstrip("\n")

    async def stop(self) -> None:
        process, self._process = self._process, None
        if process is not None:
            with contextlib.suppress(ProcessLookupError):
                process.kill()
            await process.wait()
            assert process.stdin is not None
            assert process.stdout is not None
            process.stdin.close()
            with contextlib.suppress(OSError):
                await process.stdin.wait_closed()
            with contextlib.suppress(RuntimeError):  # `ask` waits for the end of it already
                await process.stdout.read()

    async def _send(self, process: asyncio.subprocess.Process, line: str) -> None:
        assert process.stdin is not None
        process.stdin.write(line.encode() + b"\n")
        await process.stdin.drain()


async def _reply(stream: asyncio.StreamReader, heard: Heard | None) -> bytes:
    while (line := await stream.readline()).startswith(_PROGRESS):
        if heard is not None:
            await heard(line.decode().rstrip("\n"))
    return line


def _failed(message: Mapping[str, object], reason: str) -> str:
    identity = {"id": message["id"]} if isinstance(message.get("id"), int) else {}
    return json.dumps({**identity, "ok": False, "error": reason, "restarted": True})
