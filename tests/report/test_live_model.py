"""What pages show of a model: each answer compared with what the verbs say; mistakes in words, progress as it goes."""

import json

import pytest
import torch

import attnflow as af
from attnflow.models.subject import Loaded
from attnflow.report.live import model as live
from attnflow.report.live.model import MAX_CHARACTERS, ModelSession, explained
from tests.knowledge.test_layer_numbers import moe
from tests.models import ZOO, modular, tiny

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
    assert [entry["name"] for entry in reply["entries"][:3]] == [one.name for one in fired]
    assert ask(page, "trace", text=TEXT, position=2)["position"] == 2
    assert "position must be one of" in ask(page, "trace", text=TEXT, position=99)["error"]


@pytest.mark.parametrize("position", [7, 3])
def test_ablated_effects_stand_beside_the_direct_ones(page, network, position):
    heard = []
    reply = ask(page, "trace", heard, text=TEXT, position=position, ablate=4)
    assert "two forward passes, and one of 5 copies of the text" in [what for _, _, what in heard]
    target, gone = reply["answer"], network.model.layers
    with torch.no_grad():
        before = network(torch.tensor([IDS])).logits[0, position]
        for number, entry in enumerate(reply["entries"]):
            if number >= 4:
                assert (entry["ablated"], entry["lost"]) == (None, None)
                continue
            layer, place = divmod(entry["entry"], 48)
            column = gone[layer].mlp.down_proj.weight[:, place]
            kept = column.clone()
            column.zero_()
            after = network(torch.tensor([IDS])).logits[0, position]
            column.copy_(kept)
            logit, chance = (
                (each[int(target)] - each.mean(), each.softmax(-1)[int(target)]) for each in (before, after)
            )
            change = [float(a - b) for a, b in zip(logit, chance, strict=True)]
            assert [entry["ablated"], entry["lost"]] == pytest.approx(change, rel=2e-2, abs=1e-5)
    assert reply["chance"] == pytest.approx(float(before.softmax(-1)[int(target)]), rel=1e-3)
    assert "later layers react" in reply["note"]
    plain = ask(page, "trace", text=TEXT, position=position)
    assert [entry["effect"] for entry in plain["entries"]] == [entry["effect"] for entry in reply["entries"]]
    assert (plain["note"], {entry["ablated"] for entry in plain["entries"]}) == ("", {None})
    assert all(entry["promotes"] for entry in plain["entries"]), "at every token, not at the last alone"


def test_a_model_without_logits_is_traced_and_says_that_nothing_is_taken_out(page, network, monkeypatch):
    bare = network.model
    monkeypatch.setattr(live, "load_model", lambda name, tokenizer=True: Loaded(bare, None))
    reply = ask(page, "trace", text=TEXT, ablate=2)
    assert reply["entries"]
    assert reply["note"].startswith("No entry is taken out: ")
    assert {entry["ablated"] for entry in reply["entries"]} == {None}


def test_promoted_and_suppressed_tokens_are_those_of_weight_times_value(page, network):
    entries = ask(page, "trace", text=TEXT)["entries"]
    assert {entry["weight"] > 0 for entry in entries} == {True, False}
    unembedding = network.lm_head.weight * network.model.norm.weight
    for entry in entries:
        layer, place = divmod(entry["entry"], 48)
        change = unembedding @ network.model.layers[layer].mlp.down_proj.weight[:, place] * entry["weight"]
        assert entry["promotes"].split() == [str(token) for token in change.topk(5).indices.tolist()]
        assert entry["suppresses"].split() == [str(token) for token in (-change).topk(5).indices.tolist()]


