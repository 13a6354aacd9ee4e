"""One process of a store on object storage: `writer` or a reader, started by test_object_storage.py.

Generation g is one commit: it replaces the entries 0 to 9 and adds three, all with the text and the embedding g. The
writer notes in a file each generation that was committed, and compacts after every other one: it keeps old versions
for ten minutes in the first half, and deletes them at once in the second. A reader looks until it has seen the last.
"""

from __future__ import annotations

import json
import os
import sys
import time
from pathlib import Path

import torch

from attnflow.knowledge import Store
from attnflow.knowledge.store import StoreError

PLACE = "s3://bucket/facts"
READERS, GENERATIONS = 6, 8
HALF = GENERATIONS // 2
REPLACED, ADDED = 10, 3
LIMIT = 200.0  # seconds until a process that waits gives up


def ids_of(generation):
    return list(range(REPLACED + ADDED * (generation + 1)))


def write(store, folder):
    for generation in range(GENERATIONS):
        ids = list(range(REPLACED)) + ids_of(generation)[-ADDED:]
        rows = torch.full((len(ids), 4), float(generation))
        store.upsert(ids=ids, embeddings=rows, texts=[str(generation)] * len(ids))
        note(folder / "committed", str(generation))
        if generation == 2:
            store.search(torch.ones(4), 1, mode="approximate")  # makes the index
        if generation % 2:
            store.compact(keep_minutes=10 if generation < HALF else 0)
        if generation in (3, HALF + 1):  # each reader has looked in the first half, and in the second
            wait(lambda now=generation: len(list(folder.glob(f"looked-{int(now > HALF)}-*"))) == READERS)


def look(store):
    """The generation that a store shows, after a comparison of all that it says."""
    ids = store.ids().tolist()
    entries = store.get(ids)
    texts = [int(entry.text) for entry in entries]
    generation = texts[0]
    assert ids == ids_of(generation)
    assert texts == [generation] * REPLACED + [(i - REPLACED) // ADDED for i in ids[REPLACED:]]
    assert [entry.version for entry in entries[:REPLACED]] == [generation + 1] * REPLACED
    assert store.vectors()[:, 0].tolist() == [float(text) for text in texts]
    for mode in ("exact", "approximate"):
        assert store.search(torch.ones(4), 1, mode=mode).scores.tolist() == [4.0 * generation]
    assert store.snapshots() == []
    return generation


def read(folder, name, options):
    store, seen, refreshed = None, [], 0
    while not seen or seen[-1] < GENERATIONS - 1:
        committed = int((folder / "committed").read_text())
        if store is None:
            store = Store.open(PLACE, read_only=True, storage_options=options)
        else:
            store.refresh()
        held = store.search(torch.ones(4), 1).scores.item() / 4
        try:
            seen.append(look(store))
        except StoreError as error:  # only where the writer deletes old versions at once
            if "call refresh()" not in str(error) or int((folder / "committed").read_text()) < HALF:
                raise
            refreshed += 1
            continue
        assert seen[-1] == held, "one version until the next refresh"
        assert seen[-1] >= max(committed, *seen), "what was committed, or seen, is there"
        half = int(seen[-1] > HALF)
        note(folder / f"looked-{half}-{name}", "")
        if len(seen) % 3 == 0:
            store.close()
            store = None
    return {"seen": seen, "refreshed": refreshed}


def note(path, text):
    """Written whole or not at all."""
    beside = path.with_name(f".{path.name}.{os.getpid()}")
    beside.write_text(text)
    beside.replace(path)


def wait(ready):
    end = time.monotonic() + LIMIT
    while not ready():
        assert time.monotonic() < end, "the other processes are late"
        time.sleep(0.02)


def main():
    folder, name, options = Path(sys.argv[1]), sys.argv[2], json.loads(sys.argv[3])
    if name == "writer":
        with Store.open(PLACE, dim=4, storage_options=options) as store:
            write(store, folder)
    else:
        wait((folder / "committed").exists)
        note(folder / f"result-{name}", json.dumps(read(folder, name, options)))


if __name__ == "__main__":
    main()
