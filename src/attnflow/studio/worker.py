"""The process of one page, for masks or for the model: reads a message per line, answers, and ends with its input.

A separate process can be stopped at any time and cannot take the memory of other pages. Masks and the model have one
each, so masks are answered while the model is busy. `python -m attnflow.studio.worker masks BYTES` first reads the
plain data of the initial design; `... model BYTES` reads `{"model": name, "bias": folder}`, which a page never names.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import time
from collections.abc import Callable
from typing import Any, Final

_KNOWN: Final = 64  # replies about a model that are kept, so that a page that is loaded again has them at once
_PAUSE: Final = 0.1  # seconds between two lines of progress of one kind

Say = Callable[[str], None]
Answer = Callable[[dict[str, Any]], tuple[str, str]]  # to a message: the reply, and after a change the design


def main(about: str, memory: int) -> None:
    """Print `{"ready": true}`, then for each line a reply and the changed design, or an empty line.

    Lines `{"progress": [done, total, what]}` precede the replies about a model.
    """
    say, first = _begun(memory)
    answer = (_about_model if about == "model" else _about_masks)(json.loads(first), say)
    say('{"ready":true}')
    for line in sys.stdin:
        say("\n".join(answer(json.loads(line))))


def _about_masks(design: Any, _: Say) -> Answer:
    from attnflow.report.live.operations import design_of
    from attnflow.report.live.session import Session

    session = Session(design_of(design, "the design"))

    def answer(message: dict[str, Any]) -> tuple[str, str]:
        revision = session.revision
        reply = _plain(session.handle(message))
        return reply, "" if session.revision == revision else session.design.plain

    return answer


def _about_model(subject: Any, say: Say) -> Answer:
    from attnflow.report.live.model import ModelSession

    session = ModelSession(subject["model"], subject["bias"])
    said = ("", 0.0)

    def progress(done: int, total: int, what: str) -> None:
        nonlocal said
        kind, now = f"{total} {what}", time.monotonic()
        if kind != said[0] or now - said[1] >= _PAUSE:
            said = (kind, now)
            say(_plain({"progress": [done, total, what]}))

    known: dict[str, dict[str, Any]] = {}  # replies by what was asked: the model is always the same

    def answer(message: dict[str, Any]) -> tuple[str, str]:
        identity = {"id": message["id"]} if "id" in message else {}
        asked = _plain({name: value for name, value in message.items() if name != "id"})
        reply = {**known.pop(asked), **identity} if asked in known else session.handle(message, progress)
        if reply["ok"]:
            known[asked] = reply
        if len(known) > _KNOWN:
            del known[next(iter(known))]
        return _plain(reply), ""

    return answer


def _plain(content: object) -> str:
    return json.dumps(content, separators=(",", ":"), allow_nan=False)


def _begun(memory: int) -> tuple[Say, str]:
    """Returns a line printer that ends the process silently once the server is gone, and the server's first line."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for the server, which ends this process
    answers, sys.stdout = sys.stdout, sys.stderr
    _limit_memory(memory)

    def say(text: str) -> None:
        try:
            answers.write(f"{text}\n")
            answers.flush()
        except BrokenPipeError:
            os.dup2(os.open(os.devnull, os.O_WRONLY), answers.fileno())  # Python flushes once more when it ends
            raise SystemExit from None

    first = sys.stdin.readline()
    if not first.endswith("\n"):
        raise SystemExit
    return say, first


def _limit_memory(memory: int) -> None:
    if not memory:
        return
    try:
        import resource
    except ImportError:  # Windows has no such limit; the time of an operation is limited there, too
        return
    _, hard = resource.getrlimit(resource.RLIMIT_AS)
    resource.setrlimit(resource.RLIMIT_AS, (memory if hard == resource.RLIM_INFINITY else min(memory, hard), hard))


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]))