def test_the_page_of_an_entry_is_that_of_knowledge(page, network):
    strongest = ask(page, "trace", text=TEXT)["entries"][0]
    reply = ask(page, "entry", text=TEXT)
    assert reply["entry"] == strongest["entry"], "the strongest of the last token, unless one is asked for"
    assert reply["weights"][reply["position"]] == strongest["weight"]

    reply = ask(page, "entry", text=TEXT, entry=60, position=2)
    found = af.knowledge.entry(network, 60, texts=[IDS])
    assert (reply["entry"], reply["layer"], reply["position"]) == (60, 1, 2)
    assert [one["token"] for one in reply["up"]] == [one.token for one in found.raised]
    assert [one["value"] for one in reply["down"]] == pytest.approx([one.strength for one in found.lowered], rel=1e-3)
    assert [one["entry"] for one in reply["near"]["value"]] == [one.entry for one in found.near_by_value]
    assert [one["cosine"] for one in reply["near"]["key"]] == pytest.approx(
        [one.cosine for one in found.near_by_key], rel=1e-3
    )
    found = ask(page, "passages", text=TEXT, entry=60)
    assert (found["entry"], found["read"]) == (60, 8)
    [example] = found["examples"]
    assert example["tokens"] == TEXT.split()
    assert abs(example["weights"][example["at"]]) == max(map(abs, example["weights"]))


def test_an_entry_that_several_layers_read_is_asked_for_with_its_layer(monkeypatch):
    network = modular(torch.float32)
    monkeypatch.setattr(live, "load_model", lambda name, tokenizer=True: Loaded(network, None))
    page = ModelSession("tiny")
    strongest = ask(page, "trace", text=TEXT)["entries"][0]
    place = {name: strongest[name] for name in ("entry", "layer", "head")}
    assert place.items() <= ask(page, "entry", text=TEXT).items()
    assert place.items() <= ask(page, "entry", text=TEXT, **place).items()
    assert "layers [0, 1] all read entry 5" in ask(page, "entry", text=TEXT, entry=5)["error"]


def test_entries_beside_experts_are_named_and_asked_for_by_the_models_layer(monkeypatch):
    network = moe()
    monkeypatch.setattr(live, "load_model", lambda name, tokenizer=True: Loaded(network, None))
    page = ModelSession("tiny")
    trace = ask(page, "trace", text=TEXT)
    assert trace["sides"] == [f"layer {n} {where}" for n in (0, 1) for where in ("experts", "shared_expert")]
    for one in trace["entries"]:
        assert one["name"] == f"L{one['layer']}N{one['neuron']}"
        shown = ask(page, "entry", text=TEXT, **{name: one[name] for name in ("entry", "layer", "head")})
        assert {name: shown[name] for name in ("name", "entry", "layer")}.items() <= one.items()
        assert all(near["name"].startswith(f"L{near['layer']}N") for near in shown["near"]["value"])


def test_an_entry_taken_out_changes_the_next_token_as_a_zeroed_column_does(page, network):
    reply = ask(page, "without", text=TEXT, entry=60, position=4)
    with torch.no_grad():
        before = network(torch.tensor([IDS])).logits[0, 4].softmax(-1)
        network.model.layers[1].mlp.down_proj.weight[:, 12] = 0
        after = network(torch.tensor([IDS])).logits[0, 4].softmax(-1)
    for row in reply["rows"]:
        token = int(row["token"])
        assert row["before"] == pytest.approx(float(before[token]), rel=1e-3)
        assert row["after"] == pytest.approx(float(after[token]), rel=1e-3)
        assert row["change"] == pytest.approx(float(after[token] - before[token]), rel=1e-2, abs=1e-6)
    assert reply["kl"] == pytest.approx(float((before * (before / after).log()).sum()), rel=1e-2)
    assert reply["changed"] == (int(before.argmax()) != int(after.argmax()))


