"""`af.bias.train` on a tiny model, in one process or in several; run by test_distributed.py.

python distributed_training.py FOLDER "guidance" | "all" BATCH STOP: every process dies after step STOP; 0: none does.
"""

from __future__ import annotations

import os
import signal
import sys
from dataclasses import replace

import attnflow as af
from attnflow.models.loaded import Loaded
from tests.faults.checkpoints import CONFIG, TEXTS, biased, letters
from tests.processes import leave


def main(folder: str, mode: str, batch: int, stop: int) -> None:
    def die(step: int, steps: int, what: str) -> None:
        if step == stop:
            os.kill(os.getpid(), signal.SIGKILL)

    loaded = Loaded(biased("all" if mode == "all" else "guidance"), letters())
    config = replace(CONFIG, batch_size=batch)
    af.bias.train(loaded, TEXTS, folder, config, length=16, progress=die if stop else None)


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2], int(sys.argv[3]), int(sys.argv[4]))
    leave()
