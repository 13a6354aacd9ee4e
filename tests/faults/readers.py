"""Readers look while a writer inserts, replaces, deletes, restores and compacts, each by files of its own."""

from __future__ import annotations

import threading
from pathlib import Path

import numpy as np

from attnflow.knowledge.store import Store, StoreError, compaction
from tests.faults._stores import DIM, eager

PROMISE = "a reader sees every batch whole or not at all, in rows and in searches, and never an older one after a newer"
TRIALS = 60
SHORT = 1
_BATCH = 20
_WRITES = 25


def trial(seed: int, folder: Path) -> str | None:
    rng = np.random.default_rng(seed)
    with eager(), Store.open(folder / "store", dim=DIM) as store:
        compaction.KEEP = compaction.KEEP.__class__(minutes=10)  # what readers may be looking at
        done, faults = threading.Event(), list[str]()
        write(store, 1)
        readers = [threading.Thread(target=look, args=(folder / "store", done, faults)) for _ in range(2)]
        readers.append(threading.Thread(target=look, args=(store, done, faults)))
        for reader in readers:
            reader.start()
        try:
            for generation in range(2, _WRITES):
                if rng.random() < 0.2:
                    store.delete(range(_BATCH))
                write(store, generation)
                if rng.random() < 0.2:
                    store.restore(store.snapshot())
        finally:
            done.set()
            for reader in readers:
                reader.join()
        return faults[0] if faults else None


def write(store: Store, generation: int) -> None:
    rows = np.zeros((_BATCH, DIM))
    rows[:, 0] = generation
    store.upsert(ids=range(_BATCH), embeddings=rows, texts=[str(generation)] * _BATCH)


def look(place: Path | Store, done: threading.Event, faults: list[str]) -> None:
    """Until it is done, or something is wrong."""
    store = place if isinstance(place, Store) else Store.open(place, read_only=True)
    newest = 0
    try:
        while not done.is_set() and not faults:
            if store is not place:
                store.refresh()
            scores = set(store.range(np.eye(DIM)[0], 0.5).scores.tolist())
            try:
                texts = {int(entry.text or 0) for entry in store.get(range(_BATCH))}
            except KeyError:
                texts = set[int]()
            if len(scores) > 1 or len(texts) > 1:
                faults.append(f"parts of batches: scores {scores}, texts {texts}")
            if texts and max(texts) < newest:
                faults.append(f"batch {max(texts)} after {newest}")
            newest = max({newest, *texts})
    except StoreError as error:
        faults.append(f"a reader failed: {error}")
    finally:
        if store is not place:
            store.close()
