"""`check_loss`: what a loss trains is read off its gradient; mistakes, relatives, and losses that are right."""

import copy
import warnings
from collections import Counter

import peft
import pytest
import torch
import torch.nn.functional as F
import transformers
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn
from transformers.modeling_outputs import CausalLMOutputWithPast

import attnflow as af
from attnflow.audit import check_batch, check_loss
from tests.audit.common import tiny
from tests.leaks import losses
from tests.leaks.losses import BATCH, IDS, LABELS, MODEL, V, logits, mean, shifted, weighed
from tests.refused import refused

SIZE = {"vocab_size": V, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4}


def llama(**more):
    torch.manual_seed(0)
    config = transformers.LlamaConfig(**{**SIZE, **losses.OWN, "initializer_range": 0.3, **more})
    return transformers.LlamaForCausalLM(config).eval()


def per_row(batch):
    return losses.by_rows(batch, losses.ROWS)


def with_z_loss(batch):
    z, there = logits(batch)[:, :-1], batch["labels"][:, 1:] != -100
    return mean(z, batch["labels"][:, 1:]) + 1e-3 * z.logsumexp(-1)[there].square().mean()


def summed(batch):
    return mean(logits(batch)[:, :-1], batch["labels"][:, 1:], reduction="sum")


def counts(report):
    found = Counter()
    for mistake in report.mistakes:
        found[mistake.kind] += mistake.count
    return dict(found)


RIGHT = {
    "the model's own": MODEL,
    "a step": shifted(1),
    "a sum": summed,
    "a tuple": lambda batch: (shifted(1)(batch), None),
    "an output": lambda batch: MODEL(**batch),
    "backward inside": lambda batch: shifted(1)(batch).backward(),
    "label smoothing": lambda batch: mean(logits(batch)[:, :-1], batch["labels"][:, 1:], label_smoothing=0.1),
    "a temperature": lambda batch: mean(logits(batch)[:, :-1] / 2, batch["labels"][:, 1:]),
    "a z-loss": with_z_loss,
    "without a graph of logits": losses.fused(1),
    "compiled": torch.compile(MODEL, backend="eager"),
}
WRONG = {  # what is found of these leaks: {kind: places}
    "a loss that shifts twice": {"shift": 8},
    "a loss that shifts three times": {"shift": 8},
    "a loss that never shifts": {"readable": 8},
    "a loss that shifts back": {"readable": 7},  # no position is behind the last label
    "a fused loss that shifts twice": {"shift": 8},
    "a mean for each row": {"weights": 3},
    "a mean for each document": {"weights": 2},
    "a weight that falls along the text": {"weights": 6},
    "a negative weight": {"weights": 1},
    "a hole in the labels": {"untrained": 1},
    "prompts are trained": {"untrained": 6},
    "what is ignored becomes token 0": {"untrained": 8},
    "ids of another text": {"targets": 16},
    "rows run together": {"rows": 1},
    "documents that predict the next one": {"documents": 1},
    "weights of tokens that are ignored": {"weights": 7},
}


@pytest.mark.parametrize("name", RIGHT)
def test_a_right_loss_is_not_accused(name):
    report = check_loss(RIGHT[name], BATCH, MODEL)
    assert report.ok, report
    assert [(run.sequence, run.first, run.last, run.label) for run in report.trained] == [(0, 3, 7, 1), (1, 3, 5, 1)]
    assert "8 tokens" in report.loss[0]


@pytest.mark.parametrize("name", WRONG)
def test_a_wrong_loss_is_found(name):
    (step, batch), _ = losses.CASES[name]
    report = check_loss(step, batch, MODEL)
    assert report.verdict == "mistakes"
    assert WRONG[name].items() <= counts(report).items(), report
    if name == "rows run together":
        assert (report.mistakes[-1].sequence, report.mistakes[-1].position) == (0, 8), report
    if name == "a mean for each document":
        assert "differs between documents: each is averaged by itself" in report.mistakes[0].message


