"""A command under torchrun: rank 0 speaks for all, and all end together, with one exit code."""

from __future__ import annotations

import os
import sys
from datetime import timedelta
from typing import Final

from attnflow._core.errors import RankFailed

_LIMIT: Final = timedelta(seconds=30)  # for other ranks to end; they may still be importing, or wait for this one
_HERE: Final = "TORCHELASTIC_USE_AGENT_STORE"  # set where torchrun runs a store that outlives the ranks


def speaks(error: Exception | None = None) -> bool:
    """Whether this process prints: rank 0, and a rank that alone knows where its script failed."""
    rank = os.environ.get("RANK", "0") if int(os.environ.get("WORLD_SIZE", "1")) > 1 else "0"
    return rank == "0" or (not isinstance(error, RankFailed) and str(error).startswith(f"rank {rank}: "))


def part(code: int) -> None:
    """Under torchrun, end with the other ranks: it kills all of them when the first has ended with an error."""
    group = sys.modules.get("torch.distributed")
    if group is None or os.environ.get(_HERE) != "True" or (ranks := int(os.environ["WORLD_SIZE"])) == 1:
        return
    sys.stdout.flush()
    sys.stderr.flush()
    try:
        host, port = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
        store = group.TCPStore(host, port, is_master=False, timeout=_LIMIT)
        place = f"attnflow/ended/{os.environ.get('TORCHELASTIC_RESTART_COUNT')}"
        store.set(f"{place}/{os.environ['RANK']}", "")
        store.wait([f"{place}/{rank}" for rank in range(ranks)], _LIMIT)
    except RuntimeError:  # a rank was killed, or waits for this one
        pass
    os._exit(code)  # a teardown of threads takes its time, and may end a process by a signal
