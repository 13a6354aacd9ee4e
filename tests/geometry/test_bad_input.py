"""Arguments that geometry refuses, and the words by which it does: one table for the room."""

import math

import pytest
import torch
from jaxtyping import TypeCheckError
from torch import nn

import attnflow as af
from attnflow.geometry.score import survey
from attnflow.geometry.scores import full_scores, head_scores
from tests.models import tiny

NONE = nn.Linear(4, 4)


def bert():
    return tiny("Bert", torch.float32)


def ones(*shape, dtype=torch.float32, bad=None):
    made = torch.ones(shape, dtype=dtype)
    if bad is not None:
        made.view(-1)[-1] = bad
    return made


def zeroed():
    model = bert()
    nn.init.zeros_(model.encoder.layer[1].attention.self.query.weight)
    return model


geometry = af.geometry
CASES = {
    "symmetry of what is not square": (lambda: geometry.symmetry(ones(2, 3)), ValueError, "got shape [2, 3]"),
    "directionality of a vector": (lambda: geometry.directionality(ones(3)), ValueError, "got shape [3]"),
    "symmetry of integers": (lambda: geometry.symmetry(ones(2, 2, dtype=torch.int64)), TypeError, "got torch.int64"),
    "gamma": (lambda: geometry.directionality(ones(2, 2), gamma=math.nan), ValueError, "gamma must be finite, got nan"),
    "mode": (lambda: geometry.directionality(ones(2, 2), mode="sum"), ValueError, '"excess" or "norm", got \'sum\''),
    "target": (lambda: geometry.penalty(bert(), "antisymmetric"), ValueError, "target must be"),
    "penalty of no attention": (lambda: geometry.penalty(NONE), af.UnsupportedArchitecture, "no queries and keys"),
    "every 0": (lambda: geometry.monitor(bert(), every=0), ValueError, "every must be at least 1, got 0"),
    "every 1.5": (lambda: geometry.monitor(bert(), every=1.5), TypeError, "every must be an integer"),
    "mode of a monitor": (lambda: geometry.monitor(bert(), mode="sum"), ValueError, "mode must be"),
    "attention": (lambda: geometry.monitor(bert(), attention="both"), ValueError, "attention must be"),
    "attention of a survey": (lambda: survey(["minilm"], attention="both"), ValueError, "attention must be"),
    "log": (lambda: geometry.monitor(bert(), log=3), TypeError, "log must be a function of values and step"),
    "monitor of no attention": (lambda: geometry.monitor(NONE), af.UnsupportedArchitecture, "no queries and keys"),
    "monitor of no cross-attention": (
        lambda: geometry.monitor(bert(), attention="cross"),
        af.UnsupportedArchitecture,
        "no cross-attention",
    ),
    "overflow": (
        lambda: full_scores(torch.full((4, 8), 1e30), torch.full((4, 8), 1e30), 1, 1),
        ValueError,
        "overflows",
    ),
    **{
        f"{function.__name__} of {bad}": (lambda f=function, bad=bad: f(ones(3, 3, bad=bad)), ValueError, "NaN or Inf")
        for function in (geometry.symmetry, geometry.directionality)
        for bad in (math.nan, math.inf, -math.inf)
    },
    **{
        f"{function.__name__} of {bad} in the {side}": (
            lambda f=function, bad=bad, s=side: f(
                **{"query": ones(32, 60), "key": ones(16, 60)} | {s: ones({"query": 32, "key": 16}[s], 60, bad=bad)},
                num_heads=4,
                num_kv_heads=2,
            ),
            ValueError,
            f"{side} weights must be finite",
        )
        for function in (head_scores, full_scores)
        for side in ("query", "key")
        for bad in (math.nan, math.inf)
    },
    **{
        f"{initialise.__name__}: {what}": (lambda f=initialise, m=make, o=options: f(m(), **o), error, message)
        for initialise in (geometry.init_symmetric_, geometry.init_skew_)
        for what, make, options, error, message in (
            ("scale", bert, {"scale": "default"}, ValueError, "scale must be"),
            ("zeros", zeroed, {}, ValueError, "encoder.layer.1.attention.self: weights are zero"),
            ("no attention", lambda: NONE, {}, af.UnsupportedArchitecture, "no queries and keys"),
        )
    },
    "a text without tokens": (
        lambda: geometry.attribute(bert(), "", 0, tokenizer=lambda *_, **__: {"input_ids": torch.zeros(1, 0)}),
        ValueError,
        "the text '' has no tokens",
    ),
    "attention that is not there": (
        lambda: geometry.attribute(bert(), [5, 6], 0, attention="cross"),
        af.UnsupportedArchitecture,
        "no cross-attention on the attention interface: pass attention='self'",
    ),
    **{
        f"{name}: {what}": (lambda r=read, f=family, i=inputs: r(tiny(f, torch.float32), i), error, message)
        for name, read in (
            ("attribute", lambda model, inputs: geometry.attribute(model, inputs, 0)),
            ("score", lambda model, inputs: geometry.score(model, inputs=inputs)),
            (
                "pairs",
                lambda model, inputs: geometry.pairs(
                    model, inputs, 0, tower="decoder" if model.config.is_encoder_decoder else ""
                ),
            ),
        )
        for what, family, inputs, error, message in (
            # it would shift the encoder's tokens by one, and the tokens of queries would be named wrongly
            ("one half", "Bart", [5, 6, 7], ValueError, "pass a mapping with decoder_input_ids"),
            ("nothing", "Bert", {}, ValueError, "the inputs are empty"),
            ("a word for vectors", "Bert", {"inputs_embeds": "word"}, TypeError, "inputs_embeds must be a tensor"),
            (
                "more tokens than positions",
                "Bert",
                [5] * 1000,
                ValueError,
                "1000 tokens, and the model has positions for",
            ),
            ("ids beyond the vocabulary", "Bert", [10**6], ValueError, "the model's vocabulary"),
        )
    },
}


@pytest.mark.parametrize("what", CASES)
def test_it_is_refused_in_words(what):
    call, kind, message = CASES[what]
    with pytest.raises((kind, TypeCheckError)) as caught:
        call()
    assert isinstance(caught.value, TypeCheckError) or message in str(caught.value)
