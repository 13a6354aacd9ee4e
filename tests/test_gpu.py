"""On a GPU the library reads from a model what it reads from the same model on the CPU, in float64."""

import copy

import pytest
import torch

import attnflow as af
from tests.models import tiny

pytestmark = pytest.mark.gpu
DEVICE = "cuda"
IDS = torch.tensor([[5, 9, 3, 7, 11, 2, 8, 4, 6, 10]])


def attribution(model, ids):
    return af.geometry.attribute(model, {"input_ids": ids}, layer=1).raw


def scored(model, ids):
    return torch.tensor([row["symmetry"] for row in af.geometry.score(model).rows()], dtype=torch.float64)


def audited(model, ids):
    report = af.audit.check(model, {"input_ids": ids})
    assert report.ok
    return torch.tensor(report.coverage)


def biased(model, ids):
    with af.bias.attach(model, af.bias.LowRankConfig(init="kaiming")), torch.no_grad():
        for parameter in (p for p in model.parameters() if p.requires_grad):  # each device has its own random numbers
            parameter.copy_(torch.linspace(-1, 1, parameter.numel()).reshape(parameter.shape))
        return model(ids).logits


def masked(model, ids):
    with af.masks.attach(model, af.masks.sliding_window(ids.shape[1], 3)), torch.no_grad():
        return model(ids).logits


def converted(model, ids):
    with torch.no_grad():
        return af.knowledge.from_ffn(model)(ids).logits


def traced(model, ids):
    trace = af.knowledge.trace(af.knowledge.from_ffn(model), {"input_ids": ids}, ablate=3)
    return torch.tensor([(fired.norm, fired.effect or 0.0) for fired in trace.fired()], dtype=torch.float64)


@pytest.mark.parametrize(
    "read",
    [attribution, scored, audited, biased, masked, converted, traced],
    ids=lambda f: f.__name__,
)
@pytest.mark.parametrize("family", ["Llama", "GPT2", "Gemma2"])
def test_what_is_read_on_a_gpu_is_what_is_read_on_the_cpu(family, read):
    model = tiny(family, torch.float64)
    expected = read(copy.deepcopy(model), IDS)
    found = read(model.to(DEVICE), IDS.to(DEVICE))
    # Rotations are made in float32 by either device, whatever the model's precision.
    torch.testing.assert_close(found.cpu(), expected.cpu(), rtol=1e-5, atol=1e-5)
