"""What a user passes and gets: bad input, reports, and a model left as it was."""

import dataclasses
import io
import json
import random

import numpy as np
import pytest
import torch
from rich.console import Console
from torch import nn

import attnflow as af
from attnflow.audit import AuditReport, check, measure
from attnflow.models import evaluation
from tests.audit.common import LENGTH, inputs, tiny, tokens, wrapped
from tests.refused import refused


@pytest.mark.parametrize("mode", ["perturb", "quick"])
@pytest.mark.parametrize("dtype", [None, torch.float64])
def test_the_model_is_left_as_it_was(mode, dtype):
    model = tiny("BertDecoder")
    model.train()
    model.bert.embeddings.eval()
    flags = [module.training for module in model.modules()]
    state = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    pointers = [p.data_ptr() for p in model.parameters()]
    model.cls.predictions.bias.grad = torch.ones_like(model.cls.predictions.bias)
    torch.manual_seed(11)
    expected = torch.rand(3)
    torch.manual_seed(11)
    hooks = sum(len(m._forward_hooks) + len(m._forward_pre_hooks) for m in model.modules())
    report = check(model, inputs("BertDecoder"), mode=mode, dtype=dtype)
    measure(model, inputs("BertDecoder"))
    assert report.ok
    assert torch.equal(torch.rand(3), expected)
    assert [module.training for module in model.modules()] == flags
    assert [p.data_ptr() for p in model.parameters()] == pointers
    assert all(torch.equal(tensor, state[name]) for name, tensor in model.state_dict().items())
    assert [n for n, p in model.named_parameters() if p.grad is not None] == ["cls.predictions.bias"]
    assert all(p.requires_grad for p in model.parameters())
    assert sum(len(m._forward_hooks) + len(m._forward_pre_hooks) for m in model.modules()) == hooks


def test_random_generators_are_left_as_they_were():
    before = torch.get_rng_state(), random.getstate(), np.random.get_state()[1].tolist()  # noqa: NPY002
    with evaluation.evaluating(nn.Dropout()):
        evaluation.seed_all(3)
        torch.rand(3)
    assert torch.equal(torch.get_rng_state(), before[0])
    assert random.getstate() == before[1]
    assert np.random.get_state()[1].tolist() == before[2]  # noqa: NPY002


def test_the_model_is_left_as_it_was_after_a_failure():
    model = tiny("Llama").train()

    def fail(out, hidden):
        raise RuntimeError("broken")

    with wrapped(model.model.layers[1].mlp, fail), pytest.raises(RuntimeError, match="broken"):
        check(model, tokens(), dtype=torch.float64)
    assert all(module.training for module in model.modules())
    assert model.dtype == torch.float32
    assert not any(m._forward_hooks or m._forward_pre_hooks for m in model.modules())


def test_dropout_in_training_mode_is_switched_off():
    model = tiny("GPT2").train()
    assert check(model, tokens()).noise == 0.0
    assert model.training


def test_noise_is_measured_and_does_not_alarm():
    model = tiny("Llama")
    count = iter(range(10**6))

    def noisy(out, hidden):
        return out + 1e-6 * torch.sin(torch.tensor(float(next(count))))

    with wrapped(model.model.layers[1].mlp, noisy):
        report = check(model, tokens(), passes=4)
    assert report.noise > 0
    assert all(violation.kind == "state" for violation in report.violations)


def test_a_loaded_model_takes_a_text_or_a_list_of_ids():
    model = tiny("Llama")

    def tokenizer(text, return_tensors):
        assert return_tensors == "pt"
        return {"input_ids": torch.tensor([[ord(letter) % 40 for letter in text]])}

    loaded = af.models.Loaded(model, tokenizer)
    ids = [ord(letter) % 40 for letter in "some words"]
    reports = [check(loaded, "some words"), check(loaded, ids), check(model, torch.tensor([ids]))]
    assert len({dataclasses.replace(report, seconds=0.0) for report in reports}) == 1
    assert measure(loaded, "some words").masks == measure(model, ids).masks
    assert af.audit.declared_order(loaded, "some words").masks == (af.masks.causal(10),)


def test_report_renders_and_serialises():
    report = check(tiny("Llama"), tokens(), order=af.masks.sliding_window(LENGTH, 4))
    assert isinstance(report, AuditReport)
    first = report.violations[0]
    text = str(report)
    assert text.startswith("LEAK: sliding_window(n=13, window=4, causal=True); 2 x 13 positions, 3 layers")
    assert "model.layers.0.self_attn" in text
    assert str(first.source) in text
    console = Console(record=True, width=120, file=io.StringIO())
    console.print(report)
    assert "LEAK" in console.export_text()
    data = json.loads(report.to_json())
    assert data["ok"] is False
    assert AuditReport.from_dict(data) == report
    assert [row["module"] for row in report.rows()] == [violation.module for violation in report.violations]
    assert repr(report).startswith("<AuditReport ")
    assert len(repr(report)) < 300
    assert data["violations"][0]["module"] == first.module
    assert len(data["modules"]) == len(report.modules)
    assert "moves with position" in str(first)
    with pytest.raises(af.LeakFound, match=r"model\.layers\.0\.self_attn") as caught:
        report.raise_if_leaks()
    assert caught.value.witness == (first.source, first.target)
    clean = check(tiny("Llama"), tokens())
    clean.raise_if_leaks()
    assert str(clean).startswith("clean: causal")


