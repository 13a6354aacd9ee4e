"""`attnflow knowledge fit` and `ask`: from a file of facts to an answer with the entry that it came from."""

import json

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

import attnflow as af

pytest.importorskip("lancedb")


@pytest.fixture
def model(tmp_path, monkeypatch):
    monkeypatch.setattr("attnflow.knowledge.hf.words._WORDS", 100)
    tokenizer = af.load_model("smollm2-135m").tokenizer
    torch.manual_seed(0)
    sizes = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 3, "num_attention_heads": 2}
    folder = str(tmp_path / "model")
    LlamaForCausalLM(LlamaConfig(vocab_size=len(tokenizer), **sizes)).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


@pytest.mark.slow
def test_from_a_file_of_facts_to_an_answer(run, model, tmp_path):
    file, place, out = tmp_path / "facts.jsonl", str(tmp_path / "store"), str(tmp_path / "reader")
    file.write_text("\n".join(json.dumps({"key": f"the capital of {k}", "value": v}) for k, v in CAPITALS.items()))
    assert run("knowledge", "build", place, str(file), "--values").code == 0
    code, _, err = run("knowledge", "ask", model, place, "What is the capital of France?", "--reader", out)
    assert code == 2
    assert "there is no reader" in err
    code, text, err = run("knowledge", "fit", model, place, "-o", out, "--facts", "10", "--steps", "1", "--layers", "1")
    assert code == 0, err
    assert "parameters; held-out questions: entry@64" in text
    code, text, err = run("knowledge", "ask", model, place, "What is the capital of France?", "--reader", out)
    assert code in (0, 1), err
    assert "similarity above" in text
    assert "entry 0, version 1: the capital of France" in text.splitlines()[2]
    asked = run("knowledge", "ask", model, place, "What is the capital of France?", "--reader", out, "--json")
    answer = json.loads(asked.out)
    assert answer["attnflow"] == "Answer"
    assert len(answer["sources"]) == 2
    assert (asked.code == 1) == (answer["answer"] is None)
    code, _, err = run("knowledge", "fit", model, place, "-o", out, "--facts", "11")
    assert code == 2
    assert "other settings" in err


CAPITALS = {"France": "Paris", "Italy": "Rome"}
