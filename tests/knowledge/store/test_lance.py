"""A store in a directory: reopening, what may lie there, who may write."""

from __future__ import annotations

import json
import os

import pytest
import torch

from attnflow.knowledge.store import Damaged, NewerFormat, NotAStore, ReadOnly, Store, StoreLocked, metadata
from tests.knowledge.store.processes import run

EYE = torch.eye(4)


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
    (directory / "store.json").write_text(json.dumps(values | {"attnflow_store": 3, "curvature": -1}))
    for read_only in (False, True):
        with pytest.raises(NewerFormat, match=r"format 3.*reads up to 2: upgrade"):
            Store.open(directory, read_only=read_only)


def test_metadata_of_another_table_are_refused(directory):
    Store.open(directory, dim=4).close()
    metadata.save(directory, metadata.Metadata(5, 0))
    with pytest.raises(Damaged, match=r"is damaged: store\.json says dim=5, not so the entries"):
        Store.open(directory)


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
