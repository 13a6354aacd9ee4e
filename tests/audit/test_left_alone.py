"""Audits leave what a call is given, and what a forward writes, as they were: caches, counters, statistics."""

import copy

import torch
from torch import nn

import attnflow as af
from attnflow.audit import check
from tests.audit.common import tiny, tokens

LENGTH, VOCABULARY = 12, 50


def test_a_cache_that_is_passed_stays_as_it_was():
    model, ids = tiny("Llama"), tokens(4)
    with torch.no_grad():
        past = model(ids[:, :5]).past_key_values
        expected = model(ids[:, 5:], past_key_values=copy.deepcopy(past)).logits
        report = check(model, {"input_ids": ids[:, 5:], "past_key_values": past})
        assert report.ok
        assert report.noise == 0.0
        assert past.get_seq_length() == 5
        with af.audit.guard(model) as guard:
            assert torch.equal(model(ids[:, 5:], past_key_values=past).logits, expected)
    assert guard.ok


class Counts(nn.Module):
    """Counts its tokens in a buffer and its calls in an attribute, and keeps a mean."""

    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(VOCABULARY, 8)
        self.register_buffer("tokens", torch.zeros((), dtype=torch.int64))
        self.register_buffer("mean", torch.zeros(8))
        self.calls = 0

    def forward(self, input_ids):
        hidden = self.embed(input_ids)
        self.tokens += input_ids.numel()
        self.mean.lerp_(hidden.detach().mean((0, 1)), 0.1)
        self.calls += 1
        return hidden.cumsum(1)


def test_what_a_forward_counts_is_not_advanced_by_an_audit():
    ids, order = torch.randint(VOCABULARY, (3, LENGTH)), af.masks.causal(LENGTH)
    plain, guarded = Counts(), Counts()
    guarded.load_state_dict(plain.state_dict())
    plain(ids)
    with af.audit.guard(guarded, order=order) as guard:
        guarded(ids)
    assert guard.ok
    assert (int(guarded.tokens), guarded.calls) == (int(plain.tokens), plain.calls) == (3 * LENGTH, 1)
    assert torch.equal(guarded.mean, plain.mean)
    assert af.audit.measure(guarded, ids, by="output").size == LENGTH
    assert guarded.calls == 1
