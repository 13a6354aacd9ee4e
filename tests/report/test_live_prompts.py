"""What a page shows of a prompt, compared with what `af.explain` says of it."""

import json

import pytest
import torch

import attnflow as af
from attnflow.models.subject import Loaded
from attnflow.report.live import model as live
from attnflow.report.live.model import ModelSession
from tests.models import ZOO

IDS = [5, 6, 7, 8, 9, 10]
TEXT = " ".join(map(str, IDS))
PLACE = ("layer", "head", "query", "key", "half")


@pytest.fixture(scope="module")
def network():
    return ZOO["Llama"].build().float()


@pytest.fixture
def page(monkeypatch, network):
    monkeypatch.setattr(live, "load_model", lambda name, tokenizer=True: Loaded(network, None))
    return ModelSession("tiny")


def ask(page, op, **message):
    reply = page.handle({"id": 3, "op": op, "text": TEXT, **message}, lambda *_: None)
    json.dumps(reply, allow_nan=False)
    return reply


def test_the_likely_tokens_are_those_of_the_model(page, network):
    reply = ask(page, "next")
    chances = network(torch.tensor([IDS])).logits[0, -1].detach().softmax(0)
    assert [one["id"] for one in reply["likely"]] == chances.topk(6).indices.tolist()
    assert reply["likely"][0]["chance"] == pytest.approx(float(chances.max()), rel=1e-3)
    assert reply["tokens"] == list(map(str, IDS))
    assert ask(page, "next", position=2)["likely"] != reply["likely"]


def test_a_flow_is_the_explanation_of_the_answer(page, network):
    reply = ask(page, "explain", answer=3, against="4", position=4)
    found = af.explain.answer(network, IDS, 3, 4, 4)
    assert (reply["answer_id"], reply["position"], reply["against"]) == (3, 4, ["4"])
    assert reply["value"] == pytest.approx(found.value, rel=1e-3)
    assert len(reply["edges"]) == len(found.edges)
    for shown, edge in zip(reply["edges"][:9], found.edges, strict=False):
        assert shown["name"] == edge.name
        assert shown["carried"] == pytest.approx(edge.carried, rel=1e-3)
    assert [entry["name"] for entry in reply["entries"]] == [entry.name for entry in found.entries[:120]]
    assert reply["leaks"] == []
    assert reply["reach"] == list(found.reach)


def test_a_line_asks_why_this_key_and_not_that_one(page, network):
    line = next(edge for edge in ask(page, "explain")["edges"] if edge["query"] == 5)
    reply = ask(page, "edge", **{name: line[name] for name in PLACE})
    with af.explain.reading(network, IDS) as reading:
        found = reading.answer()
        edge = next(one for one in found.edges if (one.layer, one.head, one.query, one.key) == tuple(
            line[name] for name in PLACE[:4]))  # fmt: skip
        why = reading.why(edge)
    assert (reply["why"]["key"], reply["why"]["other"]) == why.keys
    total = float(why.scores[0] - why.scores[1])
    assert reply["why"]["total"] == pytest.approx(total, rel=1e-2, abs=1e-3)
    parts = sum(row["value"] for row in reply["why"]["written"]) + reply["why"]["rest"]["value"]
    assert parts + reply["why"]["constant"] == pytest.approx(total, rel=1e-2, abs=1e-3)
    row = torch.tensor(reply["weights"][line["head"]])
    assert float(row.sum()) == pytest.approx(1, abs=1e-2)
    assert float(row[reply["keys"].index(line["key"])]) == pytest.approx(line["weight"], abs=1e-3)
    assert reply["tile"]["num_keys"] == len(IDS)
    other = next(key for key in reply["keys"] if key not in why.keys)
    assert ask(page, "edge", other=other, **{name: line[name] for name in PLACE})["why"]["other"] == other