def test_terms_are_named_as_what_they_are():
    names = {name: check_loss(RIGHT[name], BATCH, MODEL).loss for name in RIGHT}
    assert names["a step"] == ("cross-entropy of 8 tokens, their mean",)
    assert names["a sum"] == ("cross-entropy of 8 tokens, their sum",)
    assert names["label smoothing"][1] == "label smoothing 0.1 at 8 positions"
    assert names["a temperature"][1] == "temperature 2 at 8 positions"
    assert names["a z-loss"][1] == "z-loss: 0.001 x log(sum of exp(logits))^2 at 8 positions"
    torch.manual_seed(0)
    routed = {"num_local_experts": 4, "num_key_value_heads": 4}
    routed |= {"output_router_logits": True, "router_aux_loss_coef": 0.05}
    experts = transformers.MixtralForCausalLM(transformers.MixtralConfig(**SIZE, **losses.OWN, **routed))
    assert "0.05 x aux_loss" in check_loss(experts, BATCH).loss[1]
    penalised = check_loss(lambda batch: shifted(1)(batch) + MODEL.lm_head.weight.square().sum(), BATCH, MODEL)
    assert "does not come from these logits" in penalised.loss[1]


@settings(max_examples=40, deadline=None)
@given(st.data())
def test_any_targets_and_weights_are_read_back(data):
    """Cross-entropy written out, with random targets, weights, smoothing, temperature and penalty for each position."""
    generator = torch.Generator().manual_seed(data.draw(st.integers(0, 9999)))
    v, n = data.draw(st.sampled_from([5, 61, 1000])), 6
    dtype = data.draw(st.sampled_from([torch.float64, torch.float32]))
    scale, smooth = data.draw(st.sampled_from([0.05, 1.0, 6.0])), data.draw(st.sampled_from([0.0, 0.05, 0.3]))
    heat, penalty = data.draw(st.sampled_from([(1.0, 0.0), (1.0, 1e-2), (3.0, 0.0)]))
    smooth = smooth if heat == 1.0 else 0.0
    table = nn.Embedding(v, v).to(dtype)
    with torch.no_grad():
        table.weight.copy_(torch.randn(v, v, generator=generator) * scale)
    ids, targets = (torch.randint(v, (2, n), generator=generator) for _ in range(2))
    weights = torch.rand(2, n, generator=generator).add(0.1) * (torch.rand(2, n, generator=generator) < 0.7)
    batch = {"input_ids": ids, "labels": targets}

    def step(batch):
        z = table(ids) / heat
        log_p = z.log_softmax(-1)
        nll = -(1 - smooth) * log_p.gather(-1, targets[..., None])[..., 0] - smooth * log_p.mean(-1)
        return ((nll + penalty * z.logsumexp(-1) ** 2) * weights.to(dtype)).sum()

    if not weights.any():
        return
    with torch.no_grad():
        hard = (table(ids) / heat).softmax(-1).amax(-1) > 0.999  # one token has it all
    found = {}
    for run in check_loss(step, batch, equal_weights=False).trained:
        found |= {(run.sequence, i): (run.label, run.weight) for i in range(run.first, run.last + 1)}
    for row, column in (weights > 0).nonzero().tolist():
        if hard[row, column] or v == 5:
            continue
        label, weight = found[row, column]
        assert weight == pytest.approx(float(weights[row, column]), rel=0.03), (row, column)
        assert label == 0 or label is None
    assert set(found) <= {(r, c) for r, c in (weights > 0).nonzero().tolist()}


