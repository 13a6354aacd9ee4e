"""What a store does, on every backend alike."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta

import numpy as np
import pytest
import torch

from attnflow.knowledge import Store
from attnflow.knowledge.store import StoreError

EYE = torch.eye(4)


def contents(store):
    """Everything that a store holds, by id."""
    entries = store.get(store.ids())
    vectors = torch.cat([store.vectors(), store.thresholds()], dim=1).tolist()
    assert [entry.embedding.tolist() + entry.thresholds.tolist() for entry in entries] == vectors
    return {
        one.id: (one.text, one.source, one.version, one.encoder, one.created, one.updated, vector)
        for one, vector in zip(entries, vectors, strict=True)
    }


def found(store, query, k, **options):
    result = store.search(query, k, **options)
    return result.ids.tolist(), result.scores.tolist()


def test_an_entry_keeps_all_that_was_said_about_it(store):
    before = datetime.now(UTC)
    ids = store.insert(
        embeddings=EYE[:2],
        texts=["Paris is in France", None],
        sources=["atlas, p. 3", "a 'quoted' source; DROP TABLE entries"],
        thresholds=[[0.5, -1.0], [0.0, 2.0]],
        encoder="mini 1.0",
    )
    assert ids.dtype == torch.int64
    assert ids.tolist() == [0, 1]
    assert len(store) == 2
    first, second = store.get(ids)
    assert (first.id, first.text, first.source, first.version) == (0, "Paris is in France", "atlas, p. 3", 1)
    assert first.encoder == "mini 1.0"
    assert first.created == first.updated
    assert before - timedelta(seconds=1) < first.created < datetime.now(UTC) + timedelta(seconds=1)
    torch.testing.assert_close(first.embedding, EYE[0], rtol=0, atol=0)
    torch.testing.assert_close(first.thresholds, torch.tensor([0.5, -1.0]), rtol=0, atol=0)
    assert second.text is None
    assert second.source == "a 'quoted' source; DROP TABLE entries"
    assert 0 in store
    assert 1 in store
    assert 2 not in store


def test_any_text_comes_back_as_it_was(store):
    texts = ["", " ", "zero \0 byte", "🙂 é 漢字", "quotes \" ' `", "line\nbreak\r\n", "x" * 60_000]
    ids = store.insert(embeddings=torch.randn(len(texts), 4), texts=texts)
    assert [entry.text for entry in store.get(ids)] == texts


def test_upsert_changes_what_is_given_and_keeps_the_rest(store):
    store.insert(embeddings=EYE[:2], texts=["a", "b"], sources=["s", "t"], thresholds=[[1, 2], [3, 4]], encoder="old")
    old = store.get([0, 1])
    store.upsert(ids=[1, 7], embeddings=EYE[2:], texts=[None, "seven"], encoder="new")
    assert store.get([0]) != []
    assert contents(store)[0][:4] == ("a", "s", 1, "old")
    changed, added = store.get([1, 7])
    assert (changed.text, changed.source, changed.version, changed.encoder) == ("b", "t", 2, "new")
    assert changed.created == old[1].created
    assert changed.updated > old[1].updated
    assert changed.embedding.tolist() == EYE[2].tolist()
    assert changed.thresholds.tolist() == [3, 4]
    assert (added.text, added.source, added.version) == ("seven", None, 1)
    assert added.thresholds.tolist() == [0, 0]
    store.upsert(ids=[1], embeddings=EYE[:1], texts=[""], thresholds=[[9, 9]])
    last = store.get([1])[0]
    assert (last.text, last.source, last.version, last.encoder) == ("", "t", 3, None)
    assert last.thresholds.tolist() == [9, 9]
    assert store.insert(embeddings=EYE[:1]).tolist() == [8]


def test_an_empty_store_answers(store):
    assert len(store) == 0
    assert store.ids().tolist() == []
    assert store.get([]) == []
    assert store.vectors().shape == (0, 4)
    assert store.thresholds().shape == (0, 2)
    assert store.search(EYE[0], k=2).ids.tolist() == [-1, -1]
    assert store.range(EYE[0], 0.0).ids.tolist() == []
    assert store.insert(embeddings=torch.empty(0, 4)).tolist() == []
    store.delete([])
    store.upsert(ids=[], embeddings=np.empty((0, 4)))
    stats = store.stats()
    assert (stats.count, stats.versions, stats.encoders, list(stats.snapshots)) == (0, {}, {}, [])


def test_ids_are_not_given_out_again(store):
    store.insert(embeddings=EYE)
    store.delete([2, 3])
    assert store.insert(embeddings=EYE[:1]).tolist() == [4]
    name = store.snapshot()
    store.insert(embeddings=EYE)
    store.restore(name)
    assert store.ids().tolist() == [0, 1, 4]
    assert store.insert(embeddings=EYE[:1]).tolist() == [9]
    store.insert(ids=[2**63 - 1, 3], embeddings=EYE[:2])
    with pytest.raises(ValueError, match="the largest id of this store is the largest integer"):
        store.insert(embeddings=EYE[:1])
    assert store.get([2**63 - 1])[0].id == 2**63 - 1


def test_snapshots_bring_back_everything(store):
    store.insert(embeddings=EYE[:2], texts=["a", "b"], encoder="e")
    before = contents(store)
    assert store.snapshot("first") == "first"
    store.upsert(ids=[0], embeddings=EYE[3:], texts=["changed"])
    store.delete([1])
    store.insert(embeddings=EYE[2:3], texts=["c"])
    after = contents(store)
    assert store.snapshot() == "snapshot-2"
    assert store.snapshots() == ["first", "snapshot-2"]
    store.restore("first")
    assert contents(store) == before
    assert found(store, EYE[0], 1) == ([0], [1.0])
    assert found(store, EYE[1], 1) == ([1], [1.0])
    store.restore("snapshot-2")
    assert contents(store) == after
    assert found(store, EYE[3], 1) == ([0], [1.0])
    assert 1 not in store
    store.drop_snapshot("first")
    assert store.snapshots() == ["snapshot-2"]
    assert list(store.stats().snapshots) == ["snapshot-2"]
    with pytest.raises(KeyError, match="first"):
        store.restore("first")
    with pytest.raises(KeyError, match="first"):
        store.drop_snapshot("first")
    with pytest.raises(ValueError, match="already"):
        store.snapshot("snapshot-2")
    for name in ("", "a/b", "../up", "x" * 65, "-a", "a b"):
        with pytest.raises(ValueError, match="a snapshot's name"):
            store.snapshot(name)


def test_stats_count(store):
    store.insert(embeddings=EYE, encoder="one")
    store.upsert(ids=[0, 9], embeddings=EYE[:2], encoder="two")
    stats = store.stats()
    assert (stats.count, stats.dim, stats.num_thresholds, stats.uri, stats.backend) == (
        5,
        4,
        2,
        store.uri,
        store.backend,
    )
    assert stats.versions == {1: 4, 2: 1}
    assert stats.encoders == {"one": 3, "two": 2}
    assert stats.mode == "exact"
    assert stats.reason
    assert (stats.bytes_on_disk is None) == (store.backend == "memory")


def test_vectors_may_be_of_any_real_kind(store):
    kinds = (torch.ones(1, 4, dtype=torch.bfloat16, requires_grad=True), torch.ones(2, 8)[::2, ::2], [[1, 1, 1, 1]])
    for values in (*kinds, np.ones((1, 4), dtype=np.int8), np.asfortranarray(np.ones((1, 4), dtype=np.float16))):
        (entry,) = store.get(store.insert(embeddings=values))
        assert (entry.embedding.dtype, entry.embedding.tolist()) == (torch.float32, [1, 1, 1, 1])


def test_what_is_given_may_change_afterwards(store):
    embeddings, ids = torch.ones(1, 4), np.array([5])
    store.insert(ids=ids, embeddings=embeddings)
    embeddings.zero_()
    ids[0] = 6
    store.get([5])[0].embedding.zero_()
    store.vectors([5]).zero_()
    assert store.get([5])[0].embedding.tolist() == [1] * 4
    assert store.vectors([5]).tolist() == [[1] * 4]
    assert found(store, torch.ones(4), 1) == ([5], [4.0])


BAD = {
    "width": (lambda s: s.insert(embeddings=torch.ones(2, 5)), ValueError, r"shape \[n, 4\]"),
    "one row": (lambda s: s.insert(embeddings=torch.ones(4)), ValueError, r"shape \[n, 4\]"),
    "NaN": (lambda s: s.insert(embeddings=[[0, 0, 0, 0], [0, np.nan, 0, 0]]), ValueError, "row 1 of embeddings"),
    "inf": (lambda s: s.upsert(ids=[0], embeddings=[[0, 0, 0, -np.inf]]), ValueError, "row 0 of embeddings"),
    "products too large": (lambda s: s.insert(embeddings=np.full((1, 4), 1e30)), ValueError, r"at most 1e\+16"),
    "too large": (lambda s: s.insert(embeddings=np.full((1, 4), 1e300)), ValueError, "NaN or infinity"),
    "NaN threshold": (
        lambda s: s.insert(embeddings=EYE[:1], thresholds=[[0, np.nan]]),
        ValueError,
        "row 0 of thresholds",
    ),
    "threshold rows": (lambda s: s.insert(embeddings=EYE, thresholds=[[0, 0]]), ValueError, r"shape \[4, 2\]"),
    "threshold width": (lambda s: s.insert(embeddings=EYE, thresholds=torch.ones(4, 3)), ValueError, "thresholds"),
    "booleans": (lambda s: s.insert(embeddings=np.ones((1, 4), dtype=bool)), TypeError, "real numbers"),
    "complex": (lambda s: s.insert(embeddings=torch.ones(1, 4, dtype=torch.cfloat)), TypeError, "real numbers"),
    "repeated ids": (lambda s: s.insert(ids=[5, 6, 5, 7], embeddings=EYE), ValueError, r"more than once: \[5\]"),
    "repeated upsert": (lambda s: s.upsert(ids=[0, 0], embeddings=EYE[:2]), ValueError, "more than once"),
    "repeated delete": (lambda s: s.delete([0, 0]), ValueError, "more than once"),
    "existing id": (lambda s: s.insert(ids=[8, 1], embeddings=EYE[:2]), ValueError, r"existing ones: \[1\]"),
    "negative id": (lambda s: s.insert(ids=[-1], embeddings=EYE[:1]), ValueError, "got -1"),
    "huge id": (lambda s: s.insert(ids=[2**63], embeddings=EYE[:1]), ValueError, "at most 9223372036854775807"),
    "float id": (lambda s: s.delete(torch.tensor([0.5])), TypeError, "integers"),
    "id count": (lambda s: s.insert(ids=[8], embeddings=EYE), ValueError, "4 ids"),
    "text count": (lambda s: s.insert(embeddings=EYE, texts=["a"]), ValueError, "4 strings"),
    "text type": (lambda s: s.insert(embeddings=EYE[:2], texts="ab"), TypeError, "got str"),
    "surrogate": (lambda s: s.insert(embeddings=EYE[:1], texts=["\ud800"]), ValueError, "Unicode"),
    "unknown delete": (lambda s: s.delete([0, 77, 78]), KeyError, r"\[77, 78\]"),
    "unknown get": (lambda s: s.get([0, 77]), KeyError, r"\[77\]"),
    "unknown vectors": (lambda s: s.vectors([77]), KeyError, r"\[77\]"),
    "unknown snapshot": (lambda s: s.restore("nothing"), KeyError, "nothing"),
    "query width": (lambda s: s.search(torch.ones(3), 1), ValueError, r"shape \[4\]"),
    "query NaN": (lambda s: s.search(torch.full((4,), torch.nan), 1), ValueError, "NaN"),
    "k": (lambda s: s.search(EYE[0], 0), ValueError, "at least 1"),
    "k too large": (lambda s: s.search(EYE[0], 10**12), ValueError, "k must be at most 1048576"),
    "query too large": (lambda s: s.search(torch.full((4,), 1e30), 1), ValueError, r"at most 1e\+16"),
    "column": (lambda s: s.search(EYE[0], 1, threshold_column=2), ValueError, "at most 1"),
    "range column": (lambda s: s.range(EYE[0], 0.0, threshold_column=-1), ValueError, "at least 0"),
    "range NaN": (lambda s: s.range(EYE[0], float("nan")), ValueError, "finite, got nan"),
    "ragged rows": (lambda s: s.insert(embeddings=[[1, 2, 3, 4], [1, 2]]), ValueError, "must all have the same length"),
    "answer to one": (lambda s: s.search(EYE[0], 1)[0], TypeError, "this result is of one query"),
}


@pytest.mark.parametrize("name", BAD)
def test_bad_input_is_refused_and_nothing_changes(store, name):
    call, error, message = BAD[name]
    store.insert(embeddings=EYE[:2], texts=["a", "b"])
    before = contents(store)
    with pytest.raises(error, match=message):
        call(store)
    assert contents(store) == before
    assert store.insert(embeddings=EYE[2:3]).tolist() == [2]
    assert found(store, EYE[2], 1) == ([2], [1.0])


@pytest.mark.parametrize("key", [2, -1, 2**63, 2**70])
def test_what_is_not_there_is_not_in_a_store(store, key):
    store.insert(embeddings=EYE[:2])
    assert key not in store
    assert 1 in store
    with pytest.raises(TypeError, match="must be an integer"):
        "1" in store  # noqa: B015


def test_a_store_without_thresholds(place):
    with Store.open(place, dim=3) as store:
        store.insert(embeddings=torch.eye(3))
        assert store.num_thresholds == 0
        assert store.get([0])[0].thresholds.shape == (0,)
        assert store.thresholds().shape == (3, 0)
        assert found(store, [0.0, 0, 1], 1) == ([2], [1.0])
        with pytest.raises(ValueError, match="no threshold columns"):
            store.search([0.0, 0, 1], 1, threshold_column=0)


def test_a_closed_store_says_so(place):
    store = Store.open(place, dim=4)
    store.close()
    store.close()
    for call in (lambda: len(store), lambda: store.insert(embeddings=EYE), lambda: store.search(EYE, 1)):
        with pytest.raises(StoreError, match="closed"):
            call()


def test_parquet_and_pandas_hold_everything_exactly(store, tmp_path):
    parquet, pandas = pytest.importorskip("pyarrow.parquet"), pytest.importorskip("pandas")
    vectors = torch.randn(3, 4, generator=torch.Generator().manual_seed(0))
    texts = ['a, "quoted" text\nof two lines', None, ""]
    store.insert(embeddings=vectors, texts=texts, thresholds=[[0.5, -1e9]] * 3, encoder="mini", ids=[7, 2, 2**62])
    store.upsert(ids=[2], embeddings=EYE[:1], sources=["é"])
    path = store.export(tmp_path / "entries.parquet")
    rows = {row["id"]: row for row in parquet.read_table(path).to_pylist()}
    kept = contents(store)
    names = ("text", "source", "version", "encoder", "created", "updated")
    assert {
        key: (*(row[name] for name in names), row["embedding"] + row["thresholds"]) for key, row in rows.items()
    } == kept
    frame = store.to_pandas().set_index("id")
    assert isinstance(frame, pandas.DataFrame)
    assert frame.loc[7, "embedding"].tolist() == vectors[0].tolist()
    with Store.open("memory", dim=4, num_thresholds=2) as other:
        table = parquet.read_table(path)
        wide = np.stack(table["embedding"].to_numpy(zero_copy_only=False))
        other.insert(embeddings=wide, ids=table["id"].to_numpy(), texts=table["text"].to_pylist())
        assert torch.equal(other.vectors(), store.vectors())
        assert [entry.text for entry in other.get([7, 2, 2**62])] == texts


def test_csv_leaves_vectors_out_and_other_names_are_refused(store, tmp_path):
    frame = pytest.importorskip("pandas")
    store.insert(embeddings=EYE[:2], texts=["a, b", None], sources=["x", "y"])
    path = store.export(tmp_path / "entries.CSV")
    table = frame.read_csv(path)
    assert list(table) == ["id", "text", "source", "encoder", "version", "created", "updated"]
    assert table["source"].tolist() == ["x", "y"]
    assert frame.to_datetime(table["created"][0]) == store.get([0])[0].created
    with pytest.raises(ValueError, match=r"must end in .parquet or .csv, got 'entries.json'"):
        store.export(tmp_path / "entries.json")
    assert sorted(path.name for path in tmp_path.iterdir() if path.is_file()) == ["entries.CSV"]


def test_an_empty_store_and_many_rows_are_written(tmp_path):
    parquet = pytest.importorskip("pyarrow.parquet")
    with Store.open("memory", dim=2) as store:
        assert parquet.read_table(store.export(tmp_path / "none.parquet")).num_rows == 0
        assert (tmp_path / store.export(tmp_path / "none.csv").name).read_text().count("\n") == 1
        rows = np.random.default_rng(0).random((20_000, 2), dtype=np.float32)
        ids = store.insert(embeddings=rows)
        table = parquet.read_table(store.export(tmp_path / "many.parquet")).sort_by("id")
        assert table["id"].to_pylist() == ids.tolist()
        assert np.array_equal(np.stack(table["embedding"].to_numpy(zero_copy_only=False)), rows)
        assert "thresholds" not in table.column_names
