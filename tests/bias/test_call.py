"""Calls are checked once, with messages for their authors."""

from dataclasses import FrozenInstanceError

import pytest
import torch

from attnflow.bias.call import make_call
from attnflow.bias.terms import Additive
from tests.bias.cases import Case, cast


def tensors(heads=4, kv_heads=2, queries=5, keys=7, batch=2, dim=8):
    return torch.randn(batch, heads, queries, dim), *(torch.randn(batch, kv_heads, keys, dim) for _ in range(2))


def call_of(query, key, value, terms=(), allow=None, dropout=0.0):
    return make_call(query, key, value, terms, allow, None, None, None, dropout)


def test_what_a_call_says_of_itself():
    call = call_of(*tensors())
    assert (call.num_heads, call.heads_per_kv, call.scale) == (4, 2, 8**-0.5)
    assert call.allow.everything
    with pytest.raises(FrozenInstanceError):
        call.scale = 1.0


def test_whether_a_gradient_may_be_asked_for():
    plain = Case().build()
    learned, leaves = cast(plain)
    assert not plain.needs_grad()
    assert learned.needs_grad()
    only_a_term = cast(plain, requires_grad=False)[0]
    only_a_term.terms[0].weight.requires_grad_()
    assert only_a_term.needs_grad()
    with torch.no_grad():
        assert not learned.needs_grad()
    assert set(leaves) >= {"query", "key", "value", "terms[0].rows", "terms[0].offset"}


@pytest.mark.parametrize(
    ("shapes", "message"),
    [
        ({"heads": 3}, "query heads a multiple of theirs"),
        ({"kv_heads": 3}, "query heads a multiple of theirs"),
    ],
)
def test_heads_that_do_not_fit(shapes, message):
    with pytest.raises(ValueError, match=message):
        call_of(*tensors(**shapes))


def test_tensors_that_do_not_fit():
    query, key, value = tensors()
    for bad in (
        (query[0], key, value),
        (query[:1], key, value),
        (query, key[:, :, 1:], value),
        (query[..., 1:], key, value),
    ):
        with pytest.raises(ValueError, match=r"query.*key.*value"):
            call_of(*bad)


def test_terms_that_do_not_fit():
    query, key, value = tensors()
    with pytest.raises(ValueError, match="Additive has 3 maps, which 4 heads cannot share evenly"):
        call_of(query, key, value, [Additive(torch.zeros(2, 3, 7))])
    with pytest.raises(ValueError, match="must be on one device, got cpu, meta"):
        call_of(query, key, value, [Additive(torch.zeros(2, 1, 7, device="meta"))])


@pytest.mark.parametrize("dropout", [-0.1, 1.0, float("nan")])
def test_dropout_out_of_range(dropout):
    with pytest.raises(ValueError, match=r"dropout must be in \[0, 1\)"):
        call_of(*tensors(), dropout=dropout)