def test_weights_and_masks_that_the_batch_explains():
    mask = (IDS != 21).long()
    report = check_loss(weighed(lambda batch: batch["loss_mask"].float()), {**BATCH, "loss_mask": mask}, MODEL)
    assert report.ok, report
    assert any("loss_mask" in note for note in report.notes)
    weights = torch.rand(2, 9, generator=torch.Generator().manual_seed(0)) + 0.5
    report = check_loss(weighed(lambda batch: batch["token_weights"]), {**BATCH, "token_weights": weights}, MODEL)
    assert report.ok, report
    assert any("in proportion to token_weights" in note for note in report.notes)
    ignored = check_loss(shifted(1), {**BATCH, "loss_weights": weights}, MODEL)
    assert counts(ignored) == {"weights": 8}
    assert check_loss(per_row, BATCH, MODEL, equal_weights=False).ok
    zeros = {**BATCH, "loss_mask": torch.zeros_like(IDS)}
    assert counts(check_batch(zeros, MODEL))["untrained"] == 8


def test_micro_batches_are_weighed_together():
    parts = [BATCH, losses.TEXT]
    report = check_loss(MODEL, parts)
    assert counts(report) == {"weights": 1}
    assert "1.75 times" in report.mistakes[-1].message
    items = 8 + 14
    together = check_loss(lambda batch: MODEL(**batch, num_items_in_batch=items).loss, parts, MODEL)
    assert together.ok, together
    named = check_loss(MODEL, {**BATCH, "num_items_in_batch": torch.tensor(items)})
    assert named.loss[0].endswith("their sum over num_items_in_batch = 22")


def test_a_loss_that_is_not_understood_is_not_green():
    def distilled(batch):
        teacher = torch.rand(2, 9, V, generator=torch.Generator().manual_seed(1)).softmax(-1)
        return F.kl_div(logits(batch).log_softmax(-1), teacher, reduction="batchmean")

    report = check_loss(distilled, BATCH, MODEL)
    assert report.verdict == "nothing tested"
    assert "the loss at 18 positions" in dict(report.untested)

    class Embeds(nn.Module):
        def forward(self, input_ids, labels=None):
            return input_ids

    own = check_batch({"input_ids": IDS[:1], "labels": IDS[:1]}, Embeds())
    assert own.verdict == "nothing tested"
    assert "the loss of Embeds" in dict(own.untested)
    twice = check_loss(lambda batch: shifted(1)(batch) + shifted(1)(batch), BATCH, MODEL)
    assert twice.verdict == "nothing tested"
    assert "made of 2 calls" in dict(twice.untested)["the other calls of the model"]
    headless = check_loss(losses.fused(1, llama()), BATCH)  # nobody says which matrix makes the logits
    assert headless.verdict == "nothing tested"
    assert not headless.trained
    for step, words in (
        (lambda batch: 1.0, "no loss with gradients"),
        (lambda batch: mean(logits(batch), batch["input_ids"], reduction="none"), "must be one number"),
        (lambda batch: (logits(batch) * 0).sum(), "zero everywhere"),
    ):
        with pytest.raises(ValueError, match=words):
            check_loss(step, BATCH)
    with pytest.raises(ValueError, match="empty list"):
        check_loss(MODEL, [])
    with refused(TypeError, "a model or a function"):
        check_loss(3, BATCH)


def test_everything_is_as_before():
    model = llama(attention_dropout=0.5).train()
    model(**BATCH).loss.backward()
    before = copy.deepcopy([parameter.grad for parameter in model.parameters()])
    torch.manual_seed(7)
    expected = torch.rand(3)
    torch.manual_seed(7)
    for subject in (model, lambda batch: model(**batch).loss.backward()):
        assert check_loss(subject, BATCH, model).ok
    assert torch.equal(torch.rand(3), expected)
    assert all(torch.equal(p.grad, old) for p, old in zip(model.parameters(), before, strict=True))
    assert model.training
    assert not nn.modules.module._has_any_global_hook()
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    weights = model.lm_head.weight.detach().clone()

    def trains(batch):
        model(**batch).loss.backward()
        optimizer.step()

    with pytest.raises(ValueError, match="updates the parameters"):
        check_loss(trains, BATCH, model)
    assert torch.equal(model.lm_head.weight, weights)


