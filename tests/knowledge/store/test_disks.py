"""A store in a directory whose disk fails, is closed or full, or is to be compacted."""

from __future__ import annotations

import tempfile
from pathlib import Path

import pytest
import torch

from attnflow.knowledge.store import Store, StoreError, lance
from tests.knowledge.store.processes import run

EYE = torch.eye(4)


AS_NOBODY = """
import os, sys
import lancedb, pyarrow, torch
import attnflow.knowledge.store.arrow
from attnflow.knowledge.store import ReadOnly, Store
if os.getuid() == 0:
    os.setgroups([])
    os.setgid(65534)
    os.setuid(65534)
for place in (sys.argv[1], sys.argv[1] + "-new"):
    try:
        Store.open(place, dim=4)
    except ReadOnly as error:
        print(error)
with Store.open(sys.argv[1], read_only=True) as store:
    print(len(store), store.search([1.0, 0, 0, 0], 1).ids.tolist(), store.stats().count)
"""


def test_a_directory_that_cannot_be_written():
    """As a user who is not root, since root may write anywhere; pytest's directories are closed to others."""
    with tempfile.TemporaryDirectory() as made:
        directory = Path(made) / "store"
        with Store.open(directory, dim=4) as store:
            store.insert(embeddings=EYE)
        for path in (directory, *directory.rglob("*")):
            path.chmod(0o555 if path.is_dir() else 0o444)
        directory.parent.chmod(0o555)
        try:
            cannot, cannot_make, answer = run(AS_NOBODY, directory).splitlines()
        finally:
            for path in (directory.parent, directory, *directory.rglob("*")):
                path.chmod(0o755)
    assert cannot.endswith("cannot be written (Permission denied): open it with read_only=True")
    assert "cannot be made: Permission denied" in cannot_make
    assert answer == "4 [0] 4"


def test_a_full_disk_loses_nothing(directory):
    """A limit on the size of files stands for it: every write of more than a few bytes fails."""
    output = run(
        """
        import resource, sys
        import torch
        from attnflow.knowledge.store import Store, StoreError
        store = Store.open(sys.argv[1], dim=4)
        store.insert(embeddings=torch.eye(4), texts=list("abcd"))
        hard = resource.getrlimit(resource.RLIMIT_FSIZE)[1]
        for limit in (0, 100, 2000):
            resource.setrlimit(resource.RLIMIT_FSIZE, (limit, hard))
            rows = torch.ones(10_000, 4)
            for call in (
                lambda: store.insert(embeddings=rows),
                lambda: store.upsert(ids=range(2, 10_002), embeddings=rows),
            ):
                try:
                    call()
                except StoreError as error:
                    print("refused", error)
                assert store.ids().tolist() == [0, 1, 2, 3], store.ids()
                assert store.search(torch.eye(4), 1).ids[:, 0].tolist() == [0, 1, 2, 3]
        resource.setrlimit(resource.RLIMIT_FSIZE, (0, hard))
        for call in (lambda: store.delete([0]), lambda: store.snapshot("s")):
            try:
                call()
            except StoreError as error:
                print("refused", error)
        assert store.ids().tolist() == [0, 1, 2, 3] and store.snapshots() == []
        resource.setrlimit(resource.RLIMIT_FSIZE, (hard, hard))
        print(store.insert(embeddings=torch.eye(4)[:1], texts=["e"]).tolist())
        store.delete([0])
        store.snapshot("s")
        """,
        directory,
    )
    refused = [line for line in output.splitlines() if line.startswith("refused")]
    assert len(refused) == 8
    assert all("the entries were not" in line or "the snapshot was not" in line for line in refused)
    with Store.open(directory) as store:
        assert [entry.text for entry in store.get(store.ids())] == ["b", "c", "d", "e"]
        assert store.snapshots() == ["s"]


