"""When a write has returned, a power cut does not undo it: only what was synchronised is on the disk then."""

from __future__ import annotations

import os

import pytest
import torch

from attnflow.knowledge.store import Store, StoreError
from tests.faults.power_cuts import Disk
from tests.knowledge.store.conftest import place_of

EYE = torch.eye(4)


@pytest.fixture
def disk(tmp_path, monkeypatch):
    """A folder of which an image is what a power cut leaves."""
    root = tmp_path / "disk"
    root.mkdir()
    made = Disk(root)
    monkeypatch.setattr(os, "fsync", made.fsync)
    yield made
    made.close()


@pytest.mark.parametrize("backend", ["lancedb", "milvus"])
def test_a_write_that_has_returned_is_on_the_disk(backend, tmp_path, disk):
    with Store.open(place_of(backend, tmp_path / "disk"), dim=4) as store:
        store.insert(embeddings=EYE, texts=list("abcd"))
        disk.image(tmp_path / "inserted", None)
        store.upsert(ids=[0], embeddings=2 * EYE[:1], texts=["A"])
        store.delete([1])
        disk.image(tmp_path / "edited", None)
    with Store.open(place_of(backend, tmp_path / "inserted")) as store:
        assert [entry.text for entry in store.get(store.ids())] == list("abcd")
    with Store.open(place_of(backend, tmp_path / "edited")) as store:
        assert [entry.text for entry in store.get(store.ids())] == list("Acd")
        assert store.get([0])[0].embedding.tolist() == [2.0, 0.0, 0.0, 0.0]


@pytest.mark.slow
def test_a_large_write_that_has_returned_is_on_the_disk(tmp_path, disk):
    """Which is a commit of LanceDB; so are a snapshot and a restore."""
    rows = EYE.repeat(40_000, 1)
    with Store.open(tmp_path / "disk" / "store", dim=4) as store:
        store.insert(embeddings=rows)
        name = store.snapshot()
        store.delete(range(150_000))
        disk.image(tmp_path / "deleted", None)
        store.restore(name)
        disk.image(tmp_path / "restored", None)
    with Store.open(tmp_path / "deleted" / "store") as store:
        assert len(store) == 10_000
        assert store.snapshots() == [name]
    with Store.open(tmp_path / "restored" / "store") as store:
        assert len(store) == 160_000
        assert store.verify().ok


@pytest.mark.parametrize("backend", ["lancedb", "milvus"])
def test_without_synchronising_it_would_not_be(backend, tmp_path, disk, monkeypatch):
    """The test is one: the disk that it makes up drops what was only written."""
    with Store.open(place_of(backend, tmp_path / "disk"), dim=4) as store:
        monkeypatch.setattr(os, "fsync", lambda _: None)
        store.insert(embeddings=EYE)
        disk.image(tmp_path / "cut", None)
    monkeypatch.undo()
    try:
        with Store.open(place_of(backend, tmp_path / "cut")) as store:
            assert len(store) == 0
    except StoreError:
        assert backend == "milvus"
