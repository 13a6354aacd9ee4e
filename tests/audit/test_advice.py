"""Every advice that an error of the room gives is followed, and helps."""

import pytest
import torch
from torch import nn

import attnflow as af
from attnflow.audit import check, measure
from tests.audit.common import LENGTH, inputs, tiny, tokens
from tests.refused import refused


class Scores(nn.Module):
    """Maps ids to vectors without a table, a list of layers, or a word on its order."""

    def forward(self, ids):
        return nn.functional.one_hot(ids, 16).double().cumsum(dim=1)


def test_a_text_without_a_tokenizer():
    model = tiny("Llama")
    with pytest.raises(ValueError, match=r"pass what af\.load_model returned in place of the model, or token ids"):
        check(model, "some words")
    assert check(model, [5, 6, 7, 8]).ok


def test_a_model_that_takes_no_cache():
    with pytest.raises(af.UnsupportedArchitecture, match="audit it with cache=False"):
        check(tiny("Bert"), tokens(), cache=True)
    assert not check(tiny("Bert"), tokens(), cache=False).violations


def test_an_order_that_is_a_tensor():
    allow = torch.ones(LENGTH, LENGTH, dtype=torch.bool).tril()
    with refused(TypeError, r"wrap a bool tensor with af\.masks\.from_dense"):
        check(tiny("Llama"), tokens(), order=allow)
    assert check(tiny("Llama"), tokens(), order=af.masks.from_dense(allow)).ok


def test_inputs_that_cannot_be_told_apart():
    call = inputs("T5")
    with pytest.raises(ValueError, match="pass different lengths"):
        check(tiny("T5"), {**call, "decoder_input_ids": call["input_ids"]})
    assert check(tiny("T5"), {**call, "decoder_input_ids": call["input_ids"][:, :9]}, passes=2).ok
    with pytest.raises(ValueError, match="an encoder-decoder needs decoder_input_ids"):
        check(tiny("T5"), call["input_ids"])
    with refused(TypeError, r"use torch\.tensor\(...\)"):
        check(tiny("Llama"), {"input_ids": [[5, 6, 7]]})
    assert check(tiny("Llama"), {"input_ids": torch.tensor([[5, 6, 7]])}).ok


def test_a_model_without_a_table_a_layer_or_a_declaration():
    model, ids = Scores(), torch.arange(6)[None]
    with pytest.raises(af.UnsupportedArchitecture, match=r"Pass order=, e\.g\. af\.masks\.causal\(n\)"):
        check(model, ids)
    assert check(model, ids, order=af.masks.causal(6)).ok
    with pytest.raises(af.UnsupportedArchitecture, match="measure it with by='output'"):
        measure(model, ids)
    assert measure(model, ids, by="output").masks == (af.masks.causal(6),)


def test_one_mask_where_layers_differ():
    model = tiny("Llama")
    with pytest.raises(ValueError, match="expected one mask per layer call, 3 of them"):
        check(model, tokens(), order=[af.masks.causal(LENGTH)] * 2)
    assert check(model, tokens(), order=[af.masks.causal(LENGTH)] * 3).ok


def test_weights_that_overflow_in_their_precision():
    model = tiny("Llama")
    with torch.no_grad():
        model.model.layers[0].mlp.down_proj.weight.mul_(1e30)
        model.model.layers[0].mlp.up_proj.weight.mul_(1e30)
    with pytest.raises(ValueError, match=r"audit in a wider precision \(dtype=\)"):
        check(model, tokens())
    assert check(model, tokens(), dtype=torch.float64).ok
