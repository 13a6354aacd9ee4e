"""The clock of the machine stands still, or goes back, from write to write and from process to process."""

from __future__ import annotations

import time
from pathlib import Path

import numpy as np

from attnflow.knowledge.store import Store
from tests.faults._stores import DIM, Model, differs, eager, steps

PROMISE = "whatever the clock says, later writes have later times, and a reader that refreshes sees the last one"
TRIALS = 200
SHORT = 2
_ROUNDS = 3
_WRITES = 4


def trial(seed: int, folder: Path) -> str | None:
    rng, model, real = np.random.default_rng(seed), Model(), time.time_ns
    now = real()
    jumps = np.array([0, 0, -1, -1_000_000, -86_400_000_000_000, 1_000, 5_000_000_000])

    def time_ns() -> int:
        nonlocal now
        now += int(rng.choice(jumps))
        return now

    time.time_ns = time_ns
    try:
        with eager():
            Store.open(folder / "store", dim=DIM).close()
            latest = None
            with Store.open(folder / "store", read_only=True) as reader:
                for turn in range(_ROUNDS):
                    with Store.open(folder / "store") as store:
                        for _ in steps(store, model, rng, _WRITES, first=turn * _WRITES + 1):
                            pass
                        reader.refresh()
                        if (lost := differs(reader, model)) is not None:
                            return f"the reader: {lost}"
                        key = model.next_id
                        (key,) = store.insert(ids=[key], embeddings=np.ones((1, DIM)), texts=["x"]).tolist()
                        updated = store.get([key])[0].updated
                        if latest is not None and updated <= latest:
                            return f"a later write has the time {updated}, an earlier one {latest}"
                        latest = updated
                        store.delete([key])
                        model.next_id = key + 1
            return None
    finally:
        time.time_ns = real
