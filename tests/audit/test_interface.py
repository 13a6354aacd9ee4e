"""What a user passes and gets: reports, any module, and a model left as it was."""

import contextlib
import dataclasses

import pytest
import torch
from torch import nn

import attnflow as af
from attnflow.audit import check, measure
from tests.audit.common import LENGTH, Stack, inputs, tiny, tokens, wrapped


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


def test_the_model_is_left_as_it_was_after_a_failure():
    model = tiny("Llama").train()

    def fail(out, hidden):
        raise RuntimeError("broken")

    with wrapped(model.model.layers[1].mlp, fail), pytest.raises(RuntimeError, match="broken"):
        check(model, tokens(), dtype=torch.float64)
    assert all(module.training for module in model.modules())
    assert model.dtype == torch.float32
    assert not any(m._forward_hooks or m._forward_pre_hooks for m in model.modules())


def test_a_loaded_model_takes_a_text_or_a_list_of_ids():
    model = tiny("Llama")

    def tokenizer(text, return_tensors):
        assert return_tensors == "pt"
        return {"input_ids": torch.tensor([[ord(letter) % 40 for letter in text]])}

    loaded = af.models.subject.Loaded(model, tokenizer)
    ids = [ord(letter) % 40 for letter in "some words"]
    reports = [check(loaded, "some words"), check(loaded, ids), check(model, torch.tensor([ids]))]
    assert len({dataclasses.replace(report, seconds=0.0) for report in reports}) == 1
    assert measure(loaded, "some words").masks == measure(model, ids).masks
    assert af.audit.declared_order(loaded, "some words").masks == (af.masks.causal(10),)


def test_a_report_says_where_it_leaks():
    report = check(tiny("Llama"), tokens(), order=af.masks.sliding_window(LENGTH, 4))
    first = report.violations[0]
    assert str(report).startswith("LEAK: sliding_window(n=13, window=4, causal=True); 2 x 13 positions, 3 layers")
    assert [row["module"] for row in report.rows()] == [violation.module for violation in report.violations]
    with pytest.raises(af.LeakFound, match=r"model\.layers\.0\.self_attn") as caught:
        report.raise_if_leaks()
    assert caught.value.witness == (first.source, first.target)
    check(tiny("Llama"), tokens()).raise_if_leaks()


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


def test_noise_is_noted():
    count = iter(range(10**6))
    model = tiny("Llama")
    with wrapped(
        model.model.layers[1].mlp, lambda out, hidden: out + 1e-6 * torch.sin(torch.tensor(1.0 * next(count)))
    ):
        report = check(model, tokens(), passes=2, both_sides=False)
    assert report.noise > 0
    assert (
        any("two equal runs differ by up to" in note for note in report.notes) or report.violations[0].kind == "state"
    )


@pytest.mark.filterwarnings("ignore")  # of the quantisation that torch itself brings
def test_a_quantised_model():
    """Torch's dynamic quantisation scales by the largest activation of the batch: later tokens show in earlier ones."""
    model = tiny("Llama")
    torch.backends.quantized.engine = "fbgemm" if "fbgemm" in torch.backends.quantized.supported_engines else "qnnpack"
    packed = torch.ao.quantization.quantize_dynamic(model, {nn.Linear}, dtype=torch.qint8)
    report = check(packed, tokens(1), passes=4, both_sides=False)
    first = report.violations[0]
    assert (first.module.split(".")[-1], first.confirmed) == ("q_proj", None)  # its kernels have no second precision
    assert any("does not run in another precision" in note for note in report.notes)


def test_nan_in_padding_is_no_business_of_the_audit():
    model, mask = tiny("Llama"), torch.ones(2, LENGTH, dtype=torch.int64)
    mask[0, 0] = 0
    refused = pytest.raises(ValueError, match=r"gives NaN at position 0 \(sequence 1\)")
    for row, outcome in ((0, contextlib.nullcontext()), (1, refused)):

        def spoil(out, hidden, row=row):
            out[row, 0] = torch.nan
            return out

        with wrapped(model.model.layers[2].mlp, spoil), outcome:
            assert check(model, {"input_ids": tokens(), "attention_mask": mask}).ok


def test_any_module_with_an_order(mode):
    """No configuration, and a name of its own for what it is called with."""

    class Named(Stack):
        def forward(self, tokens):
            return super().forward(tokens)

    model = Named(lambda hidden, layers: hidden + sum(layer(hidden).cumsum(1) for layer in layers), 3)
    assert check(model, {"tokens": tokens(2, 7)}, order=af.masks.causal(7), mode=mode).ok
    assert check(model, tokens(2, 7), order=af.masks.causal(7), mode=mode).ok
    with wrapped(model.layers[1], lambda out, hidden: out + 0.1 * hidden.flip(1)):
        assert check(model, tokens(2, 7), order=af.masks.causal(7), mode=mode).violations[0].module == "layers.1"
