"""Traces of several prompts: each is that of the prompt alone, whatever pads stand beside it."""

import sys
from dataclasses import fields, is_dataclass

import pytest
import torch
from torch import Tensor

import attnflow as af
from attnflow.knowledge.reading.trace import trace
from attnflow.models.subject import Loaded
from tests.models import tiny, tokens
from tests.models.saved import word_tokenizer

LENGTHS = (3, 7, 5)
WORDS = [f"w{i}" for i in range(49)]


def made(name):
    torch.manual_seed(0)
    return af.knowledge.from_ffn(tiny(name, torch.float64))


def padded(rows, left):
    width = max(map(len, rows))
    ids, mask = torch.full((len(rows), width), 4), torch.zeros(len(rows), width, dtype=torch.long)
    for row, one in enumerate(rows):
        place = slice(width - len(one), width) if left else slice(len(one))
        ids[row, place], mask[row, place] = one, 1
    return {"input_ids": ids, "attention_mask": mask}


def assert_same(one, other):
    if isinstance(one, Tensor):
        torch.testing.assert_close(one, other, rtol=1e-12, atol=1e-13, equal_nan=True)
    elif is_dataclass(one):
        for part in fields(one):
            assert_same(getattr(one, part.name), getattr(other, part.name))
    elif isinstance(one, tuple):
        assert len(one) == len(other)
        for each, its in zip(one, other, strict=True):
            assert_same(each, its)
    else:
        assert one == other


@pytest.mark.parametrize("left", [True, False])
@pytest.mark.parametrize("name", ["GPT2", "OPT", "Llama", "Mixtral", "Gemma2", "Bert"])
def test_a_prompt_of_a_padded_batch_is_traced_as_alone(name, left):
    model, prompts = made(name), [tokens(1, length)[0] for length in LENGTHS]
    options = {"top": 5, "ablate": 0 if name == "Bert" else 2}  # it has no logits
    batch = padded(prompts, left)
    if name in ("GPT2", "Llama") and left:  # as generation counts the positions of a padded batch
        batch["position_ids"] = (batch["attention_mask"].cumsum(1) - 1).clamp(min=0)
    found = trace(model, batch, **options)
    assert [len(one.tokens) for one in found] == list(LENGTHS)
    for one, prompt in zip(found, prompts, strict=True):
        assert_same(one, trace(model, prompt, **options))


def test_a_list_of_texts_with_what_is_asked_of_each():
    model, tokenizer = made("Llama"), word_tokenizer(["[UNK]", *WORDS])
    loaded = Loaded(model, tokenizer)
    texts, targets = ["w5 w7 w9", "w2 w3", "w8 w1 w4 w6"], ["w3", ["w4", "w5"], "w9 w10"]
    found = trace(loaded, texts, answer=targets, against=["w1", ["w2", "w3"], None], position=[-1, [0, 1], None])
    alone = [("w3", "w1", -1), (["w4", "w5"], ["w2", "w3"], [0, 1]), ("w9 w10", None, None)]
    for one, text, (wanted, others, places) in zip(found, texts, alone, strict=True):
        assert_same(one, trace(loaded, text, answer=wanted, against=others, position=places))
    assert found[2].answers == ("w9", "w10")  # the tokens of one answer
    assert [one.positions for one in trace(loaded, texts, position=-1)] == [(2,), (1,), (3,)]
    (single,) = trace(loaded, ["w5 w7 w9"])
    assert_same(single, trace(loaded, "w5 w7 w9"))
    named = [dict(tokenizer(text, return_tensors="pt")) for text in texts]
    for one, other in zip(trace(loaded, named), trace(loaded, texts), strict=True):
        assert_same(one, other)


def test_a_model_is_converted_once_for_all(monkeypatch):
    model, calls = tiny("Llama", torch.float64), []
    module = sys.modules[trace.__module__]  # the function hides it
    convert = module.from_ffn
    monkeypatch.setattr(module, "from_ffn", lambda model: calls.append(model) or convert(model))
    trace(model, padded([tokens(1, length)[0] for length in LENGTHS], left=True))
    assert calls == [model]


@pytest.mark.parametrize(
    ("changed", "options", "message"),
    [
        ({"attention_mask": torch.tensor([[1] * 6, [0] * 6])}, {}, "prompt 1 is all padding"),
        ({"attention_mask": torch.ones(2, 1, 6, 6)}, {}, r"\[prompts, tokens\], got attention_mask of \[2, 1, 6, 6\]"),
        ({}, {"answer": [3, 4, 5]}, r"a list of one for each of the 2, got \[3, 4, 5\]"),
        ({}, {"position": [[0]]}, "a list of one for each of the 2"),
        ({}, {"position": 6}, "position must be from -6 to 5"),
    ],
)
def test_what_does_not_fit_several_prompts_is_refused(changed, options, message):
    with pytest.raises(ValueError, match=message):
        trace(made("Llama"), {"input_ids": tokens(2, 6), **changed}, **options)
