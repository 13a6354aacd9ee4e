"""What pages show of a model: each answer compared with what the verbs say; mistakes in words, progress as it goes."""

import json
import math

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

import attnflow as af
from attnflow.models.loaded import Loaded
from attnflow.report.live import model as live
from attnflow.report.live.model import MAX_CHARACTERS, ModelSession

TEXT = "5 6 7 8 9 10 11 12"
IDS = [5, 6, 7, 8, 9, 10, 11, 12]


def llama():
    with torch.random.fork_rng():
        torch.manual_seed(0)
        shape = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4}
        return LlamaForCausalLM(LlamaConfig(vocab_size=32, num_key_value_heads=2, initializer_range=0.3, **shape))


@pytest.fixture
def network():
    return llama().eval()


@pytest.fixture
def page(monkeypatch, network):
    monkeypatch.setattr(live, "load_model", lambda name, tokenizer=True: Loaded(network, None))
    return ModelSession("tiny")


def ask(page, op, heard=None, **message):
    """A reply that must be plain data without NaN, and its progress."""
    reply = page.handle({"id": 3, "op": op, **message}, lambda *each: heard is not None and heard.append(each))
    assert reply["id"] == 3
    json.dumps(reply, allow_nan=False)
    return reply


def test_an_audit_that_is_clean(page, network):
    heard = []
    reply = ask(page, "audit", heard, text=TEXT)
    assert (reply["verdict"], reply["total"], reply["violations"]) == ("clean", 0, [])
    layers = reply["strips"][0]
    assert layers["stack"] == "model.layers"
    assert [row["name"] for row in layers["rows"]] == ["layers 0–1"] or len(layers["rows"]) == 1
    assert set(layers["rows"][0]["cells"]) == {"clean"}
    assert reply["tokens"] == TEXT.split()
    counted = [(done, total) for done, total, _ in heard if total]
    assert counted
    assert all(0 <= done <= total for done, total in counted)


def test_an_audit_that_finds_a_leak_names_its_layer_and_its_module(page, network):
    network.model.layers[1].mlp.register_forward_hook(lambda _, __, out: out + out.roll(-1, dims=1))
    reply = ask(page, "audit", text=TEXT)
    first = reply["violations"][0]
    assert (reply["verdict"], first["layer"], first["module"]) == ("leak", 1, "model.layers.1.mlp")
    layers = reply["strips"][0]
    broken = [
        (row["name"], layers["names"][i])
        for row in layers["rows"]
        for i, status in enumerate(row["cells"])
        if status == "breaks"
    ]
    assert broken == [("layer 1", "mlp")]


def test_the_geometry_is_that_of_score(page, network):
    heard = []
    reply = ask(page, "geometry", heard)
    scores = af.geometry.score(network)
    [stack] = reply["stacks"]
    full = [row for row in scores if row.head == "all"]
    assert [point["layer"] for point in stack["points"]] == [0, 1]
    for point, row in zip(stack["points"], full, strict=True):
        assert math.isclose(point["symmetry"], row.symmetry, rel_tol=1e-3)
        assert math.isclose(point["directionality"], row.directionality, rel_tol=1e-3, abs_tol=1e-3)
    assert [len(row) for row in stack["heads"]["symmetry"]] == [4, 4]
    assert stack["chance"]["symmetry"] == (-1.8 / 32, 3.8 / 32)
    assert [done for done, _, _ in heard if done] == [1, 2]


def test_a_bias_is_shown_by_layer_and_by_query(page, network):
    af.bias.attach(network, af.bias.GuidanceConfig(hidden_dim=8, init="kaiming", layers=[0, 1]))
    assert ask(page, "model")["bias"]
    shown = ask(page, "bias", text=TEXT)
    bias_map = af.bias.capture(network, IDS)
    assert [each["layer"] for each in shown["layers"]] == [0, 1]
    assert [len(row) for row in shown["values"]] == [8, 8]
    expected = bias_map.values("bias", 1)[-1].tolist()
    assert all(
        math.isclose(a, b, rel_tol=1e-2, abs_tol=1e-4) for a, b in zip(shown["values"][1], expected, strict=True)
    )
    one = ask(page, "bias", text=TEXT, layer=1)
    assert len(one["values"]) == 8
    assert one["values"][0][1:] == [None] * 7, "the mask forbids them"
    assert "layer must be one of" in ask(page, "bias", text=TEXT, layer=7)["error"]


def test_a_saved_bias_is_attached(monkeypatch, network, tmp_path):
    af.bias.attach(network, af.bias.GuidanceConfig(hidden_dim=8, init="kaiming", layers=[0]))
    af.bias.save(network, tmp_path)
    bare = llama().eval()
    monkeypatch.setattr(live, "load_model", lambda name, tokenizer=True: Loaded(bare, None))
    page = ModelSession("tiny", str(tmp_path))
    assert ask(page, "model")["bias"]
    assert [each["layer"] for each in ask(page, "bias", text=TEXT)["layers"]] == [0]


def test_the_trace_is_that_of_knowledge(page, network):
    reply = ask(page, "trace", text=TEXT)
    trace = af.knowledge.trace(network, IDS)
    assert (reply["position"], len(reply["values"]), len(reply["values"][0])) == (7, 2, 8)
    fired = trace.fired(-1, count=3)
    assert [entry["name"] for entry in reply["entries"][:3]] == [f"{one.layer} · {one.entry}" for one in fired]
    assert ask(page, "trace", text=TEXT, position=2)["position"] == 2
    assert "position must be one of" in ask(page, "trace", text=TEXT, position=99)["error"]


@pytest.mark.parametrize(
    ("message", "error"),
    [
        ({"op": "model", "model": "../../etc/passwd"}, None),
        ({"op": "eval"}, "unknown operation"),
        ({"op": "__init__"}, "unknown operation"),
        ({"op": "audit", "text": ["5"]}, "text must be text"),
        ({"op": "audit", "text": "5 " * MAX_CHARACTERS}, "at most 4,000 characters"),
        ({"op": "audit", "text": "5"}, "at least 2 tokens"),
        ({"op": "audit", "text": "5 99"}, "input_ids must lie in [0, 32), the vocabulary; got 5 to 99"),
        ({"op": "audit", "text": "1" * 3000}, "no tokenizer"),
        ({"op": "trace", "text": TEXT, "position": "0"}, "position: expected an integer"),
    ],
    ids=lambda value: None if isinstance(value, str) else str(value)[:50],
)
def test_what_cannot_be_asked_is_refused_in_words(page, message, error):
    reply = page.handle(message, lambda *_: None)
    if error is None:
        assert reply["model"] == "tiny", "a page names no model"
    else:
        assert not reply["ok"]
        assert error in reply["error"]


def test_a_model_that_cannot_be_read_is_an_answer_and_is_read_again(monkeypatch, network):
    calls = iter([OSError("no such file"), None])

    def load(name, tokenizer=True):
        error = next(calls)
        if error:
            raise error
        return Loaded(network, None)

    monkeypatch.setattr(live, "load_model", load)
    page = ModelSession("tiny")
    assert ask(page, "model")["error"] == "no such file"
    assert ask(page, "model")["ok"]
