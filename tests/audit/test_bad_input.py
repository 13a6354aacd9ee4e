"""What cannot be audited says what was expected and what to do; where it gives advice, that is followed and helps."""

import pytest
import torch
from torch import nn

import attnflow as af
from attnflow.audit import check, check_batch, check_scores, declared_order, guard, measure
from attnflow.audit.measurement import MeasuredOrder, record
from tests.audit.common import LENGTH, inputs, tiny, tokens
from tests.audit.test_functions import IDS as TOKENS
from tests.audit.test_functions import VOCABULARY, bigram
from tests.refused import refused

causal = af.masks.causal
IDS = torch.ones(1, 5, dtype=torch.int64)
UNSUPPORTED = af.UnsupportedArchitecture


class Scores(nn.Module):
    """Maps ids to vectors without a table, a list of layers, or a word on its order."""

    def forward(self, ids):
        return nn.functional.one_hot(ids, 16).double().cumsum(dim=1)


class Constant(nn.Module):
    """Returns nothing that has positions."""

    def forward(self, ids):
        return torch.zeros(3)


def llama(given=None, **options):
    return lambda: check(tiny("Llama"), tokens() if given is None else given, passes=2, **options)


def t5(**changes):
    return lambda: check(tiny("T5"), {**inputs("T5"), **changes}, passes=2)


def without_weights():
    with torch.device("meta"):
        return check(nn.Linear(4, 4), torch.randn(1, 3, 4), order=causal(3))


def overflowing(**options):
    model = tiny("Llama")
    with torch.no_grad():
        model.model.layers[0].mlp.down_proj.weight.mul_(1e30)
        model.model.layers[0].mlp.up_proj.weight.mul_(1e30)
    return check(model, tokens(), **options)


def with_nan(ask):
    model = tiny("Llama")
    with torch.no_grad():
        model.model.layers[0].mlp.down_proj.weight[0, 0] = torch.nan
    return ask(model, tokens())


def batch(**entries):
    return lambda: check_batch({"input_ids": IDS, **entries})


def scores(function, ids=TOKENS, vocab_size=VOCABULARY, **more):
    return lambda: check_scores(function, ids, vocab_size, **more)


def packed(**entries):
    return llama({"input_ids": tokens(1, 12), **entries})


GRID = af.masks.batch([af.masks.sliding_window(7, 2), af.masks.document([2, 3]), causal(7)])
SIX = torch.arange(6)[None]
ALLOWED = torch.ones(LENGTH, LENGTH, dtype=torch.bool).tril()

