"""A store in a directory whose disk fails, is closed or full, or is to be compacted."""

from __future__ import annotations

import tempfile
from pathlib import Path

import pytest
import torch

from attnflow.knowledge.store import Store, StoreError, compaction, lance
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


@pytest.mark.slow
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
        ("add", lambda store: store.insert(embeddings=EYE.repeat(2**9, 1))),
        ("merge_insert", lambda store: store.upsert(ids=range(2**10), embeddings=EYE.repeat(2**8, 1))),
        ("delete", lambda store: store.delete(range(4, 2**10))),
        ("add", lambda store: store.restore("s")),
    ],
)
def test_what_the_engine_cannot_do_changes_nothing(directory, method, call, monkeypatch):
    """Writes that are large enough for a commit of their own."""
    monkeypatch.setattr(lance, "_DIRECT", 2**10)
    with Store.open(directory, dim=4) as store:
        store.insert(embeddings=EYE.repeat(2**8, 1))
        store.upsert(ids=range(4), embeddings=EYE, texts=list("abcd"))
        store.snapshot("s")

        class Failing:
            def __init__(self, table):
                self.table = table

            def __getattr__(self, name):
                if name == method:
                    raise OSError("No space left on device")
                return getattr(self.table, name)

        monkeypatch.setattr(store._backend._table, "raw", Failing(store._backend._table.raw))
        with pytest.raises(StoreError, match="No space left on device; make room on the disk and call again"):
            call(store)
        assert len(store) == 2**10
        assert [entry.text for entry in store.get(range(4))] == list("abcd")
        monkeypatch.undo()
        store.upsert(ids=[0], embeddings=EYE[:1], texts=["A"])
        assert store.get([0])[0].version == 3
    with Store.open(directory) as store:
        assert store.verify().ok
        assert [entry.text for entry in store.get(range(4))] == list("Abcd")


def test_a_log_that_cannot_go_to_the_table_stays_and_is_tried_again(directory, monkeypatch, caplog):
    monkeypatch.setattr(lance, "_LOGGED", 2000)
    with Store.open(directory, dim=4) as store:
        monkeypatch.setattr(type(store._backend._table.raw), "add", failing)
        for i in range(20):
            store.insert(embeddings=EYE, texts=[str(i)] * 4)
        assert "keeps writes in its log: No space left on device" in caplog.text
        assert len(store) == 80
    assert "was closed with writes left in its log" in caplog.text
    monkeypatch.undo()
    with Store.open(directory) as store:
        assert [entry.text for entry in store.get(range(0, 80, 4))] == [str(i) for i in range(20)]


def failing(*_, **__):
    raise OSError("No space left on device")


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


@pytest.fixture
def eager(monkeypatch):
    """Every write is a commit, and a few are compacted; nothing is kept for readers."""
    monkeypatch.setattr(lance, "_LOGGED", 0)
    monkeypatch.setattr(compaction, "_MANY", 5)
    monkeypatch.setattr(compaction, "KEEP", compaction._NOW)


def test_snapshots_survive_compaction(directory, eager):
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


def test_many_short_processes_are_compacted_too(directory, eager):
    for i in range(23):
        with Store.open(directory, dim=4) as store:
            store.insert(embeddings=EYE[:1], texts=[str(i)])
    with Store.open(directory, read_only=True) as store:
        assert len(store._backend._table.raw.list_versions()) < 10
        assert [entry.text for entry in store.get(store.ids())] == [str(i) for i in range(23)]


def test_compaction_that_fails_is_said_and_the_write_stays(directory, eager, monkeypatch, caplog):
    with Store.open(directory, dim=4) as store:
        monkeypatch.setattr(type(store._backend._table.raw), "optimize", failing)
        for _ in range(8):
            store.insert(embeddings=EYE)
        assert "was not compacted: No space left on device" in caplog.text
        assert len(store) == 32


def files(directory):
    return sum(path.is_file() for path in directory.rglob("*"))


def test_many_small_writes_leave_few_files(directory):
    with Store.open(directory, dim=4) as store:
        for i in range(300):
            store.insert(embeddings=EYE[:1], texts=[str(i)])
        for i in range(300):
            store.upsert(ids=[i], embeddings=EYE[1:2])
        assert files(directory) < 20
        assert [entry.text for entry in store.get(range(300))] == [str(i) for i in range(300)]
    assert files(directory) < 20
    with Store.open(directory) as store:
        assert store.stats().versions == {2: 300}


def test_compact_leaves_the_least(directory, monkeypatch):
    monkeypatch.setattr(lance, "_LOGGED", 0)
    with Store.open(directory, dim=4) as store:
        for i in range(12):
            store.upsert(ids=[i % 3], embeddings=EYE[:1], texts=[str(i)])
        assert files(directory) > 20
        (directory / "snapshot-half.lance").mkdir()
        store.compact()
        assert files(directory) <= 7  # metadata, lock, log, rows, their list, its hint, the last transaction
        assert not (directory / "snapshot-half.lance").exists()
        assert [entry.text for entry in store.get(range(3))] == ["9", "10", "11"]
        assert store.verify().ok


def test_compact_elsewhere_has_nothing_to_do_or_says_so(tmp_path):
    with Store.open("memory", dim=4) as store:
        store.compact()
    with (
        Store.open(f"milvus:{tmp_path}/store.db", dim=4) as store,
        pytest.raises(StoreError, match="compacts its files by itself"),
    ):
        store.compact()
