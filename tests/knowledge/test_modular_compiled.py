"""Modular models under torch.compile, and FlexAttention, which compiles itself."""

import pytest
import torch

from tests.models import modular, tokens

pytestmark = [
    pytest.mark.compiled,
    pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::UserWarning"),  # torch's own, at compilation
]


@pytest.fixture(autouse=True)
def _fresh_compiler():
    torch._dynamo.reset()


GATED = {"gated": True, "threshold": "coordinate", "knowledge_activation": "gelu"}


@pytest.mark.parametrize(
    ("backend", "form", "entries_per_token"),
    [
        ("aot_eager", {}, None),
        ("aot_eager", {}, 5),
        ("aot_eager", GATED, None),
        ("aot_eager", GATED, 5),
        ("inductor", {}, 5),
    ],
)
def test_a_compiled_model_has_the_same_values_and_gradients(backend, form, entries_per_token):
    model, ids = modular(torch.float32, entries_per_token=entries_per_token, **form).train(), tokens()
    expected = model(input_ids=ids, labels=ids, use_cache=False)
    expected.loss.backward()
    gradients = {name: p.grad.clone() for name, p in model.named_parameters()}
    model.zero_grad()
    compiled = torch.compile(model, backend=backend, fullgraph=True)
    found = compiled(input_ids=ids, labels=ids, use_cache=False)
    torch.testing.assert_close(found.logits, expected.logits, rtol=1e-4, atol=1e-4)
    found.loss.backward()
    for name, parameter in model.named_parameters():
        torch.testing.assert_close(parameter.grad, gradients[name], rtol=1e-3, atol=1e-4)
    with torch.no_grad():
        expected = model.eval()(input_ids=ids, use_cache=False).logits
        torch.testing.assert_close(compiled(input_ids=ids, use_cache=False).logits, expected, rtol=1e-4, atol=1e-4)


def test_entries_of_the_call_are_not_compiled_in():
    model, ids = modular(torch.float32), tokens()
    compiled = torch.compile(model, backend="aot_eager", fullgraph=True)
    with torch.no_grad():
        for entries in (torch.randn(9, 20), torch.randn(9, 20), torch.randn(13, 20)):
            expected = model(input_ids=ids, entries=entries, use_cache=False).logits
            found = compiled(input_ids=ids, entries=entries, use_cache=False).logits
            torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-4)
