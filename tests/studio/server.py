"""The studio as a process, with the limits that a test wants: prints its address."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import NamedTuple
from urllib.parse import urlsplit

from websockets.sync.client import ClientConnection, connect

WINDOW = {"name": "sliding_window", "parameters": {"n": 16, "window": 4}}


class Server(NamedTuple):
    process: subprocess.Popen[str]
    address: str

    @property
    def port(self) -> int:
        return int(urlsplit(self.address).port or 0)

    @property
    def token(self) -> str:
        return urlsplit(self.address).fragment.removeprefix("token=")

    @property
    def origin(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def connect(self, **options) -> ClientConnection:
        """A socket as a page opens it, which has said nothing yet."""
        options = {"origin": self.origin, "proxy": None, "max_size": None} | options
        return connect(f"ws://127.0.0.1:{self.port}/session", **options)

    @contextmanager
    def page(self) -> Iterator[Page]:
        """A page that has shown the token."""
        with self.connect() as socket:
            socket.send(json.dumps({"token": self.token}))
            yield Page(socket)


class Page(NamedTuple):
    socket: ClientConnection

    def ask(self, op: str, **message):
        self.socket.send(json.dumps({"id": 1, "op": op, **message}))
        return json.loads(self.socket.recv(timeout=120))


@contextmanager
def serving(design: object = WINDOW, model: object = None, port: int = 0, **limits: float) -> Iterator[Server]:
    begin = map(json.dumps, (design, limits, model, port))
    command = [sys.executable, "-W", "error", "-m", "tests.studio.server", *begin]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    try:
        yield Server(process, process.stdout.readline().strip())
    finally:
        process.terminate()
        process.wait(30)
        process.stdout.close()


def leaky(memory: str) -> None:
    """The process of a model, with a fault in the model: an MLP that reads the token after its own."""
    from attnflow.report.live import model
    from attnflow.studio import worker

    load = model.load_model

    def faulty(name: str, **options):
        loaded = load(name, **options)
        loaded.model.model.layers[1].mlp.register_forward_hook(lambda _, __, out: out + out.roll(-1, dims=1))
        return loaded

    model.load_model = faulty
    worker.main("model", int(memory))


def slow(memory: str) -> None:
    """The process of a model whose answers take longer than a page waits unasked."""
    from attnflow.report.live import prompts
    from attnflow.studio import worker

    described = prompts._described

    def late(found):
        time.sleep(2.2)
        return described(found)

    prompts._described = late
    worker.main("model", int(memory))


PROCESSES = {"leaks": leaky, "slow": slow}


def main() -> None:
    from attnflow.studio import serve
    from attnflow.studio.process import Limits

    design, limits, model, port = map(json.loads, sys.argv[1:])
    for name in PROCESSES:
        if isinstance(model, dict) and model.pop(name, False):
            from attnflow.studio import app

            app.MODEL = ("tests.studio.server", name)  # pyright: ignore[reportAttributeAccessIssue]
    serve(design, port, lambda address: print(address, flush=True), Limits(**limits), model)


if __name__ == "__main__":
    PROCESSES[sys.argv[1]](sys.argv[2]) if sys.argv[1] in PROCESSES else main()
