"""The process of one page: reads a message per line, answers, and ends with its input.

A separate process can be stopped at any time and cannot take the memory of other pages.
`python -m attnflow.studio.worker BYTES` first reads the plain data of the initial design.
"""

from __future__ import annotations

import json
import os
import signal
import sys
from collections.abc import Callable

Say = Callable[[str], None]


def main(memory: int) -> None:
    """Answers messages on standard input, with `memory` bytes (0 for no limit).

    It first prints `{"ready": true}`; each answer is two lines, the reply and the changed design (else an empty line).
    """
    say, first = _begun(memory)
    from attnflow.report.live.operations import design_of
    from attnflow.report.live.session import Session

    session = Session(design_of(json.loads(first), "the design"))
    say('{"ready":true}')
    for line in sys.stdin:
        revision = session.revision
        reply = _plain(session.handle(json.loads(line)))
        say("\n".join((reply, "" if session.revision == revision else session.design.plain)))


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
    main(int(sys.argv[1]))
