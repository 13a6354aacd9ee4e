"""Bytes that change on the disk: no wrong value is handed out, the rows are named, the others can be rescued."""

from __future__ import annotations

import json
import random

import lancedb
import pyarrow
import pytest
import torch

from attnflow.knowledge.store import Damaged, NotAStore, Store, StoreError, log, metadata

ROWS = torch.randn(300, 16, generator=torch.Generator().manual_seed(1))


@pytest.fixture
def filled(directory):
    """The directory of a store of 299 entries, one of them in its second version, and a snapshot."""
    with Store.open(directory, dim=16, num_thresholds=1) as store:
        store.insert(embeddings=ROWS, texts=[f"fact number {i}" for i in range(300)], thresholds=torch.ones(300, 1))
        store.upsert(ids=[3], embeddings=ROWS[4:5], texts=["corrected"])
        store.delete([7])
        store.snapshot("kept")
    return directory


def data_file(directory):
    """The largest, which has the rows of the insert."""
    return max(directory.glob("entries.lance/data/*"), key=lambda path: path.stat().st_size)


def flip(path, place, bit=6):
    data = bytearray(path.read_bytes())
    data[place] ^= 1 << bit
    path.write_bytes(data)


def flip_vector(directory, row):
    path = data_file(directory)
    place = path.read_bytes().find(ROWS[row].numpy().tobytes())
    assert place >= 0
    flip(path, place + 10)


def test_vectors_are_checked_when_a_store_is_opened(filled):
    flip_vector(filled, 100)
    flip_vector(filled, 200)
    for read_only in (False, True):
        with pytest.raises(
            Damaged, match=r"2 entries have other bytes than were written: \[100, 200\]; Store\.rescue"
        ) as raised:
            Store.open(filled, read_only=read_only)
        assert sorted(raised.value.ids) == [100, 200]


def test_texts_are_checked_when_they_are_read(filled):
    path = data_file(filled)
    flip(path, path.read_bytes().find(b"fact number 42") + 3, bit=0)
    with Store.open(filled) as store:
        assert store.get([41])[0].text == "fact number 41"
        with pytest.raises(Damaged, match=r"1 entry has other bytes than were written: \[42\]"):
            store.get([41, 42])
        check = store.verify()
        assert not check.ok
        assert (check.count, check.damaged, check.faults) == (298, (42,), ())
        assert "damaged: [42]" in str(check)


def test_a_whole_store_verifies(filled):
    with Store.open(filled) as kept:
        check = kept.verify()
        assert check.ok
        assert (check.count, check.damaged, check.faults, check.leftovers) == (299, (), (), ())


def test_snapshots_are_verified_and_not_restored_damaged(filled):
    path = max(filled.glob("snapshot-kept.lance/data/*"), key=lambda path: path.stat().st_size)
    flip(path, path.read_bytes().find(ROWS[20].numpy().tobytes()))
    with Store.open(filled) as store:
        assert store.verify().faults == ("snapshot 'kept' is damaged: 1 entry of it",)
        store.upsert(ids=[20], embeddings=ROWS[:1])
        with pytest.raises(Damaged, match=r"\[20\]"):
            store.restore("kept")
        assert store.get([20])[0].version == 2


def test_what_is_whole_is_rescued(filled, tmp_path):
    flip_vector(filled, 100)
    with Store.open(tmp_path / "other", dim=16) as other, pytest.raises(StoreError, match="is there already"):
        other.rescue(filled, tmp_path / "other")
    check = Store.rescue(filled, tmp_path / "new")
    assert (check.count, check.damaged, check.faults) == (298, (100,), ())
    with Store.open(tmp_path / "new", dim=16, num_thresholds=1) as store:
        assert store.ids().tolist() == [i for i in range(300) if i not in (7, 100)]
        assert (store.get([3])[0].text, store.get([3])[0].version) == ("corrected", 2)
        assert bool((store.thresholds() == 1).all())
        assert torch.equal(store.vectors([50]), ROWS[50:51])
        assert store.insert(embeddings=ROWS[:1]).tolist() == [300]
        assert store.verify().ok


def test_parts_that_cannot_be_read_are_named_and_the_others_rescued(filled, tmp_path):
    path = data_file(filled)
    data = bytearray(path.read_bytes())
    place = data.find(b"fact number 42")
    data[place - 600 : place] = random.Random(1).randbytes(600)
    path.write_bytes(data)
    check = Store.rescue(filled, tmp_path / "new")
    assert not check.ok
    with Store.open(tmp_path / "new") as store:
        assert store.verify().ok
        for entry in store.get(store.ids()):
            assert entry.text in (f"fact number {entry.id}", "corrected")


def test_damaged_metadata_do_not_keep_rows_from_being_rescued(filled, tmp_path):
    (filled / "store.json").write_bytes(b"\xff\xfe{")
    with pytest.raises(NotAStore, match="is damaged"):
        Store.open(filled)
    check = Store.rescue(filled, tmp_path / "new")
    assert check.count == 299
    assert "store.json does not describe a store" in check.faults[0]


def test_any_changed_number_of_the_metadata_is_seen(filled):
    values = json.loads((filled / "store.json").read_text())
    (filled / "store.json").write_text(json.dumps(values | {"next_id": 3}))
    with pytest.raises(NotAStore, match="is damaged"):
        Store.open(filled)