def test_progress_is_shown():
    seen = []
    check(tiny("Llama"), tokens(batch=1), progress=lambda done, total, what: seen.append((done, total, what)))
    assert seen[-1][0] == seen[-1][1]
    assert len(seen) > LENGTH - 1
    seen.clear()
    measure(tiny("Llama"), tokens(batch=1), progress=lambda done, total, what: seen.append(what))
    assert set(seen) == {"measure", "measure layers"}


def test_watching_layers_only():
    model = tiny("Llama")
    with wrapped(model.model.layers[1].mlp, lambda out, hidden: out + 0.1 * hidden.roll(-1, 1)):
        report = check(model, tokens(), watch="layers")
    assert [v.module for v in report.violations] == ["model.layers.1"]
    assert [m.module for m in report.modules] == [*(f"model.layers.{i}" for i in range(3)), "LlamaForCausalLM"]


def test_few_passes_report_their_coverage():
    report = check(tiny("Llama"), tokens(batch=1), passes=2)
    assert report.ok
    assert 0 < report.coverage < 1
    assert report.forward_passes == 5 + 2


@pytest.mark.parametrize(
    ("given", "error", "message"),
    [
        (3, TypeError, "expected a text, token ids or a dict of keyword arguments"),
        ("a text", ValueError, "pass what af.load_model returned in place of the model"),
        ({"input_ids": [[1, 2, 3]]}, TypeError, "must be a tensor"),
        ({"attention_mask": None}, ValueError, "expected a tensor of token ids"),
        (torch.zeros(1, 0, dtype=torch.int64), ValueError, "empty"),
        (torch.zeros(0, 5, dtype=torch.int64), ValueError, "empty"),
        (torch.zeros(1, 2, 3, 4, dtype=torch.int64), ValueError, "must have shape"),
        (torch.zeros(1, 5, dtype=torch.bool), TypeError, "token ids or floating-point"),
        ({"input_ids": torch.ones(1, 5).long(), "inputs_embeds": torch.ones(1, 5, 32)}, ValueError, "either ids or"),
    ],
)
def test_bad_inputs(given, error, message):
    with refused(error, message):
        check(tiny("Llama"), given)


def test_bad_inputs_of_a_sequence_to_sequence_model():
    model = tiny("T5")
    with pytest.raises(ValueError, match="decoder_input_ids"):
        check(model, {"input_ids": tokens()})
    with pytest.raises(ValueError, match="different lengths"):
        check(model, {"input_ids": tokens(), "decoder_input_ids": tokens()})
    with pytest.raises(ValueError, match="one batch size"):
        check(model, {"input_ids": tokens(), "decoder_input_ids": tokens(batch=1, length=9)})


@pytest.mark.parametrize(
    ("order", "error", "message"),
    [
        (af.masks.causal(5), ValueError, "over 13 positions"),
        (af.masks.full(13, 12), ValueError, "over 13 positions"),
        ([af.masks.causal(13)] * 2, ValueError, "one mask per layer call, 3 of them"),
        ([], TypeError, "a list with one of them per layer"),
        (torch.ones(13, 13).bool(), TypeError, "from_dense"),
        ("causal", TypeError, "order must be"),
    ],
)
def test_bad_orders(order, error, message):
    with refused(error, message):
        check(tiny("Llama"), tokens(), order=order)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"mode": "guess"}, "mode must be"),
        ({"watch": "heads"}, "watch must be"),
        ({"passes": 0}, "passes must be at least 1"),
        ({"cache": [5, 5]}, "add up to the 13"),
    ],
)
def test_bad_arguments(arguments, message):
    with refused(ValueError, message):
        check(tiny("Llama"), tokens(), **arguments)


@pytest.mark.parametrize(("arguments", "message"), [({"by": "head"}, "by must be")])
def test_bad_arguments_of_measure(arguments, message):
    with refused(ValueError, message):
        measure(tiny("Llama"), tokens(), **arguments)


def test_a_sequence_as_long_as_the_width():
    """The hidden width is 32: layers and the model are read as [batch, positions, width], what lies inside is not."""
    model = tiny("Llama")
    report = check(model, tokens(length=32))
    assert report.ok
    assert "model.layers.0" in {each.module for each in report.modules}
    assert "model.layers.0.mlp" in {name for name, _ in report.skipped}
    with wrapped(model.model.layers[1].mlp, lambda out, hidden: out + hidden.roll(-1, dims=1)):
        first = check(model, tokens(length=32)).violations[0]
    assert (first.module, first.source) == ("model.layers.1", first.target + 1)


class Plain(nn.Module):
    def __init__(self, out=None):
        super().__init__()
        self.embed, self.out = nn.Embedding(10, 4), out

    def forward(self, ids):
        return self.embed(ids).mean(1) if self.out is None else self.out


def test_unknown_architectures_ask_for_an_order():
    ids = torch.randint(10, (2, 6))
    with pytest.raises(af.UnsupportedArchitecture, match="Pass order="):
        check(Plain(), ids)
    assert check(Plain(), ids, order=af.masks.causal(6)).ok
    with pytest.raises(af.UnsupportedArchitecture, match="nothing to audit"):
        check(Plain(torch.zeros(3)).requires_grad_(False), {"ids": ids}, order=af.masks.causal(6), watch="layers")


def test_models_without_what_a_mode_needs():
    with pytest.raises(af.UnsupportedArchitecture, match="takes no cache"):
        check(tiny("Bert"), inputs("Bert"), cache=True)
