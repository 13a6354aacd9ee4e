"""Bits flip in a file of a store: in rows, lists of files, deletions, the log or the metadata."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np

from attnflow.knowledge.store import Store, StoreError
from tests.faults._stores import DIM, Model, differs, eager, embeddings, steps

PROMISE = "no wrong entry is handed out and none vanishes unnoticed; a rescue gives whole entries alone"
TRIALS = 400
SHORT = 3
_WRITES = 8


def trial(seed: int, folder: Path) -> str | None:
    rng, model, place = np.random.default_rng(seed), Model(), folder / "store"
    with eager():
        store = Store.open(place, dim=DIM)
        for _ in steps(store, model, rng, _WRITES):
            pass
        if rng.random() < 0.5:
            store._backend._release()  # as where its process was killed, with writes in the log
        store.close()
    files = sorted(path for path in place.rglob("*") if path.is_file() and path.stat().st_size)
    path = files[int(rng.integers(len(files)))]
    data = bytearray(path.read_bytes())
    start = int(rng.integers(len(data)))
    for i in range(start, min(len(data), start + int(rng.choice([1, 1, 1, 4, 64])))):
        data[i] ^= int(rng.integers(1, 256))
    path.write_bytes(data)
    what = f"{path.relative_to(place)} at {start} of {len(data)}"
    noticed = False
    for read_only in (True, False):
        try:
            with Store.open(place, read_only=read_only) as opened:
                if (lost := differs(opened, model)) is not None:
                    return f"{what}: {lost}"
        except StoreError:
            noticed = True
    if not noticed:
        return None
    try:
        check = Store.rescue(place, folder / "rescued")
    except StoreError as error:
        return None if path.name == "store.json" or "manifest" in path.name else f"{what}: nothing was rescued: {error}"
    with Store.open(folder / "rescued") as rescued:
        for entry in rescued.get(rescued.ids()):
            token, row = map(int, json.loads(f"[{(entry.text or '').replace(':', ',')}]"))
            if not np.array_equal(entry.embedding.numpy(), embeddings(token, 201)[row]):
                return f"{what}: entry {entry.id} was rescued with another embedding"
            if check.ok and model.entries.get(entry.id, (0, 0, 0))[:2] != (token, row):
                return f"{what}: the rescue is said to be whole and has an old entry {entry.id}"
        if check.ok and len(rescued) != len(model.entries):
            return f"{what}: the rescue is said to be whole and has {len(rescued)} of {len(model.entries)} entries"
    return None
