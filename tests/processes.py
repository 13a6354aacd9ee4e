"""How a program that a test starts in several processes ends."""

from __future__ import annotations

import os
import sys

import torch.distributed as dist


def leave() -> None:
    """Waits until every process has done its work, and ends this one without the interpreter's teardown.

    Threads of gloo and of autograd outlive the main thread. One of them that asks for the GIL while Python is
    finalised is unwound by `pthread_exit`, which C++ answers with "terminate called without an active exception":
    now and then a process whose work was done dies by SIGABRT.
    """
    if dist.is_initialized():
        dist.barrier()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0)
