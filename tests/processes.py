"""Starts programs in several processes, and ends them."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import torch.distributed as dist

ROOT = Path(__file__).parents[1]


def torchrun(
    *words: str, processes: int = 2, timeout: int = 300, **environment: str
) -> subprocess.CompletedProcess[str]:
    """Run a script, or `-m` and a module, under torchrun on the CPU; who calls asks how it ended."""
    launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={processes}"]
    paths = os.pathsep.join([str(ROOT / "src"), str(ROOT), os.environ.get("PYTHONPATH", "")])
    on_cpu = {"OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": "", "ACCELERATE_USE_CPU": "true", "PYTHONPATH": paths}
    return subprocess.run(
        [*launcher, *words],
        cwd=ROOT,
        env={**os.environ, **on_cpu, **environment},
        capture_output=True,
        text=True,
        timeout=timeout,
        check=False,
    )


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
