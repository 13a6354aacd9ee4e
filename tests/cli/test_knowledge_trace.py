"""`attnflow knowledge trace` on a tiny model, with its own entries and with those of a store."""

import csv
import json
import shutil

import pytest

import attnflow as af
from attnflow.knowledge.hf.sync import save_entries
from attnflow.knowledge.provenance import Trace
from attnflow.models import load_model

TEXT = "I the of thou with thy"


def test_text(run, tiny_model):
    code, out, err = run("knowledge", "trace", tiny_model, TEXT, "--count", "3")
    assert (code, err) == (0, "")
    lines = out.splitlines()
    assert lines[0] == tiny_model
    assert lines[1].startswith("token thy at position 5, target ")
    assert lines[2].endswith("of 96 entries are active")
    assert lines[4].split()[:3] == ["layer", "token", "entry"]
    assert len(lines) == 5 + 3
    assert all("thy (5)" in line for line in lines[5:])


def test_json(run, tiny_model):
    arguments = ("--position", "2", "--target", "my", "--layer", "1", "--count", "4", "--json")
    found = json.loads(run("knowledge", "trace", tiny_model, TEXT, *arguments).out)
    assert found["schema"] == "attnflow.knowledge.trace.show/1"
    assert found["tokens"] == TEXT.split()
    assert (found["position"], found["target"], found["store"], found["written"]) == (2, "my", None, None)
    assert [layer["layer"] for layer in found["layers"]] == [1]
    assert found["layers"][0]["entries"] == 48
    effects = [entry["effect"] for entry in found["entries"]]
    assert len(effects) == 4
    assert effects == sorted(effects, key=abs, reverse=True)
    assert all(entry["layer"] == 1 and 48 <= entry["entry"] < 96 for entry in found["entries"])


def test_files(run, tiny_model, tmp_path):
    for suffix in ("svg", "png", "html", "csv", "json"):
        file = tmp_path / f"trace.{suffix}"
        code, out, err = run("knowledge", "trace", tiny_model, TEXT, "--top", "5", "-o", str(file))
        assert (code, err) == (0, "")
        assert out.splitlines()[-1] == f"written: {file}"
    saved = Trace.from_json((tmp_path / "trace.json").read_text())
    assert saved.model == tiny_model
    assert [one.ids.shape for one in saved] == [(6, 5), (6, 5)]
    rows = list(csv.DictReader((tmp_path / "trace.csv").read_text().splitlines()))
    assert len(rows) == 6 * 5 * 2
    assert "Entries of the last token" in (tmp_path / "trace.html").read_text()


def test_entries_and_texts_of_a_store(run, tiny_model, tmp_path):
    model = af.knowledge.from_ffn(load_model(tiny_model).model)
    base = model.knowledge
    before = json.loads(run("knowledge", "trace", tiny_model, TEXT, "--json").out)
    strongest = before["entries"][0]["entry"]
    uri = str(tmp_path / "store")
    with af.knowledge.Store.open(uri, dim=base.entry_dim, num_thresholds=base.num_layers) as store:
        save_entries(model, store, texts={strongest: "the strongest"})
    same = json.loads(run("knowledge", "trace", tiny_model, TEXT, "--store", uri, "--json").out)
    assert same["logit"] == pytest.approx(before["logit"], rel=1e-5)
    assert same["entries"][0]["text"] == "the strongest"
    with af.knowledge.Store.open(uri) as store:
        row = store.vectors([strongest])
        row[:, base.layout.value] = 0
        store.upsert(ids=[strongest], embeddings=row)
    edited = json.loads(run("knowledge", "trace", tiny_model, TEXT, "--store", uri, "--json").out)
    assert strongest not in [entry["entry"] for entry in edited["entries"]]
    assert edited["logit"] != pytest.approx(before["logit"], rel=1e-4)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--layer", "2"), "layers must list some of the layers with entries, 0 to 1"),
        (("--position", "9"), "position must be one of the traced"),
        (("--target", "I my"), "a target must be one token"),
        (("--store", "nowhere"), "nowhere"),
        (("-o", "trace.dot"), "the name must end in .svg or .png or .html or .csv or .json"),
    ],
)
def test_what_cannot_be_is_said(run, tiny_model, arguments, message):
    code, out, err = run("knowledge", "trace", tiny_model, TEXT, *arguments)
    assert (code, out) == (2, "")
    assert message in err


def test_an_empty_text_and_a_store_of_another_model_are_refused(run, tiny_model, tmp_path):
    assert "the text is empty" in run("knowledge", "trace", tiny_model, "").err
    with af.knowledge.Store.open(str(tmp_path / "store"), dim=8) as store:
        store.insert(embeddings=[[0.0] * 8])
    code, _, err = run("knowledge", "trace", tiny_model, TEXT, "--store", str(tmp_path / "store"))
    assert code == 2
    assert "8" in err
    shutil.rmtree(tmp_path / "store")
