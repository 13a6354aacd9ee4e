"""A store in a directory: opened again, by one writer and many readers, after a kill, with its files written anew."""

from __future__ import annotations

import os
import random
import signal
import subprocess
import sys
import textwrap
import threading
import time
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch

from attnflow.knowledge import Store
from attnflow.knowledge.store import StoreError
from attnflow.knowledge.store.table import EntryTable
from tests.knowledge.store.test_store import contents

EYE = torch.eye(4)


def files(directory):
    return sorted(path.relative_to(directory) for path in directory.rglob("*") if path.is_file())


def test_everything_is_there_when_it_is_opened_again(directory):
    with Store.open(directory, dim=4, num_thresholds=1) as store:
        store.insert(embeddings=EYE, texts=list("abcd"), thresholds=torch.ones(4, 1), encoder="e")
        store.snapshot("first")
        store.upsert(ids=[1], embeddings=EYE[:1], texts=["changed"])
        store.delete([3])
        expected = contents(store)
    with Store.open(str(directory)) as store:
        assert (store.dim, store.num_thresholds, store.backend, store.uri) == (4, 1, "lancedb", str(directory))
        assert contents(store) == expected
        assert store.snapshots() == ["first"]
        assert store.insert(embeddings=EYE[:1]).tolist() == [4]
        store.restore("first")
        assert [entry.text for entry in store.get(store.ids())] == list("abcd")


@pytest.mark.parametrize("begun", ["data", "_versions", "_transactions", ""])
def test_a_table_whose_creation_was_killed_is_absent(directory, begun):
    with Store.open(directory, dim=4) as store:
        store.insert(embeddings=EYE)
    (directory / "retired.lance" / begun).mkdir(parents=True)
    with Store.open(directory, read_only=True) as reader:
        assert reader.ids().tolist() == [0, 1, 2, 3]
    with Store.open(directory) as store:
        store.delete([3])
        assert store.insert(embeddings=EYE[:1]).tolist() == [4]
    with Store.open(directory, read_only=True) as reader:
        assert reader.ids().tolist() == [0, 1, 2, 4]


@pytest.mark.parametrize("begun", ["data", "_versions"])
def test_a_store_whose_creation_was_killed_is_made_again(directory, begun):
    (directory / "entries.lance" / begun).mkdir(parents=True)
    for options in ({}, {"read_only": True}):
        with pytest.raises(StoreError, match="there is no store at"):
            Store.open(directory, **options)
    with Store.open(directory, dim=4) as store:
        assert store.insert(embeddings=EYE).tolist() == [0, 1, 2, 3]


@pytest.mark.parametrize("attempt", range(20))  # a version less than a millisecond old once survived, one time in 80
def test_a_reader_whose_version_was_compacted_away_is_told_to_refresh(attempt, directory):
    with Store.open(directory, dim=4) as store:
        store.insert(embeddings=EYE)
        with Store.open(directory, read_only=True) as reader:
            store.delete([0])
            store.compact()
            for read in (lambda: reader.get([1]), reader.stats):
                with pytest.raises(StoreError, match=r"are gone, as after `compact`: call refresh\(\)"):
                    read()
            reader.refresh()
            assert reader.get([1])[0].id == 1


def test_a_version_that_goes_while_it_is_read_is_read_anew(directory, monkeypatch):
    load, gone = EntryTable._load, []

    def interrupted(table):
        if table is not writer._table and len(gone) < 2:
            gone.append(table)
            writer.upsert(ids=[0], embeddings=len(gone) * EYE[:1])
            writer.compact()
        return load(table)

    with Store.open(directory, dim=4) as writer:
        writer.insert(embeddings=EYE)
        monkeypatch.setattr(EntryTable, "_load", interrupted)
        with Store.open(directory, read_only=True) as reader:
            assert len(gone) == 2
            assert contents(reader) == contents(writer)
            gone.clear()
            writer.delete([3])
            reader.refresh()
            assert len(gone) == 2
            assert contents(reader) == contents(writer)
            monkeypatch.setattr("attnflow.knowledge.store.table._TRIES", 2)
            gone.clear()
            writer.delete([2])
            with pytest.raises(StoreError, match="are gone"):
                reader.refresh()
            assert reader.ids().tolist() == [0, 1]


