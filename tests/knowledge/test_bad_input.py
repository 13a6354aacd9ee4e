"""Bad arguments and what is said of them, in a process without the type checker that the other tests run under."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest

CODE = """
import json
import torch
import attnflow as af

store = af.knowledge.Store.open("memory", dim=4)
store.insert(embeddings=torch.eye(4))
sizes = {"vocab_size": 32, "hidden_size": 4, "num_hidden_layers": 1, "num_attention_heads": 1, "num_entries": 3}
model = af.knowledge.ModularForCausalLM(af.knowledge.ModularConfig(**sizes))
calls = {
    "search": lambda: store.search(torch.eye(4), 1, mode="fast"),
    "range": lambda: store.range(torch.eye(4), "0.5"),
    "texts": lambda: store.insert(embeddings=torch.eye(4), texts=(text for text in "abcd")),
    "snapshot": lambda: store.snapshot(3),
    "retrieval": lambda: af.knowledge.Retrieval(threshold="0"),
    "from_ffn": lambda: af.knowledge.from_ffn("gpt2"),
    "traced": lambda: af.knowledge.trace("gpt2", [1, 2]),
    "attach": lambda: af.knowledge.attach(model, "folder"),
    "trace": lambda: af.knowledge.trace(model, [1, 2], by="size"),
    "entries": lambda: model(torch.tensor([[1, 2]]), entries=[[1.0] * 4]),
    "vocabulary": lambda: af.knowledge.trace(model, [1, 99]),
    "padding": lambda: store.get([0, -1]),
}
layer = af.knowledge.GeneralizedCrossAttention(8, 4, 6)
plain = af.knowledge.GeneralizedCrossAttention
config = lambda **given: af.knowledge.ModularConfig(**{**sizes, **given})
calls |= {
    "threshold": lambda: plain(8, 4, 6, threshold="none"),
    "activation": lambda: plain(8, 4, 6, activation="tanh"),
    "coordinate": lambda: plain(8, 4, 1, gated=True, threshold="coordinate"),
    "zero": lambda: plain(0, 4, 6),
    "hidden": lambda: layer(torch.zeros(2, 7), torch.zeros(5, 6)),
    "width": lambda: layer(torch.zeros(2, 8), torch.zeros(5, 7)),
    "order": lambda: layer(torch.zeros(2, 8), torch.zeros(5, 6), order="fast"),
    "neither": lambda: af.knowledge.Retrieval(),
    "k": lambda: af.knowledge.Retrieval(k=0),
    "mode": lambda: af.knowledge.Retrieval(k=1, search="fast"),
    "approximate": lambda: af.knowledge.Retrieval(threshold=0, search="approximate"),
    "rows": lambda: af.knowledge.KnowledgeBase(0, 4),
    "heads": lambda: config(num_attention_heads=4, num_key_value_heads=3),
    "rope": lambda: config(head_dim=3),
    "kind": lambda: config(threshold="constant"),
    "no store": lambda: af.knowledge.attach(model, "facts"),
    "fact": lambda: af.knowledge.edit(model, {"prompt": "a"}),
    "one target": lambda: af.knowledge.trace(model, [1, 2], targets=[1]),
    "positions": lambda: af.knowledge.trace(model, [1, 2], positions=2),
    "not converted": lambda: af.knowledge.to_ffn(model),
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
    "search": 'ValueError: mode must be "exact", "approximate" or None, got \'fast\'',
    "range": "TypeError: threshold must be a number, got '0.5' of type str",
    "texts": "TypeError: texts must be a sequence of 4 strings, got generator: make it a list",
    "snapshot": "ValueError: a snapshot's name has 1 to 64 letters, digits, '.', '_' or '-', got 3",
    "retrieval": "ValueError: threshold must be a number, not NaN, got '0'",
    "from_ffn": "TypeError: expected a torch module or what af.load_model returns, got str; load a model by its name "
    "or folder with af.load_model(...)",
    "traced": "TypeError: expected a torch module or what af.load_model returns, got str; load a model by its name "
    "or folder with af.load_model(...)",
    "attach": "TypeError: store must be an open one, af.knowledge.Store.open(uri), got str",
    "trace": "ValueError: by must be 'norm' or 'effect', got 'size'",
    "entries": "TypeError: entries must be a tensor [entries, d_E] or a source, got list",
    "vocabulary": "ValueError: token ids must lie in 0 to 31, the model's vocabulary; got up to 99",
    "padding": "ValueError: ids must hold integers from 0 to 2**63 - 1, got -1; where a search found fewer entries, "
    "found[i].ids leaves -1 out",
    "threshold": "ValueError: threshold must be one of 'mlp', 'coordinate', 'constant', got 'none'",
    "activation": "ValueError: activation must be one of 'relu', 'gelu', 'silu', 'sparsemax' or a function, got 'tanh'",
    "coordinate": "ValueError: threshold='coordinate' needs entries of width 2 or more, got 1",
    "zero": "ValueError: model_dim must be at least 1, got 0",
    "hidden": "ValueError: hidden must have width 8, got shape (2, 7)",
    "width": "ValueError: entries must be [entries, 6], got shape (5, 7)",
    "order": "ValueError: order must be one of 'query_side', 'folded', 'naive', got 'fast'",
    "neither": "ValueError: give k or threshold, one of them; got k=None, threshold=None",
    "k": "ValueError: k must be at least 1, got 0",
    "mode": "ValueError: search must be one of 'auto', 'dense', 'exact', 'approximate', got 'fast'",
    "approximate": "ValueError: an approximate search finds the k best: give k, or another search for a threshold",
    "rows": "ValueError: num_entries must be at least 1, got 0",
    "heads": "ValueError: num_attention_heads (4) must be a multiple of num_key_value_heads (3)",
    "rope": "ValueError: RoPE turns pairs of coordinates: head_dim must be even, got 3",
    "kind": "ValueError: threshold must be one of 'mlp', 'coordinate', got 'constant'",
    "no store": "TypeError: store must be an open one, af.knowledge.Store.open(uri), got str",
    "fact": "ValueError: a fact needs the model's tokenizer: pass what af.load_model returned, or tokenizer=...",
    "one target": "ValueError: expected one target, or one for each of 2 positions, got 1",
    "positions": "ValueError: positions must be of 2 tokens, -2 to 1, got [2]",
    "not converted": "ValueError: ModularForCausalLM reads no knowledge base; from_ffn(model) makes one that does",
}


@pytest.fixture(scope="module")
def said():
    found = subprocess.run([sys.executable, "-c", CODE], capture_output=True, text=True)
    assert found.returncode == 0, found.stderr
    return json.loads(found.stdout.splitlines()[-1])


@pytest.mark.parametrize("name", EXPECTED)
def test_a_bad_argument_is_explained(said, name):
    assert said[name] == EXPECTED[name]
