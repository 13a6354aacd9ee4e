"""The process in which a page asks about the model: reads a message a line, answers a line; ends with its input.

Of its own, beside that of the masks, so that these are answered while the model is at work, and so that work is stopped
by ending it. `python -m attnflow.studio.model_worker BYTES` takes as its first line `{"model": name, "bias": folder}`,
from the command line of the server; a page names neither.
"""

from __future__ import annotations

import json
import sys
import time
from typing import Final

from attnflow.report.live.model import ModelSession
from attnflow.studio.worker import begun

_PAUSE: Final = 0.1  # seconds between two lines of progress of one kind


def main(memory: int) -> None:
    """Answer the messages on standard input, with lines `{"progress": [done, total, what]}` before the reply.

    Args:
        memory: bytes of address space; 0 for no limit.
    """
    write, first = begun(memory)
    subject = json.loads(first)
    session = ModelSession(subject["model"], subject["bias"])
    said = ("", 0.0)

    def say(content: dict[str, object], end: str = "") -> None:
        write(json.dumps(content, separators=(",", ":"), allow_nan=False) + end)

    def progress(done: int, total: int, what: str) -> None:
        nonlocal said
        kind, now = f"{total} {what}", time.monotonic()
        if kind != said[0] or now - said[1] >= _PAUSE:
            said = (kind, now)
            say({"progress": [done, total, what]})

    say({"ready": True})
    for line in sys.stdin:
        say(session.handle(json.loads(line), progress), "\n")  # where the process of a mask says its design


if __name__ == "__main__":
    main(int(sys.argv[1]))
