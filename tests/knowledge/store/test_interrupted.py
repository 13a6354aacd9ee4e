"""Calls that are cut short, and calls that cross each other: the index and the rows stay equal, no id is used twice."""

from __future__ import annotations

import gc
import os
import threading

import lancedb
import pytest
import torch

from attnflow.knowledge.store import NotAStore, ReadOnly, Store, StoreError, StoreLocked, lance, metadata, milvus
from attnflow.knowledge.store import store as store_module
from attnflow.knowledge.store.table import ENTRIES

EYE = torch.eye(4)


def whole(store):
    """Rows, index and ids tell the same."""
    ids = store.ids()
    assert len(store) == len(ids) == len(store.get(ids)) == len(store._backend.stamps()[0])
    for entry in store.get(ids):
        found = store.search(entry.embedding, len(ids), mode="exact")
        assert sorted(found.ids.tolist()) == ids.tolist()
        place = found.ids.tolist().index(entry.id)
        assert float(found.scores[place]) == pytest.approx(float(entry.embedding @ entry.embedding))


@pytest.mark.parametrize("method", ["add", "replace", "remove"])
def test_an_index_that_was_cut_short_is_built_anew(method, monkeypatch):
    with Store.open("memory", dim=4) as store:
        store.insert(embeddings=EYE)
        real = getattr(store._backend._index, method)

        def interrupted(*arguments):
            real(*arguments)
            raise KeyboardInterrupt

        monkeypatch.setattr(store._backend._index, method, interrupted)
        calls = {
            "add": lambda: store.insert(embeddings=2 * EYE),
            "replace": lambda: store.upsert(ids=[1], embeddings=3 * EYE[:1]),
            "remove": lambda: store.delete([1]),
        }
        with pytest.raises(KeyboardInterrupt):
            calls[method]()
        monkeypatch.undo()
        whole(store)
        store.insert(embeddings=5 * EYE)
        whole(store)


def test_a_commit_after_an_interrupt_is_found(directory, monkeypatch):
    """What LanceDB is doing when the interrupt comes may be committed all the same, unseen by the table at hand."""
    monkeypatch.setattr(lance, "_DIRECT", 0)
    with Store.open(directory, dim=4) as store:
        store.insert(embeddings=EYE)
        table = store._backend._table.raw

        class Interrupted:
            def __getattr__(self, name):
                return getattr(table, name)

            def add(self, rows):
                lancedb.connect(directory).open_table(ENTRIES).add(rows)
                raise KeyboardInterrupt

        with monkeypatch.context() as patched:
            patched.setattr(store._backend._table, "raw", Interrupted())
            with pytest.raises(KeyboardInterrupt):
                store.insert(embeddings=2 * EYE)
        assert store.insert(embeddings=3 * EYE).tolist() == [8, 9, 10, 11]
        whole(store)


def test_an_id_is_not_forgotten_where_the_disk_was_full_for_a_moment(directory, monkeypatch):
    def full(*_):
        raise OSError("No space left on device")

    with Store.open(directory, dim=4) as store:
        store.insert(embeddings=EYE)
        monkeypatch.setattr(store._backend._log, "append", full)
        with pytest.raises(StoreError, match="No space left"):
            store.delete([3])
        monkeypatch.undo()
        store.delete([3])
    with Store.open(directory) as store:
        assert store.insert(embeddings=EYE[:1]).tolist() == [4]


def test_what_was_written_while_the_lock_was_waited_for_is_seen(directory, monkeypatch):
    first = Store.open(directory, dim=4)
    first.insert(embeddings=EYE)
    real = lance.FileLock

    def later(path):
        first.delete([3])
        first.close()
        return real(path)

    monkeypatch.setattr(lance, "FileLock", later)
    with Store.open(directory) as store:
        assert store.insert(embeddings=EYE[:1]).tolist() == [4]


def test_two_may_make_the_same_store(directory, monkeypatch):
    """The slower one opens what the faster one has made, and what it was making is gone."""
    real = metadata.save

    def slow(where, made):
        real(where, made)
        monkeypatch.undo()
        Store.open(directory, dim=4).close()

    monkeypatch.setattr(metadata, "save", slow)
    with Store.open(directory, dim=4) as store:
        assert store.insert(embeddings=EYE).tolist() == [0, 1, 2, 3]
    assert [path.name for path in directory.parent.iterdir()] == [directory.name]


