"""Any sequence of calls leaves a store, on every backend, as it leaves a dictionary."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from attnflow.knowledge import Store
from tests.knowledge.store.conftest import BACKENDS, place_of

DIM, COLUMNS = 3, 2

calls = st.lists(
    st.tuples(
        st.sampled_from(["insert", "insert", "upsert", "upsert", "delete", "snapshot", "restore", "compact", "reopen"]),
        st.integers(0, 2**32 - 1),
    ),
    max_size=14,
)


def random_rows(rng, count):
    """Small integers, so that scores are exact."""
    return rng.integers(-3, 4, (count, DIM + COLUMNS)).astype(np.float32)


def make(store, state, kept, name, rng):
    """One call, and the dictionary id -> (vector, text, version) after it."""
    present = np.array(sorted(state), dtype=np.int64)
    count = int(rng.integers(0, 6))
    rows = random_rows(rng, count)
    texts = [None if rng.random() < 0.3 else f"text {rng.integers(1000)}" for _ in range(count)]
    both = {"embeddings": rows[:, :DIM], "thresholds": rows[:, DIM:], "texts": texts}
    if name == "insert":
        ids = store.insert(**both).tolist()
        assert not set(ids) & kept["used"]
        state = state | {key: (*rows[i], texts[i], 1) for i, key in enumerate(ids)}
        kept["used"] |= set(ids)
    elif name == "upsert":
        ids = rng.choice(max(kept["used"], default=0) + 4, count, replace=False) if count <= 4 else np.arange(count)
        store.upsert(ids=ids, **both)
        old = {key: state[key] for key in ids.tolist() if key in state}
        for i, key in enumerate(ids.tolist()):
            text, version = old[key][-2:] if key in old else (None, 0)
            state = state | {key: (*rows[i], texts[i] if texts[i] is not None else text, version + 1)}
        kept["used"] |= set(ids.tolist())
    elif name == "delete":
        gone = rng.choice(present, min(count, len(present)), replace=False)
        store.delete(gone)
        state = {key: value for key, value in state.items() if key not in set(gone.tolist())}
    elif name == "snapshot":
        kept["snapshots"][store.snapshot()] = state
    elif name == "restore" and kept["snapshots"]:
        label = str(rng.choice(sorted(kept["snapshots"])))
        store.restore(label)
        state = kept["snapshots"][label]
    elif name == "compact":
        store.compact()
    return state


def check(store, state):
    """Contents and the results of searches."""
    assert store.ids().tolist() == sorted(state)
    assert len(store) == len(state)
    for entry in store.get(store.ids()):
        vector = (*entry.embedding.tolist(), *entry.thresholds.tolist())
        assert (*vector, entry.text, entry.version) == state[entry.id]
    query, column = np.array([1.0, -2.0, 0.5], dtype=np.float32), 1
    expected = {key: float(np.dot(value[:DIM], query) + value[DIM + column]) for key, value in state.items()}
    for mode in ("exact", "approximate"):  # of one list, which is read whole
        found = store.search(query, 4, threshold_column=column, mode=mode)
        assert found.scores.tolist()[: len(state)] == sorted(expected.values(), reverse=True)[:4]
        assert [expected[key] for key in found.ids.tolist() if key >= 0] == found.scores.tolist()[: len(state)]
    above = store.range(query, 0.5, threshold_column=column)
    assert sorted(above.ids.tolist()) == sorted(key for key, score in expected.items() if score > 0.5)


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_store_is_a_dictionary_that_can_be_searched(backend, tmp_path_factory):
    @settings(max_examples={"memory": 12, "lancedb": 12}[backend])
    @given(calls)
    def run(sequence):
        place = place_of(backend, tmp_path_factory.mktemp("random"))
        store = Store.open(place, dim=DIM, num_thresholds=COLUMNS)
        state, kept = {}, {"used": set(), "snapshots": {}}
        for name, seed in sequence:
            if name == "reopen" and backend != "memory":
                store.close()
                store = Store.open(place)
            state = make(store, state, kept, name, np.random.default_rng(seed))
            check(store, state)
        store.close()

    run()