def test_what_is_taken_out_is_measured_and_an_entry_says_what_made_it_fire(page, network):
    flow = ask(page, "explain", answer=3)
    line = {name: flow["edges"][0][name] for name in PLACE}
    entry = {name: flow["entries"][0][name] for name in ("layer", "entry", "position", "half")}
    reply = ask(page, "take_out", answer=3, items=[line, entry])
    with af.explain.reading(network, IDS) as reading:
        found = reading.answer(3)
        removal = reading.remove([found.edges[0], found.entries[0]])
        made = reading.entry(found.entries[0])
    assert reply["alone"] == pytest.approx(removal.alone, rel=1e-2, abs=1e-4)
    assert reply["together"] == pytest.approx(removal.together, rel=1e-2, abs=1e-4)
    fired = ask(page, "fired", answer=3, **entry)
    assert fired["score"] == pytest.approx(made.value, rel=1e-3)
    assert len(fired["sources"]) == 8


@pytest.mark.parametrize(
    ("op", "message", "error"),
    [
        ("explain", {"answer": 1 << 20}, "answer"),
        ("explain", {"answer": 3, "against": 3}, "compared with itself"),
        ("explain", {"position": 99}, "position"),
        ("explain", {"text": "5 " * 3000}, "at most 4,000 characters"),
        ("why", {"text": "5 " * 201, "layer": 0}, "at most 200 tokens here, got 201"),
        ("edge", {"layer": 0, "head": 0, "query": 99, "key": 0}, "positions of the text"),
        ("edge", {"layer": 0}, "head"),
        ("fired", {"layer": 0, "entry": 10**6, "position": 0}, "not among the strongest entries"),
        ("take_out", {"items": 3}, "items"),
    ],
)
def test_mistakes_are_answered_in_words(page, op, message, error):
    reply = ask(page, op, **message)
    assert not reply["ok"]
    assert error in reply["error"]


def test_the_default_head_is_the_telling_one(page, network):
    reply = ask(page, "why", layer=1)
    assert reply["head"] == af.geometry.reading(network, IDS).telling_head(1)
    assert ask(page, "why", layer=1, head=2)["head"] == 2


def test_an_encoder_decoder_reads_the_text_in_one_half_and_has_said_the_rest_in_the_other(monkeypatch):
    network = ZOO["T5"].make(decoder_start_token_id=2).float()
    monkeypatch.setattr(live, "load_model", lambda name, tokenizer=True: Loaded(network, None))
    page = ModelSession("tiny")
    assert ask(page, "model")["halves"]
    halves = {"input_ids": torch.tensor([IDS]), "decoder_input_ids": torch.tensor([[2, 9, 4]])}
    chances = network(**halves).logits[0, -1].detach().softmax(0)
    assert [one["id"] for one in ask(page, "next", said="9 4")["likely"]] == chances.topk(6).indices.tolist()
    reply = ask(page, "explain", said="9 4", answer=3)
    assert (len(reply["encoder_tokens"]), len(reply["tokens"]), reply["position"]) == (6, 3, 2)
    assert reply["value"] == pytest.approx(af.explain.answer(network, halves, 3).value, rel=1e-3)
    assert ask(page, "explain", answer=3)["tokens"] == ["2"], "the decoder begins with its own token"
    line = next(edge for edge in reply["edges"] if edge["half"] == "cross")
    place = {name: line[name] for name in PLACE}
    assert ask(page, "edge", said="9 4", answer=3, **place)["weights"][line["head"]][line["key"]] == line["weight"]
    assert ask(page, "why", said="9 4", layer=1)["tokens"] == ["2", "9", "4"]
    assert len(ask(page, "audit")["tokens"]) == 11, "the audit's own decoder tokens follow those of the encoder"
    monkeypatch.setattr(network.config, "decoder_start_token_id", None)
    refused = page.handle({"op": "next", "text": TEXT}, lambda *_: None)
    assert "no decoder_start_token_id" in refused["error"]
