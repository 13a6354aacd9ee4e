"""`attnflow knowledge edit`: an ordinary model with other answers."""

import json

import torch

import attnflow as af
from attnflow.knowledge.facts import EditReport


def test_a_model_is_edited_and_saved(run, tiny_model, tmp_path):
    out, keep = tmp_path / "edited", tmp_path / "keep.txt"
    keep.write_text("I that you\n\nof my\n")
    where = ["-o", str(out), "--keep", str(keep), "--layers", "0,1"]
    code, text, err = run(
        "knowledge", "edit", tiny_model, "--prompt", "the thy", "--answer", "be", "--subject", "thy", *where
    )
    assert code in (0, 1), err
    assert text.startswith("1 fact, ")
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
