"""`attnflow knowledge build, stats`: a store of the entries of a tiny model, and a store by hand."""

import json

import pytest
import torch

from attnflow.knowledge.reading.duplication import Duplicates
from attnflow.knowledge.store import Store, StoreStats

pytest.importorskip("lancedb")


@pytest.fixture
def store(tmp_path):
    """Five entries of texts, of which two are the same."""
    place = str(tmp_path / "store")
    rows = torch.nn.functional.normalize(torch.eye(5, 16), dim=1)
    rows[4] = rows[3]
    with Store.open(place, dim=16) as held:
        held.insert(embeddings=rows, texts=["a cat", "a dog", "rain", "wind", "wind again"], encoder="by hand")
    return place


def entries(place):
    with Store.open(place, read_only=True) as store:
        return store.get(store.ids())


def test_feed_forward_entries_of_a_model(run, tmp_path, tiny_model, store):
    place = str(tmp_path / "entries")
    out = run.ok("knowledge", "build", place, tiny_model)
    assert out.startswith(f"{place} (lancedb): 96 entries of width 98 and 2 threshold columns")
    assert f"encoder    from_ffn:{tiny_model}: 96 entries" in out
    assert [entry.source for entry in entries(place)] == ["layer 0"] * 48 + ["layer 1"] * 48
    assert run("knowledge", "stats", place).out == out
    err = run.refused("knowledge", "build", place, tiny_model)
    assert "already holds 96 entries: name a new store" in err
    assert run("knowledge", "build", store, tiny_model).code == 2
    assert len(entries(store)) == 5


def test_stats(run, store):
    out = run.ok("knowledge", "stats", store)
    assert out.splitlines()[0].startswith(f"{store} (lancedb): 5 entries of width 16, ")
    assert "encoder    by hand: 5 entries" in out
    assert "duplicates" not in out
    code, out, _ = run("knowledge", "stats", store, "--duplicates", "--threshold", "0.9999")
    assert code == 1
    assert "duplicates 1 group of near-duplicates: 1 of 5 entries could go" in out
    assert out.splitlines()[-1].split() == ["2", "[3,", "4]", "wind"]
    found = json.loads(run("knowledge", "stats", store, "--duplicates", "--json").out)
    assert Duplicates.from_dict(found).surplus == 1
    numbers = StoreStats.from_dict(json.loads(run("knowledge", "stats", store, "--json").out))
    assert (numbers.count, numbers.versions) == (5, {1: 5})
    assert "a cosine in (0, 1], got 2.0" in run("knowledge", "stats", store, "--duplicates", "--threshold", "2").err
    assert [entry.text for entry in entries(store)][:2] == ["a cat", "a dog"]


def test_export(run, store, tmp_path):
    parquet = pytest.importorskip("pyarrow.parquet")
    out = run.ok("knowledge", "export", store, str(tmp_path / "entries.parquet"))
    assert f"written: {tmp_path / 'entries.parquet'}" in out.replace("\n", "")
    assert parquet.read_table(tmp_path / "entries.parquet")["text"].to_pylist()[:2] == ["a cat", "a dog"]
    run.ok("knowledge", "export", store, str(tmp_path / "entries.csv"))
    assert (tmp_path / "entries.csv").read_text().splitlines()[1].startswith('0,"a cat"')
    assert "the name must end in .parquet or .csv" in run.refused("knowledge", "export", store, "entries.txt")
