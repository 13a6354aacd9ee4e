"""`attnflow knowledge trace` and `edit` on a tiny model."""

import csv
import json

import torch

import attnflow as af
from attnflow.knowledge import Trace
from attnflow.knowledge.editing.facts import EditReport

TEXT = "I the of thou with thy"


def test_text(run, tiny_model):
    out = run.ok("knowledge", "trace", tiny_model, TEXT, "--count", "3")
    lines = out.splitlines()
    assert lines[0] == tiny_model
    assert lines[1] == f"prompt {TEXT}"
    assert lines[2].startswith("token thy (5), answer ")
    assert lines[3].endswith("of 96 entries are active")
    assert lines[5].split()[:4] == ["entry", "layer", "neuron", "score"]
    assert len(lines) == 6 + 3
    for line in lines[6:]:
        name, layer, neuron, *_ = line.split()
        assert name == f"L{layer}N{neuron}"


def test_json(run, tiny_model):
    arguments = ("--position", "2", "--answer", "my", "--layer", "1", "--count", "4", "--json")
    found = Trace.from_json(run("knowledge", "trace", tiny_model, TEXT, *arguments).out)
    assert found.model == tiny_model
    assert "".join(found.tokens) == TEXT
    assert set(found.answers) == {"my"}
    assert [one.layer for one in found] == [0, 1]
    assert found.layer(1).num_entries == 48
    entries = found.fired(2, layer=1, count=4)
    effects = [one.effect for one in entries]
    assert effects == sorted(effects, key=abs, reverse=True)
    assert all(one.layer == 1 and 48 <= one.entry < 96 for one in entries)


def test_several_texts(run, tiny_model, tmp_path):
    texts, options = (TEXT, "thou be"), ("--count", "3")
    one, other = (run.ok("knowledge", "trace", tiny_model, text, *options).split("\n", 1)[1] for text in texts)
    assert run.ok("knowledge", "trace", tiny_model, *texts, *options) == f"{tiny_model}\n{one}\n{other}"
    said = json.loads(run.ok("knowledge", "trace", tiny_model, *texts, "--json"))
    alone = [json.loads(run.ok("knowledge", "trace", tiny_model, text, "--json")) for text in texts]
    assert said == {"schema": "attnflow.knowledge.trace/1", "traces": alone}
    refused = run("knowledge", "trace", tiny_model, *texts, "-o", str(tmp_path / "one.html"))
    assert refused.code == 2
    assert "-o writes one trace, and there are 2 texts" in refused.err


def test_entries_are_taken_out(run, tiny_model):
    arguments = ("knowledge", "trace", tiny_model, TEXT, "--position", "3", "--ablate", "4")
    found = Trace.from_json(run(*arguments, "--json").out)
    assert found.positions == (3,)
    tried = [one.ablated_effect is not None for one in found.fired(-1)]
    assert tried == [True] * 4 + [False] * (len(tried) - 4)
    lines = run(*arguments, "--count", "5").out.splitlines()
    assert {"effect", "direct", "ablated"} < set(lines[5].split())


def test_files(run, tiny_model, tmp_path):
    for suffix in ("svg", "png", "html", "csv", "json"):
        file = tmp_path / f"trace.{suffix}"
        out = run.ok("knowledge", "trace", tiny_model, TEXT, "--count", "20", "-o", str(file))
        assert out.splitlines()[-1] == f"written: {file}"
    saved = Trace.from_json((tmp_path / "trace.json").read_text())
    assert saved.model == tiny_model
    assert [one.ids.shape for one in saved] == [(6, 20), (6, 20)]
    rows = list(csv.DictReader((tmp_path / "trace.csv").read_text().splitlines()))
    assert len(rows) == 6 * 20 * 2
    assert "Entries of the last token" in (tmp_path / "trace.html").read_text()


def test_a_model_is_edited_and_saved(run, tiny_model, tmp_path):
    out, keep = tmp_path / "edited", tmp_path / "keep.txt"
    keep.write_text("I that you\n\nof my\n")
    where = ["-o", str(out), "--keep", str(keep), "--layers", "0,1"]
    code, text, err = run(
        "knowledge", "edit", tiny_model, "--prompt", "the thy", "--answer", "be", "--subject", "thy", *where
    )
    assert code in (0, 1), err
    assert text.startswith("1 of 1 fact changed")
    assert "2 texts that must not change" in text
    plain, edited = af.load_model(tiny_model), af.load_model(str(out))
    assert type(plain.model) is type(edited.model)
    same = {n: torch.equal(v, edited.model.state_dict()[n]) for n, v in plain.model.state_dict().items()}
    assert {name for name, value in same.items() if not value} == {
        f"model.layers.{layer}.mlp.down_proj.weight" for layer in (0, 1)
    }
    ids = edited.tokenizer("I that you", return_tensors="pt")
    with torch.no_grad():
        torch.testing.assert_close(edited.model(**ids).logits, plain.model(**ids).logits, rtol=1e-4, atol=1e-4)
    facts = tmp_path / "facts.jsonl"
    facts.write_text('{"prompt": "the thy", "answer": "be", "subject": "thy"}\n')
    found = run("knowledge", "edit", tiny_model, "--file", str(facts), "-o", str(out), "--json")
    report = EditReport.from_dict(json.loads(found.out))
    assert found.code == (0 if report.ok else 1)
    assert report.facts[0].after > report.facts[0].before
    bare = run("knowledge", "edit", tiny_model, "--file", str(facts), "-o", str(out), "--no-guard")
    assert bare.code == 1
    assert "not promised: other statements on the subject stay: not measured for 1 of 1 fact" in bare.out


def test_patches(run, tiny_model, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    asked = ("knowledge", "edit", tiny_model, "--prompt", "the thy", "--answer", "be", "--subject", "thy")
    code, text, err = run(*asked, "-o", "one.patch", "--layers", "0,1")
    assert code in (0, 1), err
    assert sorted(path.name for path in (tmp_path / "one.patch").iterdir()) == ["edit.safetensors", "edit_config.json"]
    assert "other edits" not in text
    other = [*asked[:3], "--prompt", "that you", "--answer", "my", "--subject", "you", "--apply", "one.patch"]
    code, text, err = run(*other, "-o", "two.patch", "--layers", "1")
    assert "other edits in force change 48 entries of these, too, in layers 1" in text
    assert run(*other, "-o", "both", "--layers", "1").code == code

    apply = ("--apply", "one.patch", "--apply", "two.patch")
    done = run("knowledge", "trace", tiny_model, TEXT, "--json", *apply)
    assert "two.patch: other edits in force change 48 entries of these, too, in layers 1" in done.err
    found = Trace.from_json(done.out)
    assert found.model == f"{tiny_model} + one.patch + two.patch"
    folded = Trace.from_json(run.ok("knowledge", "trace", "both", TEXT, "--json"))
    plain = Trace.from_json(run.ok("knowledge", "trace", tiny_model, TEXT, "--json"))
    effects = [torch.as_tensor(one.layer(1).effects) for one in (found, folded, plain)]
    torch.testing.assert_close(effects[0], effects[1], rtol=1e-3, atol=1e-5)
    assert not torch.allclose(effects[0], effects[2], rtol=1e-3, atol=1e-5)
    assert run("knowledge", "trace", tiny_model, TEXT, "--apply", "none.patch").code == 2
    (tmp_path / "one.patch" / "edit.safetensors").write_bytes(b"")
    damaged = run("knowledge", "build", "store", tiny_model, *apply)
    assert (damaged.code, "edit.safetensors is damaged" in damaged.err) == (2, True)
    assert not (tmp_path / "store").exists()
