"""NaN hides every change: it is refused, unless it lies in padding."""

import pytest
import torch

import attnflow as af
from attnflow.audit.inputs import read
from attnflow.audit.passes import refuse_nan
from tests.audit.common import tiny, tokens
from tests.refused import refused


@pytest.mark.parametrize("ask", [af.audit.check, af.audit.measure])
def test_weights_with_nan_are_refused(ask):
    model = tiny("Llama")
    with torch.no_grad():
        model.model.layers[0].mlp.down_proj.weight[0, 0] = torch.nan
    with pytest.raises(ValueError, match="gives NaN at position 0"):
        ask(model, tokens())


def test_nan_in_padding_is_no_business_of_the_audit():
    ids = tokens(batch=2, length=5)
    mask = torch.tensor([[0, 1, 1, 1, 1], [1, 1, 1, 1, 1]])
    given = read(tiny("Llama"), {"input_ids": ids, "attention_mask": mask})
    values = torch.zeros(2, 5, 3)
    values[0, 0] = torch.nan
    refuse_nan(given, "layer", 0, values)
    values[1, 2] = torch.nan
    with pytest.raises(ValueError, match=r"layer gives NaN at position 2 \(sequence 1\)"):
        refuse_nan(given, "layer", 0, values)


def test_only_modules_are_audited():
    with refused(TypeError, "expected a torch module or what af.load_model returns, got int"):
        af.audit.check(3, tokens())
