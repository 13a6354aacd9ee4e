"""The disk is full for a while: a limit on the size of files stands for it, at which any write may fail."""

from __future__ import annotations

import logging
import resource
from pathlib import Path

import numpy as np

from attnflow.knowledge.store import Store, StoreError
from tests.faults._stores import DIM, Model, differs, eager, steps

PROMISE = "a write that fails for want of room changes nothing, every other one stays, and later ones succeed"
TRIALS = 200
SHORT = 2
_WRITES = 10


def trial(seed: int, folder: Path) -> str | None:
    rng, model = np.random.default_rng(seed), Model()
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    logging.getLogger("attnflow.knowledge.store").setLevel(logging.ERROR)  # of compaction that is put off
    try:
        with eager():
            store = Store.open(folder / "store", dim=DIM)
            for token in range(1, _WRITES + 1):
                following = steps(store, model, rng, 1, first=token)
                next(following)
                limit = int(rng.choice([0, 50, 500, 3000, 20_000, -1]))
                resource.setrlimit(resource.RLIMIT_FSIZE, (soft if limit < 0 else limit, hard))
                refused = False
                try:
                    next(following, None)
                except StoreError:
                    refused = True
                resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
                if (lost := differs(store, model)) is not None:
                    return f"write {token}, {'refused' if refused else 'done'} at {limit} bytes: {lost}"
                if refused and limit < 0:
                    return f"write {token} was refused though there was room"
            if rng.random() < 0.5:
                resource.setrlimit(resource.RLIMIT_FSIZE, (0, hard))  # also while it is closed
            store.close()
            resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
            with Store.open(folder / "store") as again:
                check = again.verify()
                return differs(again, model) or (None if check.ok and not check.leftovers else str(check))
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
        logging.getLogger("attnflow.knowledge.store").setLevel(logging.NOTSET)
