"""A store in a directory: reopening, what may lie there, who may write, and disks that fail."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import textwrap
from pathlib import Path

import pytest
import torch

from attnflow.knowledge.store import NewerFormat, NotAStore, ReadOnly, Store, StoreError, StoreLocked, lance

EYE = torch.eye(4)


@pytest.fixture
def directory(tmp_path):
    return tmp_path / "store"


def run(code, *arguments):
    """A process of its own; returns what it prints."""
    done = subprocess.run(
        [sys.executable, "-W", "error", "-c", textwrap.dedent(code), *map(str, arguments)],
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert done.stderr == ""
    return done.stdout


def test_a_store_is_the_same_after_reopening(directory):
    with Store.open(directory, dim=4, num_thresholds=1) as store:
        store.insert(embeddings=EYE, texts=list("abcd"), thresholds=torch.ones(4, 1), encoder="e")
        store.upsert(ids=[1], embeddings=EYE[:1], texts=["B"])
        store.delete([3])
        store.snapshot("kept")
        before = store.get(store.ids())
    with Store.open(str(directory)) as store:
        assert (store.dim, store.num_thresholds, store.backend) == (4, 1, "lancedb")
        for old, new in zip(before, store.get(store.ids()), strict=True):
            assert (old.id, old.text, old.source, old.version) == (new.id, new.text, new.source, new.version)
            assert (old.created, old.updated, old.encoder) == (new.created, new.updated, new.encoder)
            assert old.embedding.tolist() == new.embedding.tolist()
        assert store.search(EYE[2], 1, threshold_column=0).scores.tolist() == [2.0]
        assert store.insert(embeddings=EYE[:1]).tolist() == [4]
        assert store.snapshots() == ["kept"]
    assert sorted(path.name for path in directory.parent.iterdir()) == ["store"]


def test_ids_are_not_given_out_again_after_reopening(directory):
    with Store.open(directory, dim=4) as store:
        store.insert(embeddings=EYE)
        store.snapshot("four")
        store.insert(embeddings=EYE)
        store.delete([6, 7])
    with Store.open(directory) as store:
        assert store.insert(embeddings=EYE[:1]).tolist() == [8]
        store.restore("four")
    with Store.open(directory) as store:
        assert len(store) == 4
        assert store.insert(embeddings=EYE[:1]).tolist() == [9]


def test_widths_are_compared(directory):
    with pytest.raises(NotAStore, match=r"there is no store at .* give dim"):
        Store.open(directory)
    assert not directory.exists()
    Store.open(directory, dim=4, num_thresholds=2).close()
    with pytest.raises(ValueError, match="has dim=4, got dim=5"):
        Store.open(directory, dim=5)
    with pytest.raises(ValueError, match="has num_thresholds=2, got num_thresholds=0"):
        Store.open(directory, num_thresholds=0)
    Store.open(directory, dim=4, num_thresholds=2).close()


def test_what_is_not_a_store_is_left_alone(directory):
    directory.mkdir()
    (directory / "thesis.tex").write_text("years of work")
    with pytest.raises(NotAStore, match=r"no store\.json"):
        Store.open(directory, dim=4)
    assert [path.name for path in directory.iterdir()] == ["thesis.tex"]
    with pytest.raises(NotAStore, match=r"no store\.json"):
        Store.open(directory / "thesis.tex", dim=4)
    with pytest.raises(NotAStore, match=r"no store\.json"):
        Store.open(directory, read_only=True)


def test_an_empty_directory_becomes_a_store(directory):
    directory.mkdir()
    with Store.open(directory, dim=4) as store:
        store.insert(embeddings=EYE)
    with Store.open(directory, dim=4) as store:
        assert len(store) == 4


@pytest.mark.parametrize("text", ["", "{}", "[1]", '{"attnflow_store": 1, "dim": 4', "\0\0\0"])
def test_damaged_metadata_is_named(directory, text):
    Store.open(directory, dim=4).close()
    (directory / "store.json").write_text(text)
    with pytest.raises(NotAStore, match=r"store\.json does not describe a store of attnflow, or is damaged"):
        Store.open(directory)


def test_a_store_of_a_later_version_is_refused(directory):
    Store.open(directory, dim=4).close()
    values = json.loads((directory / "store.json").read_text())
    (directory / "store.json").write_text(json.dumps(values | {"attnflow_store": 2, "curvature": -1}))
    for read_only in (False, True):
        with pytest.raises(NewerFormat, match=r"format 2.*reads up to 1: upgrade"):
            Store.open(directory, read_only=read_only)


def test_there_is_one_writer(directory):
    first = Store.open(directory, dim=4)
    first.insert(embeddings=EYE)
    with pytest.raises(StoreLocked, match=rf"process {os.getpid()}.*read_only=True"):
        Store.open(directory)
    with Store.open(directory, read_only=True) as reader:
        assert len(reader) == 4
    run(
        """
        import sys
        from attnflow.knowledge.store import Store, StoreLocked
        try:
            Store.open(sys.argv[1])
        except StoreLocked as error:
            assert sys.argv[2] in str(error)
        else:
            raise SystemExit("two writers")
        assert len(Store.open(sys.argv[1], read_only=True)) == 4
        """,
        directory,
        os.getpid(),
    )
    first.close()
    Store.open(directory).close()


def test_a_reader_sees_the_writes_of_others_when_it_asks(directory):
    with Store.open(directory, dim=4) as writer, Store.open(directory, read_only=True) as reader:
        writer.insert(embeddings=EYE[:2], texts=["a", "b"])
        assert len(reader) == 0
        reader.refresh()
        assert [entry.text for entry in reader.get([0, 1])] == ["a", "b"]
        writer.upsert(ids=[0], embeddings=EYE[3:], texts=["A"])
        writer.delete([1])
        writer.insert(embeddings=EYE[2:3])
        assert reader.search(EYE[1], 1).ids.tolist() == [1]
        assert reader.get([0])[0].text == "a"
        reader.refresh()
        assert reader.ids().tolist() == [0, 2]
        assert reader.search(EYE[3], 1).ids.tolist() == [0]
        assert reader.get([0])[0].text == "A"
        for call in (
            lambda: reader.insert(embeddings=EYE),
            lambda: reader.delete([0]),
            lambda: reader.upsert(ids=[0], embeddings=EYE[:1]),
            lambda: reader.snapshot(),
            lambda: reader.restore("x"),
        ):
            with pytest.raises(ReadOnly, match="read_only=True"):
                call()


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

        monkeypatch.setattr(store._engine, "_table", Failing(store._engine._table))
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

        for method, call in (
            ("put", lambda: store.insert(embeddings=EYE[2:])),
            ("put", lambda: store.upsert(ids=[0], embeddings=5 * EYE[:1])),
            ("drop", lambda: store.delete([1])),
        ):
            monkeypatch.setattr(store._searcher, method, interrupted)
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
        versions = store._engine._table.list_versions()
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
        assert len(store._engine._table.list_versions()) < 10
        assert [entry.text for entry in store.get(store.ids())] == [str(i) for i in range(23)]


def test_compaction_that_fails_is_said_and_the_write_stays(directory, monkeypatch, caplog):
    monkeypatch.setattr(lance, "_COMPACT_AFTER", 1)

    def full(*_, **__):
        raise OSError("No space left on device")

    with Store.open(directory, dim=4) as store:
        monkeypatch.setattr(type(store._engine._table), "optimize", full)
        store.insert(embeddings=EYE)
        assert "was not compacted: No space left on device" in caplog.text
        assert len(store) == 4


def test_a_store_does_not_cross_a_fork(directory):
    output = run(
        """
        import os, sys, warnings
        import torch
        from attnflow.knowledge.store import Store, StoreError
        store = Store.open(sys.argv[1], dim=4)
        store.insert(embeddings=torch.eye(4))
        warnings.simplefilter("ignore")  # lancedb warns of forks
        child = os.fork()
        if not child:
            try:
                store.insert(embeddings=torch.eye(4))
            except StoreError as error:
                os._exit(7 if "before a fork" in str(error) else 1)
            os._exit(2)
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 7
        waiting = os.fork()
        if not waiting:
            import time
            time.sleep(30)
            os._exit(0)
        store.insert(embeddings=torch.eye(4))
        store.close()
        with Store.open(sys.argv[1]) as again:  # the sleeping child holds no lock
            print(len(again))
        os.kill(waiting, 9)
        os.waitpid(waiting, 0)
        """,
        directory,
    )
    assert output == "8\n"


def test_nothing_is_imported_before_use(directory):
    run(
        """
        import sys
        import attnflow.knowledge.store
        loaded = {"lancedb", "pyarrow", "faiss", "pymilvus", "milvus_lite", "pandas", "transformers"} & set(sys.modules)
        assert not loaded, loaded
        sys.modules["lancedb"] = None
        try:
            attnflow.knowledge.store.Store.open(sys.argv[1], dim=2)
        except ImportError as error:
            assert "pip install 'attnflow[knowledge]'" in str(error), error
        else:
            raise SystemExit("no error")
        """,
        directory,
    )
    assert not directory.exists()
