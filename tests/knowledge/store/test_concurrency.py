"""Readers during writes, in threads and in another process: nobody sees half of a batch."""

from __future__ import annotations

import subprocess
import sys
import textwrap
import threading
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch

from attnflow.knowledge.store import Store

BATCH = 50


def batch(generation):
    """Rows whose first coordinate is their generation: all of a batch score alike."""
    rows = torch.zeros(BATCH, 4)
    rows[:, 0] = float(generation)
    return rows


def look(store, stop):
    """Search until told to stop; every answer must be of one generation, whole."""
    query, looked = torch.tensor([1.0, 0, 0, 0]), 0
    while not stop.is_set() or not looked:
        found = store.search(query, BATCH + 10)
        assert found.certificate.total in (0, BATCH), found.certificate
        generations = set(found.scores[found.ids >= 0].tolist())
        assert len(generations) <= 1, generations
        above = store.range(query, 0.5).ids
        assert len(above) in (0, BATCH)
        try:
            entries = store.get(range(BATCH))
        except KeyError:  # between a delete and an insert
            pass
        else:
            assert len({(entry.text, float(entry.embedding[0]), entry.version) for entry in entries}) == 1
        looked += 1
    return looked


@pytest.mark.parametrize("backend", ["memory", "lancedb"])
def test_threads_see_whole_batches(backend, tmp_path):
    place = "memory" if backend == "memory" else tmp_path / "store"
    with Store.open(place, dim=4) as store, ThreadPoolExecutor(4) as threads:
        stop = threading.Event()
        store.insert(ids=range(BATCH), embeddings=batch(1), texts=["1"] * BATCH)
        readers = [threads.submit(look, store, stop) for _ in range(3)]
        try:
            for generation in range(2, 40):
                texts = [str(generation)] * BATCH
                if generation % 3:
                    store.upsert(ids=range(BATCH), embeddings=batch(generation), texts=texts)
                else:
                    store.delete(range(BATCH))
                    store.insert(ids=range(BATCH), embeddings=batch(generation), texts=texts)
        finally:
            stop.set()
        assert all(reader.result() > 0 for reader in readers)


def test_threads_may_write_together(tmp_path):
    with Store.open(tmp_path / "store", dim=4) as store, ThreadPoolExecutor(4) as threads:
        ids = list(threads.map(lambda i: store.insert(embeddings=batch(i), texts=[str(i)] * BATCH).tolist(), range(20)))
        assert sorted(key for part in ids for key in part) == list(range(20 * BATCH))
        for i, part in enumerate(ids):
            assert {entry.text for entry in store.get(part)} == {str(i)}


def test_another_process_sees_whole_batches(tmp_path):
    reader = """
        import sys
        from attnflow.knowledge.store import Store
        from tests.knowledge.store.test_concurrency import BATCH, look
        import threading, torch
        store = Store.open(sys.argv[1], read_only=True)
        print("reading", flush=True)
        stop, seen = threading.Event(), set()
        stop.set()
        while float(store.search([1.0, 0, 0, 0], 1).scores) < 60:
            look(store, stop)
            entries = store.get(store.ids())
            assert len(entries) in (0, BATCH)
            assert len({(entry.text, float(entry.embedding[0])) for entry in entries}) <= 1
            seen |= {entry.text for entry in entries}
            store.refresh()
        print(len(seen))
        """
    with Store.open(tmp_path / "store", dim=4) as store:
        store.insert(ids=range(BATCH), embeddings=batch(1), texts=["1"] * BATCH)
        command = [sys.executable, "-c", textwrap.dedent(reader), str(tmp_path / "store")]
        with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as child:
            assert child.stdout is not None
            started = child.stdout.readline()
            for generation in range(2, 61):
                store.upsert(ids=range(BATCH), embeddings=batch(generation), texts=[str(generation)] * BATCH)
            output, errors = child.communicate(timeout=600)
    assert started == "reading\n", errors
    assert child.returncode == 0, errors
    assert int(output) >= 1