@pytest.mark.parametrize("name", ["T5", "Bart", "Bert", "BertDecoder", "GPT2", "Gemma2", "Mamba2", "Llama4"])
def test_families(name):
    """The loss of the family itself; and the same with labels one place on, where it shifts."""
    model = tiny(name).float()
    ids = torch.randint(4, 40, (2, 9), generator=torch.Generator().manual_seed(0))
    batch = {"input_ids": ids, "labels": ids.clone()}
    if name == "Bert":
        hidden = torch.arange(9) % 3 == 1
        batch = {"input_ids": ids.masked_fill(hidden, 3), "labels": ids.where(hidden, -100)}
    report = check_loss(model, batch)
    assert report.ok, report
    shift = 0 if name in ("T5", "Bart", "Bert") else 1
    assert {run.label for run in report.trained} == {shift}
    if shift == 1:
        late = check_loss(model, {**batch, "labels": batch["labels"].roll(-1, 1)})
        assert {"shift", "readable", "targets"} & set(counts(late)), late


def test_a_model_that_shifts_twice(monkeypatch):
    """transformers 47394: the forward shifts, and so does the loss function."""
    kind = transformers.LlamaForCausalLM
    old = kind.forward

    def twice(self, input_ids=None, labels=None, **more):
        out = old(self, input_ids=input_ids, **more)
        loss = None
        if labels is not None:
            loss = self.loss_function(out.logits[:, :-1].contiguous(), labels[:, 1:].contiguous(), vocab_size=V)
        return CausalLMOutputWithPast(loss=loss, logits=out.logits)

    monkeypatch.setattr(kind, "forward", twice)
    report = check_batch(BATCH, MODEL)
    assert "shift" in counts(report)
    assert "each position learns the token after next" in str(report)
    assert "label at i + 2" in report.family
    assert "one position before their own" not in str(report)


def test_labels_under_other_names():
    """transformers takes `shift_labels` as they stand, and nothing else says so."""
    ahead = F.pad(LABELS[:, 1:], (0, 1), value=-100)
    assert check_batch({**BATCH, "shift_labels": ahead}, MODEL).ok
    config = copy.deepcopy(MODEL.config)
    config.architectures = ["LlamaForCausalLM"]
    for subject in (MODEL, config):
        assert "readable" in counts(check_batch({**BATCH, "shift_labels": LABELS}, subject))
    loop = {"x": IDS[:, :-1], "y": F.pad(LABELS[:, 1:], (0, 0), value=-100)}

    def step(batch):
        return mean(MODEL(batch["x"]).logits, batch["y"])

    names = {"x": "input_ids", "y": "labels"}
    assert check_loss(step, loop, names=names, eos=2).ok
    assert "readable" in counts(check_loss(step, {**loop, "y": loop["x"]}, names=names))
    with pytest.raises(ValueError, match="has no entry 'z'"):
        check_loss(step, loop, names={"z": "labels"})
    halves = check_loss(lambda batch: mean(MODEL(batch["input_ids"][:, :-1]).logits, batch["labels"][:, 1:]), BATCH)
    assert halves.ok, halves


def test_positions_of_virtual_tokens_and_of_kept_logits():
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)
        tuned = peft.get_peft_model(
            llama(), peft.PromptTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=4)
        ).eval()
    report = check_loss(tuned, BATCH)
    assert report.ok, report
    assert [(run.first, run.last) for run in report.trained] == [(3, 7), (3, 5)]
    kept = check_loss(lambda b: mean(MODEL(b["input_ids"], logits_to_keep=6).logits[:, :-1], b["labels"][:, 4:]), BATCH)
    assert kept.ok, kept
    assert [(run.first, run.last) for run in kept.trained] == [(3, 7), (3, 5)]


def test_half_precision_and_other_threads():
    half = llama().to(torch.bfloat16)
    report = check_loss(half, BATCH)
    assert report.ok, report
    assert [(run.first, run.last) for run in report.trained] == [(3, 7), (3, 5)]
    assert af.audit.check_loss(MODEL, BATCH).to_dict()["ok"] is True
