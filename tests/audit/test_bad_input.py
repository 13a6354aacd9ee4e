"""What cannot be audited says so, and model and random state are left as they were."""

import numpy as np
import pytest
import torch
from torch import nn

import attnflow as af
from attnflow.audit import check
from tests.audit.common import tiny, tokens, wrapped
from tests.refused import refused


@pytest.mark.parametrize(
    ("given", "error", "message"),
    [
        ([[5, 6, 7], [5, 6]], ValueError, "sequences of one length, got lengths 3, 2: pad them"),
        ([[5.0, 6.0]], TypeError, "token ids must be integers, got a list of floats"),
        ({"input_ids": torch.ones(1, 5)}, TypeError, r"input_ids must hold integers, got torch.float32; pass .*long"),
        (torch.ones(2, 13), ValueError, r"vectors of width 32, got shape \(2, 13\).*token ids must be integers"),
        (torch.tensor([[5, 61]]), ValueError, r"must lie in \[0, 61\), the vocabulary; got 5 to 61"),
        (torch.tensor([[-1, 5]]), ValueError, "got -1 to 5"),
    ],
)
def test_wrong_inputs(given, error, message):
    model = tiny("Llama").train()
    before = torch.get_rng_state(), np.random.get_state()[1].tolist()  # noqa: NPY002 - Python's own: beartype draws from it
    with refused(error, message):
        check(model, given)
    assert model.training
    assert torch.equal(torch.get_rng_state(), before[0])
    assert np.random.get_state()[1].tolist() == before[1]  # noqa: NPY002


def test_a_model_without_weights():
    with torch.device("meta"):
        model = nn.Linear(4, 4)
    with pytest.raises(ValueError, match="meta device: load its weights"):
        check(model, torch.randn(1, 3, 4), order=af.masks.causal(3))


def test_noise_is_noted():
    count = iter(range(10**6))
    model = tiny("Llama")
    with wrapped(
        model.model.layers[1].mlp, lambda out, hidden: out + 1e-6 * torch.sin(torch.tensor(1.0 * next(count)))
    ):
        report = check(model, tokens(), passes=2, both_sides=False)
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


class Blocks(nn.Module):
    """A module of a user's: ids or vectors in, [batch, positions, width] out, no configuration."""

    def __init__(self, leak=0.0):
        super().__init__()
        self.embed = nn.Embedding(30, 8)
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(8, 8), nn.Tanh()) for _ in range(3))
        self.leak = leak

    def forward(self, tokens):
        hidden = self.embed(tokens)
        for number, block in enumerate(self.blocks):
            hidden = hidden + block(hidden).cumsum(1) + (self.leak * hidden.flip(1) if number == 1 else 0)
        return hidden


@pytest.mark.parametrize("mode", ["perturb", "quick"])
def test_any_module_with_an_order(mode):
    ids = torch.randint(30, (2, 7), generator=torch.Generator().manual_seed(0))
    assert check(Blocks(), {"tokens": ids}, order=af.masks.causal(7), mode=mode).ok
    assert check(Blocks(), ids, order=af.masks.causal(7), mode=mode).ok
    report = check(Blocks(leak=0.1), ids, order=af.masks.causal(7), mode=mode)
    assert report.violations[0].module == "Blocks"
    with pytest.raises(af.UnsupportedArchitecture, match=r"declared order of Blocks: unknown; .*Pass order="):
        check(Blocks(), ids, mode=mode)
