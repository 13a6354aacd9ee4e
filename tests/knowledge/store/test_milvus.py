"""What is particular to Milvus, tried on a file that milvus-lite serves."""

from __future__ import annotations

import subprocess
import sys
import textwrap

import pytest
import torch

from attnflow.knowledge.store import NewerFormat, NotAStore, ReadOnly, Store, StoreError, StoreLocked, metadata, milvus
from tests.knowledge.store.test_store import contents

EYE = torch.eye(4)


@pytest.fixture
def place(tmp_path):
    return f"milvus:{tmp_path}/store.db"


def test_a_store_is_the_same_after_reopening(place):
    with Store.open(place, dim=4, num_thresholds=1) as store:
        store.insert(embeddings=EYE, texts=list("abcd"), thresholds=torch.ones(4, 1), encoder="e")
        store.snapshot("with_dots.-")
        store.upsert(ids=[1], embeddings=EYE[:1], texts=["B"])
        store.delete([3])
        before = contents(store)
    with Store.open(place) as store:
        assert (store.dim, store.num_thresholds, store.backend) == (4, 1, "milvus")
        assert contents(store) == before
        assert store.insert(embeddings=EYE[:1]).tolist() == [4]
        store.restore("with_dots.-")
    with Store.open(place) as store:
        assert [entry.text for entry in store.get(store.ids())] == list("abcd")
        assert store.insert(embeddings=EYE[:1]).tolist() == [5]
        assert len(store._backend.client.list_collections()) == 3  # the record, the present, the snapshot


def test_there_is_one_writer_and_a_file_is_served_by_one_process(place):
    with Store.open(place, dim=4) as writer:
        writer.insert(embeddings=EYE)
        with pytest.raises(StoreLocked, match="one may write at a time"):
            Store.open(place)
        with Store.open(place, read_only=True) as reader:
            assert len(reader) == 4
            writer.delete([0])
            assert reader.ids().tolist() == [1, 2, 3]
            with pytest.raises(ReadOnly, match="read_only=True"):
                reader.delete([1])
        assert len(writer) == 3  # the file is still served
        code = """
            import logging, sys
            logging.disable()
            from attnflow.knowledge.store import Store, StoreError
            try:
                Store.open(sys.argv[1], read_only=True)
            except StoreError as error:
                print(error)
            """
        done = subprocess.run([sys.executable, "-c", textwrap.dedent(code), place], capture_output=True, text=True)
        assert "milvus-lite serves a file to one process" in done.stdout, done.stderr
    Store.open(place).close()


def test_what_is_not_there_is_said(place, tmp_path):
    with pytest.raises(NotAStore, match="nothing to read"):
        Store.open(place, read_only=True)
    with pytest.raises(NotAStore, match="give dim"):
        Store.open(place)
    with pytest.raises(ValueError, match=r"ends with \.db"):
        Store.open(f"milvus:{tmp_path}/store", dim=4)
    Store.open(place, dim=4).close()
    with pytest.raises(ValueError, match="has dim=4, got dim=5"):
        Store.open(place, dim=5)


def test_a_store_of_a_later_version_is_refused(place):
    with Store.open(place, dim=4) as store:
        text = metadata.encode(store._backend.record).replace('"attnflow_store": 2', '"attnflow_store": 3')
        row = {"id": 0, "record": text, "vector": [0.0, 0.0]}
        store._backend.client.upsert("attnflow_store", [row])
    with pytest.raises(NewerFormat, match="upgrade"):
        Store.open(place)