def test_a_list_of_rows_that_cannot_be_read_is_passed_over_by_a_rescue(filled, tmp_path):
    for newest in filled.glob("entries.lance/_versions/*.manifest"):
        if newest.stem != min(path.stem for path in newest.parent.glob("*.manifest")):
            newest.unlink()  # older ones have been dropped
    with Store.open(filled) as store:
        store.insert(embeddings=ROWS.repeat(60, 1))
        store._backend._release()
    newest = min(filled.glob("entries.lance/_versions/*.manifest"))
    (filled / log.FILE).unlink()
    newest.write_bytes(b"\0" * 200)
    with pytest.raises(Damaged, match=r"is damaged: store\.json says dim=16, not so the entries; Store\.rescue"):
        Store.open(filled)
    check = Store.rescue(filled, tmp_path / "new")
    assert "an earlier one was taken" in check.faults[0]
    assert check.count == 299


def foreign_delete(directory):
    lancedb.connect(directory).open_table("entries").delete("id = 50")


def foreign_insert(directory):
    table = lancedb.connect(directory).open_table("entries")
    table.add(table.search().where("id = 50").to_arrow())


@pytest.mark.parametrize(("commit", "count"), [(foreign_delete, 298), (foreign_insert, 300)])
def test_rows_that_vanish_or_come_are_noticed(filled, tmp_path, commit, count, caplog):
    """Row by row such a table is whole. A commit that no write has announced is dropped, as of one cut short."""
    commit(filled)
    with pytest.raises(Damaged, match=rf"299 entries were written and {count} are there"):
        Store.open(filled, read_only=True)
    check = Store.rescue(filled, tmp_path / "new")
    assert check.count == min(count, 299)
    assert check.faults == (("299 entries were written, and 298, or others, are there",) if count < 299 else ())
    with Store.open(filled) as store:
        assert len(store) == 299
        assert store.verify().ok
    assert "a commit that a crash of the machine had cut short was dropped" in caplog.text


def test_a_damaged_list_of_files_is_not_taken_for_a_commit_that_was_cut_short(directory):
    """A large write that had returned does not go because the list of its files cannot be read."""
    store = Store.open(directory, dim=16)
    store.insert(embeddings=ROWS)
    store.insert(embeddings=ROWS.repeat(60, 1))
    store._backend._release()
    min(directory.glob("entries.lance/_versions/*.manifest")).write_bytes(b"\0" * 200)
    for _ in range(2):
        with pytest.raises(Damaged):
            Store.open(directory)


@pytest.fixture
def logged(directory):
    """The directory of a store whose last writes are in the log: its process was killed."""
    store = Store.open(directory, dim=16)
    store.insert(embeddings=ROWS[:20], texts=[str(i) for i in range(20)])
    store.upsert(ids=[3], embeddings=ROWS[50:51], texts=["corrected"])
    store.delete([7])
    store._backend._release()
    return directory


def test_the_log_is_read_again(logged):
    with Store.open(logged, read_only=True) as reader:
        assert reader.get([3])[0].text == "corrected"
        assert 7 not in reader
        assert reader.stats().versions == {1: 18, 2: 1}
        assert reader.verify().ok
        with Store.open(logged) as writer:
            assert writer.insert(embeddings=ROWS[:1]).tolist() == [20]
        reader.refresh()
        assert len(reader) == 20


def test_changed_bytes_of_the_log_are_noticed(logged, tmp_path):
    path = logged / log.FILE
    whole = path.read_bytes()
    for place in range(0, len(whole), 37):
        flip(path, place)
        with pytest.raises(Damaged, match=r"writes\.log has other bytes than were written"):
            Store.open(logged, read_only=True)
        path.write_bytes(whole)
    flip(path, whole.rindex(b"corrected"), 0)
    check = Store.rescue(logged, tmp_path / "new")
    assert check.count == 19
    assert "some of the latest writes are lost" in check.faults[0]
    with Store.open(tmp_path / "new") as store:
        assert (store.get([3])[0].text, 7 in store) == ("3", False)


def test_a_write_that_was_cut_short_is_not_there(logged):
    path = logged / log.FILE
    whole = path.read_bytes()
    for rest in (whole[80:110], whole[80:300], b"\0" * 5000):
        path.write_bytes(whole + rest)
        with Store.open(logged, read_only=True) as store:
            assert len(store) == 19
    with Store.open(logged) as store:
        assert store.insert(embeddings=ROWS[:1]).tolist() == [20]
    with Store.open(logged) as store:
        assert len(store) == 20


def test_a_log_that_is_missing_is_noticed(logged):
    (logged / log.FILE).unlink()
    with pytest.raises(Damaged, match=r"writes\.log is missing"):
        Store.open(logged)


def test_a_store_of_format_1_gets_checksums_when_it_is_written(directory):
    """As versions before checksums have made it."""
    fields = [("id", "int64"), ("text", "string"), ("source", "string"), ("encoder", "string"), ("version", "int64")]
    time = pyarrow.timestamp("us", tz="UTC")
    schema = pyarrow.schema(
        [(name, getattr(pyarrow, kind)()) for name, kind in fields]
        + [("created", time), ("updated", time), ("embedding", pyarrow.list_(pyarrow.float32(), 4))]
    )
    row = {"id": 5, "text": "old", "version": 2, "created": 10, "updated": 11, "embedding": [1.0, 2.0, 3.0, 4.0]}
    lancedb.connect(directory).create_table("entries", pyarrow.Table.from_pylist([row], schema=schema))
    (directory / "store.json").write_text(
        '{"attnflow_store": 1, "dim": 4, "num_thresholds": 0, "next_id": 9, "snapshots": []}'
    )
    with Store.open(directory, read_only=True) as store:
        assert store.get([5])[0].text == "old"
        with pytest.raises(StoreError, match="without checksums: open it to write"):
            store.verify()
    assert metadata.load(directory).format == 1
    with Store.open(directory) as store:
        assert store.verify().ok
        assert (store.get([5])[0].text, store.get([5])[0].version) == ("old", 2)
        assert store.insert(embeddings=[[0.0, 0.0, 0.0, 1.0]]).tolist() == [9]
    assert metadata.load(directory).format == metadata.FORMAT