# (call, error, message), and where the message gives advice a call that follows it
ROWS = {
    # inputs
    "a number": (llama(3), TypeError, "expected a text, token ids or a dict of keyword arguments"),
    "a number for a model": (lambda: check(3, tokens()), TypeError, "expected a torch module or what af.load_"),
    "a text": (llama("a text"), ValueError, "pass what af.load_model returned in place of the", llama([5, 6, 7])),
    "rows of two lengths": (llama([[5, 6, 7], [5, 6]]), ValueError, "of one length, got lengths 3, 2: pad them"),
    "floats": (llama([[5.0, 6.0]]), TypeError, "token ids must be integers, got a list of floats"),
    "a float tensor": (
        llama({"input_ids": IDS.float()}),
        TypeError,
        r"input_ids must hold integers, got torch.float32; pass .*long",
        llama({"input_ids": IDS}),
    ),
    "vectors of another width": (llama(torch.ones(2, 13)), ValueError, r"vectors of width 32, got shape \(2, 13\)"),
    "an id too large": (llama(torch.tensor([[5, 61]])), ValueError, r"in \[0, 61\), the vocabulary; got 5 to 61"),
    "a negative id": (llama(torch.tensor([[-1, 5]])), ValueError, "got -1 to 5"),
    "a list for a tensor": (
        llama({"input_ids": [[5, 6, 7]]}),
        TypeError,
        r"use torch\.tensor\(...\)",
        llama({"input_ids": torch.tensor([[5, 6, 7]])}),
    ),
    "no tensor": (llama({"attention_mask": None}), ValueError, "expected a tensor of token ids"),
    "no position": (llama(IDS[:, :0]), ValueError, "empty"),
    "no sequence": (llama(IDS[:0]), ValueError, "empty"),
    "too many axes": (llama(IDS[None, None]), ValueError, "must have shape"),
    "booleans": (llama(IDS.bool()), TypeError, "token ids or floating-point"),
    "ids and vectors": (llama({"input_ids": IDS, "inputs_embeds": torch.ones(1, 5, 32)}), ValueError, "either ids"),
    "no decoder's ids": (t5(decoder_input_ids=None), ValueError, "an encoder-decoder needs decoder_input_ids", t5()),
    "two stacks of one length": (t5(decoder_input_ids=tokens()), ValueError, "pass different lengths", t5()),
    "two batch sizes": (t5(decoder_input_ids=tokens(1, 9)), ValueError, "one batch size", t5()),
    "no weights": (without_weights, ValueError, "meta device: load its weights"),
    "NaN": (lambda: with_nan(check), ValueError, "gives NaN at position 0"),
    "NaN, measured": (lambda: with_nan(measure), ValueError, "gives NaN at position 0"),
    "an overflow": (
        overflowing,
        ValueError,
        r"audit in a wider precision \(",
        lambda: overflowing(dtype=torch.float64),
    ),
    "boundaries": (
        packed(cu_seq_lens_q=torch.tensor([0, 5, 9])),
        ValueError,
        "must rise from 0 to 12, the number of positions",
    ),
    "numbers": (packed(seq_idx=IDS), ValueError, r"seq_idx must number the positions \[1, 12\], got \[1, 5\]"),
    # orders
    "another size": (llama(order=causal(5)), ValueError, "over 13 positions"),
    "not square": (llama(order=af.masks.full(13, 12)), ValueError, "over 13 positions"),
    "two masks of three": (
        llama(order=[causal(LENGTH)] * 2),
        ValueError,
        "expected one mask per layer call, 3 of them",
        llama(order=[causal(LENGTH)] * 3),
    ),
    "no mask": (llama(order=[]), TypeError, "a list with one of them per layer"),
    "a tensor": (
        llama(order=ALLOWED),
        TypeError,
        r"make one with af\.masks\.from_dense",
        llama(order=af.masks.from_dense(ALLOWED)),
    ),
    "an array": (
        llama(order=ALLOWED.numpy()),
        TypeError,
        r"make one with af\.masks\.from_dense",
        llama(order=af.masks.from_dense(ALLOWED)),
    ),
    "a word": (llama(order="causal"), TypeError, "order must be"),
    "no pairs": (llama(order="mask"), ValueError, "needs an attention_mask of pairs"),
    "a grid of three": (llama(tokens(2, 7), order=GRID), ValueError, "for 2 sequences, got <masks of 3 sequences"),
    "a grid of seven": (llama(tokens(3, 5), order=GRID), ValueError, "over 5 positions"),
    "nothing declared": (
        lambda: check(Scores(), SIX),
        UNSUPPORTED,
        r"Pass order=, e\.g\. af\.masks\.causal\(n\)",
        lambda: check(Scores(), SIX, order=causal(6)),
    ),
    "nothing declared, asked": (lambda: declared_order(Scores(), SIX), UNSUPPORTED, "declared order of Scores"),
    # arguments
    "a mode": (llama(mode="guess"), ValueError, "mode must be 'perturb' or 'quick', got 'guess'"),
    "what to watch": (llama(watch="heads"), ValueError, "watch must be"),
    "no passes": (lambda: check(tiny("Llama"), tokens(), passes=0), ValueError, "passes must be at least 1"),
    "steps": (llama(cache=[5, 5]), ValueError, "add up to the 13", llama(cache=[11, 1, 1])),
    "no cache": (
        lambda: check(tiny("Bert"), tokens(), cache=True),
        UNSUPPORTED,
        "audit it with cache=False",
        lambda: declared_order(tiny("Bert"), tokens()),
    ),
    "nothing to audit": (lambda: check(Constant(), SIX, order=causal(6)), UNSUPPORTED, "nothing to audit"),
    "by": (lambda: measure(tiny("Llama"), tokens(), by="head"), ValueError, "by must be"),
    "no layers": (
        lambda: measure(Scores(), SIX),
        UNSUPPORTED,
        "measure it with by='output'",
        lambda: measure(Scores(), SIX, by="output"),
    ),
    "nothing returned": (lambda: measure(Constant(), SIX, by="output"), UNSUPPORTED, "nothing with a sequence"),
    "every": (lambda: guard(Scores(), every=0), ValueError, "every must be at least 1"),
    "on_leak": (lambda: guard(Scores(), on_leak="print"), ValueError, "on_leak must be 'raise' or 'log'"),
    "passes of a guard": (lambda: guard(Scores(), passes=0), ValueError, "passes must be at least 1"),
    "sequences of a guard": (lambda: guard(Scores(), sequences=0), ValueError, "sequences must be at least 1"),
    # batches
    "numbers as rows": (lambda: check_batch([1, 2]), ValueError, "row 0: expected an object with input_ids"),
    "a stream": (lambda: check_batch(iter([])), TypeError, "expected a batch as a mapping, a list of rows or a"),
    "an empty batch": (lambda: check_batch({}), ValueError, "expected input_ids or labels"),
    "float ids": (batch(input_ids=torch.rand(1, 4)), TypeError, "input_ids must hold integers, got torch.float32"),
    "labels of another length": (batch(labels=IDS[:, :4]), ValueError, "labels are"),
    "a mask of another length": (batch(attention_mask=IDS[:, :4]), ValueError, "as the ids"),
    "ragged ids": (batch(input_ids=[[1, 2], [3]]), TypeError, "input_ids must be a tensor"),
    "a model's name": (lambda: check_batch({"input_ids": IDS}, "llama"), TypeError, "model_or_config must be a"),
    # functions
    "a class": (lambda: check(nn.Linear, TOKENS), TypeError, "expected a torch module"),
    "a function with a cache": (lambda: check(bigram, TOKENS, cache=True), ValueError, "leave out cache="),
    "a loss": (scores(lambda ids: -bigram(ids)), ValueError, "lambda ids: -loss", scores(bigram)),
    "a total": (scores(lambda ids: bigram(ids).sum()), ValueError, "a score per token"),
    "one number for each sequence": (
        scores(lambda ids: bigram(ids).sum(-1)),
        ValueError,
        "a score per token, got one number for each sequence",
        scores(bigram),
    ),
    "labels of other numbers": (
        scores(lambda ids: bigram(ids)[:, -3:], labels=[-2, -1]),
        ValueError,
        "one for each of 3 numbers",
        scores(lambda ids: bigram(ids)[:, -3:], labels=[-3, -2, -1]),
    ),
    "labels of all numbers": (scores(bigram, labels=[1]), ValueError, "one for each of 0 numbers", scores(bigram)),
    "numbers of no tokens": (
        scores(lambda ids: bigram(ids)[:, [4, 2, 3]]),
        ValueError,
        "cannot be told which tokens they score: pass labels=",
    ),
    "scores of other ids": (scores(bigram, vocab_size=3), ValueError, "the vocabulary"),
    "scores of vectors": (scores(bigram, TOKENS.double()), ValueError, "must be ids"),
    # golden files
    "vectors in a golden file": (
        lambda: record(tiny("Llama"), {"inputs_embeds": torch.randn(1, 4, 32)}),
        TypeError,
        "golden file holds integers",
        lambda: record(tiny("Llama"), IDS),
    ),
}


@pytest.mark.parametrize("row", ROWS)
def test_it_is_refused_and_the_advice_helps(row):
    call, error, message, *advised = ROWS[row]
    with refused(error, message):
        call()
    for right in advised:
        assert getattr(right(), "ok", True)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("{}", "expected a saved MeasuredOrder, got something without the key"),
        (af.order.analyze(causal(3)).to_json(), "expected a saved MeasuredOrder, got 'Flow'"),
        ('{"attnflow": "MeasuredOrder", "version": 1, "model": "a"}', "it has no parameters"),
    ],
)
def test_bad_golden_files(content, message):
    with pytest.raises(ValueError, match=message):
        MeasuredOrder.from_json(content)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"model": "GPT2LMHeadModel"}, "another model: the saved order is of GPT2LMHeadModel"),
        ({"parameters": 5}, "with 5 parameters"),
        ({"inputs": {"input_ids": [[1] * 5]}}, "other inputs: input_ids differ"),
    ],
)
def test_other_models_and_inputs_are_not_compared(change, message):
    order = record(tiny("Llama"), tokens(1, 5))
    other = MeasuredOrder(**{**vars(order), **change})
    with pytest.raises(ValueError, match=message):
        order.difference(other)
