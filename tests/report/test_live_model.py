"""What pages show of a model: each answer compared with what the verbs say; mistakes in words, progress as it goes."""

import json

import pytest

import attnflow as af
from attnflow.models.loaded import Loaded
from attnflow.report.live import model as live
from attnflow.report.live.model import MAX_CHARACTERS, ModelSession
from tests.models import ZOO

TEXT = "5 6 7 8 9 10 11 12"
IDS = [5, 6, 7, 8, 9, 10, 11, 12]


def llama():
    return ZOO["Llama"].build().float()


@pytest.fixture
def network():
    return llama()


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


def test_an_audit_names_the_layer_and_the_module_of_a_leak(page, network):
    heard = []
    reply = ask(page, "audit", heard, text=TEXT)
    assert (reply["verdict"], reply["total"], reply["violations"]) == ("clean", 0, [])
    assert (reply["strips"][0]["stack"], reply["tokens"]) == ("model.layers", TEXT.split())
    assert {cell for row in reply["strips"][0]["rows"] for cell in row["cells"]} == {"clean"}
    counted = [(done, total) for done, total, _ in heard if total]
    assert counted
    assert all(0 <= done <= total for done, total in counted)

    network.model.layers[1].mlp.register_forward_hook(lambda _, __, out: out + out.roll(-1, dims=1))
    reply = ask(page, "audit", text=TEXT)
    first, layers = reply["violations"][0], reply["strips"][0]
    assert (reply["verdict"], first["layer"], first["module"]) == ("leak", 1, "model.layers.1.mlp")
    named = {(row["name"], *each) for row in layers["rows"] for each in zip(layers["names"], row["cells"], strict=True)}
    assert [(row, name) for row, name, status in named if status == "breaks"] == [("layer 1", "mlp")]


def test_the_geometry_is_that_of_score(page, network):
    heard = []
    [stack] = ask(page, "geometry", heard)["stacks"]
    full = [row for row in af.geometry.score(network) if row.head == "all"]
    assert [point["layer"] for point in stack["points"]] == [0, 1]
    for point, row in zip(stack["points"], full, strict=True):
        assert point["symmetry"] == pytest.approx(row.symmetry, rel=1e-3)
        assert point["directionality"] == pytest.approx(row.directionality, rel=1e-3, abs=1e-3)
    assert [len(row) for row in stack["heads"]["symmetry"]] == [4, 4]
    assert stack["chance"]["symmetry"] == pytest.approx((-1.8 / 32, 3.8 / 32))
    assert [done for done, _, _ in heard if done] == [1, 2]


def test_a_saved_bias_is_attached_and_shown_by_layer_and_by_query(page, network, tmp_path, monkeypatch):
    af.bias.attach(network, af.bias.GuidanceConfig(hidden_dim=8, init="kaiming", layers=[0, 1]))
    af.bias.save(network, tmp_path)
    bare = llama()
    monkeypatch.setattr(live, "load_model", lambda name, tokenizer=True: Loaded(bare, None))
    page = ModelSession("tiny", str(tmp_path))
    assert ask(page, "model")["bias"]
    shown = ask(page, "bias", text=TEXT)
    assert [each["layer"] for each in shown["layers"]] == [0, 1]
    assert [len(row) for row in shown["values"]] == [8, 8]
    expected = af.bias.capture(network, IDS).values("bias", 1)[-1].tolist()
    assert shown["values"][1] == pytest.approx(expected, rel=1e-2, abs=1e-4)
    one = ask(page, "bias", text=TEXT, layer=1)
    assert len(one["values"]) == 8
    assert one["values"][0][1:] == [None] * 7, "the mask forbids them"
    assert "layer must be one of" in ask(page, "bias", text=TEXT, layer=7)["error"]


def test_the_trace_is_that_of_knowledge(page, network):
    reply = ask(page, "trace", text=TEXT)
    assert (reply["position"], len(reply["values"]), len(reply["values"][0])) == (7, 2, 8)
    fired = af.knowledge.trace(network, IDS).fired(-1, count=3)
    assert [entry["name"] for entry in reply["entries"][:3]] == [f"{one.layer} · {one.entry}" for one in fired]
    assert ask(page, "trace", text=TEXT, position=2)["position"] == 2
    assert "position must be one of" in ask(page, "trace", text=TEXT, position=99)["error"]


@pytest.mark.parametrize(
    ("op", "message", "error"),
    [
        ("eval", {}, "unknown operation"),
        ("__init__", {}, "unknown operation"),
        ("audit", {"text": "5 " * MAX_CHARACTERS}, "at most 4,000 characters"),
        ("audit", {"text": "5"}, "at least 2 tokens"),
        ("audit", {"text": "5 99"}, "input_ids must lie in [0, 50), the vocabulary; got 5 to 99"),
        ("audit", {"text": "1" * 3000}, "no tokenizer"),
        ("bias", {"text": TEXT}, "bias"),
        ("trace", {"text": TEXT, "position": "0"}, "position: expected an integer"),
    ],
)
def test_what_cannot_be_asked_is_refused_in_words(page, op, message, error):
    reply = ask(page, op, **message)
    assert not reply["ok"]
    assert error in reply["error"]


def test_a_model_that_cannot_be_read_is_an_answer_and_is_read_again(monkeypatch, network):
    page = ModelSession("/no/such/folder")
    assert "no/such/folder" in ask(page, "model")["error"]
    monkeypatch.setattr(live, "load_model", lambda name, tokenizer=True: Loaded(network, None))
    assert ask(page, "model")["ok"]
