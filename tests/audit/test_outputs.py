"""What the caller receives: every output of a model is watched, whatever its shape, or the report names it."""

import pytest
import torch
import transformers
from torch import nn
from torch.nested import nested_tensor
from torch.nn.functional import cross_entropy

import attnflow as af
from attnflow.audit import check
from tests.audit.common import tiny, tokens

LENGTH, VOCABULARY = 12, 50


def losses(y, ids):
    return cross_entropy(y[:, :-1].reshape(-1, VOCABULARY), ids[:, 1:].reshape(-1), reduction="none")


OUTPUTS = {
    "every position": lambda y, ids: y,
    "without the last": lambda y, ids: y[:, :-1],
    "flat": lambda y, ids: y.reshape(-1, VOCABULARY),
    "flat, after another step": lambda y, ids: 2 * y.reshape(-1, VOCABULARY),
    "flat, without the last": lambda y, ids: y[:, :-1].reshape(-1, VOCABULARY),
    "flat, positions first": lambda y, ids: y.transpose(0, 1).reshape(-1, VOCABULARY),
    "losses": lambda y, ids: losses(y, ids).view(len(ids), -1),
    "flat losses": losses,
    "stacked layers": lambda y, ids: torch.stack([y, 2 * y]),
    "rows of codebooks": lambda y, ids: torch.stack([y, 2 * y, 3 * y], 1).flatten(0, 1),
    "predicted ids": lambda y, ids: y.argmax(-1),
    "words before positions": lambda y, ids: y.mT,
    "sparse": lambda y, ids: y.to_sparse(),
    "named like a cache": lambda y, ids: {"cached_scores": y, "last_past": [ids]},
    "beside a loss": lambda y, ids: {"loss": losses(y, ids).mean(), "logits": y[:, :-1]},
}


class Returns(nn.Module):
    """A causal model that returns what `output(logits, ids)` makes of its logits; after its last module it may leak."""

    def __init__(self, output, leak):
        super().__init__()
        self.embed = nn.Embedding(VOCABULARY, 16)
        self.head = nn.Linear(16, VOCABULARY)
        self.output = output
        self.leak = leak

    def forward(self, input_ids):
        y = self.head(self.embed(input_ids))
        y = y + 0.1 * y.cumsum(1)
        return self.output(y + y.flip(1) if self.leak else y, input_ids)


def report_on(output, leak, batch, mode="perturb"):
    ids = torch.randint(VOCABULARY, (batch, LENGTH))
    return check(Returns(output, leak).eval(), ids, order=af.masks.causal(LENGTH), mode=mode)


@pytest.mark.parametrize("batch", [1, 2])
@pytest.mark.parametrize("name", OUTPUTS)
def test_a_leak_after_the_last_module(name, batch, mode):
    assert report_on(OUTPUTS[name], False, batch, mode).ok
    leak = report_on(OUTPUTS[name], True, batch, mode)
    assert leak.verdict == "leak"
    assert leak.violations[0].module == "Returns"


def test_a_reading_of_fewer_rows_is_noted():
    assert any("11 rows: row i was read as position i" in n for n in report_on(OUTPUTS["without the last"], 0, 2).notes)
    shifted = check(Shifted().eval(), tokens(2, LENGTH) % VOCABULARY, order=af.masks.causal(LENGTH))
    assert shifted.ok, str(shifted)
    assert any("row i was read as position i + 1" in note for note in shifted.notes)


class Shifted(Returns):
    """Returns the last n - 1 rows of its last module."""

    def __init__(self):
        super().__init__(None, False)

    def forward(self, input_ids):
        return self.head(self.embed(input_ids))[:, 1:]


UNKNOWN = {
    "one number": (lambda y, ids: losses(y, ids).mean(), "the output is one number"),
    "pooled": (lambda y, ids: y.mean(1), "the output has shape [2, 50]"),
    "the last three": (lambda y, ids: y[:, -3:], "the output has shape [2, 3, 50]"),
    "a list of numbers": (lambda y, ids: losses(y, ids).tolist(), "is a float, which is not looked into"),
    "nothing": (lambda y, ids: None, "Returns returns no tensor"),
    "sequences of different lengths": (
        lambda y, ids: nested_tensor([y[0], y[1, 1:]], layout=torch.jagged),
        "has shape",
    ),
    "rows that vary": (lambda y, ids: y[y > 0], "the output has shape"),
}