def test_a_compaction_may_keep_the_versions_of_readers(directory):
    with Store.open(directory, dim=4) as store:
        store.insert(embeddings=EYE)
        with Store.open(directory, read_only=True) as reader:
            before = contents(reader)
            store.delete([0])
            store.compact(keep_minutes=10.0)
            assert contents(reader) == before
            store.compact()
            with pytest.raises(StoreError, match=r"call refresh\(\)"):
                contents(reader)
        for bad in (-1.0, float("inf")):
            with pytest.raises(ValueError, match="keep_minutes"):
                store.compact(keep_minutes=bad)


PLACES = ["", "postgres://somewhere/store", "http://somewhere:19530"]
PLACES += ["gs://bucket/facts", "az://container/facts", "hf://datasets/a/b", "file:///tmp/facts"]


@pytest.mark.parametrize("uri", PLACES)
def test_places_that_are_not_supported_are_refused_without_a_connection(uri, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("lancedb.connect", None)  # its sockets are not Python's
    for options in ({"dim": 4}, {"read_only": True}):
        with pytest.raises(ValueError, match="uri must be a directory"):
            Store.open(uri, **options)
    assert not list(tmp_path.iterdir())


def test_one_writes_and_any_number_read(directory):
    with Store.open(directory, dim=4) as store:
        store.insert(embeddings=EYE)
        with pytest.raises(StoreError, match="one may write at a time"):
            Store.open(directory)
        with Store.open(directory, read_only=True) as one, Store.open(directory, read_only=True) as two:
            assert len(one) == len(two) == 4
            with pytest.raises(StoreError, match="read_only=True"):
                one.insert(embeddings=EYE)
            store.delete([0])
            store.insert(embeddings=2 * EYE[:1])
            store.snapshot("taken")
            assert one.ids().tolist() == [0, 1, 2, 3]
            before = one.revision
            one.refresh()
            assert one.revision > before
            assert contents(one) == contents(store)
            assert one.search(EYE[0], 1).ids.tolist() == [4]
            assert one.snapshots() == ["taken"]
            assert two.ids().tolist() == [0, 1, 2, 3]
            store.compact()
            one.refresh()
            assert contents(one) == contents(store)
    with Store.open(directory) as again:
        assert len(again) == 4


@pytest.mark.slow
def test_what_a_killed_process_had_acknowledged_is_there(directory):
    code = """
        import sys, torch
        from attnflow.knowledge import Store
        store = Store.open(sys.argv[1], dim=4)
        number = len(store)
        while True:
            store.insert(embeddings=torch.full((3, 4), float(number)), texts=[str(number)] * 3)
            number += 3
            print(number, flush=True)
        """
    draw, acknowledged = random.Random(0), 0
    for _ in range(2):
        command = [sys.executable, "-c", textwrap.dedent(code), str(directory)]
        with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as writer:
            acknowledged = int(writer.stdout.readline())
            time.sleep(draw.uniform(0.0, 0.4))
            os.kill(writer.pid, signal.SIGKILL)
            acknowledged = int((writer.stdout.read().splitlines() or [acknowledged])[-1])
        with Store.open(directory, read_only=True) as store:
            assert len(store) in (acknowledged, acknowledged + 3)  # the write under way: all of it, or nothing
            assert store.ids().tolist() == list(range(len(store)))
            texts = [int(entry.text) for entry in store.get(store.ids())]
            assert texts == [3 * (number // 3) for number in range(len(store))]
            assert store.vectors()[:, 0].tolist() == texts


def test_files_are_written_together_and_snapshots_stay(directory):
    with Store.open(directory, dim=4) as store:
        store.insert(embeddings=EYE, texts=list("abcd"))
        store.snapshot("first")
        first = contents(store)
        for number in range(130):  # with a compaction of its own
            store.upsert(ids=[number % 7], embeddings=number * EYE[:1])
        last = contents(store)
        store.compact()
        assert contents(store) == last
        store.restore("first")
        assert contents(store) == first
        many = len(files(directory / "entries.lance"))
        store.drop_snapshot("first")
        store.compact()
        assert contents(store) == first
        assert len(files(directory / "entries.lance")) < many / 5
    with Store.open(directory) as store:
        assert contents(store) == first


def test_threads_see_whole_batches(directory):
    ids, stop = list(range(50)), threading.Event()

    def write(generation):
        rows, texts = torch.full((50, 4), float(generation)), [str(generation)] * 50
        if generation % 3:
            store.upsert(ids=ids, embeddings=rows, texts=texts)
        else:
            store.delete(ids)
            store.insert(ids=ids, embeddings=rows, texts=texts)

    def look():
        looked = 0
        while not stop.is_set() or not looked:
            found = store.search(torch.ones(4), 60)
            assert found.certificate.total in (0, 50)
            assert len(set(found.scores[found.ids >= 0].tolist())) <= 1
            try:
                entries = store.get(ids)
            except KeyError:  # between a delete and an insert
                pass
            else:
                assert len({(entry.text, float(entry.embedding[0]), entry.version) for entry in entries}) == 1
            looked += 1
        return looked

    with Store.open(directory, dim=4) as store, ThreadPoolExecutor(3) as threads:
        write(1)
        readers = [threads.submit(look) for _ in range(3)]
        try:
            for generation in range(2, 20):
                write(generation)
        finally:
            stop.set()
        assert all(reader.result() for reader in readers)


def test_a_commit_of_somebody_else_is_not_overlooked(directory):
    """The lock keeps a second writer of a directory out; on object storage nothing does."""
    import lancedb

    with Store.open(directory, dim=4) as store:
        store.insert(embeddings=EYE)
        other = lancedb.connect(str(directory)).open_table("entries")
        other.delete("id = 0")
        store.insert(embeddings=EYE[:1])
        assert store.ids().tolist() == [1, 2, 3, 4]
        other.checkout_latest()
        other.delete("id = 1")
        store.search(EYE[0], 1, mode="approximate")  # makes the index, after the other's commit
        assert store.ids().tolist() == [2, 3, 4]


def test_what_is_no_store_is_refused_and_left_alone(tmp_path):
    import lancedb
    import pyarrow

    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "notes").write_text("of somebody")
    lancedb.connect(tmp_path / "lance").create_table("entries", pyarrow.table({"id": [1]}))
    for name, options, message in [
        ("nothing", {}, "there is no store at .*give dim"),
        ("nothing", {"dim": 4, "read_only": True}, "there is nothing to read"),
        ("full", {"dim": 4}, "it holds other files"),
        ("lance", {}, "another database of LanceDB"),
        ("full/notes", {"dim": 4}, "cannot be written"),
    ]:
        with pytest.raises(StoreError, match=message):
            Store.open(tmp_path / name, **options)
    assert [path.name for path in (tmp_path / "full").iterdir()] == ["notes"]
    assert not (tmp_path / "nothing").exists()


def test_widths_are_compared(directory):
    with Store.open(directory, dim=4, num_thresholds=2):
        pass
    for options in ({"dim": 5}, {"num_thresholds": 0}):
        with pytest.raises(ValueError, match=r"has (dim=4|num_thresholds=2), got"):
            Store.open(directory, **options)
    for options, message in [
        ({"dim": 0}, "dim must be at least 1"),
        ({"num_thresholds": -1}, "num_thresholds must be at least 0"),
    ]:
        with pytest.raises(ValueError, match=message):
            Store.open(directory, **options)
    with pytest.raises(ValueError, match="is named like a file: give the name of a folder"):
        Store.open(directory.parent / "notes.txt", dim=4)
    with Store.open(directory) as store:
        assert len(store) == 0


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")
@pytest.mark.filterwarnings("ignore:.*fork.*")
def test_a_forked_child_is_refused_and_does_not_end_the_lock(directory):
    store = Store.open(directory, dim=4)
    child = os.fork()
    if not child:
        try:
            len(store)
        except StoreError as error:
            store.close()
            os._exit(0 if "before a fork" in str(error) else 2)
        os._exit(1)
    assert os.waitpid(child, 0)[1] == 0
    with pytest.raises(StoreError, match="one may write at a time"):
        Store.open(directory)
    store.close()
    Store.open(directory).close()
