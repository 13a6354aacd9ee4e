"""The probe of encoders sees a planted link, its language is what it says, and symmetry is measured as it is proved."""

from random import Random

import pytest
import torch
from torch import nn

import attnflow as af
from attnflow.bias import CustomConfig
from experiments.encoder_probe.grammar import FAR, KINDS, LENGTH, MASK, NEAR, NUMBER, batch, draw
from experiments.encoder_probe.links import links
from experiments.encoder_probe.recipe import EXPERIMENT, _links, _symmetry
from experiments.encoder_probe.study import Probe, fresh
from experiments.encoder_probe.symmetry import attention_scores, shares, untrained
from experiments.runner.statistics import Interval


class Planted(nn.Module):
    """The same bias, whatever is asked."""

    def __init__(self, table):
        super().__init__()
        self.table = table

    def forward(self, query, key):
        return self.table[None, None]


def asks_for(kind, word, candidates):
    """What a head or a distractor asks for, by rules of its own: a plural s, a man's name, the name of a cause."""
    if kind == "effect":
        return word.split(" cause")[0]
    return candidates[word.endswith("s") if kind == "verb" else word in ("Adam", "Carl", "Hugo", "Mark")]


@pytest.fixture(scope="module", name="encoder")
def _encoder():
    return fresh(EXPERIMENT.miniature(Probe()), 0).eval()


@pytest.mark.parametrize("kind", KINDS)
def test_what_is_asked_for_follows_from_the_head_alone(kind):
    chance = Random(0)
    for number in range(400):
        far = number % 2 == 1
        one = draw(kind, chance, FAR if far else NEAR, opposed=True)
        answer, head = one.words[one.dependent], one.words[one.head]
        others = [one.words[place] for place in one.distractors]
        assert len(one.words) == LENGTH
        assert len(others) in (FAR if far else NEAR)
        assert answer in one.candidates
        assert asks_for(kind, head, one.candidates) == answer
        assert all(asks_for(kind, other, one.candidates) != answer for other in others)
        marks = {one.words[one.head - 1], one.words[one.head + 1]}
        if kind == "verb":
            assert one.words[one.head - 1] not in ("near", "behind")
            assert any(one.head < place < one.dependent for place in one.distractors)
        else:
            assert marks & ({"about"} if kind == "pronoun" else {"because", "so"})


def test_a_batch_follows_from_seed_and_place_and_masks_the_dependent():
    words, shown, asked = batch(3, 5, 256, 0.05, 0.9)
    assert all(
        torch.equal(one, other) for one, other in zip((words, shown, asked), batch(3, 5, 256, 0.05, 0.9), strict=True)
    )
    assert not torch.equal(words, batch(3, 6, 256, 0.05, 0.9)[0])
    assert torch.equal(words[~asked], shown[~asked])
    assert 0.7 < float((shown[asked] == NUMBER[MASK]).double().mean()) < 0.9
    assert 1.4 < float(asked.sum(dim=1).double().mean()) < 2.0  # 0.9 + 0.05 * 15, and 0.05 of the rest


@pytest.mark.parametrize(
    ("plant", "points", "one_way"), [("forth", 1.0, 1.0), ("back", 0.5, 0.0), ("astray", 0.0, 0.0)]
)
def test_a_planted_bias_is_seen(encoder, plant, points, one_way):
    """The positive control: 5 from the dependent to its head, back, or to the distractors with 1 back."""
    one = draw("verb", Random(1))
    table = torch.zeros(LENGTH, LENGTH)
    places = {
        "forth": (one.dependent, one.head),
        "back": (one.head, one.dependent),
        "astray": (one.dependent, list(one.distractors)),
    }
    table[places[plant]] = 5.0
    if plant == "astray":
        table[one.head, one.dependent] = 1.0
    with af.bias.attach(encoder, CustomConfig(lambda _: Planted(table), layers="every")):
        found = links(encoder, [one])
    assert found.keys() == {f"{reading} {what}" for reading in ("masked", "visible") for what in ("bias", "scores")}
    for reading in ("masked", "visible"):
        bias = found[f"{reading} bias"]
        assert bias["points"] == [points] * 2
        assert bias["one way"] == [one_way] * 2
        assert bias["by"] == pytest.approx([{"forth": 5.0, "back": 0.0, "astray": -5.0}[plant]] * 2)
        if plant == "forth":  # less the mean of its row
            assert bias["one way by"] == pytest.approx([5.0 - 5.0 / LENGTH] * 2)


