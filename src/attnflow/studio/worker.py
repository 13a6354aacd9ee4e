"""The process of one page: reads a message a line, answers a line; ends with its standard input.

A process of its own can be stopped at any time, whatever it computes, and cannot take the other pages' memory.
`python -m attnflow.studio.worker BYTES` takes as its first line the plain data of the design to begin with.
"""

from __future__ import annotations

import json
import os
import signal
import sys
from collections.abc import Callable

from attnflow.report.live.actions import design_of
from attnflow.report.live.session import Session


def main(memory: int) -> None:
    """Answer the messages on standard input.

    It says `{"ready": true}` first; each answer is two lines, the reply and, after it changed, the design as plain data
    (else an empty line).

    Args:
        memory: bytes of address space; what needs more is answered "not enough memory".
    """
    say, design = begun(memory)
    session = Session(design_of(json.loads(design), "the design"))
    revision = session.revision
    say('{"ready":true}')
    for line in sys.stdin:
        reply = session.handle(json.loads(line))
        design = "" if session.revision == revision else session.plain
        revision = session.revision
        say(f"{json.dumps(reply, separators=(',', ':'), allow_nan=False)}\n{design}")


def begun(memory: int) -> tuple[Callable[[str], None], str]:
    """How a page's process says a line to its server, and the first one that the server says.

    Once the server has ended nobody reads: the process then ends, too, and says nothing of it.

    Args:
        memory: bytes of address space; 0: as many as it likes.
    """
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