def test_a_store_that_was_dropped_without_closing_is_not_locked(directory):
    store = Store.open(directory, dim=4)
    with pytest.raises(StoreLocked, match=r"this one"):
        Store.open(directory)
    del store
    gc.collect()
    Store.open(directory).close()


def test_building_the_index_anew_loses_no_insert(monkeypatch):
    with Store.open("memory", dim=4) as store:
        store.insert(embeddings=EYE)
        real = store._backend.load
        writers = []

        def load(*arguments):
            rows = real(*arguments)
            writers.append(threading.Thread(target=store.insert, kwargs={"embeddings": 2 * EYE}))
            writers[-1].start()
            writers[-1].join(0.2)
            return rows

        monkeypatch.setattr(store._backend, "load", load)
        store.reindex()
        monkeypatch.undo()
        writers[0].join()
        assert len(store) == 8
        whole(store)


def test_all_vectors_are_of_one_moment():
    with Store.open("memory", dim=4) as store:
        store.insert(embeddings=torch.ones(600, 4))
        stop = threading.Event()

        def deleting():
            for start in range(598):
                store.delete([start])
            stop.set()

        writer = threading.Thread(target=deleting)
        writer.start()
        while not stop.is_set():
            rows = store.vectors()
            assert rows.shape[1] == 4
            assert bool((rows == 1).all())
        writer.join()
        assert len(store.vectors()) == 2


@pytest.mark.parametrize("text", ['{"attnflow_store": 1}', '{"attnflow_store": "1", "dim": 4, "num_thresholds": 0}'])
def test_metadata_without_sense_are_named(directory, text):
    Store.open(directory, dim=4).close()
    (directory / metadata.FILE).write_text(text)
    with pytest.raises(NotAStore, match="is damaged"):
        Store.open(directory)


def test_a_reader_does_not_change_the_index_of_a_milvus_store(tmp_path):
    place = f"milvus:{tmp_path}/store.db"
    with Store.open(place, dim=4) as store:
        store.insert(embeddings=EYE)
        engine = store._backend
        engine.client.release_collection(engine.live)  # as where a process is killed while it builds the index anew
        for name in engine.client.list_indexes(engine.live):
            engine.client.drop_index(engine.live, index_name=name)
    with Store.open(place) as store:
        assert store.search(EYE, 1).ids[:, 0].tolist() == [0, 1, 2, 3]
    with Store.open(place, read_only=True) as store:
        with pytest.raises(ReadOnly):
            store.reindex()
        assert store.search(EYE, 1).ids[:, 0].tolist() == [0, 1, 2, 3]


def test_of_two_writers_of_a_server_the_later_one_may_write(tmp_path, monkeypatch):
    """A server has no file to lock; without the lock, a file stands for it."""
    monkeypatch.setattr(milvus.Connection, "_serve", lambda _, file, __: str(file))
    place = f"milvus:{tmp_path}/store.db"
    with Store.open(place, dim=4) as first:
        first.insert(embeddings=EYE, texts=list("abcd"))
        first.snapshot("early")
        with Store.open(place) as second:
            calls = [
                lambda: first.insert(embeddings=EYE),
                lambda: first.upsert(ids=[0], embeddings=EYE[:1]),
                lambda: first.delete([0]),
                lambda: first.snapshot(),
                lambda: first.restore("early"),
                lambda: first.drop_snapshot("early"),
                lambda: first.reindex(),
            ]
            for call in calls:
                with pytest.raises(StoreLocked, match="another one has opened"):
                    call()
            assert second.insert(embeddings=2 * EYE, texts=list("wxyz")).tolist() == [4, 5, 6, 7]
        assert [entry.text for entry in first.get(first.ids())] == list("abcdwxyz")
    with Store.open(place) as third:
        assert third.snapshots() == ["early"]
        assert third.insert(embeddings=EYE[:1]).tolist() == [8]