def test_scores_of_an_encoder_are_those_it_attends_by(encoder):
    """And what `links` reads from weights are the same scores, up to a number for each row."""
    one = draw("pronoun", Random(2))
    ids = torch.tensor([one.tokens])
    bert = encoder.bert
    bert.set_attn_implementation("eager")
    scores = attention_scores(bert, {"input_ids": ids})
    weights = torch.stack(bert(input_ids=ids, output_attentions=True).attentions)[:, 0]
    torch.testing.assert_close(scores.softmax(dim=-1).float(), weights, atol=1e-6, rtol=1e-5)
    found = links(encoder, [one])["visible scores"]["by"]
    mean = scores.mean(dim=1)
    rest = mean[:, one.dependent, list(one.distractors)].mean(dim=-1)
    assert found == pytest.approx((mean[:, one.dependent, one.head] - rest).tolist(), abs=1e-4)


def test_symmetric_scores_do_not_make_symmetric_weights():
    """daa, sec. 7, D27: softmax divides each row by its own sum; and scores are symmetric only if W_q^T W_k is."""
    bert = fresh(EXPERIMENT.miniature(Probe()), 0).bert.eval()
    ids = torch.arange(1, 13)[None]
    same = attention_scores(untrained(bert, symmetric=True), {"input_ids": ids})
    seen = shares(same)
    assert seen["scores"].max() < 1e-12
    assert seen["double-centred"].max() < 1e-12
    assert seen["weights"].min() > 1e-9
    by_hand = torch.tensor([[0.0, 1.0], [1.0, 5.0]]).softmax(dim=-1)
    assert by_hand.flatten().tolist() == pytest.approx([0.2689, 0.7311, 0.0180, 0.9820], abs=1e-4)
    plain = shares(attention_scores(untrained(bert, symmetric=False), {"input_ids": ids}))
    assert 0.3 < float(plain["double-centred"].mean()) < 0.7


def test_numbers_added_to_rows_do_not_hide_symmetry_from_the_kindest_reading():
    generator = torch.Generator().manual_seed(0)
    table = torch.randn(7, 7, generator=generator, dtype=torch.float64)
    shifted = table + table.T + 10 * torch.randn(7, 1, generator=generator, dtype=torch.float64)
    found = shares(shifted)
    assert found["scores"] > 0.3
    assert found["double-centred"] < 1e-20
    assert float(shares(table - table.T)["scores"]) == pytest.approx(1.0)


def judged(points, gain, plain=0.1, way=0.1):
    found = {"B, effect and cause, one way: less half": way}
    for kind, head in (("verb", "subject"), ("pronoun", "antecedent"), ("effect", "cause")):
        found |= {f"B, {kind} to {head}: less {other}": points for other in ("half", "random")}
        found[f"scores of plain, {kind} to {head}: less half"] = plain
    found |= {f"right, far: guidance less {arm}": gain for arm in ("plain", "key", "dense")}
    (one,) = _links({name: Interval(mean, mean - 0.05, mean + 0.05) for name, mean in found.items()})
    return one.verdict, one.tags


def test_links_are_judged_by_intervals():
    assert judged(0.2, 0.1, plain=0.0) == ("confirmed", ())
    assert judged(0.2, 0.1) == ("confirmed", ("empty",))
    assert judged(0.2, 0.0) == ("not confirmed", ())
    assert judged(0.2, 0.1, way=0.0) == ("not confirmed", ())
    assert judged(0.0, -0.1, way=0.0) == ("refuted", ())
    assert judged(0.0, 0.0, way=0.0) == ("not confirmed", ())


@pytest.mark.parametrize(
    ("low", "high", "verdict"), [(0.2, 0.4, "refuted"), (0.0, 0.005, "confirmed"), (0.01, 0.3, "not confirmed")]
)
def test_symmetry_is_judged_by_quarters_of_the_heads(low, high, verdict):
    numbers = {name: [(low + high) / 2, low, high, low] for name in ("scores", "double-centred", "weights")}
    content = {"encoder": "minilm", "sentences": 2, "heads": {name: {"words": numbers} for name in ("real", "random")}}
    (one,) = _symmetry(content)
    assert (one.claim, one.verdict) == ("D27", verdict)
    assert _symmetry({**content, "encoder": "untrained"}) == []
