"""Entries come, change and go until few of the first are left, while approximate searches look for all of them."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from attnflow.knowledge.store import Store

PROMISE = "approximate searches find 99 % of the ten best entries, old or new, for queries like them or not"
TRIALS = 200
SHORT = 2
_DIM, _K, _STEPS, _QUERIES = 16, 10, 5, 400
_TARGET = 0.99


def trial(seed: int, folder: Path) -> str | None:
    rng, shares, entries = np.random.default_rng(seed), dict[str, list[float]](), dict[int, np.ndarray]()
    with Store.open("memory", dim=_DIM, search="approximate", target_recall=_TARGET) as store:
        first = _clusters(rng, 40, 1500)
        entries.update(zip(store.insert(embeddings=first).tolist(), first, strict=True))
        for _ in range(_STEPS):
            new = _clusters(rng, int(rng.integers(1, 40)), int(rng.integers(20, 400)))
            changed = rng.choice(list(entries), len(new) // 4, replace=False)
            store.upsert(ids=changed, embeddings=new[: len(changed)])
            entries.update(zip(changed.tolist(), new, strict=False))
            rest = new[len(changed) :]
            entries.update(zip(store.insert(embeddings=rest).tolist(), rest, strict=True))
            gone = list(entries)[: int(rng.integers(1, len(entries) // 2))]
            store.delete(gone)
            for key in gone:
                del entries[key]
            ids, vectors = np.array(list(entries)), np.stack(list(entries.values())).astype(np.float64)
            asked = {
                "like any": vectors[rng.integers(len(ids), size=_QUERIES)],
                "like the latest": new[rng.integers(len(new), size=_QUERIES)],
                "in random directions": rng.standard_normal((_QUERIES, _DIM)),
            }
            for what, queries in asked.items():
                shares.setdefault(what, []).append(_recall(store, ids, vectors, queries.astype(np.float32)))
    low = {what: float(np.mean(values)) for what, values in shares.items() if np.mean(values) < _TARGET}
    return ", ".join(f"recall {share:.4f} of queries {what}" for what, share in low.items()) or None


def _clusters(rng: np.random.Generator, count: int, rows: int) -> np.ndarray:
    centres = rng.choice([0.5, 1.0, 2.0]) * rng.standard_normal((count, _DIM))
    return (centres[rng.integers(count, size=rows)] + 0.3 * rng.standard_normal((rows, _DIM))).astype(np.float32)


def _recall(store: Store, ids: np.ndarray, vectors: np.ndarray, queries: np.ndarray) -> float:
    """Equal scores are equal, rounding aside."""
    scores = queries.astype(np.float64) @ vectors.T
    least = np.sort(scores, axis=1)[:, -_K, None] - 1e-5 * np.abs(scores).max(axis=1, keepdims=True)
    order = np.argsort(ids)
    places = order[np.searchsorted(ids[order], store.search(queries, _K).ids.numpy())]
    return float((np.take_along_axis(scores, places, axis=1) >= least).mean())