def test_the_terms_of_a_score_are_those_of_geometry_and_add_up_to_it(page, network):
    reply = ask(page, "why", text=TEXT, layer=1, head=2, query=5, key=3)
    found = af.geometry.attribute(network, IDS, 1, head=2, query=5)
    at = found.keys.index(3)
    assert (reply["query"], reply["key"], reply["head"], reply["heads"]) == (5, 3, 2, [0, 1, 2, 3])
    assert reply["weights"][2] == pytest.approx(found.weights.tolist(), rel=1e-3, abs=1e-6)
    largest = reply["terms"][0]
    places = tuple(list(map(str, found.components)).index(largest[side]) for side in ("query", "key"))
    assert largest["raw"] == pytest.approx(float(found.raw[at][places]), rel=1e-3)
    assert abs(largest["centred"]) == pytest.approx(float(found.centred[at].abs().max()), rel=1e-3)
    assert reply["sum"]["raw"] == pytest.approx(float(found.scores[at]), rel=1e-3)
    for name in ("raw", "centred"):
        parts = [each[name] for each in [*reply["terms"], reply["rest"], *reply["constants"]]]
        assert sum(parts) == pytest.approx(reply["sum"][name], rel=2e-3, abs=2e-3)
    assert reply["verdict"].startswith("In layer 1 head 2, “10” (5) gives ")
    assert " of its attention to “8” (3): the score is " in reply["verdict"]
    assert reply["remark"] == ""
    first = ask(page, "why", text=TEXT, layer=1, head=2, query=0)
    assert first["remark"] == "The query can attend to no other token, so that this weight is 1 whatever the score."
    sizes = [abs(each["raw"]) for each in first["terms"]]
    assert sizes == sorted(sizes, reverse=True)
    chosen = ask(page, "why", text=TEXT, layer=1, head=2)
    assert (chosen["query"], chosen["key"]) == (7, max(range(8), key=lambda key: chosen["weights"][2][key]))


def test_a_model_without_entries_says_so_in_a_sentence(monkeypatch):
    bare = tiny("Mamba2", torch.float32)
    monkeypatch.setattr(live, "load_model", lambda name, tokenizer=True: Loaded(bare, None))
    page = ModelSession("tiny")
    for op in ("trace", "entry", "without"):
        error = ask(page, op, text=TEXT, entry=3)["error"]
        assert error.startswith("Mamba2ForCausalLM has no feed-forward layers that are known")


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
        ("trace", {"text": TEXT, "ablate": 17}, "ablate must be at most 16, got 17"),
        ("trace", {"text": TEXT, "ablate": True}, "ablate: expected an integer"),
        ("entry", {"text": TEXT, "entry": 96}, "no entry 96: the 96 ids go from 0 to 95"),
        ("entry", {"text": TEXT, "entry": -1}, "id must be at least 0, got -1"),
        ("entry", {"text": TEXT, "entry": "first"}, "entry: expected an integer"),
        ("entry", {"text": TEXT, "position": 8}, "position must be one of"),
        ("entry", {"text": "5 " * MAX_CHARACTERS, "entry": 3}, "at most 4,000 characters"),
        ("passages", {"text": TEXT, "entry": 96}, "no entry 96"),
        ("without", {"text": TEXT}, "entry: expected an integer"),
        ("without", {"text": TEXT, "entry": 3, "position": 8}, "position must be"),
        ("why", {"text": TEXT, "layer": 0, "head": 4}, "layer 0 has heads 0 to 3, got head 4"),
        ("why", {"text": TEXT, "layer": 2, "head": 0}, "layer"),
        ("why", {"text": TEXT, "layer": 0, "head": ""}, "head: expected an integer"),
        ("why", {"text": TEXT, "layer": 0, "head": 0, "query": 8}, "query"),
        ("why", {"text": TEXT, "layer": 0, "head": 0, "query": 2, "key": 8}, "has keys 0 to"),
        ("why", {"text": "5 " * MAX_CHARACTERS, "layer": 0, "head": 0}, "at most 4,000 characters"),
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


def test_constants_of_a_capped_score_are_centred_as_the_library_does():
    """A cap bends q.k, not what is added after it: here the bias of a model whose scores are capped."""
    model = tiny("Gemma2", torch.float32)
    with af.bias.attach(model, af.bias.GuidanceConfig(hidden_dim=8, init="kaiming")):
        found = af.geometry.attribute(model, [5, 6, 7, 8], layer=0)
    reply = explained(found, 1, None, list("abcd"))
    at = found.keys.index(reply["key"])
    listed = {one["name"]: one["centred"] for one in reply["constants"]}
    assert listed["attached bias"] == pytest.approx(float(found.centred_constants["attached bias"][1, at]), rel=1e-3)
    assert (found.slope[1] < 1).any()
    assert "biases" not in listed  # its projections have none
    assert sum(one["centred"] for one in reply["terms"]) + reply["rest"]["centred"] + sum(listed.values()) == (
        pytest.approx(reply["sum"]["centred"], abs=1e-3)
    )
