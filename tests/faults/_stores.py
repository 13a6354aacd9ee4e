"""A store that is written at random, and what it must hold after every write."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import numpy as np

from attnflow.knowledge.store import Store, compaction, lance

DIM = 8


class Model:
    """What a store must hold: for each id, the number of the write that made it, its row there and its version."""

    def __init__(self) -> None:
        self.entries: dict[int, tuple[int, int, int]] = {}
        self.snapshots: dict[str, dict[int, tuple[int, int, int]]] = {}
        self.next_id = 0

    def copy(self) -> Model:
        """As it is now."""
        other = Model()
        other.entries, other.snapshots, other.next_id = dict(self.entries), dict(self.snapshots), self.next_id
        return other


def embeddings(token: int, count: int) -> np.ndarray:
    """Rows that no other write has."""
    return np.random.default_rng(token).standard_normal((count, DIM)).astype(np.float32)


def steps(store: Store, model: Model, rng: np.random.Generator, count: int, first: int = 1) -> Iterator[Model]:
    """Random writes: the model after each one, before the write is made; it is made when the next one is asked for."""
    for token in range(first, first + count):
        after, present = model.copy(), np.array(sorted(model.entries), dtype=np.int64)
        kinds = ["insert", "upsert", "delete", "snapshot", "restore", "drop", "compact"]
        name = rng.choice(kinds, p=[0.35, 0.3, 0.15, 0.06, 0.05, 0.04, 0.05])
        rows = int(rng.choice([1, 1, 2, 30, 200]))
        some = rng.choice(present, min(rows, len(present)), replace=False) if len(present) else present
        labels = sorted(model.snapshots)
        if name in ("delete", "compact") or (name in ("restore", "drop") and labels):
            label = str(rng.choice(labels)) if labels else ""
            if name == "delete":
                after.entries = {key: value for key, value in model.entries.items() if key not in set(some.tolist())}
                call = lambda some=some: store.delete(some)  # noqa: E731
            elif name == "restore":
                after.entries = model.snapshots[label]
                call = lambda label=label: store.restore(label)  # noqa: E731
            elif name == "drop":
                del after.snapshots[label]
                call = lambda label=label: store.drop_snapshot(label)  # noqa: E731
            else:
                call = store.compact
        elif name == "snapshot":
            after.snapshots[f"s{token}"] = model.entries
            call = lambda token=token: store.snapshot(f"s{token}")  # noqa: E731
        else:
            ids = np.arange(model.next_id, model.next_id + rows)
            if name == "upsert":
                ids = np.concatenate([some, ids[:1]])
            after.next_id = int(ids.max()) + 1
            for row, key in enumerate(ids.tolist()):
                after.entries[key] = (token, row, model.entries[key][2] + 1 if key in model.entries else 1)
            call = lambda ids=ids, token=token: store.upsert(  # noqa: E731
                ids=ids, embeddings=embeddings(token, len(ids)), texts=[f"{token}:{row}" for row in range(len(ids))]
            )
        yield after
        call()
        model.entries, model.snapshots, model.next_id = after.entries, after.snapshots, after.next_id


def differs(store: Store, *models: Model) -> str | None:
    """None where a store holds what one of these models says; else what it holds."""
    said = [_differs(store, model) for model in models]
    return None if None in said else said[0]


def _differs(store: Store, model: Model) -> str | None:
    if store.ids().tolist() != sorted(model.entries):
        missing = sorted(set(model.entries) - set(store.ids().tolist()))
        more = sorted(set(store.ids().tolist()) - set(model.entries))
        return f"entries {missing[:5]} are missing, {more[:5]} too many"
    if set(store.snapshots()) != set(model.snapshots):
        return f"snapshots {store.snapshots()}, expected {sorted(model.snapshots)}"
    rows = store.vectors().numpy()
    made: dict[int, np.ndarray] = {}
    for place, entry in enumerate(store.get(store.ids())):
        token, row, version = model.entries[entry.id]
        made.setdefault(token, embeddings(token, 201))
        if entry.text != f"{token}:{row}" or entry.version != version:
            return f"entry {entry.id} is {entry.text!r} in version {entry.version}, expected '{token}:{row}', {version}"
        if not np.array_equal(entry.embedding.numpy(), made[token][row]) or not np.array_equal(
            rows[place], made[token][row]
        ):
            return f"entry {entry.id} has another embedding"
    return None


@contextmanager
def eager() -> Iterator[None]:
    """Small limits: the log becomes a commit, and commits are compacted, every few writes."""
    before = lance._LOGGED, lance._DIRECT, compaction._MANY, compaction.KEEP
    lance._LOGGED, lance._DIRECT, compaction._MANY, compaction.KEEP = 6000, 4000, 5, compaction._NOW
    try:
        yield
    finally:
        lance._LOGGED, lance._DIRECT, compaction._MANY, compaction.KEEP = before
