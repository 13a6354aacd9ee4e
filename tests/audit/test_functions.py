"""Functions of token ids: whatever shape the scores have, a leak planted at one pair is found at that pair."""

import copy
import functools

import pytest
import torch
from torch import nn

import attnflow as af
from attnflow.audit import check, check_scores
from tests.leaks.scorers import remembering

N, VOCABULARY = 12, 40
IDS = torch.randint(VOCABULARY, (2, N), generator=torch.Generator().manual_seed(1))
TABLE = torch.randn(VOCABULARY, VOCABULARY, generator=torch.Generator().manual_seed(2), dtype=torch.float64)


def bigram(ids, target=None, source=None):
    """log p(token | token before) for the labels 1 to n - 1, with a leak from `source` to the score of `target`."""
    scores = TABLE.log_softmax(-1)[ids[..., :-1], ids[..., 1:]]
    if target is not None:
        scores[..., target - 1] -= 0.1 * ids[..., source] / VOCABULARY
    return scores


def padded(scores, side):
    zero = torch.zeros_like(scores[..., :1])
    return torch.cat([zero, scores] if side == "first" else [scores, zero], -1)


FORMS = {
    "labels": (lambda f: f, IDS),
    "labels after a zero": (lambda f: lambda ids: padded(f(ids), "first"), IDS),
    "labels before a zero": (lambda f: lambda ids: padded(f(ids), "last"), IDS),
    "flat, before zeros": (lambda f: lambda ids: padded(f(ids), "last").flatten(), IDS),
    "flat": (lambda f: lambda ids: f(ids).flatten(), IDS),
    "numpy": (lambda f: lambda ids: f(ids).numpy(), IDS),
    "lists": (lambda f: lambda ids: f(ids).tolist(), IDS),
    "a list of tensors": (lambda f: lambda ids: list(f(ids).unbind(-1)), IDS[0]),
    "one sequence": (lambda f: f, IDS[0]),
    "beside a mean": (lambda f: lambda ids: {"loss": f(ids).mean(), "scores": f(ids)}, IDS),
    "inputs and targets": (
        lambda f: lambda x, y: f(torch.cat([x, y[:, -1:]], 1)),
        {"x": IDS[:, :-1], "y": IDS[:, 1:]},
    ),
    "ids and labels": (
        lambda f: lambda input_ids, labels: f(labels.where(labels >= 0, input_ids)),
        {"input_ids": IDS, "labels": IDS.where(torch.arange(N) > 2, -100)},
    ),
}


@pytest.mark.parametrize("name", FORMS)
def test_a_planted_pair_is_found(name):
    form, inputs = FORMS[name]
    assert check(form(bigram), inputs).ok
    (found,) = check(form(functools.partial(bigram, target=5, source=8)), inputs).violations
    assert (found.kind, found.target, found.source) == ("order", 5, 8)


def test_the_numbers_are_those_of_the_function():
    leaky = functools.partial(bigram, target=4, source=9)
    (found,) = check(leaky, IDS).violations
    assert [leaky(torch.tensor(ids))[found.target - 1].item() for ids in found.tokens] == list(found.values)
    assert found.tokens[0][:9] == found.tokens[1][:9]


class Scorer:
    """An object that scores, with the state of a function that it holds."""

    def __init__(self, score):
        self.score = score

    def __call__(self, ids):
        return self.score(ids)


@pytest.mark.parametrize("wrapped", [Scorer, lambda f: Scorer(f).__call__, lambda f: functools.partial(f)])
def test_what_is_remembered_is_found(wrapped):
    for kind in ("first", "growing"):
        assert [v.kind for v in check(wrapped(remembering(kind)), IDS).violations] == ["state"]
    report = check(wrapped(remembering("beginning")), IDS)
    assert report.verdict == "nothing tested"
    assert "begins alike" in str(report)


def test_a_procedure_that_trains_leaves_the_model_and_its_mode_alone():
    model = nn.Sequential(nn.Embedding(VOCABULARY, 8), nn.Dropout(0.0), nn.Linear(8, VOCABULARY)).train()
    before = copy.deepcopy(model.state_dict())

    def trains(ids, late):
        learner, scores = copy.deepcopy(model), []
        optimizer = torch.optim.SGD(learner.parameters(), 0.5)
        for i in range(1, ids.shape[1]):
            loss = -learner(ids[:, i - 1]).log_softmax(-1).gather(-1, ids[:, i : i + 1])
            scores += [] if late else [-loss[0, 0]]
            optimizer.zero_grad()
            loss.sum().backward()
            optimizer.step()
            scores += [-nn.functional.cross_entropy(learner(ids[:, i - 1]), ids[:, i])] if late else []
        return torch.stack(scores)

    assert check_scores(functools.partial(trains, late=False), IDS[:1], VOCABULARY, positions=3).ok
    report = check_scores(functools.partial(trains, late=True), IDS[:1], VOCABULARY, positions=3)
    assert [v.kind for v in report.violations] == ["sum"], "no later token is read, but its own is"
    assert model.training
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())


