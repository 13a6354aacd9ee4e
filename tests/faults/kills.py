"""A process that writes to a store is killed (SIGKILL) at any moment."""

from __future__ import annotations

import multiprocessing
import os
import time
from pathlib import Path

import numpy as np

from attnflow.knowledge.store import Store
from tests.faults._stores import DIM, Model, differs, eager, steps

PROMISE = "every write that a killed process had acknowledged is there, and of the one under way all or nothing"
TRIALS = 500
SHORT = 1
_WRITES = 1000


def trial(seed: int, folder: Path) -> str | None:
    """The process says how many writes are done; the same writes, counted again, are what must be there."""
    said = folder / "said"
    said.touch()
    processes = multiprocessing.get_context("forkserver")  # which has imported what is slow to import
    processes.set_forkserver_preload(["torch", "pyarrow", "attnflow.knowledge.store", "tests.faults._stores"])
    child = processes.Process(target=writing, args=(str(folder / "store"), seed, str(said)))
    child.start()
    rng = np.random.default_rng(seed)
    begun = time.monotonic()
    while said.stat().st_size < 2 and child.is_alive() and time.monotonic() - begun < 60:
        time.sleep(0.005)
    time.sleep(float(rng.uniform(0, 0.4)))
    child.kill()
    child.join()
    if child.exitcode != -9:
        return f"the process that writes ended by itself, with {child.exitcode}"
    done, model = said.stat().st_size, Model()
    expected = list[Model]()
    with Store.open("memory", dim=DIM) as counted:
        for number, following in enumerate(steps(counted, model, np.random.default_rng(seed), done + 1)):
            if number == done:
                expected = [model.copy(), following]
                break
    with eager(), Store.open(folder / "store", dim=DIM) as store:
        if (lost := differs(store, *expected)) is not None:
            return f"after {done} acknowledged writes: {lost}"
        check = store.verify()
        return None if check.ok and not check.leftovers else str(check)


def writing(place: str, seed: int, said: str) -> None:
    """Write at random until killed; one byte for each write that has returned."""
    file = os.open(said, os.O_WRONLY | os.O_APPEND)
    model = Model()
    with eager(), Store.open(place, dim=DIM) as store:
        for number, _ in enumerate(steps(store, model, np.random.default_rng(seed), _WRITES)):
            if number:
                os.write(file, b".")
        os.write(file, b".")
        time.sleep(60)
