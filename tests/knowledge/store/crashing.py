"""A process that writes at random until it is killed, and the state that it must leave behind.

Each call is told on stdout before it is made, and once more after it has returned.
"""

from __future__ import annotations

import json
import sys

import numpy as np

DIM = 16


def embeddings(token, count):
    """Rows that no other token has."""
    return np.random.default_rng(token).standard_normal((count, DIM)).astype(np.float32)


def apply(state, snapshots, step):
    """The entries after a step: id -> (token, row, version)."""
    name, ids, token = step["name"], step.get("ids", []), step["token"]
    if name == "delete":
        return {key: value for key, value in state.items() if key not in set(ids)}
    if name == "snapshot":
        snapshots[step["label"]] = state
        return state
    if name == "restore":
        return snapshots[step["label"]]
    version = {key: state[key][2] + 1 for key in ids if key in state}
    return state | {key: (token, row, version.get(key, 1)) for row, key in enumerate(ids)}


def steps(store, rng, token):
    """One random step (or none): what it is, and it is made when the generator is asked to go on."""
    present = store.ids().numpy()
    name = rng.choice(["insert", "upsert", "delete", "snapshot", "restore"], p=[0.4, 0.3, 0.2, 0.05, 0.05])
    count = int(rng.choice([1, 3, 200, 2000]))
    if name == "insert":
        ids = list(range(store._backend.next_id, store._backend.next_id + count))
        yield {"name": "insert", "ids": ids, "token": token}
        given = store.insert(embeddings=embeddings(token, count), texts=[f"{token}:{i}" for i in range(count)])
        assert given.tolist() == ids
    elif name == "upsert":
        old = rng.choice(present, min(count, len(present)), replace=False).tolist()
        ids = [*old, store._backend.next_id + 5]
        yield {"name": "upsert", "ids": ids, "token": token}
        texts = [f"{token}:{i}" for i in range(len(ids))]
        store.upsert(ids=ids, embeddings=embeddings(token, len(ids)), texts=texts)
    elif name == "delete":
        ids = rng.choice(present, min(count, len(present)), replace=False).tolist()
        yield {"name": "delete", "ids": ids, "token": token}
        store.delete(ids)
    elif name == "snapshot":
        yield {"name": "snapshot", "label": f"s{token}", "token": token}
        store.snapshot(f"s{token}")
    elif store.snapshots():
        label = str(rng.choice(store.snapshots()))
        yield {"name": "restore", "label": label, "token": token}
        store.restore(label)


def main(directory, seed):
    """Write until killed."""
    import datetime

    from attnflow.knowledge.store import Store, compaction, lance

    compaction._MANY, compaction.KEEP = 7, datetime.timedelta(milliseconds=50)
    lance._LOGGED, lance._DIRECT = 20_000, 50_000
    rng = np.random.default_rng(seed)
    token = seed * 1_000_000
    with Store.open(directory, dim=DIM) as store:
        while True:
            token += 1
            for step in steps(store, rng, token):
                print(json.dumps(step), flush=True)
                last = step
            if last["token"] == token:
                print(json.dumps({"done": token}), flush=True)


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]))