@pytest.mark.parametrize("leak", [False, True])
@pytest.mark.parametrize("name", UNKNOWN)
def test_what_cannot_be_aligned_is_never_clean(name, leak):
    output, named = UNKNOWN[name]
    report = report_on(output, leak, 2)
    assert report.verdict == "nothing tested"
    assert any(named in each for each in report.untested), report.untested
    assert "not tested, of what the caller receives" in str(report)


BESIDE = {
    "the last three": (lambda y, ids: (y + y.flip(1))[:, -3:], False),
    "a list of numbers": (lambda y, ids: y.mean((0, 2)).tolist(), False),
    "summaries": (lambda y, ids: (y.mean(1), y.mean()), True),
    "as many numbers as features": (lambda y, ids: y.mean(-1)[:, :1].repeat(1, LENGTH), False),
    "losses of the last three": (lambda y, ids: (y + y.flip(1)).mean(-1)[:, -3:], False),
    "what no token moves": (lambda y, ids: torch.ones(4, 5, 6), True),
}


@pytest.mark.parametrize("name", BESIDE)
def test_what_cannot_be_aligned_beside_what_can(name):
    output, clean = BESIDE[name]
    model = Returns(lambda y, ids: {"logits": y, "other": output(y, ids)}, False).eval()
    model.extra = nn.Linear(LENGTH, 1)
    report = check(model, tokens(2, LENGTH) % VOCABULARY, order=af.masks.causal(LENGTH))
    assert report.verdict == ("clean" if clean else "nothing tested"), str(report)
    assert any("other" in each for each in (report.untested or report.notes)) == (name != "what no token moves")


class InPlace(Returns):
    """Adds to its embeddings in place, as BLIP does."""

    def forward(self, input_ids):
        hidden = self.embed(input_ids)
        hidden += torch.arange(input_ids.shape[1])[:, None]
        return self.output(self.head(hidden), input_ids)


@pytest.mark.parametrize("name", ["every position", "flat, positions first", "stacked layers"])
def test_what_is_rewritten_in_place_is_no_noise(name):
    model = InPlace(OUTPUTS[name], False).eval()
    report = check(model, tokens(2, LENGTH) % VOCABULARY, order=af.masks.causal(LENGTH))
    assert report.ok
    assert report.noise == 0.0


@pytest.mark.parametrize("reads", [True, False])
def test_a_pooled_vector_is_compared_where_only_padding_is_forbidden(reads):
    """A mean that counts padding moves with it; one that does not is clean, and was tested."""
    model, mask = tiny("Bert").base_model, torch.arange(LENGTH) < torch.tensor([[LENGTH], [8]])
    given = {"input_ids": tokens(2, LENGTH), "attention_mask": mask.long()}
    counted = torch.ones_like(mask) if reads else mask

    class Pooled(type(model)):
        def forward(self, **kwargs):
            hidden = super().forward(**kwargs).last_hidden_state
            return (hidden * counted[:, :, None]).sum(1) / counted.sum(1, keepdim=True)

    model.__class__ = Pooled
    report = check(model, given)
    assert report.verdict == ("leak" if reads else "clean"), str(report)
    assert [violation.module for violation in report.violations[:1]] == ["Pooled"] * reads


def after(real, hidden, offset=0):
    """The vector of each sequence's last real token, or of one before it."""
    last = real.shape[1] - 1 - real.flip(1).argmax(1)
    return hidden[torch.arange(len(hidden)), last - offset]


POOLS = {  # how, side of the padding, what is wrong: pads are read, or the end is not
    "the last real token": (lambda real, h: after(real, h), "right", ""),
    "the last real token, padding on the left": (lambda real, h: after(real, h), "left", ""),
    "the last place": (lambda real, h: h[:, -1], "right", "pads"),
    "the last place, padding on the left": (lambda real, h: h[:, -1], "left", ""),
    "as many places as there are tokens": (lambda real, h: h[torch.arange(2), real.sum(1) - 1], "left", "end"),
    "the first place": (lambda real, h: h[:, 0], "right", "end"),
    "the first place, padding on the left": (lambda real, h: h[:, 0], "left", "pads"),
    "the mean of the real tokens": (lambda real, h: (h * real[..., None]).sum(1) / real.sum(1)[:, None], "right", ""),
    "the mean of all places": (lambda real, h: h.mean(1), "right", "pads"),
    "a reward of the last real token": (lambda real, h: after(real, h).sum(-1), "left", ""),
    "a reward of the last place": (lambda real, h: h[:, -1].sum(-1), "right", "pads"),
    "a reward of the token before": (lambda real, h: after(real, h, 1).sum(-1), "right", "end"),
}


