"""Arguments of a wrong type, in a process without the type checker that the other tests run under."""

from __future__ import annotations

import json
import subprocess
import sys

CODE = """
import json
import torch
import attnflow as af

store = af.knowledge.Store.open("memory", dim=4)
store.insert(embeddings=torch.eye(4))
sizes = {"vocab_size": 32, "hidden_size": 4, "num_hidden_layers": 1, "num_attention_heads": 1, "num_entries": 3}
model = af.knowledge.ModularForCausalLM(af.knowledge.ModularConfig(**sizes))
calls = {
    "search": lambda: af.knowledge.Store.open("memory", dim=4, search="fast"),
    "range": lambda: store.range(torch.eye(4), "0.5"),
    "texts": lambda: store.insert(embeddings=torch.eye(4), texts=(text for text in "abcd")),
    "snapshot": lambda: store.snapshot(3),
    "retrieval": lambda: af.knowledge.Retrieval(threshold="0"),
    "base": lambda: af.knowledge.KnowledgeBase.from_entries(torch.ones(2, 2, dtype=torch.int64)),
    "from_ffn": lambda: af.knowledge.from_ffn("gpt2"),
    "traced": lambda: af.knowledge.trace("gpt2", [1, 2]),
    "attach": lambda: af.knowledge.attach(model, "folder"),
    "trace": lambda: af.knowledge.trace(model, [1, 2], by="size"),
    "entries": lambda: model(torch.tensor([[1, 2]]), entries=[[1.0] * 4]),
    "vocabulary": lambda: af.knowledge.trace(model, [1, 99]),
    "padding": lambda: store.get([0, -1]),
    "fired": lambda: af.knowledge.trace(model, [1, 2]).fired(by="size"),
}
said = {}
for name, call in calls.items():
    try:
        call()
    except (TypeError, ValueError) as error:
        said[name] = f"{type(error).__name__}: {error}"
print(json.dumps(said))
"""
EXPECTED = {
    "search": 'ValueError: search must be "auto", "exact" or "approximate", got \'fast\'',
    "range": "TypeError: threshold must be a number, got '0.5' of type str",
    "texts": "TypeError: texts must be a sequence of 4 strings, got generator: make it a list",
    "snapshot": "ValueError: a snapshot's name has 1 to 64 letters, digits, '.', '_' or '-', got 3",
    "retrieval": "ValueError: threshold must be a number, not NaN, got '0'",
    "base": "ValueError: entries must be floating-point numbers [num_entries, entry_dim], got torch.int64 of shape "
    "(2, 2)",
    "from_ffn": "TypeError: expected a torch module or what af.load_model returns, got str; load a model by its "
    "name or folder with af.load_model(...)",
    "traced": "TypeError: expected a torch module or what af.load_model returns, got str; load a model by its "
    "name or folder with af.load_model(...)",
    "attach": "TypeError: store must be an open one, af.knowledge.Store.open(uri), got str",
    "trace": "ValueError: by must be 'norm' or 'effect', got 'size'",
    "entries": "TypeError: entries must be a tensor [entries, d_E] or a source, got list",
    "vocabulary": "ValueError: token ids must lie in 0 to 31, the model's vocabulary; got up to 99",
    "padding": "ValueError: ids must hold integers from 0 to 2**63 - 1, got -1; where a search found fewer entries, "
    "found[i].ids leaves -1 out",
    "fired": "ValueError: by must be 'norm' or 'effect', got 'size'",
}


def test_wrong_types_are_explained():
    found = subprocess.run([sys.executable, "-c", CODE], capture_output=True, text=True)
    assert found.returncode == 0, found.stderr
    assert json.loads(found.stdout.splitlines()[-1]) == EXPECTED