def test_a_killed_snapshot_is_listed_and_swept(directory, monkeypatch):
    store = Store.open(directory, dim=4)
    store.insert(embeddings=EYE)

    def killed(*_):
        raise SystemExit

    with monkeypatch.context() as patched:
        patched.setattr(metadata, "save", killed)
        patched.setattr(lance, "sweep", lambda *_: None)
        with pytest.raises(SystemExit):
            store.snapshot("half")
    assert store.snapshots() == []
    assert store.verify().leftovers == ("snapshot-half.lance",)
    (directory / ".store.json.abcdef.part").write_text("half")
    store._backend._release()
    with Store.open(directory) as store:
        assert store.verify().leftovers == ()
        assert store.snapshot("half") == "half"
        store.drop_snapshot("half")
    assert sorted(path.name for path in directory.iterdir()) == [
        "entries.lance",
        "store.json",
        "writer.lock",
        "writes.log",
    ]


def test_calls_that_fail_leave_nothing_behind(tmp_path, monkeypatch):
    def full(*_):
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patched:
        patched.setattr(metadata, "save", full)
        with pytest.raises(StoreError, match="make room on the disk"):
            Store.open(tmp_path / "a" / "b" / "store", dim=4)
    assert list(tmp_path.iterdir()) == []
    with Store.open(tmp_path / "store", dim=4) as store:
        store.insert(embeddings=EYE)
        names = sorted(path.name for path in (tmp_path / "store").iterdir())
        with monkeypatch.context() as patched:
            patched.setattr(metadata, "save", full)
            with pytest.raises(StoreError, match=r"the snapshot was not made: .*No space left"):
                store.snapshot("s")
        assert sorted(path.name for path in (tmp_path / "store").iterdir()) == names


def test_what_a_crash_left_beside_a_store_is_removed(tmp_path):
    left = tmp_path / f".store.{'0' * 32}.new"
    recent = tmp_path / f".store.{'1' * 32}.new"
    other = tmp_path / ".storekeeper.new"
    for folder in (left, recent, other):
        folder.mkdir()
        (folder / "store.json").write_text("{}")
    os.utime(left, (0, 0))
    Store.open(tmp_path / "store", dim=4).close()
    assert not left.exists()
    assert recent.exists()
    assert other.exists()


def test_a_lock_does_not_follow_a_link(directory, tmp_path):
    Store.open(directory, dim=4).close()
    precious = tmp_path / "precious"
    precious.write_text("years of work")
    (directory / "writer.lock").unlink()
    (directory / "writer.lock").symlink_to(precious)
    with pytest.raises(StoreError, match="is no plain file"):
        Store.open(directory)
    (directory / "writer.lock").unlink()
    os.mkfifo(directory / "writer.lock")
    with pytest.raises(StoreError, match="is no plain file"):
        Store.open(directory)
    assert precious.read_text() == "years of work"


def test_a_damaged_old_list_of_files_keeps_nobody_out(directory, monkeypatch):
    monkeypatch.setattr(lance, "_LOGGED", 0)
    with Store.open(directory, dim=4) as store:
        for i in range(4):
            store.upsert(ids=[i], embeddings=EYE[:1])
        store._backend._release()
    old = max((directory / "entries.lance" / "_versions").glob("*.manifest"))
    old.write_bytes(b"\xff" * 50)
    with Store.open(directory) as store:
        assert len(store) == 4
        store.compact()
    assert not old.exists()


def test_times_do_not_go_back_with_the_clock(place, monkeypatch):
    clock = iter(range(10**18, 0, -(10**12)))
    monkeypatch.setattr(store_module.time, "time_ns", lambda: next(clock))
    with Store.open(place, dim=4) as store:
        times = []
        for i in range(5):
            store.upsert(ids=[i % 2], embeddings=EYE[i % 4 : i % 4 + 1])
            times.append(store.get([i % 2])[0].updated)
        assert times == sorted(set(times))
    if place != "memory":
        with Store.open(place) as store:
            store.upsert(ids=[0], embeddings=EYE[:1])
            assert store.get([0])[0].updated > times[-1]