def test_limits_of_milvus_are_refused_before_anything_is_written(place, monkeypatch):
    with Store.open(place, dim=4) as store:
        store.insert(embeddings=EYE[:1])
        with pytest.raises(ValueError, match=r"the text of row 1 has 65,536 bytes, and Milvus keeps up to 65,535"):
            store.insert(embeddings=EYE[:2], texts=["a", "é" * 32_768])
        monkeypatch.setattr(milvus, "_REQUEST", 2000)
        with pytest.raises(ValueError, match=r"100 entries are .* give about \d+ at a time"):
            store.insert(embeddings=torch.ones(100, 4))
        with pytest.raises(ValueError, match="too many for one request"):
            store._backend.delete(torch.arange(200).numpy())
        monkeypatch.undo()
        with pytest.raises(ValueError, match="16,384"):
            store.search(EYE[0], 20_000)
        assert store.ids().tolist() == [0]
        assert store.insert(embeddings=EYE[:1]).tolist() == [1]


def test_an_approximate_index(place):
    torch.manual_seed(0)
    centres = 3 * torch.randn(20, 8)
    rows = centres.repeat(50, 1) + torch.randn(1000, 8)
    with Store.open(place, dim=8, num_thresholds=1) as store:
        store.insert(embeddings=rows, thresholds=torch.rand(1000, 1))
        exact = store.search(rows[:20], 10, threshold_column=0)
        assert exact.certificate.label == "exact"
        with pytest.raises(ValueError, match='search="approximate"'):
            store.search(rows[:20], 10, mode="approximate")
    with pytest.raises(StoreError, match="open it for writing"):
        Store.open(place, search="approximate", read_only=True)
    with Store.open(place, search="approximate", target_recall=0.9) as store:
        assert store.stats().mode == "approximate"
        assert store.stats().reason == "IVF_FLAT, 63 of 63 lists are read"
        store.calibrate(rows[:50], k=10, threshold_column=0)
        found = store.search(rows[:20], 10, threshold_column=0)
        assert found.certificate.label == "approximate"
        assert store.recall(rows[:50], 10, threshold_column=0) >= 0.9
        again = store.search(rows[:20], 10, threshold_column=0, mode="exact")
        assert again.certificate.label == "exact"
        assert again.ids.tolist() == exact.ids.tolist()
        probes = store._backend.record.probes
        assert probes < 63
    with Store.open(place, search="approximate") as store:
        assert store._backend.record.probes == probes
        assert (
            store.stats().reason
            == f"IVF_FLAT, {probes} of 63 lists are read, as calibrated, and nothing was written since"
        )
        new = store.insert(embeddings=rows[:1] + 20)
        assert store.stats().reason == "IVF_FLAT, 63 of 63 lists are read"
        assert int(store.search(rows[0] + 20, 1).ids[0]) == int(new[0])
        store.calibrate(rows[:50], k=10, threshold_column=0)
        store.delete([0])
        assert store._backend.record.probes == 63
        assert 0 not in store.search(rows[0], 10).ids.tolist()
    with Store.open(place, read_only=True) as store:
        assert store.search(rows[1], 3).certificate.label == "exact"


def test_a_failed_request_changes_nothing(place, monkeypatch):
    with Store.open(place, dim=4) as store:
        store.insert(embeddings=EYE, texts=list("abcd"))
        store.snapshot("s")
        before = contents(store)

        def refuse(*_, **__):
            raise RuntimeError("the server is gone")

        for method, call in (
            ("upsert", lambda: store.insert(embeddings=EYE)),
            ("upsert", lambda: store.upsert(ids=[0], embeddings=EYE[:1])),
            ("delete", lambda: store.delete([0])),
            ("upsert", lambda: store.restore("s")),
            ("create_collection", lambda: store.snapshot("t")),
        ):
            monkeypatch.setattr(store._backend.client, method, refuse)
            with pytest.raises(StoreError, match="the server is gone"):
                call()
            monkeypatch.undo()
            assert contents(store) == before
            assert store.snapshots() == ["s"]


def test_a_server_that_does_not_answer():
    with pytest.raises(StoreError, match=r"no connection to Milvus at http://127\.0\.0\.1:9"):
        Store.open("milvus:http://127.0.0.1:9", dim=4)