@pytest.mark.parametrize("inputs", [IDS, IDS[0]])
def test_a_sum_is_that_of_all_choices(inputs):
    def knows(ids):
        return torch.maximum(bigram(ids), torch.log(0.03 + 0.0 * bigram(ids)))

    assert check_scores(bigram, inputs, VOCABULARY).ok
    (found,) = check_scores(knows, inputs, VOCABULARY).violations
    assert found.kind == "sum"
    prefix = torch.atleast_2d(inputs)[found.target_row, found.target - 1]
    assert found.change + 1 == pytest.approx(float(TABLE.softmax(-1)[prefix].clamp_min(0.03).sum()))
    likeliest = TABLE[prefix].topk(2).indices.tolist()
    assert [ids[found.target] for ids in found.tokens] == likeliest
    assert af.audit.AuditReport.from_json((report := check_scores(knows, inputs, VOCABULARY)).to_json()) == report
    assert f"sum to {found.change + 1:.6g}" in str(found)


def test_a_large_vocabulary_is_sampled():
    logits = torch.randn(5000, generator=torch.Generator().manual_seed(0)).log_softmax(-1)
    for raised, verdict in ((0.0, "clean"), (1.5, "leak")):  # every choice 4.5 times as likely: they sum to 4.5
        report = check_scores(lambda ids, up=raised: logits[ids[:, 1:]] + up, IDS, 5000, choices=256)
        assert report.verdict == verdict, report
    wasteful = check_scores(lambda ids: bigram(ids) - 1, IDS, VOCABULARY)
    assert wasteful.ok
    assert "sum to 0.3679" in str(wasteful)


def test_one_number_is_nothing_tested():
    report = check(lambda ids: bigram(ids).mean(), IDS)
    assert (report.verdict, report.violations) == ("nothing tested", ())
    assert "output is one number" in str(report)


FEWER = {
    "the last four": slice(-4, None),
    "the first three": slice(0, 3),
    "every second one": slice(0, None, 2),
    "some in the middle": slice(3, 7),
    "those at no equal distances": [0, 1, 4, 8],
}


@pytest.mark.parametrize("inputs", [IDS, IDS[0]])
@pytest.mark.parametrize("name", FEWER)
def test_scores_of_some_tokens_alone(name, inputs):
    """Which tokens they score is found; each is a probability of its own, and knows no later one."""
    chosen = torch.arange(1, N)[FEWER[name]].tolist()

    def some(ids, leak=0.0, known=0.0):
        scores = bigram(ids)[..., FEWER[name]] + known
        return scores - leak * ids[..., -1:] / VOCABULARY

    report = check_scores(some, inputs, VOCABULARY)
    assert report.ok, str(report)
    shown = chosen if len(chosen) < 6 else [*chosen[:3], "...", *chosen[-2:]]
    assert report.order.startswith(
        f"causal(n=12); {len(chosen)} numbers, the scores of tokens {', '.join(map(str, shown))}"
    )
    (found,) = check_scores(functools.partial(some, known=0.5), inputs, VOCABULARY).violations
    assert (found.kind, found.target in chosen) == ("sum", True)
    leaky = functools.partial(some, leak=0.1)
    assert check_scores(leaky, inputs, VOCABULARY).verdict == "leak"  # of the last tokens, if nothing is said
    told = check_scores(leaky, inputs, VOCABULARY, labels=chosen).violations[0]
    assert (told.kind, told.source, told.target in chosen) == ("order", N - 1, True)


def test_the_score_of_one_token():
    def last(ids):
        return bigram(ids)[:, -1]

    assert check_scores(last, IDS, VOCABULARY, labels=[-1]).ok
    (found,) = check_scores(lambda ids: last(ids) + 0.5, IDS, VOCABULARY, labels=[-1]).violations
    assert (found.kind, found.target) == ("sum", N - 1)
    (found,) = check_scores(lambda ids: bigram(ids)[:, :1] - 0.1 * ids[:, 5:6], IDS, VOCABULARY, labels=[1]).violations
    assert (found.kind, found.target, found.source) == ("order", 1, 5)


def test_a_response_that_reads_one_token_ahead():
    def ahead(ids):
        return bigram(ids)[:, -4:] - 0.1 * torch.cat([ids[:, -3:], ids[:, -1:]], 1) / VOCABULARY

    report = check_scores(ahead, IDS, VOCABULARY)
    assert "the scores of tokens 8, 9, 10, 11" in report.order
    assert {(v.target, v.source) for v in report.violations if v.kind == "order"} <= {(8, 9), (9, 10), (10, 11)}
    assert report.violations[0].kind == "order"


def test_what_a_first_call_leaves_is_seen_in_fewer_numbers():
    scorer = remembering("first")
    assert [v.kind for v in check_scores(lambda ids: scorer(ids)[:, -3:], IDS, VOCABULARY).violations] == ["state"]
