"""Losses and batches that a random search got wrong: heads on parts of the states, texts that repeat, several heads."""

import peft
import pytest
import torch
import torch.nn.functional as F
import transformers
from torch import nn

from attnflow.audit import check_batch, check_loss
from tests.audit.test_loss import counts, llama
from tests.leaks.losses import BATCH, IDS, LABELS, MODEL, OWN, REAL, V, in_chunks, logits, mean, shifted

AHEAD = F.pad(LABELS[:, 1:], (0, 1), value=-100)
PRESHIFTED = {**BATCH, "labels": AHEAD}
SIZE = {"vocab_size": V, "hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 4, "intermediate_size": 48}


def states_of(batch):
    return MODEL.model(batch["input_ids"], batch["attention_mask"])[0]


def on_places(places, ahead=AHEAD):
    """The head on some of the states alone."""
    return lambda batch: mean(MODEL.lm_head(states_of(batch)[places]), ahead[places])


every = torch.ones_like(REAL, dtype=torch.bool)
PARTS = {
    "all but the last": on_places((slice(None), slice(0, 8))),
    "all but the first, which is not trained": on_places((slice(None), slice(1, 9))),
    "those with labels": on_places(AHEAD != -100),
    "rows joined": on_places(every),
    "chunks of 4": lambda batch: in_chunks(batch, 9),
    "chunks of 1": lambda batch: in_chunks(batch, 9, size=1),
    "logits of 1 x 18": lambda batch: mean(MODEL.lm_head(states_of(batch).reshape(1, 18, -1)), AHEAD),
}


@pytest.mark.parametrize("name", PARTS)
def test_a_head_on_a_part_of_the_states(name):
    report = check_loss(PARTS[name], BATCH, MODEL)
    assert report.ok, report
    assert [(run.sequence, run.first, run.last, run.label) for run in report.trained] == [(0, 3, 7, 1), (1, 3, 5, 1)]


@pytest.mark.parametrize(
    ("step", "kinds"),
    [
        (on_places((slice(None), slice(0, 8)), LABELS), {"readable": 7, "untrained": 1}),
        (on_places((slice(None), slice(0, 7)), LABELS.roll(-2, 1)), {"shift": 8}),
        (on_places((AHEAD != -100) & (torch.arange(9) != 4)), {"untrained": 2}),
        (lambda batch: in_chunks(batch, 4), {"untrained": 6}),
    ],
)
def test_a_wrong_head_on_a_part_of_the_states(step, kinds):
    assert kinds.items() <= counts(check_loss(step, BATCH, MODEL)).items()


class ByHand(nn.Module):
    """No module returns the states that the head is called on."""

    def __init__(self):
        super().__init__()
        self.embed, self.head = nn.Embedding(V, 32), nn.Linear(32, V)

    def states(self, ids):
        vectors = self.embed(ids)
        return vectors + vectors.cumsum(1)


def test_what_cannot_be_placed_is_named():
    own = ByHand()
    report = check_loss(lambda batch: mean(own.head(own.states(batch["input_ids"])[:, 2:]), AHEAD[:, 2:]), BATCH, own)
    assert report.verdict == "nothing tested"
    assert "rows [2, 7], the batch [2, 9]" in dict(report.untested)["which positions the loss trains"]
    twins = {**BATCH, "input_ids": torch.full_like(IDS, 7), "attention_mask": torch.ones_like(IDS)}
    bag = nn.Sequential(nn.Embedding(V, 32), nn.Linear(32, V))  # equal tokens have equal states
    report = check_loss(lambda batch: mean(bag[1](bag[0](batch["input_ids"])[:, 3:6]), AHEAD[:, 3:6]), twins, bag)
    assert report.verdict == "nothing tested"


def test_a_function_is_not_what_the_class_does():
    """A loss that is not understood, of labels that a collator has shifted: nothing is said of shifts."""
    capped = check_loss(lambda batch: mean(5 * torch.tanh(logits(batch) / 5), batch["labels"]), PRESHIFTED, MODEL)
    assert capped.verdict == "nothing tested"
    assert check_loss(lambda batch: mean(logits(batch), batch["labels"]), PRESHIFTED, MODEL).ok


@pytest.mark.parametrize("period", [1, 2])
def test_a_text_that_repeats_itself_shows_no_shift(period):
    ids = (torch.arange(10) % period + 7)[None]
    batch = {"input_ids": ids, "labels": F.pad(ids[:, 1:], (0, 1), value=-100)}
    report = check_loss(lambda batch: mean(MODEL(batch["input_ids"]).logits, batch["labels"]), batch, MODEL)
    assert report.verdict == "nothing tested"
    assert "repeats itself" in str(report)
    hole = {**batch, "labels": batch["labels"].where(torch.arange(10) != 8, -100)}
    late = check_loss(lambda _: mean(MODEL(ids).logits, hole["labels"]), batch, MODEL)
    assert not late.ok


def test_entries_that_happen_to_fit_explain_nothing():
    positions = torch.tensor([[0, 1, 2, 3, 4, 0, 1, 2, 3]])
    labels = F.pad(IDS[:1, 1:], (0, 1), value=-100).where(positions != 4, -100)
    batch = {"input_ids": IDS[:1], "position_ids": positions, "labels": labels}
    first = positions == 0  # not trained

    def step(batch):
        return mean(MODEL(IDS[:1], position_ids=positions).logits, labels.where(~first, -100))

    assert "untrained" in counts(check_loss(step, batch, MODEL))

    def by_ids(batch):
        each = mean(logits(batch)[:, :-1], batch["labels"][:, 1:], reduction="none").view(2, -1)
        return (each * batch["input_ids"][:, 1:]).sum()

    assert "weights" in counts(check_loss(by_ids, BATCH, MODEL))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_weights_of_rows_of_nearly_one_length_in_half_precision(dtype):
    half, ids = llama().to(dtype), torch.arange(3, 29).view(2, 13)
    labels = ids.clone()
    labels[1, -1:] = -100

    def by_rows(batch, sizes):
        losses = mean(half(batch["input_ids"]).logits[:, :-1], batch["labels"][:, 1:], reduction="none").view(2, -1)
        return (losses.sum(1) / sizes).mean()

    batch = {"input_ids": ids, "labels": labels}
    assert check_loss(lambda batch: by_rows(batch, torch.tensor([12, 12])), batch, half, eos=()).ok
    report = check_loss(lambda batch: by_rows(batch, torch.tensor([12, 11])), batch, half, eos=())
    assert set(counts(report)) == {"weights"}


def test_several_heads_and_other_parts_leave_the_verdict_open():
    class Streams(nn.Module):
        """Logits [batch, 2, n, vocabulary], as of ProphetNet: the next token, and the one after it."""

        def __init__(self):
            super().__init__()
            self.inner, self.heads = MODEL, nn.Linear(8, 2 * V)

        def forward(self, ids):
            return self.heads(self.inner.model(ids)[0]).unflatten(-1, (2, V)).transpose(1, 2)

    streams = Streams()
    two = check_loss(lambda batch: sum(mean(z, AHEAD) for z in streams(IDS).unbind(1)), BATCH, streams)
    penalised = check_loss(lambda batch: shifted(1)(batch) + MODEL.lm_head.weight.square().sum(), BATCH, MODEL)
    entropy = check_loss(lambda batch: shifted(1)(batch) + 1e-4 * logits(batch).softmax(-1).square().sum(), BATCH)
    spans = check_loss(MODEL, {**BATCH, "doc_spans": torch.tensor([[0, 4], [5, 8]])})
    for report in (two, penalised, entropy, spans):
        assert report.verdict == "nothing tested", report
    assert "does not come from these logits" in dict(penalised.untested)["a part of the loss"]


def test_labels_that_are_classes_are_not_read_as_tokens():
    model = transformers.BertForTokenClassification(transformers.BertConfig(**SIZE, num_labels=70)).eval()
    for labels in (IDS[:1], torch.zeros_like(IDS[:1])):
        report = check_loss(model, {"input_ids": IDS[:1], "labels": labels})
        assert report.verdict == "nothing tested"
        assert "classes" in dict(report.untested)["the loss"]
    pairs = transformers.BertForNextSentencePrediction(transformers.BertConfig(**SIZE)).eval()
    assert "labels are classes" in check_batch({"input_ids": IDS, "labels": torch.tensor([0, 1])}, pairs).family


@pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing`:FutureWarning")  # PEFT's
def test_virtual_tokens_that_are_trained_are_named():
    tuned = peft.get_peft_model(llama(), peft.PromptTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=4)).eval()

    def step(batch):
        return mean(tuned(input_ids=IDS, attention_mask=REAL).logits[:, :4], IDS[:, :4])

    assert check_loss(step, BATCH, tuned).verdict == "nothing tested"


HIDDEN = torch.arange(9) % 3 == 1
HIDES = {"input_ids": IDS.masked_fill(HIDDEN, 4), "attention_mask": REAL, "labels": IDS.where(HIDDEN & (IDS > 2), -100)}
OPEN = {**BATCH, "labels": IDS.where(REAL == 1, -100)}


@pytest.mark.parametrize(
    ("name", "config"),
    [
        ("BertLMHeadModel", {"is_decoder": False}),
        ("XLNetLMHeadModel", {"d_model": 32, "n_layer": 1, "n_head": 4, "d_inner": 48}),
        ("XLMWithLMHeadModel", {"emb_dim": 32, "n_layers": 1, "n_heads": 4, "n_words": V}),
    ],
)
def test_models_of_both_directions_under_the_head_of_a_causal_one(name, config):
    kind = getattr(transformers, name)
    sizes = SIZE if "Bert" in name else {"vocab_size": V}
    model = kind(kind.config_class(**{**sizes, **OWN, **config})).eval()
    assert not check_loss(model, HIDES).mistakes
    assert "readable" in counts(check_loss(model, OPEN))


def test_causal_models_that_say_they_are_no_decoders():
    model = transformers.GPTNeoXForCausalLM(transformers.GPTNeoXConfig(**SIZE, eos_token_id=2, pad_token_id=0)).eval()
    assert check_loss(model, BATCH).ok
    assert check_batch(BATCH, model.config).ok or not model.config.architectures


@pytest.mark.parametrize("name", ["T5", "Bart"])
def test_the_token_that_a_decoder_starts_with_is_no_padding(name):
    from tests.models import tiny

    model = tiny(name, torch.float32)
    pad = model.config.pad_token_id
    model.config.decoder_start_token_id = pad
    labels = torch.randint(5, 40, (2, 7), generator=torch.Generator().manual_seed(0))
    labels[1, 5:] = -100
    inputs = {"input_ids": torch.full((2, 6), 9), "labels": labels}
    decoder = torch.cat([torch.full((2, 1), pad), labels[:, :-1].where(labels[:, :-1] >= 0, pad)], 1)
    for batch in (inputs, {**inputs, "decoder_input_ids": decoder}):
        assert not check_batch(batch, model).mistakes
        padded = check_batch({**batch, "labels": labels.where(labels >= 0, pad)}, model)
        assert "padding" in counts(padded)


def test_labels_that_differ_from_most():
    dropped = IDS.where(torch.arange(9) % 4 != 1, 4)  # tokens that are hidden from a causal model, and predicted
    assert check_batch({**BATCH, "input_ids": dropped}, MODEL).ok
    other = {**BATCH, "labels": LABELS.where(LABELS != 21, 35)}
    assert counts(check_batch(other, MODEL)) == {"shift": 1}
    assert counts(check_batch(other, eos=2, pad=0)) == {"shift": 1}
    row = torch.stack([LABELS[0], AHEAD[1]])
    assert counts(check_batch({**BATCH, "labels": row}, MODEL))["shift"] == 3
    unlike = {**BATCH, "labels": LABELS.where(LABELS < 0, 50 + LABELS % 2)}  # two tokens that no model explains
    assert check_batch(unlike).verdict == "nothing tested"


def test_labels_that_have_all_the_probability_are_named():
    sure = llama()
    with torch.no_grad():
        sure.lm_head.weight.mul_(300)
    ids = IDS[:1]
    labels = F.pad(sure(ids).logits.argmax(-1)[:, :-1], (1, 0), value=-100)  # its own guesses
    labels[0, 3] = 5
    report = check_loss(sure, {"input_ids": ids, "labels": labels})
    assert [run.weight for run in report.trained] == pytest.approx([1 / 8] * len(report.trained))
    (hidden,) = [why for what, why in report.unchecked if "is trained" in what]
    assert hidden.startswith("the model gives it all the probability")
    labels = labels.where(labels < 0, (labels + 1) % V)  # of which it is not sure, and which nothing trains
    report = check_loss(
        lambda _: mean(sure(ids).logits[:, :3], labels[:, 1:4]), {"input_ids": ids, "labels": labels}, sure
    )
    assert "untrained" in counts(report)


@pytest.mark.parametrize("scale", [30, 300])
@pytest.mark.parametrize("smoothing", [0.0, 0.1])
def test_a_confident_model_is_not_accused(scale, smoothing):
    """Where the label has nearly all the probability, its entry of the gradient is lost in rounding."""
    sure = llama()
    with torch.no_grad():
        sure.lm_head.weight.mul_(scale)
    ids = IDS[:1]
    guesses = F.pad(sure(ids).logits.argmax(-1)[:, :-1], (1, 0), value=-100)
    for labels in (guesses, guesses.where(torch.arange(9) % 2 == 0, (ids + 3) % V)):
        batch = {"input_ids": ids, "labels": labels}
        step = lambda _, labels=labels: mean(sure(ids).logits[:, :-1], labels[:, 1:], label_smoothing=smoothing)  # noqa: E731
        assert not {"targets", "weights", "untrained", "rows"} & set(counts(check_loss(step, batch, sure)))