@pytest.mark.parametrize(
    ("method", "call"),
    [
        ("add", lambda store: store.insert(embeddings=EYE)),
        ("merge_insert", lambda store: store.upsert(ids=[0], embeddings=EYE[:1])),
        ("delete", lambda store: store.delete([0])),
        ("add", lambda store: store.restore("s")),
    ],
)
def test_what_the_engine_cannot_do_changes_nothing(directory, method, call, monkeypatch):
    with Store.open(directory, dim=4) as store:
        store.insert(embeddings=EYE, texts=list("abcd"))
        store.snapshot("s")

        class Failing:
            def __init__(self, table):
                self.table = table

            def __getattr__(self, name):
                if name == method:
                    raise OSError("No space left on device")
                return getattr(self.table, name)

        monkeypatch.setattr(store._backend._table, "raw", Failing(store._backend._table.raw))
        with pytest.raises(StoreError, match="No space left on device"):
            call(store)
        assert [entry.text for entry in store.get(store.ids())] == list("abcd")
        assert store.search(EYE, 1).ids[:, 0].tolist() == [0, 1, 2, 3]
        monkeypatch.undo()
        store.upsert(ids=[0], embeddings=EYE[:1], texts=["A"])
        assert store.get([0])[0].version == 2


def test_a_step_cut_short_after_the_commit_is_made_good(directory, monkeypatch):
    """An interrupt between the commit and the index's step: the next search compares the two."""
    with Store.open(directory, dim=4) as store:
        store.insert(embeddings=EYE[:2])

        def interrupted(*_):
            raise KeyboardInterrupt

        for call in (
            lambda: store.insert(embeddings=EYE[2:]),
            lambda: store.upsert(ids=[0], embeddings=5 * EYE[:1]),
            lambda: store.delete([1]),
        ):
            assert len(store)  # which makes good what was cut short before
            monkeypatch.setattr(store._backend, "_show", interrupted)
            with pytest.raises(KeyboardInterrupt):
                call()
            monkeypatch.undo()
        assert store.search(EYE[0], 1).scores.tolist() == [5.0]
        assert store.search(EYE[2], 1).ids.tolist() == [2]
        assert store.ids().tolist() == [0, 2, 3]


def test_snapshots_survive_compaction(directory, monkeypatch):
    monkeypatch.setattr(lance, "_COMPACT_AFTER", 5)
    monkeypatch.setattr(lance, "_KEEP", lance.datetime.timedelta(milliseconds=1))
    with Store.open(directory, dim=4) as store:
        store.insert(embeddings=EYE, texts=list("abcd"))
        store.snapshot("early")
        for i in range(23):
            store.upsert(ids=[i % 4], embeddings=torch.full((1, 4), float(i)), texts=[str(i)])
        versions = store._backend._table.raw.list_versions()
        assert len(versions) < 10
        assert store.stats().versions == {6: 1, 7: 3}
        store.restore("early")
        assert [entry.text for entry in store.get(store.ids())] == list("abcd")
        assert store.search(EYE, 1).ids[:, 0].tolist() == [0, 1, 2, 3]


def test_many_short_processes_are_compacted_too(directory, monkeypatch):
    monkeypatch.setattr(lance, "_COMPACT_AFTER", 5)
    monkeypatch.setattr(lance, "_KEEP", lance.datetime.timedelta(milliseconds=1))
    for i in range(23):
        with Store.open(directory, dim=4) as store:
            store.insert(embeddings=EYE[:1], texts=[str(i)])
    with Store.open(directory, read_only=True) as store:
        assert len(store._backend._table.raw.list_versions()) < 10
        assert [entry.text for entry in store.get(store.ids())] == [str(i) for i in range(23)]


def test_compaction_that_fails_is_said_and_the_write_stays(directory, monkeypatch, caplog):
    monkeypatch.setattr(lance, "_COMPACT_AFTER", 1)

    def full(*_, **__):
        raise OSError("No space left on device")

    with Store.open(directory, dim=4) as store:
        monkeypatch.setattr(type(store._backend._table.raw), "optimize", full)
        store.insert(embeddings=EYE)
        assert "was not compacted: No space left on device" in caplog.text
        assert len(store) == 4