@pytest.mark.parametrize("name", POOLS)
def test_which_token_is_pooled(name, mode):
    pool, side, wrong = POOLS[name]
    model = tiny("Llama").base_model
    mask = (torch.arange(LENGTH) < torch.tensor([[LENGTH], [8]])).long()
    mask = mask.flip(1) if side == "left" else mask

    class Pooled(type(model)):
        def forward(self, **kwargs):
            return pool(kwargs["attention_mask"], super().forward(**kwargs).last_hidden_state)

    model.__class__ = Pooled
    ids = tokens(2, LENGTH).masked_fill(mask == 0, 0)
    report = check(model, {"input_ids": ids, "attention_mask": mask}, mode=mode, passes=1, both_sides=False)
    assert report.verdict == ("leak" if wrong == "pads" else "nothing tested"), str(report)
    if wrong == "pads":
        assert not mask[report.violations[0].target_row, report.violations[0].source]
    short = any("does not move with the last real token" in each for each in report.untested)
    assert short == (wrong == "end" or name == "the first place, padding on the left")


@pytest.mark.parametrize("side", ["left", "right"])
@pytest.mark.parametrize("pad", [0, 2])
def test_a_classifier_that_is_told_another_padding_token(pad, side):
    """transformers pools the last token that is not `pad_token_id`, which is a pad where the padding is another one."""
    config = transformers.LlamaConfig(
        vocab_size=61, hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4,
        pad_token_id=pad, bos_token_id=1, eos_token_id=2, num_labels=3,
    )  # fmt: skip
    ids = tokens(2, LENGTH)
    ids[0, slice(0, 3) if side == "left" else slice(-3, None)] = 0
    given = {"input_ids": ids, "attention_mask": (ids > 0).long()}
    report = check(transformers.LlamaForSequenceClassification(config).eval(), given, both_sides=False)
    assert report.verdict == ("leak" if (pad, side) == (2, "right") else "nothing tested"), str(report)


def test_what_pools_without_the_end_is_noted_beside_positions():
    model = Returns(lambda y, ids: {"logits": y, "pooled": y[:, 3]}, False).eval()
    report = check(model, tokens(2, LENGTH) % VOCABULARY, order=af.masks.causal(LENGTH))
    assert report.ok
    assert any("pooled does not move with the last real token of row 0, at 11" in note for note in report.notes)


def test_nothing_says_that_sequences_were_kept_apart_unless_it_was_seen():
    def both(model, ids, **more):
        report = check(model, ids, order=af.masks.full(LENGTH), **more)
        return "kept apart" in str(report) or "no sequence moves with another" in str(report)

    ids = torch.randint(VOCABULARY, (2, LENGTH))
    clean, mean = Returns(lambda y, ids: y, False).eval(), Returns(lambda y, ids: y + y.mean(0), False).eval()
    pooled = Returns(lambda y, ids: y.mean(1) + y.mean((0, 1)), False).eval()
    assert both(clean, ids)
    assert both(clean, ids, mode="quick")
    assert both(Returns(lambda y, ids: y.mean(1), False).eval(), ids)
    for model in (mean, pooled, Counting(lambda y, ids: y, False).eval()):
        assert not both(model, ids)
    assert not both(clean, ids[:1])


class Counting(Returns):
    """Counts its calls, and adds the number to what it returns."""

    calls = 0

    def forward(self, input_ids):
        self.calls += 1
        return super().forward(input_ids) + self.calls


def test_a_pooled_vector_keeps_sequences_apart():
    report = report_on(lambda y, ids: y.mean(1) + y.mean((0, 1)), False, 3)
    assert report.violations[0].kind == "batch"


@pytest.mark.parametrize(("layers", "batch", "verdict"), [(1, 1, "clean"), (1, 2, "clean"), (1, 6, None), (2, 2, None)])
def test_the_last_state_of_recurrent_layers(layers, batch, verdict):
    """[layers, batch, width] summarises each sequence where that is the only reading."""
    report = check(nn.GRU(4, 4, layers, batch_first=True), torch.randn(batch, 6, 4), order=af.masks.causal(6))
    assert report.verdict == (verdict or "nothing tested"), str(report)


def test_outputs_of_the_last_positions_alone():
    for kept in (1, 3, LENGTH - 1):
        assert check(tiny("Llama"), {"input_ids": tokens(2, LENGTH), "logits_to_keep": kept}).ok
